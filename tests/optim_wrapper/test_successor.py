"""Whether a controller is started again for those who leave: only if it was killed. A process stands in for it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from lastwords.controller import handover, launch
from lastwords.controller.events import JobMemory, Outcome, OutcomeKind, Remember
from lastwords.controller.handover import ControllerSpec, KeptState, StateFile, StateOwner
from lastwords.errors import UnavailableError
from lastwords.liveness import paths, process_id
from lastwords.optim_wrapper.launch import successor
from lastwords.optim_wrapper.launch.successor import ControllerWatch
from lastwords.processor.events import ProcessorOptions
from lastwords.processor.ring import Silence
from tests import golden

SAVED = Outcome(OutcomeKind.SAVED, 8, "/c/step_8", "rank 1 died", (1,))


@pytest.fixture
def controller() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def state_of(pid: int, root: Path) -> Path:
    """What a controller that is this process has left."""
    path = paths.state_path("leaving", 1, "5f3a", root=root)
    path.parent.mkdir(mode=0o700)
    spec = ControllerSpec("127.0.0.1", 30051, "leaving", 1, 2, root, nonce="5f3a")
    owner = StateOwner(pid, process_id.start_ticks(pid))
    StateFile(path, owner, spec, "t0ken").write(Remember((), JobMemory(outcome=SAVED)))
    return path


@pytest.mark.process
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "ended by itself"])
def test_a_controller_that_ends_while_a_rank_leaves_is_not_taken_for_a_killed_one(
    tmp_path: Path,
    controller: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    killed: bool,
) -> None:
    """It takes its file away, and ends, between two looks of the rank: at the file, and at the process."""
    caplog.set_level(logging.INFO, "lastwords")
    path = state_of(controller.pid, tmp_path)

    def read(path: Path, read: Callable[[Path], KeptState] = handover.read) -> KeptState:
        kept = read(path)
        if not killed:
            path.unlink()
        controller.kill()
        controller.wait()
        return kept

    monkeypatch.setattr(handover, "read", read)
    monkeypatch.setattr(successor, "LEAVE_S", 0.0)
    watch = ControllerWatch(
        "rank 1",
        path,
        lambda process, when_ended: None,
        lambda: 1000,  # so many ranks come first that this one starts none itself
        lambda: True,
        Silence(ProcessorOptions()),
        lambda: False,
    )
    watch.leave()
    watch.stop()
    assert bool(caplog.messages) is killed


@pytest.mark.process
@pytest.mark.parametrize("forked", [False, True], ids=["started", "forked"])
@pytest.mark.parametrize("ends", ["exit 3", "kill -SEGV $$"], ids=["exit code", "signal"])
def test_a_successor_that_ends_at_once_says_how(
    tmp_path: Path, controller: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, ends: str, forked: bool
) -> None:
    path = state_of(controller.pid, tmp_path)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho no memory\n{ends}\n")
    python.chmod(0o700)
    made: list[subprocess.Popen[bytes]] = []

    def fork(arguments: Sequence[str], environment: Mapping[str, str], log: str) -> int:
        with open(log, "ab") as out:
            made.append(subprocess.Popen([str(python), *arguments], env=dict(environment), stdout=out))
        return made[0].pid

    monkeypatch.setattr(launch, "_fork", fork if forked else lambda *_: None)
    monkeypatch.setattr(sys, "executable", str(python))
    with golden.raises(UnavailableError):
        launch.start_successor(path)
