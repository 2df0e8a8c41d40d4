"""What `lastwords status` and `lastwords top` show of a controller and of its incidents."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lastwords.checkpoint.appearing import append_line
from lastwords.cli import main as cli
from lastwords.cli import status_command
from lastwords.cli.status_command import newest_incidents
from lastwords.controller.timeline import recorded_exit
from lastwords.errors import UnavailableError
from lastwords.state import ControllerState, RankState
from lastwords.vocabulary import Phase, ProcessId, Stand

SAVED = {
    "outcome": "SAVED", "incident": 1, "step": 31, "path": "/c", "reason": "rank 2 died", "bytes": 2_000_000,
    "known_mono_s": 5.0, "events": [{"what": "published", "mono_s": 5.07}],
}  # fmt: skip
RECOVERED = {
    "outcome": "RECOVERED", "generation": 1, "step": 31, "began_mono_s": 1.0, "died_mono_s": 5.0,
    "events": [{"what": "died", "mono_s": 5.0, "rank": 2, "code": -9}, {"what": "updated", "mono_s": 5.7, "rank": 0}],
}  # fmt: skip


def state_at(step: int, incidents: Path) -> ControllerState:
    rank = RankState(
        0, ProcessId("host", "boot", 77, 5), Stand(Phase.COMPUTING, step), connected=True, dead=False, heard_s=0.0
    )
    return ControllerState("job", 1, 1, 77, 12.5, "training", 0, "1 of 1 ranks are connected", (rank,), str(incidents))


@pytest.fixture
def record(tmp_path: Path) -> Path:
    path = tmp_path / "incidents.jsonl"
    path.write_text("".join(f"{line}\n" for line in ("half of a li", json.dumps(SAVED), json.dumps(RECOVERED))))
    return path


STRANGE = (
    "5",
    "[" * 100_000,
    '{"outcome": []}',
    *(
        json.dumps({**record, **changed})
        for record in (SAVED, RECOVERED)
        for changed in ({"events": 1}, {"events": [1]}, {"known_mono_s": 10**400}, {"died_mono_s": "x"}, {"reason": {}})
    ),
)
"""Lines of another program, or with a byte that is wrong."""


def test_an_incident_and_its_recovery_are_a_line_each_and_what_cannot_be_read_is_passed_over(record: Path) -> None:
    incident, recovery = newest_incidents(record)
    assert "rank 2 died" in incident
    assert "/c" in incident
    assert "(SIGKILL)" in recovery
    assert "0.7 s" in recovery
    assert "70 ms" in recovery
    assert newest_incidents(record, 1) == [recovery]
    assert newest_incidents(record.parent / "elsewhere") == []
    for strange in STRANGE:
        record.write_text(f"{strange}\n{json.dumps(RECOVERED)}\nhalf\n{json.dumps(SAVED)}\n")
        assert newest_incidents(record, 1) == [incident]


def test_a_record_that_is_a_fifo_has_no_incidents(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "incidents.jsonl")
    assert newest_incidents(tmp_path / "incidents.jsonl") == []
    assert recorded_exit(tmp_path / "incidents.jsonl", "job", 1) is None
    with pytest.raises(OSError):
        append_line(tmp_path / "incidents.jsonl", "{}")


def test_top_goes_on_while_no_controller_answers(
    record: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [state_at(10, record), UnavailableError("unreachable"), state_at(20, record), state_at(30, record)]

    def query(address: str) -> ControllerState:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(status_command, "query_state", query)
    assert cli.main(["top", "--controller", "here:1", "--every", "0.01", "--frames", "4"]) == 0
    first, without, again, last = capsys.readouterr().out.split("controller  here:1")[1:]
    assert "COMPUTING(10)" in first
    assert "steps/s" not in first
    assert "unreachable" in without
    assert "COMPUTING(10)" in without, "what was known last stays there"
    assert "COMPUTING(20)" in again
    assert "steps/s" not in again, "it has grown once, and nobody knows since when"
    assert "COMPUTING(30)" in last
    assert "steps/s" in last
    assert "(SIGKILL)" in last


@pytest.mark.parametrize("pause", ["0", "-1", "nan", "inf", "soon"])
def test_a_pause_that_is_none_is_refused(pause: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["top", "--every", pause])
    assert exit_.value.code == 2
