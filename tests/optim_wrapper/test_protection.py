"""How protection ends: what it gives back, and what it keeps while the process leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lastwords.optim_wrapper.config import Config
from lastwords.optim_wrapper.protection import Protection
from lastwords.optim_wrapper.world import World
from lastwords.processor.departure import EXIT_SAVED, Verdict


class Guard:
    """Stands for the signal guard and counts how often it was taken away."""

    uninstalled = 0

    def uninstall(self) -> None:
        self.uninstalled += 1


@pytest.fixture
def protection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = Config.from_env(0, "127.0.0.1", 30051, tmp_path, environ={})
    protection: Any = Protection(config, World(), lambda *_: None)  # type: ignore[arg-type, return-value]
    protection._signals = Guard()
    return protection


def test_signals_are_given_back_when_training_is_over(protection: Any) -> None:
    protection.close()
    protection.close()
    assert protection._signals.uninstalled == 1


def test_signals_are_given_back_when_the_controller_has_refused_this_process(protection: Any) -> None:
    protection._departure.refuse("port 30051 belongs to another job")
    protection.close()
    assert protection._signals.uninstalled == 1


def test_a_launchers_sigterm_cannot_cut_off_a_process_that_leaves_after_its_last_words(protection: Any) -> None:
    protection._departure.decide(Verdict(EXIT_SAVED, "lastwords: rank 0: ...", is_cause=False))
    protection.close()
    assert protection._signals.uninstalled == 0
