"""A checkpoint of M ranks read by N: what is read for each byte, what it takes of memory, and how fast it is.

    python bench/reshard.py [--mib 256] [--repeat 5] [--dir PATH] [--json]

"Bytes read" are those asked of the file system by all N ranks, for each byte of their shards. A resume checks every
byte that it uses, so it reads whole chunks of 4 MiB; by-rank slices are read as they are. Columns of which the stored
rows are no longer than a page (4 KiB) are read with what lies between them.

Times are of N ranks that load weights and AdamW's two moments together, page cache empty, until the last is done; every
repetition runs each way once, in an order that changes, and figures are medians. "Plain" reads as many bytes straight
into the same tensors. "Added memory" is the most that any rank's resident peak rose above its state, in processes that
have done nothing else.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lastwords.checkpoint import layout
from lastwords.checkpoint.boxes import Box, slices_for
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.load import open_checkpoint
from lastwords.checkpoint.meta import EMPTY_UNIT
from lastwords.checkpoint.part import UnitState, write_part
from lastwords.checkpoint.publish import IncidentFacts, publish
from lastwords.checkpoint.reshard.strategy import strategy_of
from lastwords.checkpoint.slice_reader import SliceReader, Target
from lastwords.integrations.dcp import LastWordsReader
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.resume.resume_elsewhere import Resharding, places_of, survey
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.saver import Position
from lastwords.vocabulary import UNIT_REPLICATED, Phase, Stand

BYTES_BUDGET = 1.05
CHUNK_BYTES = 4 << 20
MOVES = ((8, 4), (6, 4), (8, 3), (4, 1))
Shapes = dict[str, tuple[int, ...]]


def shapes(mib: int) -> Shapes:
    """Matrices of one layer, about `mib` MiB of float32 with rows of 16 and 64 KiB, and a norm."""
    rows = max(48, mib * 16 // 48 * 48)  # 16 + 16 + 32 KiB for each
    return {"attention": (rows, 4096), "up": (rows, 4096), "down": (rows // 2, 16384), "norm": (4096,)}


# ------------------------------------------------------------------ bytes read


def even(extent: int, parts: int) -> list[tuple[int, int]]:
    """(offset, size) of each part, as torch's chunk makes them."""
    size = -(-extent // parts)
    borders = [min(at * size, extent) for at in range(parts + 1)]
    return [(low, high - low) for low, high in itertools.pairwise(borders)]


def uneven(extent: int, parts: int) -> list[tuple[int, int]]:
    """Parts that grow from first to last."""
    borders = [extent * at * (at + 1) // (parts * (parts + 1)) for at in range(parts + 1)]
    return [(low, high - low) for low, high in itertools.pairwise(borders)]


def boxes(shape: tuple[int, ...], parts: int, how: str) -> list[Box]:
    """Of each rank; what has one axis is cut along it."""
    axis = len(shape) - 1 if how == "columns" else 0
    ranges = (uneven if how == "uneven rows" else even)(shape[axis], parts)
    return [
        Box(tuple(at * (a == axis) for a in range(len(shape))), (*shape[:axis], size, *shape[axis + 1 :]))
        for at, size in ranges
    ]


def cut_checkpoint(root: Path, state: dict[str, Any], ranks: int, how: str, step: int) -> Path:
    """A published checkpoint of these arrays, each rank with its own part of all of them."""
    directory = layout.TemporaryName(step, "bench", 1, 1, 1).under(root)
    for rank in range(ranks):
        tensors = []
        for name, array in state.items():
            box = boxes(array.shape, ranks, how)[rank]
            place = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
            spec = TensorSpec(f"unit/rank-{rank}/model/{name}", "F32", box.sizes, array.shape, box.offsets)
            tensors.append((spec, np.ascontiguousarray(array[place]).view(np.uint8).reshape(-1)))
        units = {f"rank-{rank}": UnitState(tensors, replace(EMPTY_UNIT, holders=[rank]))}
        write_part(directory, rank, 1, step, step, units, {}, {}, job="bench")
    return publish(root, directory, IncidentFacts("bench", 1, 1, 1, step, ranks, tuple(range(ranks)), "benchmark"))


def bytes_per_byte(path: Path, state: dict[str, Any], ranks: int, how: str, *, checked: bool) -> float:
    """Bytes read for each byte of the destination, all its ranks one after another; what was read is compared."""
    checkpoint = open_checkpoint(path)
    strategy = strategy_of(checkpoint.manifest)
    names = {f"model/{name}": array for name, array in state.items()}
    divided = {}
    for name in names:  # a strategy names its shards by rank; the reader wants them as they are stored
        one = strategy.divided(name)
        stored = (type(s)(f"unit/rank-{s.name}/{name}", s.box, s.where) for s in one.shards)
        divided[name] = type(one)(one.name, one.dtype, one.shape, tuple(stored))
    read = wanted = 0
    for rank in range(ranks):
        targets = []
        memories = []
        for name, array in names.items():
            box = boxes(array.shape, ranks, how)[rank]
            memories.append((name, box, np.empty(box.sizes, np.float32)))
            targets.append(Target(box, memories[-1][2], slices_for(divided[name], box)))
        with SliceReader(checkpoint, checked=checked) as reader:
            reader.read(targets)
        for name, box, memory in memories:
            place = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
            assert np.array_equal(memory, names[name][place]), name
            wanted += memory.nbytes
        read += reader.bytes_read
    return read / wanted


CUTS = (("rows", "rows"), ("columns", "columns"), ("rows", "columns"), ("uneven rows", "rows"))


def bytes_table(root: Path, mib: int) -> list[dict[str, Any]]:
    """One line for each pair of cuts and each move."""
    numbers = np.random.default_rng(0)
    state = {name: numbers.random(shape, np.float32) for name, shape in shapes(mib).items()}
    lines = []
    for step, ((saved, here), (m, n)) in enumerate(itertools.product(CUTS, MOVES), 1):
        path = cut_checkpoint(root, state, m, saved, step)
        resume, by_rank = (bytes_per_byte(path, state, n, here, checked=checked) for checked in (True, False))
        lines.append({"saved": saved, "here": here, "ranks": [m, n], "resume": resume, "by_rank": by_rank})
        remove(path)
    return lines


# ------------------------------------------------------------------ time and memory


class Layer(torch.nn.Module):
    """The tensors as DTensors over all ranks, cut along `axis` (those of one axis along that), with AdamW's state."""

    def __init__(self, sizes: Shapes, axis: int, seed: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(seed)
        for name, shape in sizes.items():
            cut = distribute_tensor(torch.rand(shape), mesh, [Shard(min(axis, len(shape) - 1))], src_data_rank=None)
            self.register_parameter(name, torch.nn.Parameter(cut))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        for parameter in self.parameters():
            parameter.grad = parameter.detach().clone()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """As torch nests it."""
        moments = {name: dict(self.optimizer.state[parameter]) for name, parameter in self.named_parameters()}
        return {"model": {name: p.detach() for name, p in self.named_parameters()}, "optim": {"state": moments}}

    def memories(self) -> Iterator[memoryview]:
        """Memory of everything on this rank."""
        for parameter in self.parameters():
            for tensor in (parameter, *(v for k, v in self.optimizer.state[parameter].items() if k != "step")):
                view = bytes_of(tensor)
                assert view is not None
                yield view

    def recorder(self) -> StepRecorder:
        """What a protected rank has of it."""
        recorder = StepRecorder(self, [OptTFTWrapper(self.optimizer)], {}, {})
        recorder.agree_units(World(), next_prefix(), ())
        recorder.make_source(lambda rank: Path("/nowhere"), lambda step: {}, None)
        recorder.begin(0, Position(1, 0))
        return recorder


def save_both(root: Path, sizes: Shapes, axis: int) -> Callable[[int], None]:
    """For each rank: one checkpoint of ours and one of torch, of the same state."""

    def body(rank: int) -> None:
        layer = Layer(sizes, axis, seed=0)
        dcp.save(layer.state(), storage_writer=FileSystemWriter(root / "torch"))
        recorder = layer.recorder()
        assert recorder.source is not None
        recorder.end_step(1, Position(1, 1))
        source, table = recorder.source, recorder.units.table
        mine = [unit for unit, holders in table.units.items() if holders[0] == rank]
        directory = layout.TemporaryName(1, "bench", 1, 1, 1).under(root)
        units = {unit: source.unit_state(unit, 1, Stand(Phase.COMPUTING, 1)) for unit in mine}
        write_part(directory, rank, 1, 1, 1, units, {}, source.facts(1), job="bench")
        dist.barrier()
        if rank == 0:
            assert UNIT_REPLICATED in table.units
            everybody = tuple(range(dist.get_world_size()))
            publish(root, directory, IncidentFacts("bench", 1, 1, 1, 1, len(everybody), everybody, "benchmark"))

    return body


def plain(layer: Layer, root: Path) -> Callable[[], int]:
    """As many bytes as the state has, this rank's share of the files from front to back."""
    views = list(layer.memories())
    files = sorted(layout.checkpoint_dir(root, 1).rglob("*.ckpt"))
    ends = list(itertools.accumulate(file.stat().st_size for file in files))
    begin = ends[-1] * dist.get_rank() // dist.get_world_size()

    def run() -> int:
        at, done = begin, 0
        fds = [os.open(file, os.O_RDONLY) for file in files]
        for view in views:
            inner = 0
            while inner < len(view):
                number = next((k for k, end in enumerate(ends) if at < end), None)
                if number is None:  # replicated tensors: the shards are a little more than the files
                    at, number = 0, 0
                start = at - (ends[number] - files[number].stat().st_size)
                got = os.preadv(fds[number], [view[inner : inner + CHUNK_BYTES]], start)
                at, inner, done = at + got, inner + got, done + got
        for fd in fds:
            os.close(fd)
        return done

    return run


def resume(layer: Layer, root: Path) -> Callable[[], int]:
    """What `TFTRegister.resume` does for the units: open, plan, read with checksums, put in place."""
    recorder = layer.recorder()

    def run() -> int:
        checkpoint = open_checkpoint(layout.checkpoint_dir(root, 1))
        surveyed = survey(checkpoint.path, checkpoint.manifest, places_of(recorder))
        resharding = Resharding(checkpoint, recorder, surveyed)
        done = resharding.read()
        resharding.commit()
        return done

    return run


def through(reader: Callable[[Path], Any]) -> Callable[[Layer, Path], Callable[[], int]]:
    """torch.distributed.checkpoint.load with this storage reader."""

    def way(layer: Layer, root: Path) -> Callable[[], int]:
        state = layer.state()

        def run() -> int:
            dcp.load(state, storage_reader=reader(root))
            return 0

        return run

    return way


# A way is asked for on each rank and gives the function that is timed; one that writes files, such as a
# transformation by rank, is one more line here.
WAYS: dict[str, Callable[[Layer, Path], Callable[[], int]]] = {
    "plain read of as many bytes": plain,
    "ours: resume, checked": resume,
    "ours: LastWordsReader": through(lambda root: LastWordsReader(layout.checkpoint_dir(root, 1))),
    "torch.distributed.checkpoint.load": through(lambda root: FileSystemReader(root / "torch")),
}


def load(root: Path, sizes: Shapes, axis: int, ways: Sequence[str], turns: int) -> Callable[[int], Any]:
    """For each rank: bytes of its shard, and of each way the seconds of each turn, MiB added at most, bytes read."""

    def body(rank: int) -> tuple[int, dict[str, tuple[list[float], float, int]]]:
        layer = Layer(sizes, axis, seed=1)
        runs = {way: WAYS[way](layer, root) for way in ways}
        found: dict[str, tuple[list[float], float, int]] = {way: ([], 0.0, 0) for way in ways}
        contents = set()
        for turn in range(turns):
            for way in [*ways[turn % len(ways) :], *ways[: turn % len(ways)]]:
                for memory in layer.memories():
                    memory[:] = bytes(len(memory))
                dist.barrier()
                if rank == 0:
                    drop_cache(root)
                gc.collect()
                dist.barrier()
                Path("/proc/self/clear_refs").write_text("5")  # forget the peak until here
                before = high_water_mib()
                start = time.perf_counter()
                read = runs[way]()
                seconds = time.perf_counter() - start
                found[way] = ([*found[way][0], seconds], max(found[way][1], high_water_mib() - before), read)
                if turn == 0 and way != next(iter(WAYS)):
                    contents.add(tuple(xxhash.xxh3_64_hexdigest(memory) for memory in layer.memories()))
        assert len(contents) < 2, "two ways have loaded different states"
        return sum(map(len, layer.memories())), found

    return body


def high_water_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024


def on_ranks(body: Callable[[int], Any], ranks: int) -> list[Any]:
    """`body(rank)` in so many new processes of one gloo group."""
    with tempfile.TemporaryDirectory() as folder:

        def be(rank: int) -> None:
            torch.set_num_threads(1)
            try:
                dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
                answer = True, body(rank)
                dist.barrier()
                dist.destroy_process_group()
            except BaseException:
                answer = False, traceback.format_exc()
            Path(folder, str(rank)).write_bytes(pickle.dumps(answer))

        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=be, args=(rank,)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        answers = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(ranks)]
    for fine, answer in answers:
        if not fine:
            raise RuntimeError(answer)
    return [answer for _, answer in answers]


def drop_cache(root: Path) -> None:
    for file in root.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def remove(path: Path) -> None:
    for inner in sorted(path.rglob("*"), reverse=True):
        inner.rmdir() if inner.is_dir() else inner.unlink()
    path.rmdir()


CASES = ((0, 0, 8, 4), (0, 0, 6, 4), (0, 0, 8, 3), (0, 0, 4, 1), (1, 1, 8, 4), (1, 1, 8, 3), (0, 1, 8, 4))
"""Axis of the cut that was saved and of the one that is loaded; ranks that saved, ranks that load."""


def times_table(root: Path, mib: int, repeat: int) -> list[dict[str, Any]]:
    """For each case and way: seconds of the slowest rank in each turn, and MiB added in new processes."""
    lines = []
    sizes = shapes(mib // 3)
    for saved, axis, m, n in CASES:
        folder = root / f"{saved} {axis} {m} {n}"
        folder.mkdir()
        on_ranks(save_both(folder, sizes, saved), m)
        added: dict[str, float] = {}
        for way in WAYS:
            sys.stderr.write(f"\r{m} to {n}, memory: {way:<50}")
            added[way] = max(answer[1][way][1] for answer in on_ranks(load(folder, sizes, axis, [way], 1), n))
        sys.stderr.write(f"\r{m} to {n}, {repeat} times all ways{' ' * 40}")
        answers = on_ranks(load(folder, sizes, axis, list(WAYS), repeat), n)
        seconds = {
            way: [max(turn) for turn in zip(*(answer[1][way][0] for answer in answers), strict=True)] for way in WAYS
        }
        state_bytes = sum(answer[0] for answer in answers)
        read = sum(answer[1]["ours: resume, checked"][2] for answer in answers) / state_bytes
        cut = " → ".join(dict.fromkeys("columns" if one else "rows" for one in (saved, axis)))
        lines.append(
            {"cut": cut, "ranks": [m, n], "bytes": state_bytes, "seconds": seconds, "added_mib": added, "resume": read}
        )
        remove(folder)
    sys.stderr.write("\r" + " " * 70 + "\r")
    return lines


def print_bytes(lines: Sequence[dict[str, Any]]) -> None:
    print(f"| saved in | read in | ranks | resume (checked) | by-rank slice | budget {BYTES_BUDGET} |")
    print("|---|---|---|---:|---:|---|")
    for line in lines:
        m, n = line["ranks"]
        kept = [name for name in ("resume", "by_rank") if line[name] > BYTES_BUDGET]
        words = {0: "met", 1: f"{' '.join(kept).replace('_', '-')} **missed**", 2: "both **missed**"}[len(kept)]
        print(
            f"| {line['saved']} | {line['here']} | {m} → {n} | {line['resume']:.3f} | {line['by_rank']:.3f} | {words} |"
        )
    print()


def print_times(lines: Sequence[dict[str, Any]], repeat: int) -> None:
    print(f"Weights and two moments, {lines[0]['bytes'] / (1 << 20):.0f} MiB, median of {repeat}\n")
    print("| cut, ranks | way | median s | slowest s | MB/s | time / plain | time / DCP | added memory |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for line in lines:
        median = {way: statistics.median(found) for way, found in line["seconds"].items()}
        first, *_, last = median
        m, n = line["ranks"]
        for way, found in line["seconds"].items():
            rate = line["bytes"] / median[way] / 1e6
            print(
                f"| {line['cut']}, {m} → {n} | {way} | {median[way]:.3f} | {max(found):.3f} | {rate:.0f} | "
                f"{median[way] / median[first]:.2f} | {median[way] / median[last]:.2f} | "
                f"{line['added_mib'][way]:.0f} MiB |"
            )
    print()
    print("Bytes read for each byte of this state by a resume (weights and moments are tensors of their own):")
    for line in lines:
        m, n = line["ranks"]
        word = "kept  " if line["resume"] <= BYTES_BUDGET else "MISSED"
        print(f"{word}  {line['cut']}, {m} → {n}: {line['resume']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the temporary directory)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="lastwords-bench-", dir=arguments.dir) as directory:
        read = bytes_table(Path(directory), arguments.mib)
        times = times_table(Path(directory), arguments.mib, arguments.repeat)
    if arguments.json:
        print(json.dumps({"bytes": read, "times": times}))
        return
    print_bytes(read)
    print_times(times, arguments.repeat)


if __name__ == "__main__":
    main()
