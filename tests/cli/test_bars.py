"""What takes long shows a bar on a terminal, and nothing anywhere else."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from lastwords.cli.main import main
from lastwords.integrations import bars
from tests.checkpoint.states import Job
from tests.checkpoint.stores import file_store
from tests.integrations.made import saved, trained
from tests.integrations.test_transform import Rooms

WIDTH = 80


def _transform(tmp: Path) -> list[object]:
    rooms = Rooms(tmp)
    return ["transform", rooms.source, rooms.out, "--to", rooms.three]


def _trained(tmp: Path) -> Path:
    saved(tmp / "ckpt", *trained(0))
    return tmp / "ckpt"


def _verify(tmp: Path) -> list[object]:
    Job(name="job").save(tmp / "ckpt", 36)
    return ["verify", tmp / "ckpt"]


def _upload(tmp: Path) -> list[object]:
    Job(name="job").save(tmp / "ckpt", 36)
    return ["upload", tmp / "ckpt", file_store(tmp / "store")]


COMMANDS: dict[str, tuple[Callable[[Path], list[object]], str]] = {
    "transform": (_transform, "rank 2 "),
    "verify": (_verify, "tft_saved_checkpoints-step_36 "),
    "upload": (_upload, "tft_saved_checkpoints-step_36-"),
    "convert": (lambda tmp: ["convert", _trained(tmp), tmp / "dcp", "--to", "dcp"], "convert "),
    "export": (lambda tmp: ["export", _trained(tmp), tmp / "out"], "export "),
}


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_bar_is_shown_on_a_terminal_alone(
    command: str, terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(
        bars, "Console", lambda *, stderr: Console(file=screen, force_terminal=terminal, width=WIDTH, color_system=None)
    )
    make, named = COMMANDS[command]
    assert main([str(argument) for argument in make(tmp_path)]) == 0
    shown = screen.getvalue()
    assert (named in shown) is terminal
    assert terminal or not shown
