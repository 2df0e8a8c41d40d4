"""What stands between a Ctrl-C and gradients that are final."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.trainer.protected_step import ProtectedStep
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.vocabulary import Phase, Stand


class Recorded:
    """Recorder, protection and gate in one; notes in which order they are called."""

    stand = Stand(Phase.READY, 4)
    position_at_gate = None

    def __init__(self, at_gate: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self._at_gate = at_gate

    @property
    def agent(self) -> Recorded:
        return self

    @property
    def watch(self) -> Recorded:
        return self

    def enter(self, step: int, position: object) -> None:
        self.calls.append("gate")
        if self._at_gate is not None:
            raise self._at_gate

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.calls.append(name)


def begun_update(one: Any) -> None:
    optimizer = OptTFTWrapper(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    ProtectedStep(one, one, one, one, [optimizer], lambda: None).begin_update()


def test_signals_wait_from_the_gate_on_and_the_tentative_copy_comes_before_it() -> None:
    """Whoever is parked there may be told to proceed: then others need its gradients."""
    one = Recorded()
    begun_update(one)
    steps = ["before_update", "hold_signals", "tentative", "ready", "gate", "pass_gate", "enter_update"]
    assert one.calls == steps


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(75), ConfigError("not in one step")], ids=repr)
def test_signals_are_let_go_where_the_gate_ends_otherwise(error: BaseException) -> None:
    one = Recorded(error)
    with pytest.raises(type(error)):
        begun_update(one)
    left = [call for call in one.calls if "signals" in call]
    assert left == ["hold_signals", "release_signals"]
    assert "enter_update" not in one.calls
