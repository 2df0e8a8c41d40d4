"""What the processes of a job say to each other: encoded and decoded, and what is not understood."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import pytest

from lastwords.errors import FormatError
from lastwords.launcher.events import Abandon, Begun, Inside, Kill, Over, Updated, Waiting
from lastwords.launcher.link import LINE_BYTES_MAX, STRANGER_LINE_BYTES_MAX, Complaints, Inbox, Lines
from lastwords.launcher.protocol import (
    KINDS,
    OWN,
    PROTOCOL,
    Applicant,
    Beat,
    Become,
    Controlled,
    ControllerAnswer,
    ControllerWanted,
    Dismissed,
    Done,
    Entry,
    Hello,
    Order,
    Raised,
    Ready,
    Report,
    SchedulerGone,
    Seat,
    difference,
    order_of,
    report_of,
    to_launcher,
    to_worker,
)
from lastwords.launcher.registry import Refused
from lastwords.launcher.versions import Ask, Sources
from tests import golden

RANK = 3

FORM = (1, "1f5e920b85ebc1f2")
"""PROTOCOL, and the digest of what all messages look like in it."""


def test_a_message_that_changes_has_another_version() -> None:
    """Red: raise PROTOCOL, unless nobody can have the one before, and put the new digest here."""
    form = sorted((kind.__name__, [(one.name, str(one.type)) for one in dataclasses.fields(kind)]) for kind in KINDS)
    assert (PROTOCOL, hashlib.sha256(json.dumps(form).encode()).hexdigest()[:16]) == FORM


def parts(kind: type[Any]) -> Iterator[type[Any]]:
    """All types that a message of this kind may hold."""
    hints = [*get_type_hints(kind).values()]
    while hints:
        hint = hints.pop()
        yield hint
        hints += get_args(hint)


def test_what_is_within_a_message_counts_as_well() -> None:
    within = {part for kind in KINDS for part in parts(kind) if dataclasses.is_dataclass(part)}
    assert within
    assert within <= {*KINDS}
    assert Applicant in KINDS, "though an application has it as a mapping"


def wire(message: dict[str, Any]) -> dict[str, Any]:
    (found,) = Lines().feed(json.dumps(message).encode() + b"\n")
    return found


@pytest.mark.parametrize(
    "said",
    [
        Hello(None, 7, PROTOCOL), Hello(0, 7, PROTOCOL), Ready(), Waiting(RANK, 7, "/logs/incidents.jsonl", "b", 1),
        Sources(RANK, {"/a": "b"}), Inside(RANK, 1, True, 2), Begun(RANK, 1, "late"), Updated(RANK), Over(RANK),
        Controlled("/state"), ControllerWanted({"spec": "{}"}, 5), Raised("ValueError: x", lasting=False), Done(),
    ],
    ids=repr,
)  # fmt: skip
def test_what_a_worker_says_comes_through_with_the_rank_of_its_connection(said: Report) -> None:
    assert report_of(RANK, wire(to_launcher(said))) == said
    if not isinstance(said, Hello):
        assert report_of(RANK, {**to_launcher(said), "rank": 0}) == said


@pytest.mark.parametrize(
    "said",
    [
        Ask(OWN), Abandon(OWN), Kill(OWN, "late"), Entry(4, 29500, 7), Entry(4, 29500, 7, Seat(0, 2, "node-1")),
        Become({"RANK": "1"}, "/out", ""), ControllerAnswer(5), ControllerAnswer(5, 7, {"port": 1}), Dismissed("why"),
        SchedulerGone(), Refused("why", later=True), Done(), Beat(),
    ],
    ids=repr,
)  # fmt: skip
def test_what_a_worker_is_told_comes_through(said: Order) -> None:
    assert order_of(wire(to_worker(said))) == said


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"kind": "Ended", "code": 0, "how": ""},
        {"kind": ["Begun"]},
        {"kind": "Begun", "step": "x", "inexact": ""},
        {"kind": "Waiting", "step": 0, "record": "", "sources": ""},
        {"kind": "Entry", "generation": 1, "port": 1},
        {"kind": "x" * 1000},
    ],
    ids=range(7),
)
def test_anything_else_is_refused_and_named(message: dict[str, Any]) -> None:
    """A field that is left out is none that has its default."""
    with golden.raises(FormatError):
        report_of(RANK, message)
    with pytest.raises(FormatError):
        order_of(message)


@pytest.mark.parametrize("version", [0, PROTOCOL + 1, "x" * 1000, None])
def test_who_has_another_version_is_told_what_to_do(version: object) -> None:
    golden.says(difference(version))


def begun(message: dict[str, Any]) -> Report:
    return report_of(RANK, message)


def test_what_is_not_understood_is_told_once_for_each_peer(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints()
    for peer in ("rank 3", "rank 3", "rank 4"):
        inbox = Inbox(peer, begun, complaints)
        wrong, right = b'{"kind": "Begun"}\n', json.dumps(to_launcher(Begun(OWN))).encode() + b"\n"
        assert [*inbox.feed(right + wrong + right)] == [Begun(RANK)]
        assert inbox.broken
        assert [*inbox.feed(right)] == []
    golden.says("\n".join(caplog.messages))


def test_complaints_take_no_more_memory_than_so_many_peers() -> None:
    complaints = Complaints()
    for peer in range(5000):
        complaints.tell(f"process {peer}", "is wrong")
    assert len(complaints._told) < 2000


def old_feed(lines: Lines) -> Callable[[bytes], object]:
    """The negative control: each piece is put behind a copy of all before it."""
    kept = bytes(lines._bytes)

    def feed(data: bytes) -> list[bytes]:
        nonlocal kept
        *whole, kept = (kept + data).split(b"\n")
        return whole

    return feed


@pytest.mark.parametrize("copies", [False, True])
def test_a_line_that_comes_in_small_pieces_is_not_copied_for_each(copies: bool) -> None:
    lines, long = Lines(), LINE_BYTES_MAX // 2
    assert [*lines.feed(b"x" * long)] == []
    assert [*lines.feed(b"x")] == []  # there is room for more now
    feed = old_feed(lines) if copies else lambda data: [*lines.feed(data)]
    tracemalloc.start()
    try:
        for _ in range(100):
            feed(b"x")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (peak_bytes > long) == copies


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_of_a_stranger_is_short(end: bytes) -> None:
    lines = Lines(STRANGER_LINE_BYTES_MAX)
    with golden.raises(FormatError):
        [*lines.feed(b"x" * (STRANGER_LINE_BYTES_MAX + 1) + end)]


def test_whoever_shows_the_token_may_go_on_at_once_with_a_long_line() -> None:
    lines = Lines(STRANGER_LINE_BYTES_MAX)
    long = {"kind": "Sources", "files": dict.fromkeys(map(str, range(10_000)), "digest")}
    found = []
    for message in lines.feed(b'{"kind": "Introduction"}\n' + json.dumps(long).encode() + b"\n"):
        found.append(message["kind"])
        lines.line_bytes_max = LINE_BYTES_MAX
    assert found == ["Introduction", "Sources"]
