"""What protection costs where the model is on a GPU: one rank, a transformer with AdamW.

    PYTHONPATH=.:src python bench/on_a_gpu.py [--width 768] [--layers 12] [--repeat 60] [--only copy] [--json FILE]

Steps of one model without protection and of the same one with it take turns, each of them waited for on the device:

    fences      what it costs to wait for the device before and after each update, without anything else
    protected   beside the same model without: what phases, fences and random numbers add
    copy        with `copy=True`, and with "now"
    read        a tensor of 512 MiB as the writer's thread reads it, beside a plain copy into pinned memory
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lastwords
from demo.transformer.model import Shape, Transformer, loss_of
from lastwords.optim_wrapper.capture.source import DeviceReader

SEQUENCES = 8
READ_BYTES = 512 << 20


class Loop:
    """A model, and one step of it at a time."""

    def __init__(self, shape: Shape, wrap: bool, fences: bool = False) -> None:
        torch.manual_seed(1)
        self.model = Transformer(shape).cuda()
        inner = torch.optim.AdamW(self.model.parameters(), 1e-3, fused=True)
        self.optimizer: Any = lastwords.OptTFTWrapper(inner) if wrap else inner
        self.inputs = torch.randint(0, 256, (SEQUENCES, shape.context), device="cuda")
        self.step_end: Callable[[int, int], None] = lambda epoch, step: None
        self.count = 0
        self.fence = torch.cuda.current_stream().synchronize if fences else lambda: None

    def one_s(self) -> float:
        """Seconds of a step."""
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(self.model(self.inputs), self.inputs)
        loss.backward()
        self.fence()
        self.optimizer.step()
        self.fence()
        self.count += 1
        self.step_end(1, self.count)
        torch.cuda.synchronize()
        return time.perf_counter() - begun_s


def alternate(shape: Shape, repeat: int, folder: Path, **settings: Any) -> tuple[list[float], list[float]]:
    """Steps without protection, and the one with it beside each."""
    plain, protected = Loop(shape, wrap=False), Loop(shape, wrap=True)
    base, found = [], []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with lastwords.TFTRegister(
        0, "127.0.0.1", port, str(folder), model=protected.model, optimizer=protected.optimizer, **settings
    ) as tft:
        protected.step_end = tft.step_end
        for _ in range(repeat + 10):
            base.append(plain.one_s())
            found.append(protected.one_s())
    return base[10:], found[10:]


def fenced(shape: Shape, repeat: int) -> tuple[list[float], list[float]]:
    """Steps without protection, and such that wait for the device before and after the update."""
    plain, other = Loop(shape, wrap=False), Loop(shape, wrap=False, fences=True)
    pairs = [(plain.one_s(), other.one_s()) for _ in range(repeat + 10)][10:]
    return [one for one, _ in pairs], [two for _, two in pairs]


def read(repeat: int) -> tuple[list[float], list[float]]:
    """Seconds of a plain copy into pinned memory, and of the reader."""
    tensor = torch.rand(READ_BYTES // 4, device="cuda")
    pinned = torch.empty(READ_BYTES // 4, pin_memory=True)
    reader = DeviceReader([tensor.device])
    base, found = [], []
    for _ in range(repeat + 2):
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        pinned.copy_(tensor)
        between_s = time.perf_counter()
        reader(tensor)
        found.append(time.perf_counter() - between_s)
        base.append(between_s - begun_s)
    return base[2:], found[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeat", type=int, default=60)
    parser.add_argument("--only", nargs="+", help="some of them")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/lastwords-bench-gpu"))
    parser.add_argument("--json", type=Path, help="all samples, in seconds")
    arguments = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shape = Shape(context=512, width=arguments.width, heads=12, layers=arguments.layers, dropout=0.1)
    numel = sum(parameter.numel() for parameter in Transformer(shape).parameters())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {numel / 1e6:.0f} million parameters")
    samples = {}
    for name, take in {
        "fences": lambda: fenced(shape, arguments.repeat),
        "protected": lambda: alternate(shape, arguments.repeat, arguments.folder),
        "copy": lambda: alternate(shape, arguments.repeat, arguments.folder, copy=True),
        "copy now": lambda: alternate(shape, arguments.repeat, arguments.folder, copy="now"),
        "read": lambda: read(min(10, arguments.repeat)),
    }.items():
        if arguments.only and name not in arguments.only:
            continue
        base, found = take()
        samples[name] = {"plain": base, name: found}
        ours, theirs = statistics.median(found), statistics.median(base)
        print(f"{name:10} {ours * 1e3:8.2f} ms beside {theirs * 1e3:8.2f} ms, {ours / theirs:.3f} x", flush=True)
        torch.cuda.empty_cache()
        if arguments.json:
            arguments.json.write_text(json.dumps(samples))


if __name__ == "__main__":
    main()
