"""Ranks that are persistently slower than their peers: people are told which, on what host, and by how much.

Peers are ranks that hold the same units: replicas of the whole model, or of the same stage or shard of it. Stages of a
pipeline are no peers, since one may well have more to do than another. What is compared is the work of a step, which
each rank measures until it meets the others (`processor.step_work`); whoever is slow makes all others wait there, so
the time between two ends of a step says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lastwords.controller.context import JobContext
from lastwords.controller.events import State
from lastwords.controller.membership import Life, Member
from lastwords.controller.words import first_texts, ranks_text
from lastwords.vocabulary import Status

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
        if report.work_s and context.state is State.WATCHING and not context.timers.running("stragglers"):
            context.timers.set("stragglers", context.now_s + look_s)

    def on_timer(self) -> None:
        """Look, if enough steps have ended; the next status sets the timer again."""
        members = self._context.members
        if self._context.state is not State.WATCHING or members.anyone_left:
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
