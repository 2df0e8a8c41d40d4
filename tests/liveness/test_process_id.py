"""Identity of processes."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from pathlib import Path

import pytest

from lastwords.errors import UnavailableError
from lastwords.liveness import process_id
from lastwords.liveness.pidfd import PidWatcher
from tests import golden


def test_this_process_is_alive_and_equal_to_itself() -> None:
    process = process_id.this_process("abc")
    assert process == process_id.this_process("abc")
    assert process.pid == os.getpid()
    assert process.host_id == process_id.host_id()
    assert process_id.is_alive(process)


def test_another_start_time_is_another_process() -> None:
    process = dataclasses.replace(process_id.this_process("abc"), start_ticks=1)
    assert not process_id.is_alive(process)


def test_a_pid_that_nobody_has_is_not_alive() -> None:
    assert process_id.start_ticks(2**22 + 1) is None  # above the kernel's PID_MAX_LIMIT


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_a_process_of_which_the_system_says_nothing_is_not_dead(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(path: Path) -> bytes:
        raise OSError(number, "no", str(path))

    process = process_id.this_process("abc")
    monkeypatch.setattr(Path, "read_bytes", fail)
    assert process_id.is_alive(process)
    with golden.raises(UnavailableError):
        process_id.start_ticks(process.pid)


def test_no_death_is_reported_where_the_system_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor too few in the controller made every rank that it began to watch a certain death."""
    process = process_id.this_process("abc")
    ended = threading.Event()
    watcher = PidWatcher()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda path: (_ for _ in ()).throw(OSError(errno.EMFILE, "no")))
            watcher.add(process, ended.set)
        assert not ended.wait(0.2)
    finally:
        watcher.stop()
