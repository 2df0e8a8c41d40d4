"""One incident as the controller wrote it down, with the kill as the beginning of time."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

What = Literal["trains", "parked", "saves", "waits", "starts", "dead"]
INCIDENTS = Path("logs") / "incidents.jsonl"


@dataclass(frozen=True)
class Bar:
    """What a rank did from begin_s to end_s, in seconds after the kill."""

    rank: int
    what: What
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Incident:
    """Times are seconds after the kill. `bars` tell the story of each rank; at `end_s` the ranks were told to leave."""

    step: int
    path: str
    saved_bytes: int
    dead_ranks: tuple[int, ...]
    known_s: float
    decided_s: float
    published_s: float
    end_s: float
    bars: tuple[Bar, ...]


def read_incident(ckpt_path: Path, killed_mono_s: float, ranks: int) -> Incident:
    """The newest incident below `ckpt_path`, which is one line of JSON there.

    The controller's clock and `killed_mono_s` are the same one (CLOCK_MONOTONIC of this host). Raises ValueError, with
    the controller's reason, if the incident did not end with a checkpoint.
    """
    lines = (ckpt_path / INCIDENTS).read_text(encoding="utf-8").splitlines()
    record = json.loads(lines[-1])
    if record["outcome"] != "SAVED":
        raise ValueError(f"the last words were not saved: {record['outcome']}, {record['reason']}")
    events = [(event, event["mono_s"] - killed_mono_s) for event in record["events"]]

    def last(what: str, rank: int | None = None) -> tuple[dict[str, Any], float]:
        found = [pair for pair in events if pair[0]["what"] == what and rank in (None, pair[0].get("rank"))]
        return found[-1] if found else ({}, float("nan"))

    decision, decided_s = last("decided")
    end_s = last("exit_sent")[1]
    dead_ranks = tuple(record["cause_ranks"])
    bars: list[Bar] = []
    for rank in range(ranks):
        if rank in dead_ranks:
            bars += [Bar(rank, "trains", float("-inf"), 0.0), Bar(rank, "dead", 0.0, float("inf"))]
            continue
        settled_s = last("settled", rank)[1]
        settled_s = decided_s if math.isnan(settled_s) else settled_s  # a silent rank is decided upon without its word
        bars += [Bar(rank, "trains", float("-inf"), settled_s), Bar(rank, "parked", settled_s, end_s)]
        if rank in decision["writers"]:
            bars.append(Bar(rank, "saves", decided_s, last("saved", rank)[1]))
    return Incident(
        step=record["step"],
        path=record["path"],
        saved_bytes=record["bytes"],
        dead_ranks=dead_ranks,
        known_s=record["known_mono_s"] - killed_mono_s,
        decided_s=decided_s,
        published_s=last("published")[1],
        end_s=end_s,
        bars=tuple(bars),
    )
