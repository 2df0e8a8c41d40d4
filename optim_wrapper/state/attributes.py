"""Plain values that hang on the model and the optimizers: counters, flags, queues, tables in their attributes.

What an attribute holds when the loop begins, a new process has, too: its constructors have set it. So only what has
moved since is state. From then on it is in the rank's black box, in the document of each step, and a resume puts it
back into the very objects: attributes that are there no more are deleted, containers keep their identity. The random
generators that are found on the way are in the same documents: see `Generators`.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel

from lastwords import clock
from lastwords.checkpoint.codec import typed
from lastwords.checkpoint.meta import StepDocument, StoredValue
from lastwords.checkpoint.storable import Place, pack, unpack
from lastwords.errors import FormatError, UnstorableError, some
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.state.beside import Beside, marked
from lastwords.optim_wrapper.state.generators import Generators, SavedGenerators
from lastwords.optim_wrapper.state.how_far import WHICH
from lastwords.optim_wrapper.state.object_walk import (
    CODE,
    GONE,
    LARGE_ARRAY,
    MANY,
    VALUE_BYTES_MAX,
    VARIABLES,
    AttributesOf,
    Walk,
    flat_gradients,
    own_of,
    variables,
)
from lastwords.optim_wrapper.state.own_state import OwnState
from lastwords.optim_wrapper.state.putting import Putting
from lastwords.optim_wrapper.state.running import called, shows_locals, user_frames
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of, problem_of, staged_bytes, version_of
from lastwords.optim_wrapper.tensors.tensor_tree import (
    UNORDERED,
    is_composite,
    leaves_of,
    out_of,
    put_together,
    take_apart,
)
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.sharding import zero

_log = logging.getLogger(__name__)

EACH_BYTES_MAX, BYTES_MAX = VALUE_BYTES_MAX, 256 << 10
"""Of one attribute, and of all: what goes into the document of a step."""

SLOW_S = 0.05
"""Of processor time. Where two looks in a row take longer, there are as few as may be."""

_SLOW_LOOKS = 2

LOOKS = 16
"""So many first steps are looked at, each of them; later ones every 64th."""

CONSTANTS_MAX, _WINDOW = 256, 64
"""Digests are kept of so many attributes with tensors, and made of so many bytes here and there of a large one."""

_TOO_LARGE = "it is too large to be copied in each step; register it as a buffer, or use local_extras and forget="
_UNSTORABLE = "a checkpoint cannot store it ({}); give it a form that one can in local_extras, and use forget="
_SHOWN = (
    "the variables of {0}() cannot be looked at, as it calls locals() or vars(): random generators there are not "
    "saved; hand them over in local_extras, and use forget={0!r}"
)

LOADER = "loader"
"""The root that only `steps()` knows, which puts its attributes back while it finds its place in the data."""

_T = TypeVar("_T")
_Name = tuple[str, str]
SavedAttributes = Mapping[str, Mapping[str, StoredValue]]
"""Path of an object and name of an attribute -> what was in it."""


class SavedValues(NamedTuple):
    """What is in a step's document."""

    values: SavedAttributes
    generators: SavedGenerators

    @property
    def before_the_loop(self) -> SavedValues:
        """Without what the loader has."""
        return SavedValues(_part(self.values, of_loader=False), _part(self.generators, of_loader=False))

    @property
    def of_the_loader(self) -> SavedValues:
        return SavedValues(_part(self.values, of_loader=True), _part(self.generators, of_loader=True))

    @property
    def at_its_place(self) -> SavedValues:
        """What is put back where the loop begins: what the loader has, and all generators, as the streams are."""
        return SavedValues(self.of_the_loader.values, self.generators)


NOTHING = SavedValues({}, {})


def saved_in(document: StepDocument, where: str) -> SavedValues:
    """FormatError if it is damaged."""
    return SavedValues(
        document.attributes_inline(f"{where}: attributes"), document.generators_inline(f"{where}: generators")
    )


class Attributes:
    """Looks at the attributes of `roots`. Training thread.

    saved: tensors that a checkpoint has anyway, by name. spoken: what else it has, of optimizers with a state_dict() of
    their own: an attribute that is part of that is not looked at. beyond: objects of the job of whose attributes only
    the random generators count. apart: extras by name, which are saved as such. variables: they lead to state as well;
    or other objects that do, by name.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        saved: Callable[[], Mapping[str, torch.Tensor]],
        ledger: Ledger | None = None,
        spoken: Mapping[str, OwnState] | None = None,
        beyond: Mapping[str, Any] | None = None,
        apart: Mapping[str, Any] | None = None,
        variables: bool | Mapping[str, Any] = False,
    ) -> None:
        self._lent = frozenset(variables) if isinstance(variables, Mapping) else frozenset()
        self._roots = {**roots, **(variables if isinstance(variables, Mapping) else {})}
        self._with_variables = variables is True
        self._apart = frozenset(map(id, (apart or {}).values()))
        self._extras = {  # an optimizer would be a cycle
            name: one for name, one in (apart or {}).items() if not isinstance(one, OptTFTWrapper)
        }
        self._beside = Beside(lambda told: _mark(told, reads_devices=False))
        self._thread = 0
        self._variables: dict[str, dict[str, int]] = {}
        """Of the functions that run the loop: the objects that their variables held when it began."""
        self._saved = saved
        self.ledger = ledger or Ledger()
        self.generators = Generators(beyond or {}, self.ledger)
        self._spoken = spoken or {}
        self._walk = Walk({}, {})
        self._gradients: set[int] = set()
        self._first: dict[_Name, Any] = {}
        self._kinds: dict[str, type[Any]] = {}
        self._moved: dict[_Name, None] = {}
        self._way: dict[str, list[str]] = {}
        self._at_ends: list[set[str]] = [set(), set()]
        self._asides = 0
        """Odd while the loop sets what it sets anyway."""
        self._aside: dict[_Name, Any] = {}
        """What the loader was like before that, of what had not moved by then."""
        self._slow = 0
        self._looked = [False, False]
        """Since the last step's end began, and at the one before."""
        self._left_out: set[str] = set()
        self._loaders: set[_Name] = set()
        """What of it the loader leads to."""
        self._captures = True
        self._brought: set[_Name] = set()
        self._as_made: list[Callable[[Container[_Name]], None]] = []
        """Put back what there was before a checkpoint brought these."""

    def know(self, loader: Any) -> None:
        """The loop draws its batches from this one."""
        self._roots[LOADER] = loader

    def knows_loader(self, loader: Any = None) -> bool:
        """Whether anything of the loader is known; or whether it is this one."""
        known = self._roots.get(LOADER)
        return known is not None if loader is None else known is loader

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What changes inside has not moved: the loop sets it anyway, such as the epoch that a sampler is told."""
        before = self._marks_of_loader()
        self._aside = {name: mark if self._first.get(name) == mark else _MOVED for name, mark in before.items()}
        self._asides += 1
        try:
            yield
            self._first |= {name: mark for name, mark in self._marks_of_loader().items() if before.get(name) != mark}
        finally:
            self._asides += 1

    def _marks_of_loader(self) -> dict[_Name, Any]:
        found: dict[_Name, Any] = {}
        with self._guarded():
            found = marked(Walk({LOADER: self._roots.get(LOADER)}, {}, self.ledger.forgets).cells, _mark)
        return found

    def begin(self) -> None:
        """The loop begins: what there is now has not moved."""
        with self._guarded():
            self._thread = threading.get_ident()
            self._variables = {
                root: {name: id(one) for name, one in held.items()} for root, held in self._held().items()
            }
            self._walk = self._new_walk()
            self._first = marked(self._walk.cells, _mark)
            kinds = {path: type(one) for path, one in self._walk.objects.items()}
            self._kinds = {path: kind for path, kind in kinds.items() if not issubclass(kind, LazyModuleMixin)}
            self.generators.begin(self._walk)
            self._plan()
            if self._walk.ended_at:
                _log.info("attributes behind %s are not looked at: there are too many objects", self._walk.ended_at)

    def let_go(self) -> None:
        """The run is over: keep nothing of the user's alive."""
        self._roots, self._walk, self._first, self._moved, self._variables = {}, Walk({}, {}), {}, {}, {}
        self._extras, self._as_made, self._loaders = {}, [], set()
        self._beside.let_go()
        self.generators.let_go()

    def loop_begins(self) -> None:
        """What variables and globals hold now, the loop has not changed."""
        for name in [called(frame) for frame in user_frames() if shows_locals(frame.f_code)]:
            self.ledger.tell(_SHOWN.format(name), leaf=name)
        try:
            self._walk.gradients = self._gradients = flat_gradients(self._saved().values())
            self._beside.begin(self._walk, self._saved(), self._extras)
        except Exception as error:  # of objects that nobody has foreseen: handed to the log, as nothing of it is saved
            _log.info("what variables and globals hold is not looked at: %r", error)
            self._beside.let_go(f"what cannot be looked at ({error!r:.200})")

    def beside(self) -> dict[str, str]:
        """What the loop has changed and no checkpoint has (`Beside.changed`). Any thread, while no step is computed."""
        try:
            return self._beside.changed(self._walk, self._saved(), self._extras, self.ledger.forgets)
        except Exception as error:  # of objects that nobody has foreseen: handed to the checkpoint
            return {f"what cannot be looked at ({error!r:.200})": ""}

    def missing_beside(self, changed: Mapping[str, str]) -> list[str]:
        """Of what the saved run's loop had changed, what this loop has not begun with as it was there."""
        return self._beside.missing(changed)

    def told(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """By name, what all attributes hold now, as a walk tells it; and likewise what is beside them. For a drill."""
        walk = self._new_walk()
        own = {".".join(name): cell.told for name, cell in walk.cells.items() if cell.told is not CODE}
        return own, self._beside.told(walk, self._saved(), self._extras)

    def look(self, *, beyond: bool = False) -> None:
        """See what has moved. beyond: search for random generators wherever the user's code may have them, too."""
        began_s = clock.thread_s()
        self._looked[0] = True
        with self._guarded():
            self._walk = self._new_walk()
            self.generators.look(self._walk, beyond=beyond)
            moved = self._moved_in(self._walk)
            if self._spoken and moved:
                said = self._said_by_optimizers()
                moved = [name for name in moved if not self._is_spoken(name, said)]
            self._moved |= dict.fromkeys(moved)
            self._plan()
        took_s = clock.thread_s() - began_s
        if not beyond and self._slow < _SLOW_LOOKS:
            self._slow = self._slow + 1 if took_s > SLOW_S else 0
            if self.is_slow:
                _log.info("a look at the attributes of model, optimizers and loader takes %.0f ms", took_s * 1e3)

    def compare_extras(self, said: Mapping[str, Any]) -> None:
        """Right after a look: see what of the extras moves that is not in these states of theirs, of now."""
        self._beside.compare(self._walk, self._extras, said)

    @property
    def is_slow(self) -> bool:
        """Whether looks take so long that there are as few as may be."""
        return self._slow >= _SLOW_LOOKS

    def _plan(self) -> None:
        """How to come to what is in each document."""
        self._way = self._walk.way_to([*self._moved, *self.generators.cells()])
        self._loaders = self._find_loaders()
        for path, why in self._walk.odd.items():
            self.ledger.tell(f"the attributes of {path} cannot be looked at: {why}", leaf=path)

    def end_step(self) -> None:
        """Before the document of a step's end: follow the generators to where they lie now."""
        self._looked[0] = False
        if self.generators:
            with self._guarded():
                self.generators.end_step(lambda: self._walk.part(self._way))

    def follow(self) -> None:
        """The same after the end of a step."""
        if self.generators:
            with self._guarded():
                self.generators.follow(lambda: self._walk.part(self._way))

    def ended(self) -> None:
        """The document of a step's end has been taken."""
        self._at_ends = [self._at_ends[1], self.moved if self._moved else set()]
        self._looked = [False, self._looked[0]]

    def moved_first(self, *, ended: bool) -> set[str]:
        """Names of what has moved for the first time in the newest step. ended: it has ended here."""
        return self.moved - self._at_ends[0 if ended else 1]

    def moved_since(self) -> set[str]:
        """Names of what a look after the last step's end has found, if it may have moved before, unseen."""
        return set() if self._looked[1] else self.moved - self._at_ends[1]

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Whatever an object of the user's is like, it costs exactness at most, and never the run."""
        try:
            yield
        except Exception as error:  # of objects that nobody has foreseen: handed to the checkpoint
            self.ledger.tell(f"the attributes of model, optimizers and loader cannot be looked at: {error!r:.200}")
            self.let_go()

    def unseen(self) -> list[str]:
        """What has moved for the first time since the newest look. Any thread, while no step is computed."""
        if not self._first and not self.generators.names:
            return []
        asides = self._asides
        try:
            walk = self._new_walk()
            new = [name for name in self._moved_in(walk) if name not in self._moved]
        except Exception as error:  # of the same objects: handed to the checkpoint
            return [f"what cannot be looked at ({error!r:.200})"]
        if asides % 2 or asides != self._asides:  # the loop is just setting what it sets anyway
            new = [name for name in new if not self._is_set_aside(name, walk)]
        values = [".".join(name) for name in new if not (self._spoken and name[0].startswith("optimizer"))]
        odd = [f"what cannot be looked at ({walk.odd[path]})" for path in walk.odd.keys() - self._walk.odd.keys()]
        return values + odd + self.generators.unseen(walk)

    def _is_set_aside(self, name: _Name, walk: Walk) -> bool:
        """Whether it had not moved before it was set, and is being set, or was met by the walk as it was before."""
        before = self._aside.get(name)
        being_set = before == self._first.get(name)
        met = walk.cells.get(name)
        of_loader = name[0].partition(".")[0] == LOADER
        return of_loader and (being_set or (met is not None and _mark(met.told) == before))

    @property
    def moved(self) -> set[str]:
        return {".".join(name) for name in self._moved if name[0] in self._walk.objects}

    def document(self, *, look: bool = False) -> dict[str, Any]:
        """Members of a step's document: what moves, and the generators; empty if nothing does."""
        if look:
            self.look()
        values = self._said() if self._moved else {}
        generators = self.generators.document()
        return {"attributes": values, **generators} if values else generators

    def of_loader(self, *, look: bool) -> str:
        """What moves of the loader, for `loader_as_of`; empty if nothing does. look: at whatever has moved by now."""
        if look:
            self.look()
        return json.dumps(self._said(self._loaders)) if self._loaders else ""

    def loader_as_of(self, values: str) -> Callable[[], None]:
        """Put this back, and what had not moved then as it was made; what puts back what there is now. FormatError."""
        saved = StepDocument(attributes=json.loads(values)).attributes_inline(LOADER) if values else {}
        self._plan()
        names = self._loaders | {(path, key) for path, keys in saved.items() for key in keys}
        back = self.now(_by_path(names))
        captures, self._captures = self._captures, False
        for as_made in self._as_made:
            as_made(self._loaders)
        if saved:
            self.ledger.tell(*self.put(saved))
        self._captures = captures

        def put_back() -> None:
            self._captures = False
            back()

        return put_back

    def _find_loaders(self) -> set[_Name]:
        """Names of what moves of whatever the loader leads to, wherever that was met first."""
        loader = self._roots.get(LOADER)
        if loader is None or not self._moved:
            return set()
        walk, here = Walk({LOADER: loader}, {}, self.ledger.forgets), self._walk
        held = {*map(id, walk.containers.values()), *map(id, walk.tensors.values())}
        shared = {
            here.origin(path) for path, one in (*here.containers.items(), *here.tensors.items()) if id(one) in held
        }
        found = here.also_in(walk)
        return {name for name in self._moved if name[0] in found or name in shared}

    def _said(self, only: Container[_Name] | None = None) -> dict[str, dict[str, Any]]:
        """What moves and can be stored. only: of these."""
        said: dict[str, dict[str, Any]] = {}
        with self._guarded():
            walk = self._walk.part(self._way)
            told = {
                name: cell.told
                for name, cell in walk.cells.items()
                if cell.told is not CODE
                and (name in self._moved or name[0] not in self._walk.objects)
                and not self._is_other(name, walk)
                and (only is None or name in only)
            }
            self._moved |= dict.fromkeys(told)
            lost = [f"{at} {UNORDERED}" for name, at in walk.disordered.items() if name in told]
            self.ledger.tell(*lost)
            room = BYTES_MAX
            for (path, key), value in told.items():
                packed, nbytes = self._storable(value, f"{path}.{key}", room)
                if packed is not None:
                    room -= nbytes
                    said.setdefault(path, {})[key] = packed
        return said

    def _storable(self, value: Any, name: str, room: int) -> tuple[Any, int]:
        """What `_packed` gives; None, with a word about each once, for what cannot be stored or is too large."""
        if type(value) is Place and (value.kind.startswith(LARGE_ARRAY) or MANY in value.kind):
            why = _TOO_LARGE
        elif type(value) is Place and not value.path and value != GONE:
            why = _UNSTORABLE.format(value.kind.partition(WHICH)[0][:80])
        else:
            try:
                packed, nbytes = _packed(value, name)
            except UnstorableError as error:
                why = f"a checkpoint cannot store {error.reason}"
            else:
                if nbytes <= min(EACH_BYTES_MAX, room):
                    return packed, nbytes
                why = _TOO_LARGE
        if name not in self._left_out:
            self._left_out.add(name)
            self.ledger.tell(f"the attribute {name} changes, and is not saved: {why}", leaf=name)
        return None, 0

    def now(self, names: SavedAttributes) -> Callable[..., None]:
        """What puts back what is in these attributes now, as far as there are such objects, or some of them."""
        if not names:
            return lambda only=None: None
        walk = self._new_walk()
        found: dict[str, dict[str, StoredValue]] = {}
        others: list[tuple[_Name, Any, Any]] = []
        for path, key in ((path, key) for path, keys in names.items() for key in keys if path in walk.objects):
            cell = walk.cells.get((path, key))
            try:
                packed, _ = _packed(GONE if cell is None else cell.told, f"{path}.{key}")
                found.setdefault(path, {})[key] = typed({key: unpack(packed)}, dict[str, StoredValue], path)[key]
            except (UnstorableError, FormatError):  # too large, say: the object itself, which nothing is written into
                own = own_of(walk.objects[path])
                others.append(((path, key), own, own.get(key)))

        def put_back(only: Container[_Name] | None = None) -> None:
            chosen = {
                path: {key: value for key, value in keys.items() if only is None or (path, key) in only}
                for path, keys in found.items()
            }
            self.put(chosen)
            for name, own, value in others:
                if only is None or name in only:
                    own[name[1]] = value

        return put_back

    def constants(self) -> dict[str, str]:
        """A digest of the tensors in each attribute of model and optimizers that has not moved: its constructor's."""
        said = self._said_by_optimizers()
        cells = self._walk.cells.items()
        return _digests({
            ".".join(name): cell.told for name, cell in cells
            if name not in self._moved and not _is_of_the_loop(name[0]) and not self._is_spoken(name, said)
        })  # fmt: skip

    def made_otherwise(self, saved: Mapping[str, str], restored: SavedAttributes) -> list[str]:
        """Reasons out of the `constants` of the saved run, where its constructors had made other tensors than these.

        restored: what comes back as it was, whatever a constructor makes.
        """
        cells = self._new_walk().cells.items()
        here = _digests(
            {f"{path}.{key}": cell.told for (path, key), cell in cells if key not in restored.get(path, {})}
        )
        differing = sorted(name for name, digest in saved.items() if here.get(name, digest) != digest)
        return [
            f"{name} was never changed by the loop, and is not what it was in the saved run: make it of a fixed seed"
            for name in differing
            if not self.ledger.forgets(name)
        ]

    def put_where_it_is(self, saved: SavedAttributes) -> tuple[list[str], list[str]]:
        """Put back what functions' variables lead to: why that is not exact, and what they do not lead to by now."""
        variables = {path: keys for path, keys in saved.items() if VARIABLES in path}
        if not variables:
            return [], []
        there = self._new_walk().objects
        reasons = self.put({path: keys for path, keys in variables.items() if path in there})
        return reasons, sorted(f"{path}.{key}" for path, keys in variables.items() if path not in there for key in keys)

    def restore(self, saved: SavedValues, *, looked: bool = False) -> list[str]:
        """Put everything back; why that is not exact, if it is not. FormatError, before anything is, for damage.

        looked: directly after `begin`, or another `restore`.
        """
        reasons = self.put(saved.values) if saved.values or not looked else []
        if saved.values or not looked:
            self.generators.look(self._walk)
        return [*reasons, *self.generators.restore(saved.generators)]

    def put(self, saved: SavedAttributes) -> list[str]:
        """Put these values back; likewise."""
        new = {(path, key) for path, keys in saved.items() for key in keys} - self._brought
        if self._captures and new:
            self._brought |= new
            self._as_made.append(self.now(_by_path(new)))
        walk = self._walk = self._new_walk()
        values = {
            (path, key): _value(stored, f"{path}.{key}")
            for path, keys in saved.items()
            for key, stored in keys.items()
            if not self.ledger.forgets(f"{path}.{key}")
        }
        putting = Putting(walk, self._saved())
        for (path, key), value in values.items():
            putting.put(path, key, value)
        self._moved |= dict.fromkeys(values)
        self._plan()
        return putting.reasons

    # ------------------------------------------------------------------ inside

    def _said_by_optimizers(self) -> set[Any]:
        return {mark for own in self._spoken.values() for mark in _leaf_marks(_said(own))}

    def _is_spoken(self, name: _Name, said: Container[Any]) -> bool:
        cell = self._walk.cells.get(name)
        return (
            bool(said)
            and cell is not None
            and name[0].startswith("optimizer")
            and all(mark in said for mark in _leaf_marks(cell.told))
        )

    def _new_walk(self) -> Walk:
        held = {}
        for root, now in self._held().items() if self._variables else ():
            then = self._variables.get(root, {})
            same = {name: one for name, one in now.items() if then.get(name) == id(one)}
            held[root] = SimpleNamespace(**same)
        saved = self._saved()
        if (held or self._lent) and threading.get_ident() == self._thread:
            self._gradients = flat_gradients(saved.values())
        roots = {**self._roots, **held}
        return Walk(roots, saved, self.ledger.forgets, self._apart, self._lent, self._gradients)

    def _held(self) -> dict[str, dict[str, Any]]:
        """What variables hold, of the functions that run the loop."""
        return variables(self._thread) if self._with_variables else {}

    def _moved_in(self, walk: Walk) -> list[_Name]:
        now = marked(walk.cells, _mark)
        moved = [name for name, mark in now.items() if self._first.get(name) != mark]
        # An object that is gone, or another one by now, is missed by whatever held it.
        there = walk.objects.keys() - walk.odd.keys()
        gone = [name for name in self._first if name not in walk.cells and name[0] in there]
        return [name for name in (*moved, *gone) if not self._is_other(name, walk)]

    def _is_other(self, name: _Name, walk: Walk) -> bool:
        """Whether an object of another class lies there than when the loop began: nothing of it is that one's."""
        kind = type(walk.objects.get(name[0]))
        return self._kinds.get(name[0], kind) is not kind


def of_job(
    view: UnitView,
    optimizers: Sequence[OptTFTWrapper],
    ledger: Ledger,
    spoken: Mapping[str, OwnState],
    beyond: Mapping[str, Any],
    apart: Mapping[str, Any] | None = None,
    variables: bool | Mapping[str, Any] = False,
) -> Attributes:
    """Those of the model and of all optimizers."""
    roots: dict[str, Any] = {"model": view.model}
    if (given := beyond.get("model")) is not view.model and isinstance(given, DistributedDataParallel):
        roots[f"{type(given).__name__} of model"] = given  # `model = DDP(net); model.best = 0.0`
    for number, wrapper in enumerate(optimizers):
        name = "optimizer" if len(optimizers) == 1 else f"optimizer[{number}]"
        roots[f"OptTFTWrapper of {name}"] = AttributesOf(wrapper)
        if zero.stateful(wrapper.inner) is wrapper.inner:
            roots[name] = wrapper.inner

    def saved() -> dict[str, torch.Tensor]:
        every = {f"parameter {name}": one for name, one in view.every_parameter().items()}
        # While FSDP2 computes, others stand in their places.
        every |= {
            f"gathered {name}": one
            for name, one in view.model.named_parameters()
            if one is not every[f"parameter {name}"] and isinstance(one, torch.nn.Parameter)
        }
        buffers = view.model.named_buffers(remove_duplicate=False)
        every |= {f"buffer {name}": one for name, one in buffers if not is_composite(one)}
        return every | {f"trained {number}": one for number, one in enumerate(view.trained)}

    return Attributes(roots, saved, ledger, spoken, beyond, apart, variables)


_MOVED = object()


def _part(every: Mapping[str, _T], *, of_loader: bool) -> dict[str, _T]:
    return {path: one for path, one in every.items() if _is_of_the_loop(path) is of_loader}


def _is_of_the_loop(path: str) -> bool:
    """Whether it is known where the loop begins, and no earlier: what the loader has, and what variables hold."""
    return path.partition(".")[0] == LOADER or VARIABLES in path


def _by_path(names: Iterable[_Name]) -> dict[str, dict[str, StoredValue]]:
    """For `now`, which asks for no values."""
    found: dict[str, dict[str, StoredValue]] = {}
    for path, key in sorted(names):
        found.setdefault(path, {})[key] = ({}, {})
    return found


def differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Names of what the first of two documents has otherwise than the second, or lacks; empty if there is none."""
    if was == now:
        return ""
    before, after = was.get("attributes", {}), now.get("attributes", {})
    every = [(path, key) for path, keys in after.items() for key in keys]
    names = [f"{path}.{key}" for path, key in every if before.get(path, {}).get(key) != after[path][key]]
    states = was.get("generators", {})
    return some(names + [name for name, one in now.get("generators", {}).items() if states.get(name) != one])


def names_in(attributes: Any) -> set[str]:
    return {f"{path}.{key}" for path, keys in (attributes or {}).items() for key in keys}


def _mark(told: Any, *, reads_devices: bool = True) -> Any:
    """What differs where this differs. reads_devices: else torch's count of writes stands for a tensor there."""
    kind = type(told)
    if kind in (int, str, bytes, bool, type(None)):
        return kind, told
    try:
        packed, _ = _packed(told, "", reads_devices=reads_devices)
    except UnstorableError as error:
        return error.reason
    return xxhash.xxh3_128_digest(json.dumps(packed).encode())


def _digests(told: Mapping[str, Any]) -> dict[str, str]:
    """Of the tensors and arrays in these values, of so many at most; those that cannot be read have none."""
    found = {name: digest for name in sorted(told) if (digest := _digest(told[name]))}
    return dict(islice(found.items(), CONSTANTS_MAX))


def _digest(told: Any) -> str:
    if type(told) is Place:
        return told.kind if told.kind.startswith(LARGE_ARRAY) else ""
    try:
        _, tensors = take_apart(told, "x", "")
    except UnstorableError:
        return ""
    found = [_sampled(one.tensor) for one in tensors]
    return "".join(found) if found and all(found) else ""


def _sampled(tensor: torch.Tensor) -> str:
    """A digest of some of its bytes, as writes through `.data` are counted nowhere; empty if it cannot be read."""
    view = None if problem_of(tensor) else bytes_of(tensor)
    if view is None:
        return ""
    hashed = xxhash.xxh3_64()
    step = max(len(view) // EACH_BYTES_MAX, 1) * _WINDOW
    for at in range(0, len(view), step):
        hashed.update(view[at : at + _WINDOW])
    return hashed.hexdigest()


def _said(own: OwnState) -> Any:
    try:
        return own.state_dict()
    except Exception:  # of the user's own code: handed to the log by whoever saves it
        return {}


def _leaf_marks(told: Any) -> list[Any]:
    """Marks of the atoms and tensors in nested containers."""
    return [*map(_mark, leaves_of(told, 8))]


def _packed(told: Any, path: str, *, reads_devices: bool = True) -> tuple[Any, int]:
    """A `StoredValue` in JSON, and about how large it is. UnstorableError; of large tensors only marks are taken.

    reads_devices: else likewise of those that lie on one.
    """
    tree, tensors = take_apart(told, "x", path)
    nbytes = sum(one.tensor.nbytes for one in tensors)
    away = not reads_devices and any(one.tensor.device.type != "cpu" for one in tensors)
    if nbytes > EACH_BYTES_MAX or away:
        marks = [
            (str(one.tensor.shape), one.tensor.data_ptr(), version_of(one.tensor), _sampled(one.tensor))
            for one in tensors
        ]
        return [repr(marks), {}], nbytes
    packed = [
        pack(tree),
        {one.name: [list(one.tensor.shape), pack(bytes(staged_bytes(one.tensor)))] for one in tensors},
    ]
    return packed, nbytes


def _value(stored: StoredValue, where: str) -> Any:
    """What was told. FormatError for what `_packed` has not made."""
    tree, tensors = stored
    return put_together(tree, out_of(tensors, where), where)
