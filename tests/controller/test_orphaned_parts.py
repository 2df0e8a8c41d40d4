"""Another job's start touches nothing of a job whose controller was killed, as long as another one may follow there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lastwords.checkpoint import layout
from lastwords.checkpoint.lock_file import LockFile
from lastwords.checkpoint.starts import QUIET_S, Claim
from lastwords.checkpoint.system import REAL_OS
from lastwords.controller import handover
from lastwords.controller.events import GoneRank, JobMemory, PartPlan, Registered, Remember, StartPublish
from lastwords.controller.handover import ControllerSpec, StateFile, StateOwner
from lastwords.controller.storage import StorageJobs
from lastwords.liveness import leftovers, paths, process_id
from lastwords.liveness.robust_mutex import LifeLine
from lastwords.vocabulary import DeathSource, ProcessId
from tests.checkpoint.states import Job

LAST_WORDS = Job(name=f"orphan-{os.getpid()}", generation=1)
PERIODIC = replace(LAST_WORDS, incident=0, attempt=4)
NONCE = "5f3a"
HERE = process_id.this_process("n")
ELSEWHERE = ProcessId("another host", HERE.pid, HERE.start_ticks, "n")
ENDED = replace(HERE, start_ticks=HERE.start_ticks - 1)
"""Another process has its number now."""


STEP = 8


def storage(root: Path, job: str, generation: int) -> StorageJobs:
    spec = ControllerSpec("127.0.0.1", 30051, job, generation, 2, root)
    return StorageJobs(spec, lambda event: None)


def starts(root: Path, job: str = "other") -> list[str]:
    """What is there when a job has been started there."""
    jobs = storage(root, job, 2)
    jobs.clear_up()
    jobs.release()
    assert jobs.wait_idle(20.0)
    return names(root)


def saves(root: Path) -> list[str]:
    """What else is there when another job has saved there, which it was started in long before."""
    job = Job(name="other", generation=1)
    job.write(root, STEP)
    jobs = storage(root, job.name, job.generation)
    parts = (PartPlan(0, 1, ("a",), (0,)), PartPlan(1, 1, ("bb",), (1,)))
    jobs.carry_out(StartPublish(1, 1, STEP, 0, parts, "rank 1 died", (1,), (1,), ()))
    assert jobs.wait_idle(20.0)
    shutil.rmtree(layout.checkpoint_dir(root, STEP))
    return names(root)


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Where a job has last words, a periodic checkpoint and a new directory when its controller is killed."""
    claim = Claim.take(tmp_path, LAST_WORDS.name, LAST_WORDS.generation)
    assert claim is not None
    LAST_WORDS.write(tmp_path, 30)
    PERIODIC.write(tmp_path, 20)
    (replace(LAST_WORDS, attempt=2).tmp_dir(tmp_path, 30) / "rank_0").mkdir(parents=True)
    REAL_OS.close(claim._fd)  # as kill -9 does
    directory = paths.make_job_dir(LAST_WORDS.name, LAST_WORDS.generation, NONCE)
    yield tmp_path
    shutil.rmtree(directory, ignore_errors=True)


def keep(root: Path, *ranks: ProcessId, gone: tuple[int, ...] = (), publishing: StartPublish | None = None) -> Path:
    """The state that the killed controller has kept for the one that follows it."""
    spec = ControllerSpec("127.0.0.1", 30052, LAST_WORDS.name, LAST_WORDS.generation, len(ranks), root, nonce=NONCE)
    path = paths.state_path(LAST_WORDS.name, LAST_WORDS.generation, NONCE)
    memory = JobMemory(
        gone=tuple(GoneRank(rank, DeathSource.STREAM, None) for rank in gone), certain=True, publishing=publishing
    )
    members = tuple(Registered(rank, ("u",)) for rank in ranks)
    StateFile(path, StateOwner(HERE.pid, HERE.start_ticks - 1), spec, "t0ken").write(Remember(members, memory))
    return path


def is_cleared_up(left: list[str]) -> bool:
    """Whether only the last words are left, where a person finds them."""
    kept = f"unpublished-step_30-{LAST_WORDS.name}-g1-i1-a1"
    return {name.partition("/")[0] for name in left} == {kept}


@pytest.mark.parametrize("comes", [starts, saves])
@pytest.mark.parametrize("living", [HERE, ELSEWHERE], ids=["here", "on another host"])
def test_nothing_of_a_job_with_a_living_rank_is_moved_or_removed(
    root: Path, living: ProcessId, comes: Callable[[Path], list[str]]
) -> None:
    keep(root, ENDED, living)
    before = names(root)
    assert comes(root) == before


@pytest.mark.parametrize("comes", [starts, saves])
@pytest.mark.parametrize(("last", "gone"), [(ENDED, ()), (ELSEWHERE, (1,))], ids=["here", "on another host"])
def test_when_its_last_rank_has_ended_it_is_cleared_up(
    root: Path, last: ProcessId, gone: tuple[int, ...], comes: Callable[[Path], list[str]]
) -> None:
    keep(root, ENDED, last, gone=gone)
    assert is_cleared_up(comes(root))


def test_a_controller_that_follows_already_may_publish_although_no_rank_lives(root: Path) -> None:
    state = keep(root, ENDED)
    before = names(root)
    with LockFile(state.with_name(paths.LOCK_NAME)).held() as held:
        assert held
        assert starts(root) == before
    assert is_cleared_up(starts(root))


@pytest.mark.parametrize(("left", "stays"), [("{", True), (None, False)], ids=["damaged", "none"])
def test_by_a_state_that_cannot_be_read_nobody_can_tell_and_without_one_nobody_can_follow(
    root: Path, left: str | None, stays: bool
) -> None:
    state = keep(root, HERE)
    state.unlink()
    if left is not None:
        state.write_text(left)
    before = names(root)
    assert (starts(root) == before) is stays
    assert is_cleared_up(starts(root)) is not stays


def ends_here(*ranks: int) -> None:
    """They have ended long ago, by their life lines."""
    for rank in ranks:
        LifeLine.create(paths.life_path(LAST_WORDS.name, LAST_WORDS.generation, rank, NONCE)).release()
    os.utime(paths.job_dir(LAST_WORDS.name, LAST_WORDS.generation, NONCE), (1, 1))


def clears_memory(job: str, root: Path) -> None:
    """As each controller does, and one rank of each host, when a job with this name is started to save in `root`."""
    leftovers.remove_dead_job_dirs(partial(handover.state_is_needed, job=job, root=root))


def test_the_state_by_which_a_launcher_may_have_a_controller_followed_outlives_all_ranks_of_its_host(
    root: Path,
) -> None:
    state = keep(root, ENDED, ELSEWHERE)
    ends_here(0)
    clears_memory("other", root)
    clears_memory(LAST_WORDS.name, root / "elsewhere")  # a job of this name in another directory is another job
    assert handover.read(state).spec.job == LAST_WORDS.name
    clears_memory(LAST_WORDS.name, root)
    assert not state.exists()


def test_so_it_does_where_a_checkpoint_lacks_no_more_than_its_name(root: Path) -> None:
    state = keep(root, ENDED, publishing=StartPublish(1, 1, STEP, 0, (), "rank 0 died", (0,), (0,), ()))
    ends_here(0)
    clears_memory("other", root)
    assert state.exists()


@pytest.mark.parametrize(
    ("last", "gone", "age_s"), [(ENDED, (), 0), (ELSEWHERE, (1,), 0), (ELSEWHERE, (), QUIET_S + 60)]
)
def test_where_nobody_can_be_saved_any_more_the_state_goes_too(
    root: Path, last: ProcessId, gone: tuple[int, ...], age_s: float
) -> None:
    state = keep(root, ENDED, last, gone=gone)
    then_s = state.stat().st_mtime - age_s
    os.utime(state, (then_s, then_s))
    ends_here(0)
    clears_memory("other", root)
    assert not state.exists()


def test_a_rank_that_has_ended_its_protection_has_nobody_followed_though_its_process_goes_on(root: Path) -> None:
    state = keep(root, HERE)
    ends_here(0)
    assert is_cleared_up(starts(root))
    clears_memory("other", root)
    assert not state.exists()


def test_ranks_whose_life_lines_are_here_are_on_no_other_host(root: Path) -> None:
    """Those of a container that has ended are, by their pid namespace."""
    state = keep(root, ELSEWHERE, ELSEWHERE)
    ends_here(0, 1)
    clears_memory("other", root)
    assert not state.exists()


def test_a_state_that_cannot_be_read_stays_for_a_day(root: Path) -> None:
    state = keep(root, ENDED)
    state.write_text("{")
    ends_here(0)
    clears_memory("other", root)
    assert state.exists()
    then_s = state.stat().st_mtime - QUIET_S - 60
    os.utime(state, (then_s, then_s))
    ends_here()
    clears_memory("other", root)
    assert not state.exists()


def test_a_restart_clears_up_behind_its_own_job_but_for_ranks_that_live_on_its_host(root: Path) -> None:
    """Whoever restarts a job has ended its ranks on other hosts; nobody tells the controller there."""
    keep(root, HERE, ELSEWHERE)
    before = names(root)
    assert starts(root, LAST_WORDS.name) == before
    keep(root, ENDED, ELSEWHERE)
    assert is_cleared_up(starts(root, LAST_WORDS.name))
