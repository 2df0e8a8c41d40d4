"""What the processes of a job say to each other: encoded and decoded, and what is not understood."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import selectors
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from lastwords.errors import ConfigError, FormatError
from lastwords.launcher.events import (
    Begun,
    End,
    Ended,
    Enter,
    Guarded,
    Inside,
    Kill,
    Leaving,
    Look,
    Over,
    Ready,
    Seat,
    Stopped,
    Updated,
)
from lastwords.launcher.link import LINE_BYTES_MAX, STRANGER_LINE_BYTES_MAX, Complaints, Connection, Lines
from lastwords.launcher.protocol import (
    KINDS,
    OWN,
    PROTOCOL,
    Applicant,
    Beat,
    ControllerAnswer,
    ControllerWanted,
    Dismissed,
    Done,
    FromRank,
    FromSupervisor,
    Loaded,
    RankHello,
    RankRaised,
    RankRuns,
    ToRank,
    ToSupervisor,
    difference,
    read,
    to_message,
)
from lastwords.launcher.registry import Rejected
from lastwords.optim_wrapper.launch import reporter
from lastwords.optim_wrapper.launch.reporter import Reporter
from tests import golden

RANK = 3

FORM = (9, "feddc91d7ca7e34e")
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
        RankHello(RANK, 7, PROTOCOL), Ready(RANK, 4), Inside(RANK, 1, True, 2), Guarded(RANK, "/state"),
        Begun(RANK, 1, "it", (("x", 0.5),)), Updated(RANK, "late"), Over(RANK),
        Leaving(RANK, 7, "/logs/incidents.jsonl"),
        Ended(RANK, 1, "exit code 1", "ValueError: x", lasting=True), Stopped(RANK),
        ControllerWanted(["{}"], {"A": "b"}, "log", 5), RankRaised("ValueError: x", lasting=False), Done(),
        Loaded(["/train.py"]), RankRuns(7, 8),
    ],
    ids=repr,
)  # fmt: skip
def test_what_a_worker_says_comes_through_with_the_rank_of_its_connection(said: FromRank | FromSupervisor) -> None:
    message = {**wire(to_message(said)), "rank": 0}
    assert read(message, RankHello | FromRank | FromSupervisor, RANK) == said


@pytest.mark.parametrize(
    "said",
    [
        End(RANK), Kill(RANK, "late"), Look(RANK), Enter(4, 29500, 7), Enter(4, 29500, 7, Seat(0, 2, "node-1")),
        ControllerAnswer(5), ControllerAnswer(5, 7), Dismissed("why"), Rejected("why", later=True), Done(),
        Beat(),
    ],
    ids=repr,
)  # fmt: skip
def test_what_a_worker_is_told_comes_through(said: ToRank | ToSupervisor) -> None:
    assert read(wire(to_message(said)), ToRank | ToSupervisor) == said


class Launcher:
    """Where a rank's words go to, and what is answered."""

    def __init__(self) -> None:
        self._server, self.name = reporter.listening(1)
        self._lines = Lines()

    @functools.cached_property
    def link(self) -> socket.socket:
        return self._server.accept()[0]

    def hears(self) -> list[RankHello | FromRank]:
        """All that has been said so far."""
        found: list[RankHello | FromRank] = []
        with contextlib.suppress(BlockingIOError):
            while data := self.link.recv(1 << 16, socket.MSG_DONTWAIT):
                found += [read(said, RankHello | FromRank, RANK) for said in self._lines.feed(data)]
        return found

    def says(self, *orders: ToRank) -> None:
        self.link.sendall(b"".join(json.dumps(to_message(order)).encode() + b"\n" for order in orders))

    def end(self) -> None:
        self._server.close()
        if "link" in vars(self):
            self.link.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    one = Launcher()
    yield one
    one.end()


SAYINGS: list[tuple[Callable[[Reporter], object], FromRank]] = [
    (lambda one: one.guarded(Path("/state")), Guarded(RANK, "/state")),
    (lambda one: one.guarded(None), Guarded(RANK)),
    (lambda one: one.loaded(["/train.py"]), Loaded(["/train.py"])),
    (lambda one: one.begun(7, lacks="it"), Begun(RANK, 7, lacks="it")),
    (lambda one: one.begun(0, lacks="it", saved_only=True), Begun(RANK, lacks="it", saved_only=True)),
    (lambda one: one.updated("late"), Updated(RANK, "late")),
    (lambda one: one.over(), Over(RANK)),
    (lambda one: one.left(7, Path("/logs"), 8), Leaving(RANK, 7, "/logs", 8)),
    (lambda one: one.left(0, None), Leaving(RANK)),
    (lambda one: one.left(0, None, 8, alone=True), Leaving(RANK, ended=8, alone=True)),
    (lambda one: one.raised("ValueError: x", lasting=True), RankRaised("ValueError: x", lasting=True)),
]


def test_what_a_rank_says_by_hand_is_understood_with_all_its_fields(launcher: Launcher) -> None:
    one = Reporter(launcher.name, RANK, step=7)
    for say, _ in SAYINGS:
        say(one)
    assert launcher.hears() == [RankHello(RANK, os.getpid(), PROTOCOL), *(said for _, said in SAYINGS)]
    kinds = re.findall(r'_say\("(\w+)"', Path(reporter.__file__).read_text(encoding="utf-8"))
    assert {*kinds} == {type(said).__name__ for _, said in SAYINGS}


def test_a_rank_goes_on_where_it_has_to_once(launcher: Launcher) -> None:
    """A loop that comes after that begins anywhere."""
    one = Reporter(launcher.name, RANK, step=7)
    assert one.goes_on_at == 7
    one.begun(7, lacks="")
    assert one.goes_on_at == 0


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ((ControllerAnswer(2, 8), ControllerAnswer(1, 7)), 7),
        ((ControllerAnswer(1),), None),
        ((), None),
    ],
    ids=["one", "none", "no launcher"],
)
def test_a_rank_asks_for_a_controller_and_understands_the_answer(
    launcher: Launcher, answers: tuple[ToRank, ...], found: object
) -> None:
    one, got = Reporter(launcher.name, RANK), list[object]()
    asks = threading.Thread(target=lambda: got.append(one.controller(["{}"], {"A": "b"}, "log")))
    asks.start()
    launcher.says(*answers)
    if not answers:
        launcher.end()
    asks.join()
    assert got == [found]
    if answers:
        assert launcher.hears() == [
            RankHello(RANK, os.getpid(), PROTOCOL),
            ControllerWanted(["{}"], {"A": "b"}, "log", 1),
        ]


def test_a_rank_does_not_wait_long_for_a_launcher_that_is_stopped_and_speaks_to_it_later(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or for a fork server that is: without a controller nothing is saved."""
    monkeypatch.setattr(reporter, "CONTROLLER_S", 0.01)
    one = Reporter(launcher.name, RANK)
    assert one.controller([], {}, "log") is None
    one.updated()
    assert launcher.hears()[1:] == [ControllerWanted([], {}, "log", 1), Updated(RANK)]
    launcher.says(ControllerAnswer(1, 7), ControllerAnswer(2, 8))
    assert one.controller([], {}, "log") == 8


def test_a_rank_that_is_refused_says_why(launcher: Launcher) -> None:
    one = Reporter(launcher.name, RANK)
    one.updated()
    launcher.says(Rejected("it speaks another version"))
    with golden.raises(ConfigError):
        one.controller([], {}, "log")


def test_a_rank_knows_the_launcher_and_whether_that_ends(launcher: Launcher) -> None:
    one = Reporter(launcher.name, RANK)
    assert not one.dismissed
    assert one.launcher_pid == os.getpid()
    launcher.says(ControllerAnswer(1))
    assert not one.dismissed
    launcher.says(Dismissed())
    assert one.dismissed


def test_a_rank_that_has_to_know_whether_the_launcher_ends_does_not_wait_for_its_word(launcher: Launcher) -> None:
    """All others would wait for this rank; for an answer it waits as before."""
    one, got = Reporter(launcher.name, RANK), list[object]()
    one.updated()
    looks = threading.Thread(target=lambda: got.append(one.dismissed), daemon=True)
    looks.start()
    looks.join(reporter.ANSWER_S / 2)
    assert got == [False]
    asks = threading.Thread(target=lambda: got.append(one.controller([], {}, "log")), daemon=True)
    asks.start()
    while not any(isinstance(said, ControllerWanted) for said in launcher.hears()):
        pass
    launcher.says(ControllerAnswer(1, 7))
    asks.join()
    assert got == [False, 7]


def test_where_the_launcher_has_ended_nobody_waits_and_people_are_told_once(
    launcher: Launcher, capfd: pytest.CaptureFixture[str]
) -> None:
    one = Reporter(launcher.name, RANK)
    one.updated()
    launcher.hears()
    launcher.end()
    for say, _ in SAYINGS:
        say(one)
    assert one.controller([], {}, "log") is None
    assert not one.dismissed
    never = Reporter(f"{launcher.name}-of-another", RANK)
    for _ in range(2):
        never.updated()
    assert never.launcher_pid is None
    assert not never.heals
    golden.says(capfd.readouterr().err)


def test_nobody_else_is_taken_for_the_launcher_nor_for_a_rank(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An abstract name has no permissions, and whoever is there first after its owner's end has it."""
    peer = reporter.peer
    monkeypatch.setattr(reporter, "peer", lambda link: (peer(link)[0], 4711))
    one = Reporter(launcher.name, RANK)
    one.updated()
    assert not launcher.link.recv(1), "it is told nothing"
    golden.says(capfd.readouterr().err)


def test_a_child_of_a_rank_says_nothing_for_it(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "_reporter", None)
    monkeypatch.setenv(reporter.LAUNCHER, f"7 {launcher.name}")
    monkeypatch.setenv("RANK", str(RANK))
    one = reporter.reporter()
    assert one is not None
    assert (one.goes_on_at, reporter.LAUNCHER in os.environ) == (7, False)
    pid = os.fork()
    if not pid:
        one.updated()
        os._exit(reporter.reporter() is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    one.over()
    assert launcher.hears() == [RankHello(RANK, os.getpid(), PROTOCOL), Over(RANK)]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"kind": "Lost", "why": ""},
        {"kind": ["Begun"]},
        {"kind": "Begun", "step": "x", "lacks": "", "imports": [], "saved_only": False},
        {"kind": "Begun", "step": 0, "imports": [], "saved_only": False},
        {"kind": "Enter", "generation": 1, "port": 1},
        {"kind": "x" * 1000},
    ],
    ids=range(7),
)
def test_anything_else_is_refused_and_named(message: dict[str, Any]) -> None:
    """A field that is left out is none that has its default."""
    with golden.raises(FormatError):
        read(message, FromRank, RANK)
    with pytest.raises(FormatError):
        read(message, ToSupervisor)


@pytest.mark.parametrize("version", [0, PROTOCOL + 1, "x" * 1000, None])
def test_who_has_another_version_is_told_what_to_do(version: object) -> None:
    golden.says(difference(version))


def begun(message: dict[str, Any]) -> FromRank:
    said: FromRank = read(message, FromRank, RANK)
    return said


def test_what_is_not_understood_is_told_once_for_each_peer(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints()
    for peer in ("rank 3", "rank 3", "rank 4"):
        heard: list[object] = []
        near, far = socket.socketpair()
        wrong, right = b'{"kind": "Begun"}\n', json.dumps(to_message(Begun(OWN))).encode() + b"\n"
        with selectors.DefaultSelector() as selector, near, far:
            connection = Connection(near, selector, peer, begun, heard.append, complaints)
            connection.feed(right + wrong + right)
            assert connection.broken
            connection.feed(right)
        assert heard == [Begun(RANK)]
    golden.says("\n".join(caplog.messages))


@pytest.mark.ci
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
    long = {"kind": "ControllerWanted", "work": dict.fromkeys(map(str, range(10_000)), "digest")}
    found = []
    for message in lines.feed(b'{"kind": "Introduction"}\n' + json.dumps(long).encode() + b"\n"):
        found.append(message["kind"])
        lines.line_bytes_max = LINE_BYTES_MAX
    assert found == ["Introduction", "ControllerWanted"]
