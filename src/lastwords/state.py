"""What a controller tells about itself to people and scripts (`lastwords status`)."""

from __future__ import annotations

from dataclasses import dataclass

from lastwords.vocabulary import ProcessId, Stand


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank as the controller sees it; `process` and `stand` are None until it has said Hello."""

    rank: int
    process: ProcessId | None
    stand: Stand | None
    connected: bool
    dead: bool
    heard_s: float
    """Seconds since its last report, -1.0 if there was none."""
    waits_at: str = ""
    """The user's line where it has long been in a collective or a backward pass; stands_at: in anything else."""
    stands_at: str = ""
    work_s: float = 0.0
    """Seconds of a step until it meets the others, the median of the newest ones; 0.0: not known."""
    slower: float = 0.0
    """By this part of its peers' `work_s`, if it is persistently slower than they are."""
    sole_holder: bool = False
    """No other living rank holds one of its units."""


@dataclass(frozen=True, slots=True)
class OpenIncident:
    """The incident that is under way. since_s: since it was known; written_bytes: of its newest attempt to save."""

    reason: str
    since_s: float
    written_bytes: int


@dataclass(frozen=True, slots=True)
class ControllerState:
    """A controller at one instant.

    stage: as in the table of states of docs/protocol.md, such as "watching". incidents: path of incidents.jsonl there.
    """

    job: str
    generation: int
    world_size: int
    pid: int
    uptime_s: float
    stage: str
    incident: int
    summary: str
    ranks: tuple[RankState, ...]
    incidents: str = ""
    open: OpenIncident | None = None
