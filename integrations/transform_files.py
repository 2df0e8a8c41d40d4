"""All ranks' files in another layout: `transform_checkpoints`. Of a checkpoint, or of a directory of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lastwords.checkpoint import layout
from lastwords.checkpoint.appearing import making_directory, refuse_existing
from lastwords.checkpoint.load import open_checkpoint
from lastwords.checkpoint.part import content_of, read_lone_header
from lastwords.checkpoint.reshard.rank_files import CheckpointSource, RankFiles
from lastwords.checkpoint.reshard.rank_transform import SUFFIX, Source, strategy_or_none, transform_rank
from lastwords.checkpoint.reshard.strategy import Strategy, strategy_of, text
from lastwords.checkpoint.system import REAL_OS, Os, make_directory, storage_errors, sync_directory
from lastwords.errors import ConfigError, IncompleteError, MismatchError, StrategyError
from lastwords.integrations.bars import rank_bars

Progress = Callable[[int, int, int | None], None]
"""Called with a rank, the bytes of its file that are written, and None: how many there will be is not known before."""


def transform_checkpoints(
    src_checkpoints_dir: str,
    dst_checkpoints_dir: str,
    ckpt_prefix: str,
    src_strategy_file: str | None = None,
    dst_strategy_file: str | None = None,
) -> None:
    """Writes `rank_N/{ckpt_prefix}{N}.ckpt` for every destination rank into a new directory.

    The destination appears whole or not at all. On a terminal, bars on stderr show how far it is.

    Args:
        src_checkpoints_dir: has sub-directories `rank_N/`, of each of which the newest file is taken, by the step that
            stands in it; all have to be of one step. If it is one of our checkpoints (with a manifest), its own
            strategy serves for None, every byte is checked, and any rank of a group will do for what all of the group
            held.
        dst_checkpoints_dir: the new directory.
        ckpt_prefix: of the files' names.
        src_strategy_file: None: not divided.
        dst_strategy_file: likewise.

    Raises:
        NotTextError: an argument is no str (a TypeError).
        ConfigError: the destination exists, or the prefix is no part of a name (a ValueError).
        IncompleteError: a source rank is missing; it is named.
        MismatchError: two models, or two steps.
        StrategyError, FormatError, ReplacedError, StorageError: a file is damaged, was replaced, or cannot be read.
    """
    with rank_bars() as progress:
        transform_all(
            src_checkpoints_dir, dst_checkpoints_dir, ckpt_prefix, src_strategy_file, dst_strategy_file,
            progress=progress,
        )  # fmt: skip


def transform_all(
    src_checkpoints_dir: str,
    dst_checkpoints_dir: str,
    ckpt_prefix: str,
    src_strategy_file: str | None = None,
    dst_strategy_file: str | None = None,
    *,
    progress: Progress | None = None,
    os: Os = REAL_OS,
) -> None:
    """As `transform_checkpoints`, told of its progress, and on another file system."""
    source_dir = Path(text("src_checkpoints_dir", src_checkpoints_dir))
    out = Path(text("dst_checkpoints_dir", dst_checkpoints_dir))
    prefix = text("ckpt_prefix", ckpt_prefix)
    if "/" in prefix or "\0" in prefix:
        raise ConfigError(f"ckpt_prefix={prefix!r} must be the beginning of a file name, without any '/'")
    said = strategy_or_none("src_strategy_file", src_strategy_file, os)
    wanted = strategy_or_none("dst_strategy_file", dst_strategy_file, os)
    refuse_existing(out, os)
    if not os.exists(source_dir / layout.MANIFEST_NAME):
        _transform_to(out, RankFiles(newest_files(source_dir, os), said, os), wanted, prefix, progress, os)
        return
    with open_checkpoint(source_dir, os) as checkpoint:
        source = CheckpointSource(checkpoint, os)
        if said is not None:
            _refuse_contradiction(source, said)
        _transform_to(out, source, wanted, prefix, progress, os)


def _transform_to(
    out: Path,
    source: Source,
    wanted: Strategy | None,
    prefix: str,
    progress: Progress | None,
    os: Os,
) -> None:
    ranks = range(1 if wanted is None else wanted.world_size)
    for rank in ranks:
        source.saved_for(wanted, rank)  # the whole plan is checked before anything is written
    with making_directory(out, os) as hidden:
        for rank in ranks:
            rank_dir = hidden / layout.rank_dir_name(rank)
            make_directory(rank_dir, os)
            told = None if progress is None else _of_rank(progress, rank)
            transform_rank(source, wanted, rank, rank_dir / f"{prefix}{rank}{SUFFIX}", os=os, progress=told)
            sync_directory(rank_dir, os)


def newest_files(source: Path, os: Os = REAL_OS) -> dict[int, Path]:
    """Of each `rank_N/` the file of the highest step. MismatchError, naming two files, where these steps differ."""
    if not os.leads_to_directory(source):
        raise IncompleteError(
            f"there is no directory {source}; pass the directory that contains rank_N directories",
            missing=(str(source),),
        )
    newest: dict[int, Path] = {}
    steps: dict[int, int] = {}
    with storage_errors("listing", source):
        names = os.listdir(source)
    for name in names:
        rank = layout.parse_rank_dir(name)
        if rank is None or not os.leads_to_directory(source / name):
            continue
        with storage_errors("listing", source / name):
            files = [source / name / file for file in os.listdir(source / name) if _is_one(file)]
        for path in files:
            step = content_of(read_lone_header(path, os), path).global_step
            if step > steps.get(rank, 0):
                steps[rank], newest[rank] = step, path
    if not newest:
        raise IncompleteError(
            f"{source} has no rank_N/*{SUFFIX}; pass the directory that contains rank_N directories",
            missing=("rank_0",),
        )
    first = min(steps)
    for rank, step in sorted(steps.items()):
        if step != steps[first]:
            raise MismatchError(
                f"the newest file of rank {first} is of global step {steps[first]} ({newest[first]}), that of rank "
                f"{rank} of step {step} ({newest[rank]}); all files must be of the same step; remove the "
                f"files of the other step"
            )
    return dict(sorted(newest.items()))


def _refuse_contradiction(source: CheckpointSource, said: Strategy) -> None:
    """StrategyError if the strategy is not the one that the checkpoint was written under."""
    own = strategy_of(source.checkpoint.manifest)
    for name, cut in sorted(said.tensors.items()):
        there = own.tensors.get(name)
        if name.startswith("model/") and (there is None or (there.dtype, there.shape) != (cut.dtype, cut.shape)):
            has = "does not have it" if there is None else f"has {there.dtype} {there.shape}"
            raise StrategyError(
                f"according to src_strategy_file {name} is {cut.dtype} {cut.shape}; {source.checkpoint.path} "
                f"{has}. Omit src_strategy_file: the checkpoint contains its own strategy"
            )


def _of_rank(progress: Progress, rank: int) -> Callable[[int], None]:
    return lambda done: progress(rank, done, None)


def _is_one(name: str) -> bool:
    """What is hidden is being written, or was left by a process that died."""
    return name.endswith(SUFFIX) and not name.startswith(".")
