"""Who is heard by a scheduler, over real connections: it is turned by hand, in the test's own thread."""

from __future__ import annotations

import dataclasses
import selectors
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastwords.errors import ConfigError, StorageError
from lastwords.launcher.cluster_state import ClusterState
from lastwords.launcher.environment import SCHEDULER, Cluster
from lastwords.launcher.link import Lines, send
from lastwords.launcher.scheduler import Scheduler, proof_of
from lastwords.liveness import process_id
from tests import golden
from tests.integration.harness import Port

TURNS = 20


@dataclasses.dataclass
class Rig:
    cluster: Cluster
    state: ClusterState
    scheduler: Scheduler
    links: list[socket.socket]

    def connect(self) -> tuple[socket.socket, Lines, str]:
        """A connection and the nonce that it was given."""
        link = socket.create_connection(("127.0.0.1", self.cluster.port), 10)
        self.links.append(link)
        lines = Lines()
        return link, lines, str(self.answers(link, lines)[0]["nonce"])

    def answers(self, link: socket.socket, lines: Lines) -> list[dict[str, Any]]:
        """What comes; {"closed": True} at the end of the connection."""
        link.setblocking(False)
        for _ in range(TURNS):
            self.scheduler._turn(0.05)
            try:
                data = link.recv(65536)
            except BlockingIOError:
                continue
            return lines.feed(data) if data else [{"closed": True}]
        return []

    def apply(self, name: str = "", *, token: str = "", nonce: str = "", workers: int = 2, pid: int = 0) -> list[Any]:
        """Of this process, unless a pid is given. token and nonce: the right ones."""
        link, lines, drawn = self.connect()
        application = self.application(name, workers, pid)
        send(link, {"apply": application, "proof": proof_of(token or self.state.token(), nonce or drawn, application)})
        return self.answers(link, lines)

    def application(
        self, name: str, workers: int = 2, pid: int = 0, rank: int | None = None, job: str = ""
    ) -> dict[str, Any]:
        me = process_id.this_process("")
        return {
            "name": name, "host": me.host_id, "pid": pid or me.pid, "start_ticks": me.start_ticks, "workers": workers,
            "rank": rank, "job": job,
        }  # fmt: skip


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    port = Port()
    cluster = Cluster(SCHEDULER, 2, "127.0.0.1", port.number, tmp_path, recovery=True)
    state = ClusterState(cluster)
    with state.held() as kept, selectors.DefaultSelector() as selector:
        made = Rig(cluster, state, Scheduler(cluster, state, kept, selector), [])
        yield made
        for link in made.links:
            link.close()
        made.scheduler.close()
    port.release()


def test_a_process_that_knows_the_token_becomes_a_rank(rig: Rig) -> None:
    (answer,) = rig.apply("1")
    assert (answer["admitted"], answer["name"]) == (1, "1")


def test_whoever_does_not_know_the_token_is_not_heard(rig: Rig) -> None:
    assert rig.apply("1", token="guessed") == [{"closed": True}]
    link, lines, _ = rig.connect()
    link.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert rig.answers(link, lines) == [{"closed": True}]
    link, lines, _ = rig.connect()
    send(link, {"waiting": 7, "record": "", "sources": "", "entered": -1})
    assert rig.answers(link, lines) == [{"closed": True}]


def test_what_another_process_has_said_before_proves_nothing(rig: Rig) -> None:
    _, _, overheard = rig.connect()
    assert rig.apply("1", nonce=overheard) == [{"closed": True}]


def reset(link: socket.socket) -> None:
    """As port scanners and load balancers leave a connection."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


def test_a_connection_that_is_reset_before_it_is_taken_does_not_end_the_scheduler(rig: Rig) -> None:
    reset(socket.create_connection(("127.0.0.1", rig.cluster.port), 10))
    assert rig.apply("1")[0]["admitted"] == 1


def test_a_name_that_is_taken_and_a_number_of_workers_that_differs(rig: Rig) -> None:
    rig.apply("1")
    (taken,) = rig.apply("1", pid=1)
    assert taken["later"]
    (differs,) = rig.apply("0", workers=3)
    assert not differs["later"]


def test_a_message_that_makes_no_sense_ends_the_connection_and_not_the_scheduler(rig: Rig) -> None:
    link, lines, nonce = rig.connect()
    application = rig.application("0")
    send(link, {"apply": application, "proof": proof_of(rig.state.token(), nonce, application)})
    rig.answers(link, lines)
    send(link, {"begun": "often"})
    assert rig.answers(link, lines) == [{"closed": True}]
    assert rig.apply("0")[0]["admitted"] == 0


def test_a_worker_that_is_done_is_told_so_once_it_is_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    link, lines, nonce = rig.connect()
    application = rig.application("0")
    send(link, {"apply": application, "proof": proof_of(rig.state.token(), nonce, application)})
    rig.answers(link, lines)
    with monkeypatch.context() as patched:
        patched.setattr(rig.state, "write", no_room)
        send(link, {"done": True})
        assert rig.answers(link, lines) == []
    send(link, {"done": True})
    assert rig.answers(link, lines) == [{"done": True}]


def test_a_scheduler_that_knows_nothing_takes_the_name_of_the_job_that_runs(rig: Rig) -> None:
    link, lines, nonce = rig.connect()
    application = rig.application("1", rank=1, job="cluster-of-before")
    send(link, {"apply": application, "proof": proof_of(rig.state.token(), nonce, application)})
    (answer,) = rig.answers(link, lines)
    assert answer["job"] == "cluster-of-before"
    assert rig.apply("0")[0]["job"] == "cluster-of-before"


def test_nobody_is_admitted_whose_name_cannot_be_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(rig.state, "write", no_room)
        (answer,) = rig.apply("1")
        assert answer["later"]
        golden.says(answer["refused"])
    assert rig.apply("1")[0]["admitted"] == 1


def no_room(_: object) -> None:
    raise StorageError("no space left", errno=28)


def test_what_a_cluster_without_recovery_has_left_is_over(rig: Rig) -> None:
    rig.apply("1")
    cluster = dataclasses.replace(rig.cluster, recovery=False, port=rig.cluster.port)
    kept = rig.state._read()
    assert kept.members
    rig.scheduler.close()
    with selectors.DefaultSelector() as selector:
        scheduler = Scheduler(cluster, rig.state, dataclasses.replace(kept, generation=3), selector)
        scheduler._look()
        assert scheduler._result is None, "the death of a process of before ends nothing"
        assert scheduler._registry.members == {}
        scheduler.close()


def test_a_port_that_is_taken(rig: Rig, tmp_path: Path) -> None:
    other = dataclasses.replace(rig.cluster, path=tmp_path / "other")
    state = ClusterState(other)
    with state.held() as kept, selectors.DefaultSelector() as selector, golden.raises(ConfigError):
        Scheduler(other, state, kept, selector)
