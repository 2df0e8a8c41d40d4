"""A notebook: a job of one process, whose cells end with an exception or an interrupt while the kernel lives on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import FORGOTTEN_ENVIRONMENT, RANK_ENVIRONMENT

pytestmark = [pytest.mark.process, pytest.mark.thorough]

CELL = """
import json, signal, threading
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lastwords

def train(name, end=None):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(2)))
    losses = {}
    with lastwords.protect(name, model=net, optimizer=optimizer, in_place=True) as tft:
        point = tft.resume(missing_ok=True)
        step = 0 if point is None else point.global_step
        for *_, (x,) in tft.steps(DataLoader(data, 8, shuffle=True), epochs=2):
            step += 1
            loss = net(x).square().mean()
            if step == 5 and end is not None:
                end()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[step] = loss.item().hex()
    Path(name, "said").write_text(json.dumps([losses, None if point is None else point.exact]))

signal.signal(signal.SIGINT, signal.default_int_handler)  # as a kernel does
"""


def kernel(folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """It reads these lines, after the cell, until one of them kills it."""
    environment = {name: value for name, value in os.environ.items() if name not in FORGOTTEN_ENVIRONMENT}
    return subprocess.run(
        [sys.executable, "-i", "-u"],
        input="\n".join([f"exec({CELL!r})", *lines, ""]),
        cwd=folder,
        env={**environment, **RANK_ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def said(folder: Path, name: str) -> Any:
    """Losses of the loop that came to its end, and whether its resume was exact; None if it was none."""
    return json.loads((folder / name / "said").read_text())


def test_an_exception_or_an_interrupt_is_saved_and_a_kernel_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    raised = kernel(
        tmp_path,
        "train('whole')",
        "train('raised', lambda: 1 / 0)",
        "signal.raise_signal(signal.SIGINT)",
        "train('raised')",
        "signal.raise_signal(signal.SIGINT)",
        "train('interrupted', lambda: (signal.raise_signal(signal.SIGINT), threading.Event().wait()))",
        "Path('lives').touch()",
    )
    assert raised.returncode == 75, raised.stderr
    assert [raised.stderr.count(f"\n{error}") for error in ("ZeroDivisionError", "KeyboardInterrupt")] == [1, 2]
    assert not (tmp_path / "lives").exists(), "an interrupt of a loop ends the kernel, and no other does"
    killed = kernel(tmp_path, "train('interrupted')", "train('killed', lambda: signal.raise_signal(signal.SIGKILL))")
    assert killed.returncode == -9, killed.stderr
    last = kernel(tmp_path, "train('killed')")
    whole, _ = said(tmp_path, "whole")
    rest = {step: loss for step, loss in whole.items() if int(step) >= 5}
    assert len(rest) == 12
    assert said(tmp_path, "raised") == [rest, True], raised.stderr
    assert said(tmp_path, "interrupted") == [rest, True], killed.stderr
    assert said(tmp_path, "killed") == [whole, None], last.stderr
