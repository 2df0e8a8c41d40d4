"""When what happened in an incident: for the log's sentence, the demo's picture and the benchmarks.

Instants are the controller's monotonic seconds, with the wall clock of the incident's start beside them.
One line of JSON for each incident goes to {ckpt root}/logs/incidents.jsonl:

    {"job", "generation", "incident", "outcome", "step", "path", "reason", "cause_ranks", "bytes",
     "known_mono_s", "known_wall_ns", "events": [{"what", "mono_s", "rank"?, "attempt"?, ...}, ...]}

"outcome" is a name of ExitKind or "FALSE_ALARM". Events: known, frozen_sent, suspected, died, ended, raised, signalled,
settled, proceed_sent, stack, decided, saved, save_failed, verified, verify_failed, verify_blocked, published,
publish_failed, exit_sent, resumed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import site
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import lastwords
from lastwords.checkpoint.appearing import append_line, read_end
from lastwords.checkpoint.system import storage_errors
from lastwords.controller.events import Event, Outcome, Published, PublishFailed, Verified, VerifyBlocked, VerifyFailed
from lastwords.errors import ConfigError
from lastwords.state import OpenIncident
from lastwords.vocabulary import (
    Exit,
    ExitKind,
    Freeze,
    Order,
    Proceed,
    Raised,
    Report,
    Resume,
    Save,
    Saved,
    SaveFailed,
    SaveProgress,
    Settled,
    Signalled,
    Stack,
)

EVENTS_MAX = 20_000
"""One incident of 16 384 ranks needs about one event a rank; more than this is not recorded."""

RECORD_BYTES_MAX = 16 << 20
"""What is read of incidents.jsonl, from its end: some lines of the largest jobs, all lines of usual ones."""

HINTS_MAX = 256
"""Deaths that were seen before the incident's first order, kept so that it begins when it was known."""


@dataclass
class _IncidentRecord:
    number: int
    reason: str
    known_mono_s: float
    known_wall_ns: int
    events: list[dict[str, Any]] = field(default_factory=list)
    seen: set[tuple[str, int]] = field(default_factory=set)
    saved_bytes: dict[int, int] = field(default_factory=dict)
    attempt: int = 0
    written_bytes: dict[int, int] = field(default_factory=dict)
    writers: dict[int, list[int]] = field(default_factory=dict)


class Timeline:
    """Collects the events of the incident under way. Not thread-safe: the loop's thread only."""

    def __init__(self, job: str, generation: int) -> None:
        self._job = job
        self._generation = generation
        self._open: _IncidentRecord | None = None
        self._hints: list[dict[str, Any]] = []
        self._newest_ended = 0

    def note(self, what: str, now_s: float, **facts: Any) -> None:
        """Something happened; before an incident it is kept as what may have started one."""
        event = {"what": what, "mono_s": round(now_s, 6), **facts}
        if self._open is None:
            self._hints = [*self._hints[-HINTS_MAX:], event]
        elif len(self._open.events) < EVENTS_MAX:
            self._open.events.append(event)

    def note_report(self, report: Report, now_s: float) -> None:
        """A report that belongs to an incident; others are not recorded."""
        match report:
            case Settled(rank=rank, incident=incident, stand=stand) if self._is_open(incident):
                if self._first("settled", rank):
                    self.note("settled", now_s, rank=rank, stand=str(stand))
            case SaveProgress(incident=incident, attempt=attempt) if self._is_open(incident):
                self._note_written(report.rank, attempt, report.bytes_written)
            case Saved(rank=rank, incident=incident, attempt=attempt, bytes_written=count) if self._is_open(incident):
                assert self._open is not None
                self._open.saved_bytes[rank] = count
                self._note_written(rank, attempt, count)
                self.note("saved", now_s, rank=rank, attempt=attempt, bytes=count)
            case SaveFailed(rank=rank, incident=incident, attempt=attempt) if self._is_open(incident):
                self.note("save_failed", now_s, rank=rank, attempt=attempt, reason=report.reason[:200])
            case Raised(rank=rank, secondary=secondary):
                self.note("raised", now_s, rank=rank, secondary=secondary)
            case Stack(rank=rank, text=text):
                self.note("stack", now_s, rank=rank, text=text)
            case Signalled(rank=rank, signal_number=number):
                self.note("signalled", now_s, rank=rank, signal=number)
            case _:
                pass

    def _note_written(self, rank: int, attempt: int, count: int) -> None:
        """Only the newest attempt counts."""
        assert self._open is not None
        if attempt > self._open.attempt:
            self._open.attempt, self._open.written_bytes = attempt, {}
        if attempt == self._open.attempt:
            self._open.written_bytes[rank] = count

    def under_way(self, now_s: float) -> OpenIncident | None:
        """The incident that has begun and not ended, for people."""
        if self._open is None:
            return None
        since_s = now_s - self._open.known_mono_s
        return OpenIncident(self._open.reason, since_s, sum(self._open.written_bytes.values()))

    def note_storage(self, event: Event, now_s: float) -> None:
        """An answer about files. Those of a periodic checkpoint belong to no incident."""
        match event:
            case Verified(incident=incident, attempt=attempt) if self._is_open(incident):
                self.note("verified", now_s, attempt=attempt)
            case VerifyFailed(incident=incident, attempt=attempt, problems=problems) if self._is_open(incident):
                texts = [f"{rank}: {text}"[:300] for rank, text in problems[:10]]
                self.note("verify_failed", now_s, attempt=attempt, problems=texts)
            case VerifyBlocked(incident=incident, attempt=attempt, reason=reason) if self._is_open(incident):
                self.note("verify_blocked", now_s, attempt=attempt, reason=reason[:300])
            case Published(incident=incident, attempt=attempt, path=path) if self._is_open(incident):
                self.note("published", now_s, attempt=attempt, path=path)
            case PublishFailed(incident=incident, attempt=attempt, reason=reason) if self._is_open(incident):
                self.note("publish_failed", now_s, attempt=attempt, reason=reason[:300])
            case _:
                pass

    def note_order(
        self, rank: int, order: Order, now_s: float, wall_ns: int, outcome: Outcome | None = None
    ) -> str | None:
        """An order went out to `rank`; returns the incident's line of JSON when this one ends it.

        outcome: how the job has ended, if it has; it names all who began the incident, an order only some.
        """
        match order:
            case Freeze(incident=incident, reason=reason):
                self._begin(incident, reason, now_s, wall_ns)
                if self._is_open(incident) and self._first("frozen_sent", -1):
                    self.note("frozen_sent", now_s)
            case Proceed(incident=incident) if self._is_open(incident):
                self.note("proceed_sent", now_s, rank=rank, step=order.step)
            case Save(incident=incident) if self._is_open(incident):
                self._note_writer(rank, order, now_s)
            case Resume(incident=incident) if self._is_open(incident):
                self.note("resumed", now_s)
                return self._end("FALSE_ALARM", 0, "", self._reason(), ())
            case Exit(incident=incident) if self._is_open(incident):
                self.note("exit_sent", now_s)
                causes = order.cause_ranks if outcome is None else outcome.cause_ranks
                return self._end(order.kind.name, order.step, order.path, order.reason, causes)
            case _:
                pass
        return None

    def _note_writer(self, rank: int, order: Save, now_s: float) -> None:
        """Of a choice one event is kept, which lists everybody who was told to write."""
        assert self._open is not None
        writers = self._open.writers.get(order.attempt)
        if writers is None:
            writers = self._open.writers[order.attempt] = []
            facts = {"step": order.step, "writers": writers, "reason": order.reason[:500]}
            self.note("decided", now_s, attempt=order.attempt, **facts)
        if self._first(f"save {order.attempt}", rank):
            writers.append(rank)

    def reopen(self, number: int, reason: str, now_s: float, wall_ns: int) -> None:
        """An incident whose end was decided by a controller that did not live to record it."""
        if number:
            self._begin(number, reason, now_s, wall_ns)

    def close(self, outcome: Outcome | None, reason: str) -> str | None:
        """The controller ends; returns the line of an incident in which nobody was left to be told how it ended.

        outcome: how the job ended, None if that was never decided; then `reason` is why the controller ends.
        """
        if self._open is None:
            return None
        if outcome is None:
            return self._end(ExitKind.NOT_SAVED.name, 0, "", reason, ())
        return self._end(outcome.kind.name, outcome.step, outcome.path, outcome.reason, outcome.cause_ranks)

    def _begin(self, number: int, reason: str, now_s: float, wall_ns: int) -> None:
        if number <= self._newest_ended or self._is_open(number):
            return  # repeated for a rank that came back late
        # Hints of the last second belong to this incident: a death is known a moment before the first order.
        hints = [hint for hint in self._hints if hint["mono_s"] >= now_s - 1.0]
        known_s = min([hint["mono_s"] for hint in hints if hint["what"] != "stack"], default=now_s)
        self._hints = []
        self._open = _IncidentRecord(number, reason, known_s, wall_ns - int((now_s - known_s) * 1e9))
        self._open.events.append({"what": "known", "mono_s": round(known_s, 6)})
        self._open.events.extend(hints)

    def _end(self, outcome: str, step: int, path: str, reason: str, cause_ranks: tuple[int, ...]) -> str:
        incident = self._open
        assert incident is not None
        self._open = None
        self._newest_ended = incident.number
        return json.dumps(
            {
                "job": self._job,
                "generation": self._generation,
                "incident": incident.number,
                "outcome": outcome,
                "step": step,
                "path": path,
                "reason": reason,
                "cause_ranks": list(cause_ranks),
                "bytes": sum(incident.saved_bytes.values()),
                "known_mono_s": round(incident.known_mono_s, 6),
                "known_wall_ns": incident.known_wall_ns,
                "events": incident.events,
            }
        )

    def _is_open(self, incident: int) -> bool:
        return self._open is not None and self._open.number == incident

    def _reason(self) -> str:
        return self._open.reason if self._open is not None else ""

    def _first(self, what: str, who: int) -> bool:
        assert self._open is not None
        if (what, who) in self._open.seen:
            return False
        self._open.seen.add((what, who))
        return True


def phases(events: Sequence[Mapping[str, Any]], zero_s: float) -> dict[str, tuple[float, float]]:
    """When each phase began and ended, in monotonic seconds; those that did not come are missing.

    events: of an incident and of its recovery, oldest first. zero_s: when the incident was known.

    >>> phases([{"what": "settled", "mono_s": 5.5}, {"what": "decided", "mono_s": 5.75}], 5.0)
    {'settle': (5.0, 5.5), 'choose': (5.5, 5.75)}
    """
    last = {event["what"]: event["mono_s"] for event in events}
    borders = [zero_s, *(last.get(what) for what in ("settled", "decided", "saved", "published"))]
    found: dict[str, tuple[float, float]] = {}
    for place, name in enumerate(("settle", "choose", "write", "publish"), 1):
        begin_s = next((at for at in reversed(borders[:place]) if at is not None), zero_s)
        end_s = borders[place]
        if end_s is not None:
            found[name] = (begin_s, max(begin_s, end_s))
    if "entered" in last:
        begin_s = last.get("published", zero_s)
        found["restart"] = (begin_s, max(begin_s, last["entered"]))
        if "updated" in last:
            found["resume"] = (last["entered"], max(last["entered"], last["updated"]))
    return found


UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What a line of incidents.jsonl raises that nobody of lastwords has written, or that was torn."""


def append_record(path: Path, line: str) -> None:
    """Append one line to `path` (incidents.jsonl), to which controllers and launchers append. StorageError."""
    with storage_errors("appending to", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, line)


def records(path: Path) -> list[bytes]:
    """The last lines of `path`, `RECORD_BYTES_MAX` at most; what is no JSON among them is for the caller to pass over.

    OSError.
    """
    return read_end(path, RECORD_BYTES_MAX).splitlines()


def recorded_exit(path: Path, job: str, generation: int) -> Exit | None:
    """How this generation of a job has ended, by its newest line in `path` (incidents.jsonl); None if none says so.

    For a rank that was stopped when everybody was told. Lines of others, false alarms and what cannot be read are
    passed over. Reads the last `RECORD_BYTES_MAX` only.
    """
    try:
        lines = records(path)
    except OSError:
        return None
    for line in reversed(lines):
        try:
            record = json.loads(line)
            if (record["job"], record["generation"]) == (job, generation) and record["outcome"] in ExitKind.__members__:
                kind, causes = ExitKind[record["outcome"]], tuple(record["cause_ranks"])
                facts = (record["step"], record["path"], record["reason"])
                return Exit(generation, record["incident"], kind, *facts, causes)
        except UNREADABLE:
            continue
    return None


def sentence(line: str) -> str:
    """One line for people out of an incident's line of JSON, with durations since it was known.

    >>> events = [{"what": "known", "mono_s": 5.0}, {"what": "settled", "mono_s": 5.004, "rank": 0}]
    >>> sentence(json.dumps({"incident": 1, "outcome": "SAVED", "step": 7, "path": "/c", "reason": "rank 1 died",
    ...     "bytes": 2_000_000, "known_mono_s": 5.0, "events": events}))
    'incident 1 (rank 1 died): SAVED, step 7, 2.0 MB, /c; since known: settled 4.0 ms'
    """
    record = json.loads(line)
    since: dict[str, float] = {}
    for event in record["events"]:
        since[event["what"]] = (event["mono_s"] - record["known_mono_s"]) * 1000  # the last of a kind counts
    order = ("frozen_sent", "settled", "decided", "saved", "verified", "published", "resumed")
    times = ", ".join(f"{what} {since[what]:.1f} ms" for what in order if what in since)
    facts = [record["outcome"]]
    if record["outcome"] == "SAVED":
        facts += [f"step {record['step']}", f"{record['bytes'] / 1e6:.1f} MB", record["path"]]
    return f"incident {record['incident']} ({record['reason']}): {', '.join(facts)}; since known: {times}"


# Incidents reach the operator's own tools: once a record is written, a process of its own (`teller`) takes it there.
#
# A process, not a thread: what it starts may hang, fail or flood its output, and it may end after whoever has started
# it. The record is in a file without a name, so nobody waits for a reader.

_log = logging.getLogger(__name__)

VARIABLE = "LASTWORDS_ON_INCIDENT"
"""A command of the shell, or an http or https URL."""

COLLECTOR_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own: where spans are sent."""

TELLERS_MAX = 8
"""At a time. Each ends within some minutes; more incidents than this meanwhile are in the record only."""


def is_url(target: str) -> bool:
    """Whether records are posted there; else it is a command.

    >>> is_url("https://hooks.example.org/x"), is_url("./page.sh https://hooks.example.org/x")
    (True, False)
    """
    return target.lower().startswith(("http://", "https://"))


def check_target(target: str) -> None:
    """Of `VARIABLE`; "" is none. ConfigError for a URL that cannot work, without its path, which may be a secret."""
    if not is_url(target):
        return
    try:
        parts = urlsplit(target)
        usable = bool(parts.hostname) and parts.port != 0 and parts.username is None and target.isprintable()
        usable = usable and " " not in target
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"{VARIABLE} begins as a URL does, and is none that can be posted to: write https://HOST/PATH, without a "
            "user's name, or, to run a command, the command"
        )


def wants_spans(environ: Mapping[str, str]) -> bool:
    """Whether the environment names a collector, and something of OpenTelemetry is installed; imports nothing."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not any(map(environ.get, COLLECTOR_VARIABLES)):
        return False
    return importlib.util.find_spec("opentelemetry") is not None


def in_memory(record: bytes) -> int:
    """Descriptor of a file that holds `record`, at its beginning. OSError."""
    fd = os.memfd_create("lastwords-incident", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(record)
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd


class Telling:
    """Starts the processes that tell. Any thread but the one that decides: a start takes some milliseconds."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []

    def tell(self, line: str) -> None:
        """Start a process with this line of incidents.jsonl. Waits for nothing; where that fails, the log says so."""
        if self._environ.get(VARIABLE) or wants_spans(self._environ):
            with self._lock:
                self._tell(line)

    def _tell(self, line: str) -> None:
        self._running = [process for process in self._running if process.poll() is None]
        if len(self._running) >= TELLERS_MAX:
            return _log.warning("an incident is not told: %d others are being told still", len(self._running))
        try:
            record = in_memory(f"{line}\n".encode())
            try:
                self._running.append(_teller(record, self._environ))
            finally:
                os.close(record)
        except OSError as error:
            _log.warning("an incident is not told, since no process can be started for it: %s", error)


def _teller(record: int, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Its output goes to where this process's log goes. A session of its own: whoever ends this one does not end it."""
    from lastwords.controller.handover import (
        TOKEN_VARIABLE,
    )  # whoever starts one has it; a teller starts faster without

    environment = finding_lastwords(environ)
    environment.pop(TOKEN_VARIABLE, None)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "lastwords.controller.teller"],
        stdin=record,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )


def finding_lastwords(environ: Mapping[str, str]) -> dict[str, str]:
    """So that a new process can import lastwords, which a script may have found by a sys.path of its own."""
    environment = dict(environ)
    home = str(Path(lastwords.__file__).resolve().parent.parent)
    if home not in (*site.getsitepackages(), site.getusersitepackages()):
        known = environment.get("PYTHONPATH", "").split(os.pathsep)
        if home not in known:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (*known, home)))
    return environment
