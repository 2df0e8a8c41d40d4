"""What stands between a Ctrl-C and gradients that are final."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.trainer.training_hooks import UpdateHooks
from lastwords.vocabulary import Phase, Stand


class Recorded:
    """Protection and gate in one; notes in which order they are called."""

    stand = Stand(Phase.READY, 4)

    def __init__(self, at_gate: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self._at_gate = at_gate

    @property
    def agent(self) -> Recorded:
        return self

    def before_update(self) -> None:
        self.calls.append("gate")
        if self._at_gate is not None:
            raise self._at_gate

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append(name)


def hooks(one: Any) -> UpdateHooks:
    return UpdateHooks(one, lambda: None, None, one, lambda reasons: None, lambda: None, lambda: None)


def test_signals_wait_from_the_gate_on() -> None:
    """Whoever is parked there may be told to proceed: then others need its gradients."""
    one = Recorded()
    hooks(one).begin_update()
    assert one.calls == ["hold_signals", "gate", "enter_update"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(75), ConfigError("not in one step")], ids=repr)
def test_signals_are_let_go_where_the_gate_ends_otherwise(error: BaseException) -> None:
    one = Recorded(error)
    with pytest.raises(type(error)):
        hooks(one).begin_update()
    assert one.calls == ["hold_signals", "gate", "release_signals"]
