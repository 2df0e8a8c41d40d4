"""What a whole copy of a rank's state in shared memory adds to a step, beside a plain copy of it.

    python bench/whole_copies.py [--mib 64 256] [--repeat 60] [--json FILE]

Weights and AdamW's moments of a multilayer perceptron. All ways take turns, so they meet the same load; the plain copy
goes into memory that has been touched.

    now      within the step's end (`copy="now"`), against a plain copy
    beside   by a thread, while this one computes for five times as long as a copy takes (`copy=True`), against a step
             without a copy; and what a thread costs that makes a plain copy

Exit code 1 if a budget is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.periodic import network
from lastwords.checkpoint.direct_io import as_bytes
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.processor.whole_copies import WholeCopies

BUDGET_NOW = 1.05
BUDGET_BESIDE = 1.03
"""With a free core."""
COMPUTE = 5


def timed(call: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


def measure(mib: int, repeat: int, folder: Path) -> tuple[dict[str, list[float]], int]:
    """Seconds of each way, and the size in bytes."""
    model = network(mib)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    view = UnitView(model, optimizer)
    copies = WholeCopies(0, lambda: folder)
    sources = [source for _, source in view.state().tensors]
    plain = [np.zeros(as_bytes(source() if callable(source) else source).nbytes, np.uint8) for source in sources]

    def copy_plainly() -> None:
        for target, source in zip(plain, sources, strict=True):
            target[:] = as_bytes(source() if callable(source) else source)

    def copy_now(step: int) -> None:
        copies.copy(step, {"u": view.state(keep=True)})

    later = {spec.name for spec, _ in view.state().tensors}
    matrix = torch.randn(256, 256)
    copied_s = min(timed(copy_plainly) for _ in range(5))

    def compute() -> None:
        begun_s = time.thread_time()
        while time.thread_time() - begun_s < COMPUTE * copied_s:
            torch.mm(matrix, matrix)

    def with_thread(step: int) -> None:
        thread = threading.Thread(target=copy_plainly)
        thread.start()
        compute()
        thread.join()

    def with_copy(step: int) -> None:
        copies.begin(step, {"u": view.state(keep=True)}, later, lambda: True)
        compute()
        copies.finish()

    ways: dict[str, Callable[[int], None]] = {
        "plain": lambda step: copy_plainly(),
        "now": copy_now,
        "no copy": lambda step: compute(),
        "thread": with_thread,
        "beside": with_copy,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(repeat + 4):
        for place, (name, way) in enumerate(ways.items()):
            found[name].append(timed(partial(way, step * len(ways) + place + 1)))
    return {name: times[4:] for name, times in found.items()}, sum(target.nbytes for target in plain)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--repeat", type=int, default=60)
    parser.add_argument("--json", type=Path, help="all samples, in seconds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    missed = False
    samples = {}
    for mib in arguments.mib:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            times, nbytes = measure(mib, arguments.repeat, Path(folder))
        median = {name: statistics.median(found) for name, found in times.items()}
        samples[f"{nbytes / 2**20:.1f} MiB"] = times
        print(f"{nbytes / 2**20:7.1f} MiB, {arguments.repeat} rounds")
        for name, of, budget in (
            ("now", "plain", BUDGET_NOW),
            ("thread", "no copy", 0.0),
            ("beside", "no copy", BUDGET_BESIDE),
        ):
            ratio = median[name] / median[of]
            missed |= bool(budget) and ratio > budget
            said = f" (budget {budget})" if budget else ""
            print(
                f"  {name:7} {median[name] * 1e3:8.2f} ms, {ratio:.3f} x {of} ({median[of] * 1e3:.2f} ms){said}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(samples))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
