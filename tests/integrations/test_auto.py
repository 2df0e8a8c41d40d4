"""`--auto`: which scripts are protected as they are, and what is left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lastwords.integrations import auto
from tests import golden

LIBRARY = """
class Trainer:
    def train(self):
        print("trains")
"""


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import transformers", ["transformers"]),
        ("from transformers import Trainer", ["transformers"]),
        ("def f():\n    import lightning.pytorch as pl", ["lightning"]),
        ("import pytorch_lightning as pl", ["pytorch_lightning"]),
        ("import torch, numpy as transformers", []),
        ("from . import transformers", []),
        ("from mine.transformers import x", []),
        ("import (", []),
    ],
)
def test_what_a_script_imports_is_found_without_running_it(source: str, found: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert auto.imported_by(str(script), auto.LIBRARIES) == found


def test_what_is_no_script_imports_nothing(tmp_path: Path) -> None:
    assert auto.imported_by(str(tmp_path), ["torch"]) == []
    assert auto.imported_by(str(tmp_path / "none.py"), ["torch"]) == []


def said(tmp_path: Path, script: str) -> str:
    """By a script that does what --auto does, then itself; a library of ours stands in for transformers."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "trainer.py").write_text(LIBRARY)
    (tmp_path / "train.py").write_text(script)
    code = (
        "import sys, runpy, logging; sys.path.insert(0, '.'); from lastwords.integrations import auto;"
        "auto._patch_transformers.__code__ = (lambda module: print('patched', module.__name__)).__code__;"
        "auto.install('train.py'); runpy.run_path('train.py')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@pytest.mark.ci
def test_a_trainer_is_patched_once_it_is_imported(tmp_path: Path) -> None:
    golden.says(said(tmp_path, "import transformers.trainer"))


@pytest.mark.ci
def test_a_script_that_uses_lastwords_itself_is_left_alone(tmp_path: Path) -> None:
    golden.says(said(tmp_path, "import transformers.trainer, lastwords"))


@pytest.mark.ci
def test_a_script_without_a_trainer_is_told_so(tmp_path: Path) -> None:
    golden.says(said(tmp_path, "print('a loop of its own')"))
