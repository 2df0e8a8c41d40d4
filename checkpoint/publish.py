"""From finished parts to a checkpoint under its final name: verify, write the manifest, rename.

Called by the controller; needs no torch. The order of system calls is what invariant I5 rests on: everything that the
new name will show is durable before the one rename, and nothing of an older checkpoint is touched before it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from lastwords import clock
from lastwords.checkpoint import layout
from lastwords.checkpoint.appearing import give_name, sync_name
from lastwords.checkpoint.codec import INTEGER_MAX
from lastwords.checkpoint.entries import shares_problem
from lastwords.checkpoint.manifest import Claimed, IncidentFacts, Manifest, build_manifest, read_manifest
from lastwords.checkpoint.part import (
    PartHead,
    check_present,
    check_unchanged,
    read_part,
    read_part_head,
    write_document,
)
from lastwords.checkpoint.removal import fence, is_older, move_aside
from lastwords.checkpoint.starts import MayBeFollowed, discard, nobody_follows, remove_stale
from lastwords.checkpoint.system import REAL_OS, Os, remove_tree, storage_error, storage_errors, sync_directory
from lastwords.errors import CheckpointError, ConfigError, FormatError, IncompleteError, StorageError
from lastwords.vocabulary import Share

# A finished checkpoint takes its final name, and what has that name is replaced or pushed aside.
#
# Others publish, prune and look meanwhile. So what was looked at before a rename is looked at again after it, and only
# what the new checkpoint replaces is removed.

logger = logging.getLogger(__name__)


def rename_into_place(root: Path, tmp_dir: Path, final: Path, manifest: Manifest, os: Os) -> None:
    """Gives what is finished and durable its final name, as `publish` says. StorageError."""
    while True:
        try:
            give_name(tmp_dir, final, os)
            return
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
        try:
            if _take_its_place(root, tmp_dir, final, manifest, os):
                return
        except FileNotFoundError as error:
            if not os.exists(tmp_dir):
                raise storage_error("publishing", final, error) from error
            # What had the name has just been pruned.


def _take_its_place(root: Path, tmp_dir: Path, final: Path, manifest: Manifest, os: Os) -> bool:
    """Publishes where there is a checkpoint of this step; False if somebody else takes the name meanwhile.

    FileNotFoundError, and nothing is done, if it is gone.
    """
    replaces = is_older(final, manifest, os)
    if replaces:
        with _unless_gone("publishing", final):
            exchanged = os.exchange(tmp_dir, final)
        if exchanged:
            sync_name(final, os)
            put_away(tmp_dir, final, manifest, os)
            return True
    # First the old one gets its new name, under which scans still find it; then the new one is published. A crash in
    # between leaves the old one visible, under the other name, and the new one not. The fsync keeps their order: were
    # only the second rename to survive, the old one would be lost.
    with _unless_gone("publishing", final):
        aside = move_aside(final, final, os)
    sync_directory(root, os)
    try:
        give_name(tmp_dir, final, os)
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise
        return False
    if replaces and is_older(aside, manifest, os):
        # Hidden first, and durably so: a crash half-way through removing it must not leave a visible torso.
        with storage_errors("removing", aside), contextlib.suppress(FileNotFoundError):
            os.rename(aside, tmp_dir)
        sync_directory(root, os)
        put_away(tmp_dir, final, manifest, os)
    return True


def put_away(tmp_dir: Path, final: Path, manifest: Manifest, os: Os) -> None:
    """Removes what had the name before. It may not be what was looked at: others can publish in between."""
    with storage_errors("looking at", tmp_dir):
        is_there = os.is_directory(tmp_dir)
    if not is_there or is_older(tmp_dir, manifest, os):
        discard(tmp_dir, os)
        return
    with storage_errors("keeping", tmp_dir):
        aside = move_aside(tmp_dir, final, os)
    sync_directory(final.parent, os)
    logger.warning("%s was published at the same moment as %s; both are kept", aside, final)


@contextlib.contextmanager
def _unless_gone(doing: str, path: Path) -> Iterator[None]:
    """As `storage_errors`, but for a FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(doing, path, error) from error


__all__ = ["NO_RANK", "IncidentFacts", "build_manifest", "later_than_all", "publish", "publish_new", "verify_parts"]


NO_RANK = -1
"""In a problem: it belongs to no single writer."""

TABLES_BYTES_MAX = 1 << 20
"""Up to here the tables of all parts are gathered in the manifest: some 4000 tensors, decoded in less than 0.1 s. What
has more leaves them in its parts, so that neither publication nor a look for the newest waits for them."""

Progress = Callable[[], None]
"""Told that the work has come further, so that whoever waits knows it from one that hangs."""


def _unheard() -> None:
    """Progress that nobody waits for."""


class SeenPart(NamedTuple):
    """What verification has read of a writer's part, and the stamps that part.json and the file beside it had then."""

    head: PartHead
    stamps: tuple[tuple[int, ...], ...]


def verify_parts(
    tmp_dir: Path,
    expected_writers: Collection[int],
    expected_units: Collection[str],
    expected_locals: Collection[int],
    step: int,
    os: Os = REAL_OS,
    *,
    progress: Progress = _unheard,
    job: str = "",
    heads: dict[int, SeenPart] | None = None,
) -> list[tuple[int, str]]:
    """Problems as (rank, text), none if the parts make a whole checkpoint of global step `step` (of `job`, if given).

    Holds part.json, and size and header of the file beside it, against their checksums, of every writer; what they say
    of each tensor comes from one hand, and is compared where it is read. The checksums of the data were taken while
    writing, from the very buffers that were written; a full read back is `lastwords verify`. A problem of no single
    writer has rank -1.

    Raises StorageError if a part could not be looked at, unless the content of another one is wrong: that is known,
    and says nothing about the part that has to be looked at again. progress: called after each writer.
    heads: gets what was read of each writer's part, for `publish`.
    """
    problems: list[tuple[int, str]] = []
    blocked: StorageError | None = None
    units: dict[str, int] = {}
    locals_: dict[int, int] = {}
    place: tuple[int, int] | None = None
    plans: dict[str, tuple[str, int]] = {}
    for rank in sorted(expected_writers):
        progress()
        try:
            part = _read_head_of(tmp_dir, rank, step, os, job)
            stamps = _stamps_of(tmp_dir, part, os) if heads is not None else ()  # before the last look at the file
            check_unchanged(tmp_dir, part.file, os)
            if heads is not None:
                heads[rank] = SeenPart(part, stamps)
        except StorageError as error:
            blocked = blocked or error
            continue
        except CheckpointError as error:
            problems.append((rank, str(error)))
            continue
        if part.epoch != layout.EPOCH_UNKNOWN:  # one that was not told the step's name contradicts nobody
            place = place or (part.epoch, part.step)
            if place != (part.epoch, part.step):
                problems.append(
                    (
                        rank,
                        f"says epoch {part.epoch}, step {part.step}, but other ranks' files say {place[0]}, {place[1]}",
                    )
                )
        for unit, summary in part.units.items():
            if unit in units:
                problems.append((rank, f"unit {unit} was also written by rank {units[unit]}"))
            units[unit] = rank
            whole = Share.parse(unit).unit
            plan, other = plans.setdefault(whole, (summary.plan, rank))
            if plan != summary.plan:
                problems.append((NO_RANK, f"ranks {other} and {rank} have cut unit {whole} into different shares"))
        for owner in part.locals:
            if owner in locals_:
                problems.append((rank, f"the local state of rank {owner} was also written by rank {locals_[owner]}"))
            locals_[owner] = rank
    if blocked is not None and not problems:
        raise blocked
    broken = bool(problems)
    for unit in sorted(set(expected_units) - set(units)):
        if not broken:  # else it is only a consequence
            problems.append((NO_RANK, f"unit {unit} is in no part"))
    mixed = None if broken else shares_problem(units)
    if mixed is not None:
        problems.append((NO_RANK, mixed))
    for owner in sorted(set(expected_locals) - set(locals_)):
        if not broken:
            problems.append((NO_RANK, f"the local state of rank {owner} is in no part"))
    for unit in sorted(set(units) - set(expected_units)):
        problems.append((units[unit], f"unit {unit} was not asked for"))
    for owner in sorted(set(locals_) - set(expected_locals)):
        problems.append((locals_[owner], f"the local state of rank {owner} was not asked for"))
    return problems


def _read_head_of(tmp_dir: Path, rank: int, step: int, os: Os, job: str = "") -> PartHead:
    rank_dir = tmp_dir / layout.rank_dir_name(rank)
    try:
        part = read_part_head(rank_dir, os)
    except FileNotFoundError as error:
        raise IncompleteError(
            f"{rank_dir} has no {layout.PART_NAME}: its writer did not finish", missing=(layout.PART_NAME,)
        ) from error
    path = layout.PartPath.parse(part.file.path, where=str(rank_dir / layout.PART_NAME))
    if part.rank != rank or path != layout.PartPath(rank, part.epoch, part.step):
        raise FormatError(f"{rank_dir} holds the part of rank {part.rank}, file {part.file.path}")
    if part.global_step != step or (part.epoch == layout.EPOCH_UNKNOWN and part.step != step):
        raise FormatError(f"{rank_dir} is of global step {part.global_step}, not of {step}")
    if job and part.job != job:
        raise FormatError(f"{rank_dir} is of job {part.job!r}, not of {job!r}: two jobs write into one directory")
    return part


def _stamps_of(tmp_dir: Path, head: PartHead, os: Os) -> tuple[tuple[int, ...], ...]:
    """Of part.json and the file beside it; () if the system does not say."""
    try:
        return tuple(os.stamp(tmp_dir / name) for name in (head.file.description, head.file.path))
    except OSError:  # told by whoever reads them
        return ()


def publish(
    root: Path,
    tmp_dir: Path,
    incident: IncidentFacts,
    os: Os = REAL_OS,
    *,
    published_unix_ns: int | None = None,
    progress: Progress = _unheard,
    heads: Mapping[int, SeenPart] | None = None,
    may_be_followed: MayBeFollowed = nobody_follows,
) -> Path:
    """Makes the parts in `tmp_dir` visible as the checkpoint of their step and returns its path.

    To be called after `verify_parts` found no problem. An older checkpoint of the same step and job is replaced in one
    step; one of another job, of a later start of this one, an exact one where this one is not, or last words where
    this one is periodic, is kept as `...-replaced-K`. A periodic checkpoint is older than its generation's last words.
    Raises IncompleteError or FormatError if a file is not there any more, or not as long as it was: what is not whole
    takes nobody's place. Raises StorageError; the older checkpoints are untouched then, and the same call goes on where
    it stopped (also if the very last fsync failed, which the message says).
    progress: called after each of many small steps. heads: what `verify_parts` has read just before; what is missing
    there, or has changed since, is read again. may_be_followed: as of `remove_stale`, which is called at the end.
    """
    if not incident.writers:
        raise IncompleteError("there is no writer, so nothing to publish", missing=("writers",))
    final = layout.checkpoint_dir(root, incident.global_step)
    if _is_of(final, incident, os):  # an earlier call got so far
        sync_name(final, os)
        if os.exists(tmp_dir / layout.MANIFEST_NAME):
            put_away(tmp_dir, final, read_manifest(final, os), os)  # what it has taken the place of
        else:
            discard(tmp_dir, os)
    else:
        if not _is_of(tmp_dir, incident, os) or _has_parts(tmp_dir, incident.writers, os):
            manifest = _describe_anew(root, tmp_dir, incident, os, published_unix_ns, progress, heads or {})
        else:
            manifest = read_manifest(tmp_dir, os)
        if manifest.tables is None:
            _remove_descriptions(tmp_dir, incident.writers, os, progress)
        for entry in manifest.files:
            progress()
            check_present(tmp_dir, entry, os)
        rename_into_place(root, tmp_dir, final, manifest, os)
    remove_stale(root, incident.job, incident.generation, os, may_be_followed=may_be_followed)
    return final


def _is_of(directory: Path, incident: IncidentFacts, os: Os) -> bool:
    """Whether the manifest in `directory` was written for this very attempt."""
    with storage_errors("looking for the manifest of", directory):
        if not os.exists(directory / layout.MANIFEST_NAME):
            return False
    try:
        found = read_manifest(directory, os)
    except StorageError:
        raise
    except CheckpointError:
        return False
    wanted = (incident.job, incident.generation, incident.incident, incident.attempt)
    return (found.job, *fence(found)) == wanted


def _has_parts(tmp_dir: Path, writers: Collection[int], os: Os) -> bool:
    with storage_errors("looking for the parts in", tmp_dir):
        return all(os.exists(tmp_dir / layout.rank_dir_name(rank) / layout.PART_NAME) for rank in writers)


def _describe_anew(
    root: Path,
    tmp_dir: Path,
    incident: IncidentFacts,
    os: Os,
    published_unix_ns: int | None,
    progress: Progress,
    heads: Mapping[int, SeenPart],
) -> Manifest:
    """Writes the manifest, durable on return. One that is there is of a call that failed: whether it is, is unknown."""
    with storage_errors("removing", tmp_dir / layout.MANIFEST_NAME):
        if os.exists(tmp_dir / layout.MANIFEST_NAME):
            os.unlink(tmp_dir / layout.MANIFEST_NAME)
    _remove_foreign(tmp_dir, incident.writers, os)
    manifest = _describe(root, tmp_dir, incident, os, published_unix_ns, progress, heads)
    sync_directory(tmp_dir, os)
    return manifest


def _remove_descriptions(tmp_dir: Path, writers: Collection[int], os: Os, progress: Progress = _unheard) -> None:
    """Removes each part.json, of which the manifest says everything."""
    for rank in sorted(writers):
        progress()
        rank_dir = tmp_dir / layout.rank_dir_name(rank)
        with storage_errors("removing", rank_dir / layout.PART_NAME):
            if os.exists(rank_dir / layout.PART_NAME):
                os.unlink(rank_dir / layout.PART_NAME)
        sync_directory(rank_dir, os)


def publish_new(root: Path, tmp_dir: Path, incident: IncidentFacts, os: Os = REAL_OS) -> Path:
    """As `publish`, for a directory that may have been left half-way through this by a process that died.

    Nothing is replaced: ConfigError if there is a checkpoint of this step, and everything stays as it is. `tmp_dir` is
    left to the caller if anything fails; with the same call again it goes on.
    """
    final = layout.checkpoint_dir(root, incident.global_step)
    with storage_errors("looking for", final):
        taken = os.exists(final)
    if taken:
        raise ConfigError(f"{final} exists already and is left as it is; remove it first, or choose another directory")
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
    if manifest.tables is None:
        _remove_descriptions(tmp_dir, writers, os)
    _remove_foreign(tmp_dir, writers, os, keep=(layout.MANIFEST_NAME,))
    sync_directory(tmp_dir, os)
    give_name(tmp_dir, final, os)
    return final


def _describe(
    root: Path,
    tmp_dir: Path,
    incident: IncidentFacts,
    os: Os,
    published_unix_ns: int | None = None,
    progress: Progress = _unheard,
    known: Mapping[int, SeenPart] = MappingProxyType({}),
) -> Manifest:
    """Writes the manifest of finished parts. known: heads that need not be read while their files are as they were."""
    heads = []
    for rank in sorted(incident.writers):
        progress()
        seen = known.get(rank)
        if seen is not None and seen.stamps and seen.stamps == _stamps_of(tmp_dir, seen.head, os):
            heads.append(seen.head)
            continue
        head = _read_head_of(tmp_dir, rank, incident.global_step, os)
        check_unchanged(tmp_dir, head.file, os)
        heads.append(head)
    gathers = sum(head.part_bytes for head in heads) <= TABLES_BYTES_MAX
    whole = [read_part(tmp_dir / layout.rank_dir_name(head.rank), os) for head in heads if gathers]
    stamp = later_than_all(root, clock.wall_ns() if published_unix_ns is None else published_unix_ns, os)
    manifest = build_manifest(incident, heads, whole, published_unix_ns=stamp)
    write_document(tmp_dir / layout.MANIFEST_NAME, manifest.encode(), os)
    return manifest


def later_than_all(root: Path, now_ns: int, os: Os = REAL_OS) -> int:
    """`now_ns`, or a little more than the newest `published_unix_ns` among the checkpoints in `root`.

    A wall clock that was set back must not make a new checkpoint look older than the one before it. Nor must one that
    says the largest number that a manifest may have make the new one unreadable: then both say the same.
    """
    with storage_errors("listing", root):
        names = os.listdir(root)
    for name in names:
        path = root / name
        if layout.CheckpointName.parse(name) is None or Claimed.if_readable(path, os).published_unix_ns < now_ns:
            continue
        try:
            now_ns = min(max(now_ns, read_manifest(path, os).published_unix_ns + 1), INTEGER_MAX)
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
