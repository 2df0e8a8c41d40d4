"""From `kill -9` to the next update on every rank: `lastwords run`, and torchrun that is started again at once.

    python bench/heal.py [--n 50] [--torchrun 5] [--width 1100 [--compile] | --rows N] [--ranks 4] [--device cuda]
        [--starts 0] [--json FILE]

4 ranks, gloo, DDP; random ranks are killed at random instants in one job, one after the other, with some seconds
between. The defaults make 29 MB of state. Processor time is that of a rank from its first line to its first update.
With --rows, the model is an embedding with sparse gradients: much state and short steps, 512 bytes of state for each
row. A plain write with fsync, a plain read and a copy of as many bytes stand beside it. On a GPU, all ranks are on the
first one, over NCCL. With --compile, inductor compiles the layers; its cache is empty at the job's start. --starts: how
long so many starts take with either launcher, and the private memory of a rank at the script's first line and after
five steps.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.memory import private_mib  # noqa: E402

FIRST_LINE = {"forked": time.monotonic(), "mib": private_mib()}
"""When the script began, and what it had to itself."""

BUDGET_S = (0.5, 0.8)
"""Median and 99th percentile, kill to all updated."""

BUDGET_CPU_S = 0.1
DIMENSIONS = 64
"""Of the embedding's rows."""

RECOVERY_TIMEOUT_S = 120.0
PAUSE_S = 2.0
"""Between two kills: until the controller of the next generation is ready."""

EVENTS = ("published", "left", "entered", "begun", "updated")
PARTS = {
    "write": ("killed", "published"),
    "free": ("published", "entered"),
    "fork": ("entered", "forked"),
    "script": ("forked", "built"),
    "read": ("built", "read"),
    "first step": ("read", "updated"),
}
"""Of a heal: between the last rank's arrival at one place and at the next one."""

STEPS = 5
"""Before the memory of a rank is looked at."""


def main(arguments: list[str] | None = None) -> int:
    """The benchmark, or (with --train) one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=50, help="kills under lastwords run")
    parser.add_argument("--torchrun", type=int, default=5, help="kills under torchrun")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=1100, help="of the model's two square layers")
    parser.add_argument("--rows", type=int, default=0, help="of an embedding in place of these layers")
    parser.add_argument("--compile", action="store_true", help="with inductor")
    parser.add_argument("--starts", type=int, default=0, help="of jobs in which nobody is killed")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.train is not None:
        train(options.train, options.width, options.rows, options.device, compiled=options.compile)
        return 0
    figures: dict[str, Any] = {}
    flags = ["--width", str(options.width), "--rows", str(options.rows), "--device", options.device]
    flags += ["--compile"] * options.compile
    for launcher, kills in (("lastwords run", options.n), ("torchrun", options.torchrun)):
        if kills:
            figures[launcher] = measure(launcher, kills, options.ranks, flags, options.seed)
    report(figures)
    for launcher in ("lastwords run", "torchrun") if options.starts else ():
        figures[f"{launcher}, starts"] = [started(launcher, options.ranks, flags) for _ in range(options.starts)]
        report_starts(launcher, figures[f"{launcher}, starts"])
    if options.rows:
        figures["plain"] = plain(options.rows * DIMENSIONS * 8)
        print(", ".join(f"{what} {seconds:.2f} s" for what, seconds in figures["plain"].items()))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def train(directory: Path, width: int, rows: int, device: str, *, compiled: bool) -> None:
    """One rank, until the file `stop` is there."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import lastwords

    torch.set_num_threads(1)
    if device == "cuda":
        from tests.integration.gpu import set_up

        set_up(int(os.environ["RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    inner: torch.optim.Optimizer
    if rows:
        table = torch.nn.Embedding.from_pretrained(torch.zeros(rows, DIMENSIONS), freeze=False, sparse=True)
        whole = torch.nn.Sequential(table, torch.nn.Linear(DIMENSIONS, 1)).to(device)
        model = DistributedDataParallel(whole, init_sync=False)
        inner = torch.optim.Adagrad(model.parameters(), 1e-3)
        batch = torch.randint(0, rows, (64,)).to(device)
    else:
        layers = [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)]
        dense = torch.nn.Sequential(*layers).to(device)
        model = DistributedDataParallel(torch.compile(dense) if compiled else dense)
        inner = torch.optim.AdamW(model.parameters(), 1e-3)
        batch = torch.randn(4, width).to(device)
    with lastwords.protect(directory / "checkpoints", model=model, optimizer=inner) as tft:
        passed = {**FIRST_LINE, "built": time.monotonic()}
        point = tft.resume(missing_ok=True)
        passed["read"] = time.monotonic()
        first = step = 0 if point is None else point.global_step
        while not stop(directory, device):
            step += 1
            tft.optimizer.zero_grad()
            model(batch).square().mean().backward()
            tft.optimizer.step()
            tft.step_end(1, step)
            if step == first + 1:
                stepped = {"pid": os.getpid(), "mono_s": time.monotonic(), "cpu_s": sum(os.times()[:2]), "step": step}
                say(directory, f"stepped_{dist.get_rank()}", {**passed, **stepped})
            if step == first + STEPS:
                say(directory, f"trained_{dist.get_rank()}", {"first": passed["mib"], "trained": private_mib()})


def say(directory: Path, name: str, what: dict[str, Any]) -> None:
    """In a file that is whole once it is there."""
    temporary = directory / f"{name}.new"
    temporary.write_text(json.dumps(what), encoding="utf-8")
    temporary.rename(directory / name)


def stop(directory: Path, device: str) -> bool:
    """The same answer on all ranks."""
    import torch
    import torch.distributed as dist

    answer = torch.tensor([(directory / "stop").exists()], dtype=torch.int32, device=device)
    dist.broadcast(answer, 0)
    return bool(answer)


def start(launcher: str, ranks: int, directory: Path, flags: list[str]) -> subprocess.Popen[bytes]:
    """A job, which writes to `log`."""
    module = ["lastwords.cli", "run"] if launcher == "lastwords run" else ["torch.distributed.run"]
    command = [sys.executable, "-m", *module, "--standalone", "--nproc-per-node", str(ranks), __file__]
    command += ["--train", str(directory), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(directory / "compiled")}
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def started(launcher: str, ranks: int, flags: list[str]) -> dict[str, float]:
    """Seconds from a job's start to the first step of all its ranks, and MiB of the rank that has most."""
    directory, begun_mono_s = Path(tempfile.mkdtemp(prefix="bench-heal-")), time.monotonic()
    job = start(launcher, ranks, directory, flags)
    try:
        _await(job, directory, lambda: len(said(directory, "trained")) == ranks)
        updated_s = max(one["mono_s"] for one in stepped(directory)) - begun_mono_s
        memory = {f"{when}_mib": max(one[when] for one in said(directory, "trained")) for when in ("first", "trained")}
        (directory / "stop").touch()
        job.wait(RECOVERY_TIMEOUT_S)
    finally:
        job.terminate()
        job.wait()
    shutil.rmtree(directory)
    return {"updated": updated_s, **memory}


def measure(launcher: str, kills: int, ranks: int, flags: list[str], seed: int) -> list[dict[str, float]]:
    """Seconds from each kill to what follows it, and processor seconds of a rank."""
    draw = random.Random(seed)
    directory = Path(tempfile.mkdtemp(prefix="bench-heal-"))
    ours = launcher == "lastwords run"
    job = start(launcher, ranks, directory, flags)
    found: list[dict[str, float]] = []
    try:
        _await(job, directory, lambda: len(stepped(directory)) == ranks)
        for _ in range(kills):
            time.sleep(PAUSE_S + draw.random())
            before = stepped(directory)
            pids = {one["pid"] for one in before}
            killed_mono_s = time.monotonic()
            os.kill(draw.choice(before)["pid"], signal.SIGKILL)
            if not ours:  # its own --max-restarts keeps the store, and ranks find addresses of the dead there
                job.wait(RECOVERY_TIMEOUT_S)
                job = start(launcher, ranks, directory, flags)
            _await(job, directory, lambda pids=pids: not pids & {one["pid"] for one in stepped(directory)})
            again = stepped(directory)
            figures = {"updated": max(one["mono_s"] for one in again) - killed_mono_s}
            if ours:
                recovered = len(found) + 1
                _await(job, directory, lambda count=recovered: len(records(directory, "RECOVERED")) >= count)
                figures = durations(directory, killed_mono_s)
                figures |= {
                    what: max(one[what] for one in again) - killed_mono_s for what in ("forked", "built", "read")
                }
            found.append({**figures, "cpu": statistics.median(one["cpu_s"] for one in again)})
        (directory / "stop").touch()
        job.wait(RECOVERY_TIMEOUT_S)
    finally:
        job.terminate()
        job.wait()
    shutil.rmtree(directory)
    return found


def plain(nbytes: int) -> dict[str, float]:
    """Seconds to write so many bytes past the page cache with one fsync, to read them, and to copy them in memory."""
    import numpy as np

    block, found = mmap.mmap(-1, 64 << 20), {}
    block.write(os.urandom(len(block)))
    with tempfile.NamedTemporaryFile(prefix="bench-heal-") as file:

        def timed(what: str, flags: int, work: Callable[[int], object]) -> None:
            begun_s = time.perf_counter()
            descriptor = os.open(file.name, flags | os.O_DIRECT)
            for _ in range(nbytes // len(block)):
                work(descriptor)
            os.fsync(descriptor)
            os.close(descriptor)
            found[what] = time.perf_counter() - begun_s

        timed("write", os.O_WRONLY, lambda to: os.write(to, block))
        timed("read", os.O_RDONLY, lambda source: os.readv(source, [block]))
    source, target = np.ones(nbytes // 8), np.ones(nbytes // 8)
    begun_s = time.perf_counter()
    np.copyto(target, source)
    return {**found, "copy": time.perf_counter() - begun_s}


def stepped(directory: Path) -> list[dict[str, Any]]:
    """What ranks have said after the first step of their newest process."""
    return said(directory, "stepped")


def said(directory: Path, name: str) -> list[dict[str, Any]]:
    """By each rank."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in directory.glob(f"{name}_*") if not path.suffix]


def _await(job: subprocess.Popen[bytes], directory: Path, there: Any) -> None:
    deadline_mono_s = time.monotonic() + RECOVERY_TIMEOUT_S
    while not there():
        if job.poll() is not None or time.monotonic() > deadline_mono_s:
            raise RuntimeError((directory / "log").read_text(encoding="utf-8", errors="replace")[-4000:])
        time.sleep(0.05)


def records(directory: Path, outcome: str) -> list[dict[str, Any]]:
    """Lines of incidents.jsonl, oldest first."""
    path = directory / "checkpoints" / "logs" / "incidents.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["outcome"] == outcome]


def durations(directory: Path, killed_mono_s: float) -> dict[str, float]:
    """Of the newest recovery: until the last rank had got there."""
    events = records(directory, "SAVED")[-1]["events"] + records(directory, "RECOVERED")[-1]["events"]
    return {what: max(one["mono_s"] for one in events if one["what"] == what) - killed_mono_s for what in EVENTS}


def report(figures: dict[str, Any]) -> None:
    """The table."""
    print("seconds from kill -9 until ... (median / 99th percentile), and processor seconds of a rank")
    columns = (*EVENTS, "cpu")
    print(f"{'':<14}{'kills':>6}" + "".join(f"{what:>16}" for what in columns))
    for name, runs in figures.items():
        cells = []
        for what in columns:
            values = sorted(run[what] for run in runs if what in run)
            cells.append(f"{statistics.median(values):>8.3f} /{percentile(values):>6.3f}" if values else f"{'–':>16}")
        print(f"{name:<14}{len(runs):>6}{''.join(cells)}")
    if "lastwords run" in figures:
        runs = [{"killed": 0.0, **run} for run in figures["lastwords run"]]
        medians = {what: statistics.median(run[to] - run[of] for run in runs) for what, (of, to) in PARTS.items()}
        print(", ".join(f"{what} {seconds:.2f} s" for what, seconds in medians.items()))
        updated = sorted(run["updated"] for run in figures["lastwords run"])
        cpu = statistics.median(run["cpu"] for run in figures["lastwords run"])
        for what, value, limit in (
            ("median", statistics.median(updated), BUDGET_S[0]),
            ("99th percentile", percentile(updated), BUDGET_S[1]),
            ("processor", cpu, BUDGET_CPU_S),
        ):
            print(f"budget, {what}: {limit:.2f} s: {'met' if value <= limit else 'MISSED'}")


def report_starts(launcher: str, starts: list[dict[str, float]]) -> None:
    """Medians."""
    middle = {what: statistics.median(one[what] for one in starts) for what in starts[0]}
    print(
        f"{launcher}: all ranks have updated {middle['updated']:.2f} s after the start; private memory of a rank "
        f"{middle['first_mib']:.1f} MiB at its first line, {middle['trained_mib']:.1f} MiB after {STEPS} steps"
    )


def percentile(values: list[float]) -> float:
    """The 99th of sorted values."""
    return values[min(len(values) - 1, round(0.99 * len(values)))]


if __name__ == "__main__":
    sys.exit(main())
