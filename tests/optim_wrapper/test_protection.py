"""How protection ends: what it gives back, and what it keeps while the process leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lastwords.checkpoint.layout import start_name
from lastwords.controller.handover import ControllerSpec
from lastwords.controller.launch import ControllerHandle
from lastwords.errors import ConfigError, StorageError
from lastwords.liveness import leftovers, paths
from lastwords.liveness.robust_mutex import LifeLine
from lastwords.optim_wrapper.launch import startup
from lastwords.optim_wrapper.launch.config import Config
from lastwords.optim_wrapper.launch.startup import Agreement
from lastwords.optim_wrapper.launch.world import World
from lastwords.optim_wrapper.trainer.protection import Protection, refuse_watchdog
from lastwords.processor.departure import EXIT_NOT_SAVED, EXIT_SAVED, Verdict, verdict_of
from lastwords.vocabulary import Exit, ExitKind
from tests import golden


class Guard:
    """Stands for the signal guard and counts how often it was taken away."""

    uninstalled = 0

    def uninstall(self) -> None:
        self.uninstalled += 1

    def begin_incident(self) -> None: ...


@pytest.fixture
def protection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = Config.from_env(0, "127.0.0.1", 30051, tmp_path, environ={})
    protection: Any = Protection(config, World(), lambda *_: None)  # type: ignore[arg-type, return-value]
    protection._signals = Guard()
    return protection


def test_signals_are_given_back_when_training_is_over(protection: Any) -> None:
    protection.close()
    protection.close()
    assert protection._signals.uninstalled == 1


def test_signals_are_given_back_when_the_controller_has_refused_this_process(protection: Any) -> None:
    protection.departure.refuse("port 30051 belongs to another job")
    protection.close()
    assert protection._signals.uninstalled == 1


def test_a_launchers_sigterm_cannot_cut_off_a_process_that_leaves_after_its_last_words(protection: Any) -> None:
    protection.departure.decide(Verdict(EXIT_SAVED, "lastwords: rank 0: ...", is_cause=False))
    protection.close()
    assert protection._signals.uninstalled == 0


@pytest.mark.parametrize(
    ("causes", "asked", "shown"),
    [((), False, True), ((2,), False, False), ((0, 2), True, False)],
    ids=["nobody", "rank 2", "all were asked to stop"],
)
def test_an_echo_keeps_its_traceback_unless_the_cause_is_known(
    protection: Any, causes: tuple[int, ...], asked: bool, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    protection._asked_to_stop = lambda: asked
    monkeypatch.setattr(protection.departure, "end_within", lambda *_: None)
    order = Exit(1, 1, ExitKind.SAVED, 7, "/c", "a collective failed on rank 0", causes)
    protection.departure.decide(verdict_of(0, order))
    raised: list[tuple[str, bool]] = []
    protection._agent = SimpleNamespace(raised=lambda *what: raised.append(what), close=lambda: None)
    protection._world.size = 3
    with pytest.raises(SystemExit) as caught:
        protection.fail(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), lambda: None)
    assert [secondary for _, secondary in raised] == [True]
    assert caught.value.code == EXIT_SAVED
    assert ("RuntimeError: [gloo" in capsys.readouterr().err) is shown


@pytest.mark.parametrize(("others", "expected"), [((1, 2), 1), ((), 1)], ids=["lowest of three", "alone"])
def test_the_lowest_rank_of_a_host_removes_what_dead_jobs_left_there(
    protection: Any, host: str, others: tuple[int, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert removals(protection, host, (0, *others), monkeypatch) == expected


def test_any_other_rank_leaves_it_to_that_one(protection: Any, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    protection._world.rank = 1
    assert removals(protection, host, (0, 1), monkeypatch) == 0


@pytest.fixture
def host() -> Iterator[str]:
    """A job with a directory in shared memory."""
    job = f"test-protection-{os.getpid()}"
    paths.make_job_dir(job, 1)
    yield job
    paths.remove_job_dir(job, 1)


def removals(protection: Any, job: str, ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    """How often leftovers are looked for when these ranks live on this host."""
    calls: list[None] = []
    monkeypatch.setattr(leftovers, "remove_dead_job_dirs", lambda needed: calls.append(None))
    lives = [LifeLine.create(paths.life_path(job, 1, rank)) for rank in ranks]
    protection._agent = SimpleNamespace(on_peer_died=lambda report: None, close=lambda: None)
    core: Any = SimpleNamespace(asks=False)
    protection._look_after_host(Agreement(job, 1, "token", "prefix"), core)
    protection.close()
    for life in lives:
        life.release()
    return len(calls)


def test_a_rank_that_finds_the_jobs_directory_gone_leaves_as_it_was_told(
    protection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(path: Path) -> Any:
        raise StorageError(f"cannot create the black box {path}: No such file or directory")

    protection._agreement = Agreement("job", 1, "token", "prefix")
    with pytest.raises(StorageError):
        protection.use_box(make)  # the control: nobody has told it to leave
    monkeypatch.setattr(protection.departure, "end_within", lambda *_: None)
    protection.departure.decide(Verdict(EXIT_NOT_SAVED, "lastwords: rank 0: nothing to save", is_cause=False))
    with pytest.raises(SystemExit) as caught:
        protection.use_box(make)
    assert caught.value.code == EXIT_NOT_SAVED


def test_two_jobs_of_one_name_on_one_host_never_share_a_black_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each draws generation 1, in a directory of its own. Who ends first takes only its own files away."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    started: list[ControllerSpec] = []

    def start(spec: ControllerSpec, token: str) -> ControllerHandle:
        started.append(spec)
        return ControllerHandle(0, spec.port, spec.log_path, None)

    monkeypatch.setattr(startup.controller_launch, "start_controller", start)
    boxes = []
    for number in (0, 1):
        environ = {"LASTWORDS_JOB": f"test-one-name-{os.getpid()}"}
        config = Config.from_env(0, "127.0.0.1", 30051 + number, tmp_path / str(number), environ=environ)
        protection: Any = Protection(config, World(), lambda *_: None)  # type: ignore[arg-type, return-value]
        protection._agreement = startup.agree(World(), config, {})
        boxes.append(protection.box_path(0))
    assert boxes[0].parent != boxes[1].parent
    specs = [ControllerSpec.from_json(spec.to_json()) for spec in started]
    for box, spec in zip(boxes, specs, strict=True):
        assert paths.make_job_dir(spec.job, spec.generation, spec.nonce) == box.parent
        box.touch()
    paths.remove_job_dir(specs[0].job, specs[0].generation, specs[0].nonce)
    assert [box.exists() for box in boxes] == [False, True]
    paths.remove_job_dir(specs[1].job, specs[1].generation, specs[1].nonce)


def test_a_start_remembers_those_whose_controllers_were_killed_and_may_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(startup.starts, "STARTS_KEPT", 1)
    monkeypatch.setattr(startup.handover, "may_be_followed", lambda job, generation: generation == 1)
    monkeypatch.setattr(
        startup.controller_launch, "start_controller", lambda spec, token: ControllerHandle(0, 1, spec.log_path, None)
    )
    config = Config.from_env(0, "127.0.0.1", 30051, tmp_path, environ={"LASTWORDS_JOB": "digits"})
    for _ in range(3):
        startup.agree(World(), config, {})
    assert [generation for generation in (1, 2, 3) if (tmp_path / start_name(generation)).exists()] == [1, 3]


@pytest.mark.parametrize("value", [None, "1", "2"])
def test_nccls_watchdog_has_to_be_switched_off(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """2 is CleanUpOnly: it aborts the collective that hangs, and what is queued behind it goes on with rubbish."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    environ = {} if value is None else {"TORCH_NCCL_ASYNC_ERROR_HANDLING": value}
    with golden.raises(ConfigError):
        refuse_watchdog(environ)
    refuse_watchdog({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    refuse_watchdog(environ)
