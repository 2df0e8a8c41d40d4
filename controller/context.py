"""What the parts of the controller's core share: members, options, timers, the time, and the effects so far."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from lastwords.controller.events import INFO, ControllerOptions, Effect, JobStage, Send
from lastwords.controller.membership import Life, Member, Membership
from lastwords.core_events import Log
from lastwords.vocabulary import ExitKind, Notice, Order

# The time that a platform leaves between a signal and SIGKILL, and how the waits of an incident are cut to fit. Pure.
#
# Only waits after which something else can be done are cut: a rank that does not settle is left out, another one
# writes, the fallback directory is used. If nothing can be saved without the rank that is late, it has the usual time,
# and what a file system refuses is tried again for the usual time, until the end.

SIGINT = 2
"""Ctrl-C comes from a person, who may wait; the others from platforms and launchers, which kill later."""

PARTS = 3
"""No such wait may take more than one part of the grace period: for ranks, for a writer, and one is left to write."""

WAIT_S_MIN = 2.0
"""What cannot be cut further: a rank that is inside fsync says so once a second."""

FAREWELL_S_MAX = 2.0
FAREWELL_PART = 0.1
"""Before the end, for ranks to hear how it ends and to say so."""


def saving_s(options: ControllerOptions) -> float:
    """From the signal until nothing more is waited for.

    >>> saving_s(ControllerOptions(preemption_grace_s=30.0)), saving_s(ControllerOptions(preemption_grace_s=5.0))
    (28.0, 4.5)
    """
    grace_s = options.preemption_grace_s
    return grace_s - min(FAREWELL_S_MAX, FAREWELL_PART * grace_s)


def in_a_hurry(options: ControllerOptions) -> ControllerOptions:
    """The same deadlines, as far as the grace period has room for them.

    >>> options = in_a_hurry(ControllerOptions(preemption_grace_s=30.0))
    >>> options.settle_timeout_s, options.lost_confirm_s, options.progress_timeout_s, options.storage_timeout_s
    (10.0, 2.0, 10.0, 120.0)
    """
    part_s = max(options.preemption_grace_s / PARTS, WAIT_S_MIN)
    storage_s = options.storage_timeout_s
    return replace(
        options,
        settle_timeout_s=min(options.settle_timeout_s, part_s),
        lost_confirm_s=min(options.lost_confirm_s, part_s),
        newest_timeout_s=min(options.newest_timeout_s, part_s),
        progress_timeout_s=min(options.progress_timeout_s, part_s),
        storage_timeout_s=min(storage_s, part_s) if options.has_fallback_target else storage_s,
    )


@dataclass(frozen=True, slots=True)
class IncidentResumed:
    """A false alarm: everybody trains on."""


@dataclass(frozen=True, slots=True)
class IncidentEnded:
    """Everybody leaves."""

    kind: ExitKind
    step: int
    path: str
    reason: str


Verdict = IncidentResumed | IncidentEnded
"""How an incident ends."""


class Timers:
    """A few named points in time; the only place where the core waits for time to pass."""

    def __init__(self) -> None:
        self._at_s: dict[str, float] = {}

    def set(self, name: str, at_s: float) -> None:
        """Start or move a timer."""
        self._at_s[name] = at_s

    def set_earlier(self, name: str, at_s: float) -> None:
        """Start a timer, or move it if that makes it earlier."""
        self._at_s[name] = min(at_s, self._at_s.get(name, at_s))

    def start(self, name: str, at_s: float) -> None:
        """Start a timer unless it is running."""
        self._at_s.setdefault(name, at_s)

    def clear(self, *names: str) -> None:
        """Stop timers, running or not."""
        for name in names:
            self._at_s.pop(name, None)

    def clear_all(self) -> None:
        """Stop every timer."""
        self._at_s.clear()

    def running(self, name: str) -> bool:
        """Whether this timer is set."""
        return name in self._at_s

    def at_s(self, name: str) -> float | None:
        """When this timer is due; None if it is not set."""
        return self._at_s.get(name)

    def pop_due(self, now_s: float) -> list[str]:
        """Timers that are due, in the order of their time; they are stopped."""
        due = sorted((at_s, name) for name, at_s in self._at_s.items() if at_s <= now_s)
        self.clear(*(name for _, name in due))
        return [name for _, name in due]

    @property
    def next_s(self) -> float | None:
        """When the next timer is due."""
        return min(self._at_s.values(), default=None)


class JobContext:
    """Shared by the core and the incident that is on; only `ControllerCore.handle` moves `now_s`."""

    def __init__(self, world_size: int, generation: int, options: ControllerOptions) -> None:
        self.options = options
        self.generation = generation
        self.members = Membership(world_size, generation)
        self.timers = Timers()
        self.state = JobStage.REGISTERING
        self.now_s = 0.0
        self.certain = False
        self._unhurried = options
        self.preempted = False  # a launcher, or the platform, has asked for the end, and says when that comes
        self.publishing = False  # a periodic checkpoint is complete: the controller stays until it has its name
        self.effects: list[Effect] = []

    def be_certain(self) -> bool:
        """The job ends: no alarm is a false one, and silent ranks have less time. True if this is news."""
        if self.certain:
            return False
        self.certain = True
        self.timers.set_earlier("suspects", self.now_s)
        return True

    def begin_grace(self) -> bool:
        """A rank was asked to stop: waits are cut to the grace period. False if that is done, or there is none.

        The timer "grace" rings when nothing more is to be waited for.
        """
        if self.preempted or not self.options.preemption_grace_s:
            return False
        self.preempted = True
        self.timers.set("grace", self.now_s + saving_s(self.options))
        self.options = in_a_hurry(self.options)
        return True

    def uncut_s(self, option: str) -> float:
        """Give a deadline back what the grace period has taken from it; returns how much that is, 0.0 if nothing."""
        full_s, cut_s = getattr(self._unhurried, option), getattr(self.options, option)
        self.options = replace(self.options, **{option: full_s})
        return float(full_s - cut_s)

    def silent_until_s(self, member: Member) -> float:
        """When a rank of which nothing is heard counts as dead."""
        options = self.options
        if member.watched:
            return member.suspect_since_s + options.stall_timeout_s
        return member.suspect_since_s + (options.lost_confirm_s if self.certain else options.silence_timeout_s)

    def longest_wait_s(self, silent: Collection[int]) -> float:
        """How long an incident may still wait for ranks to settle, or for word of those that are `silent`."""
        ends_s = [self.timers.at_s("settle"), self.timers.at_s("proceed")]
        if not self.certain:
            ends_s = [self.silent_until_s(self.members.members[rank]) for rank in silent]
        return max((at_s - self.now_s for at_s in ends_s if at_s is not None), default=0.0)

    def emit(self, effect: Effect) -> None:
        """Append an effect."""
        self.effects.append(effect)

    def log(self, level: int, text: str) -> None:
        """Say one line to the operator."""
        self.effects.append(Log(level, text))

    def tell_people(self, text: str, *, about: Collection[int] = (), level: int = INFO) -> None:
        """A line in the log, and in the output of one rank: the lowest, if it can be none of those that it is about."""
        self.log(level, text)
        living = [rank for rank in self.members.connected_ranks() if self.members.members[rank].life is Life.ALIVE]
        for rank in sorted(living, key=lambda rank: (rank in about, rank))[:1]:
            self.send(rank, Notice(self.generation, text))

    def send(self, rank: int, order: Order) -> None:
        """Send an order to a rank that has a session; others get it when they return."""
        if self.members.members[rank].reachable:
            self.effects.append(Send(rank, order))

    def send_all(self, order: Order) -> None:
        """Send an order to every rank that can hear it, in the order of ranks."""
        for rank in self.members.connected_ranks():
            self.send(rank, order)
