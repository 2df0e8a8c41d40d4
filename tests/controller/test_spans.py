"""An incident as OpenTelemetry's tools get it, with the exporter in memory that it brings for tests."""

from __future__ import annotations

import doctest
import http.server
import importlib.util
import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from lastwords.controller import teller, timeline
from tests import golden
from tests.page.test_incidents import RECOVERED, SAVED

NOT_SAVED = {**SAVED, "outcome": "NOT_SAVED", "path": "", "reason": "no space left"}
HAS_SDK = importlib.util.find_spec("opentelemetry") is not None and importlib.util.find_spec("opentelemetry.sdk")
SDK = pytest.mark.skipif(not HAS_SDK, reason="lastwords[otel] is not installed")


def exported(record: dict[str, Any]) -> list[Any]:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    teller.export(json.dumps(record).encode(), exporter)
    return list(exporter.get_finished_spans())


@SDK
def test_an_incident_is_one_span_with_a_child_for_each_phase() -> None:
    *children, whole = exported(SAVED)
    known_ns = SAVED["known_wall_ns"]
    assert (whole.name, whole.parent) == ("incident", None)
    assert (whole.start_time, whole.end_time) == (known_ns, known_ns + 80_000_000)
    assert [(child.name, child.start_time - known_ns, child.end_time - known_ns) for child in children] == [
        ("settle", 0, 5_000_000), ("choose", 5_000_000, 10_000_000),
        ("write", 10_000_000, 60_000_000), ("publish", 60_000_000, 70_000_000),
    ]  # fmt: skip
    assert {child.parent.span_id for child in children} == {whole.context.span_id}
    assert whole.attributes["lastwords.outcome"] == "SAVED"
    assert whole.attributes["lastwords.cause_ranks"] == (1,)
    assert whole.status.is_ok
    assert whole.resource.attributes["service.name"] == "lastwords"


@SDK
def test_a_recovery_is_in_the_trace_of_its_incident_and_in_no_others() -> None:
    *children, recovery = exported(RECOVERED)
    assert [child.name for child in children] == ["restart", "resume"]
    (*_, incident), (*_, other) = exported(SAVED), exported({**SAVED, "incident": 2})
    assert recovery.context.trace_id == incident.context.trace_id != other.context.trace_id
    assert recovery.context.span_id != incident.context.span_id
    assert 0 < recovery.end_time - recovery.start_time < 10**9


@SDK
def test_an_incident_that_was_not_saved_is_an_error() -> None:
    *_, whole = exported(NOT_SAVED)
    assert not whole.status.is_ok
    assert whole.status.description == "no space left"


class Refusing:
    """A collector that takes nothing."""

    def export(self, _: Any) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        return SpanExportResult.FAILURE

    def shutdown(self) -> None: ...


@SDK
def test_spans_that_are_not_taken_are_an_error() -> None:
    with golden.raises(RuntimeError):
        teller.export(json.dumps(SAVED).encode(), Refusing())  # type: ignore[arg-type]


@pytest.mark.ci
@SDK
def test_the_process_that_tells_sends_them_over_http() -> None:
    bodies: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.path.encode() + self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        environ = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        command = [sys.executable, "-P", "-m", "lastwords.controller.teller"]
        done = subprocess.run(
            command, input=json.dumps(SAVED).encode(), env=environ, capture_output=True, timeout=120, check=True
        )
        server.shutdown()
        thread.join()
    assert (done.stdout, done.stderr) == (b"", b"")
    (body,) = bodies
    assert body.startswith(b"/v1/traces")
    assert b"settle" in body


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "TRUE"}, False),
    ],
)
def test_spans_are_sent_where_the_environment_names_a_collector_and_the_library_is_there(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], wanted: bool
) -> None:
    monkeypatch.setattr(timeline.importlib.util, "find_spec", lambda name: name)
    assert timeline.wants_spans(environ) is wanted
    monkeypatch.setattr(timeline.importlib.util, "find_spec", lambda name: None)
    assert not timeline.wants_spans(environ)


def test_the_examples_hold() -> None:
    assert doctest.testmod(teller).failed == 0
    assert doctest.testmod(timeline).failed == 0
