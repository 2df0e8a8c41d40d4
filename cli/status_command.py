"""`lastwords status`: what a running controller knows. Imported on demand, since it brings gRPC."""

from __future__ import annotations

import dataclasses
import json
import sys

from rich.text import Text

from lastwords.cli import tables
from lastwords.controller import handover
from lastwords.controller.query import query_state
from lastwords.errors import ConfigError, UnavailableError
from lastwords.state import ControllerState, RankState


def find_controller() -> str:
    """Address of the one controller of this user on this host.

    Raises UnavailableError if there is none, ConfigError naming all if there are several.
    """
    running = handover.running_here()
    if not running:
        raise UnavailableError("no controller of this user runs on this host; specify one: --controller HOST:PORT")
    if len(running) > 1:
        known = ", ".join(f"{record.address} (job {record.job})" for record in running)
        raise ConfigError(f"several controllers run here, choose one with --controller: {known}")
    return running[0].address


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
    console.print(tables.facts(_facts(address, state)))
    columns = ("rank", "process", "host", "stands at", "heard", "")
    rows = [_row(rank) for rank in state.ranks]
    console.print(tables.table("", columns, rows, right=("rank", "process", "heard")))


def _facts(address: str, state: ControllerState) -> list[tuple[str, object]]:
    return [
        ("controller", f"{address}, process {state.pid}, up for {state.uptime_s:.0f} s"),
        ("job", f"{state.job}, generation {state.generation}, {state.world_size} ranks"),
        ("stage", f"{state.stage}, incidents so far: {state.incident}"),
        ("summary", state.summary),
    ]


def _row(rank: RankState) -> tuple[object, ...]:
    if rank.process is None:
        return rank.rank, "-", "-", "-", "-", Text("not registered", style="yellow")
    if rank.dead:
        word = Text("dead", style="red")
    elif rank.connected:
        word = Text("connected", style="green")
    else:
        word = Text("lost", style="red")
    host = rank.process.host_id[:8]
    return rank.rank, rank.process.pid, host, rank.stand or "-", f"{rank.heard_s:.1f} s ago", word
