"""Saving and loading the same state in several ways, beside what the disk itself can do.

    python bench/save_load.py [--mib 512] [--repeat 7] [--dir PATH] [--json]

Each repetition runs every way once, in an order that changes, so that other load hits all of them alike; figures are
medians. "Plain" is a write of the very same bytes from aligned memory with O_DIRECT and one fsync (our limit), and
a sequential read with an empty page cache into memory that has been touched before. "ours: decided to published"
includes verification, manifest and rename. "added memory" is the peak above the state itself while saving.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from lastwords.checkpoint import layout, load, publish
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.part import UnitState, write_part

BLOCK_BYTES = 4 << 20
SAVE_BUDGET, SAVE_BUDGET_S, LOAD_BUDGET = 1.15, 0.25, 0.8
MEMORY_BUDGET_MIB = 128


def make_state(mib: int) -> dict[str, torch.Tensor]:
    """Weights and two moments of a network whose layers have the sizes of the demo's, up to about `mib` MiB."""
    torch.manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    left, layer = mib * (1 << 20) // 12, 0
    while left > 0:
        for name, count in ((f"{layer}.weight", min(left, 1024 * 5120)), (f"{layer}.bias", 5120 if left > 5120 else 0)):
            if count:
                for key in (f"model/{name}", f"optim/{name}/exp_avg", f"optim/{name}/exp_avg_sq"):
                    state[f"unit/replicated/{key}"] = torch.rand(count)
                left -= count
        layer += 1
    return state


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tensor.view(torch.uint8).numpy()


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def drop_cache(path: Path) -> None:
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Ways:
    """Every way to save and to load, each timed in seconds."""

    def __init__(self, root: Path, state: dict[str, torch.Tensor]) -> None:
        self.root = root
        self.state = state
        self.bytes = sum(tensor.nbytes for tensor in state.values())
        self.specs = [(TensorSpec(name, "F32", tuple(t.shape)), bytes_of(t)) for name, t in state.items()]
        self.target = {name: torch.ones_like(tensor) for name, tensor in state.items()}
        padded = -(-self.bytes // BLOCK_BYTES) * BLOCK_BYTES
        self.aligned = mmap.mmap(-1, padded)
        at = 0
        for tensor in state.values():
            self.aligned[at : at + tensor.nbytes] = bytes_of(tensor).tobytes()
            at += tensor.nbytes
        self.step = 0

    # ------------------------------------------------------------------ saving

    def save_plain(self) -> float:
        view = memoryview(self.aligned)
        start = time.perf_counter()
        fd = os.open(self.root / "plain", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT)
        for at in range(0, len(view), BLOCK_BYTES):
            os.pwrite(fd, view[at : at + BLOCK_BYTES], at)
        os.fsync(fd)
        os.close(fd)
        return time.perf_counter() - start

    def save_ours(self) -> float:
        self.step += 1
        start = time.perf_counter()
        tmp = layout.TemporaryName(self.step, "bench", 1, 1, 1).under(self.root)
        write_part(tmp, 0, 1, self.step, self.step, {"replicated": UnitState(self.specs)}, {}, {}, job="bench")
        problems = publish.verify_parts(tmp, [0], ["replicated"], [], self.step)
        assert not problems, problems
        publish.publish(self.root, tmp, publish.IncidentFacts("bench", 1, 1, 1, self.step, 1, (0,), "benchmark"))
        return time.perf_counter() - start

    def save_torch(self) -> float:
        start = time.perf_counter()
        torch.save(self.state, self.root / "torch")
        sync(self.root / "torch")
        return time.perf_counter() - start

    def save_safetensors(self) -> float:
        start = time.perf_counter()
        safetensors.torch.save_file(self.state, self.root / "safetensors")
        sync(self.root / "safetensors")
        return time.perf_counter() - start

    def save_dcp(self) -> float:
        start = time.perf_counter()
        # Its file system writer fsyncs by itself (sync_files=True is its default).
        dcp.save(self.state, checkpoint_id=str(self.root / "dcp"), no_dist=True)
        return time.perf_counter() - start

    # ------------------------------------------------------------------ loading

    def _published(self) -> Path:
        return layout.checkpoint_dir(self.root, self.step)

    def load_plain(self) -> float:
        """The same file into one buffer, over and over: what a sequential read of it costs at least."""
        file = next(self._published().rglob("*.ckpt"))
        drop_cache(file)
        buffer = memoryview(self.aligned)[:BLOCK_BYTES]
        start = time.perf_counter()
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
        return time.perf_counter() - start

    def load_ours(self) -> float:
        drop_cache(self._published())
        start = time.perf_counter()
        checkpoint = load.open_checkpoint(self._published())
        checkpoint.read_tensors(self.target, lambda spec: bytes_of(self.target[spec.name]).data)
        return time.perf_counter() - start

    def load_torch(self) -> float:
        drop_cache(self.root / "torch")
        start = time.perf_counter()
        for name, tensor in torch.load(self.root / "torch", weights_only=True).items():
            self.target[name].copy_(tensor)
        return time.perf_counter() - start

    def load_safetensors(self) -> float:
        drop_cache(self.root / "safetensors")
        start = time.perf_counter()
        for name, tensor in safetensors.torch.load_file(self.root / "safetensors").items():
            self.target[name].copy_(tensor)
        return time.perf_counter() - start

    def load_dcp(self) -> float:
        drop_cache(self.root / "dcp")
        start = time.perf_counter()
        dcp.load(self.target, checkpoint_id=str(self.root / "dcp"), no_dist=True)
        return time.perf_counter() - start

    def check(self) -> None:
        """What our own loading gave is what was saved."""
        for tensor in self.target.values():
            tensor.zero_()
        self.load_ours()
        assert all(torch.equal(self.target[name], tensor) for name, tensor in self.state.items())

    def tidy(self) -> None:
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


SAVES = {
    "plain O_DIRECT write + fsync": "save_plain",
    "ours: decided to published": "save_ours",
    "torch.save + fsync": "save_torch",
    "safetensors.save_file + fsync": "save_safetensors",
    "torch.distributed.checkpoint.save": "save_dcp",
}
LOADS = {
    "plain sequential read": "load_plain",
    "ours: into existing tensors": "load_ours",
    "torch.load + copy_": "load_torch",
    "safetensors.load_file + copy_": "load_safetensors",
    "torch.distributed.checkpoint.load": "load_dcp",
}


def measure(ways: Ways, repeat: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in (*SAVES, *LOADS)}
    for turn in range(repeat + 1):
        for table in (SAVES, LOADS):
            names = list(table)
            names = names[turn % len(names) :] + names[: turn % len(names)]
            for name in names:
                method: Callable[[], float] = getattr(ways, table[name])
                seconds = method()
                if turn:  # the first turn touches memory and disk for the first time
                    samples[name].append(seconds)
        if turn == 0:
            ways.check()
        ways.tidy()
    return samples


MEMORY_CODE = """
import sys
sys.path.insert(0, sys.argv[3])
import save_load as bench
from pathlib import Path

def high_water_kib():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))

ways = bench.Ways.__new__(bench.Ways)
ways.root, ways.step, ways.state = Path(sys.argv[1]), 0, bench.make_state(int(sys.argv[2]))
ways.specs = [(bench.TensorSpec(n, "F32", tuple(t.shape)), bench.bytes_of(t)) for n, t in ways.state.items()]
open("/proc/self/clear_refs", "w").write("5")  # forget the peak that imports have left
before = high_water_kib()
ways.save_ours()
print((high_water_kib() - before) / 1024)
"""


def added_memory_mib(mib: int, root: Path) -> float:
    """Peak resident memory of a process that saves `mib` MiB, above what it had just before."""
    command = [sys.executable, "-c", MEMORY_CODE, str(root), str(mib), str(Path(__file__).parent)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def verdicts(samples: dict[str, list[float]], memory_mib: float) -> dict[str, tuple[str, bool]]:
    """Each budget that this page reaches: figure and whether it is kept."""
    median = {name: statistics.median(values) for name, values in samples.items()}
    plain, ours = median["plain O_DIRECT write + fsync"], median["ours: decided to published"]
    read, loaded = median["plain sequential read"], median["ours: into existing tensors"]
    return {
        f"save <= {SAVE_BUDGET} x plain + {SAVE_BUDGET_S} s": (
            f"{ours:.3f} s of {SAVE_BUDGET * plain + SAVE_BUDGET_S:.3f} s ({ours / plain:.2f} x plain)",
            ours <= SAVE_BUDGET * plain + SAVE_BUDGET_S,
        ),
        f"load >= {LOAD_BUDGET} x plain read": (f"{read / loaded:.2f} x", read / loaded >= LOAD_BUDGET),
        f"added memory while saving <= {MEMORY_BUDGET_MIB} MiB": (
            f"{memory_mib:.0f} MiB",
            memory_mib <= MEMORY_BUDGET_MIB,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the temporary directory)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with tempfile.TemporaryDirectory(prefix="lastwords-bench-", dir=arguments.dir) as directory:
        ways = Ways(Path(directory), make_state(arguments.mib))
        samples = measure(ways, arguments.repeat)
        memory_mib = added_memory_mib(arguments.mib, Path(directory))
    budgets = verdicts(samples, memory_mib)
    if arguments.json:
        print(json.dumps({"bytes": ways.bytes, "seconds": samples, "budgets": budgets, "memory_mib": memory_mib}))
        return
    print(f"{ways.bytes / (1 << 20):.0f} MiB in {len(ways.state)} tensors, median of {arguments.repeat}\n")
    for title, table in (("save", SAVES), ("load, page cache empty", LOADS)):
        limit = statistics.median(samples[next(iter(table))])
        print(f"| {title} | median s | slowest s | MB/s | time / plain |\n|---|---:|---:|---:|---:|")
        for name in table:
            median = statistics.median(samples[name])
            rate = ways.bytes / median / 1e6
            print(f"| {name} | {median:.3f} | {max(samples[name]):.3f} | {rate:.0f} | {median / limit:.2f} |")
        print()
    for name, (figure, kept) in budgets.items():
        print(f"{'kept  ' if kept else 'MISSED'}  {name}: {figure}")


if __name__ == "__main__":
    main()
