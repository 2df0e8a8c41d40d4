"""The process of which all ranks of a host are forks: it has imported torch and lastwords, and runs nothing else.

It is started with one thread for each pool, since a child of a process that has run a parallel region with more hangs
for ever; each fork gets the number of threads that it would have as a new process. Ranks are forked by a helper that
ends at once, so the launcher, which takes in orphans (PR_SET_CHILD_SUBREAPER), is the parent of all: it collects them
whatever becomes of this process, which has no children. If the launcher ends, so does this process, and ranks go on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from lastwords.clock import mono_s
from lastwords.errors import named
from lastwords.launcher.fork_messages import Fork, Forked, Forks, Made
from lastwords.launcher.link import RECV_BYTES, Lines, send
from lastwords.launcher.orphans import children as children_of_this
from lastwords.launcher.protocol import read, to_message
from lastwords.liveness.parents import die_with_parent
from lastwords.processor.departure import flush

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Pools are made when a library is loaded, with so many threads."""

OF_RANKS = ("RANK", "LOCAL_RANK", "ROLE_RANK", "MASTER_PORT")
"""Variables that are different in each process, or in each generation."""

UNMISSED = ("jemalloc_bg_thd",)
"""Threads that a library starts again in a fork."""

PAUSE_S = 0.001
"""Between two looks whether a process or a thread has ended."""

JOINED_S = 0.2
"""How long the kernel may take to end a thread that Python has joined."""

BOOT = "import sys; sys.path.pop(0); from lastwords.launcher.fork_server import serve; serve()"
"""Of `python -c`, whose sys.path begins with the working directory: modules there must not take the place of others."""


def serve() -> None:
    """The whole life of this process, and of all its forks.

    argv: -c, the socket's descriptor, the launcher's pid, where the script's modules are, and which modules to import.
    """
    _, fd, launcher, path, *modules = sys.argv
    link, parent = socket.socket(fileno=int(fd)), int(launcher)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    link.set_inheritable(False)
    _import_all()
    send(link, to_message(_preloaded(path, modules)))
    for order in _orders(link):
        one = _forked(order.forks, link)
        if one is not None:
            from lastwords.launcher import new_process

            (new_process.run if one.rank >= 0 else new_process.control)(one)
    os._exit(0)  # what was imported is not to run at the end of this process


def _orders(link: socket.socket) -> Iterator[Forks]:
    """Until the launcher has ended."""
    lines = Lines()
    while data := link.recv(RECV_BYTES):
        for said in lines.feed(data):
            yield read(said, Forks)


def _import_all() -> None:
    """Torch, what it imports at the first model and step, and what a rank of lastwords needs; then all is set aside.

    What exists now stays for ever: with `gc.freeze` no collection in a fork looks at it, which would copy its pages. At
    a fork's end it is collected again: only the collector finds the globals of modules there (functions and they form a
    cycle), and flushes what was opened and not closed.
    """
    import numpy.ma  # noqa: F401
    import setproctitle
    import torch
    import torch._dynamo
    import torch.nn.parallel
    import torch.profiler
    import torch.utils.data

    import lastwords.controller.__main__
    import lastwords.optim_wrapper.resume.resume
    import lastwords.optim_wrapper.trainer.protect  # noqa: F401
    from lastwords.checkpoint.codec import prepare
    from lastwords.checkpoint.manifest import Manifest
    from lastwords.checkpoint.meta import LocalMeta, UnitMeta
    from lastwords.checkpoint.part_tables import Heads
    from lastwords.checkpoint.starts import Start
    from lastwords.launcher import new_process  # noqa: F401
    from lastwords.optim_wrapper.ddp.ddp_found import known_ddps
    from lastwords.optim_wrapper.state.running import user_modules

    setproctitle.setproctitle(f"{setproctitle.getproctitle()} [lastwords fork server]")
    known_ddps()
    deque(user_modules(), 0)
    prepare(Manifest, Heads, LocalMeta, UnitMeta, Start)
    if not _has_device():
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        del model, optimizer


def _has_device() -> bool:
    return any(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev"))


def _preloaded(path: str, modules: Sequence[str]) -> Made:
    seconds: dict[str, float] = {}
    if problem := why_not():
        return Made(problem)
    sys.path.insert(0, path)
    for name in modules:
        begun_s = mono_s()
        with _reads_of_ranks() as read:
            try:
                importlib.import_module(name)
            except BaseException as error:  # outermost: of the module's own code, which may exit as well
                problem = f"it raises {named(error)}"
        if read:
            return Made(f"it reads {', '.join(sorted(read))}, which differs between ranks", name)
        if problem := problem or why_not():
            return Made(problem, name)
        seconds[name] = mono_s() - begun_s
    sys.path.remove(path)
    gc.collect()
    gc.freeze()
    return Made("", "", seconds)


@contextlib.contextmanager
def _reads_of_ranks() -> Iterator[set[str]]:
    """Of what only a rank has, and is not there: all ranks would go on with the answer to that."""
    reads = os._Environ.__getitem__
    found: set[str] = set()

    def note(environ: Any, name: Any) -> Any:
        if name in OF_RANKS:
            found.add(name)
        return reads(environ, name)

    os._Environ.__getitem__ = note  # type: ignore[method-assign]
    try:
        yield found
    finally:
        os._Environ.__getitem__ = reads  # type: ignore[method-assign]


def why_not() -> str:
    """Why a fork of this process could not do what it should; "" if it could.

    It has one thread, so whatever waits for another one of this process's waits for ever, and what another one had
    locked stays so.
    """
    _end_monitors()
    if threads := _threads():
        return f"it has started {threads} thread{'s' * (threads > 1)}, which a fork does not have"
    distributed = sys.modules["torch.distributed"]
    if distributed.is_available() and distributed.is_initialized():
        return "it has made a process group"
    trackers = {resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    if children := [*{*children_of_this()} - trackers]:
        return f"it has started {len(children)} process{'es' * (len(children) > 1)}"
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (target := os.readlink(f"/proc/self/fd/{name}")).startswith("/dev/nvidia"):
                return f"it has opened {target}"
    return ""


def _threads() -> int:
    """How many a fork would miss. One that was joined is gone a moment later."""
    deadline_mono_s = mono_s() + JOINED_S
    while (count := sum(map(_is_missed, os.listdir("/proc/self/task")))) and mono_s() < deadline_mono_s:
        time.sleep(PAUSE_S)
    return count


def _is_missed(task: str) -> bool:
    """Whether this thread is one that a fork would miss."""
    if int(task) == os.getpid():
        return False
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/self/task/{task}/comm").read_text(encoding="utf-8", errors="replace").strip() not in UNMISSED
        )
    return False


def _end_monitors() -> None:
    """tqdm has a thread once a bar was shown, and starts another one where it is missing."""
    tqdm = sys.modules.get("tqdm")
    monitor = getattr(getattr(tqdm, "tqdm", None), "monitor", None)
    if monitor is not None:
        monitor.exit()
        tqdm.tqdm.monitor = None  # type: ignore[union-attr]


def _forked(forks: Sequence[Fork], link: socket.socket) -> Fork | None:
    """In each fork what it is to be; None in this process, once all are there."""
    flush()
    try:
        helper = os.fork()
    except OSError as error:
        send(link, to_message(Forked({}, str(error))))
        return None
    if not helper:
        return _fork_each(forks, link)
    if os.waitpid(helper, 0)[1]:
        send(link, to_message(Forked({}, "the process that forks them was killed")))
    return None


def _fork_each(forks: Sequence[Fork], link: socket.socket) -> Fork:
    """The helper: it returns in the forks alone, once each has the parent that it keeps."""
    helper = os.getpid()
    for one in forks:
        try:
            pid = os.fork()
        except OSError as error:
            send(link, to_message(Forked({}, str(error))))
            break
        if not pid:
            link.close()
            while os.getppid() == helper:
                time.sleep(PAUSE_S)
            return one
        send(link, to_message(Forked({str(one.rank): pid})))
    os._exit(0)
