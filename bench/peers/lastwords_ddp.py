"""DDP protected by lastwords, under `lastwords run` or under torchrun."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lastwords
from bench.peers.workload import UpdateLog, Workload, directory, goes_on


def main() -> None:
    """One rank."""
    dist.init_process_group("gloo")
    workload = Workload(dist.get_rank())
    log = UpdateLog(workload)
    model = DistributedDataParallel(workload.net)
    with lastwords.protect(directory() / "checkpoints", model=model, optimizer=workload.optimizer) as tft:
        point = tft.resume(missing_ok=True)
        step = 0 if point is None else point.global_step
        while goes_on(step):
            step += 1
            loss = workload.update(model, tft.optimizer, step)
            tft.step_end(1, step)
            log.updated(step, dist.get_world_size(), loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
