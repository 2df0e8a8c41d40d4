"""DDP through torchft: each rank is a replica group of its own, and a new one takes its state from a living peer."""

import argparse
import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torchft import (  # type: ignore[import-not-found]
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

from bench.peers.workload import RANKS, UpdateLog, Workload, goes_on


class ErrorsKept(DistributedDataParallel):  # type: ignore[misc]
    """With gloo an all-reduce fails in wait(). The manager notes it, so the step will not be committed. torchft's own
    hook then asserts that the work has a future (`assert fut._fut` in ddp.py), and the survivor dies as well.
    """

    # torch compares the annotations of a hook with types: they must be no strings.
    @staticmethod
    def _comm_hook(state: Manager, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = state.allreduce(bucket.buffer())
        if work.wait() and not state.errored():
            return work.get_future()._fut  # type: ignore[no-any-return]
        unused: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        unused.set_result(bucket.buffer())
        return unused


def main() -> None:
    """One replica."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tuned", action="store_true", help="time-outs of 5 s, not 60; ErrorsKept")
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
    model = (ErrorsKept if tuned else DistributedDataParallel)(manager, workload.net)
    optimizer = Optimizer(manager, workload.optimizer)
    while goes_on(manager.current_step()):
        step = manager.current_step() + 1
        loss = workload.update(model, optimizer, step)
        if manager.current_step() >= step:  # committed; a failed step is tried again
            log.updated(manager.current_step(), manager.num_participants(), loss)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
