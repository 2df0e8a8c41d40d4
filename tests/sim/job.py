"""The job that is simulated: ranks, hosts, units, steps. A frozen value; nothing here moves."""

from __future__ import annotations

from dataclasses import dataclass

from lastwords.vocabulary import NO_SCHEDULE, UNIT_REPLICATED, Hello, ProcessId, Schedule, Stand

TORN = -1
"""Content of weights that an update has begun to overwrite and has not finished."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the simulated ranks train, and on which machines.

    hosts: host of each rank; the controller lives on the host of rank 0.
    units: the units of each rank; a job with more than one unit has a gate.
    skipped: steps that have no update on any rank (an inf step).
    log_collective: the loop runs a collective between the update and the end of each step.
    update_collective: the optimizer runs a collective inside `step()` (as ZeRO-1 does).
    skips_inside: in a skipped step it is the optimizer that finds out, inside `step()`.
    closure: the optimizer calls its closure twice.
    gate_breaks: ranks whose gate fails, rather than hangs, when a peer dies (random schedules draw their own).
    without_gate: deliberately wrong: no gate although there are several units.
    skips_gate: deliberately wrong: a rank that skips a step does not come to its gate.
    schedule: of the periodic checkpoints.
    shared: units are large, so that they are written in shares.
    copies: each rank keeps two whole copies of its units, of the last steps it has ended whose numbers this divides, in
        its host's memory; 0: none.
    """

    hosts: tuple[int, ...]
    units: tuple[tuple[str, ...], ...]
    steps: int
    start_step: int = 0
    skipped: frozenset[int] = frozenset()
    log_collective: bool = False
    update_collective: bool = False
    skips_inside: bool = False
    closure: bool = False
    fallback: bool = False
    generation: int = 1
    gate_breaks: frozenset[int] = frozenset()
    without_gate: bool = False
    skips_gate: bool = False
    schedule: Schedule = NO_SCHEDULE
    shared: bool = False
    copies: int = 0

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @property
    def unit_names(self) -> tuple[str, ...]:
        return tuple(sorted({unit for units in self.units for unit in units}))

    @property
    def has_gate(self) -> bool:
        return not self.without_gate and any(units != self.units[0] for units in self.units)

    @property
    def targets(self) -> tuple[int, ...]:
        return (0, 1) if self.fallback else (0,)

    def same_weights(self, content: int, step: int) -> bool:
        """Whether weights that came out of step `content` are those of step `step`.

        >>> Job((0,), (("replicated",),), 5, skipped=frozenset({3})).same_weights(2, 3)
        True
        """
        return 0 <= content <= step and all(between in self.skipped for between in range(content + 1, step + 1))

    def hello(self, rank: int, stand: Stand) -> Hello:
        """How a rank begins a session."""
        shared = self.units[rank] if self.shared else ()
        return Hello(rank, self.generation, self.world_size, self.process(rank), self.units[rank], stand, shared)

    def process(self, rank: int) -> ProcessId:
        return ProcessId(f"host{self.hosts[rank]}", 1000 + rank, 77, f"g{self.generation}r{rank}")


def data_parallel(ranks: int, steps: int, ranks_per_host: int = 8) -> Job:
    """A pure DDP job: one unit on every rank."""
    return Job(tuple(rank // ranks_per_host for rank in range(ranks)), ((UNIT_REPLICATED,),) * ranks, steps)
