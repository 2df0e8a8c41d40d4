"""`lastwords upload`, and the other commands on the URL of a store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import layout, load, retention
from lastwords.checkpoint.remote import uploader
from lastwords.checkpoint.remote.store import RemotePath, os_for
from lastwords.cli.main import ExitCode, main
from tests import golden
from tests.checkpoint.states import Job
from tests.checkpoint.stores import file_store
from tests.checkpoint.test_retention import filled, steps_in

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Last words of step 30, periodic checkpoints of 31 to 33."""
    directory = tmp_path / "ckpt"
    Job(attempt=2).save(directory, 30)
    return filled(directory, range(31, 34))


@pytest.fixture
def there(tmp_path: Path) -> RemotePath:
    return file_store(tmp_path / "store")


def run(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: Capture, *arguments: object) -> tuple[int, Any]:
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)


def steps_there(root: RemotePath) -> list[int]:
    found = load.scan(root, os_for([root]))
    return sorted(one.manifest.global_step for one in found if one.manifest is not None)


def flipped_there(root: RemotePath, step: int) -> None:
    """One bit of the data of a checkpoint in the store is wrong."""
    file = next(Path("/", *root.parts[1:]).glob(f"*step_{step}*/rank_1/*.ckpt"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_upload_says_where_each_is(capsys: Capture, here: Path, there: RemotePath) -> None:
    code, said = run_json(capsys, "upload", here, there)
    assert code == ExitCode.OK
    assert [one["path"][-2:] for one in said["uploaded"]] == ["33", "32", "31", "30"]
    assert all(one["to"].startswith(str(there)) for one in said["uploaded"])
    code, out, _ = run(capsys, "upload", here, there)
    assert code == ExitCode.OK
    assert out.split() == [one["to"] for one in said["uploaded"]]


def test_the_commands_that_read_take_a_url(capsys: Capture, here: Path, there: RemotePath) -> None:
    run(capsys, "upload", here, there)
    code, said = run_json(capsys, "ls", there)
    assert (code, [one["global_step"] for one in said["checkpoints"]]) == (ExitCode.OK, [33, 32, 31, 30])
    code, out, _ = run(capsys, "latest", there)
    newest = out.strip()
    assert (code, newest.startswith(f"{there}/")) == (ExitCode.OK, True)
    for path in (there, newest):
        assert run(capsys, "verify", path)[0] == ExitCode.OK
        assert run(capsys, "inspect", path)[0] == ExitCode.OK


def test_verify_reads_every_byte_there_and_says_what_mends_it(capsys: Capture, here: Path, there: RemotePath) -> None:
    run(capsys, "upload", here, there)
    flipped_there(there, 32)
    code, said = run_json(capsys, "verify", there)
    assert code == ExitCode.DAMAGED
    assert [one["sound"] for one in said["checkpoints"]] == [True, False, True, True]
    damaged = said["checkpoints"][1]["path"]
    for path in (there, damaged):
        golden.says(run(capsys, "verify", path)[2])
    run(capsys, "upload", here, there)
    assert run(capsys, "verify", there)[0] == ExitCode.DAMAGED
    assert run(capsys, "upload", "--verify", here, there)[0] == ExitCode.OK
    assert run(capsys, "verify", there)[0] == ExitCode.OK


def test_prune_of_a_url_keeps_its_own_rule(capsys: Capture, here: Path, there: RemotePath) -> None:
    run(capsys, "upload", here, there)
    code, said = run_json(capsys, "prune", there, "--keep", 1, "--dry-run")
    assert (code, steps_there(there)) == (ExitCode.OK, [30, 31, 32, 33])
    code, said = run_json(capsys, "prune", there, "--keep", 1)
    assert (code, [one["global_step"] for one in said["removed"]]) == (ExitCode.OK, [31, 32])
    assert steps_there(there) == [30, 33]
    assert steps_in(here) == [30, 31, 32, 33]


def test_prune_of_a_url_reads_the_one_that_is_to_stay(capsys: Capture, here: Path, there: RemotePath) -> None:
    run(capsys, "upload", here, there)
    flipped_there(there, 33)
    code, said = run_json(capsys, "prune", there, "--keep", 1)
    assert (code, [one["global_step"] for one in said["removed"]], len(said["others"])) == (ExitCode.OK, [31], 1)
    assert steps_there(there) == [30, 32, 33]


def test_prune_of_a_url_leaves_alone_what_prune_of_a_path_does(capsys: Capture, here: Path, there: RemotePath) -> None:
    """A link to a checkpoint of another disk, and a directory into which another program has put a file."""
    run(capsys, "upload", here, there)
    store = Path("/", *there.parts[1:])
    (linked,), (shared,) = store.glob("*step_31*"), store.glob("*step_32*")
    outside = store.with_name("outside")
    linked.rename(outside)
    linked.symlink_to(outside)
    (shared / "precious.txt").write_text("hi")
    code, said = run_json(capsys, "prune", there, "--keep", 1)
    assert (code, said["removed"]) == (ExitCode.DAMAGED, [])
    golden.says([said["others"][0].replace(str(linked), "LINK"), said["left"][0]["why"].replace(str(shared), "SHARED")])
    assert linked.is_symlink()
    assert steps_there(there) == [30, 31, 32, 33]
    for path in store.iterdir():
        assert load.verify(path) == []


def test_prune_of_a_url_removes_nothing_once_the_newest_is_gone(
    capsys: Capture, here: Path, there: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, "upload", here, there)
    carry_out = retention.carry_out

    def later(*made: Any, **how: Any) -> Any:
        (newest,) = Path("/", *there.parts[1:]).glob("*step_33*")
        shutil.rmtree(newest)
        return carry_out(*made, **how)

    monkeypatch.setattr(retention, "carry_out", later)
    _, said = run_json(capsys, "prune", there, "--keep", 1)
    assert said["removed"] == []
    assert steps_there(there) == [30, 31, 32]


def test_prune_leaves_what_has_not_been_uploaded_unless_asked(capsys: Capture, here: Path, there: RemotePath) -> None:
    run(capsys, "upload", here, there)
    filled(here, range(34, 37))
    code, _, errors = run(capsys, "prune", here, "--keep", 1)
    assert code == ExitCode.OK
    assert steps_in(here) == [30, 34, 35, 36]
    golden.says(errors)
    run(capsys, "prune", here, "--keep", 1, "--not-uploaded")
    assert steps_in(here) == [30, 36]


def test_prune_of_a_fallback_directory_leaves_what_has_not_been_uploaded(
    capsys: Capture, here: Path, there: RemotePath, tmp_path: Path
) -> None:
    fallback = filled(tmp_path / "fallback", range(41, 43))
    run(capsys, "upload", here, there, "--fallback", fallback)
    filled(fallback, range(43, 46))
    run(capsys, "prune", fallback, "--keep", 1)
    assert steps_in(fallback) == [43, 44, 45]


def test_one_checkpoint_is_not_uploaded_as_if_it_held_some(capsys: Capture, here: Path, there: RemotePath) -> None:
    checkpoint = layout.checkpoint_dir(here, 33)
    before = sorted(checkpoint.rglob("*"))
    code, _, errors = run(capsys, "upload", checkpoint, there)
    assert code == ExitCode.USAGE
    golden.says(errors)
    assert sorted(checkpoint.rglob("*")) == before


def test_nothing_to_upload_is_said_and_has_its_exit_code(
    capsys: Capture, here: Path, there: RemotePath, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for arguments in ((tmp_path / "empty", there), (here, there, "--job", "typo")):
        code, out, errors = run(capsys, "upload", *arguments)
        assert (code, out) == (ExitCode.NOTHING_FOUND, "")
        golden.says(errors)
        assert run_json(capsys, "upload", *arguments) == (ExitCode.NOTHING_FOUND, {"uploaded": []})
    damaged = Job().save(tmp_path / "damaged", 1)
    shutil.rmtree(damaged / "rank_1")
    code, _, errors = run(capsys, "upload", damaged.parent, there)
    assert code == ExitCode.DAMAGED
    golden.says(errors)
    assert run(capsys, "upload", here, there, "--job", "job")[0] == ExitCode.OK
    assert run(capsys, "upload", "--verify", here, there)[0] == ExitCode.OK


def test_a_fallback_directory_that_is_not_there_is_said(
    capsys: Capture, here: Path, there: RemotePath, tmp_path: Path
) -> None:
    code, out, errors = run(capsys, "upload", here, there, "--fallback", tmp_path / "typo")
    assert (code, len(out.splitlines())) == (ExitCode.OK, 4)
    golden.says(errors)
    here.rename(tmp_path / "fallback")
    here.mkdir()
    code, out, _ = run(capsys, "upload", here, there, "--fallback", tmp_path / "fallback")
    assert (code, len(out.splitlines())) == (ExitCode.OK, 4)


def test_where_nobody_uploads_prune_is_as_ever(capsys: Capture, here: Path) -> None:
    assert uploader.read(here) is None
    run(capsys, "prune", here, "--keep", 1)
    assert steps_in(here) == [30, 33]


def test_what_cannot_be_is_said(capsys: Capture, here: Path, there: RemotePath, tmp_path: Path) -> None:
    assert run(capsys, "ls", there)[0] == ExitCode.NOTHING_FOUND
    assert run(capsys, "verify", there)[0] == ExitCode.NOTHING_FOUND
    code, _, errors = run(capsys, "upload", tmp_path / "missing", there)
    assert code == ExitCode.NOTHING_FOUND
    golden.says(errors)
    with pytest.raises(SystemExit) as caught:
        run(capsys, "upload", here, "bucket/job")
    assert caught.value.code == ExitCode.USAGE
    capsys.readouterr()
    code, _, errors = run(capsys, "ls", "nostore://bucket/job")
    assert code == ExitCode.USAGE
    golden.says(errors)
    (tmp_path / "store").write_text("a file")
    code, _, errors = run(capsys, "upload", here, there)
    assert code == ExitCode.STORAGE
    golden.says(errors)


def test_a_checkpoint_there_without_its_manifest_does_not_count(capsys: Capture, here: Path, there: RemotePath) -> None:
    run(capsys, "upload", here, there)
    next(Path("/", *there.parts[1:]).glob("*step_33*/manifest.json")).unlink()
    code, out, _ = run(capsys, "latest", there)
    assert code == ExitCode.OK
    name = layout.CheckpointName.parse(out.strip().rpartition("/")[2])
    assert name is not None
    assert name.global_step == 32
