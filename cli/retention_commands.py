"""`lastwords ls` and `prune`: which checkpoints there are, and the removal of old ones."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.text import Text

from lastwords import clock, log_lines
from lastwords.checkpoint import load, removal, retention
from lastwords.checkpoint.manifest import Claimed, read_manifest
from lastwords.checkpoint.remote import transfer, uploader
from lastwords.checkpoint.remote.store import RemotePath, Store, address_of, os_for, place
from lastwords.checkpoint.remote.uploader import Uploader, follow, wait_on
from lastwords.checkpoint.retention import VerifiedOnce
from lastwords.checkpoint.system import Os
from lastwords.cli import checkpoint_commands as commands
from lastwords.cli import tables
from lastwords.cli.checkpoint_commands import ExitCode
from lastwords.errors import CheckpointError, ConfigError, IncompleteError, StorageError
from lastwords.integrations.bars import bar_of, bars

Add = Callable[[str, str], argparse.ArgumentParser]


def add_parsers(add: Add) -> None:
    """Adds the commands; `add(name, what)` makes a parser without arguments."""
    ls = add("ls", "list the checkpoints in PATH, newest first")
    prune = add("prune", "remove old checkpoints, never the newest, nor one that is being read: docs/operating.md")
    for command in (ls, prune):
        command.add_argument(
            "path", type=place, metavar="PATH", help="the directory that holds the checkpoints, or a URL"
        )
        command.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    rule = prune.add_mutually_exclusive_group(required=True)
    rule.add_argument("--keep", type=_positive, default=0, metavar="N", help="keep so many of the newest")
    rule.add_argument("--per-minutes", type=_positive, default=0, metavar="M", help="keep one in so many minutes")
    prune.add_argument("--last-words", action="store_true", help="count and remove last words, too")
    prune.add_argument("--job", action="append", metavar="JOB", help="whose; needed if there are several jobs")
    prune.add_argument("--not-uploaded", action="store_true", help="remove what has not been uploaded yet, too")
    prune.add_argument("--dry-run", action="store_true", help="remove nothing; show what would go")
    upload = add("upload", "upload the complete checkpoints in PATH to a remote store: docs/running.md")
    upload.add_argument("path", type=Path, metavar="PATH", help="the directory that holds the checkpoints")
    upload.add_argument("url", type=address_of, metavar="URL", help="a directory in a store, such as s3://bucket/job")
    upload.add_argument("--job", help="only checkpoints of this job")
    upload.add_argument("--fallback", type=Path, metavar="DIR", help="a second directory that holds checkpoints")
    how = upload.add_mutually_exclusive_group()
    how.add_argument("--follow", action="store_true", help="go on with new ones until standard input ends")
    how.add_argument("--verify", action="store_true", help="read all that is there, and send again what is damaged")
    upload.add_argument("--json", action="store_true", help="print one JSON document")


def listed(root: Path, *, as_json: bool) -> ExitCode:
    """Prints every checkpoint in `root`, newest first."""
    found = load.scan(root, os_for([root]))
    if not found:
        return commands.nothing(root, as_json=as_json, empty={"checkpoints": []})
    now_ns = clock.wall_ns()
    if as_json:
        commands.print_json({"checkpoints": [_json(one, now_ns) for one in found]})
    else:
        columns = ("checkpoint", "step", "kind", "size", "age", "complete", "exact", "job")
        rows = [_row(one, now_ns) for one in found]
        tables.console().print(
            tables.table(f"Checkpoints in {root}", columns, rows, right=("step", "size", "age"), cut=("job",))
        )
    if any(one.status is load.DirectoryStatus.COMPLETE for one in found):
        return ExitCode.OK
    return max(commands.EXIT_CODE_OF[one.status] for one in found)


def _row(one: load.Found, now_ns: int) -> tuple[object, ...]:
    complete = (
        Text("yes", "green") if one.status is load.DirectoryStatus.COMPLETE else Text(f"no: {one.status.value}", "red")
    )
    said = one.manifest
    if said is None:
        return (one.path.name, "", "", "", "", complete, "", "")
    age = tables.age((now_ns - said.published_unix_ns) / 1e9)
    exact = Text("yes", "green") if said.exact else Text("no", "yellow")
    size = tables.size(said.total_bytes)
    return (one.path.name, said.global_step, said.kind.value, size, age, complete, exact, said.job)


def _json(one: load.Found, now_ns: int) -> dict[str, Any]:
    said = one.manifest
    about: dict[str, Any] = {
        "path": str(one.path),
        "complete": one.status is load.DirectoryStatus.COMPLETE,
        "why": one.why,
    }
    if said is not None:
        about |= {
            "global_step": said.global_step,
            "kind": said.kind.value,
            "bytes": said.total_bytes,
            "published_unix_ns": said.published_unix_ns,
            "age_s": (now_ns - said.published_unix_ns) / 1e9,
            "job": said.job,
            "exact": said.exact,
        }
    return about


def prune(arguments: argparse.Namespace) -> list[CheckpointError] | None:
    """Prunes each of the jobs that were named, or the only one, and prints what went.

    Returns why something that was to go is still there; None if there are no checkpoints.
    """
    root: Path = arguments.path
    rules = retention.Rules(arguments.keep, arguments.per_minutes, arguments.last_words)
    system = os_for([root])
    verified = VerifiedOnce(lambda path: bar_of(path.name, read_manifest(path, system).total_bytes))
    goes_anyway = arguments.not_uploaded or isinstance(root, RemotePath)
    spared = (lambda _: False) if goes_anyway else uploader.not_uploaded(root)
    jobs = list(dict.fromkeys(arguments.job or _only_job(root, system)))
    try:
        plans = [retention.plan([root], job, rules, system, verified=verified, spared=spared) for job in jobs]
    except StorageError as error:
        raise StorageError(f"nothing is removed: {error}", errno=error.errno) from error
    others = list(dict.fromkeys(text for made in plans for text in made.others))
    without = [job for job, made in zip(jobs, plans, strict=True) if not made.keep]
    strange = _not_there(root, without, system)
    if len(without) == len(jobs) and (strange or not others):
        for there in load.scan(root, system):
            if there.status is load.DirectoryStatus.UNREADABLE:
                raise StorageError(f"nothing is removed: {there.why}")
        empty: dict[str, Any] = {"removed": [], "left": [], "kept": [], "others": []}
        commands.nothing(root, as_json=arguments.json, empty=empty, why=strange)
        return None
    if strange:
        commands.say(strange)
    if arguments.dry_run:
        outcomes = [retention.RemovalOutcome(one.path, one.said) for made in plans for one in reversed(made.remove)]
    else:
        if not isinstance(root, RemotePath):
            retention.finish([root])
        carry_out = functools.partial(retention.carry_out, os=system, verified=verified, remove=_remover(root))
        outcomes = [outcome for made in plans for outcome in carry_out(made)]
    kept = [one for made in plans for one in made.keep]
    if arguments.json:
        commands.print_json(_outcomes_json(outcomes, kept, others, dry_run=arguments.dry_run))
    else:
        _print_outcomes(root, outcomes, kept, dry_run=arguments.dry_run)
    for text in others:
        commands.say(f"left as it is: {text}")
    for one in (one for made in plans for one in made.spared):
        commands.say(f"left as it is: {one.path} has not been uploaded yet")
    left = [outcome.left for outcome in outcomes if outcome.left is not None]
    if not kept:
        left.append(IncompleteError(f"no checkpoint in {root} is sound", missing=(str(root),)))
    for why in left:
        commands.say(str(why))
    return left


def _remover(root: Path) -> Callable[[Path, Claimed, Os], None]:
    if not isinstance(root, RemotePath):
        return removal.remove
    store = Store(root)
    return lambda path, said, _: transfer.remove(RemotePath(path), said, store)


def _only_job(root: Path, system: Os) -> list[str]:
    jobs = retention.jobs_in(root, system)
    if len(jobs) > 1:
        raise ConfigError(f"{root} holds checkpoints of the jobs {', '.join(jobs)}: say with --job whose to prune")
    return jobs


def _not_there(root: Path, jobs: list[str], system: Os) -> str:
    """That some of `jobs` have nothing here, and who has; "" if that is not so."""
    there = retention.jobs_in(root, system) if jobs else []
    strange = [job for job in jobs if job not in there]
    if not strange or not there:
        return ""
    named = f"job {strange[0]}" if len(strange) == 1 else f"the jobs {', '.join(strange)}"
    return f"there is no checkpoint of {named} in {root}; the jobs there: {', '.join(there)}"


def _print_outcomes(
    root: Path, outcomes: list[retention.RemovalOutcome], kept: list[retention.CompleteCheckpoint], *, dry_run: bool
) -> None:
    rows = [
        (one.path.name, one.said.global_step, one.said.kind.value, one.said.job) for one in outcomes if one.left is None
    ]
    if rows:
        title = f"{'Would be removed' if dry_run else 'Removed'} from {root}"
        columns = ("checkpoint", "step", "kind", "job")
        tables.console().print(tables.table(title, columns, rows, right=("step",), cut=("job",)))
    else:
        tables.console().print("nothing to remove" if not outcomes else "nothing was removed")
    if kept:
        tables.console().print(f"{len(kept)} kept; the newest is {kept[0].path.name}")


def _outcomes_json(
    outcomes: list[retention.RemovalOutcome],
    kept: list[retention.CompleteCheckpoint],
    others: list[str],
    *,
    dry_run: bool,
) -> dict[str, Any]:
    def one_json(path: Path, said: Any) -> dict[str, Any]:
        return {"path": str(path), "kind": said.kind.value, **dataclasses.asdict(said)}

    return {
        "dry_run": dry_run,
        "removed": [one_json(one.path, one.said) for one in outcomes if one.left is None],
        "left": [{**one_json(one.path, one.said), "why": str(one.left)} for one in outcomes if one.left is not None],
        "kept": [one_json(one.path, one.said) for one in kept],
        "others": others,
    }


def _positive(text: str) -> int:
    """Of an option."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


# `lastwords upload`: checkpoints go to a remote store, once or as they are published.

_NICE = 10
"""Training goes first."""


def upload(arguments: argparse.Namespace) -> ExitCode:
    """Uploads, and prints what has been uploaded now. Raises StorageError if the store refuses."""
    root: Path = arguments.path
    to: RemotePath = arguments.url
    roots = [root, *([arguments.fallback] if arguments.fallback is not None else [])]
    if arguments.follow:
        output = logging.StreamHandler(sys.stderr)
        output.setFormatter(log_lines.formatter(logging.Formatter("%(asctime)s upload: %(message)s")))
        logging.basicConfig(level=logging.INFO, handlers=[output], force=True)
        log_lines.know(**({"job": arguments.job} if arguments.job else {}))
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
        uploader = Uploader(roots, to, arguments.job)
        everything = follow(uploader.upload_missing, wait_on(sys.stdin.fileno()))
        return ExitCode.OK if everything else ExitCode.STORAGE
    if not root.is_dir():
        return commands.nothing(root, as_json=arguments.json, empty={"uploaded": []})
    for missing in (one for one in roots[1:] if not one.is_dir()):
        commands.say(f"there is nothing at {missing}")
    with bars() as tell:
        uploaded = Uploader(roots, to, arguments.job, on_progress=tell).upload_missing(
            again=True, verify=arguments.verify
        )
    there = [] if uploaded else [one for directory in roots for one in load.scan(directory, job=arguments.job)]
    if not uploaded and not any(one.status is load.DirectoryStatus.COMPLETE for one in there):
        return _nothing_whole(root, there, arguments)
    if arguments.json:
        commands.print_json({"uploaded": [{"path": str(one.path), "to": str(to / one.name)} for one in uploaded]})
    else:
        for one in uploaded:
            print(f"{to / one.name}")
    return ExitCode.OK


def _nothing_whole(root: Path, there: list[load.Found], arguments: argparse.Namespace) -> ExitCode:
    """Says why nothing can be uploaded. there: what is not whole."""
    if not there:
        why = _not_there(root, [arguments.job] if arguments.job else [], os_for([root]))
        return commands.nothing(root, as_json=arguments.json, empty={"uploaded": []}, why=why)
    for one in there:
        commands.say(one.why)
    if arguments.json:
        commands.print_json({"uploaded": []})
    return max(commands.EXIT_CODE_OF[one.status] for one in there)
