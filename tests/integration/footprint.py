"""A protected rank that writes down what lastwords has changed in its process: before, in and after the loop.

python -m tests.integration.footprint RANK WORLD_SIZE DIRECTORY
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ENVIRONMENT_BEFORE = dict(os.environ)

import lastwords  # noqa: E402  the environment has to be looked at before


def children() -> list[list[str]]:
    """Command lines of this process's living children."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except FileNotFoundError:  # a thread that has ended meanwhile
            continue
        for pid in pids:
            line = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if line != [""]:  # a zombie has none
                found.append(line)
    return found


def footprint(model: torch.nn.Module) -> dict[str, Any]:
    """Everything that can be seen from inside."""
    wakeup_fd = signal.set_wakeup_fd(-1)
    if wakeup_fd >= 0:
        signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "all_daemon": all(one.daemon for one in threading.enumerate() if one is not threading.main_thread()),
        "environment": {key: value for key, value in os.environ.items() if ENVIRONMENT_BEFORE.get(key) != value},
        "handlers": {number.name: repr(signal.getsignal(number)) for number in signal.Signals},
        "excepthook": repr(sys.excepthook),
        "wakeup_fd": wakeup_fd,
        "hooks": sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
            for module in model.modules()
        )
        + sum(
            len(one._backward_hooks or ()) + len(one._post_accumulate_grad_hooks or ()) for one in model.parameters()
        ),
        "children": children(),
    }


def main() -> None:
    rank, world_size, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = {"before": footprint(model)}
    optimizer = lastwords.OptTFTWrapper(inner)
    loader = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4)
    tft = lastwords.TFTRegister(
        0, "127.0.0.1", 0, directory / "checkpoints", model=model, optimizer=optimizer, extras={"e": {"a": 1}}
    )
    with tft:
        for _, step, batch in tft.steps(loader, epochs=1):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            if step == 3:
                seen["inside"] = footprint(model)
    seen["after"] = footprint(model)
    (directory / f"footprint_{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
