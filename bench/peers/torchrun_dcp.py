"""Plain DDP (--every 0), or DDP with torch.distributed.checkpoint every k steps, restarted as a whole by torchrun."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from bench.peers.workload import UpdateLog, Workload, directory, goes_on


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints; 0: none")
    parser.add_argument("--asynchronous", action="store_true", help="async_save")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    workload = Workload(dist.get_rank())
    log = UpdateLog(workload)
    model = DistributedDataParallel(workload.net)
    step = load(workload)
    beside = dist.new_group(backend="gloo") if options.asynchronous else None  # the training's own would be confused
    saving: Any = None
    while goes_on(step):
        step += 1
        loss = workload.update(model, workload.optimizer, step)
        log.updated(step, dist.get_world_size(), loss)
        if options.every and step % options.every == 0:
            if saving is not None:
                saving.result()
            saving = save(workload, step, beside)
    if saving is not None:
        saving.result()
    dist.destroy_process_group()


def state(workload: Workload, step: int) -> dict[str, Any]:
    """What a checkpoint holds; each rank has its own random numbers."""
    model, optimizer = get_state_dict(workload.net, workload.optimizer)
    return {"model": model, "optimizer": optimizer, "step": step, f"rng_{workload.rank}": torch.get_rng_state()}


def save(workload: Workload, step: int, beside: dist.ProcessGroup | None) -> Any:
    """None, or the future of a checkpoint that is written in the background, in the group `beside`."""
    path = directory() / "checkpoints" / f"{step:06d}"
    if beside is not None:
        return state_dict_saver.async_save(state(workload, step), checkpoint_id=path, process_group=beside)
    state_dict_saver.save(state(workload, step), checkpoint_id=path)
    return None


def load(workload: Workload) -> int:
    """The step of the newest complete checkpoint, which is loaded; 0 if there is none."""
    complete = sorted((directory() / "checkpoints").glob("*/.metadata"))
    if not complete:
        return 0
    loaded = state(workload, 0)
    state_dict_loader.load(loaded, checkpoint_id=complete[-1].parent)
    set_state_dict(
        workload.net,
        workload.optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    torch.set_rng_state(loaded[f"rng_{workload.rank}"])
    return int(loaded["step"])


if __name__ == "__main__":
    main()
