"""The training loop as the controller sees it: all begin it with the same numbers, and all leave it together."""

from __future__ import annotations

from dataclasses import dataclass

from lastwords.controller.closing import Closing
from lastwords.controller.context import JobContext
from lastwords.controller.detection import death_text
from lastwords.controller.events import INFO, State
from lastwords.controller.membership import Member
from lastwords.controller.periodic import Periodic
from lastwords.controller.words import first_texts, ranks_text
from lastwords.vocabulary import DeathSource, Left, LoopBegin, LoopGo, Status

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
        if context.state is not State.WATCHING or not members.anyone_waits:
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
        return self._context.state is State.WATCHING and members.members[rank].left is not None and members.finishing

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
        if self._context.state is not State.WATCHING or not members.anyone_left:
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
        if self._context.state is not State.WATCHING or not members.anyone_left or members.everyone_left:
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
        if self._context.state is not State.WATCHING:
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
