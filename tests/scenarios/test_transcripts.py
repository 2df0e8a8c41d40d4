"""Every `*.txt` here is a story: commands (`> ...`), what follows from them, and why, in `#` lines.

The output is compared whole. `LASTWORDS_REGENERATE=1 pytest tests/scenarios` writes it anew; review the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.scenarios.story import Story

HERE = Path(__file__).parent
TRANSCRIPTS = sorted(HERE.glob("*.txt"))


def retell(text: str) -> str:
    """The transcript with the output that its commands have now."""
    story = Story()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("> "):
            lines.append(line)
            lines += [f"  {output}" for output in story.run(line[2:])]
        elif line.startswith("#") or not line.strip():
            lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=[path.stem for path in TRANSCRIPTS])
def test_the_story_is_told_as_it_happens(path: Path) -> None:
    written = path.read_text(encoding="utf-8")
    told = retell(written)
    if os.environ.get("LASTWORDS_REGENERATE") == "1":
        path.write_text(told, encoding="utf-8")
    else:
        assert told.splitlines() == written.splitlines(), "LASTWORDS_REGENERATE=1 writes the transcript anew"


def test_a_transcript_that_is_wrong_is_noticed() -> None:
    written = TRANSCRIPTS[0].read_text(encoding="utf-8")
    assert retell(written.replace("Welcome", "Farewell")) != written.replace("Welcome", "Farewell")
