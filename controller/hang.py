"""Training that stands still though every rank lives: who is behind is said, and may become an incident.

All that is known is that no step has ended for long: a validation, a slow disk and a deadlock look alike from here. So
that is what is said, beside the lines at which the ranks are, and nothing is done about it unless `hang_timeout_s` says
when to stop waiting.
"""

from __future__ import annotations

from collections.abc import Mapping

from lastwords.controller.context import JobContext
from lastwords.controller.events import WARNING, State
from lastwords.controller.loop import Strayed
from lastwords.controller.membership import Member
from lastwords.controller.words import NAMED_RANKS_MAX, ranks_text
from lastwords.vocabulary import Notice, Status

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
        if told_s and context.state is State.WATCHING:
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
        return known and self._context.state is State.WATCHING and not members.anyone_left

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
