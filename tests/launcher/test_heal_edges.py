"""`lastwords run` where healing itself goes wrong, or must not be: the same training, bitwise, or an end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import load
from lastwords.launcher import core
from lastwords.processor.departure import EXIT_SAVED
from tests import golden
from tests.integration.harness import Cluster
from tests.integration.zygote import command_line, processes
from tests.launcher.test_fork_server import fork_server_of
from tests.launcher.test_heal import ROOT, SCRIPT, STEPS, begun, check_equal, environment, pids, run, trace
from tests.launcher.test_launcher_ends import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

RANKS = 2
CONTAINER = ("unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--mount-proc")


def command(directory: Path, *deaths: str, steps: int = STEPS, script: tuple[str, ...] = ("-m", SCRIPT)) -> list[str]:
    launcher = [sys.executable, "-m", "lastwords.cli", "run", "--standalone", "--nproc-per-node", str(RANKS)]
    return [*launcher, *script, str(directory), str(steps), *deaths]


def failed(directory: Path, *deaths: str, restarts: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """A job that fails, once all of it has ended."""
    captured: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 600, "check": False}
    arguments = command(directory, *deaths, script=("--max-restarts", str(restarts), "-m", SCRIPT))
    done = subprocess.run(arguments, env={**environment(), **env}, **captured)
    assert done.returncode == 1, done.stderr
    return done


def last_line(said: str) -> str:
    """The launcher's."""
    return [line for line in said.splitlines() if line.startswith("lastwords run: ")][-1]


@contextlib.contextmanager
def started(directory: Path, arguments: list[str], **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher that writes to `log`, and is gone afterwards."""
    with (directory / "log").open("wb") as log:
        launcher = subprocess.Popen(arguments, env={**environment(), **env}, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same script under torchrun, where nobody dies."""
    directory = tmp_path_factory.mktemp("undisturbed")
    run(directory, launcher="torchrun", ranks=RANKS, cluster=cluster)
    return directory


@pytest.mark.thorough
def test_where_nothing_is_saved_all_begin_at_the_first_step_and_starts_may_be_deleted(
    tmp_path: Path, undisturbed: Path
) -> None:
    run(tmp_path, "1:5:unsaved", "0:7:forget", "1:9:bwd", ranks=RANKS)
    check_equal(tmp_path, undisturbed, heals=2, ranks=RANKS)
    assert len([*tmp_path.glob("died-*")]) == 3
    steps = [int(line.split()[0]) for line in (tmp_path / "trace-0").read_text().splitlines()]
    assert steps.count(1) == 2
    assert steps.count(7) == 1


@pytest.mark.thorough
def test_survivors_wait_for_a_directory_that_is_gone_and_nothing_is_lost_once_it_is_back(
    tmp_path: Path, undisturbed: Path
) -> None:
    with started(tmp_path, command(tmp_path, "1:5:unsaved"), LASTWORDS_STORAGE_RETRY_S="200") as launcher:
        until(lambda: "trying again" in (tmp_path / "log").read_text(), "the survivor has found no directory")
        (tmp_path / "ckpt").unlink()
        (tmp_path / "hidden").rename(tmp_path / "ckpt")
        (tmp_path / "hidden").mkdir()  # else it is hidden again
        assert launcher.wait(200) == 0, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    lines = [line for line in said.splitlines() if "trying again" in line]
    golden.says(re.sub(r"(?<=step )\d+|\.tmp-\S+", "_", line) for line in lines)
    golden.says(last_line(said).partition("; ")[2].partition(",")[0])
    check_equal(tmp_path, undisturbed, heals=1, ranks=RANKS)
    steps = [line.split()[0] for line in (tmp_path / "trace-0").read_text().splitlines()]
    assert len(steps) == len({*steps})


@pytest.mark.thorough
def test_a_heal_to_which_other_samples_were_drawn_is_not_called_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAWN_ANEW", "1")
    said = run(tmp_path, "1:5:bwd", ranks=RANKS)
    golden.says(last_line(said).partition("; the resume")[2])


def test_a_rank_that_dies_in_the_same_step_every_time_ends_the_job_with_its_number(tmp_path: Path) -> None:
    golden.says(last_line(failed(tmp_path, "1:5:always").stderr))
    assert [max(trace(tmp_path, rank)) for rank in range(RANKS)] == [4, 4]
    assert load.latest(tmp_path / "ckpt") is not None
    # The first death comes with a newly saved step.
    assert {len(begun(tmp_path, rank)) for rank in range(RANKS)} == {1 + core.DEATHS_MAX + 1}


@pytest.mark.thorough
def test_what_lastwords_refuses_is_tried_once_and_is_the_last_line(tmp_path: Path) -> None:
    done = failed(tmp_path, REFUSED="1")
    last = done.stderr.splitlines()[-1]
    cause = done.stderr.split("Root Cause")[1]  # both may have ended before one could be told to
    root = next(line for line in cause.splitlines() if line.strip().startswith("rank      : "))
    assert re.findall(r"\d", root)[:1] == re.findall(r"\d", last)[:1], "torch's root cause is the same rank"
    golden.says(re.sub(r"(?<=rank )\d|(?<=\.py:)\d+", "_", last))
    assert {len(begun(tmp_path, rank)) for rank in range(RANKS)} == {1}


@pytest.mark.thorough
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_script_that_does_not_resume_is_saved_and_begun_anew_as_often_as_max_restarts_says(
    tmp_path: Path, restarts: int
) -> None:
    done = failed(tmp_path, "1:5:bwd", "1:9:bwd", restarts=restarts, NO_RESUME="1")
    golden.says(last_line(done.stderr))
    assert load.latest(tmp_path / "ckpt") is not None
    assert {len(begun(tmp_path, rank)) for rank in range(RANKS)} == {1 + restarts}


@pytest.mark.thorough
def test_ranks_of_which_one_has_left_out_a_collective_are_named_and_go_on_from_the_step_before(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTWORDS_HANG_NOTICE_S", "4")
    monkeypatch.setenv("LASTWORDS_HANG_TIMEOUT_S", "6")
    run(tmp_path, "1:5:skip", ranks=RANKS)
    check_equal(tmp_path, undisturbed, heals=1, ranks=RANKS)
    lines = (tmp_path / "ckpt" / "logs" / "incidents.jsonl").read_text().splitlines()
    (incident,) = [one for one in map(json.loads, lines) if one["outcome"] == "SAVED"]
    assert (incident["step"], incident["cause_ranks"]) == (4, [0, 1])
    stacks = {event["rank"]: event["text"] for event in incident["events"] if event["what"] == "stack"}
    assert [rank for rank in range(RANKS) if "dist.barrier()" in stacks[rank]] == [0]
    assert [rank for rank in range(RANKS) if "loss.backward()" in stacks[rank]] == [1]


@pytest.mark.thorough
def test_a_launcher_that_is_killed_while_it_heals_leaves_a_checkpoint_and_no_process(tmp_path: Path) -> None:
    with started(tmp_path, command(tmp_path, "1:5:bwd")) as launcher:
        try:
            until((tmp_path / "died-1-5-bwd").exists, "rank 1 dies")
            launcher.kill()
            until(lambda: processes_of(tmp_path) <= {launcher.pid}, "all processes of the job have ended")
        finally:
            for pid in processes_of(tmp_path):
                os.kill(pid, signal.SIGKILL)
    assert load.latest(tmp_path / "ckpt") is not None, (tmp_path / "log").read_text()
    assert len(pids(tmp_path, 1)) == 1, "another process has trained"


def processes_of(directory: Path) -> set[int]:
    """Those that have this directory among their arguments."""
    return {pid for pid in processes() if str(directory) in command_line(pid)}


@pytest.mark.thorough
def test_a_death_between_the_end_of_the_loops_and_its_news_makes_nobody_train_again(tmp_path: Path) -> None:
    done = failed(tmp_path, "1:0:release")
    golden.says(last_line(done.stderr))
    for rank in range(RANKS):
        assert len((tmp_path / f"trace-{rank}").read_text().splitlines()) == STEPS, done.stderr


@pytest.mark.thorough
def test_a_launcher_that_has_no_descriptors_for_a_while_goes_on_once_it_has(tmp_path: Path, undisturbed: Path) -> None:
    with started(tmp_path, command(tmp_path, "1:5:bwd")) as launcher:
        until(lambda: all((tmp_path / f"trace-{rank}").exists() for rank in range(RANKS)), "all ranks train")
        fewest, most = resource.prlimit(
            launcher.pid, resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        until(lambda: "tried again" in (tmp_path / "log").read_text(), "they are used up")
        resource.prlimit(launcher.pid, resource.RLIMIT_NOFILE, (fewest, most))
        assert launcher.wait(200) == 0, (tmp_path / "log").read_text()
    check_equal(tmp_path, undisturbed, heals=1, ranks=RANKS)


@pytest.mark.thorough
def test_ranks_that_no_process_can_be_had_for_are_forked_once_it_can(tmp_path: Path, undisturbed: Path) -> None:
    """As with `ulimit -u`, which does not hold for root."""
    someone = () if os.getuid() else ("setpriv", "--reuid=12345", "--regid=12345", "--clear-groups")
    reads_all = [f"--{caps}-caps=+dac_override" for caps in ("inh", "ambient")] if someone else []
    if subprocess.run([*someone, *reads_all, sys.executable, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("nobody else can be had here")
    with started(tmp_path, [*someone, *reads_all, *command(tmp_path)]) as launcher:
        until(lambda: all((tmp_path / f"trace-{rank}").exists() for rank in range(RANKS)), "all ranks train")
        limit = [*someone, "prlimit", f"--pid={fork_server_of(launcher.pid)}"]
        subprocess.run([*limit, "--nproc=1:"], check=True)
        os.kill(pids(tmp_path, 1)[0], signal.SIGKILL)
        until(lambda: "tried again" in (tmp_path / "log").read_text(), "there are too many processes")
        fewest, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        subprocess.run([*limit, f"--nproc={'unlimited' if fewest < 0 else fewest}:"], check=True)
        assert launcher.wait(200) == 0, (tmp_path / "log").read_text()
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if "tried again" in line]
    golden.says(line)
    check_equal(tmp_path, undisturbed, heals=1, ranks=RANKS)


@pytest.mark.thorough
@pytest.mark.parametrize("edited", ["train.py", "helper.py"])
def test_a_program_that_was_edited_is_refused_by_name(tmp_path: Path, edited: str) -> None:
    """A helper, too, and where a module is run."""
    (tmp_path / "helper.py").write_text("RATE = 1\n")
    text = (ROOT / "tests/launcher/healed_training.py").read_text()
    (tmp_path / "train.py").write_text(text.replace("\nimport lastwords", "\nimport helper\nimport lastwords", 1))
    script = (str(tmp_path / "train.py"),) if edited == "train.py" else ("-m", "train")
    path = f"{environment()['PYTHONPATH']}:{tmp_path}"
    with started(tmp_path, command(tmp_path, steps=100_000, script=script), PYTHONPATH=path) as launcher:
        until(lambda: all((tmp_path / f"trace-{rank}").exists() for rank in range(RANKS)), "all ranks train")
        (tmp_path / edited).write_text((tmp_path / edited).read_text() + "# another version")
        os.kill(pids(tmp_path, 1)[0], signal.SIGKILL)
        assert launcher.wait(200) != 0
    golden.says(last_line((tmp_path / "log").read_text()))
    assert [len(pids(tmp_path, rank)) for rank in range(RANKS)] == [1, 1], "nobody trains with another version"
    assert load.latest(tmp_path / "ckpt") is not None


def comes_inside() -> bool:
    return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.thorough
def test_the_first_process_of_a_container_heals_and_collects_the_dead_of_others_and_saves_when_it_is_told_to_end(
    tmp_path: Path,
) -> None:
    if not comes_inside():
        pytest.skip("no container can be made here")
    with started(tmp_path, [*CONTAINER, *command(tmp_path, "1:5:bwd", steps=100_000)]) as outside:
        until(lambda: "training again" in (tmp_path / "log").read_text(), "it has healed")
        launcher = pids_of_children(outside.pid)[0]
        inside = ["nsenter", f"--target={launcher}", "--user", "--preserve-credentials", "--pid", "--mount"]
        subprocess.run([*inside, "setsid", "sh", "-c", "sleep 2 &"], check=True)
        until(lambda: "sleep" in names_of_children(launcher), "it has taken a stranger's child in")
        until(lambda: "sleep" not in names_of_children(launcher), "which has ended and is collected")
        os.kill(launcher, signal.SIGTERM)
        assert outside.wait(60) == EXIT_SAVED
    assert re.search("ended by SIGTERM; step [0-9]+ was saved", last_line((tmp_path / "log").read_text()))
    assert load.latest(tmp_path / "ckpt") is not None


def pids_of_children(parent: int) -> list[int]:
    return [pid for pid, (its, _) in processes().items() if its == parent]


def names_of_children(parent: int) -> list[str]:
    """Of those that have ended, too."""
    found = []
    for pid in pids_of_children(parent):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return found
