"""The writers of a rank: one in an incident, which reads the live state, and one behind the training, from a copy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from lastwords import clock
from lastwords.errors import UnavailableError
from lastwords.processor.copied_state import CopiedState, CopyMemory
from lastwords.processor.events import Event, SaveErrored, SaveFinished, SaveProgressed
from lastwords.processor.saver import SaveJob, SaverSpec
from lastwords.vocabulary import PERIODIC, Save, Stand

_log = logging.getLogger(__name__)


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
        job = SaveJob(
            order,
            stand,
            spec,
            progress=lambda o, n, syncing: self._handle(SaveProgressed(o.incident, o.attempt, n, syncing)),
            done=lambda o, n: self._handle(SaveFinished(o.incident, o.attempt, n)),
            failed=lambda o, why, storage: self._handle(SaveErrored(o.incident, o.attempt, why, storage)),
            after=after,
        )
        job.start()
        return job
