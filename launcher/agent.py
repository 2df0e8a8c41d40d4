"""torch's elastic agent, except that a worker that dies is replaced alone.

Rendezvous, logs, error files and `--max-restarts` are torch's. What differs: nobody ends the survivors because one
worker has failed. A thread of its own hears the workers, sees their processes end, and does what `LauncherCore` says;
torch's loop, in the main thread, asks ten times a second how it stands.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from lastwords.clock import mono_s
from lastwords.controller import launch as controller_launch
from lastwords.launcher.core import Abandon, Begun, Effect, Ended, Enter, Event, Kill, LauncherCore, Start, Stop, Tick
from lastwords.launcher.core import Waiting as AtTheDoor
from lastwords.launcher.link import SPARE, VARIABLE, Lines, send

_log = logging.getLogger(__name__)

GENERATIONS_PER_ROUND = 1000
"""torch counts its own restarts; the generations of round n are called n * 1000, n * 1000 + 1, ..."""


class _Process(SubprocessHandler):
    """A worker that was started after the others; its output goes on in the file of the one that it replaces."""

    def __init__(self, *args: Any, out: str = "", err: str = "") -> None:
        self._out, self._err = out, err
        super().__init__(*args)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as files:
            streams = [files.enter_context(open(one, "ab")) if one else None for one in (self._out, self._err)]
            return subprocess.Popen(args, env=env, stdout=streams[0], stderr=streams[1], start_new_session=True)


class HealingAgent(LocalElasticAgent):
    """spares: how many processes without a rank are kept ready."""

    def __init__(self, *args: Any, spares: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._spares_wanted = spares
        self._round: _Round | None = None
        self._rounds = 0

    # ------------------------------------------------------------------ torch's agent

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        directory = Path(tempfile.mkdtemp(prefix="lastwords-"))
        self._round = _Round(self._rounds, directory, worker_group.spec.local_world_size, self._spares_wanted)
        self._rounds += 1
        os.environ[VARIABLE] = str(directory / "agent")
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._round.begin(self._pcontext)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._round is not None
        for worker in worker_group.workers:
            worker.id = self._round.processes[worker.local_rank].pid
        if self._round.result is None:
            return RunResult(state=WorkerState.HEALTHY)
        if self._round.result.failure is None:
            return RunResult(
                state=WorkerState.SUCCEEDED, return_values={one.global_rank: None for one in worker_group.workers}
            )
        _log.error("lastwords run: no process is replaced any more: %s", self._round.result.failure)
        return RunResult(state=WorkerState.FAILED, failures=self._round.failures(worker_group))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(signal.SIGTERM, self._shutdown_timeout)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        if self._round is not None:
            self._round.end()
        super()._shutdown(*args, **kwargs)


class _Round:
    """The workers of one rendezvous round, and the thread that looks after them."""

    def __init__(self, number: int, directory: Path, ranks: int, spares: int) -> None:
        self.result: Stop | None = None
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._core = LauncherCore(tuple(range(ranks)))
        self._first = number * GENERATIONS_PER_ROUND
        self._directory = directory
        self._spares_wanted = spares
        self._spares: list[_Spare] = []
        self._links: dict[int, socket.socket] = {}
        self._codes: dict[int, int] = {}
        self._context: Any = None
        self._store: TCPStore | None = None
        self._controllers = _Controllers()
        self._over = False
        self._selector = selectors.DefaultSelector()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(directory / "agent"))
        self._server.listen(ranks + spares)
        self._wake, wake_up = socket.socketpair()
        self._wake_up = wake_up
        self._thread = threading.Thread(target=self._run, name="lastwords-agent", daemon=True)

    def begin(self, context: Any) -> None:
        """The workers have been started, by torch."""
        self._context = context
        for rank, handler in context.subprocess_handlers.items():
            self.processes[rank] = handler.proc
        self._thread.start()

    def end(self) -> None:
        """Nobody is replaced any more; spares end. Idempotent, any thread."""
        if self._over:
            return
        self._over = True
        with contextlib.suppress(OSError):
            self._wake_up.send(b"x")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def failures(self, group: WorkerGroup) -> dict[int, ProcessFailure]:
        """Of the ranks whose last process ended badly; of all, if none did."""
        bad = {rank for rank, code in self._codes.items() if code} or set(self.processes)
        return {
            worker.global_rank: ProcessFailure(
                local_rank=worker.local_rank,
                pid=self.processes[worker.local_rank].pid,
                exitcode=self._codes.get(worker.local_rank, 1),
                error_file=self._context.error_files[worker.local_rank],
            )
            for worker in group.workers
            if worker.local_rank in bad
        }

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        watch = self._selector.register
        watch(self._server, selectors.EVENT_READ, self._accept)
        watch(self._wake, selectors.EVENT_READ, lambda: None)
        for rank in self.processes:
            self._watch(rank)
        for _ in range(self._spares_wanted):
            self._start_spare()
        self._controllers.prepare()
        try:
            while not self._over and self.result is None:
                self._turn()
        except Exception as error:  # outermost: torch's loop has to hear that nobody looks after the workers
            _log.exception("the launcher failed")
            self.result = Stop(repr(error))
        for spare in self._spares:
            spare.end()
        for link in self._links.values():
            link.close()
        self._controllers.end()
        self._selector.close()
        self._server.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _turn(self) -> None:
        due_s = self._core.deadline_s
        for key, _ in self._selector.select(None if due_s is None else max(0.0, due_s - mono_s())):
            key.data()
        self._handle(Tick())

    def _handle(self, event: Event) -> None:
        for effect in self._core.handle(event, mono_s()):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Start(rank):
                self._start(rank)
            case Enter(generation):
                self._enter(self._first + generation)
            case Abandon(rank):
                self._tell(rank, {"abandon": True})
            case Kill(rank, why):
                _log.warning("rank %d is killed and replaced: %s", rank, why)
                self.processes[rank].kill()
            case Stop():
                self.result = effect

    def _enter(self, generation: int) -> None:
        """Each generation has a store of its own: in the one before it, ranks would find the addresses of the dead."""
        address = self._context.envs[0]["MASTER_ADDR"]
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        for rank in self.processes:
            self._tell(rank, {"enter": generation, "port": self._store.port})

    def _tell(self, rank: int, message: dict[str, Any]) -> None:
        if rank in self._links:
            with contextlib.suppress(OSError):  # it has died, which its pidfd tells
                send(self._links[rank], message)

    def _watch(self, rank: int) -> None:
        process = self.processes[rank]
        pidfd = os.pidfd_open(process.pid)

        def ended() -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            code = process.wait()
            self._codes[rank] = code
            self._drop(rank)
            if code:
                _log.warning("rank %d (pid %d) ended with %d", rank, process.pid, code)
            self._handle(Ended(rank, code))

        self._selector.register(pidfd, selectors.EVENT_READ, ended)

    def _drop(self, rank: int) -> None:
        link = self._links.pop(rank, None)
        if link is not None:
            self._forget(link)
            link.close()

    def _forget(self, link: socket.socket) -> None:
        """A process and its link end at the same time, and either may be seen first."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link)

    # ------------------------------------------------------------------ what workers say

    def _accept(self) -> None:
        link, _ = self._server.accept()
        lines, who = Lines(), _Who()

        def heard() -> None:
            try:
                data = link.recv(65536)
                messages = lines.feed(data)
            except (OSError, ValueError):
                data = b""
            if not data:
                self._forget(link)
                return
            for message in messages:
                self._hear(who, link, message)

        self._selector.register(link, selectors.EVENT_READ, heard)

    def _hear(self, who: _Who, link: socket.socket, message: dict[str, Any]) -> None:
        if "pid" in message:
            spare = next((one for one in self._spares if one.process.proc.pid == message["pid"]), None)
            if spare is not None:
                who.spare, spare.link = spare, link
            else:
                who.rank = int(message["rank"])
                self._links[who.rank] = link
            return
        if who.spare is not None and who.spare.rank is not None:
            who.rank, who.spare = who.spare.rank, None
        if "ready" in message and who.spare is not None:
            who.spare.ready = True
        elif who.rank is not None and "waiting" in message:
            self._handle(AtTheDoor(who.rank, int(message["waiting"])))
        elif who.rank is not None and "begun" in message:
            self._handle(Begun(who.rank))
        elif who.rank is not None and "controller" in message:
            self._hand_out(who.rank, message["controller"])

    def _hand_out(self, rank: int, work: dict[str, str]) -> None:
        process = self._controllers.hand_out(work)
        if process is None:
            return self._tell(rank, {"controller": None})
        assert process.stdout is not None
        answers = process.stdout

        def answered() -> None:
            line = answers.readline()
            self._selector.unregister(answers)
            answers.close()
            self._tell(rank, {"controller": [process.pid, json.loads(line) if line else {}]})
            self._controllers.prepare()

        self._selector.register(answers, selectors.EVENT_READ, answered)

    # ------------------------------------------------------------------ processes

    def _start(self, rank: int) -> None:
        context = self._context
        out, err = context.stdouts[rank], context.stderrs[rank]
        spare = next((one for one in self._spares if one.ready and one.process.proc.poll() is None), None)
        if spare is not None:
            self._spares.remove(spare)
            process, spare.rank = spare.process, rank
            assert spare.link is not None
            self._links[rank] = spare.link
            send(spare.link, {"become": context.envs[rank], "stdout": out, "stderr": err})
        else:
            process = _Process(
                context.entrypoint, context.args[rank], context.envs[rank], None, None, rank, context._numa_options,
                out=out, err=err,
            )  # fmt: skip
        context.subprocess_handlers[rank] = process
        self.processes[rank] = process.proc
        self._codes.pop(rank, None)
        self._watch(rank)
        _log.warning("rank %d goes on in process %d%s", rank, process.proc.pid, " (a spare)" if spare else "")
        if spare is not None:
            self._start_spare()

    def _start_spare(self) -> None:
        context = self._context
        env = {**context.envs[0], SPARE: "1"}
        for name in ("RANK", "LOCAL_RANK", "ROLE_RANK"):
            env.pop(name, None)
        handler = _Process(context.entrypoint, context.args[0], env, None, None, 0, context._numa_options)
        self._spares.append(_Spare(handler))


class _Controllers:
    """One process that has imported what a controller needs, and those that were handed out."""

    def __init__(self) -> None:
        self._ready: subprocess.Popen[bytes] | None = None
        self._out: list[subprocess.Popen[bytes]] = []

    def prepare(self) -> None:
        self._out = [one for one in self._out if one.poll() is None]
        command, environment = controller_launch.waiting_command()
        pipe = subprocess.PIPE
        self._ready = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, start_new_session=True)

    def hand_out(self, work: dict[str, str]) -> subprocess.Popen[bytes] | None:
        """It is a controller from now on; None if there is none."""
        process, self._ready = self._ready, None
        if process is None or process.poll() is not None:
            return None
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has died: the other end of its answers says so
            process.stdin.write(json.dumps(work).encode() + b"\n")
            process.stdin.close()
        self._out.append(process)
        return process

    def end(self) -> None:
        """The one that nobody needs any more; a controller ends with its job."""
        if self._ready is not None:
            self._ready.kill()
            self._ready.wait()


class _Who:
    """Who is at the other end of a link."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.spare: _Spare | None = None


class _Spare:
    """A process that has imported the script and waits for a rank."""

    def __init__(self, process: _Process) -> None:
        self.process = process
        self.link: socket.socket | None = None
        self.ready = False
        self.rank: int | None = None

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.process.proc.kill()
            self.process.proc.wait()
