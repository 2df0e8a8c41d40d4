"""What one rank's core remembers, and what it can be asked. Pure; the calls and events are in `processor.core`."""

from __future__ import annotations

from lastwords.processor.correspondence import Correspondence
from lastwords.processor.events import ProcessorOptions
from lastwords.processor.grace import Grace
from lastwords.processor.participation import Outbox, Participation
from lastwords.processor.phases import ENDED_PHASES, row
from lastwords.processor.snapshots import Snapshots
from lastwords.vocabulary import Phase, Save, Stand

_COMPUTING, _READY, _UPDATED = Phase.COMPUTING, Phase.READY, Phase.UPDATED
_END_ROW = row("try_end_step")


class RankState:
    """State of one rank in the protocol, and the queries on it. Not thread-safe: the shell has the lock."""

    def __init__(
        self, rank: int, generation: int, start_step: int = 0, options: ProcessorOptions | None = None
    ) -> None:
        self.rank = rank
        self.generation = generation
        self.options = options or ProcessorOptions()
        self._phase = _COMPUTING
        self._ended_step = start_step
        self._outbox = Outbox()
        self._part = Participation(rank, generation, self._outbox)
        self._snapshots = Snapshots(rank, generation, self._outbox)
        self._said = Correspondence(self._part, self._outbox, self.options)
        self._welcomed = False
        self._released = False
        self._leaving = False
        self._now_s = 0.0
        self._step_end_grace = Grace(self.options.step_end_grace_s)
        self._update_grace = Grace(self.options.update_grace_s)
        self._has_copy = self.options.has_copy
        self._retreated = False  # in this incident this rank stands by its copy of the last step

    # ------------------------------------------------------------------ queries

    @property
    def phase(self) -> Phase:
        """That of the stand."""
        return self._phase

    @property
    def step(self) -> int:
        """That of the stand: the one that was ended last, or the one under way."""
        return self._ended_step if self._phase in ENDED_PHASES else self._ended_step + 1

    @property
    def stand(self) -> Stand:
        """Exactly where this rank stands."""
        return Stand(self._phase, self.step)

    @property
    def settled_stand(self) -> Stand:
        """What the controller is told: the stand, or that of the copy which this rank has gone back to."""
        return Stand(_COMPUTING, self._ended_step) if self._retreated else self.stand

    @property
    def ended_step(self) -> int:
        """Newest global step that this rank has ended."""
        return self._ended_step

    @property
    def frozen(self) -> bool:
        """True from Freeze to Resume: no update may begin. An Exit ends it with the process."""
        return self._part.incident != 0

    @property
    def incident(self) -> int:
        """The incident in which this rank is frozen, 0 if none."""
        return self._part.incident

    @property
    def may_train(self) -> bool:
        """True if the training thread may go on with its loop."""
        return not (self._part.incident or self._leaving or self._said.left or self._said.raised)

    @property
    def copy_due(self) -> Save | None:
        """The periodic checkpoint for which the state has to be copied now, before anything of it moves on."""
        order = self._snapshots.due(self._ended_step)
        if order is None or self._phase not in ENDED_PHASES or self._part.incident or self._leaving:
            return None
        return order

    @property
    def may_end_step(self) -> bool:
        """True if `try_end_step` would end the step now.

        A rank that has settled in UPDATED stays there: its committed rank-local state must not move any more,
        because another process may be reading it.
        """
        if self._leaving or self._released or _END_ROW[self._phase] is None:
            return False
        return not self._part.incident or (self._phase is _UPDATED and self._part.settled is None)

    @property
    def may_proceed(self) -> bool:
        """True if `try_update` would answer True although this rank is frozen."""
        return self._phase is _READY and not self._leaving and self._part.proceed_step == self._ended_step + 1

    @property
    def loop_open(self) -> bool:
        """True once all ranks have agreed on the loop that `begin_loop` announced."""
        return self._said.loop_open

    @property
    def steps_done(self) -> bool:
        """True if every step of the loop that `begin_loop` announced has ended: what comes now is the user's alone."""
        loop = self._said.loop
        last = 0 if loop is None else loop.steps_per_epoch * loop.epochs
        return 0 < last <= self._ended_step and self._phase in ENDED_PHASES

    @property
    def asked_to_stop(self) -> bool:
        """True once this process has got a stop signal that was reported."""
        return self._said.signalled is not None

    @property
    def welcomed(self) -> bool:
        """True once the controller has said that all ranks are registered."""
        return self._welcomed

    @property
    def asks(self) -> bool:
        """True if this rank waits for the controller, was asked to stop, or knows of a death."""
        return self._said.asks

    @property
    def needs_controller(self) -> bool:
        """True until this rank knows how its job ends."""
        return not (self._released or self._leaving)

    @property
    def released(self) -> bool:
        """True once every rank has left the loop; this process may go on after it."""
        return self._released

    @property
    def leaving(self) -> bool:
        """True once this process has been told to end."""
        return self._leaving
