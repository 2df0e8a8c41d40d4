"""The drills of examples/README.md: each command, as it stands there, finds what the table below it says.

`make ci-frameworks` runs them with the pinned versions of transformers and lightning.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from lastwords.drill.compare import BITWISE, DIFFERS, TOLD
from lastwords.drill.phases import NAMES
from tests.integration.drilling import drilled
from tests.launcher.forked import ROOT

EXAMPLES = ROOT / "examples"
DRILLS = re.findall(
    r"^```\n\$ lastwords drill (.*?)-- (\S+)(.*)\n((?:.+\n)+?)```$",
    (EXAMPLES / "README.md").read_text(encoding="utf-8"),
    flags=re.MULTILINE,
)
"""Flags, script, its arguments, and the table."""
NEEDS = {"hf_finetune.py": "transformers", "lightning_fit.py": "lightning"}
MISSED = "not drilled"
VERDICTS = {"bitwise": BITWISE, "state": BITWISE, "told": TOLD, "differs": DIFFERS, "not": MISSED}
"""First word of a table's last column -> what the report calls it."""

WAIT_S = 3000.0


def printed(table: str) -> dict[str, str]:
    """Phase -> verdict, of a drill's table."""
    rows = [re.split(r" {2,}", line.strip()) for line in table.splitlines()]
    return {row[0]: VERDICTS[re.split(r"\W", row[-1])[0]] for row in rows if row[0] in NAMES}


def found(report: dict[str, Any]) -> dict[str, str]:
    """The same, of its report."""
    return {one["phase"]: one["verdict"] for one in report["drills"]} | dict.fromkeys(report["missed"], MISSED)


def test_each_example_is_drilled_in_each_phase() -> None:
    assert sorted(script for _, script, _, _ in DRILLS) == sorted(
        f"examples/{one.name}" for one in EXAMPLES.glob("*.py")
    )
    assert [set(printed(table)) for *_, table in DRILLS] == [set(NAMES)] * len(DRILLS)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(WAIT_S)
@pytest.mark.parametrize(("flags", "script", "arguments", "table"), DRILLS, ids=[script for _, script, _, _ in DRILLS])
def test_a_drill_of_an_example_says_what_the_readme_says(
    tmp_path: Path, flags: str, script: str, arguments: str, table: str
) -> None:
    library = NEEDS.get(Path(script).name)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: make ci-frameworks")
    said = drilled(tmp_path, *flags.split(), command=(str(ROOT / script), *arguments.split()), limit_s=WAIT_S)
    assert said.report is not None, said.text
    assert found(said.report) == printed(table), f"{said.text}\n{said.report}"


@pytest.mark.slow
@pytest.mark.process
def test_an_evaluation_that_draws_anew_is_told(tmp_path: Path) -> None:
    """Negative control, and why nanogpt.py draws its held-out batches once."""
    text = (EXAMPLES / "nanogpt.py").read_text(encoding="utf-8")
    before, once, after = text.partition(" in held_out")
    script = tmp_path / "nanogpt.py"
    script.write_text(f"{before} in (batch() for _ in range(4)){after}")
    assert once
    said = drilled(tmp_path, "--phases", "evaluation", command=(str(script), "--evaluate-every", "5"))
    assert found(said.report) == {"evaluation": TOLD}, said.text
