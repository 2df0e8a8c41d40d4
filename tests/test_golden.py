"""The golden messages: what varies has a name, a changed message fails, and every entry has a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastwords.errors import FormatError
from tests import golden

NOT_THERE = "tests/test_golden.py::test_that_was_removed"


def test_every_entry_has_a_test() -> None:
    names = list(golden.parsed(golden.MESSAGES.read_text(encoding="utf-8")))
    assert golden.without_a_test(names) == [], "make messages"
    assert golden.without_a_test([NOT_THERE, *names[:1]]) == [NOT_THERE]


def test_the_file_is_as_it_would_be_written() -> None:
    text = golden.MESSAGES.read_text(encoding="utf-8")
    assert golden.written(golden.parsed(text)) == text, "make messages"


def test_what_varies_has_a_name(tmp_path: Path) -> None:
    assert golden.normalised(FormatError(f"{tmp_path}/a")) == "FormatError: <tmp>/a"
    assert golden.normalised(f"{golden.ROOT}/tests") == "<root>/tests"
    assert golden.normalised("127.0.0.1:4711, port 80; step_12:34") == "127.0.0.1:<port>, port <port>; step_12:34"
    assert golden.normalised(f"process {os.getpid() + 1000}, rank 12") == "process <pid>, rank 12"
    assert golden.normalised("<f at 0x7f3a>, 9f86d081, decade, 12345678") == "<f at <address>>, <hex>, decade, 12345678"
    assert golden.normalised("/dev/shm/lastwords-1000-job-g0/link.json") == "/dev/shm/lastwords-<uid>-job-g0/link.json"
    assert golden.normalised(["one", "two \n"]) == "one\ntwo"


@pytest.fixture
def messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of messages for the running test alone, also while the golden ones are recorded."""
    monkeypatch.delenv(golden.RECORD, raising=False)
    monkeypatch.setattr(golden, "MESSAGES", tmp_path / "messages.txt")
    golden._golden.cache_clear()
    yield tmp_path / "messages.txt"
    golden._golden.cache_clear()


@pytest.mark.parametrize("case", ["a", "b"])
def test_a_message_is_compared_with_that_of_its_test(messages: Path, case: str) -> None:
    test = golden.Running.test
    usual = golden.test_of(test)
    messages.write_text(golden.written({usual: "FormatError: one", f"{usual} #2": "two", f"{test} #3": "three"}))
    with golden.raises(FormatError):
        raise FormatError("one")
    golden.says("two")
    golden.says("two")
    golden.says("three")
    with pytest.raises(AssertionError, match=r"(?s)four.*ARGS=tests/test_golden\.py"):
        golden.says("four")


def test_another_message_fails_and_is_taken_when_it_is_recorded(
    messages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = golden.Running.test
    before = {test: "old", NOT_THERE: "gone", f"{test} #2": "said no more"}
    messages.write_text(golden.written(before))
    with pytest.raises(AssertionError, match=r"(?s)new.*old"):
        golden.says("new")
    golden.Running.said.clear()
    monkeypatch.setenv(golden.RECORD, str(tmp_path / "record"))
    golden.says("new")
    assert golden.merged(before, golden.recorded(tmp_path / "record")) == {test: "new"}


def test_a_test_that_says_now_this_now_that_is_refused() -> None:
    with pytest.raises(AssertionError, match="a::b"):
        golden.merged({}, [("a::b", "this"), ("a::b", "that")])
