"""`lastwords drill` on real jobs: a script that is exact, one with each fault, and a drill that is spoilt itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import FORGOTTEN_ENVIRONMENT, RANK_ENVIRONMENT

pytestmark = [pytest.mark.process, pytest.mark.thorough]

SCRIPT = Path(__file__).with_name("drilled_training.py")
LIMIT_S = 240.0


@dataclass(frozen=True)
class Said:
    """By a drill. report: its JSON; None if there is none."""

    code: int
    text: str
    report: Any


def drilled(folder: Path, *flags: str, script: tuple[str, ...] = ()) -> Said:
    """Of a script with these arguments, on two ranks."""
    environment = {name: value for name, value in os.environ.items() if name not in FORGOTTEN_ENVIRONMENT}
    written, scratch = folder / "report.json", folder / "scratch"
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "lastwords.cli",
        "drill",
        "--json",
        str(written),
        *flags,
        "--",
        str(SCRIPT),
        *script,
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, **RANK_ENVIRONMENT, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    text = done.stdout + done.stderr
    return Said(done.returncode, text, json.loads(written.read_text()) if written.exists() else None)


def test_a_script_that_resumes_exactly_is_bitwise_in_each_phase_and_its_own_checkpoints_are_not_touched(
    tmp_path: Path,
) -> None:
    said = drilled(tmp_path, "--phases", "backward,epoch-end,evaluation,periodic,fewer-ranks,between-updates")
    assert said.code == 0, said.text
    drills = {one["phase"]: one for one in said.report["drills"]}
    assert {one["verdict"] for one in drills.values()} == {"bitwise"}
    assert set(drills) == {"backward", "epoch-end", "evaluation", "periodic", "fewer-ranks"}
    assert set(said.report["missed"]) == {"between-updates"}
    assert (drills["backward"]["resumed_after"], drills["epoch-end"]["resumed_after"]) == (
        drills["backward"]["step"] - 1,
        drills["epoch-end"]["step"],
    )
    assert drills["periodic"]["resumed_after"] == drills["periodic"]["step"] - 2, "of the periodic one"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"report.json", "scratch"}, "not even a directory for the script's checkpoints"
    assert not [*(tmp_path / "scratch").glob("lastwords-drill-*")], "the drill's own are removed"


def test_a_number_that_nobody_saves_is_named(tmp_path: Path) -> None:
    said = drilled(tmp_path, "--phases", "forward", script=("--unsaved",))
    assert said.code == 1, said.text
    (one,) = said.report["drills"]
    assert one["verdict"] == "differs"
    assert (one["first"]["kind"], one["first"]["step"]) == ("parameter", one["resumed_after"] + 1)
    assert one["suspects"] == ["main() of __main__.trainer.scale"]
    assert one["suspects"][0] in said.text


def test_a_bit_that_is_spoilt_on_the_resume_is_found(tmp_path: Path) -> None:
    said = drilled(tmp_path, "--self-test")
    assert said.code == 0, said.text
    (one,) = said.report["drills"]
    assert (one["verdict"], one["at_resume"]["kind"], one["at_resume"]["rank"]) == ("differs", "parameter", 0)


@pytest.mark.parametrize(
    ("script", "flags", "code", "word"),
    [
        ("--unseeded", (), 6, "reproducible"),
        ("--never", (), 2, "missing_ok"),
        ("--crash", (), 7, "planted"),
        ("--hang", ("--timeout", "25"), 7, "--timeout"),
    ],
)
def test_a_script_that_cannot_be_drilled_is_told_so(
    tmp_path: Path, script: str, flags: tuple[str, ...], code: int, word: str
) -> None:
    said = drilled(tmp_path, *flags, script=(script,))
    assert said.code == code, said.text
    assert word in said.text
