"""The processes of one host: started, watched until they end, and told what the head of the job orders."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import selectors
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lastwords.clock import mono_s
from lastwords.errors import UnavailableError, is_shortage
from lastwords.launcher.events import (
    Awaited,
    Effect,
    End,
    Ended,
    Enter,
    Event,
    Guarded,
    Kill,
    Leaving,
    Look,
    Lost,
    Ready,
    Stop,
    Stopped,
)
from lastwords.launcher.forks import Ahead, ForkServer
from lastwords.launcher.link import Complaints, Connection, Reception
from lastwords.launcher.processes import (
    RankProcess,
    RankSeat,
    children,
    collect_orphans,
    end_group,
    end_orphans,
    ended_badly,
)
from lastwords.launcher.protocol import (
    OWN,
    ControllerAnswer,
    ControllerWanted,
    Dismissed,
    Fork,
    FromRank,
    Loaded,
    RankHello,
    RankRaised,
    difference,
    read,
    to_message,
)
from lastwords.launcher.registry import Rejected
from lastwords.liveness import process_id
from lastwords.liveness.endings import OomCounts, ending_text
from lastwords.liveness.pidfd import PidWatcher
from lastwords.optim_wrapper.launch.reporter import LAUNCHER, listening, peer
from lastwords.optim_wrapper.launch.successor import ControllerWatch
from lastwords.processor.events import ProcessorOptions
from lastwords.processor.ring import Silence
from lastwords.processor.signals import ASKS

# Starts the controller again where it was killed, or is silent, and no rank of its host is left that would do so.
#
# Ranks of other hosts that still hold everything then save, and nothing is lost. As long as ranks of this host live,
# it is their turn first.

AGAIN_S = 1.0
"""Before another try where no thread can be started."""


class Standby:
    """For one host, and one controller after the other. One thread.

    Raises UnavailableError if it lacks descriptors, or no thread can be started.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._ranks: set[int] = set()
        self._watch: ControllerWatch | None = None
        self._pids = PidWatcher()
        self._pids.start()

    def controlled(self, rank: int, path: Path) -> None:
        """A rank of this host has a controller, which keeps its state in `path`, on this host."""
        if path != self._path:
            self._forget()
            self._path = path
            self._watch = ControllerWatch(
                "the launcher",
                path,
                self._pids.add,
                lambda: len(self._ranks),
                lambda: self._path == path,
                Silence(ProcessorOptions()),
                lambda: not self._ranks,
            )
            self._start(self._watch)
        self._ranks.add(rank)

    def ended(self, rank: int) -> None:
        """The process of this rank has ended."""
        self._ranks.discard(rank)

    def end(self) -> None:
        """No controller is started any more; one that is there ends with its job."""
        self._forget()
        self._pids.stop()

    def _start(self, watch: ControllerWatch) -> None:
        try:
            watch.start(patiently=False)
        except UnavailableError:
            self._pids.later(AGAIN_S, lambda: self._start(watch))

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._path = self._watch = None
        self._ranks.clear()


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HowLeft:
    """How the ranks of a host have ended. codes: None of a process that has not. step: the newest that one of them has
    said to be saved, at any time; 0 if none. record: where the incidents of the job are noted. ended: the newest step
    that one of them had ended.
    """

    codes: Mapping[int, int | None]
    step: int
    record: Path | None
    ended: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """What ranks run. python: that of the fork server; "": each is a process of its own. threads: of each pool.

    preload: modules that are imported before any rank is forked. dies_with_launcher: so do the ranks.
    """

    python: str
    is_module: bool
    threads: int
    preload: tuple[str, ...] = ()
    dies_with_launcher: bool = False

    def path_of(self, seats: Mapping[int, RankSeat]) -> str:
        """Where the script's own modules are."""
        args = next(iter(seats.values())).args
        return os.getcwd() if self.is_module or len(args) < 2 else os.path.dirname(os.path.realpath(str(args[1])))


SHORTAGE_PAUSE_S = 0.5
SHORTAGE_TRIES_MAX = 120
"""What cannot be done for lack of them is tried again after each pause, so often."""

ABSENT_LOOKS_MAX = 10
"""For a script that is not there, after each such pause."""

COLLECT_S = 10.0
"""Between two looks for orphans that have ended."""

CHANGED = "{} has been changed since it was loaded, and a job does not go on with another version of its program"


class Host:
    """Belongs to the thread that runs `selector`, whose keys' data are functions to call.

    seats: by rank. report: takes what happens to this host's ranks; `obey` is the way back. begun: a fork server that
    has been started already.
    """

    def __init__(
        self,
        seats: Mapping[int, RankSeat],
        program: Program,
        selector: selectors.BaseSelector,
        report: Callable[[Event], None],
        begun: Ahead | None = None,
    ) -> None:
        self.result: Stop | None = None
        self.failures: dict[int, tuple[int, Ended]] = {}
        """Of the ranks whose processes have ended badly by themselves in this generation: pid, and how."""
        self.seats = seats
        self.address = ""
        """Of rank 0's host, where it is another one than that of the store."""
        self._program = program
        self._raised: dict[int, RankRaised] = {}
        """What they have said before their end."""
        self._asked: set[int] = set()
        """Processes that were told to end, from here."""
        self._left: set[int] = set()
        """And those that were told by their controller, maybe after an exception of their own."""
        self._to_signal: dict[int, int] = {}
        """Ranks whose processes are told so as soon as they are there, and by which signal."""
        self._links: dict[int, Connection] = {}
        self._complaints = Complaints()
        self._standby = Standby()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._said: set[str] = set()
        self._saved_step, self._ended_step, self._record = 0, 0, ""
        self._files = _ProgramFiles(seats, program)
        self._sessions: set[int] = set()
        self._before = {*children()}
        """Processes that this one had before it had any rank: of a shell, say, that has become this launcher."""
        self._tries = 0
        self._controllers: dict[int, Callable[[int | None], None]] = {}
        """Tells the ranks that have asked for one; by what it has in place of a rank."""
        self._served: set[int] = set()
        """Controllers of this generation: how one has ended is seen as long as nobody has collected it."""
        self._forking: tuple[Mapping[str, str], int] | None = None
        """What is the same in all forks of this generation, and the step that was saved."""
        self._selector = selector
        self._report = report
        self._server, self._name = listening(len(seats))
        """Where the ranks of this host come to."""
        self._server.setblocking(False)
        self._reception = Reception(self._server)
        common = {**os.environ, **_common([seat.env for seat in seats.values()])}
        self._forks = ForkServer(program.python, common, selector, program.preload, program.path_of(seats))
        self._begun = begun
        self._forks.made, self._forks.impossible = self._made, self._cannot_fork
        self._forks.failed = lambda why: self._lost(f"no rank can be forked: {why}")

    def begin(self) -> None:
        """Processes can be started from now on."""
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        if self._program.python:
            self._forks.start(self._begun)
        for rank in self.seats:
            self._report(Ready(rank))
        self._collect_orphans()

    @property
    def due_in_s(self) -> float | None:
        """When `tick` is wanted."""
        return max(0.0, min(due_s for due_s, _ in self._later) - mono_s()) if self._later else None

    def tick(self) -> None:
        now_s = mono_s()
        due = [act for due_s, act in self._later if due_s <= now_s]
        self._later = [one for one in self._later if one[0] > now_s]
        for act in due:
            act()

    def end(self) -> None:
        """The fork server ends; ranks go on."""
        self._forks.end()
        for link in self._links.values():
            link.tell(to_message(Dismissed()))
            link.hang_up()
        self._standby.end()
        self._server.close()

    def left(self) -> HowLeft:
        """How the ranks have ended that were there at the `end`. Once, when they have."""
        self._report = lambda event: None  # nobody is replaced any more
        for link in self._links.values():
            while link.read():
                pass
            link.close()
        codes = {rank: seat.proc.returncode for rank, seat in self.seats.items() if seat.proc.pid}
        return HowLeft(codes, self._saved_step, Path(self._record) if self._record else None, self._ended_step)

    def obey(self, effect: Effect) -> None:
        """An order of the head of the job."""
        match effect:
            case Enter():
                self._enter(effect)
            case End(rank):
                self._end(rank, signal.SIGTERM)
            case Kill(rank, why):
                _log.warning("rank %d is killed: %s", rank, why)
                self._end(rank, signal.SIGKILL)
            case Awaited(rank, what, seconds):
                pid = self.seats[rank].proc.pid
                stopped = f" and is stopped (`kill -CONT {pid}` lets it go on)" if process_id.is_stopped(pid) else ""
                end = "" if seconds is None else f", and it is killed in {seconds:.0f} s"
                _log.warning("rank %d (pid %d) %s%s; all others wait for it%s", rank, pid, what, stopped, end)
            case Look(rank):
                if process_id.is_stopped(self.seats[rank].proc.pid):
                    self._report(Stopped(rank))
            case Stop():
                self.result = effect

    def signal_all(self, number: int) -> None:
        """Pass a signal on to the ranks of this host. Any thread. One that asks for a checkpoint would end those that
        are not protected yet, and is not for them."""
        for rank, seat in self.seats.items():
            if seat.proc.returncode is not None:
                continue
            if number == ASKS and not process_id.is_handled(seat.proc.pid, number):
                self._say_once(f"rank {rank} does not handle {ASKS.name} yet, and does not get it")
                continue
            self._signal(rank, number)

    def _end(self, rank: int, number: int) -> None:
        process = self.seats[rank].proc
        if process.returncode is not None:  # it has ended, or is being forked
            self._to_signal[rank] = number
            return
        self._asked.add(process.pid)
        self._signal(rank, number)

    def _signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.seats[rank].proc.pid, number)  # a method of Popen's would collect it, unseen

    # ------------------------------------------------------------------ a generation

    def _enter(self, order: Enter) -> None:
        self._clear_up()
        self.failures.clear()
        self._asked.clear()
        self._left.clear()
        self._to_signal.clear()
        self._tries = 0
        self._begin_generation(order)

    def _begin_generation(self, order: Enter, looks: int = 1) -> None:
        """Once the script is there: while it is replaced, or its file system is slow, it may not be for a moment."""
        if (absent := self._files.absent) is not None:
            if looks > ABSENT_LOOKS_MAX:
                return self._lost(f"{absent} is not there any more, so no rank can be started")
            self._say_once(
                f"{absent} is not there; it is waited for, {ABSENT_LOOKS_MAX * SHORTAGE_PAUSE_S:g} s at most"
            )
            self._later.append((mono_s() + SHORTAGE_PAUSE_S, lambda: self._begin_generation(order, looks + 1)))
            return
        if (changed := self._files.changed) is not None:
            return self._report(Lost(CHANGED.format(changed)))
        more = {
            "TORCHELASTIC_RESTART_COUNT": str(order.generation),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_PORT": str(order.port),
        }
        for seat in self.seats.values():
            error_file = Path(seat.env.get("TORCHELASTIC_ERROR_FILE", ""))
            try:
                if error_file.is_file():  # and not /dev/null, where there is no directory for logs
                    error_file.unlink()
            except OSError as error:
                self._say_once(f"an older failure may be shown for a newer one, since it cannot be removed: {error}")
        if self._program.python:
            self._forking = more, order.step
            self._forks.fork([self._fork(rank, seat, more, order.step) for rank, seat in self.seats.items()])
            return self._look_at_forks()
        self._spawn_all(more, order.step)

    def _look_at_forks(self) -> None:
        if (again_s := self._forks.supervise()) is not None:
            self._later.append((mono_s() + again_s, self._look_at_forks))

    def _spawn_all(self, more: Mapping[str, str], step: int) -> None:
        environment = {**more, LAUNCHER: f"{step} {self._name}"}
        for rank, seat in self.seats.items():
            self._try(f"no process can be started for rank {rank}", partial(self._spawn, rank, seat, environment))

    def _cannot_fork(self, why: str) -> None:
        """However often it is tried: with LD_PRELOAD and the like a bare interpreter has threads already."""
        if self._sessions:  # some are in this generation
            return self._forks.failed(why)
        _log.warning("no rank can be forked, so each is a new process, which takes seconds after a failure: %s", why)
        self._program = replace(self._program, python="")
        if self._forking is not None:
            self._spawn_all(*self._forking)

    def _fork(self, rank: int, seat: RankSeat, more: Mapping[str, str], step: int) -> Fork:
        # torch's own: -u, and perhaps -m
        argv = [str(one) for one in seat.args[2 if self._program.is_module else 1 :]]
        environment = {**os.environ, **seat.env, **more}
        return Fork(
            rank, environment, argv, self._program.is_module, seat.stdout, seat.stderr, self._program.threads,
            self._name, step, self.address, os.getpid() if self._program.dies_with_launcher else 0,
            seat.cpus,
        )  # fmt: skip

    def _spawn(self, rank: int, seat: RankSeat, more: dict[str, str]) -> None:
        seat.spawn(more)
        self._watch(rank)

    def _made(self, pids: Mapping[int, int], problem: str) -> None:
        """Forks of the fork server; problem: why there are not more of them."""
        for rank, pid in pids.items():
            if rank in self._controllers:
                self._served.add(pid)
                self._controllers.pop(rank)(pid)
                continue
            self.seats[rank].proc = RankProcess(pid)
            self._watch(rank)
        if not problem:
            return
        self._tries += 1
        if self._tries > SHORTAGE_TRIES_MAX and self._forks.wants_ranks:
            return self._lost(f"no rank can be forked: {problem}")
        self._say_once(
            f"not all ranks can be forked: {problem}; it is tried again for {SHORTAGE_TRIES_MAX * SHORTAGE_PAUSE_S:g} s"
        )
        self._later.append((mono_s() + SHORTAGE_PAUSE_S, lambda: self._forks.fork(())))

    def _lost(self, why: str) -> None:
        self._report(Lost(why))

    def _clear_up(self) -> None:
        """What ranks of the generation before have left behind would meet those of the next one."""
        for pid, name in end_orphans(self._sessions, {*self._own, *self._served}):
            if self._forks.supervise() is None:  # else it may be a fork that is not known yet
                self._say_once(f"process {pid} ({name}) has outlived the rank that started it, and goes on")
        self._sessions.clear()
        self._served.clear()

    def _collect_orphans(self) -> None:
        if self._forks.supervise() is None:  # else a fork may have ended that is not known yet
            collect_orphans({*self._own, *self._served})
        self._later.append((mono_s() + COLLECT_S, self._collect_orphans))

    @property
    def _own(self) -> set[int]:
        return {*self._before, self._forks.pid, *(seat.proc.pid for seat in self.seats.values())}

    # ------------------------------------------------------------------ ranks

    def _watch(self, rank: int) -> None:
        process = self.seats[rank].proc
        self._sessions.add(process.pid)
        counts = OomCounts.around(process.pid)
        before = counts.read()

        def ended() -> None:
            if ended_badly(process.pid):
                # Not collected yet, so the number of its process group is still its own. A loader's worker of a rank
                # that died while it started it would wait for ever: torch asks for its parent a moment too late.
                end_group(process.pid)
            self._accept()
            code = process.wait()
            self._standby.ended(rank)
            link = self._links.pop(rank, None)
            if link is not None:
                while link.read():  # that its loop was over, say: its end may be seen first
                    pass
                link.close()
            said = self._raised.pop(rank, RankRaised("", lasting=False))
            event = Ended(rank, code, ending_text(code, before, counts.read()), said.error, said.lasting)
            if code and process.pid not in self._asked and (said.error or process.pid not in self._left):
                _log.warning("rank %d (pid %d) ended with %d (%s)", rank, process.pid, code, event.words)
                self.failures.setdefault(rank, (process.pid, event))
            self._report(event)

        def watch() -> None:
            pidfd = os.pidfd_open(process.pid)

            def once() -> None:
                self._selector.unregister(pidfd)
                os.close(pidfd)
                self._try(f"the processes of rank {rank} cannot be looked for", ended)

            self._selector.register(pidfd, selectors.EVENT_READ, once)

        self._try(f"process {process.pid} cannot be watched", watch)
        if rank in self._to_signal:
            self._end(rank, self._to_signal[rank])

    def _try(self, failure: str, act: Callable[[], None], tries: int = 1) -> None:
        """`act`, once more after a pause where something is short. The job ends if it is so all the time."""
        try:
            act()
        except OSError as error:
            if not is_shortage(error) or tries > SHORTAGE_TRIES_MAX:
                return self._lost(f"{failure}: {error}")
            self._say_once(f"{failure}: {error}; it is tried again for {SHORTAGE_TRIES_MAX * SHORTAGE_PAUSE_S:g} s")
            self._later.append((mono_s() + SHORTAGE_PAUSE_S, lambda: self._try(failure, act, tries + 1)))

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning("%s", what)

    def _accept(self) -> None:
        """All that have come: one that ends at once may not have been met, and can only be as long as it is there."""
        while (taken := self._reception.accept()) is not None:
            self._take(taken[0])

    def _take(self, link: socket.socket) -> None:
        pid, uid = peer(link)
        connection = Connection(
            link, self._selector, f"process {pid}",
            lambda message: read(message, RankHello | FromRank, connection.rank),
            lambda report: self._hear(connection, report), self._complaints,
        )  # fmt: skip
        if uid not in (os.geteuid(), 0):
            self._complaints.tell(f"user {uid}", "has come to the socket of this launcher's ranks, and is not heard")
            return connection.close()
        connection.read()

    def _hear(self, link: Connection, report: RankHello | FromRank | None) -> None:
        match report:
            case RankHello():
                self._meet(link, report)
            case None:
                pass  # how a process ends is told by its pidfd
            case _ if link.rank == OWN:
                pass
            case RankRaised():
                self._raised[link.rank] = report
            case Loaded(files):
                self._files.add(files)
            case ControllerWanted():
                self._fork_controller(link, report)
            case _:
                match report:
                    case Guarded(rank, path) if path:
                        self._standby.controlled(rank, Path(path))
                    case Leaving(rank, step, record, ended):
                        self._left.add(self.seats[rank].proc.pid)
                        self._saved_step = max(self._saved_step, step)
                        self._ended_step = max(self._ended_step, ended)
                        self._record = record or self._record
                self._report(report)

    def _meet(self, link: Connection, hello: RankHello) -> None:
        """A process introduces itself. Each one that was started leads a session, also where a shell is around it.

        What is left of a process of an earlier generation is not heard.
        """
        try:
            leader = os.getsid(hello.pid)
        except OSError:
            return
        rank = next((rank for rank, seat in self.seats.items() if seat.proc.pid == leader), None)
        if rank is None:
            return
        name = f"rank {rank} (pid {hello.pid})"
        if (wrong := difference(hello.version)) is not None:
            link.tell(to_message(Rejected(f"{name} {wrong}")))
            link.close()
            return self._lost(f"{name} {wrong}")
        link.let_in(name)
        link.rank = rank
        self._links[rank] = link
        self._raised.pop(rank, None)  # of one before it in the same shell, which tries again

    def _fork_controller(self, link: Connection, wanted: ControllerWanted) -> None:
        def answer(pid: int | None) -> None:
            link.tell(to_message(ControllerAnswer(wanted.asked, pid)))

        if not self._program.python:
            return answer(None)
        number, log = min(self._controllers, default=0) - 1, wanted.log
        self._controllers[number] = answer
        self._forks.fork([Fork(number, wanted.environment, wanted.arguments, False, log, log, 1, "", 0, "", 0)])


class _ProgramFiles:
    """What the program consists of: the script from the start on, the rest since a rank has told of it."""

    def __init__(self, seats: Mapping[int, RankSeat], program: Program) -> None:
        args = next(iter(seats.values())).args
        self._script = str(args[1]) if program.python and not program.is_module else ""
        self._known: dict[str, tuple[object, bytes]] = {}
        self.add([self._script])

    def add(self, paths: Sequence[str]) -> None:
        """Each counts as it is when it is added first."""
        for path in {*paths} - {*self._known}:
            with contextlib.suppress(OSError):  # of none that can be read: the ranks will say so
                self._known[path] = _stamp(path), _digest(path)

    @property
    def absent(self) -> str | None:
        """The script, where it has been there. Without it no rank could say so itself."""
        try:
            if self._script in self._known:
                _stamp(self._script)
        except OSError:
            return self._script
        return None

    @property
    def changed(self) -> str | None:
        """One that has other contents now. A module that is gone may have been made by a rank."""
        for path, (stamp, digest) in self._known.items():
            with contextlib.suppress(OSError):
                if _stamp(path) != stamp and _digest(path) != digest:
                    return path
        return None


def _stamp(path: str) -> object:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _digest(path: str) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()


def _common(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What is the same for all ranks of this host."""
    first, *others = environments
    return {name: value for name, value in first.items() if all(one.get(name) == value for one in others)}
