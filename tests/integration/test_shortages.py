"""No free descriptor while the controller is killed: another one follows as soon as there are some again."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lastwords.liveness import paths
from tests.integration.harness import free_port

BEGIN = """
import os, resource, signal, subprocess, sys, threading
from pathlib import Path
from lastwords.controller import handover
from lastwords.controller.events import Remember
from lastwords.controller.launch import start_successor
from lastwords.controller.events import JobMemory
from lastwords.controller.handover import ControllerSpec
from lastwords.controller.handover import StateFile, StateOwner
from lastwords.errors import LastWordsError, is_shortage
from lastwords.liveness import paths, process_id
from lastwords.liveness.pidfd import PidWatcher
from lastwords.optim_wrapper.launch import successor
from lastwords.processor.events import ProcessorOptions
from lastwords.processor.ring import Silence

HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

def leave_descriptors(free):
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, HARD))

def end_shortage():
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(HARD, 1024), HARD))

root, job, free = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
path = paths.state_path(job, 1)
path.parent.mkdir(mode=0o700)
killed = subprocess.Popen(["sleep", "60"])
owner = StateOwner(killed.pid, process_id.start_ticks(killed.pid))
spec = ControllerSpec("127.0.0.1", int(sys.argv[4]), job, 1, 2, root)
StateFile(path, owner, spec, "t0ken").write(Remember((), JobMemory()))
"""

WATCH = """
successor.TRIES_MAX = 1
pids, watched, followed = PidWatcher(), threading.Event(), threading.Event()
def when_ended(process, on_end):
    pids.add(process, on_end)
    (watched if process.pid == killed.pid else followed).set()
watch = successor.ControllerWatch(
    "rank 0", path, when_ended, lambda: 0, lambda: True, Silence(ProcessorOptions()), lambda: False
)
leave_descriptors(0)
watch.start()
end_shortage()
assert watched.wait(10), "not watched"
leave_descriptors(free)
killed.kill()
killed.wait()
watch._thread.join(1.0)
end_shortage()
assert followed.wait(30), "not followed"
watch.stop()
os.kill(successor.handover.owner(path).pid, signal.SIGKILL)
"""

START = """
killed.kill()
killed.wait()
before = os.listdir("/proc/self/fd")
leave_descriptors(free)
try:
    start_successor(path)
except LastWordsError as error:
    assert is_shortage(error), error
else:
    raise AssertionError
end_shortage()
assert os.listdir("/proc/self/fd") == before, "something is left open"
"""

SERVE = """
import threading
from lastwords import threads
from lastwords.controller import __main__ as controller
threads._PAUSES_S = (0.1,)
start = threading.Thread.start

def refuse(self):
    if self.name.startswith(("lastwords-host-watch", "lastwords-lines")[free]):
        assert not handover.run_file_path(spec.ip, spec.port).exists(), "it says that it serves"
        raise RuntimeError("can't start new thread")
    start(self)

os.environ["LASTWORDS_TOKEN"] = "t0ken"
killed.kill()
path.unlink()
threading.Thread.start = refuse
assert controller.main([spec.to_json()]) == 1
assert not path.exists(), "state is left of a controller that never served"
os._exit(0)
"""


def run(script: str, tmp_path: Path, free: int) -> None:
    """In a process of its own, whose descriptors may be taken away."""
    job = f"shortages-{secrets.token_hex(4)}"
    command = [sys.executable, "-c", BEGIN + script, str(tmp_path), job, str(free), str(free_port())]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    finally:
        shutil.rmtree(paths.state_path(job, 1).parent, ignore_errors=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.ci
@pytest.mark.parametrize("free", [0, 1], ids=["who served cannot be read", "no process can be started"])
def test_who_has_no_descriptor_when_the_controller_is_killed_starts_it_again_later(tmp_path: Path, free: int) -> None:
    run(WATCH, tmp_path, free)


@pytest.mark.ci
@pytest.mark.parametrize("free", range(5))
def test_a_controller_that_cannot_be_started_for_lack_of_descriptors_leaves_none_open(
    tmp_path: Path, free: int
) -> None:
    run(START, tmp_path, free)


@pytest.mark.ci
@pytest.mark.parametrize("lacking", [0, 1], ids=["that watches", "that writes"])
def test_a_controller_that_lacks_a_thread_never_begins_to_serve(tmp_path: Path, lacking: int) -> None:
    run(SERVE, tmp_path, lacking)
