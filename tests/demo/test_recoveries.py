"""The demo of healing reads what the controller and the launcher wrote about each failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from demo.recoveries import read_recoveries


def event(what: str, mono_s: float, rank: int | None = None) -> dict[str, Any]:
    return {"what": what, "mono_s": mono_s} | ({} if rank is None else {"rank": rank})


def write(root: Path, *records: dict[str, Any]) -> None:
    (root / "logs").mkdir()
    (root / "logs" / "incidents.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


SAVED = {
    "outcome": "SAVED",
    "step": 7,
    "events": [event("settled", 10.1, 0), event("decided", 10.2), event("published", 10.3)],
}
RECOVERED = {
    "outcome": "RECOVERED",
    "events": [
        event("died", 10.0, 1), event("left", 10.4, 0), event("left", 10.5, 2), event("ready", 10.6, 1),
        event("entered", 10.7), *(event("updated", 11.0 + rank, rank) for rank in range(3)),
    ],
}  # fmt: skip


def test_what_each_rank_did_after_the_kill(tmp_path: Path) -> None:
    write(tmp_path, SAVED, RECOVERED)
    (found,) = read_recoveries(tmp_path, [10.0], 3)
    assert (found.step, found.dead_rank) == (7, 1)
    times = (found.saved_s, found.entered_s, found.trains_s)
    assert times == pytest.approx((0.3, 0.7, 3.0))
    begins = {(bar.rank, bar.what): bar.begin_s for bar in found.bars if bar.what in ("dead", "saves")}
    # Rank 2 was decided upon without its word.
    assert begins == pytest.approx({(0, "saves"): 0.1, (1, "dead"): 0.0, (2, "saves"): 0.2})


def test_a_kill_without_a_recovery_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, SAVED)
    with pytest.raises(ValueError, match="0 recoveries"):
        read_recoveries(tmp_path, [10.0], 3)
