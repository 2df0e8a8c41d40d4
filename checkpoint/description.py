"""The manifest of a checkpoint, made of its parts' descriptions and of what the controller knows beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lastwords.checkpoint import layout
from lastwords.checkpoint.entries import together
from lastwords.checkpoint.manifest import Manifest, contradiction
from lastwords.checkpoint.part import Part
from lastwords.checkpoint.part_head import LocalSummary, PartHead
from lastwords.checkpoint.part_tables import Heads, LocalHead, PartTables, UnitHead
from lastwords.checkpoint.reason import Cause, Reason, merged
from lastwords.checkpoint.system import REAL_OS
from lastwords.vocabulary import Share


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


def build_manifest(
    incident: Incident, parts: Sequence[Part] | Sequence[PartHead], *, published_unix_ns: int
) -> Manifest:
    """Manifest of verified parts. AssertionError if they contradict each other, since they were verified.

    Of heads only, it leaves the tables in each part.json.
    """
    heads = [PartHead.of(part) if isinstance(part, Part) else part for part in parts]
    units = {unit: entry for part in heads for unit, entry in part.units.items()}
    locals_ = {rank: entry for part in heads for rank, entry in part.locals.items()}
    reasons: list[Reason] = []
    for rank in range(incident.world_size):
        local = locals_.get(rank)
        if local is None:
            why = incident.lost_locals.get(rank, "it was not written")
            reasons.append(Reason(why, Cause.LOCAL_STATE_LOST, (rank,)))
        elif not local.exact:
            reasons += [reason.of_rank(rank) for reason in local.reasons or (Reason("no reason given"),)]
    for unit, entry in sorted(units.items()):
        # The writer's own: a step cut off between update and end leaves, for one, a scheduler that has not moved.
        reasons += [Reason(reason, unit=Share.parse(unit).unit) for reason in entry.reasons]
    epoch, step = next(
        ((part.epoch, part.step) for part in heads if part.epoch != layout.EPOCH_UNKNOWN),
        (layout.EPOCH_UNKNOWN, incident.global_step),
    )
    if epoch == layout.EPOCH_UNKNOWN:
        reasons += _unnamed(incident.global_step, locals_)
    listed = _in_one_file([part for part in parts if isinstance(part, Part)])
    if listed is None:
        listed = _left_in_parts(heads, incident.global_step)
    manifest = Manifest(
        job=incident.job,
        parent_job=incident.parent_job,
        generation=incident.generation,
        incident=incident.incident,
        attempt=incident.attempt,
        global_step=incident.global_step,
        epoch=epoch,
        step=step,
        world_size=incident.world_size,
        reason=incident.reason,
        cause_ranks=tuple(sorted(incident.cause_ranks)),
        published_unix_ns=published_unix_ns,
        **listed,
        exact=not reasons,
        reasons=merged(reasons),
        facts=merge_facts(incident.facts, heads),
    )
    problem = contradiction(manifest)
    assert problem is None, problem
    return manifest


def _in_one_file(parts: Sequence[Part]) -> dict[str, Any] | None:
    """Tables that are gathered in the manifest; None without parts."""
    if not parts:
        return None
    units = {unit: entry for part in parts for unit, entry in part.units.items()}
    locals_ = {rank: entry for part in parts for rank, entry in part.locals.items()}
    return {
        "files": tuple(part.file for part in parts),
        "units": dict(sorted(together(units).items())),
        "locals": dict(sorted(locals_.items())),
    }


def _left_in_parts(parts: Sequence[PartHead], global_step: int) -> dict[str, Any]:
    """What a manifest says of parts that keep their tables."""
    units = {unit: UnitHead(part.rank, one.holders) for part in parts for unit, one in part.units.items()}
    locals_ = {
        rank: LocalHead(part.rank, one.exact, one.reasons) for part in parts for rank, one in part.locals.items()
    }
    files = {
        part.rank: replace(part.file, chunks=(), part_bytes=part.part_bytes, part_sum=part.part_sum) for part in parts
    }
    heads = Heads(dict(sorted(units.items())), dict(sorted(locals_.items())), files)
    tables = PartTables(Path(), heads, global_step, REAL_OS)  # only to be encoded: nothing is read through it
    return {
        "files": tuple(files.values()),
        "units": tables.units,
        "locals": tables.locals,
    }


def _unnamed(global_step: int, locals_: Mapping[int, LocalSummary]) -> list[Reason]:
    """Why a resume after a step without a name is not exact; nothing where the loop gives names to no step."""
    said = [after for rank in sorted(locals_) if (after := locals_[rank].after) is not None]
    if any(after == () for after in said):
        return []
    last = next((f" (last reported: epoch {a[0]}, step {a[1]})" for a in said if a), "")
    return [
        Reason(
            f"global step {global_step} was saved before the training loop had reported its epoch and "
            f"step{last}; continue by global step"
        )
    ]


def merge_facts(own: Mapping[str, Any], parts: Sequence[PartHead]) -> dict[str, Any]:
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
