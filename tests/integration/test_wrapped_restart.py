"""A restart by torchrun through a wrapper, with another controller port each time: it goes on where it was killed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

WAIT_S = 300.0

TRAIN = """
import os, signal, sys
import torch
import torch.distributed as dist
import lastwords

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = lastwords.OptTFTWrapper(torch.optim.AdamW(model.parameters(), lr=0.1))
loader = torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=4)
port = int(sys.argv[2 + attempt])
tft = lastwords.TFTRegister(0, "127.0.0.1", port, sys.argv[1], model=model, optimizer=optimizer)
with tft:
    point = tft.resume() if tft.restarted else None
    print(f"attempt {attempt} begins after {point and point.global_step}", flush=True)
    for epoch, step, batch in tft.steps(loader, epochs=1):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if (attempt, step, dist.get_rank()) == (0, 5, 1):
            os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""


def test_a_restart_through_a_wrapper_goes_on_after_the_last_words(tmp_path: Path) -> None:
    script, wrapper = tmp_path / "train.py", tmp_path / "wrap.sh"
    script.write_text(TRAIN)
    wrapper.write_text('#!/bin/sh\n"$@"\nexit $?\n')  # not exec: the shell stays the parent
    wrapper.chmod(0o755)
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = [str(probe.getsockname()[1]) for probe in (one, other)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "--no-python", str(wrapper), sys.executable, str(script), str(tmp_path / "ckpt"), *ports],
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    begins = sorted(re.findall(r"attempt \d begins after (?:None|\d+)", done.stdout))
    assert begins == ["attempt 0 begins after None"] * 2 + ["attempt 1 begins after 5"] * 2, done.stdout + done.stderr
