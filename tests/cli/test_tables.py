"""What a narrow terminal, a wide one and a pipe get of a table: a name that somebody copies is always whole."""

from __future__ import annotations

import dataclasses
import doctest
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lastwords.checkpoint import layout, load
from lastwords.cli import checkpoint_commands, tables
from lastwords.cli.main import main
from lastwords.cli.status_command import view_of
from tests import golden
from tests.checkpoint.states import Job
from tests.page.fake_controller import state_of

JOB = "pretrain-7b-run42-ablation-of-warmup-2026-10-02"
NAMES = [
    "tft_saved_checkpoints-step_1234567",
    *(f"tft_saved_checkpoints-step_{step}" for step in (41, 40, 36, 37)),
    "tft_saved_checkpoints-step_37-replaced-1",
]
COMMANDS = [["ls"], ["inspect"], ["verify"], ["prune", "--job", JOB, "--keep", "1", "--last-words", "--dry-run"]]

Shown = Callable[..., list[str]]


class Output(io.StringIO):
    """A terminal, or a pipe."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal  # type: ignore[method-assign]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of a job with a long name and of another one: whole, without a manifest, and without a file."""
    directory = tmp_path / "checkpoints"
    last_words, periodic = Job(name=JOB), Job(name=JOB, incident=0, generation=9)
    for step in (36, 37):
        last_words.again(generation=step).save(directory, step)
    Job(name="other", generation=99).save(directory, 37)
    (periodic.save(directory, 40) / layout.MANIFEST_NAME).unlink()
    next((periodic.save(directory, 41) / "rank_1").iterdir()).unlink()
    periodic.save(directory, 1_234_567)
    assert {path.name for path in directory.glob("tft_*")} == {*NAMES}
    return directory


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, root: Path) -> Shown:
    """Lines that a terminal of so many columns gets, or a pipe."""

    def lines(command: list[str], columns: int | None) -> list[str]:
        file = Output(terminal=columns is not None)
        made = Console(file=file, width=columns or 80, color_system=None, soft_wrap=True)
        monkeypatch.setattr(tables, "console", lambda: made)
        main([command[0], str(root), *command[1:]])
        return file.getvalue().splitlines()

    return lines


@pytest.mark.ci
@pytest.mark.parametrize("columns", [40, 80, 160, None], ids=["40", "80", "160", "pipe"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_names_of_checkpoints_are_whole_in_every_width(
    shown: Shown, root: Path, command: list[str], columns: int | None
) -> None:
    lines = shown(command, columns)
    assert str(root) in lines[0], "the directory is named first, so no row has its path"
    assert not any(str(root) in line for line in lines[1:])
    found = [line.split()[0] for line in lines if line.startswith("tft_")]
    assert sorted(found) == sorted(NAMES[3:4] if command[0] == "prune" else NAMES)
    too_wide = [line for line in lines[1:] if columns and len(line) > columns and len(line.split()) > 1]
    assert not [line for line in too_wide if not line.startswith("2 kept; ")]


@pytest.mark.parametrize("forced", ["", "1"], ids=["", "colours"])
@pytest.mark.parametrize("command", COMMANDS[:2], ids=lambda command: command[0])
def test_in_a_pipe_each_checkpoint_is_one_line_in_which_nothing_is_cut(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, command: list[str], forced: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", forced)
    lines = shown(command, None)
    assert len(lines) == 2 + len(NAMES) + 1
    by_name = {line.split()[0]: line for line in lines if line}
    assert JOB in by_name[NAMES[0]]
    assert by_name[NAMES[4]].split().count("other") == 1


@pytest.mark.parametrize("columns", [40, 80, 160])
def test_what_gives_way_is_the_jobs_name(shown: Shown, root: Path, columns: int) -> None:
    lines = [line.rstrip() for line in shown(["prune", *COMMANDS[3][1:]], columns)]
    golden.says("\n".join(lines).replace(str(root), "ROOT"))


def test_facts_are_wrapped_between_words_only() -> None:
    file = Output(terminal=True)
    made = Console(file=file, width=30, color_system=None, soft_wrap=True)
    made.print(tables.facts([("path", "/a/path/that/is/longer/than/the/line"), ("because", "of a long reason " * 2)]))
    golden.says("\n".join(line.rstrip() for line in file.getvalue().splitlines()))


def test_the_examples_hold() -> None:
    assert doctest.testmod(tables).failed == doctest.testmod(checkpoint_commands).failed == 0


LONGEST = "j" * 64
"""As long as a job's name may be."""


@pytest.mark.parametrize("parent", ["", "p" * 64])
def test_one_checkpoint_of_the_longest_job_fits_into_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: str
) -> None:
    path = Job(name=LONGEST).save(tmp_path, 36)
    examine = load.examine

    def examined(*arguments: Any) -> load.Found:
        found = examine(*arguments)
        assert found.manifest is not None
        return dataclasses.replace(found, manifest=dataclasses.replace(found.manifest, parent_job=parent))

    monkeypatch.setattr(load, "examine", examined)
    file = Output(terminal=True)
    made = Console(file=file, width=80, color_system=None, soft_wrap=True)
    monkeypatch.setattr(tables, "console", lambda: made)
    assert main(["inspect", str(path), "--tensors"]) == 0
    lines = file.getvalue().splitlines()
    assert [line.split() for line in lines if LONGEST in line] == [["job", LONGEST]]
    assert (["resumed", "from", parent] in [line.split() for line in lines]) is bool(parent)
    assert not [line for line in lines if len(line) > 80 and str(path) not in line]


def test_the_state_of_the_longest_job_fits_into_80_columns() -> None:
    file = Output(terminal=True)
    made = Console(file=file, width=80, color_system=None, soft_wrap=True)
    for part in view_of("127.0.0.1:30051", dataclasses.replace(state_of(3), job=LONGEST)):
        made.print(part)
    lines = file.getvalue().splitlines()
    assert any(LONGEST in line for line in lines)
    assert not [line for line in lines if len(line) > 80]
