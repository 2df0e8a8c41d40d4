"""With LASTWORDS_LOG=json each line of the product is one JSON object, and the user's loggers are left alone."""

from __future__ import annotations

import io
import json
import logging
import socket
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from lastwords import log_lines
from lastwords.cli.main import main
from lastwords.errors import ConfigError
from lastwords.processor.departure import say
from tests import golden

TEXT = logging.Formatter("%(message)s")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ours = logging.getLogger("lastwords")
    before, propagates = [*ours.handlers], ours.propagate
    monkeypatch.setattr(log_lines, "_facts", {})
    yield
    ours.handlers, ours.propagate = before, propagates


Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lines:
    """Of a process with LASTWORDS_LOG=json: what it has written to stderr since this was called last."""
    monkeypatch.setenv(log_lines.VARIABLE, "json")
    return lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_of_a_rank_says_when_where_who_and_at_which_step(lines: Lines) -> None:
    log_lines.begin("3")
    step = 7
    log_lines.know(job="digits", step=lambda: step)
    logging.getLogger("lastwords.processor.agent").warning('two\nlines, %s and "quotes"', "é")
    step = 8
    say("lastwords: rank 3: the end")
    first, second = lines()
    assert abs(datetime.fromisoformat(first.pop("time")).timestamp() - datetime.now().timestamp()) < 3600
    assert first == {
        "level": "WARNING", "logger": "lastwords.processor.agent", "message": 'two\nlines, é and "quotes"',
        "host": socket.gethostname(), "job": "digits", "rank": 3, "step": 7,
    }  # fmt: skip
    assert (second["logger"], second["step"], second["rank"]) == ("lastwords.processor.departure", 8, 3)


def test_an_exception_is_in_the_same_line(lines: Lines) -> None:
    log_lines.begin()
    try:
        raise ValueError("a mistake")
    except ValueError:
        logging.getLogger("lastwords.x").exception("it failed")
    (line,) = lines()
    assert line["message"] == "it failed"
    assert line["error"].endswith("ValueError: a mistake")
    assert "rank" not in line


def test_the_loggers_of_the_user_stay_as_they_are(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    root, own = logging.getLogger(), logging.getLogger("users")
    monkeypatch.setattr(root, "handlers", [])  # an earlier test's command has one, whose stderr is closed
    before = [*root.handlers], root.level, [*own.handlers], own.propagate
    users = io.StringIO()
    handler = logging.StreamHandler(users)
    root.addHandler(handler)
    try:
        log_lines.begin("0")
        log_lines.begin("0")
        own.warning("the user's line")
        logging.getLogger("lastwords.x").warning("ours")
    finally:
        root.removeHandler(handler)
    assert users.getvalue().splitlines() == ["the user's line"]
    ours = [line["message"] for line in lines() if line["logger"] == "lastwords.x"]
    assert ours == ["ours"], "once, however often it was asked for"
    assert ([*root.handlers], root.level, [*own.handlers], own.propagate) == before


@pytest.mark.parametrize("value", ["", "text"])
def test_without_it_nothing_is_set_up_and_lines_are_text(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(log_lines.VARIABLE, value)
    before = [*logging.getLogger("lastwords").handlers]
    log_lines.begin("0")
    say("a line")
    assert logging.getLogger("lastwords").handlers == before
    assert capsys.readouterr().err == "a line\n"
    assert log_lines.formatter(TEXT) is TEXT


def test_another_value_is_refused() -> None:
    log_lines.check("json")
    with golden.raises(ConfigError):
        log_lines.check("JSON")


def test_a_launcher_that_is_refused_says_so_in_json_and_a_command_for_people_in_words(
    lines: Lines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LASTWORDS_JOB", "digits")
    assert main(["run", "/no/such/script.py"]) != 0
    (line,) = lines()
    assert line["job"] == "digits"
    golden.says(line["message"])
    assert main(["transform", "/no/such", "/x", "--to", "/no/such"]) != 0
    assert capsys.readouterr().err.startswith("lastwords: ")
