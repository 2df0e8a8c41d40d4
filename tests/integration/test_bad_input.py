"""What cannot work is refused at the start, in bounded time, with what to do; what fails at a death loses nothing."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lastwords
from tests.integration.forked import on_ranks
from tests.integration.harness import Port
from tests.integration.kills import Kill
from tests.integration.plan import Layout
from tests.integration.rig import EXIT_NOT_SAVED, KILLED, Launch, Rig
from tests.selection import more

pytestmark = pytest.mark.process

LAYOUT = Layout()
KILL = Kill("forward", 6, (3,))
BEHIND = Kill("forward", 3, (3,))
REFUSED_TIMEOUT_S = 40.0


def refused(launch: Launch, pattern: str) -> None:
    """Every rank says what matches, having trained nothing, and ends with an error: its own or that of another rank."""
    launch.finish(REFUSED_TIMEOUT_S)
    codes = set(launch.codes.values())
    if 1 not in codes or not codes <= {1, EXIT_NOT_SAVED}:
        raise launch.fail(f"the ranks ended with {launch.codes}, expected errors")
    for rank in range(launch.layout.world_size):
        text = " ".join(launch.job.output(rank).split())
        if not re.search(pattern, text):
            raise launch.fail(f"rank {rank} does not say {pattern!r}")
        assert launch.track.last_step(rank) == 0


# ---------------------------------------------------------------------- at the start


@pytest.mark.thorough
def test_a_ctrl_rank_id_outside_the_world_is_refused(rig: Rig) -> None:
    refused(rig.launch(LAYOUT, ctrl_rank=4), r"ConfigError: ctrl_rank_id is 4.*ranks 0 to 3")


def test_a_port_that_something_else_uses_is_named(rig: Rig) -> None:
    port = Port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port.number))
        other.listen()
        launch = rig.launch(LAYOUT, port=port)
        refused(launch, rf"{port.number}.*in use")


def test_a_controller_that_cannot_be_reached_is_named_in_bounded_time(rig: Rig) -> None:
    port = Port()
    launch = rig.launch(LAYOUT, port=port, sabotage=("no_controller",), env={"LASTWORDS_CONNECT_TIMEOUT_S": "2"})
    refused(launch, rf"UnavailableError: .*127\.0\.0\.1:{port.number}")


def test_a_malformed_switch_is_refused(rig: Rig) -> None:
    refused(rig.launch(LAYOUT, env={"MS_ENABLE_TFT": "{TTP:maybe}"}), r"ConfigError: MS_ENABLE_TFT=.*\{TTP:1\}")


def test_switched_off_it_is_not_there(rig: Rig) -> None:
    launch = rig.launch(LAYOUT, env={"MS_ENABLE_TFT": "{TTP:0}"})
    launch.finish()
    rig.check_untouched(launch)
    assert not any(path.read_text() for path in launch.directory.glob("rank_*.shm"))
    assert not list(Path(launch.plan.checkpoints).glob("logs/*"))


def test_ranks_with_different_numbers_of_steps_are_refused_and_named(rig: Rig) -> None:
    launch = rig.launch(LAYOUT, overrides=((2, "steps_per_epoch", 5),))
    refused(launch, r"ConfigError: .*rank 2\b.*5")


def test_ranks_with_different_directories_are_refused_and_named(rig: Rig, tmp_path: Path) -> None:
    launch = rig.launch(LAYOUT, overrides=((1, "checkpoints", str(tmp_path / "elsewhere")),))
    launch.finish(REFUSED_TIMEOUT_S)
    assert launch.codes[1] == 1
    assert "elsewhere" in launch.job.output(1)
    assert all(launch.codes.values())


def test_a_path_that_cannot_be_written_is_found_at_the_start(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    launch = rig.launch(LAYOUT, checkpoints=tmp_path / "file" / "checkpoints")
    refused(launch, r"ConfigError: .*file/checkpoints.*a file where a directory is needed")


def test_extras_that_cannot_be_stored_are_refused_with_their_path(rig: Rig) -> None:
    refused(rig.launch(LAYOUT, bad_extra=True), r"UnstorableError: .*odd.*thing")


# ---------------------------------------------------------------------- storage fails at the death

IMPATIENT = {"LASTWORDS_STORAGE_RETRY_S": "1"}


@pytest.mark.thorough
def test_a_disk_that_is_full_for_one_rank_makes_another_save(rig: Rig) -> None:
    launch = rig.launch(LAYOUT, faults=KILL.faults(LAYOUT), sabotage=("disk_full:0",))
    launch.finish()
    step = rig.check_last_words(launch, [3], {5})
    assert writer(launch) == 1
    rig.check_resume(launch, step)


@pytest.mark.thorough
def test_a_failed_fsync_makes_another_rank_save(rig: Rig) -> None:
    launch = rig.launch(LAYOUT, faults=KILL.faults(LAYOUT), sabotage=("fsync_fails:0", "fsync_fails:1"))
    launch.finish()
    step = rig.check_last_words(launch, [3], {5})
    assert writer(launch) == 2
    rig.check_resume(launch, step)


@pytest.mark.thorough
def test_a_failed_fsync_of_every_rank_is_tried_again(rig: Rig) -> None:
    launch = rig.launch(LAYOUT, faults=KILL.faults(LAYOUT), sabotage=("fsync_fails_once",))
    launch.finish()
    step = rig.check_last_words(launch, [3], {5})
    rig.check_resume(launch, step)


@pytest.mark.thorough
def test_a_full_disk_falls_back_to_the_other_directory(rig: Rig, tmp_path: Path) -> None:
    fallback = tmp_path / "fallback"
    launch = rig.launch(
        LAYOUT, faults=KILL.faults(LAYOUT), sabotage=("disk_full_at:checkpoints",), fallback=str(fallback)
    )
    launch.finish()
    assert not launch.checkpoints
    assert [path.name for path in fallback.glob("tft_*")] == ["tft_saved_checkpoints-step_5"]
    for rank in range(3):
        assert str(fallback) in launch.last_words(rank)[0]
    rig.check_resume(launch, 5, fallback=str(fallback))


def test_a_full_disk_costs_the_last_words_but_not_the_older_checkpoint(rig: Rig) -> None:
    older, step = rig.died(LAYOUT, BEHIND)
    launch = rig.launch(LAYOUT, faults=KILL.faults(LAYOUT), sabotage=("disk_full",), recover=True, env=IMPATIENT)
    launch.finish()
    assert launch.codes == dict.fromkeys(range(4), EXIT_NOT_SAVED) | {3: KILLED}, launch.job.report()
    for rank in range(3):
        assert "No space left on device" in launch.last_words(rank)[0]
        assert f"the newest checkpoint is of step {step}: {older.checkpoints[-1]}" in launch.last_words(rank)[0]
    assert launch.new_checkpoint is None
    rig.check_resume(older, step)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "lastwords-test", str(path)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.root
def test_a_disk_that_really_is_full_falls_back(rig: Rig, tmp_path: Path, small_disk: Path) -> None:
    layout = Layout(model="medium")
    fallback = tmp_path / "fallback"
    launch = rig.launch(layout, faults=KILL.faults(layout), checkpoints=small_disk, fallback=str(fallback))
    launch.finish()
    assert not launch.checkpoints
    assert [path.name for path in fallback.glob("tft_*")] == ["tft_saved_checkpoints-step_5"], launch.job.report()
    rig.check_resume(launch, 5, fallback=str(fallback))


def writer(launch: Launch) -> int:
    checkpoint = launch.new_checkpoint
    assert checkpoint is not None
    return int(launch.manifest(checkpoint)["units"]["replicated"]["writer"])


# ---------------------------------------------------------------------- at the resume


def test_without_a_checkpoint_resume_is_an_error(rig: Rig) -> None:
    refused(rig.launch(LAYOUT, recover=True), r"IncompleteError: ")


def test_without_a_checkpoint_a_resume_that_may_miss_it_trains_from_the_start(rig: Rig) -> None:
    launch = rig.launch(LAYOUT, recover=True, missing_ok=True)
    launch.finish()
    rig.check_untouched(launch)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"model": "medium"}, r"MismatchError: .*inlet\.weight.*saved.*here"),
        more({"batch_norm": False}, r"MismatchError: .*norms\.0"),
        more({"tied": True}, r"MismatchError: .*second\.weight"),
        ({"scheduler": False}, r"MismatchError: .*scheduler"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_something_else_is_refused_and_told_apart(
    rig: Rig, change: dict[str, Any], pattern: str
) -> None:
    killed, _ = rig.died(LAYOUT, BEHIND)
    other = Layout(**change)
    refused(rig.launch(other, checkpoints=Path(killed.plan.checkpoints), recover=True), pattern)


def test_another_number_of_ranks_goes_on_from_the_saved_step_and_says_why_that_is_not_exact(rig: Rig) -> None:
    killed, step = rig.died(LAYOUT, BEHIND)
    fewer = rig.launch(Layout(world_size=3), checkpoints=Path(killed.plan.checkpoints), recover=True)
    fewer.finish()
    assert set(fewer.codes.values()) == {0}, fewer.job.report()
    resumed = fewer.track.one(0, "resumed")
    assert resumed is not None
    assert (resumed["step"], resumed["exact"]) == (step, False)
    assert "resumed on 3 ranks from a checkpoint saved on 4" in " ".join(resumed["reasons"])


def test_a_flipped_byte_is_found_by_every_rank_before_it_trains(rig: Rig) -> None:
    killed, _ = rig.died(LAYOUT, BEHIND)
    file = ckpt_file(killed)
    flip(file, file.stat().st_size // 2)
    refused(rig.launch(LAYOUT, recover=True), rf"FormatError: .*{re.escape(file.name)}")


def test_a_truncated_checkpoint_is_passed_over_for_the_older_one(rig: Rig) -> None:
    older, step = rig.died(LAYOUT, BEHIND)
    newer, _ = rig.die(LAYOUT, KILL, recover=True)
    os.truncate(ckpt_file(newer), ckpt_file(newer).stat().st_size - 4096)
    rig.check_resume(older, step)


@pytest.mark.thorough
def test_a_directory_without_a_manifest_is_passed_over(rig: Rig) -> None:
    older, step = rig.died(LAYOUT, BEHIND)
    newer, _ = rig.die(LAYOUT, KILL, recover=True)
    assert newer.new_checkpoint is not None
    (newer.new_checkpoint / "manifest.json").unlink()
    rig.check_resume(older, step)


def ckpt_file(launch: Launch) -> Path:
    assert launch.new_checkpoint is not None
    (file,) = launch.new_checkpoint.glob("rank_*/*.ckpt")
    return file


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_an_error_in_one_rank_s_constructor_is_told_to_the_ranks_that_wait_for_it(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        model = torch.nn.Linear(2, 2)
        optimizer = lastwords.OptTFTWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            tft = lastwords.TFTRegister(0, "127.0.0.1", 1, str(tmp_path / "ckpt"), model=model, optimizer=optimizer,
                                        verify_every=-rank)  # fmt: skip
            tft.start()
        except lastwords.ConfigError as error:
            return str(error)
        return "started"

    waiting, wrong = on_ranks(body, tmp_path, 2)
    assert wrong.startswith("verify_every must be a number of steps")
    assert waiting == f"another rank cannot start: rank 1: {wrong}"


def test_ranks_with_different_settings_are_refused(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        model = torch.nn.Linear(2, 2)
        optimizer = lastwords.OptTFTWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            lastwords.TFTRegister(0, "127.0.0.1", 0, str(tmp_path / "ckpt"), model=model, optimizer=optimizer,
                                  copy=rank == 1).start()  # fmt: skip
        except lastwords.ConfigError as error:
            return str(error)
        return "started"

    first, second = on_ranks(body, tmp_path, 2)
    why = "the ranks were registered with different settings: copy: False on rank 0, True on rank 1"
    assert (first, second) == (f"another rank cannot start: rank 1: {why}", why)
