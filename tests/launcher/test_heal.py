"""`lastwords run`: only a killed worker is replaced, and the run is bitwise that of a job in which nobody died."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.harness import Cluster
from tests.integration.zygote import AGENTS

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SCRIPT = "tests.launcher.healed_training"
RANKS, STEPS = 3, 16
START_S = 200.0
WAIT_S = 500.0
"""Many times what a whole run takes; with ten failures it is some minutes on a busy machine."""


def environment() -> dict[str, str]:
    kept = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LASTWORDS_JOB", "LASTWORDS_LAUNCHER"):
        kept.pop(name, None)
    return kept


def run(
    directory: Path,
    *deaths: str,
    launcher: str = "healing",
    ranks: int = RANKS,
    steps: int = STEPS,
    cluster: Cluster | None = None,
    **more: object,
) -> str:
    """A whole job; returns what it wrote to stderr. launcher: one of AGENTS. Its processes are forks of `cluster`'s."""
    directory.mkdir(exist_ok=True)
    flags = [flag for name, value in more.items() for flag in (f"--{name.replace('_', '-')}", str(value))]
    arguments = [str(directory), str(steps), *deaths]
    if cluster is not None:
        job = cluster.start(
            directory / "launched",
            module=SCRIPT,
            arguments=arguments,
            world_size=ranks,
            launcher=launcher,
            launcher_arguments=flags,
            env=environment(),
        )
        assert job.wait(WAIT_S)[-1].code == 0, job.report()
        job.close()
        return (job.directory / f"{launcher}.err").read_text()
    command = [sys.executable, "-m", *AGENTS[launcher], "--standalone", "--nproc-per-node", str(ranks), *flags]
    command += ["-m", SCRIPT, *arguments]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def trace(directory: Path, rank: int) -> dict[int, str]:
    """Loss of each step; a step that was trained twice has to have given the same one."""
    found: dict[int, str] = {}
    for line in (directory / f"trace-{rank}").read_text(encoding="utf-8").splitlines():
        step, loss, *_ = line.split()
        assert found.setdefault(int(step), loss) == loss
    return found


def pids(directory: Path, rank: int) -> list[int]:
    """The processes that were this rank, in turn."""
    lines = (directory / f"trace-{rank}").read_text(encoding="utf-8").splitlines()
    return list(dict.fromkeys(int(line.split()[2]) for line in lines))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same script under torchrun, where nobody dies."""
    directory = tmp_path_factory.mktemp("undisturbed")
    said = run(directory, launcher="torchrun")
    assert said.count("not started by `lastwords run`") == 1
    return directory


def check_equal(directory: Path, undisturbed: Path, died: dict[int, int], ranks: int = RANKS) -> None:
    """died: rank -> how often; where it died in the window of a step, nobody wrote that step's line for it."""
    for rank in range(ranks):
        assert (directory / f"final-{rank}").read_text() == (undisturbed / f"final-{rank}").read_text(), rank
        found = trace(directory, rank)
        whole = trace(undisturbed, rank)
        assert found == {step: whole[step] for step in found}
        assert len(pids(directory, rank)) == 1 + died.get(rank, 0), rank


@pytest.mark.thorough
def test_a_rank_that_dies_in_main_before_its_loop_is_replaced(tmp_path: Path, undisturbed: Path) -> None:
    run(tmp_path, "1:0:main", "0:7:bwd", spares=1)
    check_equal(tmp_path, undisturbed, {0: 1})
    assert {path.name for path in tmp_path.glob("died-*")} == {"died-1-0-main", "died-0-7-bwd"}


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["with", "start and stop"])
def test_ten_failures_leave_no_threads_and_no_descriptors_in_a_survivor(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how != "with":
        monkeypatch.setenv("START_STOP", "1")
    run(tmp_path, *(f"1:{step}:bwd" for step in range(2, 12)), spares=0)
    # One that dies in its first step has written no line where the step before was saved with its gradients.
    check_equal(tmp_path, undisturbed, {1: len(pids(tmp_path, 1)) - 1})
    assert len([*tmp_path.glob("died-1-*")]) == 10
    counts = [json.loads(line) for line in (tmp_path / "resources-0").read_text().splitlines()]
    assert len(counts) == 11
    # Torch may take its time to end the threads of one group.
    early, late = ({name: max(one[name] for one in some) for name in some[0]} for some in (counts[1:4], counts[-3:]))
    assert all(late[name] - early[name] < 7 for name in late), counts


@pytest.mark.thorough
def test_loader_workers_and_forks_of_main_do_not_stand_in_the_way_and_output_goes_where_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADER_WORKERS", "2")
    run(tmp_path / "whole", launcher="torchrun")
    monkeypatch.setenv("FORKS", "1")
    healed = tmp_path / "healed"
    said = run(healed, "1:5:bwd", "0:9:win", spares=1, tee=3, log_dir=tmp_path / "logs")
    check_equal(healed, tmp_path / "whole", {0: 1, 1: 1})
    for rank, deaths in ((0, 1), (1, 1), (2, 0)):
        assert len(pids(healed, rank)) == 1 + deaths
        for pid in pids(healed, rank):
            assert f"[default{rank}]:rank={rank} pid={pid}" in said
    # The fork of each of three stays in main, and on rank 0 a controller: no loader's worker is left of any stay.
    assert len((healed / "children-2").read_text().split()) == 3


@pytest.mark.thorough
def test_of_a_rank_that_comes_late_nobody_finds_an_address_before_it_has_come(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each generation has a store of its own."""
    monkeypatch.setenv("LATE_RANK", "2")
    run(tmp_path, "1:5:bwd", spares=1)
    check_equal(tmp_path, undisturbed, {1: 1})
    assert (tmp_path / "late").read_text() == str(RANKS - 1)


@pytest.mark.thorough
def test_in_the_store_of_the_generation_before_torch_finds_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whom torch then waits for depends on the ports: the lower of two numbers may be the one that listens."""
    monkeypatch.setenv("LATE_RANK", "2")
    command = [sys.executable, "-m", "tests.launcher.old_store", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["--spares", "1", "-m", SCRIPT, str(tmp_path), str(STEPS), "1:5:bwd"]
    launcher = subprocess.Popen(command, env=environment(), cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline_mono_s = time.monotonic() + START_S
    try:
        while not (late := tmp_path / "late").exists() or not late.read_text():
            assert time.monotonic() < deadline_mono_s, "no rank was late"
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise AssertionError(f"the launcher ended with {launcher.wait(timeout=0.05)}")
        assert late.read_text() == str(RANKS)
    finally:
        launcher.terminate()
        launcher.wait()
