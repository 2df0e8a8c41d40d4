"""Files of single ranks as a source: which of them are needed, and what each holds.

A file is what `transform_checkpoint_by_rank` has written, which says itself what parts of tensors it holds, or a file
of last words (`unit/{unit}/...`), of which only the source's strategy says it. Of a group of ranks with the same part
any file will do. A file that still lies in its checkpoint's directory is checked against the manifest there. Of any
other no checksums are known: all that is noticed is that it was replaced or written again meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lastwords.checkpoint import layout
from lastwords.checkpoint.boxes import Box, whole
from lastwords.checkpoint.document import damage
from lastwords.checkpoint.entries import Cause, FileEntry, by_unit
from lastwords.checkpoint.format import Header, TensorSpec
from lastwords.checkpoint.layout import MANIFEST_NAME, UnitTensorName, parse_tensor_name
from lastwords.checkpoint.load import Checkpoint, Stamp, stamp_of
from lastwords.checkpoint.lock_file import ReaderLock
from lastwords.checkpoint.manifest import Manifest, read_manifest, read_published
from lastwords.checkpoint.meta import FileContent, UnitMeta
from lastwords.checkpoint.part import content_of, read_lone_header
from lastwords.checkpoint.reshard.saved_state import SavedState, SavedUnit, buffers_of_ranks, join, read_unit, units_of
from lastwords.checkpoint.reshard.strategy import Cut, Held, Needs, Strategy
from lastwords.checkpoint.reshard.transform_plan import check_fit
from lastwords.checkpoint.slice_reader import StoredTensor
from lastwords.checkpoint.storable import unpack
from lastwords.checkpoint.system import REAL_OS, Os, where_it_leads
from lastwords.errors import (
    ConfigError,
    FormatError,
    IncompleteError,
    MismatchError,
    ReplacedError,
    StrategyError,
    ranks_text,
)
from lastwords.vocabulary import UNIT_REPLICATED, Share


class PublishedFiles:
    """Checkpoints in whose directories files lie, each opened once. Nobody prunes them while this lives."""

    def __init__(self, os: Os) -> None:
        self._os = os
        self._met: dict[Path, Checkpoint] = {}

    def checkpoint_of(self, path: Path) -> Checkpoint | None:
        """That in whose directory `path` (CHECKPOINT/rank_N/NAME) lies; None if no manifest lies beside it."""
        rank_dir = where_it_leads(path).parent
        directory = rank_dir.parent
        if layout.parse_rank_dir(rank_dir.name) is None or not self._os.exists(directory / MANIFEST_NAME):
            return None
        if directory not in self._met:
            held = ReaderLock.take(directory, self._os)
            self._met[directory] = Checkpoint(directory, read_published(directory, self._os), self._os, held)
        return self._met[directory]

    def entry_of(self, path: Path) -> FileEntry | None:
        """Checksums of `path`, whose header has been checked; None if no manifest lies beside.

        FormatError for a manifest that is damaged or lists no such file, and for a header that is not as it says.
        """
        checkpoint = self.checkpoint_of(path)
        if checkpoint is None:
            return None
        name = str(where_it_leads(path).relative_to(checkpoint.path))
        if all(one.path != name for one in checkpoint.manifest.files):
            raise FormatError(
                damage(
                    checkpoint.path / MANIFEST_NAME,
                    f"it does not list {name}, so that file's checksums are unknown; move files that are not "
                    f"part of the checkpoint out of its directory",
                )
            )
        return checkpoint.open(name).entry

    def nobody_has(self, name: str) -> bool:
        """Whether no unit of the checkpoints that were met holds a tensor; False if none was met."""
        units = [item for checkpoint in self._met.values() for item in checkpoint.manifest.units.items()]
        return bool(units) and not any(
            spec.name == f"unit/{unit}/{name}" for unit, entry in units for spec in entry.tensors
        )


Boxes = Mapping[str, tuple[Sequence[int], Sequence[int]]]
"""Offsets and shape of the whole, of each tensor that is a part."""


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file whose header has been read. Names of its units' specs are `{rank}/{name in the file}`."""

    rank: int
    path: Path
    content: FileContent
    header: Header
    stamp: Stamp | None
    units: tuple[SavedUnit, ...]
    entry: FileEntry | None
    """Its checksums, if a manifest knows them."""

    def has(self, name: str, box: Box) -> bool:
        """Whether this part of a tensor is in the file."""
        found = (unit.specs.get(name) for unit in self.units)
        return any(spec is not None and Box(spec.offsets, spec.shape) == box for spec in found)

    def knows(self, fqn: str) -> bool:
        """Whether the file has the state of this parameter, if there is any."""
        return any(fqn in unit.states or fqn in unit.meta.parameters for unit in self.units)


class RankFiles:
    """Source of slices: the files of some ranks, opened as they are needed. For one thread.

    files: rank of the source -> path. strategy: how the source's tensors are cut; None: every file has everything.
    """

    def __init__(self, files: Mapping[int, Path], strategy: Strategy | None, os: Os = REAL_OS) -> None:
        self._files = dict(sorted(files.items()))
        self._os = os
        self._published = PublishedFiles(os)
        self._opened: dict[int, RankFile | None] = {}
        self._complete_for: set[tuple[int, int]] = set()
        self._needs: tuple[Strategy | None, Needs] | None = None
        self._joined: tuple[int, SavedState] | None = None
        self._given = strategy
        if strategy is not None:
            strategy.check()
        self.strategy = self._undivided() if strategy is None else strategy

    @property
    def checked(self) -> bool:
        """Whether the checksums of all files are known that have been opened."""
        return all(file.entry is not None for file in self._opened.values() if file is not None)

    @property
    def moment(self) -> FileContent:
        """Of what has been opened."""
        return next(file.content for file in self._opened.values() if file is not None)

    def saved_for(self, wanted: Strategy | None, rank: int) -> SavedState:
        """All that is known of what destination rank `rank` needs (`wanted` None: everything).

        IncompleteError names the source rank whose file is missing, after its whole group has been tried.
        """
        if (id(wanted), rank) not in self._complete_for:
            if self._needs is None or self._needs[0] is not wanted:
                self._needs = wanted, Needs(self.strategy, wanted)
            for name, held in self._needs[1].of(rank):
                self._find(name, held)
            self._find_common()
            self._complete_for.add((id(wanted), rank))
        opened = [file for _, file in sorted(self._opened.items()) if file is not None]
        if not opened:
            raise IncompleteError("there is none of the source's files", missing=tuple(map(str, self._files.values())))
        if self._joined is None or self._joined[0] != len(opened):
            self._refuse_mixed(opened)
            units = sorted((unit for file in opened for unit in file.units), key=lambda unit: unit.meta.extras is None)
            saved = join([*units, buffers_of_ranks(_locals_of(opened), units)], copies=True)
            self._joined = len(opened), saved
        return self._joined[1]

    def stored(self, name: str) -> tuple[StoredTensor, ...]:
        """Where a tensor's bytes lie."""
        rank, _, inside = name.partition("/")
        file = self._opened.get(int(rank))
        if file is None:
            raise IncompleteError(f"there is no file of rank {rank}", missing=(f"rank {rank}",))
        parsed = parse_tensor_name(inside) if inside not in file.header.tensors else None
        if isinstance(parsed, UnitTensorName):
            checkpoint = self._published.checkpoint_of(file.path)
            assert checkpoint is not None, "the file was opened as one with shares of a unit"
            return checkpoint.stored(inside)
        spec, begin, _ = file.header.tensors[inside]
        return (StoredTensor(file.path, begin, spec, file.entry),)

    def check_unchanged(self) -> None:
        """ReplacedError if a file is not the one any more whose header was read."""
        for file in filter(None, self._opened.values()):
            if stamp_of(file.path, self._os) != file.stamp:
                raise ReplacedError(f"{file.path} was replaced, changed or removed while it was read; try again")

    # ------------------------------------------------------------------ inside

    def _find(self, name: str, held: Held) -> None:
        """Opens files of the group until one has this part."""
        fqn = name.removeprefix("optim/")
        for rank in held.ranks:
            file = self._open(rank)
            if file is None:
                continue
            if file.has(name, held.box):
                return
            if name.startswith("optim/") and not self.strategy.tensors[name].dtype and file.knows(fqn):
                return
        if name.startswith("buffer/") and self._is_of_ranks(name, held):
            return
        absent = [rank for rank in held.ranks if self._open(rank) is None]
        if absent:
            path = self._files.get(absent[0])
            where = f"its file {path} does not exist" if path is not None else "no file was given for it"
            text = f"source rank {absent[0]} is missing: {where}"
            if len(absent) > 1:
                text += f" (missing too: {', '.join(map(str, absent[1:]))})"
            missing = tuple(f"rank {rank}" for rank in absent)
        else:
            text, missing = "it is in none of their files", (name,)
        raise IncompleteError(
            f"{name}{held.box} is held by source {ranks_text(held.ranks)}; {text}. "
            + ("No other rank of its group has it. " if absent and len(held.ranks) > 1 else "")
            + "Give the file of one of them, or use another checkpoint",
            missing=missing,
        )

    def _is_of_ranks(self, name: str, held: Held) -> bool:
        """Whether a buffer is one that each rank saves for itself, or that nobody has saved.

        The strategy of a model without content lists those too: only memory shows which buffers are small. Where files
        of its holders are not there and no manifest says what was in them, it may be lost.
        """
        files = [file for file in map(self._open, self._files) if file is not None]
        if any(spec_name.endswith(f"/{name}") for spec_name in _locals_of(files)):
            return True
        nowhere = not any(name in unit.specs for file in files for unit in file.units)
        return nowhere and (all(map(self._open, held.ranks)) or self._published.nobody_has(name))

    def _find_common(self) -> None:
        """What belongs to all ranks (extras, buffers that no strategy lists) may be in any one file of last words.

        A file that a transformation has written has all of it.
        """
        for rank in (*self._opened, *self._files):
            file = self._open(rank)
            if file is not None and file.content.meta is not None:
                return

    def _open(self, rank: int) -> RankFile | None:
        if rank not in self._opened:
            path = self._files.get(rank)
            self._opened[rank] = None if path is None or not self._os.exists(path) else self._read(rank, path)
        return self._opened[rank]

    def _read(self, rank: int, path: Path) -> RankFile:
        stamp, header = stamp_of(path, self._os), read_lone_header(path, self._os)
        entry = self._published.entry_of(path)
        content = content_of(header, path)
        specs = {name: replace(spec, name=f"{rank}/{name}") for name, (spec, _, _) in header.tensors.items()}
        if content.meta is not None:
            meta = UnitMeta.read(unpack(content.meta, str(path)), str(path))
            units = [self._of_rank(rank, path, content.boxes or {}, meta, specs)]
        else:
            units = [
                self._of_unit(rank, path, unit, UnitMeta.read(unpack(said, str(path)), f"{path}: unit {unit}"), specs)
                for unit, said in (content.units or {}).items()
                if Share.parse(unit).count == 1
            ]
            units += self._of_shares(rank, path, content.units or {})
        return RankFile(rank, path, content, header, stamp, tuple(units), entry)

    def _of_shares(self, rank: int, path: Path, names: Iterable[str]) -> list[SavedUnit]:
        """Units of last words of which the file has shares: whole, since the other shares lie beside it."""
        units = []
        for unit, shares in by_unit(names).items():
            if shares[0].count == 1:
                continue
            checkpoint = self._published.checkpoint_of(path)
            if checkpoint is None:
                raise IncompleteError(
                    f"{path} has only {len(shares)} of the {shares[0].count} shares of unit {unit}, and no "
                    f"{MANIFEST_NAME} lies beside it: give the files in their checkpoint's directory",
                    missing=tuple(str(share) for share in shares[0].all if share not in shares),
                )
            entry = checkpoint.manifest.units[unit]
            specs = {spec.name: TensorSpec(f"{rank}/{spec.name}", spec.dtype, spec.shape) for spec in entry.tensors}
            units.append(self._of_unit(rank, path, unit, entry.meta, specs))
        return units

    def _of_rank(
        self, rank: int, path: Path, boxes: Boxes, meta: UnitMeta, specs: Mapping[str, TensorSpec]
    ) -> SavedUnit:
        """The one unit of a file that says itself which parts it holds."""
        placed = dict(specs)
        try:
            for name, (offsets, shape) in boxes.items():
                spec = specs[name]
                placed[name] = TensorSpec(spec.name, spec.dtype, spec.shape, tuple(shape), tuple(offsets))
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                damage(path, f"it does not record which regions of the tensors it holds ({error!r})")
            ) from error
        if self._given is None and boxes:
            name, (offsets, shape) = next(iter(boxes.items()))
            raise StrategyError(
                f"{path} holds only parts of tensors, such as {name}{Box(tuple(offsets), specs[name].shape)} of "
                f"{list(shape)}: give the strategy that it was written under (src_strategy_file)"
            )
        for name, spec in placed.items():
            if self._given is not None and name in self._given.tensors:
                self._compare(path, rank, name, Box(spec.offsets, spec.shape), spec.dtype)
        return read_unit(str(path), str(path), meta, "", placed)

    def _of_unit(self, rank: int, path: Path, unit: str, meta: UnitMeta, specs: Mapping[str, TensorSpec]) -> SavedUnit:
        """A unit of last words, whose places in the whole the strategy says."""
        if self._given is None and (unit != UNIT_REPLICATED or meta.holders is not None):
            raise StrategyError(
                f"{path} is of a sharded job (it has the unit {unit!r}): give its strategy (src_strategy_file); the "
                "checkpoint's directory serves as one"
            )
        prefix = f"unit/{unit}/"
        own = {name.removeprefix(prefix): spec for name, spec in specs.items() if name.startswith(prefix)}
        plain = read_unit(str(path), f"unit {unit} of {path}", meta, prefix, own)
        placed: dict[str, TensorSpec] = {}
        for name, spec in own.items():
            kind, _, fqn = name.partition("/")
            if kind in ("model", "buffer") and not fqn.startswith("~"):
                cut = self.strategy.tensors.get(name) if self._given is not None else None
                if cut is not None:
                    placed[name] = _at(spec, self._compare(path, rank, name, None, spec.dtype, spec.shape), cut.shape)
        own_forms = set()
        for fqn, keys in plain.states.items():
            for node in keys.values():
                if "tensor" not in node or fqn.startswith("~"):
                    continue
                name = node["tensor"]
                found = self._place_of_state(path, rank, fqn, name, plain.place(name), len(node["shape"]))
                if found is None:
                    own_forms.add(name)
                else:
                    placed[name] = found
        return replace(plain, specs={**own, **placed}, own_forms=frozenset(own_forms))

    def _place_of_state(
        self, path: Path, rank: int, fqn: str, name: str, spec: TensorSpec, dimensions: int
    ) -> TensorSpec | None:
        """Where the strategy says that a state tensor belongs; None for one of a form of its own."""
        if self._given is None:
            return spec
        listed = self._given.tensors.get(name)
        if listed is not None and listed.dtype:
            return _at(spec, self._compare(path, rank, name, None, spec.dtype, spec.shape), listed.shape)
        cut = self._given.state_of(fqn)
        box = None if cut is None else _box_of(cut, rank)
        more = spec.shape[dimensions:]
        if cut is None or box is None:
            return None
        if spec.shape == box.sizes:
            return _at(spec, box, cut.shape)
        if more and spec.shape == (*box.sizes, *more):
            zeros = (0,) * len(more)
            return _at(spec, Box((*box.offsets, *zeros), spec.shape), (*cut.shape, *more))
        return None

    def _compare(self, path: Path, rank: int, name: str, box: Box | None, dtype: str, sizes: Sequence[int] = ()) -> Box:
        """The part that the strategy gives to `rank`; MismatchError if the file's is another one."""
        cut = self.strategy.tensors[name]
        said = _box_of(cut, rank)
        there = said if said is not None and box is None and said.sizes == tuple(sizes) else box
        if said is None or there != said or dtype != cut.dtype:
            has = f"{dtype} {box}" if box is not None else f"a part of the shape {tuple(sizes)}, {dtype}"
            says = "no part of it" if said is None else f"{said} of {cut.shape}, {cut.dtype}"
            raise MismatchError(
                f"{path}: {name} is {has} there; the source's strategy gives rank {rank} {says}. Give the strategy "
                "that the file was written under",
                different={name: f"{has} in the file, {says} in the strategy"},
            )
        return said

    def _undivided(self) -> Strategy:
        """The strategy of files that all have everything."""
        tensors: dict[str, tuple[TensorSpec, list[int]]] = {}
        for rank in self._files:
            file = self._open(rank)
            for unit in () if file is None else file.units:
                for name, spec in unit.specs.items():
                    if name.startswith(("model/", "buffer/", "optim/")) and "/~" not in name:
                        first, ranks = tensors.setdefault(name, (spec, []))
                        if (first.dtype, first.shape) != (spec.dtype, spec.shape):
                            raise StrategyError(
                                f"{unit.label}: {name} is {spec.dtype} {spec.shape} there and {first.dtype} "
                                f"{first.shape} in another file, so these are parts: give the source's strategy"
                            )
                        ranks.append(rank)
        if not tensors:
            what = ", ".join(str(path) for path in self._files.values()) or "no file was given"
            raise IncompleteError(f"there is none of the source's files ({what})", missing=("rank 0",))
        cuts = {
            name: Cut(spec.dtype, spec.shape, (Held(whole(spec.shape), tuple(ranks)),))
            for name, (spec, ranks) in tensors.items()
        }
        return Strategy(max(self._files) + 1, cuts)

    def _refuse_mixed(self, opened: Sequence[RankFile]) -> None:
        for file in opened[1:]:
            first = opened[0]
            if file.content.global_step != first.content.global_step:
                raise MismatchError(
                    f"{first.path} is of global step {first.content.global_step} and {file.path} of step "
                    f"{file.content.global_step}; all files must be of the same step"
                )


def _locals_of(files: Sequence[RankFile]) -> dict[str, TensorSpec]:
    """What single ranks have saved for themselves: name in the file -> the tensor as it is named in the source."""
    return {
        name: replace(spec, name=f"{file.rank}/{name}")
        for file in files
        for name, (spec, _, _) in file.header.tensors.items()
        if name.startswith("local/")
    }


def _box_of(cut: Cut, rank: int) -> Box | None:
    return next((held.box for held in cut.held if rank in held.ranks), None)


def _at(spec: TensorSpec, box: Box, shape: tuple[int, ...]) -> TensorSpec:
    try:
        return TensorSpec(spec.name, spec.dtype, spec.shape, shape, box.offsets)
    except ConfigError as error:
        raise MismatchError(f"{spec.name}: {error}") from error


# A published checkpoint as a source: its own strategy, its own checksums, any rank's file for what several held.


class CheckpointSource:
    """All of a checkpoint, checked as a whole when this is made. Methods may be called from any thread.

    Raises FormatError where its units contradict each other, IncompleteError, naming tensor and region, for what is in
    no file, MismatchError for state that is divided in a way that is not understood.
    """

    checked = True

    def __init__(self, checkpoint: Checkpoint, os: Os = REAL_OS) -> None:
        manifest = checkpoint.manifest
        self.checkpoint = checkpoint
        self.moment = manifest
        units = [unit for _, unit in units_of(checkpoint.path, manifest)]
        self.saved = join(units, copies=manifest.moved)
        self.saved.check()
        specs = {spec.name: spec for entry in manifest.locals.values() for spec in entry.tensors}
        self._for_files = join([*units, buffers_of_ranks(specs, units)], copies=manifest.moved)
        self._os = os
        self._checked: Strategy | None = None

    def saved_for(self, wanted: Strategy | None, rank: int) -> SavedState:
        """Everything, for any rank's file: with the buffers that each rank has saved for itself, unlike `saved`.

        MismatchError if the strategy is of another model.
        """
        if wanted is not None and wanted is not self._checked:
            check_fit(self._for_files, wanted)
            self._checked = wanted
        return self._for_files

    def stored(self, name: str) -> tuple[StoredTensor, ...]:
        """Where a tensor's bytes lie, and their checksums."""
        return self.checkpoint.stored(name)

    def check_unchanged(self) -> None:
        """ReplacedError if it is not there any more, or another one is. Bytes that were read are checked as such."""
        try:
            same = read_manifest(self.checkpoint.path, self._os) == self.checkpoint.manifest
        except (FormatError, IncompleteError):
            same = False
        if not same:
            raise ReplacedError(f"{self.checkpoint.path} was replaced or removed while it was read; nothing is damaged")


def lost_locals(manifest: Manifest) -> dict[int, str]:
    """Why each rank's own state is not there, as the source's manifest says it."""
    lost = [reason for reason in manifest.reasons if reason.cause is Cause.LOCAL_STATE_LOST]
    return {rank: reason.detail for reason in lost for rank in reason.ranks}
