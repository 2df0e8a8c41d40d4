"""group_info.pb: a small file in which each rank says who holds the same as it does.

`GROUP_INFO_FILE=group_info.pb` makes each rank write one at the start. They serve periodic checkpoints with one file
for each rank: where a rank's file is lost, that of another rank of its group is as good. (A last-words checkpoint
needs none of this, since its manifest says where each unit is.)

Where a rank writes: `{rank}` in the value is replaced by its rank; a value that only this rank was given is taken as
it is; and where ranks share one value, as they do under torchrun, rank 3 writes `group_info_rank_3.pb`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from lastwords._pb import group_info_pb2 as pb
from lastwords.checkpoint.appearing import write_file
from lastwords.checkpoint.system import REAL_OS, make_directories, read_whole
from lastwords.errors import ConfigError, GroupInfoError, NotTextError
from lastwords.sharding.agree import WorldLike
from lastwords.sharding.describe import group_of
from lastwords.sharding.pieces import UnitTable
from lastwords.vocabulary import RANKS_MAX, UNIT_REPLICATED

VARIABLE = "GROUP_INFO_FILE"
FORMAT = 1
"""Newest format that this code reads, and the one it writes."""

_BYTES_MAX = 1 << 28
"""A holder takes up to 3 bytes: far more than any job needs."""
_RANK_IN_PATH = re.compile(r"(?<![A-Za-z0-9])rank_([0-9]+)")


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """Content of a group_info file. group: ranks that hold all units of `rank`; units: those, with their holders."""

    rank: int
    world_size: int
    group: tuple[int, ...]
    units: Mapping[str, tuple[int, ...]]


# ---------------------------------------------------------------------- writing


def value_is_shared(board: WorldLike, prefix: str, environ: Mapping[str, str], timeout_s: float) -> bool:
    """Whether another rank of the job would write to the very path that this rank was given.

    To be called by all ranks or by none, also where the variable is not set. prefix: a place of its own on the board.
    A value that names no file is a ConfigError on every rank.
    """
    if board.size == 1:
        return False
    value = environ.get(VARIABLE, "")
    own, problem = "", ""
    try:
        own = str(_path(value, board.rank, shared=False).absolute()) if value else ""
    except ConfigError as error:
        problem = f"rank {board.rank}: {error}"
    board.publish(f"{prefix}/group_info/{board.rank}", {"path": own, "problem": problem})
    if board.rank == 0:
        keys = [f"{prefix}/group_info/{rank}" for rank in range(board.size)]
        words = [board.read(key, timeout_s, f"every rank's {VARIABLE}") for key in keys]
        counts = Counter(word["path"] for word in words if word["path"])
        problems = [word["problem"] for word in words if word["problem"]]
        shared = [path for path, count in counts.items() if count > 1]
        board.publish(f"{prefix}/group_info", {"shared": shared, "problem": next(iter(problems), "")})
    word = board.read(f"{prefix}/group_info", timeout_s, f"rank 0 to compare the ranks' {VARIABLE}")
    if word["problem"]:
        raise ConfigError(word["problem"])
    return own in word["shared"]


def write_group_info(environ: Mapping[str, str], rank: int, table: UnitTable, *, shared: bool = True) -> Path | None:
    """Write this rank's file where GROUP_INFO_FILE says; the path written, or None where the variable is not set.

    shared: other ranks were given the same value, see `value_is_shared`; a job of one rank shares it with nobody.
    An older file is replaced in one rename. Raises ConfigError for a value that names no file, StorageError where the
    file system refuses.
    """
    value = environ.get(VARIABLE, "")
    if not value:
        return None
    world_size = len(table.units[UNIT_REPLICATED])
    path = _path(value, rank, shared=shared and world_size > 1)
    message = pb.GroupInfo(format=FORMAT, rank=rank, world_size=world_size)
    message.group.extend(group_of(rank, table.units, table.mine))
    for name in table.mine:
        message.units.add(name=name, holders=sorted(table.units[name]))
    make_directories(path.parent, REAL_OS)
    write_file(path, message.SerializeToString(), replace=True)
    return path


def _path(value: str, rank: int, *, shared: bool) -> Path:
    """
    >>> str(_path("out/{rank}/group_info.pb", 3, shared=True)), str(_path("group_info.pb", 3, shared=True))
    ('out/3/group_info.pb', 'group_info_rank_3.pb')
    """
    path = Path(value.replace("{rank}", str(rank)))
    if not path.name or value.endswith("/") or path.is_dir():
        raise ConfigError(f"{VARIABLE}={value!r} is a directory; set it to the name of a file, such as group_info.pb")
    if shared and "{rank}" not in value:
        return path.with_name(f"{path.stem}_rank_{rank}{path.suffix}")
    return path


# ---------------------------------------------------------------------- reading


def read_group_info(path: Path) -> GroupInfo:
    """Content of a group_info file. GroupInfoError if it is missing, empty, damaged, foreign or of a newer format."""
    if not path.is_file():
        raise GroupInfoError(
            f"there is no group_info file {path}; the job writes it at its start if {VARIABLE} is set (where ranks "
            "share one value, rank 3's file is called group_info_rank_3.pb)"
        )
    raw = read_whole(path, REAL_OS, bytes_max=_BYTES_MAX)
    if not raw:
        raise GroupInfoError(f"{path} is empty; start the job again with {VARIABLE} set, or use another rank's file")
    message = pb.GroupInfo()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise _damaged(path, "it is no group_info file") from error
    if message.format > FORMAT:
        raise GroupInfoError(
            f"{path} was written by a newer lastwords, format {message.format}; this one reads up to {FORMAT}; upgrade"
        )
    if message.format == 0:
        raise _damaged(path, "it is no group_info file")
    if not message.group:
        raise _damaged(path, "it has no list of ranks")
    info = GroupInfo(
        message.rank,
        message.world_size,
        tuple(message.group),
        {unit.name: tuple(unit.holders) for unit in message.units},
    )
    problem = _contradiction(info, len(message.units))
    if problem is not None:
        raise _damaged(path, problem)
    return info


def _contradiction(info: GroupInfo, units: int) -> str | None:
    if info.world_size > RANKS_MAX:
        return f"its world has {info.world_size} ranks, more than any job"
    for what, ranks in (("its group", info.group), *((f"unit {name!r}", ranks) for name, ranks in info.units.items())):
        if list(ranks) != sorted(set(ranks)) or info.rank not in ranks:
            return f"{what} is {list(ranks)}, not an ascending list with rank {info.rank} in it"
        if ranks[-1] >= info.world_size:
            return f"{what} names rank {ranks[-1]} in a world of {info.world_size} ranks"
    if len(info.units) != units or info.group != group_of(info.rank, info.units, info.units):
        return "its group does not follow from its units"
    return None


def _damaged(path: Path, what: str) -> GroupInfoError:
    return GroupInfoError(
        f"{path} is damaged: {what}; start the job again with {VARIABLE} set, or use the file of another rank"
    )


def restore_group_info_list(path: str) -> list[int]:
    """Ranks whose checkpoint file can stand in for that of the rank which wrote this group_info file, itself included.

    Args:
        path: the group_info file.

    Raises:
        NotTextError: the path is no str (a TypeError).
        GroupInfoError: the file is missing, empty, damaged, or without the list (a ValueError).
    """
    _refuse_other_types("path", path)
    return list(read_group_info(Path(path)).group)


def get_ckpt_path_with_strategy(ckpt_path: str, strategy_path: str) -> str | None:
    """`ckpt_path` if that file exists; else the first file that does of a rank of the same group; else None.

    Args:
        ckpt_path: a rank's own file; the last `rank_K` in it says of which rank, and wherever the same `rank_K` stands
            in it, another rank's number is tried, lowest first. Without any, there is no other file to look for.
        strategy_path: the rank's group_info file, which is read only if its own checkpoint file is gone.

    Raises:
        NotTextError, GroupInfoError: as `restore_group_info_list` does.
        ConfigError: the group_info file is of another group than the checkpoint's rank (a ValueError).
    """
    _refuse_other_types("ckpt_path", ckpt_path)
    _refuse_other_types("strategy_path", strategy_path)
    if os.path.isfile(ckpt_path):
        return ckpt_path
    group = restore_group_info_list(strategy_path)
    found = _RANK_IN_PATH.findall(ckpt_path)
    if not found:
        return None
    digits = found[-1]
    if int(digits) not in group:
        raise ConfigError(
            f"{ckpt_path} is of rank {int(digits)}, but {strategy_path} is of the group {group}; no file of that group "
            "can take its place: use the group_info file of the checkpoint's own rank"
        )
    for rank in group:
        other = re.sub(rf"(?<![A-Za-z0-9])rank_{digits}(?![0-9])", f"rank_{rank}", ckpt_path)
        if os.path.isfile(other):
            return other
    return None


def _refuse_other_types(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise NotTextError(f"{name} must be a str, such as str(path), not a {type(value).__name__}")
