"""Runs every benchmark, one after the other, and prints their tables: `make bench`.

    python bench/run.py [--quick] [--only step_overhead ...] [--out DIR]

Each benchmark prints its figures beside the budget and the machine's own limit, measured in the same run. Their
output goes to DIR/{name}.txt too, with the load of the machine before each. --quick takes minutes, not a quarter of
an hour, and its 99th percentiles mean little.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FULL = {
    "step_overhead": [],
    "step_cost_witness": [],
    "memory": [],
    "detection": ["--resident-gb", "0.1", "2", "8", "--repetitions", "30"],
    "incident": ["--n", "50"],
    "heal": [],
    "save_load": [],
    "periodic": [],
    "shares": [],
    "reshard": [],
    "transform": [],
    "scale": ["--ranks", "16384"],
}
QUICK = {
    "step_overhead": ["--steps", "300", "--rounds", "3"],
    "step_cost_witness": ["--steps", "100"],
    "memory": ["--repeat", "1"],
    "detection": ["--resident-gb", "0.1", "2", "--repetitions", "5"],
    "incident": ["--n", "3"],
    "heal": ["--n", "2"],
    "periodic": ["--mib", "64", "--saves", "3"],
    "save_load": ["--mib", "128", "--repeat", "3"],
    "shares": ["--mib", "128", "--repeat", "3"],
    "reshard": ["--mib", "96", "--repeat", "1"],
    "transform": ["--mib", "96"],
    "scale": [],
}


def machine() -> str:
    """What the figures were measured on; no names."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {memory_gib:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=sorted(FULL), default=list(FULL), metavar="NAME")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = []
    print(machine(), flush=True)
    for name in arguments.only:
        more = (QUICK if arguments.quick else FULL)[name]
        command = [sys.executable, str(HERE / f"{name}.py"), *more]
        load = os.getloadavg()[0]
        head = f"== bench/{name}.py {' '.join(more)}".rstrip() + f"   (load before: {load:.1f})"
        print(f"\n{head}", flush=True)
        begun = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        print(done.stdout, end="")
        print(f"-- {time.monotonic() - begun:.0f} s", flush=True)
        (arguments.out / f"{name}.txt").write_text(f"{machine()}\n{head}\n{done.stdout}", encoding="utf-8")
        if done.returncode:
            failed.append(name)
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
