"""`lastwords run` where healing itself goes wrong, or must not be: the same training, bitwise, or an end."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import load
from lastwords.launcher import crash_loop
from tests import golden
from tests.integration.harness import Cluster
from tests.integration.zygote import command_line, processes
from tests.launcher.test_heal import ROOT, SCRIPT, STEPS, check_equal, environment, pids, run, trace
from tests.launcher.test_launcher_ends import until
from tests.selection import more

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

RANKS = 2
CAPTURED: dict[str, Any] = {"env": environment(), "cwd": ROOT, "capture_output": True, "text": True, "timeout": 600}


def command(directory: Path, *deaths: str) -> list[str]:
    launcher = [sys.executable, "-m", "lastwords.cli", "run", "--standalone", "--nproc-per-node", str(RANKS)]
    return [*launcher, "-m", SCRIPT, str(directory), str(STEPS), *deaths]


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same script under torchrun, where nobody dies."""
    directory = tmp_path_factory.mktemp("undisturbed")
    run(directory, launcher="torchrun", ranks=RANKS, cluster=cluster)
    return directory


@pytest.mark.thorough
def test_a_main_that_can_be_entered_once_is_entered_by_new_processes(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCE_ONLY", "1")
    run(tmp_path, "1:5:bwd", ranks=RANKS)
    check_equal(tmp_path, undisturbed, {0: 1, 1: 1}, ranks=RANKS)


@pytest.mark.thorough
def test_where_nothing_is_saved_nobody_goes_on_with_weights_from_outside_of_main(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTSIDE", "1")
    run(tmp_path, "1:5:unsaved", ranks=RANKS)
    check_equal(tmp_path, undisturbed, {0: 1, 1: 1}, ranks=RANKS)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "second",
    ["1:1:import", "1:1:alone", "1:1:main", "1:1:resume", "0:1:resume"],
    ids=["the replacement in its import", "before the others meet it", "in main", "in resume", "a survivor in resume"],
)
def test_whoever_dies_while_a_death_is_healed_is_replaced_as_well(
    tmp_path: Path, undisturbed: Path, second: str
) -> None:
    run(tmp_path, "1:5:bwd", second, ranks=RANKS)
    assert (tmp_path / f"died-{second.replace(':', '-')}").exists()
    check_equal(tmp_path, undisturbed, {1: 1} | ({0: 1} if second.startswith("0") else {}), ranks=RANKS)


@pytest.mark.thorough
def test_a_spare_that_is_stopped_as_it_takes_a_place_is_replaced_soon(
    cluster: Cluster, tmp_path: Path, undisturbed: Path
) -> None:
    said = run(tmp_path, "1:5:bwd", "1:0:stop", ranks=RANKS, launcher="impatient", cluster=cluster, spares=1)
    assert (tmp_path / "died-1-0-stop").exists()
    check_equal(tmp_path, undisturbed, {1: 1}, ranks=RANKS)
    (killed,) = [line for line in said.splitlines() if "killed and replaced:" in line]
    golden.says(killed[killed.index("rank ") :])


@pytest.mark.thorough
def test_a_job_whose_starts_are_deleted_while_it_runs_knows_its_last_words(tmp_path: Path, undisturbed: Path) -> None:
    run(tmp_path, "0:3:forget", "1:5:bwd", ranks=RANKS)
    assert (tmp_path / "died-0-3-forget").exists()
    check_equal(tmp_path, undisturbed, {1: 1}, ranks=RANKS)


@pytest.mark.thorough
def test_a_rank_that_dies_in_the_same_step_every_time_ends_the_job_with_its_number(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, "1:5:always"), **CAPTURED)
    assert done.returncode == 1, done.stderr
    golden.says([line for line in done.stderr.splitlines() if line.startswith("lastwords run: ")][-1])
    assert [max(trace(tmp_path, rank)) for rank in range(RANKS)] == [4, 4]
    assert load.latest(tmp_path / "ckpt") is not None
    started = (tmp_path / "resources-1").read_text().splitlines()
    assert len(started) == 1 + crash_loop.DEATHS_MAX + 1, "the first death comes with a newly saved step"
    assert len((tmp_path / "resources-0").read_text().splitlines()) == len(started)


@pytest.mark.thorough
def test_what_lastwords_refuses_is_tried_once_and_is_the_last_line(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path), **{**CAPTURED, "env": {**environment(), "REFUSED": "1"}})
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    cause = done.stderr.split("Root Cause")[1]  # both may have ended before one could be told to
    root = next(line for line in cause.splitlines() if line.strip().startswith("rank      : "))
    assert re.findall(r"\d", root)[:1] == re.findall(r"\d", last)[:1], "torch's root cause is the same rank"
    golden.says(re.sub(r"(?<=rank )\d|(?<=\.py:)\d+", "_", last))
    assert {len((tmp_path / f"resources-{rank}").read_text().splitlines()) for rank in range(RANKS)} == {1}


@pytest.mark.thorough
@pytest.mark.parametrize(("held", "loaders"), [(False, 1), (True, 3)], ids=["let go", "negative control"])
def test_workers_of_a_loader_end_with_the_stay_in_main_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool, loaders: int
) -> None:
    """Persistent ones belong to the loader, which a frame of `main` holds."""
    monkeypatch.setenv("LOADER_WORKERS", "persistent")
    if held:
        monkeypatch.setenv("HELD", "1")
    run(tmp_path, "0:5:bwd", "0:9:bwd", ranks=RANKS)
    assert [len(pids(tmp_path, rank)) for rank in range(RANKS)] == [3, 1]
    assert len((tmp_path / "children-1").read_text().split()) == 2 * loaders


@pytest.mark.thorough
def test_ranks_of_which_one_has_left_out_a_collective_are_named_and_go_on_from_the_step_before(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTWORDS_HANG_NOTICE_S", "4")
    monkeypatch.setenv("LASTWORDS_HANG_TIMEOUT_S", "6")
    run(tmp_path, "1:5:skip", ranks=RANKS)
    check_equal(tmp_path, undisturbed, {}, ranks=RANKS)
    lines = (tmp_path / "ckpt" / "logs" / "incidents.jsonl").read_text().splitlines()
    (incident,) = [one for one in map(json.loads, lines) if one["outcome"] == "SAVED"]
    assert (incident["step"], incident["cause_ranks"]) == (4, [0, 1])
    stacks = {event["rank"]: event["text"] for event in incident["events"] if event["what"] == "stack"}
    assert [rank for rank in range(RANKS) if "dist.barrier()" in stacks[rank]] == [0]
    assert [rank for rank in range(RANKS) if "loss.backward()" in stacks[rank]] == [1]


@pytest.mark.thorough
def test_a_launcher_that_is_killed_while_it_heals_leaves_a_checkpoint_and_no_process(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        launcher = subprocess.Popen(command(tmp_path, "1:5:bwd"), env=environment(), cwd=ROOT, stdout=log, stderr=log)
    try:
        until((tmp_path / "died-1-5-bwd").exists, "rank 1 dies")
        launcher.kill()
        until(lambda: processes_of(tmp_path) <= {launcher.pid}, "all processes of the job have ended")
    finally:
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)
        launcher.wait()
    assert load.latest(tmp_path / "ckpt") is not None, (tmp_path / "log").read_text()
    assert len(pids(tmp_path, 1)) == 1, "its replacement has trained"


def processes_of(directory: Path) -> set[int]:
    """Those that have this directory among their arguments."""
    return {pid for pid in processes() if str(directory) in command_line(pid)}


@pytest.mark.thorough
def test_a_death_between_the_end_of_the_loops_and_its_news_makes_nobody_train_again(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, "1:0:release"), **CAPTURED)
    assert done.returncode != 0
    assert (tmp_path / "died-1-0-release").exists(), done.stderr
    for rank in range(RANKS):
        assert len((tmp_path / f"trace-{rank}").read_text().splitlines()) == STEPS, done.stderr


@pytest.mark.thorough
def test_a_launcher_that_has_no_descriptors_for_a_while_goes_on_once_it_has(tmp_path: Path, undisturbed: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        launcher = subprocess.Popen(command(tmp_path, "1:5:bwd"), env=environment(), cwd=ROOT, stdout=log, stderr=log)
    try:
        until(lambda: all((tmp_path / f"trace-{rank}").exists() for rank in range(RANKS)), "all ranks train")
        fewest, most = resource.prlimit(
            launcher.pid, resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        until(lambda: "Too many open files" in (tmp_path / "log").read_text(), "they are used up")
        resource.prlimit(launcher.pid, resource.RLIMIT_NOFILE, (fewest, most))
        assert launcher.wait(200) == 0, (tmp_path / "log").read_text()
    finally:
        launcher.kill()
        launcher.wait()
    check_equal(tmp_path, undisturbed, {1: 1}, ranks=RANKS)


CHANGED = """
import os, pathlib, signal, sys
import lastwords
from lastwords.launcher import worker
from tests.launcher.healed_training import DIRECTORY, main

def ready(warm_up=worker.warm_up):
    warm_up()
    (DIRECTORY / "spare-is-ready").touch()

if "LASTWORDS_SPARE" in os.environ:
    while not all((DIRECTORY / f"trace-{rank}").exists() for rank in range(2)):
        signal.sigtimedwait((), 0.05)
    pathlib.Path(__file__).write_text(pathlib.Path(__file__).read_text() + "# another version")
    worker.warm_up = ready
lastwords.run(main)
"""
"""A script that is another one for its spare than for the ranks, which have begun by then."""


@pytest.mark.thorough
def test_a_spare_that_has_another_version_of_the_script_takes_nobodys_place(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CHANGED)
    command = [sys.executable, "-m", "lastwords.cli", "run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["--spares", "1", str(script), str(tmp_path), "100000"]
    with (tmp_path / "log").open("wb") as log:
        launcher = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=log, stderr=log)
    try:
        until(lambda: (tmp_path / "spare-is-ready").exists(), "a spare that was started late")
        (first,) = pids(tmp_path, 1)
        os.kill(first, signal.SIGKILL)
        assert launcher.wait(200) != 0
    finally:
        launcher.kill()
        launcher.wait()
    lines = (tmp_path / "log").read_text().splitlines()
    golden.says(lines[-1])
    assert any("(a spare)" in line for line in lines)
    assert [len(pids(tmp_path, rank)) for rank in range(RANKS)] == [1, 1], "nobody trains with another version"


OPENED = """
import sys
import lastwords

results = open(sys.argv[1], "w")
results.write("opened at the top level\\n")
cycle = [open(sys.argv[2], "w")]
cycle.append(cycle)
cycle[0].write("in a cycle\\n")

def main():
    results.write("written in main\\n")
    if len(sys.argv) > 3:
        raise ValueError(sys.argv[3])

lastwords.run(main)
"""
"""A script that closes none of its files, as many do: a plain Python writes what they hold when it ends."""


@pytest.mark.parametrize("fails", [[], more(["fails"])], ids=["returns", "raises"])
def test_files_that_a_script_leaves_open_are_whole_when_its_process_ends(tmp_path: Path, fails: list[str]) -> None:
    script, *files = (tmp_path / name for name in ("train.py", "results", "cycle"))
    script.write_text(OPENED)
    launcher = [sys.executable, "-m", "lastwords.cli", "run", "--standalone", "--nproc-per-node", "1"]
    done = subprocess.run([*launcher, str(script), *map(str, files), *fails], **CAPTURED, check=False)
    assert (done.returncode != 0) == bool(fails), done.stderr
    assert [file.read_text() for file in files] == ["opened at the top level\nwritten in main\n", "in a cycle\n"]
