"""Who may serve: one process at a time, a successor only where nobody serves any more, and not for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lastwords import clock
from lastwords.controller import handover, takeover
from lastwords.controller.events import JobMemory, Remember
from lastwords.controller.handover import ControllerSpec, StateFile, StateOwner
from lastwords.errors import BusyError, ConfigError, UnavailableError
from lastwords.liveness import paths, process_id
from tests import golden

CODE = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the state is; nothing of the lock is left afterwards."""
    place = paths.state_path("takeover", 1, root=tmp_path)
    place.parent.mkdir(mode=0o700)
    with contextlib.ExitStack() as held:
        monkeypatch.setattr(takeover, "_held", held)
        yield place


def keep(path: Path, owner: StateOwner) -> None:
    """The state of a controller."""
    spec = ControllerSpec("127.0.0.1", 30051, "takeover", 1, 2, path.parent)
    StateFile(path, owner, spec, "t0ken").write(Remember((), JobMemory(incident=3)))


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock, as a controller does."""
    command = [sys.executable, "-c", CODE, str(path.parent / paths.LOCK_NAME)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        keep(path, StateOwner(process.pid, process_id.start_ticks(process.pid) or 0, (0.0,)))
        yield process
        process.kill()


DEAD = StateOwner(2**22 + 1, 5)


def test_of_a_dead_controller_the_state_is_taken(path: Path) -> None:
    keep(path, DEAD)
    kept = takeover.follow(path)
    assert kept.memory.incident == 3
    owner = takeover.this_owner(kept.owner)
    assert owner.is_running
    assert owner.pid == os.getpid()


def test_nobody_else_serves_meanwhile(path: Path) -> None:
    keep(path, DEAD)
    takeover.follow(path)
    with golden.raises(BusyError):
        takeover.hold(path.parent)


def test_one_that_answers_is_left_alone(
    path: Path, holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = SimpleNamespace(pid=holder.pid, stage="watching")
    monkeypatch.setattr(takeover, "query_state", lambda *_, **__: answer)
    with golden.raises(BusyError):
        takeover.follow(path)
    assert holder.poll() is None


@pytest.mark.parametrize("stopped", [False, True])
def test_one_that_does_not_answer_is_ended_first(
    path: Path, holder: subprocess.Popen[bytes], stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stopped:
        holder.send_signal(signal.SIGSTOP)

    def silent(*_: object, **__: object) -> None:
        raise UnavailableError("nobody answers")

    monkeypatch.setattr(takeover, "query_state", silent)
    kept = takeover.follow(path)
    assert holder.wait() == -signal.SIGKILL
    assert kept.memory.incident == 3


def test_one_that_has_just_begun_is_waited_for(
    path: Path, holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(path, StateOwner(holder.pid, process_id.start_ticks(holder.pid) or 0, (clock.mono_s(),)))
    answers = [UnavailableError("not yet"), SimpleNamespace(pid=holder.pid, stage="watching")]

    def soon(*_: object, **__: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(takeover, "query_state", soon)
    with golden.raises(BusyError):
        takeover.follow(path, answer_s=60.0)
    assert holder.poll() is None


def test_one_that_dies_again_and_again_is_not_started_for_ever(path: Path) -> None:
    now_s = clock.mono_s()
    keep(path, StateOwner(DEAD.pid, 5, (now_s - 40.0, now_s - 20.0, now_s - 10.0)))
    assert takeover.follow(path).owner.pid == DEAD.pid
    keep(path, StateOwner(DEAD.pid, 5, (now_s - 20.0, now_s - 10.0, now_s - 1.0)))
    with golden.raises(ConfigError):
        takeover.follow(path)


def test_by_hand_it_is_started_once_more(path: Path) -> None:
    now_s = clock.mono_s()
    keep(path, StateOwner(DEAD.pid, 5, (now_s, now_s, now_s)))
    assert takeover.follow(path, by_hand=True).owner.pid == DEAD.pid


def test_the_job_ends_meanwhile(path: Path) -> None:
    keep(path, DEAD)
    path.unlink()
    with golden.raises(UnavailableError):
        takeover.follow(path)
    assert handover.owner(path) is None
