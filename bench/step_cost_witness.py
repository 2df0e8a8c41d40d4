"""What watching every tensor adds to a step: a mark at its end, a comparison before the update, a mark after it.

    python bench/step_cost_witness.py [--steps 300] [--json FILE]

One step of AdamW on one linear layer after another, so many that there are 10, 200 and 2000 tensors in all (weights,
biases and their moments), once with the watch and once without, alternating, so that caches are as a step leaves them.
"moving" is the same where a tenth of the weights is frozen and written in each forward pass, and so copied.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lastwords.optim_wrapper.capture.buffers import Buffers
from lastwords.optim_wrapper.capture.state_watch import StateWatch
from lastwords.optim_wrapper.state.state_view import UnitView

BUDGET_US = 20.0
"""At 200 tensors."""
WIDTH = 32
PER_LAYER = 8
"""Weight and bias, each with two moments and a count of steps."""


class Loop:
    """A training loop in one process; moving: every tenth layer is frozen and written before the forward pass."""

    def __init__(self, tensors: int, *, moving: bool) -> None:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(max(2, round(tensors / PER_LAYER)))]
        self.model = nn.Sequential(*layers)
        self.written = [*layers[1::10]] if moving else []
        for layer in self.written:
            layer.requires_grad_(False)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, 1e-3)
        self.batch = torch.randn(4, WIDTH, requires_grad=True)
        self.watch: StateWatch | None = None
        self.count = 0

    def protect(self) -> Loop:
        """Watch it from now on."""
        self.watch = StateWatch(UnitView(self.model, self.optimizer), Buffers(self.model))
        self.watch.list_tensors()
        self.watch.mark_end(0)
        return self

    def one_us(self) -> tuple[float, float]:
        """Microseconds of a step, and of the watch in it."""
        self.optimizer.zero_grad()
        with torch.no_grad():
            for layer in self.written:
                layer.weight.mul_(0.999)
        self.model(self.batch).sum().backward()
        self.count += 1
        watch, spent_ns, began_ns = self.watch, 0, time.perf_counter_ns()
        if watch is not None:
            watch.begin_update()
            spent_ns = time.perf_counter_ns() - began_ns
        self.optimizer.step()
        ended_ns = time.perf_counter_ns()
        if watch is not None:
            watch.end_update()
            watch.end_step(look=False)
            watch.mark_end(self.count)
            spent_ns += time.perf_counter_ns() - ended_ns
        return (time.perf_counter_ns() - began_ns) / 1000, spent_ns / 1000


def measure(tensors: int, steps: int, *, moving: bool) -> dict[str, float]:
    """Medians and p99 of what the watch takes, and the median of a step's update without it."""
    torch.manual_seed(1)
    plain, watched = Loop(tensors, moving=moving), Loop(tensors, moving=moving).protect()
    for _ in range(20):
        plain.one_us(), watched.one_us()
    watch = watched.watch
    assert watch is not None
    watch.list_tensors()
    pairs = [(plain.one_us(), watched.one_us()) for _ in range(steps)]
    spent = sorted(pair[1][1] for pair in pairs)
    return {
        "tensors": len(watch._witness._names),
        "watch_us": statistics.median(spent),
        "watch_p99_us": spent[int(0.99 * (len(spent) - 1))],
        "update_us": statistics.median(pair[0][0] for pair in pairs),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for moving in (False, True):
        for tensors in (10, 200, 2000):
            row = {"case": "moving" if moving else "still", **measure(tensors, given.steps, moving=moving)}
            rows.append(row)
            sys.stdout.write(
                f"{row['case']:>6} {row['tensors']:>5.0f} tensors: {row['watch_us']:7.1f} us a step "
                f"(p99 {row['watch_p99_us']:.1f}), beside an update of {row['update_us']:.0f} us\n"
            )
    sys.stdout.write(f"budget: {BUDGET_US:.0f} us at 200 tensors\n")
    if given.json is not None:
        given.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
