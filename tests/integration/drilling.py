"""Runs `lastwords drill` for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.harness import FORGOTTEN_ENVIRONMENT, RANK_ENVIRONMENT

LIMIT_S = 600.0


@dataclass(frozen=True)
class Said:
    """By a drill. report: its JSON; None if there is none."""

    code: int
    text: str
    report: Any


def drilled(folder: Path, *flags: str, command: tuple[str, ...], limit_s: float = LIMIT_S) -> Said:
    """The command is drilled in this directory, where its report and whatever it leaves lie afterwards."""
    environment = {name: value for name, value in os.environ.items() if name not in FORGOTTEN_ENVIRONMENT}
    written, scratch = folder / "report.json", folder / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "lastwords.cli", "drill", "--json", str(written), *flags, "--", *command],
        cwd=folder,
        env={**environment, **RANK_ENVIRONMENT, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    text = done.stdout + done.stderr
    return Said(done.returncode, text, json.loads(written.read_text()) if written.exists() else None)
