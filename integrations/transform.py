"""A published checkpoint rewritten for other ranks: units moved, state of single ranks left as it was saved.

Every destination rank's part is written by itself into a hidden directory of the destination, which says what it is a
transformation of. So several processes can share the ranks, and one that was killed is gone on from; whoever finishes
the last part publishes all of them at once.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from lastwords.checkpoint import layout
from lastwords.checkpoint.boxes import whole
from lastwords.checkpoint.checkpoint_source import CheckpointSource
from lastwords.checkpoint.document import Fields, decode_document, encode_document
from lastwords.checkpoint.load import find_checkpoint, open_checkpoint
from lastwords.checkpoint.manifest import Manifest, read_manifest
from lastwords.checkpoint.part import (
    LocalEntry,
    LocalState,
    UnitEntry,
    UnitState,
    read_part,
    write_document,
    write_part,
)
from lastwords.checkpoint.partfile import check_header
from lastwords.checkpoint.publish import Incident, publish_new, verify_parts
from lastwords.checkpoint.reshard_plan import Divided, Shard, slices_for
from lastwords.checkpoint.slice_reader import SliceReader
from lastwords.checkpoint.strategy import Strategy, load_sound_strategy
from lastwords.checkpoint.streamed import Streamed
from lastwords.checkpoint.system import (
    REAL_OS,
    Os,
    close,
    make_directories,
    make_directory,
    read_whole,
    remove_tree,
    storage_errors,
    sync_directory,
)
from lastwords.checkpoint.transform_plan import (
    Holding,
    Planned,
    Ranks,
    by_holders,
    check_fit,
    meta_of,
    planned,
    whole_strategy,
)
from lastwords.errors import ConfigError, FormatError, IncompleteError
from lastwords.sharding.grouping import unit_name
from lastwords.vocabulary import UNIT_REPLICATED

IDENTITY_NAME = "transform.json"
IDENTITY_FORMAT = 1
_DOCUMENT_BYTES_MAX = 1 << 16
_LOST = " its local state (RNG streams, buffers, data position) is lost: "

Progress = Callable[[int, int, int], None]
"""Called with a rank, the bytes of it that are written, and how many there will be; from any thread."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """path: the checkpoint, once all ranks' parts are there. missing: ranks whose parts are not written yet."""

    path: Path | None
    global_step: int
    world_size: int
    written: tuple[int, ...]
    already: tuple[int, ...]
    missing: tuple[int, ...]


def transform(
    source: Path,
    root: Path,
    to: Path | None,
    *,
    ranks: Collection[int] | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
    os: Os = REAL_OS,
) -> Outcome:
    """Publishes the checkpoint `source` (or the newest in it) in `root`, in the layout of the strategy `to`.

    to: a strategy file, or a checkpoint whose layout is meant; None: everything whole on one rank. ranks: only these
    destination ranks' parts are written now. jobs: parts that are written at the same time; each holds one tensor in
    memory. Every byte is checked against the source's checksums as it is read.

    Raises ConfigError if a checkpoint of this step is in `root`, or an unfinished transformation of something else;
    StrategyError, MismatchError, FormatError, IncompleteError and StorageError. What was finished is kept for the same
    call again.
    """
    if jobs < 1:
        raise ConfigError(f"{jobs} ranks at a time make no progress; give 1 or more")
    if os.exists(source) and not os.is_directory(source):
        raise ConfigError(f"{source} is a file; give a checkpoint's directory, or one that holds checkpoints")
    checkpoint = open_checkpoint(find_checkpoint(source, os), os)
    found = CheckpointSource(checkpoint, os)
    wanted = whole_strategy(found.saved) if to is None else _strategy(to, os)
    check_fit(found.saved, wanted)
    work = _Transformation(found, wanted, root, os)
    chosen = sorted(range(wanted.world_size) if ranks is None else set(ranks))
    if not chosen or not 0 <= chosen[0] <= chosen[-1] < wanted.world_size:
        raise ConfigError(f"there are no such ranks to write: the destination has 0 to {wanted.world_size - 1}")
    return work.run(chosen, jobs, progress)


def _strategy(to: Path, os: Os) -> Strategy:
    return load_sound_strategy(find_checkpoint(to, os) if os.is_directory(to) else to, os)


class _Cancelled(Exception):
    """Another rank has failed."""


class _Transformation:
    """One source, one destination. What is on the disk decides what is left to do."""

    def __init__(self, source: CheckpointSource, wanted: Strategy, root: Path, os: Os) -> None:
        self._source = source
        self._wanted = wanted
        self._root = root
        self._os = os
        self._manifest: Manifest = source.checkpoint.manifest
        self._final = layout.checkpoint_dir(root, self._manifest.global_step)
        self._hidden = root / f".transform-{self._final.name}"
        raw = read_whole(source.checkpoint.path / layout.MANIFEST_NAME, os, bytes_max=1 << 30)
        self._identity = {
            "world_size": wanted.world_size,
            "manifest": xxhash.xxh3_64_hexdigest(raw),
            "strategy": xxhash.xxh3_64_hexdigest(wanted.encode()),
        }
        everyone = tuple(range(wanted.world_size))
        self._units: dict[str, tuple[Ranks, Holding]] = {}
        for holders, holding in sorted(by_holders(source.saved, wanted).items()):
            name = UNIT_REPLICATED if holders == everyone else unit_name(holders)
            self._units[name] = holders, holding
        self._writers = sorted(
            {holders[0] for holders, _ in self._units.values()}
            | {rank % wanted.world_size for rank in self._manifest.locals}
        )
        self._cancelled = threading.Event()

    def run(self, chosen: list[int], jobs: int, progress: Progress | None) -> Outcome:
        os, hidden = self._os, self._hidden
        self._refuse_published()
        make_directories(self._root, os)
        with storage_errors("creating the directory", hidden):
            make_directory(hidden, os)
        self._claim()
        written: list[int] = []
        already = self._done(self._writers)
        todo = [rank for rank in self._writers if rank in chosen and rank not in already]
        for rank in self._write_all(todo, jobs, progress):
            written.append(rank)
        self._source.check_unchanged()
        if not os.exists(hidden) and os.exists(self._final):  # another process was faster with the last part
            return Outcome(
                self._final, self._manifest.global_step, self._wanted.world_size, tuple(written), tuple(already), ()
            )
        left = [rank for rank in self._writers if rank not in already and rank not in written]
        there = self._done(left)  # what other processes have finished meanwhile
        missing = tuple(rank for rank in left if rank not in there)
        path = None if missing else self._publish()
        return Outcome(
            path, self._manifest.global_step, self._wanted.world_size, tuple(sorted(written)), tuple(already), missing
        )

    # ------------------------------------------------------------------ the directory

    def _refuse_published(self) -> None:
        if self._os.exists(self._final):
            raise ConfigError(
                f"{self._final} exists already and is left as it is; remove it first, or give another directory"
            )

    def _claim(self) -> None:
        """Writes down what this directory is for, or compares what is written there."""
        os, path = self._os, self._hidden / IDENTITY_NAME
        if not os.exists(path) and not os.exists(self._hidden / layout.MANIFEST_NAME):
            content = {"format_version": IDENTITY_FORMAT, "source": str(self._source.checkpoint.path), **self._identity}
            own = self._hidden / f"{IDENTITY_NAME}.{secrets.token_hex(4)}"
            write_document(own, encode_document(content), os, durable=True)
            with storage_errors("writing", path), contextlib.suppress(FileExistsError):
                os.rename(own, path)
            sync_directory(self._hidden, os)
        there = self._read_identity(path)
        different = [key for key, value in self._identity.items() if there.get(key) != value]
        if different:
            what = "another checkpoint" if "manifest" in different else "another strategy"
            raise ConfigError(
                f"{self._hidden} holds an unfinished transformation of {what} ({there.get('source', 'unknown')} to "
                f"{there.get('world_size')} ranks); finish that with its own command, or remove the directory"
            )

    def _read_identity(self, path: Path) -> Mapping[str, Any]:
        if not self._os.exists(path):  # all parts are done, and it was killed while it published
            moved: Mapping[str, Any] = read_manifest(self._hidden, self._os).facts["moved"]
            return moved
        raw = read_whole(path, self._os, bytes_max=_DOCUMENT_BYTES_MAX)
        fields = Fields(decode_document(raw, where=path, version_max=IDENTITY_FORMAT), path)
        return {key: fields.raw(key) for key in fields.keys()}  # noqa: SIM118

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
            owners: list[UnitEntry | LocalEntry] = [*part.units.values(), *part.locals.values()]
            specs = {spec.name: spec for owner in owners for spec in owner.tensors}
            check_header(self._hidden, part.file, specs, rank=rank, global_step=self._manifest.global_step, os=os)
        except (FileNotFoundError, FormatError, IncompleteError):
            return False
        return True

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[bool]:
        """Whether this process has the lock of that name. It ends with the process, however that ends."""
        os, path = self._os, self._hidden / f"{name}.lock"
        with storage_errors("locking", path):
            try:
                fd = os.create(path, direct=False)
            except FileExistsError:
                fd = os.open_read(path)
            try:
                mine = os.try_lock(fd)
            except OSError:  # a file system without locks: then nobody can tell
                mine = True
        try:
            yield mine
        finally:
            close(fd, path, os)

    # ------------------------------------------------------------------ the parts

    def _write_all(self, todo: list[int], jobs: int, progress: Progress | None) -> Iterator[int]:
        if jobs == 1 or len(todo) < 2:
            for rank in todo:
                if self._write(rank, progress):
                    yield rank
            return
        with ThreadPoolExecutor(jobs, "lastwords-transform") as pool:
            running = {pool.submit(self._write, rank, progress): rank for rank in todo}
            try:
                for done in as_completed(running):
                    if done.result():
                        yield running[done]
            except BaseException:
                self._cancelled.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _write(self, rank: int, progress: Progress | None) -> bool:
        """False if another process is at it."""
        with self._locked(layout.rank_dir_name(rank)) as mine:
            if not mine:
                return False
            remove_tree(self._hidden / layout.rank_dir_name(rank), self._os)
            self._write_part(rank, progress)
        return True

    def _write_part(self, rank: int, progress: Progress | None) -> None:
        manifest, saved = self._manifest, self._source.saved
        units = {unit: pair for unit, pair in self._units.items() if pair[0][0] == rank}
        locals_ = {owner: entry for owner, entry in manifest.locals.items() if owner % self._wanted.world_size == rank}
        plans = [
            *(planned(saved, holding, _called(unit)) for unit, (_, holding) in units.items()),
            *(_as_it_is(entry) for entry in locals_.values()),
        ]
        with SliceReader(self._source, checked=True, keep_edges=True, os=self._os) as reader:
            streamed = Streamed(reader, self._source, plans)
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

    def _meta(self, unit: str) -> dict[str, Any]:
        holders, holding = self._units[unit]
        meta = meta_of(self._source.saved, holding, _called(unit))
        return meta if len(self._units) == 1 else {**meta, "holders": list(holders)}

    # ------------------------------------------------------------------ the checkpoint

    def _publish(self) -> Path | None:
        manifest = self._manifest
        with self._locked("publish") as mine:
            if not mine:
                return None  # by whoever has it
            if self._os.exists(self._final) and not self._os.exists(self._hidden):
                return self._final
            if not self._os.exists(self._hidden / layout.MANIFEST_NAME):
                problems = verify_parts(
                    self._hidden, self._writers, self._units, manifest.locals, manifest.global_step, self._os
                )
                if problems:
                    raise FormatError(f"{self._hidden}: {problems[0][1]}; remove that rank's directory and try again")
            size = self._wanted.world_size
            incident = Incident(
                job=manifest.job,
                generation=manifest.generation,
                incident=manifest.incident,
                attempt=manifest.attempt,
                global_step=manifest.global_step,
                world_size=manifest.world_size,
                writers=tuple(self._writers),
                reason=f"{manifest.reason} (units moved to {size} rank{'s' * (size > 1)} by lastwords transform)",
                cause_ranks=manifest.cause_ranks,
                lost_locals=_lost(manifest),
                parent_job=manifest.parent_job,
                facts={**manifest.facts, "moved": self._identity},
            )
            return publish_new(self._root, self._hidden, incident, self._os)


def _called(unit: str) -> Callable[[str], str]:
    return lambda name: f"unit/{unit}/{name}"


def _as_it_is(entry: LocalEntry) -> list[Planned]:
    """Tensors of one rank alone."""
    found = []
    for spec in entry.tensors:
        box = whole(spec.shape)
        found.append(Planned(spec, box, slices_for(Divided(spec.name, spec.dtype, spec.shape,
                                                           (Shard(spec.name, box),)), box)))  # fmt: skip
    return found


def _lost(manifest: Manifest) -> dict[int, str]:
    """Why each rank's own state is not there, as the source's manifest says it."""
    found = {}
    for rank in range(manifest.world_size):
        begin = f"rank {rank}:{_LOST}"
        why = next((reason.removeprefix(begin) for reason in manifest.reasons if reason.startswith(begin)), None)
        if why is not None:
            found[rank] = why
    return found
