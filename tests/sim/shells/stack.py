"""One job with its shells as they are shipped: Agent, Session, saver, sessions, roster, server, storage, publish.

`Stack(draw(seed)).run()` gives a `Ledger` for `tests.sim.checkers`. Only what a rank trains, the network, the disk, the
clock and the kernel's threads are simulated; everything in between is the code that runs in a real job.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from lastwords import clock
from lastwords.checkpoint import layout, load, publish
from lastwords.checkpoint.entries import Reason
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.meta import EMPTY_UNIT, LocalMeta
from lastwords.checkpoint.part import LocalState, UnitState
from lastwords.checkpoint.system import Os
from lastwords.controller import server as controller_server
from lastwords.controller import sessions as controller_sessions
from lastwords.controller import storage as controller_storage
from lastwords.controller import takeover
from lastwords.controller.core import ControllerCore
from lastwords.controller.events import ControllerOptions, Remember
from lastwords.controller.handover import ControllerSpec, StateFile
from lastwords.errors import CheckpointError, ConfigError, GateFailedError, LastWordsError
from lastwords.optim_wrapper.launch import successor as successor_module
from lastwords.processor import agent as agent_module
from lastwords.processor import departure as departure_module
from lastwords.processor import saver as saver_module
from lastwords.processor import session as session_module
from lastwords.processor.agent import Agent
from lastwords.processor.core import ProcessorCore
from lastwords.processor.departure import EXIT_NOT_SAVED, EXIT_SAVED, Departure
from lastwords.processor.saver import Position, SaverSpec
from lastwords.processor.session import Session
from lastwords.transport import grpc, start_of
from lastwords.vocabulary import DeathSource, Hello, ProcessId, Stand
from tests.checkpoint.simulated_disk import SimulatedOs
from tests.checkpoint.states import Job as OlderJob
from tests.sim.checkers import complaints
from tests.sim.job import TORN, Job
from tests.sim.ledger import Ledger, Life, Publication, RankRecord, Written
from tests.sim.shells.controllers import Controllers
from tests.sim.shells.disk import Calls
from tests.sim.shells.following import Following
from tests.sim.shells.plan import Blow, StackPlan
from tests.sim.shells.scheduler import Gone, Process, Queue, Scheduler, Threading, Threads, Time
from tests.sim.shells.wire import Loop, Wire

HORIZON_S = 1000.0
GROUP_TIMEOUT_S = 120.0
"""Shorter than torch's, so that less virtual time has to pass in which nothing happens."""

ROOT = Path("/proc/simulated")
"""Where nothing can be made by mistake on a real disk."""

FALLBACK = Path("/proc/fallback")
NAME = "job"
ADDRESS = ("127.0.0.1", 29400)
KEEPALIVE_S = 1.8
SILENT_S = 1.5
OLDER, OLDER_STEP, AHEAD_NS = OlderJob(NAME, generation=0), 100, 9 * 10**18
"""What the job had left in its fallback directory in an earlier generation, at a step that it then went back from.
(In one directory it would make no difference: a publication is stamped later than all that it sees.)"""

WELCOME_TIMEOUT_S = 330.0
ELEMENTS = 33
STEPS_PER_EPOCH = 2


class CollectiveError(Exception):
    """A collective of the simulated training has failed."""


class Rank:
    """One simulated trainer: a process, its training thread, and the shipped shell around its core."""

    def __init__(self, stack: Stack, rank: int) -> None:
        self.stack = stack
        self.rank = rank
        self.process = Process(f"rank {rank}")
        self.record = RankRecord(reach=(0,))
        self.entered: dict[str, int] = {}
        self.box: set[int] = {0}
        self.core = ProcessorCore(rank, 1, 0)
        self.code: int | None = None

    def main(self) -> None:
        """What the process does from its start to its end."""
        code = 1
        try:
            code = self._train()
        except SystemExit as error:
            code = int(error.code or 0)
        except ConfigError as error:
            self.stack.tell(self.process.name, f"is refused: {error}")
        except Exception as error:  # outermost: what the shells raise and nobody expects is a finding
            self.stack.scheduler.crashed.append("".join(traceback.format_exception(error)))
        self.exit(code)

    def exit(self, code: int) -> None:
        """The end of the process, from any of its threads."""
        self.code = code
        self.record.life = Life.LEFT
        self.record.reach = self.reach()
        verdict = self.departure.verdict
        saved = verdict is not None and verdict.code == EXIT_SAVED
        self.record.farewell = "released" if code == 0 else "exit saved" if saved else f"exit {code}"
        if verdict is not None and "controller" in verdict.line and "lost" in verdict.line:
            self.record.farewell = "controller lost"
        self.stack.tell(self.process.name, f"ends with {code}: {verdict.line if verdict else ''}")
        self.stack.ended(self)
        self.stack.scheduler.leave()

    def reach(self) -> tuple[int, ...]:
        record = self.record
        if record.held == TORN:
            return ()
        ready = self.core.stand.phase.name == "READY"
        return (record.held, record.held + 1) if ready else (record.held,)

    def _train(self) -> int:
        job = self.stack.job
        process = job.process(self.rank)
        self.departure = Departure(self.rank)
        self.agent = agent = Agent(
            self.core,
            hello=lambda stand: Hello(self.rank, 1, job.world_size, process, job.units[self.rank], stand),
            saver=SaverSpec(self.rank, NAME, (ROOT,), Source(self)),
            departure=self.departure,
        )
        session = Session(
            f"{ADDRESS[0]}:{ADDRESS[1]}",
            "token",
            start_of(NAME, 1),
            self.rank,
            on_order=agent.on_order,
            on_up=agent.on_session_up,
            on_down=agent.on_session_down,
            on_refused=agent.on_session_refused,
            hello=agent.hello,
            jitter=random.Random(self.rank),
        )
        session.start()
        agent.start(session)
        if not agent.wait_until(lambda: self.core.welcomed, WELCOME_TIMEOUT_S):
            return 1
        if self.stack.following is not None and job.hosts[self.rank] == job.hosts[0]:
            self.stack.following.watch(self, lambda: session.up).start()
        agent.begin_loop(0, 0, 0)
        try:
            for step in range(1, job.steps + 1):
                self._step(step)
            agent.left()
        except CollectiveError as error:
            self.record.gave_up |= self.core.stand.phase.name == "READY"
            agent.raised(str(error), secondary=True)
            verdict = self.departure.verdict
            return verdict.code if verdict is not None else 1
        agent.close()
        return 0

    def _step(self, step: int) -> None:
        stack, agent = self.stack, self.agent
        stack.compute(0.01)
        if stack.raises(self.rank, step):
            stack.ledger.certain_faults += 1
            raise CollectiveError("out of memory")
        self.box.add(step)
        stack.collective(self, "reduce", step)
        if stack.job.has_gate:
            agent.ready()
            self.entered["gate"] = step
            agent.pass_gate(Gate(self, step).passed)
            agent.begin_update()
        else:
            agent.begin_update()
        self.record.held = TORN
        stack.compute(0.005)
        self.record.held = step
        agent.end_update()
        if stack.job.log_collective:
            stack.collective(self, "log", step)
        agent.end_step(self._commit)

    def _commit(self, step: int) -> None:
        self.box = {step - 1, step}
        self.record.ended = step


class Gate:
    """The gate of one step, as `Agent.pass_gate` looks at it."""

    def __init__(self, rank: Rank, step: int) -> None:
        self._rank = rank
        self._step = step

    def passed(self) -> bool:
        stack = self._rank.stack
        complete = all(other.entered.get("gate", 0) >= self._step for other in stack.ranks)
        dead = any(not other.process.lives for other in stack.ranks)
        if dead and (not complete or stack.scheduler.dice.random() < 0.3) and stack.scheduler.dice.random() < 0.1:
            raise GateFailedError("connection closed by peer")
        return complete


class Source:
    """`processor.saver.StateSource`: tensors are full of the number of the step that they are of."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def position(self, step: int) -> Position | None:
        """As a loop of one's own has it, which names a step only when it ends it."""
        named = step <= self._rank.record.ended or not self._rank.stack.plan.names_late
        return Position(*_name_of(step)) if named else None

    def unit_state(self, unit: str, step: int, stand: Stand) -> UnitState:
        record = self._rank.record
        spec = TensorSpec(layout.unit_tensor_name(unit, "model", "weight"), "F32", (ELEMENTS,))
        return UnitState(
            [(spec, lambda: np.full(ELEMENTS, record.held, np.float32).data)],
            replace(EMPTY_UNIT, hyperparameters=[{"step": record.held}]),
        )

    def local_states(self, ranks: Sequence[int], step: int) -> Mapping[int, LocalState]:
        return {rank: self._local(rank, step) for rank in ranks}

    def _local(self, rank: int, step: int) -> LocalState:
        if step not in self._rank.stack.ranks[rank].box:
            return LocalState([], exact=False, reasons=(Reason("its black box has another step"),))
        epoch, step_of_epoch = _name_of(step)
        named = step <= self._rank.stack.ranks[rank].record.ended
        after = list(_name_of(step - 1)) if step > 1 else None
        slot = {"epoch": epoch, "step": step_of_epoch} if named else {"epoch": None, "step": None, "after": after}
        return LocalState([], LocalMeta(slot={"held": step, **slot}))

    def facts(self, step: int) -> dict[str, Any]:
        return {}


def _name_of(step: int) -> tuple[int, int]:
    """Epoch and step in it: the epochs are short, so that incidents come at their ends."""
    return layout.epoch_and_step(step, STEPS_PER_EPOCH)


class Watch:
    """In place of the controller's host watch: the world tells it who has died."""

    def __init__(self, stack: Stack, *arguments: Any) -> None:
        self.on_death: Callable[[int, DeathSource, float], None]
        self.on_release: Callable[[int], None]
        self.on_death, _, self.on_release, *_ = (argument for argument in arguments if callable(argument))
        self._stack = stack

    def start(self) -> None: ...

    def welcome(self, rank: int, process: ProcessId) -> None:
        following = self._stack.following
        if following is not None:
            following.looks_after(self, rank)
        elif self._stack.ranks[rank].record.life is Life.KILLED:
            self._stack.announce(rank, self)

    def part_with(self, rank: int) -> None: ...

    def stop(self) -> None: ...


class Stack:
    """One simulation. Everything random comes from the plan's seed."""

    def __init__(self, plan: StackPlan) -> None:
        self.plan = plan
        self.job: Job = plan.job
        self.scheduler = Scheduler(random.Random(plan.seed))
        self.disk = SimulatedOs()
        self.calls = Calls(self.disk, self.scheduler, plan.slow_disk_s)
        spec = ControllerSpec(ADDRESS[0], ADDRESS[1], NAME, 1, self.job.world_size, ROOT)
        self.controllers = Controllers(self.scheduler, self.disk, spec, self.kill_process, self._answers)
        self.controller = self.controllers.new()  # the one that serves, or did
        self.served: list[Process] = []
        self.wire = Wire(self.scheduler, self.controller, plan.delay_s)
        self._spec = spec
        self.ranks = [Rank(self, rank) for rank in range(self.job.world_size)]
        self.ledger = Ledger([rank.record for rank in self.ranks])
        self.core = ControllerCore(self.job.world_size, 1, ControllerOptions())
        self.watch: Watch | None = None
        stops = any(blow.kind in ("stop_controller", "hang_controller") for blow in plan.blows)
        self.following = Following(self) if stops and not plan.followed else None
        self.keeps = stops or plan.followed  # the state of its controller, and the lock
        self.lines: list[str] = []
        self.misnamed: list[str] = []
        self.misordered: list[str] = []
        self.at_once: list[str] = []
        self.struck: set[Blow] = set()

    def complaints(self) -> list[str]:
        """What the checkers say after the run, and what they cannot see: names, and threads that crashed."""
        found = complaints(self.job, self.ledger)
        found += [f"a_name_is_never_guessed: {text}" for text in self.misnamed]
        found += [f"a_resume_takes_the_newest_step: {text}" for text in self.misordered]
        found += [f"one_controller_at_a_time: {text}" for text in self.at_once]
        return found + [f"no_thread_crashes: {text}" for text in self.scheduler.crashed]

    def tell(self, who: str, text: str) -> None:
        self.lines.append(f"{self.scheduler.now_s:10.4f} s  {who:<10}  {text}")

    # ------------------------------------------------------------------ from beginning to end

    def run(self) -> Ledger:
        """Until nothing can happen any more; the checkpoints that were published are in the ledger."""
        scheduler = self.scheduler
        with tempfile.TemporaryDirectory() as directory, self._simulated():
            self.disk.mkdir(ROOT.parent)
            self.disk.mkdir(ROOT)
            if self.plan.older_is_ahead:
                self.disk.mkdir(FALLBACK)
                facts, written = OLDER.facts(OLDER_STEP), OLDER.write(FALLBACK, OLDER_STEP, self.disk)
                publish.publish(FALLBACK, written, facts, self.disk, published_unix_ns=AHEAD_NS)
            with self.controllers.simulated(Path(directory)) if self.keeps else contextlib.nullcontext():
                scheduler.spawn(self.controller, "loop", self._begin)
                if not self.keeps:
                    self._begin_job()
                self.ledger.crossed_horizon = not scheduler.run(HORIZON_S)
        self.ledger.ended = True
        if self.following is not None:
            self.following.excuse()
        for rank in self.ranks:
            if rank.record.life is Life.ALIVE:
                rank.record.reach = rank.reach()
        self._look_at_the_disk()
        return self.ledger

    def _begin_job(self) -> None:
        for rank in self.ranks:
            self.scheduler.spawn(rank.process, "main", rank.main)
        for blow in self.plan.blows:
            self.scheduler.after(blow.at_s, lambda blow=blow: self._strike(blow))

    def _begin(self) -> None:
        """The first controller."""
        state_file = None
        if self.keeps:
            state_file = self.controllers.first()
            self._begin_job()
        self.serve(self.controller, state_file)

    def begin_anew(self, answer: Any) -> None:
        """Another one, which may find that it is not wanted. answer: for whoever has started it."""
        process = self.scheduler.current.process
        try:
            state_file, kept = self.controllers.follow(by_hand=self.plan.followed and self.plan.seed % 2 == 0)
        except LastWordsError as error:
            self.tell(process.name, f"does not serve: {error}")
            answer.error = error
            self.scheduler.leave()
        self.tell(process.name, f"takes the place of the one before: {kept.remembered}")
        answer.pid = os.getpid()
        self.serve(process, state_file, kept.remembered)

    def serve(self, process: Process, state_file: StateFile | None, before: Remember | None = None) -> None:
        """The main thread of a controller's process."""
        loop = Loop(self.scheduler)
        self.controller = self.wire.controller = process
        self.core = ControllerCore(self.job.world_size, 1, ControllerOptions(), before)
        self.at_once += [f"{other.name} lives when {process.name} serves" for other in self.served if other.lives]
        self.served.append(process)
        self.ledger.controller_killed = False
        try:
            reason = loop.run_until_complete(self._shell(self.core, state_file, before))
            self.tell(process.name, f"stops: {reason}")
            if process is self.controller:
                self.ledger.controller_stopped = True
        finally:
            loop.abandon()
        if self.keeps:
            self.controllers.clear_up()
        self._part(process)
        self.scheduler.leave()

    async def _shell(self, core: ControllerCore, state_file: StateFile | None, before: Remember | None) -> str:
        listening = controller_server.listen(self._spec)
        shell = controller_server.ControllerShell(*listening, "token", core, state_file=state_file, before=before)
        self.watch = shell._neighbours  # type: ignore[assignment]
        return await shell.run(lambda: None)

    def _part(self, process: Process) -> None:
        """The sessions of a controller whose process has ended break."""
        for rank in self.ranks:
            if self.wire.serves(process, rank.rank):
                self.wire.cut(rank.rank, 0.001, 0.001)

    def _answers(self, process: Process) -> bool:
        """Whether a controller would answer a question now."""
        return not process.stopped and self.wire.is_served_by(process)

    @contextlib.contextmanager
    def _simulated(self) -> Iterator[None]:
        threading, threads, queue, time = (kind(self.scheduler) for kind in (Threading, Threads, Queue, Time))
        with contextlib.ExitStack() as stack:
            if self.following is not None:
                stack.enter_context(mock.patch.object(successor_module, "start_successor", self.following.start))
                stack.enter_context(mock.patch.object(successor_module, "threading", threading))
                stack.enter_context(mock.patch.object(successor_module, "threads", threads))
                stack.enter_context(mock.patch.object(successor_module, "_log", _Lines(self)))
            for module in (agent_module, departure_module, saver_module, session_module, controller_storage):
                stack.enter_context(mock.patch.object(module, "threading", threading))
                stack.enter_context(mock.patch.object(module, "threads", threads))
            stack.enter_context(mock.patch.object(agent_module, "time", time))
            stack.enter_context(mock.patch.object(controller_storage, "queue", queue))
            stack.enter_context(mock.patch.object(controller_storage, "time", time))
            stack.enter_context(mock.patch.object(controller_storage, "_append"))
            ends = types.SimpleNamespace(_exit=self._end_process, getpid=os.getpid)
            stack.enter_context(mock.patch.object(departure_module, "os", ends))
            for name in ("atexit", "logging", "multiprocessing", "sys"):
                stack.enter_context(mock.patch.object(departure_module, name, mock.MagicMock()))
            stack.enter_context(mock.patch.object(departure_module.Departure, "announce"))
            stack.enter_context(mock.patch.object(departure_module, "_bytes_written", return_value=(0, 0)))
            stack.enter_context(mock.patch.object(session_module, "grpc", _PerRank(self)))
            stack.enter_context(mock.patch.object(controller_server, "grpc", self.wire.for_controller()))
            stack.enter_context(mock.patch.object(controller_server, "Neighbours", partial(Watch, self)))
            stack.enter_context(mock.patch.object(controller_server, "paths", mock.Mock()))
            stack.enter_context(mock.patch.object(clock, "mono_s", self._mono_s))
            stack.enter_context(mock.patch.object(clock, "wall_ns", self._wall_ns))
            modules = (agent_module, session_module, saver_module, controller_server, controller_storage, takeover)
            for module in modules:
                stack.enter_context(mock.patch.object(module, "_log", _Lines(self)))
            stack.enter_context(mock.patch.object(controller_sessions, "_log", _Lines(self)))
            for name, call in self.calls.patches().items():
                stack.enter_context(mock.patch.object(Os, name, call))
            yield

    def _mono_s(self) -> float:
        return self.scheduler.now_s

    def _wall_ns(self) -> int:
        return int(1e18 + self.scheduler.now_s * 1e9)

    def _end_process(self, code: int) -> None:
        name = self.scheduler.current.process.name
        self.ranks[int(name.rpartition(" ")[2])].exit(code)

    # ------------------------------------------------------------------ training

    def compute(self, about_s: float) -> None:
        self.scheduler.sleep(about_s * (0.3 + self.scheduler.dice.random()))

    def raises(self, rank: int, step: int) -> bool:
        return self.plan.raises == (rank, step)

    def collective(self, rank: Rank, name: str, step: int) -> None:
        """An all-reduce: nobody leaves it before all have entered; after a death it raises, hangs, or is through."""
        rank.entered[name] = step
        dice = self.scheduler.dice
        hangs = False
        until_s = self.scheduler.now_s + GROUP_TIMEOUT_S
        while True:
            complete = all(other.entered.get(name, 0) >= step for other in self.ranks)
            if any(not other.process.lives for other in self.ranks) and not hangs:
                lot = dice.random()
                if complete and lot < 0.4:
                    return
                if lot < 0.7:
                    raise CollectiveError("connection closed by peer")
                hangs = True
            elif complete and not hangs:
                return
            if self.scheduler.now_s > until_s:
                raise CollectiveError("timed out")
            self.scheduler.sleep(0.002 if not hangs else 5.0)

    # ------------------------------------------------------------------ faults

    def _strike(self, blow: Blow) -> None:
        self.tell("fault", str(blow))
        self.struck.add(blow)
        getattr(self, f"_{blow.kind}")(blow)

    def _kill(self, blow: Blow) -> None:
        rank = self.ranks[blow.rank]
        if rank.process.lives:
            rank.record.life = Life.KILLED
            self.ledger.certain_faults += 1
            self.ended(rank)
            self.scheduler.kill(rank.process)
            if self.controller.lives and self.watch is not None:
                self.announce(blow.rank, self.watch)
            if self.following is not None and self.controller.stopped:  # else the controller's own watch says the same
                self.following.died(rank)

    def announce(self, rank: int, watch: Watch) -> None:
        """The host watch of a controller sees the end of a rank of its host."""
        if self.job.hosts[rank] == self.job.hosts[0]:
            known_s = self.scheduler.now_s + 0.0005
            self.scheduler.after(0.0005, lambda: watch.on_death(rank, DeathSource.ROBUST_MUTEX, known_s))

    def ended(self, rank: Rank) -> None:
        """The kernel closes what a process had open."""
        gives_up = rank.record.farewell == f"exit {EXIT_NOT_SAVED}"
        if self.following is not None and not gives_up:
            self.scheduler.after(0.0, self.following.excuse)
        self.wire.cut(rank.rank, 0.0, 0.001 + 0.3 * self.scheduler.dice.random())

    def _kill_controller(self, blow: Blow) -> None:
        if self.following is not None:
            self.controllers.clear_up()  # what it has kept is lost with it
        if self.controller.lives:
            self.kill_process(self.controller)

    def kill_process(self, process: Process) -> None:
        """SIGKILL of a controller, or of one that would be."""
        if not process.lives:
            return
        self.tell(process.name, "is killed")
        if process is self.controller:
            self.ledger.controller_killed = True
        self.wire.close(process)
        self.scheduler.kill(process)
        self.calls.release(process.name)
        self._part(process)
        if self.following is not None:
            self.following.killed(process)

    def _start_controller(self, blow: Blow) -> None:
        for _ in range(blow.count):
            answer = types.SimpleNamespace()  # nobody waits for it
            self.scheduler.spawn(self.controllers.new(), "loop", partial(self.begin_anew, answer))

    def _stop(self, blow: Blow) -> None:
        """SIGSTOP, and SIGCONT later."""
        rank = self.ranks[blow.rank]
        rank.process.stopped = True
        if blow.lasts_s >= SILENT_S:
            rank.record.ill.add("silent")
        if blow.lasts_s > KEEPALIVE_S:
            self.scheduler.after(KEEPALIVE_S, lambda: self._gone_silent(rank))

        def go_on() -> None:
            rank.process.stopped = False

        self.scheduler.after(blow.lasts_s, go_on)

    def _gone_silent(self, rank: Rank) -> None:
        if rank.process.stopped and rank.process.lives:
            self.wire.cut(rank.rank, 0.01, 0.0)

    def _hang_controller(self, blow: Blow) -> None:
        self._stop_controller(blow, answers_pings=True)

    def _stop_controller(self, blow: Blow, answers_pings: bool = False) -> None:
        process = self.controller
        process.stopped = True
        if self.following is not None:
            self.following.stopped(process, answers_pings)
        elif blow.lasts_s >= SILENT_S:
            self.ledger.certain_faults += 1

        def go_on() -> None:
            process.stopped = False

        if blow.lasts_s < HORIZON_S:
            self.scheduler.after(blow.lasts_s, go_on)

    def _cut(self, blow: Blow) -> None:
        if blow.lasts_s >= SILENT_S:
            self.ranks[blow.rank].record.ill.add("silent")
        self.wire.blocked_until_s[blow.rank] = self.scheduler.now_s + blow.lasts_s
        self.wire.cut(blow.rank, 0.001, 0.001)

    def _one_way(self, blow: Blow) -> None:
        """What the rank says, or what it is told, is held up; long enough, and the connection breaks."""
        until_s = self.scheduler.now_s + blow.lasts_s
        self.wire.held_until_s[(blow.rank, self.scheduler.dice.random() < 0.5)] = until_s
        if blow.lasts_s >= SILENT_S:
            self.ranks[blow.rank].record.ill.add("silent")
        if blow.lasts_s > KEEPALIVE_S:
            self.scheduler.after(KEEPALIVE_S, lambda: self._cut(Blow("cut", 0, blow.rank, blow.lasts_s - KEEPALIVE_S)))

    def _glitch(self, blow: Blow) -> None:
        """Some of the next system calls of a rank, or of the controller (rank -1), fail, and work afterwards."""
        name = "controller" if blow.rank < 0 else self.ranks[blow.rank].process.name
        self.calls.glitches[name] = blow.count

    # ------------------------------------------------------------------ what is on the disk

    def _look_at_the_disk(self) -> None:
        for name in self.disk.listdir(ROOT):
            path = ROOT / name
            if not name.startswith("tft_saved_checkpoints-step_") or layout.MANIFEST_NAME not in self.disk.listdir(
                path
            ):
                continue
            try:
                checkpoint = load.open_checkpoint(path, self.disk)
                problems = [problem.text for problem in load.verify(path, True, self.disk)]
            except CheckpointError as error:
                self.ledger.stale_effects.append(f"{path} is visible and cannot be read: {error}")
                continue
            self.ledger.publications.append(self._publication(checkpoint, whole=not problems))

        found = {publication.step for publication in self.ledger.publications}
        newest = load.newest([ROOT, FALLBACK] if self.plan.older_is_ahead else [ROOT], os=self.disk)
        if found and newest != layout.checkpoint_dir(ROOT, max(found)):
            self.misordered.append(f"step {max(found)} was published, and {newest} would be taken")

    def _publication(self, checkpoint: load.Checkpoint, whole: bool) -> Publication:
        manifest = checkpoint.manifest
        content: dict[str, np.ndarray[Any, Any]] = {}

        def into(spec: TensorSpec) -> memoryview:
            content[spec.name] = np.zeros(ELEMENTS, np.float32)
            return memoryview(content[spec.name]).cast("B")

        if manifest.epoch != layout.EPOCH_UNKNOWN and (manifest.epoch, manifest.step) != _name_of(manifest.global_step):
            name = f"epoch {manifest.epoch}, step {manifest.step}"
            self.misnamed.append(f"global step {manifest.global_step} was published as {name}")
        checkpoint.read_tensors([layout.unit_tensor_name(unit, "model", "weight") for unit in manifest.units], into)
        files: dict[int, list[tuple[str, int, int]]] = {}
        for unit, entry in sorted(manifest.units.items()):
            values = content[layout.unit_tensor_name(unit, "model", "weight")]
            last = int(values[0]) if (values == values[0]).all() else TORN
            files.setdefault(entry.writer, []).append((unit, int((entry.meta.hyperparameters or ())[0]["step"]), last))
        locals_: dict[int, list[tuple[int, int]]] = {}
        lost = []
        for rank, local in sorted(manifest.locals.items()):
            if local.exact:
                locals_.setdefault(local.writer, []).append((rank, int(local.meta.slot["held"])))
            else:
                lost.append(rank)
        lost += [rank for rank in range(self.job.world_size) if rank not in manifest.locals]
        written = tuple(
            Written(
                writer,
                manifest.generation,
                manifest.incident,
                manifest.attempt,
                manifest.global_step,
                tuple(files.get(writer, ())),
                tuple(locals_.get(writer, ())),
                whole,
            )
            for writer in sorted(files.keys() | locals_.keys())
        )
        return Publication(
            manifest.generation,
            manifest.incident,
            manifest.attempt,
            manifest.global_step,
            0,
            written,
            tuple(lost),
            verified=True,
        )


class _PerRank:
    """The module `grpc` as a rank's session sees it, whichever rank that is."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def __getattr__(self, name: str) -> Any:
        if name != "insecure_channel":
            return getattr(grpc, name)
        rank = int(self._stack.scheduler.current.process.name.rpartition(" ")[2])
        return self._stack.wire.channel_of(rank)


class _Lines:
    """A logger that tells the story; exceptions that a shell's outermost loop has caught are findings."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def _tell(self, text: str, *arguments: object, **_: object) -> None:
        if self._stack.scheduler.inside:
            self._stack.tell(self._stack.scheduler.current.process.name, text % arguments if arguments else text)

    debug = info = warning = error = _tell

    def log(self, _level: int, text: str, *arguments: object) -> None:
        self._tell(text, *arguments)

    def exception(self, text: str, *arguments: object) -> None:
        if self._stack.scheduler.inside:
            self._tell(text + "\n" + traceback.format_exc().replace("%", "%%"), *arguments)
            self._stack.scheduler.crashed.append(text % arguments if arguments else text)


__all__ = ["CollectiveError", "Gone", "Stack"]
