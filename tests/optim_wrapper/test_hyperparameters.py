"""Units written at different places of a step are restored with the learning rates of one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lastwords.checkpoint.entries import UnitEntry
from lastwords.checkpoint.meta import EMPTY_UNIT, UnitMeta
from lastwords.optim_wrapper.state.plain_values import align, plain_part


def entry(meta: UnitMeta) -> UnitEntry:
    return UnitEntry(writer=0, file="rank_0/x.ckpt", tensors=(), said=meta.to_json())


def saved(*, own_ended: bool, extras_ended: bool, groups: list[dict[str, Any]]) -> dict[str, UnitEntry]:
    """What the manifest says of a unit of this rank, and of the extras, whose writer had `groups`."""
    of_extras = replace(EMPTY_UNIT, step_ended=extras_ended, hyperparameters=[*map(plain_part, groups)])
    return {"ranks-1-3": entry(replace(EMPTY_UNIT, step_ended=own_ended)), "replicated": entry(of_extras)}


def group(lr: float, **more: Any) -> dict[str, Any]:
    return {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, **more}


def test_of_two_places_in_a_step_that_of_the_extras_counts() -> None:
    for own_ended in (True, False):
        groups = [group(0.5)]
        entries = saved(own_ended=own_ended, extras_ended=not own_ended, groups=[group(0.25)])
        assert align(groups, entries, ["ranks-1-3"]) == []
        assert groups[0]["lr"] == 0.25
        assert len(groups[0]["params"]) == 1


def test_at_one_place_every_unit_keeps_its_own() -> None:
    for ended in (True, False):
        groups = [group(0.5)]
        entries = saved(own_ended=ended, extras_ended=ended, groups=[group(0.25)])
        assert align(groups, entries, ["ranks-1-3", "replicated"]) == []
        assert groups[0]["lr"] == 0.5


def test_of_different_groups_nothing_is_taken_over_and_the_reason_is_given() -> None:
    different = [
        [group(0.25, eps=1e-6)],
        [group(0.25, initial_lr=1.0)],
        [group(0.25), group(0.25)],
        [group(torch.tensor(0.25))],  # type: ignore[arg-type]
    ]
    for others in different:
        groups = [group(0.5)]
        (reason,) = align(groups, saved(own_ended=False, extras_ended=True, groups=others), ["ranks-1-3"])
        assert reason.startswith("ranks-1-3 and the extras")
        assert groups[0]["lr"] == 0.5


def test_a_checkpoint_that_does_not_say_is_taken_as_it_is() -> None:
    groups = [group(0.5)]
    assert align(groups, {"ranks-1-3": entry(EMPTY_UNIT), "replicated": entry(EMPTY_UNIT)}, ["ranks-1-3"]) == []
    assert groups[0]["lr"] == 0.5
