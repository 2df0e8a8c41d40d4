"""Incidents reach commands and URLs, and whatever these do, whoever tells of an incident waits for nothing."""

from __future__ import annotations

import http.server
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lastwords.controller import teller, timeline
from lastwords.controller.storage import StorageJobs
from lastwords.errors import ConfigError
from tests import golden
from tests.controller.test_state_file import spec_of

RECORD = json.dumps({"job": "digits", "incident": 1, "outcome": "SAVED", "events": []}).encode()
SECRET = "T0P-SECRET"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(teller, "LIMIT_S", 0.3)
    monkeypatch.setattr(teller, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(teller, "OUTPUT_S", 5.0)
    caplog.set_level(logging.INFO)


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Answers with these codes in turn, 0 for none at all, and keeps what was posted."""

    codes: ClassVar[list[int]] = []
    posted: ClassVar[list[tuple[str, str | None, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.posted.append((self.path, self.headers["Content-Type"], body))
        if code := self.codes.pop(0):
            self.send_response(code)
            self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def endpoint(*codes: int) -> Iterator[str]:
    Endpoint.codes, Endpoint.posted = [*codes], []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/{SECRET}"
        server.shutdown()
        thread.join()


# ---------------------------------------------------------------------- a command


def test_a_command_gets_the_record_and_the_log_its_output(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    teller.run(f"cat > {tmp_path}/got; echo told; echo oops >&2", RECORD)
    assert (tmp_path / "got").read_bytes() == RECORD
    golden.says(caplog.messages)


@pytest.mark.parametrize("command", ["exit 3", "/no/such/command --now", "kill -9 $$", "("])
def test_a_command_that_fails_is_said_once(command: str, caplog: pytest.LogCaptureFixture) -> None:
    teller.run(command, RECORD)
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    golden.says(said.getMessage())


def test_a_command_that_hangs_is_killed_with_what_it_has_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    never, alive = tmp_path / "never", tmp_path / "alive"
    os.mkfifo(never)
    os.mkfifo(alive)
    with open(os.open(alive, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as reader:
        teller.run(f"exec 3> {alive}; sh -c 'echo begun; cat {never}' & cat {never}", RECORD)
        os.set_blocking(reader.fileno(), True)
        assert reader.read() == b"", "it ends when the last of them has ended"
    begun, said = caplog.messages
    assert begun.endswith("begun")
    golden.says(said)


def test_a_command_that_floods_its_output_ends_and_the_log_has_the_beginning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(teller, "LIMIT_S", 60.0)
    teller.run("yes | head -c 20000000", RECORD)
    assert len(caplog.messages) == teller.OUTPUT_LINES_MAX + 1
    assert caplog.messages[-1].endswith(f" {20_000_000 - 2 * teller.OUTPUT_LINES_MAX} more bytes")


def test_what_a_command_leaves_behind_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(teller, "OUTPUT_S", 0.0)
    os.mkfifo(tmp_path / "gate")
    teller.run(f"(cat {tmp_path}/gate; echo late > {tmp_path}/late) & exit 0", RECORD)
    assert not caplog.messages, "it was not killed, nor waited for"
    (tmp_path / "gate").write_text("go on")
    while not (tmp_path / "late").exists():
        pass


# ---------------------------------------------------------------------- a URL


def test_the_record_is_posted() -> None:
    with endpoint(204) as url:
        teller.post(url, RECORD)
    assert Endpoint.posted == [(f"/{SECRET}", "application/json", RECORD)]


def test_what_may_pass_is_tried_three_times_and_then_said_without_the_path(caplog: pytest.LogCaptureFixture) -> None:
    with endpoint(503, 0, 429) as url:
        teller.post(url, RECORD)
    assert len(Endpoint.posted) == 3
    assert SECRET not in caplog.text
    golden.says(caplog.messages)


def test_a_try_that_succeeds_is_the_last(caplog: pytest.LogCaptureFixture) -> None:
    with endpoint(500, 200, 500) as url:
        teller.post(url, RECORD)
    assert len(Endpoint.posted) == 2
    assert not caplog.messages


def test_what_is_refused_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with endpoint(404, 200) as url:
        teller.post(url, RECORD)
    assert len(Endpoint.posted) == 1
    golden.says(caplog.messages)


def test_a_server_that_never_answers_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(teller, "TRY_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        teller.post(f"http://127.0.0.1:{silent.getsockname()[1]}/{SECRET}", RECORD)
    golden.says(caplog.messages)


def test_whatever_takes_too_long_is_left_and_whatever_fails_is_said(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    teller.within(0.05, "nothing was told", done.wait)
    teller.within(5.0, "nothing was told", lambda: int("x"))
    done.set()
    golden.says(caplog.messages)


@pytest.mark.parametrize("target", ["https://", "http://host:99999/", "https://user:pw@host/", "https://a b/"])
def test_a_url_that_cannot_work_is_refused_at_the_start(target: str) -> None:
    with golden.raises(ConfigError):
        timeline.check_target(target)


@pytest.mark.parametrize(
    "target", ["", "./page.sh", "https://hooks.example.org/T0", "HTTP://[::1]:80/x", "curl https://"]
)
def test_what_may_work_is_taken(target: str) -> None:
    timeline.check_target(target)


# ---------------------------------------------------------------------- whoever starts it


def test_the_record_is_written_before_it_is_told_and_a_failure_to_tell_is_not_the_next_ones(tmp_path: Path) -> None:
    path, seen = tmp_path / "logs" / "incidents.jsonl", []

    def tell(line: str) -> None:
        seen.append((line, path.read_text().splitlines()[-1]))
        raise ValueError("a mistake")

    jobs = StorageJobs(spec_of(tmp_path), lambda event: None, tell=tell)
    jobs.record(path, "one")
    jobs.record(path, "two")
    assert jobs.wait_idle(30.0)
    assert seen == [("one", "one"), ("two", "two")]


def test_an_incident_is_told_even_if_the_record_cannot_be_written(tmp_path: Path) -> None:
    seen: list[str] = []
    jobs = StorageJobs(spec_of(tmp_path), lambda event: None, tell=seen.append)
    jobs.record(Path("/proc/nowhere/lines"), "one")
    assert jobs.wait_idle(60.0)
    assert seen == ["one"]


def test_telling_returns_while_the_command_runs_and_never_has_too_many(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeline, "TELLERS_MAX", 1)
    os.mkfifo(tmp_path / "gate")
    steps = "cat gate > /dev/null", "cat > part", "env > env", "mv part got"
    command = f"cd {tmp_path}; {'; '.join(steps)}"
    environ = {**os.environ, timeline.VARIABLE: command, "LASTWORDS_TOKEN": SECRET}
    one = timeline.Telling(environ)
    one.tell(RECORD.decode())
    one.tell("{}")
    golden.says(caplog.messages)
    (tmp_path / "gate").write_text("go on")  # only now: `tell` has returned before
    (process,) = one._running
    assert process.wait(60) == 0
    assert (tmp_path / "got").read_bytes() == RECORD + b"\n"
    assert SECRET not in (tmp_path / "env").read_text()


def test_without_the_variable_no_process_is_started() -> None:
    one = timeline.Telling({})
    one.tell("{}")
    assert not one._running


def test_where_no_process_can_be_started_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    timeline.Telling({timeline.VARIABLE: "true"}).tell("{}")
    golden.says(caplog.messages)
