"""The wall clock jumps by an hour, forwards or back: nothing is published, removed or chosen for it that should not be.

Time-outs and periodic checkpoints go by the monotonic clock: cores are told the time, and a rule of tests/test_style.py
lists the modules that read the other one. What each of them does after a jump:

    checkpoint/publish.py, retention.py   times of checkpoints never go back; after a jump more of them stay, not less
    checkpoint/starts.py, system.py        unfinished directories whose writer nobody knows stay for a day, not an hour
    controller/handover.py                a controller that runs keeps its file
    controller/server.py, timeline.py     incidents have both clocks, the wall clock for people
    controller/teller.py                   a recovery is moved as a whole, and lasts as long as it did
    controller/handover.py              a sign of life is another time, not a later one
    launcher/host.py                      a file whose time differs is read again: its contents count
    liveness/leftovers.py                 a job with a living rank keeps its files
    cli/retention_commands.py             only shows ages
    page/server.py, watch.py              only show ages
    drill/report.py                       only says when a script was drilled
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from lastwords import clock
from lastwords.checkpoint import layout, load, publish, starts
from lastwords.checkpoint.manifest import read_manifest
from lastwords.checkpoint.retention import Rules, prune
from lastwords.controller import handover
from lastwords.controller.handover import ControllerSpec
from lastwords.controller.teller import spans_of
from lastwords.liveness import paths
from lastwords.liveness.leftovers import remove_dead_job_dirs
from lastwords.liveness.robust_mutex import LifeLine
from tests.checkpoint.simulated_disk import SimulatedOs
from tests.checkpoint.states import Job
from tests.controller.test_state_file import REMEMBERED, spec_of
from tests.selection import usually

HOUR_S = 3600
JUMPS_S = (HOUR_S, -HOUR_S)
PERIODIC = Job(incident=0)
STARTED_NS = 1_790_000_000 * 10**9
ROOT = Path("/ckpt")

PAUSE_S, KEEP_S = 600, 1800
CHECKPOINTS = 12


@pytest.fixture(params=JUMPS_S, ids=["an hour ahead", "an hour back"])
def jumped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read now is off by an hour, compared with what was read before."""
    wall_ns = clock.wall_ns
    monkeypatch.setattr(clock, "wall_ns", lambda: wall_ns() + request.param * 10**9)


class BackwardsError(AssertionError):
    """A checkpoint looks older than the one before it."""


def disk() -> SimulatedOs:
    made = SimulatedOs()
    made.mkdir(ROOT)
    return made


def published_and_pruned(monkeypatch: pytest.MonkeyPatch, place: int, jump_s: int) -> list[list[int]]:
    """Steps that are there after each of some checkpoints; the clock jumps before the one at `place`."""
    made, there = disk(), []
    for number in range(CHECKPOINTS):
        job, step = PERIODIC.again(attempt=number + 1), 10 * (number + 1)
        wall_ns = STARTED_NS + (number * PAUSE_S + (jump_s if number >= place else 0)) * 10**9
        monkeypatch.setattr(clock, "wall_ns", lambda wall_ns=wall_ns: wall_ns)
        publish.publish(ROOT, job.write(ROOT, step, made), job.facts(step), made)
        prune([ROOT], job.name, Rules(0, KEEP_S // 60), made)
        newest = load.latest(ROOT, os=made)
        assert newest == layout.checkpoint_dir(ROOT, step), "an older one would be taken"
        found = load.scan(ROOT, made)
        times = [read_manifest(one.path, made).published_unix_ns for one in reversed(found)]
        if times != sorted(set(times)):
            raise BackwardsError(times)
        there.append(sorted(one.manifest.global_step for one in found if one.manifest))
    return there


@pytest.mark.parametrize("place", usually(range(1, CHECKPOINTS), [5]))
@pytest.mark.parametrize("jump_s", JUMPS_S)
def test_one_in_so_many_minutes_remains_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch, place: int, jump_s: int
) -> None:
    for steps in published_and_pruned(monkeypatch, place, jump_s):
        apart_s = [PAUSE_S * (after - before) // 10 for before, after in pairwise(steps)]
        assert max(apart_s, default=0) <= KEEP_S, f"only {steps} are left"


def test_without_a_jump_most_of_them_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the one above would show nothing."""
    assert len(published_and_pruned(monkeypatch, 0, 0)[-1]) < CHECKPOINTS // 2


def test_times_that_go_back_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(publish, "later_than_all", lambda root, now_ns, os: now_ns)
    with pytest.raises(BackwardsError):
        published_and_pruned(monkeypatch, 4, -HOUR_S)


@pytest.mark.usefixtures("jumped")
def test_an_unfinished_directory_of_another_host_stays(tmp_path: Path) -> None:
    directory = Job(name="other").write(tmp_path, 30)
    for rank in (0, 1):
        (directory / f"rank_{rank}/part.json").unlink()
    assert starts.remove_stale(tmp_path, "mine", 3) == []


def test_a_jump_of_more_than_a_day_makes_it_look_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control, and the limit."""
    directory = Job(name="other").write(tmp_path, 30)
    for rank in (0, 1):
        (directory / f"rank_{rank}/part.json").unlink()
    wall_ns = clock.wall_ns() + int(starts.QUIET_S + HOUR_S) * 10**9
    monkeypatch.setattr(clock, "wall_ns", lambda: wall_ns)
    assert starts.remove_stale(tmp_path, "mine", 3) == [directory]


@pytest.mark.usefixtures("jumped")
def test_the_file_of_a_controller_that_runs_stays(tmp_path: Path) -> None:
    start_ticks = handover.process_id.start_ticks(os.getpid())
    assert start_ticks is not None
    record = handover.RunRecord("127.0.0.1:30051", os.getpid(), start_ticks, "job", 1, "token", "")
    path = handover.run_file_path("127.0.0.1", 30051, root=tmp_path)
    handover.RunFile(path, record).update(stage="watching", live=2, progress=1)
    handover.remove_dead_run_files(root=tmp_path)
    assert path.exists()


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    path = Path(f"/dev/shm/test-wall-clock-{os.getpid()}")
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.mark.usefixtures("jumped")
def test_the_files_of_a_job_with_a_living_rank_stay(shared_memory: Path) -> None:
    directory = paths.make_job_dir("alive", 1, "5f3a7700", root=shared_memory)
    life = LifeLine.create(paths.life_path("alive", 1, 0, "5f3a7700", root=shared_memory))
    assert remove_dead_job_dirs(lambda directory: False, root=shared_memory) == []
    life.release()
    assert directory.exists()


def test_a_sign_of_life_is_seen_though_the_clock_was_set_back(tmp_path: Path) -> None:
    path = paths.state_path("state-file", 2, "5f3a", root=tmp_path)
    path.parent.mkdir(mode=0o700)
    spec: ControllerSpec = dataclasses.replace(spec_of(tmp_path), nonce="5f3a")
    file = handover.StateFile(path, handover.StateOwner(1, 1), spec, "token")
    file.write(REMEMBERED)
    later_s = clock.wall_ns() / 1e9 + HOUR_S
    os.utime(path, (later_s, later_s))
    before = handover.beat(path)
    file.beat()
    beat = handover.beat(path)
    assert beat is not None
    assert before is not None
    assert beat < before


def test_a_span_lasts_as_long_as_it_did_whatever_the_wall_clock_says() -> None:
    events = [{"what": "entered", "mono_s": 5.2}, {"what": "updated", "mono_s": 5.7, "rank": 0}]
    record = {"outcome": "RECOVERED", "step": 31, "died_mono_s": 5.0, "events": events}
    now_ns = 10**18
    for shift_s in (0, *JUMPS_S):
        shifted = spans_of(record, 6.0, now_ns + shift_s * 10**9)
        assert [round((span.end_ns - span.begin_ns) / 1e9, 3) for span in shifted] == [0.7, 0.2, 0.5]
        assert shifted[0].begin_ns == now_ns + (shift_s - 1) * 10**9
