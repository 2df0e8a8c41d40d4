"""`lastwords.run(main)`: a worker under `lastwords run` enters `main` again after a failure, and keeps its process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from lastwords import threads
from lastwords.controller import launch as controller_launch
from lastwords.errors import BusyError, ConfigError, IncompleteError, MismatchError
from lastwords.launcher.callables import refusal_line, refuse_main, refuse_needed, shown
from lastwords.launcher.environment import SCHEDULER, Cluster, cluster_of
from lastwords.launcher.events import Abandon, Waiting
from lastwords.launcher.link import RECV_BYTES, Complaints, Inbox, send
from lastwords.launcher.membership import Membership
from lastwords.launcher.protocol import (
    OWN,
    PROTOCOL,
    Become,
    ControllerAnswer,
    ControllerWanted,
    Dismissed,
    Entry,
    Hello,
    Order,
    Raised,
    Ready,
    Report,
    SchedulerGone,
    order_of,
    to_launcher,
)
from lastwords.launcher.registry import Refused
from lastwords.launcher.scheduler import schedule
from lastwords.launcher.source_files import source_digests
from lastwords.launcher.stay import THREADS, Stay
from lastwords.launcher.streams import Streams
from lastwords.launcher.versions import Ask, Sources
from lastwords.launcher.warm_up import warm_up
from lastwords.optim_wrapper.launch import world
from lastwords.optim_wrapper.launch.config import LAUNCHER, SPARE
from lastwords.optim_wrapper.trainer import reentry
from lastwords.optim_wrapper.trainer.hold import is_collective_error, one_line
from lastwords.optim_wrapper.trainer.register import TFTRegister
from lastwords.processor.departure import EXIT_NOT_SAVED, say

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

CONTROLLER_S = 60.0
"""How long the launcher may take to hand out a controller."""

EXIT_REFUSED, EXIT_BUSY = 2, 5
"""Those of the command `lastwords` for the same errors."""

ERROR_CHARS_MAX = 1000
"""Of an exception that a launcher hears of."""

ECHO_S = 5.0
"""After a collective has failed before the loop: how long the news may take that all have to leave `main`."""

_kept: dict[str, Any] = {}
_workers: list[Worker] = []
"""This process under `lastwords run`, once `run` was called."""


def run(main: Callable[[], object]) -> None:
    """Run a training script's `main`, and enter it again after a failure if `lastwords run` has started this process.

    `main` takes no arguments; what it returns is dropped. It makes its process groups, model and loaders itself, and
    calls `resume()` before its loop; after a failure of any rank it is entered once more on all ranks, those that
    survived in the same process. Started otherwise (plain python, torchrun), `main` is called once. Training thread
    only. A ConfigError, here or in `main`, ends this process with one line and exit code 2, a BusyError with 5.
    """
    try:
        _run(main)
    except (ConfigError, BusyError) as error:
        _log.debug("refused", exc_info=True)
        _tell_launcher(refusal_line(error, ""), lasting=True)
        say(f"lastwords: {refusal_line(error, os.environ.get('RANK', ''))}")
        raise SystemExit(EXIT_BUSY if isinstance(error, BusyError) else EXIT_REFUSED) from error
    except BaseException as error:  # handed to the caller
        _tell_launcher(one_line(error, ERROR_CHARS_MAX), lasting=_out_of_resume(error))
        raise


def _tell_launcher(error: str, *, lasting: bool) -> None:
    for one in _workers:
        one.raised(error, lasting=lasting)


def _out_of_resume(error: BaseException) -> bool:
    """Whether `resume()` has found no checkpoint, or one of another model. A MismatchError of later steps may pass."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, MismatchError | IncompleteError) and TFTRegister.resume.__code__ in frames


def _run(main: Callable[[], object]) -> None:
    if _workers:
        raise ConfigError("lastwords.run(main) was called in this process before: call it once, for all the training")
    path = os.environ.pop(LAUNCHER, None)  # not for what this process starts
    if path is not None:
        one = Worker(_connected(path))
        one.introduce()  # before anything can be refused, so that the launcher hears of it
        _workers.append(one)
        refuse_main(main)
        _refuse_group()
        return one.run(main)
    refuse_main(main)
    if (cluster := cluster_of(os.environ)) is not None:
        return _run_in(cluster, main)
    if os.environ.get("RANK", "0") == "0":
        _log.warning("not started by `lastwords run`, so a failure ends all processes, as without lastwords.run(main)")
    main()


def _run_in(cluster: Cluster, main: Callable[[], object]) -> None:
    """The part of this process in a dynamic cluster: the scheduler's, or a worker's."""
    _refuse_group()
    if cluster.role == SCHEDULER:
        if code := schedule(cluster):
            raise SystemExit(code)
        return
    membership = Membership(cluster)
    _workers.append(Worker(membership.launcher, membership.farewell, ends_if_asked=True))
    _workers[0].introduce()
    _workers[0].run(main)
    membership.done()


def _refuse_group() -> None:
    if dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "init_process_group() was called before lastwords.run(main): its group would belong to the first processes "
            "only; call it in main()"
        )


def _connected(path: str) -> socket.socket:
    """To the launcher, which listens at `path`."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(path)
    except OSError as error:
        _log.info("the launcher does not answer at %s: %s", path, error)
        raise _without_launcher() from None
    return link


def keep(name: str, make: Callable[[], _T]) -> _T:
    """`make()` at the first call in this process, the same object at every later one, also after a failure.

    For what is costly and holds no process group: a data set, a tokenizer, a compiled kernel. It must not hold state
    that training changes. Raises ConfigError for a `make` that cannot be called so.
    """
    if not isinstance(name, str):
        raise ConfigError(f'lastwords.keep(name, make) takes a name first, such as "data", not {shown(name)}')
    if not callable(make):
        raise ConfigError(
            f"lastwords.keep({name!r}, make) takes a function that makes the object, not {shown(make)}: write "
            f"lastwords.keep({name!r}, lambda: ...), so that it is made once in each process"
        )
    refuse_needed(make, "make", f"keep({name!r}, make)")
    if name not in _kept:
        _kept[name] = make()
    value: _T = _kept[name]
    return value


class Worker:
    """This process, as the launcher's agent knows it. link: to it. farewell: waits until all that was said is sent.
    ends_if_asked: on SIGTERM and the like it ends after the incident; else it goes on, since its launcher ends it where
    that is meant.
    """

    def __init__(
        self, link: socket.socket, farewell: Callable[[], None] = lambda: None, *, ends_if_asked: bool = False
    ) -> None:
        self._socket = link
        self._farewell = farewell
        self._ends_if_asked = ends_if_asked
        self._spare = False
        self._condition = threading.Condition()
        self._become: Become | None = None
        self._entered: Entry | None = None
        self._entry = -1
        """The newest entry into `main`; -1 before the first."""
        self._streams: Streams | None = None
        self._gone = False
        self._scheduler_lost = False
        """Since this stay in `main` began, and with it the store in which its ranks meet."""
        self._dismissed = False
        self._asked = 0
        self._controller: dict[int, tuple[int, dict[str, object]] | None] = {}
        self._refused = ""
        """Why the launcher does not hear this process."""
        self._stay: Stay | None = None
        self._inside = False
        """The training thread is in `main`."""
        self._saved_step = 0
        self._exit_code = EXIT_NOT_SAVED
        """Of this process if it ends outside of `main`: whether the newest step that has ended here is saved."""
        self._record = ""
        self._abandoned = False
        self._sources: dict[str, str] = {}
        self._version = ""

    def introduce(self) -> None:
        """The first message: who this process is."""
        self._spare = os.environ.pop(SPARE, "") == "1"
        self._say(Hello(None if self._spare else int(os.environ["RANK"]), os.getpid(), PROTOCOL))

    def run(self, main: Callable[[], object]) -> None:
        """Until `main` has returned by itself, or raised what is its own."""
        threads.start_patiently(self._listen, name="lastwords-launcher")
        threads.reserve(THREADS)
        self._sources = source_digests()
        self._version = hashlib.sha256(json.dumps(self._sources, sort_keys=True).encode()).hexdigest()[:16]
        self._streams = Streams()
        warm_up()
        if self._spare:
            self._say(Ready())
            self._take_place()
        controller_launch.use_waiting(self._become_controller)
        while not self._enter(main):
            pass

    def raised(self, error: str, *, lasting: bool) -> None:
        """An exception leaves `run`: the launcher hears why this process ends."""
        self._inside = False
        with contextlib.suppress(OSError):  # the launcher has ended
            send(self._socket, to_launcher(Raised(error, lasting)))
        self._farewell()

    def _say(self, report: Report) -> None:
        try:
            send(self._socket, to_launcher(report))
        except OSError:
            raise _without_launcher() from None

    def _enter(self, main: Callable[[], object]) -> bool:
        """Once: True if `main` has come to its end."""
        with contextlib.suppress(OSError):  # the launcher has ended, which the listening thread sees
            waiting = Waiting(OWN, self._saved_step, self._record, self._version, self._entry)
            send(self._socket, to_launcher(waiting))
        with self._condition:
            self._condition.wait_for(lambda: self._entered is not None or self._gone)
            self._raise_if_refused()
            if self._entered is None:  # the launcher has ended: as after any incident
                raise _without_launcher(self._saved_step, self._exit_code, told=self._dismissed)
            self._entry = self._entered.generation
            port, step = self._entered.port, self._entered.step
            os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["MASTER_PORT"] = str(self._entry), str(port)
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            self._entered = None
            self._stay, self._inside = (stay := Stay(self._socket, step if self._entry else 0, self._exit_code)), True
            if self._abandoned:
                stay.leave(0, (), None)
        world.begin_again()
        reentry.use(stay)
        hook = sys.excepthook
        if self._streams is not None:
            self._streams.put_back()
        try:
            _call(main, stay)
        except BaseException as error:  # handed to the caller, unless it is only the news of a failure elsewhere
            if not stay.leaving and not self._is_echo(error, stay):
                if self._dismissed:
                    stay.tell_what_is_saved()
                raise
            _let_go(error)
        else:
            if not stay.leaving:
                self._inside = False
                return True
        stay.end()
        self._inside = False
        sys.excepthook = hook  # torch wraps it once more at each init_process_group()
        self._saved_step = max(self._saved_step, stay.saved_step)
        self._exit_code = stay.exit_code
        self._record = stay.record or self._record
        if stay.signal and self._ends_if_asked:
            raise _asked_to_stop(stay.signal, self._exit_code)
        return False

    def _is_echo(self, error: BaseException, stay: Stay) -> bool:
        """A collective has failed before the loop, where no controller tells why: because all have to leave `main`?"""
        if stay.trains or not is_collective_error(error):
            return False
        with self._condition:
            self._condition.wait_for(lambda: stay.leaving or self._scheduler_lost or self._gone, ECHO_S)
            if self._scheduler_lost:
                stay.leave(0, (), None)
            return stay.leaving

    # ------------------------------------------------------------------ inside

    def _become_controller(self, work: dict[str, str]) -> tuple[int, dict[str, object]] | None:
        """The launcher has a process that has imported what a controller needs."""
        with self._condition:
            self._asked = asked = self._asked + 1  # an answer may come after the stay in main that has asked for it
            try:
                send(self._socket, to_launcher(ControllerWanted(work, asked)))
            except OSError:  # the launcher has gone: this process starts the controller itself
                return None
            self._condition.wait_for(lambda: asked in self._controller or self._gone, CONTROLLER_S)
            return self._controller.pop(asked, None)

    def _listen(self) -> None:
        try:
            self._hear()
        finally:  # also after a mistake of its own: the training thread must not wait for what nobody hears
            with self._condition:
                self._gone = True
                self._condition.notify_all()
        if self._inside and not self._dismissed and not self._refused:
            rank = os.environ.get("RANK", "?")
            say(f"lastwords: rank {rank}: the launcher has ended; a failure now ends all ranks")

    def _hear(self) -> None:
        """Until the launcher has ended."""
        inbox = Inbox("the launcher", order_of, Complaints())
        while not inbox.broken:
            try:
                data = self._socket.recv(RECV_BYTES)
            except OSError:
                return
            if not data:
                return
            for order in inbox.feed(data):
                if isinstance(order, Ask):
                    with contextlib.suppress(OSError):  # seen at the next turn
                        send(self._socket, to_launcher(Sources(OWN, self._sources)))
                self._take(order)

    def _take(self, order: Order) -> None:
        with self._condition:
            match order:
                case Abandon() if self._entered is not None:
                    self._abandoned = True  # the training thread is about to enter
                case Abandon() if self._stay is not None:
                    self._stay.leave(0, (), None)
                case Become():
                    self._become = order
                case Dismissed(failure):
                    self._dismissed = True
                    if self._stay is not None:
                        self._stay.dismissed = True
                    if failure:
                        self._stop(f"the scheduler has given up: {failure}")
                case Refused(why):
                    self._refused, self._gone = why, True
                    if self._inside:
                        self._stop(why)
                case ControllerAnswer(asked, pid, words):
                    self._controller[asked] = None if pid is None else (pid, words)
                case Entry():
                    self._entered, self._abandoned, self._scheduler_lost = order, False, False
                case SchedulerGone():
                    self._scheduler_lost = True
                case _:
                    pass
            self._condition.notify_all()

    def _stop(self, why: str) -> None:
        """Nobody heals this worker. Whoever leaves `main` anyway ends with its own code, which no signal cuts off."""
        say(f"lastwords: {why}")
        if self._inside and self._stay is not None and not self._stay.leaving:
            os.kill(os.getpid(), signal.SIGTERM)

    def _raise_if_refused(self) -> None:
        if self._refused:
            raise ConfigError(self._refused)

    def _take_place(self) -> None:
        """A spare takes the place of a rank; the launcher may as well end without ever needing it."""
        with self._condition:
            self._condition.wait_for(lambda: self._become is not None or self._gone)
            self._raise_if_refused()
            if self._become is None:
                os._exit(0)
            become = self._become
        os.environ.update(become.environment)
        for path, stream in ((become.stdout, sys.stdout), (become.stderr, sys.stderr)):
            if path:
                stream.flush()
                with open(path, "ab") as file:
                    os.dup2(file.fileno(), stream.fileno())


def _call(main: Callable[[], object], stay: Stay) -> None:
    try:
        main()
    except BaseException as error:  # handed to the run that it leaves, and to the caller
        stay.hold(error)
        raise


def _let_go(error: BaseException | None) -> None:
    """Of all that the frames of `main` hold, also where somebody keeps the exceptions that came out of it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        following = error.__context__
        error.__traceback__ = error.__context__ = error.__cause__ = None
        error = following


def _asked_to_stop(number: int, code: int) -> SystemExit:
    say(
        f"lastwords: rank {os.environ['RANK']} was asked to stop ({signal.Signals(number).name}) and ends; the job "
        f"waits for it: start it again with the same environment; exit code {code}"
    )
    return SystemExit(code)


def _without_launcher(saved_step: int = 0, code: int = EXIT_NOT_SAVED, *, told: bool = False) -> SystemExit:
    """The launcher has ended, and this process is not in `main`, which it can never enter. told: and has said so."""
    if not told:
        rank, saved = os.environ.get("RANK", ""), f"step {saved_step} is saved, " if saved_step else ""
        say(
            f"lastwords: {f'rank {rank}' if rank.isdecimal() else 'a spare'}: the launcher has ended, so this process "
            f"cannot enter main(); {saved}start the job again; exit code {code}"
        )
    return SystemExit(code)
