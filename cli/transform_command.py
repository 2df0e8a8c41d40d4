"""`lastwords transform`: its arguments, its progress, and what it says at the end."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from lastwords.checkpoint.strategy import WORLD_SIZE_MAX
from lastwords.cli import tables
from lastwords.cli.checkpoint_commands import print_json, say
from lastwords.errors import ConfigError
from lastwords.integrations.bars import rank_bars
from lastwords.integrations.transform import Outcome, transform

WHOLE = "whole"
RANKS_MISSING = 1
"""Exit code where other ranks' parts are still to be written: `NOTHING_FOUND`, no checkpoint is there yet."""

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
        help="a strategy file, a checkpoint whose layout is meant, or the word `whole`: everything on one rank",
    )
    command.add_argument("--ranks", metavar="LIST", help="only these ranks' parts, such as 0,2,4-7 (default: all)")
    command.add_argument("--jobs", type=int, default=1, metavar="N", help="parts that are written at once (default 1)")
    command.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    to = None if arguments.to == WHOLE else Path(arguments.to)
    ranks = None if arguments.ranks is None else ranks_of(arguments.ranks)
    with rank_bars() as progress:
        done = transform(arguments.source, arguments.out, to, ranks=ranks, jobs=arguments.jobs, progress=progress)
    if arguments.json:
        print_json(
            {
                "path": None if done.path is None else str(done.path),
                "global_step": done.global_step,
                "world_size": done.world_size,
                "written": list(done.written),
                "already": list(done.already),
                "missing": list(done.missing),
            }
        )
    if done.already and done.written:
        say(f"{len(done.already)} rank(s) had been written before and were kept")
    if done.path is not None:
        if not arguments.json:
            print(done.path)
        return 0
    if done.missing:
        say(
            f"not published yet: the parts of {len(done.missing)} of {done.world_size} ranks are missing "
            f"({_listed(done)}); run the same command for them (--ranks), and the last one publishes"
        )
    else:
        say("all parts are written; another process is publishing them")
    return RANKS_MISSING


def ranks_of(text: str) -> list[int]:
    """Ranks in words of a person.

    >>> ranks_of("0,2,4-7")
    [0, 2, 4, 5, 6, 7]
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"{text!r} is no list of ranks; write numbers and ranges, such as 0,2,4-7")
        low, high = int(first), int(last) if dash else int(first)
        if high >= WORLD_SIZE_MAX:
            raise ConfigError(f"{part.strip()!r} is no range of ranks: they go up to {WORLD_SIZE_MAX - 1}")
        if high < low:
            raise ConfigError(f"{part.strip()!r} is no range of ranks; write the smaller one first, such as 4-7")
        found.update(range(low, high + 1))
    return sorted(found)


def _listed(done: Outcome) -> str:
    shown = tables.numbers(done.missing[:_LISTED_MAX])
    return shown + (", ..." if len(done.missing) > _LISTED_MAX else "")
