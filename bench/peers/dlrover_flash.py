"""DDP with DLRover's flash checkpoints: into the agent's shared memory every k steps; all ranks are started again."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.ddp import (  # type: ignore[import-not-found]
    DdpCheckpointer,
    StorageType,
)
from torch.nn.parallel import DistributedDataParallel

from bench.peers.workload import UpdateLog, Workload, directory, goes_on


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=10)
    every = parser.parse_args().every
    dist.init_process_group("gloo")
    workload = Workload(dist.get_rank())
    log = UpdateLog(workload)
    model = DistributedDataParallel(workload.net)
    checkpointer = DdpCheckpointer(str(directory() / "checkpoints"))
    step = load(workload, checkpointer)
    while goes_on(step):
        step += 1
        loss = workload.update(model, workload.optimizer, step)
        log.updated(step, dist.get_world_size(), loss)
        if step % every == 0:
            state = {
                "model": workload.net.state_dict(),
                "optimizer": workload.optimizer.state_dict(),
                "step": step,
                "rng": torch.get_rng_state(),
            }
            checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY)
    dist.destroy_process_group()


def load(workload: Workload, checkpointer: DdpCheckpointer) -> int:
    """The step that was in memory, else on disk; 0 if there is none. One rank has saved, for all."""
    state = checkpointer.load_checkpoint()
    if not state:
        return 0
    workload.net.load_state_dict(state["model"])
    workload.optimizer.load_state_dict(state["optimizer"])
    if workload.rank == 0:
        torch.set_rng_state(state["rng"])
    return int(state["step"])


if __name__ == "__main__":
    main()
