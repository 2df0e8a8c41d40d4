"""What the launcher and the controller wrote down about each failure of a healed run, and who did what when."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.incident import INCIDENTS, Bar


@dataclass(frozen=True)
class Recovery:
    """Times are seconds after the kill; at `trains_s` every rank had taken a step again."""

    step: int
    dead_rank: int
    saved_s: float
    entered_s: float
    trains_s: float
    bars: tuple[Bar, ...]


def read_recoveries(ckpt_path: Path, killed_mono_s: list[float], ranks: int) -> list[Recovery]:
    """Of a run in which one rank was killed at each of these instants. ValueError if it has not recovered as often."""
    lines = (ckpt_path / INCIDENTS).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    saved = [record for record in records if record["outcome"] == "SAVED"]
    healed = [record for record in records if record["outcome"] == "RECOVERED"]
    if not len(saved) == len(healed) == len(killed_mono_s):
        raise ValueError(f"{len(killed_mono_s)} kills, {len(saved)} checkpoints, {len(healed)} recoveries")
    return [_recovery(*one, ranks) for one in zip(saved, healed, killed_mono_s, strict=True)]


def _recovery(incident: dict[str, Any], record: dict[str, Any], killed_s: float, ranks: int) -> Recovery:
    def at(what: str, rank: int | None = None, events: list[dict[str, Any]] = record["events"]) -> float:
        return max(
            one["mono_s"] - killed_s for one in events if one["what"] == what and rank in (None, one.get("rank"))
        )

    def settled(rank: int) -> float:
        known = any(one["what"] == "settled" and one["rank"] == rank for one in incident["events"])
        return at("settled", rank, incident["events"]) if known else at("decided", None, incident["events"])

    dead = int(next(one["rank"] for one in record["events"] if one["what"] == "died"))
    bars = []
    for rank in range(ranks):
        begin_s = 0.0 if rank == dead else settled(rank)
        bars += [
            Bar(rank, "trains", float("-inf"), begin_s),
            Bar(rank, "dead" if rank == dead else "saves", begin_s, at("entered")),
            Bar(rank, "starts", at("entered"), at("updated", rank)),
            Bar(rank, "trains", at("updated", rank), float("inf")),
        ]
    saved_s = at("published", None, incident["events"])
    return Recovery(incident["step"], dead, saved_s, at("entered"), at("updated"), tuple(bars))
