"""`lastwords.run(main)`: a worker under `lastwords run` enters `main` again after a failure, and keeps its process."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import logging
import os
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from lastwords.controller import launch as controller_launch
from lastwords.errors import ConfigError, UnavailableError
from lastwords.launcher.link import SPARE, VARIABLE, Lines, send
from lastwords.launcher.unblock import Unblocker, open_sockets
from lastwords.optim_wrapper.launch import world
from lastwords.optim_wrapper.trainer import reentry
from lastwords.processor.departure import EXIT_NOT_SAVED, EXIT_SAVED, wait_out

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

CONTROLLER_S = 60.0
"""How long the launcher may take to hand out a controller."""

LEAVE_S = 20.0
"""How long a survivor may take from the end of an incident until it has left `main` and its groups."""

SOURCES_MAX = 4000
"""Files of the user's code that are compared between a replacement and the other ranks."""

_kept: dict[str, Any] = {}
_workers: list[Worker] = []
"""This process under `lastwords run`, once `run` was called."""


def run(main: Callable[[], object]) -> None:
    """Run a training script's `main`, and enter it again after a failure if `lastwords run` has started this process.

    `main` takes no arguments; what it returns is dropped. It makes its process groups, model and loaders itself, and
    calls `resume()` before its loop; after a failure of any rank it is entered once more on all ranks, those that
    survived in the same process. Started otherwise (plain python, torchrun), `main` is called once. Training thread
    only. Raises ConfigError for a `main` that cannot be called so.
    """
    _refuse(main)
    if _workers:
        raise ConfigError("lastwords.run(main) was called in this process before: call it once, for all the training")
    path = os.environ.pop(VARIABLE, None)  # not for what this process starts
    if path is None:
        if os.environ.get("RANK", "0") == "0":
            _log.warning(
                "not started by `lastwords run`, so a failure ends all processes, as without lastwords.run(main)"
            )
        main()
        return
    if dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "init_process_group() was called before lastwords.run(main): its group would belong to the first processes "
            "only; call it in main()"
        )
    _workers.append(Worker(path))
    _workers[0].run(main)


def keep(name: str, make: Callable[[], _T]) -> _T:
    """`make()` at the first call in this process, the same object at every later one, also after a failure.

    For what is costly and holds no process group: a data set, a tokenizer, a compiled kernel. It must not hold state
    that training changes.
    """
    if name not in _kept:
        _kept[name] = make()
    value: _T = _kept[name]
    return value


def _refuse(main: Callable[[], object]) -> None:
    if not callable(main) or inspect.iscoroutinefunction(main):
        raise ConfigError(f"lastwords.run(main) takes a function without arguments, not {main!r}")
    with contextlib.suppress(ValueError):
        needed = [
            one.name
            for one in inspect.signature(main).parameters.values()
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
        if needed:
            raise ConfigError(
                f"main() takes {', '.join(needed)}, and lastwords.run(main) has nothing to give: wrap it in a function "
                "without arguments, such as lambda: main(arguments)"
            )


class Stay:
    """One stay in `main`, and the `reentry.Leaver` of what runs in it: whoever is late finds that it is over."""

    def __init__(self, link: socket.socket) -> None:
        self.leaving = False
        self.saved_step = 0
        self.record = ""
        self._link = link
        self._lock = threading.Lock()
        self._over = False
        self._left = threading.Event()
        self._unblocker: Unblocker | None = None
        self._before = frozenset(inode for _, inode in open_sockets())

    def leave(self, step: int, ports: tuple[int, ...], record: Path | None) -> None:
        """The training thread comes out of `main`, wherever it is; after `LEAVE_S` this process ends instead."""
        with self._lock:
            if self.leaving or self._over:
                return
            self.leaving, self.saved_step, self.record = True, step, str(record or "")
            self._unblocker = Unblocker(self._before, ports)
            self._unblocker.begin()
        threading.Thread(target=self._end_if_here, name="lastwords-leave", daemon=True).start()

    def begun(self) -> None:
        """The training loop begins; a controller looks after this rank."""
        with contextlib.suppress(OSError):
            send(self._link, {"begun": True})

    def updated(self) -> None:
        """The first step of this stay is over."""
        with contextlib.suppress(OSError):
            send(self._link, {"updated": True})

    def over(self) -> None:
        """The training loop has come to its end."""
        with contextlib.suppress(OSError):
            send(self._link, {"over": True})

    def end(self) -> None:
        """Training thread: out of all groups; nothing of this stay runs after that."""
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        with self._lock:
            self._over = True
        self._left.set()
        if self._unblocker is not None:
            self._unblocker.end()

    def _end_if_here(self) -> None:
        """In a thread of its own; files that are being written are waited for."""
        if wait_out(lambda seconds: self._left.wait(seconds), LEAVE_S):
            return
        with self._lock:
            if self._over:
                return
        rank = os.environ.get("RANK", "?")
        sys.stderr.write(f"lastwords: rank {rank} has not left main() for {LEAVE_S:g} s; its process is replaced\n")
        os._exit(EXIT_SAVED)


class Worker:
    """This process, as the launcher's agent knows it."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(path)
        except OSError as error:
            raise UnavailableError(f"the launcher does not answer at {path}: {error}") from error
        self._condition = threading.Condition()
        self._become: dict[str, Any] | None = None
        self._entered: tuple[int, int] | None = None
        self._gone = False
        self._dismissed = False
        self._asked = 0
        self._controller: dict[int, tuple[int, dict[str, object]] | None] = {}
        self._stay: Stay | None = None
        self._saved_step = 0
        self._record = ""
        self._abandoned = False
        self._sources: dict[str, str] = {}

    def run(self, main: Callable[[], object]) -> None:
        """Until `main` has returned by itself, or raised what is its own."""
        spare = os.environ.pop(SPARE, "") == "1"
        send(self._socket, {"rank": None if spare else int(os.environ["RANK"]), "pid": os.getpid()})
        threading.Thread(target=self._listen, name="lastwords-launcher", daemon=True).start()
        self._sources = source_digests()
        warm_up()
        if spare:
            send(self._socket, {"ready": True})
            self._take_place()
        controller_launch.use_waiting(self._become_controller)
        while not self._enter(main):
            pass

    def _enter(self, main: Callable[[], object]) -> bool:
        """Once: True if `main` has come to its end."""
        with contextlib.suppress(OSError):  # the launcher has ended, which the listening thread sees
            send(self._socket, {"waiting": self._saved_step, "record": self._record, "sources": self._sources})
        with self._condition:
            self._condition.wait_for(lambda: self._entered is not None or self._gone)
            if self._entered is None:  # the launcher has ended: as after any incident
                raise SystemExit(EXIT_SAVED if self._saved_step else EXIT_NOT_SAVED)
            os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["MASTER_PORT"] = map(str, self._entered)
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            self._entered = None
            self._stay = stay = Stay(self._socket)
            if self._abandoned:
                stay.leave(0, (), None)
        world.begin_again()
        reentry.use(stay)
        hook = sys.excepthook
        try:
            main()
        except BaseException as error:  # handed to the caller, unless it is only the news of a failure elsewhere
            if not stay.leaving:
                raise
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = error.__context__ = error.__cause__ = None
        else:
            if not stay.leaving:
                return True
        stay.end()
        sys.excepthook = hook  # torch wraps it once more at each init_process_group()
        self._saved_step = max(self._saved_step, stay.saved_step)
        self._record = stay.record or self._record
        return False

    # ------------------------------------------------------------------ inside

    def _become_controller(self, work: dict[str, str]) -> tuple[int, dict[str, object]] | None:
        """The launcher has a process that has imported what a controller needs."""
        with self._condition:
            self._asked += 1  # an answer may come after the stay in main that has asked for it
            try:
                send(self._socket, {"controller": work, "asked": self._asked})
            except OSError:  # the launcher has gone: this process starts the controller itself
                return None
            self._condition.wait_for(lambda: self._asked in self._controller or self._gone, CONTROLLER_S)
            return self._controller.pop(self._asked, None)

    def _listen(self) -> None:
        lines = Lines()
        while True:
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            if not data:
                with self._condition:
                    self._gone = True
                    self._condition.notify_all()
                if not self._dismissed:
                    rank = os.environ.get("RANK", "?")
                    sys.stderr.write(f"lastwords: rank {rank}: the launcher has ended; a failure now ends all ranks\n")
                return
            for message in lines.feed(data):
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        with self._condition:
            if "abandon" in message and self._entered is not None:
                self._abandoned = True  # the training thread is about to enter
            elif "abandon" in message and self._stay is not None:
                self._stay.leave(0, (), None)
            if "become" in message:
                self._become = message
            if "dismissed" in message:
                self._dismissed = True
            if "controller" in message:
                found = message["controller"]
                self._controller[message["asked"]] = None if found is None else (int(found[0]), found[1])
            if "enter" in message:
                self._entered, self._abandoned = (message["enter"], message["port"]), False
            self._condition.notify_all()

    def _take_place(self) -> None:
        """A spare takes the place of a rank; the launcher may as well end without ever needing it."""
        with self._condition:
            self._condition.wait_for(lambda: self._become is not None or self._gone)
            if self._become is None:
                os._exit(0)
            become = self._become
        os.environ.update(become["become"])
        for path, stream in ((become.get("stdout"), sys.stdout), (become.get("stderr"), sys.stderr)):
            if path:
                stream.flush()
                with open(path, "ab") as file:
                    os.dup2(file.fileno(), stream.fileno())


def source_digests() -> dict[str, str]:
    """Of the files of the user's own code that are imported by now, by path; installed packages are left out."""
    installed = {os.path.realpath(path) + os.sep for path in sysconfig.get_paths().values()}
    found = {}
    for module in [*sys.modules.values()]:
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.endswith(".py") and not os.path.realpath(path).startswith((*installed,)):
            with contextlib.suppress(OSError):
                found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    return dict([*found.items()][:SOURCES_MAX])


def warm_up() -> None:
    """What torch imports and starts at the first DDP model, backward pass and optimizer, done beforehand.

    What is there then stays for ever: with `gc.freeze`, the collection between two stays in `main` only has to look at
    what the stay has made, where it would take some tenths of a second else.
    """
    import torch
    import torch._dynamo  # DDP and the optimizers import it at first use: seconds
    import torch.nn.parallel
    import torch.utils.data

    import lastwords.optim_wrapper.trainer.register  # noqa: F401

    with torch.random.fork_rng(devices=[]):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    gc.freeze()
