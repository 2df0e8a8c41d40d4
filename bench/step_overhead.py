"""What protection adds to a step on the training thread, part by part, beside the budgets and the machine's limits.

    python bench/step_overhead.py [--steps 400] [--rounds 10] [--layers 20] [--processor-time] [--json FILE] [--calls]

Two loops over the same small DDP model (one rank, gloo) alternate step by step in one process, one of them protected;
whatever else the machine does hits both. All figures are in situ, in the caches that a forward and backward leave:

(a) phases and hooks   what a protected step adds, less the two copies below
(b) RNG capture        the two copies of a model without buffers: streams, slots, comparison
(c) buffers            what BatchNorm buffers add to those copies, beside a plain copy of the same buffers in the same
                       place of the same step
off                    the same wrapper and register under MS_ENABLE_TFT='{TTP:0}'

The machine's limits: an empty Python call with two clock reads (what a timing costs), one uncontended lock, a plain
`copy_` of every buffer, and by how much two unprotected loops differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

import lastwords

HOOKS_BUDGET_US, RNG_BUDGET_US, BUFFERS_BUDGET = 20.0, 60.0, 2.0
Figures = dict[str, float]


def quantiles(samples_us: list[float]) -> Figures:
    """Median and 99th percentile."""
    ordered = sorted(samples_us)
    return {
        "median_us": round(statistics.median(ordered), 2),
        "p99_us": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 2),
    }


def network(batchnorm: int) -> torch.nn.Module:
    """Two linear layers and `batchnorm` BatchNorm layers between, under DDP."""
    layers: list[torch.nn.Module] = [torch.nn.Linear(16, 16)]
    layers += [torch.nn.BatchNorm1d(16) for _ in range(batchnorm)]
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(16, 2)))


class Loop:
    """One training loop that can be run for a while, stopped, and run on."""

    clock_ns = staticmethod(time.perf_counter_ns)

    def __init__(self, batchnorm: int, wrap: bool) -> None:
        self.model = network(batchnorm)
        inner = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.optimizer: Any = lastwords.OptTFTWrapper(inner) if wrap else inner
        self.batch = torch.randn(4, 16)
        self.step_end: Callable[[int, int], None] = lambda epoch, step: None
        self.count = 0

    def one_us(self) -> float:
        """Train one step; returns its microseconds."""
        start_ns = self.clock_ns()
        self.optimizer.zero_grad()
        self.model(self.batch).sum().backward()
        self.optimizer.step()
        self.count += 1
        self.step_end(1, self.count)
        return (self.clock_ns() - start_ns) / 1000


@contextlib.contextmanager
def registered(loop: Loop, enabled: bool = True) -> Iterator[Any]:
    """The loop under a TFTRegister of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["MS_ENABLE_TFT"] = "{TTP:1}" if enabled else "{TTP:0}"
    with tempfile.TemporaryDirectory() as directory:
        tft = lastwords.TFTRegister(0, "127.0.0.1", port, directory, model=loop.model, optimizer=loop.optimizer)
        with tft:
            loop.step_end = tft.step_end
            yield tft


def added_us(plain: Loop, protected: Loop, count: int) -> tuple[list[float], list[float]]:
    """Steps of the plain loop, and how much longer the step of the other one beside each was."""
    base, added = [], []
    for _ in range(count):
        base.append(plain.one_us())
        added.append(protected.one_us() - base[-1])
    return base, added


@contextlib.contextmanager
def timed(owner: object, name: str, samples: list[float]) -> Iterator[None]:
    """Time every call of a method."""
    original = getattr(owner, name)
    now = time.perf_counter_ns

    def call(*args: object, **options: object) -> object:
        start_ns = now()
        result = original(*args, **options)
        samples.append((now() - start_ns) / 1000)
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)


def copies_us(tft: Any, protected: Loop, plain: Loop, count: int) -> list[float]:
    """Both copies of each step together, while the two loops alternate."""
    parts: tuple[list[float], list[float]] = ([], [])
    box = tft._recorder._box
    with timed(box, "tentative", parts[0]), timed(box, "committed", parts[1]):
        for _ in range(count):
            plain.one_us()
            protected.one_us()
    return [one + other for one, other in zip(*parts, strict=True)]


def plain_copies_us(loop: Loop, other: Loop, count: int) -> list[float]:
    """One plain copy of every buffer at the end of each step of an unprotected loop, buffer by buffer."""
    buffers = list(loop.model.buffers())
    targets = [torch.empty_like(buffer) for buffer in buffers]
    samples: list[float] = []

    def copy(epoch: int, step: int) -> None:
        start_ns = time.perf_counter_ns()
        for target, source in zip(targets, buffers, strict=True):
            target.copy_(source)
        samples.append((time.perf_counter_ns() - start_ns) / 1000)

    loop.step_end = copy
    for _ in range(count):
        other.one_us()
        loop.one_us()
    return samples


def limits() -> dict[str, Figures]:
    """What the machine takes for the least of things."""
    lock = threading.Lock()
    nothing, locked = [], []
    for samples, work in ((nothing, lambda: None), (locked, lambda: lock.acquire() and lock.release())):
        for _ in range(5000):
            start_ns = time.perf_counter_ns()
            work()
            samples.append((time.perf_counter_ns() - start_ns) / 1000)
    return {"limit: empty call, timed": quantiles(nothing), "limit: one lock, timed": quantiles(locked)}


def python_calls(loop: Loop, steps: int) -> int:
    """How many functions of Python one step calls, after so many; the least of a few, as some steps look closer."""
    for _ in range(steps):
        loop.one_us()
    counts = []
    for _ in range(8):
        called = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal called
            called += event == "call"

        sys.setprofile(count)
        try:
            loop.one_us()
        finally:
            sys.setprofile(None)
        counts.append(called)
    return min(counts)


def added_calls(steps: int = 100) -> int:
    """How many more a protected step calls: no clock has a say in it."""
    plain, protected = Loop(0, wrap=False), Loop(0, wrap=True)
    with registered(protected):
        return python_calls(protected, steps) - python_calls(plain, steps)


def measure(steps: int, rounds: int, layers: int) -> dict[str, Figures]:
    """All figures by name."""
    torch.set_num_threads(1)
    count = steps * rounds
    result = limits()
    plain, protected = Loop(0, wrap=False), Loop(0, wrap=True)
    with registered(protected) as tft:
        added_us(plain, protected, steps)
        base, added = added_us(plain, protected, count)
        copies = copies_us(tft, protected, plain, count)
    result["unprotected step"] = quantiles(base)
    result["added to a step"] = quantiles(added)
    result["RNG capture (both copies)"] = quantiles(copies)
    result["phases and hooks"] = {
        "median_us": round(result["added to a step"]["median_us"] - result["RNG capture (both copies)"]["median_us"], 2)
    }
    plain, protected = Loop(layers, wrap=False), Loop(layers, wrap=True)
    with registered(protected) as tft:
        added_us(plain, protected, steps)
        with_buffers = copies_us(tft, protected, plain, count // 4)
    once = plain_copies_us(Loop(layers, wrap=False), plain, count // 4)
    more = statistics.median(with_buffers) - result["RNG capture (both copies)"]["median_us"]
    result["buffers (both copies)"] = {"median_us": round(more, 2)}
    result["limit: plain copy of the buffers"] = quantiles(once)
    plain, wrapped, equal = Loop(0, wrap=False), Loop(0, wrap=True), Loop(0, wrap=False)
    with registered(wrapped, enabled=False):
        added_us(plain, wrapped, steps)
        result["added with TTP:0"] = quantiles(added_us(plain, wrapped, count)[1])
    added_us(plain, equal, steps)
    result["limit: a second unprotected loop"] = quantiles(added_us(plain, equal, count)[1])
    return result


def verdicts(result: dict[str, Figures], layers: int) -> dict[str, str]:
    """Budget and outcome for the figures that have one."""
    hooks, rng = result["phases and hooks"]["median_us"], result["RNG capture (both copies)"]["median_us"]
    ratio = result["buffers (both copies)"]["median_us"] / result["limit: plain copy of the buffers"]["median_us"]
    return {
        "phases and hooks": f"{HOOKS_BUDGET_US:g} us: {'met' if hooks <= HOOKS_BUDGET_US else 'MISSED'}",
        "RNG capture (both copies)": f"{RNG_BUDGET_US:g} us: {'met' if rng <= RNG_BUDGET_US else 'MISSED'}",
        "buffers (both copies)": f"{BUFFERS_BUDGET:g} x a plain copy: {'met' if ratio <= BUFFERS_BUDGET else 'MISSED'} "
        f"({ratio:.2f} x, {3 * layers} buffers)",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=20, help="BatchNorm layers for the buffers' figures")
    parser.add_argument("--processor-time", action="store_true", help="of whole steps: the training thread's own time")
    parser.add_argument("--calls", action="store_true", help="count Python calls instead of microseconds")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.processor_time:
        Loop.clock_ns = staticmethod(time.thread_time_ns)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if args.calls:
        print(f"{added_calls()} Python calls a step more than without protection")
        return 0
    result = measure(args.steps, args.rounds, args.layers)
    told = verdicts(result, args.layers)
    for name, figures in result.items():
        p99 = f"p99 {figures['p99_us']:9.2f} us" if "p99_us" in figures else " " * 16
        print(f"{name:34s} median {figures['median_us']:8.2f} us   {p99}   {told.get(name, '')}".rstrip())
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
