"""The process of which all ranks of a host are forks: it has imported torch and lastwords, and runs nothing else.

It is started with one thread for each pool, since a child of a process that has run a parallel region with more hangs
for ever; each fork gets the number of threads that it would have as a new process. Ranks are forked by a helper that
ends at once, so the launcher, which takes in orphans (PR_SET_CHILD_SUBREAPER), is the parent of all: it collects them
whatever becomes of this process, which has no children. If the launcher ends, so does this process, and ranks go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import io
import os
import random  # noqa: F401  # before any module seeds it
import signal
import socket
import sys
import time
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from lastwords.clock import mono_s
from lastwords.errors import counted, named
from lastwords.launcher.link import RECV_BYTES, Lines, send
from lastwords.launcher.processes import PAUSE_S, children
from lastwords.launcher.protocol import (
    Fork,
    Forked,
    Forks,
    Importing,
    Made,
    Preload,
    from_text,
    read,
    to_message,
)
from lastwords.liveness.parents import MEANT_FOR_RANKS, die_with_parent
from lastwords.processor import departure
from lastwords.processor.departure import flush

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Pools are made when a library is loaded, with so many threads."""

OF_RANKS = ("RANK", "LOCAL_RANK", "ROLE_RANK", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
"""Variables that are different in each process, or in each generation."""

SEEDS = {"random": "seed", "numpy.random": "seed", "torch": "manual_seed", "torch.random": "manual_seed"}
"""Functions of modules that give global random streams a seed."""

RANK_ZERO = {
    "lightning.fabric.utilities.rank_zero": ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"),
    "lightning_fabric.utilities.rank_zero": ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"),
    "torchmetrics.utilities.prints": ("LOCAL_RANK",),
}
"""Modules that keep the first of these variables that is set in `rank_zero_only.rank`, which each fork sets anew."""

LOOKING_UP = ("os", "_collections_abc", "collections.abc", __name__)
"""Modules of the functions between a read of the environment and whoever reads it."""

UNMISSED = ("jemalloc_bg_thd",)
"""Threads that a library starts again in a fork."""

JOINED_S = 0.2
"""How long the kernel may take to end a thread that Python has joined."""

BOOT = "import sys; sys.flags.safe_path or sys.path.pop(0); from lastwords.launcher.fork_server import serve; serve()"
"""Of `python -c`, whose sys.path begins with the working directory: modules there must not take the place of others."""


def serve() -> None:
    """The whole life of this process, and of all its forks.

    argv: -c, the socket's descriptor, and the launcher's pid.
    """
    _, fd, launcher = sys.argv
    link, parent = socket.socket(fileno=int(fd)), int(launcher)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    link.set_inheritable(False)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # after `trap '' CHLD` in a shell nobody could be waited for
    ignored = [one for one in MEANT_FOR_RANKS if signal.getsignal(one) is not signal.SIG_IGN]
    plain = {one: signal.signal(one, signal.SIG_IGN) for one in ignored}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    _import_all()
    left_out: Sequence[str] = ()
    for order in _orders(link):
        if isinstance(order, Preload):
            left_out = order.left_out
            send(link, to_message(_preloaded(from_text(order), link)))
            continue
        one = _forked([*map(from_text, order.forks)], link, plain)
        if one is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what came since its launcher knows it is for the rank
            from lastwords.launcher import new_process

            one = dataclasses.replace(one, environment={**one.environment, **set_here})
            set_rank(one.environment)
            if one.rank < 0:
                new_process.control(one)
            new_process.run(one, left_out)
    os._exit(0)  # what was imported is not to run at the end of this process


def _orders(link: socket.socket) -> Iterator[Preload | Forks]:
    """Until the launcher has ended."""
    lines = Lines()
    while data := link.recv(RECV_BYTES):
        for said in lines.feed(data):
            yield read(said, Preload | Forks)


def _import_all() -> None:
    """Torch, what it imports at the first model and step, and what a rank of lastwords needs; then all is set aside.

    What exists now stays for ever: with `gc.freeze` no collection in a fork looks at it, which would copy its pages. At
    a fork's end it is collected again: only the collector finds the globals of modules there (functions and they form a
    cycle), and flushes what was opened and not closed.
    """
    import setproctitle

    setproctitle.setproctitle(f"{sys.executable} [lastwords fork server]")  # before anything changes the environment
    import numpy.ma  # noqa: F401
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
    from lastwords.checkpoint.meta import BucketRecord, FileContent, LocalMeta, RunFacts, StepDocument, UnitMeta
    from lastwords.checkpoint.part import Heads
    from lastwords.checkpoint.starts import Start
    from lastwords.launcher import new_process  # noqa: F401
    from lastwords.optim_wrapper.ddp.ddp_found import known_ddps
    from lastwords.optim_wrapper.state.running import user_modules

    known_ddps()
    deque(user_modules(), 0)
    prepare(Manifest, Heads, LocalMeta, UnitMeta, Start, BucketRecord, FileContent, RunFacts, StepDocument)
    if not _has_device():
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        del model, optimizer


def _has_device() -> bool:
    return any(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev"))


def _preloaded(order: Preload, link: socket.socket) -> Made:
    seconds: dict[str, float] = {}
    if problem := why_not():
        return Made(problem)
    os.environ.clear()
    os.environ.update(order.environment)
    path, *modules = order.argv
    sys.path.insert(0, path)
    before, directory = dict(os.environ), os.getcwd()
    for name in modules:
        begun_s, known = mono_s(), {*sys.modules}
        send(link, to_message(Importing(name)))
        with _deeds() as done:
            try:
                importlib.import_module(name)
            except BaseException as error:  # outermost: of the module's own code, which may exit as well
                problem = f"it raises {named(error)}"
        if os.getcwd() != directory:
            done["it changes the working directory"] = None
        if found := _generators(sys.modules.keys() - known):
            done[f"it has a random generator, {found[0]}, which would draw the same in all ranks"] = None
        if problem := next(iter(done), problem) or why_not():
            return Made(problem, name)
        seconds[name] = mono_s() - begun_s
    sys.path.remove(path)
    set_here.update({name: value for name, value in os.environ.items() if before.get(name) != value})
    opened = [one for one in gc.get_objects() if issubclass(type(one), io.IOBase) and not one.closed]
    gc.collect()
    gc.freeze()
    departure.begin(opened)
    return Made("", "", seconds)


set_here: dict[str, str] = {}
"""Variables of the environment that preloaded modules have set."""


def _generators(modules: Collection[str]) -> list[str]:
    """Where the user's own among these have a random generator."""
    if "torch" not in sys.modules:
        return []
    from lastwords.optim_wrapper.state.how_far import GENERATORS
    from lastwords.optim_wrapper.state.running import user_modules

    return [
        f"{module}.{name}"
        for module, names in user_modules()
        if module in modules
        for name, one in names.items()
        if issubclass(type(one), GENERATORS)
    ]


@contextlib.contextmanager
def _deeds() -> Iterator[dict[str, None]]:
    """What is done meanwhile that only a rank can do.

    It reads what only a rank has, so that all would go on with the answer to that; or seeds the streams, which are
    those of each rank.
    """
    found: dict[str, None] = {}
    reads = os._Environ.__getitem__

    def note(environ: Any, name: Any) -> Any:
        if name in OF_RANKS and not _is_set_anew(name):
            found[f"it reads {name}, which differs between ranks"] = None
        return reads(environ, name)

    def seeding(seed: Any) -> Any:
        @functools.wraps(seed)
        def noted(*args: Any, **options: Any) -> Any:
            found["it seeds random streams, which are those of each rank"] = None
            return seed(*args, **options)

        return noted

    owners = {sys.modules[module]: name for module, name in SEEDS.items() if module in sys.modules}
    seeds = [(owner, name, getattr(owner, name)) for owner, name in owners.items()]
    os._Environ.__getitem__ = note  # type: ignore[method-assign]
    for owner, name, seed in seeds:
        setattr(owner, name, seeding(seed))
    try:
        yield found
    finally:
        os._Environ.__getitem__ = reads  # type: ignore[method-assign]
        for owner, name, seed in seeds:
            setattr(owner, name, seed)


def _is_set_anew(name: str) -> bool:
    """Whether the module that reads this variable now is one of RANK_ZERO, and of a release that is known here."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in LOOKING_UP:
        frame = frame.f_back
    found: Mapping[str, object] = {} if frame is None else frame.f_globals
    return name in RANK_ZERO.get(str(found.get("__name__")), ()) and "rank_zero_only" in found


def set_rank(environment: Mapping[str, str]) -> None:
    """In a fork with this environment: what the modules of RANK_ZERO that are loaded have read in another one."""
    for module, names in RANK_ZERO.items():
        if (only := getattr(sys.modules.get(module), "rank_zero_only", None)) is not None:
            only.rank = int(next((environment[name] for name in names if name in environment), 0))


def why_not() -> str:
    """Why a fork of this process could not do what it should; "" if it could.

    It has one thread, so whatever waits for another one of this process's waits for ever, and what another one had
    locked stays so.
    """
    _end_monitors()
    if threads := _threads():
        return f"it has started {_counted(threads)}, which a fork does not have"
    distributed = sys.modules["torch.distributed"]
    if distributed.is_available() and distributed.is_initialized():
        return "it has made a process group"
    trackers = {resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    if own := [*{*children()} - trackers]:
        return f"it has started {len(own)} process{'es' * (len(own) > 1)}"
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (target := os.readlink(f"/proc/self/fd/{name}")).startswith("/dev/nvidia"):
                return f"it has opened {target}"
    return ""


def _threads() -> list[str]:
    """Names of those that a fork would miss. One that was joined is gone a moment later."""
    deadline_mono_s = mono_s() + JOINED_S
    while (names := [*_names_of_threads()]) and mono_s() < deadline_mono_s:
        time.sleep(PAUSE_S)
    return names


def _names_of_threads() -> Iterator[str]:
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/self/task/{task}/comm").read_text(encoding="utf-8", errors="replace").strip()
            if int(task) != os.getpid() and name not in UNMISSED:
                yield name


def _counted(threads: Sequence[str]) -> str:
    """With the names of those that have one of their own: a module may come with another one whose threads they are."""
    own = Path("/proc/self/comm").read_text(encoding="utf-8", errors="replace").strip()
    named = ", ".join(sorted({*threads} - {own}))
    return f"{counted(len(threads), 'thread')}{f' ({named})' if named else ''}"


def _end_monitors() -> None:
    """tqdm has a thread once a bar was shown, and starts another one where it is missing."""
    tqdm = sys.modules.get("tqdm")
    monitor = getattr(getattr(tqdm, "tqdm", None), "monitor", None)
    if monitor is not None:
        monitor.exit()
        tqdm.tqdm.monitor = None  # type: ignore[union-attr]


def _forked(forks: Sequence[Fork], link: socket.socket, plain: Mapping[signal.Signals, Any]) -> Fork | None:
    """In each fork what it is to be; None in this process, once all are there. plain: handlers that forks have."""
    flush()
    try:
        helper = os.fork()
    except OSError as error:
        send(link, to_message(Forked({}, str(error), error.errno or 0)))
        return None
    if not helper:
        signal.pthread_sigmask(signal.SIG_BLOCK, plain)
        for number, handler in plain.items():
            if signal.getsignal(number) is signal.SIG_IGN:  # else a preloaded module has taken it
                signal.signal(number, handler)
        return _fork_each(forks, link)
    if os.waitpid(helper, 0)[1]:
        send(link, to_message(Forked({}, "the process that forks them was killed")))
    return None


def _fork_each(forks: Sequence[Fork], link: socket.socket) -> Fork:
    """The helper: it returns in the forks alone, once each has the parent that it keeps, and the launcher knows it."""
    helper = os.getpid()
    for one in forks:
        try:
            known, known_by = os.pipe()
            pid = os.fork()
        except OSError as error:
            send(link, to_message(Forked({}, str(error), error.errno or 0)))
            break
        if not pid:
            os.setsid()  # whoever ends the fork server's group does not end a rank that the launcher knows
            link.close()
            os.close(known_by)
            if not os.read(known, 1):  # the launcher may not know it, and would have another one forked
                os.kill(os.getpid(), signal.SIGKILL)
            os.close(known)
            while os.getppid() == helper:
                time.sleep(PAUSE_S)
            return one
        os.close(known)
        send(link, to_message(Forked({str(one.rank): pid})))
        with contextlib.suppress(BrokenPipeError):  # the launcher has ended it already
            os.write(known_by, b".")
        os.close(known_by)
    os._exit(0)
