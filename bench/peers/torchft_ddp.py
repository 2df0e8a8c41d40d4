"""DDP through torchft: each rank is a replica group of its own, and a new one takes its state from a living peer."""

import argparse
import os
from datetime import timedelta
from typing import Any

from torchft import (  # type: ignore[import-not-found]
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

from bench.peers.workload import RANKS, UpdateLog, Workload, goes_on


def main() -> None:
    """One replica."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tuned", action="store_true", help="time-outs of 5 s, not 60")
    tuned = parser.parse_args().tuned
    rank = int(os.environ["REPLICA_GROUP_ID"])
    workload = Workload(rank)
    log = UpdateLog(workload)

    def state() -> dict[str, Any]:
        return {"model": workload.net.state_dict(), "optimizer": workload.optimizer.state_dict()}

    def load(loaded: dict[str, Any]) -> None:
        workload.net.load_state_dict(loaded["model"])
        workload.optimizer.load_state_dict(loaded["optimizer"])

    group, limits = ProcessGroupGloo(), {}
    if tuned:
        limit = timedelta(seconds=5)
        group, limits = ProcessGroupGloo(timeout=limit), {"timeout": limit}
    manager = Manager(
        pg=group,
        min_replica_size=RANKS - 1,
        state_dict=state,
        load_state_dict=load,
        replica_id=f"replica_{rank}",
        **limits,
    )
    model = DistributedDataParallel(manager, workload.net)
    optimizer = Optimizer(manager, workload.optimizer)
    while goes_on(manager.current_step()):
        step = manager.current_step() + 1
        loss = workload.update(model, optimizer, step)
        if manager.current_step() >= step:  # committed; a failed step is tried again
            log.updated(manager.current_step(), manager.num_participants(), loss)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
