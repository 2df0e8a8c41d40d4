"""The demo on fewer ranks: eight train, `kill -9` of one, four go on, and one process says what the model has learned.

python -m demo.transformer.elastic --seed 7        the same victim, steps and delay as the last time with seed 7
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import lastwords
from demo import story
from demo.compare import RankLog, first_difference_before, mean_losses, other_states, read_logs, seen
from demo.incident import Incident, read_incident
from demo.picture import draw
from demo.transformer.answer import PROMPT, answer, continued, weights_by_hand
from demo.transformer.model import Shape, Transformer

RANKS, FEWER = 8, 4
EPOCHS = 2
LOSS_TOLERANCE = 1e-5
"""Four ranks add up in another order than eight, and AdamW carries every last bit on: 4e-7 measured in fifty steps."""

LOGITS_TOLERANCE = 1e-5
"""Four ranks add up their parts of a projection, and one process has it whole: 1.4e-6 measured."""

CONTINUED = "four ranks went on where eight had been: same state, same curve, every sample once, same answers"


@dataclasses.dataclass(frozen=True)
class Runs:
    """What the three runs and the two incidents between them have left. `checkpoint` is what the four ranks left."""

    uninterrupted: Mapping[int, RankLog]
    killed: Mapping[int, RankLog]
    fewer: Mapping[int, RankLog]
    incident: Incident
    last_step: int
    checkpoint: Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=512, help="pieces of text in an epoch, a multiple of 16")
    parser.add_argument("--width", type=int, default=64)
    story.add_arguments(parser)
    args = parser.parse_args()
    if args.windows < 64 or args.windows % 16:
        parser.error("--windows: a multiple of 16, at least 64")
    seed = story.drawn(args.seed)
    title = (
        f"[bold]{RANKS} ranks learn English, one of them gets kill -9, and {FEWER} ranks go on.[/]\n"
        "[dim]A transformer over bytes: 2 replicas x 4 ranks that share each layer (tensor parallelism),\n"
        f"then one replica on 4 ranks, then one process that only answers; seed {seed} chooses the victim.[/]\n"
    )
    arguments = ("--layout", "tp", "--parts", "4", "--dropout", "0", "--epochs", str(EPOCHS))
    arguments += ("--windows", str(args.windows), "--width", str(args.width))
    demo = story.Demo(title, "demo.transformer.train", RANKS, arguments, seed, args.out, never_killed=("--plain",))
    return story.tell(demo, lambda console, demo: _live(console, demo, args.windows // 16, args.width))


def _live(console: Console, demo: story.Demo, steps_per_epoch: int, width: int) -> int:
    runs = _run(console, demo, steps_per_epoch)
    picture = demo.out / "elastic.png"
    problems = [
        *same_state(console, runs),
        *same_curve(console, runs),
        *every_sample(console, runs, steps_per_epoch),
        *same_answers(console, runs, width),
    ]
    draw(picture, runs.uninterrupted, runs.killed, runs.fewer, runs.incident, resumed_as=f"{FEWER} ranks go on",
         title=f"{FEWER} ranks go on where {RANKS} were" if not problems else "The runs differ")  # fmt: skip
    console.print(f"\npicture: {picture}\ncheckpoint: {runs.checkpoint}\n", soft_wrap=True)
    for problem in problems:
        console.print(problem, style="bold red", markup=False, soft_wrap=True)
    if problems:
        return story.EXIT_DIFFERENT
    _say(console, f"[bold green]{CONTINUED}[/]")
    return 0


def _run(console: Console, demo: story.Demo, steps_per_epoch: int) -> Runs:
    draws = random.Random(demo.seed)
    smaller = dataclasses.replace(demo, ranks=FEWER)
    with story.bars(console) as progress:
        stages = [
            story.Stage(progress, *one)
            for one in ((demo, "never killed"), (demo, "killed"), (smaller, "on 4 ranks"))
        ]  # fmt: skip
        uninterrupted = stages[0].run(*demo.never_killed)

        training = stages[1].start()
        victim, step, moment = draws.randrange(RANKS), draws.randint(2, steps_per_epoch - 3), draws.random()
        delay_s = moment * story.median_step_s(uninterrupted[victim])
        killed_mono_s = training.kill_at(victim, step, delay_s, stages[1].show)
        progress.print(f"kill -9 of rank {victim}, {moment:.0%} of a step after its step {step}")
        training.wait(stages[1].show, timeout_s=story.RUN_TIMEOUT_S)
        stages[1].stop()
        killed = read_logs(training.folder)
        incident = read_incident(training.ckpt_path, killed_mono_s, RANKS)

        last_step = draws.randint(EPOCHS * steps_per_epoch * 3 // 4, EPOCHS * steps_per_epoch - 1)
        more = ("--is_recover", "1", "--sigterm-after", str(last_step))
        second = stages[2].start(*more, ckpt_path=training.ckpt_path, from_step=incident.step)
        second.wait(stages[2].show, timeout_s=story.RUN_TIMEOUT_S)
        stages[2].stop()
        fewer = read_logs(second.folder)
        if any(log.resumed == "" for log in fewer.values()) or len(fewer) != FEWER:
            raise RuntimeError(f"{FEWER} ranks did not go on:\n{second.first_error()}")
        left = read_incident(training.ckpt_path, killed_mono_s, FEWER)
        progress.print(f"SIGTERM after step {left.step}: the {FEWER} ranks leave a checkpoint, and go")
    console.print(story.table(incident, lost := story.steps_lost(killed, incident)))
    if lost:
        raise RuntimeError(f"{lost} steps were trained but are not in the checkpoint")
    if left.step != last_step:
        raise RuntimeError(f"SIGTERM came after step {last_step}, but the checkpoint is of step {left.step}")
    return Runs(uninterrupted, killed, fewer, incident, last_step, Path(left.path))


def same_state(console: Console, runs: Runs) -> list[str]:
    """Both runs cut each layer into four, so what rank r begins with can be held against rank r of the first run."""
    step = runs.incident.step
    difference = first_difference_before(runs.uninterrupted, runs.killed)
    wrong = other_states(runs.uninterrupted, runs.fewer, step=step)
    if difference or wrong:
        return [f"before the kill: {difference}"] * bool(difference) + [
            f"ranks {wrong} began with another state"
        ] * bool(wrong)
    _say(console, f"state      the {FEWER} ranks began with that of step {step}, bit for bit: weights and optimizer")
    return []


def same_curve(console: Console, runs: Runs) -> list[str]:
    """The batches are the same, the sums are not made in the same order."""
    expected, killed, found = (mean_losses(logs) for logs in (runs.uninterrupted, runs.killed, runs.fewer))
    first = runs.incident.step + 1
    if list(found) != list(range(first, runs.last_step + 1)):
        return [f"the {FEWER} ranks took steps {sorted(found)}, not {first} to {runs.last_step}"]
    apart = max(abs(found[step] - expected[step]) for step in found)
    console.print(_curve({**killed, **found}, expected, first, runs.last_step))
    if apart > LOSS_TOLERANCE:
        return [f"the losses are {apart:.1e} apart, more than {LOSS_TOLERANCE:.0e}"]
    _say(console, f"curve      never more than {apart:.1e} apart (allowed: {LOSS_TOLERANCE:.0e}; no dropout here)")
    return []


def _say(console: Console, line: str) -> None:
    """A line that is not broken where the terminal ends."""
    console.print(line, soft_wrap=True)


def _curve(found: Mapping[int, float], expected: Mapping[int, float], first: int, last: int) -> Table:
    table = Table(title="Loss", title_justify="left")
    for column in ("step", "ranks", "loss", f"never killed, {RANKS} ranks", "apart"):
        table.add_column(column, justify="right")
    shown = sorted({1, first - 1, first, first + 1, (first + last) // 2, last} & found.keys())
    for step in shown:
        ranks = RANKS if step < first else FEWER
        apart = f"{abs(found[step] - expected[step]):.1e}"
        table.add_row(str(step), str(ranks), f"{found[step]:.6f}", f"{expected[step]:.6f}", apart)
    return table


def every_sample(console: Console, runs: Runs, steps_per_epoch: int) -> list[str]:
    step, windows = runs.incident.step, 16 * steps_per_epoch
    before, after = seen(runs.killed, range(1, step + 1)), seen(runs.fewer, range(step + 1, steps_per_epoch + 1))
    whole: Counter[int] = before + after
    if whole != dict.fromkeys(range(windows), 1):
        missing, twice = windows - len(whole), sum(count > 1 for count in whole.values())
        return [f"of the {windows} samples of the first epoch {missing} were not seen, and {twice} more than once"]
    shared = f"{before.total()} by {RANKS} ranks, {after.total()} by {FEWER}"
    _say(console, f"samples    each of the first epoch's {windows} was seen once: {shared}")
    return []


def same_answers(console: Console, runs: Runs, width: int) -> list[str]:
    """One process against the four ranks, and against weights that were put together in the naive way."""
    shape = Shape(width=width)
    with torch.device("meta"):
        model = Transformer(shape)
    loaded = lastwords.load_for_inference(runs.checkpoint, model)
    plain = Transformer(shape)
    plain.load_state_dict(weights_by_hand(runs.checkpoint))
    one = answer(model)
    four = torch.load(runs.checkpoint.parents[2] / "on-4-ranks" / "answer.pt")
    apart = (one - four).abs().max().item()
    if not torch.equal(one, answer(plain)):
        return ["one process answers otherwise than with the same weights put together by hand"]
    if apart > LOGITS_TOLERANCE:
        return [f"one process answers otherwise than {FEWER} ranks: logits are {apart:.1e} apart"]
    _say(
        console,
        f"inference  one process, weights of step {loaded.global_step}: logits are those of the same weights put "
        f"together by hand,\n           bit for bit, and at most {apart:.1e} from the {FEWER} ranks' (allowed: "
        f"{LOGITS_TOLERANCE:.0e})",
    )
    console.print("\nWhat it goes on with after the dim words (so few steps teach it letters and blanks, not English):")
    console.print(f"[dim]{PROMPT}[/][bold]", end="")
    console.print(continued(model, PROMPT).removeprefix(PROMPT), markup=False, style="bold")
    return []


if __name__ == "__main__":
    sys.exit(main())
