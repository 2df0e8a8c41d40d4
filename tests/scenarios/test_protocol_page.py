"""docs/protocol.md says what the code does: its tables are made from the code's tables.

`LASTWORDS_REGENERATE=1 pytest tests/scenarios` writes them anew; review the diff.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from lastwords import vocabulary
from lastwords.controller.events import (
    NEXT_STATES,
    RESEND_INTERVAL_MAX_S,
    RESEND_INTERVAL_S,
    STORAGE_FAILURES_MAX,
    ControllerOptions,
)
from lastwords.processor import events as processor_events
from lastwords.processor.core import PARKED, TRANSITIONS, ProcessorOptions
from lastwords.vocabulary import Phase

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"

WAITS = {
    "start_timeout_s": ("for all ranks to register, and for all to begin the loop", "everybody is refused, by name"),
    "silence_timeout_s": ("for a lost session to come back, where nothing else has happened", "the rank is dead"),
    "lost_confirm_s": ("for a lost session to come back, once the job ends anyway", "the rank is dead"),
    "stall_timeout_s": ("for one whose process the controller sees to live (stopped, frozen)", "the rank is given up"),
    "keepalive_time_s": ("of silence on a connection", "the controller sends a ping"),
    "keepalive_timeout_s": ("for the answer to that ping", "the session is lost"),
    "settle_timeout_s": ("for `Settled` after `Freeze` or `Proceed`", "the rank is excluded"),
    "progress_timeout_s": ("for a writer's next byte", "the rank is excluded, another one writes"),
    "sync_timeout_s": ("for a writer inside fsync or close", "the rank is excluded, another one writes"),
    "storage_timeout_s": ("for the next file that is read back or published", "the directory is given up"),
    "storage_retry_s": (
        "for a file system that refuses to take it after all",
        "writers: the choice without them; files: the directory is given up",
    ),
    "leave_timeout_s": ("of a rank that left early, or a custom loop, for any other rank to move", "an incident"),
    "finish_timeout_s": (
        "of a rank that has done all its steps, or left a custom loop where all others stand, for any to move",
        "an incident",
    ),
    "newest_timeout_s": (
        "where nothing can be saved, for what there is to go on from instead to be known",
        "nothing is said of it",
    ),
    "hang_notice_s": ("for a step to end on any rank, or some median steps if that is more", "people are told"),
    "hang_timeout_s": ("the same, if it is set", "an incident"),
    "straggler_notice_s": ("of looks at a rank that is slower than its peers", "people are told"),
    "preemption_grace_s": (
        "from the first signal to stop until the processes are taken away, if it is set",
        "a little earlier the incident ends, with what is published by then",
    ),
    "exit_timeout_s": ("for the last session to end", "the controller ends"),
    "step_end_grace_s": ("for the end of a step after a frozen update", "the rank settles in UPDATED"),
    "unprotected_s": (
        "for a controller, of a rank that trains",
        "the rank says that it is unprotected; signals act as without lastwords",
    ),
    "controller_lost_s": ("for a controller, of a rank that can do nothing else", "the rank leaves with the reason"),
    "unanswered_s": (
        "for a sign of life of the controller, of a rank of its host that has something to say",
        "it is asked, and followed if it does not answer within 2 s",
    ),
    "controller_silent_s": (
        "the same, of one that merely trains",
        "it is asked, and followed if it does not answer within 2 s",
    ),
    "update_grace_s": (
        "for the end of a frozen update, of a rank with a copy of the last step",
        "the rank settles with its copy",
    ),
}


def phases_table() -> list[str]:
    methods = list(dict.fromkeys(method for _, method in TRANSITIONS))
    lines = ["| call | " + " | ".join(phase.name for phase in Phase) + " |", "|---|" + "---|" * len(Phase)]
    for method in methods:
        cells = []
        for phase in Phase:
            after, parked = TRANSITIONS.get((phase, method)), PARKED.get((phase, method))
            text = after.name if after is not None else ""
            cells.append(text + (f" *(parks in {parked.name})*" if parked is not None else ""))
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return lines


def states_table() -> list[str]:
    lines = ["| state | can lead to |", "|---|---|"]
    for before, following in NEXT_STATES.items():
        ordered = [state.name for state in NEXT_STATES if state in following]
        lines.append(f"| {before.name} | {', '.join(ordered)} |")
    return lines


def deadlines_table() -> list[str]:
    lines = ["| wait | option | default | when it is over |", "|---|---|---|---|"]
    for options in (ControllerOptions(), ProcessorOptions()):
        for field in dataclasses.fields(options):
            if field.name.endswith("_s"):
                wait, then = WAITS[field.name]
                lines.append(f"| {wait} | `{field.name}` | {getattr(options, field.name):g} s | {then} |")
    return lines


TABLES = {"phases": phases_table, "states": states_table, "deadlines": deadlines_table}


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    made = page
    for name, table in TABLES.items():
        body = "\n".join([f"<!-- {name} -->", *table(), f"<!-- end {name} -->"])
        made, count = re.subn(rf"<!-- {name} -->.*?<!-- end {name} -->", lambda _: body, made, flags=re.DOTALL)  # noqa: B023
        assert count == 1, name
    if os.environ.get("LASTWORDS_REGENERATE") == "1":
        PAGE.write_text(made, encoding="utf-8")
    else:
        assert made.splitlines() == page.splitlines(), "LASTWORDS_REGENERATE=1 writes the tables anew"


@pytest.mark.parametrize("union", [vocabulary.Report, vocabulary.Order], ids=["reports", "orders"])
def test_the_page_has_a_line_for_every_message(union: object) -> None:
    page = PAGE.read_text(encoding="utf-8")
    messages = [kind.__name__ for kind in union.__args__]  # type: ignore[attr-defined]
    assert [name for name in messages if f"| `{name}` |" not in page] == []


def test_the_page_names_the_intervals_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"after {RESEND_INTERVAL_S:g} s, then in pauses that double up to {RESEND_INTERVAL_MAX_S:g} s, until" in page
    assert processor_events.RESEND_INTERVAL_S == 1.0, "the page says `every second`"
    assert f"{STORAGE_FAILURES_MAX} refusals (and one more for every fourth host)" in page


def test_every_invariant_has_its_argument() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [number for number in range(1, 8) if f"**I{number}. " not in page] == []
