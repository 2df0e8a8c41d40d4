"""What publication needs of a part: all of part.json but the tables, at a cost that no tensor adds to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from lastwords.checkpoint import layout
from lastwords.checkpoint.codec import Number, typed
from lastwords.checkpoint.document import decode_document, read_document, told
from lastwords.checkpoint.entries import by_name, by_rank, local_summary, unit_summary, unpacked
from lastwords.checkpoint.part import Part, Written
from lastwords.checkpoint.reason import Reason
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.checkpoint.versions import PART_FORMAT

_KEYS = ("rank", "global_step", "epoch", "step", "job", "file", "facts", "summary")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSummary:
    """holders: the ranks that held the unit; None if its writer did not say. reasons: why it is not exact.

    plan: of a share, as of `UnitEntry`.
    """

    holders: tuple[Number, ...] | None = None
    reasons: tuple[str, ...]
    plan: str = ""


@dataclass(frozen=True, slots=True)
class LocalSummary:
    """after: epoch and step that the loop had named last, () if it names none, None if that was not recorded."""

    exact: bool
    reasons: tuple[Reason, ...]
    after: tuple[Number, ...] | None = None


@dataclass(frozen=True, slots=True)
class PartHead(Written):
    """A part without its tables. part_bytes, part_sum: of part.json itself, 0 and "" if it was not read from there."""

    units: Mapping[str, UnitSummary]
    locals: Mapping[int, LocalSummary]
    facts: Mapping[str, Any]
    part_bytes: int = 0
    part_sum: str = ""

    @staticmethod
    def of(part: Part) -> PartHead:
        """Head of a part that is in memory."""
        units = {unit: typed(unit_summary(one), UnitSummary, unit) for unit, one in part.units.items()}
        locals_ = {rank: typed(local_summary(one), LocalSummary, f"rank {rank}") for rank, one in part.locals.items()}
        place = part.rank, part.global_step, part.epoch, part.step
        return PartHead(*place, part.job, part.file, units, locals_, part.facts)

    @staticmethod
    def decode(raw: bytes, where: Path) -> PartHead:
        """FormatError if it is damaged or newer than this code."""
        content = decode_document(raw, where=where, version_max=PART_FORMAT, only=_KEYS)
        with told(where):
            summary = typed(content["summary"], dict[str, Any], "summary")
            content["units"] = by_name(summary.get("units"), "summary.units")
            content["locals"] = by_rank(summary.get("locals"), "summary.locals")
            content["facts"] = unpacked(content["facts"], "facts")
            itself = {"part_bytes": len(raw), "part_sum": xxhash.xxh3_64_hexdigest(raw)}
            return typed(content | itself, PartHead, "")


def read_part_head(rank_dir: Path, os: Os = REAL_OS) -> PartHead:
    """part.json of one writer without its tables; FileNotFoundError, FormatError or StorageError."""
    path = rank_dir / layout.PART_NAME
    return PartHead.decode(read_document(path, os), path)
