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
