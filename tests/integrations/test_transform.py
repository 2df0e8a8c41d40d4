"""A whole checkpoint in another layout: shared by processes, killed and gone on with, refused; and all ranks' files."""

from __future__ import annotations

import io
import json
import os as posix
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lastwords
from lastwords.checkpoint import load
from lastwords.checkpoint.boxes import Box
from lastwords.checkpoint.entries import Cause
from lastwords.checkpoint.load import open_checkpoint
from lastwords.checkpoint.reshard.strategy import Cut, Held, Strategy, save_strategy_file, strategy_of
from lastwords.cli.main import main
from lastwords.cli.transform_command import ranks_of
from lastwords.errors import (
    ConfigError,
    FormatError,
    IncompleteError,
    MismatchError,
    ReplacedError,
    StorageError,
    StrategyError,
)
from lastwords.integrations.bars import rank_bars
from lastwords.integrations.diff import diff
from lastwords.integrations.transform import TransformOutcome, transform
from lastwords.integrations.transform_files import transform_all, transform_checkpoints
from tests import golden
from tests.checkpoint.elastic import QUICK, content_of, gathered, save_naively
from tests.checkpoint.test_rank_transform import W, columns, job, rows
from tests.integrations.made import flip, saved, trained

BITS = {name: (dtype, array.tobytes()) for name, (dtype, array) in job().arrays.items()}
STEP = "tft_saved_checkpoints-step_7"


class Rooms:
    """A checkpoint of four ranks, and strategies of three and two."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.source = save_naively(tmp / "saved", job(), rows(2, 2), os=QUICK)
        self.out = tmp / "out"
        self.three, self.two = tmp / "three", tmp / "two"
        save_strategy_file(columns(3), self.three, QUICK)
        save_strategy_file(rows(2), self.two, QUICK)

    def move(self, to: Path | None = None, **more: Any) -> TransformOutcome:
        return transform(more.pop("source", self.source), more.pop("out", self.out), to or self.three, os=QUICK, **more)


@pytest.fixture
def rooms(tmp_path: Path) -> Rooms:
    return Rooms(tmp_path)


# ------------------------------------------------------------------ what comes out


def test_units_are_those_of_a_job_with_that_layout_each_written_by_its_lowest_holder(rooms: Rooms) -> None:
    done = rooms.move()
    assert done.path == rooms.out / STEP
    assert (done.world_size, done.written, done.missing) == (3, (0, 1, 2), ())
    manifest = open_checkpoint(done.path).manifest
    assert {unit: entry.writer for unit, entry in manifest.units.items()} == {
        "replicated": 0, "rank-0": 0, "rank-1": 1, "rank-2": 2,
    }  # fmt: skip
    assert manifest.units["rank-1"].meta.optimizer_state["w"]["dict"][2][1]["shape"] == [8, 2]
    assert "placements" not in json.dumps(manifest.units["rank-1"].said)
    assert strategy_of(manifest).tensors["model/w"] == columns(3).tensors["model/w"]
    assert load.latest(rooms.out) == done.path
    assert sorted(path.name for path in rooms.out.iterdir()) == [STEP]
    assert sorted(path.name for path in done.path.iterdir()) == ["manifest.json", "rank_0", "rank_1", "rank_2"]


def test_state_of_single_ranks_goes_along_and_what_was_lost_is_still_said(rooms: Rooms) -> None:
    old = open_checkpoint(rooms.source).manifest
    new = open_checkpoint(rooms.move(rooms.two).path or Path()).manifest
    assert new.world_size == old.world_size == 4
    assert {rank: entry.writer for rank, entry in new.locals.items()} == {rank: rank % 2 for rank in old.locals}
    assert new.reasons == old.reasons
    assert any(reason.cause is Cause.LOCAL_STATE_LOST for reason in new.reasons)
    assert (new.job, new.cause_ranks, new.facts["torch"]) == (old.job, old.cause_ranks, "2.13")
    assert new.published_unix_ns > old.published_unix_ns


def test_a_checkpoint_s_layout_can_be_meant_and_the_newest_in_a_directory_is_taken(rooms: Rooms) -> None:
    first = rooms.move()
    assert first.path is not None
    back = transform(rooms.out, rooms.tmp / "back", rooms.source.parent, jobs=3, os=QUICK)
    assert back.path is not None
    old, new = (open_checkpoint(path).manifest for path in (rooms.source, back.path))
    assert strategy_of(old) == strategy_of(new)
    assert {unit: entry.meta.holders for unit, entry in old.units.items()} == {
        unit: entry.meta.holders for unit, entry in new.units.items()
    }
    assert gathered(back.path) == BITS


def test_whole_is_one_unit_of_one_rank(rooms: Rooms) -> None:
    done = transform(rooms.source, rooms.out, None, os=QUICK)
    assert done.path is not None
    manifest = open_checkpoint(done.path).manifest
    assert list(manifest.units) == ["replicated"]
    assert manifest.holders_world_size == 1
    assert gathered(done.path) == BITS


# ------------------------------------------------------------------ shared, killed, gone on with


def test_several_hosts_share_the_ranks_and_the_last_one_publishes(rooms: Rooms) -> None:
    first = rooms.move(ranks=[0])
    assert (first.path, first.written, first.missing) == (None, (0,), (1, 2))
    assert load.scan(rooms.out) == []
    second = rooms.move(ranks=[2, 0])
    assert (second.path, second.written, second.already, second.missing) == (None, (2,), (0,), (1,))
    third = rooms.move(ranks=[1])
    assert (third.written, third.already) == ((1,), (0, 2))
    assert third.path is not None
    assert gathered(third.path) == BITS


def test_another_source_or_strategy_for_the_same_step_is_refused_with_what_to_do(rooms: Rooms) -> None:
    rooms.move(ranks=[0])
    with golden.raises(ConfigError):
        rooms.move(rooms.two)
    other = save_naively(rooms.tmp / "other", job(), rows(4), os=QUICK)
    with golden.raises(ConfigError):
        rooms.move(source=other)
    assert rooms.move().path is not None


def test_a_finished_part_that_was_damaged_since_is_written_again(rooms: Rooms) -> None:
    rooms.move(ranks=[0, 1])
    [file] = (rooms.out / f".transform-{STEP}" / "rank_1").glob("*.ckpt")
    flip(file, 20)
    done = rooms.move()
    assert (done.already, done.written) == ((0,), (1, 2))
    assert done.path is not None
    assert not load.verify(done.path)


def test_killed_half_way_the_same_command_goes_on(rooms: Rooms) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from lastwords.integrations.transform import transform\n"
        "def tell(rank, done, total):\n"
        "    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "transform(*map(Path, sys.argv[1:4]), progress=tell)\n"
    )
    places = [str(path) for path in (rooms.source, rooms.out, rooms.three)]
    killed = subprocess.run([sys.executable, "-c", script, *places], timeout=60, env={**posix.environ})
    assert killed.returncode == -signal.SIGKILL
    assert load.scan(rooms.out) == []
    assert (rooms.out / f".transform-{STEP}" / "rank_1").exists()
    done = rooms.move()
    assert (done.already, done.written) == ((0,), (1, 2))
    assert done.path is not None
    assert gathered(done.path) == BITS


def test_a_rank_that_another_process_is_writing_is_left_to_it(rooms: Rooms) -> None:
    rooms.move(ranks=[0])
    lock = rooms.out / f".transform-{STEP}" / "rank_1.lock"
    lock.touch()
    fd = QUICK.open_read(lock)
    assert QUICK.try_lock(fd)
    try:
        done = rooms.move()
        assert (done.path, done.written, done.missing, done.busy) == (None, (2,), (1,), (1,))
    finally:
        QUICK.close(fd)
    assert rooms.move().path is not None


# ------------------------------------------------------------------ of a real model


def test_a_model_s_state_comes_through_and_a_rank_s_file_goes_into_a_model_in_three_lines(tmp_path: Path) -> None:
    import safetensors.torch

    model, optimizer = trained()
    source = saved(tmp_path / "saved", model, optimizer)
    moved = transform(source, tmp_path / "moved", None, os=QUICK).path
    assert moved is not None
    assert not diff(source, moved).differences
    transform_all(str(moved), str(tmp_path / "files"), "part", os=QUICK)
    state = safetensors.torch.load_file(tmp_path / "files/rank_0/part0.ckpt")
    other, _ = trained(seed=5)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(state[f"model/{name}"])
    inputs = torch.randn(2, 3)
    assert not torch.equal(other.scale, model.scale)
    other.scale.copy_(state["buffer/scale"])
    assert torch.equal(other(inputs), model(inputs))


# ------------------------------------------------------------------ refusals


def test_another_checkpoint_of_the_same_step_in_the_destination_is_refused_and_this_very_one_is_the_result(
    rooms: Rooms,
) -> None:
    first = rooms.move()
    again = rooms.move()
    assert (again.path, again.written, again.already) == (first.path, (), (0, 1, 2))
    with golden.raises(ConfigError):
        rooms.move(rooms.two)
    with golden.raises(ConfigError):
        rooms.move(out=rooms.source.parent)
    assert load.latest(rooms.out) == first.path


def test_a_flipped_byte_of_the_source_is_never_carried_over(rooms: Rooms) -> None:
    [file] = rooms.source.glob("rank_2/*.ckpt")
    flip(file, file.stat().st_size - 1)
    with golden.raises(FormatError):
        rooms.move()
    assert load.scan(rooms.out) == []


def test_a_source_that_is_replaced_while_it_is_read_is_an_error(rooms: Rooms) -> None:
    class Replacing(type(QUICK)):  # type: ignore[misc]
        """When rank 1 begins, the same step is saved once more: other bytes of the manifest, the same tensors."""

        def create(self, path: Path, *, direct: bool) -> int:
            if path.parent.name == "rank_1" and path.suffix == ".ckpt":
                shutil.rmtree(rooms.source)
                save_naively(rooms.source.parent, job(), rows(2, 2), os=QUICK)
            fd: int = super().create(path, direct=direct)
            return fd

    with golden.raises(ReplacedError):
        transform(rooms.source, rooms.out, rooms.three, os=Replacing())
    assert load.scan(rooms.out) == []


@pytest.mark.parametrize(
    ("moment", "after"), [("manifest.json", "nothing"), ("rank_1", "nothing"), ("rank_1", "other content")]
)
def test_bytes_that_do_not_fit_are_no_damage_where_the_source_is_another_one_by_then(
    rooms: Rooms, moment: str, after: str
) -> None:
    """Between finding and opening it, or while a part is written: rank 2's file is then another one, or not there."""

    class Replacing(type(QUICK)):  # type: ignore[misc]
        looks = 0

        def open_read(self, path: Path) -> int:
            if path.parent == rooms.source and path.name == moment:
                self.looks += 1
            if self.looks == 2:  # the first look is for the stamp
                self.replace()
            fd: int = super().open_read(path)
            return fd

        def create(self, path: Path, *, direct: bool) -> int:
            if path.parent.name == moment and path.suffix == ".ckpt":
                self.replace()
            fd: int = super().create(path, direct=direct)
            return fd

        def replace(self) -> None:
            self.looks = 3
            shutil.rmtree(rooms.source)
            if after == "other content":
                other = job()
                other.arrays["model/w"] = "F32", other.arrays["model/w"][1] + 1
                save_naively(rooms.source.parent, other, rows(4), os=QUICK)

    with pytest.raises(ReplacedError):
        transform(rooms.source, rooms.out, rooms.three, os=Replacing())
    assert load.scan(rooms.out) == []


def test_strategies_that_do_not_fit_are_refused_before_anything_is_written(rooms: Rooms) -> None:
    (rooms.tmp / "empty").touch()
    gap = Strategy(1, {"model/w": Cut("F32", W, (Held(Box((0, 0), (7, 6)), (0,)),))})
    save_strategy_file(gap, rooms.tmp / "gap", QUICK)
    other = Strategy(1, {"model/v": Cut("F32", W, (Held(Box((0, 0), W), (0,)),))})
    save_strategy_file(other, rooms.tmp / "other model", QUICK)
    twice = Strategy(1, {**columns(1).tensors, "optim/w": Cut("", W, (Held(Box((0, 0), W), (1,)),))})
    save_strategy_file(twice, rooms.tmp / "rank 1 of 1", QUICK)
    kinds: dict[str, Any] = {
        "empty": StrategyError,
        "nothing": StrategyError,
        "gap": StrategyError,
        "other model": MismatchError,
        "rank 1 of 1": StrategyError,
    }
    for name, kind in kinds.items():
        with golden.raises(kind):
            rooms.move(rooms.tmp / name)
    assert not rooms.out.exists()


def test_ranks_and_jobs_that_make_no_sense_are_refused(rooms: Rooms) -> None:
    for ranks in ([], [3], [-1]):
        with pytest.raises(ConfigError, match="ranks 0 to 2"):
            rooms.move(ranks=ranks)
    with golden.raises(ConfigError):
        rooms.move(jobs=0)


def test_a_rank_that_fails_among_several_at_once_is_an_error_and_the_others_are_kept(rooms: Rooms) -> None:
    class Full(type(QUICK)):  # type: ignore[misc]
        def create(self, path: Path, *, direct: bool) -> int:
            if path.suffix == ".ckpt" and path.parent.name == "rank_2":
                raise OSError(28, "no space left on device")
            fd: int = super().create(path, direct=direct)
            return fd

    with golden.raises(StorageError):
        transform(rooms.source, rooms.out, rooms.three, jobs=3, os=Full())
    assert rooms.move().path is not None


# ------------------------------------------------------------------ the command


def test_the_command_prints_the_path_and_diff_says_the_same(rooms: Rooms, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(rooms.source.parent), str(rooms.out)
    assert main(["transform", source, out, "--to", str(rooms.three), "--ranks", "0,2"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    golden.says(printed.err)
    assert main(["transform", source, out, "--to", str(rooms.three), "--jobs", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{rooms.out / STEP}\n"
    golden.says(printed.err)
    assert main(["diff", source, out]) == 0
    assert main(["verify", out]) == 0
    capsys.readouterr()
    assert main(["inspect", str(rooms.out / STEP)]) == 0
    golden.says(capsys.readouterr().out)
    assert main(["groups", out]) == 0
    assert "3 ranks" in capsys.readouterr().out


def test_the_command_says_by_its_exit_code_what_is_wrong(rooms: Rooms, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(rooms.source), str(rooms.out)
    assert main(["transform", source, out, "--to", "whole", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(rooms.out / STEP)
    assert main(["transform", source, out, "--to", "whole", "--verify"]) == 0
    file = next((rooms.out / STEP).rglob("*.ckpt"))
    flip(file, file.stat().st_size - 1)
    assert main(["transform", source, out, "--to", "whole", "--verify"]) == 3
    golden.says(capsys.readouterr().err)
    assert main(["transform", source, out, "--to", str(rooms.two)]) == 2
    assert main(["transform", str(rooms.tmp / "nothing"), out, "--to", "whole"]) == 3
    assert main(["transform", source, str(rooms.tmp / "new"), "--to", str(rooms.tmp / "nothing")]) == 3
    assert main(["transform", source, str(rooms.tmp / "new"), "--to", "whole", "--ranks", "7-3"]) == 2
    golden.says(capsys.readouterr().err)
    assert main(["transform", source, str(rooms.tmp / "new"), "--to", "whole", "--ranks", "0-99999999"]) == 2
    golden.says(capsys.readouterr().err)
    assert main(["transform", str(rooms.three), str(rooms.tmp / "new"), "--to", "whole"]) == 2
    golden.says(capsys.readouterr().err)


def test_a_dry_run_says_what_would_be_written_and_read_and_touches_nothing(
    rooms: Rooms, capsys: pytest.CaptureFixture[str]
) -> None:
    def everything() -> list[tuple[str, int, int]]:
        return [(str(path), path.stat().st_mtime_ns, path.stat().st_ino) for path in sorted(rooms.tmp.rglob("*"))]

    command = ["transform", str(rooms.source), str(rooms.out), "--to", str(rooms.three)]
    before = everything()
    assert main([*command, "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert main([*command, "--dry-run"]) == 0
    golden.says(capsys.readouterr().out)
    assert everything() == before
    assert main([*command, "--ranks", "1"]) == 1
    assert main([*command, "--dry-run", "--json", "--ranks", "0,1"]) == 0
    capsys.readouterr()
    path = rooms.move().path
    assert path is not None
    assert said["path"] == str(path)
    assert [part["rank"] for part in said["writes"]] == [0, 1, 2]
    written = {
        entry.path: sum(spec.nbytes for spec in open_checkpoint(path).manifest.tensors_of(entry).values())
        for entry in open_checkpoint(path).manifest.files
    }
    assert [part["bytes"] for part in said["writes"]] == list(written.values())
    assert {Path(file) for part in said["writes"] for file in part["reads"]} <= set(rooms.source.rglob("*.ckpt"))
    # What is there needs nothing more; another strategy, or one that does not fit, is refused as it would be.
    assert main([*command, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["writes"] == []
    assert main(["transform", str(rooms.source), str(rooms.out), "--to", str(rooms.two), "--dry-run"]) == 2


@pytest.mark.parametrize("text", ["", "a", "1,,2", "1-", "-1", "3-1", "1-99999999999"])
def test_a_list_of_ranks_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        ranks_of(text)


# ------------------------------------------------------------------ all ranks' files


def test_all_files_appear_at_once_under_upstream_s_names(rooms: Rooms) -> None:
    transform_checkpoints(str(rooms.source), str(rooms.out), "ms-", None, str(rooms.three))
    assert sorted(str(path.relative_to(rooms.out)) for path in rooms.out.rglob("*.ckpt")) == [
        f"rank_{rank}/ms-{rank}.ckpt" for rank in range(3)
    ]
    with golden.raises(ValueError):
        transform_checkpoints(str(rooms.source), str(rooms.out), "ms-", None, str(rooms.three))


def test_the_newest_file_of_each_rank_is_taken_by_the_step_that_stands_in_it(rooms: Rooms) -> None:
    later = save_naively(rooms.tmp / "later", job(), rows(2, 2), step=12, os=QUICK)
    files = rooms.tmp / "files"
    transform_all(str(rooms.source), str(files), "a", None, str(rooms.two), os=QUICK)
    transform_all(str(later), str(rooms.tmp / "new"), "b", None, str(rooms.two), os=QUICK)
    newer = (rooms.tmp / "new/rank_0/b0.ckpt").rename(files / "rank_0/b0.ckpt")
    posix.utime(newer, (1, 1))  # old by its time
    with golden.raises(MismatchError):
        transform_all(str(files), str(rooms.out), "c", str(rooms.two), str(rooms.three), os=QUICK)
    (rooms.tmp / "new/rank_1/b1.ckpt").rename(files / "rank_1/b1.ckpt")
    (files / "rank_1/.tmp-c.ckpt").write_bytes(b"half")
    transform_all(str(files), str(rooms.out), "c", str(rooms.two), str(rooms.three), os=QUICK)
    assert content_of(rooms.out / "rank_2/c2.ckpt")[0]["global_step"] == 12


def test_a_missing_rank_of_a_directory_is_named_and_nothing_appears(rooms: Rooms) -> None:
    files = rooms.tmp / "files"
    transform_all(str(rooms.source), str(files), "a", None, str(rooms.two), os=QUICK)
    (files / "rank_1/a1.ckpt").unlink()
    with golden.raises(IncompleteError):
        transform_checkpoints(str(files), str(rooms.out), "c", str(rooms.two), str(rooms.three))
    assert not rooms.out.exists()
    for source in (rooms.tmp / "nothing", rooms.tmp / "three"):
        with golden.raises(IncompleteError):
            transform_checkpoints(str(source), str(rooms.out), "c")
    (rooms.tmp / "hollow/rank_0").mkdir(parents=True)
    with golden.raises(IncompleteError):
        transform_checkpoints(str(rooms.tmp / "hollow"), str(rooms.out), "c")


def test_a_strategy_that_is_not_the_checkpoint_s_own_is_refused(rooms: Rooms) -> None:
    other = Strategy(1, {"model/w": Cut("BF16", W, (Held(Box((0, 0), W), (0,)),))})
    save_strategy_file(other, rooms.tmp / "other", QUICK)
    with golden.raises(ValueError):
        transform_checkpoints(str(rooms.source), str(rooms.out), "c", str(rooms.tmp / "other"), None)
    with pytest.raises(TypeError):
        transform_checkpoints(3, str(rooms.out), "c")  # type: ignore[arg-type]
    with golden.raises(ValueError):
        transform_checkpoints(str(rooms.source), str(rooms.out), "../c")


def test_the_calls_are_where_users_look_for_them() -> None:
    assert lastwords.transform_checkpoints is transform_checkpoints
    assert lastwords.rank_list_for_transform(0) == [0]
    assert callable(lastwords.transform_checkpoint_by_rank)


def test_on_a_terminal_every_rank_has_a_bar_and_elsewhere_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    with rank_bars() as tell:
        assert tell is not None
        tell(3, 1 << 20, None)
        tell(4, 1 << 20, 2 << 20)
    assert "rank 3" in screen.getvalue()
    assert "rank 4" in screen.getvalue()
    for nobody_looks in (io.StringIO(), None):  # None is what a process has that was started with 2>&-
        monkeypatch.setattr("sys.stderr", nobody_looks)
        with rank_bars() as tell:
            assert tell is None
