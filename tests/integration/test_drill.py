"""`lastwords drill` on real jobs: a script that is exact, one with each fault, and a drill that is spoilt itself."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lastwords.checkpoint import drill_record
from tests.integration.drilling import drilled

pytestmark = [pytest.mark.process, pytest.mark.thorough]

SCRIPT = str(Path(__file__).with_name("drilled_training.py"))


def test_a_script_that_resumes_exactly_is_bitwise_in_each_phase_and_its_own_checkpoints_are_not_touched(
    tmp_path: Path,
) -> None:
    said = drilled(
        tmp_path, "--phases", "backward,epoch-end,evaluation,periodic,fewer-ranks,between-updates", command=(SCRIPT,)
    )
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


def test_one_rank_or_two_at_once_die_between_and_after_the_updates_of_two_optimizers(tmp_path: Path) -> None:
    phases, kept = {"between-updates": "optimizer 0", "after-update": "optimizer 1"}, tmp_path / "kept"
    flags = ("--nproc-per-node", "3", "--phases", ",".join(phases), "--kills", "2", "--two", "--keep", str(kept))
    said = drilled(tmp_path, *flags, command=(SCRIPT, "--halves"))
    assert said.code == 0, said.text
    drills = said.report["drills"]
    assert [(one["phase"], len(one["ranks"])) for one in drills] == [(name, n) for name in phases for n in (1, 1, 2)]
    assert {one["verdict"] for one in drills} == {"bitwise"}, said.text
    for number, one in enumerate(drills, 1):
        assert one["step"] - one["resumed_after"] in (0, 1)
        folder = kept / f"{number:02}-{one['phase']}"
        (line,) = [
            line for line in (folder / "output.log").read_text().splitlines() if line.startswith("lastwords run: ")
        ]
        assert sorted(map(int, re.findall(r"rank (\d) died \(SIGKILL\)", line))) == one["ranks"], line
        for rank in range(3):
            lines = map(json.loads, (folder / f"rank_{rank}.jsonl").read_text().splitlines())
            dies = [(line["step"], line["what"]) for line in lines if line["kind"] == "dies"]
            assert dies == [(one["step"], phases[one["phase"]])] * (rank in one["ranks"]), rank
    for single, other, _ in (drills[:3], drills[3:]):
        assert single["ranks"] != other["ranks"]
        assert single["step"] != other["step"]


def test_a_number_that_nobody_saves_is_named(tmp_path: Path) -> None:
    said = drilled(tmp_path, "--phases", "forward", "--record", "ckpt", command=(SCRIPT, "--unsaved"))
    assert said.code == 1, said.text
    (one,) = said.report["drills"]
    assert one["verdict"] == "differs"
    assert (one["first"]["kind"], one["first"]["step"]) == ("parameter", one["resumed_after"] + 1)
    assert one["suspects"] == ["main() of __main__.trainer.scale"]
    assert one["suspects"][0] in said.text
    record, _ = drill_record.read(tmp_path / "ckpt")
    assert record is not None
    assert [(covered.phase, covered.verdict) for covered in record.drills] == [("forward", "differs")]
    assert (record.bitwise, record.sha256) == (False, drill_record.digest_of(Path(SCRIPT)))


def test_a_bit_that_is_spoilt_on_the_resume_is_found(tmp_path: Path) -> None:
    said = drilled(tmp_path, "--self-test", command=(SCRIPT,))
    assert said.code == 0, said.text
    (one,) = said.report["drills"]
    assert (one["verdict"], one["at_resume"]["kind"], one["at_resume"]["rank"]) == ("differs", "parameter", 0)


@pytest.mark.parametrize(("flag", "code", "dead"), [("--cache", 0, ["model.5.last"]), ("--cache-read", 1, [])])
def test_state_that_is_told_and_dead_is_named_with_what_to_write_and_no_other_is(
    tmp_path: Path, flag: str, code: int, dead: list[str]
) -> None:
    said = drilled(tmp_path, "--phases", "forward", command=(SCRIPT, flag))
    assert said.code == code, said.text
    (one,) = said.report["drills"]
    assert any("model.5.last" in why for why in one["reasons"])
    assert said.report["forget"] == dead
    assert ('forget=("model.5.last",)' in said.text) == bool(dead)


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
    said = drilled(tmp_path, *flags, command=(SCRIPT, script))
    assert said.code == code, said.text
    assert word in said.text
