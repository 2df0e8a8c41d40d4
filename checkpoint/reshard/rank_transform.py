"""One rank's file in another layout: `transform_checkpoint_by_rank`, and what writes such a file.

The names in it are those of a strategy: `model/FQN`, `buffer/FQN`, `optim/FQN/KEY`. What is no tensor is JSON in the
header, with the part of the whole that each tensor is, so that such a file is a source again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from lastwords.checkpoint.appearing import making_file, refuse_existing
from lastwords.checkpoint.document import in_steps
from lastwords.checkpoint.format import METADATA_KEY
from lastwords.checkpoint.meta import FILE_FORMAT, FileContent, json_of
from lastwords.checkpoint.part import write_tensors
from lastwords.checkpoint.reshard.rank_files import CheckpointSource, RankFiles
from lastwords.checkpoint.reshard.strategy import Strategy, load_sound_strategy, text
from lastwords.checkpoint.reshard.transform_plan import Streamed, meta_of, of_rank, planned, whole_strategy
from lastwords.checkpoint.slice_reader import SliceReader
from lastwords.checkpoint.storable import pack
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.errors import ConfigError, FormatError, IncompleteError, NotARankError, NotTextError

SUFFIX = ".ckpt"

Progress = Callable[[int], None]


Source = CheckpointSource | RankFiles
"""Where a transformation reads from."""


def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, str],
    save_checkpoint_file_name: str,
    src_strategy_file: str | None = None,
    dst_strategy_file: str | None = None,
) -> None:
    """Writes what destination rank `rank_id` holds into one new file, out of the files of source ranks.

    Holds one tensor of the destination in memory. The file appears whole or not at all. What is read of a file that
    lies in its checkpoint's directory is checked against the manifest; of any other no checksums are known.

    Args:
        rank_id: in the destination.
        checkpoint_files_map: source rank -> its .ckpt. Those that `rank_list_for_transform` names have to be there, or
            of each another one of its group.
        save_checkpoint_file_name: the new file; it ends in .ckpt.
        src_strategy_file: None: not divided.
        dst_strategy_file: likewise.

    Raises:
        NotARankError, NotTextError: an argument is of another type (a TypeError).
        ConfigError: the name does not end in .ckpt, or exists (a ValueError).
        BusyError: another process writes it.
        IncompleteError: a rank's file is missing; it is named.
        MismatchError: strategies of two models, or files of two steps.
        StrategyError, FormatError, ReplacedError, StorageError: a file is damaged, was replaced, or cannot be read.
    """
    if type(rank_id) is not int:
        raise NotARankError(f"rank_id must be an int, not {rank_id!r}")
    if not isinstance(checkpoint_files_map, Mapping):
        raise NotTextError("checkpoint_files_map must be a dict: source rank -> path of its file")
    for rank, path in checkpoint_files_map.items():
        if type(rank) is not int:
            raise NotARankError(f"checkpoint_files_map has the key {rank!r}; a source rank must be an int")
        if rank < 0:
            raise ConfigError(f"checkpoint_files_map has the key {rank}; the lowest rank is 0")
        text(f"checkpoint_files_map[{rank}]", path)
    target = Path(text("save_checkpoint_file_name", save_checkpoint_file_name))
    if target.suffix != SUFFIX:
        raise ConfigError(f"save_checkpoint_file_name must end in {SUFFIX}, not {str(target)!r}")
    source = strategy_or_none("src_strategy_file", src_strategy_file)
    wanted = strategy_or_none("dst_strategy_file", dst_strategy_file)
    check_rank(rank_id, wanted)
    refuse_existing(target)
    files = RankFiles({rank: Path(path) for rank, path in checkpoint_files_map.items()}, source)
    transform_rank(files, wanted, rank_id, target)


def strategy_or_none(name: str, path: str | None, os: Os = REAL_OS) -> Strategy | None:
    """The strategy in a file or a checkpoint's directory, checked; None for None."""
    if path is None:
        return None
    return load_sound_strategy(Path(text(name, path)), os)


def check_rank(rank: int, wanted: Strategy | None) -> None:
    """ConfigError for a rank that the destination does not have."""
    size = 1 if wanted is None else wanted.world_size
    if not 0 <= rank < size:
        raise ConfigError(f"rank_id is {rank}; the destination has the ranks 0 to {size - 1}")


def transform_rank(
    source: Source,
    wanted: Strategy | None,
    rank: int,
    target: Path,
    *,
    os: Os = REAL_OS,
    progress: Progress | None = None,
) -> None:
    """Writes destination rank `rank` of `wanted` (None: everything whole) into the new file `target`."""
    try:
        _write_rank(source, wanted, rank, target, os, progress)
    except (FormatError, IncompleteError):
        source.check_unchanged()  # if it is another one by now, that is why
        raise


def _write_rank(
    source: Source, wanted: Strategy | None, rank: int, target: Path, os: Os, progress: Progress | None
) -> None:
    saved = source.saved_for(wanted, rank)
    strategy = whole_strategy(saved) if wanted is None else wanted
    holding = of_rank(saved, strategy, rank)
    plans = planned(saved, holding, _same)
    moment = source.moment
    content = FileContent(
        format=FILE_FORMAT,
        rank=rank,
        world_size=strategy.world_size,
        global_step=moment.global_step,
        epoch=moment.epoch,
        step=moment.step,
        job=moment.job,
        boxes={
            one.spec.name: (one.spec.offsets, one.spec.global_shape)
            for one in plans
            if one.spec.shape != one.spec.global_shape
        },
        meta=pack(meta_of(saved, holding, _same).to_json(), "meta"),
    )
    with SliceReader(source, checked=True, unknown_too=not source.checked, keep_edges=True, os=os) as reader:
        streamed = Streamed(reader, source, [plans])
        with making_file(target, os) as hidden:
            [tensors] = streamed.tensors
            write_tensors(hidden, tensors, {METADATA_KEY: in_steps(json_of(content))}, os, progress)
            source.check_unchanged()


def _same(name: str) -> str:
    return name
