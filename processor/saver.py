"""Writes this rank's part of a checkpoint in a thread of its own, while the training thread is parked or stuck."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy

from lastwords import clock, threads
from lastwords.checkpoint import layout, part
from lastwords.checkpoint.direct_io import as_bytes
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.part import LocalState, TensorSource, UnitState
from lastwords.checkpoint.system import SyncWatch
from lastwords.errors import IncompleteError, StorageError, UnavailableError, named
from lastwords.processor.events import Event, SaveErrored, SaveFinished, SaveProgressed
from lastwords.vocabulary import PERIODIC, Save, Stand

_log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.25
"""Progress goes out four times a second: well inside every progress time-out, and no load."""

SYNC_INTERVAL_S = 1.0
"""So often a writer inside fsync or close is reported to be there, by another thread: its own cannot."""


NICEST = 19

READS_MAX = 5
"""So often a part is written because the loop has changed what was read. It is soon stuck: a rank has died."""


class Position(NamedTuple):
    """Epoch and step within it (both 1-based, 0 before the first) of a global step."""

    epoch: int
    step: int


class StateSource(Protocol):
    """Where the writer finds the state. Called in the writer's thread while this rank is settled."""

    def position(self, step: int) -> Position | None:
        """What the loop calls global step `step`; None if it has not said so yet."""
        ...

    def unit_state(self, unit: str, step: int, stand: Stand) -> part.UnitState:
        """Tensors of the unit, or of a share of one, as they are at `step`; CheckpointError if it is not held here."""
        ...

    def copied_unit(self, unit: str, step: int) -> part.UnitState:
        """The same from a whole copy of any rank of this host, dead or alive; CheckpointError if there is none."""
        ...

    def local_states(self, ranks: Sequence[int], step: int) -> Mapping[int, part.LocalState]:
        """Rank-local state of ranks of this host at `step`, read from their black boxes."""
        ...

    def facts(self, step: int) -> dict[str, Any]:
        """What a resume after `step` has to know about the run (versions, bucket order, data options)."""
        ...


class _CancelledError(Exception):
    """Raised inside the writer to stop it; never leaves this module."""


@dataclass(frozen=True, slots=True)
class SaverSpec:
    """Where parts go and where their content comes from. `roots` are indexed by `Save.target`."""

    rank: int
    job: str
    roots: tuple[Path, ...]
    source: StateSource


class SaveJob:
    """One order to save, carried out by a daemon thread, which ends with SaveFinished or SaveErrored.

    handle: takes these, and SaveProgressed before; called by the writer and by a thread of its own. After `cancel()`
    nothing more comes.
    """

    def __init__(
        self,
        order: Save,
        stand: Stand,
        spec: SaverSpec,
        handle: Callable[[Event], None],
        *,
        after: SaveJob | None = None,
        watch: SyncWatch | None = None,
    ) -> None:
        self.order = order
        self._stand = stand
        self._spec = spec
        self._after = after  # an earlier attempt's job, cancelled: it must be off the files before this one starts
        self._handle = handle
        self._cancelled = threading.Event()
        self._over = threading.Event()
        self._watch = watch or SyncWatch()
        self._written = 0
        self._reported_mono_s = clock.mono_s()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start writing. UnavailableError if no thread can be started; then nothing is told."""
        self._thread = threads.start(self._run, name="lastwords-saver")

    def cancel(self) -> None:
        """Stop at the next chunk; what was written stays in the temporary directory, for the controller to discard."""
        self._cancelled.set()

    @property
    def ended(self) -> bool:
        """Whether it reads and writes nothing any more."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended; a cancelled one ends at its next chunk."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        if self.order.incident == PERIODIC:
            _yield_to_training()
        try:
            if self._after is not None:
                self._after.wait()
                self._after = None
            threads.start(self._report_syncs, name="lastwords-saver-sync")
            written = self._write()
        except _CancelledError:
            return
        except StorageError as error:
            self._fail(str(error), storage=True)
        except (OSError, MemoryError, RuntimeError, UnavailableError) as error:
            # No descriptor for a black box, no memory (torch says RuntimeError), no thread: perhaps later.
            _log.warning(
                "rank %s could not write its files of step %s", self._spec.rank, self.order.step, exc_info=True
            )
            self._fail(named(error), storage=True)
        except Exception as error:  # outermost loop of this thread: whatever it was, the controller must hear of it
            _log.exception("rank %s could not write its files of step %s", self._spec.rank, self.order.step)
            self._fail(named(error), storage=False)
        else:
            self._over.set()
            if not self._cancelled.is_set():
                self._handle(SaveFinished(self.order.incident, self.order.attempt, written))
        finally:
            self._over.set()

    def _report_syncs(self) -> None:
        while not self._over.wait(SYNC_INTERVAL_S) and not self._cancelled.is_set():
            try:
                if self._watch.inside:
                    self._say_progress(syncing=True)
            except Exception:  # outermost loop of this thread: the controller has to hear of the next one
                _log.exception("rank %s could not say that it syncs step %s", self._spec.rank, self.order.step)

    def _fail(self, reason: str, storage: bool) -> None:
        self._over.set()
        if not self._cancelled.is_set():
            self._handle(SaveErrored(self.order.incident, self.order.attempt, reason, storage))

    def _progress(self, written: int) -> None:
        if self._cancelled.is_set():
            raise _CancelledError
        self._written = written
        now_mono_s = clock.mono_s()
        if now_mono_s - self._reported_mono_s >= PROGRESS_INTERVAL_S:
            self._reported_mono_s = now_mono_s
            self._say_progress(syncing=False)

    def _say_progress(self, *, syncing: bool) -> None:
        self._handle(SaveProgressed(self.order.incident, self.order.attempt, self._written, syncing))

    def _write(self) -> int:
        order = self.order
        if not 0 <= order.target < len(self._spec.roots):
            raise StorageError(f"rank {self._spec.rank} has no directory number {order.target}: set fallback_path")
        for _ in range(READS_MAX):
            units = self._units()
            written = self._write_part(units)
            # The loop may compute on while its state is read, and write what it has never written before; and the owner
            # of a copy may live, and write it over.
            if _reasons(self._units()) == _reasons(units):
                return written.file.bytes
            part.remove_part(self._directory, written, self._watch)
            _log.info(
                "rank %s reads its state of step %s again: it changed while it was read", self._spec.rank, order.step
            )
        raise IncompleteError("state that the loop was changing could not be read consistently", missing=order.units)

    @property
    def _directory(self) -> Path:
        order = self.order
        name = layout.TemporaryName(order.step, self._spec.job, order.generation, order.incident, order.attempt)
        return name.under(self._spec.roots[order.target])

    def _units(self) -> dict[str, part.UnitState]:
        source, order = self._spec.source, self.order
        return {
            unit: source.copied_unit(unit, order.step)
            if unit in order.copied
            else source.unit_state(unit, order.step, self._stand)
            for unit in order.units
        }

    def _write_part(self, units: dict[str, part.UnitState]) -> part.RankPart:
        order, source = self.order, self._spec.source
        locals_ = source.local_states(order.local_ranks, order.step)
        position = source.position(order.step) or _named_by(locals_.values())
        epoch, step_of_epoch = position or (layout.EPOCH_UNKNOWN, order.step)
        return part.write_part(
            self._directory,
            rank=self._spec.rank,
            epoch=epoch,
            step=step_of_epoch,
            global_step=order.step,
            units=units,
            locals=locals_,
            facts=source.facts(order.step),
            progress=self._progress,
            job=self._spec.job,
            os=self._watch,
        )


def _yield_to_training() -> None:
    """This thread, and those that it starts, get the processor when nobody else wants it: training goes on meanwhile.

    On Linux, setpriority() with a thread id affects that thread only (setpriority(2), "C library/kernel differences").
    """
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICEST)
    except OSError as error:
        _log.info("the writer behind the training has the training's priority: %s", error)


def _reasons(units: Mapping[str, part.UnitState]) -> list[tuple[object, ...]]:
    return [(state.version, *state.meta.reasons) for state in units.values()]


def _named_by(locals_: Iterable[part.LocalState]) -> Position | None:
    """What a rank that has ended the step calls it, by its black box."""
    for local in locals_:
        said = local.meta.document
        if said.epoch is not None and said.step is not None:
            return Position(said.epoch, said.step)
    return None


# The state of a rank at one step, copied into memory of its own, for a checkpoint that is written while it trains.


class CopyMemory:
    """Host memory that one copy after the other is taken into; it is allocated once, and grows with the state."""

    def __init__(self) -> None:
        self._buffers: dict[str, numpy.ndarray[Any, numpy.dtype[numpy.uint8]]] = {}
        self._used: dict[str, numpy.ndarray[Any, numpy.dtype[numpy.uint8]]] = {}

    def begin(self) -> None:
        """A new copy: what the one before used may be overwritten."""
        self._buffers, self._used = {**self._buffers, **self._used}, {}

    def end(self) -> None:
        """The copy is taken: memory of tensors that are gone is given back."""
        self._buffers = {}

    def copy(self, spec: TensorSpec, source: TensorSource) -> memoryview:
        """The tensor's bytes, which nothing else writes."""
        memory = self._buffers.get(spec.name)
        if memory is None or memory.nbytes != spec.nbytes:
            memory = numpy.empty(spec.nbytes, numpy.uint8)
        memory[:] = as_bytes(source() if callable(source) else source)
        self._used[spec.name] = memory
        return memory.data


class CopiedState:
    """`StateSource` of one order: everything that it names, as it was when this was made. Any thread."""

    def __init__(self, source: StateSource, order: Save, stand: Stand, memory: CopyMemory) -> None:
        """Copies, in the training thread. Raises what `source` raises."""
        memory.begin()
        step = order.step
        units = {unit: source.unit_state(unit, step, stand) for unit in order.units}
        locals_ = source.local_states(order.local_ranks, step)
        self._units = {unit: replace(one, tensors=_copies(one.tensors, memory)) for unit, one in units.items()}
        self._locals = {rank: replace(one, tensors=_copies(one.tensors, memory)) for rank, one in locals_.items()}
        self._position = source.position(step)
        self._facts = source.facts(step)
        memory.end()

    def position(self, step: int) -> Position | None:
        return self._position

    def unit_state(self, unit: str, step: int, stand: Stand) -> UnitState:
        return self._units[unit]

    def copied_unit(self, unit: str, step: int) -> UnitState:
        """Not asked for: an order that this is made of names none."""
        return self._units[unit]

    def local_states(self, ranks: Sequence[int], step: int) -> Mapping[int, LocalState]:
        return self._locals

    def facts(self, step: int) -> dict[str, Any]:
        return self._facts


def _copies(tensors: Sequence[tuple[TensorSpec, TensorSource]], memory: CopyMemory) -> list[tuple[TensorSpec, Any]]:
    return [(spec, memory.copy(spec, source)) for spec, source in tensors]


# The writers of a rank: one in an incident, which reads the live state, and one behind the training, from a copy.


class Writers:
    """Starts and ends `SaveJob`s; `handle` gets what they have to say, from their threads.

    `copy` belongs to the training thread; `start` and `cancel` are called with the agent's lock.
    """

    def __init__(self, spec: SaverSpec, handle: Callable[[Event], None]) -> None:
        self._spec = spec
        self._handle = handle
        self._in_incident: SaveJob | None = None
        self._behind: SaveJob | None = None
        self._copied: CopiedState | None = None
        self._memory = CopyMemory()

    def copy(self, order: Save, stand: Stand) -> str:
        """Copy the state that `order` names; why that was impossible, or nothing."""
        if self._behind is not None and not self._behind.ended:
            return "the checkpoint before it is still being written"
        try:
            self._copied = CopiedState(self._spec.source, order, stand, self._memory)
        except Exception as error:  # handed to the controller, and training goes on: it is only a checkpoint
            _log.warning("rank %d could not copy step %d", self._spec.rank, order.step, exc_info=True)
            return f"{type(error).__name__}: {error}"
        return ""

    def start(self, order: Save, stand: Stand) -> SaveErrored | None:
        """Write what `order` names: the copy, if it is a periodic checkpoint, otherwise the state as it is.

        An event if no thread can be started for that, which passes: the controller asks again, or somebody else.
        """
        try:
            if order.incident == PERIODIC:
                assert self._copied is not None, "it is asked for only after `copy`"
                spec, self._copied = replace(self._spec, source=self._copied), None
                self._behind = self._job(order, stand, spec, self._behind)
            else:
                self._in_incident = self._job(order, stand, self._spec, self._in_incident)
        except UnavailableError as error:
            return SaveErrored(order.incident, order.attempt, str(error), storage=True)
        return None

    def cancel(self, incident: int) -> None:
        """Stop the writer, if there is one."""
        job = self._behind if incident == PERIODIC else self._in_incident
        if job is not None:
            job.cancel()

    @property
    def busy(self) -> bool:
        """Whether one still reads or writes; a cancelled one does until its next chunk."""
        return not all(job is None or job.ended for job in (self._in_incident, self._behind))

    def wait(self, timeout_s: float) -> None:
        """Wait for both to end, not longer than `timeout_s`: a file system may hang."""
        deadline_mono_s = clock.mono_s() + timeout_s
        for job in filter(None, (self._in_incident, self._behind)):
            job.wait(max(deadline_mono_s - clock.mono_s(), 0.0))

    def _job(self, order: Save, stand: Stand, spec: SaverSpec, after: SaveJob | None) -> SaveJob:
        job = SaveJob(order, stand, spec, self._handle, after=after)
        job.start()
        return job
