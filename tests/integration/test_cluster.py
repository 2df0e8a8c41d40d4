"""A dynamic cluster: workers and scheduler are killed and started again one by one, and nothing differs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastwords.processor.departure import EXIT_SAVED
from tests.integration.harness import Port
from tests.integration.rig import once
from tests.launcher import test_heal
from tests.launcher.test_heal import ROOT, SCRIPT, check_equal, environment

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

RANKS = 3
STEPS = 150
WAIT_S = 200.0
"""Many times what a whole run takes."""


class Cluster:
    """Processes of one cluster, each in a log of its own."""

    def __init__(self, directory: Path, recovery: bool = True) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self._port = Port()
        self._environment = {
            **environment(),
            "MS_WORKER_NUM": str(RANKS),
            "MS_SCHED_HOST": "127.0.0.1",
            "MS_SCHED_PORT": str(self._port.number),
            "MS_ENABLE_RECOVERY": str(int(recovery)),
            "MS_RECOVERY_PATH": str(directory / "recovery"),
        }
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self.scheduler = self.start_scheduler()

    def start_scheduler(self, **environ: str) -> subprocess.Popen[bytes]:
        """Or start it again: the script itself, which is a scheduler by MS_ROLE, unless it has been started before."""
        script = ["-m", SCRIPT, str(self.directory), str(STEPS)]
        command = ["-m", "lastwords.cli", "scheduler"] if (self.directory / "scheduler.log").exists() else script
        self.scheduler = self._start("scheduler", command, {"MS_ROLE": "MS_SCHED", **environ})
        return self.scheduler

    def start(self, rank: int, *deaths: str, **environ: str) -> subprocess.Popen[bytes]:
        """Or start it again; deaths: as healed_training takes them."""
        given = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank), **environ}
        arguments = ["-m", SCRIPT, str(self.directory), str(STEPS), *deaths]
        self.workers[rank] = self._start(f"worker-{rank}", arguments, given)
        return self.workers[rank]

    def _start(self, name: str, arguments: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *arguments], env={**self._environment, **environ}, cwd=ROOT, stdout=log, stderr=log
            )

    def said(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(self.directory.glob("*.log")))

    def wait(self, *ranks: int, codes: tuple[int, ...] = (0,)) -> None:
        for rank in ranks:
            assert self.workers[rank].wait(WAIT_S) in codes, self.said()

    def wait_until(self, there: Callable[[], bool]) -> None:
        until_s = time.monotonic() + WAIT_S
        while not there():
            assert time.monotonic() < until_s, self.said()
            time.sleep(0.01)

    def wait_for_step(self, step: int) -> None:
        """Until rank 2, which nobody kills, has ended this step."""
        self.wait_until(lambda: self.step() >= step)

    def step(self) -> int:
        path = self.directory / "trace-2"
        return int(path.read_text().split("\n")[-2].split()[0]) if path.exists() and path.stat().st_size else 0

    def kill(self, *processes: subprocess.Popen[bytes]) -> None:
        for process in processes:
            process.kill()
        for process in processes:
            assert process.wait(WAIT_S) == -signal.SIGKILL, self.said()

    def finish(self) -> None:
        self.wait(*range(RANKS))
        assert self.scheduler.wait(WAIT_S) == 0, self.said()
        assert not (self.directory / "recovery" / "cluster" / "state.json").exists()

    def end(self) -> None:
        for process in (self.scheduler, *self.workers.values()):
            process.kill()
            process.wait(WAIT_S)
        self._port.release()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "cluster")
    yield made
    made.end()


@pytest.fixture(scope="module")
def undisturbed(references: Path) -> Path:
    """The same script under torchrun, where nobody dies."""

    def run(directory: Path) -> None:
        test_heal.run(directory, launcher=("torch.distributed.run",), ranks=RANKS, steps=STEPS)

    return once(references / "cluster", run)


@pytest.mark.thorough
def test_workers_are_killed_and_started_again(cluster: Cluster, undisturbed: Path) -> None:
    plan = ("1:5:bwd", "0:9:win")
    for rank in range(RANKS):
        cluster.start(rank, *plan)
    for rank in (1, 0):
        cluster.wait(rank, codes=(-signal.SIGKILL,))
        cluster.start(rank, *plan)
    cluster.finish()
    check_equal(cluster.directory, undisturbed, {0: 1, 1: 1})


def test_training_goes_on_without_its_scheduler_and_the_next_one_heals(cluster: Cluster, undisturbed: Path) -> None:
    for rank in range(RANKS):
        cluster.start(rank)
    cluster.wait_for_step(3)
    cluster.kill(cluster.scheduler)
    cluster.wait_for_step(cluster.step() + 10)
    cluster.start_scheduler()
    cluster.kill(cluster.workers[1])
    cluster.start(1)
    cluster.finish()
    check_equal(cluster.directory, undisturbed, {1: 1})


@pytest.mark.thorough
def test_a_worker_that_is_asked_to_stop_saves_and_ends_and_the_others_wait_for_it(
    cluster: Cluster, undisturbed: Path
) -> None:
    for rank in range(RANKS):
        cluster.start(rank)
    cluster.wait_for_step(3)
    cluster.workers[1].send_signal(signal.SIGINT)
    cluster.wait(1, codes=(EXIT_SAVED,))
    cluster.start(1)
    cluster.finish()
    check_equal(cluster.directory, undisturbed, {1: 1})


def test_a_cluster_that_is_asked_to_stop_whole_ends_and_goes_on_when_it_is_started_again(
    cluster: Cluster, undisturbed: Path
) -> None:
    for rank in range(RANKS):
        cluster.start(rank)
    cluster.wait_for_step(3)
    for process in (cluster.scheduler, *cluster.workers.values()):
        process.terminate()
    cluster.wait(*range(RANKS), codes=(EXIT_SAVED,))
    cluster.scheduler.wait(WAIT_S)
    cluster.start_scheduler()
    for rank in range(RANKS):
        cluster.start(rank)
    cluster.finish()
    check_equal(cluster.directory, undisturbed, dict.fromkeys(range(RANKS), 1))


@pytest.mark.thorough
def test_a_scheduler_that_is_killed_before_all_ranks_have_met_takes_nobody_with_it_that_waits_for_others(
    cluster: Cluster, undisturbed: Path
) -> None:
    """The store in which they meet ends with it; whoever comes there later looks for it until its process ends."""
    plan = ("1:5:bwd",)
    for rank in range(RANKS):
        cluster.start(rank, *plan, LATE_RANK="2", LATE_BEHIND="")
    cluster.wait(1, codes=(-signal.SIGKILL,))
    cluster.start(1, *plan)
    cluster.wait_until((cluster.directory / "late").exists)  # and 2 waits for some seconds now
    cluster.kill(cluster.scheduler)
    cluster.start_scheduler()
    cluster.wait(2, codes=(EXIT_SAVED,))
    cluster.start(2, *plan)
    cluster.finish()
    check_equal(cluster.directory, undisturbed, {1: 1, 2: 1})


@pytest.mark.thorough
def test_a_scheduler_that_knows_nothing_takes_a_job_that_trains_for_what_it_is(
    cluster: Cluster, undisturbed: Path
) -> None:
    log = cluster.directory / "scheduler.log"
    for rank in range(RANKS):  # by such names they become ranks in the order in which they come
        cluster.start(rank, MS_NODE_ID=f"worker {RANKS - rank}")
        cluster.wait_until(lambda: log.read_text().count("has come, as rank") == rank + 1)  # noqa: B023
    cluster.wait_for_step(3)
    cluster.kill(cluster.scheduler)
    (cluster.directory / "recovery" / "cluster" / "state.json").unlink()
    cluster.start_scheduler()
    cluster.wait_for_step(cluster.step() + 20)
    cluster.kill(cluster.workers[1])
    cluster.start(1, MS_NODE_ID=f"worker {RANKS - 1}")
    cluster.finish()
    check_equal(cluster.directory, undisturbed, {1: 1})


@pytest.mark.thorough
def test_a_worker_and_the_scheduler_are_killed_at_once(cluster: Cluster, undisturbed: Path) -> None:
    for rank in range(RANKS):
        cluster.start(rank)
    cluster.wait_for_step(3)
    cluster.kill(cluster.scheduler, cluster.workers[0])
    cluster.start(0)  # it waits for the scheduler, as the others do
    cluster.start_scheduler()
    cluster.finish()
    check_equal(cluster.directory, undisturbed, {0: 1})


def test_a_cluster_that_is_killed_whole_goes_on_from_its_newest_checkpoint(cluster: Cluster, undisturbed: Path) -> None:
    plan = ("1:5:bwd",)
    for rank in range(RANKS):
        cluster.start(rank, *plan)
    cluster.wait(1, codes=(-signal.SIGKILL,))
    cluster.start(1, *plan)
    cluster.wait_for_step(12)
    cluster.kill(cluster.scheduler, *cluster.workers.values())
    for rank in range(RANKS):
        cluster.start(rank, *plan)
    cluster.start_scheduler()
    cluster.finish()
    check_equal(cluster.directory, undisturbed, {0: 1, 1: 2, 2: 1})
    (saved,) = (cluster.directory / "ckpt").glob("tft_saved_checkpoints-step_*")
    step = int(saved.name.rpartition("_")[2])
    assert step in (4, 5), "5 unless the dead rank alone had what was to be reduced of it"
    repeated = [int(line.split()[0]) for line in (cluster.directory / "trace-2").read_text().splitlines()]
    assert repeated.count(step + 1) == 2
    assert repeated.count(step) <= 1, "a rank that was stopped after its update has no line of it"


@pytest.mark.thorough
def test_without_recovery_the_first_death_ends_the_job_whose_step_is_saved(tmp_path: Path, undisturbed: Path) -> None:
    """And it begins again at that step, if all are started again."""
    cluster = Cluster(tmp_path / "cluster", recovery=False)
    try:
        for rank in range(RANKS):
            cluster.start(rank, "1:5:bwd")
        cluster.wait(1, codes=(-signal.SIGKILL,))
        cluster.wait(0, 2, codes=(EXIT_SAVED,))
        assert cluster.scheduler.wait(WAIT_S) == 1, cluster.said()
        for rank in range(RANKS):
            cluster.start(rank, "1:5:bwd")
        cluster.start_scheduler()
        cluster.finish()
    finally:
        cluster.end()
    check_equal(cluster.directory, undisturbed, dict.fromkeys(range(RANKS), 1))
