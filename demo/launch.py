"""Starts training under torchrun, watches its logs, and leaves no process behind whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.002
END_TIMEOUT_S = 10.0
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


@contextlib.contextmanager
def no_process_left_behind() -> Iterator[None]:
    """Kills every descendant on the way out, those in sessions of their own included.

    torchrun puts each worker, and the rank that starts it the controller, into a session of its own, so no process
    group holds them all. As their "subreaper" this process becomes the parent of each one whose parent has gone.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        deadline_mono_s = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline_mono_s:
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(POLL_S)
            except ChildProcessError:
                break


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants of `pid` that have not ended."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                after_name = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                if after_name[0] != "Z":
                    children.setdefault(int(after_name[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def free_port() -> int:
    """A TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Training:
    """One run of a training script, logging to `folder`; `module` is its name, demo.train say.

    launcher: what follows `python -m`; plain torchrun unless something else is asked for.
    """

    def __init__(
        self,
        module: str,
        folder: Path,
        ranks: int,
        ckpt_path: Path,
        arguments: Sequence[str],
        launcher: Sequence[str] = ("torch.distributed.run",),
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.ckpt_path = ckpt_path
        self.ranks = ranks
        self.output = folder / "output.txt"
        command = [sys.executable, "-m", *launcher, "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", module, "--step-log", str(folder), "--ckpt-path", str(ckpt_path), *arguments]
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                cwd=ROOT,  # also because oneMKL ends a process whose working directory has been removed
                start_new_session=True,  # ctrl-C ends the demo, and the demo ends this
            )

    def log(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.jsonl"

    def pid(self, rank: int) -> int:
        """Of the newest process of `rank`; 0 before there is one."""
        path = self.folder / f"rank_{rank}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n") and '"pid"' in line]
        return int(whole[-1]["pid"]) if whole else 0

    def steps_done(self, rank: int) -> int:
        """How many steps the log of this rank shows; reads the file once again, which is short."""
        try:
            return self.log(rank).read_bytes().count(b'"loss"')
        except FileNotFoundError:
            return 0

    def exit_code(self) -> int | None:
        return self._process.poll()

    def first_error(self, lines: int = 25) -> str:
        """What the workers printed, up to torchrun's own summary, which only repeats exit codes."""
        text = self.output.read_text(encoding="utf-8", errors="replace")
        said = re.split(r"^.*torch/distributed/elastic.*$", text, maxsplit=1, flags=re.MULTILINE)[0].strip()
        return "\n".join([*(said or text).splitlines()[:lines], f"(all of it: {self.output})"])

    def wait(self, on_progress: Callable[[int], None], *, timeout_s: float) -> int:
        """Waits for torchrun to end and returns its exit code; reports the slowest rank's steps on the way."""
        deadline_mono_s = time.monotonic() + timeout_s
        while (code := self.exit_code()) is None:
            on_progress(min(self.steps_done(rank) for rank in range(self.ranks)))
            if time.monotonic() > deadline_mono_s:
                raise TimeoutError(f"training has not ended after {timeout_s:.0f} s; its output is in {self.output}")
            time.sleep(0.1)
        on_progress(min(self.steps_done(rank) for rank in range(self.ranks)))
        return code

    def kill_at(self, rank: int, step: int, after_s: float, on_progress: Callable[[int], None]) -> float:
        """Sends SIGKILL to `rank`, `after_s` after its log shows `step` steps. Returns the moment (CLOCK_MONOTONIC)."""
        shown = 0
        while (done := self.steps_done(rank)) < step:
            if (code := self.exit_code()) is not None:
                raise RuntimeError(
                    f"the launcher ended with exit code {code} before step {step}:\n{self.first_error()}"
                )
            if done != shown:
                on_progress(shown := done)
            time.sleep(POLL_S)
        pid = self.pid(rank)
        time.sleep(after_s)
        moment_mono_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return moment_mono_s
