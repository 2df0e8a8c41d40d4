"""The demo of healing: train, `kill -9` two workers in turn; the job goes on by itself, and nothing differs in any bit.

python -m demo.heal --seed 7        the same victims, steps and delays as the last time with seed 7
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from demo import story
from demo.compare import RankLog, healed_difference, read_logs
from demo.heal_picture import draw
from demo.launch import Training
from demo.recoveries import Recovery, read_recoveries

IDENTICAL = "the run in which two workers died is bitwise identical to the one in which nobody did"
LAUNCHER = ("lastwords.cli", "run", "--preload", "sklearn.datasets")
KILLS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512, help="width of the two wide layers")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    story.add_arguments(parser)
    args = parser.parse_args()
    if args.ranks <= KILLS:
        parser.error(f"--ranks: more than {KILLS}, since {KILLS} of them are killed")
    seed = story.drawn(args.seed)
    title = (
        f"[bold]{args.ranks} ranks learn handwritten digits; two get kill -9, and the job goes on by itself.[/]\n"
        f"[dim]784-512-{args.hidden}-{args.hidden}-512-10, DDP, lastwords run --preload sklearn.datasets; "
        f"seed {seed} chooses the victims.[/]\n"
    )
    shape = ("--epochs", str(args.epochs), "--batch-size", str(args.batch_size), "--hidden", str(args.hidden))
    return story.tell(story.Demo(title, "demo.train", args.ranks, shape, seed, args.out), _live)


def _live(console: Console, demo: story.Demo) -> int:
    draws = random.Random(demo.seed)
    with story.bars(console) as progress:
        whole, healed = (story.Stage(progress, demo, name) for name in ("never killed", "healed"))
        uninterrupted = whole.run()
        training = healed.start(launcher=LAUNCHER)
        steps = uninterrupted[0].steps
        killed_mono_s = []
        victims = draws.sample(range(demo.ranks), KILLS)
        for number, victim in enumerate(victims):
            step = draws.randint(number * steps // KILLS + 2, (2 * number + 1) * steps // (2 * KILLS))
            after_s = draws.random() * story.median_step_s(uninterrupted[victim])
            killed_mono_s.append(training.kill_at(victim, step, after_s, healed.show))
            progress.print(f"kill -9 of rank {victim} after its step {step}")
        code = training.wait(healed.show, timeout_s=story.RUN_TIMEOUT_S)
        healed.show(steps)
        healed.stop()
        if code:
            raise RuntimeError(f"lastwords run ended with exit code {code}:\n{training.first_error()}")
    recoveries = read_recoveries(training.ckpt_path, killed_mono_s, demo.ranks)
    return _tell(console, demo, training, uninterrupted, recoveries)


def _tell(
    console: Console,
    demo: story.Demo,
    training: Training,
    uninterrupted: Mapping[int, RankLog],
    recoveries: Sequence[Recovery],
) -> int:
    found = difference(uninterrupted, training.folder, recoveries)
    picture = demo.out / "healing.png"
    title = "Two kills" if found is None else "The runs differ"
    draw(picture, uninterrupted, read_logs(training.folder), recoveries, title=title)
    console.print(table(recoveries))
    console.print(f"picture: {picture}\n", soft_wrap=True)
    if found is not None:
        console.print(f"the runs differ: {found}", style="bold red", markup=False, soft_wrap=True)
        return story.EXIT_DIFFERENT
    console.print(f"[bold green]{IDENTICAL}[/]")
    return 0


def difference(uninterrupted: Mapping[int, RankLog], healed: Path, recoveries: Sequence[Recovery]) -> str | None:
    """None if the run that logged to `healed` is the uninterrupted one, in new processes after each kill."""
    found = healed_difference(uninterrupted, read_logs(healed), [one.step for one in recoveries])
    for rank in uninterrupted if found is None else ():
        lines = [json.loads(line) for line in (healed / f"rank_{rank}.jsonl").read_text(encoding="utf-8").splitlines()]
        pids = {line["pid"] for line in lines if "pid" in line}
        if len(pids) != 1 + len(recoveries):
            return f"rank {rank} ran in {len(pids)} processes"
    return found


def table(recoveries: Sequence[Recovery]) -> Table:
    """Seconds after each kill."""
    rows = Table(title="\nSeconds after the kill", title_justify="left")
    for name in ("killed", "saved step", "published", "started again", "all train again"):
        rows.add_column(name, justify="right")
    for one in recoveries:
        times = (f"{value:.2f}" for value in (one.saved_s, one.entered_s, one.trains_s))
        rows.add_row(f"rank {one.dead_rank}", str(one.step), *times)
    return rows


if __name__ == "__main__":
    sys.exit(main())
