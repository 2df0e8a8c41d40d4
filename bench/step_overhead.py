"""What protection adds to a step on the training thread, beside the budget: phases and hooks, RNG capture, buffers.

Two loops over the same small model alternate in one process, one protected and one not; a third column takes the
single calls apart. Whatever else the machine does hits both. One rank, CPU.

    python bench/step_overhead.py [--steps 400] [--rounds 15] [--batchnorm 0]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import torch

import lastwords


def quantiles(samples_us: list[float]) -> dict[str, float]:
    ordered = sorted(samples_us)
    return {
        "median_us": round(statistics.median(ordered), 2),
        "p99_us": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 2),
    }


def network(batchnorm: int) -> torch.nn.Module:
    layers: list[torch.nn.Module] = [torch.nn.Linear(16, 16)]
    layers += [torch.nn.BatchNorm1d(16) for _ in range(batchnorm)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 2))


class Loop:
    """One training loop that can be run for a while, stopped, and run on."""

    def __init__(self, batchnorm: int) -> None:
        self.model = network(batchnorm)
        inner = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.optimizer = lastwords.OptTFTWrapper(inner)
        self.batch = torch.randn(4, 16)
        self.step_end: Callable[[int, int], None] = lambda epoch, step: None
        self.count = 0

    def one_us(self) -> float:
        start_ns = time.perf_counter_ns()
        self.optimizer.zero_grad()
        self.model(self.batch).sum().backward()
        self.optimizer.step()
        self.count += 1
        self.step_end(1, self.count)
        return (time.perf_counter_ns() - start_ns) / 1000


@contextlib.contextmanager
def replaced(owner: object, name: str, samples: list[float]) -> Iterator[None]:
    """Time every call of a method."""
    original = getattr(owner, name)

    def timed(*args: object, **kwargs: object) -> object:
        start_ns = time.perf_counter_ns()
        result = original(*args, **kwargs)
        samples.append((time.perf_counter_ns() - start_ns) / 1000)
        return result

    setattr(owner, name, timed)
    try:
        yield
    finally:
        delattr(owner, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batchnorm", type=int, default=0, help="BatchNorm layers in the model")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    plain, protected = Loop(args.batchnorm), Loop(args.batchnorm)
    with tempfile.TemporaryDirectory() as directory:
        tft = lastwords.TFTRegister(
            0, "127.0.0.1", port, directory, model=protected.model, optimizer=protected.optimizer
        )
        with tft:
            protected.step_end = tft.step_end
            added: list[float] = []
            base: list[float] = []
            for loop in (plain, protected):
                for _ in range(args.steps):
                    loop.one_us()
            for _ in range(args.rounds):
                pairs = [(plain.one_us(), protected.one_us()) for _ in range(args.steps)]
                base += [one for one, _ in pairs]
                added += [other - one for one, other in pairs]
            parts: dict[str, list[float]] = {"rng capture (both copies)": [], "tentative copy": [], "committed copy": []}
            recorder, rng = tft._recorder, tft._recorder.rng
            box = recorder._box
            assert box is not None
            with (
                replaced(rng, "capture", parts["rng capture (both copies)"]),
                replaced(box, "tentative", parts["tentative copy"]),
                replaced(box, "committed", parts["committed copy"]),
            ):
                for _ in range(args.steps * 3):
                    protected.one_us()
    captures = parts["rng capture (both copies)"]
    parts["rng capture (both copies)"] = [a + b for a, b in zip(captures[::2], captures[1::2], strict=False)]
    result = {
        "unprotected step": quantiles(base),
        "added to a step": quantiles(added),
        **{name: quantiles(samples) for name, samples in parts.items()},
    }
    copies = result["tentative copy"]["median_us"] + result["committed copy"]["median_us"]
    result["phases and hooks (added - copies)"] = {
        "median_us": round(result["added to a step"]["median_us"] - copies, 2),
        "p99_us": float("nan"),
    }
    if args.json:
        print(json.dumps(result))
        return
    for name, figures in result.items():
        print(f"{name:36s} median {figures['median_us']:8.2f} us   p99 {figures['p99_us']:8.2f} us")


if __name__ == "__main__":
    main()
