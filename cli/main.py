"""The command `lastwords`: arguments in, exit code out. What the commands do is in modules of their own.

Data goes to stdout (with `--json` exactly one JSON document), everything else to stderr. Exit codes are for scripts:
see `ExitCode`.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lastwords import __version__, log_lines
from lastwords.checkpoint.remote.store import place
from lastwords.checkpoint.system import storage_error
from lastwords.cli import checkpoint_commands as commands
from lastwords.cli import drill_command, interop_commands, retention_commands, transform_command
from lastwords.cli.checkpoint_commands import ExitCode
from lastwords.controller.launch import start_successor
from lastwords.errors import (
    BusyError,
    ConfigError,
    FormatError,
    IncompleteError,
    LastWordsError,
    ReplacedError,
    StorageError,
    UnavailableError,
)
from lastwords.liveness.paths import STATE_NAME

# Standard streams that the caller has closed, as some services and `>&-` do.
#
# The next file that is opened would get the number of one of them: a pipe of ours would be a child's output, and what
# a library prints would go into a socket.

_MODES = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_missing() -> None:
    """Open /dev/null for each that is closed, here and in the children to come. Before anything else is opened."""
    for fd, (name, mode) in enumerate(_MODES):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


OF_JOBS = (["run"], ["worker"], ["scheduler"])
"""Commands that run as long as a job does: what they say belongs to its log."""

EXIT_CODES = """\
exit codes:
  0  success
  1  nothing found: there is no checkpoint at PATH, or no controller answers; diff: the two differ;
     transform: not published yet, since files of other ranks are missing; drill: a resume differs, or fails
  2  wrong usage
  3  the checkpoint is damaged, incomplete, or written by a newer lastwords
  4  the file system reported an error (permission, I/O)
  5  try again: another process writes to the same place, or the checkpoint was replaced twice while it was read
  6  drill: the script is not reproducible by itself
  7  drill: the command fails, or hangs, by itself
"""


def build_parser() -> argparse.ArgumentParser:
    """Parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="lastwords",
        description="Runs jobs that go on after a failure; shows, moves and removes their checkpoints.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lastwords {__version__}")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def bare(name: str, what: str) -> argparse.ArgumentParser:
        return subcommands.add_parser(
            name, help=what, description=what, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def add(name: str, what: str) -> argparse.ArgumentParser:
        command = bare(name, what)
        command.add_argument(
            "path",
            type=Path if name == "groups" else place,
            metavar="PATH",
            help=f"a checkpoint, or the directory that holds them{'' if name == 'groups' else '; or a URL of either'}",
        )
        command.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
        return command

    latest = add("latest", "print the path of the newest complete checkpoint in PATH")
    latest.epilog = (
        "If a checkpoint has more than 256 files, only directories are checked; resume() and `inspect` check each file."
    )
    latest.add_argument("--job", help="only checkpoints of this job")
    inspect = add("inspect", "show what a checkpoint holds, or list those in PATH")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.add_argument("--all", action="store_true", help="list each rank's reasons why a resume is not exact")
    verify = add("verify", "read and verify every byte; of all checkpoints if PATH holds several")
    verify.add_argument("--quick", action="store_true", help="check manifest, sizes and headers only")
    add(
        "groups",
        ("show which ranks hold which unit and which of them may be lost; PATH may also hold group_info files"),
    )
    what = "show the state of a running controller: its ranks, their steps, the newest incidents"
    status = bare("status", what)
    status.add_argument(
        "--controller", metavar="HOST:PORT", help="its address; default: the only one of this user on this host"
    )
    status.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    what = "show the same again and again, with steps per second; ends with Ctrl-C"
    top = bare("top", what)
    top.add_argument("--controller", metavar="HOST:PORT", help="as of status")
    top.add_argument("--every", type=_seconds, default=1.0, metavar="SECONDS", help="pause between looks (default: 1)")
    top.add_argument("--frames", type=int, default=0, metavar="N", help="end after N looks (default: never)")
    what = "show a job in a browser and to Prometheus, on this host: docs/operating.md; ends with Ctrl-C"
    serve = bare("serve", what)
    serve.add_argument("path", type=Path, nargs="?", metavar="PATH", help="the directory that holds the checkpoints")
    serve.add_argument("--controller", metavar="HOST:PORT", help="as of status")
    serve.add_argument("--http", default="127.0.0.1:8090", metavar="HOST:PORT", help="default: 127.0.0.1:8090")
    serve.add_argument(
        "--token-file", type=Path, metavar="FILE", help="what a browser has to know; needed off loopback"
    )
    what = "start the controller of a running job again, on the host where it was killed: docs/troubleshooting.md"
    controller = bare("controller", what)
    controller.add_argument(
        "--recover", type=Path, required=True, metavar="PATH", help="the job's directory in /dev/shm, or the file in it"
    )
    controller.add_argument("--json", action="store_true", help="print one JSON document")
    what = "run this host's ranks of a training script; torchrun's flags: docs/running.md"
    subcommands.add_parser("run", help=what, add_help=False)
    what = "kill ranks of a script in each phase of a step, and see whether it resumes bitwise: docs/exact-resume.md"
    drill_command.add_arguments(bare("drill", what))
    worker = bare("worker", "run a worker of a dynamic cluster, which the environment describes: docs/cluster.md")
    worker.add_argument("-m", dest="module", action="store_true", help="the script is a module, as of python -m")
    worker.add_argument("script")
    worker.add_argument("arguments", nargs=argparse.REMAINDER)
    bare("scheduler", "run the scheduler of a dynamic cluster, which the environment describes: docs/cluster.md")
    retention_commands.add_parsers(bare)
    interop_commands.add_parsers(bare)
    transform_command.add_parser(bare)
    return parser


def _in_cluster(role: str, argv: Sequence[str]) -> int:
    """As a script does that calls `lastwords.run(main)` with this MS_ROLE. argv: of a worker: -m NAME, or a script, and
    its arguments.
    """
    from lastwords.launcher.environment import SCHEDULER, cluster_of  # with torch, which the others do without
    from lastwords.launcher.scheduler import schedule
    from lastwords.launcher.supervisor import supervise

    name = "lastwords scheduler: " if role == SCHEDULER else ""
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(log_lines.formatter(logging.Formatter(f"{name}%(message)s")))
    logging.basicConfig(level=logging.WARNING, handlers=[output], force=True)
    cluster = cluster_of(os.environ, role)
    assert cluster is not None
    if role != SCHEDULER:
        return supervise(cluster, argv)
    return schedule(cluster)


def _seconds(text: str) -> float:
    """Of an option."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise ValueError(text)
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its `ExitCode`; SystemExit(2) for wrong usage."""
    open_missing()
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _main(argv)
    except LastWordsError as error:
        line = f"lastwords: {error}"
        print(log_lines.said(line, __name__) if argv[:1] in OF_JOBS else line, file=sys.stderr)
        return exit_code_of(error)


def _main(argv: Sequence[str]) -> int:
    if argv[:1] == ["run"]:
        from lastwords.launcher.forks import begun_for

        log_lines.begin()
        with begun_for(argv) as begun:
            from lastwords.launcher.command import run  # brings torch, which the other commands do without

            run(argv[1:], begun)
        return ExitCode.OK
    if argv[:1] == ["worker"] and argv[1:2] not in ([], ["-h"], ["--help"]):
        return _in_cluster("MS_WORKER", argv[1:])
    if argv[:1] == ["drill"]:
        logging.basicConfig(format="lastwords: %(message)s", level=logging.WARNING, stream=sys.stderr, force=True)
        return drill_command.run(argv[1:])
    arguments = build_parser().parse_args(argv)
    if arguments.command == "scheduler":
        return _in_cluster("MS_SCHED", [])
    logging.basicConfig(format="lastwords: %(message)s", level=logging.WARNING, stream=sys.stderr, force=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # a path is printed as the bytes that it is
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # `lastwords inspect ... | head`: the reader has seen enough. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except OSError as error:  # of a path that was given, and that the system refuses to look at: it is too long, say
        if error.filename is None:
            raise
        raise storage_error("looking at", Path(os.fsdecode(error.filename)), error) from error
    return code


def _run(arguments: argparse.Namespace) -> ExitCode:
    if arguments.command in interop_commands.COMMANDS:
        return interop_commands.run(arguments)
    if arguments.command == "transform":
        return transform_command.run(arguments)
    if arguments.command == "status":
        from lastwords.cli.status_command import status  # brings gRPC, which the other commands do without

        status(arguments.controller, as_json=arguments.json)
        return ExitCode.OK
    if arguments.command == "top":
        from lastwords.cli.status_command import top

        top(arguments.controller, every_s=arguments.every, frames=arguments.frames)
        return ExitCode.OK
    if arguments.command == "serve":
        from lastwords.cli.serve_command import serve

        serve(arguments)
        return ExitCode.OK
    if arguments.command == "controller":
        return _recovered(arguments)
    if arguments.command == "prune":
        return _pruned(arguments)
    if arguments.command == "upload":
        return retention_commands.upload(arguments)
    if arguments.command == "ls":
        return retention_commands.listed(arguments.path, as_json=arguments.json)
    if arguments.command == "latest":
        return commands.latest(arguments.path, arguments.job, as_json=arguments.json)
    if arguments.command == "groups":
        from lastwords.cli.groups_command import groups  # brings protobuf

        return groups(arguments.path, as_json=arguments.json)
    if arguments.command == "inspect":
        return commands.inspect(
            arguments.path, as_json=arguments.json, tensors=arguments.tensors, everything=arguments.all
        )
    return commands.verify(arguments.path, as_json=arguments.json, deep=not arguments.quick)


def _recovered(arguments: argparse.Namespace) -> ExitCode:
    path = arguments.recover.absolute()
    handle = start_successor(path / STATE_NAME if path.is_dir() else path, by_hand=True)
    if arguments.json:
        sys.stdout.write(json.dumps({"pid": handle.pid, "log": str(handle.log_path)}) + "\n")
    else:
        sys.stdout.write(f"the controller is process {handle.pid}; its log is {handle.log_path}\n")
    return ExitCode.OK


def _pruned(arguments: argparse.Namespace) -> ExitCode:
    left = retention_commands.prune(arguments)
    if left is None:
        return ExitCode.NOTHING_FOUND
    return max((exit_code_of(error) for error in left), default=ExitCode.OK)


def exit_code_of(error: LastWordsError) -> ExitCode:
    """Exit code for an error that ended a command."""
    if isinstance(error, StorageError):
        return ExitCode.STORAGE
    if isinstance(error, UnavailableError):
        return ExitCode.NOTHING_FOUND
    if isinstance(error, BusyError | ReplacedError):
        return ExitCode.AGAIN
    if isinstance(error, FormatError | IncompleteError):
        return ExitCode.DAMAGED
    return ExitCode.USAGE if isinstance(error, ConfigError) else ExitCode.DAMAGED
