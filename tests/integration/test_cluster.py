"""A dynamic cluster: ranks, workers and scheduler are killed one by one, and nothing differs."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from lastwords.processor.departure import EXIT_SAVED
from tests.integration import harness
from tests.integration.rig import once
from tests.integration.zygote import PROGRAM
from tests.launcher import test_heal
from tests.launcher.test_heal import SCRIPT, trace
from tests.patience import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

RANKS = 3
STEPS = 150
WAIT_S = 500.0
"""Many times what a whole run takes."""


def signal_each(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Cluster:
    """Processes of one cluster, each with files of its own for what it writes."""

    def __init__(self, zygote: harness.Cluster, directory: Path, recovery: bool = True) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self._zygote = zygote
        self._port = harness.Port()
        self._environment = {
            "MS_WORKER_NUM": str(RANKS),
            "MS_SCHED_HOST": "127.0.0.1",
            "MS_SCHED_PORT": str(self._port.number),
            "MS_ENABLE_RECOVERY": str(int(recovery)),
            "MS_RECOVERY_PATH": str(directory / "recovery"),
        }
        self.workers: dict[int, harness.Process] = {}
        self._jobs: list[harness.Job] = []
        self.scheduler = self.start_scheduler()

    def start_scheduler(self, **environ: str) -> harness.Process:
        """Or start it again: the script itself, which is a scheduler by MS_ROLE, unless it has been started before."""
        script = [SCRIPT, str(self.directory), str(STEPS)]
        command = ["lastwords.cli", "scheduler"] if (self.directory / "scheduler").exists() else script
        self.scheduler = self._start("scheduler", command, {"MS_ROLE": "MS_SCHED", **environ})
        return self.scheduler

    def start(self, rank: int, *deaths: str, **environ: str) -> harness.Process:
        """Or start it again. deaths: of ranks, as healed_training takes them."""
        given = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank), **environ}
        arguments = [SCRIPT, str(self.directory), str(STEPS), *deaths]
        self.workers[rank] = self._start(f"worker-{rank}", arguments, given)
        return self.workers[rank]

    def _start(self, name: str, command: list[str], environ: dict[str, str]) -> harness.Process:
        job = self._zygote.start(
            self.directory / name,
            module=command[0],
            arguments=command[1:],
            world_size=1,
            launcher=PROGRAM,
            env={**self._environment, **environ},
        )
        self._jobs.append(job)
        return harness.Process(job)

    def said(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(self.directory.glob(f"*/{PROGRAM}.*")))

    def wait(self, *ranks: int, codes: tuple[int, ...] = (0,)) -> None:
        for rank in ranks:
            try:
                code = self.workers[rank].wait(WAIT_S)
            except harness.HarnessTimeoutError as error:
                raise AssertionError(f"{error}\n{self.said()}") from None
            assert code in codes, self.said()

    def wait_until(self, there: Callable[[], bool]) -> None:
        until(there, self.said)

    def wait_for_step(self, step: int) -> None:
        """Until rank 2, which does not die alone, has ended this step."""
        self.wait_until(lambda: self.step() >= step)

    def step(self) -> int:
        path = self.directory / "trace-2"
        return int(path.read_text().split("\n")[-2].split()[0]) if path.exists() and path.stat().st_size else 0

    def kill(self, *processes: harness.Process) -> None:
        """At once: all are stopped first, else a rank that dies a moment later saves what it has."""
        stopped = [int(line.split()[0]) for process in processes for line in process.job.processes()]
        signal_each(stopped, signal.SIGSTOP)
        for process in processes:
            process.kill()
        for process in processes:
            assert process.wait(WAIT_S) == -signal.SIGKILL, self.said()
        signal_each(stopped, signal.SIGCONT)  # what does not die with its launcher sees that that is gone

    def finish(self, undisturbed: Path) -> None:
        """All come to their end, with what that directory has."""
        self.wait(*range(RANKS))
        assert self.scheduler.wait(WAIT_S) == 0, self.said()
        assert not (self.directory / "recovery" / "cluster" / "state.json").exists()
        for rank in range(RANKS):
            found, whole = trace(self.directory, rank), trace(undisturbed, rank)
            assert found == {step: whole[step] for step in found}
            assert (self.directory / f"final-{rank}").read_text() == (undisturbed / f"final-{rank}").read_text(), rank

    def end(self) -> None:
        for job in self._jobs:
            job.close()
        self._port.release()


@pytest.fixture
def job(cluster: harness.Cluster, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(cluster, tmp_path / "cluster")
    yield made
    made.end()


@pytest.fixture(scope="module")
def undisturbed(cluster: harness.Cluster, references: Path) -> Path:
    """The same script under torchrun, where nobody dies."""

    def run(directory: Path) -> None:
        test_heal.run(directory, launcher="torchrun", ranks=RANKS, steps=STEPS, cluster=cluster)

    return once(references / "cluster", run)


@pytest.mark.thorough
def test_ranks_that_die_alone_are_forked_again_and_nobody_does_anything(job: Cluster, undisturbed: Path) -> None:
    for rank in range(RANKS):
        job.start(rank, "1:5:bwd", "0:9:win")
    job.finish(undisturbed)
    assert {path.name for path in job.directory.glob("died-*")} == {"died-1-5-bwd", "died-0-9-win"}


def test_training_goes_on_without_its_scheduler_and_the_next_one_heals(job: Cluster, undisturbed: Path) -> None:
    for rank in range(RANKS):
        job.start(rank)
    job.wait_for_step(3)
    job.kill(job.scheduler)
    job.wait_for_step(job.step() + 10)
    job.start_scheduler()
    job.kill(job.workers[1])
    job.start(1)
    job.finish(undisturbed)


@pytest.mark.thorough
def test_a_worker_that_is_asked_to_stop_saves_and_ends_and_the_others_wait_for_it(
    job: Cluster, undisturbed: Path
) -> None:
    for rank in range(RANKS):
        job.start(rank)
    job.wait_for_step(3)
    job.workers[1].send_signal(signal.SIGINT)
    job.wait(1, codes=(EXIT_SAVED,))
    job.start(1)
    job.finish(undisturbed)


@pytest.mark.thorough
def test_a_cluster_that_is_asked_to_stop_whole_ends_and_goes_on_when_it_is_started_again(
    job: Cluster, undisturbed: Path
) -> None:
    for rank in range(RANKS):
        job.start(rank)
    job.wait_for_step(3)
    for process in (job.scheduler, *job.workers.values()):
        process.terminate()
    job.wait(*range(RANKS), codes=(EXIT_SAVED,))
    job.scheduler.wait(WAIT_S)
    job.start_scheduler()
    for rank in range(RANKS):
        job.start(rank)
    job.finish(undisturbed)


@pytest.mark.thorough
def test_where_the_scheduler_is_killed_before_all_ranks_have_met_all_are_forked_again(
    job: Cluster, undisturbed: Path
) -> None:
    """The store in which they meet ends with it."""
    plan = ("1:5:bwd",)
    for rank in range(RANKS):
        job.start(rank, *plan, LATE_RANK="2")
    job.wait_until((job.directory / "late").exists)  # and 2 waits for some seconds now
    job.kill(job.scheduler)
    job.start_scheduler()
    job.finish(undisturbed)


@pytest.mark.thorough
def test_a_scheduler_that_knows_nothing_takes_a_job_that_trains_for_what_it_is(job: Cluster, undisturbed: Path) -> None:
    log = job.directory / "scheduler" / f"{PROGRAM}.err"
    job.wait_until(log.exists)
    for rank in range(RANKS):  # by such names they become ranks in the order in which they come
        job.start(rank, MS_NODE_ID=f"worker {RANKS - rank}")
        job.wait_until(lambda: log.read_text().count("has come, as rank") == rank + 1)  # noqa: B023
    job.wait_for_step(3)
    hold = job.directory / "hold"
    hold.touch()  # else the training may be over before all have found the next scheduler
    job.kill(job.scheduler)
    (job.directory / "recovery" / "cluster" / "state.json").unlink()
    job.start_scheduler()
    # Whoever is late finds that a new worker has its rank by now.
    job.wait_until(lambda: job.said().count("is there again") == RANKS)
    hold.unlink()
    job.wait_for_step(job.step() + 1)
    job.kill(job.workers[1])
    job.start(1, MS_NODE_ID=f"worker {RANKS - 1}")
    job.finish(undisturbed)


@pytest.mark.thorough
def test_a_worker_and_the_scheduler_are_killed_at_once(job: Cluster, undisturbed: Path) -> None:
    for rank in range(RANKS):
        job.start(rank)
    job.wait_for_step(3)
    job.kill(job.scheduler, job.workers[0])
    job.start(0)  # it waits for the scheduler, as the others do
    job.start_scheduler()
    job.finish(undisturbed)


def test_a_cluster_that_is_killed_whole_goes_on_from_its_newest_checkpoint(job: Cluster, undisturbed: Path) -> None:
    plan = ("1:5:bwd",)
    for rank in range(RANKS):
        job.start(rank, *plan)
    job.wait_for_step(12)
    job.kill(job.scheduler, *job.workers.values())
    for rank in range(RANKS):
        job.start(rank, *plan)
    job.start_scheduler()
    job.finish(undisturbed)
    (saved,) = (job.directory / "ckpt").glob("tft_saved_checkpoints-step_*")
    step = int(saved.name.rpartition("_")[2])
    assert step in (4, 5), "5 unless the dead rank alone had what was to be reduced of it"
    repeated = [int(line.split()[0]) for line in (job.directory / "trace-2").read_text().splitlines()]
    assert repeated.count(step + 1) == 2
    assert repeated.count(step) <= 1, "a rank that was stopped after its update has no line of it"


@pytest.mark.thorough
def test_without_recovery_the_first_death_ends_the_job_whose_step_is_saved(
    cluster: harness.Cluster, tmp_path: Path, undisturbed: Path
) -> None:
    """And it begins again at that step, if all are started again."""
    job = Cluster(cluster, tmp_path / "cluster", recovery=False)
    try:
        for rank in range(RANKS):
            job.start(rank, "1:5:bwd")
        job.wait(1, codes=(128 + signal.SIGKILL,))
        job.wait(0, 2, codes=(EXIT_SAVED,))
        assert job.scheduler.wait(WAIT_S) == 1, job.said()
        for rank in range(RANKS):
            job.start(rank, "1:5:bwd")
        job.start_scheduler()
        job.finish(undisturbed)
    finally:
        job.end()
