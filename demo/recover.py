"""The demo of a dynamic cluster: a worker, the scheduler, both, and all at once get `kill -9`, and are started again.

python -m demo.recover --workers 4 --seed 7     the same victims and steps as the last time with seed 7
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from demo import story
from demo.compare import RankLog, healed_difference, read_logs
from demo.launch import ROOT, Training, free_port

MODULE = "demo.disaster_recover.train"
SCRIPTS = ROOT / "demo" / "disaster_recover"
IDENTICAL = "the run whose processes were killed is bitwise identical to the one in which nobody was"
SCHEDULER = "scheduler"
GENERATIONS = 4
"""All ranks begin once, and again after each act but that of the scheduler alone."""

POLL_S = 0.01
LOG_LINES = 25

WORKER_DIES, SCHEDULER_DIES, WITHOUT_SCHEDULER, TOO_LATE = 0.1, 0.2, 0.25, 0.85
"""Parts of the training: a worker dies after the first; the scheduler dies, and is started again, after the next two;
the last is where it has to be back, so that both can die."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.02, 1.0


class Cluster:
    """The processes that run.sh and recover.sh start. This process has to be the parent of orphans."""

    def __init__(self, folder: Path, workers: int, *arguments: str) -> None:
        self.folder, self.workers = folder, workers
        self._port = free_port()
        self._killed: set[str] = set()
        variables = {"MS_WORKER_NUM": str(workers), "MS_SCHED_PORT": str(self._port), "PYTHON": sys.executable}
        self._environment = {**os.environ, **variables, "OUT": str(folder)}
        self._run("run.sh", *arguments)

    def recover(self, *which: str) -> list[str]:
        """Names of the processes that recover.sh has started again."""
        started = [line.partition(" ")[0] for line in self._run("recover.sh", *which).splitlines()]
        self._killed -= {*started}
        return started

    def kill(self, *names: str) -> None:
        """All of them at once; none is left, not even as a zombie."""
        pids = [self._pid(name) for name in names]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        self._killed |= {*names}

    def step(self, rank: int) -> int:
        """The newest in the rank's log, whose losses stand there before the backward."""
        try:
            found = re.findall(rb'"global_step": (\d+)', (self.folder / f"rank_{rank}.jsonl").read_bytes())
        except FileNotFoundError:
            return 0
        return int(found[-1]) if found else 0

    def listens(self) -> bool:
        """Whether there is a scheduler."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
            return True
        return False

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """RuntimeError if a process ends meanwhile, TimeoutError if it takes for ever."""
        deadline_mono_s = time.monotonic() + story.RUN_TIMEOUT_S
        while not until():
            for name in self.names():
                if name not in self._killed and os.waitpid(self._pid(name), os.WNOHANG) != (0, 0):
                    raise RuntimeError(f"{name} has ended, {what}:\n{self._said(name)}")
            if time.monotonic() > deadline_mono_s:
                raise TimeoutError(f"waited {story.RUN_TIMEOUT_S:.0f} s, {what}:\n{self._said(SCHEDULER)}")
            time.sleep(POLL_S)

    def finish(self) -> None:
        """All processes come to their end by themselves."""
        deadline_mono_s = time.monotonic() + story.RUN_TIMEOUT_S
        for name in self.names():
            while (ended := os.waitpid(self._pid(name), os.WNOHANG)) == (0, 0):
                if time.monotonic() > deadline_mono_s:
                    raise TimeoutError(f"{name} has not ended:\n{self._said(name)}")
                time.sleep(POLL_S)
            if code := os.waitstatus_to_exitcode(ended[1]):
                raise RuntimeError(f"{name} ended with exit code {code}:\n{self._said(name)}")

    def _run(self, script: str, *arguments: str) -> str:
        command = ["bash", str(SCRIPTS / script), *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{script} ended with exit code {done.returncode}:\n{done.stderr}")
        return done.stdout

    def names(self) -> list[str]:
        """Of all processes, as recover.sh names them."""
        return [SCHEDULER, *(f"worker-{rank}" for rank in range(self.workers))]

    def _pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text(encoding="utf-8"))

    def _said(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([*lines[-LOG_LINES:], f"(all of it: {path})"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    story.add_arguments(parser)
    args = parser.parse_args()
    if args.workers < 2:
        parser.error("--workers: 2 at least, since one of them has to survive the other")
    if args.steps < 40 or args.steps % 2:
        parser.error("--steps: an even number, 40 at least")
    seed = story.drawn(args.seed)
    title = (
        f"[bold]A scheduler and {args.workers} workers; some get kill -9, and are started again by hand.[/]\n"
        f"[dim]demo/disaster_recover/run.sh and recover.sh; seed {seed} chooses the victims.[/]\n"
    )
    return story.tell(story.Demo(title, MODULE, args.workers, ("--steps", str(args.steps)), seed, args.out), _live)


def _live(console: Console, demo: story.Demo) -> int:
    steps = int(demo.arguments[1])
    begun_mono_s = time.monotonic()
    uninterrupted = _uninterrupted(demo)
    console.print(f"undisturbed: {steps} steps under torchrun, {time.monotonic() - begun_mono_s:.0f} s")
    startup_s = min(min(log.mono_s.values()) for log in uninterrupted.values()) - begun_mono_s
    # While the scheduler starts again the training goes on; it must not come to its end, however busy the machine is.
    pause_s = startup_s / (steps * (TOO_LATE - WITHOUT_SCHEDULER))
    pause_s = min(max(pause_s, PAUSE_S_MIN), PAUSE_S_MAX)
    cluster = Cluster(demo.out / "cluster", demo.ranks, *demo.arguments, "--pause-s", f"{pause_s:.3f}")
    acts = Acts(console, cluster, random.Random(demo.seed), steps, pause_s)
    acts.a_worker_dies()
    acts.the_scheduler_dies()
    acts.both_die()
    acts.all_die()
    cluster.finish()
    return _verdict(console, cluster.folder, uninterrupted)


class Acts:
    """What is done to the cluster, one after the other."""

    def __init__(self, console: Console, cluster: Cluster, draws: random.Random, steps: int, pause_s: float) -> None:
        self._console, self._cluster, self._draws = console, cluster, draws
        self._steps, self._pause_s = steps, pause_s
        self._reached = 0
        self.victims = draws.sample(range(cluster.workers), 2)
        """One after the other."""

    def a_worker_dies(self) -> None:
        victim = self.victims[0]
        step = self._reach(int(WORKER_DIES * self._steps) + self._draws.randrange(5), victim)
        killed_mono_s = time.monotonic()
        self._cluster.kill(f"worker-{victim}")
        self._cluster.recover("worker", str(victim))
        self._tell(f"worker {victim} in step {step}; recover.sh worker {victim}: {self._after(step, killed_mono_s)}")

    def the_scheduler_dies(self) -> None:
        watched = self.victims[0]
        step = self._reach(int(SCHEDULER_DIES * self._steps), watched)
        self._cluster.kill(SCHEDULER)
        alone = self._reach(max(int(WITHOUT_SCHEDULER * self._steps), step + 5), watched)
        self._cluster.recover(SCHEDULER)
        self._cluster.wait(self._cluster.listens, "while the scheduler started")
        self._reached = self._cluster.step(watched)
        self._tell(
            f"the scheduler in step {step}; training goes on; recover.sh scheduler in step {alone}: back in "
            f"step {self._reached}"
        )
        if self._reached > TOO_LATE * self._steps:
            raise RuntimeError("the scheduler was back when the training was nearly over: take more --steps")

    def both_die(self) -> None:
        victim = self.victims[1]
        step = self._reach(self._draws.randint(2, 5), victim)
        killed_mono_s = time.monotonic()
        both = [SCHEDULER, f"worker-{victim}"]
        self._cluster.kill(*both)
        if (started := self._cluster.recover()) != both:
            raise RuntimeError(f"recover.sh has started {started} again, where {both} were killed")
        self._tell(f"the scheduler and worker {victim} in step {step}; recover.sh: {self._after(step, killed_mono_s)}")

    def all_die(self) -> None:
        """What goes on then is the newest checkpoint: the last words of the act before."""
        step = self._reach(self._draws.randint(2, 5), self.victims[0])
        killed_mono_s = time.monotonic()
        self._cluster.kill(*self._cluster.names())
        if (started := self._cluster.recover()) != self._cluster.names():
            raise RuntimeError(f"recover.sh has started {started} again, where all were killed")
        self._tell(f"all processes in step {step}; recover.sh: {self._after(step, killed_mono_s)}")

    def _reach(self, step: int, rank: int) -> int:
        """Waits until the rank is in the middle of this step, or of the second after what was reached before."""
        step = max(step, self._reached + 2)
        self._cluster.wait(lambda: self._cluster.step(rank) >= step, f"before step {step}")
        time.sleep(self._draws.random() * self._pause_s)
        self._reached = self._cluster.step(rank)
        return self._reached

    def _after(self, step: int, killed_mono_s: float) -> str:
        ranks = range(self._cluster.workers)
        self._cluster.wait(lambda: min(map(self._cluster.step, ranks)) > step + 1, f"before step {step + 2}")
        return f"all train again {time.monotonic() - killed_mono_s:.1f} s after the kill"

    def _tell(self, what: str) -> None:
        self._console.print(f"kill -9 of {what}", soft_wrap=True)


def _uninterrupted(demo: story.Demo) -> Mapping[int, RankLog]:
    folder = demo.out / "undisturbed"
    training = Training(demo.module, folder, demo.ranks, folder / "checkpoints", [*demo.arguments, "--pause-s", "0"])
    if code := training.wait(lambda _: None, timeout_s=story.RUN_TIMEOUT_S):
        raise RuntimeError(f"torchrun ended with exit code {code}:\n{training.first_error()}")
    return read_logs(folder)


def _verdict(console: Console, folder: Path, uninterrupted: Mapping[int, RankLog]) -> int:
    difference = healed_difference(uninterrupted, read_logs(folder), ()) or inconsistency(folder)
    if difference is not None:
        console.print(f"the runs differ: {difference}", style="bold red", markup=False, soft_wrap=True)
        return story.EXIT_DIFFERENT
    console.print(f"[bold green]{IDENTICAL}[/]", soft_wrap=True)
    return 0


def inconsistency(folder: Path) -> str | None:
    """None if each rank ran in GENERATIONS processes, and a step that was repeated had the same loss."""
    for path in sorted(folder.glob("rank_*.jsonl")):
        rank = int(path.stem.removeprefix("rank_"))
        pids: set[int] = set()
        losses: dict[int, float] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if "pid" in record:
                pids.add(record["pid"])
            elif "loss" in record:
                step, loss = record["global_step"], record["loss"]
                if losses.setdefault(step, loss).hex() != loss.hex():
                    return f"step {step}, rank {rank}: loss is {losses[step].hex()} at first and {loss.hex()} later"
        if len(pids) != GENERATIONS:
            return f"rank {rank} ran in {len(pids)} processes"
    return None


if __name__ == "__main__":
    sys.exit(main())
