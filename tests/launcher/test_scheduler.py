"""Who is heard by a scheduler, over real connections: it is turned by hand, in the test's own thread."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import resource
import selectors
import shutil
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lastwords.clock import OwnTime
from lastwords.errors import BusyError, ConfigError, FormatError, LastWordsError, StorageError
from lastwords.launcher import head, membership
from lastwords.launcher import link as link_module
from lastwords.launcher import scheduler as module
from lastwords.launcher.cluster_state import VERSION, ClusterState, KeptCluster, read_token
from lastwords.launcher.core import KEEP_AGAIN_S, RankPlace
from lastwords.launcher.environment import SCHEDULER, Cluster
from lastwords.launcher.events import Begun, Ended, Event, Gone, Inside, Leaving, Over, Ready, Stop
from lastwords.launcher.link import LINE_BYTES_MAX, STRANGER_LINE_BYTES_MAX, Lines, send
from lastwords.launcher.protocol import (
    OWN,
    PROTOCOL,
    Applicant,
    Application,
    Beat,
    Dismissed,
    Done,
    FromSupervisor,
    RankRuns,
    proof_of,
    to_message,
)
from lastwords.launcher.registry import SILENCE_S, Admitted, Process, Rejected, Worker
from lastwords.launcher.scheduler import BEAT_S, Scheduler, schedule
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
        """What comes beside beats; {"closed": True} at the end of the connection."""
        link.setblocking(False)
        for _ in range(TURNS):
            self.scheduler._turn(0.05)
            try:
                data = link.recv(65536)
            except BlockingIOError:
                continue
            if not data:
                return [{"closed": True}]
            if said := [message for message in lines.feed(data) if message["kind"] != Beat.__name__]:
                return said
        return []

    def apply(self, name: str = "", *, token: str = "", nonce: str = "", workers: int = 2, pid: int = 0) -> list[Any]:
        """Of this process, unless a pid is given. token and nonce: the right ones."""
        link, lines, drawn = self.connect()
        application = self.application(name, workers, pid)
        self.send(link, nonce or drawn, application, token)
        return self.answers(link, lines)

    def send(self, link: socket.socket, nonce: str, application: dict[str, Any], token: str = "") -> None:
        proof = proof_of(token or self.state.token(), nonce, application)
        send(link, to_message(Application(application, proof)))

    def application(
        self, name: str, workers: int = 2, pid: int = 0, rank: int | None = None, job: str = ""
    ) -> dict[str, Any]:
        me = process_id.this_process("")
        return {
            "name": name, "host": me.host_id, "pid": pid or me.pid, "start_ticks": me.start_ticks, "workers": workers,
            "rank": rank, "job": job, "version": PROTOCOL,
        }  # fmt: skip


@pytest.fixture
def port() -> Iterator[int]:
    one = Port()
    yield one.number
    one.release()


@pytest.fixture
def rig(tmp_path: Path, port: int) -> Iterator[Rig]:
    cluster = Cluster(SCHEDULER, 2, "127.0.0.1", port, tmp_path, recovery=True)
    state = ClusterState(cluster)
    with state.held() as kept, selectors.DefaultSelector() as selector:
        made = Rig(cluster, state, Scheduler(cluster, state, kept, selector), [])
        yield made
        for link in made.links:
            link.close()
        made.scheduler.close()


def test_a_process_that_knows_the_token_becomes_a_rank(rig: Rig) -> None:
    (answer,) = rig.apply("1")
    assert (answer["rank"], answer["name"]) == (1, "1")


def test_whoever_does_not_know_the_token_is_not_heard(rig: Rig) -> None:
    assert rig.apply("1", token="guessed") == [{"closed": True}]
    link, lines, _ = rig.connect()
    link.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert rig.answers(link, lines) == [{"closed": True}]
    link, lines, _ = rig.connect()
    send(link, to_message(Ready(OWN, 7)))
    assert rig.answers(link, lines) == [{"closed": True}]


@pytest.mark.parametrize(
    "proof", ["ü", "\ud800", "\udc00\udc00", "\0", "x" * 3000, 7, None], ids=lambda one: ascii(one)[:20]
)
@pytest.mark.parametrize(
    "version", [PROTOCOL, PROTOCOL + 1, 10**3000, 0.5, "\ud800", "ü", [1], None, True], ids=lambda one: ascii(one)[:20]
)
def test_whatever_a_stranger_says_ends_his_connection_only(rig: Rig, proof: object, version: object) -> None:
    link, lines, _ = rig.connect()
    send(link, {"kind": "Application", "apply": {**rig.application("1"), "version": version}, "proof": proof})
    assert rig.answers(link, lines) == [{"closed": True}]


def test_what_a_stranger_has_nested_as_deep_as_can_be_read_ends_his_connection_only(rig: Rig) -> None:
    for deep in range(850, 1000):
        with socket.create_connection(("127.0.0.1", rig.cluster.port), 10) as link:
            nested = "[" * deep + "]" * deep
            link.sendall(f'{{"kind": "Application", "apply": {{"name": {nested}}}, "proof": ""}}\n'.encode())
            rig.scheduler._turn(0.05)
            rig.scheduler._turn(0.05)
    assert rig.apply("1")[0]["rank"] == 1


def test_nobody_comes_in_at_another_address_than_the_clusters(rig: Rig) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", rig.cluster.port), 10)


def test_what_another_process_has_said_before_proves_nothing(rig: Rig) -> None:
    _, _, overheard = rig.connect()
    assert rig.apply("1", nonce=overheard) == [{"closed": True}]


def reset(link: socket.socket) -> None:
    """As port scanners and load balancers leave a connection."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


def test_a_connection_that_is_reset_before_it_is_taken_does_not_end_the_scheduler(rig: Rig) -> None:
    reset(socket.create_connection(("127.0.0.1", rig.cluster.port), 10))
    assert rig.apply("1")[0]["rank"] == 1


def test_a_name_that_is_taken_and_a_number_of_workers_that_differs(rig: Rig) -> None:
    rig.apply("1")
    (taken,) = rig.apply("1", pid=1)
    assert taken["later"]
    (differs,) = rig.apply("0", workers=3)
    assert not differs["later"]


def test_a_message_that_makes_no_sense_ends_the_connection_and_not_the_scheduler(rig: Rig) -> None:
    link, lines, nonce = rig.connect()
    application = rig.application("0")
    rig.send(link, nonce, application)
    rig.answers(link, lines)
    send(link, {"kind": "Begun", "step": "often"})
    assert rig.answers(link, lines) == [{"closed": True}]
    assert rig.apply("0")[0]["rank"] == 0


@pytest.mark.timeout(120)
def test_a_worker_that_is_stopped_keeps_nobody_waiting(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "SILENCE_S", 1000)  # until the kernel gives up
    link, lines, nonce = rig.connect()
    rig.send(link, nonce, rig.application("0", pid=1))
    rig.answers(link, lines)
    for _ in range(16):
        rig.scheduler._tell(0, Dismissed("x" * (1 << 20)))
    assert rig.apply("1")[0]["rank"] == 1


def test_a_process_that_applies_twice_at_once_is_one_worker(rig: Rig) -> None:
    link, lines, nonce = rig.connect()
    for _ in range(2):
        rig.send(link, nonce, rig.application("0"))
    assert [answer["rank"] for answer in rig.answers(link, lines)] == [0, 0]
    rig.scheduler._head.take_over(3, 7)
    send(link, to_message(Done(3)))
    assert rig.answers(link, lines) == [to_message(Done())]


def test_a_worker_that_is_done_is_told_so_once_it_is_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_AGAIN_S", 0.0)
    link, lines = meet(rig, 0)
    rig.scheduler._head.take_over(3, 7)
    with monkeypatch.context() as patched:
        patched.setattr(rig.state, "write", no_room)
        send(link, to_message(Done(3)))
        assert rig.answers(link, lines) == []
    assert rig.answers(link, lines) == [to_message(Done())]


@pytest.mark.parametrize(
    ("kept", "entry", "other", "first"),
    [(3, 3, Ended(OWN, 1), 0), (3, 2, Ended(OWN, 1), 1), (None, 3, Ready(OWN, 3), 1), (None, 3, Ready(OWN, 3), 0)],
    ids=["its generation is over", "it has not heard that another one has begun", "what was kept is lost", "and late"],
)
def test_a_rank_that_has_come_to_its_end_in_vain_takes_part_in_the_next_generation(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, kept: int | None, entry: int, other: FromSupervisor, first: int
) -> None:
    monkeypatch.setattr(process_id, "runs", lambda *_: True)
    links = [meet(rig, rank) for rank in range(2)]
    if kept is not None:
        rig.scheduler._head.take_over(kept, 7)
    said = other, Done(entry)
    for rank in (first, 1 - first):
        send(links[rank][0], to_message(said[rank]))
        answers = rig.answers(*links[1])
    (begins,) = answers
    assert (begins["kind"], begins["generation"] > 3) == ("Enter", True)
    assert not rig.scheduler._member(1).done


def test_nothing_begins_while_a_worker_is_not_connected_and_has_not_said_where_it_is(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_id, "runs", lambda *_: True)
    links = [meet(rig, rank) for rank in range(2)]
    send(links[0][0], to_message(Ready(OWN)))
    assert rig.answers(*links[0]) == []
    links[0][0].close()
    send(links[1][0], to_message(Ready(OWN)))
    assert rig.answers(*links[1]) == []
    assert rig.scheduler._head._recovery._events == [], "it has not died"
    again = meet(rig, 0)
    assert rig.answers(*links[1]) == []
    send(again[0], to_message(Ready(OWN)))
    assert [rig.answers(*link)[0]["kind"] for link in (again, links[1])] == ["Enter", "Enter"]


@pytest.mark.parametrize("end", [Ended(OWN, 1), Ready(OWN, 3), None], ids=["its rank", "meanwhile", "its supervisor"])
def test_without_recovery_the_first_death_ends_the_job(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, end: Ended | Ready | None
) -> None:
    monkeypatch.setattr(rig.scheduler, "_cluster", dataclasses.replace(rig.cluster, recovery=False))
    link, _ = train(rig, monkeypatch, runs=end is not None)[1]
    if end is not None:
        send(link, to_message(end))
        rig.scheduler._turn(0.05)
    looks(rig)
    golden.says(rig.scheduler._result.failure if rig.scheduler._result else "")


def test_a_scheduler_that_knows_nothing_takes_the_name_of_the_job_that_runs(rig: Rig) -> None:
    link, lines, nonce = rig.connect()
    application = rig.application("1", rank=1, job="cluster-of-before")
    rig.send(link, nonce, application)
    (answer,) = rig.answers(link, lines)
    assert answer["job"] == "cluster-of-before"
    assert rig.apply("0")[0]["job"] == "cluster-of-before"


def meet(rig: Rig, rank: int) -> tuple[socket.socket, Lines]:
    """A worker that is admitted as this rank, in a process of its own."""
    link, lines, nonce = rig.connect()
    rig.send(link, nonce, rig.application(str(rank), pid=os.getpid() + rank))
    rig.answers(link, lines)
    return link, lines


def test_the_next_scheduler_knows_what_one_that_knew_nothing_has_learnt_from_the_workers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_id, "runs", lambda *_: True)
    links = []
    for rank in range(2):
        link, lines = meet(rig, rank)
        send(link, to_message(Inside(OWN, 5, True, 1)))
        assert rig.answers(link, lines) == []
        links.append((link, lines))
    for said in (Over(OWN), Done(5)):
        send(links[0][0], to_message(said))
    assert rig.answers(*links[0]) == [to_message(Done())]
    rig.scheduler.close()
    with selectors.DefaultSelector() as selector:
        scheduler = Scheduler(rig.cluster, rig.state, rig.state._read(), selector)
        assert [scheduler._head.core.place(rank) for rank in range(2)] == [RankPlace.DONE, RankPlace.RUNNING]
        scheduler.close()


def test_a_worker_that_comes_when_the_cluster_has_just_ended_is_told_so(rig: Rig) -> None:
    """Its connection was lost a moment before, say."""
    rig.scheduler._obey(Stop("a crash loop"))
    answers = rig.apply("1")
    assert [one["kind"] for one in answers] == ["Admission", "Dismissed"]
    assert answers[1]["failure"] == "a crash loop"


def test_nobody_is_admitted_whose_name_cannot_be_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(rig.state, "write", no_room)
        (answer,) = rig.apply("1")
        assert answer["later"]
        golden.says(answer["why"])
    assert rig.apply("1")[0]["rank"] == 1


@pytest.mark.parametrize("full", [False, True])
def test_what_the_workers_of_a_large_cluster_bring_at_once_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    workers, written = 100, list[int]()
    one = Return(tmp_path, workers, monkeypatch, members=0)

    def write(kept: KeptCluster) -> None:
        written.append(len(kept.members))
        if full:
            no_room(kept)

    monkeypatch.setattr(one.state, "write", write)
    one.come(*range(workers))
    one.turn()
    one.answer()
    one.turn()
    assert written == [workers]
    assert one.there == ([] if full else [*range(workers)])
    one.answer()
    one.scheduler._head.take_over(5, 7)
    for link in one.links.values():
        send(link, to_message(Done(5)))
    one.turn()
    assert written[1:] == ([] if full else [workers])
    one.close()


def test_a_worker_that_comes_back_is_admitted_though_others_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Return(tmp_path, 2, monkeypatch, members=1)
    monkeypatch.setattr(one.state, "write", no_room)
    one.come(0, 1)
    one.turn()
    one.answer()
    one.turn()
    assert one.there == [0]
    one.close()


def no_room(_: object) -> None:
    raise StorageError("no space left", errno=28)


@pytest.mark.parametrize("recovery", [True, False])
def test_the_first_line_says_whether_anything_is_healed(
    tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture, recovery: bool
) -> None:
    cluster = Cluster(SCHEDULER, 2, "127.0.0.1", port, tmp_path, recovery)
    state = ClusterState(cluster)
    with state.held() as kept, selectors.DefaultSelector() as selector:
        Scheduler(cluster, state, kept, selector).close()
    golden.says(caplog.messages)


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


def looks(rig: Rig) -> None:
    """As some seconds later."""
    rig.scheduler._looked_s = rig.scheduler._state_looked_s = -math.inf
    rig.scheduler._look()


@pytest.mark.parametrize("whole", [True, False], ids=["the path", "the state"])
def test_a_path_that_is_removed_under_a_scheduler_is_there_again_for_workers_and_the_next_one(
    rig: Rig, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    rig.apply("1")
    before, token, path = rig.state._read(), rig.state.token(), rig.cluster.path
    caplog.clear()
    looks(rig)
    assert caplog.messages == []
    if whole:
        shutil.rmtree(path)
    else:
        (path / "cluster" / "state.json").unlink()
    for _ in range(2):
        looks(rig)
    golden.says(caplog.messages)
    after = rig.state._read()
    assert (after.job, after.members["1"].process, rig.state.token()) == (
        before.job, before.members["1"].process, token,
    )  # fmt: skip
    assert stat.S_IMODE((path / "cluster").stat().st_mode) == 0o700
    assert rig.apply("0")[0]["rank"] == 0
    with pytest.raises(BusyError), ClusterState(rig.cluster).held():
        pass


@pytest.mark.parametrize("whole", [True, False], ids=["token and state", "the token"])
def test_a_path_that_another_scheduler_has_taken_meanwhile_is_left_to_it(
    rig: Rig, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    rig.apply("1")
    token = rig.state.token()
    shutil.rmtree(rig.cluster.path)
    other = ClusterState(dataclasses.replace(rig.cluster, port=1))
    with other.held() as kept:
        others = other.token()
        if whole:
            other.write(kept)
        caplog.clear()
        for _ in range(2):
            looks(rig)
        golden.says(caplog.messages)
        assert other.token() == others
        assert (rig.cluster.path / "cluster" / "state.json").exists() is whole
    shutil.rmtree(rig.cluster.path)
    looks(rig)
    assert rig.state.token() == token


@pytest.mark.parametrize("down", [True, False], ids=["is down", "runs"])
def test_what_another_cluster_keeps_that_has_taken_the_path_stays_its_own(
    rig: Rig, caplog: pytest.LogCaptureFixture, down: bool
) -> None:
    """Somebody had removed it under this one."""
    rig.apply("1")
    shutil.rmtree(rig.cluster.path)
    other = ClusterState(dataclasses.replace(rig.cluster, port=1))
    with contextlib.ExitStack() as runs:
        kept = runs.enter_context(other.held())
        others = other.token()
        other.write(kept)
        if down:
            runs.close()
        caplog.clear()
        looks(rig)
        rig.state.remove()
        assert (read_token(rig.cluster.path), other._read()) == (others, kept)
    golden.says(caplog.messages)
    with other.held() as again:
        assert again == kept, "its own next scheduler can have it"


@pytest.mark.parametrize("left", ["nothing", "all but the lock"])
def test_a_path_that_was_removed_when_the_cluster_ends_has_nothing_of_it(rig: Rig, left: str) -> None:
    rig.apply("1")
    directory = rig.cluster.path / "cluster"
    if left == "nothing":
        shutil.rmtree(rig.cluster.path)
    else:
        (directory / "state.lock").unlink()
    rig.state.remove()
    assert directory.exists() is (left != "nothing")
    assert {one.name for one in directory.glob("*")} <= {"state.lock"}


def test_a_port_that_is_taken(rig: Rig, tmp_path: Path) -> None:
    other = dataclasses.replace(rig.cluster, path=tmp_path / "other")
    state = ClusterState(other)
    with state.held() as kept, selectors.DefaultSelector() as selector, golden.raises(ConfigError):
        Scheduler(other, state, kept, selector)


class Return:
    """A scheduler that has been started again, at a clock of the test's; its workers are on other hosts, and train.

    members: so many of the workers were there before.
    """

    GENERATION = 5

    def __init__(self, path: Path, workers: int, monkeypatch: pytest.MonkeyPatch, members: int | None = None) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(module, "mono_s", lambda: self.now_s)
        self._port = Port()
        self.cluster = Cluster(SCHEDULER, workers, "127.0.0.1", self._port.number, path, recovery=True)
        self.state = ClusterState(self.cluster)
        self._selector = selectors.DefaultSelector()
        ranks = range(workers if members is None else members)
        before = {str(rank): Worker(rank, Process(f"host-{rank}", 1000 + rank, 1)) for rank in ranks}
        with self.state.held():
            generation = self.GENERATION if len(ranks) == workers else -1
            kept = KeptCluster(VERSION, self.cluster.address, workers, "job", generation, 7, before)
            self.scheduler = Scheduler(self.cluster, self.state, kept, self._selector)
        self.links: dict[int, socket.socket] = {}

    def come(self, *ranks: int) -> None:
        """Connections that wait until they are taken."""
        for rank in ranks:
            self.links[rank] = socket.create_connection(("127.0.0.1", self.cluster.port), 10)

    def turn(self, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.scheduler._turn(0)
        self.scheduler._look()
        self.scheduler._head.tick()

    def answer(self) -> None:
        """What workers do that have been spoken to."""
        for rank, link in self.links.items():
            link.setblocking(False)
            try:
                messages = Lines().feed(link.recv(65536))
            except (BlockingIOError, ConnectionResetError):
                continue
            for nonce in (message["nonce"] for message in messages if "nonce" in message):
                application = {
                    "name": str(rank), "host": f"host-{rank}", "pid": 1000 + rank, "start_ticks": 1,
                    "workers": self.cluster.workers, "rank": rank, "job": "job",
                    "version": PROTOCOL,
                }  # fmt: skip
                send(link, to_message(Application(application, proof_of(self.state.token(), nonce, application))))

    @property
    def there(self) -> list[int]:
        return [one.rank for one in self.scheduler._registry.members.values() if one.linked]

    @property
    def dead(self) -> list[int]:
        return [one.rank for one in self.scheduler._registry.members.values() if one.over]

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self.scheduler.close()
        self._selector.close()
        self._port.release()


def test_hundreds_of_workers_that_come_back_at_once_are_heard_in_a_few_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, turns, asked = 300, 20, list[Process]()
    one = Return(tmp_path, workers, monkeypatch)
    monkeypatch.setattr(one.scheduler, "_runs", asked.append)
    one.come(*range(workers))
    for _ in range(turns):
        one.turn(0.05)
        one.answer()
    assert len(one.there) == workers
    assert one.dead == []
    looks = turns * 0.05 / module.LOOK_S + 1
    assert len(asked) <= looks * workers, "and no application makes all others be looked at"
    one.close()


@pytest.mark.parametrize("own_time", [True, False])
def test_a_scheduler_that_was_stopped_declares_nobody_dead_who_has_come_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_time: bool
) -> None:
    if not own_time:
        monkeypatch.setattr(OwnTime, "at", lambda _, now_mono_s: now_mono_s)
    one = Return(tmp_path, 4, monkeypatch)
    one.come(0, 1, 2, 3)
    one.turn(after_s=SILENCE_S + 1)
    assert one.dead == ([] if own_time else [0, 1, 2, 3])
    one.answer()
    one.turn()
    assert one.there == ([0, 1, 2, 3] if own_time else [])
    one.close()


def test_who_stays_silent_while_the_scheduler_listens_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Return(tmp_path, 2, monkeypatch)
    one.come(0)
    for _ in range(int(SILENCE_S / 0.5)):
        assert one.dead == []
        one.turn(after_s=0.5)
        one.answer()
    assert (one.there, one.dead) == ([0], [1])
    one.close()


def test_a_scheduler_that_writes_for_seconds_again_and_again_beats_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, write_s = Return(tmp_path, 2, monkeypatch), 0.7 * membership.SILENT_S
    one.come(0, 1)
    one.turn()
    one.answer()
    one.turn()
    assert one.there == [0, 1]
    said_s = [one.now_s]
    monkeypatch.setattr(module, "Beat", lambda: said_s.append(one.now_s) or Beat())
    for _ in range(100):
        one.turn(0.1)

    def write(_: KeptCluster) -> None:
        one.now_s += write_s

    monkeypatch.setattr(one.state, "write", write)
    for _ in range(5):
        one.scheduler._keep()
    one.turn()
    pauses_s = [after_s - before_s for before_s, after_s in itertools.pairwise(said_s)]
    assert max(pauses_s) == pytest.approx(write_s + BEAT_S, abs=BEAT_S)
    assert max(pauses_s) < membership.SILENT_S
    for link in one.links.values():
        assert {message["kind"] for message in Lines().feed(link.recv(65536))} == {"Admission", "Beat"}
    one.close()


def test_nothing_is_done_for_a_connection_whose_peer_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Return(tmp_path, 2, monkeypatch)
    one.come(0)
    one.links[0].close()
    one.turn()
    assert one.scheduler._strangers == []
    one.come(0, 1)
    one.turn()
    one.answer()
    one.links[0].close()
    one.turn()
    assert one.there == [1], "its application came, and it does not wait for the answer"
    one.close()


def test_a_name_that_changes_hands_between_two_looks(rig: Rig) -> None:
    rig.apply("1", pid=1)
    rig.scheduler._head.take_over(3, 7)
    assert rig.scheduler._head.core.place(1) is RankPlace.RUNNING
    assert rig.apply("1")[0]["rank"] == 1
    assert rig.scheduler._head.core.place(1) is RankPlace.ABSENT, "the end of the process before it is heard of"


def test_a_worker_that_was_done_is_admitted_again_where_all_ranks_begin_once_more(rig: Rig) -> None:
    """A rank has died after it: where the script has no training loop, nobody knows that it was at the end, too."""
    link, lines, nonce = rig.connect()
    rig.send(link, nonce, rig.application("1", pid=1))
    rig.answers(link, lines)
    rig.apply("0", pid=1)
    rig.scheduler._head.take_over(3, 7)
    send(link, to_message(Done(3)))
    rig.answers(link, lines)
    assert rig.apply("1")[0]["done"]
    for _ in range(2):
        looks(rig)
    assert rig.scheduler._head.core.place(1) is RankPlace.ABSENT, "rank 0 has ended"
    kept = json.loads((rig.cluster.path / "cluster" / "state.json").read_text())
    assert not kept["members"]["1"]["done"], "the next scheduler has to know it as well"
    assert rig.apply("1")[0]["rank"] == 1


def train(rig: Rig, monkeypatch: pytest.MonkeyPatch, runs: bool = False) -> list[tuple[socket.socket, Lines]]:
    """Both ranks, in two processes that end at once, unless they run; no turn has been taken since."""
    monkeypatch.setattr(process_id, "runs", lambda *_: True)
    links = [meet(rig, rank) for rank in range(2)]
    rig.scheduler._head.take_over(3, 7)
    monkeypatch.setattr(process_id, "runs", lambda *_: runs)
    return links


def test_workers_that_have_ended_while_the_scheduler_was_stopped_are_heard_out(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The select that it was stopped in has seen nothing of what they have said since."""
    for rank, (link, _) in enumerate(train(rig, monkeypatch)):
        for said in (Over(rank), Done(3)):
            send(link, to_message(said))
        link.close()
    looks(rig)
    rig.scheduler._turn(0.0)
    assert rig.scheduler._result == Stop(None)


def test_how_a_rank_has_ended_is_heard_though_its_supervisor_has_ended_since(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = train(rig, monkeypatch)
    heard = list[Event]()
    monkeypatch.setattr(rig.scheduler._head, "hear", heard.append)
    end = Ended(1, 1, raised="ImportError: x", lasting=True)
    send(links[1][0], to_message(end))
    looks(rig)
    assert heard == [end, Gone(0), Gone(1)]


def test_a_name_whose_process_has_just_said_that_it_is_done_does_not_change_hands(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = train(rig, monkeypatch)
    send(links[1][0], to_message(Done(3)))
    another = Applicant("1", rig.scheduler._host, 7, 1, 2, None, "")
    first, then = rig.scheduler._verdict(another), rig.scheduler._verdict(another)
    assert isinstance(first, Rejected)
    assert isinstance(then, Rejected)
    assert (first.later, then.done) == (True, True)


def test_a_name_is_free_once_the_rank_of_a_worker_that_has_ended_has_ended_as_well(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies with its supervisor, but may hang in a file system for long."""
    links = train(rig, monkeypatch)
    running = {70}
    monkeypatch.setattr(process_id, "runs", lambda pid, _: pid in running)
    send(links[1][0], to_message(RankRuns(70, 9)))
    another = Applicant("1", rig.scheduler._host, 7, 1, 2, None, "")
    looks(rig)
    assert [rig.scheduler._head.core.place(rank) for rank in range(2)] == [RankPlace.ABSENT, RankPlace.RUNNING]
    refused = rig.scheduler._verdict(another)
    assert isinstance(refused, Rejected)
    assert refused.later
    golden.says(refused.why)
    running.clear()
    looks(rig)
    assert rig.scheduler._head.core.place(1) is RankPlace.ABSENT
    assert rig.scheduler._verdict(another) == Admitted("1", 1, anew=True)


def test_a_worker_of_another_version_is_told_what_to_do_and_the_log_says_it_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        link, lines, nonce = rig.connect()
        application = {"version": PROTOCOL + 1, "name": "0", "pid": 7}  # what else it says there is not known
        rig.send(link, nonce, application)
        (answer,) = rig.answers(link, lines)
        assert (answer["kind"], answer["later"], answer["done"]) == ("Rejected", False, False)
    assert rig.scheduler._registry.members == {}
    golden.says([answer["why"], *caplog.messages])


def test_what_a_worker_says_that_is_not_understood_is_told_once_though_it_comes_again(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        link, lines, nonce = rig.connect()
        rig.send(link, nonce, rig.application("0"))
        rig.answers(link, lines)
        send(link, {"kind": "Ready"})
        assert rig.answers(link, lines) == [{"closed": True}]
    (line,) = [one for one in caplog.messages if "not understood" in one]
    golden.says(line.replace(str(os.getpid()), "PID"))


def test_a_stranger_is_told_of_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        link, lines, _ = rig.connect()
        link.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert rig.answers(link, lines) == [{"closed": True}]
        assert rig.apply("1", token="guessed") == [{"closed": True}]
    golden.says("\n".join(caplog.messages))


@pytest.mark.parametrize("limit_bytes", [STRANGER_LINE_BYTES_MAX, LINE_BYTES_MAX])
def test_strangers_take_little_memory(rig: Rig, monkeypatch: pytest.MonkeyPatch, limit_bytes: int) -> None:
    """The other limit is the negative control."""
    monkeypatch.setattr(module, "STRANGER_LINE_BYTES_MAX", limit_bytes)
    link, lines, _ = rig.connect()
    link.sendall(b"x" * 2 * STRANGER_LINE_BYTES_MAX)
    assert rig.answers(link, lines) == ([{"closed": True}] if limit_bytes == STRANGER_LINE_BYTES_MAX else [])


def test_a_worker_may_say_more_than_a_stranger(rig: Rig) -> None:
    link, lines, nonce = rig.connect()
    rig.send(link, nonce, rig.application("0"))
    rig.answers(link, lines)
    send(link, to_message(Leaving(OWN, 7, "x" * 2 * STRANGER_LINE_BYTES_MAX)))
    assert rig.answers(link, lines) == []


def test_a_mistake_of_the_schedulers_own_is_not_taken_for_a_workers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    link, lines, nonce = rig.connect()
    rig.send(link, nonce, rig.application("0"))
    rig.answers(link, lines)
    caplog.clear()
    for mistake in (KeyError(7), FormatError("of a file")):
        monkeypatch.setattr(rig.scheduler._head, "hear", raises(mistake))
        send(link, to_message(Begun(OWN)))
        with pytest.raises(type(mistake)):
            rig.answers(link, lines)
    assert caplog.messages == []


def raises(mistake: Exception) -> Callable[[object], None]:
    def act(_: object) -> None:
        raise mistake

    return act


def test_no_generation_begins_before_that_is_kept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(head, "mono_s", lambda: now_s[0])
    workers = []
    for rank in range(2):
        workers.append(meet(rig, rank))
    monkeypatch.setattr(rig.scheduler, "_runs", lambda _: True)
    caplog.clear()
    with monkeypatch.context() as patched:
        patched.setattr(rig.state, "write", no_room)
        for link, lines in workers:
            send(link, to_message(Ready(OWN)))
            assert rig.answers(link, lines) == []
        for _ in range(3):
            now_s[0] += KEEP_AGAIN_S
            rig.scheduler._head.tick()
            assert rig.answers(*workers[0]) == []
    assert rig.state._read().generation == -1
    now_s[0] += KEEP_AGAIN_S
    rig.scheduler._head.tick()
    assert rig.state._read().generation == 0
    assert [[one["kind"] for one in rig.answers(*worker)] for worker in workers] == [["Enter"], ["Enter"]]
    golden.says("\n".join(caplog.messages))


def test_a_scheduler_may_open_as_many_files_as_it_has_workers(rig: Rig) -> None:
    """It ends at once here, since the address is taken."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    try:
        with pytest.raises(LastWordsError):
            schedule(dataclasses.replace(rig.cluster, workers=few))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limits[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
