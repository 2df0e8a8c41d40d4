"""Random generators of the user's own: found, captured with the other streams, and put back by the place they lie at.

Every generator that `generator_search` finds when the box is made has a region of its own; what is made later gets one
of a few spare regions. A region says by itself what is in it:

    uint32 bytes of JSON | {"place", "kind", "bytes"} | the state

What lies at a place at the end of a step is what the next step reads, also where the loop puts another generator there
("for epoch ...: rng = default_rng(epoch)"). One that is made anew in each step, and was not drawn from after the end of
the step that made it, is no state: it is let go of. In a worker a generator is a copy of the one here, made anew in
each epoch, so that there is nothing to save.
"""

from __future__ import annotations

import json
import logging
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from lastwords.errors import MismatchError, StorageError
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.streams.generator_search import GENERATORS, Unreached, search
from lastwords.optim_wrapper.streams.generator_states import kind_of, stream_of
from lastwords.optim_wrapper.streams.places import Place, user_frames
from lastwords.optim_wrapper.streams.rng_streams import Stream
from lastwords.processor.black_box import BlackBox, RegionCopy, RegionSpec

_log = logging.getLogger(__name__)

PREFIX = "rng/own/"
_SPARE_REGIONS = 24
_SPARE_BYTES = 8192
_NAME_MAX = 400
_ALIGN = 64


@dataclass(slots=True)
class _Own:
    """One generator. ends: ends of steps at which it lay at its place."""

    place: Place
    generator: Any
    stream: Stream
    kind: str
    region: str = ""
    ends: int = 0
    found_as: bytes = b""
    takes: dict[int, Callable[[], None]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        name = self.place.name
        return name if len(name) <= _NAME_MAX else f"{name[:_NAME_MAX]}~{xxhash.xxh3_64_hexdigest(name.encode())}"

    @property
    def head(self) -> bytes:
        """What a region begins with."""
        about = {"place": self.name, "kind": self.kind, "bytes": self.stream.region.nbytes}
        text = json.dumps(about).encode()
        text = text.ljust(-(-(len(text) + 4) // _ALIGN) * _ALIGN - 4)
        return len(text).to_bytes(4, "little") + text

    def state(self) -> bytes:
        taken = bytearray(self.stream.region.nbytes)
        self.stream.into(memoryview(taken))()
        return bytes(taken)


def content_of(region: bytes | bytearray | memoryview) -> tuple[dict[str, Any], bytes]:
    """What a region says of itself, and the state. MismatchError if it is none."""
    raw = bytes(region)
    end = 4 + int.from_bytes(raw[:4], "little")
    try:
        about = json.loads(raw[4:end])
        return {"place": str(about["place"]), "kind": str(about["kind"])}, raw[end : end + int(about["bytes"])]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise MismatchError(f"a region of a random generator is damaged: {error}") from error


class OwnStreams:
    """The generators of the user's own; belongs to the training thread, but for `capture`.

    roots: where to look beside the stack, by the names that places begin with. taken: generators that are captured
    elsewhere, and values that are saved as a whole and need not be looked into.
    """

    def __init__(self, roots: Mapping[str, Any], taken: Collection[Any] = (), ledger: Ledger | None = None) -> None:
        self._roots = dict(roots)
        self._taken = tuple(taken)
        self._searches = True
        self._own: dict[str, _Own] = {}
        self._passing: dict[str, _Own] = {}
        """Places at which generators do not stay, with what was there at the newest look."""
        self._spare = [f"{PREFIX}#{number}" for number in range(_SPARE_REGIONS)]
        self._box: BlackBox | None = None
        self._takes: dict[int, list[Callable[[], None]]] = {}
        self.ledger = ledger or Ledger()
        self._missing: list[str] = []
        self._unsaved: list[str] = []
        self._at_limit = False

    def let_go(self) -> None:
        """The run is over: keep nothing of the user's alive."""
        self._roots, self._searches, self._box = {}, False, None
        for places in (self._own, self._passing, self._takes):
            places.clear()

    @classmethod
    def none(cls) -> OwnStreams:
        """No generators, also where there are some."""
        streams = cls({})
        streams._searches = False
        return streams

    def __bool__(self) -> bool:
        return bool(self._own)

    @property
    def names(self) -> tuple[str, ...]:
        """Places of what is captured."""
        return tuple(self._own)

    @property
    def regions(self) -> tuple[RegionSpec, ...]:
        """One for each generator that was there at the newest look before `bind`, and spare ones."""
        found = []
        for name, own in self._own.items():
            own.region = f"{PREFIX}{name}"
            found.append(RegionSpec(own.region, "U8", (len(own.head) + own.stream.region.nbytes,), in_epoch=True))
        if not self._searches:
            return ()
        spare = [RegionSpec(name, "U8", (_SPARE_BYTES,), lazy=True, in_epoch=True) for name in self._spare]
        return (*found, *spare)

    def bind(self, box: BlackBox) -> None:
        """Capture into `box`, whose layout has `regions`."""
        self._box = box
        for own in self._own.values():
            self._prepare(own)
        self._arrange()

    def capture(self, slot: int) -> None:
        """Take all states into an open slot."""
        for take in self._takes.get(slot, ()):
            take()

    # ------------------------------------------------------------------ who is there

    def end_step(self, *, look: bool) -> bool:
        """Follow the places to what lies there now; look: search for new ones. Whether other regions are in use now."""
        if not (look or self._own or self._passing):
            return False
        before = [own.region for own in self._own.values()]
        if self._own or self._passing:
            self.follow(ends=1)
        if look:
            self.look()
        return before != [own.region for own in self._own.values()]

    def follow(self, *, ends: int = 0) -> None:
        """Capture what lies at the places now from now on; ends: 1 at the end of a step, else 0."""
        frames = user_frames()
        for own in list(self._own.values()):
            self._follow(own, frames, ends)
        if ends:
            self._watch(frames)

    def look(self) -> None:
        """Search everywhere: captures what is new, lets go of what is nowhere any more."""
        if not self._searches:
            return
        unreached = Unreached()
        found = search(self._roots, self._taken, unreached=unreached)
        self.ledger.tell(*unreached.reasons)
        if unreached.limits and not self._at_limit:
            self._at_limit = True
            _log.info(
                "the search for random generators stopped %s: generators beyond are not saved", unreached.limits[-1]
            )
        there = {id(generator) for _, generator in found.values()}
        for own in list(self._own.values()):
            if id(own.generator) not in there:
                self._let_go(own)
        known = {id(own.generator) for own in self._own.values()} | {id(thing) for thing in self._taken}
        for place, generator in found.values():
            if id(generator) not in known:
                self._meet(place, generator)
        self._arrange()

    def _meet(self, place: Place, generator: Any) -> None:
        stream = stream_of(generator)
        if stream is None:
            self.ledger.tell(f"the state of the random generator {place.name} ({kind_of(generator)}) cannot be taken")
            return
        own = _Own(place, generator, stream, kind_of(generator), ends=int(self._box is None))
        if own.name in self._own:
            return
        if own.name in self._passing:
            own.found_as = own.state()
            self._passing[own.name] = own
            return
        self._add(own)

    def _add(self, own: _Own) -> None:
        if self._box is not None:
            size = len(own.head) + own.stream.region.nbytes
            if not self._spare or size > _SPARE_BYTES:
                self.ledger.tell(
                    f"there is no room in the black box for the random generator {own.name}, which was "
                    f"created after the start"
                )
                return
            try:
                self._box.activate(self._spare[0])
            except StorageError as error:
                self.ledger.tell(f"there is no room for the random generator {own.name}: {error}")
                return
            own.region = self._spare.pop(0)
            own.found_as = own.state()
            self._prepare(own)
        self._own[own.name] = own

    def _follow(self, own: _Own, frames: list[types.FrameType], ends: int) -> None:
        now = own.place.now(frames)
        if now is own.generator:
            own.ends += ends
        elif issubclass(type(now), GENERATORS):
            if own.ends == 0 and own.state() == own.found_as:
                self._let_go(own)
                self._passing[own.name] = own
            else:
                self._follow_to(own, now)
            self._arrange()

    def _follow_to(self, own: _Own, generator: Any) -> None:
        stream = stream_of(generator)
        if stream is None or kind_of(generator) != own.kind or stream.region.nbytes != own.stream.region.nbytes:
            self._let_go(own)
            self.ledger.tell(
                f"the random generator {own.name} was replaced by a different generator "
                f"({kind_of(generator)}), and is not saved"
            )
            return
        own.generator, own.stream, own.ends = generator, stream, own.ends + 1
        self._prepare(own)

    def _watch(self, frames: list[types.FrameType]) -> None:
        """Of what was found at a passing place at the newest look: is it used in a later step after all?"""
        for own in list(self._passing.values()):
            if own.found_as:
                now = own.place.now(frames)
                used = now is own.generator or own.state() != own.found_as
                own.found_as = b""
                if used and issubclass(type(now), GENERATORS):
                    del self._passing[own.name]
                    self._meet(own.place, now)
                    self._arrange()

    def _let_go(self, own: _Own) -> None:
        del self._own[own.name]
        if self._box is not None and own.region:
            self._box.deactivate(own.region)
            if own.region.startswith(f"{PREFIX}#"):
                self._spare.append(own.region)

    def _prepare(self, own: _Own) -> None:
        assert self._box is not None
        head = own.head
        for slot in self._box.step_slots + self._box.epoch_slots:
            target = self._box.region(slot, own.region)
            target[: len(head)] = head
            own.takes[slot] = own.stream.into(target[len(head) : len(head) + own.stream.region.nbytes])

    def _arrange(self) -> None:
        if self._box is not None:
            for slot in self._box.step_slots + self._box.epoch_slots:
                self._takes[slot] = [own.takes[slot] for own in self._own.values()]

    # ------------------------------------------------------------------ resume

    def snapshot(self) -> dict[str, RegionCopy]:
        """All states as they are now, beside the box."""
        copies = {}
        for name, own in self._own.items():
            data = bytearray(own.head + own.state())
            copies[f"{PREFIX}{name}"] = RegionCopy("U8", (len(data),), data)
        return copies

    def restore(self, regions: Mapping[str, RegionCopy]) -> list[str]:
        """Put back what is saved of generators that are here now; why that failed. See `left_over` for the others."""
        self.look()
        reasons = []
        saved: dict[str, tuple[str, bytes]] = {}
        for region, copy in regions.items():
            if region.startswith(PREFIX):
                about, state = content_of(copy.data)
                saved[about["place"]] = about["kind"], state
        for name, own in self._own.items():
            kind, state = saved.get(name, (own.kind, b""))
            if kind != own.kind:
                reasons.append(f"the random generator {name} was a {kind}, and is a {own.kind} here")
            elif name in saved:
                try:
                    own.stream.restore(state)
                except MismatchError as error:
                    reasons.append(f"the random generator {name} cannot be restored: {error}")
        self._missing = sorted(saved.keys() - self._own.keys())
        self._unsaved = sorted(self._own.keys() - saved.keys())
        return reasons

    def unsaved(self) -> list[str]:
        """Why what the newest `restore` found here alone, and is here still, makes a resume not exact.

        What lay in a function that is not being run any more is out of reach, as it was in the saved run.
        """
        frames = user_frames()
        there = [name for name in self._unsaved if name in self._own and self._own[name].place.now(frames) is not None]
        return [
            f"the random generator {name} is not in the checkpoint, and starts from its initial state" for name in there
        ]

    def left_over(self) -> list[str]:
        """The same of all that was here or in the checkpoint alone."""
        return [
            f"the random generator {name} was saved but does not exist when the loop begins; create it before the loop"
            for name in self._missing
        ] + self.unsaved()
