"""A run of one system: its processes, its log, and the end of both."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.peers.systems import SHARED_MEMORY, System
from bench.peers.workload import DIRECTORY

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.1
LIMIT_S = 120.0
"""For a start, and for a recovery."""


class JobError(Exception):
    """The system has not come to where it should be; the message is the last line that it has printed."""


@dataclass(frozen=True)
class Update:
    """A line of the log."""

    mono_ns: int
    pid: int
    rank: int
    step: int
    ranks: int
    loss: int
    weights: int | None = None


class Job:
    """All processes that it has started, directly or not, are gone when the block is left."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.directory = Path(tempfile.mkdtemp(prefix="bench-peers-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._training: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Job:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), DIRECTORY: str(self.directory)}
        env["PYTHONWARNINGS"] = "ignore"
        for number, command in enumerate(self.system.start()):
            with (self.directory / f"output_{number}").open("wb") as output:
                process = subprocess.Popen(
                    command.arguments,
                    cwd=self.directory,
                    env={**env, **command.environment},
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            self._processes.append(process)
            if not command.serves:
                self._training.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while marked := marked_pids(f"{DIRECTORY}={self.directory}".encode()):
            for pid in marked:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            for process in self._processes:
                process.wait()
            time.sleep(POLL_S)
        for left in Path("/dev/shm").glob(f"{SHARED_MEMORY}*"):
            left.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def updates(self) -> list[Update]:
        """All lines of all processes, oldest first."""
        lines = itertools.chain.from_iterable(
            path.read_text(encoding="utf-8").splitlines() for path in self.directory.glob("updates_*.jsonl")
        )
        return sorted((Update(**json.loads(line)) for line in lines), key=lambda update: update.mono_ns)

    def wait_for(self, reached: Callable[[list[Update]], bool], what: str) -> list[Update]:
        """The log once `reached` is true of it."""
        deadline_mono_s = time.monotonic() + LIMIT_S
        while not reached(updates := self.updates()):
            over = self.over()
            if over and reached(updates := self.updates()):
                break
            if over or time.monotonic() > deadline_mono_s:
                raise JobError(f"{what}: {'ended' if over else f'not within {LIMIT_S:.0f} s'}; {self.last_line()}")
            time.sleep(POLL_S)
        return updates

    def end(self, last_step: int, ranks: int) -> list[Update]:
        """The log once `ranks` ranks have come to `last_step`, where they stop; none of them has come to it yet."""
        ending = self.directory / "ending"
        ending.write_text(str(last_step), encoding="utf-8")
        ending.rename(self.directory / "last_step")
        return self.wait_for(
            lambda updates: len({update.rank for update in updates if update.step == last_step}) >= ranks,
            f"step {last_step}",
        )

    def over(self) -> bool:
        """Whether the processes that end with the training have ended."""
        return all(process.poll() is not None for process in self._training)

    def last_line(self) -> str:
        """Of what the processes have printed: the last line that names an error, or the last one."""
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(self.directory.glob("output_*"))]
        lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["nothing printed"])[-1][:300]

    def durable(self) -> list[Path]:
        """Complete checkpoints on disk."""
        return sorted(self.directory.glob(self.system.durable)) if self.system.durable else []


def marked_pids(mark: bytes) -> list[int]:
    """Processes whose environment holds `mark`; zombies have none."""
    found: list[Any] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            marked = mark in path.read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or is another user's
        if marked:
            found.append(int(path.parent.name))
    return found
