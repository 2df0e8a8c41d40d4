"""What protection adds to the memory of a training rank: private memory of two otherwise equal processes.

    python bench/memory.py [--repeat 5] [--steps 200] [--json FILE]

Each process imports the same modules, makes the same model under DDP (one rank, gloo) and trains as many steps, one
with TFTRegister and one without; then both read Private_Dirty in /proc/self/smaps_rollup: memory that the process has
to itself and has written. Code of shared libraries is not in it; whether that counts as private at all depends on who
else on the machine has mapped the same files, and moves the figures by several MiB.
The black box lies in shared memory; its size is the rank-local state and stands beside it. Beside both: what a bare
gRPC channel adds, the machine's own limit for anything that speaks gRPC, and the controller's process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BUDGET_MIB = 16.0
KINDS = ("plain", "gRPC channel alone", "TFTRegister")


def private_mib(pid: int | str = "self") -> float:
    """Memory that a process has to itself and has written, shared libraries' code not included."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024


def be_rank(kind: str, steps: int, directory: str) -> None:
    """Train as `kind` and print the private memory, the box's and the controller's."""
    import socket

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    network = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 10))
    model = torch.nn.parallel.DistributedDataParallel(network)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3)
    batch = torch.randn(16, 256)
    step_end = None
    tft: Any = None
    kept: Any = None
    if kind == "gRPC channel alone":
        import grpc

        with socket.create_server(("127.0.0.1", 0)) as server:
            kept = grpc.insecure_channel(f"127.0.0.1:{server.getsockname()[1]}")
            kept.subscribe(lambda state: None, try_to_connect=True)
    elif kind == "TFTRegister":
        import lastwords

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        optimizer = lastwords.OptTFTWrapper(optimizer)
        tft = lastwords.TFTRegister(0, "127.0.0.1", port, directory, model=model, optimizer=optimizer)
        tft.start()
        step_end = tft.step_end
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if step_end is not None:
            step_end(1, step)
    figures = {"private_mib": private_mib(), "box_mib": 0.0, "controller_mib": 0.0}
    if tft is not None:
        box = tft._run.protection.box_path(0)
        figures["box_mib"] = box.stat().st_blocks * 512 / (1 << 20)
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for pid in children:
            if b"lastwords.controller" in Path(f"/proc/{pid}/cmdline").read_bytes():
                figures["controller_mib"] = private_mib(int(pid))
    print(json.dumps(figures), flush=True)
    if tft is not None:
        tft.stop()


def measure(repeat: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """Figures of each kind of process, taken in turn."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for turn in range(repeat):
        for kind in KINDS:
            sys.stderr.write(f"\r{turn + 1} of {repeat}: {kind:<20}")
            with tempfile.TemporaryDirectory() as directory:
                command = [sys.executable, __file__, "--rank", kind, "--steps", str(steps), "--dir", directory]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[kind].append(json.loads(done.stdout.splitlines()[-1]))
    sys.stderr.write("\r" + " " * 40 + "\r")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--rank", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--dir", default=".", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if arguments.rank:
        be_rank(arguments.rank, arguments.steps, arguments.dir)
        return 0
    found = measure(arguments.repeat, arguments.steps)
    median = {kind: statistics.median(one["private_mib"] for one in found[kind]) for kind in KINDS}
    worst = max(one["private_mib"] for one in found["TFTRegister"]) - median["plain"]
    ours = found["TFTRegister"]
    result = {
        "repeat": arguments.repeat,
        "plain_mib": median["plain"],
        "added_mib": median["TFTRegister"] - median["plain"],
        "added_max_mib": worst,
        "grpc_mib": median["gRPC channel alone"] - median["plain"],
        "box_mib": statistics.median(one["box_mib"] for one in ours),
        "controller_mib": statistics.median(one["controller_mib"] for one in ours),
        "budget_mib": BUDGET_MIB,
    }
    met = result["added_mib"] <= BUDGET_MIB
    print(f"private memory of a rank without protection  {result['plain_mib']:8.1f} MiB")
    print(f"added by TFTRegister                         {result['added_mib']:8.1f} MiB, at most {worst:.1f}", end="")
    print(f"   budget {BUDGET_MIB:g}: {'met' if met else 'MISSED'}")
    print(f"added by a bare gRPC channel                 {result['grpc_mib']:8.1f} MiB")
    print(f"black box (shared memory, rank-local state)  {result['box_mib']:8.2f} MiB")
    print(f"controller, one process for the job          {result['controller_mib']:8.1f} MiB")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
