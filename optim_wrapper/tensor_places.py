"""Where many tensors lie and how often they were written: read all at once.

Asking a tensor for its address or its count of writes costs a tenth of a microsecond each, which is too much for all
tensors of a model several times in a step. Both stand in the C++ objects behind it, and numpy gathers them with a few
reads for all tensors together:

    Python object -> TensorImpl -> StorageImpl   -> address and length of the memory
                                -> storage offset
                                -> VersionCounter -> count of writes

Each object is held by the one before it, and the Python objects are held here, so whatever a user does with a tensor
(`.data =`, `resize_`, `set_`, `swap_tensors`), what is read is alive. Where the fields lie is not assumed but found in
tensors made for it, and proved on them; where anything does not fit (another torch, another interpreter), the public
attributes are asked instead and only the time is lost.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_log = logging.getLogger(__name__)

Words = npt.NDArray[Any]

_WORD = 8
_LOOKED_AT = 40
"""Words of an object among which a field is looked for; no object is that small that this would leave its page."""
_VERSION_BITS = 0xFFFFFFFF


class _Everything:
    """All memory of this process as one array of 8-byte words. It begins at address 8: numpy wants no null pointer."""

    __array_interface__ = {"shape": (2**45 - 1,), "typestr": "<i8", "data": (_WORD, True), "version": 3}  # noqa: RUF012


class _Fields(NamedTuple):
    """Where each field lies in its object, in words."""

    impl: int
    storage: int
    counter: int
    offset: int
    memory: int
    nbytes: int
    version: int


class Places(NamedTuple):
    """Of some tensors, one column each. at: storage, offset in it in elements, counter; what these two are is nobody's
    business. memory: address and bytes of the storage, and the count of writes."""

    at: Words
    memory: Words

    @property
    def addresses(self) -> Words:
        """Where each storage's memory begins."""
        row: Words = self.memory[0]
        return row

    @property
    def nbytes(self) -> Words:
        """How long it is."""
        row: Words = self.memory[1]
        return row

    @property
    def offsets(self) -> Words:
        """Where each tensor begins in it, in elements."""
        row: Words = self.at[1]
        return row

    @property
    def writes(self) -> Words:
        """How often each tensor was written to."""
        row: Words = self.memory[2] & _VERSION_BITS
        return row


class TensorPlaces:
    """Reads where these tensors' memory is, and how often they were written. Any thread may call.

    They are dense or strided tensors, no wrappers around others (of a DTensor, its local part). counted: those
    whose counts of writes are theirs (DTensors), where these are others.
    public: ask the tensors themselves; where the fields were not found, and for tests.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], counted: Sequence[torch.Tensor] = (), *, public: bool = False
    ) -> None:
        self._held = tensors
        self._counted = [_UNCOUNTED if tensor.is_inference() else tensor for tensor in counted or tensors]
        self._use(None if public else _fields())

    def _use(self, fields: _Fields | None) -> None:
        self._fields = fields
        if fields is None:
            return
        count = len(self._held)
        objects = [np.fromiter(map(id, some), np.int64, count) for some in (self._held, self._counted)]
        self._objects = _word(np.stack(objects)) + fields.impl
        # What is read of each object, and that `_word` has to take one off.
        self._of_impl = np.array([[fields.storage], [fields.offset], [fields.counter]]) - 1
        self._of_both = np.array([[fields.memory], [fields.nbytes], [fields.version]]) - 1

    def read(self) -> Places:
        """As it is now. A few microseconds, and a hundredth of one for each tensor."""
        if self._fields is None:
            return self._asked()
        memory = _memory()
        impls = memory.take(self._objects) >> 3
        at = memory.take(impls[_IMPLS] + self._of_impl)
        if not at[_BOTH].all():  # swapped with a tensor that has no storage (sparse), or no counter (inference)
            stand_in = memory.take(_word(np.array([[id(_UNCOUNTED)]], np.int64)) + self._fields.impl)
            known = memory.take((stand_in >> 3) + self._of_impl)
            at = np.where((at == 0) & _POINTERS, known, at)
        return Places(at, memory.take((at >> 3)[_BOTH] + self._of_both))

    def _asked(self) -> Places:
        storages = [tensor.untyped_storage() for tensor in self._held]
        offsets = [tensor.storage_offset() for tensor in self._held]
        memory = [
            [storage.data_ptr() for storage in storages],
            [storage.nbytes() for storage in storages],
            [tensor._version for tensor in self._counted],
        ]
        count = len(storages)
        at = [[0] * count, offsets, [0] * count]
        return Places(np.array(at, np.int64).reshape(3, count), np.array(memory, np.int64).reshape(3, count))


_IMPLS = [0, 0, 1]
_BOTH = [0, 0, 2]
_POINTERS = np.array([[True], [False], [True]])


def words_at(indices: Words) -> Words:
    """The 8-byte words at these places, as `word_index` gives them. They have to be memory of this process."""
    return _memory().take(indices)


def word_index(addresses: Words) -> Words:
    """Where `words_at` finds the word at each address, a multiple of 8."""
    return _word(addresses)


_UNCOUNTED = torch.empty(0)
"""Stands for tensors that were made under `torch.inference_mode`, whose writes nobody counts."""


def _word(addresses: Words) -> Words:
    return (addresses >> 3) - 1


@functools.cache
def _memory() -> Words:
    return np.array(_Everything(), copy=False)


@functools.cache
def _fields() -> _Fields | None:
    """Found once in a process; None if anything is not as it has to be."""
    try:
        fields = _found()
        return fields if _proved(fields) else None
    except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:  # only the quicker way is lost
        _log.info("tensors' places are asked for one by one: %r", error)
        return None


def _found() -> _Fields:
    flat = torch.empty(0x9000)
    one, other, apart = torch.nn.Parameter(torch.empty(7)), torch.empty(11), flat[0x1235:]
    shares = one.detach()  # the same storage and the same counter
    impl = _only(_object(id(one), 8), one._cdata)
    here, there, else_where = _object(one._cdata), _object(shares._cdata), _object(other._cdata)
    storage = _only(here, one.untyped_storage()._cdata)
    shared = [at for at, word in enumerate(here) if word == there[at] != else_where[at] and at != storage]
    (counter,) = [at for at in shared if here[at] % _WORD == 0 and here[at] > 1 << 16]
    offset = _only(_object(apart._cdata), 0x1235)
    in_storage = _object(flat.untyped_storage()._cdata, 12)
    memory, nbytes = in_storage.index(flat.data_ptr()), in_storage.index(flat.untyped_storage().nbytes())
    before = _object(here[counter], 4)
    with torch.no_grad():
        for _ in range(5):
            one.add_(1)
    after = _object(here[counter], 4)
    (version,) = [at for at, (was, now) in enumerate(zip(before, after, strict=True)) if now - was == 5]
    return _Fields(impl, storage, counter, offset, memory, nbytes, version)


def _proved(fields: _Fields) -> bool:
    """Whether tensors of many kinds are read as they say of themselves, before and after they change."""
    tensors: list[torch.Tensor] = [
        torch.nn.Parameter(torch.ones(3, 4)), torch.arange(100)[7:], torch.empty(0), torch.tensor(1.5),
        torch.ones(8, 8, dtype=torch.bfloat16)[:, 3:5], torch.nn.Buffer(torch.ones(5, dtype=torch.bool)),
    ]  # fmt: skip
    places = TensorPlaces(tensors, public=True)
    places._use(fields)
    for _ in range(3):
        read, asked = places.read(), places._asked()
        if not all(
            np.array_equal(*pair)
            for pair in (
                (read.memory[:2], asked.memory[:2]),
                (read.writes, asked.writes),
                (read.offsets, asked.offsets),
            )
        ):
            return False
        with torch.no_grad():
            tensors[0].mul_(2)
            tensors[1].add_(1)
            tensors[2].resize_(1000)
            tensors[3].data = torch.ones(9)[2:4]
            tensors[4].zero_()
            swap: Any = torch.utils.swap_tensors
            swap(tensors[5], torch.nn.Buffer(torch.zeros(6)))
    return True


def _object(address: int, words: int = _LOOKED_AT) -> list[int]:
    """The first words of an object."""
    found: list[Any] = _memory().take(_word(np.array(address, np.int64)) + np.arange(words)).tolist()
    return found


def _only(words: list[int], value: int) -> int:
    (at,) = [at for at, word in enumerate(words) if word == value]
    return at
