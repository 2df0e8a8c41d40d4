"""`lastwords transform`: its arguments, its progress, and what it says at the end."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from lastwords.checkpoint import load
from lastwords.checkpoint.system import REAL_OS
from lastwords.cli import tables
from lastwords.cli.checkpoint_commands import ExitCode, print_json, say
from lastwords.errors import ConfigError, counted, some
from lastwords.integrations.bars import rank_bars
from lastwords.integrations.transform import prepared, transform
from lastwords.vocabulary import RANKS_MAX

WHOLE = "whole"
_LISTED_MAX = 16


def add_parser(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Adds the command; `add(name, what)` makes a parser without arguments."""
    command = add("transform", "rewrite a checkpoint for other ranks, in the layout that a strategy describes")
    command.add_argument("source", type=Path, metavar="SRC", help="a checkpoint, or the directory that holds them")
    command.add_argument("out", type=Path, metavar="DST", help="the directory in which the new checkpoint appears")
    command.add_argument(
        "--to",
        required=True,
        metavar="STRATEGY",
        help="a strategy file, a checkpoint whose layout is wanted, or `whole`: everything on one rank",
    )
    command.add_argument(
        "--ranks", metavar="LIST", help=("write only the files of these ranks, such as 0,2,4-7 (default: all)")
    )
    command.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help=("number of ranks whose files are written in parallel (default 1)"),
    )
    command.add_argument("--verify", action="store_true", help="read the result back and verify every byte")
    command.add_argument(
        "--dry-run", action="store_true", help=("dry run: print what would be read and written, or why it is rejected")
    )
    command.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Runs the command; returns its exit code."""
    to = None if arguments.to == WHOLE else Path(arguments.to)
    ranks = None if arguments.ranks is None else ranks_of(arguments.ranks)
    if arguments.dry_run:
        return _dry_run(arguments, to, ranks)
    with rank_bars() as progress:
        done = transform(arguments.source, arguments.out, to, ranks=ranks, jobs=arguments.jobs, progress=progress)
    if arguments.json:
        print_json({**asdict(done), "path": None if done.path is None else str(done.path)})
    if done.already and done.written:
        say(f"kept {counted(len(done.already), 'rank')} of an earlier run")
    if done.path is not None:
        problems = load.verify(done.path) if arguments.verify else []
        for problem in problems:
            say(problem.text)
        if problems:
            return ExitCode.DAMAGED
        if not arguments.json:
            print(done.path)
        return ExitCode.OK
    if done.busy == done.missing != ():
        say(
            f"another process is writing the missing ranks ({some(done.missing, _LISTED_MAX)}), and publishes the "
            "checkpoint when it is done"
        )
    elif done.missing:
        say(
            f"not published yet: the files of {len(done.missing)} of {done.world_size} ranks are missing "
            f"({some(done.missing, _LISTED_MAX)}); run the same command for them (--ranks); the last run "
            "publishes the checkpoint"
        )
    else:
        say(
            "all files are written, but another process has locked the destination; it publishes the checkpoint, "
            "or else run the same command again"
        )
    return ExitCode.NOTHING_FOUND  # yet: other ranks' parts are still to be written


def _dry_run(arguments: argparse.Namespace, to: Path | None, ranks: list[int] | None) -> ExitCode:
    with prepared(arguments.source, arguments.out, to, ranks, REAL_OS) as (work, chosen):
        files = list(work.files(chosen))
    total = sum(nbytes for _, nbytes, _ in files)
    if arguments.json:
        parts = [{"rank": rank, "bytes": nbytes, "reads": list(map(str, reads))} for rank, nbytes, reads in files]
        exists = work.final.exists()
        print_json({"path": str(work.final), "exists": exists, "writes": parts, "bytes": total})
        return ExitCode.OK
    console = tables.console()
    rows = [(rank, tables.size(nbytes), ", ".join(map(_short, reads))) for rank, nbytes, reads in files]
    if rows:
        columns = ("rank", "size", "read from")
        console.print(tables.table(f"To be written: {work.final}", columns, rows, right=columns[:2]))
    left = len(files)
    what = (
        f"{counted(left, 'file')}, {tables.size(total)} would be written"
        if left
        else f"{work.final}: nothing is left to write"
    )
    console.print(tables.plain(f"{what}; this was a dry run, and nothing was touched"))
    return ExitCode.OK


def _short(path: Path) -> str:
    return str(Path(path.parent.name) / path.name)


def ranks_of(text: str) -> list[int]:
    """Ranks in words of a person.

    >>> ranks_of("0,2,4-7")
    [0, 2, 4, 5, 6, 7]
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"{text!r} is not a list of ranks; write numbers and ranges, such as 0,2,4-7")
        low, high = int(first), int(last) if dash else int(first)
        if high >= RANKS_MAX:
            raise ConfigError(f"{part.strip()!r} is not a range of ranks: the highest rank is {RANKS_MAX - 1}")
        if high < low:
            raise ConfigError(f"{part.strip()!r} is not a range of ranks; write the smaller number first, such as 4-7")
        found.update(range(low, high + 1))
    return sorted(found)
