"""`lastwords serve` as a process: beside a job that is killed, with many browsers, and with what it must not answer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastwords.page.watch import STREAMS_MAX
from tests.integration.plan import Fault, Layout
from tests.integration.rig import Rig
from tests.integration.served import SECRET, TOKEN, Events, Page, file_of, reading, served
from tests.integration.trouble import Trouble
from tests.page.fake_controller import FakeController, state_of
from tests.patience import until
from tests.selection import usually

pytestmark = pytest.mark.process

RANKS, BROWSERS, SECONDS = 1000, 20, 8
BYTES_PER_S_MAX = 10_000


@pytest.fixture
def fake() -> Iterator[FakeController]:
    with FakeController(state_of(8)).serving() as controller:
        yield controller


@pytest.fixture
def page(fake: FakeController) -> Iterator[Page]:
    with served("--controller", fake.address, env=TOKEN) as page:
        yield page


def test_a_job_that_is_killed_is_watched_from_before_its_start_until_after_its_end(rig: Rig) -> None:
    root = rig.directory / "checkpoints"
    with served(str(root)) as page, reading(page) as (events,):
        until(lambda: events.state and events.state["note"], "the reason why there is nothing to see")
        assert not events.state["live"]
        waits = Fault(1, 5, "forward", ("await:watched", "kill"))
        launch = rig.launch(Layout(epochs=3), faults=[waits])
        until(lambda: events.state["live"] and events.state["step"] == 4, "step 4")
        assert events.state["phase"].isalpha()
        assert "lastwords_controller_up 1.0" in page.ask("/metrics")[1].decode()
        (launch.directory / "mark-watched").touch()
        launch.finish()
        until(lambda: events.state["newest"] and not events.state["live"], "the end")
        assert events.state["step"], "what was known last stays there"
        assert [one["step"] for one in events.state["checkpoints"]] == [4]
        (incident,) = page.json("/incidents.json")
        assert (incident["outcome"], incident["cause"], incident["step"]) == ("SAVED", "death", 4)
        assert page.json(f"/incidents.json?after={incident['id']}") == []
        text = page.ask("/metrics")[1].decode()
        assert 'lastwords_incidents_total{cause="death",outcome="SAVED"} 1.0' in text
        assert "lastwords_controller_up 0.0" in text


@pytest.mark.thorough
def test_on_a_slow_disk_an_incident_is_seen_with_what_is_written(slow_rig: Rig) -> None:
    root = slow_rig.directory / "checkpoints"
    slow = Trouble(("write", "fsync"), "", 1000, 0.0, 600)
    env = slow.prepare(slow_rig.directory / "trouble", root)
    with served(str(root)) as page, reading(page) as (events,):
        dies = Fault(1, 5, "forward", ("await:watched", slow.action, "kill"))
        launch = slow_rig.launch(Layout(epochs=3), faults=[dies], env=env)
        until(lambda: events.state and events.state["live"] and events.state["step"] == 4, "step 4")
        (launch.directory / "mark-watched").touch()
        until(lambda: (events.state["open"] or {}).get("bytes"), "bytes that are written")
        assert events.state["phase"][1] == "X"
        assert [row["kind"] for row in events.state["odd"]][:1] == ["dead"]
        assert b"lastwords_incident_open 1.0" in page.ask("/metrics")[1]
        launch.finish()
        until(lambda: events.state["newest"] and not events.state["open"], "the end")


def test_a_controller_that_comes_back_is_seen(fake: FakeController, page: Page) -> None:
    with reading(page) as (events,):
        until(lambda: events.state and events.state["live"], "the controller")
        port = fake.port
        fake.stop()
        until(lambda: not events.state["live"], "its end")
        with FakeController(state_of(8, step=2000), port).serving():
            until(lambda: events.state["live"] and events.state["step"] == 2000, "the next one")


def test_with_many_browsers_the_controller_is_asked_once_a_second_and_each_gets_few_bytes(fake: FakeController) -> None:
    fake.state = state_of(RANKS)
    with served("--controller", fake.address, env=TOKEN) as page, reading(page, BROWSERS) as events:
        until(lambda: all(one.state and one.state["live"] for one in events), "the first looks")
        asked, read, began_s = fake.asked, [one.bytes_read for one in events], time.monotonic()
        for second in range(SECONDS):
            fake.state = state_of(RANKS, 1000 + second, seed=second)
            page.ask("/metrics")
            time.sleep(1.0)
        lasted_s = time.monotonic() - began_s
        assert fake.asked - asked <= lasted_s + 2
        per_s = [(one.bytes_read - before) / lasted_s for one, before in zip(events, read, strict=True)]
        assert 0 < min(per_s) <= max(per_s) < BYTES_PER_S_MAX, per_s
        assert all(one.kinds[0] == "state" and set(one.kinds[1:]) == {"diff"} for one in events)


def test_nobody_is_asked_while_nobody_looks(fake: FakeController, page: Page) -> None:
    with reading(page) as (events,):
        until(lambda: events.state and events.state["live"], "a look")
    until(lambda: b"lastwords_page_streams 0.0" in page.ask("/metrics")[1], "the browser's leaving")
    time.sleep(1.5)
    asked = fake.asked
    time.sleep(2.5)
    assert fake.asked == asked


def test_there_is_a_limit_on_browsers_and_who_leaves_makes_room(page: Page) -> None:
    with reading(page, STREAMS_MAX) as events:
        assert {one.status for one in events} == {200}
        assert Events(page).status == 503
        assert page.ask("/healthz")[0] == 200
        events[0].close()
        until(lambda: Events(page).status == 200, "room")


REFUSED = {
    "a strange host": ("GET", "/state.json", {"Host": "evil.example"}, 403),
    "a strange host of the page": ("GET", "/", {"Host": "evil.example:8090"}, 403),
    "POST": ("POST", "/state.json", {}, 405),
    "HEAD of a stream": ("HEAD", "/events", {}, 405),
    "a file beside the page": ("GET", "/../server.py", {}, 404),
    "no number": ("GET", "/incidents.json?after=x", {}, 400),
    "a long number": ("GET", f"/incidents.json?after={'9' * 5000}", {}, 400),
    "a rank beyond": ("GET", "/state.json?rank=99999", {}, 200),
}


def test_what_is_refused(page: Page) -> None:
    statuses = {name: page.ask(path, headers, method)[0] for name, (method, path, headers, _) in REFUSED.items()}
    assert statuses == {name: status for name, (_, _, _, status) in REFUSED.items()}
    assert page.ask("/state.json", {"Host": "localhost:9999"})[0] == 200


def test_with_a_token_nothing_of_the_job_is_told_without_it(fake: FakeController, tmp_path: Path) -> None:
    with served("--controller", fake.address, "--token-file", file_of(tmp_path, f"{SECRET}\n"), env=TOKEN) as page:
        for path in ("/events", "/state.json", "/incidents.json", "/metrics"):
            for given in ({}, {"Authorization": f"Bearer {SECRET}x"}, {"Authorization": SECRET}):
                assert page.ask(path, given)[0] == 401
        assert page.ask("/state.json", {"Authorization": f"Bearer {SECRET}"})[0] == 200
        assert page.ask("/")[0] == page.ask("/healthz")[0] == 200


WRONG = {
    "no token off loopback": (["--http", "0.0.0.0:18090"], 2, "--token-file"),
    "a short token": (["--token-file", "TOKEN"], 2, "256"),
    "no file with a token": (["--token-file", "/nowhere"], 2, "/nowhere"),
    "no address": (["--http", "8090"], 2, "8090"),
    "an address elsewhere": (["--http", "192.0.2.1:8090"], 2, "192.0.2.1"),
    "no address of a controller": (["--controller", "here"], 2, "HOST:PORT"),
    "a file as PATH": (["TOKEN"], 4, "token"),
    "a port in use": (["--http", "127.0.0.1:IN_USE"], 2, "--http"),
}


def run(*arguments: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    code = f"import sys; {before}; from lastwords.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", usually(WRONG, {"no token off loopback", "a port in use", "a file as PATH"}))
def test_it_does_not_start_and_says_why_with(name: str, tmp_path: Path) -> None:
    arguments, code, word = WRONG[name]
    with socket.create_server(("127.0.0.1", 0)) as other:
        places = {"TOKEN": file_of(tmp_path, "short"), "IN_USE": str(other.getsockname()[1])}
        for place, value in places.items():
            arguments = [argument.replace(place, value) for argument in arguments]
        done = run(*arguments)
    assert (done.returncode, word in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_extra_it_says_what_to_install() -> None:
    done = run(before="sys.modules['starlette'] = None")
    assert done.returncode == 2
    assert "lastwords[page]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_browser_that_does_not_read_harms_nobody(fake: FakeController, page: Page) -> None:
    fake.state = state_of(RANKS)
    with socket.create_connection(("127.0.0.1", page.port)) as deaf, reading(page) as (events,):
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        deaf.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: len(events.kinds) >= 3, "what the other one gets")


def test_it_ends_by_a_signal_though_browsers_are_connected(page: Page) -> None:
    with reading(page) as (events,):
        until(lambda: events.state, "a state")
        page.process.terminate()
        until(lambda: page.process.poll() is not None, "its end")
    assert os.path.exists(f"/proc/{page.process.pid}") is False
