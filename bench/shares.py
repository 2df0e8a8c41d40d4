"""A unit written by one rank and by several, each a process of its own, beside what the disk itself can do.

    python bench/shares.py [--mib 1024] [--writers 4] [--repeat 7] [--held-mb N] [--dir PATH] [--json FILE]

Each repetition runs every way once, in an order that changes, so that other load hits all of them alike; what counts
are the ratios within a repetition. "Plain" is a write of as many bytes from aligned memory with O_DIRECT and one fsync.
All others are timed from the order to the published checkpoint. "Held": each process may write at a quarter of the rate
of the plain write, as where the network of a host is the limit.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from lastwords.checkpoint import layout, publish
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.part import UnitState, share_of, write_part
from lastwords.checkpoint.system import Os
from lastwords.vocabulary import UNIT_REPLICATED, Share

BLOCK_BYTES = 4 << 20
HELD_BUDGET = 3.5
FREE_BUDGET, FREE_BUDGET_S = 1.15, 0.1


def make_state(mib: int) -> UnitState:
    """Weights and two moments of a network of layers of 5120 x 1024, the last one smaller."""
    rest = mib * (1 << 20) // 12
    tensors = []
    noise = np.random.default_rng(0).integers(0, 256, 5120 * 1024 * 4, np.uint8)
    for layer in range(-(-rest // (5120 * 1024))):
        rows = min(5120, -(-(rest - layer * 5120 * 1024) // 1024))
        for name in (f"model/{layer}.weight", *(f"optim/{layer}.weight/{key}" for key in ("exp_avg", "exp_avg_sq"))):
            tensors.append(
                (TensorSpec(f"unit/{UNIT_REPLICATED}/{name}", "F32", (rows, 1024)), noise[: rows * 4096].copy())
            )
    return UnitState(tensors)


class Held(Os):
    """A disk that takes so many bytes a second from this process."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        written = super().pwrite(fd, data, offset)
        now_s = time.perf_counter()
        self._free_s = max(self._free_s, now_s) + written / self._bytes_per_s
        time.sleep(max(0.0, self._free_s - time.perf_counter()))
        return written


def writer(rank: int, unit: UnitState, root: Path, orders: Connection) -> None:
    """One rank: writes what it is told to."""
    while (order := orders.recv()) is not None:
        step, names, rate = order
        units = {name: share_of(unit, Share.parse(name)) for name in names}
        held = Held(rate) if rate else Os()
        tmp = layout.TemporaryName(step, "bench", 1, 1, 1).under(root)
        write_part(tmp, rank, 1, step, step, units, {}, {}, job="bench", os=held)
        orders.send(step)


class Ranks:
    """The writers, and the controller's work on what they have written."""

    def __init__(self, unit: UnitState, root: Path, count: int) -> None:
        self._root = root
        self._step = 0
        context = multiprocessing.get_context("fork")
        self._orders, self._processes = [], []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=writer, args=(rank, unit, root, there), daemon=True)
            process.start()
            self._orders.append(here)
            self._processes.append(process)

    def save(self, writers: int, rate: float = 0.0) -> float:
        """Seconds from the orders until it is published."""
        self._step += 1
        step, shares = self._step, Share(UNIT_REPLICATED, 0, writers).all
        start_s = time.perf_counter()
        for orders, share in zip(self._orders, shares, strict=False):
            orders.send((step, [str(share)], rate))
        for orders in self._orders[:writers]:
            orders.recv()
        tmp, ranks = layout.TemporaryName(step, "bench", 1, 1, 1).under(self._root), tuple(range(writers))
        heads: dict[int, publish.SeenPart] = {}
        problems = publish.verify_parts(tmp, ranks, [*map(str, shares)], [], step, heads=heads)
        assert not problems, problems
        incident = publish.IncidentFacts("bench", 1, 1, 1, step, len(self._orders), ranks, "benchmark")
        published = publish.publish(self._root, tmp, incident, heads=heads)
        elapsed_s = time.perf_counter() - start_s
        shutil.rmtree(published)
        return elapsed_s

    def close(self) -> None:
        for orders, process in zip(self._orders, self._processes, strict=True):
            orders.send(None)
            process.join()


def plain(path: Path, memory: mmap.mmap) -> float:
    """Seconds for the same number of bytes, and no more work than that."""
    view = memoryview(memory)
    start_s = time.perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT)
    for at in range(0, len(view), BLOCK_BYTES):
        os.pwrite(fd, view[at : at + BLOCK_BYTES], at)
    os.fsync(fd)
    os.close(fd)
    elapsed_s = time.perf_counter() - start_s
    path.unlink()
    return elapsed_s


@contextmanager
def ranks_of(unit: UnitState, root: Path, count: int) -> Iterator[Ranks]:
    ranks = Ranks(unit, root, count)
    try:
        yield ranks
    finally:
        ranks.close()


def measure(mib: int, writers: int, repeat: int, root: Path, held_mb: float) -> dict[str, float]:
    """Medians in seconds, and medians of the ratios."""
    unit = make_state(mib)
    size = sum(spec.nbytes for spec, _ in unit.tensors)
    memory = mmap.mmap(-1, -(-size // BLOCK_BYTES) * BLOCK_BYTES)
    memory.write(b"\1" * len(memory))
    times: dict[str, list[float]] = {}
    with ranks_of(unit, root, writers) as ranks:
        rate = held_mb * 1e6 or size / plain(root / "plain", memory) / 4
        ways = {
            "plain": lambda: plain(root / "plain", memory),
            "one": lambda: ranks.save(1),
            "several": lambda: ranks.save(writers),
            "one, held": lambda: ranks.save(1, rate),
            "several, held": lambda: ranks.save(writers, rate),
        }
        for number in range(repeat):
            names = sorted(ways)
            random.Random(number).shuffle(names)
            for name in names:
                times.setdefault(name, []).append(ways[name]())
                print(f"  {name}: {times[name][-1]:.2f} s", file=sys.stderr, flush=True)
    figures = {name: statistics.median(some) for name, some in times.items()}
    for name, over in (("several, held", "one, held"), ("plain", "one"), ("plain", "several")):
        ratios = [b / a for a, b in zip(times[name], times[over], strict=True)]
        figures[f"{over} / {name}"] = statistics.median(ratios)
    return figures | {"bytes": float(size), "held to bytes/s": rate}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures; exit code 1 if a budget is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the unit")
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--held-mb", type=float, default=0.0, help="MB/s of a held one, if not a quarter of the disk's")
    parser.add_argument("--dir", type=Path, help="where to write; a file system with O_DIRECT")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    root = Path(tempfile.mkdtemp(prefix="lastwords-bench-", dir=options.dir))
    try:
        figures = measure(options.mib, options.writers, options.repeat, root, options.held_mb)
    finally:
        shutil.rmtree(root)
    for name, figure in figures.items():
        print(f"{name:28} {figure:14.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures))
    free = figures["several"] <= FREE_BUDGET * figures["plain"] + FREE_BUDGET_S
    return 0 if free and figures["one, held / several, held"] >= HELD_BUDGET else 1


if __name__ == "__main__":
    sys.exit(main())
