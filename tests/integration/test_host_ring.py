"""On a host without the controller, the ranks themselves tell it of a neighbour's death, at once and only then."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import layout
from lastwords.checkpoint.load import open_checkpoint
from lastwords.errors import StorageError, UnavailableError
from lastwords.liveness import paths
from lastwords.processor import ring as ring_module
from lastwords.processor.ring import HostRing, ranks_here
from lastwords.vocabulary import DeathSource, PeerDied
from tests.integration.kills import Kill
from tests.integration.living import Living
from tests.integration.plan import Layout
from tests.integration.puppet import WAIT_S, PuppetProcess
from tests.integration.rig import Rig
from tests.integration.test_controller_shell import Job
from tests.patience import until
from tests.shortage import no_file_at_all

pytestmark = pytest.mark.process

JOB = f"test-ring-{os.getpid()}"
ME = 4
LIVING = (0, 1, 2, 5)
AT_ONCE_S = 0.5
SOON_S = 10.0
"""Far from what silence and the time to confirm it would take in that test."""
"""Far more than a death takes to be known, far less than `silence_timeout_s` or any keepalive."""


class Heard:
    """What a ring reports."""

    def __init__(self) -> None:
        self._reports: queue.Queue[PeerDied] = queue.Queue()
        self._endings: queue.Queue[PeerDied] = queue.Queue()

    def put(self, report: PeerDied) -> None:
        (self._endings if report.how else self._reports).put(report)

    def ending(self) -> tuple[int, str]:
        report = self._endings.get(timeout=WAIT_S)
        return report.dead_rank, report.how

    def deaths(self, count: int) -> list[int]:
        return [self._reports.get(timeout=WAIT_S).dead_rank for _ in range(count)]

    def nothing(self, for_s: float = 0.3) -> bool:
        with contextlib.suppress(queue.Empty):
            return self._reports.get(timeout=for_s) is None
        return True


@pytest.fixture
def neighbours() -> Iterator[dict[int, Living]]:
    """Processes that hold the life lines of four ranks of this host; this process is rank 4."""
    paths.make_job_dir(JOB, 1)
    with contextlib.ExitStack() as stack:
        yield {rank: stack.enter_context(Living(paths.life_path(JOB, 1, rank))) for rank in LIVING}
    paths.remove_job_dir(JOB, 1)


@pytest.fixture
def ring() -> Iterator[tuple[HostRing, Heard]]:
    heard = Heard()
    ring = HostRing(ME, JOB, 1, heard.put)
    yield ring, heard
    ring.stop()


Ring = tuple[HostRing, Heard]


def test_each_rank_watches_the_next_two_and_takes_the_next_one_for_each_it_loses(
    neighbours: dict[int, Living], ring: Ring
) -> None:
    assert ranks_here(JOB, 1) == list(LIVING)
    ring[0].start()
    neighbours[1].kill()  # the third one from here on: others watch it
    assert ring[1].nothing()
    neighbours[5].kill()  # the next one; then rank 1 comes into view, and has died already
    assert ring[1].deaths(2) == [5, 1]
    assert ring[1].ending() == (5, "SIGKILL")
    neighbours[2].kill()
    neighbours[0].kill()
    assert sorted(ring[1].deaths(2)) == [0, 2]
    assert ring[1].nothing()


def test_who_could_not_be_watched_for_lack_of_descriptors_is_watched_once_there_are_some(
    neighbours: dict[int, Living], ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_module, "PAUSES_S", (0.01, 0.01))
    ring[0].start()
    with no_file_at_all():
        neighbours[5].kill()  # rank 1 would be the next one to be watched
        assert ring[1].deaths(1) == [5]
        assert until(lambda: ring[0]._tried.get(1, 0) > 5)  # a shortage is not given up
        assert ring[0]._tried.keys() == {1}  # nor does the rank after it take its place
    assert until(lambda: 1 in ring[0]._watched)
    neighbours[1].kill()
    assert ring[1].deaths(1) == [1]


def test_whoever_is_left_of_a_host_tells_of_all_the_others(neighbours: dict[int, Living], ring: Ring) -> None:
    for neighbour in neighbours.values():
        neighbour.kill()
    ring[0].start()
    assert sorted(ring[1].deaths(4)) == list(LIVING)


def test_a_rank_that_has_released_its_life_line_is_passed_over_without_a_word(
    neighbours: dict[int, Living], ring: Ring
) -> None:
    ring[0].start()
    for rank in (5, 0):
        assert neighbours[rank].tell("release") == "released"
        neighbours[rank].kill()
        neighbours[rank].wait()
    assert ring[1].nothing()
    neighbours[2].kill()
    assert ring[1].deaths(1) == [2]


def test_after_stop_nothing_is_reported(neighbours: dict[int, Living], ring: Ring) -> None:
    ring[0].start()
    ring[0].stop()
    for neighbour in neighbours.values():
        neighbour.kill()
    assert ring[1].nothing()


def test_a_forked_child_that_stops_its_copy_does_not_blind_its_parent(
    neighbours: dict[int, Living], ring: Ring
) -> None:
    ring[0].start()
    child = os.fork()
    if child == 0:
        ring[0].stop()
        os._exit(0)
    os.waitpid(child, 0)
    neighbours[5].kill()
    assert ring[1].deaths(1) == [5]


def failing_first(times: int, call: Any, error: Exception) -> Any:
    """`call`, but for its first calls."""
    left = [error] * times

    def instead(*args: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return call(*args, **named)

    return instead


def test_what_cannot_be_watched_for_a_moment_is_watched_soon(
    neighbours: dict[int, Living], ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(ring_module, "PAUSES_S", (0.05, 0.05))
    monkeypatch.setattr(
        ring_module, "_names_in", failing_first(1, ring_module._names_in, StorageError("full", errno=errno.EMFILE))
    )
    monkeypatch.setattr(
        ring[0]._watch, "add", failing_first(len(LIVING), ring[0]._watch.add, UnavailableError(str(full)))
    )
    ring[0].start()
    for neighbour in neighbours.values():
        neighbour.kill()
    assert sorted(ring[1].deaths(4)) == list(LIVING)


def test_a_host_without_a_job_directory_is_no_error(ring: Ring) -> None:
    ring[0].start()
    assert ring[1].nothing(0.0)


# ---------------------------------------------------------------------- with a controller that cannot see the host


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with contextlib.closing(Job(tmp_path / "ckpt", f"{JOB}-{time.monotonic_ns() % 10**6}")) as job:
        yield job


def elsewhere(job: Job, *, watching: bool = True, **more: Any) -> list[PuppetProcess]:
    """Three ranks of a host that is not the controller's, two steps trained; it knows them by their sessions alone."""
    ranks = [job.puppet_process(rank, host="another-host", watching=watching, **more) for rank in range(3)]
    for rank in ranks:
        rank.begin_call("begin")
    for rank in ranks:
        rank._results.get(timeout=WAIT_S)
    for rank in ranks:
        rank.call("await_go")
        rank.call("step", 2)
    return ranks


def kill_with_a_child_left(rank: PuppetProcess) -> tuple[float, int]:
    """kill -9 of a rank whose forked child keeps its sockets open: no end of a connection will ever tell."""
    child = rank.call("fork")
    return rank.kill(), child


def test_a_kill_on_another_host_is_known_by_its_neighbours_before_any_connection_breaks(job: Job) -> None:
    job.start(silence_timeout_s=30.0, lost_confirm_s=30.0)
    ranks = elsewhere(job, resident_mb=512)
    killed_mono_s, child = kill_with_a_child_left(ranks[1])
    try:
        assert {ranks[rank].told()["path"] for rank in (0, 2)} == {str(layout.checkpoint_dir(job.spec.root, 2))}
        incident = job.incident()
        (died,) = [event for event in incident["events"] if event["what"] == "died"]
        assert (died["rank"], died["source"]) == (1, DeathSource.ROBUST_MUTEX.name)
        assert died["seen_by"] in (0, 2)
        assert died["mono_s"] - killed_mono_s < SOON_S
        assert incident["cause_ranks"] == [1]
        assert sorted(open_checkpoint(layout.checkpoint_dir(job.spec.root, 2)).manifest.locals) == [0, 1, 2]
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.thorough
def test_without_the_ring_the_same_kill_takes_the_keepalive_and_the_time_to_confirm(job: Job) -> None:
    """Negative control: nothing but the neighbours can know it at once."""
    job.start(silence_timeout_s=1.0, lost_confirm_s=1.0)
    ranks = elsewhere(job, watching=False)
    killed_mono_s, child = kill_with_a_child_left(ranks[1])
    try:
        assert {ranks[rank].told()["path"] for rank in (0, 2)} == {str(layout.checkpoint_dir(job.spec.root, 2))}
        events = job.incident()["events"]
        assert not [event for event in events if event["what"] == "died"]
        decided = next(event for event in events if event["what"] == "decided")
        assert decided["mono_s"] - killed_mono_s > 1.0 + AT_ONCE_S
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_clean_end_on_another_host_is_nobodys_death(job: Job) -> None:
    job.start()
    ranks = elsewhere(job)
    for rank in ranks:
        rank.call("mark_left")
    for rank in ranks:
        rank.call("await_release")
    for rank in ranks:
        rank.begin_call("release")
        assert rank.process.wait(WAIT_S) == 0
    job.assert_nothing_is_left()
    assert not job.incidents()


def test_in_training_a_death_on_another_host_is_known_at_once_and_costs_nothing(rig: Rig) -> None:
    """Real trainers with loader workers, which hold the dead rank's sockets open; only the ring can know in time."""
    trained = Layout(workers=2)
    kill = Kill("forward", 6, (2,))
    late = {"LASTWORDS_SILENCE_TIMEOUT_S": "30", "LASTWORDS_LOST_CONFIRM_S": "30"}
    launch = rig.launch(trained, faults=kill.faults(trained), sabotage=("another_host",), env=late)
    launch.finish()
    step = rig.check_last_words(launch, [2], {5})
    (died,) = [event for event in launch.incidents()[-1]["events"] if event["what"] == "died"]
    assert died["rank"] == 2
    assert died["source"] in {DeathSource.ROBUST_MUTEX.name, DeathSource.PIDFD.name}, "whichever speaks first"
    assert died["seen_by"] in (0, 1)
    rig.check_resume(launch, step)
