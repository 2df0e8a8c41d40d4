"""The training loop as the controller sees it: all begin it with the same numbers, and all leave it together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lastwords.controller.context import IncidentEnded, JobContext
from lastwords.controller.events import (
    ERROR,
    INFO,
    RESEND_INTERVAL_MAX_S,
    RESEND_INTERVAL_S,
    WARNING,
    EndController,
    JobStage,
    Outcome,
    OutcomeKind,
    Reply,
    Send,
)
from lastwords.controller.incident import Incident
from lastwords.controller.membership import Life, Member, death_text
from lastwords.controller.periodic import Periodic
from lastwords.controller.words import first_texts
from lastwords.errors import NAMED_RANKS_MAX, ranks_text
from lastwords.vocabulary import (
    DeathSource,
    Exit,
    ExitKind,
    Left,
    LoopBegin,
    LoopGo,
    Notice,
    Order,
    Refused,
    Release,
    Status,
)

# How a job ends for the controller: everybody is told, again and again, until everybody has gone or time is up.

_OUTCOME_KINDS = {
    ExitKind.SAVED: OutcomeKind.SAVED,
    ExitKind.NOTHING_TO_SAVE: OutcomeKind.NOTHING_TO_SAVE,
    ExitKind.NOT_SAVED: OutcomeKind.NOT_SAVED,
}


class Closing:
    """The last order and the outcome, once there is one. States: EXITING, RELEASING, REFUSING, then STOPPED."""

    TIMERS = ("farewell", "exit")

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self.farewell: Order | None = None  # what everybody is told while the job ends: see `farewell_to`
        self._causes: frozenset[int] = frozenset()
        self.outcome: Outcome | None = None
        self._pause_s = RESEND_INTERVAL_S
        self._told_strangers: set[int] = set()  # ranks that came too late to register, and know by now

    @property
    def stopped(self) -> bool:
        """True once there is nothing left to do."""
        return self._context.state is JobStage.STOPPED

    # ------------------------------------------------------------------ three ways to end

    def exit_all(self, incident: Incident, verdict: IncidentEnded) -> None:
        """An incident is over."""
        kind, reason, causes = verdict.kind, verdict.reason, incident.causes.ranks
        what = f"step {verdict.step} is in {verdict.path}" if kind is ExitKind.SAVED else _OUTCOME_KINDS[kind].value
        level = ERROR if kind is ExitKind.NOT_SAVED else INFO
        self._context.log(level, f"incident {incident.number} is over: {what}; {reason}")
        self.end(Outcome(_OUTCOME_KINDS[kind], verdict.step, verdict.path, reason, causes), incident.number)

    def release_all(self, step: int) -> None:
        """All ranks have left the loop at the same step."""
        reason = f"all ranks have left the training loop at step {step}"
        self._context.log(INFO, reason)
        self.end(Outcome(OutcomeKind.RELEASED, step, "", reason, ()))

    def refuse_all(self, reason: str) -> None:
        """The job cannot start."""
        self._context.log(ERROR, reason)
        self.end(Outcome(OutcomeKind.REFUSED, 0, "", reason, ()))

    def end(self, outcome: Outcome, incident: int = 0) -> None:
        """It is decided how the job ends, here or by the controller before: tell everybody."""
        context, causes = self._context, outcome.cause_ranks
        self.outcome, self._causes = outcome, frozenset(causes)
        match outcome.kind:
            case OutcomeKind.RELEASED:
                context.state, self.farewell = JobStage.RELEASING, Release(context.generation)
            case OutcomeKind.REFUSED:
                context.state, self.farewell = JobStage.REFUSING, Refused(context.generation, outcome.reason)
            case kind:
                facts = (outcome.step, outcome.path, outcome.reason, causes[:NAMED_RANKS_MAX])
                exit_kind = next(one for one, other in _OUTCOME_KINDS.items() if other is kind)
                context.state, self.farewell = JobStage.EXITING, Exit(context.generation, incident, exit_kind, *facts)
        context.timers.clear("start", *LoopWatch.TIMERS)
        context.be_certain()
        context.timers.set("exit", context.now_s + context.options.exit_timeout_s)
        context.timers.set("farewell", context.now_s + self._pause_s)
        self._tell_all()
        self.stop_if_empty()

    def _tell_all(self) -> None:
        for rank in self._context.members.connected_ranks():
            self.tell(rank)

    def tell(self, rank: int) -> None:
        """How the job ends, if it does. Also to one that was reported dead: if it hears this, that was a mistake."""
        if self.farewell is not None:
            self._context.emit(Send(rank, self.farewell_to(rank)))

    def farewell_to(self, rank: int) -> Order:
        """What a rank is told. Of those that began the incident, who may be all, it needs to know whether it is one."""
        order = self.farewell
        assert order is not None
        if isinstance(order, Exit) and rank in self._causes and rank not in order.cause_ranks:
            return replace(order, cause_ranks=(*order.cause_ranks, rank))
        return order

    # ------------------------------------------------------------------ until all have gone

    def on_timer(self, name: str) -> None:
        """`farewell`: say it again. `exit`: nobody is waited for any longer."""
        if name == "exit":
            if self._context.publishing:
                self._context.timers.set("exit", self._context.now_s + self._context.options.exit_timeout_s)
                return
            members = self._context.members
            late = sorted(members.living) + [rank for rank in members.missing_ranks if rank not in self._told_strangers]
            self._stop(f"the job has ended; {ranks_text(late)} did not deregister in time")
            return
        self._tell_all()
        self._pause_s = min(2 * self._pause_s, RESEND_INTERVAL_MAX_S)
        self._context.timers.set("farewell", self._context.now_s + self._pause_s)

    def stop_if_empty(self) -> None:
        """Stop once every process has gone or is known to have ended."""
        if self.farewell is not None and self._context.state is not JobStage.STOPPED and not self._lingering():
            self._stop("the job has ended and every rank has deregistered")

    def tell_stranger(self, rank: int) -> None:
        """A rank has come that was not registered before the job ended."""
        self._told_strangers.add(rank)
        self._context.emit(Reply(self.farewell_to(rank)))
        self.stop_if_empty()

    def _lingering(self) -> bool:
        """True while some rank may still have to be told (one that lives, or is still to come), or files be named."""
        members = self._context.members
        if self._context.publishing:
            return True
        return bool(members.living) or len(members.members) + len(self._told_strangers) < members.world_size

    def _stop(self, reason: str) -> None:
        self._context.state = JobStage.STOPPED
        self._context.timers.clear_all()
        self._context.emit(EndController(reason))


BEGIN_NOTICE_S = 10.0
LEAVE_NOTICE_S = 6.0
"""From the first rank that waits, before the loop or after it, until people are told for whom; a rank says after 3 s
that it stands in a collective."""


@dataclass(frozen=True, slots=True)
class Strayed:
    """Ranks that cannot leave the loop together with the others: an incident."""

    ranks: tuple[int, ...]
    words: str


class LoopWatch:
    """Agreement before the loop, patience after it. Decides only while the job is WATCHING."""

    TIMERS = ("loop", "leave", "begin_notice", "leave_notice")

    def __init__(self, context: JobContext, closing: Closing, periodic: Periodic) -> None:
        self._context = context
        self._closing = closing
        self._periodic = periodic
        self._let_go: dict[int, DeathSource] = {}
        self._waits_on = False  # for the last one, after the first time-out
        self._told: set[str] = set()  # notices that people have had

    # ------------------------------------------------------------------ begin

    def on_begin(self, report: LoopBegin) -> None:
        """A rank is about to start its loop."""
        if self._context.members.begin_loop(report):
            self._context.send(report.rank, LoopGo(self._context.generation))  # agreed already, it missed the answer
        else:
            self.check_begin()

    def check_begin(self) -> None:
        """Let the loop begin once all ranks want the same."""
        context, members = self._context, self._context.members
        if context.state is not JobStage.WATCHING or not members.anyone_waits:
            return
        context.timers.start("loop", context.now_s + context.options.start_timeout_s)
        if "begin_notice" not in self._told:
            context.timers.start("begin_notice", context.now_s + BEGIN_NOTICE_S)
        if not members.loop_wanted_by_all:
            return
        context.timers.clear("loop", "begin_notice")
        disagreement = members.loop_disagreement()
        if disagreement is not None:
            self._closing.refuse_all(disagreement)
            return
        for rank in members.agree_loop():
            context.send(rank, LoopGo(members.generation))
        self._periodic.begin(members.schedule)

    # ------------------------------------------------------------------ leave

    def needs_nobody(self, rank: int) -> bool:
        """True if this rank has left and all others have done their steps: without it nothing is lost or held up.

        Nothing is to be saved then that the user's code is not saving itself.
        """
        members = self._context.members
        return self._context.state is JobStage.WATCHING and members.members[rank].left is not None and members.finishing

    def lets_go(self, rank: int, source: DeathSource) -> bool:
        """A rank has died; True if that is no incident as long as all are done."""
        if not self.needs_nobody(rank):
            return False
        self._let_go[rank] = source
        self._context.log(INFO, f"rank {rank} {death_text(source)} after all ranks had completed their steps")
        return True

    def on_left(self, report: Left) -> Strayed | None:
        """A rank has left its loop."""
        return self.check_left() if self._context.members.leave(report) else None

    def check_left(self) -> Strayed | None:
        """Release everybody once all have left at the same step."""
        members = self._context.members
        if self._context.state is not JobStage.WATCHING or not members.anyone_left:
            return None
        if not members.everyone_left:
            self._arm_leave()
            return None
        steps = members.left_steps()
        if len(steps) == 1:
            self._context.timers.clear("leave", "leave_notice")
            if not self._periodic.holds_release(step := next(iter(steps))):
                self._closing.release_all(step)
            return None
        said = first_texts((f"{ranks_text(ranks)} at step {step}" for step, ranks in steps.items()), ", ")
        early = sorted(rank for step, ranks in steps.items() if step < max(steps) for rank in ranks)
        return Strayed(tuple(early), f"left the training loop before the other ranks ({said})")

    def on_status(self, member: Member, report: Status) -> list[tuple[int, DeathSource]]:
        """A rank says where it stands; if it has moved, those who have left can wait for it.

        Returns the deaths that are incidents now: of ranks that were let go because all seemed to be done.
        """
        if report.stand == member.stand == member.streamed and report.waits_at == member.waits_at:
            return []
        member.stand = member.streamed = report.stand
        member.waits_at = report.waits_at
        members = self._context.members
        if self._context.state is not JobStage.WATCHING or not members.anyone_left or members.everyone_left:
            return []  # those who have all left wait for a checkpoint at most
        self._arm_leave()
        if not self._let_go or members.finishing:
            return []
        missed, self._let_go = sorted(self._let_go.items()), {}
        return [(rank, source) for rank, source in missed if not members.members[rank].living]

    def _arm_leave(self) -> None:
        options = self._context.options
        self._waits_on = False
        early = bool(self._context.members.left_early)
        timeout_s = options.leave_timeout_s if early else options.finish_timeout_s
        self._context.timers.set("leave", self._context.now_s + timeout_s)
        if "leave_notice" not in self._told:
            told_s = LEAVE_NOTICE_S if early else options.leave_timeout_s
            self._context.timers.set_earlier("leave_notice", self._context.now_s + told_s)

    # ------------------------------------------------------------------ time

    def on_timer(self, name: str) -> Strayed | None:
        """`loop`: some ranks never began it. `leave`: some ranks have left it and the others stand still.

        Before that, people are told for whom the others wait.
        """
        members, options = self._context.members, self._context.options
        if self._context.state is not JobStage.WATCHING:
            return None
        if name == "loop":
            waiting = members.loop_waiting
            missing = sorted(set(members.members) - set(waiting))
            text = f"{ranks_text(missing)} did not begin the training loop within {options.start_timeout_s:g} s"
            where = members.places(rank for rank in missing if members.members[rank].waits_at)
            self._closing.refuse_all(f"{text} after {ranks_text(waiting)} had begun it{where and f' ({where})'}")
            return None
        if name in ("begin_notice", "leave_notice"):
            self._told.add(name)
            context = self._context
            context.tell_people(self._who_begins() if name == "begin_notice" else self._who_leaves())
            return None
        # Whoever is in a collective waits for those that have left: that is no work of the user's after the loop.
        if members.finishing and not self._waits_on and not (members.left_early and members.stuck):
            context, self._waits_on = self._context, True
            words = "has reached the step at which all other ranks left the loop; waiting for it to leave"
            if len(members.not_left) > 1:
                words = "have reached the step at which the other ranks left the loop; waiting for them to leave"
            context.log(INFO, f"{ranks_text(members.not_left)} {words}")
            if members.left_early:  # they may also wait in a collective for one that has left too early
                context.timers.set("leave", context.now_s + options.finish_timeout_s - options.leave_timeout_s)
            return None
        early = members.left_early
        if early:
            waited_s = options.finish_timeout_s if self._waits_on else options.leave_timeout_s
            words = f"left the training loop early, and no other rank has made progress for {waited_s:g} s"
            return Strayed(tuple(early), words)
        return Strayed(
            tuple(members.not_left),
            (f"did not finish the training loop, and has made no progress for {options.finish_timeout_s:g} s"),
        )

    def _who_begins(self) -> str:
        context, members = self._context, self._context.members
        waiting = members.loop_waiting
        missing = sorted(set(members.members) - set(waiting))
        have, wait = ("have", "wait") if len(waiting) > 1 else ("has", "waits")
        return (
            f"{ranks_text(waiting)} {have} come to the first step of the training loop and {wait} for "
            f"{ranks_text(missing)}, for {context.options.start_timeout_s:g} s at most ({members.places(missing)}); a "
            "rank that leaves out its first optimizer.step() has to call step_end() all the same"
        )

    def _who_leaves(self) -> str:
        members, options = self._context.members, self._context.options
        steps = members.left_steps().items()
        left = first_texts(
            (f"{ranks_text(ranks)} left the training loop after step {step}" for step, ranks in steps), ", "
        )
        if members.finishing and not members.stuck:
            rest = "whoever has left waits for the others"
        else:
            rest = (
                "every rank has to leave after the same step (sys.exit() on one rank alone stops all others). If no "
                f"rank moves for {options.leave_timeout_s:g} s, a checkpoint is saved and all ranks leave the "
                "training loop"
            )
        have = "have" if len(members.not_left) > 1 else "has"
        return f"{left}; {ranks_text(members.not_left)} {have} not ({members.places(members.not_left)}); {rest}"


# Training that stands still though every rank lives: who is behind is said, and may become an incident.
#
# All that is known is that no step has ended for long: a validation, a slow disk and a deadlock look alike from here.
# So that is what is said, beside the lines at which the ranks are, and nothing is done about it unless
# `hang_timeout_s` says when to stop waiting.

QUIET_STEPS = 10
"""A job is used to steps of some length: people hear of it after so many of them without an end, not earlier."""

FIRST_STEPS = 3
"""These may take long, as kernels are compiled, and say nothing about the others."""

AGAIN = 3
"""It is said again after that many times as long."""

ANSWER_S = 0.5
"""For the stacks of those that are behind, before anything is said; ranks answer within milliseconds."""

PACES_MAX = 500


class HangWatch:
    """The time since a step has ended last on any rank. Decides only while the job is WATCHING.

    pace_s: what a controller that was killed has kept, or 0.
    """

    TIMERS = ("hang",)

    def __init__(self, context: JobContext, pace_s: float) -> None:
        self._context = context
        self._paces = [pace_s] if pace_s else []  # seconds that a step took, of the newest steps
        self.kept_pace_s = pace_s
        """Half of the steps take no longer, as far as whoever follows has to know it: within a factor of two."""
        self._newest = -1  # step that some rank has ended last
        self._since_s = 0.0
        self._told_s = 0.0  # without an ended step, when that was said last
        self._asked: set[int] | None = None  # for their stacks, and they have not answered; None: nobody was asked
        self._ends = False  # the job, once they have answered

    # ------------------------------------------------------------------ what ranks say

    def on_status(self, member: Member, report: Status) -> None:
        """A rank says where it stands."""
        member.stands_at = report.stands_at
        ended = report.stand.ended_step
        if ended <= self._newest:
            return
        context, quiet_s = self._context, self._quiet_s
        if self._newest > context.members.base_step:
            self._paces = [*self._paces[1 - PACES_MAX :], quiet_s / (ended - self._newest)]
            if not 0.5 * self.kept_pace_s <= self._pace_s <= 2.0 * self.kept_pace_s:
                self.kept_pace_s = self._pace_s
        told_s, self._newest = self._told_s, ended
        self.begin_anew()
        if told_s and context.state is JobStage.WATCHING:
            context.tell_people(f"training goes on: step {ended} has ended, after {quiet_s:.0f} s")

    def on_stack(self, rank: int) -> None:
        """A rank has answered."""
        if self._asked:
            self._asked.discard(rank)

    def begin_anew(self) -> None:
        """A step has ended, or an incident has: nobody is late."""
        if self._told_s or self._asked is not None:
            self._context.timers.clear("hang")
        self._since_s, self._told_s, self._asked = self._context.now_s, 0.0, None
        self._arm()

    # ------------------------------------------------------------------ time

    def on_timer(self) -> Strayed | None:
        """It may have been too long."""
        if not self._watches:
            return None
        if self._asked is None and self._quiet_s < self._patience_s:
            self._arm()
            return None
        if self._asked is None:
            self._ask()
            return None
        text, late = self._words(), behind(self._context.members.members)
        self._told_s, silent, self._asked = self._quiet_s, self._asked, None
        if self._ends:
            self._context.log(WARNING, text)
            words = f"stood still: no step had ended for {self._told_s:.0f} s"
            return Strayed(tuple(late), f"{words}, and did not answer" if silent >= {*late} else words)
        self._context.tell_people(text, about=late)
        self._arm()
        return None

    @property
    def _watches(self) -> bool:
        members = self._context.members
        known = self._newest >= members.base_step + FIRST_STEPS
        return known and self._context.state is JobStage.WATCHING and not members.anyone_left

    @property
    def _quiet_s(self) -> float:
        return self._context.now_s - self._since_s

    @property
    def _pace_s(self) -> float:
        """0 where the first word of this loop was of a later step: they have been short so far."""
        return sorted(self._paces)[len(self._paces) // 2] if self._paces else 0.0

    @property
    def _is_over(self) -> bool:
        timeout_s = self._context.options.hang_timeout_s
        return 0 < timeout_s <= self._quiet_s

    @property
    def _patience_s(self) -> float:
        """How long after the last step people hear of it, or hear of it again, or it is an incident."""
        options = self._context.options
        said_s = AGAIN * self._told_s or max(options.hang_notice_s, QUIET_STEPS * self._pace_s)
        return min(said_s, options.hang_timeout_s or said_s)

    def _arm(self) -> None:
        """The timer is not moved at each step: it rings, and is set anew where it was too early."""
        context = self._context
        if self._watches and not context.timers.running("hang"):
            look_s = context.now_s + context.options.hang_notice_s
            context.timers.set("hang", min(self._since_s + self._patience_s, look_s))

    # ------------------------------------------------------------------ words

    def _ask(self) -> None:
        """Those that are behind for their stacks; before an incident the others, too, as far as there is room."""
        context, self._ends = self._context, self._is_over
        text = f"no step has ended for {self._quiet_s:.0f} s; rank"
        ranks = behind(context.members.members)
        if self._ends:
            ranks += sorted(context.members.members.keys() - {*ranks})
        self._asked = {*ranks[:NAMED_RANKS_MAX]}
        for rank in ranks[:NAMED_RANKS_MAX]:
            context.send(rank, Notice(context.generation, f"{text} {rank} is here:", stack=True))
        context.timers.set("hang", context.now_s + ANSWER_S)

    def _words(self) -> str:
        members = self._context.members
        late = behind(members.members)
        others = [rank for rank in sorted(members.members) if rank not in set(late)]
        first = f"no step has ended for {self._quiet_s:.0f} s (half of the steps take {self._pace_s:.2g} s or less)"
        if others:
            rest = "the others are" if len(others) > 1 else "the other is"
            said = f"behind {'are' if len(late) > 1 else 'is'} {members.places(late)}; {rest} {members.places(others)}"
        else:
            said = f"no rank is behind the others ({members.places(late)})"
        if self._asked:
            silent = ranks_text(self._asked)
            said += f"; {silent} did not answer, as if stopped, or in a call that keeps the interpreter's lock"
        return f"{first}; {said}"


def behind(members: Mapping[int, Member]) -> list[int]:
    """The ranks that are the least far, sorted; among those at the same point, the ones that are in no collective.

    Whoever is in a collective waits for others there, or may do so.
    """
    reached = {rank: (member.stand.ended_step, member.stand.phase) for rank, member in members.items()}
    last = [rank for rank in sorted(reached) if reached[rank] == min(reached.values())]
    return [rank for rank in last if not members[rank].waits_at] or last


# Ranks that are persistently slower than their peers: people are told which, on what host, and by how much.
#
# Peers are ranks that hold the same units: replicas of the whole model, or of the same stage or shard of it. Stages of
# a pipeline are no peers, since one may well have more to do than another. What is compared is the work of a step,
# which each rank measures until it meets the others (`processor.agent.StepWork`); whoever is slow makes all others wait
# there, so the time between two ends of a step says nothing.

LOOKS = 3
"""A rank is named after so many looks at which it was slower, and not any more after so many at which it was not."""

NEW_STEPS = 8
"""Between two looks; a job that stands still, or validates, is not looked at."""

SLOWER = 0.2
SLOWER_S = 0.005
"""A rank is slow if its work exceeds its peers' median by 20 % and by 5 ms.

Below half of either (10 %, 2.5 ms) it is as fast as they are; in between, what is known of it stays."""


class Stragglers:
    """Looks `LOOKS` times in `straggler_notice_s`, which takes time proportional to the ranks. Only while WATCHING."""

    TIMERS = ("stragglers",)

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._looked_at_step: int | None = None
        self._turning: dict[int, int] = {}  # rank -> looks in a row that speak against what is known of it
        self._slower: dict[int, float] = {}

    @property
    def slower(self) -> Mapping[int, float]:
        """The ranks that people have been told of, and by which part of their peers' work they are slower."""
        return self._slower

    def on_status(self, member: Member, report: Status) -> None:
        """A rank says how long a step takes it."""
        member.work_s = report.work_s
        context = self._context
        look_s = context.options.straggler_notice_s / LOOKS
        if report.work_s and context.state is JobStage.WATCHING and not context.timers.running("stragglers"):
            context.timers.set("stragglers", context.now_s + look_s)

    def on_timer(self) -> None:
        """Look, if enough steps have ended; the next status sets the timer again."""
        members = self._context.members
        if self._context.state is not JobStage.WATCHING or members.anyone_left:
            return
        step = max(member.stand.ended_step for member in members.members.values())
        if self._looked_at_step is not None and step < self._looked_at_step + NEW_STEPS:
            return
        self._looked_at_step = step
        peers: dict[tuple[str, ...], list[Member]] = {}
        for member in members.members.values():
            if member.work_s and member.connected and member.life is Life.ALIVE:
                peers.setdefault(member.units, []).append(member)
        before, self._turning = self._turning, {}
        texts: list[str] = []
        again: list[int] = []
        for group in peers.values():
            typical_s = sorted(member.work_s for member in group)[(len(group) - 1) // 2]
            for member in group:
                if not self._turns(member, typical_s, before.get(member.rank, 0)):
                    continue
                if member.rank in self._slower:
                    texts.append(_words(member, typical_s))
                else:
                    again.append(member.rank)
        self._tell(texts, again)

    def _turns(self, member: Member, typical_s: float, looks: int) -> bool:
        """Compare a rank with its peers. looks: how many of the last ones spoke against what is known of it."""
        rank, more_s = member.rank, member.work_s - typical_s
        known = rank in self._slower
        share = 0.5 if known else 1.0
        slow = more_s >= share * SLOWER * typical_s and more_s >= share * SLOWER_S
        turns = slow is not known and looks + 1 >= LOOKS
        if slow is not known and not turns:
            self._turning[rank] = looks + 1
        if known and turns:
            del self._slower[rank]
        elif known or turns:
            self._slower[rank] = more_s / typical_s
        return turns

    def _tell(self, slower: Sequence[str], again: Sequence[int]) -> None:
        if slower:
            self._context.tell_people(first_texts(slower), about=self._slower)
        if again:
            are, their = ("are", "their") if len(again) > 1 else ("is", "its")
            self._context.tell_people(f"{ranks_text(again)} {are} as fast as {their} peers again")


def _words(member: Member, typical_s: float) -> str:
    who = f"rank {member.rank} (process {member.process.pid} on host {member.process.host_id[:8]})"
    share = (member.work_s - typical_s) / typical_s
    times = f"{_ms(member.work_s)} of work in a step instead of {_ms(typical_s)} (+{share:.0%})"
    return f"{who} is persistently slower than its peers: {times}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
