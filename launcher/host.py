"""The processes of one host: started, watched until they end, and told what the head of the job orders."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastwords.checkpoint.codec import from_json
from lastwords.clock import mono_s
from lastwords.controller import launch as controller_launch
from lastwords.errors import FormatError, is_shortage
from lastwords.launcher.events import (
    NOT_LEFT,
    Abandon,
    Awaited,
    Effect,
    Ended,
    Enter,
    Event,
    Imported,
    Kill,
    Look,
    Lost,
    Start,
    Stop,
    Stopped,
    Updated,
    Waiting,
)
from lastwords.launcher.link import Complaints, Connection, Inbox
from lastwords.launcher.processes import Controllers, Process, ended_badly, kill_group
from lastwords.launcher.protocol import (
    OWN,
    Become,
    Controlled,
    ControllerAnswer,
    ControllerWanted,
    Dismissed,
    Done,
    Entry,
    Hello,
    Order,
    Raised,
    Ready,
    Report,
    difference,
    report_of,
    to_worker,
)
from lastwords.launcher.registry import Refused
from lastwords.launcher.roster import OWN_LEAVE_S
from lastwords.launcher.spares import RESTOCK_S, Spare, Spares
from lastwords.launcher.standby import Standby
from lastwords.launcher.versions import Ask
from lastwords.liveness import process_id
from lastwords.liveness.endings import ending_text
from lastwords.liveness.oom_counts import OomCounts

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """How a process has ended badly. error: what has left its `main`; "" where nothing is known to."""

    pid: int
    code: int
    error: str


@dataclass(frozen=True, slots=True)
class Left:
    """How the ranks of a host have ended. codes: None of a process that has not. step: the newest that one of them has
    said to be saved, at any time; 0 if none. record: where the incidents of the job are noted.
    """

    codes: Mapping[int, int | None]
    step: int
    record: Path | None


SHORTAGE_PAUSE_S = 0.5
SHORTAGE_TRIES_MAX = 120
"""What cannot be done for lack of them is tried again after each pause, so often."""

RESTOCK_AFTER_UPDATE_S = 0.3
"""The same from the first update of a rank on this host: the others are about to make theirs."""


class Host:
    """Belongs to the thread that runs `selector`, whose keys' data are functions to call.

    server: where the workers come to, a Unix socket in a directory of its own, which is removed in the end. context:
    torch's, of the processes that were started first. report: takes what happens to this host's ranks; `obey` is the
    way back.
    """

    def __init__(
        self,
        server: socket.socket,
        context: Any,
        spares: int,
        selector: selectors.BaseSelector,
        report: Callable[[Event], None],
    ) -> None:
        self.result: Stop | None = None
        self.failures: dict[int, Failure] = {}
        """Of the ranks whose processes have ended badly by themselves since all entered `main`, the first of each."""
        self._raised: dict[int, Raised] = {}
        """What they have said before their end."""
        self._killed: set[int] = set()
        """Processes that were ended from here."""
        self._context = context
        self._local = {int(env["RANK"]): local for local, env in context.envs.items()}
        self.processes: dict[int, subprocess.Popen[bytes]] = {
            rank: context.subprocess_handlers[local].proc for rank, local in self._local.items()
        }
        self._spares = Spares(spares, context, self._at_the_end_of, self._say_once, self._restock_in)
        self._links: dict[int, Connection] = {}
        self._complaints = Complaints()
        self._controllers = Controllers()
        self._standby = Standby()
        self._restock_due_s: float | None = None
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._said: set[str] = set()
        self._saved_step, self._record = 0, ""
        self._selector = selector
        self._report = report
        self._server = server

    def begin(self) -> None:
        """Watch what was started, and start spares."""
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        for rank in self.processes:
            self._watch(rank)
        self._spares.restock()

    @property
    def due_in_s(self) -> float | None:
        """When `tick` is wanted."""
        dues_s = [due_s for due_s, _ in self._later] + ([] if self._restock_due_s is None else [self._restock_due_s])
        return max(0.0, min(dues_s) - mono_s()) if dues_s else None

    def tick(self) -> None:
        """Time has passed."""
        if self._restock_due_s is not None and mono_s() >= self._restock_due_s:
            self._restock_due_s = None
            self._spares.restock()
            self._controllers.prepare()
        now_s = mono_s()
        due = [act for due_s, act in self._later if due_s <= now_s]
        self._later = [one for one in self._later if one[0] > now_s]
        for act in due:
            act()

    def end(self) -> None:
        """Spares and the controller that waits end; ranks go on."""
        self._spares.end()
        for rank in self.processes:
            self._tell(rank, Dismissed())
        for link in self._links.values():
            link.hang_up()
        self._controllers.end()
        self._standby.end()
        directory = Path(self._server.getsockname()).parent
        self._server.close()
        shutil.rmtree(directory, ignore_errors=True)

    def left(self) -> Left:
        """How the ranks have ended that were there at the `end`. Once, when they have."""
        self._report = lambda event: None  # nobody is replaced any more
        for link in self._links.values():
            while link.read():
                pass
            link.close()
        codes = {rank: process.returncode for rank, process in self.processes.items()}
        return Left(codes, self._saved_step, Path(self._record) if self._record else None)

    def obey(self, effect: Effect) -> None:
        """An order of the head of the job."""
        match effect:
            case Start(rank):
                self._try(f"no process can be started for rank {rank}", lambda: self._start(rank))
            case Enter(entry, port, step):
                self.failures.clear()
                for rank in self.processes:
                    self._tell(rank, Entry(entry, port, step))
            case Ask(rank) | Abandon(rank):
                self._tell(rank, effect)
            case Kill(rank, why):
                _log.warning("rank %d is killed and replaced: %s", rank, why)
                self._killed.add(self.processes[rank].pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.processes[rank].pid, signal.SIGKILL)  # Popen.kill would collect it
            case Awaited(rank, what, seconds):
                pid = self.processes[rank].pid
                stopped = f" and is stopped (`kill -CONT {pid}` lets it go on)" if process_id.is_stopped(pid) else ""
                end = "" if seconds is None else f", and it is killed and replaced in {seconds:.0f} s"
                if end and what == NOT_LEFT and not stopped:
                    end = (
                        f"; it ends itself after {OWN_LEAVE_S:g} s unless it writes files, and is killed and replaced "
                        f"in {seconds:.0f} s at the latest"
                    )
                _log.warning("rank %d (pid %d) %s%s; all others wait for it%s", rank, pid, what, stopped, end)
            case Look(rank):
                if process_id.is_stopped(self.processes[rank].pid):
                    self._report(Stopped(rank))
            case Stop():
                self.result = effect

    def signal_all(self, number: int) -> None:
        """Pass a signal on to the ranks of this host. Any thread."""
        for process in [*self.processes.values()]:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)  # Popen.send_signal would collect it, before its end is seen here

    # ------------------------------------------------------------------ workers

    def _tell(self, rank: int, order: Order) -> None:
        if rank in self._links:
            self._links[rank].tell(to_worker(order))

    def _watch(self, rank: int) -> None:
        process = self.processes[rank]
        counts = OomCounts.around(process.pid)
        before = counts.read()

        def ended() -> None:
            if ended_badly(process.pid):
                # Not collected yet, so the number of its process group is still its own. A loader's worker of a rank
                # that died while it started it would wait for ever: torch asks for its parent a moment too late.
                kill_group(process.pid)
            self._accept()
            code = process.wait()
            self._standby.ended(rank)
            link = self._links.pop(rank, None)
            if link is not None:
                while link.read():  # that its loop was over, say: its end may be seen first
                    pass
                link.close()
            said = self._raised.pop(rank, Raised("", lasting=False))
            event = Ended(rank, code, ending_text(code, before, counts.read()), said.error, said.lasting)
            if code:
                _log.warning("rank %d (pid %d) ended with %d (%s)", rank, process.pid, code, event.words)
            if code and process.pid not in self._killed:
                self.failures.setdefault(rank, Failure(process.pid, code, said.error))
            self._report(event)

        self._at_the_end_of(process, ended)

    def _at_the_end_of(self, process: subprocess.Popen[bytes], ended: Callable[[], None]) -> None:
        def watch() -> None:
            pidfd = os.pidfd_open(process.pid)

            def once() -> None:
                self._selector.unregister(pidfd)
                os.close(pidfd)
                ended()

            self._selector.register(pidfd, selectors.EVENT_READ, once)

        self._try(f"process {process.pid} cannot be watched", watch)

    def _try(self, failure: str, act: Callable[[], None], tries: int = 1) -> None:
        """`act`, once more after a pause where something is short. The job ends if it is so all the time."""
        try:
            act()
        except OSError as error:
            if not is_shortage(error) or tries > SHORTAGE_TRIES_MAX:
                return self._report(Lost(f"{failure}: {error}"))
            self._say_once(f"{failure}: {error}; it is tried again for {SHORTAGE_TRIES_MAX * SHORTAGE_PAUSE_S:g} s")
            self._later.append((mono_s() + SHORTAGE_PAUSE_S, lambda: self._try(failure, act, tries + 1)))

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning("%s", what)

    def _accept(self) -> None:
        """All that have come: one that ends at once may not have been met, and can only be as long as it is there."""
        pending = select.poll()
        pending.register(self._server, select.POLLIN)
        while self._server in self._selector.get_map() and pending.poll(0):
            self._accept_one()

    def _accept_one(self) -> None:
        self._selector.unregister(self._server)  # or a connection that cannot be taken is seen again and again
        taken: list[Connection] = []
        self._try("a process of this job cannot connect", lambda: taken.append(self._take()))
        for connection in taken:
            connection.read()

    def _take(self) -> Connection:
        link, _ = self._server.accept()
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        who = _Who()
        pid, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        inbox = Inbox(f"process {pid}", lambda message: report_of(who.known_rank, message), self._complaints)
        connection = Connection(link, self._selector, inbox, lambda report: self._hear(who, connection, report))
        return connection

    def _hear(self, who: _Who, link: Connection, report: Report | None) -> None:
        match report:
            case Hello():
                self._meet(who, link, report)
            case Ready() if who.spare is not None:
                who.spare.ready = True
            case None | Ready() | Done():
                pass  # how a process ends is told by its pidfd
            case _ if who.known_rank == OWN:
                pass
            case Raised():
                self._raised[who.known_rank] = report
            case Controlled(path):
                self._standby.controlled(who.known_rank, Path(path))
            case ControllerWanted(work, asked):
                self._hand_out(link, work, asked)
            case _:
                if isinstance(report, Updated):
                    self._restock_in(RESTOCK_AFTER_UPDATE_S)
                if isinstance(report, Waiting):
                    self._saved_step = max(self._saved_step, report.step)
                    self._record = report.record or self._record
                self._report(report)

    def _meet(self, who: _Who, link: Connection, hello: Hello) -> None:
        """A process introduces itself. Each one that was started leads a session, also where a shell is around it.

        What is left of a process that has been replaced is not heard.
        """
        try:
            leader = os.getsid(hello.pid)
        except OSError:
            return
        who.spare = self._spares.of(leader)
        who.rank = next((rank for rank, process in self.processes.items() if process.pid == leader), None)
        if who.spare is None and who.rank is None:
            return
        name = f"a spare (pid {hello.pid})" if who.rank is None else f"rank {who.rank} (pid {hello.pid})"
        if (wrong := difference(hello.version)) is not None:
            link.tell(to_worker(Refused(f"{name} {wrong}")))
            link.close()
            if who.rank is not None:
                return self._report(Lost(f"{name} {wrong}"))
            return self._complaints.tell(name, wrong)
        link.let_in(name)
        if who.spare is not None:
            who.spare.link = link
        elif who.rank is not None:
            self._links[who.rank] = link
            self._raised.pop(who.rank, None)  # of one before it in the same shell, which tries again

    def _hand_out(self, link: Connection, work: dict[str, str], asked: int) -> None:
        process = self._controllers.hand_out(work)
        self._restock_in(RESTOCK_S)
        if process is None:
            return link.tell(to_worker(ControllerAnswer(asked)))
        assert process.stdout is not None
        answers = process.stdout

        def answered() -> None:
            line = answers.readline()
            self._selector.unregister(answers)
            answers.close()
            try:
                words = from_json(line, dict[str, Any]) if line else controller_launch.ending(process)
            except FormatError:  # something else has written there
                words = {}
            link.tell(to_worker(ControllerAnswer(asked, process.pid, words)))

        self._selector.register(answers, selectors.EVENT_READ, answered)

    # ------------------------------------------------------------------ processes

    def _start(self, rank: int) -> None:
        context, local = self._context, self._local[rank]
        out, err = context.stdouts[local], context.stderrs[local]
        error_file = Path(context.error_files[local])
        if error_file.is_file():  # and not /dev/null, where there is no directory for logs
            error_file.unlink()
        spare = self._spares.take(local)
        if spare is not None:
            process, spare.rank = spare.process, rank
            assert spare.link is not None
            self._links[rank] = spare.link
            spare.link.tell(to_worker(Become(context.envs[local], out, err)))
        else:
            process = Process(
                context.entrypoint, context.args[local], context.envs[local], None, None, local,
                context._numa_options, out=out, err=err,
            )  # fmt: skip
        context.subprocess_handlers[local] = process
        self.processes[rank] = process.proc
        self._watch(rank)
        _log.warning("rank %d goes on in process %d%s", rank, process.proc.pid, " (a spare)" if spare else "")
        if spare is not None:
            self._restock_in(RESTOCK_S)
            self._report(Imported(rank))

    def _restock_in(self, seconds: float) -> None:
        """What was used is replaced, but not while the ranks need the processors to train again."""
        due_s = mono_s() + seconds
        self._restock_due_s = due_s if self._restock_due_s is None else min(due_s, self._restock_due_s)


class _Who:
    """Who is at the other end of a link."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.spare: Spare | None = None

    @property
    def known_rank(self) -> int:
        """OWN of a spare without a rank, and of whoever has not introduced itself."""
        if self.spare is not None and self.spare.rank is not None:
            self.rank, self.spare = self.spare.rank, None
        return OWN if self.rank is None else self.rank
