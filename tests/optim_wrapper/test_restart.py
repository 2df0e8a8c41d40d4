"""Which checkpoint a restart takes, and what it says where there are only those of other jobs."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist

from lastwords.checkpoint import load, starts
from lastwords.checkpoint.meta import RunFacts
from lastwords.checkpoint.remote.store import Store
from lastwords.checkpoint.remote.transfer import upload
from lastwords.errors import (
    CheckpointError,
    ConfigError,
    FormatError,
    IncompleteError,
    LastWordsError,
    ReplacedError,
    StorageError,
)
from lastwords.optim_wrapper.launch.world import World, launch_of
from lastwords.optim_wrapper.resume import resume, resume_choice, resume_elsewhere
from lastwords.optim_wrapper.resume.resume_choice import OwnJobs, choose, open_chosen
from tests import golden
from tests.checkpoint.states import Job
from tests.checkpoint.stores import file_store

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "8f3a",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/8f3a_b/attempt_0/1/error.json",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "40001",
}
AFTER = {
    **TORCHRUN,
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/8f3a_b/attempt_1/1/error.json",
    "MASTER_PORT": "53987",
}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return World()


def chosen(roots: list[Path], world: World, own: OwnJobs | None) -> Path:
    found = choose(roots, world, "key", own, missing_ok=False)
    assert found is not None
    return found.path


def start(root: Path, environ: dict[str, str]) -> starts.Start:
    return starts.draw([root], launch_of(environ))


@pytest.mark.ci
def test_a_restart_through_a_wrapper_is_the_same_job(tmp_path: Path) -> None:
    """The wrapper is a new process in each start, so whatever is asked of the parent differs."""
    code = "import os; from lastwords.optim_wrapper.launch.world import launch_of; print(launch_of(os.environ))"
    script = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}; exit $?"  # `; exit`: the shell stays the parent
    said = [
        subprocess.run(["sh", "-c", script], env={**os.environ, **TORCHRUN}, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert [run.returncode for run in said] == [0, 0], said
    stable = [run.stdout.partition("process=")[0] for run in said]
    assert stable[0] == stable[1]
    first, second = start(tmp_path, TORCHRUN), start(tmp_path, AFTER)
    assert (second.job, second.restarted) == (first.job, True)


def test_a_restart_takes_its_own_checkpoint_before_a_newer_one_of_another_job(tmp_path: Path, world: World) -> None:
    own = Job(name="mine", generation=1).save(tmp_path, 10)
    newer = Job(name="other", generation=2).save(tmp_path, 90)
    assert chosen([tmp_path], world, OwnJobs("mine")) == own
    # Negative control: a start by hand asks for the newest of all.
    assert chosen([tmp_path], world, None) == newer


@pytest.mark.parametrize(("named", "own"), [(True, OwnJobs("mine", ("grandfather",))), (False, None)])
def test_a_start_by_hand_takes_its_own_checkpoints_where_the_user_has_named_the_job(
    named: bool, own: OwnJobs | None, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[OwnJobs | None] = []
    monkeypatch.setattr(resume, "open_chosen", lambda roots, world, key, own, missing_ok: asked.append(own))
    unused: Any = None
    agreed: Any = SimpleNamespace(job="mine", jobs=("grandfather",), restarted=False)
    resume.resume_from([tmp_path], world, unused, RunFacts(), key="k", agreed=agreed, missing_ok=False, named=named)
    assert asked == [own]


@pytest.mark.parametrize("missing_ok", [True, False])
def test_a_restart_that_finds_other_jobs_checkpoints_only_is_an_error_with_a_remedy(
    tmp_path: Path, world: World, missing_ok: bool
) -> None:
    Job(name="other").save(tmp_path, 30)
    with golden.raises(ConfigError):
        choose([tmp_path], world, "key", OwnJobs("mine"), missing_ok)


def test_a_restart_before_the_first_checkpoint_begins_anew(tmp_path: Path, world: World) -> None:
    assert choose([tmp_path], world, "key", OwnJobs("mine"), True) is None
    with golden.raises(IncompleteError):
        choose([tmp_path], world, "key", OwnJobs("mine"), False)


def test_a_restart_goes_on_from_what_its_job_had_resumed_from(tmp_path: Path, world: World) -> None:
    """Started by hand from another job's checkpoint, killed before its own first one, restarted by torchrun."""
    before = Job(name="grandfather").save(tmp_path, 30)
    assert chosen([tmp_path], world, OwnJobs("mine", ("grandfather",))) == before


def test_a_damaged_checkpoint_that_names_no_job_is_not_passed_over_in_silence(tmp_path: Path, world: World) -> None:
    (Job(name="mine").save(tmp_path, 30) / "manifest.json").write_bytes(b"rubbish")
    with golden.raises(FormatError):
        choose([tmp_path], world, "key", OwnJobs("mine"), True)


def test_the_newest_of_a_job_is_that_of_the_highest_generation_and_step_whatever_the_clocks_say(
    tmp_path: Path, world: World
) -> None:
    """The host of the second controller is five minutes behind, and its checkpoint lies in the fallback directory."""
    fallback = tmp_path / "fallback"
    fallback.mkdir()
    Job(name="mine", generation=1).save(tmp_path, 500)
    newest = Job(name="mine", generation=2).save(fallback, 400)
    assert chosen([tmp_path, fallback], world, None) == newest
    assert chosen([fallback, tmp_path], world, OwnJobs("mine")) == newest


# ------------------------------------------------------------------ while a controller still publishes


class OneOf(World):
    """One of two ranks, each in a thread of its own; `before_opening` runs when it has heard what rank 0 chose."""

    def __init__(self, rank: int, store: dist.Store, before_opening: Callable[[], object]) -> None:
        self.rank, self.size, self.store, self.backend = rank, 2, store, "gloo"
        self.before_opening = before_opening

    def read(self, key: str, timeout_s: float, what: str) -> dict[str, Any]:
        word = super().read(key, timeout_s, what)
        self.before_opening()
        return word


def both_open(root: Path, before_opening: Callable[[], object], *, missing_ok: bool = False) -> list[object]:
    """What each rank has opened: the attempt that published it, or the error."""
    store = dist.HashStore()

    def opened(rank: int) -> object:
        try:
            found = open_chosen([root], OneOf(rank, store, before_opening), "job/start/resume", None, missing_ok)
        except CheckpointError as error:
            return error
        assert found is not None
        return found[0].manifest.attempt

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(opened, range(2)))


def test_all_ranks_open_the_checkpoint_that_rank_0_chose_though_it_is_exchanged_meanwhile(tmp_path: Path) -> None:
    """A late publication of the same step: rank 0 has opened the old one, rank 1 finds the new one under its name."""
    Job(attempt=1).save(tmp_path, 10)
    late = iter([lambda: Job(attempt=2).save(tmp_path, 10)])
    assert both_open(tmp_path, lambda: next(late, lambda: None)()) == [2, 2]


def test_a_checkpoint_that_is_exchanged_again_and_again_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    Job(attempt=1).save(tmp_path, 10)
    attempts = itertools.count(2)
    errors = both_open(tmp_path, lambda: Job(attempt=next(attempts)).save(tmp_path, 10))
    assert isinstance(errors[1], ReplacedError)
    golden.says(errors)
    # Negative control: where nothing is exchanged both have the one that is there.
    assert len({str(found) for found in both_open(tmp_path, lambda: None)}) == 1


# ------------------------------------------------------------------ hosts with a directory each, which is not shared


class OnItsHost(OneOf):
    """Its directory has the path of rank 0's, and is another one."""

    def __init__(self, rank: int, store: dist.Store, roots: list[Path]) -> None:
        super().__init__(rank, store, lambda: None)
        self.roots = roots

    def read(self, key: str, timeout_s: float, what: str) -> dict[str, Any]:
        word = super().read(key, timeout_s, what)
        return {**word, "path": word["path"].replace(str(self.roots[0]), str(self.roots[self.rank]))}


def each_opens(tmp_path: Path, steps_of: Sequence[Sequence[int]], lost_by: int | None = None) -> list[object]:
    """The step that each rank resumes from, or its error; whatever was there is there afterwards.

    lost_by: the rank whose host has lost a file of its newest checkpoint.
    """
    roots = [tmp_path / "host-0", tmp_path / "host-1"]
    for root, steps in zip(roots, steps_of, strict=True):
        root.mkdir()
        for step in steps:
            Job().save(root, step)
    if lost_by is not None:
        max(roots[lost_by].rglob("rank_1/*")).unlink()
    before = [sorted(root.rglob("*")) for root in roots]
    store = dist.HashStore()

    def opened(rank: int) -> object:
        try:
            found = open_chosen([roots[rank]], OnItsHost(rank, store, roots), "job/start/resume", None, True)
        except LastWordsError as error:
            return error
        return None if found is None else found[0].manifest.global_step

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(opened, range(2)))
    assert [sorted(root.rglob("*")) for root in roots] == before, "something was deleted, or made"
    return found


@pytest.mark.parametrize(
    "steps_of", [((10,), (10, 20)), ((10, 20), (10,)), ((10, 20, 30, 40), (10, 30)), ((5, 10, 40), (10, 20))], ids=str
)
def test_of_directories_that_differ_the_newest_that_all_have_is_taken(
    tmp_path: Path, steps_of: tuple[tuple[int, ...], ...]
) -> None:
    newest = max({*steps_of[0]} & {*steps_of[1]})
    assert each_opens(tmp_path, steps_of) == [newest, newest]


def test_what_is_downloaded_where_others_do_not_see_it_is_downloaded_once(tmp_path: Path) -> None:
    """Each older one of the store would follow it, in vain."""
    roots, there = [tmp_path / "host-0", tmp_path / "host-1"], file_store(tmp_path / "store")
    for root in roots:
        Job().save(root, 10)
    for step in (20, 30, 40):
        upload(Job().save(tmp_path / "elsewhere", step), Store(there))
    store = dist.HashStore()

    def opened(rank: int) -> int:
        found = open_chosen([roots[rank], there], OnItsHost(rank, store, roots), "job/start/resume", None, False)
        assert found is not None
        return found[0].manifest.global_step

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(opened, range(2))) == [10, 10]
    assert sorted(path.name.partition("step_")[2][:2] for path in roots[0].iterdir()) == ["10", "40"]


@pytest.mark.parametrize("steps_of", [((10, 20), (30,)), ((10,), ()), ((), (10,))], ids=str)
def test_directories_that_differ_are_an_error_on_all_ranks_and_nobody_begins_anew(
    tmp_path: Path, steps_of: tuple[tuple[int, ...], ...]
) -> None:
    errors = each_opens(tmp_path, steps_of)
    assert all(isinstance(error, CheckpointError | ConfigError) for error in errors), errors
    golden.says(errors)


def test_a_copy_that_is_not_whole_is_passed_over_where_rank_0_finds_that(tmp_path: Path) -> None:
    assert each_opens(tmp_path, ((10, 20), (10, 20)), lost_by=0) == [10, 10]


def test_a_copy_that_is_not_whole_on_another_host_ends_all_ranks_and_is_named(tmp_path: Path) -> None:
    golden.says(each_opens(tmp_path, ((10, 20), (10, 20)), lost_by=1))


def test_a_checkpoint_that_is_published_when_rank_0_has_found_none_is_taken(tmp_path: Path) -> None:
    late = iter([lambda: Job(attempt=2).save(tmp_path, 10)])
    assert both_open(tmp_path, lambda: next(late, lambda: None)(), missing_ok=True) == [2, 2]


# ------------------------------------------------------------------ a rank that alone cannot read


@pytest.mark.parametrize("where", ["read", "survey", "own state", "buckets", "nowhere"])
def test_what_one_rank_alone_cannot_read_ends_all_ranks_at_once_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The others neither wait for its word nor begin a collective without it."""
    Job().save(tmp_path, 10)
    store = dist.HashStore()
    reached: list[str] = []

    def failing_at(place: str, answer: object) -> Callable[..., object]:
        def do(*given: Any, **_: Any) -> object:
            if place == where and any(getattr(one, "rank", one) == 1 for one in given):
                raise StorageError("reading part.json failed: injected")
            return answer

        return do

    def leader(world: World, key: str, word: Any) -> int:
        world.publish(f"{key}/streams/{world.rank}", {})
        world.read(f"{key}/streams/{1 - world.rank}", resume.STORE_WAIT_S, "the other rank to resume")
        reached.append("leader")
        return world.rank

    for module in (resume, resume_choice, resume_elsewhere):
        monkeypatch.setattr(module, "STORE_WAIT_S", 1.0)
    monkeypatch.setattr(
        resume, "fits_as_it_is", lambda _, table, rank, view: failing_at("read", where != "survey")(rank)
    )
    monkeypatch.setattr(resume, "places_of", lambda recorder: recorder)
    found = SimpleNamespace(names=set())
    monkeypatch.setattr(resume, "survey", lambda path, manifest, places: failing_at("survey", found)(places))
    monkeypatch.setattr(resume, "take_over", lambda checkpoint, world, key, recorder: leader(world, key, {}))
    nothing = resume_elsewhere.TakenOver({}, -1, [], -1)
    monkeypatch.setattr(resume, "own_or_stand_in", lambda _, rank, recorder: failing_at("own state", nothing)(rank))
    monkeypatch.setattr(resume, "_buckets", lambda manifest, recorder: failing_at("buckets", ([], []))(recorder))
    monkeypatch.setattr(resume.ddp_buckets, "replay", lambda model, order, trained: reached.append("replay") or [])
    monkeypatch.setattr(resume, "_restore_units", lambda *_: MagicMock())

    def resumed(rank: int) -> object:
        recorder = MagicMock(rank=rank)
        recorder.buffers.restore.return_value = []
        try:
            world = OneOf(rank, store, lambda: None)
            resume.resume_from(
                [tmp_path], world, recorder, RunFacts(), key="job/start/resume", agreed=None, missing_ok=False
            )
        except LastWordsError as error:
            return error
        return None

    monkeypatch.setattr(
        load, "_check", lambda path, manifest, os: load.Found(path, load.DirectoryStatus.COMPLETE, "", manifest)
    )
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(resumed, range(2)))
    if where == "nowhere":  # negative control
        assert (said, reached) == ([None, None], ["replay", "replay"])
        return
    assert [type(error) for error in said] == [CheckpointError, StorageError]
    assert all("injected" in str(error) for error in said)
    assert reached == []
