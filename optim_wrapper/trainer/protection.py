"""Everything that runs while a rank is protected, started and ended in the right order.

Order of the start: agreement (rank ctrl_rank_id starts the controller), life line, signals, session, "all ranks are
registered", the ring of this host's ranks. The black box follows when the loop begins, because only then it is known
what has to go in.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lastwords import log_lines, threads
from lastwords.checkpoint import load
from lastwords.checkpoint.manifest import Claimed
from lastwords.controller import handover
from lastwords.controller import launch as controller_launch
from lastwords.controller.handover import INCIDENTS_FILE, LOG_DIRECTORY
from lastwords.controller.timeline import recorded_exit
from lastwords.errors import ConfigError, LastWordsError, StorageError, UnavailableError, is_shortage
from lastwords.liveness import leftovers, paths
from lastwords.liveness.process_id import host_id, start_ticks, this_process
from lastwords.liveness.robust_mutex import LifeLine
from lastwords.optim_wrapper.capture.source import TrainerSource
from lastwords.optim_wrapper.launch import startup
from lastwords.optim_wrapper.launch.config import Config
from lastwords.optim_wrapper.launch.reporter import Reporter, reporter
from lastwords.optim_wrapper.launch.successor import ControllerWatch
from lastwords.optim_wrapper.launch.world import World
from lastwords.optim_wrapper.trainer.hold import exit_code_of, is_collective_error, is_loader_error, one_line
from lastwords.processor.agent import Agent
from lastwords.processor.black_box import BlackBox
from lastwords.processor.core import ProcessorCore
from lastwords.processor.departure import EXIT_NOT_SAVED, EXIT_SAVED, THREADS, UNWIND_S, Departure, Verdict, say
from lastwords.processor.ring import HostRing, Silence, living_before
from lastwords.processor.saver import SaverSpec
from lastwords.processor.session import Session
from lastwords.processor.signals import SignalGuard
from lastwords.transport import host_port, start_of
from lastwords.vocabulary import UNIT_REPLICATED, Exit, Hello, ProcessId

_log = logging.getLogger(__name__)


class Protection:
    """Agent, session, life line and signal guard of one rank. Belongs to the training thread."""

    def __init__(
        self,
        config: Config,
        world: World,
        make_source: Callable[[Callable[[int], Path]], TrainerSource],
        units: tuple[str, ...] = (UNIT_REPLICATED,),
        shared: tuple[str, ...] = (),
    ) -> None:
        self._config = config
        self._world = world
        self._make_source = make_source
        self._units = units
        self._shared = shared
        self._agreement: startup.Agreement | None = None
        self._launcher = reporter()
        self.departure = Departure(
            world.rank,
            self._recorded_exit,
            self._leave_controller,
            healed=lambda: self._launcher is not None and self._launcher.heals,
            tell=self._tell_verdict,
        )
        self._agent: Agent | None = None
        self._session: Session | None = None
        self._life: LifeLine | None = None
        self._ring: HostRing | None = None
        self._watch: ControllerWatch | None = None
        self._signals: SignalGuard | None = None
        self._asked_to_stop: Callable[[], bool] = lambda: False
        self._reserved = False
        self._closed = False
        self._pid = os.getpid()

    # ------------------------------------------------------------------ life

    def start(self, settings: dict[str, Any], checkpoint_bytes: int = 0) -> None:
        """Everything up to "all ranks are registered". checkpoint_bytes: about how large a checkpoint will be.

        Raises a LastWordsError with what to do; nothing stays then.
        """
        refuse_watchdog()
        if self._launcher is not None:
            controller_launch.use_forks(self._launcher.controller)
        self._agreement = agreement = startup.agree(self._world, self._config, settings, checkpoint_bytes)
        try:
            self._start(agreement)
        except BaseException:
            self.close()
            raise

    def _start(self, agreement: startup.Agreement) -> None:
        config, rank = self._config, self._world.rank
        threads.reserve(THREADS)
        self._reserved = True
        paths.make_job_dir(agreement.job, agreement.generation, agreement.nonce)
        try:
            self._life = LifeLine.create(paths.life_path(agreement.job, agreement.generation, rank, agreement.nonce))
        except UnavailableError as error:
            if is_shortage(error):
                raise
            _log.info("%s", error)
        process = this_process(secrets.token_hex(8))
        core = ProcessorCore(rank, agreement.generation, 0, config.processor)
        log_lines.know(job=agreement.job, rank=rank, step=lambda: core.stand.ended_step)
        source = self._make_source(self.box_path)
        agent = self._agent = Agent(
            core,
            hello=lambda stand: Hello(
                rank, agreement.generation, self._world.size, process, self._units, stand, self._shared
            ),
            saver=SaverSpec(rank, agreement.job, tuple(config.roots), source),
            departure=self.departure,
            settled=source.settled,
            forsake_copies=source.forsake_copies,
        )
        self._asked_to_stop = lambda: core.asked_to_stop
        signals = self._signals = agent.signals = SignalGuard(agent.on_signal, on_ask=agent.want_save)
        signals.install()
        address = host_port(config.ctrl_ip, agreement.port)
        session = self._session = Session(
            address,
            agreement.token,
            start_of(agreement.job, agreement.generation),
            rank,
            on_order=agent.on_order,
            on_up=agent.on_session_up,
            on_down=agent.on_session_down,
            on_refused=agent.on_session_refused,
            hello=agent.hello,
            wanted=lambda: not (core.released or core.leaving or self.closed),
            silence=Silence(config.processor),
        )
        session.start()
        agent.start(session)
        if not agent.wait_until(lambda: session.up or core.welcomed, config.connect_timeout_s):
            raise UnavailableError(
                f"rank {rank} could not reach the controller at {address} for {config.connect_timeout_s:g} s; it runs "
                f"on the host of rank {config.ctrl_rank_id}: check that {config.ctrl_ip!r} (ctrl_ip, or MASTER_ADDR "
                f"with protect) is an address of that host, and that port {agreement.port} is open between the hosts"
            )
        start_timeout_s = config.controller.start_timeout_s
        if not agent.wait_until(lambda: core.welcomed, start_timeout_s + 5.0):
            raise UnavailableError(
                f"not all ranks registered with the controller within {start_timeout_s:g} s; look for the errors of "
                "ranks that did not start (LASTWORDS_START_TIMEOUT_S sets the limit)"
            )
        self._look_after_host(agreement, core)

    def _look_after_host(self, agreement: startup.Agreement, core: ProcessorCore) -> None:
        """Everybody has said Hello, so every rank of this host has its life line."""
        self._ring = HostRing(
            self._world.rank, agreement.job, agreement.generation, self.agent.on_peer_died, agreement.nonce
        )
        self._ring.start()
        start = (agreement.job, agreement.generation)
        state_path = paths.state_path(*start, agreement.nonce)
        self._watch = ControllerWatch(
            f"rank {self._world.rank}",
            state_path,
            self._ring.when_ended,
            lambda: living_before(self._world.rank, *start, agreement.nonce),
            lambda: not (self.closed or self.departure.decided),
            Silence(self._config.processor),
            lambda: core.asks,
            lambda: self._session is not None and self._session.up,
        )
        self._watch.start()
        if self._launcher is not None:
            self._launcher.guarded(state_path if state_path.exists() else None)
            self._watch_launcher(self._launcher)
        if self._ring.is_first:
            needed = partial(handover.state_is_needed, job=agreement.job, root=self._config.ckpt_save_path)
            leftovers.remove_dead_job_dirs(needed)  # the controller does so too, but only on its own host

    def close(self) -> None:
        """End the threads and give everything back. The job's files in shared memory belong to the controller.

        Not the signals, once an incident ends this process: launchers send SIGTERM to the survivors while they
        leave, and with its default handler that would cut off the one line, the exit code and `finally` blocks. A
        notebook's kernel lives on after an exception, and has to hear its user's next interrupt.
        """
        if self.closed:
            return
        self._closed = True
        if self._signals is not None and (self.departure.verdict is None or hasattr(sys, "ps1")):
            self._signals.uninstall()
        if self._watch is not None:
            self._watch.leave()
            self._watch.stop()
        if self._ring is not None:
            self._ring.stop()
        if self._agent is not None:
            self._agent.close()
        if self._life is not None:
            self._life.release()
        if self._reserved and not self.departure.decided:
            threads.release(THREADS)

    # ------------------------------------------------------------------ what others need

    @property
    def closed(self) -> bool:
        """Whether there is nothing to end here: it has ended, or this process is a child of the one that began."""
        return self._closed or os.getpid() != self._pid

    @property
    def agreement(self) -> startup.Agreement:
        """Job, generation, prefix in the store; known once started."""
        assert self._agreement is not None
        return self._agreement

    @property
    def agent(self) -> Agent:
        """The agent; exists once started."""
        assert self._agent is not None
        return self._agent

    @property
    def signals(self) -> SignalGuard:
        """The guard of this process's signals; exists once started."""
        assert self._signals is not None
        return self._signals

    def box_path(self, rank: int) -> Path:
        """Where the black box of a rank of this host is."""
        agreement = self.agreement
        return paths.box_path(agreement.job, agreement.generation, rank, agreement.nonce)

    def use_box(self, make: Callable[[Path], BlackBox]) -> None:
        """Write the stand into the box that `make(path)` makes from now on; StorageError if there is no room for it.

        Where the job has ended meanwhile its controller has taken the directory away: this rank then leaves as it was
        told, by SystemExit.
        """
        try:
            box = make(self.box_path(self._world.rank))
        except StorageError:
            if not self.departure.decided:
                raise
            self.departure.leave()
        self.agent.write_stands_to(box)

    # ------------------------------------------------------------------ the end

    def _tell_verdict(self, verdict: Verdict) -> None:
        if self._launcher is not None:
            ended = 0 if self._agent is None else self._agent.stand.ended_step
            self._launcher.left(verdict.step, self._record, ended, alone=verdict.alone)

    def _watch_launcher(self, launcher: Reporter) -> None:
        if (pid := launcher.launcher_pid) is None:
            return

        def ended() -> None:
            if not (self.closed or self.departure.decided or launcher.dismissed):
                say(f"lastwords: rank {self._world.rank}: the launcher has ended; a failure now ends all ranks")

        assert self._ring is not None
        process = ProcessId(host_id(), pid, start_ticks(pid) or 0, nonce="")
        with contextlib.suppress(UnavailableError):
            self._ring.when_ended(process, ended)

    def _leave_controller(self) -> None:
        if self._watch is not None:
            self._watch.leave()

    def _recorded_exit(self) -> Exit | None:
        """How the job has ended by the controller's record, which is where the checkpoints are. May block."""
        if self._agreement is None:
            return None
        return recorded_exit(self._record, self._agreement.job, self._agreement.generation)

    @property
    def _record(self) -> Path:
        return self._config.ckpt_save_path / LOG_DIRECTORY / INCIDENTS_FILE

    def newest_step(self) -> int:
        """Of the newest checkpoint of this job, as far as its files can be read; 0 if there is none. May block."""
        try:
            path = load.newest(self._config.sources, (self.agreement.job,), every_file=True)  # as resume() looks
            return 0 if path is None else Claimed.read(path).global_step
        except LastWordsError as error:
            _log.info("cannot determine the newest checkpoint: %s", error)
            return 0

    def fail(self, error: BaseException, detach: Callable[[], None]) -> None:
        """`error` leaves the loop: hold this rank until its incident is over, `detach` and end the protection.

        Raises SystemExit or ConfigError, except where the user is to see this rank's own exception, which is not the
        echo of another rank's end. An echo of which nobody knows the cause is shown with its traceback all the same;
        that this rank was asked to stop is a cause. In a job of one there is nobody whose death could be heard of.
        """
        own = (self._world.size == 1 or not is_collective_error(error)) and not (
            self._asked_to_stop() and is_loader_error(error)
        )
        if self._signals is not None:
            self._signals.begin_incident()
        self.agent.raised(one_line(error), not own)
        detach()
        self.close()
        verdict = self.departure.verdict
        if verdict and isinstance(error, SystemExit) and error.code in (verdict.code, self.departure.exit_code):
            return  # what the end of the incident has asked for
        if self.departure.refused is not None:
            if own:
                return  # what leaves the loop is the refusal itself, or an earlier error
        elif own and (verdict is None or verdict.is_cause or verdict.code != EXIT_SAVED):
            return self.departure.leave_to_user(error, exit_code_of(error))
        elif verdict is None or (verdict.is_cause and not self._asked_to_stop()):
            self.departure.end_within(UNWIND_S, EXIT_NOT_SAVED if verdict is None else verdict.code)
            traceback.print_exception(error)  # blocks where the reader of stderr has stopped
        self.departure.leave()


def refuse_watchdog(environ: Mapping[str, str] = os.environ) -> None:
    """ConfigError if NCCL's watchdog would kill healthy survivors, or spoil their state, while it is being saved.

    0 is torch's NoHandling. 2, CleanUpOnly, leaves the process alive but aborts the communicator of a collective that
    hangs: what is queued behind it then runs on what the abort has left in the gradients. The variable is read when a
    process group is made, so it has to be set before. Source: ErrorHandlingMode in torch's ProcessGroupNCCL.hpp.
    """
    if not (dist.is_available() and dist.is_initialized()) or "nccl" not in dist.get_backend_config():
        return
    value = environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    if value != "0":
        aborts = "abort the hanging collective, and the update after it would use invalid data"
        why = aborts if value == "2" else "kill the healthy ranks before their state is saved"
        raise ConfigError(
            f"TORCH_NCCL_ASYNC_ERROR_HANDLING is {value} (torch's default is 3): when a rank dies, NCCL's watchdog "
            f"would {why}. Set TORCH_NCCL_ASYNC_ERROR_HANDLING=0 in the environment before init_process_group, on "
            "every rank"
        )
