"""The demo leaves no process behind, whatever happens to it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from demo import launch, story
from demo.launch import Training, descendants

ROOT = Path(__file__).resolve().parents[2]
DEMO_THAT_FAILS = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
from demo.launch import no_process_left_behind
GRANDCHILD = "import time; print(1, flush=True); time.sleep(600)"
CHILD = (
    "import subprocess, sys\\n"
    f"command = [sys.executable, '-c', {GRANDCHILD!r}]\\n"
    "child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)\\n"
    "child.stdout.readline()\\n"
    "print(child.pid, flush=True)"
)
with no_process_left_behind():
    child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True, stdout=subprocess.PIPE)
    print(int(child.stdout.readline()), flush=True)
    child.wait()
    raise SystemExit(3)
"""


@pytest.mark.process
def test_an_orphan_in_a_session_of_its_own_ends_with_the_demo() -> None:
    command = [sys.executable, "-c", DEMO_THAT_FAILS, str(ROOT)]
    demo = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert demo.returncode == 3, demo.stderr
    orphan = int(demo.stdout)
    assert not Path(f"/proc/{orphan}").exists()


@pytest.mark.process
def test_descendants_are_found_across_sessions() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as child:
        assert child.pid in descendants(os.getpid())
        child.communicate(b"\n")
    assert child.pid not in descendants(os.getpid())


def test_training_runs_where_the_project_is_whatever_becomes_of_the_callers_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(launch.subprocess, "Popen", lambda command, **options: started.append(options))
    Training("demo.train", tmp_path / "run", 2, tmp_path / "checkpoints", [])
    assert started[0]["cwd"] == ROOT


def test_a_relative_output_directory_means_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    story.add_arguments(parser)
    assert parser.parse_args(["--out", "here"]).out == tmp_path / "here"


REMOVED = """
import os, sys
os.chdir(sys.argv[1])
if sys.argv[2] == "removed":
    os.rmdir(sys.argv[1])
import torch
print((torch.ones(64, 64) @ torch.ones(64, 64)).sum().item())
"""


@pytest.mark.process
@pytest.mark.parametrize("state", ["there", "removed"])
def test_a_removed_working_directory_is_what_ends_torch_at_its_first_product(state: str, tmp_path: Path) -> None:
    """Why the demo chooses a directory by itself, and what docs/troubleshooting.md says."""
    directory = tmp_path / "gone"
    directory.mkdir()
    command = [sys.executable, "-c", REMOVED, str(directory), state]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if state == "removed" and done.returncode == 0:
        pytest.skip("this torch has no oneMKL, or one that does not mind")
    assert (done.returncode == 0) is (state == "there"), done.stderr
    assert ("load" in done.stdout + done.stderr) is (state == "removed")
