"""`lastwords drill`: proof, on a script of the user's own, that it resumes exactly. See docs/exact-resume.md."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lastwords import __version__
from lastwords.checkpoint import drill_record
from lastwords.cli import tables
from lastwords.cli.checkpoint_commands import ExitCode
from lastwords.drill import phases
from lastwords.drill.compare import FAILED
from lastwords.drill.drill import Wishes, drill
from lastwords.drill.report import Report
from lastwords.drill.runs import Runs
from lastwords.errors import CommandFailedError, ConfigError, StorageError
from lastwords.optim_wrapper.launch.drill_plan import STREAM

STEPS, TIMEOUT_S, KILLS_MAX = 12, 600.0, 100
REFUSED = ("--nnodes", "--rdzv", "--node", "--master", "--run-path", "--standalone")
"""Beginnings of flags of `lastwords run` that are none of a drill, which is of one host."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command; others before `--` are those of `lastwords run`."""
    parser.usage = "lastwords drill [flags, also those of lastwords run] -- SCRIPT [ARGUMENTS]"
    parser.allow_abbrev = False
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=int, default=2, metavar="N", help="ranks (default: 2)"
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help=f"global steps of each run (default: {STEPS})"
    )
    names = ",".join(phases.NAMES)
    parser.add_argument("--phases", default=names, metavar="A,B", help=f"where ranks are killed (default: {names})")
    parser.add_argument("--kills", type=int, default=1, metavar="N", help="kills in each phase (default: 1)")
    parser.add_argument("--two", action="store_true", help="in each phase, two ranks at once besides")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help=f"of each run (default: {TIMEOUT_S:g})"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep outputs, records and checkpoints in DIR")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="keep what was covered beside the job's checkpoints in DIR, where resume() and `inspect` find it",
    )
    parser.add_argument("--self-test", action="store_true", help="spoil one bit on a resume: the drill has to name it")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write the report to FILE (-: stdout), too"
    )


def run(argv: Sequence[str]) -> ExitCode:
    """The exit code. argv: all after the word `drill`. SystemExit(2) for wrong usage."""
    parser = argparse.ArgumentParser(prog="lastwords drill", description=__doc__)
    add_arguments(parser)
    if "--" not in argv:
        parser.parse_known_args(argv)  # for --help
        parser.error("put `--` before the script: lastwords drill --nproc-per-node 2 -- train.py --lr 0.1")
    at = [*argv].index("--")
    arguments, flags = parser.parse_known_args(argv[:at])
    command = [*argv[at + 1 :]]
    wishes = _checked(arguments, flags, command)
    kept: Path | None = arguments.keep
    if arguments.record is not None:
        _make(arguments.record)
    folder = _folder(kept)
    report = Report(_what(command, flags))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # which ends the run under way
    try:
        code = _drilled(Runs(flags, command, folder, arguments.timeout), wishes, report, as_json=arguments.json == "-")
    except CommandFailedError as error:
        print(f"lastwords drill: {error}", file=sys.stderr)
        kept = folder  # its output is needed
        return ExitCode.COMMAND_FAILED
    else:
        if arguments.record is not None:
            drill_record.write(arguments.record, report.to_record())
    finally:
        if any(one.kind == FAILED for one in report.verdicts):
            kept = folder
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)
    if arguments.json is not None:
        _write(arguments.json, {**report.to_json(), "exit_code": code})
    return code


def _checked(arguments: argparse.Namespace, flags: Sequence[str], command: Sequence[str]) -> Wishes:
    """ConfigError for what makes no sense."""
    if not command:
        raise ConfigError("there is no script after `--`: lastwords drill --nproc-per-node 2 -- train.py --lr 0.1")
    if refused := [flag for flag in flags if flag.startswith(REFUSED)]:
        raise ConfigError(f"{refused[0]}: a drill is of one host, and starts its own rendezvous")
    for name, value, least, most in (
        ("--nproc-per-node", arguments.nproc_per_node, 1, 4096),
        ("--steps", arguments.steps, 4, 1_000_000),
        ("--kills", arguments.kills, 1, KILLS_MAX),
        ("--timeout", arguments.timeout, 1, 1e9),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{name} {value}: has to be from {least} to {most:g}")
    if arguments.record is not None and arguments.self_test:
        raise ConfigError("--record: a self-test shows nothing of the script; drill it without --self-test")
    if arguments.two and arguments.nproc_per_node < 2:
        raise ConfigError("--two needs two ranks: --nproc-per-node 2 or more")
    return Wishes(
        arguments.nproc_per_node,
        arguments.steps,
        phases.phases_of(arguments.phases),
        arguments.kills,
        arguments.two,
        arguments.self_test,
        arguments.keep is not None,
    )


def _folder(kept: Path | None) -> Path:
    try:
        if kept is None:
            return Path(tempfile.mkdtemp(prefix="lastwords-drill-"))
    except OSError as error:
        raise StorageError(f"cannot write {tempfile.gettempdir()}: {error.strerror}", errno=error.errno or 0) from error
    _make(kept)
    if any(kept.iterdir()):
        raise ConfigError(f"--keep {kept}: the directory is not empty")
    return kept.absolute()


def _make(folder: Path) -> None:
    """Before anything is run, since that takes long. StorageError where that fails, or nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror}", errno=error.errno or 0) from error


def _what(command: Sequence[str], flags: Sequence[str]) -> dict[str, Any]:
    script = Path(command[0])
    digest = hashlib.sha256(script.read_bytes()).hexdigest() if script.is_file() else None
    return {
        "script": command[0],
        "sha256": digest,
        "arguments": [*command[1:]],
        "flags": [*flags],
        "lastwords": __version__,
        "torch": importlib.metadata.version("torch"),
        "python": sys.version.split()[0],
    }


def _drilled(runs: Runs, wishes: Wishes, report: Report, *, as_json: bool) -> ExitCode:
    def say(line: str) -> None:
        print(f"lastwords drill: {line}", file=sys.stderr, flush=True)

    drill(runs, wishes, report, say)
    if report.irreproducible is not None:
        say(
            f"the script is not reproducible by itself: two undisturbed runs differ, first in {report.irreproducible}. "
            f"{_unseeded(report)}Seed all generators, and on a GPU use torch.use_deterministic_algorithms(True)"
        )
        return ExitCode.NOT_REPRODUCIBLE
    if not as_json:
        _show(report)
    if wishes.self_test:
        return _self_test(report)
    for line in [] if as_json else report.advice():
        print(line)
    return ExitCode.OK if report.is_bitwise else ExitCode.NOTHING_FOUND


def _unseeded(report: Report) -> str:
    streams = [name.removeprefix(STREAM).strip() for name in report.set_aside if name.startswith(STREAM)]
    return f"Random streams that differ, too: {', '.join(streams)}. " if streams else ""


def _show(report: Report) -> None:
    title = f"{report.of['script']}: {report.steps} steps on {report.world} ranks"
    columns = ["phase", "killed ranks", "in step", "resumed after", "compared with the undisturbed run"]
    rows = [[tables.plain(cell) for cell in row] for row in report.rows()]
    tables.console().print(tables.table(title, columns, rows, wrap=columns[-1:]))


def _self_test(report: Report) -> ExitCode:
    """Whether the bit that was spoilt was named."""
    (verdict,) = report.verdicts
    found = verdict.at_resume
    if found is not None and (found.kind, found.name, found.rank) == ("parameter", verdict.spoilt, 0):
        print(f"self-test: one bit of {found.name} was spoilt on rank 0, and was found")
        return ExitCode.OK
    print("self-test failed: one bit was spoilt on rank 0, and the drill has not named it")
    return ExitCode.NOTHING_FOUND


def _write(where: str, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=2) + "\n"
    if where == "-":
        sys.stdout.write(text)
        return
    try:
        Path(where).write_text(text)
    except OSError as error:
        raise StorageError(f"cannot write {where}: {error.strerror}", errno=error.errno or 0) from error
