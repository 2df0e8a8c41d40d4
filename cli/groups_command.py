"""`lastwords groups`: units, who holds them, and what may die. From group_info files or a checkpoint's manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text

from lastwords.checkpoint import load
from lastwords.checkpoint.manifest import Manifest
from lastwords.cli import tables
from lastwords.cli.checkpoint_commands import EXIT_CODE_OF, ExitCode, is_checkpoint, nothing, print_json, say
from lastwords.errors import NAMED_RANKS_MAX, GroupInfoError, counted, ranks_text, some
from lastwords.sharding.describe import may_die
from lastwords.sharding.group_info import GroupInfo, read_group_info
from lastwords.vocabulary import UNIT_REPLICATED

_OWN_NAME = "group_info"
"""A file *.pb that is no group_info file is somebody else's, unless its name begins like this."""


@dataclass(frozen=True, slots=True)
class _UnitRow:
    """A unit. holders: None where they were not recorded; writers and file (the first one's): in a checkpoint."""

    unit: str
    holders: tuple[int, ...] | None
    writers: tuple[int, ...] = ()
    file: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "holders": None if self.holders is None else list(self.holders),
            "may_die": None if self.holders is None else len(self.holders) - 1,
            "writer": self.writers[0] if self.writers else None,
            "file": self.file or None,
        } | ({"writers": list(self.writers)} if len(self.writers) > 1 else {})


@dataclass(frozen=True, slots=True)
class _Groups:
    """What was found, whatever it was read from."""

    source: str
    path: Path
    world_size: int
    rows: tuple[_UnitRow, ...]
    notes: tuple[str, ...] = ()
    ranks: Mapping[int, tuple[tuple[int, ...], Path]] = field(default_factory=dict)
    """Rank -> its redundancy group and its file; of group_info files only."""

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "path": str(self.path),
            "world_size": self.world_size,
            "units": [row.to_json() for row in self.rows],
            "groups": [
                {"rank": rank, "group": list(group), "file": str(path)}
                for rank, (group, path) in sorted(self.ranks.items())
            ],
            "notes": list(self.notes),
        }


def groups(path: Path, *, as_json: bool) -> ExitCode:
    """Shows the units of a checkpoint, of the group_info files in a directory, or of its newest checkpoint."""
    empty: dict[str, Any] = {"path": str(path), "units": []}
    if is_checkpoint(path):
        return _of_checkpoint(load.examine(path), as_json=as_json)
    sound, problems = _read_all(path)
    if problems:
        return _damaged(path, problems, as_json=as_json)
    if sound:
        contradictions = list(_contradictions(sound))
        if contradictions:
            return _damaged(path, contradictions, as_json=as_json)
        _show(_of_files(path, sound), as_json=as_json)
        return ExitCode.OK
    checkpoints = load.scan(path) if path.is_dir() else []
    complete = [found for found in checkpoints if found.status is load.DirectoryStatus.COMPLETE]
    if checkpoints:
        return _of_checkpoint((complete or checkpoints)[0], as_json=as_json)
    if path.is_dir():
        say(f"there is neither a group_info file nor a checkpoint in {path}")
        if as_json:
            print_json(empty)
        return ExitCode.NOTHING_FOUND
    return nothing(path, as_json=as_json, empty=empty)


# ---------------------------------------------------------------------- group_info files


def _read_all(path: Path) -> tuple[dict[Path, GroupInfo], list[str]]:
    """Sound files by their paths, and what is wrong with the others."""
    sound: dict[Path, GroupInfo] = {}
    problems: list[str] = []
    if path.is_file():
        candidates = [path]
    else:
        candidates = sorted({*path.glob("*.pb"), *path.glob("*/*.pb"), *path.glob(f"{_OWN_NAME}*")})
    for candidate in candidates:
        if not candidate.is_file():
            continue
        try:
            sound[candidate] = read_group_info(candidate)
        except GroupInfoError as error:
            if candidate == path or candidate.name.startswith(_OWN_NAME):
                problems.append(str(error))
    return sound, problems


def _contradictions(found: Mapping[Path, GroupInfo]) -> Iterator[str]:
    """Why these files cannot be of one job."""
    remedy = "the files are of different jobs: remove the files of the older job"
    first, *others = found
    of_rank: dict[int, Path] = {}
    holders: dict[str, tuple[tuple[int, ...], Path]] = {}
    for path in (first, *others):
        info = found[path]
        if info.world_size != found[first].world_size:
            yield (
                f"{first} is of a job with {found[first].world_size} ranks and {path} of one with {info.world_size}; "
                f"{remedy}"
            )
            continue
        same = of_rank.setdefault(info.rank, path)
        if found[same] != info:
            yield f"{same} and {path} are both of rank {info.rank}, but differ; {remedy}"
        for unit, ranks in info.units.items():
            before, where = holders.setdefault(unit, (ranks, path))
            if before != ranks:
                yield (
                    f"{where} says that unit {unit!r} is held by {ranks_text(before)}, {path} says by "
                    f"{ranks_text(ranks)}; {remedy}"
                )
    for path, info in found.items():
        for unit, (ranks, where) in holders.items():
            if info.rank in ranks and unit not in info.units and info.world_size == found[first].world_size:
                yield f"{where} says that rank {info.rank} holds unit {unit!r}, {path} does not; {remedy}"


def _of_files(path: Path, found: Mapping[Path, GroupInfo]) -> _Groups:
    units = {unit: holders for info in found.values() for unit, holders in info.units.items()}
    ranks = {info.rank: (info.group, file) for file, info in found.items()}
    world_size = next(iter(found.values())).world_size
    notes = []
    missing = [rank for rank in range(world_size) if rank not in ranks]
    if missing and not path.is_file():
        notes.append(f"there is no group_info file of {ranks_text(missing)} here")
    rows = tuple(
        _UnitRow(unit, units[unit]) for unit in sorted(units, key=lambda unit: (-len(units[unit]), units[unit]))
    )
    return _Groups("group_info", path, world_size, rows, (*notes, *_unprotected(rows, world_size)), ranks)


# ---------------------------------------------------------------------- checkpoints


def _of_checkpoint(found: load.Found, *, as_json: bool) -> ExitCode:
    code = EXIT_CODE_OF[found.status]
    if found.why:
        say(found.why)
    if found.manifest is None:
        if as_json:
            print_json({"path": str(found.path), "units": [], "problems": [found.why]})
        return code
    manifest = found.manifest
    recorded = {unit: _holders(manifest, unit) for unit in manifest.units}
    rows = tuple(
        _UnitRow(unit, recorded[unit], entry.writers, entry.file)
        for unit, entry in sorted(manifest.units.items(), key=lambda item: (-len(recorded[item[0]] or ()), item[0]))
    )
    notes = _unprotected(rows, manifest.holders_world_size)
    if None in recorded.values():
        notes = (*notes, "this checkpoint does not say which ranks held its units")
    _show(_Groups("manifest", found.path, manifest.holders_world_size, rows, notes), as_json=as_json)
    return code


def _holders(manifest: Manifest, unit: str) -> tuple[int, ...] | None:
    """Ranks that held a unit, as far as the manifest tells and they are of this job."""
    ranks = manifest.units[unit].meta.holders
    if ranks is None and unit == UNIT_REPLICATED:
        return tuple(range(manifest.holders_world_size))  # what every rank holds, by its name
    if ranks is None or max(ranks) >= manifest.holders_world_size:
        return None
    return tuple(sorted(set(ranks)))


# ---------------------------------------------------------------------- output


def _unprotected(rows: Sequence[_UnitRow], world_size: int) -> tuple[str, ...]:
    alone = [row for row in rows if row.holders is not None and len(row.holders) == 1]
    if not alone or world_size == 1:
        return ()
    ranks = sorted({row.holders[0] for row in alone if row.holders is not None})
    return (
        (
            f"no redundancy: part of the state is held by {ranks_text(ranks)} alone; if such a rank dies, only an "
            "older checkpoint remains"
        ),
    )


def _show(found: _Groups, *, as_json: bool) -> None:
    if as_json:
        print_json(found.to_json())
        return
    of_checkpoint = found.source == "manifest"
    columns = ("unit", "holders", "may die", *(("written by rank", "file") if of_checkpoint else ()))
    rows = [
        (
            row.unit,
            _held(row.holders, found.world_size),
            "" if row.holders is None else _may_die(row.holders),
            *((tables.numbers(sorted(set(row.writers))), row.file) if of_checkpoint else ()),
        )
        for row in found.rows
    ]
    console = tables.console()
    console.print(tables.table(f"Units in {found.path}, {counted(found.world_size, 'rank')}", columns, rows))
    for note in found.notes:
        console.print(tables.plain(note, "yellow"))


def _held(holders: Sequence[int] | None, world_size: int) -> str:
    if holders is None:
        return "not recorded"
    return "all" if len(holders) == world_size else some(holders, NAMED_RANKS_MAX)


def _may_die(holders: Sequence[int]) -> Text:
    return tables.plain(may_die(len(holders)), "red" if len(holders) == 1 else "")


def _damaged(path: Path, problems: Sequence[str], *, as_json: bool) -> ExitCode:
    for problem in problems:
        say(problem)
    if as_json:
        print_json({"path": str(path), "units": [], "problems": list(problems)})
    return ExitCode.DAMAGED
