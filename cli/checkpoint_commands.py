"""`lastwords latest`, `inspect` and `verify`. Each prints to stdout and returns an exit code."""

from __future__ import annotations

import enum
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from lastwords.checkpoint import drill_record, layout, load
from lastwords.checkpoint.codec import brief
from lastwords.checkpoint.drill_record import Drilled
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.manifest import CheckpointKind, Manifest
from lastwords.checkpoint.part import read_lone_header
from lastwords.checkpoint.remote.store import RemotePath, os_for
from lastwords.checkpoint.starts import Unpublished, find_unpublished
from lastwords.checkpoint.system import where_it_leads
from lastwords.cli import tables
from lastwords.errors import IncompleteError, counted, ranks_text
from lastwords.integrations.bars import bar_of


class ExitCode(enum.IntEnum):
    """What a script learns. Every command keeps to these."""

    OK = 0
    # No checkpoint, no controller answers; `diff`: the two differ; `transform`: parts missing; `drill`: not bitwise
    NOTHING_FOUND = 1
    USAGE = 2  # the command line makes no sense (argparse's own code)
    DAMAGED = 3  # something is there, but damaged, incomplete, or of a newer format
    STORAGE = 4  # the file system refused
    AGAIN = 5  # another process was in the way, at the destination or the source; nothing is damaged
    NOT_REPRODUCIBLE = 6  # `drill`: two runs differ although nothing was killed
    COMMAND_FAILED = 7  # `drill`: the command fails, or hangs, by itself


EXIT_CODE_OF = {
    load.DirectoryStatus.COMPLETE: ExitCode.OK,
    load.DirectoryStatus.INCOMPLETE: ExitCode.DAMAGED,
    load.DirectoryStatus.DAMAGED: ExitCode.DAMAGED,
    load.DirectoryStatus.NEWER: ExitCode.DAMAGED,
    load.DirectoryStatus.UNREADABLE: ExitCode.STORAGE,
}


def latest(root: Path, job: str | None, *, as_json: bool) -> ExitCode:
    """Prints the path of the newest complete checkpoint. Newer ones that were skipped are told on stderr."""
    system = os_for([root])
    path = load.latest(root, job, system)
    if path is None:
        others = [
            found for found in load.scan(root, system, job=job) if found.status is not load.DirectoryStatus.COMPLETE
        ]
        of_job = "" if job is None else f" of job {job}"
        say(f"no complete checkpoint{of_job} in {root}")
        if as_json:
            print_json({"path": None, "incomplete": [_found_json(found) for found in others]})
        return _worst(others) if others else ExitCode.NOTHING_FOUND
    if not as_json:
        print(path)
        return ExitCode.OK
    try:
        manifest = load.open_checkpoint(path, system).manifest
    except IncompleteError:
        if system.exists(path):
            raise
        return latest(root, job, as_json=as_json)  # it has just been pruned, so there is a newer one
    print_json({"path": str(path), **_summary_json(manifest)})
    return ExitCode.OK


def inspect(path: Path, *, as_json: bool, tensors: bool, everything: bool = False) -> ExitCode:
    """Shows one checkpoint, one .ckpt file, or the list of checkpoints in a directory.

    everything: every reason of every rank why a resume is not exact; otherwise they are folded. JSON has them always.
    """
    if path.is_file() and path.name != layout.MANIFEST_NAME:
        return _inspect_file(path, as_json=as_json)
    if is_checkpoint(path):
        return _inspect_one(load.examine(path, os_for([path])), as_json=as_json, tensors=tensors, everything=everything)
    return _inspect_all(path, as_json=as_json, everything=everything)


def verify(path: Path, *, as_json: bool, deep: bool) -> ExitCode:
    """Checks one checkpoint, or all in a directory, and lists every problem."""
    results = _verified(path, deep) or _verified(path, deep)  # if all were pruned meanwhile, there are newer ones
    if not results:
        return nothing(path, as_json=as_json, empty={"checkpoints": []})
    if as_json:
        print_json(
            {
                "deep": deep,
                "checkpoints": [
                    {
                        "path": str(found.path),
                        "kind": found.manifest.kind.value if found.manifest is not None else None,
                        "sound": not problems,
                        "bytes": found.manifest.total_bytes if found.manifest is not None else None,
                        "problems": [{"file": problem.file, "text": problem.text} for problem in problems],
                    }
                    for found, problems in results
                ],
            }
        )
    else:
        root = path.parent if is_checkpoint(path) else path
        rows = [
            (
                found.path.name,
                found.manifest.kind.value if found.manifest else "",
                Text("not sound", "red") if problems else Text("sound", "green"),
                "\n".join(problem.text for problem in problems).replace(f"{root}/", "") or _size(found),
            )
            for found, problems in results
        ]
        what = "every byte" if deep else "manifests, sizes and headers"
        tables.console().print(
            tables.table(f"Checked {what} in {root}", ("checkpoint", "kind", "result", ""), rows, wrap=("",))
        )
    worst = max((_code_of(found, problems) for found, problems in results))
    if isinstance(path, RemotePath) and worst is ExitCode.DAMAGED:
        url = path.parent if is_checkpoint(path) else path
        say(f"where DIR still has such a checkpoint, `lastwords upload --verify DIR {url}` sends again what is damaged")
    return worst


def _verified(path: Path, deep: bool) -> list[tuple[load.Found, list[load.Problem]]]:
    """Without those that a job has removed while they were looked at: nothing is wrong with them."""
    results, system = [], os_for([path])
    for found in [load.examine(path, system)] if is_checkpoint(path) else load.scan(path, system):
        total = found.manifest.total_bytes if found.manifest is not None and deep else 0
        with bar_of(found.path.name, total) as on_bytes:
            problems = load.verify(found.path, deep, system, on_bytes)
        if not problems or found.path == path or system.exists(found.path):
            results.append((found, problems))
    return results


def is_checkpoint(path: Path) -> bool:
    """True for a directory that is a checkpoint by its name or its manifest, however damaged it may be."""
    names, system = (path.name, where_it_leads(path).name), os_for([path])
    named = any(layout.CheckpointName.parse(name) is not None for name in names) and (
        system.leads_to_directory(path) or system.is_link(path)
    )
    return named or system.exists(path / layout.MANIFEST_NAME)


def _code_of(found: load.Found, problems: list[load.Problem]) -> ExitCode:
    if not problems:
        return ExitCode.OK
    return ExitCode.STORAGE if found.status is load.DirectoryStatus.UNREADABLE else ExitCode.DAMAGED


def _worst(found: list[load.Found]) -> ExitCode:
    return max(EXIT_CODE_OF[item.status] for item in found)


def nothing(path: Path, *, as_json: bool, empty: dict[str, Any], why: str = "") -> ExitCode:
    """Says that there is no checkpoint, or `why` there is none to be taken; with --json the document `empty`."""
    found = os_for([path]).leads_to_directory(path)
    say(why or (f"there is no checkpoint in {path}" if found else f"there is nothing at {path}"))
    if as_json:
        print_json(empty)
    return ExitCode.NOTHING_FOUND


# ---------------------------------------------------------------------- inspect


def _inspect_all(root: Path, *, as_json: bool, everything: bool) -> ExitCode:
    found, kept = load.scan(root, os_for([root])), [] if isinstance(root, RemotePath) else find_unpublished(root)
    if not found and not as_json:
        _print_drilled(root)
        _print_unpublished(kept)
    if not found:
        return nothing(root, as_json=as_json, empty={"checkpoints": [], "unpublished": _unpublished_json(kept)})
    if as_json:
        checkpoints = [_found_json(item) for item in found]
        print_json({"checkpoints": checkpoints, "unpublished": _unpublished_json(kept), "drilled": _drilled_json(root)})
    else:
        rows = [
            (
                item.path.name,
                _state(item),
                item.manifest.global_step if item.manifest else "",
                item.manifest.kind.value if item.manifest else "",
                tables.moment(item.manifest.published_unix_ns) if item.manifest else "",
                _size(item),
                item.manifest.job if item.manifest else "",
                _exact(item.manifest, everything=everything, most=1) if item.manifest else "",
                item.why.replace(f"{root}/", "") or (item.manifest.reason if item.manifest else ""),
            )
            for item in found
        ]
        columns = ("checkpoint", "state", "step", "kind", "published", "size", "job", "exact", "why")
        title = f"Checkpoints in {root}, newest first"
        tables.console().print(
            tables.table(title, columns, rows, right=("step", "size"), cut=("job",), wrap=("exact", "why"))
        )
        _print_drilled(root)
        _print_unpublished(kept)
    if any(item.status is load.DirectoryStatus.COMPLETE for item in found):
        return ExitCode.OK
    return _worst(found)


def _print_unpublished(kept: list[Unpublished]) -> None:
    """What incidents without a checkpoint have left, and what can be done with it."""
    if not kept:
        return
    rows = [
        (
            one.path.name,
            one.global_step,
            one.job,
            tables.numbers(one.ranks),
            f"whole: rename it to {layout.CheckpointName(one.global_step)}" if one.whole else "parts only",
        )
        for one in kept
    ]
    columns = ("directory", "step", "job", "finished parts of ranks", "")
    title = "Unpublished files, kept until you remove them"
    tables.console().print(tables.table(title, columns, rows, right=("step",), cut=("job",), wrap=("",)))


def _unpublished_json(kept: list[Unpublished]) -> list[dict[str, Any]]:
    return [
        {"path": str(one.path), "step": one.global_step, "job": one.job, "ranks": list(one.ranks), "whole": one.whole}
        for one in kept
    ]


def _inspect_one(found: load.Found, *, as_json: bool, tensors: bool, everything: bool) -> ExitCode:
    code = EXIT_CODE_OF[found.status]
    if as_json:
        content = None if found.manifest is None else json.loads(found.manifest.encode())
        beside = _drilled_json(found.path.parent, found.manifest)
        print_json({**_found_json(found), "drilled": beside, "manifest": content})
        return code
    if found.manifest is None:
        say(found.why)
        return code
    console = tables.console()
    _print_manifest(console, found, found.manifest, everything=everything)
    if tensors:
        specs = [spec for unit in found.manifest.units.values() for spec in unit.tensors]
        specs += [spec for local in found.manifest.locals.values() for spec in local.tensors]
        console.print(_tensor_table(specs))
    return code


def _print_manifest(console: Console, found: load.Found, manifest: Manifest, *, everything: bool) -> None:
    rows: list[tuple[str, object]] = [
        ("checkpoint", found.path),
        ("state", _state(found)),
        ("step", f"{manifest.global_step} ({_place(manifest)})"),
        ("published", tables.moment(manifest.published_unix_ns)),
        ("kind", manifest.kind.value),
        ("because", manifest.reason),
        ("caused by", ranks_text(manifest.cause_ranks) if manifest.cause_ranks else "nobody"),
        ("job", manifest.job),
        *([("resumed from", manifest.parent_job)] if manifest.parent_job else []),
        ("taken in", f"generation {manifest.generation}, {_which(manifest)}"),
        ("world size", _world(manifest)),
        ("size", f"{tables.size(manifest.total_bytes)} in {counted(len(manifest.files), 'file')}"),
        ("exact resume", _exact(manifest, everything=everything)),
        *([("drilled", text)] if (text := _drilled(found.path.parent, manifest)) else []),
    ]
    if found.why:
        rows.insert(2, ("problem", tables.plain(found.why, "red")))
    console.print(tables.facts(rows))
    console.print()
    columns = ("unit", "written by rank", "tensors", "size", "types", "file")
    units = [
        (name, tables.numbers(set(unit.writers)), *tables.amount(unit.tensors), _types(unit.tensors), unit.file)
        for name, unit in manifest.units.items()
    ]
    console.print(tables.table("Units", columns, units, right=columns[1:4], wrap=("types",)))
    columns = ("rank", "written by rank", "tensors", "size", "exact", "file")
    locals_ = [
        (
            rank,
            local.writer,
            *tables.amount(local.tensors),
            "yes" if local.exact else f"no: {'; '.join(map(str, local.reasons))}" if everything else "no, see above",
            local.file,
        )
        for rank, local in manifest.locals.items()
    ]
    console.print(tables.table("Rank-local state", columns, locals_, right=columns[:4], wrap=("exact",)))
    if manifest.facts:
        facts = [(name, tables.short(value)) for name, value in manifest.facts.items()]
        console.print(tables.table("Recorded with it", ("what", "value"), facts, wrap=("value",)))


def _inspect_file(path: Path, *, as_json: bool) -> ExitCode:
    header = read_lone_header(path)
    specs = [spec for spec, _, _ in header.tensors.values()]
    if as_json:
        print_json(
            {
                "path": str(path),
                "bytes": header.file_bytes,
                "metadata": dict(header.metadata),
                "tensors": [
                    {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "begin": begin, "end": end}
                    for spec, begin, end in header.tensors.values()
                ],
            }
        )
        return ExitCode.OK
    console = tables.console()
    console.print(tables.facts([("file", path), ("size", tables.size(header.file_bytes)), ("tensors", len(specs))]))
    console.print()
    console.print(_tensor_table(specs))
    return ExitCode.OK


def _tensor_table(specs: list[TensorSpec]) -> Any:
    columns = ("tensor", "type", "shape", "of", "at", "size")
    rows = [
        (
            spec.name,
            spec.dtype,
            _shape(spec.shape),
            "" if spec.shape == spec.global_shape else _shape(spec.global_shape),
            "" if spec.shape == spec.global_shape else _shape(spec.offsets),
            tables.size(spec.nbytes),
        )
        for spec in specs
    ]
    return tables.table("Tensors", columns, rows, right=("size",))


def _shape(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes)) or "scalar"


def _types(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{count} {dtype}" for dtype, count in sorted(Counter(spec.dtype for spec in specs).items()))


def _exact(manifest: Manifest, *, everything: bool, most: int = tables.SHOWN_MAX) -> Text:
    if manifest.exact:
        return Text("yes", "green")
    lines = tables.shortened(manifest.reasons, everything=everything, most=most)
    return tables.plain("no, because " + "\n".join(lines), "yellow")


def _beside(root: Path, manifest: Manifest | None) -> Drilled | None:
    """What a drill has covered, and what has changed since: in the script, if it is here, or in the saved run."""
    found, why = (None, "") if isinstance(root, RemotePath) else drill_record.read(root)
    if why:
        say(why)
    if found is None:
        return None
    digest = drill_record.digest_of(Path(found.script)) or found.sha256
    torch, world_size = (None, None) if manifest is None else (manifest.run.torch, manifest.world_size)
    return found.beside((digest, found.arguments_sha256), torch=torch, world_size=world_size)


def _drilled(root: Path, manifest: Manifest | None = None) -> str:
    found = _beside(root, manifest)
    if found is None:
        return ""
    what = drill_record.summary(found.drills) if found.reproducible else "two undisturbed runs differ"
    of = f"{found.script}, {found.world_size} ranks, torch {found.torch}, lastwords {found.lastwords}"
    changed = "".join(f"\nno longer: {one}" for one in found.changed)
    return f"{tables.moment(found.drilled_unix_ns)}, {of}: {what}{changed}"


def _print_drilled(root: Path) -> None:
    if text := _drilled(root):
        print(tables.plain(f"drilled {text}").plain)


def _drilled_json(root: Path, manifest: Manifest | None = None) -> dict[str, Any] | None:
    found = _beside(root, manifest)
    return None if found is None else asdict(found)


def _state(found: load.Found) -> Text:
    return tables.plain(found.status.value, "green" if found.status is load.DirectoryStatus.COMPLETE else "red")


def _size(found: load.Found) -> str:
    return tables.size(found.manifest.total_bytes) if found.manifest else ""


def _which(manifest: Manifest) -> str:
    if manifest.kind is CheckpointKind.PERIODIC:
        return f"periodic checkpoint {manifest.attempt}"
    return f"incident {manifest.incident}, attempt {manifest.attempt}"


def _place(manifest: Manifest) -> str:
    if not manifest.named:
        return "not known: the loop had not named its epoch and step yet"
    return f"epoch {manifest.epoch}, step {manifest.step}"


# ---------------------------------------------------------------------- output


def _summary_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "global_step": manifest.global_step,
        "epoch": manifest.epoch if manifest.named else None,
        "step": manifest.step if manifest.named else None,
        "job": manifest.job,
        "generation": manifest.generation,
        "kind": manifest.kind.value,
        "world_size": manifest.world_size,
        "holders_world_size": manifest.holders_world_size,
        "published_unix_ns": manifest.published_unix_ns,
        "bytes": manifest.total_bytes,
        "reason": manifest.reason,
        "cause_ranks": list(manifest.cause_ranks),
        "exact": manifest.exact,
        "reasons": [brief(reason) for reason in manifest.reasons],
    }


def _world(manifest: Manifest) -> str:
    if not manifest.moved:
        return str(manifest.world_size)
    return f"{manifest.world_size}; its units were moved to {manifest.holders_world_size} (lastwords transform)"


def _found_json(found: load.Found) -> dict[str, Any]:
    summary = {} if found.manifest is None else _summary_json(found.manifest)
    return {"path": str(found.path), "state": found.status.value, "why": found.why, **summary}


def print_json(content: dict[str, Any]) -> None:
    """The one document of a command with --json."""
    json.dump(content, sys.stdout, indent=2)
    sys.stdout.write("\n")


def say(text: str) -> None:
    """A line on stderr."""
    print(f"lastwords: {tables.plain(text).plain}", file=sys.stderr)
