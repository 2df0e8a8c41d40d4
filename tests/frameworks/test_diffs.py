"""The diff of docs/integrations.md for accelerate, as it stands there, and the same for Fabric: drilled, and exact.

`make ci-frameworks` installs them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lastwords.drill.compare import BITWISE, DIFFERS
from tests import readme
from tests.integration.drilling import Said, drilled
from tests.launcher.forked import ROOT

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]

DIFF = readme.block("diff", "accelerator.prepare", (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8"))
PREPARE = next(line[1:] for line in DIFF.splitlines() if "accelerator.prepare" in line)
SETUPS = {
    "accelerate": ("from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)", {}),
    "lightning": (
        "from lightning.fabric import Fabric\n"
        'fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")\nfabric.launch()',
        {
            PREPARE: "model, optimizer = fabric.setup(model, optimizer)\nloader = fabric.setup_dataloaders(loader)",
            "accelerator.": "fabric.",
        },
    ),
}
"""Package -> what comes first, and what is called otherwise there."""

BEFORE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lastwords
{setup}
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)
drawn = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(80, 10, generator=drawn), torch.randint(0, 4, (80,), generator=drawn))
loader, epochs, loss_fn = DataLoader(data, 8, shuffle=True), 3, nn.functional.cross_entropy
"""


def drill(folder: Path, package: str, phases: str, left_out: str = "") -> Said:
    """The diff's new side in a script, without what is left out."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make ci-frameworks")
    setup, others = SETUPS[package]
    text = "\n".join(line[1:] for line in DIFF.splitlines() if line[0] != "-")
    for word, other in {**others, **({left_out: ""} if left_out else {})}.items():
        assert word in text
        text = text.replace(word, other)
    (folder / "train.py").write_text(BEFORE.format(setup=setup) + text)
    said = drilled(folder, "--phases", phases, command=("train.py",))
    assert said.report is not None, said.text
    return said


@pytest.mark.parametrize("package", SETUPS)
def test_three_lines_make_a_loop_exact(package: str, tmp_path: Path) -> None:
    said = drill(tmp_path, package, "forward,after-update,epoch-end")
    found = {one["phase"]: (one["verdict"], one["reasons"]) for one in said.report["drills"]}
    assert found == dict.fromkeys(("forward", "after-update", "epoch-end"), (BITWISE, [])), said.text


def test_without_the_scheduler_it_differs(tmp_path: Path) -> None:
    """Negative control."""
    said = drill(tmp_path, "accelerate", "forward", left_out='"scheduler": scheduler')
    assert [one["verdict"] for one in said.report["drills"]] == [DIFFERS], said.text
