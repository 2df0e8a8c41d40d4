"""Random generators of the user's own: captured with each step, and put back by the place that they lie at.

What lies at a place at the end of a step is what the next step reads, also where the loop puts another generator there
("for epoch ...: rng = default_rng(epoch)"). One that is made anew in each step, and was not drawn from after the end of
the step that made it, is no state. In a worker a generator is a copy of the one here, made anew in each epoch, so that
there is nothing to save.

    torch.Generator, random.Random, numpy's RandomState    as `rng_streams` takes the global ones
    numpy's other generators                               their public `state`, as JSON, and the number of children
    numpy's SeedSequence                                   the number of children that it has spawned
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from lastwords.errors import MismatchError
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.state.object_walk import Beyond, Walk
from lastwords.optim_wrapper.streams.rng_streams import NumpyStream, PythonStream, Stream, TorchStream

BYTES_MAX = 1 << 20
"""Of all states together, in a step's document."""

_SPAWNED = "n_children_spawned"
_CHILDREN_MAX, _CHILDREN_AT_ONCE = 100_000_000, 1000

SavedGenerators = Mapping[str, tuple[str, bytes]]
"""Path of a generator -> its kind, and its state."""


class GeneratorState(NamedTuple):
    """How the state of one generator is read, and put back."""

    read: Callable[[], bytes]
    put: Callable[[bytes], None]


class _Generator:
    """One generator. ends: ends of steps at which it lay at its place. found_as: its state when it was found."""

    def __init__(self, generator: Any, state: GeneratorState, *, ends: int) -> None:
        self.generator, self.state, self.kind, self.ends = generator, state, kind_of(generator), ends
        self.taken = self.found_as = state.read()
        self._member: list[str] = []

    def member(self) -> list[str]:
        """The member of a document."""
        now = self.state.read()
        if now != self.taken or not self._member:
            self.taken = now
            self._member = [self.kind, base64.b64encode(now).decode("ascii")]
        return self._member


class Generators:
    """Those that a walk has come to, and what lies beyond it. Training thread, but for `drawn` and `unseen`.

    roots: objects of the job that the walk does not look into, by their names.
    """

    def __init__(self, roots: Mapping[str, Any], ledger: Ledger | None = None) -> None:
        self._roots = dict(roots)
        self.ledger = ledger or Ledger()
        self._leaves: dict[str, _Generator] = {}
        self._passing: dict[str, _Generator | None] = {}
        """Places at which generators do not stay, with what was there at the newest look."""
        self._begun = False
        self._walk = Walk({}, {})
        self._beyond: Beyond | None = None
        self._way: tuple[list[str], dict[str, list[str]]] = [], {}
        """Places beyond the walk, and how to come to them."""
        self._missing: list[str] = []
        self._unsaved: list[str] = []

    def let_go(self) -> None:
        self._roots, self._leaves, self._passing, self._beyond, self._way = {}, {}, {}, None, ([], {})
        self._walk = Walk({}, {})

    def __bool__(self) -> bool:
        """Whether any has to be followed from step to step."""
        return bool(self._leaves or self._passing)

    @property
    def names(self) -> list[str]:
        return [*self._leaves]

    def begin(self, walk: Walk) -> None:
        """The loop begins: what there is now has been here at the end of a step, as it were."""
        self._begun, self._leaves = False, {}
        self.look(walk)
        self._begun = True

    def look(self, walk: Walk, *, beyond: bool = True) -> None:
        """Take what is new, and let go of what is nowhere any more. beyond: not only of what the walk has come to."""
        self._walk = walk
        found = dict(walk.generators)
        if beyond:
            self._beyond, self._way = Beyond(walk, self._roots), ([], {})
            found |= {path: one for path, one in self._beyond.generators.items() if path not in found}
            there = {*map(id, found.values())}
            self._leaves = {path: one for path, one in self._leaves.items() if id(one.generator) in there}
        known = {id(one.generator) for one in self._leaves.values()}
        for path, generator in found.items():
            if id(generator) not in known and path not in self._leaves:
                self._meet(path, generator)

    def cells(self) -> list[tuple[str, str]]:
        """Where those lie that the walk has come to."""
        return [self._walk.origin(path) for path in (*self._leaves, *self._passing) if path in self._walk.generators]

    def _meet(self, path: str, generator: Any) -> None:
        state = state_of(generator)
        if state is None:
            self.ledger.tell(
                f"the state of the random generator {path} ({kind_of(generator)}) cannot be taken", leaf=path
            )
            return
        leaf = _Generator(generator, state, ends=int(not self._begun))
        if path in self._passing:
            self._passing[path] = leaf
        else:
            self._leaves[path] = leaf

    def _lying(self, part: Walk) -> dict[str, Any]:
        """What lies at the places now. part: of the walk, to `cells`."""
        beyond = self._beyond
        if beyond is None:
            return part.generators
        places = [path for path in (*self._leaves, *self._passing) if path not in self._walk.generators]
        if places != self._way[0]:
            self._way = places, beyond.way_to(beyond.origin(path) for path in places if path in beyond.generators)
        way = self._way[1]
        return {**beyond.part(way).generators, **part.generators} if way else part.generators

    def end_step(self, part: Callable[[], Walk]) -> None:
        """Follow the places to what lies there now. part: makes one of the walk, to `cells`."""
        now = self._follow(part(), ends=1)
        for path, leaf in [*self._passing.items()]:
            if leaf is not None:  # is what was found there at the newest look used in a later step after all?
                used = now.get(path) is leaf.generator or leaf.state.read() != leaf.found_as
                self._passing[path] = None
                if used and path in now:
                    del self._passing[path]
                    self._meet(path, now[path])

    def follow(self, part: Callable[[], Walk]) -> None:
        """See what lies at the places now, after the end of a step."""
        self._follow(part(), ends=0)

    def _follow(self, part: Walk, *, ends: int) -> dict[str, Any]:
        now = self._lying(part)
        for path, leaf in [*self._leaves.items()]:
            if path not in now or now[path] is leaf.generator:
                leaf.ends += ends * (path in now)
                continue
            del self._leaves[path]
            if leaf.ends == 0 and leaf.state.read() == leaf.found_as:
                self._passing[path] = None
            else:
                self._meet(path, now[path])
                if path in self._leaves:
                    self._leaves[path].ends = leaf.ends + 1
        return now

    def document(self) -> dict[str, Any]:
        """The member of a step's document; empty if there are none."""
        if not self._leaves:
            return {}
        said = {path: one.member() for path, one in self._leaves.items()}
        if sum(len(state) for _, state in said.values()) > BYTES_MAX:
            self.ledger.tell(f"the states of {len(said)} random generators are too large to be saved with each step")
            return {}
        return {"generators": said}

    # ------------------------------------------------------------------ in an incident, any thread

    def states(self) -> dict[str, bytes]:
        """What they are like now."""
        return {path: one.state.read() for path, one in self._leaves.items()}

    def drawn(self) -> str:
        """One that has drawn since the newest document; empty if none has."""
        return next((path for path, one in self._leaves.items() if one.state.read() != one.taken), "")

    def unseen(self, walk: Walk) -> list[str]:
        """Those that have come since the newest look."""
        leaves = self._leaves
        known = {id(one.generator) for one in leaves.values()}
        return [
            path
            for path, one in walk.generators.items()
            if id(one) not in known and path not in self._passing and (path not in leaves or leaves[path].ends > 0)
        ]

    # ------------------------------------------------------------------ resume

    def restore(self, saved: SavedGenerators) -> list[str]:
        """Put back those that are here, directly after a look; why that failed. See `left_over` for the others."""
        reasons = []
        for path, (kind, state) in saved.items():
            leaf = self._leaves.get(path)
            if leaf is not None and kind != leaf.kind:
                reasons.append(f"the random generator {path} was a {kind}, and is a {leaf.kind} here")
            elif leaf is not None:
                try:
                    leaf.state.put(state)
                except (MismatchError, OverflowError, RuntimeError, TypeError, ValueError) as error:
                    reasons.append(f"the random generator {path} cannot be restored: {error}")
        self._missing = sorted(saved.keys() - self._leaves.keys())
        self._unsaved = sorted(self._leaves.keys() - saved.keys())
        return reasons

    def unsaved(self) -> list[str]:
        """Why what the newest `restore` found here alone, and is here still, makes a resume not exact.

        What lay in a function that is not being run any more is out of reach, as it was in the saved run.
        """
        now = self._lying(self._walk)
        there = [path for path in self._unsaved if path in self._leaves and path in now]
        return [
            f"the random generator {path} is not in the checkpoint, and starts from its initial state" for path in there
        ]

    def left_over(self) -> list[str]:
        """The same of all that was here or in the checkpoint alone."""
        return [
            f"the random generator {path} was saved but does not exist when the loop begins; create it before the loop"
            for path in self._missing
        ] + self.unsaved()


def kind_of(generator: Any) -> str:
    """What a state belongs to: another kind of generator cannot take it.

    >>> kind_of(np.random.default_rng()), kind_of(random.Random()), kind_of(torch.Generator())
    ('numpy.random.PCG64', 'random.Random', 'torch.Generator on cpu')
    """
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, random.Random):
        return "random.Random"
    if isinstance(generator, np.random.Generator):
        generator = generator.bit_generator
    home = type(generator).__module__
    home = "numpy.random" if home.startswith("numpy.random.") else home
    return f"{home}.{type(generator).__name__}"


def state_of(generator: Any) -> GeneratorState | None:
    """How its state is taken and put back; None if it has one that cannot be taken."""
    try:
        if isinstance(generator, torch.Generator):
            return of_stream(TorchStream("own", generator))
        if isinstance(generator, random.Random):
            plain = type(generator).getstate is random.Random.getstate
            return of_stream(PythonStream(generator)) if plain else None
        if isinstance(generator, np.random.RandomState):
            twister = generator.get_state(legacy=False)["bit_generator"] == "MT19937"  # type: ignore[call-overload]
            return of_stream(NumpyStream(generator)) if twister else None
        if isinstance(generator, np.random.SeedSequence):
            return GeneratorState(
                lambda: b"%d" % getattr(generator, _SPAWNED), lambda data: _spawn_up_to(generator, int(data))
            )
        state = _of_bits(generator.bit_generator if isinstance(generator, np.random.Generator) else generator)
        state.read()
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return state


def of_stream(stream: Stream) -> GeneratorState:
    """Likewise, of one of the process's own."""
    memory = bytearray(stream.region.nbytes)
    copy = stream.into(memoryview(memory))

    def read() -> bytes:
        copy()
        return bytes(memory)

    return GeneratorState(read, stream.restore)


def of_process() -> dict[str, GeneratorState]:
    """The process's own on the CPU."""
    torchs = TorchStream("torch", torch.default_generator)
    return {"python": of_stream(PythonStream()), "numpy": of_stream(NumpyStream()), "torch": of_stream(torchs)}


def _of_bits(bits: Any) -> GeneratorState:
    seeds = getattr(bits, "seed_seq", None)

    def read() -> bytes:
        return json.dumps([bits.state, getattr(seeds, _SPAWNED, 0)], default=_listed).encode()

    def put(data: bytes) -> None:
        try:
            state, spawned = json.loads(data)
            bits.state = _shaped_as(bits.state, state)
            _spawn_up_to(seeds, spawned)
        except (KeyError, TypeError, ValueError) as error:
            raise MismatchError(f"this is not a state of a {type(bits).__name__}: {error}") from error

    return GeneratorState(read, put)


def _spawn_up_to(seeds: Any, count: int) -> None:
    missing = count - getattr(seeds, _SPAWNED, count)
    if missing < 0:
        raise MismatchError(f"its seed sequence had spawned {count} children, and {count - missing} here")
    if missing > _CHILDREN_MAX:
        raise MismatchError(f"its seed sequence had spawned {count} children, more than can be spawned again")
    for done in range(0, missing, _CHILDREN_AT_ONCE):
        seeds.spawn(min(_CHILDREN_AT_ONCE, missing - done))


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} in the state of a bit generator")


def _shaped_as(here: Any, saved: Any) -> Any:
    """The saved values, with arrays where there are arrays here."""
    if isinstance(here, dict):
        return {key: _shaped_as(item, saved[key]) for key, item in here.items()}
    return np.array(saved, dtype=here.dtype).reshape(here.shape) if isinstance(here, np.ndarray) else saved
