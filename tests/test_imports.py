"""The import contracts of .importlinter hold, and each of them can break."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "src",
    "controller",
    "processor",
    "optim_wrapper",
    "sharding",
    "checkpoint",
    "launcher",
    "liveness",
    "integrations",
    "page",
    "drill",
    "cli",
)
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of everything that is shipped, with its links."""
    for folder in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / ".importlinter", tmp_path)
    return tmp_path


def test_the_import_contracts_hold(tree: Path) -> None:
    linted = lint(tree)
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.ci
@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("processor/saver.py", "import lastwords.controller.events", "Imports point one way"),
        ("checkpoint/layout.py", "import lastwords.liveness.paths", "Imports point one way"),
        ("processor/saver.py", "import torch", "torch stays in optim_wrapper"),
        ("liveness/paths.py", "import lastwords.transport", "checkpoint and liveness know nothing of gRPC"),
        ("controller/takeover.py", "import lastwords.page.watch", "Imports point one way"),
        ("optim_wrapper/launch/startup.py", "import lastwords.controller.server", "only how to start a controller"),
    ],
)
def test_an_import_that_points_the_wrong_way_breaks_a_contract(
    tree: Path, module: str, line: str, contract: str
) -> None:
    with (tree / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    linted = lint(tree)
    assert linted.returncode != 0
    broken = [text for text in linted.stdout.splitlines() if "BROKEN" in text]
    assert any(contract in text for text in broken), linted.stdout


def test_a_module_without_a_place_breaks_the_layers(tree: Path) -> None:
    (tree / "src" / "lastwords" / "misplaced.py").write_text('"""Nobody has said where this belongs."""\n')
    assert lint(tree).returncode != 0
