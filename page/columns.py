"""A job as a browser gets it: one character for each rank in each column, and what changes from second to second."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median
from typing import Any

from lastwords.checkpoint.entries import runs_of
from lastwords.page.incidents import Incidents
from lastwords.state import ControllerState, RankState
from lastwords.vocabulary import Phase

LETTERS = {
    Phase.COMPUTING: "C",
    Phase.READY: "R",
    Phase.UPDATING: "U",
    Phase.UPDATED: "N",
    Phase.SKIPPED: "S",
    Phase.TORN: "T",
    Phase.DONE: "D",
}
DEAD, LOST, UNREGISTERED = "X", "?", "-"

SOLE_HOLDER, ODD = 1, 2
"""Flags of a rank; their sum is one digit."""

SILENT_S = 10.0
SILENT_TIMES = 5
"""A rank is silent if it has not been heard of for SILENT_S and SILENT_TIMES as long as the median of all."""

ROWS_MAX = 50
TEXT_MAX = 300
GAP_MAX = 6
"""Unchanged characters between two changed ones: the next run would cost more than they do."""

COLUMNS = ("phase", "flag")
GROWTHS = 10
IDLE_STAGES = ("registering", "watching")


class Rate:
    """Growth per second of a number that is looked at again and again, over the last times that it has grown.

    Looks between two growths count nothing: a step may take minutes. One that is overdue makes the rate fall.

    >>> rate = Rate()
    >>> [rate.of(*look) for look in ((6, 0.0), (7, 2.0), (7, 3.0), (8, 6.0), (8, 9.0), (8, 12.0), (2, 13.0))]
    [None, None, None, 0.25, 0.25, 0.1, None]
    """

    def __init__(self) -> None:
        self._last = -1
        self._grown: deque[tuple[float, int]] = deque(maxlen=GROWTHS)

    def of(self, value: int, now_s: float) -> float | None:
        """None until it has grown twice; a number that has fallen is another one."""
        if value < self._last:
            self._grown.clear()
        elif value > self._last >= 0:
            self._grown.append((now_s, value))
        self._last = value
        if len(self._grown) < 2:
            return None
        (begin_s, first), (end_s, last) = self._grown[0], self._grown[-1]
        usual_s = (end_s - begin_s) / (len(self._grown) - 1)
        return (last - first) / ((end_s if now_s - end_s <= usual_s else now_s) - begin_s)


@dataclass(frozen=True)
class JobLook:
    """What is known at one instant. state: the newest that the controller has told, None if it never has.

    note: why it does not answer, "" if it does; heard_unix_s: when it last did, 0.0 while it does.
    """

    state: ControllerState | None = None
    address: str = ""
    note: str = ""
    heard_unix_s: float = 0.0
    steps_per_s: float | None = None
    bytes_per_s: float | None = None
    root: str = ""
    files_note: str = ""
    checkpoints: tuple[Mapping[str, Any], ...] = ()
    incidents: Incidents = field(default_factory=Incidents)

    @property
    def live(self) -> bool:
        """Whether the controller answers."""
        return self.state is not None and not self.note


def newest_step(state: ControllerState) -> int:
    """That a rank has ended."""
    return max((rank.stand.ended_step for rank in state.ranks if rank.stand is not None), default=0)


def compact(look: JobLook) -> dict[str, Any]:
    """All that the page shows, as JSON; its keys are the same each time. Times are Unix seconds, sizes bytes."""
    state = look.state
    found: dict[str, Any] = {
        "live": look.live,
        "note": look.note,
        "heard": round(look.heard_unix_s, 1),
        "controller": look.address,
        "root": look.root,
        "files_note": look.files_note,
        "checkpoints": [*look.checkpoints],
        "newest": look.incidents.newest_id,
        "rate": _digits(look.steps_per_s),
        "open": _open(look),
    }
    facts: dict[str, Any] = {"job": "", "generation": 0, "world": 0, "stage": "", "incident": 0, "step": 0}
    facts |= {"connected": 0, "phase": "", "flag": "", "hosts": [], "odd": [], "more": 0}
    if state is not None:
        rows = odd_rows(state.ranks)
        odd = {rank for row in rows if row.kind in MARKED for rank in row.ranks}
        hosts = groupby("" if one.process is None else one.process.host_id[:8] for one in state.ranks)
        facts = {
            "job": state.job,
            "generation": state.generation,
            "world": state.world_size,
            "stage": state.stage,
            "incident": state.incident,
            "step": newest_step(state),
            "connected": sum(rank.connected and not rank.dead for rank in state.ranks),
            "phase": "".join(_letter(rank) for rank in state.ranks),
            "flag": "".join(str(SOLE_HOLDER * rank.sole_holder + ODD * (rank.rank in odd)) for rank in state.ranks),
            "hosts": [[host, sum(1 for _ in same)] for host, same in hosts],
            "odd": [row.json() for row in rows[:ROWS_MAX]],
            "more": max(0, len(rows) - ROWS_MAX),
        }
    return found | facts


def _digits(value: float | None) -> float | None:
    """Three of them: what nobody reads need not be sent."""
    return None if value is None else float(f"{value:.3g}")


def _open(look: JobLook) -> dict[str, Any] | None:
    if look.state is None or not look.live or look.state.stage in IDLE_STAGES:
        return None
    under_way = look.state.open
    if under_way is None:
        return None
    return {
        "reason": under_way.reason[:TEXT_MAX],
        "since_s": round(under_way.since_s, 1),
        "bytes": under_way.written_bytes,
        "rate": _digits(look.bytes_per_s),
    }


def _letter(rank: RankState) -> str:
    if rank.stand is None:
        return UNREGISTERED
    if rank.dead:
        return DEAD
    ended = rank.stand.phase is Phase.DONE
    return LETTERS[rank.stand.phase] if rank.connected or ended else LOST


# ------------------------------------------------------------------------------------------------ ranks that are odd


@dataclass
class Row:
    """Ranks of which the same is to be said. kind: dead, lost, unregistered, slow, waits, stands or silent."""

    kind: str
    where: str = ""
    ranks: list[int] = field(default_factory=list)
    hosts: dict[str, None] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    slower: float = 0.0
    heard_s: float = 0.0

    def json(self) -> dict[str, Any]:
        """For the page."""
        host = next(iter(self.hosts), "") if len(self.hosts) == 1 else f"{len(self.hosts)} hosts" if self.hosts else ""
        low, high = min(self.steps, default=0), max(self.steps, default=0)
        return {
            "kind": self.kind,
            "where": self.where[:TEXT_MAX],
            "ranks": spans(self.ranks),
            "first": self.ranks[0],
            "host": host,
            "step": "" if not self.steps else str(low) if low == high else f"{low} to {high}",
            "slower": round(self.slower, 2),
            "heard_s": round(self.heard_s),
        }


def spans(ranks: Sequence[int], count_max: int = 8) -> str:
    """Sorted ranks in few words.

    >>> spans([3]), spans([0, 1, 2, 7, 9, 10])
    ('3', '0 to 2, 7, 9 to 10')
    """
    runs = runs_of(ranks)
    words = [str(first) if first == last else f"{first} to {last}" for first, last in runs[:count_max]]
    more = sum(last - first + 1 for first, last in runs[count_max:])
    return ", ".join(words + [f"and {more} more"] * (more > 0))


KINDS = ("dead", "lost", "silent", "slow", "stands", "waits", "unregistered")
"""The worst first."""

MARKED = frozenset(("lost", "silent", "slow", "stands"))
"""Those with a mark in the grid. The dead and the unregistered have a letter; those that wait for others can be all."""


def odd_rows(ranks: Iterable[RankState]) -> list[Row]:
    """Ranks that are not as they should be, those with the same words in one row; the worst rows first.

    Beside a dead rank all others stand or wait, as they should.
    """
    ranks = [*ranks]
    expected = ("stands", "waits") if any(rank.dead for rank in ranks) else ()
    usual_s = median([rank.heard_s for rank in ranks]) if ranks else 0.0
    rows: dict[tuple[str, str, str], Row] = {}
    for rank in ranks:
        kind = _kind(rank, max(SILENT_S, SILENT_TIMES * usual_s))
        if not kind or kind in expected:
            continue
        where = rank.waits_at or rank.stands_at
        host = "" if rank.process is None else rank.process.host_id[:8]
        row = rows.setdefault((kind, where, host if kind in ("dead", "slow") else ""), Row(kind, where))
        row.ranks.append(rank.rank)
        if host:
            row.hosts[host] = None
        if rank.stand is not None:
            row.steps.append(rank.stand.ended_step)
        row.slower, row.heard_s = max(row.slower, rank.slower), max(row.heard_s, rank.heard_s)
    return sorted(rows.values(), key=lambda row: (KINDS.index(row.kind), row.ranks[0]))


def _kind(rank: RankState, silent_s: float) -> str:
    if rank.stand is None:
        return "unregistered"
    if rank.dead:
        return "dead"
    if rank.stand.phase is Phase.DONE:
        return ""
    if not rank.connected:
        return "lost"
    if rank.slower:
        return "slow"
    if rank.waits_at or rank.stands_at:
        return "waits" if rank.waits_at else "stands"
    return "silent" if rank.heard_s > silent_s else ""


# ------------------------------------------------------------------------------------------------ what changes


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Keys whose values have changed; of columns only the runs of characters that have, as [place, characters].

    >>> difference({"step": 1, "phase": "CCCC", "flag": "00"}, {"step": 1, "phase": "CCUC", "flag": "000"})
    {'phase': [[2, 'U']], 'flag': '000'}
    """
    found: dict[str, Any] = {}
    for key, value in new.items():
        before = old.get(key)
        if value == before:
            continue
        same_ranks = key in COLUMNS and isinstance(before, str) and len(before) == len(value)
        found[key] = runs(before, value) if same_ranks and isinstance(before, str) else value
    return found


def runs(old: str, new: str) -> list[list[Any]]:
    """Where `new` differs from `old`, which is as long.

    >>> runs("CCCCCCCCCCCC", "UCUCCCCCCCCR")
    [[0, 'UCU'], [11, 'R']]
    """
    found: list[tuple[int, int]] = []
    for place, (before, after) in enumerate(zip(old, new, strict=True)):
        if before == after:
            continue
        if found and place - found[-1][1] <= GAP_MAX:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return [[begin, new[begin:end]] for begin, end in found]
