"""A worker's way to the scheduler of its cluster."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lastwords.errors import UnavailableError
from lastwords.launcher import membership
from lastwords.launcher.cluster_state import ClusterState
from lastwords.launcher.environment import WORKER, Cluster
from lastwords.launcher.membership import Membership


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
