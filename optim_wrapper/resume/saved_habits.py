"""What the run that is resumed had learned of its loop, and what its loop had called its steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.meta import NO_STATE, Habits, StoredLate
from lastwords.processor.recurrence import Recurrence
from lastwords.processor.saver import Position


def habits_for(rank: int | None, manifest: Manifest) -> Habits:
    """What the saved run had learned: that of this rank, or of all together where its own is lost, or for None."""
    every = {rank: local.meta.habits for rank, local in manifest.locals.items()}
    own = manifest.locals.get(-1 if rank is None else rank)
    names_go_back = any(habits.names_go_back for habits in every.values())  # all ranks have to judge alike
    if own is not None and own.meta.kind != NO_STATE:
        return replace(own.meta.habits, names_go_back=names_go_back)
    passes = {one.passes for one in every.values()} - {None}
    return Habits(
        names_go_back=names_go_back,
        passes=passes.pop() if rank is not None and len(passes) == 1 else None,
        early_reasons=[*dict.fromkeys(why for one in every.values() for why in one.early_reasons)],
        after_copy=_newest(one.after_copy for one in every.values()),
        after_update=_newest(one.after_update for one in every.values()),
        updates=max((one.updates for one in every.values()), default=0),
        draws=any(one.draws for one in every.values()) or None,
    )


def _newest(tables: Iterable[StoredLate]) -> StoredLate:
    """Of each name what is known by the table in which it has come last."""
    every = [item for table in tables for item in table.items()]
    return dict(sorted(every, key=lambda item: Recurrence(*item[1]).last))


def last_named(manifest: Manifest) -> Position | None:
    """Of the step that was saved, or, where nobody knew that, of the newest one before it that a rank knew."""
    if manifest.named:
        return Position(manifest.epoch, manifest.step)
    said = [local.document.after or () for local in manifest.locals.values() if local.tensors]
    return max((Position(*after) for after in said if len(after) == 2), default=None)
