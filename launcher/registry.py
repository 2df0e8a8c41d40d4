"""Which process is which rank of a dynamic cluster, pure: applications come in, verdicts go out.

A worker has a name, and a name has a rank for the life of the cluster. A name changes hands only once the process that
has it and that of its rank are known to be dead, which can be known on the scheduler's own host alone, or it has been
silent for SILENCE_S: a process that only lost its connection for a moment would else be two. docs/cluster.md has the
table of verdicts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

SILENCE_S = 30.0
"""How long nothing may come from a process of another host, without a connection, until its name is free."""


@dataclass(frozen=True, slots=True)
class Process:
    """Of a worker. host: as of `process_id.host_id`; start_ticks: with them a pid is not mistaken for a later one."""

    host: str
    pid: int
    start_ticks: int


@dataclass(slots=True)
class Worker:
    """The process that is `rank`. linked: a connection to it is open. silent_since_s: else, since when it is not."""

    rank: int
    process: Process
    linked: bool = False
    silent_since_s: float = 0.0
    over: bool = False
    """Its end is known, or taken for granted."""
    done: bool = False
    """Its rank has come to its end."""
    forked: Process | None = None
    """The newest one of its rank that is known; it may outlive `process` for a moment."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The process is `rank` from now on, under this name. anew: another process was it before, or none."""

    name: str
    rank: int
    anew: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """It is not. later: it may apply again, since whoever has the name may be about to end."""

    why: str
    later: bool = False
    done: bool = False
    """Nor does it have to: the worker has come to its end."""


@dataclass(slots=True)
class Registry:
    """The members of a cluster of so many workers, by name."""

    workers: int
    members: dict[str, Worker] = field(default_factory=dict)

    def apply(
        self,
        name: str,
        process: Process,
        workers: int,
        now_s: float,
        runs: Callable[[Process], bool | None],
        rank: int | None = None,
    ) -> Admitted | Rejected:
        """A process wants to be a worker.

        name: "" for any. runs: whether a process does; None where nobody knows. It may find out that its member is
        done. rank: what it is already, by the word of a scheduler that has left nothing.
        """
        if workers != self.workers:
            return Rejected(f"it was started for {workers} workers, and the cluster has {self.workers} (MS_WORKER_NUM)")
        name = name or self._any_name(process, now_s, runs)
        if not name:
            return Rejected(f"all {self.workers} workers are there", later=True)
        member = self.members.get(name)
        if member is None:
            return self._begin(name, process, now_s, rank)
        if rank not in (None, member.rank):
            return Rejected(f"it is rank {rank}, and {name!r} is rank {member.rank} by now; start it again")
        if member.done and member.process != process:
            return Rejected(f"worker {name!r} has come to its end before, so there is nothing to do", done=True)
        if member.process != process:
            if (why := self._is_taken(member, now_s, runs)) is not None:
                return Rejected(f"{name!r} is taken by {why}", later=True)
            self.members[name] = Worker(member.rank, process, silent_since_s=now_s)
            return Admitted(name, member.rank, anew=True)
        if member.over:
            return Rejected(f"{name!r} was silent for {SILENCE_S:g} s and counts as dead; start it again")
        return Admitted(name, member.rank, anew=False)

    def ended(self, now_s: float, runs: Callable[[Process], bool | None]) -> list[int]:
        """Ranks whose processes have ended, or count as dead from now on; each once."""
        found = []
        for member in self.members.values():
            if not member.over and self._is_taken(member, now_s, runs) is None:
                member.over = True
                found.append(member.rank)
        return found

    def _begin(self, name: str, process: Process, now_s: float, is_rank: int | None) -> Admitted | Rejected:
        taken = {member.rank for member in self.members.values()}
        if is_rank in taken:
            return Rejected(f"it is rank {is_rank}, which is another worker by now; start it again")
        free = [rank for rank in range(self.workers) if rank not in taken]
        if not free:
            names = ", ".join(map(repr, [*self.members][:8]))
            return Rejected(f"{name!r} is no worker of this cluster; its {self.workers} workers are {names}")
        wanted = is_rank if is_rank is not None else int(name) if name.isascii() and name.isdigit() else -1
        rank = wanted if wanted in free else free[-1]  # numbers mean the rank, and may come later
        self.members[name] = Worker(rank, process, silent_since_s=now_s)
        return Admitted(name, rank, anew=True)

    def _any_name(self, process: Process, now_s: float, runs: Callable[[Process], bool | None]) -> str:
        """For a process that has none: its own from before, one that nobody ever had, one of a dead process."""
        for name, member in self.members.items():
            if member.process == process:
                return name
        if len(self.members) < self.workers:
            # A number is its rank, if that can be: where another rank has it for a name, a larger one is any rank.
            taken = {member.rank for member in self.members.values()}
            return next(
                str(number) for number in itertools.count() if number not in taken and str(number) not in self.members
            )
        free = [name for name, one in self.members.items() if self._is_taken(one, now_s, runs) is None]
        return min(free, key=lambda name: self.members[name].rank, default="")

    def _is_taken(self, member: Worker, now_s: float, runs: Callable[[Process], bool | None]) -> str | None:
        """By whom; None if its process and that of its rank are dead, or it has been silent for so long."""
        if member.over:
            return None
        process = member.process
        running = None if member.done else runs(process)
        if member.done:  # by now: `runs` hears what it has said last
            return "a worker that has come to its end"
        if running is False:
            forked = member.forked
            return f"process {forked.pid} of its rank, which runs" if forked is not None and runs(forked) else None
        who = f"process {process.pid}"
        if running:
            return f"{who}, which runs"
        if member.linked:
            return f"{who} of another host, which is connected"
        silent_s = now_s - member.silent_since_s
        return f"{who} of another host, silent for {silent_s:.0f} of {SILENCE_S:g} s" if silent_s < SILENCE_S else None
