"""The controller's shell: sessions, host watch, storage and clock around the pure `ControllerCore`.

One asyncio loop is the only thread that touches the core. Whatever can block runs elsewhere and comes back through
`call_soon_threadsafe`: the host watch's threads (a death has to reach the core well within a millisecond), the
storage threads, and the log's queue (set up in `__main__`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
from collections.abc import Callable, Iterable, Sequence

from lastwords import clock, codec, threads
from lastwords.controller import events
from lastwords.controller.core_api import Core
from lastwords.controller.detection import CERTAIN
from lastwords.controller.events import Effect, Event, State
from lastwords.controller.handover import RunFile
from lastwords.controller.neighbours import Neighbours
from lastwords.controller.roster import Roster
from lastwords.controller.sessions import PeerSession, SessionService, connections_max
from lastwords.controller.spec import ControllerSpec
from lastwords.controller.state_file import StateFile
from lastwords.controller.storage import StorageJobs
from lastwords.controller.telling import Telling
from lastwords.controller.timeline import Timeline, recorded_exit, sentence
from lastwords.errors import LastWordsError, UnavailableError
from lastwords.liveness import paths, process_id
from lastwords.state import ControllerState
from lastwords.transport import Keepalive, grpc, host_port, server_options, start_of
from lastwords.vocabulary import DeathSource, Goodbye, Hello, PeerDied, Report, SaveProgress

_log = logging.getLogger(__name__)

HOUSEKEEPING_INTERVAL_S = 0.2
"""How often the run file is brought up to date, the starter is looked after, and a sign of life is left."""

STRAYS_LOGGED = 3
"""A refused process that goes on talking is mentioned this often."""

STOP_GRACE_S = 1.0
"""What is left to say gets this long; the core has waited for the sessions to end before it stops."""

STORAGE_GRACE_S = 30.0
"""Unfinished files of gigabytes take their time to be removed; what is left then is removed by the next job."""

_MAY_END_WHEN_EMPTY = (State.REGISTERING, State.EXITING, State.RELEASING, State.REFUSING)


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
        core: Core,
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
        self._roster = Roster(spec.world_size)
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
        self._feed((events.Tick(),))
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
        if self._roster.is_untouched and ticks % 5 == 4 and self._spec.starter_pid and not self._starter_lives():
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
        return self._roster.live or int(self._roster.is_untouched and self._starter_lives())

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
            self._roster.hear(report, now_s)
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
            self._roster.bind(session, hello, now_s)
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
        if self._roster.bury(rank):
            self._timeline.note("died", known_mono_s, rank=rank, source=source.name, **facts)

    def _has_time(self) -> bool:
        """Whether nobody waits for the disk, or for the end of this process: there is no incident. Any thread."""
        released = self._core.outcome is not None and self._core.outcome.kind is events.OutcomeKind.RELEASED
        return self._core.state is State.WATCHING or released

    def _note_ending(self, rank: int, how: str, now_s: float) -> None:
        if how and self._roster.explain(rank):
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
                case events.StartVerify():
                    self._storage.verify(effect)
                case events.StartPublish():
                    self._storage.publish(effect)
                case events.Discard():
                    self._storage.discard(effect)
                case events.Keep():
                    self._storage.keep(effect)
                case events.LookForNewest():
                    self._storage.look_for_newest(effect)
                case events.Prune():
                    self._storage.prune(effect)
                case events.Remember():
                    if self._state_file is not None:
                        self._state_file.write(effect)
                case events.Log(level=level, text=text):
                    _log.log(level, "%s", " | ".join(text.splitlines()))
                case events.Stop(reason=reason):
                    self.stop(reason)

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
        self._feed((events.Tick(),))

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
                ranks=self._roster.views(now_s, self._core.slower) if with_ranks else (),
                incidents=str(self._spec.incidents_path),
                open=self._timeline.under_way(now_s),
            )
        )
