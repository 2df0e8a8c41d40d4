"""A rank's session against a real gRPC server: what gets through, what survives a break, what ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from lastwords import descriptors
from lastwords.controller.events import ControllerOptions
from lastwords.controller.sessions import PeerSession, SessionService
from lastwords.processor import session as session_module
from lastwords.processor.events import ProcessorOptions
from lastwords.processor.session import BACKOFF_MAX_S, OUTBOX_REPORTS_MAX, Session
from lastwords.transport import Keepalive, grpc, server_options
from lastwords.vocabulary import (
    Freeze,
    Goodbye,
    Hello,
    Order,
    PeerDied,
    Phase,
    ProcessId,
    Report,
    Settled,
    Stand,
    Status,
    Welcome,
)
from tests import golden
from tests.integration.harness import free_port
from tests.patience import until

TOKEN = "s3cret"
WAIT_S = 10.0
UNANSWERED_S = ProcessorOptions().unanswered_s


class Controller:
    """A real SessionService in a loop of its own, that notes what it hears and says what it is told to."""

    def __init__(self, port: int, token: str = TOKEN, keepalive: Keepalive | None = None, job: str = "digits") -> None:
        self.heard: queue.Queue[Report] = queue.Queue()
        self.messages: queue.Queue[int] = queue.Queue()
        self.closed: queue.Queue[PeerSession] = queue.Queue()
        self.sessions: list[PeerSession] = []
        self.asked: queue.Queue[bool] = queue.Queue()
        self.port = port
        self._token = token
        self._job = job
        self._keepalive = keepalive or Keepalive(0.8, 1.0)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()

    def on_reports(self, session: PeerSession, reports: Sequence[Report]) -> None:
        if session not in self.sessions:
            self.sessions.append(session)
        self.messages.put(len(reports))
        for report in reports:
            self.heard.put(report)

    def on_closed(self, session: PeerSession) -> None:
        self.closed.put(session)

    def state(self, *, with_ranks: bool) -> bytes:
        self.asked.put(with_ranks)
        return b""

    def say(self, rank: int, order: Order) -> None:
        self.loop.call_soon_threadsafe(self.sessions[-1].push, rank, order)

    def cut(self) -> None:
        self.loop.call_soon_threadsafe(self.sessions[-1].cancel)

    def hear(self, kind: type[Report]) -> Any:
        deadline = time.monotonic() + WAIT_S
        while True:
            report = self.heard.get(timeout=max(0.0, deadline - time.monotonic()))
            if isinstance(report, kind):
                return report

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._serve())
        finally:
            self.loop.close()

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        server = grpc.aio.server(options=server_options(self._keepalive))
        SessionService(self._token, self._job, self).register(server)
        assert server.add_insecure_port(f"127.0.0.1:{self.port}") == self.port
        await server.start()
        self._ready.set()
        await self._end.wait()
        await server.stop(0)

    def __enter__(self) -> Controller:
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join(WAIT_S)


class Rank:
    """A session with call-backs that note what happened."""

    def __init__(
        self,
        port: int,
        rank: int = 1,
        token: str = TOKEN,
        on_order: Callable[[Order], None] | None = None,
        *,
        wanted: bool = True,
    ):
        self.rank, self.port = rank, port
        self.hellos: queue.Queue[None] = queue.Queue()
        self.orders: queue.Queue[Order] = queue.Queue()
        self.ups: queue.Queue[None] = queue.Queue()
        self.downs: queue.Queue[bool] = queue.Queue()
        self.refusals: queue.Queue[str] = queue.Queue()
        self.stand = Stand(Phase.COMPUTING, 0)
        self.session = Session(
            f"127.0.0.1:{port}",
            token,
            "digits",
            rank,
            on_order=on_order or self.orders.put,
            on_up=lambda: self.ups.put(None),
            on_down=lambda: self.downs.put(True),
            on_refused=self.refusals.put,
            hello=self.hello,
            wanted=lambda: wanted,
            jitter=random.Random(7),
        )
        self.session.start()

    def hello(self) -> Hello:
        self.hellos.put(None)
        return Hello(self.rank, 0, 4, ProcessId("host", 1, 1, "n"), ("replicated",), self.stand)

    def close(self) -> None:
        self.session.close(WAIT_S)


@pytest.fixture
def controller() -> Iterator[Controller]:
    with Controller(free_port()) as running:
        yield running


@pytest.fixture
def rank(controller: Controller) -> Iterator[Rank]:
    with contextlib.closing(Rank(controller.port)) as running:
        running.ups.get(timeout=WAIT_S)
        yield running


def test_a_session_begins_with_hello_and_carries_reports_and_orders(controller: Controller, rank: Rank) -> None:
    assert controller.hear(Hello) == rank.hello()
    rank.session.send(Status(1, 0, Stand(Phase.READY, 1)))
    assert controller.hear(Status).stand == Stand(Phase.READY, 1)
    controller.say(1, Welcome(0))
    assert rank.orders.get(timeout=WAIT_S) == Welcome(0)


def test_orders_for_another_rank_of_the_session_are_not_taken(controller: Controller, rank: Rank) -> None:
    controller.hear(Hello)
    controller.say(2, Freeze(0, 1, "for rank 2"))
    controller.say(1, Freeze(0, 2, "for rank 1"))
    order = rank.orders.get(timeout=WAIT_S)
    assert isinstance(order, Freeze)
    assert order.incident == 2
    assert rank.orders.empty()


def test_a_broken_session_comes_back_with_a_fresh_hello(controller: Controller, rank: Rank) -> None:
    controller.hear(Hello)
    rank.stand = Stand(Phase.COMPUTING, 9)
    controller.cut()
    rank.downs.get(timeout=WAIT_S)
    rank.ups.get(timeout=WAIT_S)
    assert controller.hear(Hello).stand == Stand(Phase.COMPUTING, 9)
    rank.session.send(Goodbye(1, 0))
    assert controller.hear(Goodbye) == Goodbye(1, 0)


def look(rank: Rank, seconds: float, *, asks: bool) -> None:
    """For so long the rank looks, and hears no word."""
    for tenths in range(round(seconds * 10) + 1):
        rank.session.ask_if_silent(asks, tenths / 10)


def test_a_controller_is_asked_after_a_silence_by_who_has_something_to_say(controller: Controller, rank: Rank) -> None:
    look(rank, UNANSWERED_S - 0.1, asks=True)
    look(rank, 100.0, asks=False)
    rank.session.send(Status(1, 0, Stand(Phase.READY, 1)))
    controller.hear(Status)
    assert controller.asked.empty()
    rank.session.ask_if_silent(True, 100.0)
    with_ranks = controller.asked.get(timeout=WAIT_S)
    assert not with_ranks
    assert rank.session.up
    assert rank.downs.empty()


def test_a_session_whose_controller_hangs_is_given_up_and_comes_back_with_it(
    controller: Controller, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transport goes on: pings are answered, and connections are taken, but no call."""
    monkeypatch.setattr(session_module, "ANSWER_S", 0.5)
    goes_on = threading.Event()
    controller.loop.call_soon_threadsafe(goes_on.wait)
    try:
        look(rank, UNANSWERED_S, asks=True)
        rank.downs.get(timeout=WAIT_S)
        assert not rank.session.up
        assert rank.ups.empty()
    finally:
        goes_on.set()
    rank.ups.get(timeout=WAIT_S)


def test_a_session_that_cannot_be_written_to_is_ended_and_comes_back(controller: Controller, rank: Rank) -> None:
    class Broken:
        async def write(self, _message: bytes) -> None:
            raise OSError("no way out")

    controller.hear(Hello)
    controller.sessions[-1]._context = Broken()
    controller.say(1, Welcome(0))
    rank.downs.get(timeout=WAIT_S)
    rank.ups.get(timeout=WAIT_S)
    controller.hear(Hello)
    controller.say(1, Welcome(0))
    assert rank.orders.get(timeout=WAIT_S) == Welcome(0)


def test_it_comes_back_within_the_time_that_makes_a_lost_session_a_death(controller: Controller, rank: Rank) -> None:
    controller.hear(Hello)
    for _ in range(5):
        controller.cut()
        controller.hear(Hello)
    assert ControllerOptions().lost_confirm_s > BACKOFF_MAX_S


def test_a_session_waits_for_a_controller_that_starts_later() -> None:
    port = free_port()
    with contextlib.closing(Rank(port)) as rank:
        rank.session.send(PeerDied(1, 0, 2, source=1))  # type: ignore[arg-type]
        until(lambda: rank.session._failures)
        with Controller(port) as controller:
            rank.ups.get(timeout=WAIT_S)
            assert controller.hear(Hello).rank == 1
            assert controller.hear(PeerDied).dead_rank == 2
        assert rank.downs.get(timeout=WAIT_S)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_session_that_is_over_is_news_to_who_needs_one(
    controller: Controller, caplog: pytest.LogCaptureFixture, wanted: bool
) -> None:
    """At the end of a job, words such as "connect again" look like trouble to whoever logs INFO."""
    caplog.set_level(logging.DEBUG, "lastwords")
    with contextlib.closing(Rank(controller.port, wanted=wanted)) as rank:
        rank.ups.get(timeout=WAIT_S)
        controller.hear(Hello)
        controller.cut()
        rank.downs.get(timeout=WAIT_S)
        levels = [record.levelno for record in caplog.records if "is down" in record.getMessage()]
    assert levels == [logging.INFO if wanted else logging.DEBUG]


@pytest.mark.parametrize("wanted", [True, False])
def test_a_controller_that_is_not_there_is_news_to_who_needs_one(
    caplog: pytest.LogCaptureFixture, wanted: bool
) -> None:
    caplog.set_level(logging.DEBUG, "lastwords")
    with contextlib.closing(Rank(free_port(), wanted=wanted)) as rank:
        for _ in range(2):  # the second attempt begins once the first one's end is told
            rank.hellos.get(timeout=WAIT_S)
    levels = {record.levelno for record in caplog.records if record.name == "lastwords.processor.session"}
    assert levels == {logging.INFO if wanted else logging.DEBUG}


def test_a_controller_that_is_replaced_on_the_same_port_is_found_again() -> None:
    port = free_port()
    with contextlib.closing(Rank(port)) as rank:
        for _ in range(2):
            with Controller(port) as controller:
                rank.ups.get(timeout=WAIT_S)
                controller.hear(Hello)
            rank.downs.get(timeout=WAIT_S)


WITHOUT_DESCRIPTORS = """
import resource
from tests.integration.test_session import WAIT_S, Controller, Rank, free_port

rank = Rank(free_port())
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
for _ in range(3):  # the first connection needs files of its own
    rank.hellos.get(timeout=WAIT_S)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
for _ in range(4):
    rank.hellos.get(timeout=WAIT_S)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
with Controller(rank.port):
    rank.ups.get(timeout=WAIT_S)
    rank.close()
"""


@pytest.mark.ci
def test_a_rank_without_a_free_descriptor_survives_that_its_controller_is_gone() -> None:
    found = subprocess.run([sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr


FIRST_SESSION = """
import os, resource, sys
from lastwords.errors import UnavailableError, is_shortage
from tests.integration.test_session import Rank, free_port

free, port = int(sys.argv[1]), free_port()
lowest = os.dup(0)
os.close(lowest)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    rank = Rank(port)
except UnavailableError as error:
    assert is_shortage(error)
    sys.exit(str(error))
for _ in range(3):
    rank.hellos.get(timeout=30)
rank.close()
"""


@pytest.mark.ci
@pytest.mark.parametrize("free", range(8))
def test_a_first_session_without_enough_descriptors_is_an_error_and_no_abort(free: int) -> None:
    found = subprocess.run(
        [sys.executable, "-c", FIRST_SESSION, str(free)], capture_output=True, text=True, timeout=120
    )
    assert found.returncode == int(free < descriptors.GRPC_TAKES), found.stderr
    if found.returncode:
        golden.says(found.stderr.splitlines()[-1])


def test_a_wrong_token_is_told_once_and_ends_the_session(controller: Controller) -> None:
    with contextlib.closing(Rank(controller.port, token="guess")) as rank:
        reason = rank.refusals.get(timeout=WAIT_S)
        assert "token" in reason
        assert f"127.0.0.1:{controller.port}" in reason
        rank.session._thread.join(WAIT_S)
        assert not rank.session._thread.is_alive()
    assert controller.heard.empty()


def test_a_controller_of_another_job_refuses_even_where_the_token_is_the_same() -> None:
    with Controller(free_port(), job="words") as other, contextlib.closing(Rank(other.port)) as rank:
        reason = rank.refusals.get(timeout=WAIT_S)
        assert "job words" in reason
        assert "job digits" in reason
        assert other.heard.empty()


@pytest.mark.parametrize("foreign", [{"token": "another"}, {"job": "words"}], ids=["token", "job"])
def test_another_job_on_the_port_is_a_lost_controller_and_no_refusal(
    foreign: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The rank was welcome once: whoever refuses it now is not its controller, which may still come back."""
    caplog.set_level("WARNING", "lastwords")
    port = free_port()
    with contextlib.closing(Rank(port)) as rank:
        with Controller(port):
            rank.ups.get(timeout=WAIT_S)
        rank.downs.get(timeout=WAIT_S)
        with Controller(port, **foreign) as other:
            until(lambda: "serves another job" in caplog.text)
            assert caplog.text.count("serves another job") == 1
            assert other.heard.empty()
        with Controller(port):
            rank.ups.get(timeout=WAIT_S)
        assert rank.refusals.empty()


def test_something_that_is_no_controller_ends_the_session_with_a_reason() -> None:
    async def serve(port: int, up: threading.Event, end: threading.Event) -> None:
        server = grpc.aio.server(options=server_options(Keepalive(0.8, 1.0)))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        up.set()
        await asyncio.get_running_loop().run_in_executor(None, end.wait)
        await server.stop(0)

    port, up, end = free_port(), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve(port, up, end)))
    thread.start()
    try:
        assert up.wait(WAIT_S)
        with contextlib.closing(Rank(port)) as rank:
            assert "rejected rank 1" in rank.refusals.get(timeout=WAIT_S)
    finally:
        end.set()
        thread.join()


def test_close_delivers_what_was_sent_before_it(controller: Controller, rank: Rank) -> None:
    for dead in range(2, 200):
        rank.session.send(PeerDied(1, 0, dead, source=2))  # type: ignore[arg-type]
    rank.session.send(Goodbye(1, 0))
    rank.close()
    heard = []
    while not isinstance(report := controller.hear(object), Goodbye):  # type: ignore[arg-type]
        heard.append(report)
    assert [report.dead_rank for report in heard if isinstance(report, PeerDied)] == list(range(2, 200))
    assert not rank.session._thread.is_alive()
    assert controller.closed.get(timeout=WAIT_S)


def test_close_without_a_controller_is_over_at_once() -> None:
    rank = Rank(free_port())
    rank.session.send(Goodbye(1, 0))
    rank.close()
    assert not rank.session._thread.is_alive()


def test_only_the_newest_status_waits_while_nobody_listens() -> None:
    port = free_port()
    with contextlib.closing(Rank(port)) as rank:
        for step in range(1, 5001):
            rank.session.send(Status(1, 0, Stand(Phase.COMPUTING, step)))
            rank.session.send(Settled(1, 0, 1, step, Stand(Phase.COMPUTING, step)))
        with Controller(port) as controller:
            assert controller.hear(Status).stand.step == 5000
            assert controller.hear(Settled).sequence == 5000
            assert controller.heard.empty()


def test_an_outbox_that_nobody_empties_is_bounded_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with contextlib.closing(Rank(port)) as rank:
        for dead in range(OUTBOX_REPORTS_MAX + 5):
            rank.session.send(PeerDied(1, 0, dead, source=2))  # type: ignore[arg-type]
        assert caplog.text.count("does not receive reports") == 1
        with Controller(port) as controller:
            deaths = [controller.hear(PeerDied).dead_rank for _ in range(OUTBOX_REPORTS_MAX)]
    assert deaths == list(range(5, OUTBOX_REPORTS_MAX + 5))


def test_a_report_that_cannot_be_encoded_is_dropped_alone(controller: Controller, rank: Rank) -> None:
    rank.session.send(PeerDied(1, 0, -1, source=2))  # type: ignore[arg-type]
    rank.session.send(PeerDied(1, 0, 3, source=2))  # type: ignore[arg-type]
    assert controller.hear(PeerDied).dead_rank == 3


def test_a_call_back_that_fails_does_not_end_the_session(controller: Controller) -> None:
    seen: queue.Queue[Order] = queue.Queue()

    def fail(order: Order) -> None:
        seen.put(order)
        raise ZeroDivisionError("a mistake in the agent")

    with contextlib.closing(Rank(controller.port, on_order=fail)) as rank:
        for _ in range(2):
            rank.ups.get(timeout=WAIT_S)
            controller.hear(Hello)
            controller.say(1, Welcome(0))
            assert seen.get(timeout=WAIT_S) == Welcome(0)


def test_malformed_orders_are_dropped_and_the_session_goes_on(controller: Controller, rank: Rank) -> None:
    controller.hear(Hello)

    async def write_garbage() -> None:
        await controller.sessions[-1]._context.write(b"\xff\xff\xff garbage")

    asyncio.run_coroutine_threadsafe(write_garbage(), controller.loop).result(WAIT_S)
    controller.say(1, Welcome(0))
    assert rank.orders.get(timeout=WAIT_S) == Welcome(0)
    assert rank.downs.empty()


def test_an_answer_comes_while_hundreds_are_asked(controller: Controller, rank: Rank) -> None:
    """One of the two trips from known to decided; bench/incident.py measures how long that takes."""
    controller.hear(Hello)
    for step in range(1, 101):
        rank.session.send(Settled(1, 0, 1, step, Stand(Phase.COMPUTING, step)))
        controller.hear(Settled)
        controller.say(1, Freeze(0, step, ""))
        assert rank.orders.get(timeout=WAIT_S) == Freeze(0, step, "")
