"""A data-parallel job whose steps take one rank longer: `python -m tests.integration.uneven_training PLAN.json`.

It trains until the file "last" in its folder names the step after which every rank leaves.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lastwords

PLAN: dict[str, Any] = {
    "out": "",
    "checkpoints": "",
    "port": 0,
    "step_s": 0.025,  # what a step takes every rank, and waits for nobody
    "slow": None,  # [rank, seconds]: that much longer on this rank
    "validates": None,  # [rank, steps, seconds]: this rank is busy for that long after every so many steps
}


def last_step(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 1 << 40  # not yet


def main(arguments: list[str]) -> None:
    plan = PLAN | json.loads(Path(arguments[0]).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = lastwords.OptTFTWrapper(torch.optim.SGD(net.parameters(), lr=0.01))
    work_s = plan["step_s"] + (plan["slow"][1] if plan["slow"] and plan["slow"][0] == rank else 0.0)
    with lastwords.TFTRegister(
        0, "127.0.0.1", plan["port"], plan["checkpoints"], model=net, optimizer=optimizer
    ) as tft:  # fmt: skip
        step = 0
        while step < last_step(Path(plan["out"]) / "last"):
            optimizer.zero_grad()
            time.sleep(work_s)
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            tft.step_end()
            step += 1
            if plan["validates"] and plan["validates"][0] == rank and step % plan["validates"][1] == 0:
                time.sleep(plan["validates"][2])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
