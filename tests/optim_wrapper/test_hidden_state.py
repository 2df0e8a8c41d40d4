"""Attributes of an optimizer that no `state_dict()` has are a reason as long as they are not what they began as."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lastwords.optim_wrapper.hidden_state import HiddenState


class Lazy(torch.optim.SGD):
    """Copies slow weights in its first step, and knows by a flag that it has."""

    started = None

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.started = False
        self.paused = False


def made() -> tuple[Lazy, HiddenState]:
    net = nn.Linear(2, 2)
    optimizer = Lazy(net.parameters())
    return optimizer, HiddenState(optimizer, "optimizer", None, net)


def test_a_flag_that_the_first_step_sets_stays_a_reason() -> None:
    """A resumed run has it unset, and would copy the slow weights once more."""
    optimizer, hidden = made()
    optimizer.started = True
    assert [reason.split()[0] for reason in hidden.look()] == ["optimizer.started"]
    assert [reason.split()[0] for reason in hidden.look()] == ["optimizer.started"]


def test_one_that_is_back_where_it_began_is_none() -> None:
    optimizer, hidden = made()
    optimizer.paused = True
    assert len(hidden.look()) == 1
    optimizer.paused = False
    assert hidden.look() == []


def test_what_comes_later_counts_from_when_it_was_first_seen() -> None:
    optimizer, hidden = made()
    optimizer.late = 3  # type: ignore[attr-defined]
    assert hidden.look() == []
    optimizer.late = 4  # type: ignore[attr-defined]
    assert len(hidden.look()) == 1
