"""One incident's attempts to save: who writes, what is finished, what may be thrown away.

A writer's part is kept across attempts as long as the step stays the same, even if the writer dies after it has
finished: the file is on disk, for whenever its directory is chosen again. Every attempt has a directory of its own,
so that a writer which was given up but still runs can never write into a directory that is about to be published;
kept parts are moved over when all parts are there. Each new attempt after a failure has lost a rank, or a (rank,
directory) pair; where all pairs are lost they get another chance after a pause, so often as `Patience` allows. So
their number is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from lastwords.controller.context import JobContext
from lastwords.controller.events import (
    STORAGE_FAILURES_MAX,
    WARNING,
    Discard,
    KeepParts,
    PartPlan,
    StartPublish,
    StartVerify,
)
from lastwords.controller.membership import Life
from lastwords.controller.selection import Decision, WrittenPart
from lastwords.controller.words import first_texts
from lastwords.errors import ranks_text
from lastwords.vocabulary import Save, SaveProgress, Share

# When to try again what a file system has refused: after growing pauses, and not for ever. Pure.

FIRST_PAUSE_S = 0.25
PAUSE_S_MAX = 4.0
"""A descriptor or a page is free again within a second; a mount that fails over takes minutes, and is not helped by
being asked more often."""


class Patience:
    """Pauses between tries of one thing; the first call of `pause_s` starts the clock."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._next_s = FIRST_PAUSE_S

    def pause_s(self, now_s: float, limit_s: float) -> float | None:
        """How long to wait before the next try; None once `limit_s` have passed since the first call.

        The last try comes at the limit, so the number of tries is bounded if that is finite.

        >>> patience = Patience()
        >>> [patience.pause_s(now_s, 1.0) for now_s in (7.0, 7.25, 7.75, 8.0)]
        [0.25, 0.5, 0.25, None]
        >>> patience = Patience()
        >>> {patience.pause_s(now_s, float("inf")) for now_s in range(2000)} == {0.25, 0.5, 1.0, 2.0, 4.0}
        True
        """
        if self._began_s is None:
            self._began_s = now_s
        left_s = self._began_s + limit_s - now_s
        if left_s < 0.001:  # what rounding may leave
            return None
        pause_s = min(self._next_s, PAUSE_S_MAX, left_s)
        self._next_s = min(2 * pause_s, PAUSE_S_MAX)
        return pause_s


@dataclass(slots=True)
class Writing:
    """A part that is being written. `answered`: the writer has said that it has the order.

    sync_until_s: set while it says that it is inside fsync and writes nothing: how long that may renew its deadline.
    """

    part: WrittenPart
    order: Save
    deadline_s: float
    bytes_written: int = -1
    answered: bool = False
    sync_until_s: float | None = None


class Saving:
    """Writers, parts and directories of one incident."""

    def __init__(self, context: JobContext, incident: int) -> None:
        self._context = context
        self._incident = incident
        self.attempt = 0
        self.writing: dict[int, Writing] = {}
        self.finished: dict[tuple[int, int, int], WrittenPart] = {}  # by rank, target and step
        self.refused: dict[int, set[int]] = {}  # rank -> targets that its writes failed on
        self.barred: dict[int, set[int]] = {}  # of these, those that will not pass
        self._rejected: set[tuple[int, int, str]] = set()
        self.cannot_copy: set[int] = set()  # ranks that failed to copy black boxes
        self.closed_targets: set[int] = set()
        self._failures: Counter[int] = Counter()  # target -> how often it has refused
        self.storage_reason = ""
        self._people_know = False  # that the file system is waited for
        self.plan: tuple[WrittenPart, ...] = ()
        self.step = 0
        self.target = 0
        self.lost_local_ranks: tuple[int, ...] = ()
        self._directories: dict[int, tuple[int, int]] = {}  # attempt -> (step, target)
        self._spared: set[int] = set()  # attempts whose directory must not be removed
        self._patience = Patience()  # with writers that were refused
        self._file_patience = Patience()  # with the controller's own work on the newest attempt
        self._file_order: StartVerify | StartPublish | None = None
        self._publishing: set[int] = set()
        self.shares = True  # units may be written in shares
        self.copies: dict[int, set[int]] = {}  # rank -> steps of its whole copies, whoever has told

    # ------------------------------------------------------------------ writing

    def parts(self) -> list[WrittenPart]:
        """Parts that a new decision may keep."""
        return [*self.finished.values(), *(writing.part for writing in self.writing.values())]

    def begin(self, decision: Decision) -> None:
        """Carry out a decision: order new parts, keep what it keeps, throw away what it does not need."""
        context = self._context
        self.step, self.target = decision.step, decision.target
        self.lost_local_ranks = decision.lost_local_ranks
        # A directory of its own even if nothing new is to be written: in the one before, a writer that was given up
        # has left half a file, or is still writing it.
        self.attempt += 1
        self._directories[self.attempt] = (decision.step, decision.target)
        new = [
            WrittenPart(rank, self.attempt, decision.step, decision.target, work.units, work.local_ranks)
            for rank, work in sorted(decision.writers.items())
        ]
        self.plan = (*decision.kept, *new)
        kept = set(decision.kept)
        self.writing = {rank: writing for rank, writing in self.writing.items() if writing.part in kept}
        # Parts in another directory, or of another step, stay: if this one fails too, they may be all that is left.
        self._discard_unneeded()
        for part in new:
            order = Save(
                generation=context.generation,
                incident=self._incident,
                attempt=part.attempt,
                step=part.step,
                units=part.units,
                local_ranks=part.local_ranks,
                target=part.target,
                reason=decision.reason,
                copied=decision.writers[part.rank].copied,
            )
            deadline_s = context.now_s + context.options.progress_timeout_s
            self.writing[part.rank] = Writing(part, order, deadline_s)
            context.send(part.rank, order)
        self._arm()

    def _arm(self) -> None:
        """The timer may ring when no deadline is over: to look for the next one at every report would be O(n²)."""
        if self.writing:
            self._context.timers.set_earlier("writers", min(writing.deadline_s for writing in self.writing.values()))
        else:
            self._context.timers.clear("writers")

    def _disarm_if_done(self) -> None:
        if not self.writing:
            self._context.timers.clear("writers")

    def progress(self, report: SaveProgress) -> None:
        """A writer has written more, or is inside fsync (for so long, and no longer): that renews its deadline."""
        writing = self._of(report.rank, report.attempt)
        if writing is None:
            return
        writing.answered = True
        now_s, options = self._context.now_s, self._context.options
        if report.bytes_written > writing.bytes_written:
            writing.bytes_written = report.bytes_written
            writing.sync_until_s = None
            writing.deadline_s = now_s + options.progress_timeout_s
        elif report.syncing:
            if writing.sync_until_s is None:
                writing.sync_until_s = now_s + options.sync_timeout_s
            renewed_s = min(now_s + options.progress_timeout_s, writing.sync_until_s)
            writing.deadline_s = max(writing.deadline_s, renewed_s)

    def finish(self, rank: int, attempt: int, step: int) -> bool:
        """A writer's part is on disk; False if nobody asked for it (any more)."""
        writing = self._of(rank, attempt)
        if writing is None or writing.part.step != step:
            return False
        del self.writing[rank]
        self.finished[rank, writing.part.target, step] = writing.part
        self._disarm_if_done()
        return True

    def drop_writer(self, rank: int) -> bool:
        """This rank will not finish its part; True if it was writing one."""
        dropped = self.writing.pop(rank, None) is not None
        self._disarm_if_done()
        return dropped

    def fail(self, rank: int, attempt: int) -> Save | None:
        """This writer says that it failed; its order, if anybody waits for it (still)."""
        writing = self._of(rank, attempt)
        if writing is not None:
            self.drop_writer(rank)
        return None if writing is None else writing.order

    def refuse(self, rank: int, reason: str) -> None:
        """The file system refused what this rank wrote to the directory in use."""
        self.refused.setdefault(rank, set()).add(self.target)
        self._failures[self.target] += 1
        self.storage_reason = reason

    def forgive(self) -> None:
        """Every writer that was refused may try again, unless it is certain what will come of it."""
        self.refused = {rank: set(targets) for rank, targets in self.barred.items()}
        self._failures.clear()

    def tries_writers_later(self, limit_s: float) -> bool:
        """Wait, with the timer "again", until refused writers may try again; False if they have for `limit_s`."""
        if not limit_s or self._context.timers.running("again"):
            return limit_s > 0
        return self._again(self._patience, limit_s, "every writer that could write it was rejected")

    def _again(self, patience: Patience, limit_s: float, words: str) -> bool:
        context = self._context
        pause_s = patience.pause_s(context.now_s, limit_s)
        if pause_s is None:
            return False
        text = f"incident {self._incident}: {words}; trying again in {pause_s:g} s"
        if self._people_know or pause_s < PAUSE_S_MAX:
            context.log(WARNING, text)
        else:
            self._people_know = True
            why = f": {self.storage_reason}" if self.storage_reason else ""
            context.tell_people(f"{text}, for {limit_s:g} s since the first time{why}", level=WARNING)
        context.timers.set("again", context.now_s + pause_s)
        return True

    def targets(self, *, forgiven: bool = False) -> tuple[int, ...]:
        """The directories still in play, the preferred one first; `forgiven`: as after `forgive`."""
        members = self._context.members.members.values()
        failures_max = STORAGE_FAILURES_MAX + len({member.process.host_id for member in members}) // 4
        possible = (0, 1) if self._context.options.has_fallback_target else (0,)
        return tuple(
            target
            for target in possible
            if target not in self.closed_targets and (forgiven or self._failures[target] < failures_max)
        )

    def drop_overdue(self) -> list[tuple[Writing, str]]:
        """Give up writers that have made no progress for too long; returns each with what to say of it, sorted."""
        now_s = self._context.now_s
        options = self._context.options
        late = sorted(rank for rank, writing in self.writing.items() if now_s >= writing.deadline_s)
        told = []
        for rank in late:
            writing = self.writing.pop(rank)
            if writing.sync_until_s is not None and now_s >= writing.sync_until_s:
                told.append((writing, f"was inside fsync or close for {options.sync_timeout_s:g} s"))
            else:
                told.append((writing, f"made no progress for {options.progress_timeout_s:g} s while writing"))
        self._arm()
        return told

    def wait_on(self, dropped: Iterable[Writing], more_s: float) -> None:
        """Writers that were given up have more time after all."""
        for writing in dropped:
            writing.deadline_s += more_s
            self.writing[writing.part.rank] = writing
        self._arm()

    def hurry(self) -> None:
        """Deadlines have become shorter: those that run already, too."""
        by_s = self._context.now_s + self._context.options.progress_timeout_s
        for writing in self.writing.values():
            writing.deadline_s = min(writing.deadline_s, by_s)
        self._arm()

    def forget_copies(self, units: Iterable[str], step: int) -> None:
        """A copy of one of these units could not be read: none of them is tried again."""
        for rank, member in self._context.members.members.items():
            if not {*units}.isdisjoint(member.units):
                self.copies.get(rank, set()).discard(step)

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
        self._order_files(StartVerify(self._incident, self.attempt, self.step, self.target, parts))
        gathered = {part: replace(part, attempt=self.attempt) for part in self.plan}
        self.plan = tuple(gathered.values())
        self.finished = {key: gathered.get(part, part) for key, part in self.finished.items()}

    def _order_files(self, order: StartVerify | StartPublish) -> None:
        self._file_order = order
        self._file_patience = Patience()
        self._context.emit(order)

    def tries_files_later(self, words: str, limit_s: float) -> bool:
        """Wait until the order about the finished files may go out again; False after `limit_s` of that."""
        return self._again(self._file_patience, limit_s, words)

    def order_files_again(self) -> None:
        """The same order once more: parts that could not be moved still lie where it says."""
        assert self._file_order is not None
        self._context.emit(self._file_order)

    def reject(self, problems: tuple[tuple[int, str], ...]) -> None:
        """Verification found bad parts: those of the writers that it names, or all parts where it names none.

        A writer whose part fails twice with the same message is barred; otherwise the retries would never end.
        """
        writers = {part.rank for part in self.plan}
        if self._drops_shares(problems):
            return
        bad = {rank for rank, _ in problems} & writers or writers
        text = first_texts(f"part of rank {rank}: {text}" if rank in writers else text for rank, text in problems)
        for rank in bad:
            self.refuse(rank, text or "the verification failed")
            self.finished.pop((rank, self.target, self.step), None)
        for rank, why in problems:
            word = (rank, self.target, why)
            if word in self._rejected and rank in writers:
                self.barred.setdefault(rank, set()).add(self.target)
            self._rejected.add(word)

    def _drops_shares(self, problems: tuple[tuple[int, str], ...]) -> bool:
        """Where parts are good, but do not fit together, nobody's shares are used any more: units are written whole."""
        shared = {part for part in self.plan if any(Share.parse(name).count > 1 for name in part.units)}
        if not shared or any(rank in {part.rank for part in self.plan} for rank, _ in problems):
            return False
        self.shares, self.storage_reason = False, first_texts(text for _, text in problems)
        self.finished = {key: part for key, part in self.finished.items() if part not in shared}
        return True

    def start_publish(self, reason: str, cause_ranks: tuple[int, ...], doubts: Mapping[int, str]) -> None:
        """The parts are good: give the directory its final name. doubts: see `Settled`, by rank."""
        members = self._context.members.members
        self._publishing.add(self.attempt)
        self._order_files(
            StartPublish(
                incident=self._incident,
                attempt=self.attempt,
                step=self.step,
                target=self.target,
                parts=tuple(PartPlan(part.rank, part.attempt, part.units, part.local_ranks) for part in self.plan),
                reason=reason,
                cause_ranks=cause_ranks,
                dead_ranks=tuple(sorted(rank for rank, member in members.items() if member.life is Life.DEAD)),
                lost_local_ranks=self.lost_local_ranks,
                doubts=tuple(sorted(doubts.items())),
            )
        )

    def was_publishing(self, attempt: int) -> bool:
        """True if the publication of this attempt was asked for, even if it has been given up since."""
        return attempt in self._publishing

    def published_step(self, attempt: int) -> int:
        """Step of an attempt whose publication was asked for."""
        return self._directories[attempt][0]

    def close_target(self, reason: str) -> None:
        """This directory cannot be published into; its finished files stay where they are, for a human."""
        self.closed_targets.add(self.target)
        self._spared.add(self.attempt)
        if isinstance(self._file_order, StartVerify):  # perhaps not all have been moved yet
            self._spared |= {part.attempt for part in self._file_order.parts}
        self.storage_reason = reason
        self.finished = {key: part for key, part in self.finished.items() if part.target != self.target}

    def discard_all(self, published_attempt: int = 0) -> None:
        """Throw away every temporary directory but the published one (which has another name by now)."""
        for attempt in sorted(self._directories):
            if attempt != published_attempt and attempt not in self._spared:
                self._discard(attempt)
        self._directories = {}

    def keep_finished(self) -> str:
        """Nothing will be published: finished parts are kept for a human, the rest goes. What to tell, "" if nothing.

        Parts of a directory that was given up count as finished, whatever is wrong with it.
        """
        kept = {part.attempt for part in self.finished.values()} | self._spared
        told: list[str] = []
        for attempt, (step, target) in sorted(self._directories.items()):
            if attempt not in kept:
                self._discard(attempt)
                continue
            self._context.emit(KeepParts(self._incident, attempt, step, target))
            ranks = [part.rank for part in self.finished.values() if part.attempt == attempt]
            whose = f"of {ranks_text(ranks)} " if ranks else ""
            where = "the fallback directory" if target else "the checkpoint directory"
            told.append(f"finished files {whose}of step {step} are kept in {where} as unpublished-step_{step}-*")
        self._directories = {}
        return "; ".join(dict.fromkeys(told))

    @property
    def attempts(self) -> tuple[Discard, ...]:
        """The temporary directories of this incident, as what would remove them."""
        return tuple(Discard(self._incident, attempt, *where) for attempt, where in sorted(self._directories.items()))

    @property
    def publishing(self) -> StartPublish | None:
        """The newest order about the finished files, if that was to publish them."""
        return self._file_order if isinstance(self._file_order, StartPublish) else None

    def _discard_unneeded(self) -> None:
        needed = (
            {part.attempt for part in self.plan} | {part.attempt for part in self.finished.values()} | {self.attempt}
        )
        for attempt in sorted(self._directories):
            if attempt not in needed and attempt not in self._spared:
                self._discard(attempt)
                del self._directories[attempt]

    def _discard(self, attempt: int) -> None:
        step, target = self._directories[attempt]
        self._context.emit(Discard(self._incident, attempt, step, target))
