"""Signals in real processes: a main thread that is stuck in C, forked children, torch's data-loader workers."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from typing import Self

import pytest

from tests.integration.living import ROOT

pytestmark = pytest.mark.process

WAIT_S = 60.0


class Scene:
    """A scene of guarded.py, read line by line."""

    def __init__(self, name: str, *, plain: bool = False) -> None:
        arguments = [sys.executable, "-m", "tests.integration.guarded", name, *(["plain"] if plain else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # A session of its own: what the tests send is for this process alone.
        self._process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def line(self, timeout_s: float = WAIT_S) -> str | None:
        """The next line; None if there is none within the time."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return None
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._process.stdout.fileno(), 1)
            if not byte:
                break
            line += byte
        return line.decode().strip()

    def until(self, wanted: str) -> None:
        while (line := self.line()) != wanted:
            assert line, f"{wanted!r} was never said"

    def ended_by(self) -> int:
        """The signal that has ended it."""
        return -self._process.wait(WAIT_S)

    def rest(self) -> list[str]:
        output, errors = self._process.communicate(timeout=WAIT_S)
        assert self._process.returncode == 0, errors.decode()
        return output.decode().split("\n")[:-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def test_sigterm_without_a_controller_ends_a_process_that_is_stuck_in_a_collective() -> None:
    with Scene("obeyed_in_c") as scene:
        scene.until("ready")
        scene.send(signal.SIGTERM)
        assert scene.ended_by() == signal.SIGTERM


def test_sigterm_is_known_although_the_main_thread_is_stuck_in_a_collective() -> None:
    with Scene("stuck_in_c") as scene:
        scene.until("ready")
        scene.send(signal.SIGTERM)
        assert scene.line() == f"reported {int(signal.SIGTERM)}"


def test_a_python_handler_alone_would_not_run_there() -> None:
    # Negative control: this is why the wake-up fd is used.
    with Scene("stuck_in_c", plain=True) as scene:
        scene.until("ready")
        scene.send(signal.SIGTERM)
        assert scene.line(timeout_s=1.5) is None


def test_the_sigterm_of_a_forked_child_is_not_its_parents() -> None:
    with Scene("signalled_child") as scene:
        assert scene.rest() == ["child ended"]


def test_a_child_that_kept_the_guard_would_report_its_signals_as_its_parents() -> None:
    # Negative control: without the hook after a fork the child inherits handler and wake-up fd.
    with Scene("signalled_child", plain=True) as scene:
        assert f"reported {int(signal.SIGTERM)}" in scene.rest()


def test_ctrl_c_in_an_update_reports_and_a_second_one_interrupts_after_it() -> None:
    with Scene("interrupted_sleep") as scene:
        scene.until("half 1")
        scene.send(signal.SIGINT)
        scene.until(f"reported {int(signal.SIGINT)}")
        for _ in range(2):  # the main thread has run the first one's handler by then
            assert (scene.line() or "").startswith("half")
        scene.send(signal.SIGINT)
        assert scene.rest()[-2:] == ["updated", "interrupted"]


def test_ctrl_c_without_the_guard_tears_the_update() -> None:
    with Scene("interrupted_sleep", plain=True) as scene:
        scene.until("half 1")
        scene.send(signal.SIGINT)
        lines = scene.rest()
        assert lines[-1] == "interrupted"
        assert "updated" not in lines


def test_killed_data_loader_workers_do_not_tear_an_update() -> None:
    with Scene("data_loader") as scene:
        assert scene.rest() == ["weights whole", "quiet in the incident", "raised after the update: True"]


def test_killed_data_loader_workers_tear_an_update_without_the_guard() -> None:
    with Scene("data_loader", plain=True) as scene:
        assert scene.rest() == ["raised in the update: True", "weights torn"]
