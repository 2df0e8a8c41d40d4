"""A worker's way to the scheduler of its cluster."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lastwords.clock import OwnTime
from lastwords.errors import ConfigError, UnavailableError
from lastwords.launcher import joining, membership, scheduler
from lastwords.launcher.cluster_state import ClusterState
from lastwords.launcher.environment import WORKER, Cluster
from lastwords.launcher.events import Kill, Waiting
from lastwords.launcher.joining import JOIN_S, Joined
from lastwords.launcher.link import Lines, send
from lastwords.launcher.membership import Membership
from lastwords.launcher.protocol import (
    OWN,
    PROTOCOL,
    Admission,
    Beat,
    Challenge,
    ControllerAnswer,
    ControllerWanted,
    Done,
    Entry,
    Order,
    Raised,
    SchedulerGone,
    Seat,
    order_of,
    to_launcher,
    to_message,
    to_worker,
)
from lastwords.launcher.registry import Refused
from lastwords.launcher.versions import Sources
from lastwords.processor.departure import EXIT_NOT_SAVED
from tests import golden
from tests.integration.harness import free_port


def test_a_worker_that_has_met_itself_at_the_schedulers_port_leaves_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it waits for an answer, and the scheduler cannot be started again."""
    link = socket.socket()
    link.bind(("127.0.0.1", 0))
    link.connect(address := link.getsockname())
    cluster = Cluster(WORKER, 2, *address, tmp_path, True)
    with ClusterState(cluster).held():
        ClusterState(cluster).token()
    monkeypatch.setattr(joining.socket, "create_connection", lambda *_: link)  # no limit to how long it waits
    monkeypatch.setattr(joining, "JOIN_S", -1.0)
    with pytest.raises(UnavailableError):
        Membership(cluster)
    socket.create_server(address).close()


@pytest.mark.parametrize("started", [False, True], ids=["it has never started", "its port is closed"])
def test_a_scheduler_that_cannot_be_reached_is_waited_for_with_a_limit_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, started: bool
) -> None:
    cluster = Cluster(WORKER, 2, "127.0.0.1", free_port(), tmp_path, True)
    if started:
        with ClusterState(cluster).held():
            ClusterState(cluster).token()
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(joining, "mono_s", lambda: now_s)
    monkeypatch.setattr(joining.time, "sleep", sleep)
    with caplog.at_level(logging.WARNING), pytest.raises(UnavailableError) as refused:
        Membership(cluster)
    assert now_s == pytest.approx(joining.JOIN_S, abs=1)
    assert len(caplog.messages) == pytest.approx(joining.JOIN_S / joining.NOTICE_S, abs=4)
    golden.says([caplog.messages[0], str(refused.value)])


def test_a_newcomer_is_told_that_a_scheduler_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        cluster = Cluster(WORKER, 2, *stopped.getsockname(), tmp_path, True)
        with ClusterState(cluster).held():
            ClusterState(cluster).token()
        monkeypatch.setattr(joining, "ANSWER_S", 0.1)
        monkeypatch.setattr(joining, "JOIN_S", -1.0)
        with golden.raises(UnavailableError):
            Membership(cluster)


def test_a_worker_that_waits_outside_of_main_says_so_now_and_then_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(joining.Candidate, "join", lambda self: None)
    monkeypatch.setattr(Membership, "_connect", lambda self, admitted: None)
    monkeypatch.setattr(Membership, "_run", lambda self: None)
    worker = Membership(Cluster(WORKER, 2, "127.0.0.1", 8118, tmp_path, True))
    with caplog.at_level(logging.WARNING):
        for seconds in range(1, int(joining.JOIN_S) + 2):
            worker._wait_outside(float(seconds))
    ours = [line for line in capfd.readouterr().err.splitlines() if line.startswith("lastwords:")]
    golden.says([*caplog.messages, *ours])
    assert not worker._worker.open
    worker.launcher.close()


class Scheduler:
    """Takes one connection after the other, each with a version of its own, and admits whoever comes.

    stops: when it has admitted the first one, until it goes on.
    """

    def __init__(self, path: Path, *versions: int, stops: bool = False) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.cluster = Cluster(WORKER, 2, *self._server.getsockname(), path, True)
        with ClusterState(self.cluster).held():
            ClusterState(self.cluster).token()
        self.asked = 0
        self.answer: Admission | Refused = Admission(0, "0", "job")
        self._goes_on = threading.Event()
        if not stops:
            self._goes_on.set()
        self._thread = threading.Thread(target=self._play, args=versions, daemon=True)
        self._thread.start()

    def _play(self, *versions: int) -> None:
        for version in versions:
            link, _ = self._server.accept()
            with link:
                self.asked += 1
                send(link, to_message(Challenge("nonce", version)))
                if link.recv(1 << 16) and version == PROTOCOL:
                    send(link, to_message(self.answer))
                    self._goes_on.wait()

    def go_on(self) -> None:
        self._goes_on.set()

    def close(self) -> None:
        self.go_on()
        self._thread.join(10)
        self._server.close()


def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker writes there ends with the test."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")


def test_a_worker_does_not_wait_for_a_scheduler_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_environment(monkeypatch)
    monkeypatch.setattr(membership, "AGAIN_S", 30.0)
    scheduler = Scheduler(tmp_path, PROTOCOL, stops=True)
    one = Membership(scheduler.cluster)
    one.launcher.settimeout(10)
    for _ in range(16):
        send(one.launcher, to_launcher(Sources(OWN, {"x" * (1 << 20): "digest"})))
    send(one.launcher, to_launcher(ControllerWanted({}, 7)))
    (answer,) = Lines().feed(one.launcher.recv(1 << 16))
    assert order_of(answer) == ControllerAnswer(7)
    one.farewell()
    assert not one._thread.is_alive()
    scheduler.close()


@pytest.mark.parametrize("removed", [False, True], ids=["it refuses", "its files are removed"])
def test_a_worker_whose_end_is_kept_and_not_answered_ends_as_soon_as_it_learns_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], removed: bool
) -> None:
    own_environment(monkeypatch)
    monkeypatch.setattr(membership.os, "_exit", sys.exit)
    noted, note = threading.Event(), membership._Stand.note

    def note_and_tell(stand: membership._Stand, message: dict[str, Any]) -> None:
        note(stand, message)
        noted.set()

    monkeypatch.setattr(membership._Stand, "note", note_and_tell)
    scheduler = Scheduler(tmp_path, PROTOCOL, *(() if removed else [PROTOCOL]), stops=True)
    one = Membership(scheduler.cluster)
    ends = threading.Thread(target=one.done)
    ends.start()
    assert noted.wait(10)
    scheduler.answer = Refused("it has come to the end of main() before", done=True)
    if removed:
        ClusterState(scheduler.cluster).remove()
    scheduler.go_on()
    ends.join(60)
    assert not ends.is_alive()
    scheduler.close()
    assert capfd.readouterr().err == ""


def test_a_process_that_comes_back_after_another_has_ended_as_its_worker_ends_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    own_environment(monkeypatch)
    monkeypatch.setattr(Membership, "_run", lambda self: None)
    monkeypatch.setattr(membership.os, "_exit", sys.exit)
    scheduler = Scheduler(tmp_path, PROTOCOL, PROTOCOL)
    one = Membership(scheduler.cluster)
    scheduler.answer = Refused("it has come to the end of main() before", done=True)
    with pytest.raises(SystemExit) as ended:
        one._ask_again()
    assert ended.value.code == 0
    assert capfd.readouterr().err.endswith(f"lastwords: {scheduler.answer.why}\n")
    scheduler.close()


def test_the_next_scheduler_hears_why_a_worker_ends() -> None:
    stand = membership._Stand()
    stand.note(raised := to_launcher(Raised("ValueError: x", lasting=False)))
    assert stand.repeated() == [raised]


def test_a_worker_of_another_version_than_the_scheduler_ends_at_once(tmp_path: Path) -> None:
    scheduler = Scheduler(tmp_path, PROTOCOL + 1)
    with golden.raises(ConfigError):
        Membership(scheduler.cluster)
    scheduler.close()


def test_a_worker_that_trains_hears_once_that_the_next_scheduler_has_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "AGAIN_S", 0.01)
    own_environment(monkeypatch)
    scheduler = Scheduler(tmp_path, PROTOCOL, PROTOCOL + 1)
    one = Membership(scheduler.cluster)
    one.launcher.settimeout(10)
    lines, orders = Lines(), list[Order]()
    while data := one.launcher.recv(1 << 16):
        orders += map(order_of, lines.feed(data))
    gone, refused = orders
    assert gone == SchedulerGone()
    assert isinstance(refused, Refused)
    golden.says(refused.why)
    one._thread.join(10)
    assert (one._thread.is_alive(), scheduler.asked) == (False, 2)
    scheduler.close()


class Near:
    """A worker whose thread is the test's, at the test's clock. scheduler: the other end of its connection."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        own_environment(monkeypatch)
        monkeypatch.setenv("RANK", "1")
        self.now_s = 100.0
        self.scheduler, near = socket.socketpair()
        monkeypatch.setattr(membership, "mono_s", lambda: self.now_s)
        monkeypatch.setattr(joining.Candidate, "join", lambda _: Joined(Admission(1, "1", "job"), near, Lines()))
        monkeypatch.setattr(Membership, "_run", lambda _: None)
        self.worker = Membership(Cluster(WORKER, 2, "127.0.0.1", 8118, path, True))
        self.worker.launcher.setblocking(False)

    def enters(self) -> None:
        send(self.scheduler, to_worker(Entry(0, 29500, 0, Seat(0, 2, "127.0.0.1"))))
        self.passes(0.5)
        assert self.worker._stand.inside == 0

    def passes(self, seconds: float, *, beats: bool = False) -> None:
        """Time; the scheduler says what it does then, or nothing."""
        since_beat_s = 0.0
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            since_beat_s += 0.5
            if beats and since_beat_s >= scheduler.BEAT_S:
                since_beat_s = 0.0
                self.beats()
            if self.worker._worker.open:
                self.worker._turn(0.0)

    def beats(self) -> None:
        send(self.scheduler, to_worker(Beat()))

    @property
    def told(self) -> list[str]:
        """What the worker was told since it was asked the last time."""
        try:
            return [message["kind"] for message in Lines().feed(self.worker.launcher.recv(1 << 16))]
        except BlockingIOError:
            return []

    def close(self) -> None:
        for one in (self.scheduler, self.worker.launcher):
            one.close()
        for connection in (self.worker._worker, self.worker._scheduler):
            if connection is not None and connection.open:
                connection.close()
        self.worker._selector.close()


@pytest.fixture
def near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Near]:
    with contextlib.closing(Near(tmp_path, monkeypatch)) as made:
        yield made


def test_a_scheduler_that_beats_is_waited_for_without_a_limit(near: Near, caplog: pytest.LogCaptureFixture) -> None:
    near.passes(2 * JOIN_S, beats=True)
    assert caplog.messages == []
    assert near.worker._worker.open


def test_a_worker_that_trains_says_once_that_its_scheduler_is_silent_and_trains_on(
    near: Near, caplog: pytest.LogCaptureFixture
) -> None:
    near.enters()
    assert near.told == ["Entry"]
    near.passes(2 * JOIN_S)
    assert (near.told, near.worker._worker.open) == ([], True)
    near.beats()
    near.passes(membership.SILENT_S - 1)
    golden.says(caplog.messages)


def test_a_worker_that_has_come_to_its_end_does_not_say_that_it_trains(
    near: Near, caplog: pytest.LogCaptureFixture
) -> None:
    near.enters()
    send(near.worker.launcher, to_launcher(Done()))
    near.passes(2 * membership.SILENT_S)
    golden.says(caplog.messages)


def test_a_worker_whose_end_is_not_confirmed_says_so_and_ends(
    near: Near, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(membership, "FAREWELL_S", 0.0)
    near.worker.done()
    golden.says(capfd.readouterr().err)


def test_a_worker_that_waits_for_a_silent_scheduler_says_so_and_ends_after_the_limit(
    near: Near, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    near.passes(JOIN_S - 1)
    assert near.worker._worker.open
    near.passes(2)
    assert not near.worker._worker.open
    golden.says([*caplog.messages, *capfd.readouterr().err.splitlines()[-1:]])


def test_a_scheduler_that_goes_on_in_time_has_all_its_time_again(near: Near, caplog: pytest.LogCaptureFixture) -> None:
    near.passes(JOIN_S - 1)
    caplog.clear()
    near.beats()
    near.passes(JOIN_S - 1)
    assert near.worker._worker.open
    golden.says([*caplog.messages[:2]])


def test_a_worker_that_leaves_main_while_its_scheduler_is_silent_waits_for_it_from_then_on(near: Near) -> None:
    near.enters()
    near.passes(JOIN_S + 1)
    send(near.worker.launcher, to_launcher(Waiting(OWN, 3, "", "", 0)))
    near.passes(JOIN_S - 1)
    assert near.worker._worker.open
    near.passes(2)
    assert not near.worker._worker.open


def test_a_silent_scheduler_that_is_then_killed_is_no_news(near: Near, caplog: pytest.LogCaptureFixture) -> None:
    near.passes(membership.SILENT_S + 1)
    assert len(caplog.messages) == 1
    near.scheduler.close()
    near.passes(10)
    assert near.told == [SchedulerGone.__name__]
    near.passes(JOIN_S - 25)
    assert near.worker._worker.open
    near.passes(10)
    assert not near.worker._worker.open, "the time in which it was stopped counts"


@pytest.mark.parametrize("own_time", [True, False])
@pytest.mark.parametrize("outside", [True, False], ids=["waits", "trains"])
def test_a_worker_or_a_host_that_was_stopped_says_nothing_of_the_scheduler(
    near: Near, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own_time: bool, outside: bool
) -> None:
    """The scheduler says its next word a moment later: it was stopped as well."""
    if not own_time:
        monkeypatch.setattr(OwnTime, "at", lambda _, now_mono_s, apart_s_max=0.0: now_mono_s)
    if not outside:
        near.enters()
    near.passes(4, beats=True)
    near.now_s += 2 * JOIN_S
    near.passes(2)
    near.passes(4, beats=True)
    assert bool(caplog.messages) is not own_time


def test_a_worker_whose_stderr_is_dead_ends_where_its_scheduler_ends_it(
    near: Near, close_stderr: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    close_stderr()
    monkeypatch.setattr(membership.os, "_exit", sys.exit)
    monkeypatch.setattr(membership, "FAREWELL_S", 0.0)
    answer = Refused("another process has its place")
    monkeypatch.setattr(joining.Candidate, "ask", lambda _: answer)
    for end, code in (
        (lambda: near.worker._obey(Kill(1, "it is late")), EXIT_NOT_SAVED),
        (near.worker._ask_again, EXIT_NOT_SAVED),
        (lambda: near.worker._end("it has come to its end before"), 0),
    ):
        with pytest.raises(SystemExit) as ended:
            end()
        assert ended.value.code == code
    near.worker.done()
    near.worker._wait_outside(JOIN_S + 1)
    assert not near.worker._worker.open
