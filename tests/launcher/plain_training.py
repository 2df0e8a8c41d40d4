"""A training script as people write it: much of its state is at the top, and it knows nothing of `lastwords run`.

Arguments: a directory, steps, and deaths as rank:step, each of which happens once. Each rank appends to
{directory}/begun-{rank} what it finds as it begins, and to rows-{rank}.csv a line per step, which nobody flushes;
final-{rank} is all of its state at the end, and left-{rank}-* stands for each time that it was told to leave.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

import lastwords

DIRECTORY, STEPS, DEATHS = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
random.seed(11)
rank = int(os.environ["RANK"])
ranks = int(os.environ["WORLD_SIZE"])
generator = torch.Generator().manual_seed(3)
history: list[float] = []
calls, best_loss = 0, math.inf


progress: dict[str, Any] = {"losses": [], "best": math.inf, "calm": 0}
"""What the loop goes by, which is handed over."""


def note(loss: float) -> bool:
    """Whether the loss has not fallen for three steps."""
    progress["losses"].append(loss)
    progress["calm"] = 0 if loss < progress["best"] else progress["calm"] + 1
    progress["best"] = min(progress["best"], loss)
    return bool(progress["calm"] == 3)


def die(step: int) -> None:
    """Here, if the plan says so."""
    mark = DIRECTORY / f"died-{rank}-{step}"
    if f"{rank}:{step}" in DEATHS and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    global calls, best_loss
    calls += 1
    dist.init_process_group("gloo")
    found: dict[str, object] = {"calls": calls, "history": len(history), "best": best_loss, "drawn": random.random()}
    torch.manual_seed(7 + calls + len(history))
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 16))
    model = DistributedDataParallel(net)
    samples = torch.randn((STEPS * 4 + 6) * ranks, 16, generator=generator)
    training, rest = random_split(TensorDataset(samples), [STEPS * 4 * ranks, 6 * ranks], generator=generator)
    found["split"] = hashlib.sha256(str([*training.indices, *rest.indices]).encode()).hexdigest()
    sampler: DistributedSampler[object] = DistributedSampler(training, shuffle=True)
    loader = DataLoader(training, batch_size=4, sampler=sampler)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tft = lastwords.protect(DIRECTORY / "ckpt", model=model, optimizer=sgd, local_extras={"progress": progress})
    rows = csv.writer(open(DIRECTORY / f"rows-{rank}.csv", "a"))  # noqa: SIM115
    with tft:
        tft.on_leave(lambda: (DIRECTORY / f"left-{rank}-{os.getpid()}").touch())
        point = tft.resume(missing_ok=True)
        with (DIRECTORY / f"begun-{rank}").open("a") as file:
            file.write(json.dumps(found) + "\n")
        for _, step, (batch,) in tft.steps(loader, epochs=1):
            tft.optimizer.zero_grad()
            loss = (model(batch) - random.random() * batch).pow(2).mean()
            die(step)
            loss.backward()
            history.append(loss.item())
            best_loss = min(best_loss, loss.item())
            if note(loss.item()):
                tft.optimizer.param_groups[0]["lr"] *= 0.7
            tft.optimizer.step()
            rows.writerow([step, repr(loss.item())])
    state = [*net.state_dict().values(), *(one["momentum_buffer"] for one in sgd.state.values())]
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in state)).hexdigest()
    end = [digest, progress, sgd.param_groups[0]["lr"], random.random(), torch.rand(1).item()]
    (DIRECTORY / f"final-{rank}").write_text(json.dumps(end))
    if point is not None:
        (DIRECTORY / f"beside-{rank}").write_text("\n".join(point.beside))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
