"""Identity of processes."""

from __future__ import annotations

import dataclasses
import os

from lastwords.liveness import process_id


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
