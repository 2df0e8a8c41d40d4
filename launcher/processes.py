"""Processes of one host: ranks, as forks of the fork server or of their own."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from lastwords.clock import mono_s
from lastwords.errors import ConfigError, is_shortage
from lastwords.processor.departure import say

FORKING_S = 10.0
"""How long whoever forks ranks may take to do so, and to end."""

PAUSE_S = 0.001
"""Between two looks whether it has."""


class RankProcess:
    """A child of this process that leads a session, whoever has forked it. Any thread.

    pid: 0 where a rank has none: torch's agent finds that it has ended well.
    """

    def __init__(self, pid: int = 0) -> None:
        self.pid = pid
        self.returncode: int | None = None if pid else 0
        """As of `Popen.returncode`."""
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """`returncode`, once it has ended, which collects it."""
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(ChildProcessError):  # for a moment it is that of whoever has forked it
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                ended = select.poll()
                ended.register(pidfd, select.POLLIN)
                ended.poll(None if timeout_s is None else timeout_s * 1000)
            finally:
                os.close(pidfd)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s or 0.0)
        return code


class RankSeat:
    """A rank's place on this host, over all generations. For torch's agent it is a `SubprocessHandler`.

    args, env, stdout, stderr: torch's, of the first generation. proc: the process of this one.
    """

    def __init__(
        self,
        entrypoint: str,
        args: tuple[object, ...],
        env: dict[str, str],
        stdout: str | None = None,
        stderr: str | None = None,
        local_rank_id: int = 0,
        numa_options: Any = None,
    ) -> None:
        self.entrypoint, self.args, self.env, self.numa_options = entrypoint, args, env, numa_options
        self.stdout, self.stderr = stdout or "", stderr or ""
        for path in {self.stdout, self.stderr} - {""}:
            open(path, "wb").close()  # what a start before this one has left there
        self.local_rank_id = local_rank_id
        self.cpus = [] if numa_options is None else _cpus_near(local_rank_id, numa_options)
        """Of a fork; none: all. A process of its own is started with torch's numactl."""
        self.proc: Any = RankProcess()

    def spawn(self, env: dict[str, str]) -> None:
        """A process of its own. OSError."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        paths = self.stdout, self.stderr

        class OwnSession(SubprocessHandler):
            def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
                with contextlib.ExitStack() as files:
                    out, err = (_opened(one, files) for one in paths)
                    return subprocess.Popen(args, env=env, stdout=out, stderr=err, start_new_session=True)

        environment = {**self.env, **env}
        own = OwnSession(self.entrypoint, self.args, environment, None, None, self.local_rank_id, self.numa_options)
        self.proc = own.proc

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """A signal for all processes of its group, which it leads once it has got so far."""
        number = death_sig or signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            try:
                os.killpg(self.proc.pid, number)
            except ProcessLookupError:
                os.kill(self.proc.pid, number)


def _cpus_near(device: int, numa_options: Any) -> list[int]:
    """What torch would bind this device's rank to, as for `--numa-binding`. Raises what torch does."""
    from torch.numa import binding

    if (found := getattr(binding, "_get_validated_logical_cpus_to_bind_to", None)) is None:
        raise ConfigError("this release of torch cannot tell lastwords run what --numa-binding means; leave it out")
    return sorted(found(gpu_index=device, numa_options=numa_options))


def _opened(path: str, files: contextlib.ExitStack) -> Any:
    """None: the launcher's own, where a rank has none, or cannot have it. OSError at a shortage."""
    try:
        return files.enter_context(open(output(path), "ab")) if path else None
    except OSError as error:
        if is_shortage(error):
            raise
        say(f"lastwords run: {path} cannot be written, so a rank writes where its launcher does: {error}")
        return None


def output(path: str) -> int:
    """A file to which a rank's output is appended, in a directory that may have been removed meanwhile. OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, flags, 0o666)


def ended_badly(pid: int) -> bool:
    """Of a process that has ended and has not been collected."""
    deadline_mono_s = mono_s() + FORKING_S
    while True:
        try:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # it is still that of whoever has forked it, and forks others
            if mono_s() > deadline_mono_s:
                return True
            time.sleep(PAUSE_S)
            continue
        return found is None or found.si_code != os.CLD_EXITED or found.si_status != 0


def kill_group(pid: int) -> None:
    """All processes of the group that this one leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


# Processes that outlive the rank that has started them. They are this process's children then (`take_in_orphans`).


def end_orphans(sessions: Collection[int], kept: Collection[int]) -> Iterator[tuple[int, str]]:
    """Kills those of these sessions, and names the others, but for those in `kept`. Collects whatever has ended."""
    seen = {*kept}
    while new := {*children()} - seen:  # the children of whoever is ended here are this process's then
        yield from _end_these(sorted(new), sessions)
        seen |= new


def _end_these(pids: Sequence[int], sessions: Collection[int]) -> Iterator[tuple[int, str]]:
    for pid in pids:
        with contextlib.suppress(OSError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                continue
            if _is_tracker(pid):  # it ends by itself, and removes what those have left that are ended here
                continue
            if os.getsid(pid) in sessions:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            elif not _is_controller(pid):
                yield pid, Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()


def collect_orphans(kept: Collection[int]) -> None:
    """Those that have ended, but for `kept`. Whoever is the first process of a container has strangers' as well."""
    for pid in {*children()} - {*kept}:
        with contextlib.suppress(OSError):
            if os.getsid(pid) != os.getsid(0):  # else this process may have started it, and wait for it
                os.waitpid(pid, os.WNOHANG)


def end_group(group: int) -> None:
    """Kills the processes of this group."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.getpgid(int(name)) == group and not _is_tracker(int(name)):
                os.kill(int(name), signal.SIGKILL)


def _is_tracker(pid: int) -> bool:
    """Multiprocessing's, of named semaphores and shared memory."""
    return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _is_controller(pid: int) -> bool:
    """One that a rank has started ends with its job, and by itself."""
    return b"lastwords.controller" in Path(f"/proc/{pid}/cmdline").read_bytes()


def children() -> list[int]:
    """Of this process, those that have ended and were not collected as well."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/self/task/{task}/children").read_text(encoding="ascii")
            found += map(int, text.split())
    return found
