"""What a demo does: train, `kill -9` one worker, resume, and compare with a run that was never killed, bit for bit."""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from demo.compare import RankLog, first_difference, read_logs
from demo.incident import Incident, read_incident
from demo.launch import Training, free_port, no_process_left_behind
from demo.picture import draw

IDENTICAL = "resumed run is bitwise identical to the uninterrupted run"
EXIT_DIFFERENT, EXIT_FAILED = 1, 2
RUN_TIMEOUT_S = 600.0
"""A run takes a quarter of a minute on two cores, most of it imports; this only ends a demo that hangs."""


@dataclass(frozen=True)
class Demo:
    """`module` is the training script, run with `arguments`; `never_killed` are more of them, for the reference run.

    done_again: so many steps may be computed once more, where the victim had no copy of them yet.
    """

    title: str
    module: str
    ranks: int
    arguments: tuple[str, ...]
    seed: int
    out: Path
    never_killed: tuple[str, ...] = ()
    done_again: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=None, help="chooses victim and moment (default: drawn, and shown)")
    # The training runs in a working directory of its own, so a relative path would mean two places.
    out = Path(__file__).resolve().parent / "out"
    parser.add_argument("--out", type=lambda text: Path(text).absolute(), default=out)


def drawn(seed: int | None) -> int:
    """The seed that was asked for; without one a random one, which the demo shows."""
    return random.SystemRandom().randrange(10**6) if seed is None else seed


def tell(demo: Demo, live: Callable[[Console, Demo], int] | None = None) -> int:
    """Live through the demo (by default: kill, resume, compare) and print it; returns the exit code."""
    console = Console(highlight=False)
    console.print(demo.title)
    shutil.rmtree(demo.out, ignore_errors=True)
    try:
        with no_process_left_behind():
            return (live or _story)(console, demo)
    except (OSError, RuntimeError, ValueError) as error:  # TimeoutError is an OSError
        console.print(str(error), style="bold red", markup=False, soft_wrap=True)
        return EXIT_FAILED


def _story(console: Console, demo: Demo) -> int:
    draws = random.Random(demo.seed)
    with bars(console) as progress:
        stages = [Stage(progress, demo, name) for name in ("never killed", "killed", "resumed")]

        uninterrupted = stages[0].run(*demo.never_killed)
        steps = uninterrupted[0].steps

        training = stages[1].start()
        victim, step, moment = draws.randrange(demo.ranks), draws.randint(2, steps - 2), draws.random()
        killed_mono_s = training.kill_at(victim, step, moment * median_step_s(uninterrupted[victim]), stages[1].show)
        progress.print(f"kill -9 of rank {victim}, {moment:.0%} of a step after its step {step}")
        training.wait(stages[1].show, timeout_s=RUN_TIMEOUT_S)
        stages[1].stop()
        killed = read_logs(training.folder)
        incident = read_incident(training.ckpt_path, killed_mono_s, demo.ranks)

        resumed = stages[2].run("--is_recover", "1", ckpt_path=training.ckpt_path, from_step=incident.step)

    lost = steps_lost(killed, incident)
    difference = first_difference(uninterrupted, killed, resumed, step=incident.step)
    if difference is None and lost > demo.done_again:
        difference = f"{lost} steps were trained but are not in the checkpoint"
    picture = demo.out / "last-words.png"
    same = "The resumed run is the uninterrupted run, bit for bit"
    draw(picture, uninterrupted, killed, resumed, incident, title=same if difference is None else "The runs differ")
    console.print(table(incident, lost, "steps done again" if demo.done_again else "steps lost"))
    console.print(f"picture: {picture}\ncheckpoint: {incident.path}\n", soft_wrap=True)
    if difference is not None:
        console.print(f"the runs differ: {difference}", style="bold red", markup=False, soft_wrap=True)
        return EXIT_DIFFERENT
    console.print(f"[bold green]{IDENTICAL}[/]")
    return 0


def bars(console: Console) -> Progress:
    """Where the stages of a demo show how far they are."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    return Progress(*columns, TimeElapsedColumn(), console=console)


class Stage:
    """One run of the training script, and its progress bar."""

    def __init__(self, progress: Progress, demo: Demo, name: str) -> None:
        self._progress = progress
        self._task = progress.add_task(f"{name:<12}", total=None, start=False)
        self._demo = demo
        self._folder: Path = demo.out / name.replace(" ", "-")
        self._from_step = 0
        self._total: int | None = None

    def start(
        self,
        *extra: str,
        ckpt_path: Path | None = None,
        from_step: int = 0,
        launcher: Sequence[str] = ("torch.distributed.run",),
    ) -> Training:
        demo = self._demo
        self._from_step = from_step
        self._progress.start_task(self._task)
        arguments = [*demo.arguments, "--ctrl-port", str(free_port()), *extra]
        saved = ckpt_path or self._folder / "checkpoints"
        return Training(demo.module, self._folder, demo.ranks, saved, arguments, launcher)

    def run(self, *extra: str, ckpt_path: Path | None = None, from_step: int = 0) -> Mapping[int, RankLog]:
        """The whole run; raises RuntimeError with what it printed if it fails."""
        training = self.start(*extra, ckpt_path=ckpt_path, from_step=from_step)
        code = training.wait(self.show, timeout_s=RUN_TIMEOUT_S)
        self.stop()
        if code != 0:
            raise RuntimeError(f"torchrun ended with exit code {code}:\n{training.first_error()}")
        return read_logs(training.folder)

    def stop(self) -> None:
        """The run is over, whether or not it has taken all its steps."""
        self._progress.stop_task(self._task)

    def show(self, done: int) -> None:
        if self._total is None and done:
            self._total = read_logs(self._folder)[0].steps
        self._progress.update(self._task, total=self._total, completed=self._from_step + done)


def median_step_s(log: RankLog) -> float:
    moments = [log.mono_s[step] for step in sorted(log.mono_s)]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(moments))


def steps_lost(killed: Mapping[int, RankLog], incident: Incident) -> int:
    """Steps that a survivor has logged and the checkpoint does not have."""
    survivors = [log for rank, log in killed.items() if rank not in incident.dead_ranks]
    return max(0, max(max(log.losses, default=0) for log in survivors) - incident.step)


def table(incident: Incident, lost: int, what: str = "steps lost") -> Table:
    rows = Table(title=f"\nThe last words of step {incident.step}", title_justify="left", show_header=False)
    rows.add_column(style="bold")
    rows.add_column(justify="right")
    rows.add_row("known after", f"{incident.known_s * 1e3:.2f} ms")
    rows.add_row("decided after", f"{incident.decided_s * 1e3:.1f} ms")
    rows.add_row("published after", f"{incident.published_s * 1e3:.0f} ms")
    rows.add_row("bytes", f"{incident.saved_bytes:,}")
    rows.add_row(what, str(lost))
    return rows
