"""Recovery from `kill -9` of one rank, by several systems in turn on one machine: `make bench-peers`.

    python -m bench.peers.bench_peers [--n 20] [--calm 3] [--seed 1] [--only NAME ...] [--out STEM] [--again FILE]

Writes STEM.json and STEM.svg, and prints the table; --again does this with the results of an earlier session.

One kill per run: the victim is drawn among the ranks, the instant from the two seconds after step 20. In each round
every system has one run, so that all meet the same load. Beforehand, and once in each of the first rounds, it runs
undisturbed beside plain DDP: for the step times, and for the losses and weights with which the killed run is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers.job import ROOT, Job, JobError, Update
from bench.peers.picture import draw
from bench.peers.systems import PLAIN, SYSTEMS, System
from bench.peers.verdict import first_of, verdict
from bench.peers.workload import RANKS, WEIGHTS_EVERY

WARM_STEP = 20
SPREAD_S = 2.0
CALM_STEPS = 160
CALM_FROM = 21
"""The step times of the start are not counted."""


def main() -> int:
    """The benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=20, help="kills per system")
    parser.add_argument("--calm", type=int, default=3, help="undisturbed runs per system")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="systems, by name or a part of it")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out" / "comparison", metavar="STEM")
    parser.add_argument("--again", type=Path, metavar="FILE", help="results of an earlier session")
    options = parser.parse_args()
    if options.again is not None:
        results = json.loads(options.again.read_text(encoding="utf-8"))
    else:
        chosen = [system for system in SYSTEMS if not options.only or any(part in system.name for part in options.only)]
        results = unmeasured(chosen, options.n, options.seed)
        try:
            measure(results, chosen, options.n, options.calm)
        finally:  # what there is after an interruption
            keep(results, options.out)
    keep(results, options.out)
    draw(options.out.with_suffix(".svg"), results)
    report(results)
    return 0


def keep(results: dict[str, Any], stem: Path) -> None:
    """Writes the figures."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(compact(results), encoding="utf-8")


def compact(results: dict[str, Any]) -> str:
    """JSON with a line for each kill."""
    text = json.dumps(results, indent=1)
    return re.sub(r"(?<=[{\[])\n {4,}[^{}\[\]]*(?=[}\]])", lambda found: " ".join(found[0].split()), text) + "\n"


def unmeasured(systems: Sequence[System], kills: int, seed: int) -> dict[str, Any]:
    """What the report and the picture are made of, without figures yet."""
    return {
        "kills": kills,
        "seed": seed,
        "load_before": round(os.getloadavg()[0], 1),
        "load_after": None,
        "import_torch_s": [import_torch_s() for _ in range(3)],
        "plain_step_ms": [],
        "systems": {system.name: {"settings": system.settings, "step_ms": [], "kills": []} for system in systems},
    }


def measure(results: dict[str, Any], systems: Sequence[System], kills: int, calm: int) -> None:
    """Fills in the figures, a round of all systems after the other."""
    draws = random.Random(results["seed"])
    references: dict[str, dict[tuple[int, int], Update]] = {}
    for number in range(max(calm, kills)):
        for system in (PLAIN, *systems) if number < calm else ():
            try:
                updates = undisturbed(system)
            except JobError as error:
                progress(f"{number + 1}/{calm} {system.name}, undisturbed: {error}")
                continue
            references.setdefault(system.name, {(update.rank, update.step): update for update in updates})
            times_ms = results["plain_step_ms"] if system is PLAIN else results["systems"][system.name]["step_ms"]
            times_ms.append(round(step_ms(updates), 2))
            progress(f"{number + 1}/{calm} {system.name}, undisturbed: {times_ms[-1]} ms a step")
        for system in systems if number < kills else ():
            reference = references.get(system.name, {})
            found = one_kill(system, draws.randrange(RANKS), draws.random() * SPREAD_S, reference)
            results["systems"][system.name]["kills"].append(found)
            progress(f"{number + 1}/{kills} {system.name}: {json.dumps(found)}")
    results["load_after"] = round(os.getloadavg()[0], 1)


def progress(text: str) -> None:
    """A session takes hours."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def import_torch_s() -> float:
    """Of a new process, alone: every cold restart has to wait for it."""
    begun_mono_s = time.monotonic()
    subprocess.run([sys.executable, "-W", "ignore", "-c", "import torch"], check=True)
    return round(time.monotonic() - begun_mono_s, 2)


def undisturbed(system: System) -> list[Update]:
    """The log of a run in which nobody is killed."""
    with Job(system) as job:
        return job.end(CALM_STEPS, RANKS)


def step_ms(updates: Sequence[Update]) -> float:
    """The mean, so that what is saved every tenth step counts."""
    times_ns = {update.step: update.mono_ns for update in updates if update.rank == 0}
    return (times_ns[CALM_STEPS] - times_ns[CALM_FROM]) / 1e6 / (CALM_STEPS - CALM_FROM)


def one_kill(
    system: System, victim_rank: int, delay_s: float, reference: dict[tuple[int, int], Update]
) -> dict[str, Any]:
    """What happened after `kill -9` of a rank; {"failed": why} if the system did not recover."""
    with Job(system) as job:
        try:
            job.wait_for(lambda updates: all(seen(updates, rank) >= WARM_STEP for rank in range(RANKS)), "start")
            time.sleep(delay_s)
            before = job.updates()
            victim_pid = [update.pid for update in before if update.rank == victim_rank][-1]
            killed_mono_ns = time.monotonic_ns()
            os.kill(victim_pid, signal.SIGKILL)
            world = RANKS if system.full_again else RANKS - 1
            job.wait_for(lambda updates: first_of(updates, killed_mono_ns, victim_pid, world) is not None, "recovery")
            durable = [path.name for path in job.durable()]
            updates = job.updates()
            updates = job.end((updates[-1].step // WEIGHTS_EVERY + 2) * WEIGHTS_EVERY, world)
        except JobError as error:
            return {"victim": victim_rank, "failed": str(error)}
    return {"victim": victim_rank, **verdict(updates, killed_mono_ns, victim_pid, reference), "durable": bool(durable)}


def seen(updates: Sequence[Update], rank: int) -> int:
    """The newest step of a rank."""
    return max((update.step for update in updates if update.rank == rank), default=0)


def report(results: dict[str, Any]) -> None:
    """The table in Markdown, as docs/comparison.md has it."""
    plain = statistics.median(results["plain_step_ms"])
    print(f"`import torch`: {statistics.median(results['import_torch_s']):.2f} s; plain DDP: {plain:.1f} ms a step;")
    print(f"load before: {results['load_before']}, after: {results['load_after']}; seed {results['seed']}\n")
    print("| system | recovered | all ranks again | fewer ranks | updates lost | kept | bitwise | durable | step |")
    print("|---|---:|---:|---:|---:|---:|---|---|---:|")
    for name, system in results["systems"].items():
        good = [one for one in system["kills"] if "failed" not in one]
        same = good and all(one["first_difference"] is None and one["steps_compared"] for one in good)
        cells = [
            name,
            f"{len(good)} of {len(system['kills'])}",
            median_max([one["full_s"] for one in good], "s"),
            median_max([one["fewer_s"] for one in good], "s"),
            median_max([one["updates_lost"] for one in good], ""),
            median_max([one["pids_kept"] for one in good], ""),
            "yes" if same else "no",
            "yes" if good and all(one["durable"] for one in good) else "no",
            f"{statistics.median(system['step_ms']) / plain:.2f} ×" if system["step_ms"] else "–",
        ]
        print(f"| {' | '.join(cells)} |")


def median_max(values: Sequence[float | None], unit: str) -> str:
    """Of those that there are."""
    there = [value for value in values if value is not None]
    if not there:
        return "–"
    form = "{:.2f} s, {:.2f} s" if unit else "{:g}, {:g}"
    return form.format(statistics.median(there), max(there))


if __name__ == "__main__":
    sys.exit(main())
