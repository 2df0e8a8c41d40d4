"""A script with more than one loop: each has a directory of its own, and what a loop sets for all of torch is known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lastwords.checkpoint import load
from tests.integration.harness import free_port

pytestmark = pytest.mark.process

SCRIPT = """
import sys
import torch
import lastwords


def train(folder, port, *, breaks=False):
    model = torch.nn.Linear(4, 4)
    optimizer = lastwords.OptTFTWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
    with lastwords.TFTRegister(0, "127.0.0.1", port, folder, model=model, optimizer=optimizer) as tft:
        for _, step, batch in tft.steps(loader, epochs=1):
            optimizer.zero_grad()
            model(batch).sum().backward()
            if step == 2:
                torch.set_float32_matmul_precision("medium" if folder == second else "high")
                tft.save()
                assert not breaks, "as the user's loop does"
            optimizer.step()


first, second, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
try:
    train(first, port, breaks=True)
except AssertionError:
    train(first, port)  # a loop that has not come to its end may be tried again
train(second, port)
try:
    train(first, port)
except lastwords.ConfigError as error:
    print(type(error).__name__)
"""


def test_a_second_loop_in_the_directory_of_one_that_has_ended_is_refused(tmp_path: Path) -> None:
    """A failure in either would send both to the newest checkpoint, whosever it is."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "a"), str(tmp_path / "b"), str(free_port())]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ConfigError"]
    path = load.latest(tmp_path / "b")
    assert path is not None, done.stderr
    with load.open_checkpoint(path) as saved:
        assert saved.manifest.run.matmul_precision == "medium", "not what it was when the loop began"
