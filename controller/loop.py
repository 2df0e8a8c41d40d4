"""The training loop as the controller sees it: all begin it with the same numbers, and all leave it together."""

from __future__ import annotations

from dataclasses import dataclass

from lastwords.controller.closing import Closing
from lastwords.controller.context import JobContext
from lastwords.controller.events import State
from lastwords.controller.words import ranks_text
from lastwords.vocabulary import Left, LoopBegin, LoopGo


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
        said = ", ".join(f"{ranks_text(ranks)} at step {step}" for step, ranks in steps.items())
        early = sorted(rank for step, ranks in steps.items() if step < max(steps) for rank in ranks)
        return Strayed(tuple(early), f"left the loop before the others ({said})")

    def on_progress(self) -> None:
        """Some rank has moved: those who have left can wait for it."""
        if self._context.state is State.WATCHING and self._context.members.anyone_left:
            self._arm_leave()

    def _arm_leave(self) -> None:
        options = self._context.options
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
            text = f"{ranks_text(missing)} did not begin the loop within {options.start_timeout_s:g} s"
            self._closing.refuse_all(f"{text} of {ranks_text(waiting)}")
            return None
        early = members.left_early
        if early:
            words = f"left the loop early, and no other rank has moved for {options.leave_timeout_s:g} s"
            return Strayed(tuple(early), words)
        return Strayed(
            tuple(members.not_left), f"did not finish the loop, and has not moved for {options.finish_timeout_s:g} s"
        )
