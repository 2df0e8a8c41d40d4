"""What rank-local capture adds to a step: random streams, buffers and the black box's own bookkeeping.

    python bench/step_cost_rng.py [--steps 2000] [--cold-mb 32] [--layers 50] [--json FILE]

One step is a tentative and a committed copy with their comparison. Each figure is given warm (nothing else runs in
between) and cold (that many megabytes are written before each step, as a forward and backward do). Beside it: the
same streams through their public functions, and a plain `copy_` of the same buffers, once and twice.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lastwords.optim_wrapper.capture.rank_local import BoxRecorder, BufferCapture, Capture, RngCapture, regions
from lastwords.optim_wrapper.state.attributes import Attributes
from lastwords.optim_wrapper.state.object_walk import Walk
from lastwords.processor.black_box import BlackBox, BoxLayout
from lastwords.processor.signals import SignalGuard
from lastwords.vocabulary import Phase

OWN_GENERATORS = 8
RNG_BUDGET_US = 60.0
BOOKKEEPING_BUDGET_US = 10.0
"""Two slots of 5 us."""
STAND_BUDGET_US = 0.3
GUARD_BUDGET_US = 2.0
"""refresh 1 us, begin_update and end_update 0.5 us each."""
JUDGED_WARM = ("100 phase marks", "100 guarded updates", "black box bookkeeping")
"""Budgets of single calls; whole captures are judged as a real step meets them, cold."""
Row = dict[str, float | str]


def recorder(directory: Path, captures: Sequence[Capture]) -> BoxRecorder:
    """A recorder over a box of its own."""
    path = directory / f"rank_{len(list(directory.iterdir()))}.box"
    return BoxRecorder(BlackBox.create(path, BoxLayout(regions(captures))), captures)


def stepping(made: BoxRecorder, own: Attributes | None = None, draw: Callable[[], object] = int) -> Callable[[], None]:
    """One step's copies, with the step counted up; own: the user's generators; draw: from all of them."""
    step = 0

    def document() -> bytes:
        return b"{}" if own is None else b"{%s}" % own.document()[1:]

    def once() -> None:
        nonlocal step
        step += 1
        draw()
        made.tentative(step, document())
        if own is not None:
            own.generators.end_step()
        made.committed(step, document())

    return once


def seeded(seed: int) -> torch.Generator:
    """One of torch's."""
    return torch.Generator().manual_seed(seed)


class Noise(torch.nn.Module):
    """Has generators of its own."""

    def __init__(self, *kinds: Callable[[int], Any]) -> None:
        super().__init__()
        self.streams = [kinds[seed % len(kinds)](seed) for seed in range(OWN_GENERATORS)]

    def draw(self) -> None:
        """From each of them."""
        for one in self.streams:
            torch.rand((), generator=one) if isinstance(one, torch.Generator) else one.random()


def taken(noise: Noise) -> Attributes:
    """What takes its generators, and no others."""
    found = Attributes({"noise": noise}, dict)
    found.generators.look(Walk({"noise": noise}, {}), beyond=False)
    return found


def stands(made: BoxRecorder, count: int = 100) -> Callable[[], None]:
    """`count` phase marks."""

    def once() -> None:
        for step in range(count):
            made.box.set_stand(Phase.UPDATING, step)

    return once


def guarded_updates(guard: SignalGuard, count: int = 100) -> Callable[[], None]:
    """What the signal guard does around `count` updates."""

    def once() -> None:
        for _ in range(count):
            guard.begin_update()
            guard.end_update()

    return once


def public_streams() -> None:
    """What the captures would cost through getstate, get_state and get_rng_state: twice a step."""
    for _ in range(2):
        random.getstate()
        np.random.get_state()
        torch.get_rng_state()


def timed_us(work: Callable[[], None], steps: int, cold: torch.Tensor | None) -> tuple[float, float]:
    """Median and 99th percentile of `work`, in microseconds."""
    for _ in range(20):
        work()
    taken = []
    for _ in range(steps):
        if cold is not None:
            cold.add_(1)
        begun = time.perf_counter()
        work()
        taken.append((time.perf_counter() - begun) * 1e6)
    taken.sort()
    return taken[steps // 2], taken[int(steps * 0.99)]


def measure(directory: Path, steps: int, cold_mb: int, layers: int) -> list[Row]:
    """All rows of the table."""
    network = torch.nn.Sequential(*[torch.nn.BatchNorm2d(256) for _ in range(layers)])
    buffers = list(network.buffers())
    plain = [torch.empty_like(buffer) for buffer in buffers]

    def plain_copy() -> None:
        for target, source in zip(plain, buffers, strict=True):
            target.copy_(source)

    guard = SignalGuard(lambda number: None)
    rng = recorder(directory, [RngCapture()])
    idle, drawing = Noise(np.random.default_rng), Noise(np.random.default_rng, random.Random, seeded)
    with_idle, with_drawing = (recorder(directory, [RngCapture()]) for _ in range(2))
    nothing = recorder(directory, [])
    normalised = recorder(directory, [BufferCapture(network)])
    both = recorder(directory, [RngCapture(), BufferCapture(network)])
    names: list[tuple[str, Callable[[], None], float]] = [
        ("100 phase marks", stands(nothing), 100 * STAND_BUDGET_US),
        ("100 guarded updates", guarded_updates(guard), 100 * GUARD_BUDGET_US),
        ("black box bookkeeping", stepping(nothing), BOOKKEEPING_BUDGET_US),
        ("random streams", stepping(rng), RNG_BUDGET_US),
        (f"  and {OWN_GENERATORS} of the user's own", stepping(with_idle, taken(idle)), 0.0),
        ("  of three kinds, which draw", stepping(with_drawing, taken(drawing), drawing.draw), 0.0),
        ("  through public functions", public_streams, 0.0),
        (f"{len(buffers)} buffers of {layers} BatchNorm", stepping(normalised), -1.0),
        ("  plain copy", plain_copy, 0.0),
        ("streams and buffers", stepping(both), 0.0),
    ]
    guard.install()
    cold = torch.zeros(cold_mb << 18)
    rows: list[Row] = []
    for name, work, budget_us in names:
        sys.stderr.write(f"\r{name:<40}")
        warm_us, cold_us = timed_us(work, steps, None), timed_us(work, steps, cold)
        rows.append(
            {
                "what": name,
                "warm_median_us": warm_us[0],
                "warm_p99_us": warm_us[1],
                "cold_median_us": cold_us[0],
                "cold_p99_us": cold_us[1],
                "budget_us": budget_us,
            }
        )
    guard.uninstall()
    copied = next(row for row in rows if row["what"] == "  plain copy")
    for row in rows:
        if row["budget_us"] == -1.0:
            row["budget_us"] = 2 * float(copied["cold_median_us"])
    sys.stderr.write("\r" + " " * 40 + "\r")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--cold-mb", type=int, default=32)
    parser.add_argument("--layers", type=int, default=50, help="BatchNorm layers of 256 channels")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        rows = measure(Path(directory), arguments.steps, arguments.cold_mb, arguments.layers)
    print(f"{'a step (tentative + committed)':<32} {'warm':>8} {'p99':>8} {'cold':>8} {'p99':>8}   us; budget")
    for row in rows:
        budget_us = float(row["budget_us"])
        measured = "warm" if row["what"] in JUDGED_WARM else "cold"
        met = float(row[f"{measured}_median_us"]) <= budget_us
        verdict = f"{budget_us:.0f} ({measured}): {'met' if met else 'MISSED'}"
        print(
            f"{row['what']:<32} {row['warm_median_us']:>8.1f} {row['warm_p99_us']:>8.1f} {row['cold_median_us']:>8.1f} "
            f"{row['cold_p99_us']:>8.1f}   {verdict if budget_us else ''}".rstrip()
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
