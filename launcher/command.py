"""`lastwords run`: torchrun's command line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import signal
import socket
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser, parse_min_max_nnodes

from lastwords import descriptors
from lastwords.controller.timeline import records
from lastwords.errors import ConfigError, StorageError
from lastwords.integrations import auto
from lastwords.launcher.agent import HANDLED, HealingAgent
from lastwords.launcher.forks import Ahead
from lastwords.launcher.host import HowLeft, Program
from lastwords.launcher.recovery import ending
from lastwords.liveness import process_id
from lastwords.optim_wrapper.launch.reporter import AUTO, peer
from lastwords.processor.departure import EXIT_SAVED, say
from lastwords.processor.signals import UNHANDLED_STOPS

# One launcher for a job on a host: what a second one would do to the checkpoints of the first is found out here.
#
# A claim is an abstract Unix socket, which the kernel removes with its process, and which tells who holds it. Two
# starts are of one job if `LASTWORDS_JOB` names it, and the command and the working directory are the same: the name
# alone may be that of jobs in different directories. Nodes of one rendezvous may share a host, as in tests.

_log = logging.getLogger(__name__)

BACKLOG = 4096
"""Launchers that may ask who it is: no connection is ever taken, and each keeps its place."""

UNKNOWN_PID = 0
"""As the kernel has it for a process that cannot be seen from here."""


def claim(
    command: Sequence[str], meeting: Sequence[str], nodes: int, environ: Mapping[str, str] = os.environ
) -> contextlib.ExitStack:
    """Hold this job, if it has a name, until what is returned is closed. meeting: which rendezvous this is.

    Raises ConfigError where another launcher holds it, unless that is one of so many `nodes` of the same rendezvous.
    """
    held = contextlib.ExitStack()
    if not (job := environ.get("LASTWORDS_JOB", "")):
        return held
    name = f"lastwords-{os.getuid()}-{_digest([job, os.getcwd(), *command])}"
    of_meeting = f"{name}-{_digest(meeting)}"
    first = _bind(name)
    if first is None and _holder(f"{of_meeting}-0") is None:
        raise _refusal(job, _holder(name))
    for node in range(nodes):
        if (place := _bind(f"{of_meeting}-{node}")) is not None:
            for one in filter(None, (first, place)):
                held.enter_context(one)
            return held
    raise _refusal(job, _holder(f"{of_meeting}-0"))


def _refusal(job: str, pid: int | None) -> ConfigError:
    who, how = (f", by process {pid}", f" (kill -TERM {pid})") if pid else ("", "")
    return ConfigError(
        f"job {job!r} (LASTWORDS_JOB) is run by this command in this directory already{who}: end that one first{how}, "
        "or give this one another name"
    )


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([*words]).encode()).hexdigest()[:24]


def _bind(name: str) -> socket.socket | None:
    """None if another process has that name."""
    one = socket.socket(socket.AF_UNIX)
    try:
        one.bind(f"\0{name}")
        one.listen(BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            one.close()
            return None
        _log.info("whether another launcher runs this job is not known: %s", error)
    return one


def _holder(name: str) -> int | None:
    """Its process, UNKNOWN_PID where it does not say; None if nobody has that name."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"\0{name}")
        except ConnectionRefusedError:
            return None
        except BlockingIOError:  # very many have asked
            return UNKNOWN_PID
        return peer(probe)[0]


DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""What torch's launcher handles; the releases before 2.9 have no flag for it."""

FILES_PER_RANK = 8
"""Of a rank: its link, its pidfd, its outputs and their logs."""

FILES_RESERVED = 256
"""For the rendezvous, the stores, and strangers' connections."""


def parser() -> argparse.ArgumentParser:
    """torchrun's own, with our arguments beside."""
    made = get_args_parser()
    made.prog = "lastwords run"
    made.description = (
        "torchrun, except that a job goes on by itself after a failure: all ranks are forked anew, and resume."
    )
    made.add_argument(
        "--preload",
        default="",
        metavar="MODULES",
        help="names, with commas between them, of modules that are imported once, before any rank is started",
    )
    made.add_argument(
        "--auto",
        action="store_true",
        help="protect a script that uses a Trainer of transformers or lightning, as it is; that is preloaded, too",
    )
    made.add_argument("--spares", type=int, default=0, help=argparse.SUPPRESS)
    return made


def run(argv: Sequence[str], begun: Ahead | None = None) -> None:
    """Runs this host's ranks of a job. ConfigError for impossible flags, SystemExit: 1 where the job has failed, 75 or
    76 where a signal has ended it, 75 where it is saved and the script lacks what would load that.

    The last line then says why; torch's report is before it. begun: a fork server that has been started already.
    """
    try:
        _run(argv, begun)
    except ChildFailedError as error:
        say("".join(traceback.format_exception_only(error)).rstrip("\n"))  # and not where in the launcher it was raised
        raise SystemExit(1) from None


@record
def _run(argv: Sequence[str], begun: Ahead | None) -> None:
    arguments = parser().parse_args(argv)
    if arguments.spares:
        say("lastwords run: --spares does nothing any more: all ranks are forked anew in milliseconds")
    if not (arguments.module or arguments.no_python or arguments.run_path or Path(arguments.training_script).exists()):
        raise ConfigError(f"there is no script {arguments.training_script!r} in {Path.cwd()}")
    with _refusals():
        fewest, most = parse_min_max_nnodes(arguments.nnodes)
    if fewest != most:
        raise ConfigError(
            f"--nnodes={arguments.nnodes}: lastwords run keeps the number of hosts; name one "
            "number, or start an elastic job with torchrun"
        )
    alone = arguments.rdzv_backend == "static" and not arguments.rdzv_endpoint and arguments.master_port is None
    if arguments.standalone or (alone and most == 1):  # as torch's own from 2.13 on; before it, there is always a port
        arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
        arguments.local_addr = arguments.local_addr or "localhost"  # torch would take a name that may not resolve
    if arguments.master_port is None:
        arguments.master_port = 29500
    with _refusals():
        config, command, command_arguments = config_from_args(arguments)
    if config.nproc_per_node < 1:
        raise ConfigError(f"--nproc-per-node is {config.nproc_per_node}; it is a number of ranks, from 1")
    if not isinstance(command, str):
        raise ConfigError(
            "--run-path runs the script in the launcher's own process, which could not go on after a failure"
        )
    if arguments.auto:
        if arguments.no_python:
            raise ConfigError("--auto is for Python scripts, and --no-python says that this is none")
        os.environ[AUTO] = "1"
    ranks = f"{config.nproc_per_node} ranks of this host and {most} hosts"
    os.close(process_id.open_pidfd(os.getpid()))  # of no use where that is not allowed
    descriptors.allow(FILES_PER_RANK * config.nproc_per_node + most + FILES_RESERVED, ranks)
    meeting = [config.rdzv_backend, config.rdzv_endpoint, config.run_id]
    with claim([command, *map(str, command_arguments)], meeting, most):
        _launch(config, command, command_arguments, _program(arguments, config, command), begun)


@contextmanager
def _refusals() -> Iterator[None]:
    """What torch refuses of its own flags is a ConfigError."""
    try:
        yield
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"torch refuses the flags: {error}") from error


def handled(signals_to_handle: str) -> list[str]:
    """Names of the signals that end the launcher: those of the flag, and what ranks take for such.

    None that is ignored now: torch would handle it all the same, and its ranks would have it as by default, so `nohup`
    would be in vain.
    """
    names = dict.fromkeys([*signals_to_handle.split(","), *(one.name for one in UNHANDLED_STOPS)])
    ignored = {one.name for one in signal.Signals if signal.getsignal(one) is signal.SIG_IGN}
    return [name for name in names if name.strip() not in ignored]


def ended_by_signal(left: HowLeft | None) -> tuple[int, str]:
    """Exit code of a launcher that a signal has ended, and what is saved. left: how its ranks have ended; None: they
    have not."""
    if left is None:
        return 1, "its ranks have not ended yet: they save what there is, each says so, and end by themselves"
    lines: list[bytes] = []
    with contextlib.suppress(OSError, StorageError):
        lines = records(left.record) if left.record is not None else []
    return ending(left.codes, left.step, lines, left.ended)


def _program(arguments: argparse.Namespace, config: LaunchConfig, command: str) -> Program:
    """threads: what torchrun would give each rank; with one rank, as many as this process has taken."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    count = int(threads) if threads.isdigit() and int(threads) else torch.get_num_threads()
    python = "" if arguments.no_python else command
    named = [name.strip() for name in arguments.preload.split(",")]
    if arguments.auto:
        named += [auto.LIBRARIES[one] for one in auto.imported_by(arguments.training_script, auto.LIBRARIES)]
    preload = tuple(dict.fromkeys(filter(None, named)))
    return Program(python, arguments.module, 1 if not threads and config.nproc_per_node > 1 else count, preload)


def _launch(
    config: LaunchConfig, command: str, arguments: Sequence[str], program: Program, begun: Ahead | None
) -> None:
    handler = rendezvous.get_rendezvous_handler(
        RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
    )
    # What this release of torch has; the rest of its settings is in the environment, the log specs and the handler.
    optional = ("event_log_handler", "numa_options", "virtual_local_rank", "duplicate_stdout_filters")
    known = {one.name for one in dataclasses.fields(WorkerSpec)}
    more = {name: getattr(config, name) for name in (*optional, "duplicate_stderr_filters") if name in known}
    of_the_flag = getattr(config, "signals_to_handle", DEFAULT_SIGNALS)
    os.environ[HANDLED] = ",".join(handled(of_the_flag))
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=command,
        args=tuple(arguments),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        **more,
    )
    timeout_s = getattr(config, "shutdown_timeout", None)  # before torch 2.12 there is none
    patience = {} if timeout_s is None else {"shutdown_timeout": timeout_s}
    agent = HealingAgent(
        spec=spec,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        program=program,
        begun=begun,
        **patience,
    )
    signal.signal(signal.SIGUSR1, lambda number, frame: agent.pass_on(number))
    try:
        result = agent.run()
    except SignalException as error:  # only this host ends: the rendezvous would be closed for the others, too
        if agent.left is None:
            agent.pass_on(agent.stop)
        code, saved = ended_by_signal(agent.left)
        say(f"lastwords run: ended by {error.sigval.name}; {saved}")
        raise SystemExit(code) from None
    except BaseException:  # handed to the caller
        handler.shutdown()
        raise
    handler.shutdown()
    if result.is_failed():
        last_line = f"lastwords run: {agent.failure}"
        if agent.saved or not result.failures:  # on this host
            say(last_line)
            raise SystemExit(EXIT_SAVED if agent.saved else 1)
        failed = ChildFailedError(name=command, failures=result.failures)
        failed.add_note(last_line)
        raise failed
