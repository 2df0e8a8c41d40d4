"""A checkpoint that was moved to another disk and linked back is one like any other, to every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lastwords.checkpoint import load
from lastwords.checkpoint.load import find_checkpoint
from lastwords.checkpoint.system import REAL_OS, remove_tree
from lastwords.cli.main import ExitCode, main
from tests import golden
from tests.checkpoint.elastic import QUICK, save_naively
from tests.checkpoint.states import Job
from tests.checkpoint.test_rank_transform import job, rows

JOB = Job()
NEWER = "tft_saved_checkpoints-step_37"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Step 36, and a link to step 37, which lies elsewhere under another name."""
    directory = tmp_path / "ckpt"
    JOB.save(directory, 36)
    path = JOB.again(generation=2).save(directory, 37)
    path.rename(tmp_path / "archived")
    path.symlink_to(tmp_path / "archived")
    return directory


def test_all_commands_see_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load.latest(root) == root / NEWER
    assert next(found.path.name for found in load.scan(root)) == NEWER
    assert find_checkpoint(root) == root / NEWER
    assert load.open_checkpoint(root / NEWER).manifest.global_step == 37
    for command in ("latest", "inspect", "verify", "groups"):
        for path in (root, root / NEWER)[: 1 if command == "latest" else 2]:
            assert main([command, str(path), "--json"]) == ExitCode.OK, command
            out, err = capsys.readouterr()
            assert NEWER in out
            assert json.loads(out)
            assert err == ""


COMMANDS = ("ls", "latest", "inspect", "verify", "groups", "prune --keep=1", "upload", "transform")


def refused(command: str, path: str, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether it ends with an exit code and a sentence; an exception that is none of ours is a traceback."""
    name, *options = command.split()
    more = {"upload": ["file:///nowhere/at/all"], "transform": ["out", "--to", "whole"]}.get(name, options)
    code = main([name, path, *more])
    shown = "".join(capsys.readouterr())
    return code != ExitCode.OK and len(shown) > 20


@pytest.mark.parametrize("command", COMMANDS)
def test_a_link_that_leads_in_a_circle_is_refused(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert refused(command, str(tmp_path / "loop"), capsys)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("path", [".", "ckpt"])
def test_a_path_from_a_directory_that_is_gone_is_refused(
    tmp_path: Path, command: str, path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert refused(command, path, capsys)


def test_one_that_leads_nowhere_is_named_and_is_not_passed_over_in_silence(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "archived").rename(tmp_path / "unmounted")
    assert main(["latest", str(root)]) == ExitCode.OK
    out, err = capsys.readouterr()
    assert out.strip().endswith("step_36")
    assert NEWER in err
    golden.says(err)
    for command in ("inspect", "verify"):
        code = main([command, str(root)])
        shown = "".join(capsys.readouterr())
        assert NEWER[:20] in shown
        assert code == (ExitCode.OK if command == "inspect" else ExitCode.DAMAGED)
        assert main([command, str(root / NEWER)]) == ExitCode.DAMAGED
        assert "dangling" in "".join(capsys.readouterr())


def test_a_transformation_takes_a_linked_source_and_a_linked_layout(tmp_path: Path) -> None:
    path = save_naively(tmp_path / "saved", job(), rows(2), os=QUICK)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert main(["transform", str(link), str(tmp_path / "out"), "--to", str(link)]) == 0
    linked_root = tmp_path / "root"
    linked_root.symlink_to(tmp_path / "saved")
    assert main(["transform", str(linked_root), str(tmp_path / "out2"), "--to", str(linked_root)]) == 0


def test_what_is_published_in_the_place_of_a_link_leaves_alone_what_that_led_to(root: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in (tmp_path / "archived").rglob("*"))
    JOB.again(generation=3).save(root, 37)
    assert not (root / NEWER).is_symlink()
    assert load.latest(root) == root / NEWER
    assert sorted(path.name for path in (tmp_path / "archived").rglob("*")) == before
    assert [path.name for path in root.iterdir() if path.name.startswith(".tmp")] == []


def test_removing_a_link_removes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").write_text("x")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "kept")
    remove_tree(link, REAL_OS)
    assert not link.is_symlink()
    assert (tmp_path / "kept" / "x").exists()


def test_transform_calls_a_circular_link_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "circle").symlink_to("circle")
    assert main(["transform", str(tmp_path / "circle"), str(tmp_path / "out"), "--to", "whole"]) == ExitCode.STORAGE
    golden.says(capsys.readouterr().err)
