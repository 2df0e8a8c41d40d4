"""What `copy=True` adds to a step: a whole copy of a rank's state in shared memory, beside a plain copy of it.

    python bench/whole_copies.py [--mib 64 256] [--repeat 60]

Weights and AdamW's moments of a multilayer perceptron. Both ways take turns, so they meet the same load; the plain copy
goes into memory that has been touched. Exit code 1 if the budget is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
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

BUDGET = 1.05


def timed(call: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


def measure(mib: int, repeat: int, folder: Path) -> tuple[float, float, int]:
    """Seconds of either way, medians, and the size in bytes."""
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

    ways = (lambda step: copy_plainly(), lambda step: copies.take(step, {"u": view.state()}))
    times = [[timed(partial(way, step)) for way in ways] for step in range(1, repeat + 5)]
    one, other = (statistics.median(found) for found in zip(*times[4:], strict=True))
    return one, other, sum(target.nbytes for target in plain)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--repeat", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    missed = False
    for mib in arguments.mib:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            plain, whole, nbytes = measure(mib, arguments.repeat, Path(folder))
        missed |= whole > BUDGET * plain
        print(
            f"{nbytes / 2**20:7.1f} MiB: plain copy {plain * 1e3:7.2f} ms, whole copy {whole * 1e3:7.2f} ms, "
            f"{whole / plain:.3f} times (budget {BUDGET})",
            flush=True,
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
