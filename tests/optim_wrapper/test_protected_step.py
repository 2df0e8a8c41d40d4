"""What stands between a Ctrl-C and gradients that are final."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.trainer.protected_step import ProtectedStep
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.agent import StepWork
from lastwords.vocabulary import Phase, Stand


class Recorded:
    """One of those that a step calls; notes in which order that is."""

    stand = Stand(Phase.READY, 4)
    position_at_gate = None

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name = name
        self._calls = calls

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self._calls.append(f"{self._name}.{name}")


class Around(Recorded):
    """Recorder, protection and gate in one."""

    def __init__(self, at_gate: BaseException | None = None) -> None:
        self.calls: list[str] = []
        super().__init__("recorder", self.calls)
        self.agent, self.watch, self.signals = [Recorded(name, self.calls) for name in ("agent", "watch", "signals")]
        self.agent.work, self.ledger, self.uncopied, self.source = StepWork(), Ledger(), False, None
        self._at_gate = at_gate

    def enter(self, step: int, position: object) -> None:
        self.calls.append("gate.enter")
        if self._at_gate is not None:
            raise self._at_gate


def begun_update(one: Any) -> None:
    optimizer = OptTFTWrapper(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    ProtectedStep(one, one, one, one, [optimizer], lambda: None, one.fail).begin_update()


def test_signals_wait_from_the_gate_on_and_the_tentative_copy_comes_before_it() -> None:
    """Whoever is parked there may be told to proceed: then others need its gradients."""
    one = Around()
    begun_update(one)
    assert one.calls == [
        "recorder.finish_copy",
        "watch.begin_update",
        "agent.copy_if_due",
        "signals.begin_update",
        "recorder.tentative",
        "agent.ready",
        "gate.enter",
        "agent.pass_gate",
        "agent.begin_update",
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(75), ConfigError("gate")], ids=repr)
def test_signals_are_let_go_where_the_gate_ends_otherwise(error: BaseException) -> None:
    one = Around(error)
    with pytest.raises(type(error)):
        begun_update(one)
    of_signals = [call for call in one.calls if call.startswith("signals")]
    assert of_signals == ["signals.begin_update", "signals.end_update"]
    assert "agent.begin_update" not in one.calls
    assert ("recorder.fail" in one.calls) == isinstance(error, ConfigError), "a loop may swallow that one"
