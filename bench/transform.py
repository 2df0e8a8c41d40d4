"""A checkpoint of M ranks rewritten as files of N: what is read for each byte, what it takes of memory, and how fast.

    python bench/transform.py [--mib 384] [--dir PATH] [--json]

Weights and AdamW's two moments, rows of 16 and 64 KiB, written by M ranks. `by rank` is transform_checkpoint_by_rank,
one new process for each of the N ranks, on bare files (without a manifest nothing can be checked); `whole` is
`lastwords transform`, which checks every byte that it uses and so reads whole chunks of 4 MiB.

"Bytes read" are those asked of the file system. "Added memory" is the most that a process's resident peak rose above
what it had after its imports; the largest tensor of a destination rank stands beside it. Times are with an empty page
cache, beside copying the source's files with fsync in the same run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from dataclasses import replace

import numpy as np
from reshard import BYTES_BUDGET, boxes, drop_cache, high_water_mib

from lastwords.checkpoint import layout
from lastwords.checkpoint.boxes import whole
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.meta import EMPTY_UNIT, ExtrasMeta, UnitMeta
from lastwords.checkpoint.part import UnitState, write_part
from lastwords.checkpoint.publish import IncidentFacts, publish
from lastwords.checkpoint.reshard.rank_transform import transform_checkpoint_by_rank
from lastwords.checkpoint.reshard.strategy import Cut, Held, Strategy, save_strategy_file
from lastwords.integrations.transform import transform
from lastwords.vocabulary import UNIT_REPLICATED

CASES = (
    ("rows", "rows", 8, 4), ("rows", "rows", 6, 4), ("rows", "rows", 8, 3), ("rows", "rows", 4, 1),
    ("columns", "columns", 8, 4), ("columns", "columns", 8, 3), ("rows", "columns", 8, 4),
)  # fmt: skip
MOMENTS = ("exp_avg", "exp_avg_sq")
Shapes = dict[str, tuple[int, ...]]


def shapes(mib: int) -> Shapes:
    """Parameters that are, with two moments each, about `mib` MiB of float32."""
    rows = max(48, mib * 16 // 3 // 48 * 48)
    return {"attention": (rows, 4096), "up": (rows, 4096), "down": (rows // 2, 16384)}


def meta_of(parts: Shapes, unit: str, holders: list[int]) -> UnitMeta:
    """What a unit of a training run says beside its tensors."""
    states = {
        name: [
            [key, {"tensor": f"unit/{unit}/optim/{name}/{key}", "dtype": "float32", "shape": list(shape)}]
            for key in MOMENTS
        ]
        for name, shape in parts.items()
    }
    return replace(
        EMPTY_UNIT,
        optimizer="AdamW",
        parameters=dict.fromkeys(parts, "float32"),
        groups=[{"dict": [["lr", {"plain": 0.001}]]}],
        group_parameters=[list(parts)],
        group_numbers=[0],
        holders=holders,
        extras=ExtrasMeta(states={}, step_on_resume=()),
        optimizer_state={name: {"dict": pairs} for name, pairs in states.items()},
    )


def written(root: Path, sizes: Shapes, ranks: int, how: str) -> Path:
    """A published checkpoint, each rank with its own part of all tensors."""
    directory = layout.TemporaryName(1, "bench", 1, 1, 1).under(root)
    random = np.random.default_rng(1)
    for rank in range(ranks):
        unit = f"rank-{rank}" if ranks > 1 else UNIT_REPLICATED
        tensors = []
        parts = {}
        for name, shape in sizes.items():
            box = boxes(shape, ranks, how)[rank]
            parts[name] = box.sizes
            for stored in (f"model/{name}", *(f"optim/{name}/{key}" for key in MOMENTS)):
                spec = TensorSpec(f"unit/{unit}/{stored}", "F32", box.sizes, shape, box.offsets)
                tensors.append((spec, random.bytes(spec.nbytes)))
        units = {unit: UnitState(tensors, meta_of(parts, unit, [rank]))}
        if rank == 0 and ranks > 1:
            units[UNIT_REPLICATED] = UnitState([], meta_of({}, UNIT_REPLICATED, list(range(ranks))))
        write_part(directory, rank, 1, 1, 1, units, {}, {}, job="bench")
    return publish(root, directory, IncidentFacts("bench", 1, 1, 1, 1, ranks, tuple(range(ranks)), "benchmark"))


def strategy(sizes: Shapes, ranks: int, how: str) -> Strategy:
    """The destination's: each rank has its part."""
    tensors = {}
    for name, shape in sizes.items():
        parts = boxes(shape, ranks, how) if ranks > 1 else [whole(shape)]
        tensors[f"model/{name}"] = Cut("F32", shape, tuple(Held(box, (rank,)) for rank, box in enumerate(parts)))
    return Strategy(ranks, tensors)


def alone(body: Callable[[], None]) -> dict[str, float]:
    """`body` in a new process: its seconds, bytes that it asked the file system for, MiB that its peak rose."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def be() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak until here
        memory, read, start = high_water_mib(), bytes_asked(), time.perf_counter()
        body()
        seconds = time.perf_counter() - start
        send.send({"seconds": seconds, "read": bytes_asked() - read, "added_mib": high_water_mib() - memory})

    process = context.Process(target=be)
    process.start()
    send.close()
    try:
        found: dict[str, float] = receive.recv()
    except EOFError as error:
        raise RuntimeError("the measured process has failed, see above") from error
    process.join()
    return found


def bytes_asked() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar")))


def copy_all(source: Path, out: Path) -> None:
    """Plain copies of the files, durable."""
    for file in sorted(source.rglob("*.ckpt")):
        target = out / file.name
        shutil.copyfile(file, target)
        fd = os.open(target, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def case(root: Path, mib: int, saved: str, here: str, m: int, n: int) -> dict[str, Any]:
    """All figures of one move."""
    sizes = shapes(mib)
    source = written(root / "from", sizes, m, saved)
    wanted = root / "strategy"
    save_strategy_file(strategy(sizes, n, here), wanted)
    files = {int(file.parent.name.removeprefix("rank_")): str(file) for file in source.rglob("*.ckpt")}
    data = sum(4 * shape[0] * shape[1] for shape in sizes.values()) * (1 + len(MOMENTS))
    largest = max(4 * box.elements for shape in sizes.values() for box in boxes(shape, n, here)) / (1 << 20)
    (root / "copy").mkdir()
    drop_cache(root)
    plain = alone(lambda: copy_all(source, root / "copy"))
    bare = root / "bare"
    shutil.copytree(source, bare)
    (bare / layout.MANIFEST_NAME).unlink()
    moved = {rank: str(bare / Path(file).relative_to(source)) for rank, file in files.items()}
    drop_cache(root)
    by_rank = [
        alone(lambda rank=rank: transform_checkpoint_by_rank(  # type: ignore[misc]
            rank, moved, str(root / f"rank{rank}.ckpt"), str(source), str(wanted)))
        for rank in range(n)
    ]  # fmt: skip
    drop_cache(root)
    whole_run = alone(lambda: _whole(source, root / "to", wanted))
    return {
        "saved": saved, "here": here, "ranks": [m, n], "bytes": data, "largest_mib": largest,
        "copy_s": plain["seconds"],
        "by_rank": {"read": sum(one["read"] for one in by_rank) / data, "s": sum(one["seconds"] for one in by_rank),
                    "added_mib": max(one["added_mib"] for one in by_rank)},
        "whole": {"read": whole_run["read"] / data, "s": whole_run["seconds"], "added_mib": whole_run["added_mib"]},
    }  # fmt: skip


def _whole(source: Path, out: Path, wanted: Path) -> None:
    transform(source, out, wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=384, help="size of the state")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the temporary directory)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    lines = []
    for one in CASES:
        with tempfile.TemporaryDirectory(prefix="lastwords-bench-", dir=arguments.dir) as directory:
            lines.append(case(Path(directory), arguments.mib, *one))
    if arguments.json:
        print(json.dumps(lines))
        return
    print(f"State of {lines[0]['bytes'] >> 20} MiB; budget {BYTES_BUDGET} bytes read for each byte\n")
    print("| move | way | bytes read for each | | time / plain copy | added memory | largest tensor |")
    print("|---|---|---:|---|---:|---:|---:|")
    for line in lines:
        m, n = line["ranks"]
        for way in ("by_rank", "whole"):
            figures = line[way]
            print(
                f"| {line['saved']} {m} → {line['here']} {n} | {way.replace('_', ' ')} | {figures['read']:.3f} | "
                f"{'met' if figures['read'] <= BYTES_BUDGET else '**missed**'} | "
                f"{figures['s'] / line['copy_s']:.2f} | {figures['added_mib']:.0f} MiB | "
                f"{line['largest_mib']:.0f} MiB |"
            )


if __name__ == "__main__":
    main()
