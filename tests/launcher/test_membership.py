"""A worker's way to the scheduler of its cluster."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from lastwords.errors import UnavailableError
from lastwords.launcher import membership
from lastwords.launcher.cluster_state import ClusterState
from lastwords.launcher.environment import WORKER, Cluster
from lastwords.launcher.membership import Membership
from tests import golden


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
        Membership(cluster)
    socket.create_server(address).close()


@pytest.mark.parametrize("started", [False, True], ids=["it has never started", "its port is closed"])
def test_a_scheduler_that_cannot_be_reached_is_waited_for_with_a_limit_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, started: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    cluster = Cluster(WORKER, 2, *address, tmp_path, True)
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
        Membership(cluster)
    assert now_s == pytest.approx(membership.JOIN_S, abs=1)
    assert len(caplog.messages) == pytest.approx(membership.JOIN_S / membership.NOTICE_S, abs=4)
    golden.says([caplog.messages[0], str(refused.value)])


def test_a_worker_that_waits_outside_of_main_says_so_now_and_then_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(Membership, "_join", lambda self: None)
    monkeypatch.setattr(Membership, "_run", lambda self: None)
    worker = Membership(Cluster(WORKER, 2, "127.0.0.1", 8118, tmp_path, True))
    with caplog.at_level(logging.WARNING):
        for seconds in range(1, int(membership.JOIN_S) + 2):
            worker._wait_outside(float(seconds))
    golden.says([*caplog.messages, capfd.readouterr().err])
    assert worker._near.fileno() == -1
    worker.launcher.close()
