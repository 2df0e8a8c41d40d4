"""Who takes part: registration, the agreement on the loop, and who has left it. Data and checks, no decisions."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from lastwords.controller.events import LoopShape
from lastwords.controller.words import first_texts
from lastwords.errors import ranks_text
from lastwords.vocabulary import NO_SCHEDULE, DeathSource, Hello, Left, LoopBegin, Phase, ProcessId, Schedule, Stand

# What counts as a death, what only as a suspicion, and how either is said.

CERTAIN: Final = frozenset((DeathSource.ROBUST_MUTEX, DeathSource.PIDFD))
"""Sources that only speak when the process has ended. The others say that nothing is heard of it."""

_DEATH_WORDS: Final[Mapping[DeathSource, str]] = {
    DeathSource.ROBUST_MUTEX: "died (killed or crashed)",
    DeathSource.PIDFD: "died (killed or crashed)",
    DeathSource.STREAM: "was lost (its connection broke and it did not reconnect)",
}
_SUSPICION_WORDS: Final[Mapping[DeathSource, str]] = {
    DeathSource.STREAM: "its connection broke",
}

_SIGNAL_NAMES: Final[Mapping[int, str]] = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    10: "SIGUSR1",
    12: "SIGUSR2",
    15: "SIGTERM",
    24: "SIGXCPU",
}


def death_text(source: DeathSource, how: str = "") -> str:
    """How a death by this source is told, without the rank. how: the process has ended, where that is known.

    >>> death_text(DeathSource.PIDFD), death_text(DeathSource.PIDFD, "SIGSEGV, segmentation fault")
    ('died (killed or crashed)', 'died (SIGSEGV, segmentation fault)')
    """
    return f"died ({how})" if how and source in CERTAIN else _DEATH_WORDS[source]


def suspicion_text(source: DeathSource) -> str:
    """How a suspicion by this source is told."""
    return _SUSPICION_WORDS.get(source, "it may have ended")


def signal_text(signal_number: int) -> str:
    """How a request to stop is told.

    >>> signal_text(15)
    'was asked to stop (SIGTERM)'
    """
    return f"was asked to stop ({_SIGNAL_NAMES.get(signal_number, f'signal {signal_number}')})"


class Causes:
    """Why an incident is on: rank -> words. Signals count as long as nothing else has happened."""

    def __init__(self) -> None:
        self._words: dict[int, str] = {}
        self._only_signals = True

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that caused the incident, sorted."""
        return tuple(sorted(self._words))

    def add(self, rank: int, words: str) -> bool:
        """A death or an exception; a death is added to what the rank did before. False if nothing is new."""
        known = self._words.get(rank)
        if known is not None and words in known:
            return False
        self._words[rank] = words if known is None else f"{known}, then {words}"
        self._only_signals = False
        return True

    def explain(self, rank: int, words: str, better: str) -> None:
        """What was said of a death is said with more knowledge."""
        if rank in self._words:
            self._words[rank] = self._words[rank].replace(words, better)

    def add_signal(self, rank: int, words: str) -> bool:
        """A request to stop. After a death it is the launcher's answer to that death, not a cause of its own."""
        if not self._only_signals or rank in self._words:
            return False
        self._words[rank] = words
        return True

    def text(self) -> str:
        """All causes in one phrase, ranks with the same words together; of thousands of words the first ones.

        >>> causes = Causes()
        >>> _ = causes.add_signal(1, "was asked to stop"), causes.add_signal(0, "was asked to stop")
        >>> causes.text()
        'ranks 0 and 1: each was asked to stop'
        """
        by_words: dict[str, list[int]] = {}
        for rank, words in sorted(self._words.items()):
            by_words.setdefault(words, []).append(rank)
        return first_texts(_phrase(ranks, words) for words, ranks in by_words.items())


def _phrase(ranks: Iterable[int], words: str) -> str:
    ordered = list(ranks)
    return f"{ranks_text(ordered)} {words}" if len(ordered) == 1 else f"{ranks_text(ordered)}: each {words}"


class Life(enum.Enum):
    """What the controller believes about a process."""

    ALIVE = "alive"
    SUSPECT = "suspect"  # not heard of; becomes DEAD unless the same process says Hello in time
    DEAD = "dead"
    GONE = "gone"  # left on purpose and with permission


@dataclass(slots=True)
class Member:
    """One registered rank. `stand` is the newest that was reported, for people and for progress only; `streamed` is the
    newest that the rank has streamed by itself, which says whether it is done with its loop."""

    rank: int
    process: ProcessId
    units: tuple[str, ...]
    stand: Stand
    streamed: Stand | None = None
    connected: bool = True
    life: Life = Life.ALIVE
    source: DeathSource | None = None  # of the suspicion or death
    how: str = ""  # it has died, as far as is known
    watched: bool = False  # the end of its process will be told, so its silence is none
    suspect_since_s: float = 0.0
    waits_at: str = ""  # the user's line where it has long been in a collective or a backward pass, as it says
    stands_at: str = ""  # the same of anything else
    work_s: float = 0.0  # of a step until it meets the others, as it says; 0.0: not known
    left: Stand | None = None
    loop: LoopShape | None = None  # announced, not yet agreed
    loop_agreed: LoopShape | None = None
    shared: tuple[str, ...] = ()

    @property
    def living(self) -> bool:
        """True unless the process is known to have ended."""
        return self.life in (Life.ALIVE, Life.SUSPECT)

    @property
    def buried(self) -> bool:
        """True if the process has certainly ended. One that was only silent for too long may come back."""
        return self.life is Life.DEAD and self.source in CERTAIN

    @property
    def death(self) -> str:
        """How its death is told; it has died."""
        return "is gone" if self.source is None else death_text(self.source, self.how)

    @property
    def reachable(self) -> bool:
        """True if it has a session and may still read from it."""
        return self.connected and not self.buried


_INSIDE: Final = {Phase.READY: "before", Phase.UPDATING: "in", Phase.UPDATED: "after"}
"""Of the update of the step under way; in all other phases the step that has ended last says enough."""


def _place(member: Member) -> str:
    where = f" and in a collective or a backward pass at {member.waits_at}" if member.waits_at else ""
    where = where or (member.stands_at and f", at {member.stands_at}")
    inside = _INSIDE.get(member.stand.phase)
    step = (
        f"after step {member.stand.ended_step}"
        if inside is None
        else f"{inside} the update of step {member.stand.step}"
    )
    return f"{step}{where}"


class Membership:
    """All ranks of a job of `world_size` ranks."""

    def __init__(self, world_size: int, generation: int) -> None:
        self.world_size: Final = world_size
        self.generation: Final = generation
        self.members: dict[int, Member] = {}
        self.suspects: set[int] = set()
        self.base_step = 0  # newest step at which any rank started: there is nothing to save up to it
        self.loop_go_sent = False
        self.loop: LoopShape | None = None  # what all ranks have agreed upon
        self.living: set[int] = set()
        self.dead: set[int] = set()
        self._not_left: set[int] = set()
        self._left_early: set[int] = set()
        self._loop_waiting: set[int] = set()
        self._units: tuple[str, ...] | None = None

    # ------------------------------------------------------------------ registration

    def refusal(self, hello: Hello) -> str | None:
        """Why this process may not take part, or None if it may (or already does)."""
        if hello.generation != self.generation:
            return (
                f"rank {hello.rank} is of generation {hello.generation}, but this controller serves generation "
                f"{self.generation}; end the older processes and start all ranks together"
            )
        if hello.world_size != self.world_size:
            return (
                f"rank {hello.rank} was started for a job of {hello.world_size} ranks, but the job has "
                f"{self.world_size}; start all ranks with the same WORLD_SIZE"
            )
        if not 0 <= hello.rank < self.world_size:
            return f"rank {hello.rank} is outside a job of {self.world_size} ranks (0 to {self.world_size - 1})"
        member = self.members.get(hello.rank)
        if member is not None and member.process != hello.process:
            return (
                f"rank {hello.rank} is already taken by process {member.process.pid} on host "
                f"{member.process.host_id}; only one process may be rank {hello.rank}"
            )
        return None

    def admit(self, hello: Hello) -> Member:
        """Take a process in, or take note that it is connected (again). `refusal` must have said None."""
        member = self.members.get(hello.rank)
        if member is None:
            units = tuple(sorted(set(hello.units)))
            member = Member(hello.rank, hello.process, units, hello.stand, shared=hello.shared)
            self.members[hello.rank] = member
            self.living.add(hello.rank)
            self._not_left.add(hello.rank)
            self._units = None
            self.base_step = max(self.base_step, hello.stand.ended_step)
        member.connected = True
        member.stand = hello.stand
        return member

    @property
    def complete(self) -> bool:
        """True once all ranks are registered."""
        return len(self.members) == self.world_size

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks that have never registered, sorted."""
        return [rank for rank in range(self.world_size) if rank not in self.members]

    @property
    def reached(self) -> int:
        """The newest step that some rank, dead or alive, is known to have ended."""
        return max([self.base_step, *(member.stand.ended_step for member in self.members.values())])

    @property
    def units(self) -> tuple[str, ...]:
        """Every unit that a checkpoint must hold, sorted."""
        if self._units is None:
            self._units = tuple(sorted({unit for member in self.members.values() for unit in member.units}))
        return self._units

    def connected_ranks(self) -> list[int]:
        """Ranks with an open session, sorted."""
        return sorted(rank for rank, member in self.members.items() if member.connected)

    # ------------------------------------------------------------------ life

    def suspect(self, rank: int, source: DeathSource, since_s: float) -> None:
        """Nothing is heard of this rank any more, as is known since `since_s`."""
        self.members[rank].suspect_since_s = since_s
        self._move(rank, Life.SUSPECT, source)

    def clear(self, rank: int) -> None:
        """The same process is back (or a thought-dead one has returned)."""
        self._move(rank, Life.ALIVE)

    def bury(self, rank: int, source: DeathSource) -> None:
        """The process has ended, or is treated as if it had."""
        self._move(rank, Life.DEAD, source)

    def depart(self, rank: int) -> None:
        """The process, which is neither dead nor suspected, has left with permission."""
        self._move(rank, Life.GONE)

    def _move(self, rank: int, life: Life, source: DeathSource | None = None) -> None:
        member = self.members[rank]
        member.life, member.source = life, source
        kept = ((self.living, member.living), (self.dead, life is Life.DEAD), (self.suspects, life is Life.SUSPECT))
        for ranks, belongs in kept:
            (ranks.add if belongs else ranks.discard)(rank)

    # ------------------------------------------------------------------ the loop

    def begin_loop(self, report: LoopBegin) -> bool:
        """Note what a rank announces; True if that very loop has been agreed on before (it missed the answer)."""
        member = self.members[report.rank]
        shape = LoopShape(report.steps_per_epoch, report.epochs, report.start_step, report.schedule)
        if shape == member.loop_agreed:
            return True
        member.loop = shape
        self._loop_waiting.add(report.rank)
        self.base_step = max(self.base_step, report.start_step) if not self.loop_go_sent else self.base_step
        return False

    def loop_disagreement(self) -> str | None:
        """Who wants which loop, if the ranks that have announced one differ."""
        by_shape: dict[LoopShape, list[int]] = {}
        for rank, member in sorted(self.members.items()):
            if member.loop is not None:
                by_shape.setdefault(member.loop, []).append(rank)
        if len(by_shape) < 2:
            return None
        said = first_texts(f"{ranks_text(ranks)}: {shape}" for shape, ranks in by_shape.items())
        return (
            f"the ranks disagree about the training loop ({said}); every rank needs the same number of batches "
            "(DistributedSampler, drop_last=True) and the same checkpoint"
        )

    @property
    def schedule(self) -> Schedule:
        """Of the periodic checkpoints, as all ranks have agreed."""
        return NO_SCHEDULE if self.loop is None else self.loop.schedule

    @property
    def start_step(self) -> int:
        """The step after which the loop began: that of the checkpoint that was resumed from, 0 without one."""
        return 0 if self.loop is None else self.loop.start_step

    @property
    def _last_step(self) -> int:
        """Of the loop that all ranks have agreed upon; 0 if that is not known."""
        return 0 if self.loop is None else self.loop.last_step

    @property
    def anyone_waits(self) -> bool:
        """True if some rank has announced a loop that has not begun."""
        return bool(self._loop_waiting)

    @property
    def loop_wanted_by_all(self) -> bool:
        """True if every rank of the job has announced a loop."""
        return len(self._loop_waiting) == self.world_size

    @property
    def loop_waiting(self) -> list[int]:
        """Ranks that have announced a loop and wait for the others, sorted."""
        return sorted(self._loop_waiting)

    def agree_loop(self) -> list[int]:
        """All ranks want the same loop: it starts. Returns the ranks to tell, sorted."""
        ranks = self.loop_waiting
        for rank in ranks:
            self.loop = self.members[rank].loop_agreed = self.members[rank].loop
            self.members[rank].loop = None
        self._loop_waiting.clear()
        self.loop_go_sent = True
        return ranks

    # ------------------------------------------------------------------ leaving

    def leave(self, report: Left) -> bool:
        """Note that a rank has left the loop; False if that was known."""
        member = self.members[report.rank]
        known = member.left is not None
        member.left = report.stand
        member.stand = report.stand
        self._not_left.discard(report.rank)
        if not self._last_step or report.stand.ended_step < self._last_step:
            self._left_early.add(report.rank)
        return not known

    @property
    def anyone_left(self) -> bool:
        """True once some rank has left the loop."""
        return len(self._not_left) < len(self.members)

    @property
    def everyone_left(self) -> bool:
        """True once all ranks of the job have left the loop."""
        return self.complete and not self._not_left

    def left_steps(self) -> dict[int, list[int]]:
        """Step at which ranks left -> those ranks, sorted."""
        steps: dict[int, list[int]] = {}
        for rank, member in sorted(self.members.items()):
            if member.left is not None:
                steps.setdefault(member.left.ended_step, []).append(rank)
        return dict(sorted(steps.items()))

    @property
    def finishing(self) -> bool:
        """True if the loop may be over on every rank: whoever has not left it stands where the others left it.

        That is the loop's last step, or may be, where nobody knows the last one. Before a last step that is known one
        rank has to be alone in that: it writes the user's files, say. Several may wait for one that left too early.
        """
        left = [member for member in self.members.values() if member.left is not None]
        steps = {member.left.ended_step for member in left if member.left is not None}
        if len(steps) != 1 or not self.complete:
            return False
        here = Stand(Phase.COMPUTING, steps.pop())
        if any(self.members[rank].streamed != here for rank in self._not_left):
            return False
        return len(self._not_left) == 1 or here.ended_step >= self._last_step

    @property
    def stuck(self) -> bool:
        """True if all that have not left the loop are in a collective or a backward pass, and have been for long."""
        return bool(self._not_left) and all(self.members[rank].waits_at for rank in self._not_left)

    def places(self, ranks: Iterable[int]) -> str:
        """Where these ranks are in their loops, for people; those at the same place together."""
        by_place: dict[str, list[int]] = {}
        for rank in ranks:
            by_place.setdefault(_place(self.members[rank]), []).append(rank)
        return first_texts((f"{ranks_text(there)}: {place}" for place, there in by_place.items()), ", ")

    @property
    def left_early(self) -> list[int]:
        """Ranks that left before the last step of their loop, or whose loop's last step is not known; sorted."""
        return sorted(self._left_early)

    @property
    def not_left(self) -> list[int]:
        """Ranks that are still in their loop, sorted."""
        return sorted(self._not_left)
