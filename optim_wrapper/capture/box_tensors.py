"""Tensors of this rank in its black box: where each is found, which copies have it, and how they are taken.

Whoever knows of a tensor that only this rank has, or has as it was at a step's end, `add`s it: buffers, what the loop
writes beside its updates, gradients that it carries. All of them are copied here, in one call.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, cast

import numpy as np
import torch

from lastwords.checkpoint.format import TYPE_NAMES
from lastwords.errors import StorageError
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.streams.rng_streams import memory_at
from lastwords.optim_wrapper.tensors.tensor_bytes import (
    CODES,
    dtype_named,
    overwrite,
    problem_of,
    tensor_over,
    version_of,
)
from lastwords.optim_wrapper.tensors.tensor_places import TensorPlaces, Words, word_index
from lastwords.processor.black_box import BlackBox
from lastwords.processor.box_layout import REGION_ALIGN_BYTES, RegionCopy, RegionSpec, SlotKind
from lastwords.sharding.dtensor import is_dtensor, local_of
from lastwords.torch_private import foreach_copy

_log = logging.getLogger(__name__)

REFORMS_MAX = 16
"""A cache that grows in each step would have the black box made anew in each."""

GATHERED_BYTES_MAX = 16 * 1024
"""A larger tensor is copied more quickly by itself: a gather takes some 0.5 ns for each word."""

_NOTHING = torch.empty(0)
_WORD = 8
_ZERO = np.zeros(1, np.int64)
"""Goes where the room between two regions is, which has to be the same in all copies."""

Form = tuple[torch.Size, torch.dtype]


def form_of(tensor: torch.Tensor) -> Form:
    return tensor.shape, tensor.dtype


def stored_form(tensor: torch.Tensor) -> tuple[str | None, tuple[int, ...]]:
    """Element type and shape of a region that holds this rank's part of a tensor."""
    local = local_of(tensor)
    return CODES.get(local.dtype), tuple(local.shape)


def unstorable(tensor: torch.Tensor) -> str:
    """Why a tensor, or the part of one on this rank, can be in no black box; or nothing."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return f"cannot be captured ({tensor.layout} on {tensor.device})"
    if what := problem_of(local_of(tensor)):
        return f"cannot be captured: it {what}"
    return "" if tensor.dtype in CODES else f"cannot be captured ({tensor.dtype})"


class BoxTensor:
    """One tensor by its place `table[key]`, since the loop may put another one there.

    region: its name in the box. what: what messages call it. waits: it takes no memory, and is in no copy, until it is
    another tensor than now or has been written to. late: no tentative copy has it, since the update changes it.
    steady: nobody gives it another form under the same object. optional: it may go and come back, which tells nothing.
    """

    __slots__ = (
        "_first", "_first_version", "dtype", "given_up", "key", "optional", "reforms", "region", "steady", "table",
        "waits", "what",
    )  # fmt: skip

    def __init__(
        self,
        region: str,
        what: str,
        table: Any,
        key: Any,
        *,
        waits: bool = False,
        late: bool = False,
        steady: bool = False,
        optional: bool = False,
        alone: bool = False,
    ) -> None:
        """alone: its memory is taken when it is first copied."""
        self.what, self.table, self.key = what, table, key
        self.waits, self.steady, self.optional = waits, steady, optional
        self.given_up, self.reforms = False, 0
        tensor: torch.Tensor = table.get(key)
        self._first: torch.Tensor | None = tensor if waits else None
        self._first_version = version_of(tensor)
        local = local_of(tensor)
        self.dtype = local.dtype
        shape, lazy = tuple(local.shape), waits or alone
        self.region = RegionSpec(region, CODES[self.dtype], shape, lazy=lazy, committed_only=late)

    @property
    def name(self) -> str:
        return self.region.name

    @property
    def tensor(self) -> torch.Tensor | None:
        """As it is now."""
        tensor: torch.Tensor | None = self.table.get(self.key)
        return tensor

    def changed(self) -> bool:
        """Whether it is another tensor than at the start, or has been written to."""
        first = self._first
        return first is None or self.tensor is not first or version_of(first) != self._first_version

    def reformed(self) -> BoxTensor | None:
        """The same with room for the form that it has now; None if there can be none, or it changes too often."""
        tensor = self.tensor
        if tensor is None or unstorable(tensor) or is_dtensor(tensor) or not tensor.numel():
            return None
        if self.reforms == REFORMS_MAX:
            return None
        twin = copy.copy(self)
        shape, twin.dtype = form_of(tensor)
        old = self.region
        twin.region = RegionSpec(
            old.name, CODES[twin.dtype], tuple(shape), lazy=old.lazy, committed_only=old.committed_only
        )
        twin.given_up, twin.reforms = False, self.reforms + 1
        return twin

    def misfit(self) -> str:
        """Why it cannot be copied into its region as it is now; "" if it can."""
        tensor = self.tensor
        if tensor is None:
            return "was removed"
        if problem := unstorable(tensor):
            return problem
        shape, dtype = form_of(local_of(tensor))
        if (tuple(shape), dtype) == (self.region.shape, self.dtype):
            return ""
        return f"was replaced by one of {dtype} {tuple(shape)}"

    def fits(self, saved: RegionCopy) -> bool:
        """Whether a saved region has its form."""
        return (saved.dtype, tuple(saved.shape)) == (self.region.dtype, self.region.shape)

    def write(self, saved: RegionCopy) -> None:
        """Give the tensor this content, of its form."""
        tensor = self.tensor
        assert tensor is not None, self.what
        overwrite(tensor, tensor_of(saved))


def tensor_of(saved: RegionCopy) -> torch.Tensor:
    """A region's content as a tensor of its own."""
    return tensor_over(bytearray(saved.data), dtype_named(TYPE_NAMES[saved.dtype]), tuple(saved.shape))


class BoxTensors:
    """A `Capture` of all tensors that are in the black box. Training thread.

    needs_room: the box has to be made anew, since it has no room for what was added, or for another form.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger()
        self.needs_room = False
        self._kept: dict[str, BoxTensor] = {}
        self._waiting: dict[str, BoxTensor] = {}
        self._box: BlackBox | None = None
        self._reshaped: set[str] = set()
        self._active: list[BoxTensor] = []
        self._away: list[BoxTensor] = []  # optional ones that are not there
        self._known: list[torch.Tensor | None] = []  # None: optional, and not to be kept alive
        self._sources: list[torch.Tensor] = []  # the same, but of a DTensor the part that lies here
        self._targets: dict[int, list[torch.Tensor]] = {}
        self._views: dict[tuple[int, str], torch.Tensor] = {}
        self._gathered: Gathered | None = None
        self._joined: set[BoxTensor] = set()
        self._fixed: list[int] = []  # places of those that are not optional
        self._lookups: list[tuple[Callable[[Any], Any], Any]] = []
        self._loose: list[int] = []
        self._rest: dict[bool, list[int]] = {}  # of a tentative copy or not: those that are copied one by one
        self._names: dict[bool, frozenset[str]] = {}
        self._checked: list[int] = []  # places of those whose form may change under the same object
        self._sharded: list[int] = []
        self._forms: list[Form] = []

    def add(self, kept: BoxTensor) -> None:
        """Have this in the copies, from the next box on if the one of now has no room for it."""
        self.remove(kept.name)
        self._kept[kept.name] = kept
        if kept.waits:
            self._waiting[kept.name] = kept
        self._see(kept)

    def remove(self, name: str) -> None:
        """Have this in no further copy."""
        kept = self._kept.pop(name, None)
        self._waiting.pop(name, None)
        self._reshaped.discard(name)
        if kept in self._away:
            self._away.remove(kept)
        if kept in self._active:
            self._drop([kept])

    def look_in(self, name: str, table: Mapping[Any, Any]) -> None:
        """This one, if it is copied, is there from now on."""
        kept = self._kept.get(name)
        if kept is not None and kept.table is not table:
            kept.table = table
            self._arrange()

    def want(self, name: str) -> None:
        """One that waits is in the copies from now on."""
        if (kept := self._waiting.pop(name, None)) is not None:
            kept.waits, kept._first = False, None
            self._see(kept)

    def make_room(self) -> None:
        """At a step's end: what has another form gets room for it."""
        if not self._reshaped:
            return
        for name in sorted(self._reshaped & self._kept.keys()):
            kept = self._kept[name]
            if (twin := kept.reformed()) is not None:
                self.add(twin)
            elif kept.optional:
                kept.given_up = False
                self._away.append(kept)
        self._reshaped = set()

    def _see(self, kept: BoxTensor) -> None:
        if self._box is None:
            return
        if kept.region not in self._box.layout.regions:
            self.needs_room = True
        elif not kept.waits:
            self._activate(kept)
            self._arrange(steady=kept.steady)

    def get(self, name: str) -> BoxTensor | None:
        """What is in the copies under this name."""
        return self._kept.get(name)

    def reshaped(self, name: str) -> bool:
        """Whether it gets room for another form."""
        return name in self._reshaped

    def of_kind(self, prefix: str) -> dict[str, BoxTensor]:
        """Those whose regions' names begin so, by the rest of the name."""
        return {name.removeprefix(prefix): one for name, one in self._kept.items() if name.startswith(prefix)}

    def held(self, slot: int | None) -> frozenset[str]:
        """What is in the copy in a slot."""
        box = self._box
        return frozenset(name for name in self._kept if box is not None and slot is not None and box.has_in(slot, name))

    # ------------------------------------------------------------------ Capture

    @property
    def regions(self) -> tuple[RegionSpec, ...]:
        """What each copy needs room for; what waits takes memory only later."""
        return tuple(kept.region for kept in self._kept.values())

    def bind(self, box: BlackBox) -> None:
        """Prepare the copies into each step slot of `box`, whose layout has `regions`; replaces an earlier box."""
        self._box, self.needs_room = box, False
        self._active, self._known, self._sources, self._away = [], [], [], []
        self._targets, self._views = {slot: [] for slot in box.step_slots}, {}
        for kept in self._kept.values():
            if not kept.waits:
                self._activate(kept)
        self._arrange()

    def refresh(self) -> None:
        """Before a copy is begun: see what has been written for the first time, was replaced, or has come back."""
        if not self._kept:
            return
        if self._waiting:
            for name in [name for name, kept in self._waiting.items() if kept.changed()]:
                self.want(name)
        if not (self._are_there() and (not self._loose or self._look_up_loose())):
            self._follow()
        if self._away:
            back = [kept for kept in self._away if (tensor := kept.tensor) is not None and not unstorable(tensor)]
            self._away = [kept for kept in self._away if kept not in back]
            for kept in back:
                self._activate(kept)
            self._arrange(steady=False)

    def _are_there(self) -> bool:
        """Whether all that are not optional are the same tensors as before, of the same form, and can be read."""
        known, sources = self._known, self._sources
        live = [get(key) for get, key in self._lookups]
        return (
            all(map(is_, [known[place] for place in self._fixed] if self._loose else known, live))
            and (not self._checked or self._are_as_they_were(sources))
            and (
                not self._sharded or all(local_of(cast(torch.Tensor, known[at])) is sources[at] for at in self._sharded)
            )
        )

    def _are_as_they_were(self, sources: Sequence[torch.Tensor]) -> bool:
        return [form_of(sources[place]) for place in self._checked] == self._forms and all(
            _has_memory(sources[place]) for place in self._checked
        )

    def _look_up_loose(self) -> bool:
        """See where the optional ones are now, which are not kept alive between two copies; whether all fit."""
        for place in self._loose:
            kept = self._active[place]
            if (tensor := kept.tensor) is None:
                return False
            self._sources[place] = local = local_of(tensor)
            if (local.shape, local.dtype) != (kept.region.shape, kept.dtype) or not _has_memory(local):
                return False
        return True

    def capture(self, slot: int) -> None:
        """Take the tensors into an open step slot."""
        if not self._kept:
            return
        early = self._bound.open_kind is SlotKind.TENTATIVE
        try:
            self._copy(slot, early)
        except RuntimeError:
            before = self._names[early]
            self._follow()  # what does not fit is named now, so its older bytes count for nothing
            self._arrange()
            for name in before - self._names[early]:
                self._bound.leave_out(slot, name)
            self._copy(slot, early)
        for place in self._loose:
            self._sources[place] = _NOTHING

    # ------------------------------------------------------------------ inside

    @property
    def _bound(self) -> BlackBox:
        assert self._box is not None, "bind() comes first"
        return self._box

    def _copy(self, slot: int, early: bool) -> None:
        if self._gathered is not None and not self._gathered.copy(slot):
            raise RuntimeError("not all of them lie where they did")
        sources, targets, rest = self._sources, self._targets[slot], self._rest[early]
        if rest:
            with torch.inference_mode():
                foreach_copy([targets[place] for place in rest], [sources[place] for place in rest])

    def _activate(self, kept: BoxTensor) -> None:
        name = kept.name
        if kept.given_up or not self._fits(kept):
            self._bound.deactivate(name)
            return
        try:
            self._bound.activate(name)
        except StorageError as error:
            kept.given_up = True
            why = os.strerror(error.errno) if error.errno else str(error)
            self._say(f"{kept.what} has changed but could not be copied: {why}; enlarge /dev/shm")
            return
        tensor = kept.tensor
        assert tensor is not None
        self._active.append(kept)
        self._known.append(None if kept.optional else tensor)
        self._sources.append(local_of(tensor))
        for slot, targets in self._targets.items():
            if (slot, name) not in self._views:
                view = tensor_over(self._bound.region(slot, name), kept.dtype, kept.region.shape)
                self._views[slot, name] = view
            targets.append(self._views[slot, name])

    def _follow(self) -> None:
        """Follow those that are another tensor now; one that does not fit any more is given up."""
        gone, lies_elsewhere = [], False
        for place, kept in enumerate(self._active):
            if not self._fits(kept):
                gone.append(kept)
                continue
            tensor = kept.tensor
            assert tensor is not None
            local = local_of(tensor)
            lies_elsewhere |= kept.steady and local is not self._sources[place]
            self._known[place], self._sources[place] = None if kept.optional else tensor, local
        if gone:
            self._drop(gone)
        if lies_elsewhere:
            self._arrange(steady=True)

    def _drop(self, kept: Sequence[BoxTensor]) -> None:
        for place in reversed(range(len(self._active))):
            if self._active[place] not in kept:
                continue
            self._bound.deactivate(self._active[place].name)
            del self._active[place], self._known[place], self._sources[place]
            for targets in self._targets.values():
                del targets[place]
        self._arrange(steady=any(one.steady for one in kept))

    def _fits(self, kept: BoxTensor) -> bool:
        """Whether it can be copied into its region; if not, it is given up, and that is said."""
        problem = kept.misfit()
        if not problem:
            return True
        tensor = kept.tensor
        if kept.optional and (tensor is None or unstorable(tensor)):
            self._away.append(kept)
            return False
        kept.given_up = True
        if kept.reformed() is not None:
            self._reshaped.add(kept.name)
        else:
            self._say(f"{kept.what} {problem}")
        return False

    def _arrange(self, *, steady: bool = True) -> None:
        """See which are copied how. steady: those that are copied together may be others than before."""
        places = range(len(self._active))
        if steady:
            self._gather(places)
        self._loose = [place for place in places if self._active[place].optional]
        self._fixed = [place for place in places if not self._active[place].optional]
        self._lookups = [(self._active[place].table.get, self._active[place].key) for place in self._fixed]
        # Of those that are copied together nobody changes the form under the same object, and there may be hundreds.
        self._checked = [place for place in self._fixed if self._active[place] not in self._joined]
        self._forms = [form_of(self._sources[place]) for place in self._checked]
        self._sharded = [place for place in self._fixed if is_dtensor(self._known[place])]
        alone = [place for place in places if self._active[place] not in self._joined]
        for early in (False, True):
            taken = {place for place in places if not (early and self._active[place].region.committed_only)}
            self._rest[early] = [place for place in alone if place in taken]
            self._names[early] = frozenset(self._active[place].name for place in taken)

    def _gather(self, places: Iterable[int]) -> None:
        """Copy those together whose form nobody changes, and whose bytes lie as in the box."""
        targets = next(iter(self._targets.values()), [])
        together = [
            place
            for place in places
            if self._active[place].steady and _can_be_gathered(self._sources[place], targets[place])
        ]
        self._gathered, self._joined = None, set()
        if together:
            into = {slot: [every[place] for place in together] for slot, every in self._targets.items()}
            self._gathered = Gathered([self._sources[place] for place in together], into)
            self._joined = {self._active[place] for place in together}

    def _say(self, reason: str) -> None:
        if self.ledger.tell(reason):
            _log.warning("%s: a resume will not be exact", reason)


def _has_memory(tensor: torch.Tensor) -> bool:
    """False where the storage has been resized to less than the tensor takes: reading it would end the process."""
    plain = tensor.layout is torch.strided and not tensor.storage_offset() and tensor.is_contiguous()
    return (plain and tensor.untyped_storage().nbytes() >= tensor.nbytes) or not unstorable(tensor)


def _can_be_gathered(tensor: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the tensor's bytes are whole words side by side in the host's memory, as the target's are."""
    alike = tensor.shape == target.shape and tensor.dtype == target.dtype and tensor.is_contiguous()
    if tensor.device.type != "cpu" or not alike or tensor.untyped_storage().nbytes() < tensor.nbytes:
        return False
    words = not (tensor.nbytes | tensor.data_ptr() | target.data_ptr()) % _WORD
    return 0 < tensor.nbytes <= GATHERED_BYTES_MAX and words


_shape = attrgetter("shape")


class Gathered:
    """Copies of tensors that `_can_be_gathered`: one numpy call for those side by side.

    A `copy_` takes most of a microsecond however small the tensor is, and a BatchNorm has three buffers.
    targets: of each slot, where the copy of each tensor goes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], targets: Mapping[int, Sequence[torch.Tensor]]) -> None:
        self._tensors, self._shapes = tensors, [*map(_shape, tensors)]
        self._places = TensorPlaces(tensors)
        sources = [(one.data_ptr(), one.nbytes) for one in tensors]
        self._gathers = {
            slot: _gathers(
                sorted((target.data_ptr(), *source) for target, source in zip(of_slot, sources, strict=True))
            )
            for slot, of_slot in targets.items()
        }

    def copy(self, slot: int) -> bool:
        """Copy all of them; nothing, and False, where not all lie where they did, or one is a smaller part of that."""
        if not self._places.still() or [*map(_shape, self._tensors)] != self._shapes:
            return False
        for words, target in self._gathers[slot]:
            self._places.copy(words, target)
        return True


def _gathers(copies: Iterable[tuple[int, int, int]]) -> list[tuple[Words, Words]]:
    """For each run of regions side by side where its words come from, and its memory.

    copies: where to, where from, and how many bytes, by where to.
    """
    zero = word_index(np.array([_ZERO.ctypes.data]))
    begin, end, words = 0, -REGION_ALIGN_BYTES, [zero]
    runs: list[tuple[int, list[Words]]] = []
    for target, source, nbytes in copies:
        if target - end >= REGION_ALIGN_BYTES:  # more than what fills up a line: something else lies in between
            begin, words = target, []
            runs.append((begin, words))
        else:
            words.append(np.repeat(zero, (target - end) // _WORD))
        words.append(word_index(np.arange(source, source + nbytes, _WORD)))
        end = target + nbytes
    joined = [(begin, np.concatenate(words)) for begin, words in runs]
    return [(words, np.frombuffer(memory_at(begin, words.nbytes), np.int64)) for begin, words in joined]
