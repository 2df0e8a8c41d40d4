"""`python -m lastwords.controller.teller`: tells of one incident, whose record (a line of JSON) is its standard input.

LASTWORDS_ON_INCIDENT is a command, which gets the record on its standard input, or a URL, to which it is posted. Where
OpenTelemetry's variables name a collector, the incident's spans go there as well. Nobody waits for this process, and
each thing that it does has a limit. What does not work is said in one line, without the URL: its path may be a secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lastwords import clock, log_lines, threads
from lastwords.controller.timeline import VARIABLE, in_memory, is_url, phases, wants_spans
from lastwords.errors import UnavailableError
from lastwords.liveness.parents import MEANT_FOR_RANKS
from lastwords.vocabulary import ExitKind

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


# An incident, or a recovery, as spans of OpenTelemetry: one for all of it, and one for each phase. Imports it late.
#
# All spans of one incident, and of the recovery that mends it, are of one trace, whose number follows from the record.

Attributes = Mapping[str, str | bool | int | list[int]]

ATTRIBUTES = ("job", "generation", "incident", "outcome", "step", "path", "reason", "cause_ranks", "bytes", "entry")
RECOVERED = "RECOVERED"


@dataclass(frozen=True, slots=True)
class Span:
    """begin_ns, end_ns: of the wall clock, since 1970."""

    name: str
    begin_ns: int
    end_ns: int
    attributes: Attributes


def spans_of(record: Mapping[str, Any], now_mono_s: float, now_wall_ns: int) -> list[Span]:
    """The span of all of it, and then those of its phases. record: a line of incidents.jsonl.

    now_mono_s, now_wall_ns: the same instant on both clocks, for a recovery, whose record has only the first.

    >>> record = {"outcome": "SAVED", "step": 7, "known_mono_s": 5.0, "known_wall_ns": 10**18,
    ...     "events": [{"what": "settled", "mono_s": 5.5}]}
    >>> [(span.name, span.begin_ns - 10**18, span.end_ns - 10**18) for span in spans_of(record, 6.0, 0)]
    [('incident', 0, 500000000), ('settle', 0, 500000000)]
    """
    recovered = record["outcome"] == RECOVERED
    zero_s = record["died_mono_s"] if recovered else record["known_mono_s"]
    wall_ns = record.get("known_wall_ns", now_wall_ns - int((now_mono_s - zero_s) * 1e9))
    events = sorted(record["events"], key=lambda event: event["mono_s"])

    def at_ns(mono_s: float) -> int:
        return int(wall_ns + round((mono_s - zero_s) * 1e9))

    end_s = max([zero_s, *(event["mono_s"] for event in events)])
    attributes = {f"lastwords.{name}": record[name] for name in ATTRIBUTES if name in record}
    whole = Span("recovery" if recovered else "incident", at_ns(zero_s), at_ns(end_s), attributes)
    found = phases(events, zero_s).items()
    return [whole, *(Span(name, at_ns(begin_s), at_ns(until_s), {}) for name, (begin_s, until_s) in found)]


def trace_number(record: Mapping[str, Any]) -> int:
    """128 bits, the same for an incident and its recovery, which has the incident's generation and number."""
    about = record.get("generation"), record.get("incident")
    text = str(about) if None not in about else json.dumps(record, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big") or 1


def export(line: bytes, exporter: SpanExporter | None = None) -> None:
    """Send the spans of one line of incidents.jsonl; exporter: default over HTTP, to where OTEL_EXPORTER_OTLP_* say.

    Blocks. Raises RuntimeError if they were not taken, ImportError where an exporter is missing.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.trace import Status, StatusCode, set_span_in_context

    if exporter is None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    record = json.loads(line)
    number = trace_number(record)

    class Numbers(RandomIdGenerator):  # type: ignore[misc]
        def generate_trace_id(self) -> int:
            return number

    class EndedSpans(SpanProcessor):  # type: ignore[misc]
        """The library's own would not say whether the spans were taken."""

        def on_end(self, span: Any) -> None:
            ended.append(span)

    ended: list[Any] = []
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or "lastwords"})
    provider = TracerProvider(resource=resource, id_generator=Numbers(), shutdown_on_exit=False)
    provider.add_span_processor(EndedSpans())
    tracer = provider.get_tracer("lastwords")
    whole, *parts = spans_of(record, clock.mono_s(), clock.wall_ns())
    top = tracer.start_span(whole.name, start_time=whole.begin_ns, attributes=dict(whole.attributes))
    for part in parts:
        child = tracer.start_span(part.name, set_span_in_context(top), start_time=part.begin_ns)
        child.end(part.end_ns)
    if record["outcome"] == ExitKind.NOT_SAVED.name:
        top.set_status(Status(StatusCode.ERROR, record["reason"]))
    top.end(whole.end_ns)
    taken = exporter.export(ended)
    exporter.shutdown()
    if taken is not SpanExportResult.SUCCESS:
        raise RuntimeError("the collector has not taken them")


_log = logging.getLogger("lastwords.controller.teller")

LIMIT_S = 30.0
"""Of a command, which is killed then; also of the spans."""

TRY_S = 10.0
PAUSES_S = (1.0, 4.0)
"""Of a post: how long each try may wait for the other side, and the pauses before the second and the third one."""

POST_LIMIT_S = 60.0
"""Of all its tries: another side that sends byte by byte keeps within TRY_S for ever."""

OUTPUT_BYTES_MAX, OUTPUT_LINES_MAX = 8192, 50
"""Of a command's output, that the log has of it; the rest is counted."""

OUTPUT_S = 1.0
"""How long the end of the output may take once the command has ended; what it has started may hold the pipe."""

NICE = 10
"""Ranks may be starting again."""

AGAIN = (408, 429)
"""Of the answers 400 to 499 those after which a try may succeed."""


def main() -> int:
    """Tell, and exit 0, whatever has come of it: nobody asks."""
    for number in MEANT_FOR_RANKS:
        signal.signal(number, signal.SIG_DFL)  # a controller ignores them, and a command would, too
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    text = logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(log_lines.formatter(text))
    logging.basicConfig(level=logging.INFO, handlers=[output], force=True)
    for library in ("opentelemetry", "urllib3", "requests"):
        logging.getLogger(library).setLevel(logging.CRITICAL)  # what fails is said here, once
    record, target = sys.stdin.buffer.read(), os.environ.get(VARIABLE, "")
    if is_url(target):
        within(POST_LIMIT_S, "the incident's record was not posted", lambda: post(target, record))
    elif target:
        run(target, record)
    if wants_spans(os.environ):
        from lastwords.controller import teller  # brings nothing by itself; `export` imports OpenTelemetry

        within(LIMIT_S, "the incident's spans were not sent", lambda: teller.export(record))
    return 0


def within(limit_s: float, what: str, act: Callable[[], object]) -> None:
    """Call `act` in a thread, and go on without it after `limit_s`."""

    def guarded() -> None:
        try:
            act()
        except Exception as error:  # outermost frame of a thread: a library's errors, whatever they are
            _log.warning("%s: %s: %s", what, type(error).__name__, error)

    try:
        thread = threads.start(guarded, name="lastwords-tell")
    except UnavailableError as error:
        return _log.warning("%s: %s", what, error)
    thread.join(limit_s)
    if thread.is_alive():
        _log.warning("%s: it has taken %g s", what, limit_s)


def run(command: str, record: bytes) -> None:
    """Give `record` to a command of the shell, as its standard input; its output goes to the log."""
    try:
        given = in_memory(record)
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(given)
    except OSError as error:
        return _log.warning("the command of %s was not started: %s", VARIABLE, error)
    assert process.stdout is not None
    shown = _Output(process.stdout)
    ended = os.pidfd_open(process.pid)
    in_time = shown.read_until(ended, LIMIT_S)
    if not in_time:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    shown.read_until(None, OUTPUT_S)
    os.close(ended)
    said = f"ended with {code}" if code else ""
    said = said if in_time else f"had not ended after {LIMIT_S:g} s and was killed"
    for line in shown.lines():
        _log.info("%s: %s", VARIABLE, line)
    if said:
        _log.warning("the command of %s %s", VARIABLE, said)


class _Output:
    """What a command writes: its beginning is kept, and the rest counted, so that it can always write on."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._kept = b""
        self._more_bytes = 0
        self._open = True

    def read_until(self, ended: int | None, limit_s: float) -> bool:
        """Read until `ended` (a pidfd) is ready, or, without one, until the pipe's end; False after `limit_s`.

        By this thread: where the system has none left, an incident is told all the same.
        """
        deadline_mono_s = clock.mono_s() + limit_s
        while self._open or ended is not None:
            watched = [*([self._pipe.fileno()] if self._open else []), *([ended] if ended is not None else [])]
            ready, _, _ = select.select(watched, [], [], max(0.0, deadline_mono_s - clock.mono_s()))
            if self._open and self._pipe.fileno() in ready:
                self._take()
            if ended in ready:
                return True
            if clock.mono_s() >= deadline_mono_s:
                return False
        return True

    def _take(self) -> None:
        data = os.read(self._pipe.fileno(), 65536)
        room = OUTPUT_BYTES_MAX - len(self._kept)
        self._kept += data[:room]
        self._more_bytes += max(0, len(data) - room)
        self._open = bool(data)

    def lines(self) -> list[str]:
        """For people."""
        text = self._kept.decode(errors="replace")
        found = ["".join(c if c.isprintable() or c == "\t" else "?" for c in line) for line in text.splitlines()]
        left = self._more_bytes + sum(len(line) + 1 for line in found[OUTPUT_LINES_MAX:])
        return [*filter(None, found[:OUTPUT_LINES_MAX]), *([f"... and {left} more bytes"] if left else [])]


def post(url: str, record: bytes) -> None:
    """Post `record` to `url`; three tries, and the last one's failure is said."""
    import http.client  # a command does without, and starts sooner
    import urllib.error
    import urllib.request

    headers = {"Content-Type": "application/json", "User-Agent": "lastwords"}
    why = ""
    for number in range(len(PAUSES_S) + 1):
        if number:
            threading.Event().wait(PAUSES_S[number - 1])
        try:
            request = urllib.request.Request(url, record, headers, method="POST")
            with urllib.request.urlopen(request, timeout=TRY_S):
                return
        except urllib.error.HTTPError as error:
            why = f"it answers {error.code} {error.reason}"
            if 400 <= error.code < 500 and error.code not in AGAIN:
                break
        except (OSError, http.client.HTTPException) as error:  # URLError, and a time-out while it is read, are OSErrors
            why = str(getattr(error, "reason", error))
    _log.warning("the incident's record was not posted to %s (%s): %s", urlsplit(url).hostname, VARIABLE, why)


if __name__ == "__main__":
    main()
    os._exit(0)  # a thread may hang in a name server's answer
