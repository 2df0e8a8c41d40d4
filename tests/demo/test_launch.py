"""The demo leaves no process behind, whatever happens to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo.launch import descendants

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
