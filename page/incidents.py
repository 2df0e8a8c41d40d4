"""Incidents and recoveries out of incidents.jsonl, as the page draws them and the metrics count them. Pure.

Seconds of a drawing are counted from when the incident was known.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lastwords.controller.timeline import UNREADABLE, phases, sentence
from lastwords.errors import ranks_text
from lastwords.launcher import recovery
from lastwords.vocabulary import ExitKind

KEPT = 100
"""Incidents and recoveries that are kept for the page; all are counted."""

LINES_KEPT = 8
"""A recovery follows the incident that it has mended."""

ROWS_MAX = 8
"""Ranks that a drawing has a row for: the dead, the writers, then the others."""

TEXT_MAX = 500
FALSE_ALARM = "FALSE_ALARM"
OUTCOMES = (*ExitKind.__members__, FALSE_ALARM)
CAUSES = {"raised": "exception", "signalled": "signal", "died": "death", "stack": "hang", "suspected": "lost"}
"""By what was seen of the ranks that began an incident; the first that is found counts."""

OTHER = "other"
MARKS = (("decided", "decided"), ("published", "published"), ("entered", "started again"), ("updated", "training"))

Event = Mapping[str, Any]
Bar = tuple[str, float | None, float | None]
"""What (trains, parked, saves, dead, starts), from and until when; None: since before, or for ever."""


class Incidents:
    """The lines of one incidents.jsonl so far. Not thread-safe."""

    def __init__(self) -> None:
        self.items: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.counts: Counter[tuple[str, str]] = Counter()
        """By cause and outcome."""
        self.recoveries = 0
        self.steps_lost = 0
        self._lines: deque[bytes] = deque(maxlen=LINES_KEPT)

    def copy(self) -> Incidents:
        """What is known so far, for another thread."""
        other = Incidents()
        other.items, other.counts = self.items.copy(), self.counts.copy()
        other.recoveries, other.steps_lost = self.recoveries, self.steps_lost
        return other

    @property
    def newest_id(self) -> int:
        """0 if there is none."""
        return self.items[-1]["id"] if self.items else 0

    def after(self, number: int) -> list[dict[str, Any]]:
        """What is newer than the item with this id, the oldest first."""
        return [item for item in self.items if item["id"] > number]

    def add(self, line: bytes, number: int) -> None:
        """One line. number: its id, larger than the one before. What nobody of lastwords has written is passed over."""
        try:
            record = json.loads(line)
            if record["outcome"] == recovery.OUTCOME:
                mended = recovery.incident_of([*self._lines], record)
                item = _item(record, mended, recovery.sentence(record, mended))
                lost = recovery.steps_lost(record, mended)
                self.recoveries, self.steps_lost = self.recoveries + 1, self.steps_lost + lost
            elif record["outcome"] in OUTCOMES:
                item = _item(None, record, sentence(line.decode()))
                self.counts[item["cause"], item["outcome"]] += 1
            else:
                return
        except (*UNREADABLE, IndexError):
            return
        self._lines.append(line)
        self.items.append({"id": number, **item})


def _item(healed: Event | None, incident: Event | None, words: str) -> dict[str, Any]:
    """healed: the launcher's record, if this is one. incident: the controller's; one of both is there."""
    record = incident if incident is not None else healed
    assert record is not None
    died_s = healed["died_mono_s"] if healed is not None else record["known_mono_s"]
    zero_s = min(died_s, incident["known_mono_s"]) if incident is not None else died_s
    events = sorted(
        (event for one in (incident, healed) if one is not None for event in one["events"]),
        key=lambda event: event["mono_s"],
    )
    if healed is not None:  # the controller is told to end when the ranks are
        events = [event for event in events if event["what"] != "exit_sent"]
    seconds = {key: round(end_s - begin_s, 4) for key, (begin_s, end_s) in phases(events, zero_s).items()}
    last = _last_of(events)
    return {
        "key": f"{incident['job']}.{incident['generation']}.{incident['incident']}"
        if incident is not None
        else f"at {died_s}",
        "healed": healed is not None,
        "outcome": str(record["outcome"]),
        "cause": cause(events, record.get("cause_ranks", ())),
        "job": str(record.get("job", "")),
        "step": int((healed or record)["step"]),
        "bytes": int(record.get("bytes", 0)),
        "unix_s": round(incident["known_wall_ns"] / 1e9, 3) if incident is not None else None,
        "words": words[:TEXT_MAX],
        "seconds": seconds,
        "marks": [[word, round(last[what] - zero_s, 4)] for what, word in MARKS if what in last],
        "end_s": round(max(events[-1]["mono_s"] - zero_s, 0.001), 4),
        "rows": _rows(events, record.get("cause_ranks", ()), zero_s),
    }


def cause(events: Iterable[Event], cause_ranks: Sequence[int]) -> str:
    """What began an incident: an exception, a signal, a death, a hang, or the loss of a rank or host.

    >>> cause([{"what": "suspected"}, {"what": "died", "rank": 2}], [2]), cause([], [])
    ('death', 'other')
    """
    found = {
        event["what"]
        for event in events
        if not event.get("secondary") and ("rank" not in event or not cause_ranks or event["rank"] in cause_ranks)
    }
    return next((word for what, word in CAUSES.items() if what in found), OTHER)


def _last_of(events: Iterable[Event]) -> dict[str, float]:
    """When each kind of event came last."""
    return {event["what"]: event["mono_s"] for event in events}


def _rows(events: Sequence[Event], cause_ranks: Iterable[int], zero_s: float) -> list[dict[str, Any]]:
    """A row for each rank that matters, and one for all others together."""
    of_rank: dict[int, dict[str, float]] = {}
    for event in events:
        if "rank" in event:
            of_rank.setdefault(event["rank"], {})[event["what"]] = event["mono_s"] - zero_s
    dead = {rank for rank, seen in of_rank.items() if "died" in seen} & {*cause_ranks} or {*cause_ranks}
    decided = [event for event in events if event["what"] == "decided"]
    writers = {*decided[-1]["writers"]} if decided and "writers" in decided[-1] else set()
    last = {what: at - zero_s for what, at in _last_of(events).items()}
    named = sorted(of_rank.keys() | dead | writers, key=lambda rank: (rank not in dead, rank not in writers, rank))
    shown, others = named[:ROWS_MAX], named[ROWS_MAX:]
    if len(others) == 1:
        shown, others = named, []
    rows = [
        {"name": f"rank {rank}", "bars": _bars(of_rank.get(rank, {}), last, rank in dead, rank in writers)}
        for rank in sorted(shown)
    ]
    if others:
        merged: dict[str, float] = {}
        for rank in others:
            for what, at in of_rank[rank].items():
                merged[what] = max(at, merged.get(what, at))
        rows.append({"name": f"{len(others)} others", "bars": _bars(merged, last, False, False)})
        rows[-1]["title"] = ranks_text(others)
    return rows


def _bars(seen: Mapping[str, float], last: Mapping[str, float], is_dead: bool, writes: bool) -> list[Bar]:
    """What one rank did. seen: when it did what last; last: when anybody did. Seconds, all of them."""
    entered = last.get("entered")
    ends = entered if entered is not None else last.get("resumed", last.get("exit_sent"))
    begin = 0.0 if is_dead else seen.get("settled", last.get("decided", 0.0))
    bars: list[Bar] = [("trains", None, round(begin, 4))]
    bars.append(("dead" if is_dead else "parked", round(begin, 4), None if ends is None else round(ends, 4)))
    if writes and "decided" in last:
        done = seen.get("saved", last.get("exit_sent", ends))
        bars.append(("saves", round(last["decided"], 4), None if done is None else round(done, 4)))
    if entered is not None:
        again = seen.get("updated", last.get("updated", entered))
        bars += [("starts", round(entered, 4), round(again, 4)), ("trains", round(again, 4), None)]
    elif "resumed" in last:
        bars.append(("trains", round(last["resumed"], 4), None))
    return bars
