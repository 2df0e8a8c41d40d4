"""A supervisor's way to the scheduler of its cluster."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastwords.clock import OwnTime
from lastwords.errors import ConfigError, UnavailableError
from lastwords.launcher import membership, scheduler
from lastwords.launcher.cluster_state import ClusterState
from lastwords.launcher.environment import WORKER, Cluster
from lastwords.launcher.events import Begun, Ended, Enter, Guarded, Inside, Kill, Leaving, Over, Ready, Seat
from lastwords.launcher.link import Lines, send
from lastwords.launcher.membership import JOIN_S, Candidate, Joined, WorkerMembership
from lastwords.launcher.protocol import (
    OWN,
    PROTOCOL,
    Admission,
    Beat,
    Challenge,
    Dismissed,
    Done,
    FromSupervisor,
    RankRuns,
    ToSupervisor,
    read,
    to_message,
)
from lastwords.launcher.registry import Rejected
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
    monkeypatch.setattr(membership.socket, "create_connection", lambda *_: link)  # no limit to how long it waits
    monkeypatch.setattr(membership, "JOIN_S", -1.0)
    with pytest.raises(UnavailableError):
        Candidate(cluster).join()
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

    monkeypatch.setattr(membership, "mono_s", lambda: now_s)
    monkeypatch.setattr(membership.time, "sleep", sleep)
    with caplog.at_level(logging.WARNING), pytest.raises(UnavailableError) as refused:
        Candidate(cluster).join()
    assert now_s == pytest.approx(membership.JOIN_S, abs=1)
    assert len(caplog.messages) == pytest.approx(membership.JOIN_S / membership.NOTICE_S, abs=4)
    golden.says([caplog.messages[0], str(refused.value)])


def test_a_newcomer_is_told_that_a_scheduler_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        cluster = Cluster(WORKER, 2, *stopped.getsockname(), tmp_path, True)
        with ClusterState(cluster).held():
            ClusterState(cluster).token()
        monkeypatch.setattr(membership, "ANSWER_S", 0.1)
        monkeypatch.setattr(membership, "JOIN_S", -1.0)
        with golden.raises(UnavailableError):
            Candidate(cluster).join()


def test_a_worker_of_another_version_than_the_scheduler_ends_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, golden.raises(ConfigError):
        cluster = Cluster(WORKER, 2, *server.getsockname(), tmp_path, True)
        with ClusterState(cluster).held():
            ClusterState(cluster).token()
        answers = threading.Thread(target=lambda: send(server.accept()[0], to_message(Challenge("x", PROTOCOL + 1))))
        answers.start()
        try:
            Candidate(cluster).join()
        finally:
            answers.join()


class Near:
    """A supervisor's membership at the test's clock. scheduler: the other end of its connection.

    told: what it has been ordered; ended: that nobody will order anything any more, as `WorkerMembership` says it.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.scheduler, near = socket.socketpair()
        self.told: list[ToSupervisor] = []
        self.ended: list[tuple[str, bool]] = []
        self._lines, self._selector = Lines(), selectors.DefaultSelector()
        monkeypatch.setattr(membership, "mono_s", lambda: self.now_s)
        monkeypatch.setattr(Candidate, "join", lambda _: Joined(Admission(1, "1", "job"), near, Lines()))
        cluster = Cluster(WORKER, 2, "127.0.0.1", 8118, path, True)
        self.worker = WorkerMembership(
            cluster, self._selector, self.told.append, lambda why, fails: self.ended.append((why, fails))
        )
        self.worker.begin()

    def enters(self, entry: int = 0) -> None:
        send(self.scheduler, to_message(Enter(entry, 29500, 0, Seat(0, 2, "127.0.0.1"))))
        self.passes(0.5)
        assert self.worker._stand.entry == entry

    def passes(self, seconds: float, *, beats: bool = False) -> None:
        """Time; the scheduler says what it does then, or nothing."""
        since_beat_s = 0.0
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            since_beat_s += 0.5
            if beats and since_beat_s >= scheduler.BEAT_S:
                since_beat_s = 0.0
                self.beats()
            for key, _ in self._selector.select(0):
                key.data()
            self.worker.tick()

    def beats(self) -> None:
        send(self.scheduler, to_message(Beat()))

    def loses(self) -> None:
        """The connection to its scheduler."""
        self.scheduler.close()
        for key, _ in self._selector.select(0):
            key.data()

    @property
    def said(self) -> list[FromSupervisor]:
        """To the scheduler, since it was asked the last time."""
        return [read(message, FromSupervisor, 1) for message in self._lines.feed(self.scheduler.recv(1 << 20))]

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()
        self._selector.close()


@pytest.fixture
def near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Near]:
    with contextlib.closing(Near(tmp_path, monkeypatch)) as made:
        yield made


def test_a_worker_does_not_wait_for_a_scheduler_that_is_stopped(near: Near) -> None:
    for _ in range(16):
        near.worker.report(Leaving(1, 7, "x" * (1 << 20)))
    near.worker.close()


def test_what_happens_to_a_rank_is_said_and_repeated_to_the_next_scheduler(near: Near) -> None:
    assert near.said == [Ready(1, -1)]
    stand = near.worker._stand
    near.enters(5)
    said = RankRuns(7, 8), Guarded(1), Begun(1), Over(1)
    for event in said:
        near.worker.report(event)
    assert near.said == [*said]
    assert stand.repeated() == [Inside(OWN, 5, begun=True, loops=1), RankRuns(7, 8), Guarded(1), Over(1)]
    near.worker.report(Begun(1))
    near.worker.report(Guarded(1))
    assert stand.repeated() == [Inside(OWN, 5, begun=True, loops=2), RankRuns(7, 8), Guarded(1)], "of the second loop"
    for event in (Leaving(1, 7), Ended(1, 75)):
        near.worker.report(event)
    assert stand.repeated() == [Leaving(1, 7), Ready(OWN, 5)]
    near.enters(6)
    assert stand.repeated() == [Inside(OWN, 6, begun=False, loops=0)]
    near.worker.report(Ended(1, 0))
    assert near.said[-1:] == stand.repeated() == [Done(6)]
    near.enters(7)
    assert stand.repeated() == [Inside(OWN, 7, begun=False, loops=0)], "it had come to its end in vain"


def test_what_the_scheduler_orders_is_passed_on(near: Near) -> None:
    near.enters()
    send(near.scheduler, to_message(Kill(1, "it is late")))
    near.passes(0.5)
    assert [type(order) for order in near.told] == [Enter, Kill]
    send(near.scheduler, to_message(Dismissed("a crash loop")))
    near.passes(2)
    near.loses()
    near.passes(2)
    assert near.ended == [("the scheduler has given up: a crash loop", True)], "once"


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize(
    "answer",
    [
        Rejected("it has come to its end before", done=True),
        Rejected("another process has its place"),
        UnavailableError("its files are removed"),
        ConfigError("it is of another version"),
    ],
    ids=["done", "refused", "no files", "version"],
)
def test_what_follows_from_the_answer_of_the_next_scheduler(
    near: Near, monkeypatch: pytest.MonkeyPatch, done: bool, answer: Rejected | Exception
) -> None:
    asked = []

    def ask(_: Candidate) -> Rejected:
        asked.append(answer)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Candidate, "ask", ask)
    near.enters()
    if done:
        near.worker.report(Ended(1, 0))
    near.loses()
    near.passes(4)
    golden.says([f"{why}; {fails}" for why, fails in near.ended])
    if near.ended:
        assert (len(near.ended), len(asked)) == (1, 1), "it is not asked again"


def test_a_scheduler_that_beats_is_waited_for_without_a_limit(near: Near, caplog: pytest.LogCaptureFixture) -> None:
    near.passes(2 * JOIN_S, beats=True)
    assert (caplog.messages, near.ended) == ([], [])


def test_a_worker_that_trains_says_once_that_its_scheduler_is_silent_and_trains_on(
    near: Near, caplog: pytest.LogCaptureFixture
) -> None:
    near.enters()
    near.passes(2 * JOIN_S)
    assert (len(near.told), near.ended) == (1, [])
    near.beats()
    near.passes(membership.SILENT_S - 1)
    golden.says(caplog.messages)


def test_a_worker_that_has_come_to_its_end_waits_until_that_is_known_and_not_for_ever(
    near: Near, caplog: pytest.LogCaptureFixture
) -> None:
    near.enters()
    near.worker.report(Ended(1, 0))
    near.passes(JOIN_S - 1)
    assert near.ended == []
    near.passes(2)
    golden.says([*caplog.messages, *(why for why, _ in near.ended)])


def test_a_worker_that_waits_for_a_silent_scheduler_says_so_now_and_then_and_ends_after_the_limit(
    near: Near, caplog: pytest.LogCaptureFixture
) -> None:
    near.passes(JOIN_S - 1)
    assert near.ended == []
    near.passes(2)
    golden.says([*caplog.messages, *(f"{why}; {fails}" for why, fails in near.ended)])


def test_a_scheduler_that_goes_on_in_time_has_all_its_time_again(near: Near, caplog: pytest.LogCaptureFixture) -> None:
    near.passes(JOIN_S - 1)
    caplog.clear()
    near.beats()
    near.passes(JOIN_S - 1)
    assert near.ended == []
    golden.says(caplog.messages[:2])


def test_a_worker_whose_rank_ends_while_its_scheduler_is_silent_waits_for_it_from_then_on(near: Near) -> None:
    near.enters()
    near.passes(JOIN_S + 1)
    near.worker.report(Ended(1, 75))
    near.passes(JOIN_S - 1)
    assert near.ended == []
    near.passes(2)
    assert len(near.ended) == 1


def test_a_silent_scheduler_that_is_then_killed_is_no_news(near: Near, caplog: pytest.LogCaptureFixture) -> None:
    near.passes(membership.SILENT_S + 1)
    assert len(caplog.messages) == 1
    near.loses()
    near.passes(JOIN_S - 15)
    assert near.ended == []
    near.passes(10)
    assert len(near.ended) == 1, "the time in which it was stopped counts"


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
