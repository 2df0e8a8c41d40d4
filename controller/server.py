"""The controller's shell: sessions, host watch, storage and clock around the pure `ControllerCore`.

One asyncio loop is the only thread that touches the core. Whatever can block runs elsewhere and comes back through
`call_soon_threadsafe`: the host watch's threads (a death has to reach the core well within a millisecond), the
storage threads, and the log's queue (set up in `__main__`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType

from lastwords import clock, codec, threads
from lastwords.checkpoint.system import PAUSES_S
from lastwords.controller import events, handover
from lastwords.controller.core import ControllerCore
from lastwords.controller.events import Effect, Event, JobStage
from lastwords.controller.handover import ControllerSpec, RunFile, StateFile
from lastwords.controller.membership import CERTAIN, Membership
from lastwords.controller.sessions import PeerSession, SessionService, connections_max
from lastwords.controller.storage import StorageJobs
from lastwords.controller.timeline import Telling, Timeline, recorded_exit, sentence
from lastwords.core_events import Log, Tick
from lastwords.errors import LastWordsError, UnavailableError, is_shortage
from lastwords.liveness import leftovers, paths, process_id
from lastwords.liveness.watch import HostWatch
from lastwords.state import ControllerState, RankState
from lastwords.transport import Keepalive, grpc, host_port, server_options, start_of
from lastwords.vocabulary import DeathSource, Goodbye, Hello, PeerDied, ProcessId, Report, SaveProgress

# Which session each rank's orders go to, and what people are told about a rank.


class SessionRoster:
    """The sessions that accepted ranks are bound to, and when each rank was heard of last. The loop's thread only."""

    def __init__(self) -> None:
        self._session_of: dict[int, PeerSession] = {}
        self._heard_mono_s: dict[int, float] = {}

    @property
    def connected(self) -> Collection[int]:
        """Ranks with an open session."""
        return self._session_of.keys()

    def session_of(self, rank: int) -> PeerSession | None:
        """Session that orders for `rank` go to."""
        return self._session_of.get(rank)

    def bind(self, session: PeerSession, rank: int, now_s: float) -> None:
        """A Hello was accepted: orders for its rank go here from now on; a session left without ranks is ended."""
        before = self._session_of.get(rank)
        if before is not None and before is not session:
            before.ranks.discard(rank)
            if not before.ranks:
                before.cancel()
        session.ranks.add(rank)
        self._session_of[rank] = session
        self.hear(rank, now_s)

    def unbind(self, session: PeerSession) -> list[int]:
        """A session is over; returns the ranks that have none now, sorted."""
        gone = sorted(rank for rank in session.ranks if self._session_of.get(rank) is session)
        for rank in gone:
            del self._session_of[rank]
        return gone

    def hear(self, rank: int, now_s: float) -> None:
        """A report of an accepted rank."""
        self._heard_mono_s[rank] = now_s

    def heard_s(self, rank: int, now_s: float) -> float:
        """Seconds since the last report, -1.0 if there was none."""
        return max(0.0, now_s - self._heard_mono_s[rank]) if rank in self._heard_mono_s else -1.0


def rank_states(
    job: Membership, roster: SessionRoster, now_s: float, slower: Mapping[int, float] = MappingProxyType({})
) -> Iterator[RankState]:
    """All ranks of the job as people see them. slower: by how much, those that are slower than their peers."""
    holders = Counter(unit for member in job.members.values() if not member.buried for unit in member.units)
    for rank in range(job.world_size):
        member, connected, heard_s = job.members.get(rank), rank in roster.connected, roster.heard_s(rank, now_s)
        if member is None:
            yield RankState(rank, None, None, connected, dead=False, heard_s=heard_s)
            continue
        known = rank, member.process, member.stand, connected, member.buried, heard_s
        if member.buried:
            yield RankState(*known)
            continue
        said = member.waits_at, member.stands_at, member.work_s, slower.get(rank, 0.0)
        yield RankState(*known, *said, sole_holder=any(holders[unit] == 1 for unit in member.units))


# Ranks on the controller's own host, watched by itself: their deaths are known before any connection breaks.

_log = logging.getLogger(__name__)


class Neighbours:
    """The host watch behind a thread of its own, since adding a watch opens files and may wait for a thread.

    `on_death(rank, source, known_mono_s)`, `on_watched(rank)`, `on_release(rank)` and `on_ending(rank, how)` come from
    threads of their own; methods are for the loop's thread.
    """

    def __init__(
        self,
        job: str,
        generation: int,
        on_death: Callable[[int, DeathSource, float], None],
        on_watched: Callable[[int], None],
        on_release: Callable[[int], None],
        on_ending: Callable[[int, str], None],
        nonce: str = "",
        may_be_followed: Callable[[Path], bool] = lambda directory: True,
    ) -> None:
        self._job = job
        self._generation = generation
        self._nonce = nonce
        self._may_be_followed = may_be_followed
        self._host_id = process_id.host_id()
        self._on_watched = on_watched
        self._watched: dict[int, ProcessId] = {}
        self._watch = HostWatch(on_death, on_release=on_release, on_ending=on_ending)
        self._jobs = ThreadPoolExecutor(1, thread_name_prefix="lastwords-host-watch")  # one keeps the order of calls

    def start(self) -> None:
        """Start the threads, and remove what ended jobs and killed controllers have left on this host.

        UnavailableError where there are none, after some seconds.
        """
        self._watch.start()
        with threads.starting("lastwords-host-watch"):
            self._jobs.submit(_clear_up, self._may_be_followed)

    def welcome(self, rank: int, process: ProcessId) -> None:
        """An accepted rank: watch its process if it runs on this host, unless that is done already."""
        if process.host_id == self._host_id and self._watched.get(rank) != process:
            self._watched[rank] = process
            self._jobs.submit(self._add, rank, process)

    def part_with(self, rank: int) -> None:
        """The rank's process ends with permission; its end is nobody's business."""
        if self._watched.pop(rank, None) is not None:
            self._jobs.submit(self._watch.remove, rank)

    def stop(self) -> None:
        """Stop watching. Waits for threads: not for the loop's thread."""
        self._jobs.shutdown(wait=True)
        self._watch.stop()

    def _add(self, rank: int, process: ProcessId, tried: int = 0) -> None:
        try:
            self._watch.add(rank, paths.life_path(self._job, self._generation, rank, self._nonce), process)
            self._on_watched(rank)
        except LastWordsError as error:
            if is_shortage(error):  # too many open files, say: it passes, and until then a death is found out late
                self._add_later(rank, process, min(tried, len(PAUSES_S) - 1))
            elif tried < len(PAUSES_S):
                self._add_later(rank, process, tried)
            else:
                _log.warning(
                    ("rank %d cannot be watched on this host; its death will show only as a lost connection: %s"),
                    rank,
                    error,
                )
        except Exception:  # outermost: nobody looks at what a thread pool's job raises
            _log.exception("watching rank %d failed", rank)

    def _add_later(self, rank: int, process: ProcessId, tried: int) -> None:
        def again() -> None:
            if self._watched.get(rank) == process:
                with contextlib.suppress(RuntimeError):  # it has been stopped
                    self._jobs.submit(self._add, rank, process, tried + 1)

        self._watch.later(PAUSES_S[tried], again)


def _clear_up(may_be_followed: Callable[[Path], bool]) -> None:
    try:
        handover.remove_dead_run_files()
        leftovers.remove_dead_job_dirs(may_be_followed)
    except Exception:  # outermost: nobody looks at what a thread pool's job raises
        _log.exception("cleaning up failed")


HOUSEKEEPING_INTERVAL_S = 0.2
"""How often the run file is brought up to date, the starter is looked after, and a sign of life is left."""

STRAYS_LOGGED = 3
"""A refused process that goes on talking is mentioned this often."""

STOP_GRACE_S = 1.0
"""What is left to say gets this long; the core has waited for the sessions to end before it stops."""

STORAGE_GRACE_S = 30.0
"""Unfinished files of gigabytes take their time to be removed; what is left then is removed by the next job."""

_MAY_END_WHEN_EMPTY = (JobStage.REGISTERING, JobStage.EXITING, JobStage.RELEASING, JobStage.REFUSING)


def listen(spec: ControllerSpec) -> tuple[grpc.aio.Server, ControllerSpec]:
    """A server that holds `spec`'s address from now on, and `spec` with the port that it got. Of a loop's thread.

    Raises UnavailableError if the address cannot be bound.
    """
    keepalive = Keepalive(spec.options.keepalive_time_s, spec.options.keepalive_timeout_s)
    server = grpc.aio.server(options=server_options(keepalive, connections_max(spec.world_size)))
    address = host_port(spec.ip, spec.port)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise UnavailableError(f"cannot listen on {address}: {error}") from error
    if port != (spec.port or port):
        raise UnavailableError(f"cannot listen on {address}")
    return server, dataclasses.replace(spec, port=port)


class ControllerShell:
    """Serves one job until its core stops. Build it and `run` it in one loop; `run` may be called once.

    `server` and `spec` are what `listen` gives.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        spec: ControllerSpec,
        token: str,
        core: ControllerCore,
        *,
        run_file: RunFile | None = None,
        state_file: StateFile | None = None,
        before: events.Remember | None = None,
    ) -> None:
        self._server = server
        self._spec = spec
        self._core = core
        self._run_file = run_file
        self._state_file = state_file
        self._before = before
        self._service = SessionService(token, start_of(spec.job, spec.generation), self)
        self._storage = StorageJobs(spec, self._from_thread, may_read=self._has_time, tell=Telling().tell)
        self._timeline = Timeline(spec.job, spec.generation)
        self._roster = SessionRoster()
        self._died = {rank for rank, member in core.members.members.items() if member.buried}
        self._explained: set[int] = set()
        self._starter_ticks = process_id.start_ticks(spec.starter_pid) if spec.starter_pid else None
        self._own_time = clock.OwnTime()
        self._progress = 0
        self._newest_line = ""
        self._run_file_problem = ""
        self._asked_to_end = False
        self._stop_reason: str | None = None
        self._stopped = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._began_mono_s = clock.mono_s()
        self._loop = asyncio.get_running_loop()
        self._neighbours = Neighbours(
            spec.job,
            spec.generation,
            self._on_death,
            lambda rank: self._call_soon(self._feed, (events.Watched(rank),)),
            lambda rank: self._call_soon(self._feed, (events.Watched(rank, ended=True),)),
            lambda rank, how: self._call_soon(self._on_end_known, rank, how),
            spec.nonce,
            partial(handover.state_is_needed, job=spec.job, root=spec.root),
        )

    # ------------------------------------------------------------------ life

    async def run(self, on_ready: Callable[[], None]) -> str:
        """Serve until the core stops; returns its reason. `on_ready` is called once ranks may connect."""
        with threads.starting("lastwords-clean-up"):
            await self._loop.run_in_executor(None, int)  # its thread, which waits for the end from now on
        self._neighbours.start()
        self._storage.start()
        self._service.register(self._server)
        await self._server.start()
        self._loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        _log.info(
            "controller of job %s, generation %d (process %d) serves %d ranks on %s",
            self._spec.job,
            self._spec.generation,
            os.getpid(),
            self._spec.world_size,
            host_port(self._spec.ip, self._spec.port),
        )
        self._feed((Tick(),))
        self._follow()
        self._update_run_file()
        self._storage.clear_up()
        housekeeping = self._loop.create_task(self._keep_house())
        beating = self._loop.create_task(self._beat())
        on_ready()
        try:
            await self._stopped.wait()
        finally:
            housekeeping.cancel()
            if self._timer is not None:
                self._timer.cancel()
            await self._service.end_all(STOP_GRACE_S)
            await self._server.stop(STOP_GRACE_S)
            await self._loop.run_in_executor(None, self._clean_up)
            beating.cancel()
        return self._stop_reason or ""

    def _follow(self) -> None:
        """In the place of a controller that was killed: its ranks are known, whether they live or not."""
        if self._before is None:
            return
        memory = self._before.memory
        gone = {one.rank for one in memory.gone}
        for rank, known in enumerate(self._before.members):
            if rank not in gone:
                self._neighbours.welcome(rank, known.process)
        spec, outcome = self._spec, memory.outcome
        if outcome is not None and recorded_exit(spec.incidents_path, spec.job, spec.generation) is None:
            self._timeline.reopen(memory.incident, outcome.reason, clock.mono_s(), clock.wall_ns())

    def stop(self, reason: str) -> None:
        """End `run` soon; the first reason counts."""
        if self._stop_reason is None:
            self._stop_reason = reason
            _log.info("controller ends: %s", reason)
            line = self._timeline.close(self._core.outcome, reason)
            if line is not None:
                self._record(line)
            self._stopped.set()

    def _clean_up(self) -> None:
        self._neighbours.stop()
        self._storage.release()
        self._storage.wait_idle(STORAGE_GRACE_S)
        paths.remove_job_dir(self._spec.job, self._spec.generation, self._spec.nonce)
        if self._run_file is not None:
            self._run_file.remove()

    async def _keep_house(self) -> None:
        ticks = 0
        while True:
            try:
                self._look_after(ticks)
            except Exception:  # outermost loop of a task: keep the service going
                _log.exception("housekeeping failed")
            ticks += 1
            await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)

    async def _beat(self) -> None:
        """By the loop that does everything: a controller that leaves no such sign is ended by ranks of its host."""
        while self._state_file is not None:
            self._state_file.beat()
            await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)

    def _look_after(self, ticks: int) -> None:
        self._update_run_file()
        if self._state_file is not None:
            self._state_file.write_again()
        if not self._core.members.members and ticks % 5 == 4 and self._spec.starter_pid and not self._starter_lives():
            self.stop(
                f"no rank has connected, and process {self._spec.starter_pid}, which started the controller, has ended"
            )
        self._end_if_asked()

    def _update_run_file(self) -> None:
        if self._run_file is None:
            return
        try:
            self._run_file.update(stage=self._core.state.value, live=self._live(), progress=self._progress)
        except LastWordsError as error:
            if self._run_file_problem != str(error):  # it is tried again; the same words are said once
                _log.warning("a later controller on this address will not detect this controller: %s", error)
            self._run_file_problem = str(error)

    def _starter_lives(self) -> bool:
        return self._starter_ticks is not None and process_id.runs(self._spec.starter_pid, self._starter_ticks)

    def _live(self) -> int:
        """Ranks that can be expected to go on; before the first of them, the process that started this."""
        members = self._core.members.members
        living = sum(not members[rank].buried for rank in self._roster.connected)
        return living or int(not members and self._starter_lives())

    def _on_sigterm(self) -> None:
        _log.info("received SIGTERM: the controller will end when no rank is left and no incident is open")
        self._asked_to_end = True
        self._end_if_asked()

    def _end_if_asked(self) -> None:
        may_end = self._core.state in _MAY_END_WHEN_EMPTY and not self._storage.busy
        if self._asked_to_end and may_end and self._live() == 0:
            self.stop("it received SIGTERM, and no rank is left")

    # ------------------------------------------------------------------ what comes in

    def on_reports(self, session: PeerSession, reports: Sequence[Report]) -> None:
        """Reports of ranks that said Hello in this session, and such Hellos; anything else is dropped."""
        now_s = clock.mono_s()
        for report in reports:
            if isinstance(report, Hello):
                self._take_hello(session, report, now_s)
                continue
            if self._roster.session_of(report.rank) is not session:
                session.strays += 1
                if session.strays <= STRAYS_LOGGED:
                    _log.warning(
                        "%s: dropped %s of rank %d, which is registered over another session",
                        session, type(report).__name__, report.rank,
                    )  # fmt: skip
                continue
            self._roster.hear(report.rank, now_s)
            if isinstance(report, SaveProgress):
                self._progress += 1
            elif isinstance(report, Goodbye):
                self._neighbours.part_with(report.rank)
            elif isinstance(report, PeerDied) and report.source in CERTAIN:
                self._note_death(report.dead_rank, report.source, now_s, seen_by=report.rank)
                self._note_ending(report.dead_rank, report.how, now_s)
            self._timeline.note_report(report, now_s)
            self._perform(self._ask(events.FromRank(report), now_s), now_s, session, report.rank)
        self._rearm()

    def on_closed(self, session: PeerSession) -> None:
        """A session is over: its ranks are under suspicion, unless they have said Hello in a newer one."""
        gone = self._roster.unbind(session)
        if gone and self._stop_reason is None:
            now_s = clock.mono_s()
            self._timeline.note("suspected", now_s, ranks=gone)
            self._feed(tuple(events.SessionClosed(rank) for rank in gone))

    def _take_hello(self, session: PeerSession, hello: Hello, now_s: float) -> None:
        effects = self._ask(events.FromRank(hello), now_s)
        if effects is None:
            return
        if not any(isinstance(effect, events.Reply) for effect in effects):
            self._roster.bind(session, hello.rank, now_s)
            self._neighbours.welcome(hello.rank, hello.process)
        self._perform(effects, now_s, session, hello.rank)

    def _on_died(self, rank: int, source: DeathSource, known_mono_s: float) -> None:
        self._note_death(rank, source, known_mono_s)
        self._feed((events.Died(rank, source),))

    def _on_end_known(self, rank: int, how: str) -> None:
        self._note_ending(rank, how, clock.mono_s())
        self._feed((events.EndKnown(rank, how),))

    def _note_death(self, rank: int, source: DeathSource, known_mono_s: float, **facts: int) -> None:
        """Only the first word of a death: on this host two ranks and this process watch the same one."""
        if rank in self._core.members.members and rank not in self._died:
            self._died.add(rank)
            self._timeline.note("died", known_mono_s, rank=rank, source=source.name, **facts)

    def _has_time(self) -> bool:
        """Whether nobody waits for the disk, or for the end of this process: there is no incident. Any thread."""
        released = self._core.outcome is not None and self._core.outcome.kind is events.OutcomeKind.RELEASED
        return self._core.state is JobStage.WATCHING or released

    def _note_ending(self, rank: int, how: str, now_s: float) -> None:
        if how and rank in self._died and rank not in self._explained:
            self._explained.add(rank)
            self._timeline.note("ended", now_s, rank=rank, how=how)

    def _from_thread(self, event: Event) -> None:
        """A storage thread's answer; any thread."""
        self._call_soon(self._on_storage, event)

    def _on_storage(self, event: Event) -> None:
        self._progress += 1
        self._timeline.note_storage(event, clock.mono_s())
        self._feed((event,))

    # ------------------------------------------------------------------ the core

    def _feed(self, incoming: Iterable[Event]) -> None:
        now_s = clock.mono_s()
        for event in incoming:
            self._perform(self._ask(event, now_s), now_s)
        self._rearm()

    def _ask(self, event: Event, now_s: float) -> list[Effect] | None:
        try:
            return self._core.handle(event, self._own_time.at(now_s))
        except Exception:  # outermost: one event that the core cannot digest must not end everybody's protection
            _log.exception("the controller's core failed at %s; the event is dropped", event)
            return None

    def _perform(
        self, effects: list[Effect] | None, now_s: float, session: PeerSession | None = None, rank: int = 0
    ) -> None:
        """Carry out what the core wants; `session` and `rank` are where the report came from, for a Reply."""
        for effect in effects or ():
            match effect:
                case events.Send(order=order):
                    line = self._timeline.note_order(effect.rank, order, now_s, clock.wall_ns(), self._core.outcome)
                    receiver = self._roster.session_of(effect.rank)
                    if receiver is not None:
                        receiver.push(effect.rank, order)
                    if line is not None:
                        self._record(line)
                case events.Reply(order=order):
                    assert session is not None, "only a report can be replied to"
                    session.push(rank, order)
                case events.Remember():
                    if self._state_file is not None:
                        self._state_file.write(effect)
                case Log(level=level, text=text):
                    _log.log(level, "%s", " | ".join(text.splitlines()))
                case events.EndController(reason=reason):
                    self.stop(reason)
                case _:
                    self._storage.carry_out(effect)

    def _rearm(self) -> None:
        deadline_s = None if self._stop_reason is not None else self._core.deadline_s
        look_mono_s = None if deadline_s is None else self._own_time.look_mono_s(deadline_s)
        if self._timer is not None:
            if look_mono_s is not None and self._timer.when() <= look_mono_s:
                return  # it may ring too early and is set anew then; cheaper than setting it at every report
            self._timer.cancel()
            self._timer = None
        if look_mono_s is not None:
            self._timer = self._loop.call_at(look_mono_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._feed((Tick(),))

    def _record(self, line: str) -> None:
        self._newest_line = sentence(line)
        _log.info("%s", self._newest_line)
        self._storage.record(self._spec.incidents_path, line)

    # ------------------------------------------------------------------ other threads

    def _on_death(self, rank: int, source: DeathSource, known_mono_s: float) -> None:
        """Watcher's thread."""
        self._call_soon(self._on_died, rank, source, known_mono_s)

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # the loop is closed: the controller has ended meanwhile

    # ------------------------------------------------------------------ people

    def state(self, *, with_ranks: bool) -> bytes:
        """Answer to a State call."""
        now_s = clock.mono_s()
        summary = f"{len(self._roster.connected)} of {self._spec.world_size} ranks are connected"
        if self._newest_line:
            summary += f"; {self._newest_line}"
        ranks = rank_states(self._core.members, self._roster, now_s, self._core.slower)
        return codec.state_to_bytes(
            ControllerState(
                job=self._spec.job,
                generation=self._spec.generation,
                world_size=self._spec.world_size,
                pid=os.getpid(),
                uptime_s=now_s - self._began_mono_s,
                stage=self._core.state.value,
                incident=self._core.incident,
                summary=summary,
                ranks=tuple(ranks) if with_ranks else (),
                incidents=str(self._spec.incidents_path),
                open=self._timeline.under_way(now_s),
            )
        )
