"""What publication needs of a part: all of part.json but the tables, at a cost that no tensor adds to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from lastwords.checkpoint import layout
from lastwords.checkpoint.document import Fields, decode_document, read_document
from lastwords.checkpoint.entries import facts_from_json, local_summary, ranks_of, unit_summary
from lastwords.checkpoint.part import Part, Written, written_from_json
from lastwords.checkpoint.reason import Reason, reasons_in
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.checkpoint.versions import PART_FORMAT

_KEYS = ("rank", "global_step", "epoch", "step", "job", "file", "facts", "summary")


@dataclass(frozen=True, slots=True)
class UnitSummary:
    """holders: the ranks that held the unit; None if its writer did not say. reasons: why it is not exact.

    plan: of a share, as of `UnitEntry`.
    """

    holders: tuple[int, ...] | None
    reasons: tuple[str, ...]
    plan: str = ""

    @staticmethod
    def from_json(fields: Fields) -> UnitSummary:
        holders = fields.integers("holders") if "holders" in fields.keys() else None  # noqa: SIM118
        plan = fields.text("plan") if "plan" in fields.keys() else ""  # noqa: SIM118
        return UnitSummary(holders, fields.texts("reasons"), plan)


@dataclass(frozen=True, slots=True)
class LocalSummary:
    """after: epoch and step that the loop had named last, () if it names none, None if that was not recorded."""

    exact: bool
    reasons: tuple[Reason, ...]
    after: tuple[int, ...] | None

    @staticmethod
    def from_json(fields: Fields) -> LocalSummary:
        after = fields.integers("after") if "after" in fields.keys() else None  # noqa: SIM118
        return LocalSummary(fields.truth("exact"), reasons_in(fields, "reasons"), after)


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
        units = {unit: UnitSummary.from_json(Fields(unit_summary(one), unit)) for unit, one in part.units.items()}
        locals_ = {
            rank: LocalSummary.from_json(Fields(local_summary(one), f"rank {rank}"))
            for rank, one in part.locals.items()
        }
        place = part.rank, part.global_step, part.epoch, part.step
        return PartHead(*place, part.job, part.file, units, locals_, part.facts)

    @staticmethod
    def decode(raw: bytes, where: Path) -> PartHead:
        """FormatError if it is damaged or newer than this code."""
        fields = Fields(decode_document(raw, where=where, version_max=PART_FORMAT, only=_KEYS), where)
        summary = fields.inner("summary")
        units, locals_ = summary.inner("units"), ranks_of(summary.inner("locals"))
        return PartHead(
            *written_from_json(fields, where),
            units={unit: UnitSummary.from_json(units.inner(unit)) for unit in units.keys()},  # noqa: SIM118
            locals={rank: LocalSummary.from_json(inner) for rank, inner in sorted(locals_.items())},
            facts=facts_from_json(fields, where),
            part_bytes=len(raw),
            part_sum=xxhash.xxh3_64_hexdigest(raw),
        )


def read_part_head(rank_dir: Path, os: Os = REAL_OS) -> PartHead:
    """part.json of one writer without its tables; FileNotFoundError, FormatError or StorageError."""
    path = rank_dir / layout.PART_NAME
    return PartHead.decode(read_document(path, os), path)
