"""`lastwords status` and `lastwords top`: what a running controller knows. Imported on demand: it brings gRPC."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from lastwords.checkpoint.appearing import read_end
from lastwords.cli import tables
from lastwords.clock import mono_s
from lastwords.controller.takeover import find_controller, query_state
from lastwords.controller.timeline import RECORD_BYTES_MAX, UNREADABLE, sentence
from lastwords.errors import UnavailableError
from lastwords.launcher import recovery
from lastwords.page.columns import Rate, newest_step
from lastwords.state import ControllerState, RankState

RECENT = 5
"""Incidents and recoveries that are shown."""


def status(address: str | None, *, as_json: bool) -> None:
    """Prints the state of the controller at `address`, or of the only one of this user on this host."""
    address = address or find_controller()
    state = query_state(address)
    if as_json:
        record = dataclasses.asdict(state)
        for view, rank in zip(record["ranks"], state.ranks, strict=True):
            view["stand"] = None if rank.stand is None else str(rank.stand)
        sys.stdout.write(json.dumps({"controller": address, **record}, indent=2) + "\n")
        return
    console = tables.console()
    for part in view_of(address, state):
        console.print(part)


def top(address: str | None, *, every_s: float, frames: int = 0) -> None:
    """Prints that state again and again, on one screen in a terminal; until it is interrupted, or `frames` times.

    A job that is started anew, or healed, has a new controller: meanwhile the newest state stays on the screen.
    """
    console = tables.console()
    shown: list[RenderableType] = []
    pace = Rate()
    with contextlib.ExitStack() as screen, contextlib.suppress(KeyboardInterrupt):
        live = (
            screen.enter_context(Live(console=console, screen=True, auto_refresh=False))
            if console.is_terminal
            else None
        )
        for frame in itertools.count(1):
            note = ""
            try:
                found = address or find_controller()
                state = query_state(found)
            except UnavailableError as error:
                note = f"{error}; trying again"
            else:
                shown = view_of(found, state, pace.of(newest_step(state), mono_s()))
            parts = [*shown, *([tables.plain(note, "yellow")] if note else [])]
            if live is None:
                for part in parts:
                    console.print(part)
            else:
                live.update(Group(*parts), refresh=True)
            if frame == frames:
                return
            time.sleep(every_s)


def view_of(address: str, state: ControllerState, pace: float | None = None) -> list[RenderableType]:
    """What is printed of a state. pace: steps per second."""
    columns = ("rank", "process", "host", "stands at", "work", "heard", "")
    rows = [_row(rank) for rank in state.ranks]
    facts = _facts(address, state) + ([("pace", f"{pace:.2f} steps/s")] if pace is not None else [])
    facts += [("recent", "\n".join(found))] if (found := newest_incidents(Path(state.incidents))) else []
    return [
        tables.facts(facts),
        tables.table("", columns, rows, right=("rank", "process", "work", "heard"), wrap=("",)),
    ]


def newest_incidents(path: Path, count: int = RECENT) -> list[str]:
    """The last lines of an incidents.jsonl, in words, oldest first; none if it cannot be read here."""
    try:
        lines = read_end(path, RECORD_BYTES_MAX).decode(errors="replace").splitlines()
    except OSError:
        return []
    found: list[str] = []
    for number, line in enumerate(lines):
        try:
            record = json.loads(line)
            healed = record["outcome"] == recovery.OUTCOME
            incident = recovery.incident_of(lines[:number], record) if healed else None
            words = recovery.sentence(record, incident) if healed else sentence(line)
        except UNREADABLE:
            continue
        found.append(words)
    return found[-count:]


def _facts(address: str, state: ControllerState) -> list[tuple[str, object]]:
    return [
        ("controller", f"{address}, process {state.pid}, up for {state.uptime_s:.0f} s"),
        ("job", f"{state.job}, generation {state.generation}, {state.world_size} ranks"),
        ("stage", f"{state.stage}, incidents so far: {state.incident}"),
        ("summary", state.summary),
    ]


def _row(rank: RankState) -> tuple[object, ...]:
    if rank.process is None:
        return rank.rank, "-", "-", "-", "-", "-", Text("not registered", style="yellow")
    if rank.dead:
        word = Text("dead", style="red")
    elif rank.connected:
        word = Text("connected", style="green")
    else:
        word = Text("lost", style="red")
    for place in _places(rank):
        word = word.append(f", {place}", style="yellow")
    host, work = rank.process.host_id[:8], f"{rank.work_s * 1e3:.3g} ms" if rank.work_s else "-"
    return rank.rank, rank.process.pid, host, rank.stand or "-", work, f"{rank.heard_s:.1f} s ago", word


def _places(rank: RankState) -> Iterator[str]:
    """What there is to say of a rank beside whether it lives."""
    if rank.slower:
        yield f"slower than its peers by {rank.slower:.0%}"
    if rank.waits_at:
        yield f"in a collective or a backward pass at {rank.waits_at}"
    elif rank.stands_at:
        yield f"at {rank.stands_at}"
