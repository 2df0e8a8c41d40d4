"""From finished parts to a checkpoint under its final name: verify, write the manifest, rename.

Called by the controller; needs no torch. The order of system calls is what invariant I5 rests on: everything that the
new name will show is durable before the one rename, and nothing of an older checkpoint is touched before it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastwords import clock
from lastwords.checkpoint import layout
from lastwords.checkpoint.manifest import MANIFEST_FORMAT, Manifest, claimed_published_ns, contradiction, read_manifest
from lastwords.checkpoint.part import LocalEntry, Part, UnitEntry, read_part, write_document
from lastwords.checkpoint.partfile import check_header, check_unchanged
from lastwords.checkpoint.stale import discard, remove_stale
from lastwords.checkpoint.system import REAL_OS, Os, remove_tree, storage_errors, sync_directory
from lastwords.errors import CheckpointError, ConfigError, FormatError, IncompleteError, StorageError

logger = logging.getLogger(__name__)

NO_RANK = -1
"""In a problem: it belongs to no single writer."""

_REPLACED_MAX = 1000


@dataclass(frozen=True, slots=True)
class Incident:
    """What the controller knows about a checkpoint beside its parts.

    writers: the ranks whose parts belong to it. local_ranks: those whose local state should be in it;
    lost_locals: for each rank whose local state is lost, why. facts: added to those of the writers.
    """

    job: str
    generation: int
    incident: int
    attempt: int
    global_step: int
    world_size: int
    writers: tuple[int, ...]
    reason: str
    cause_ranks: tuple[int, ...] = ()
    lost_locals: Mapping[int, str] = field(default_factory=dict)
    parent_job: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def verify_parts(
    tmp_dir: Path,
    expected_writers: Collection[int],
    expected_units: Collection[str],
    expected_locals: Collection[int],
    step: int,
    os: Os = REAL_OS,
) -> list[tuple[int, str]]:
    """Problems as (rank, text), none if the parts make a whole checkpoint of global step `step`.

    Reads part.json, size and header of every writer. The checksums of the data were taken while writing, from the
    very buffers that were written; a full read back is `lastwords verify`. A problem of no single writer has rank -1.
    """
    problems: list[tuple[int, str]] = []
    units: dict[str, int] = {}
    locals_: dict[int, int] = {}
    place: tuple[int, int] | None = None
    for rank in sorted(expected_writers):
        try:
            part = _read_part_of(tmp_dir, rank, step, os)
            specs = {spec.name: spec for entry in _owners(part) for spec in entry.tensors}
            check_header(tmp_dir, part.file, specs, rank=rank, global_step=step, os=os)
        except CheckpointError as error:
            problems.append((rank, str(error)))
            continue
        if place is None:
            place = (part.epoch, part.step)
        elif place != (part.epoch, part.step):
            problems.append((rank, f"says epoch {part.epoch}, step {part.step}, others say {place[0]}, {place[1]}"))
        for unit in part.units:
            if unit in units:
                problems.append((rank, f"unit {unit} was written by rank {units[unit]} as well"))
            units[unit] = rank
        for owner in part.locals:
            if owner in locals_:
                problems.append((rank, f"the local state of rank {owner} was written by rank {locals_[owner]} as well"))
            locals_[owner] = rank
    broken = bool(problems)
    for unit in sorted(set(expected_units) - set(units)):
        if not broken:  # else it is only a consequence
            problems.append((NO_RANK, f"unit {unit} is in no part"))
    for owner in sorted(set(expected_locals) - set(locals_)):
        if not broken:
            problems.append((NO_RANK, f"the local state of rank {owner} is in no part"))
    for unit in sorted(set(units) - set(expected_units)):
        problems.append((units[unit], f"unit {unit} was not asked for"))
    for owner in sorted(set(locals_) - set(expected_locals)):
        problems.append((locals_[owner], f"the local state of rank {owner} was not asked for"))
    return problems


def _read_part_of(tmp_dir: Path, rank: int, step: int, os: Os) -> Part:
    rank_dir = tmp_dir / layout.rank_dir_name(rank)
    try:
        part = read_part(rank_dir, os)
    except FileNotFoundError as error:
        raise IncompleteError(
            f"{rank_dir} has no {layout.PART_NAME}: its writer did not finish", missing=(layout.PART_NAME,)
        ) from error
    path = layout.PartPath.parse(part.file.path, where=str(rank_dir / layout.PART_NAME))
    if part.rank != rank or path != layout.PartPath(rank, part.epoch, part.step):
        raise FormatError(f"{rank_dir} holds the part of rank {part.rank}, file {part.file.path}")
    if part.global_step != step:
        raise FormatError(f"{rank_dir} is of global step {part.global_step}, not of {step}")
    if any(entry.writer != rank or entry.file != part.file.path for entry in _owners(part)):
        raise FormatError(f"{rank_dir}: {layout.PART_NAME} points to another rank's file")
    return part


def _owners(part: Part) -> list[UnitEntry | LocalEntry]:
    return [*part.units.values(), *part.locals.values()]


def publish(
    root: Path, tmp_dir: Path, incident: Incident, os: Os = REAL_OS, *, published_unix_ns: int | None = None
) -> Path:
    """Makes the parts in `tmp_dir` visible as the checkpoint of their step and returns its path.

    To be called after `verify_parts` found no problem. A checkpoint of the same step and job is replaced in one
    step; one of another job is kept as `...-replaced-K`. Raises StorageError; the older checkpoints are untouched
    then, and `tmp_dir` can be discarded (unless the very last fsync failed, which the message says).
    """
    parts = [_read_part_of(tmp_dir, rank, incident.global_step, os) for rank in sorted(incident.writers)]
    for part in parts:
        check_unchanged(tmp_dir, part.file, os)
    if not parts:
        raise IncompleteError("there is no writer, so nothing to publish", missing=("writers",))
    stamp = later_than_all(root, clock.wall_ns() if published_unix_ns is None else published_unix_ns, os)
    manifest = build_manifest(incident, parts, published_unix_ns=stamp)
    _remove_foreign(tmp_dir, incident.writers, os)
    write_document(tmp_dir / layout.MANIFEST_NAME, manifest.encode(), os, durable=True)
    for part in parts:
        rank_dir = tmp_dir / layout.rank_dir_name(part.rank)
        with storage_errors("removing", rank_dir / layout.PART_NAME):
            os.unlink(rank_dir / layout.PART_NAME)
        sync_directory(rank_dir, os)
    sync_directory(tmp_dir, os)
    final = layout.checkpoint_dir(root, incident.global_step)
    _rename_into_place(root, tmp_dir, final, incident.job, os)
    remove_stale(root, incident.job, incident.generation, os)
    return final


def publish_new(root: Path, tmp_dir: Path, incident: Incident, os: Os = REAL_OS) -> Path:
    """As `publish`, for a directory that may have been left half-way through this by a process that died.

    Nothing is replaced: ConfigError if there is a checkpoint of this step, and everything stays as it is. `tmp_dir` is
    left to the caller if anything fails; with the same call again it goes on.
    """
    final = layout.checkpoint_dir(root, incident.global_step)
    if os.exists(final):
        raise ConfigError(f"{final} exists already and is left as it is; remove it first, or give another directory")
    try:
        manifest = read_manifest(tmp_dir, os)
    except IncompleteError:
        manifest = _describe(root, tmp_dir, incident, os)
    except FormatError:  # the machine went down before it was durable: no part.json has been removed yet
        with storage_errors("removing", tmp_dir / layout.MANIFEST_NAME):
            os.unlink(tmp_dir / layout.MANIFEST_NAME)
        manifest = _describe(root, tmp_dir, incident, os)
    # Durable before the first part.json goes: whoever goes on from here finds the one or the other.
    sync_directory(tmp_dir, os)
    writers = [layout.PartPath.parse(entry.path, where=str(tmp_dir)).rank for entry in manifest.files]
    for rank in writers:
        rank_dir = tmp_dir / layout.rank_dir_name(rank)
        with storage_errors("removing", rank_dir / layout.PART_NAME):
            if os.exists(rank_dir / layout.PART_NAME):
                os.unlink(rank_dir / layout.PART_NAME)
        sync_directory(rank_dir, os)
    _remove_foreign(tmp_dir, writers, os, keep=(layout.MANIFEST_NAME,))
    sync_directory(tmp_dir, os)
    with storage_errors("publishing", final):
        os.rename(tmp_dir, final)
    _sync_published(root, final, os)
    return final


def _describe(root: Path, tmp_dir: Path, incident: Incident, os: Os) -> Manifest:
    """Writes the manifest of finished parts."""
    parts = [_read_part_of(tmp_dir, rank, incident.global_step, os) for rank in sorted(incident.writers)]
    for part in parts:
        check_unchanged(tmp_dir, part.file, os)
    stamp = later_than_all(root, clock.wall_ns(), os)
    manifest = build_manifest(incident, parts, published_unix_ns=stamp)
    write_document(tmp_dir / layout.MANIFEST_NAME, manifest.encode(), os, durable=True)
    return manifest


def build_manifest(incident: Incident, parts: list[Part], *, published_unix_ns: int) -> Manifest:
    """Manifest of verified parts. AssertionError if they contradict each other, since they were verified."""
    units = {unit: entry for part in parts for unit, entry in part.units.items()}
    locals_ = {rank: entry for part in parts for rank, entry in part.locals.items()}
    reasons: list[str] = []
    for rank in range(incident.world_size):
        local = locals_.get(rank)
        if local is None:
            why = incident.lost_locals.get(rank, "it was not written")
            reasons.append(f"rank {rank}: its local state (RNG streams, buffers, data position) is lost: {why}")
        elif not local.exact:
            reasons += [f"rank {rank}: {reason}" for reason in local.reasons or ("no reason given",)]
    for unit, entry in sorted(units.items()):
        # The writer's own: a step cut off between update and end leaves, for one, a scheduler that has not moved.
        reasons += [f"unit {unit}: {reason}" for reason in entry.meta.get("reasons", ())]
    manifest = Manifest(
        format_version=MANIFEST_FORMAT,
        job=incident.job,
        parent_job=incident.parent_job,
        generation=incident.generation,
        incident=incident.incident,
        attempt=incident.attempt,
        global_step=incident.global_step,
        epoch=parts[0].epoch,
        step=parts[0].step,
        world_size=incident.world_size,
        reason=incident.reason,
        cause_ranks=tuple(sorted(incident.cause_ranks)),
        published_unix_ns=published_unix_ns,
        files=tuple(part.file for part in parts),
        units=dict(sorted(units.items())),
        locals=dict(sorted(locals_.items())),
        exact=not reasons,
        reasons=tuple(dict.fromkeys(reasons)),
        facts=merge_facts(incident.facts, parts),
    )
    problem = contradiction(manifest)
    assert problem is None, problem
    return manifest


def merge_facts(own: Mapping[str, Any], parts: list[Part]) -> dict[str, Any]:
    """Facts of the lowest writer, with what other writers see differently under "by_rank"."""
    merged: dict[str, Any] = dict(parts[0].facts)
    differing = {
        str(part.rank): {
            key: value for key, value in part.facts.items() if merged.get(key) != value or key not in merged
        }
        for part in parts[1:]
    }
    merged.update(own)
    different = {rank: facts for rank, facts in differing.items() if facts}
    if different:
        merged["by_rank"] = different
    return merged


def later_than_all(root: Path, now_ns: int, os: Os = REAL_OS) -> int:
    """`now_ns`, or a little more than the newest `published_unix_ns` among the checkpoints in `root`.

    A wall clock that was set back must not make a new checkpoint look older than the one before it.
    """
    with storage_errors("listing", root):
        names = os.listdir(root)
    for name in names:
        path = root / name
        if layout.CheckpointName.parse(name) is None or claimed_published_ns(path, os) < now_ns:
            continue
        try:
            now_ns = max(now_ns, read_manifest(path, os).published_unix_ns + 1)
        except CheckpointError:
            continue  # damaged, so its claim is worth nothing
    return now_ns


def _remove_foreign(tmp_dir: Path, writers: Collection[int], os: Os, keep: Collection[str] = ()) -> None:
    """Removes what ranks left that were excluded after they had begun to write."""
    with storage_errors("listing", tmp_dir):
        names = os.listdir(tmp_dir)
    keep = {layout.rank_dir_name(rank) for rank in writers} | {*keep}
    for name in names:
        if name in keep:
            continue
        if os.is_directory(tmp_dir / name):
            remove_tree(tmp_dir / name, os)
        else:
            with storage_errors("removing", tmp_dir / name):
                os.unlink(tmp_dir / name)


def _rename_into_place(root: Path, tmp_dir: Path, final: Path, job: str, os: Os) -> None:
    with storage_errors("publishing", final):
        try:
            os.rename(tmp_dir, final)
            replaced = False
        except FileExistsError:
            replaced = True
    if not replaced:
        _sync_published(root, final, os)
        return
    try:
        same_job = read_manifest(final, os).job == job
    except StorageError:
        raise
    except CheckpointError:
        same_job = False  # unreadable: keep it for a person to look at
    if same_job:
        with storage_errors("publishing", final):
            exchanged = os.exchange(tmp_dir, final)
        if exchanged:
            _sync_published(root, final, os)
            discard(tmp_dir, os)  # now the older checkpoint of this very step
            return
    # First the old one gets its new name, under which scans still find it; then the new one is published. A crash in
    # between leaves the old one visible, under the other name, and the new one not. The fsync keeps their order: were
    # only the second rename to survive, the old one would be lost.
    with storage_errors("publishing", final):
        aside = _free_name(root, final, os)
        os.rename(final, aside)
    sync_directory(root, os)
    with storage_errors("publishing", final):
        os.rename(tmp_dir, final)
    _sync_published(root, final, os)
    if same_job:
        # Hidden first, and durably so: a crash half-way through removing it must not leave a visible torso.
        with storage_errors("removing", aside):
            os.rename(aside, tmp_dir)
        sync_directory(root, os)
        discard(tmp_dir, os)


def _free_name(root: Path, final: Path, os: Os) -> Path:
    name = layout.CheckpointName.parse(final.name)
    assert name is not None
    for count in range(1, _REPLACED_MAX):
        aside = root / str(layout.CheckpointName(name.global_step, count))
        if not os.exists(aside):
            return aside
    raise StorageError(f"{root} has {_REPLACED_MAX} replaced checkpoints of one step: remove some")


def _sync_published(root: Path, final: Path, os: Os) -> None:
    try:
        sync_directory(root, os)
    except StorageError as error:
        raise StorageError(
            f"{final} is visible and whole, but may not survive a power loss: {error}", errno=error.errno
        ) from error
