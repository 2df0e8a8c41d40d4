"""Recovery from `kill -9` of one rank, by several systems in turn on one machine: `make bench-peers`.

    python -m bench.peers.bench_peers [--n 20] [--calm 3] [--seed 1] [--only NAME ...] [--out STEM] [--again FILE]

Writes STEM.json and STEM.svg, and prints the table; --again does this with the results of an earlier session.

The victim is drawn among the ranks, the instant from the two seconds after the 20th update of all ranks, since the
start or since the recovery before. Four kills fall into one run, but one where a process is kept in reserve, which
shall be there. The systems have their kills in turn, so that all meet the same load. In each of the first rounds they
run undisturbed beside plain DDP: for the step times, and for the losses and weights that the killed runs should have.
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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers.job import ROOT, Job, JobError, Update
from bench.peers.picture import draw
from bench.peers.systems import PLAIN, SYSTEMS, System
from bench.peers.verdict import Kill, first_of, verdict
from bench.peers.workload import RANKS, WEIGHTS_EVERY

WARM_UPDATES = 20
SPREAD_S = 2.0
CALM_STEPS = 200
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
    for number in range(calm):
        for system in (PLAIN, *systems):
            try:
                updates = undisturbed(system)
            except JobError as error:
                progress(f"{number + 1}/{calm} {system.name}, undisturbed: {error}")
                continue
            references.setdefault(system.name, {(update.rank, update.step): update for update in updates})
            times_ms = results["plain_step_ms"] if system is PLAIN else results["systems"][system.name]["step_ms"]
            times_ms.append(round(step_ms(updates), 2))
            progress(f"{number + 1}/{calm} {system.name}, undisturbed: {times_ms[-1]} ms a step")
    plans = [(draws.randrange(RANKS), draws.random() * SPREAD_S) for _ in range(kills)]
    while waiting := [system for system in systems if len(results["systems"][system.name]["kills"]) < kills]:
        done = min(len(results["systems"][system.name]["kills"]) for system in waiting)
        for system in waiting:
            there = results["systems"][system.name]["kills"]
            if len(there) > done:
                continue
            found = killed(system, plans[done : done + system.kills_per_run], references.get(system.name, {}))
            there += found
            for number, one in enumerate(found, done + 1):
                progress(f"{number}/{kills} {system.name}: {json.dumps(one)}")
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


def killed(
    system: System, plans: Sequence[tuple[int, float]], reference: dict[tuple[int, int], Update]
) -> list[dict[str, Any]]:
    """What happened after each `kill -9` of a run; the last one is {"failed": why} if the system did not recover."""
    kills: list[Kill] = []
    failure: list[dict[str, Any]] = []
    with Job(system) as job:
        try:
            for victim_rank, delay_s in plans:
                kills.append(one_kill(job, victim_rank, delay_s, kills[-1].recovered_mono_ns if kills else 0))
            last_step = (job.updates()[-1].step // WEIGHTS_EVERY + 2) * WEIGHTS_EVERY
            job.end(last_step, RANKS if system.full_again else RANKS - 1)
        except JobError as error:
            del kills[len(plans) - 1 :]  # of which it cannot be said that training went on
            failure.append({"victim": plans[len(kills)][0], "failed": str(error)})
        updates = job.updates()
    afterwards = [*kills[1:], None][: len(kills)]
    return [verdict(updates, kill, after, reference) for kill, after in zip(kills, afterwards, strict=True)] + failure


def one_kill(job: Job, victim_rank: int, delay_s: float, begun_mono_ns: int) -> Kill:
    """Kills a rank, and waits until training goes on."""
    job.wait_for(lambda updates: fewest_updates(updates, begun_mono_ns) >= WARM_UPDATES, "training")
    time.sleep(delay_s)
    victim_pid = [update.pid for update in job.updates() if update.rank == victim_rank][-1]
    world = RANKS if job.system.full_again else RANKS - 1
    killed_mono_ns = time.monotonic_ns()
    os.kill(victim_pid, signal.SIGKILL)
    job.wait_for(lambda updates: first_of(updates, killed_mono_ns, victim_pid, world) is not None, "recovery")
    return Kill(victim_rank, victim_pid, begun_mono_ns, killed_mono_ns, time.monotonic_ns(), bool(job.durable()))


def fewest_updates(updates: Sequence[Update], begun_mono_ns: int) -> int:
    """Of any rank, since `begun_mono_ns`."""
    counts = Counter(update.rank for update in updates if update.mono_ns > begun_mono_ns)
    return min(counts[rank] for rank in range(RANKS))


def report(results: dict[str, Any]) -> None:
    """The table in Markdown, as docs/benchmarks.md has it."""
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
