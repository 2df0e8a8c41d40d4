"""Where the time of a recovery went: one sentence, and one line of JSON beside those of the controller's incidents.

A recovery lasts from the first death until every rank has updated its weights again. Its line in incidents.jsonl:

    {"outcome": "RECOVERED", "entry", "step", "began_mono_s", "died_mono_s",
     "events": [{"what", "mono_s", "rank"?, "code"?, "how"?, "raised"?, "imports"?, "inexact"?}, ...],
     "generation"?, "incident"?, "trained"?, "ended"?}

entry: number of the generation that goes on. generation, incident: those of the newest of the controllers' lines
about this failure, where there is one: ranks may die in a recovery, too. began_mono_s: when the generation before
began. died_mono_s: the first sign that it is over. Events: died (a process has ended by itself; the controller often
knows before; raised: the exception that has left its script), left (a survivor leaves), entered (all processes are
started anew), begun (the loop of a rank; imports: in the first recovery of a job, modules that could be preloaded, with
seconds), updated (inexact: why it may differ from one that was never interrupted). trained: steps had been done. ended:
the newest one that a survivor had. Instants are CLOCK_MONOTONIC, as the controller's are.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lastwords.controller.timeline import UNREADABLE
from lastwords.errors import ranks_text
from lastwords.launcher.events import UNKNOWN_CODE
from lastwords.liveness.endings import ending_text
from lastwords.processor.departure import EXIT_NOT_SAVED, EXIT_SAVED
from lastwords.vocabulary import ExitKind, Phase, Stand

OUTCOME = "RECOVERED"
SAVED, NOT_SAVED = ExitKind.SAVED.name, ExitKind.NOT_SAVED.name

_STAND = re.compile(r"([A-Z_]+)\((\d+)\)")
_NONE: dict[str, Any] = {"events": []}

IMPORTS_S = 0.2
"""From where on it is worth a word how long imports have taken."""


@dataclass
class Recovery:
    """Takes what the launcher sees of `ranks`; nothing is kept as long as all are well. Not thread-safe."""

    ranks: tuple[int, ...]
    _events: list[dict[str, Any]] = field(default_factory=list)
    _entry: int = 0
    _step: int = 0
    _began_s: float = 0.0
    _entered_s: float = 0.0
    _ended: int = 0
    _late: set[int] = field(default_factory=set)
    """Those that have not updated in this generation."""
    _told_of_imports: bool = False
    _trained: bool = False
    """Steps have been done since the newest recovery, or the job's start."""

    def died(self, rank: int, code: int, now_s: float, how: str = "", raised: str = "") -> None:
        """A process has ended by itself. code, how, raised: as of `events.Ended`."""
        self._note("died", now_s, rank=rank, code=code, **_said(how=how, raised=raised))

    def left(self, rank: int, step: int, now_s: float, ended: int = 0) -> None:
        """`rank` is told to leave. step: the newest one that it knows to be saved. ended: that it has ended."""
        self._step, self._ended = max(self._step, step), max(self._ended, ended)
        self._note("left", now_s, rank=rank)

    def entered(self, entry: int, now_s: float) -> None:
        self._entry, self._entered_s, self._late = entry, now_s, {*self.ranks}
        if self._events:
            self._note("entered", now_s)
        else:
            self._began_s = now_s

    def begun(self, rank: int, step: int, now_s: float, imports: Mapping[str, float]) -> None:
        """The loop of `rank` begins after `step`. imports: as of `events.Begun`."""
        if not self._events:
            return
        self._step = max(self._step, step)
        self._note("begun", now_s, rank=rank, **_said(imports={} if self._told_of_imports else {**imports}))

    def updated(self, rank: int, now_s: float, inexact: str = "") -> dict[str, Any] | None:
        """`rank` has ended its first step in this generation. The recovery's record, if it is the last one to do so.

        inexact: as of `events.Updated`.
        """
        if not self._events:
            self._trained = True
            return None
        self._note("updated", now_s, rank=rank, **_said(inexact=inexact))
        self._late.discard(rank)
        if self._late:
            return None
        record = {
            "outcome": OUTCOME,
            "entry": self._entry,
            "step": self._step,
            "began_mono_s": round(self._began_s, 6),
            "died_mono_s": min(one["mono_s"] for one in self._events),
            "events": self._events,
            **_said(trained=self._trained, ended=self._ended),
        }
        self._told_of_imports = self._told_of_imports or _imports(self._events) != ""
        self._events, self._step, self._ended, self._began_s, self._trained = [], 0, 0, self._entered_s, True
        return record

    def _note(self, what: str, now_s: float, **more: Any) -> None:
        self._events.append({"what": what, "mono_s": round(now_s, 6), **more})


def _said(**more: Any) -> dict[str, Any]:
    """What of it there is."""
    return {name: one for name, one in more.items() if one}


def sentence(record: Mapping[str, Any], incident: Mapping[str, Any] | None) -> str:
    """One line for people. record: of a recovery. incident: the controller's of the same failure, where there was one.

    >>> died = [{"what": "died", "mono_s": 5.0, "rank": 2, "code": -9}, {"what": "entered", "mono_s": 5.4}]
    >>> record = {"outcome": OUTCOME, "entry": 1, "step": 31, "died_mono_s": 5.0,
    ...     "events": [*died, {"what": "updated", "mono_s": 5.7, "rank": 0}]}
    >>> saved = [{"what": "decided", "mono_s": 5.008}, {"what": "published", "mono_s": 5.07}]
    >>> sentence(record, {"known_mono_s": 5.0, "step": 31, "events": saved})
    'rank 2 died (SIGKILL): decided after 8 ms, saved after 70 ms, started again after 0.4 s, training again after \
0.7 s; nothing lost, step 31 was saved'
    >>> refused = {"outcome": "NOT_SAVED", "reason": "disk full", "known_mono_s": 5.0, "events": [
    ...     {"what": "settled", "mono_s": 5.001, "rank": 0, "stand": "COMPUTING(31)"}]}
    >>> sentence({**record, "step": 20}, refused)
    'rank 2 died (SIGKILL): started again after 0.4 s, training again after 0.7 s; NOT SAVED (disk full): \
STEPS 21 TO 31 ARE LOST, resumed after step 20'
    >>> alone = {**record, "step": 20, "trained": True, "events": died}
    >>> sentence(alone, {**refused, "reason": "no rank is left that could write", "events": []})
    'rank 2 died (SIGKILL): started again after 0.4 s; NOT SAVED (no rank is left that could write): \
STEPS AFTER 20 ARE LOST, resumed after step 20'
    """
    died_s = min(record["died_mono_s"], incident["known_mono_s"] if incident else record["died_mono_s"])
    moments = (("decided", "decided"), ("published", "saved"))
    found = [f"{word} after {_since(died_s, at)}" for what, word in moments for at in _last(incident or _NONE, what)]
    found += [f"started again after {_since(died_s, at)}" for at in _last(record, "entered")]
    found += [f"training again after {_since(died_s, at)}" for at in _last(record, "updated")]
    seen = {one["rank"]: one["how"] for one in (incident or _NONE)["events"] if one["what"] == "ended"}
    dead: dict[int, str] = {}
    for one in record["events"]:
        if one["what"] == "died":  # a replacement may have died, too, and matters less
            how = one.get("raised") or seen.get(one["rank"]) or one.get("how") or _end(one["code"])
            dead.setdefault(one["rank"], how)
    who = ", ".join(f"rank {rank} died ({how})" for rank, how in dead.items())
    who = who or (incident or {}).get("reason") or "the ranks have begun again"
    inexact, imports = _inexact(record["events"]), _imports(record["events"])
    saved = _saved(record["step"], incident, record.get("ended", 0), exact=not inexact)
    unsaved = incident is None or incident.get("outcome", SAVED) == NOT_SAVED
    if unsaved and record.get("trained") and not _newest_ended(incident, record.get("ended", 0)):
        lost = f"STEPS AFTER {record['step']}" if record["step"] else "ALL STEPS"
        if dead.keys() >= {one["rank"] for one in record["events"] if "rank" in one}:
            saved = f"{_not_saved(incident)}: {lost} ARE LOST, {saved}"
        elif not any(one["what"] == "left" for one in record["events"]):
            saved = f"{lost} MAY BE LOST, since no rank has said what it saved; {saved}"
    return f"{who}: {', '.join(found)}{imports}; {saved}{inexact}"


def _inexact(events: Iterable[Mapping[str, Any]]) -> str:
    """Whose loop may differ from now on, as far as the newest entry tells, and why the first one's may."""
    why = {one["rank"]: one.get("inexact", "") for one in events if one["what"] == "updated"}
    ranks = sorted(rank for rank, reason in why.items() if reason)
    if not ranks:
        return ""
    where = "" if len(ranks) == len(why) else f" on {ranks_text(ranks)}"
    return f"; the resume is not exact{where}: {why[ranks[0]]}"


def _imports(events: Iterable[Mapping[str, Any]]) -> str:
    """How much of it were imports, on the rank where they took longest, and what saves them; "" where it was little."""
    of_rank: dict[int, dict[str, float]] = {
        one["rank"]: one.get("imports", {}) for one in events if one["what"] == "begun"
    }
    longest = max(of_rank.values(), key=lambda imports: sum(imports.values()), default={})
    if sum(longest.values()) < IMPORTS_S:
        return ""
    return f" ({sum(longest.values()):.1f} s of it were imports: --preload {','.join(longest)} saves them)"


def _saved(step: int, incident: Mapping[str, Any] | None, ended: int, *, exact: bool) -> str:
    """What became of the steps. step: the newest one that was saved. ended: that a survivor has said to have ended."""
    ended = _newest_ended(incident, ended)
    if incident is not None and incident.get("outcome", SAVED) == SAVED:
        if ended > incident.get("step", step):  # what was saved is from whole copies
            return f"step {step} was saved, and step {ended} is done again"
        return f"{'nothing lost, ' if exact else ''}step {step} was saved"
    lost = f"STEPS {step + 1} TO {ended} ARE LOST, " if ended > step else ""
    why = f"{_not_saved(incident)}: " if lost else ""
    return f"{why}{lost}resumed after step {step}" if step else f"{why}{lost}began anew"


def _not_saved(incident: Mapping[str, Any] | None) -> str:
    return "NOT SAVED" if incident is None else f"NOT SAVED ({incident['reason']})"


def _newest_ended(incident: Mapping[str, Any] | None, ended: int) -> int:
    """Step that a survivor had ended: as it has told the controller, or else the launcher (`ended`)."""
    stands = [_STAND.fullmatch(one.get("stand", "")) for one in incident["events"]] if incident is not None else []
    return max((Stand(Phase[found[1]], int(found[2])).ended_step for found in stands if found), default=ended)


def steps_lost(record: Mapping[str, Any], incident: Mapping[str, Any] | None) -> int:
    """Steps that had ended and are done again. record: of a recovery; incident: as of `sentence`.

    >>> steps_lost({"step": 20, "ended": 31}, None), steps_lost({"step": 31, "ended": 31}, None)
    (11, 0)
    """
    return max(0, _newest_ended(incident, int(record.get("ended", 0))) - int(record["step"]))


def incident_of(lines: Sequence[str | bytes], record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of the lines of incidents.jsonl the one of the failure that this recovery (`record`) has mended."""
    return _newest(lines, lambda one: one["known_mono_s"] >= record["began_mono_s"])


def ending(codes: Mapping[int, int | None], step: int, lines: Sequence[str | bytes], ended: int = 0) -> tuple[int, str]:
    """Exit code of a launcher whose ranks were told to end, and what is saved. lines: of incidents.jsonl.

    codes: how the ranks have ended. step: the newest one that a rank knows to be saved; 0: none. ended: that one had
    ended. The exit code is EXIT_SAVED exactly where the sentence says to start the job again.

    >>> line = '{"outcome": "SAVED", "step": 31, "path": "/ckpt/tft_saved_checkpoints-step_31"}'
    >>> ending({0: 75, 1: 75}, 31, [line])
    (75, 'step 31 was saved in /ckpt/tft_saved_checkpoints-step_31; start the job again to go on from there')
    >>> ending({0: -15, 1: -15}, 0, [])
    (76, 'nothing was saved: no rank was in its training loop')
    """
    found = _newest(lines, lambda one: one["outcome"] == SAVED and one["step"] == step and bool(one["path"]))
    where = f" in {found['path']}" if found else ""
    saved = f"{f'step {step}' if step else 'a checkpoint'} was saved{where}"
    goes_on = f"{saved}; start the job again to go on from there"
    if EXIT_SAVED in codes.values():
        return EXIT_SAVED, goes_on
    if codes and not any(codes.values()):
        return 1, "its ranks had come to their end"
    older = f"; before, {saved}" if step else ""
    if killed := [rank for rank, code in codes.items() if code == -signal.SIGKILL]:
        verb = "was" if len(killed) == 1 else "were"
        return EXIT_NOT_SAVED, (
            f"nothing is known to be saved: {ranks_text(killed)} had not ended in time and {verb} killed "
            f"(`lastwords latest PATH` prints the newest checkpoint){older}"
        )
    last = _newest(lines, lambda one: isinstance(one["reason"], str))
    why = f": {last['reason']}" if last and last["outcome"] == NOT_SAVED else ""
    if EXIT_NOT_SAVED in codes.values() or why:
        reached = f", and step {ended} had been done" if ended > step else ""
        return EXIT_NOT_SAVED, f"nothing new was saved{reached}{why}{older}"
    if step:
        return EXIT_SAVED, goes_on
    return EXIT_NOT_SAVED, "nothing was saved: no rank was in its training loop"


def _newest(lines: Sequence[str | bytes], wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    """Of the controllers' lines of incidents.jsonl. What nobody of lastwords has written is passed over."""
    for line in reversed(lines):
        try:
            record: dict[str, Any] = json.loads(line)
            if record["outcome"] in ExitKind.__members__ and wanted(record):
                return record
        except UNREADABLE:
            continue
    return None


def joined(record: Mapping[str, Any], incident: Mapping[str, Any] | None) -> str:
    """The line of JSON of a recovery with what leads to the controller's line about the same failure, if there is one.

    >>> joined({"outcome": "RECOVERED", "entry": 3}, {"job": "digits", "generation": 7, "incident": 1})
    '{"outcome": "RECOVERED", "entry": 3, "generation": 7, "incident": 1}'
    """
    about = {key: incident[key] for key in ("generation", "incident") if key in incident} if incident else {}
    return json.dumps({**record, **about})


def _last(record: Mapping[str, Any], what: str) -> list[float]:
    return [one["mono_s"] for one in record["events"] if one["what"] == what][-1:]


def _since(begin_s: float, end_s: float) -> str:
    seconds = max(0.0, end_s - begin_s)
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.0995 else f"{seconds:.1f} s"


def _end(code: int) -> str:
    return "killed or crashed" if code == UNKNOWN_CODE else ending_text(code)
