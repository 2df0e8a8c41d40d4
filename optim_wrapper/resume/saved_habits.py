"""What the run that is resumed had learned of its loop, and what its loop had called its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.meta import Habits
from lastwords.processor.saver import Position


def habits_for(rank: int | None, manifest: Manifest) -> Habits:
    """What the saved run had learned: that of this rank, or of all together where its own is lost, or for None."""
    every = {rank: local.meta.habits for rank, local in manifest.locals.items()}
    own = every.get(-1 if rank is None else rank)
    names_go_back = any(habits.names_go_back for habits in every.values())  # all ranks have to judge alike
    if own is not None and own.late is not None:
        return replace(own, names_go_back=names_go_back)
    newest = max(every.values(), key=lambda one: one.late[2] if one.late else -1, default=Habits())
    writes = {one[:3]: one for one in sorted((one for habits in every.values() for one in habits.writes), key=_last)}
    return Habits(
        names_go_back=names_go_back,
        passes=newest.passes if rank is not None else None,
        late=newest.late,
        moved=newest.moved,
        tentative_reasons=[*dict.fromkeys(why for one in every.values() for why in one.tentative_reasons)],
        early_reasons=[*dict.fromkeys(why for one in every.values() for why in one.early_reasons)],
        writes=[*writes.values()],
        changes={
            what: max((one.changes[what] for one in every.values() if what in one.changes), key=lambda when: when[2])
            for what in {what for one in every.values() for what in one.changes}
        },
    )


def _last(writes: tuple[Any, ...]) -> int:
    return int(writes[-1][2])


def last_named(manifest: Manifest) -> Position | None:
    """Of the step that was saved, or, where nobody knew that, of the newest one before it that a rank knew."""
    if manifest.named:
        return Position(manifest.epoch, manifest.step)
    said = [local.document.after or () for local in manifest.locals.values() if local.tensors]
    return max((Position(*after) for after in said if len(after) == 2), default=None)
