"""A child that is forked inside `with tft:` leaves it at once, however it does, and writes nothing of its parent's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.harness import free_port

pytestmark = pytest.mark.process

WAIT_S = 120.0

SCRIPT = """
import os, signal, sys, time
import torch
import lastwords

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
optimizer = lastwords.OptTFTWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
loader = torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=4)
tft = lastwords.TFTRegister(0, "127.0.0.1", int(sys.argv[2]), sys.argv[1], model=model, optimizer=optimizer)


def train(batch):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()


def leaves_by_the_end():
    return


def leaves_by_an_exception():
    raise ValueError("the child's own")


def leaves_by_exit():
    sys.exit(7)


def trains_on():
    for _ in range(3):
        train(torch.randn(4, 4))
        tft._run.end_step(None)


WAYS = {leaves_by_the_end: 0, leaves_by_an_exception: 1, leaves_by_exit: 7, trains_on: 0}
children = {}
box = None
child = False
with tft:
    for epoch, step, batch in tft.steps(loader, epochs=1):
        train(batch)
        if step == 3:
            box = tft._run.protection.box_path(0)
            before = box.read_bytes()
            for way in WAYS:
                pid = os.fork()
                if pid == 0:
                    child = True
                    way()
                    break
                children[pid] = way
            if child:
                break
            deadline_s = time.monotonic() + 60
            found = {}
            while len(found) < len(children) and time.monotonic() < deadline_s:
                for pid, way in children.items():
                    if pid not in found and os.waitpid(pid, os.WNOHANG)[0]:
                        found[pid] = way
                time.sleep(0.01)
            for pid, way in children.items():
                if pid not in found:
                    print("HANGS", way.__name__, flush=True)
                    os.kill(pid, signal.SIGKILL)
            print("BOX", box.read_bytes() == before, flush=True)
if child:
    print("LEFT", flush=True)
else:
    print("DONE", flush=True)
"""


def test_a_forked_child_leaves_at_once_and_does_not_touch_the_black_box(tmp_path: Path) -> None:
    port = free_port()
    environ = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    environ["OMP_NUM_THREADS"] = (
        "1"  # OpenMP's threads do not survive a fork: a child that computes would wait for them
    )
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(port)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    said = done.stdout.split("\n")
    assert "HANGS" not in done.stdout, done.stdout + done.stderr
    assert "BOX True" in said, done.stdout + done.stderr
    assert (said.count("LEFT"), said.count("DONE"), done.returncode) == (2, 1, 0), done.stdout + done.stderr
    assert "the child's own" in done.stderr
    assert not list(tmp_path.glob("tft_saved*")), "no child's end is an incident"
