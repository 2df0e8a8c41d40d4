"""Ctrl-C ends a command without a traceback, also while its modules are imported."""

from __future__ import annotations

import signal
import sys
from types import ModuleType

import pytest

from lastwords.cli.__main__ import main


class _Interrupted(ModuleType):
    """What is imported raises: at once, or as it is called."""

    def __init__(self, *, imported: bool) -> None:
        super().__init__("lastwords.cli.main")
        if imported:
            self.main = self.raises

    def __getattr__(self, name: str) -> object:
        self.raises()
        raise AssertionError(name)

    def raises(self) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("imported", [True, False])
def test_an_interrupt_is_an_exit_code_and_no_traceback(monkeypatch: pytest.MonkeyPatch, imported: bool) -> None:
    monkeypatch.setitem(sys.modules, "lastwords.cli.main", _Interrupted(imported=imported))
    assert main() == 128 + signal.SIGINT
