"""A training script as people write it: much of its state is at the top, and it knows nothing of `lastwords run`.

Arguments: a directory, steps, and deaths as rank:step, each of which happens once. Each rank appends to
{directory}/begun-{rank} what it finds as it begins, and to rows-{rank}.csv a line per step, which nobody flushes;
final-{rank} is all of its state at the end, left-{rank}-* stands for each time that it was told to leave, and
ended-{rank} for each process that has come to its end.
"""

from __future__ import annotations

import os

STARTED_WITH = os.environ.setdefault("STARTED_WITH", str(os.getpid()))
import torch  # noqa: E402

DTYPE = torch.get_default_dtype()
torch.set_default_dtype(torch.float64)
import atexit  # noqa: E402
import csv  # noqa: E402
import functools  # noqa: E402
import hashlib  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import math  # noqa: E402
import multiprocessing  # noqa: E402
import queue  # noqa: E402
import random  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split  # noqa: E402

import lastwords  # noqa: E402

DIRECTORY, STEPS, DEATHS = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
ARGUMENTS, sys.argv = len(sys.argv) - len(DEATHS), ["train"]
random.seed(11)
np.random.seed(12)
rank = int(os.environ["RANK"])
ranks = int(os.environ["WORLD_SIZE"])
generator = torch.Generator().manual_seed(3)
of_numpy, of_python = np.random.default_rng(5), random.Random(6)
history: list[float] = []
calls, best_loss = 0, math.inf
if rank == 0:
    import wave  # noqa: F401

log = logging.getLogger("train")
log.addHandler(logging.FileHandler(DIRECTORY / f"log-{rank}"))
losses: queue.Queue[float | None] = queue.Queue()
atexit.register(lambda: (DIRECTORY / f"ended-{rank}").open("a").write("once\n"))


def write_down() -> None:
    """What a thread does."""
    while (loss := losses.get()) is not None:
        log.warning("%r", loss)


writer = threading.Thread(target=write_down, daemon=True)
writer.start()


class Samples(Dataset[torch.Tensor]):
    """Those that a worker gives are drawn anew each time."""

    given = 0

    def __init__(self) -> None:
        self.samples = torch.randn((STEPS * 4 + 6) * ranks, 16, generator=generator)
        self.order = of_numpy.permutation(len(self.samples)).tolist()
        of_python.shuffle(self.order)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        Samples.given += 1
        return self.samples[self.order[index]] + 0.1 * torch.randn(16)


@functools.cache
def scale(width: int) -> float:
    """Computed once."""
    return width**-0.5 * (1 + len(history))


progress: dict[str, Any] = {"losses": [], "best": math.inf, "calm": 0}
"""What the loop goes by, which is handed over."""


def note(loss: float) -> bool:
    """Whether the loss has not fallen for three steps."""
    progress["losses"].append(loss)
    progress["calm"] = 0 if loss < progress["best"] else progress["calm"] + 1
    progress["best"] = min(progress["best"], loss)
    return bool(progress["calm"] == 3)


def die(step: int) -> None:
    """Here, if the plan says so, once all ranks have come to it: what they have written of the step before stays."""
    for death in DEATHS:
        whose, _, at = death.partition(":")
        mark = DIRECTORY / f"died-{whose}-{at}"
        if at == str(step) and not mark.exists():
            dist.barrier()
            if whose == str(rank):
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    global calls, best_loss
    calls += 1
    dist.init_process_group("gloo")
    multiprocessing.set_start_method("fork")
    found: dict[str, object] = {"calls": calls, "history": len(history), "best": best_loss, "drawn": random.random()}
    found |= {"dtype": str(DTYPE), "own": str(os.getpid()) == STARTED_WITH, "arguments": ARGUMENTS}
    found |= {"given": Samples.given, "cached": scale.cache_info().currsize, "scale": scale(16)}
    found |= {"threads": [one.name for one in threading.enumerate()][:2], "wave": "wave" in sys.modules}
    torch.manual_seed(7 + calls + len(history))
    import tests.launcher.drawing  # noqa: F401

    found["then"] = random.random(), np.random.random(), torch.rand(1).item()
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 16))
    model = DistributedDataParallel(torch.compile(net, backend="aot_eager"))
    training, rest = random_split(Samples(), [STEPS * 4 * ranks, 6 * ranks], generator=generator)
    found["split"] = hashlib.sha256(str([*training.indices, *rest.indices]).encode()).hexdigest()
    sampler: DistributedSampler[object] = DistributedSampler(training, shuffle=True)
    loader = DataLoader(training, batch_size=4, sampler=sampler, num_workers=1, persistent_workers=True)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tft = lastwords.protect(DIRECTORY / "ckpt", model=model, optimizer=sgd, local_extras={"progress": progress})
    rows = csv.writer(open(DIRECTORY / f"rows-{rank}.csv", "a"))  # noqa: SIM115
    with tft:
        tft.on_leave(lambda: (DIRECTORY / f"left-{rank}-{os.getpid()}").touch())
        point = tft.resume(missing_ok=True)
        with (DIRECTORY / f"begun-{rank}").open("a") as file:
            file.write(json.dumps(found) + "\n")
        for _, step, batch in tft.steps(loader, epochs=1):
            tft.optimizer.zero_grad()
            noise = random.random() * of_python.random() + of_numpy.random() + np.random.random()
            loss = scale(16) * (model(batch) - noise * batch).pow(2).mean()
            die(step)
            loss.backward()
            history.append(loss.item())
            losses.put(loss.item())
            best_loss = min(best_loss, loss.item())
            total = loss.detach().clone()
            dist.all_reduce(total)
            if note(total.item()):
                tft.optimizer.param_groups[0]["lr"] *= 0.7
            tft.optimizer.step()
            rows.writerow([step, repr(loss.item())])
    losses.put(None)
    writer.join()
    state = [*net.state_dict().values(), *(one["momentum_buffer"] for one in sgd.state.values())]
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in state)).hexdigest()
    end = [digest, progress, sgd.param_groups[0]["lr"], random.random(), torch.rand(1).item()]
    (DIRECTORY / f"final-{rank}").write_text(json.dumps(end))
    if point is not None:
        (DIRECTORY / f"beside-{rank}").write_text("\n".join(point.beside))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
