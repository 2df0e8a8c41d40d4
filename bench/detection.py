"""How long until a `kill -9` is known on the same host: robust mutex, pidfd and socket EOF side by side.

    python bench/detection.py [--resident-gb 0.1 2] [--repetitions 20] [--pages small] [--load 0] [--json FILE]

Three processes, as in a job. The *victim* touches that much memory, takes its life line and connects a socket. The
*watcher* (the controller's part) waits with one thread each for the robust mutex, the pidfd and the end of the
socket. This process kills: were it also the watcher, the killing thread would hold its interpreter lock while the
dying process has the core. Times are CLOCK_MONOTONIC, the same for all of a host, from just before kill(2) to the
first line of the call-back. The first source to speak is what the controller acts on; pidfd and socket EOF are what
the machine gives without a robust mutex.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from lastwords.liveness import paths, process_id
from lastwords.liveness.pidfd import PidWatcher
from lastwords.liveness.robust_mutex import LifeLine, watch
from lastwords.vocabulary import ProcessId

SOURCES = ("robust mutex", "pidfd", "socket EOF")
MEDIAN_BUDGET_MS = 1.0
P99_BUDGET_MS = 5.0
WAIT_S = 120.0


def be_victim(life_path: str, port: str, resident_bytes: str, pages: str) -> None:
    """Memory touched, life line held, socket connected, asleep."""
    memory = mmap.mmap(-1, int(resident_bytes), flags=mmap.MAP_PRIVATE)
    # Small pages are the usual case and the slow one: the kernel gives each of them back by itself.
    memory.madvise(mmap.MADV_NOHUGEPAGE if pages == "small" else mmap.MADV_HUGEPAGE)
    memory[::4096] = b"\1" * len(range(0, len(memory), 4096))
    line = LifeLine.create(Path(life_path))
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        connection.sendall(b"r")
        signal.pause()
    line.release()


def be_watcher() -> None:
    """For each line "LIFE_PATH PID" wait for that death in three ways and print when each was known."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        for order in sys.stdin:
            life_path, pid = order.split()
            connection, _ = server.accept()
            connection.recv(1)
            print(json.dumps(_await_death(Path(life_path), int(pid), connection)), flush=True)


def _await_death(life_path: Path, pid: int, connection: socket.socket) -> dict[str, int]:
    known_ns: dict[str, int] = {}
    all_known = threading.Event()
    process = ProcessId(process_id.host_id(), pid, process_id.start_ticks(pid) or 0, "bench")
    life_watch = watch(life_path, lambda _: _note(known_ns, "robust mutex", all_known))
    pid_watcher = PidWatcher()
    pid_watcher.add(process, lambda: _note(known_ns, "pidfd", all_known))
    end = threading.Thread(target=_await_eof, args=(connection, known_ns, all_known), daemon=True)
    end.start()
    print("watching", flush=True)
    all_known.wait(WAIT_S)
    life_watch.stop()
    pid_watcher.stop()
    end.join()
    return known_ns


def _note(known_ns: dict[str, int], source: str, all_known: threading.Event) -> None:
    known_ns[source] = time.monotonic_ns()
    if len(known_ns) == len(SOURCES):
        all_known.set()


def _await_eof(connection: socket.socket, known_ns: dict[str, int], all_known: threading.Event) -> None:
    with connection, contextlib.suppress(ConnectionError):
        connection.recv(1)
    _note(known_ns, "socket EOF", all_known)


class Watcher:
    """The watching process from the outside."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--watcher"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._line())

    def expect(self, life_path: Path, pid: int) -> None:
        _pipe(self._process.stdin).write(f"{life_path} {pid}\n")
        _pipe(self._process.stdin).flush()
        assert self._line() == "watching"

    def known_ns(self) -> dict[str, int]:
        known: dict[str, int] = json.loads(self._line())
        assert len(known) == len(SOURCES), f"within {WAIT_S:g} s only {sorted(known)} spoke"
        return known

    def close(self) -> None:
        _pipe(self._process.stdin).close()
        self._process.wait()

    def _line(self) -> str:
        return _pipe(self._process.stdout).readline().strip()


def one_death(watcher: Watcher, life_path: Path, resident_bytes: int, pages: str) -> dict[str, float]:
    """Milliseconds from the kill to each source's word."""
    arguments = [str(life_path), str(watcher.port), str(resident_bytes), pages]
    victim = subprocess.Popen([sys.executable, __file__, "--victim", *arguments])
    try:
        watcher.expect(life_path, victim.pid)
        time.sleep(0.05)  # all three are asleep by then
        killed_ns = time.monotonic_ns()
        os.kill(victim.pid, signal.SIGKILL)
        known_ns = watcher.known_ns()
    finally:
        victim.kill()
        victim.wait()
    return {source: (known_ns[source] - killed_ns) / 1e6 for source in SOURCES}


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5), percentile([1.0, 2.0], 0.99)
    (2.0, 2.0)
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def measure(
    sizes_gb: Sequence[float], repetitions: int, pages: str, progress: Callable[[str], object]
) -> list[dict[str, float | str]]:
    """One row for each size and source."""
    rows: list[dict[str, float | str]] = []
    job = f"bench-{os.getpid()}"
    paths.make_job_dir(job, 0)
    watcher = Watcher()
    try:
        for size_gb in sizes_gb:
            deaths: list[dict[str, float]] = []
            for number in range(repetitions):
                deaths.append(one_death(watcher, paths.life_path(job, 0, 0), int(size_gb * (1 << 30)), pages))
                progress(f"\r{size_gb:g} GB resident: {number + 1} of {repetitions} ")
            for source in SOURCES:
                values = [death[source] for death in deaths]
                rows.append(
                    {
                        "resident_gb": size_gb,
                        "source": source,
                        "median_ms": percentile(values, 0.5),
                        "p99_ms": percentile(values, 0.99),
                        "max_ms": max(values),
                        "repetitions": repetitions,
                    }
                )
        progress("\r" + " " * 60 + "\r")
    finally:
        watcher.close()
        paths.remove_job_dir(job, 0)
    return rows


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """That many processes that compute for ever, to measure on an overloaded machine."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def report(rows: Sequence[dict[str, float | str]]) -> Iterator[str]:
    """The rows as lines of a table."""
    yield f"{'resident':>9}  {'source':<12} {'median':>10} {'p99':>11} {'max':>11}  budget (median, p99)"
    for row in rows:
        verdict = ""
        if row["source"] == "robust mutex":
            met = float(row["median_ms"]) <= MEDIAN_BUDGET_MS and float(row["p99_ms"]) <= P99_BUDGET_MS
            verdict = f"{MEDIAN_BUDGET_MS:g} ms, {P99_BUDGET_MS:g} ms: {'met' if met else 'MISSED'}"
        yield (
            f"{row['resident_gb']:>6g} GB  {row['source']:<12} {row['median_ms']:>7.3f} ms {row['p99_ms']:>8.3f} ms "
            f"{row['max_ms']:>8.3f} ms  {verdict}".rstrip()
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resident-gb", type=float, nargs="+", default=[0.1, 2.0], metavar="GB")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--pages", choices=("small", "huge"), default="small", help="of the victim's memory")
    parser.add_argument("--load", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--victim", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--watcher", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.victim:
        be_victim(*arguments.victim)
        return 0
    if arguments.watcher:
        be_watcher()
        return 0
    with load(arguments.load):
        rows = measure(arguments.resident_gb, arguments.repetitions, arguments.pages, sys.stderr.write)
    print("\n".join(report(rows)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


if __name__ == "__main__":
    sys.exit(main())
