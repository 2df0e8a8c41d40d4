"""An incident, or a recovery, as spans of OpenTelemetry: one for all of it, and one for each phase. Imports it late.

All spans of one incident, and of the recovery that mends it, are of one trace, whose number follows from the record.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lastwords import clock
from lastwords.controller.timeline import phases
from lastwords.vocabulary import ExitKind

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

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

    class Ended(SpanProcessor):  # type: ignore[misc]
        """The library's own would not say whether the spans were taken."""

        def on_end(self, span: Any) -> None:
            ended.append(span)

    ended: list[Any] = []
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or "lastwords"})
    provider = TracerProvider(resource=resource, id_generator=Numbers(), shutdown_on_exit=False)
    provider.add_span_processor(Ended())
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
