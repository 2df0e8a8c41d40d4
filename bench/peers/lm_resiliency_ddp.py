"""DDP with lm-resiliency: every k steps each rank's state is copied to its own memory and to a peer's.

When a rank has died, the others write both copies to disk and end, and torchrun waits in lm-resiliency's rendezvous for
the step that all ranks shall load. Naming it is left to a manager of the user's: --manage starts torchrun, and does it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from lm_resiliency import InMemoryCkptConfig, enable_resiliency  # type: ignore[import-not-found]
from lm_resiliency.integrations.torchrun import (  # type: ignore[import-not-found]
    TorchrunLaunchConfig,
    TorchrunRecoveryCoordinator,
    TorchrunRecoveryRequest,
    get_torchrun_worker_context,
)
from torch.nn.parallel import DistributedDataParallel

from bench.peers.systems import free_port
from bench.peers.workload import RANKS, UpdateLog, Workload, directory, goes_on

TORCHRUN = """
from lm_resiliency.integrations.torchrun import create_rendezvous_handler
from torch.distributed import run
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
rendezvous_handler_registry.register("lm_resiliency", create_rendezvous_handler)
run.main()
"""
"""torchrun with the rendezvous, whose entry point in the package torch cannot use: it gives it no argument."""
RUN = "bench_peers"
TUNED = {"poll_interval_ms": 20, "heartbeat_timeout_ms": 1000}
POLL_S = 0.05


def main() -> int:
    """One rank, or the manager."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--tuned", action="store_true", help="TUNED in place of 250 ms and 10 s")
    parser.add_argument("--manage", action="store_true")
    options = parser.parse_args()
    if options.manage:
        return manage(options.tuned, ["--every", str(options.every)])
    train(options.every)
    return 0


def train(every: int) -> None:
    """One rank."""
    dist.init_process_group("gloo")
    context = get_torchrun_worker_context()
    workload = Workload(dist.get_rank())
    log = UpdateLog(workload)
    model = DistributedDataParallel(workload.net)
    session = enable_resiliency(
        model,
        workload.optimizer,
        interval=every,
        checkpoint=InMemoryCkptConfig(disk_folder=str(directory() / "checkpoints")),
        enable_detection=False,
        group=dist.new_group(backend="gloo"),  # else it makes one for NCCL as well, which fails without a GPU
        device=torch.device("cpu"),
        recovery_mode=context.recovery_mode,
    )
    mark = directory() / f"worker_{context.generation}_{workload.rank}"
    mark.with_suffix(".new").write_text(f"{os.getpid()} {session.ckpt_manager.topology_id}", encoding="utf-8")
    mark.with_suffix(".new").rename(mark)
    while goes_on(session.step_count):
        step = session.step_count + 1
        loss = workload.update(model, workload.optimizer, step)
        log.updated(step, dist.get_world_size(), loss)
    dist.destroy_process_group()


def manage(tuned: bool, arguments: Sequence[str]) -> int:
    """Starts torchrun; whenever all ranks have ended, names the newest step of which all have written their state."""
    port = free_port()
    launch = TorchrunLaunchConfig(
        run_id=RUN,
        rendezvous_endpoint=f"127.0.0.1:{port}",
        restart_context_path=directory() / "context" / "context.json",
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=RANKS,
        max_restarts=5,
        **(TUNED if tuned else {}),
    )
    flags = launch.command(module="bench.peers.lm_resiliency_ddp", module_args=arguments)[1:]
    torchrun = subprocess.Popen([sys.executable, "-c", TORCHRUN, *flags])
    manager = TorchrunRecoveryCoordinator(dist.TCPStore("127.0.0.1", port, wait_for_workers=False), run_id=RUN)
    while torchrun.poll() is None:
        generation = manager.current_generation
        marks = [path.read_text(encoding="utf-8").split() for path in directory().glob(f"worker_{generation}_?")]
        ended = len(marks) == RANKS and not any(Path(f"/proc/{pid}").exists() for pid, _ in marks)
        if ended and (step := newest_complete()):
            manager.publish_successor(
                generation=generation,
                active_node_ids=manager.initial_placement(active_node_count=1, allocated_node_count=1).active_node_ids,
                quarantined_node_ids=(),
                request=TorchrunRecoveryRequest(
                    plan_id=f"plan_{generation}",
                    intent_id=f"intent_{generation}",
                    reason_code="process_death",
                    recovery_mode="latest",
                    checkpoint_source="gemini",
                    checkpoint_step=step,
                    checkpoint_manifest_id=f"step_{step}",
                    topology_digest=marks[0][1],
                    restart_deadline_unix_ms=time.time_ns() // 1_000_000 + 120_000,
                ),
                local_world_size=RANKS,
            )
        time.sleep(POLL_S)
    return torchrun.returncode


def newest_complete() -> int:
    """0: there is none."""
    folders = [
        path for path in (directory() / "checkpoints").rglob("step-*") if len([*path.glob("rank-*.pt")]) == RANKS
    ]
    return max((int(path.name.removeprefix("step-")) for path in folders), default=0)


if __name__ == "__main__":
    sys.exit(main())
