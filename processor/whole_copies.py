"""A rank's units as they were at the end of a step, in files of shared memory that outlive the process.

A copy is begun at the step's end. What may change from then on is copied at once; weights and optimizer state, which
stay as they are until the next update, by a thread beside the training. Before that update the rank waits for it. A
loop may exchange its weights for a moment, to validate with averages of them, say, through `.data`, which nothing
counts. So a copy is compared with them, and they have to be what they were at the step's end before and after that.

Two files take turns, so that one is whole while the other is written over: whoever dies in the middle of a copy leaves
the one before. A file begins with a page of words:

    magic, sequence (odd while the rest is written), step, bytes of the description and their xxh3_64

The description (JSON) follows on the next page: each unit as a checkpoint's part has it, in two pieces, and the rank's
local state, if it was given. Then come the tensors, each on a 64-byte boundary. Everything that is read is checked:
another version may have written it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import queue
import struct
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy
import xxhash

from lastwords import threads
from lastwords.checkpoint.direct_io import as_bytes
from lastwords.checkpoint.document import compact, told
from lastwords.checkpoint.entries import LocalEntry, UnitEntry, entries, in_order
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import PartPath
from lastwords.checkpoint.meta import json_of
from lastwords.checkpoint.part import LocalState, TensorSource, UnitState
from lastwords.errors import FormatError, IncompleteError, LastWordsError, UnavailableError
from lastwords.liveness import paths
from lastwords.processor.box_layout import PAGE_BYTES, HeldFiles
from lastwords.vocabulary import WholeCopy

_log = logging.getLogger(__name__)

FILES = 2
_HEAD = struct.Struct("=8sQQQQ")
_MAGIC = b"LWCOPY\x00\x03"
_ALIGN = 64
_ROOM = 64 * 1024
_EXIT_S = 10.0
PATIENCE_S = 10.0
"""So long a copy that has been begun is waited for in an incident: what a device does may never end by then."""

_COMPARED_BYTES = 1 << 18

BESIDE_BYTES_MIN = 1 << 20
"""Less than this is copied at once: handing it to a thread would take as long."""

_LISTED = ("parameters", "buffers", "optimizer_state")
"""Fields of a unit's meta that last as long as the list of its tensors."""

_NOTHING: dict[str, Any] = {}

_NO_FILE = str(PartPath(0, 0, 1))
"""In the place of a part's file: the tensors follow."""


class WholeCopies:
    """Taken by the training thread at each step's end. `get` may be called by any thread while this rank is settled."""

    def __init__(
        self, rank: int, directory: Callable[[], Path], *, beside: bool = True, devices: Devices | None = None
    ) -> None:
        """directory: of this start of the job, in shared memory; known once the ranks have agreed.

        beside: whether a thread copies what it may, while the next step is computed. devices: copies what lies there.
        """
        self.rank = rank
        self._directory = directory
        self._beside = beside
        self._devices = devices
        self._files: list[_CopyFile | None] = [None] * FILES
        self._steps = [-1] * FILES
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._again: Callable[[], bool] | None = None
        self._descriptions = _Descriptions()
        self.problem = ""
        """Why the copies end with this process, if they do."""

    def begin(
        self,
        step: int,
        states: Mapping[str, UnitState],
        later: Collection[str],
        is_unmoved: Callable[[], bool],
        local: LocalState | None = None,
    ) -> None:
        """Copy the units as they are at the end of `step`, which may come twice. Without a copy training goes on.

        later: names of tensors that may be read until `finish`, unless something else than an update writes to them;
        then `is_unmoved`, which other threads ask, says False. local: for steps that the black box does not keep.
        """
        if not self._idle.wait(PATIENCE_S):
            _log.warning("rank %d could not copy step %d: the copy before it has not ended", self.rank, step)
            return
        self.finish()
        try:
            number, file, rest = self._take(step, states, later if self._beside else (), local)
            if sum(one.place.stop - one.place.start for one in rest) >= BESIDE_BYTES_MIN:
                copies = self._apart(file, rest)
                if self._hand_over(partial(self._fill, step, number, file, copies, is_unmoved)):
                    return
            for one in rest:
                file.put(one)
        except (OSError, MemoryError) as error:
            _log.warning("rank %d could not copy step %d: %s", self.rank, step, error)
            return
        self._seal(step, number, file)

    def _apart(self, file: _CopyFile, rest: Sequence[_CopyPiece]) -> _Copies:
        """What of it the host copies, and how the devices do it."""
        if self._devices is None:
            return _Copies(rest)
        away = [one for one in rest if self._devices.takes(one.source)]
        if not away:
            return _Copies(rest)
        here = [one for one in rest if not self._devices.takes(one.source)]
        mark = self._devices.mark([one.source for one in away])
        return _Copies(here, partial(self._devices.copy, mark, file, [one.place for one in away]))

    def _beside_training(self, fill: Callable[[], bool]) -> None:
        if not fill():
            self._again = fill

    def finish(self, patience_s: float | None = None) -> bool:
        """The copy that has been begun is whole, on return; False: there is none, since the weights are others by now.

        Training thread. A copy during which they were others, and are back, is made again. patience_s: there is none
        either if it takes longer, as it may where a device waits for a dead peer.
        """
        if not self._idle.wait(patience_s):
            return False
        again, self._again = self._again, None
        if again is None or again():
            return True
        _log.warning("rank %d has no copy of its last step, after which the loop has changed its weights", self.rank)
        return False

    def copy(self, step: int, states: Mapping[str, UnitState], local: LocalState | None = None) -> None:
        """`begin`, all at once. OSError, MemoryError."""
        self.finish()
        number, file, _ = self._take(step, states, (), local)
        self._seal(step, number, file)

    def _hand_over(self, fill: Callable[[], bool]) -> bool:
        """Whether there is a thread that does it."""
        if self._tasks is None:
            tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            try:
                threads.start(_work, tasks, self._idle, name="lastwords-copy")
            except UnavailableError as error:
                _log.warning("rank %d copies its state within each step's end: %s", self.rank, error)
                self._beside = False
                return False
            weakref.finalize(self, _end, tasks, self._idle)
            self._tasks = tasks
        try:
            self._idle.clear()
            self._tasks.put(partial(self._beside_training, fill))
        except BaseException:  # of a signal's handler: handed to the caller
            self._idle.set()
            raise
        return True

    def _fill(
        self,
        step: int,
        number: int,
        file: _CopyFile,
        copies: _Copies,
        is_unmoved: Callable[[], bool],
    ) -> bool:
        """The rest of a copy; False where its weights have been others meanwhile. Any thread."""
        try:
            for one in copies.here:
                file.put(one)
            whole = copies.away() and is_unmoved() and all(file.has(one) for one in copies.here) and is_unmoved()
        except Exception as error:  # handed to the log: training goes on, without a copy of this step
            _log.warning("rank %d could not copy step %d: %s", self.rank, step, error)
            return True
        if whole:
            self._seal(step, number, file)
        return whole

    def _seal(self, step: int, number: int, file: _CopyFile) -> None:
        if file is self._files[number]:  # else it was forsaken meanwhile
            file.seal()
            self._steps[number] = step

    def forsake(self) -> None:
        """What has been copied must not be used."""
        self._idle.wait(PATIENCE_S)
        self._again = None
        for number, file in enumerate(self._files):
            if file is not None:
                file.void()
            self._files[number], self._steps[number] = None, -1
            self._unlink(number)

    def _path(self, number: int) -> Path:
        return self._directory() / f"rank_{self.rank}.copy{number}"

    def _unlink(self, number: int) -> None:
        """A file that is written no more would be taken for whole."""
        with contextlib.suppress(OSError):
            self._path(number).unlink()

    def _take(
        self, step: int, states: Mapping[str, UnitState], later: Collection[str], local: LocalState | None
    ) -> tuple[int, _CopyFile, list[_CopyPiece]]:
        """A copy that is not sealed, and what it lacks: the tensors of these names."""
        number = self._steps.index(step) if step in self._steps else self._steps.index(min(self._steps))
        self._steps[number] = -1
        described, nbytes = self._descriptions.of(states, local)
        file = self._files[number]
        if file is None or file.nbytes < nbytes:
            file = self._files[number] = self._made(number, nbytes)
        file.begin(step, described)
        rest, at = [], _up(PAGE_BYTES + len(described))
        for spec, source in _tensors(states, local):
            piece = _CopyPiece(spec.name, slice(at, at + spec.nbytes), source)
            if spec.name in later:
                rest.append(piece)
            else:
                file.put(piece)
            at = _up(piece.place.stop)
        return number, file, rest

    def get(self, unit: str, step: int) -> UnitState | None:
        """A unit of this rank at the end of `step`; None if no copy is of that, or none comes to be whole."""
        found = self._read(step)
        return None if found is None else found.units.get(unit)

    def local(self, step: int) -> LocalState | None:
        """What this rank had for itself at the end of `step`; likewise."""
        found = self._read(step)
        return None if found is None else found.local

    def _read(self, step: int) -> _Content | None:
        if step not in self._steps:
            self._idle.wait(PATIENCE_S)
        if step not in self._steps:
            return None
        file = self._files[self._steps.index(step)]
        assert file is not None
        return file.read(step)

    def _made(self, number: int, nbytes: int) -> _CopyFile:
        """A file with some more room than is needed now, since the description grows; where there is none, memory."""
        nbytes += nbytes // 64 + _ROOM
        try:
            return _CopyFile.create(self._path(number), nbytes)
        except OSError as error:
            self._unlink(number)
            if not self.problem:
                self.problem = (
                    f"no other process can read rank {self.rank}'s copies: no room for {nbytes} bytes in shared "
                    f"memory ({error.strerror}); enlarge /dev/shm (docker: --shm-size)"
                )
                _log.warning("%s", self.problem)
            return _CopyFile(mmap.mmap(-1, nbytes))


def whole_copies(files: HeldFiles) -> tuple[WholeCopy, ...]:
    """Those that are in this host's memory now. Any thread."""
    return tuple(WholeCopy(rank, step) for rank, step, _ in _whole(files))


def read_copy(files: HeldFiles, unit: str, step: int) -> UnitState:
    """A unit at the end of a step, from a copy of any rank of this host. IncompleteError if there is none, OSError."""
    for _, found in _contents(files, step):
        if unit in found.units:
            return found.units[unit]
    raise IncompleteError(f"no copy of the unit {unit!r} at step {step} is in this host's memory", missing=(unit,))


def read_local(files: HeldFiles, rank: int, step: int) -> LocalState | None:
    """What a rank of this host had for itself at the end of a step, if a copy of that is here. OSError."""
    return next((found.local for of, found in _contents(files, step) if of == rank), None)


def _contents(files: HeldFiles, step: int) -> Iterator[tuple[int, _Content]]:
    """Rank and content of each copy of a step that can be read."""
    for rank, of, path in _whole(files):
        if of != step:
            continue
        try:
            yield rank, _CopyFile.open(files.open(path), str(path)).read(step, str(path))
        except (FileNotFoundError, LastWordsError) as error:
            _log.warning("%s cannot be read: %s", path, error)


def _whole(files: HeldFiles) -> Iterator[tuple[int, int, Path]]:
    """Rank, step and file of each copy that is whole."""
    for path in files.copies():
        if (step := _step_of(files, path)) is not None:
            yield int(path.stem.removeprefix("rank_")), step, path


def _step_of(files: HeldFiles, path: Path) -> int | None:
    """The step of a file that is whole."""
    try:
        fd = files.open(path)
    except OSError:
        return None
    try:
        head = os.pread(fd, _HEAD.size, 0)
    finally:
        os.close(fd)
    if len(head) < _HEAD.size:
        return None
    magic, sequence, step, *_ = _HEAD.unpack(head)
    return step if magic == _MAGIC and sequence and not sequence % 2 else None


class Devices(Protocol):
    """Copies what sources of other memory than the host's have into a file."""

    def takes(self, source: object) -> bool:
        """Whether a source is of that kind."""

    def mark(self, sources: Sequence[Any]) -> Any:
        """What they are from now on is to be copied. Training thread."""

    def copy(self, mark: Any, file: _CopyFile, places: Sequence[slice]) -> bool:
        """Copy them there; False where they have been something else meanwhile. Any thread, one at a time."""


class _Content(NamedTuple):
    units: dict[str, UnitState]
    local: LocalState | None


class _CopyPiece(NamedTuple):
    """A tensor, where it goes in a file, and where it comes from."""

    name: str
    place: slice
    source: Any


class _Copies(NamedTuple):
    """What is still to be copied: pieces in the host's memory, and the rest."""

    here: Sequence[_CopyPiece]
    away: Callable[[], bool] = lambda: True


class _CopyFile:
    """One file, or as much memory. Its mapping stays as long as anything that was read from it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.bytes = numpy.frombuffer(memory, numpy.uint8)
        self._sequence = 0
        self._said = 0, 0, 0

    @property
    def nbytes(self) -> int:
        return len(self._memory)

    @classmethod
    def create(cls, path: Path, nbytes: int) -> _CopyFile:
        """A new file with its memory reserved; an older one of that name is replaced. OSError."""
        with paths.replacing(path) as fd:
            os.posix_fallocate(fd, 0, nbytes)  # without it a later store would end the process where there is no room
            file = cls(mmap.mmap(fd, nbytes))
        os.close(fd)
        return file

    @classmethod
    def open(cls, fd: int, where: str) -> _CopyFile:
        """Another process' file, to be read; the descriptor is closed. OSError, FormatError."""
        try:
            if os.fstat(fd).st_size < PAGE_BYTES:
                raise FormatError(f"{where} is no copy of a rank's units: it is too short")
            return cls(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
        finally:
            os.close(fd)

    def begin(self, step: int, described: bytes) -> None:
        """Replace what is there: no copy, until it is sealed."""
        self._sequence += 1 + self._sequence % 2  # odd
        self._said = step, len(described), xxhash.xxh3_64_intdigest(described)
        self._say(*self._said)
        self._memory[PAGE_BYTES : PAGE_BYTES + len(described)] = described

    def put(self, piece: _CopyPiece) -> None:
        """A tensor in its place."""
        source = piece.source
        self.bytes[piece.place] = as_bytes(source() if callable(source) else source)

    def has(self, piece: _CopyPiece) -> bool:
        """Whether a tensor is as it was put there."""
        source = piece.source
        there, here = self.bytes[piece.place], as_bytes(source() if callable(source) else source)
        parts = range(0, len(there), _COMPARED_BYTES)
        return all(numpy.array_equal(there[a : a + _COMPARED_BYTES], here[a : a + _COMPARED_BYTES]) for a in parts)

    def seal(self) -> None:
        """All is there."""
        self._sequence += 1
        self._say(*self._said)

    def _say(self, step: int, nbytes: int, checksum: int) -> None:
        self._memory[: _HEAD.size] = _HEAD.pack(_MAGIC, self._sequence, step, nbytes, checksum)

    def void(self) -> None:
        """What is there is no copy any more."""
        self._sequence += 1 + self._sequence % 2
        self._say(0, 0, 0)

    def read(self, step: int, where: str = "a copy") -> _Content:
        """What is in it; the tensors are this memory itself. FormatError."""
        magic, sequence, of, nbytes, checksum = _HEAD.unpack_from(self._memory)
        if magic != _MAGIC or sequence % 2 or of != step or PAGE_BYTES + nbytes > self.nbytes:
            raise FormatError(f"{where} is no whole copy of step {step}")
        described = self._memory[PAGE_BYTES : PAGE_BYTES + nbytes]
        if xxhash.xxh3_64_intdigest(described) != checksum:
            raise FormatError(f"{where} is damaged: its description is not the one that was written")
        at = _up(PAGE_BYTES + nbytes)

        def tensors(specs: Sequence[TensorSpec]) -> list[tuple[TensorSpec, TensorSource]]:
            nonlocal at
            found: list[tuple[TensorSpec, TensorSource]] = []
            for spec in specs:
                if at + spec.nbytes > self.nbytes:
                    raise FormatError(f"{where} ends before {spec.name}")
                found.append((spec, self.bytes[at : at + spec.nbytes].data))
                at = _up(at + spec.nbytes)
            return found

        entries, own = _Descriptions.read(described, where)
        units = {
            unit: UnitState(tensors(one.tensors), one.meta, version=(where, sequence)) for unit, one in entries.items()
        }
        local = None if own is None else LocalState(tensors(own.tensors), own.meta, own.exact, own.reasons)
        return _Content(units, local)


def _work(tasks: queue.SimpleQueue[Callable[[], None] | None], idle: threading.Event) -> None:
    while (task := tasks.get()) is not None:
        with contextlib.suppress(Exception):  # a user's log handler may raise: there is no copy then
            task()
        idle.set()
        del task  # and the tensors in it, and perhaps the last reference to whoever would wait in `_end`


def _end(tasks: queue.SimpleQueue[Callable[[], None] | None], idle: threading.Event) -> None:
    """Also at the interpreter's exit: a thread that is inside torch by then would abort the process."""
    tasks.put(None)
    idle.wait(_EXIT_S)


class _Descriptions:
    """What copies say of their units: of each what a step leaves as it is, and then the rest of all.

    The text of the former is made anew only where not all is the very same object as the last time.
    """

    def __init__(self) -> None:
        self._lasting: dict[str, tuple[list[Any], str]] = {}

    def of(self, states: Mapping[str, UnitState], local: LocalState | None) -> tuple[bytes, int]:
        """As JSON; and how many bytes the whole takes."""
        lasting = [self._of_list(unit, state) for unit, state in states.items()]
        rest = {}
        for unit, state in states.items():
            meta = replace(state.meta, parameters=_NOTHING, buffers=_NOTHING, optimizer_state=_NOTHING)
            rest[unit] = UnitEntry(0, _NO_FILE, (), meta.to_json())
        own = None
        if local is not None:
            specs = tuple(spec for spec, _ in local.tensors)
            own = LocalEntry(0, _NO_FILE, specs, json_of(local.meta), local.exact, local.reasons)
        raw = f"[{', '.join((*lasting, compact(rest), compact(own)))}]".encode()
        at = _up(PAGE_BYTES + len(raw))
        for spec, _ in _tensors(states, local):
            at = _up(at + spec.nbytes)
        return raw, at

    def _of_list(self, unit: str, state: UnitState) -> str:
        said = {name: getattr(state.meta, name) for name in _LISTED}
        found = [*said.values(), *(spec for spec, _ in state.tensors)]
        known, text = self._lasting.get(unit, ([], ""))
        if len(found) != len(known) or not all(map(is_, found, known)):
            text = compact(UnitEntry(0, _NO_FILE, tuple(spec for spec, _ in state.tensors), said))
            self._lasting[unit] = found, text
        return text

    @staticmethod
    def read(raw: bytes | memoryview, where: str) -> tuple[dict[str, UnitEntry], LocalEntry | None]:
        """The units in their order, in which their tensors lie in the file. FormatError."""
        try:
            *lasting, rest, own = json.loads(bytes(raw))
            whole = {
                unit: entry | {"tensors": one["tensors"], "meta": entry["meta"] | one["meta"]}
                for one, (unit, entry) in zip(lasting, rest.items(), strict=True)
            }
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
            raise FormatError(f"{where} is damaged: {error!r}") from error
        with told(where):
            units = entries(in_order(whole, "units"), UnitEntry, "units")
            local = entries(in_order({} if own is None else {"own": own}, "local"), LocalEntry, "local")
        return units, local.get("own")


def _tensors(states: Mapping[str, UnitState], local: LocalState | None) -> Iterator[tuple[TensorSpec, TensorSource]]:
    """In the order in which they lie in a file."""
    for state in states.values():
        yield from state.tensors
    yield from () if local is None else local.tensors


def _up(at: int) -> int:
    return -(-at // _ALIGN) * _ALIGN
