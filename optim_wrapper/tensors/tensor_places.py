"""Where many tensors lie and how often they were written: read all at once.

Asking a tensor for its address or its count of writes costs a tenth of a microsecond each, which is too much for all
tensors of a model several times in a step. Both stand in the C++ objects behind it, and numpy gathers them with three
reads for all tensors together:

    Python object -> TensorImpl -> StorageImpl   -> address and length of the memory
                                -> storage offset
                                -> VersionCounter -> count of writes

Tensors hardly ever move, so where each field lies is worked out once, and then compared: first whether the Python
objects have the TensorImpls that they had, then whether all that these point to is the same, and then the counts are
read. The Python objects and the storages are held here, and a counter by its TensorImpl, so whatever a user does with a
tensor (`.data =`, `resize_`, `set_`, `swap_tensors`), what is read is alive. Where the fields lie is not assumed but
found in tensors made for it, and proved on them; where anything does not fit (another torch, another interpreter), the
public attributes are asked instead and only the time is lost.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from operator import is_
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


class _AllMemory:
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


class Where(NamedTuple):
    """Where some tensors lie, one number each: address and bytes of the storage's memory, offset in it in elements."""

    addresses: Words
    nbytes: Words
    offsets: Words


class TensorPlaces:
    """Some tensors, and where they lay when this was made. Never changed; any thread may call.

    It holds their storages, so that neither their memory nor what is known of it is gone while it is read.
    They are dense or strided tensors, no wrappers around others (of a DTensor, its local part). counted: those
    whose counts of writes are theirs (DTensors), where these are others. Some microseconds for each tensor.
    public: ask the tensors themselves; where the fields were not found, and for tests. fields: to be proved.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        counted: Sequence[torch.Tensor] = (),
        *,
        public: bool = False,
        fields: _Fields | None = None,
    ) -> None:
        self.held = [_storage_of(tensor) for tensor in tensors]
        self._tensors = tensors
        self._counted = [_UNCOUNTED if tensor.is_inference() else tensor for tensor in counted or tensors]
        self._take = _memory().take
        fields = None if public else fields or _fields()
        self._quick = fields is not None
        self.counters: Words = np.empty(0, np.int64)
        """Where `read` finds their counts of writes; empty where these have to be asked for."""
        if fields is None:
            self.where = self._asked()
        else:
            self._settle(fields)

    def _settle(self, fields: _Fields) -> None:
        count, take = len(self._tensors), self._take
        same = all(map(is_, self._tensors, self._counted))
        objects = [*self._tensors] if same else [*self._tensors, *self._counted]
        self._objects = word_index(np.fromiter(map(id, objects), np.int64, len(objects))) + fields.impl
        impls = take(self._objects)
        self._impls = impls.tobytes()
        stand_in = word_index(np.array(_UNCOUNTED._cdata, np.int64))
        # Swapped with a tensor that has no storage (sparse), or no counter (inference): nobody counts or moves those.
        storages = word_index(
            np.fromiter((_NOWHERE._cdata if one is None else one._cdata for one in self.held), np.int64, count)
        )
        of_tensor, of_counted = word_index(impls[:count]), word_index(impls[len(impls) - count :])
        counters = take(of_counted + fields.counter)
        counters = np.where(counters == 0, take(stand_in + fields.counter), counters)
        columns = [
            storages + fields.memory, storages + fields.nbytes, of_tensor + fields.offset, of_tensor + fields.storage,
            of_counted + fields.counter,
        ]  # fmt: skip
        self._fields = np.stack(columns, 1).ravel()  # what belongs to one tensor is read together
        found = take(self._fields)
        self._found = found.tobytes()
        self.where = Where(*found.reshape(count, len(columns)).T[:3])
        self.counters = word_index(counters) + fields.version

    def still(self) -> bool:
        """Whether all of them lie there now. A few microseconds, and a hundredth of one for each tensor.

        What is read second is there if what was read first is as it was.
        """
        if self._quick:
            take = self._take
            same: bool = take(self._objects).tobytes() == self._impls and take(self._fields).tobytes() == self._found
            return same
        return all(map(np.array_equal, self._asked(), self.where))

    def read(self, indices: Words) -> bytes:
        """Counts of writes, 8 bytes each (see `writes_in`), and the words at these places; `counters` come first there.

        They are to be memory of this process: so ask `still` before.
        """
        words: bytes = self._take(indices).tobytes()
        return words if self._quick else self._asked_writes().tobytes() + words

    def words_at(self, words: Words, single: Words) -> bytes:
        """The words at the first places, then the bytes at the others, as `byte_index` gives them; likewise."""
        found: bytes = self._take(words).tobytes()
        return found + _memory_bytes().take(single).tobytes() if len(single) else found

    def copy(self, words: Words, target: Words) -> None:
        """Copy the words at these places; likewise."""
        self._take(words, out=target, mode="clip")  # the usual mode would go through a buffer

    def writes(self) -> Words:
        """How often each tensor was written to."""
        return writes_in(self.read(self.counters), len(self._tensors))

    def _asked(self) -> Where:
        storages = [tensor.untyped_storage() for tensor in self._tensors]
        addresses = [storage.data_ptr() for storage in storages]
        numbers = addresses, [one.nbytes() for one in storages], [one.storage_offset() for one in self._tensors]
        return Where(*(np.array(column, np.int64) for column in numbers))

    def _asked_writes(self) -> Words:
        return np.array([tensor._version for tensor in self._counted], np.int64)


def writes_in(content: bytes, count: int) -> Words:
    """How often each of so many tensors was written to, from what `TensorPlaces.read` has returned."""
    numbers: Words = np.frombuffer(content, np.int64, count) & _VERSION_BITS
    return numbers


def word_index(addresses: Words) -> Words:
    """Where `TensorPlaces.read` finds the word at each address, a multiple of 8."""
    return (addresses >> 3) - 1


def byte_index(addresses: Sequence[int]) -> Words:
    """Where `TensorPlaces.words_at` finds the byte at each address."""
    return np.array(addresses, np.int64) - _WORD


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse: a tensor that was swapped with it was let in
        return None


_UNCOUNTED = torch.empty(0)
"""Stands for tensors that were made under `torch.inference_mode`, whose writes nobody counts."""

_NOWHERE = _UNCOUNTED.untyped_storage()
"""Stands for the storage of tensors that have none."""


@functools.cache
def _memory() -> Words:
    return np.array(_AllMemory(), copy=False)


@functools.cache
def _memory_bytes() -> Words:
    found: Words = _memory().view(np.uint8)
    return found


@functools.cache
def _fields() -> _Fields | None:
    """Found once in a process; None if anything is not as it has to be, and then only the quicker way is lost."""
    try:
        fields = _found()
        return fields if _proved(fields) else None
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError, StopIteration) as error:
        _log.info("tensor addresses are read one by one, which is slower: %r", error)
        return None


def _found() -> _Fields:
    flat = torch.empty(0x9000)
    one, other, apart = torch.nn.Parameter(torch.empty(7)), torch.empty(11), flat[0x1235:]
    shares = one.detach()  # the same storage and the same counter
    # The first of the places that fit: what lies behind an object's end may hold the same by chance.
    impl = _object(id(one), 8).index(one._cdata)
    here, there, else_where = _object(one._cdata), _object(shares._cdata), _object(other._cdata)
    storage = here.index(one.untyped_storage()._cdata)
    shared = [at for at, word in enumerate(here) if word == there[at] != else_where[at] and at != storage]
    counter = next(at for at in shared if here[at] % _WORD == 0 and here[at] > 1 << 16)
    offset = _object(apart._cdata).index(0x1235)
    in_storage = _object(flat.untyped_storage()._cdata, 12)
    memory, nbytes = in_storage.index(flat.data_ptr()), in_storage.index(flat.untyped_storage().nbytes())
    before = _object(here[counter], 4)
    with torch.no_grad():
        for _ in range(5):
            one.add_(1)
    after = _object(here[counter], 4)
    version = next(at for at, (was, now) in enumerate(zip(before, after, strict=True)) if now - was == 5)
    return _Fields(impl, storage, counter, offset, memory, nbytes, version)


def _proved(fields: _Fields) -> bool:
    """Whether tensors of many kinds are read as they say of themselves, before and after they change."""
    tensors: list[torch.Tensor] = [
        torch.nn.Parameter(torch.ones(3, 4)), torch.arange(100)[7:], torch.empty(0), torch.tensor(1.5),
        torch.ones(8, 8, dtype=torch.bfloat16)[:, 3:5], torch.nn.Buffer(torch.ones(5, dtype=torch.bool)),
    ]  # fmt: skip
    before: TensorPlaces | None = None
    for _ in range(3):
        read, asked = TensorPlaces(tensors, fields=fields), TensorPlaces(tensors, public=True)
        same = all(map(np.array_equal, (*read.where, read.writes()), (*asked.where, asked.writes())))
        if not same or not read.still() or (before is not None and before.still()):
            return False
        before = read
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
    found: list[Any] = _memory().take(word_index(np.array(address, np.int64)) + np.arange(words)).tolist()
    return found
