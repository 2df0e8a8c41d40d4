"""A published checkpoint rewritten for other ranks: units moved, state of single ranks left as it was saved.

Every destination rank's part is written by itself into a hidden directory of the destination, which says what it is a
transformation of. So several processes can share the ranks, and one that was killed is gone on from; whoever finishes
the last part publishes all of them at once.

Each process shares a lock of the destination as long as it writes, and has a lock of the rank that it writes. The
publisher has the destination's lock alone: then nobody writes, nobody holds a lock inside, and nobody can begin before
the result has its final name. After taking a lock, each asks again what is there. A result is never written to again.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import xxhash

from lastwords import threads
from lastwords.checkpoint import layout
from lastwords.checkpoint.appearing import refuse_checkpoint, write_file
from lastwords.checkpoint.codec import typed
from lastwords.checkpoint.document import damage, decode_document, encode_document, told
from lastwords.checkpoint.entries import Entry, LocalEntry
from lastwords.checkpoint.load import (
    DirectoryStatus,
    damage_told_from_replacement,
    examine,
    find_checkpoint,
    open_checkpoint,
    stamp_of,
)
from lastwords.checkpoint.lock_file import LockFile
from lastwords.checkpoint.manifest import IncidentFacts, Manifest, read_manifest
from lastwords.checkpoint.meta import IDENTITY_FORMAT, Moved, UnitMeta, json_of
from lastwords.checkpoint.part import LocalState, UnitState, check_header, read_part, write_part
from lastwords.checkpoint.publish import publish_new, verify_parts
from lastwords.checkpoint.reshard.rank_files import CheckpointSource, lost_locals
from lastwords.checkpoint.reshard.strategy import Strategy, load_sound_strategy
from lastwords.checkpoint.reshard.transform_plan import (
    Holding,
    Planned,
    Ranks,
    Streamed,
    as_it_is,
    by_holders,
    called_in,
    check_fit,
    meta_of,
    planned,
    whole_strategy,
)
from lastwords.checkpoint.slice_reader import SliceReader
from lastwords.checkpoint.system import (
    REAL_OS,
    Os,
    make_directories,
    make_directory,
    read_whole,
    remove_tree,
)
from lastwords.errors import ConfigError, FormatError, IncompleteError, StorageError, counted
from lastwords.sharding.grouping import unit_name
from lastwords.vocabulary import UNIT_REPLICATED

IDENTITY_NAME = "transform.json"
_DOCUMENT_BYTES_MAX = 1 << 16
_WAIT_S = 30.0
"""For another process to publish: that writes one manifest and renames, whatever the size of the state."""

Progress = Callable[[int, int, int], None]
"""Called with a rank, the bytes of it that are written, and how many there will be; from any thread."""


@dataclass(frozen=True, slots=True)
class TransformOutcome:
    """path: the checkpoint, once all ranks' parts are there. missing: ranks whose parts are not written yet.

    written: by this call; already: there when it began. busy: those of `missing` that another process was writing.
    """

    path: Path | None
    global_step: int
    world_size: int
    written: tuple[int, ...]
    already: tuple[int, ...]
    missing: tuple[int, ...]
    busy: tuple[int, ...] = ()


def transform(
    source: Path,
    root: Path,
    to: Path | None,
    *,
    ranks: Collection[int] | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
    os: Os = REAL_OS,
) -> TransformOutcome:
    """Publishes the checkpoint `source` (or the newest in it) in `root`, in the layout of the strategy `to`.

    to: a strategy file, or a checkpoint whose layout is meant; None: everything whole on one rank. ranks: only these
    destination ranks' parts are written now. jobs: parts that are written at the same time; each holds one tensor in
    memory. Every byte is checked against the source's checksums as it is read.

    If another process has published the same, that is the result. Any number of processes may do this at once.
    Raises ConfigError if `root` is a checkpoint, if another one of this step is in it, or an unfinished transformation
    of another one; StrategyError, MismatchError, FormatError, IncompleteError, ReplacedError, StorageError. What was
    finished is kept for the same call again.
    """
    if jobs < 1:
        raise ConfigError(f"the number of ranks that are written in parallel must be at least 1, not {jobs}")
    with prepared(source, root, to, ranks, os) as (work, chosen):
        return work.run(chosen, jobs, progress)


@contextlib.contextmanager
def prepared(
    source: Path, root: Path, to: Path | None, ranks: Collection[int] | None, os: Os
) -> Iterator[tuple[Transformation, list[int]]]:
    """What is to be done, and for which ranks: found and checked, and nothing written. Errors as of `transform`."""
    if os.exists(source) and not os.is_link(source) and not os.leads_to_directory(source):
        raise ConfigError(f"{source} is a file; pass a checkpoint's directory, or a directory that holds checkpoints")
    refuse_checkpoint(root)
    path = find_checkpoint(source, os)
    with damage_told_from_replacement(path, stamp_of(path, os), os), open_checkpoint(path, os) as checkpoint:
        found = CheckpointSource(checkpoint, os)
        wanted = whole_strategy(found.saved) if to is None else _strategy(to, os)
        check_fit(found.saved, wanted)
        chosen = sorted(range(wanted.world_size) if ranks is None else set(ranks))
        if not chosen or not 0 <= chosen[0] <= chosen[-1] < wanted.world_size:
            raise ConfigError(
                f"these ranks do not exist in the destination, which has ranks 0 to {wanted.world_size - 1}"
            )
        yield Transformation(found, wanted, root, os), chosen


def _strategy(to: Path, os: Os) -> Strategy:
    return load_sound_strategy(find_checkpoint(to, os) if os.leads_to_directory(to) else to, os)


class _Did(enum.Enum):
    """What became of a rank's part. NOTHING: another process had finished it. WAIT: another one is at it."""

    WRITE = "write"
    NOTHING = "nothing"
    WAIT = "wait"


class _Cancelled(Exception):
    """Another rank has failed."""


class Transformation:
    """One source, one destination. What is on the disk decides what is left to do."""

    def __init__(self, source: CheckpointSource, wanted: Strategy, root: Path, os: Os) -> None:
        self._source = source
        self._wanted = wanted
        self._root = root
        self._os = os
        self._manifest: Manifest = source.checkpoint.manifest
        self.final = layout.checkpoint_dir(root, self._manifest.global_step)
        self._hidden = root / f".transform-{self.final.name}"
        self._lock = LockFile(root / f"{self._hidden.name}.lock", os)
        raw = read_whole(source.checkpoint.path / layout.MANIFEST_NAME, os, bytes_max=1 << 30)
        self._identity = Moved(
            wanted.world_size, xxhash.xxh3_64_hexdigest(raw), xxhash.xxh3_64_hexdigest(wanted.encode())
        )
        everyone = tuple(range(wanted.world_size))
        self._units: dict[str, tuple[Ranks, Holding]] = {}
        for holders, holding in sorted(by_holders(source.saved, wanted).items()):
            name = UNIT_REPLICATED if holders == everyone else unit_name(holders)
            self._units[name] = holders, holding
        self.writers = sorted(
            {holders[0] for holders, _ in self._units.values()}
            | {rank % wanted.world_size for rank in self._manifest.locals}
        )
        self._cancelled = threading.Event()

    def run(self, chosen: list[int], jobs: int, progress: Progress | None) -> TransformOutcome:
        make_directories(self._root, self._os)
        with self._lock.held(shared=True, wait_s=_WAIT_S) as mine:
            if not mine:
                return self._outcome(None)  # all parts are there, and somebody is publishing them
            if self._is_published():
                return self._outcome(self.final, already=self.writers)
            make_directory(self._hidden, self._os)
            self._claim()
            already = self._done(self.writers)
            written: list[int] = []
            busy: list[int] = []
            todo = [rank for rank in self.writers if rank in chosen and rank not in already]
            for rank, did in self._write_all(todo, jobs, progress):
                if did is not _Did.NOTHING:
                    (written if did is _Did.WRITE else busy).append(rank)
            self._source.check_unchanged()
            left = [rank for rank in self.writers if rank not in already and rank not in written]
            there = self._done(left)  # what other processes have finished meanwhile
        missing = [rank for rank in left if rank not in there]
        path = None if missing else self._publish()
        return self._outcome(path, written, already, missing, [rank for rank in busy if rank in missing])

    def _outcome(
        self,
        path: Path | None,
        written: Sequence[int] = (),
        already: Sequence[int] = (),
        missing: Sequence[int] = (),
        busy: Sequence[int] = (),
    ) -> TransformOutcome:
        ranks = (tuple(sorted(each)) for each in (written, already, missing, busy))
        return TransformOutcome(path, self._manifest.global_step, self._wanted.world_size, *ranks)

    def files(self, chosen: list[int]) -> Iterator[tuple[int, int, list[Path]]]:
        """Of each part that `run` would write: its rank, bytes of its tensors, files it is made of. Writes nothing.

        ConfigError if something else is in the way.
        """
        if self._is_published():
            return
        if self._os.exists(self._hidden / IDENTITY_NAME):
            self._refuse_another()
        already = self._done(self.writers)
        for rank in self.writers:
            if rank in chosen and rank not in already:
                plans = [one for planned in self._plans(rank) for one in planned]
                files = {
                    stored.path
                    for one in plans
                    for piece in one.slices
                    for stored in self._source.stored(piece.shard.name)
                }
                yield rank, sum(one.spec.nbytes for one in plans), sorted(files)

    def _is_published(self) -> bool:
        """Whether this very transformation has its final name. ConfigError if something else has it."""
        if not self._os.exists(self.final):
            return False
        found = examine(self.final, self._os)
        if found.manifest is None or found.manifest.run.moved != self._identity:
            raise ConfigError(
                f"{self.final} exists already and is not this checkpoint transformed to this strategy; it was not "
                "changed: choose another directory"
            )
        if found.status is not DirectoryStatus.COMPLETE:
            raise FormatError(f"{self.final} was published, but {found.why}")
        return True

    def _claim(self) -> None:
        """Writes down what this directory is for, or compares what is written there."""
        os, path = self._os, self._hidden / IDENTITY_NAME
        if not os.exists(path) and not os.exists(self._hidden / layout.MANIFEST_NAME):
            content = {"format_version": IDENTITY_FORMAT, "source": str(self._source.checkpoint.path)}
            content |= json_of(self._identity)
            try:
                write_file(path, encode_document(content), os)
            except StorageError as error:
                if error.errno != errno.EEXIST:  # another process has claimed it for something, which is compared now
                    raise
        self._refuse_another()

    def _refuse_another(self) -> None:
        there, source = self._read_identity(self._hidden / IDENTITY_NAME)
        if there != self._identity:
            what = "another checkpoint" if there.manifest != self._identity.manifest else "another strategy"
            raise ConfigError(
                f"{self._hidden} holds an unfinished transformation of {what} ({source} to "
                f"{there.world_size} ranks): let that command end, or run it again to finish it; remove the directory "
                "only where it does not run any more"
            )

    def _read_identity(self, path: Path) -> tuple[Moved, str]:
        """What is transformed there, and its source's path."""
        if not self._os.exists(path):  # all parts are done, and it was killed while it published
            moved = read_manifest(self._hidden, self._os).run.moved
            if moved is None:
                raise FormatError(damage(self._hidden / layout.MANIFEST_NAME, "it is of no transformation"))
            return moved, "unknown"
        raw = read_whole(path, self._os, bytes_max=_DOCUMENT_BYTES_MAX)
        content = decode_document(raw, where=path, version_max=IDENTITY_FORMAT)
        with told(path):  # here the two sums have no default
            moved = typed({"manifest": None, "strategy": None, **content}, Moved, "")
            return moved, typed(content.get("source"), str, "source")

    def _done(self, ranks: Sequence[int]) -> list[int]:
        """Those of the ranks whose parts are there."""
        if ranks and self._os.exists(self._hidden / layout.MANIFEST_NAME):
            with contextlib.suppress(FormatError):  # it was being written when the machine went down
                read_manifest(self._hidden, self._os)
                return list(ranks)
        return [rank for rank in ranks if self._is_done(rank)]

    def _is_done(self, rank: int) -> bool:
        """Whether the rank's part is durable and whole: part.json is written after that."""
        os, rank_dir = self._os, self._hidden / layout.rank_dir_name(rank)
        try:
            part = read_part(rank_dir, os)
            owners: list[Entry] = [*part.units.values(), *part.locals.values()]
            specs = {spec.name: spec for owner in owners for spec in owner.tensors}
            check_header(self._hidden, part.file, specs, rank=rank, global_step=self._manifest.global_step, os=os)
        except (FileNotFoundError, FormatError, IncompleteError):
            return False
        return True

    def _write_all(self, todo: list[int], jobs: int, progress: Progress | None) -> Iterator[tuple[int, _Did]]:
        if jobs == 1 or len(todo) < 2:
            for rank in todo:
                yield rank, self._write(rank, progress)
            return
        with ThreadPoolExecutor(jobs, "lastwords-transform") as pool:
            try:
                with threads.starting("lastwords-transform"):
                    running = {pool.submit(self._write, rank, progress): rank for rank in todo}
                for done in as_completed(running):
                    yield running[done], done.result()
            except BaseException:
                self._cancelled.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _write(self, rank: int, progress: Progress | None) -> _Did:
        name = layout.rank_dir_name(rank)
        with LockFile(self._hidden / f"{name}.lock", self._os).held() as mine:
            if not mine:
                return _Did.WAIT
            if self._done([rank]):
                return _Did.NOTHING
            remove_tree(self._hidden / name, self._os)
            self._write_part(rank, progress)
        return _Did.WRITE

    def _write_part(self, rank: int, progress: Progress | None) -> None:
        manifest = self._manifest
        units, locals_ = self._owners(rank)
        with SliceReader(self._source, checked=True, keep_edges=True, os=self._os) as reader:
            streamed = Streamed(reader, self._source, self._plans(rank))
            tensors = iter(streamed.tensors)
            total = streamed.nbytes

            def tell(done: int) -> None:
                if self._cancelled.is_set():
                    raise _Cancelled
                if progress is not None:
                    progress(rank, min(done, total), total)

            write_part(
                self._hidden,
                rank,
                manifest.epoch,
                manifest.step,
                manifest.global_step,
                {unit: UnitState(next(tensors), self._meta(unit)) for unit in units},
                {
                    owner: LocalState(next(tensors), entry.meta, entry.exact, entry.reasons)
                    for owner, entry in locals_.items()
                },
                {},
                tell,
                job=manifest.job,
                os=self._os,
            )

    def _owners(self, rank: int) -> tuple[list[str], dict[int, LocalEntry]]:
        """Units and local states that a rank's part has."""
        size = self._wanted.world_size
        locals_ = {owner: entry for owner, entry in self._manifest.locals.items() if owner % size == rank}
        return [unit for unit, (holders, _) in self._units.items() if holders[0] == rank], locals_

    def _plans(self, rank: int) -> list[list[Planned]]:
        units, locals_ = self._owners(rank)
        of_units = [planned(self._source.saved, self._units[unit][1], called_in(unit)) for unit in units]
        return [*of_units, *(as_it_is(entry) for entry in locals_.values())]

    def _meta(self, unit: str) -> UnitMeta:
        holders, holding = self._units[unit]
        return meta_of(self._source.saved, holding, called_in(unit), None if len(self._units) == 1 else holders)

    def _publish(self) -> Path | None:
        """None if another process holds the destination for longer than publishing takes."""
        manifest = self._manifest
        with self._lock.held(wait_s=_WAIT_S) as mine:
            if not mine:
                return None
            if self._is_published():
                return self.final
            if not self._os.exists(self._hidden / layout.MANIFEST_NAME):
                problems = verify_parts(
                    self._hidden, self.writers, self._units, manifest.locals, manifest.global_step, self._os
                )
                if problems:
                    raise FormatError(f"{self._hidden}: {problems[0][1]}; remove that rank's directory and try again")
            size = self._wanted.world_size
            incident = IncidentFacts(
                job=manifest.job,
                generation=manifest.generation,
                incident=manifest.incident,
                attempt=manifest.attempt,
                global_step=manifest.global_step,
                world_size=manifest.world_size,
                writers=tuple(self.writers),
                reason=f"{manifest.reason} (units moved to {counted(size, 'rank')} by lastwords transform)",
                cause_ranks=manifest.cause_ranks,
                lost_locals=lost_locals(manifest),
                parent_job=manifest.parent_job,
                facts={**manifest.facts, "moved": json_of(self._identity)},
            )
            return publish_new(self._root, self._hidden, incident, self._os)
