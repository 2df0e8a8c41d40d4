"""The training loop as the controller sees it: all begin it with the same numbers, and all leave it together."""

from __future__ import annotations

from dataclasses import dataclass

from lastwords.controller.closing import Closing
from lastwords.controller.context import JobContext
from lastwords.controller.detection import death_text
from lastwords.controller.events import INFO, State
from lastwords.controller.membership import Member
from lastwords.controller.words import first_texts, ranks_text
from lastwords.vocabulary import DeathSource, Left, LoopBegin, LoopGo, Stand


@dataclass(frozen=True, slots=True)
class Strayed:
    """Ranks that cannot leave the loop together with the others: an incident."""

    ranks: tuple[int, ...]
    words: str


class LoopWatch:
    """Agreement before the loop, patience after it. Decides only while the job is WATCHING."""

    TIMERS = ("loop", "leave")

    def __init__(self, context: JobContext, closing: Closing) -> None:
        self._context = context
        self._closing = closing
        self._let_go: dict[int, DeathSource] = {}
        self._waits_on = False  # for the last one, after the first time-out

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
        if not members.loop_wanted_by_all:
            return
        context.timers.clear("loop")
        disagreement = members.loop_disagreement()
        if disagreement is not None:
            self._closing.refuse_all(disagreement)
            return
        for rank in members.agree_loop():
            context.send(rank, LoopGo(members.generation))

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
            self._closing.release_all(next(iter(steps)))
            return None
        said = first_texts((f"{ranks_text(ranks)} at step {step}" for step, ranks in steps.items()), ", ")
        early = sorted(rank for step, ranks in steps.items() if step < max(steps) for rank in ranks)
        return Strayed(tuple(early), f"left the training loop before the other ranks ({said})")

    def on_status(self, member: Member, stand: Stand) -> list[tuple[int, DeathSource]]:
        """A rank says where it stands; if it has moved, those who have left can wait for it.

        Returns the deaths that are incidents now: of ranks that were let go because all seemed to be done.
        """
        if stand == member.stand == member.streamed:
            return []
        member.stand = member.streamed = stand
        if self._context.state is not State.WATCHING or not self._context.members.anyone_left:
            return []
        self._arm_leave()
        if not self._let_go or self._context.members.finishing:
            return []
        missed, self._let_go = sorted(self._let_go.items()), {}
        return [(rank, source) for rank, source in missed if not self._context.members.members[rank].living]

    def _arm_leave(self) -> None:
        options = self._context.options
        self._waits_on = False
        timeout_s = options.leave_timeout_s if self._context.members.left_early else options.finish_timeout_s
        self._context.timers.set("leave", self._context.now_s + timeout_s)

    # ------------------------------------------------------------------ time

    def on_timer(self, name: str) -> Strayed | None:
        """`loop`: some ranks never began it. `leave`: some ranks have left it and the others stand still."""
        members, options = self._context.members, self._context.options
        if self._context.state is not State.WATCHING:
            return None
        if name == "loop":
            waiting = members.loop_waiting
            missing = sorted(set(members.members) - set(waiting))
            text = f"{ranks_text(missing)} did not begin the training loop within {options.start_timeout_s:g} s"
            self._closing.refuse_all(f"{text} after {ranks_text(waiting)} had begun it")
            return None
        if members.finishing and not self._waits_on:
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
