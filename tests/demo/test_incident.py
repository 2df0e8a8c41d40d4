"""The demo reads the controller's own record of the incident."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from demo.incident import INCIDENTS, Bar, read_incident
from tests import golden

KILLED_MONO_S = 100.0


def write(root: Path, **changes: Any) -> None:
    """One incident: rank 2 of three ranks dies, rank 0 writes."""
    events: list[dict[str, Any]] = [
        {"what": "known", "mono_s": 100.001},
        {"what": "died", "mono_s": 100.001, "rank": 2, "source": "ROBUST_MUTEX"},
        {"what": "settled", "mono_s": 100.002, "rank": 1, "stand": "COMPUTING(7)"},
        {"what": "settled", "mono_s": 100.004, "rank": 0, "stand": "COMPUTING(7)"},
        {"what": "decided", "mono_s": 100.005, "attempt": 1, "step": 7, "writers": [0], "reason": "lowest"},
        {"what": "saved", "mono_s": 100.040, "rank": 0, "attempt": 1, "bytes": 1000},
        {"what": "published", "mono_s": 100.050},
        {"what": "exit_sent", "mono_s": 100.051},
    ]
    record = {"outcome": "SAVED", "step": 7, "path": "/c/step_7", "reason": "rank 2 died", "bytes": 1000}
    record |= {"cause_ranks": [2], "known_mono_s": 100.001, "events": events, **changes}
    path = root / INCIDENTS
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def test_times_count_from_the_kill_and_each_rank_has_its_story(tmp_path: Path) -> None:
    write(tmp_path, outcome="FALSE_ALARM", step=0)
    write(tmp_path)
    incident = read_incident(tmp_path, KILLED_MONO_S, ranks=3)
    times = (incident.known_s, incident.decided_s, incident.published_s, incident.end_s)
    assert times == pytest.approx((0.001, 0.005, 0.050, 0.051))
    assert (incident.step, incident.saved_bytes, incident.dead_ranks) == (7, 1000, (2,))
    story = [(bar.rank, bar.what) for bar in incident.bars]
    assert story == [
        (0, "trains"),
        (0, "parked"),
        (0, "saves"),
        (1, "trains"),
        (1, "parked"),
        (2, "trains"),
        (2, "dead"),
    ]
    (saves,) = [bar for bar in incident.bars if bar.what == "saves"]
    assert saves == Bar(0, "saves", pytest.approx(0.005), pytest.approx(0.040))


def test_an_incident_that_saved_nothing_is_an_error_with_the_controllers_reason(tmp_path: Path) -> None:
    write(tmp_path, outcome="NOT_SAVED", reason="no space left on device")
    with golden.raises(ValueError):
        read_incident(tmp_path, KILLED_MONO_S, ranks=3)
