"""One incident's attempts to save: who writes, what is finished, what may be thrown away.

A writer's part is kept across attempts as long as the step stays the same, even if the writer dies after it has
finished: the file is on disk, for whenever its directory is chosen again. Every attempt has a directory of its own,
so that a writer which was given up but still runs can never write into a directory that is about to be published;
kept parts are moved over when all parts are there. Each new attempt after a failure has lost a rank, or a (rank,
directory) pair, so their number is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lastwords.controller.context import JobContext
from lastwords.controller.decision import Decision, Part
from lastwords.controller.events import STORAGE_FAILURES_MAX, Discard, PartPlan, StartPublish, StartVerify
from lastwords.vocabulary import Save


@dataclass(slots=True)
class Writing:
    """A part that is being written. `answered`: the writer has said that it has the order."""

    part: Part
    order: Save
    deadline_s: float
    bytes_written: int = -1
    answered: bool = False


class Saving:
    """Writers, parts and directories of one incident."""

    def __init__(self, context: JobContext, incident: int) -> None:
        self._context = context
        self._incident = incident
        self.attempt = 0
        self.writing: dict[int, Writing] = {}
        self.finished: list[Part] = []
        self.refused: dict[int, set[int]] = {}  # rank -> targets that its writes failed on
        self.cannot_copy: set[int] = set()  # ranks that failed to copy black boxes
        self.closed_targets: set[int] = set()
        self._failures: dict[int, int] = {}  # target -> how often it has refused
        self.storage_reason = ""
        self.plan: tuple[Part, ...] = ()
        self.step = 0
        self.target = 0
        self.lost_local_ranks: tuple[int, ...] = ()
        self._directories: dict[int, tuple[int, int]] = {}  # attempt -> (step, target)
        self._spared: set[int] = set()  # attempts whose directory must not be removed
        self._publishing: set[int] = set()

    # ------------------------------------------------------------------ writing

    def parts(self) -> list[Part]:
        """Parts that a new decision may keep."""
        return self.finished + [writing.part for _, writing in sorted(self.writing.items())]

    def begin(self, decision: Decision, reason: str) -> None:
        """Carry out a decision: order new parts, keep what it keeps, throw away what it does not need."""
        context = self._context
        self.step, self.target = decision.step, decision.target
        self.lost_local_ranks = decision.lost_local_ranks
        # A directory of its own even if nothing new is to be written: in the one before, a writer that was given up
        # has left half a file, or is still writing it.
        self.attempt += 1
        self._directories[self.attempt] = (decision.step, decision.target)
        new = [
            Part(rank, self.attempt, decision.step, decision.target, work.units, work.local_ranks)
            for rank, work in sorted(decision.writers.items())
        ]
        self.plan = (*decision.kept, *new)
        self.writing = {rank: writing for rank, writing in self.writing.items() if writing.part in decision.kept}
        # Parts in another directory stay: if this one fails too, they may be all that is left of a dead writer.
        self.finished = [part for part in self.finished if part.step == self.step]
        self._discard_unneeded()
        writers = tuple(sorted({part.rank for part in new} | set(self.writing)))
        for part in new:
            order = Save(
                generation=context.generation,
                incident=self._incident,
                attempt=part.attempt,
                step=part.step,
                units=part.units,
                local_ranks=part.local_ranks,
                target=part.target,
                writers=writers,
                reason=reason,
            )
            deadline_s = context.now_s + context.options.progress_timeout_s
            self.writing[part.rank] = Writing(part, order, deadline_s)
            context.send(part.rank, order)
        self._arm()

    def _arm(self) -> None:
        if self.writing:
            self._context.timers.set_earlier("writers", min(writing.deadline_s for writing in self.writing.values()))
        else:
            self._context.timers.clear("writers")

    def progress(self, rank: int, attempt: int, bytes_written: int) -> None:
        """A writer has written more; that renews its deadline."""
        writing = self._of(rank, attempt)
        if writing is None:
            return
        writing.answered = True
        if bytes_written > writing.bytes_written:
            writing.bytes_written = bytes_written
            writing.deadline_s = self._context.now_s + self._context.options.progress_timeout_s

    def finish(self, rank: int, attempt: int, step: int) -> bool:
        """A writer's part is on disk; False if nobody asked for it (any more)."""
        writing = self._of(rank, attempt)
        if writing is None or writing.part.step != step:
            return False
        del self.writing[rank]
        replaced = (rank, writing.part.target)
        self.finished = [part for part in self.finished if (part.rank, part.target) != replaced] + [writing.part]
        self._arm()
        return True

    def drop_writer(self, rank: int) -> bool:
        """This rank will not finish its part; True if it was writing one."""
        dropped = self.writing.pop(rank, None) is not None
        self._arm()
        return dropped

    def fail(self, rank: int, attempt: int) -> Part | None:
        """This writer says that it failed; what it was to write, if anybody waits for it (still)."""
        writing = self._of(rank, attempt)
        if writing is not None:
            self.drop_writer(rank)
        return None if writing is None else writing.part

    def refuse(self, rank: int, reason: str) -> None:
        """The file system refused what this rank wrote to the directory in use."""
        self.refused.setdefault(rank, set()).add(self.target)
        self._failures[self.target] = self._failures.get(self.target, 0) + 1
        self.storage_reason = reason

    def targets(self) -> tuple[int, ...]:
        """The directories still in play, the preferred one first."""
        members = self._context.members.members.values()
        failures_max = STORAGE_FAILURES_MAX + len({member.process.host_id for member in members}) // 4
        possible = (0, 1) if self._context.options.has_fallback_target else (0,)
        return tuple(
            target
            for target in possible
            if target not in self.closed_targets and self._failures.get(target, 0) < failures_max
        )

    def drop_overdue(self) -> list[int]:
        """Give up writers that have made no progress for too long; returns them, sorted."""
        now_s = self._context.now_s
        late = sorted(rank for rank, writing in self.writing.items() if now_s >= writing.deadline_s)
        for rank in late:
            del self.writing[rank]
        self._arm()
        return late

    def unanswered(self) -> list[Writing]:
        """Writers that may have missed their order, sorted."""
        return [writing for _, writing in sorted(self.writing.items()) if not writing.answered]

    def _of(self, rank: int, attempt: int) -> Writing | None:
        writing = self.writing.get(rank)
        return writing if writing is not None and writing.part.attempt == attempt else None

    # ------------------------------------------------------------------ verify and publish

    def start_verify(self) -> None:
        """All parts are finished: gather them in the newest attempt's directory and look at them."""
        parts = tuple(PartPlan(part.rank, part.attempt, part.units, part.local_ranks) for part in self.plan)
        self._context.emit(StartVerify(self._incident, self.attempt, self.step, self.target, parts))
        gathered = {part: replace(part, attempt=self.attempt) for part in self.plan}
        self.plan = tuple(gathered.values())
        self.finished = [gathered.get(part, part) for part in self.finished]

    def reject(self, problems: tuple[tuple[int, str], ...]) -> None:
        """Verification found bad parts; where it names no writer, all are."""
        writers = {part.rank for part in self.plan}
        bad = {rank for rank, _ in problems} & writers or writers
        text = "; ".join(f"part of rank {rank}: {text}" if rank in writers else text for rank, text in problems)
        for rank in sorted(bad):
            self.refuse(rank, text or "the verification failed")
        self.finished = [part for part in self.finished if part.target != self.target or part.rank not in bad]

    def start_publish(self, reason: str, cause_ranks: tuple[int, ...], dead_ranks: tuple[int, ...]) -> None:
        """The parts are good: give the directory its final name."""
        self._publishing.add(self.attempt)
        self._context.emit(
            StartPublish(
                incident=self._incident,
                attempt=self.attempt,
                step=self.step,
                target=self.target,
                parts=tuple(PartPlan(part.rank, part.attempt, part.units, part.local_ranks) for part in self.plan),
                reason=reason,
                cause_ranks=cause_ranks,
                dead_ranks=dead_ranks,
                lost_local_ranks=self.lost_local_ranks,
            )
        )

    def was_publishing(self, attempt: int) -> bool:
        """True if the publication of this attempt was asked for, even if it has been given up since."""
        return attempt in self._publishing

    def published_step(self, attempt: int) -> int:
        """Step of an attempt whose publication was asked for."""
        return self._directories[attempt][0]

    def close_target(self, reason: str) -> None:
        """This directory cannot be published into; its verified files stay where they are, for a human."""
        self.closed_targets.add(self.target)
        self._spared.add(self.attempt)
        self.storage_reason = reason
        self.finished = [part for part in self.finished if part.target != self.target]

    def discard_all(self, published_attempt: int = 0) -> None:
        """Throw away every temporary directory but the published one (which has another name by now)."""
        for attempt in sorted(self._directories):
            if attempt != published_attempt and attempt not in self._spared:
                self._discard(attempt)
        self._directories = {}

    def _discard_unneeded(self) -> None:
        needed = {part.attempt for part in self.plan} | {part.attempt for part in self.finished} | {self.attempt}
        for attempt in sorted(self._directories):
            if attempt not in needed and attempt not in self._spared:
                self._discard(attempt)
                del self._directories[attempt]

    def _discard(self, attempt: int) -> None:
        step, target = self._directories[attempt]
        self._context.emit(Discard(self._incident, attempt, step, target))
