from __future__ import annotations

import io

import pytest

from lastwords.optim_wrapper.launch.progress import Progress


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def shown(terminal: bool, seconds: list[float], total: int = 10) -> str:
    now = iter([0.0, *seconds, seconds[-1]])
    out = Screen(terminal)
    bar = Progress("fetching", total, out=out, clock=lambda: next(now))
    for count in range(1, len(seconds) + 1):
        bar.at(count)
    bar.close()
    return out.getvalue()


def test_short_waits_say_nothing() -> None:
    assert shown(True, [0.1, 0.5, 0.9]) == ""
    assert shown(False, [0.1, 0.5, 0.9]) == ""


def test_a_terminal_gets_one_line_that_is_drawn_over() -> None:
    text = shown(True, [0.5, 2.0, 2.05, 3.0])
    assert text.count("\r") == 3
    assert text.count("\n") == 1
    assert "fetching: 2/10, 8 s left" in text
    assert "2/10" in text
    assert "3/10" not in text
    assert text.rstrip("\x1b[K\n").endswith("fetching: 10/10")


def test_a_log_file_gets_a_plain_line_now_and_then() -> None:
    text = shown(False, [0.5, 2.0, 5.0, 13.0])
    assert text.splitlines() == [
        "lastwords: fetching: 2/10, 8 s left",
        "lastwords: fetching: 4/10, 20 s left",
        "lastwords: fetching: 10/10",
    ]


def test_a_process_without_stderr_waits_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    bar = Progress("fetching", 2, clock=iter([0.0, 2.0, 3.0]).__next__)
    bar.at(1)
    bar.close()
