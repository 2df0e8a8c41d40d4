"""Learning rates and their like, of one moment on every rank: that of the extras, the scheduler among them.

In a sharded job the units of one step come from several ranks. One of them may have ended the step while another has
made its update and not come to its scheduler yet. The scheduler is restored from the writer of `replicated`, so where a
unit's writer stood elsewhere in the step, the hyperparameters have to come from there as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lastwords.checkpoint.entries import UnitEntry
from lastwords.checkpoint.meta import UnitMeta
from lastwords.checkpoint.reshard.saved_state import MOVED_BY_SCHEDULERS
from lastwords.checkpoint.storable import refuse_unstorable
from lastwords.errors import UnstorableError
from lastwords.optim_wrapper.state.group_copies import copies_differ
from lastwords.vocabulary import UNIT_REPLICATED


def at_moment(meta: UnitMeta, groups: list[dict[str, Any]], *, unit: str, ended: bool) -> UnitMeta:
    """With whether the unit's writer had ended the step; of `replicated`, with all groups' plain values too."""
    plain = [_plain(group) for group in groups] if unit == UNIT_REPLICATED else None
    return replace(meta, step_ended=ended, hyperparameters=plain)


def align(groups: list[dict[str, Any]], entries: Mapping[str, UnitEntry], restored: Iterable[str]) -> list[str]:
    """Take over the values of the extras' moment where one of the `restored` units was written at another one.

    groups: the optimizer's, as restored. Returns why the resume is not exact where that cannot be told.
    """
    extras = entries[UNIT_REPLICATED].meta
    elsewhere = [unit for unit in restored if entries[unit].meta.step_ended not in (None, extras.step_ended)]
    if not elsewhere:
        return []
    saved = extras.hyperparameters or []
    alike = len(saved) == len(groups) and all(map(_alike, groups, saved))
    if not alike:
        return [
            f"{' and '.join(elsewhere)} and the extras were written by ranks at different points of the "
            f"step, and their optimizers' param_groups differ: a scheduler step may be missing"
        ]
    for group, values in zip(groups, saved, strict=True):
        group.update({key: value for key, value in values.items() if key in MOVED_BY_SCHEDULERS})
    return []


def moved_by_hand(
    before: list[dict[str, Any]], now: list[dict[str, Any]], groups: Sequence[Mapping[str, Any]], schedulers: list[Any]
) -> bool:
    """Whether two copies of `groups` differ in what no step of these schedulers has made so.

    A scheduler explains the `lr` of its own optimizer's groups that it left there, and one that cycles momentum that.
    """
    if before is now or not schedulers or len(before) != len(now):
        return copies_differ(before, now)
    return any(
        was is not one and (was.keys() != one.keys() or any(
            value is not was[key] and _differ(was[key], value) and not _explained(key, value, group, schedulers)
            for key, value in one.items()
        ))
        for was, one, group in zip(before, now, groups, strict=True)
    )  # fmt: skip


def _explained(key: str, value: Any, group: Mapping[str, Any], schedulers: list[Any]) -> bool:
    for scheduler in schedulers if key in MOVED_BY_SCHEDULERS else ():
        own = getattr(scheduler, "optimizer", None)
        place = next((at for at, one in enumerate(getattr(own, "param_groups", ())) if one is group), None)
        if own is not None and place is None:
            continue
        if key != "lr":
            parts = (scheduler, *getattr(scheduler, "_schedulers", ()))
            if any(getattr(one, "cycle_momentum", False) for one in parts):
                return True
            continue
        left = getattr(scheduler, "_last_lr", None)
        # Another kind than torch's, which does not show it.
        if left is None or place is None or (place < len(left) and not _differ(left[place], value)):
            return True
    return False


def _differ(one: Any, other: Any) -> bool:
    return copies_differ([{"": one}], [{"": other}])


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """What can be stored without a tree of tensors."""
    found = {}
    for key, value in group.items():
        if key == "params":
            continue
        try:
            refuse_unstorable(value, key)
        except UnstorableError:
            continue
        found[key] = value
    return found


def _alike(group: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    here = _plain(group)
    same = all(here.get(key) == value for key, value in saved.items() if key not in MOVED_BY_SCHEDULERS)
    return same and here.keys() == saved.keys() and not isinstance(group.get("lr"), torch.Tensor)
