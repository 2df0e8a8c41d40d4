"""DDP in nvidia-resiliency-ext's in-process restart: survivors enter the function again and load the last checkpoint.

Checkpoints are those of torchrun_dcp.py. More processes than ranks are reserves, which take the place of the dead. With
--serve: the two stores alone, which by default live in rank 0 and die with it.
"""

import argparse
import logging
import os
import threading
from datetime import timedelta
from typing import Any, Optional

import torch.distributed as dist
from nvidia_resiliency_ext import inprocess  # type: ignore[import-not-found]
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from bench.peers.torchrun_dcp import load, save
from bench.peers.workload import RANKS, UpdateLog, Workload, goes_on

EVERY = 10
GLOO_TIMEOUT_S = 10.0
"""As in the project's examples; torch's own is 30 minutes."""
TUNED: dict[str, Any] = {
    "monitor_thread_interval": timedelta(seconds=0.1),
    "monitor_process_interval": timedelta(seconds=0.1),
    "heartbeat_interval": timedelta(seconds=0.1),
    "progress_watchdog_interval": timedelta(seconds=0.1),
    "heartbeat_timeout": timedelta(seconds=3),
    "soft_timeout": timedelta(seconds=5),
    "hard_timeout": timedelta(seconds=10),
    "last_call_wait": timedelta(seconds=0.1),
}
TUNED_GLOO_TIMEOUT_S = 2.0


class StoreElsewhere(inprocess.store.TCPStore):  # type: ignore[misc]
    """In no rank's process."""

    TCP_STORE_HOST_RANK = -1


def main() -> None:
    """One process: a rank or a reserve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    tuned = options.tuned
    logging.basicConfig(level=logging.WARNING)
    host, port, nvrx_port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["NVRX_PORT"])
    if options.serve:
        kept = [TCPStore(host, one, is_master=True, wait_for_workers=False) for one in (port, nvrx_port)]
        threading.Event().wait()
        del kept
    hosts = os.environ["RANK"] == "0" and not tuned
    stores = TCPStore(host, port, is_master=hosts, wait_for_workers=False, multi_tenant=True)
    wrapper = inprocess.Wrapper(
        store_factory=StoreElsewhere if tuned else inprocess.store.TCPStore,
        store_kwargs={"port": nvrx_port, "wait_for_workers": not tuned},
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.MaxActiveWorldSize(RANKS),
            inprocess.rank_assignment.ShiftRanks(),
        ),
        **(TUNED if tuned else {}),
    )
    wrapper(train)(stores, TUNED_GLOO_TIMEOUT_S if tuned else GLOO_TIMEOUT_S)


def train(stores: TCPStore, timeout_s: float, call: Optional[inprocess.CallWrapper] = None) -> None:  # noqa: UP045
    """Entered again after each failure; the wrapper finds `call` by its annotation, which must be no string."""
    assert call is not None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = PrefixStore(str(call.iteration), stores)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s))
    workload = Workload(rank)
    log = UpdateLog(workload)
    model = DistributedDataParallel(workload.net)
    step = load(workload)
    while goes_on(step):
        step += 1
        loss = workload.update(model, workload.optimizer, step)
        log.updated(step, ranks, loss)
        if step % EVERY == 0:
            save(workload, step, None)


if __name__ == "__main__":
    main()
