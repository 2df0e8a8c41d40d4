"""Starts jobs of real processes for a test, waits for them in bounded time, and leaves nothing behind.

    with Cluster() as cluster:
        job = cluster.start(directory, module="tests.integration.training", arguments=[...], world_size=4)
        exits = job.wait(timeout_s=60)
        job.close()

See zygote.py for how the processes hang together.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lastwords.checkpoint.codec import typed
from lastwords.checkpoint.entries import Reason
from tests.integration.programs import MESSAGE_BYTES_MAX
from tests.integration.zygote import AGENTS, PROGRAM

ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES = 30
PORTS = range(10_240, 32_000)
"""Below the range that the kernel hands out by itself, so that nobody takes a port between choice and use."""

STACKS_S = 10.0
"""A busy rank has so long to write its stacks."""

RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
FORGOTTEN_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MS_ENABLE_TFT")


class HarnessTimeoutError(AssertionError):
    """Something did not happen in its bounded time; the message carries every log of the job."""


class Port:
    """A TCP port that no other test run on this machine uses while this object lives."""

    def __init__(self) -> None:
        folder = Path("/tmp") / f"lastwords-test-ports-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        draw = random.Random()
        for _ in range(1000):
            number = draw.choice(PORTS)
            lock = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
            except OSError:
                os.close(lock)
                continue
            self.number, self._lock = number, lock
            return
        raise OSError("no free port")

    def release(self) -> None:
        """Let others use the port."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def free_port() -> int:
    """A `Port` that is held until this process ends."""
    return Port().number


@dataclass(frozen=True)
class RankExit:
    """How a process of a job ended: exit code, or minus the signal's number."""

    rank: int
    code: int
    mono_s: float


@dataclass
class Job:
    """Handle of the processes of one launch. `directory` holds rank_{r}.out, rank_{r}.err and the script's files."""

    sock: socket.socket
    directory: Path
    world_size: int
    launcher: str
    ports: list[Port]
    watched: list[Path] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)
    exits: dict[int, RankExit] = field(default_factory=dict)
    closed: bool = False
    _events: deque[dict[str, Any]] = field(default_factory=deque)

    @property
    def expected(self) -> list[int]:
        """The numbers under which processes are reported: the ranks, or -1 for a launcher."""
        return [-1] if self.launcher in (*AGENTS, PROGRAM) else list(range(self.world_size))

    def wait(self, timeout_s: float, ranks: Sequence[int] | None = None) -> dict[int, RankExit]:
        """Wait for these processes (all) to end; raises HarnessTimeoutError with the logs."""
        wanted = set(self.expected if ranks is None else ranks)
        self.wait_for(lambda: wanted <= self.exits.keys(), timeout_s, f"the end of {sorted(wanted)}")
        return dict(self.exits)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Poll `condition` (files, exits) until it holds; raises HarnessTimeoutError with the logs."""
        deadline_mono_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_mono_s:
                stacks = self.dump_stacks()
                raise HarnessTimeoutError(f"waited {timeout_s} s for {what}\n{self.report()}\n{stacks}")
            self._pump(0.02)

    def signal(self, rank: int, signal_number: int, *, group: bool = False) -> None:
        """Send a signal to a rank that this job started (not under torchrun), or to its whole process group."""
        self._send({"do": "signal", "rank": rank, "signal": signal_number, "group": group})

    def kill_all(self) -> None:
        """End all ranks with SIGKILL, one right after the other: nobody has the time to save the others' last words."""
        self._send({"do": "kill_all"})

    def processes(self, timeout_s: float = 10) -> list[str]:
        """Every living process of the job, controllers and adopted orphans included."""
        found = self._ask({"do": "list"}, "list", timeout_s)["processes"]
        return [f"{process['pid']} {process['command']}" for process in found]

    def wait_gone(self, timeout_s: float) -> None:
        """Wait until no process of the job is left, helpers included; raises HarnessTimeoutError naming them."""
        self.wait(timeout_s)
        deadline_mono_s = time.monotonic() + timeout_s
        while left := self.processes():
            if time.monotonic() > deadline_mono_s:
                for process in left:  # the handlers of a rank are those of its forked children, too
                    with contextlib.suppress(OSError):
                        os.kill(int(process.split()[0]), signal.SIGUSR1)
                time.sleep(1.0)
                raise HarnessTimeoutError(f"still there after {timeout_s} s: {left}\n{self.report()}")
            time.sleep(0.02)

    def close(self) -> list[str]:
        """End whatever is left, in any case; returns what had to be killed."""
        if self.closed:
            return []
        self.closed = True
        killed: list[str] = []
        try:
            killed = list(self._ask({"do": "close"}, "closed", 15)["killed"])
        finally:
            self.sock.close()
            for port in self.ports:
                port.release()
        return killed

    def output(self, rank: int, stream: str = "err") -> str:
        """What a rank has written to stdout ("out") or stderr ("err") so far."""
        path = self.directory / f"rank_{rank}.{stream}"
        return path.read_text(errors="replace") if path.exists() else ""

    def report(self) -> str:
        """Exit codes and the tail of every log: what a person needs to find out what went wrong."""
        parts = [f"exits: { {rank: end.code for rank, end in sorted(self.exits.items())} }"]
        logs = [path for folder in (self.directory, *self.watched) for path in sorted(folder.rglob("*"))]
        for path in logs:
            if path.suffix in (".err", ".out", ".log") or path.name == "incidents.jsonl":
                with contextlib.suppress(OSError):
                    lines = path.read_text(errors="replace").splitlines()
                    if lines:
                        parts += [f"--- {path} ({len(lines)} lines)", *lines[-TAIL_LINES:]]
        return "\n".join(parts)

    def dump_stacks(self) -> str:
        """Python stacks of the ranks that still live, written by their faulthandler to their stderr."""
        living = [rank for rank in self.expected if rank not in self.exits and rank >= 0]
        before = {rank: len(self.output(rank)) for rank in living}
        for rank in living:
            self.signal(rank, signal.SIGUSR1)
        deadline_mono_s = time.monotonic() + STACKS_S
        while time.monotonic() < deadline_mono_s and any(len(self.output(rank)) == before[rank] for rank in living):
            time.sleep(0.1)
        time.sleep(0.5)  # until all threads are written
        return "\n".join(f"--- stacks of rank {rank}\n{self.output(rank)[before[rank] :]}" for rank in living)

    def _send(self, command: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.sock.send(json.dumps(command).encode())

    def _ask(self, command: dict[str, Any], answer: str, timeout_s: float) -> dict[str, Any]:
        self._send(command)
        deadline_mono_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_mono_s:
            self._pump(0.05)
            for event in self._events:
                if event["event"] == answer:
                    self._events.remove(event)
                    return event
        raise HarnessTimeoutError(f"the job's parent did not answer {command}")

    def _pump(self, timeout_s: float) -> None:
        """Take in what the job's parent has to say; waits for the first message only."""
        self.sock.settimeout(max(timeout_s, 0.001))
        while True:
            try:
                data = self.sock.recv(MESSAGE_BYTES_MAX)
            except (TimeoutError, BlockingIOError):
                return
            if not data:
                raise HarnessTimeoutError(f"the job's parent is gone\n{self.report()}")
            event = json.loads(data)
            if event["event"] == "started":
                self.pids[event["rank"]] = event["pid"]
            elif event["event"] == "exit":
                self.exits[event["rank"]] = RankExit(event["rank"], event["code"], event["mono_s"])
            else:
                self._events.append(event)
            self.sock.settimeout(0.001)


class Process:
    """The launcher of a job, or its only program, as `subprocess.Popen` would show it."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def wait(self, timeout_s: float) -> int:
        return self.job.wait(timeout_s)[-1].code

    def send_signal(self, number: int) -> None:
        self.job.signal(-1, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Cluster:
    """One zygote and the jobs started from it. A context manager: leaving it ends everything.

    preload: a library in each process of its jobs.
    """

    def __init__(self, preload: Path | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {name: value for name, value in os.environ.items() if name not in FORGOTTEN_ENVIRONMENT}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**env, **RANK_ENVIRONMENT, **({"LD_PRELOAD": str(preload)} if preload else {})},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._sock = ours
        self._ready: dict[str, Any] | None = None
        self._jobs: list[Job] = []

    @property
    def pid(self) -> int:
        """The zygote's."""
        return self._process.pid

    @property
    def ready(self) -> dict[str, Any]:
        """What the zygote says about itself once it has imported everything."""
        if self._ready is None:
            self._sock.settimeout(120)
            data = self._sock.recv(MESSAGE_BYTES_MAX)
            if not data:
                raise RuntimeError("the zygote ended while it was importing; its traceback is on stderr")
            self._ready = json.loads(data)
        return self._ready

    def start(
        self,
        directory: Path,
        *,
        module: str,
        arguments: Sequence[str],
        world_size: int,
        launcher: str = "fork",
        launcher_arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        watched: Sequence[Path] = (),
        ports: Sequence[Port] = (),
        ignored: Sequence[int] = (),
        by_exec: bool = False,
    ) -> Job:
        """Start `python -m module arguments` on every rank. launcher: "fork", "hand" or one of AGENTS.

        With "program" it is one process, which knows nothing of ranks. by_exec: an agent of AGENTS and its ranks are
        interpreters that begin from nothing, and no forks; ranks that are started "by hand" always are.

        `watched` directories are printed with the logs when something fails; `ports` are released with the job.
        Signals that are `ignored` are so from the start.
        """
        assert launcher in ("fork", "hand", PROGRAM, *AGENTS), launcher
        assert self.ready
        directory.mkdir(parents=True, exist_ok=True)
        master = Port()
        spec = {
            "module": module,
            "arguments": list(arguments),
            "world_size": world_size,
            "launcher": launcher,
            "launcher_arguments": list(launcher_arguments),
            "directory": str(directory),
            "master_port": master.number,
            "env": dict(env or {}),
            "ignored": [int(number) for number in ignored],
            "by_exec": by_exec,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(self._sock, [json.dumps(spec).encode()], [theirs.fileno()])
        theirs.close()
        job = Job(ours, directory, world_size, launcher, [master, *ports], list(watched))
        self._jobs.append(job)
        return job

    def close(self) -> list[str]:
        """End all jobs and the zygote; returns what had to be killed."""
        killed = self.close_jobs()
        self._sock.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return killed

    def close_jobs(self) -> list[str]:
        """End all jobs; returns what had to be killed."""
        killed = []
        while self._jobs:
            killed += self._jobs.pop().close()
        return killed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def with_texts(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest's JSON, with its reasons as people read them."""
    return manifest | {"reasons": [*map(str, typed(manifest["reasons"], tuple[Reason, ...], "reasons"))]}
