"""The launcher's end of its fork server: starts it, asks it for the processes of a generation, and replaces it."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lastwords.clock import OwnTime, mono_s
from lastwords.errors import is_shortage
from lastwords.launcher.fork_server import BOOT, OF_RANKS, THREAD_VARIABLES
from lastwords.launcher.link import LINE_BYTES_MAX, Connection
from lastwords.launcher.processes import PAUSE_S, kill_group
from lastwords.launcher.protocol import Fork, Forked, Forks, Importing, Made, Preload, as_text, read, to_message
from lastwords.liveness.process_id import is_stopped

_log = logging.getLogger(__name__)

HUNG_S = 30.0
"""It forks thousands of processes in that time: one that says nothing is stopped, or hangs."""

LOOK_S = OwnTime.LOOK_INTERVAL_S

SHORT_S = 60.0
"""How long a shortage may last while processes are wanted."""

END_S = 1.0
"""How long those who fork may take to do so, and to end."""

DEATHS_MAX = 3
"""Servers in a row that may end before they have served."""


HASH_SEED = "1"
"""Sets of strings have one order in all ranks of a job, and in all that resume it. Not 0, which a script can see in
sys.flags.
"""

NOT_AHEAD = {"-h", "--help", "--no-python", "--no_python"}
"""Arguments of launchers that may need no fork server."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """A fork server that imports torch while its launcher does, which then says what else. python: its interpreter."""

    python: str
    process: subprocess.Popen[bytes]
    link: socket.socket

    def end(self) -> None:
        """If nobody has taken it."""
        self.link.close()
        self.process.kill()
        self.process.wait()


def ahead(python: str, environment: Mapping[str, str] = os.environ) -> Ahead:
    """Dies with the thread that calls this. OSError."""
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [python, "-u", "-c", BOOT, str(theirs.fileno()), str(os.getpid())],
            env=_of_server(environment),
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return Ahead(python, process, ours)


@contextlib.contextmanager
def begun_for(argv: Sequence[str]) -> Iterator[Ahead | None]:
    """For a launcher with these arguments; None where it may need none, or where one can be started only later."""
    begun = None
    if not NOT_AHEAD & {*argv}:
        with contextlib.suppress(OSError):
            begun = ahead(os.environ.get("PYTHON_EXEC", sys.executable))
    try:
        yield begun
    finally:
        if begun is not None:
            begun.end()


def _of_server(environment: Mapping[str, str]) -> dict[str, str]:
    made = {"PYTHONHASHSEED": HASH_SEED, **environment, **dict.fromkeys(THREAD_VARIABLES, "1")}
    made["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return {name: value for name, value in made.items() if name not in OF_RANKS}


class ForkServer:
    """Of one host. python: its interpreter. environment: of all ranks, without what differs between them.

    preload: modules that are imported before any fork, once for the life of the job; path: where those of the script
    are. made: is told of the ranks that were, with their processes. failed: is told why no process can be forked any
    more; impossible: why none can, however often that is tried. Thread of the selector; the server dies with it.
    """

    def __init__(
        self,
        python: str,
        environment: Mapping[str, str],
        selector: selectors.BaseSelector,
        preload: Sequence[str] = (),
        path: str = "",
    ) -> None:
        self._python, self._selector = python, selector
        self._environment = _of_server(environment)
        self._preload, self._path = [*preload], path
        self._left_out: list[str] = []
        self.made: Callable[[Mapping[int, int], str], None] = lambda pids, problem: None
        self.failed: Callable[[str], None] = lambda why: None
        self.impossible: Callable[[str], None] = lambda why: None
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Connection | None = None
        self._ready = False
        self._wanted: tuple[Fork, ...] = ()
        self._asked: set[int] = set()
        """Ranks of those that it has been asked for, and that it has not answered."""
        self._has_forked = False
        self._deaths = 0
        self._importing = ""
        self._own_time = OwnTime()
        self._heard_s = self._now_s

    @property
    def _now_s(self) -> float:
        """It may have been stopped together with this process."""
        return self._own_time.at(mono_s())

    @property
    def pid(self) -> int:
        """0 where there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def wants_ranks(self) -> bool:
        """And not only controllers, without which ranks train on, and which they can start themselves."""
        return any(one.rank >= 0 for one in self._wanted)

    def start(self, begun: Ahead | None = None) -> None:
        """It imports what ranks need, from now on. begun: one that does so already.

        At a shortage again when processes are wanted.
        """
        self._process = None
        try:
            self._start(begun)
        except OSError as error:
            if not is_shortage(error) or self._now_s - self._heard_s > SHORT_S:
                self._give_up(self.failed, f"no fork server can be started: {error}")

    def _start(self, begun: Ahead | None) -> None:
        if begun is None or begun.python != self._python:
            begun = ahead(self._python, self._environment)
        self._process = begun.process
        with contextlib.suppress(OSError):  # this process may have raised its own since
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
        peer = f"the fork server (pid {self.pid})"
        self._ready, self._asked = False, set()
        self._link = Connection(
            begun.link, self._selector, peer, lambda said: read(said, Importing | Made | Forked), self._hear
        )
        preload = as_text(Preload(self._environment, [self._path, *self._preload], self._left_out))
        self._tell(preload, "environment and modules of all processes")

    def fork(self, forks: Sequence[Fork]) -> None:
        """Processes for these ranks, which `made` tells of; without any, for those that are still wanted."""
        self._heard_s = self._now_s
        self._wanted += tuple(forks)
        if self._process is None:
            return self.start()
        self._ask()

    def end(self) -> None:
        """It ends; the ranks go on."""
        process, self._process, self._ready = self._process, None, False
        if process is not None:
            process.kill()
        if self._link is not None:
            deadline_mono_s = mono_s() + END_S
            while self._link.open and mono_s() < deadline_mono_s:  # ranks that are being forked are known in the end
                if not self._link.read():
                    time.sleep(PAUSE_S)
            self._link.close()
        if process is not None:
            kill_group(process.pid)  # not collected yet, so the number is still its own
            process.wait()

    def _ask(self) -> None:
        """For all that are wanted, once it has answered for those before: asked twice, it would fork a rank twice."""
        if self._ready and self._wanted and not self._asked:
            self._asked = {one.rank for one in self._wanted}
            forks = Forks([*map(as_text, self._wanted)])
            self._tell(forks, f"environment and arguments of {len(self._wanted)} processes")

    def _tell(self, what: Preload | Forks, of: str) -> None:
        assert self._link is not None
        message = to_message(what)
        if (size := len(json.dumps(message))) > LINE_BYTES_MAX:
            self.end()
            return self._give_up(self.impossible, f"{of} take {size} bytes, more than {LINE_BYTES_MAX}")
        self._link.tell(message)

    def supervise(self) -> float | None:
        """In how many seconds to look again whether it does what it was asked to; None: it has done all."""
        if not self._wanted:
            return None
        if self._process is None:
            self.start()
            return LOOK_S
        left_s = HUNG_S - (self._now_s - self._heard_s)
        if left_s <= 0 and (self._ready or is_stopped(self.pid)):
            _log.warning("the fork server (pid %d) has not answered for %g s, and is killed", self.pid, HUNG_S)
            kill_group(self.pid)
        elif left_s <= 0:
            self._heard_s = self._now_s
            what = self._importing or "what all ranks need"
            _log.warning("the fork server (pid %d) still imports %s, and no rank begins before", self.pid, what)
        return LOOK_S

    def _hear(self, said: Importing | Made | Forked | None) -> None:
        self._heard_s = self._now_s
        match said:
            case Importing(module):
                self._importing = module
            case Made(problem, module, seconds):
                self._ready, self._importing = not problem, ""
                for name, took_s in seconds.items():
                    _log.info("%s was imported in %.1f s", name, took_s)
                if problem:
                    return self._is_spoilt(problem, module)
                self._ask()
            case Forked(pids, problem, number):
                self._deaths = 0
                made = {int(rank): pid for rank, pid in pids.items()}
                self._has_forked = self._has_forked or bool(made)
                if number == errno.ENOMEM and not self._has_forked:  # as where no memory may be overcommitted
                    return self._is_spoilt(problem, "")
                self._wanted = tuple(one for one in self._wanted if one.rank not in made)
                self._asked = set() if problem else self._asked - made.keys()
                self.made(made, problem)
                if not problem:  # else it is asked again after a pause
                    self._ask()
            case None:
                self._is_gone()

    def _is_spoilt(self, problem: str, module: str) -> None:
        """By a module, without which another one is started; or by what all need."""
        self.end()
        if not module:
            return self._give_up(self.impossible, problem)
        _log.warning("%s cannot be preloaded, and is left to the script: %s", module, problem)
        self._preload.remove(module)
        self._left_out.append(module)
        self.start()

    def _is_gone(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        kill_group(process.pid)  # it may have closed its socket alone
        code = process.wait()
        module, self._importing = self._importing, ""
        if module:
            return self._is_spoilt(f"the process ends with {code}", module)
        self._deaths = 0 if self._ready and not self._wanted else self._deaths + 1
        self._ready = False
        if self._deaths >= DEATHS_MAX:
            why = f"the fork server has ended {self._deaths} times before it has served, with {code}"
            return self._give_up(self.failed, why)
        _log.warning("the fork server (pid %d) has ended with %d; another one is started", process.pid, code)
        self.start()

    def _give_up(self, tell: Callable[[str], None], why: str) -> None:
        """Ranks that run do without it: it is tried once more when others are wanted."""
        wanted, self._wanted, self._deaths = self.wants_ranks, (), 0
        if wanted:
            return tell(why)
        _log.warning("%s; another one is started when ranks are wanted", why)
