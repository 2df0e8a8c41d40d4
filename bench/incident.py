"""From `kill -9` to a published checkpoint, in real jobs: 4 ranks, gloo, DDP, killed at random instants.

    python bench/incident.py [--n 20] [--seed 1] [--width 256] [--json FILE]

Each job trains until a random rank is killed at a random instant; the controller's own times of the incident come
from {ckpt_save_path}/logs/incidents.jsonl, the instant of the kill from here (CLOCK_MONOTONIC, the same for all of a
host). "known to decided" includes the rest of an update that is under way, which for this model is below 1 ms.
Beside it, in the same run: asking four processes and hearing from all of them over bare gRPC streams, which is what
the freeze and its answers consist of, idle and with four processes that compute, as the survivors of a kill do.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

WORLD_SIZE = 4
WARM_STEPS = 30
DECIDED_BUDGET_MS = (10.0, 50.0)
PUBLISHED_EXTRA_S = 0.25
JOB_TIMEOUT_S = 90.0
ROUND_TRIPS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """The benchmark, or (with --train, --echo) one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=20, help="how many jobs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=256, help="of the model's layers; 256 makes 1.6 MB of state")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.train:
        train(Path(options.train[0]), int(options.train[1]), int(options.train[2]))
        return 0
    if options.echo:
        echo(options.echo)
        return 0
    figures = measure(options.n, options.seed, options.width)
    report(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


# ---------------------------------------------------------------------- the job


def train(directory: Path, port: int, width: int) -> None:
    """One rank: trains until something happens."""
    import torch
    import torch.distributed as dist

    import lastwords

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.Linear(width, 10)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = lastwords.OptTFTWrapper(torch.optim.AdamW(model.parameters(), 1e-3))
    tft = lastwords.TFTRegister(0, "127.0.0.1", port, directory / "checkpoints", model=model, optimizer=optimizer)
    batch = torch.randn(32, width)
    with tft:
        for step in range(1, 1_000_000):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()  # type: ignore[no-untyped-call]
            tft.step_end(1, step)
            if step == WARM_STEPS:
                (directory / f"warm_{rank}").touch()


def one_incident(cluster: Any, directory: Path, draw: random.Random, width: int) -> dict[str, float]:
    """Milliseconds of one incident."""
    from tests.integration.harness import Port

    port = Port()
    job = cluster.start(
        directory,
        module="bench.incident",
        arguments=["--train", str(directory), str(port.number), str(width)],
        world_size=WORLD_SIZE,
        watched=[directory / "checkpoints"],
        ports=[port],
    )
    try:
        job.wait_for(lambda: len(list(directory.glob("warm_*"))) == WORLD_SIZE, JOB_TIMEOUT_S, "the first steps")
        time.sleep(draw.uniform(0.0, 0.2))
        victim = job.pids[draw.randrange(WORLD_SIZE)]
        killed_mono_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        job.wait(JOB_TIMEOUT_S)
        job.wait_gone(JOB_TIMEOUT_S)
    finally:
        job.close()
    line = (directory / "checkpoints" / "logs" / "incidents.jsonl").read_text().splitlines()[-1]
    record = json.loads(line)
    assert record["outcome"] == "SAVED", line
    at = {event["what"]: event["mono_s"] for event in record["events"]}  # the last of a kind counts
    known = record["known_mono_s"]
    return {
        "killed_to_known_ms": (known - killed_mono_s) * 1e3,
        "known_to_settled_ms": (at["settled"] - known) * 1e3,
        "known_to_decided_ms": (at["decided"] - known) * 1e3,
        "decided_to_published_ms": (at["published"] - at["decided"]) * 1e3,
        "killed_to_published_ms": (at["published"] - killed_mono_s) * 1e3,
        "bytes": float(record["bytes"]),
    }


# ---------------------------------------------------------------------- the machine's own limits


def echo(address: str) -> None:
    """A process that answers every message of a bare gRPC stream."""
    from lastwords.transport import grpc

    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    answers.put(b"hello")
    stream = grpc.insecure_channel(address).stream_stream("/bench/Echo")(iter(answers.get, b""))
    for message in stream:
        answers.put(message)


def round_trips_ms(busy: int, count: int = ROUND_TRIPS) -> list[float]:
    """Times to ask WORLD_SIZE processes and to hear from all, with `busy` processes that compute meanwhile.

    queue.Empty if one of them does not answer within a minute.
    """
    from lastwords.transport import grpc

    asks: list[queue.SimpleQueue[bytes]] = []
    heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def serve(messages: Iterator[bytes], _: Any) -> Iterator[bytes]:
        mine: queue.SimpleQueue[bytes] = queue.SimpleQueue()

        def listen() -> None:
            try:
                for message in messages:
                    heard.put(message)
            except grpc.RpcError:
                pass  # the process was ended

        asks.append(mine)  # before its hello can be heard: whoever has heard all asks all
        threading.Thread(target=listen, daemon=True).start()
        return iter(mine.get, b"")

    server = grpc.server(ThreadPoolExecutor(2 * WORLD_SIZE))
    handler = grpc.method_handlers_generic_handler("bench", {"Echo": grpc.stream_stream_rpc_method_handler(serve)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    command = [sys.executable, __file__, "--echo", f"127.0.0.1:{port}"]
    running = [subprocess.Popen(command) for _ in range(WORLD_SIZE)]
    running += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        for _ in range(WORLD_SIZE):
            heard.get(timeout=60)
        times = []
        for _ in range(count):
            time.sleep(0.01)  # everybody asleep, as before a death
            begun = time.monotonic()
            for mine in asks:
                mine.put(b"freeze")
            for _ in range(WORLD_SIZE):
                heard.get(timeout=60)
            times.append((time.monotonic() - begun) * 1e3)
        return times
    finally:
        for process in running:
            process.kill()
            process.wait()
        for mine in asks:
            mine.put(b"")  # ends the handler, for which the interpreter's exit would wait
        server.stop(0)


def plain_write_s(nbytes: int, directory: Path) -> float:
    """The same number of bytes with O_DIRECT and one fsync, median of 5."""
    import mmap

    block = 4096
    padded = -(-nbytes // block) * block
    memory = mmap.mmap(-1, padded)
    times = []
    for turn in range(5):
        path = directory / f"plain_{turn}"
        begun = time.monotonic()
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        os.pwrite(fd, memory, 0)
        os.fsync(fd)
        os.close(fd)
        times.append(time.monotonic() - begun)
        path.unlink()
    return statistics.median(times)


# ---------------------------------------------------------------------- figures


def measure(count: int, seed: int, width: int) -> dict[str, Any]:
    """All figures."""
    from tests.integration.harness import Cluster

    draw = random.Random(seed)
    directory = Path(tempfile.mkdtemp(prefix="lastwords-bench-"))
    incidents = []
    with Cluster() as cluster:
        for number in range(count):
            incidents.append(one_incident(cluster, directory / f"job_{number}", draw, width))
            sys.stderr.write(f"\r{number + 1} of {count} jobs killed ")
    sys.stderr.write("\r" + " " * 40 + "\r")
    state_bytes = int(statistics.median(one["bytes"] for one in incidents))
    figures: dict[str, Any] = {
        "n": count,
        "bytes": state_bytes,
        "plain_write_ms": plain_write_s(state_bytes, directory) * 1e3,
    }
    for name, busy in (("round_trip_idle_ms", 0), ("round_trip_busy_ms", WORLD_SIZE)):
        try:
            figures[name] = summary(round_trips_ms(busy))
        except queue.Empty:  # the incidents have been measured all the same
            sys.stderr.write(f"{name}: a process did not answer within a minute; not measured\n")
    for name in incidents[0]:
        if name.endswith("_ms"):
            figures[name] = summary([one[name] for one in incidents])
    shutil.rmtree(directory)
    return figures


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile (nearest rank) and maximum."""
    ordered = sorted(values)
    at = max(0, -(-99 * len(ordered) // 100) - 1)
    return {"median": statistics.median(ordered), "p99": ordered[at], "max": ordered[-1]}


def report(figures: dict[str, Any]) -> None:
    """The table."""
    write_budget_ms = 1.15 * figures["plain_write_ms"] + PUBLISHED_EXTRA_S * 1e3
    decided = figures["known_to_decided_ms"]
    met = decided["median"] <= DECIDED_BUDGET_MS[0] and decided["p99"] <= DECIDED_BUDGET_MS[1]
    published = figures["decided_to_published_ms"]["median"] <= write_budget_ms
    median_ms, p99_ms = DECIDED_BUDGET_MS
    verdicts = {
        "known_to_decided_ms": f"{median_ms:g} ms, {p99_ms:g} ms: {'met' if met else 'MISSED'}",
        "decided_to_published_ms": f"{write_budget_ms:.0f} ms: {'met' if published else 'MISSED'}",
    }
    print(
        f"{figures['n']} jobs of {WORLD_SIZE} ranks, {figures['bytes'] / 1e6:.1f} MB; plain write of as much", end=" "
    )
    print(f"{figures['plain_write_ms']:.1f} ms\n{'':<28} {'median':>9} {'p99':>9} {'max':>9}   budget")
    for name, values in figures.items():
        if isinstance(values, dict):
            label = name.removesuffix("_ms").replace("_", " ")
            print(
                f"{label:<28} {values['median']:>6.2f} ms {values['p99']:>6.2f} ms {values['max']:>6.2f} ms   "
                f"{verdicts.get(name, '')}".rstrip()
            )


if __name__ == "__main__":
    sys.exit(main())
