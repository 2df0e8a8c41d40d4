"""Whether a job that runs for long and is healed again and again holds more and more: descriptors, threads, memory.

    python bench/soak.py [--minutes 30] [--ranks 64] [--kills 10] [--json FILE]

Many ranks on few cores, gloo, DDP, small layers; random ranks are killed at equal distances. All processes of the job
are looked at twice a minute. Printed for each kind of process: the most that one of them had in the first and in the
last third of the time; memory is what is its own (RssAnon).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

KINDS = {"rank": r"\[lastwords rank", "fork server": "lastwords.fork", "controller": r"lastwords\.controller"}
LOOK_EVERY_S = 30.0
BEGIN_S = 600.0

Figures = dict[str, int]
"""descriptors, threads, KiB of the process that has most of each."""


def main(arguments: list[str] | None = None) -> int:
    """The benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write what was seen to this file")
    options = parser.parse_args(arguments)
    found = soak(options.ranks, options.minutes * 60, options.kills, random.Random(options.seed))
    report(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def soak(ranks: int, seconds: float, kills: int, draw: random.Random) -> list[dict[str, Figures]]:
    """What each kind of process held at each look."""
    from bench import heal

    directory = Path(tempfile.mkdtemp(prefix="bench-soak-"))
    command = [sys.executable, "-m", "lastwords.cli", "run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [heal.__file__, "--train", str(directory), "--width", "64"]
    with (directory / "log").open("wb") as log:
        job = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
    found: list[dict[str, Figures]] = []
    try:
        begun_s = time.monotonic()
        while len(heal.stepped(directory)) < ranks:
            assert job.poll() is None, (directory / "log").read_text()
            assert time.monotonic() - begun_s < BEGIN_S, "the job does not begin"
            time.sleep(1)
        begun_s, killed = time.monotonic(), 0
        while (passed_s := time.monotonic() - begun_s) < seconds:
            time.sleep(min(LOOK_EVERY_S, seconds / 20))
            assert job.poll() is None, (directory / "log").read_text()
            found.append(seen(job.pid))
            if killed < kills * passed_s / seconds - 0.5:
                killed += 1
                os.kill(draw.choice(heal.stepped(directory))["pid"], signal.SIGKILL)
        (directory / "stop").touch()
        assert job.wait(BEGIN_S) == 0, (directory / "log").read_text()
        print(f"{killed} kills, {len(heal.records(directory, 'RECOVERED'))} times healed")
    finally:
        job.terminate()
        job.wait()
    shutil.rmtree(directory)
    return found


def seen(launcher: int) -> dict[str, Figures]:
    """The most of each that one process of each kind has now."""
    most: dict[str, Figures] = {}
    for pid in [launcher, *descendants(launcher)]:
        try:
            name = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            status = Path(f"/proc/{pid}/status").read_text()
            held = {
                "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
                "threads": int(re.findall(r"^Threads:\s+(\d+)", status, re.M)[0]),
                "KiB": int(re.findall(r"^RssAnon:\s+(\d+)", status, re.M)[0]),
            }
        except (OSError, IndexError):  # it is ending
            continue
        kind = next((one for one, pattern in KINDS.items() if re.search(pattern, name)), "other")
        before = most.setdefault("launcher" if pid == launcher else kind, held)
        most["launcher" if pid == launcher else kind] = {what: max(before[what], held[what]) for what in held}
    return most


def descendants(pid: int) -> Iterator[int]:
    """Of a process, at any depth."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            yield child
            yield from descendants(child)


def report(found: list[dict[str, Figures]]) -> None:
    """A table: the first and the last third."""
    third = max(len(found) // 3, 1)
    print(f"{'':12} {'descriptors':>15} {'threads':>15} {'MiB':>15}")
    for kind in sorted({kind for one in found for kind in one}):
        cells = []
        for what, unit in (("descriptors", 1), ("threads", 1), ("KiB", 1024)):
            first, last = (
                max((one[kind][what] for one in part if kind in one), default=0) / unit
                for part in (found[:third], found[-third:])
            )
            cells.append(f"{first:6.0f} -> {last:5.0f}")
        print(f"{kind:12} " + " ".join(f"{cell:>15}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
