"""What launchers of several hosts say to each other, and who is heard."""

from __future__ import annotations

import contextlib
import errno
import json
import selectors
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from lastwords.errors import FormatError
from lastwords.launcher import head, link
from lastwords.launcher.core import LEAVE_S
from lastwords.launcher.events import (
    Awaited,
    Begun,
    Effect,
    End,
    Ended,
    Enter,
    Event,
    Guarded,
    Kill,
    Leaving,
    Lost,
    Over,
    Ready,
    Stop,
    Updated,
)
from lastwords.launcher.head import Head, Listener, Uplink
from lastwords.launcher.link import Connection, Lines, send
from lastwords.launcher.protocol import PROTOCOL, FromHost, Introduction, ToHost, read, to_message
from tests import golden
from tests.launcher.test_scheduler import reset


@pytest.mark.parametrize(
    "what",
    [
        Ready(3, 7), Leaving(3, 7, "/logs/incidents.jsonl"), Begun(1), Over(2), Updated(2), Ended(0, -9), Lost("why"),
        Enter(4, 29500), End(0), Kill(2, "late"), Awaited(2, "late", 5.5), Stop(None), Stop("why"),
    ],
    ids=repr,
)  # fmt: skip
def test_events_and_effects_come_through_as_they_are(what: Event | Effect) -> None:
    (line,) = Lines().feed(json.dumps(to_message(what)).encode() + b"\n")
    assert read(line, FromHost if isinstance(what, Event) else ToHost) == what


@pytest.mark.parametrize("line", [{}, {"kind": "Tick"}, {"kind": "Ended", "rank": "zero", "code": 1}, {"kind": "End"}])
def test_anything_else_is_refused(line: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        read(line, FromHost)
    with pytest.raises(FormatError):
        read(line, ToHost)


class Job:
    """A head with rank 0 on its own host, and what reaches a launcher that looks after rank 1."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.here: list[Effect] = []
        self.there: list[Effect] = []
        self.head = Head(2, 0, "127.0.0.1")
        self.head.has_host(range(1), self.here.append)
        self.listener = Listener(self.head, self.selector)
        self.invitation = self.listener.invitation("127.0.0.1")

    def uplink(self) -> Uplink:
        return Uplink(lambda: self.invitation, range(1, 2), self.selector, self.there.append)

    def turn(self, until: int = 8) -> None:
        for _ in range(until):
            for key, _ in self.selector.select(0.2):
                key.data()


def test_the_head_directs_the_ranks_of_another_host() -> None:
    job = Job()
    other = job.uplink()
    job.turn(2)
    other.report(Ready(1))
    job.head.hear(Ready(0))
    job.turn(3)
    (entered,) = job.there
    assert isinstance(entered, Enter)
    assert [entered] == job.here
    other.report(Guarded(1))
    other.report(Ended(1, -9))
    job.turn(3)
    job.head.hear(Ended(0, 75))
    job.turn(3)
    assert job.there[1:] == job.here[1:] != [], "all ranks begin anew"
    other.end()
    job.listener.end()


def test_a_connection_that_is_reset_before_it_is_taken_does_not_end_the_head() -> None:
    job = Job()
    reset(socket.create_connection(("127.0.0.1", json.loads(job.invitation)["port"]), 10))
    other = job.uplink()
    job.turn(3)
    other.report(Ready(1))
    job.head.hear(Ready(0))
    job.turn(3)
    assert job.here == job.there, "both ranks begin"
    other.end()
    job.listener.end()


def test_a_shortage_of_descriptors_is_told_once_and_again_only_if_it_had_passed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s, short = 0.0, [True]

    class Server:
        def accept(self) -> object:
            if short[0]:
                raise OSError(errno.EMFILE, "Too many open files")
            return server.accept()

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(link, "mono_s", lambda: now_s)
    monkeypatch.setattr(link.time, "sleep", sleep)
    reception = link.Reception(Server())  # type: ignore[arg-type]
    with link.listening(0, 8) as server:
        for _ in range(100):
            short[0] = True
            assert reception.accept() is None
            short[0] = False
            with socket.create_connection(("127.0.0.1", server.getsockname()[1])):
                taken = reception.accept()
                assert taken is not None
                taken[0].close()
        assert reception.accept() is None
    golden.says("\n".join(caplog.messages))
    now_s += link.SILENCE_S + 1
    short[0] = True
    assert reception.accept() is None
    assert len(caplog.messages) == 2


def test_a_launcher_that_goes_stops_the_job() -> None:
    job = Job()
    other = job.uplink()
    job.turn(2)
    other.end()
    job.turn(3)
    (stop,) = job.here
    assert isinstance(stop, Stop)
    job.listener.end()


def test_a_head_that_goes_stops_the_others() -> None:
    job = Job()
    job.uplink()
    job.turn(2)
    job.listener.end()
    job.turn(3)
    (stop,) = job.there
    assert isinstance(stop, Stop)


def test_the_launcher_of_a_host_that_is_lost_after_the_rendezvous_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s, told = [0.0], list[Effect]()
    monkeypatch.setattr(head, "mono_s", lambda: now_s[0])
    one = Head(2, 0, "127.0.0.1")
    one.has_host(range(1), told.append)
    one.hear(Ready(0))
    while not told:
        assert one.due_in_s is not None, "all wait for ever"
        now_s[0] += one.due_in_s
        one.tick()
    (stop,) = told
    assert isinstance(stop, Stop)
    golden.says(str(stop.failure))
    golden.says("\n".join(caplog.messages))


def test_where_no_store_can_be_had_for_a_minute_the_job_ends_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s, told = [0.0], list[Effect]()

    def pause(seconds: float) -> None:
        now_s[0] += seconds

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(head, "mono_s", lambda: now_s[0])
    monkeypatch.setattr(head, "TCPStore", refused)
    monkeypatch.setattr(head.time, "sleep", pause)
    one = Head(1, 0, "127.0.0.1")
    one.has_host(range(1), told.append)
    one.hear(Ready(0))
    (stop,) = told
    assert isinstance(stop, Stop)
    golden.says(str(stop.failure))
    golden.says("\n".join(caplog.messages))


def test_a_launcher_that_came_while_the_head_was_stopped_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(head, "mono_s", lambda: now_s[0])
    job = Job()
    job.head.tick()
    other = job.uplink()
    now_s[0] += 2 * head.HOSTS_S
    job.head.tick()
    assert job.here == []
    job.turn(2)
    assert job.head.due_in_s is None
    other.end()
    job.listener.end()


def test_a_rank_is_not_killed_for_the_time_in_which_the_whole_job_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, told = [0.0], list[Effect]()
    monkeypatch.setattr(head, "mono_s", lambda: now_s[0])
    one = Head(2, 0, "127.0.0.1")
    one.has_host(range(2), told.append)
    for event in (Ready(0), Ready(1), Guarded(0), Guarded(1), Ended(1, -9), Leaving(0, 7)):
        one.hear(event)
    now_s[0] += 2 * LEAVE_S
    one.tick()
    assert Kill not in map(type, told)
    while Kill not in map(type, told):
        assert one.due_in_s is not None
        now_s[0] += one.due_in_s
        one.tick()
    assert now_s[0] > 2.9 * LEAVE_S


def test_where_all_launchers_have_come_none_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, told = [0.0], list[Effect]()
    monkeypatch.setattr(head, "mono_s", lambda: now_s[0])
    one = Head(2, 0, "127.0.0.1")
    for rank in range(2):
        one.has_host(range(rank, rank + 1), told.append)
    now_s[0] += 2 * head.HOSTS_S
    one.tick()
    assert (one.due_in_s, told) == (None, [])


def test_whoever_does_not_know_the_token_is_not_heard() -> None:
    job = Job()
    found = json.loads(job.invitation)
    with socket.create_connection(("127.0.0.1", found["port"])) as stranger:
        send(stranger, to_message(Introduction("guess", (1, 2), PROTOCOL)))
        send(stranger, to_message(Ended(1, 1)))
        job.turn(4)
        assert job.here == []
        assert stranger.recv(1) == b""
    job.turn(2)
    assert job.here == []
    job.listener.end()


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "Introduction", "token": "\u00e9", "ranks": [0, 1]}',
        '{"kind": "Introduction", "token": 1, "ranks": 2}',
        '{"kind": []}',
        "[" * 5000,
        "null",
        "",
        "x" * (2 << 20),
    ],
    ids=range(7),
)
def test_what_a_stranger_sends_ends_his_connection_only(line: str) -> None:
    job = Job()
    other = job.uplink()
    job.turn(2)
    found = json.loads(job.invitation)
    with socket.create_connection(("127.0.0.1", found["port"])) as stranger:
        job.turn(1)
        stranger.settimeout(0.5)
        with contextlib.suppress(OSError):
            stranger.sendall(line.encode() + b"\n")
        job.turn(6)
    assert job.here == job.there == []
    other.report(Lost("why"))
    job.turn(3)
    assert job.there == [Stop("why")]
    job.listener.end()


def introduced(job: Job, introduction: Introduction) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", json.loads(job.invitation)["port"]), 10)
    send(link, to_message(introduction))
    job.turn(2)
    return link


def test_a_launcher_of_another_version_ends_the_job_and_both_are_told_what_to_do() -> None:
    job = Job()
    with introduced(job, Introduction(json.loads(job.invitation)["token"], (1, 2), PROTOCOL + 1)) as other:
        (stop,) = job.here
        assert isinstance(stop, Stop)
        (message,) = Lines().feed(other.recv(1 << 16))
        assert read(message, ToHost) == stop
    golden.says(str(stop.failure))
    job.listener.end()


def test_a_launcher_that_says_what_is_not_understood_ends_the_job_with_that_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job()
    with introduced(job, Introduction(json.loads(job.invitation)["token"], (1, 2), PROTOCOL)) as other:
        send(other, {"kind": "Ended", "rank": 1})
        job.turn(2)
    (stop,) = job.here
    assert isinstance(stop, Stop)
    golden.says([str(stop.failure), *caplog.messages])
    job.listener.end()


def test_a_mistake_of_the_heads_own_is_not_taken_for_a_launchers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def mistake(event: Event) -> None:
        if isinstance(event, Ready):
            raise FormatError("of a file that was read, say")

    job = Job()
    other = job.uplink()
    job.turn(2)
    monkeypatch.setattr(job.head, "hear", mistake)
    other.report(Ready(1))
    with pytest.raises(FormatError):
        job.turn(3)
    assert caplog.messages == []
    other.end()
    job.listener.end()


class Peer:
    """A process at the other end of a connection, and what is heard of it here. It reads if it is asked to."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        near, self.far = socket.socketpair()
        self.heard: list[object] = []
        self.connection = Connection(near, selector, "a peer", lambda message: message, self.heard.append)
        self.lines = Lines()

    def reads(self) -> list[dict[str, Any]]:
        """What has come by now."""
        found: list[dict[str, Any]] = []
        with contextlib.suppress(BlockingIOError):
            while data := self.far.recv(1 << 16, socket.MSG_DONTWAIT):
                found += self.lines.feed(data)
        return found


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as one:
        yield one


def turn(selector: selectors.BaseSelector) -> bool:
    """Whether there was something to do."""
    ready = selector.select(0)
    for key, _ in ready:
        key.data()
    return bool(ready)


LONG = {"kind": "Long", "text": "x" * (1 << 20)}
"""No socket's buffer takes that."""


@pytest.mark.timeout(60)
def test_nobody_waits_for_a_peer_that_reads_nothing_and_it_has_all_once_it_reads(
    selector: selectors.BaseSelector,
) -> None:
    stopped, other = Peer(selector), Peer(selector)
    told = [{**LONG, "number": number} for number in range(4)]
    for message in told:
        stopped.connection.tell(message)
        other.connection.tell({"kind": "Short"})
        assert other.reads() == [{"kind": "Short"}]
        assert not turn(selector), "nothing can be done until it reads"
    found = []
    while len(found) < len(told):
        found += stopped.reads()
        turn(selector)
    assert found == told
    assert not turn(selector), "there is nothing left to send"
    send(stopped.far, {"kind": "Here"})
    assert turn(selector)
    assert stopped.heard == [{"kind": "Here"}]
    for one in (stopped, other):
        one.connection.close()
        one.far.close()


@pytest.mark.timeout(60)
def test_a_peer_that_does_not_take_what_it_is_told_is_gone_after_all_that_it_has_said(
    selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "UNSENT_BYTES_MAX", len(LONG["text"]))
    stopped = Peer(selector)
    send(stopped.far, {"kind": "Over"})
    for _ in range(3):
        stopped.connection.tell(LONG)
    assert stopped.heard == [], "in its turn, and not in that of whoever speaks to it"
    while stopped.connection.open:
        assert turn(selector)
    assert stopped.heard == [{"kind": "Over"}, None]
    stopped.connection.tell(LONG)
    stopped.far.close()


def test_a_connection_that_is_closed_has_passed_on_what_the_peer_takes(selector: selectors.BaseSelector) -> None:
    one = Peer(selector)
    one.connection.tell(LONG)
    begun = one.far.recv(1 << 19)
    one.connection.close()
    assert one.heard == []
    rest = b"".join(iter(lambda: one.far.recv(1 << 16), b""))
    assert len(begun + rest) > len(begun)
    one.far.close()
