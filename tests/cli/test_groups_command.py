"""`lastwords groups`: what may die, from group_info files and from manifests, with exit codes for scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lastwords._pb import group_info_pb2 as pb
from lastwords.checkpoint.part import UnitState
from lastwords.cli.main import ExitCode, main
from lastwords.sharding.declare import units_from_mesh
from lastwords.sharding.group_info import write_group_info
from lastwords.vocabulary import UNIT_REPLICATED
from tests import golden
from tests.checkpoint.states import Job, published
from tests.sharding.tables import Table, eight_ranks, table_of, tables_of

Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class JobWithHolders(Job):
    """Units a and bb; `recorded` has the holders that the writers know of."""

    recorded: Any = None

    def unit(self, unit: str, step: int) -> UnitState:
        state = super().unit(unit, step)
        holders = (self.recorded or {}).get(unit)
        return state if holders is None else UnitState(state.tensors, replace(state.meta, holders=holders))


def write_all(folder: Path, tables: list[Table], name: str = "group_info.pb") -> None:
    for rank, table in enumerate(tables):
        write_group_info({"GROUP_INFO_FILE": str(folder / name)}, rank, table)


def run(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    code = main(["groups", *(str(argument) for argument in arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: Capture, path: Path) -> tuple[int, Any]:
    code, out, _ = run(capsys, path, "--json")
    return code, json.loads(out)


def lines_of(out: str) -> list[list[str]]:
    """Words of each line, split at two blanks or more."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines()]


# ---------------------------------------------------------------------- group_info files


def test_units_holders_and_what_may_die_are_shown(capsys: Capture, tmp_path: Path) -> None:
    write_all(tmp_path, eight_ranks())
    code, out, err = run(capsys, tmp_path)
    assert (code, err) == (ExitCode.OK, "")
    golden.says("  ".join(cells) for cells in lines_of(out))


def test_json_has_units_and_every_ranks_group(capsys: Capture, tmp_path: Path) -> None:
    write_all(tmp_path, eight_ranks())
    code, found = run_json(capsys, tmp_path)
    assert code == ExitCode.OK
    assert (found["source"], found["world_size"], found["notes"]) == ("group_info", 8, [])
    assert [item["group"] for item in found["groups"]] == [[0, 4], [1, 5], [2, 6], [3, 7]] * 2
    assert found["groups"][3]["file"] == str(tmp_path / "group_info_rank_3.pb")
    assert {"unit": "tp3", "holders": [3, 7], "may_die": 1, "writer": None, "file": None} in found["units"]


@pytest.mark.parametrize("name", ["rank_{rank}/group_info.pb", "{rank}/mine.pb", "{rank}.pb", "group_info"])
def test_files_are_found_whatever_they_were_called(capsys: Capture, tmp_path: Path, name: str) -> None:
    write_all(tmp_path, eight_ranks(), name)
    code, found = run_json(capsys, tmp_path)
    assert code == ExitCode.OK
    assert len(found["groups"]) == 8


def test_one_file_can_be_looked_at(capsys: Capture, tmp_path: Path) -> None:
    write_all(tmp_path, eight_ranks())
    code, found = run_json(capsys, tmp_path / "group_info_rank_6.pb")
    assert code == ExitCode.OK
    assert [unit["unit"] for unit in found["units"]] == [UNIT_REPLICATED, "tp2"]
    assert found["notes"] == []


def test_without_redundancy_it_says_what_follows(capsys: Capture, tmp_path: Path) -> None:
    write_all(tmp_path, tables_of(units_from_mesh(dp=2, optimizer_shard_size=2)))
    code, out, _ = run(capsys, tmp_path)
    assert code == ExitCode.OK
    golden.says("  ".join(cells) for cells in lines_of(out))


def test_a_job_of_one_has_nobody_to_lose(capsys: Capture, tmp_path: Path) -> None:
    write_all(tmp_path, [table_of(0, {UNIT_REPLICATED: (0,)})])
    assert run_json(capsys, tmp_path)[1]["notes"] == []


def test_ranks_without_a_file_are_named(capsys: Capture, tmp_path: Path) -> None:
    write_all(tmp_path, eight_ranks())
    for rank in (2, 5):
        (tmp_path / f"group_info_rank_{rank}.pb").unlink()
    code, out, _ = run(capsys, tmp_path)
    assert code == ExitCode.OK
    golden.says("  ".join(cells) for cells in lines_of(out))


def test_somebody_elses_pb_files_are_left_alone(capsys: Capture, tmp_path: Path) -> None:
    write_all(tmp_path, eight_ranks())
    (tmp_path / "frozen_graph.pb").write_bytes(b"\xff\xff")
    (tmp_path / "folder.pb").mkdir()
    assert run(capsys, tmp_path)[0] == ExitCode.OK
    assert run(capsys, tmp_path / "frozen_graph.pb")[0] == ExitCode.DAMAGED, "asked for by name, it is an error"


def test_a_damaged_file_is_named_and_has_its_exit_code(capsys: Capture, tmp_path: Path) -> None:
    write_all(tmp_path, eight_ranks())
    (tmp_path / "group_info_rank_2.pb").write_bytes(b"")
    code, out, err = run(capsys, tmp_path)
    assert (code, out) == (ExitCode.DAMAGED, "")
    golden.says(err)
    code, found = run_json(capsys, tmp_path)
    assert code == ExitCode.DAMAGED
    golden.says(found["problems"][0])


def test_files_of_two_jobs_are_not_mixed(capsys: Capture, tmp_path: Path) -> None:
    write_all(tmp_path, eight_ranks())
    write_all(tmp_path, tables_of(units_from_mesh(dp=2, tp=2)))
    code, _, err = run(capsys, tmp_path)
    assert code == ExitCode.DAMAGED
    golden.says(err)


def test_files_of_two_jobs_of_equal_size_are_not_mixed(capsys: Capture, tmp_path: Path) -> None:
    write_all(tmp_path, tables_of(units_from_mesh(dp=2, tp=2)))
    other = tables_of(units_from_mesh(dp=2, tp=2, order="tp-dp"))
    write_group_info({"GROUP_INFO_FILE": str(tmp_path / "group_info.pb")}, 1, other[1])
    code, _, err = run(capsys, tmp_path)
    assert code == ExitCode.DAMAGED
    golden.says(err)
    (tmp_path / "again").mkdir()
    write_group_info({"GROUP_INFO_FILE": str(tmp_path / "again/group_info.pb")}, 2, other[2])
    golden.says(run(capsys, tmp_path)[2])


def test_a_rank_that_does_not_know_of_its_unit_is_a_contradiction(capsys: Capture, tmp_path: Path) -> None:
    write_all(tmp_path, tables_of(units_from_mesh(dp=2, tp=2)))
    message = pb.GroupInfo(format=1, rank=3, world_size=4, group=[0, 1, 2, 3])
    message.units.add(name=UNIT_REPLICATED, holders=[0, 1, 2, 3])
    (tmp_path / "group_info_rank_3.pb").write_bytes(message.SerializeToString())
    code, _, err = run(capsys, tmp_path)
    assert code == ExitCode.DAMAGED
    golden.says(err)


# ---------------------------------------------------------------------- checkpoints

HOLDERS = {"a": [0], "bb": [0, 1]}


def test_a_checkpoint_tells_units_holders_and_writers(capsys: Capture, tmp_path: Path) -> None:
    path = JobWithHolders(recorded=HOLDERS).save(tmp_path, 37)
    for where in (path, tmp_path):
        code, out, _ = run(capsys, where)
        assert code == ExitCode.OK
        golden.says("  ".join(cells) for cells in lines_of(out))


def test_a_checkpoint_in_json(capsys: Capture, tmp_path: Path) -> None:
    path = JobWithHolders(recorded=HOLDERS).save(tmp_path, 37)
    code, found = run_json(capsys, path)
    assert code == ExitCode.OK
    assert (found["source"], found["path"], found["world_size"]) == ("manifest", str(path), 2)
    assert found["units"][0] == {
        "unit": "bb",
        "holders": [0, 1],
        "may_die": 1,
        "writer": 1,
        "file": "rank_1/ttp_rank_1-4_7.ckpt",
    }


@pytest.mark.parametrize("recorded", [None, {"a": [0, 2]}])
def test_holders_that_a_checkpoint_does_not_tell_are_not_guessed(
    capsys: Capture, tmp_path: Path, recorded: Any
) -> None:
    code, out, _ = run(capsys, JobWithHolders(recorded=recorded).save(tmp_path, 37))
    assert code == ExitCode.OK
    golden.says("  ".join(cells) for cells in lines_of(out))


@pytest.mark.parametrize("recorded", [{"a": []}, {"a": "01"}, {"a": 3}, {"a": [0, None]}, {"a": [-1]}])
def test_holders_that_cannot_be_meant_are_damage(capsys: Capture, tmp_path: Path, recorded: Any) -> None:
    code, out, err = run(capsys, JobWithHolders(recorded=recorded).save(tmp_path, 37))
    assert (code, out) == (ExitCode.DAMAGED, "")
    assert "meta.holders" in err


def test_what_is_called_replicated_was_held_by_all_ranks(capsys: Capture, tmp_path: Path) -> None:
    """Pure data parallelism: the checkpoint has this one unit, and no list of its holders."""
    path = published(tmp_path, {0: {UNIT_REPLICATED: Job().unit(UNIT_REPLICATED, 37)}}, world_size=2)
    code, found = run_json(capsys, path)
    assert code == ExitCode.OK
    assert [unit["holders"] for unit in found["units"]] == [[0, 1]]


def test_the_newest_complete_checkpoint_of_a_directory_is_shown(capsys: Capture, tmp_path: Path) -> None:
    older = JobWithHolders(recorded=HOLDERS).save(tmp_path, 36)
    newer = JobWithHolders(recorded=HOLDERS, generation=2).save(tmp_path, 37)
    assert run_json(capsys, tmp_path)[1]["path"] == str(newer)
    (newer / "rank_1/ttp_rank_1-4_7.ckpt").unlink()
    code, found = run_json(capsys, tmp_path)
    assert (code, found["path"]) == (ExitCode.OK, str(older))


def test_a_checkpoint_that_lacks_a_file_is_shown_and_has_its_exit_code(capsys: Capture, tmp_path: Path) -> None:
    path = JobWithHolders(recorded=HOLDERS).save(tmp_path, 37)
    (path / "rank_1/ttp_rank_1-4_7.ckpt").unlink()
    for where in (path, tmp_path):
        code, out, err = run(capsys, where)
        assert code == ExitCode.DAMAGED
        assert "rank_1/ttp_rank_1-4_7.ckpt" in err
        golden.says("  ".join(cells) for cells in lines_of(out))


def test_a_checkpoint_without_a_manifest_says_so(capsys: Capture, tmp_path: Path) -> None:
    path = JobWithHolders().save(tmp_path, 37)
    (path / "manifest.json").unlink()
    code, found = run_json(capsys, path)
    assert code == ExitCode.DAMAGED
    golden.says(found["problems"][0])


def test_nothing_found_has_its_own_exit_code(capsys: Capture, tmp_path: Path) -> None:
    for path, words in ((tmp_path, "neither a group_info file nor a checkpoint in"), (tmp_path / "no", "nothing at")):
        code, out, err = run(capsys, path)
        assert (code, out) == (ExitCode.NOTHING_FOUND, "")
        assert words in err
        assert run_json(capsys, path) == (ExitCode.NOTHING_FOUND, {"path": str(path), "units": []})


def test_a_name_from_a_file_cannot_steer_the_terminal(capsys: Capture, tmp_path: Path) -> None:
    message = pb.GroupInfo(format=1, rank=0, world_size=1, group=[0])
    message.units.add(name="a\x1b[31mb", holders=[0])
    (tmp_path / "group_info.pb").write_bytes(message.SerializeToString())
    assert "\x1b[31m" not in run(capsys, tmp_path)[1]


@pytest.mark.process
def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    write_all(tmp_path, eight_ranks())
    code = (
        f"import sys; from lastwords.cli.main import main; assert main(['groups', {str(tmp_path)!r}]) == 0; "
        "print([name for name in ('torch', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n")
