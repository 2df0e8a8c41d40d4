"""Whether a tensor has changed since a moment: seen, for every tensor that a checkpoint holds, in a few microseconds.

What is taken of each tensor is where its memory lies, how often torch has counted a write to it, and, in the host's
memory, a few of its 8-byte words: a write through `.data`, and one by a kernel that does not count, leaves the first
two as they were. Other words are looked at after each step, so that what one look spares the next one may see. A
write that spares all that is looked at is not seen; `verify_every` looks at all bytes in the steps that it names.
Uncounted writes on a device are for `device_copies` to see.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors.tensor_places import (
    TensorPlaces,
    Where,
    Words,
    byte_index,
    word_index,
    writes_in,
)
from lastwords.optim_wrapper.tensors.tensor_tree import inner_names
from lastwords.sharding.dtensor import is_dtensor, local_of

WORDS_MAX, WORDS_EACH_MAX = 512, 16
"""About so many words are looked at in all, and of each tensor at least two and at most so many."""

SHARED_WORDS_MAX = 256
"""About so many words go into the checksum of what is the same on every rank, and at least one of each tensor."""

ROUNDS = 16
"""After so many steps the same words are looked at again."""

_NO_WORDS: Words = np.empty(0, np.int64)

_GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole parts, lie spread over 0 to 1 however many there are."""


class StateName(NamedTuple):
    """What a tensor is called in a checkpoint's unit. kind: model, buffer or optim; key: the optimizer's."""

    kind: str
    name: str
    key: str | None = None

    def __str__(self) -> str:
        words = {"model": "parameter", "buffer": "buffer", "optim": "optimizer state of"}
        return f"{words[self.kind]} {self.name!r}" + (f" ({self.key})" if self.key else "")


class Slot(NamedTuple):
    """A tensor and the dictionary that has it, if it may be replaced there by another one."""

    tensor: torch.Tensor
    table: Mapping[Any, Any] | None = None
    key: Any = None
    within: tuple[Any, ...] = ()
    """Of optimizer state: what has it, and the keys there that lead to `table`, which may be replaced, too."""

    def now(self) -> Any:
        """What stands in its place now."""
        found: Any = self.table
        if self.within:
            view, *keys = self.within
            found = view.optimizer_state
            for key in keys:
                found = _inside(found, key)
        return _inside(found, self.key)

    def is_direct(self, name: StateName) -> bool:
        """Whether it stands in the state of a parameter itself, in no list or dict there."""
        return str(self.key) == name.key


class _WordsForm(NamedTuple):
    """Where tensors lay, which of them have words that are looked at, and what is theirs in each round's."""

    where: Where
    wordy: Words
    masks: list[Words]


class Mark(NamedTuple):
    """What all tensors were like at a moment. Compared by the `Witness` that has made it.

    content: their counts of writes, and the words of a round.
    """

    look: int
    round: int
    form: _WordsForm
    content: bytes
    restless: list[tuple[torch.Tensor | None, int]]


_mark: Callable[[tuple[int, int, _WordsForm, bytes, list[tuple[torch.Tensor | None, int]]]], Mark]
_mark = partial(tuple.__new__, Mark)  # quicker, and called twice in every step


class _Lying(NamedTuple):
    """Where tensors lie, and so what is read of them in each round. Never changed: two threads may look at once."""

    places: TensorPlaces
    form: _WordsForm
    indices: list[Words]
    shared: list[Words]
    """Of each round: where the words are that `checksum` looks at."""
    shared_bytes: Words
    """Where the bytes are of what has no whole word: a count of steps, say."""
    all_shared: bool


class Witness:
    """Marks of the tensors that `every` names; asked again at `list_tensors`, which belongs to the training thread.

    Other methods may be called by any thread.
    """

    def __init__(self, every: Callable[[], Mapping[StateName, Slot]]) -> None:
        self._every = every
        self.looks = 0
        """Counts up where the tensors are others; marks of different looks are not compared."""
        self._slots: dict[StateName, Slot] = {}
        self._names: list[StateName] = []
        self._tensors: list[torch.Tensor] = []
        self._restless: dict[StateName, Slot] = {}
        self.modules_change = False
        """Whether a whole module has been put in another one's place: only a look finds its tensors then."""
        self._shared: list[StateName] = []
        self._shared_sum: int
        self._lying: _Lying
        self._enrol({})

    def list_tensors(self) -> None:
        """See which tensors there are now. What stands in one's place every now and then is told by itself alone."""
        before, slots = self._slots, {name: slot for name, slot in self._every().items() if _can_be_read(slot.tensor)}
        for name, slot in slots.items():
            known = before.get(name)
            if known is not None and known.tensor is not slot.tensor and slot.table is not None:
                self._restless[name] = slot
                self.modules_change |= name.kind != "optim" and slot.table is not known.table
        self._restless = {name: slot for name, slot in self._restless.items() if name in slots}
        if len(before) != len(slots) or any(
            name not in before or before[name].tensor is not slot.tensor for name, slot in slots.items()
        ):
            self._slots = slots
            self._enrol({name: slot for name, slot in slots.items() if name not in self._restless})

    def share(self, names: Iterable[StateName]) -> bool:
        """From now on `checksum` looks at these. Returns whether it looks at all of them that have words."""
        self._shared = sorted((name for name in names if name in self._place_of), key=str)
        self._lying = self._settle()
        forms = [(str(name), tuple(self._tensors[self._place_of[name]].shape)) for name in self._shared]
        self._shared_sum = xxhash.xxh3_64_intdigest(repr(forms).encode())
        return self._lying.all_shared

    def checksum(self, step: int) -> int | None:
        """Of some words of what is shared, which a rank with the same bytes has too; None: there are none.

        Other words in each step. Directly after a `mark`, which has seen that all of them lie where they did.
        """
        lying = self._lying
        if not self._shared:
            return None
        seen = lying.places.words_at(lying.shared[step % ROUNDS], lying.shared_bytes)
        return xxhash.xxh3_64_intdigest(seen, seed=self._shared_sum)

    def mark(self, since: Mark | None = None, *, step: int = 0) -> Mark:
        """What they are like now. since: a mark that it is to be compared with; step: else, other words for each."""
        lying = self._lying
        if not lying.places.still():
            lying = self._lying = self._settle()
        number = step % ROUNDS if since is None else since.round
        restless = [_seen(slot) for slot in self._restless.values()] if self._restless else []
        return _mark((self.looks, number, lying.form, lying.places.read(lying.indices[number]), restless))

    def moved(self, since: Mark, until: Mark | None = None) -> list[StateName]:
        """Names of those that were written, or have other memory, since then (`until` another mark, or now)."""
        if since.look != self.looks:
            return []
        now = until or self.mark(since)
        same = now.content == since.content and now.form is since.form
        if same and not self._restless:
            return []
        restless = [
            name
            for name, was, seen in zip(self._restless, since.restless, now.restless, strict=True)
            if was[0] is not seen[0] or was[1] != seen[1]
        ]
        if same:
            return restless
        differs = self._writes(now) != self._writes(since)
        for one, other in zip(since.form.where, now.form.where, strict=True):
            differs |= one != other
        both = np.intersect1d(since.form.wordy, now.form.wordy)
        one, other = (self._rows(mark)[np.isin(mark.form.wordy, both)] for mark in (since, now))
        differs[both] |= (one != other).any(1)
        return [self._names[place] for place in np.flatnonzero(differs)] + restless

    def writes(self, name: StateName, since: Mark, until: Mark) -> int:
        """How many writes torch has counted to one of them in between; 0 where it lies elsewhere now."""
        if name not in self._place_of or since.look != until.look:
            return 0
        at, one, other = self._place_of[name], since.form.where, until.form.where
        if one.addresses[at] != other.addresses[at] or one.nbytes[at] != other.nbytes[at]:
            return 0
        return int(self._writes(until)[at] - self._writes(since)[at])

    def get(self, name: StateName) -> torch.Tensor | None:
        """The tensor of this name as of the last look, of a DTensor the part that lies here."""
        slot = self._slots.get(name)
        return None if slot is None else local_of(slot.tensor)

    def live(self, name: StateName) -> torch.Tensor | None:
        """The tensor that stands in this name's place now, of a DTensor the part that lies here."""
        slot = self._slots.get(name)
        if slot is None or slot.table is None:
            return None if slot is None else local_of(slot.tensor)
        tensor = slot.now()
        if tensor is slot.tensor and _is_plain(tensor):
            return local_of(tensor)
        return local_of(tensor) if isinstance(tensor, torch.Tensor) and _can_be_read(tensor) else None

    def items(self) -> Iterator[tuple[StateName, torch.Tensor]]:
        """All of them as of the last look."""
        return ((name, local_of(slot.tensor)) for name, slot in self._slots.items())

    def replaced(self) -> list[StateName]:
        """Names of those in whose place another tensor stands since the last look, and of those that have come.

        State of the optimizer that has come, or that lies in lists, is what its update has made.
        """
        now = self._every()
        return [
            name
            for name, slot in now.items()
            if (name not in self._restless or (name.kind != "optim" and slot.table is not self._restless[name].table))
            and _can_be_read(slot.tensor)
            and (name.kind != "optim" if name not in self._slots else self._is_other(name, slot.tensor))
            and (name.kind != "optim" or slot.table is not None)
        ]

    def gone(self) -> list[StateName]:
        """Names of those that were there at the last look, and in whose place nothing stands now.

        What lies in lists and dicts of an optimizer's state is its update's to take out.
        """
        now = self._every()
        return [
            name
            for name, slot in self._slots.items()
            if (name not in now or not _can_be_read(now[name].tensor))
            and (name.kind != "buffer" or self.live(name) is None)
            and (name.kind != "optim" or slot.is_direct(name))
        ]

    def slot(self, name: StateName) -> Slot:
        """Where this one was as of the last look."""
        return self._slots[name]

    # ------------------------------------------------------------------ inside

    def _is_other(self, name: StateName, tensor: torch.Tensor) -> bool:
        place = self._place_of.get(name)
        known = self._slots[name].tensor
        return known is not tensor or (place is not None and local_of(tensor) is not self._tensors[place])

    def _writes(self, mark: Mark) -> Words:
        return writes_in(mark.content, len(self._names))

    def _rows(self, mark: Mark) -> Words:
        """Of each tensor that has any, the words that are looked at, and of these what is the tensor's own."""
        words = np.frombuffer(mark.content, np.int64)[len(self._names) :].reshape(-1, self._each)
        return words & mark.form.masks[mark.round]

    def _enrol(self, slots: Mapping[StateName, Slot]) -> None:
        self.looks += 1
        self._names = [*slots]
        self._place_of = {name: place for place, name in enumerate(self._names)}
        self._tensors = [local_of(slot.tensor) for slot in slots.values()]
        self._counted = [slot.tensor for slot in slots.values()]
        self._each = min(max(WORDS_MAX // max(len(self._names), 1), 2), WORDS_EACH_MAX)
        self._shared = []
        self._lying = self._settle()

    def _settle(self) -> _Lying:
        """Where the words are that are looked at, now that the tensors lie there."""
        places = TensorPlaces(self._tensors, self._counted)
        where = places.where
        columns = zip(where.addresses.tolist(), where.nbytes.tolist(), where.offsets.tolist(), strict=True)
        spans = [
            _words_of(tensor, *place) if _is_plain(tensor) else None
            for tensor, place in zip(self._tensors, columns, strict=True)
        ]
        wordy = np.array([at for at, span in enumerate(spans) if span is not None], np.int64)
        known = [span for span in spans if span is not None]
        rounds, masks = _rounds(known, self._each)
        indices = [np.concatenate((places.counters, one.ravel())) for one in rounds]
        # What begins within a word may do so on this rank alone. Masks would cost more than all the rest.
        every = [span for name in self._shared if (span := spans[self._place_of[name]]) is not None]
        aligned = [span for span in every if span[2] == -1]
        whole = [(begin, count, -1, -1) for begin, words, _, tail in aligned if (count := words - (tail != -1))]
        small = [begin + byte for begin, words, _, tail in aligned if words == 1 for byte in range(_bytes_in(tail))]
        shared = _rounds(whole, max(SHARED_WORDS_MAX // len(whole), 1))[0] if whole else [_NO_WORDS] * ROUNDS
        every_aligned = len(aligned) == len(every)
        return _Lying(places, _WordsForm(where, wordy, masks), indices, shared, byte_index(small), every_aligned)


def _rounds(spans: Sequence[tuple[int, int, int, int]], each: int) -> tuple[list[Words], list[Words]]:
    """Of each round where so many words of each span are, and what is its own of them."""
    begins, counts, heads, tails = np.array(spans, np.int64).reshape(-1, 4).T[:, :, None]
    # A round's first words are the same however many there are, so what two of these look at is in the cache.
    first, more = np.arange(ROUNDS)[:, None], np.arange(ROUNDS, ROUNDS * each).reshape(ROUNDS, each - 1)
    fractions = np.concatenate((first, more), 1) * _GOLDEN % 1.0
    rounds = [(fraction * counts).astype(np.int64) for fraction in fractions]
    rounds[-1][:, 0], rounds[-2][:, 0] = (counts - 1)[:, 0], 0  # the ends, which chance may pass over
    masks = [np.where(at == 0, heads, -1) & np.where(at == counts - 1, tails, -1) for at in rounds]
    return [word_index(begins) + at for at in rounds], masks


def tensors_of(view: UnitView, captured: Collection[str]) -> Iterator[tuple[StateName, Slot]]:
    """Everything that a checkpoint holds of a rank beside what is `captured` in each step: buffers of these names."""
    every = view.all_names()
    tables = {id(one): (module._parameters, key) for module in view.model.modules()
              for key, one in module._parameters.items() if one is not None}  # fmt: skip
    for name, parameter in every.parameters.items():
        yield StateName("model", name), Slot(parameter, *tables.get(id(parameter), (None, None)))
    for name, buffer in every.buffers.items():
        if name not in captured:
            module, key = every.owners[name]
            yield StateName("buffer", name), Slot(buffer, module._buffers, key)
    names = {id(parameter): name for name, parameter in every.parameters.items()}
    for of, value in [*view.optimizer_state.items()]:
        whose = names.get(id(of)) if isinstance(of, torch.Tensor) else f"~{of}"
        if whose is not None and isinstance(value, dict):
            for inner, item in [*value.items()]:
                yield from _nested(StateName("optim", whose, str(inner)), item, value, inner, (view, of))


def _nested(
    name: StateName, item: Any, table: Mapping[Any, Any] | None, key: Any, within: tuple[Any, ...]
) -> Iterator[tuple[StateName, Slot]]:
    if isinstance(item, torch.Tensor) and (inside := inner_names(item)):
        for inner in inside:
            deeper = name._replace(key=f"{name.key}.{inner}")
            yield from _nested(deeper, getattr(item, inner), vars(item), inner, (*within, key))
    elif isinstance(item, torch.Tensor):
        yield name, Slot(item, table, key, within)
    elif isinstance(item, list | tuple | dict):
        for place, inner in [*item.items()] if isinstance(item, dict) else enumerate(item):
            deeper = name._replace(key=f"{name.key}.{place}")
            yield from _nested(deeper, inner, item if isinstance(item, dict) else None, place, (*within, key))


def _inside(table: Any, key: Any) -> Any:
    """What has this key in a table, a list or a tensor around others; None: nothing."""
    if isinstance(table, dict | Mapping):
        return table.get(key)
    if isinstance(table, list | tuple):
        return table[key] if key < len(table) else None
    return vars(table).get(key) if isinstance(table, torch.Tensor) else None


def _can_be_read(tensor: torch.Tensor) -> bool:
    """Whether it has memory of its own and no other tensor inside."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_nested:
        return False
    local = local_of(tensor)
    plain = is_dtensor(tensor) or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return plain and local.layout is torch.strided and not local.is_quantized and local.device.type != "meta"


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is still what it was let in for: it may have been swapped with another one."""
    return tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_nested


def _words_of(tensor: torch.Tensor, address: int, nbytes: int, offset: int) -> tuple[int, int, int, int] | None:
    """Where a tensor's first word lies, how many follow one another from there, and what is its own in first and last.

    address, nbytes: of its storage; offset: in it, in elements. None where there is none: on a device, or without
    memory. A word that begins at a multiple of 8 lies in one page: where a byte of it can be read, all can.
    """
    size = tensor.element_size()
    run = _run(tensor) * size
    begin = address + offset * size
    if tensor.device.type != "cpu" or not address or not run or begin + run > address + nbytes:
        return None
    first, end = begin // 8, -(-(begin + run) // 8)
    return first * 8, end - first, _bytes_from(begin - first * 8), ~_bytes_from(8 - (end * 8 - begin - run))


def _bytes_from(number: int) -> int:
    """A mask for the bytes of a word from one of them on.

    >>> hex(_bytes_from(2) & 2**64 - 1), _bytes_from(0), _bytes_from(8)
    ('0xffffffffffff0000', -1, 0)
    """
    return -1 << 8 * number if number < 8 else 0


def _bytes_in(mask: int) -> int:
    """Of how many bytes a word's mask is, if these are its first ones, and not all.

    >>> _bytes_in(0xFFFFFFFF), _bytes_in(-1)
    (4, 0)
    """
    return 0 if mask == -1 else mask.bit_length() // 8


def _run(tensor: torch.Tensor) -> int:
    """How many of its elements lie side by side, from its first one on.

    >>> _run(torch.zeros(3, 4)), _run(torch.zeros(3, 4).t()), _run(torch.zeros(3, 4)[:, 1:3]), _run(torch.zeros(()))
    (12, 12, 2, 1)
    """
    count = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return 0
        if size > 1 and stride != count:
            break
        count *= size
    return count


def _seen(slot: Slot) -> tuple[torch.Tensor | None, int]:
    tensor = slot.now()
    if not isinstance(tensor, torch.Tensor):
        return None, 0
    return tensor, 0 if tensor.is_inference() else tensor._version
