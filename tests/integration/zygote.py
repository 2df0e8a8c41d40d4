"""A process that has imported torch and forks rank processes from there: a job of 4 ranks starts in 0.3 s, not 8 s.

    pytest --(socket pair)--> zygote --(fork)--> job parent --(fork or exec)--> ranks -> loader workers
                                                        --(fork)--> nursery -> controllers (see controllers.py)
                                                        --(fork or exec)--> launcher -> ranks (see programs.py)

The job parent is a child subreaper, so that whatever a job leaves behind (a controller in a session of its own,
a data-loader worker of a killed rank) becomes its child and can be found and ended. It speaks to the test over a
socket of its own, one JSON object a message; when that socket closes, the whole job ends.

A forked rank returns from `main()` and runs its training as the last statement of this file: exceptions then
reach the real `sys.excepthook`, threads are waited for and functions of `atexit` are called, as always. But it does
not free its memory: to free all of torch takes a third of a second, of which the kernel needs a part to copy the pages
that were shared until then. Ranks that a launcher has started by exec end as every interpreter does.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration import programs
from tests.integration.controllers import Nursery
from tests.integration.programs import MESSAGE_BYTES_MAX, PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, Program, prctl

AGENTS = {
    "torchrun": ("torch.distributed.run",),
    "healing": ("lastwords.cli", "run"),
    "impatient": ("tests.launcher.impatient",),
}
"""Launchers that start the ranks themselves: what follows `python -m`."""

PROGRAM = "program"
"""In place of a launcher: one process, whose arguments are all that it gets."""

POLL_S = 0.02

PRELOAD = (
    "numpy",
    "torch",
    "torch._dynamo",  # torch.optim imports it at the first step; a second each time
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.nn.parallel",
    "torch.optim.lr_scheduler",
    "torch.utils.data.distributed",
    "torch.distributed.launcher.api",  # all that torchrun needs
    "torch.distributed.elastic.rendezvous.registry",
    "torch.profiler",
    "numpy.ma",
    "safetensors",
    "msgspec",
    "xxhash",
    "grpc.aio",  # starts no thread and opens nothing before the first channel, which is a rank's own
    "lastwords.cli.main",
    "lastwords.controller.launch",
    "lastwords.launcher.command",
    "lastwords.launcher.scheduler",
    "lastwords.launcher.worker",
    "lastwords.optim_wrapper.resume.resume",
    "lastwords.optim_wrapper.trainer.register",
    "lastwords.optim_wrapper.wrapper",
    "lastwords.sharding.verify",
    "tests.integration.training",
    "tests.integration.parallel_training",
    "tests.integration.toy_training",
    "tests.zoo.rank",
)


def processes() -> dict[int, tuple[int, str]]:
    """pid -> (parent's pid, state letter) of every process."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                found[int(entry)] = (int(fields[1]), fields[0])
    return found


def descendants(root_pid: int) -> list[int]:
    """Every living process below `root_pid`, zombies left out."""
    table = processes()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found, todo = [], [root_pid]
    while todo:
        for pid in children.get(todo.pop(), ()):
            todo.append(pid)
            if table[pid][1] not in "ZX":
                found.append(pid)
    return found


def command_line(pid: int) -> str:
    """The process's arguments, for messages."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return "(gone)"


def send(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send one message; a closed peer is not an error here, the next receive says so."""
    with contextlib.suppress(OSError):
        sock.send(json.dumps(message).encode())


@dataclass
class RankTask:
    """What a forked process has to do once `main()` has returned in it."""

    what: Callable[[], None]

    def run(self) -> None:
        """Run it; whatever it raises is the interpreter's to report."""
        global _exit_code
        try:
            self.what()
            _exit_code = 0
        except SystemExit as ending:
            if ending.code is None or isinstance(ending.code, int):
                _exit_code = ending.code or 0
            raise


_exit_code: int | None = None
"""Of a rank that has ended without an exception that is to be reported."""


def end_without_freeing() -> None:
    """The last function of `atexit`, since it was registered first."""
    if _exit_code is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(_exit_code & 0xFF)


class JobParent:
    """Parent of one job's processes. Returns a RankTask in the forked ranks, None in itself."""

    def __init__(self, sock: socket.socket, spec: dict[str, Any]) -> None:
        self.sock = sock
        self.spec = spec
        self.pids: dict[int, int] = {}
        self.running: set[int] = set()
        self.nursery: Nursery | None = None

    def environment(self, rank: int | None) -> dict[str, str]:
        """Environment of a rank (None: of the launcher)."""
        env = {**os.environ, **self.spec["env"]}
        if rank is not None:
            env |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.spec["world_size"]),
                "LOCAL_WORLD_SIZE": str(self.spec["world_size"]),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.spec["master_port"]),
            }
        return env

    def open_output(self, name: str) -> tuple[int, int]:
        """Append-only files for stdout and stderr of `name`."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        base = Path(self.spec["directory"])
        return os.open(base / f"{name}.out", flags, 0o644), os.open(base / f"{name}.err", flags, 0o644)

    def ignore(self) -> None:
        """As `nohup` does."""
        for number in self.spec["ignored"]:
            signal.signal(number, signal.SIG_IGN)

    def prepare(self) -> None:
        """In a child, before it becomes another program."""
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        self.ignore()

    def fork(self, rank: int, name: str) -> bool:
        """Whether this is the new process, in which everything of this parent is dropped; rank -1 is the launcher."""
        pid = os.fork()
        if pid:
            self.started(rank, pid)
            return False
        self.prepare()
        os.setsid()
        self.sock.close()
        for number, fd in enumerate((os.open(os.devnull, os.O_RDONLY), *self.open_output(name))):
            os.dup2(fd, number)
            os.close(fd)
        environment = self.environment(rank if rank >= 0 else None)
        os.environ.clear()
        os.environ.update(environment)
        return True

    def forked_rank(self) -> None:
        """What a forked rank does: the module's `main`."""
        if self.nursery is not None:
            self.nursery.use()
        sys.argv = [self.spec["module"], *self.spec["arguments"]]
        importlib.import_module(self.spec["module"]).main(self.spec["arguments"])

    def spawn(self, rank: int, name: str, command: list[str]) -> None:
        """Start a process by exec, in a session of its own; rank -1 is the launcher."""
        out, err = self.open_output(name)
        process = subprocess.Popen(
            command,
            env=self.environment(rank if rank >= 0 else None),
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=self.prepare,
        )
        os.close(out)
        os.close(err)
        process.returncode = 0  # reaped below, not by Popen
        self.started(rank, process.pid)

    def started(self, rank: int, pid: int) -> None:
        """Remember a process and say so."""
        self.pids[rank] = pid
        self.running.add(rank)
        send(self.sock, {"event": "started", "rank": rank, "pid": pid})

    def launch(self) -> RankTask | None:
        """Start the job's processes in the way the spec asks for."""
        spec = self.spec
        program = ["-m", spec["module"], *spec["arguments"]]
        if spec["launcher"] == PROGRAM:
            return RankTask(Program(program[1], program[2:]).run) if self.fork(-1, spec["launcher"]) else None
        if spec["launcher"] in AGENTS:
            agent = [*AGENTS[spec["launcher"]], "--standalone"]
            agent += ["--nproc-per-node", str(spec["world_size"]), *spec["launcher_arguments"], *program]
            if spec["by_exec"]:
                self.spawn(-1, spec["launcher"], [sys.executable, "-m", *agent])
            elif self.fork(-1, spec["launcher"]):
                return RankTask((programs.use_nursery() or Program(agent[0], agent[1:])).run)
            return None
        if spec["launcher"] == "fork" and "PYTHONPATH" not in spec["env"]:  # which faults begin with an interpreter
            self.nursery = Nursery()
        for rank in range(spec["world_size"]):
            if spec["launcher"] == "hand":
                self.spawn(rank, f"rank_{rank}", [sys.executable, *program])
            elif self.fork(rank, f"rank_{rank}"):
                return RankTask(self.forked_rank)
        if self.nursery is not None:
            self.nursery.close()
        return None

    def run(self) -> RankTask | None:
        """Start, watch and obey until the test closes its end."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if task := self.launch():
            return task
        self.sock.settimeout(POLL_S)
        while True:
            self.reap()
            try:
                data = self.sock.recv(MESSAGE_BYTES_MAX)
            except TimeoutError:
                continue
            except OSError:
                data = b""
            if not data:
                self.end_everything()
                return None
            self.obey(json.loads(data))

    def obey(self, command: dict[str, Any]) -> None:
        """Carry out one request of the test."""
        if command["do"] == "signal":
            if command["rank"] in self.running:
                pid = self.pids[command["rank"]]
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if command["group"] else os.kill)(pid, command["signal"])
        elif command["do"] == "kill_all":
            for rank in self.running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank], signal.SIGKILL)
        elif command["do"] == "list":
            found = [{"pid": pid, "command": command_line(pid)} for pid in self.processes()]
            send(self.sock, {"event": "list", "processes": found})
        elif command["do"] == "close":
            send(self.sock, {"event": "closed", "killed": self.end_everything()})

    def processes(self) -> list[int]:
        """Those of the job that live: all but the nursery, which ends with the last rank."""
        return [pid for pid in descendants(os.getpid()) if self.nursery is None or pid != self.nursery.pid]

    def reap(self) -> None:
        """Collect every child that has ended, adopted ones included."""
        ranks = {pid: rank for rank, pid in self.pids.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            rank = ranks.get(pid)
            if rank in self.running:
                self.running.discard(rank)
                code = os.waitstatus_to_exitcode(status)
                send(self.sock, {"event": "exit", "rank": rank, "code": code, "mono_s": time.monotonic()})

    def end_everything(self) -> list[str]:
        """Kill whatever lives below this process until nothing does; returns what had to be killed."""
        killed: dict[int, str] = {}
        for _ in range(500):
            living = self.processes()
            if not living:
                break
            for pid in living:
                killed.setdefault(pid, command_line(pid))
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            time.sleep(0.01)
        self.reap()
        return [f"{pid} {text}" for pid, text in killed.items()]


def preload() -> dict[str, Any]:
    """Import what ranks need, without starting a thread; returns what the test wants to know about it."""
    for name in PRELOAD:
        importlib.import_module(name)
    import torch

    from lastwords.optim_wrapper.ddp.ddp_found import known_ddps

    torch.set_num_threads(1)
    known_ddps()  # there is none yet; the first call looks through all objects
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, every page of this heap
    return {"threads": len(os.listdir("/proc/self/task"))}


def requests(control: socket.socket) -> Iterator[tuple[dict[str, Any], socket.socket] | None]:
    """Requests to start a job, each with the job's own socket; None now and then, so that children are reaped."""
    control.settimeout(0.1)
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES_MAX, 1)
        except TimeoutError:
            yield None
            continue
        if not data:
            return
        yield json.loads(data), socket.socket(fileno=fds[0])


def main() -> RankTask | None:
    """Serve until the test's end closes; in a forked rank, return what it has to run."""
    atexit.register(end_without_freeing)
    control = socket.socket(fileno=int(sys.argv[1]))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    send(control, {"event": "ready", **preload()})
    job_parents: set[int] = set()
    for request in requests(control):
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                job_parents.discard(ended)
        if request is None:
            continue
        spec, sock = request
        pid = os.fork()
        if pid == 0:
            control.close()
            task = JobParent(sock, spec).run()
            if task is None:
                os._exit(0)
            return task
        job_parents.add(pid)
        sock.close()
    deadline_mono_s = time.monotonic() + 10
    while (living := descendants(os.getpid())) and time.monotonic() < deadline_mono_s:
        for orphan in living:
            with contextlib.suppress(OSError):
                os.kill(orphan, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.01)
    return None


if __name__ == "__main__":
    rank_task = main()
    if rank_task is not None:
        rank_task.run()
