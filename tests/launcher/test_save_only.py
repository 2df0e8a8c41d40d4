"""`--auto` on scripts without a Trainer: last words at a death, the lines that they need, and nothing by guessing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lastwords.checkpoint.load import scan
from lastwords.processor.departure import EXIT_SAVED
from tests import golden
from tests.launcher import unknown_loop

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

SCRIPT = unknown_loop.__file__
HEALING, TORCHRUN = ("lastwords.cli", "run"), ("torch.distributed.run",)
DIES_AT = 8


def run(
    directory: Path, *arguments: object, launcher: Sequence[str] = (*HEALING, "--auto"), script: str = SCRIPT
) -> str:
    """What a job of two ranks has said. Its exit code is in `code.txt`."""
    command = [sys.executable, "-m", *launcher, "--standalone", "--nproc-per-node", "2", script, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=directory, env=dict(os.environ, OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=240
    )
    (directory / "code.txt").write_text(str(done.returncode))
    return done.stdout + done.stderr


def code(directory: Path) -> int:
    return int((directory / "code.txt").read_text())


def losses(directory: Path) -> list[str]:
    return (directory / "losses.txt").read_text().splitlines()


def of_lastwords(said: str) -> str:
    lines = re.findall(r"^(?:step .*|lastwords[ :].*|    with .*|        .*)$", said, re.M)
    return "\n".join(dict.fromkeys(line for line in lines if "tft" in line or not line.startswith(" ")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Losses of the job under torchrun in which nobody dies."""
    directory = tmp_path_factory.mktemp("whole")
    run(directory, 0, launcher=TORCHRUN)
    return losses(directory)


def test_what_was_trained_is_saved_and_the_lines_that_were_said_go_on_from_it(tmp_path: Path, whole: list[str]) -> None:
    said = run(tmp_path, DIES_AT, launcher=(*HEALING, "--auto", "--max-restarts", "3"))
    golden.says(of_lastwords(said).replace(str(tmp_path), "DIR"))
    assert code(tmp_path) == EXIT_SAVED
    assert losses(tmp_path) == whole[: DIES_AT - 1]
    (saved,) = scan(tmp_path / "last_words")

    again = run(tmp_path, DIES_AT - 2)  # it begins anew, and leaves what is there alone
    assert scan(tmp_path / "last_words") == [saved]
    assert len(scan(tmp_path / "last_words-2")) == 1, again

    (tmp_path / "losses.txt").unlink()
    said = run(tmp_path, 0, "lines", launcher=TORCHRUN)
    assert losses(tmp_path) == whole[DIES_AT - 1 :], said
    golden.says("\n".join(re.findall(r"exact=\w+|'saved by --auto[^']*'", said)))


@pytest.mark.thorough
def test_an_undisturbed_loop_ends_as_without_it(tmp_path: Path, whole: list[str]) -> None:
    said = run(tmp_path, 0)
    assert (code(tmp_path), losses(tmp_path), scan(tmp_path / "last_words")) == (0, whole, []), said


@pytest.mark.thorough
def test_under_torchrun_an_import_saves_too(tmp_path: Path, whole: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(Path(SCRIPT).read_text().replace("import os\n", "import lastwords.auto\nimport os\n", 1))
    run(tmp_path, DIES_AT, launcher=TORCHRUN, script=str(script))
    assert losses(tmp_path) == whole[: DIES_AT - 1]
    assert len(scan(tmp_path / "last_words")) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["gan", "two"])
def test_a_loop_of_which_too_little_is_known_is_refused_before_its_first_update(kind: str, tmp_path: Path) -> None:
    said = run(tmp_path, 0, kind)
    golden.says("\n".join(dict.fromkeys(re.findall(r"unknown_loop.py:\d+: (--auto.*?)\)?$", said, re.M))))
    assert not (tmp_path / "losses.txt").exists()
