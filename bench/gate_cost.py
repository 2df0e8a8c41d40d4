"""What the gate of a sharded job adds to a step, beside a plain blocking collective of the same size.

    python bench/gate_cost.py [--ranks 2 4 8] [--steps 400] [--compute-ms 5]

Each rank computes for a while, then enters the gate and waits for it as a training step does (an agent, a core, a
black box's worth of marks beside it). In every other step it waits in a blocking one-element all-reduce instead, and
in every third in nothing at all, so that all three see the same machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lastwords.optim_wrapper.launch.world import World
from lastwords.optim_wrapper.trainer.gate import Gate
from lastwords.processor.agent import Agent
from lastwords.processor.core import ProcessorCore
from lastwords.processor.departure import Departure

KINDS = ("nothing", "blocking all-reduce", "gate")


class Silent:
    """A session that goes nowhere: nothing is sent per step."""

    def send(self, report: Any) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass


def rank_body(rank: int, ranks: int, steps: int, compute_s: float, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    gate = Gate(World(), "gate", timeout_s=60.0)
    unused: Any = None
    agent = Agent(ProcessorCore(rank, 1, 0), hello=unused, saver=unused, departure=Departure(rank))
    agent.start(Silent())
    matrix, one = torch.randn(96, 96), torch.zeros(1)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for step in range(1, steps * len(KINDS) + 1):
        until_s = time.perf_counter() + compute_s
        while time.perf_counter() < until_s:
            matrix = (matrix @ matrix).clamp_(-1, 1)
        dist.barrier()  # what the backward pass's own collectives do: ranks come at about the same time
        kind = KINDS[step % len(KINDS)]
        begun_s = time.perf_counter()
        agent.ready()
        if kind == "gate":
            gate.enter(step)
            agent.pass_gate(gate.passed)
        elif kind == "blocking all-reduce":
            dist.all_reduce(one)
        agent.begin_update()
        agent.end_update()
        times[kind].append(time.perf_counter() - begun_s)
        agent.end_step(lambda _: None)
    Path(folder, f"rank{rank}").write_bytes(pickle.dumps(times))
    dist.barrier()
    agent.close()
    dist.destroy_process_group()


def measure(ranks: int, steps: int, compute_s: float) -> dict[str, list[float]]:
    """Seconds of each kind, over all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=rank_body, args=(rank, ranks, steps, compute_s, folder)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        each = [pickle.loads(Path(folder, f"rank{rank}").read_bytes()) for rank in range(ranks)]
    return {kind: [value for times in each for value in times[kind][10:]] for kind in KINDS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--compute-ms", type=float, default=3.0)
    arguments = parser.parse_args()
    print(f"{'ranks':>5}  {'between ready and updated':<22} {'median':>10} {'p99':>10}")
    for ranks in arguments.ranks:
        found = measure(ranks, arguments.steps, arguments.compute_ms / 1000)
        for kind in KINDS:
            ordered = sorted(found[kind])
            p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
            median = statistics.median(ordered)
            print(f"{ranks:>5}  {kind:<25} {median * 1000:>7.3f} ms {p99 * 1000:>7.2f} ms", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
