from __future__ import annotations

import errno
import json
import os as posix
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lastwords import clock
from lastwords.checkpoint import layout, load, publish
from lastwords.checkpoint.system import Os
from lastwords.cli import tables
from lastwords.cli.main import ExitCode, main
from tests import golden
from tests.checkpoint.states import Job
from tests.checkpoint.test_retention import filled, flipped, name_of, sound_in, steps_in

PERIODIC = Job(incident=0)
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    Job(attempt=2).save(directory, 30)
    return filled(directory)


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """Last words of step 30, periodic checkpoints of 31 to 36."""
    return Path(shutil.copytree(made, tmp_path / "ckpt"))


def run(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: Capture, *arguments: object) -> tuple[int, Any]:
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)


# ---------------------------------------------------------------------- ls


def test_ls_lists_each_with_its_kind(capsys: Capture, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "wall_ns", lambda: 3 * 3600 * 10**9)
    (layout.checkpoint_dir(root, 33) / layout.MANIFEST_NAME).unlink()
    next((layout.checkpoint_dir(root, 34) / "rank_1").iterdir()).unlink()
    code, out, _ = run(capsys, "ls", root)
    assert code == ExitCode.OK
    golden.says(" ".join(out.split()))


def test_ls_in_json(capsys: Capture, root: Path) -> None:
    next((layout.checkpoint_dir(root, 34) / "rank_1").iterdir()).unlink()
    code, said = run_json(capsys, "ls", root)
    assert code == ExitCode.OK
    found = said["checkpoints"]
    assert [one["global_step"] for one in found] == [36, 35, 34, 33, 32, 31, 30]
    assert [one["complete"] for one in found] == [True, True, False, True, True, True, True]
    assert [one["kind"] for one in found] == ["periodic"] * 6 + ["last words"]
    assert found[0].keys() >= {"path", "bytes", "age_s", "published_unix_ns", "job", "exact", "why"}


def test_ls_of_nothing_and_of_nothing_whole(capsys: Capture, tmp_path: Path) -> None:
    assert run_json(capsys, "ls", tmp_path) == (ExitCode.NOTHING_FOUND, {"checkpoints": []})
    (PERIODIC.save(tmp_path, 3) / layout.MANIFEST_NAME).unlink()
    assert run(capsys, "ls", tmp_path)[0] == ExitCode.DAMAGED


def test_an_age_in_the_future_is_called_that(capsys: Capture, tmp_path: Path) -> None:
    directory = PERIODIC.write(tmp_path, 37)
    publish.publish(tmp_path, directory, PERIODIC.facts(37), published_unix_ns=clock.wall_ns() + 10**15)
    assert tables.age(-1) in run(capsys, "ls", tmp_path)[1]
    assert run_json(capsys, "ls", tmp_path)[1]["checkpoints"][0]["age_s"] < -900_000


# ---------------------------------------------------------------------- prune


def test_prune_says_what_went(capsys: Capture, root: Path) -> None:
    code, out, err = run(capsys, "prune", root, "--keep", 2)
    assert (code, err) == (ExitCode.OK, "")
    golden.says(" ".join(out.split()))
    assert steps_in(root) == [30, 35, 36]
    code, out, err = run(capsys, "prune", root, "--keep", 2)
    assert (code, err) == (ExitCode.OK, "")
    golden.says(out)
    assert run(capsys, "prune", root, "--keep", 1, "--last-words")[0] == ExitCode.OK
    assert steps_in(root) == [36]


def test_a_dry_run_removes_nothing_and_says_the_same(capsys: Capture, root: Path) -> None:
    before = run_json(capsys, "prune", root, "--keep", 2, "--dry-run")
    assert steps_in(root) == [30, *range(31, 37)]
    after = run_json(capsys, "prune", root, "--keep", 2)
    assert (before[1].pop("dry_run"), after[1].pop("dry_run")) == (True, False)
    assert before == after
    assert [one["global_step"] for one in after[1]["removed"]] == [31, 32, 33, 34]
    assert [one["global_step"] for one in after[1]["kept"]] == [36, 35, 30]
    golden.says(" ".join(run(capsys, "prune", root, "--keep", 1, "--dry-run")[1].split()))


def test_one_in_so_many_minutes(capsys: Capture, tmp_path: Path) -> None:
    for number in range(6):
        job = PERIODIC.again(attempt=number + 1)
        directory = job.write(tmp_path, 31 + number)
        at_ns = number * 600 * 10**9
        publish.publish(tmp_path, directory, job.facts(31 + number), published_unix_ns=at_ns + 1)
    assert run(capsys, "prune", tmp_path, "--per-minutes", 20)[0] == ExitCode.OK
    assert steps_in(tmp_path) == [31, 33, 35, 36]


def test_of_several_jobs_it_has_to_be_said_whose(capsys: Capture, root: Path) -> None:
    filled(root, range(41, 44), PERIODIC.again(name="other"))
    code, _, err = run(capsys, "prune", root, "--keep", 1)
    assert code == ExitCode.USAGE
    golden.says(err)
    assert run(capsys, "prune", root, "--keep", 1, "--job", "other")[0] == ExitCode.OK
    assert steps_in(root) == [30, *range(31, 37), 43]
    assert run(capsys, "prune", root, "--keep", 1, "--job", "other", "--job", "job")[0] == ExitCode.OK
    assert steps_in(root) == [30, 36, 43]


def test_a_job_that_is_not_there_is_told_whose_checkpoints_are(capsys: Capture, root: Path) -> None:
    filled(root, range(41, 44), PERIODIC.again(name="other"))
    everything = steps_in(root)
    code, out, err = run(capsys, "prune", root, "--keep", 1, "--job", "nonsense")
    assert (code, out, steps_in(root)) == (ExitCode.NOTHING_FOUND, "", everything)
    golden.says(err)
    # Beside something of nobody's: it is not said that nothing there is sound.
    (layout.checkpoint_dir(root, 33) / layout.MANIFEST_NAME).unlink()
    code, _, err = run(capsys, "prune", root, "--keep", 1, "--job", "nonsense", "--job", "gibberish")
    assert (code, steps_in(root)) == (ExitCode.NOTHING_FOUND, everything)
    golden.says(err)
    code, _, err = run(capsys, "prune", root, "--keep", 1, "--job", "nonsense", "--job", "other")
    assert (code, steps_in(root)) == (ExitCode.OK, [30, *range(31, 37), 43])
    golden.says(err.splitlines()[0])


def test_one_that_is_read_stays_and_the_exit_code_says_so(capsys: Capture, root: Path) -> None:
    with load.open_checkpoint(layout.checkpoint_dir(root, 33)):
        code, said = run_json(capsys, "prune", root, "--keep", 1)
    assert code == ExitCode.AGAIN
    assert [one["global_step"] for one in said["left"]] == [33]
    assert steps_in(root) == [30, 33, 36]


def test_what_is_left_alone_is_told(capsys: Capture, root: Path) -> None:
    (layout.checkpoint_dir(root, 33) / layout.MANIFEST_NAME).unlink()
    (layout.checkpoint_dir(root, 34) / "notes.txt").write_text("mine")
    code, _, err = run(capsys, "prune", root, "--keep", 1)
    assert code == ExitCode.DAMAGED
    golden.says(err)
    assert steps_in(root) == [30, 33, 34, 36]


def test_prune_reads_the_one_that_is_to_stay_and_names_it_if_it_is_damaged(capsys: Capture, root: Path) -> None:
    flipped(root, 36)
    before = run_json(capsys, "prune", root, "--keep", 1, "--dry-run")
    after = run_json(capsys, "prune", root, "--keep", 1)
    assert (before[1].pop("dry_run"), after[1].pop("dry_run")) == (True, False)
    assert before == after
    assert [one["global_step"] for one in after[1]["kept"]] == [35, 30]
    golden.says(after[1]["others"])
    code, out, err = run(capsys, "prune", root, "--keep", 1)
    assert code == ExitCode.OK
    golden.says((" ".join(out.split()), err))
    assert (steps_in(root), sound_in(root)) == ([30, 35, 36], [30, 35])


def test_prune_where_nothing_may_be_read(capsys: Capture, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Os, path: Path) -> int:
        raise PermissionError(errno.EACCES, posix.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as here:
        here.setattr(Os, "open_read", refused)
        here.setattr(Os, "open_lock", refused)
        code, out, err = run(capsys, "prune", root, "--keep", 1)
    assert (code, out, steps_in(root)) == (ExitCode.STORAGE, "", [30, *range(31, 37)])
    golden.says(err)


def test_prune_where_nothing_is_sound(capsys: Capture, root: Path) -> None:
    flipped(root, 30, 32, 33, 34, 35, 36)
    (layout.checkpoint_dir(root, 31) / layout.MANIFEST_NAME).unlink()
    code, out, err = run(capsys, "prune", root, "--keep", 1, "--last-words")
    assert (code, steps_in(root)) == (ExitCode.OK, [30, *range(31, 37)])
    golden.says((" ".join(out.split()), err))
    for step in range(30, 37):
        (layout.checkpoint_dir(root, step) / layout.MANIFEST_NAME).unlink(missing_ok=True)
    code, said = run_json(capsys, "prune", root, "--keep", 1, "--job", "job")
    assert (code, len(said["others"])) == (ExitCode.DAMAGED, 7)
    code, out, err = run(capsys, "prune", root, "--keep", 1, "--job", "job")
    golden.says((out, err.splitlines()[-1]))


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_what_cannot_be_read_keeps_prune_from_removing(
    capsys: Capture, root: Path, monkeypatch: pytest.MonkeyPatch, dry: list[str]
) -> None:
    reads = Os.preadv

    def failing(self: Os, fd: int, views: Sequence[memoryview], offset: int) -> int:
        count = reads(self, fd, views, offset)
        if name_of(fd).endswith("-4_6.ckpt") and count == self.size(fd):
            raise OSError(errno.EIO, posix.strerror(errno.EIO))
        return count

    monkeypatch.setattr(Os, "preadv", failing)
    code, out, err = run(capsys, "prune", root, "--keep", 1, *dry)
    assert (code, out, steps_in(root)) == (ExitCode.STORAGE, "", [30, *range(31, 37)])
    golden.says(err)


def test_prune_of_nothing(capsys: Capture, tmp_path: Path) -> None:
    assert run(capsys, "prune", tmp_path, "--keep", 1)[0] == ExitCode.NOTHING_FOUND
    assert run(capsys, "prune", tmp_path / "missing", "--keep", 1)[0] == ExitCode.NOTHING_FOUND
    code, said = run_json(capsys, "prune", tmp_path, "--keep", 1, "--job", "nobody")
    assert (code, said) == (ExitCode.NOTHING_FOUND, {"removed": [], "left": [], "kept": [], "others": []})


@pytest.mark.parametrize("arguments", [[], ["--keep", "0"], ["--keep", "x"], ["--keep", "2", "--per-minutes", "3"]])
def test_wrong_usage(capsys: Capture, root: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["prune", str(root), *arguments])
    assert ended.value.code == ExitCode.USAGE
    assert len(steps_in(root)) == 7
