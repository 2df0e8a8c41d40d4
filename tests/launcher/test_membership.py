"""A worker's way to the scheduler of its cluster."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lastwords.errors import ConfigError, UnavailableError
from lastwords.launcher import joining, membership
from lastwords.launcher.cluster_state import ClusterState
from lastwords.launcher.environment import WORKER, Cluster
from lastwords.launcher.link import Lines, send
from lastwords.launcher.membership import Membership
from lastwords.launcher.protocol import (
    OWN,
    PROTOCOL,
    Admission,
    Challenge,
    ControllerAnswer,
    ControllerWanted,
    Order,
    Raised,
    SchedulerGone,
    order_of,
    to_launcher,
    to_message,
)
from lastwords.launcher.registry import Refused
from lastwords.launcher.versions import Sources
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
    one._lost_s = 0.0
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
