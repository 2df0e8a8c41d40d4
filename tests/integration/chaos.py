"""Kills at random instants, checked bit for bit: `python -m tests.integration.chaos --n 50 --seed 1 --mode kill`.

Every run has a seed of its own (seed, seed + 1, ...), from which layout, victims and instants follow. The instant
itself is real time, so a replay with the same seed comes close to the same point, but need not hit the same bit.

Modes: `kill`, nothing but kills and a disturbed rank now and then; `storage`, the file system of the checkpoints
fails for a moment after a kill; `pause`, a rank or the controller is stopped for up to 10 s, with a kill or without;
`stranger`, others crowd the controller's port; `jobs`, two jobs save to one directory, and each loses ranks; `heal`,
one launch under `lastwords run`, where all kills of the story come one after the other; `heal-controller`, the same,
and the controller is killed a moment before a rank, or after it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.integration.harness import Cluster
from tests.integration.plan import Fault, Layout
from tests.integration.rig import EXIT_NOT_SAVED, EXIT_SAVED, GONE_TIMEOUT_S, KILLED, RUN_TIMEOUT_S, Launch, Rig
from tests.integration.stranger import Crowd
from tests.integration.trouble import Trouble, build

RUNS_MAX = 6
"""Launches of one story: kills that come one after the other, and the run to the end."""

MODES = ("kill", "storage", "pause", "stranger", "jobs", "heal", "heal-controller")
SILENT_MAX = 400
"""Connections that say nothing, at once."""


@dataclass(frozen=True)
class Story:
    """A layout and, for each launch, who dies when."""

    layout: Layout
    blows: tuple[tuple[Fault, ...], ...]
    trouble: Trouble | None = None
    strangers: int = 0
    other: Story | None = None  # of another job, at the same time and place


def draw_layout(draw: random.Random) -> Layout:
    """A random layout; expensive ones are rare."""
    layout = Layout(
        world_size=draw.choice((3, 4, 4, 4, 5)),
        model=draw.choice(("small", "small", "medium", "medium", "large")),
        batch_norm=draw.random() < 0.8,
        dropout=draw.random() < 0.8,
        tied=draw.random() < 0.3,
        frozen=draw.random() < 0.3,
        broadcast_buffers=draw.random() < 0.6,
        accumulate=draw.choice((1, 1, 2, 3)),
        no_sync=draw.random() < 0.5,
        loader=draw.choice(("distributed", "distributed", "plain")),
        augment=draw.random() < 0.7,
        workers=draw.choice((0, 0, 2)),
        clip=draw.random() < 0.7,
        log_reduce=draw.choice(("", "before", "after")),
        epochs=2,
        steps_per_epoch=draw.randint(3, 6),
        seed=draw.randint(1, 5),
    )
    if draw.random() < 0.3:
        skipped = tuple(sorted({draw.randint(1, layout.steps) for _ in range(2)}))
        layout = dataclasses.replace(layout, inf_steps=skipped)
    return layout


def draw_story(seed: int, mode: str = "kill") -> Story:
    """What happens in the run with this seed."""
    story = draw_kills(random.Random(seed))
    if mode in ("kill", "heal"):
        return story
    draw = random.Random(f"{mode} {seed}")
    if mode == "heal-controller":
        return dataclasses.replace(story, blows=tuple(draw_controller_kill(draw, blow) for blow in story.blows))
    story = dataclasses.replace(story, blows=story.blows[:1])
    first = story.blows[0][0]
    if mode == "storage":
        trouble = Trouble.draw(draw)
        faults = (Fault(first.rank, first.step, "body", (trouble.action, *first.actions)), *story.blows[0][1:])
        return dataclasses.replace(story, blows=(faults,), trouble=trouble)
    if mode == "pause":
        return dataclasses.replace(story, blows=(draw_pauses(draw, story),))
    if mode == "stranger":
        return dataclasses.replace(story, strangers=draw.randint(100, SILENT_MAX))
    assert mode == "jobs", f"unknown mode {mode}, known are {', '.join(MODES)}"
    other = draw_kills(draw)
    return dataclasses.replace(story, other=dataclasses.replace(other, blows=other.blows[:1]))


def draw_controller_kill(draw: random.Random, blow: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """A rank that is to die, or is disturbed, kills the controller a moment before or after."""
    number = draw.randrange(len(blow))
    actions = blow[number].actions
    before = draw.random() < 0.5
    later = f"sleep:{draw.uniform(0, 0.05):.3f}"
    changed = ("kill_controller", *actions) if before else (*actions, later, "kill_controller")
    return (*blow[:number], dataclasses.replace(blow[number], actions=changed), *blow[number + 1 :])


def draw_pauses(draw: random.Random, story: Story) -> tuple[Fault, ...]:
    """One or two processes stop, alone or around the kills."""
    layout, (blow, *_) = story.layout, story.blows
    victims = [fault for fault in blow if fault.actions[0].startswith("kill")] if draw.random() < 0.6 else []
    step = blow[0].step
    pauses = []
    for _ in range(draw.choice((1, 1, 2))):
        who = draw.choice(("self", "self", "controller"))
        times_s = draw.choice((0.0, draw.uniform(0, 0.1), draw.uniform(0, 1.0))), draw.uniform(0.5, 10.0)
        rank = draw.choice([rank for rank in range(layout.world_size) if rank not in {each.rank for each in victims}])
        before = draw.randint(max(1, step - 1), step)
        pauses.append(Fault(rank, before, "body", (f"pause:{who},{times_s[0]:.3f},{times_s[1]:.2f}",)))
    return (*victims, *pauses)


def draw_kills(draw: random.Random) -> Story:
    """A layout, and kills one launch after the other."""
    layout = draw_layout(draw)
    blows = []
    first_step = 1
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if first_step > layout.steps:
            break
        step = draw.randint(first_step, layout.steps)
        count = draw.choice((1, 1, 1, 2, layout.world_size - 1))
        victims = draw.sample(range(layout.world_size), count)
        start_s = draw.uniform(0.0, 0.08 if layout.model == "large" else 0.02)
        spread_s = draw.choice((0.0, 0.0, 0.002, 0.02, 0.2))  # the longer ones reach into the incident
        blow = [
            Fault(rank, step, "body", (f"kill_after:{start_s + draw.uniform(0, spread_s):.6f}",)) for rank in victims
        ]
        bystanders = [rank for rank in range(layout.world_size) if rank not in victims]
        if draw.random() < 0.3:
            blow.append(draw_disturbance(draw, draw.choice(bystanders), step))
        blows.append(tuple(blow))
        first_step = step + 2
    return Story(layout, tuple(blows))


def draw_disturbance(draw: random.Random, rank: int, step: int) -> Fault:
    """Something beside the kills: a rank that is stopped for a while, is asked to stop, or raises."""
    phase = draw.choice(("body", "forward", "before_step", "update", "after_update", "end"))
    action = draw.choice((f"stop:{draw.uniform(0.05, 0.9):.2f}", "term", "raise", f"sleep:{draw.uniform(0, 0.3):.2f}"))
    if action == "raise" and phase == "update":
        return Fault(rank, step, phase, ("garbage", "raise"))
    return Fault(rank, step, phase, (action,))


def live(rig: Rig, story: Story) -> Counter[str]:
    """Live through a story; raises AssertionError where something was lost. Returns what happened, to be counted."""
    happened: Counter[str] = Counter()
    layout, step = story.layout, 0
    rig.reference(layout)
    for blow in story.blows:
        with surroundings(rig, story, happened) as env:
            launch = rig.launch(layout, faults=blow, recover=step > 0, env=env)
            with crowd(launch, story.strangers):
                launch.finish()
        step = max(step, judge(rig, launch, blow, step, happened))
        if step == 1 and not launch.exact:
            happened["inexact, and said so"] += 1
            rig.check_inexact_resume(launch, step)
            return happened
        if not any(fault.actions[0].startswith(("kill", "trouble")) for fault in blow):
            happened["nobody was killed"] += 1
            rig.check_untouched(launch)
    go_on(rig, layout, step, {})
    return happened


def live_healed(rig: Rig, story: Story) -> Counter[str]:
    """The same, but nobody starts again: each blow comes in the generation after the one before."""
    faults = [dataclasses.replace(fault, restart=number) for number, blow in enumerate(story.blows) for fault in blow]
    launch, difference = rig.healed(story.layout, faults)
    happened = Counter({"recoveries": sum(one["outcome"] == "RECOVERED" for one in launch.incidents())})
    happened["killed after the loop"] += launch.codes != {-1: 0}
    resumes = [one for records in launch.track.records for one in records if one["kind"] == "resumed"]
    if not all(one["exact"] for one in resumes):
        happened["inexact, and said so"] += 1
    elif difference is not None:
        raise launch.fail(str(difference))
    return happened


def go_on(rig: Rig, layout: Layout, step: int, env: Mapping[str, str]) -> None:
    """The last launch of a story: from the last words (0: from the beginning) to the end, with the same bits."""
    last = rig.launch(layout, recover=step > 0, env=env)
    last.finish()
    if set(last.codes.values()) != {0}:
        raise last.fail(f"the last run ended with {last.codes}")
    if step == 0:
        rig.check_untouched(last)
        return
    if last.resumed_after() != step:
        raise last.fail(f"resumed after step {last.resumed_after()}, not after {step}")
    difference = rig.difference(last, step)
    if difference is not None:
        raise last.fail(str(difference))


@contextlib.contextmanager
def surroundings(rig: Rig, story: Story, happened: Counter[str]) -> Iterator[dict[str, str]]:
    """The environment of a launch whose file system is going to fail; counts how often it did."""
    if story.trouble is None:
        yield {}
        return
    file = rig.directory / "trouble"
    file.parent.mkdir(parents=True, exist_ok=True)
    yield story.trouble.prepare(file, rig.directory / "checkpoints")
    happened["calls failed"] += story.trouble.failed(file)


def crowd(launch: Launch, count: int) -> contextlib.AbstractContextManager[object]:
    """Strangers at the controller's port, if there are any."""
    return Crowd("127.0.0.1", launch.plan.ctrl_port, count, count) if count else contextlib.nullcontext()


def live_side_by_side(rig: Rig, stories: tuple[Story, ...]) -> Counter[str]:
    """Two jobs at once in one directory; then each resumes from its own last words, at once again."""
    happened: Counter[str] = Counter()
    for story in stories:
        rig.reference(story.layout)
    names = [f"job-{number}" for number in range(len(stories))]
    launches = [
        rig.launch(story.layout, faults=story.blows[0], env={"LASTWORDS_JOB": name})
        for story, name in zip(stories, names, strict=True)
    ]
    finish_all(launches)
    steps = []
    for story, launch in zip(stories, launches, strict=True):
        steps.append(judge(rig, launch, story.blows[0], 0, happened))
        if steps[-1] == 1 and not launch.exact:
            happened["inexact, and said so"] += 1
            return happened
    for story, name, step in zip(stories, names, steps, strict=True):
        if step:
            # As a restart, since a start by hand takes the newest of all.
            go_on(rig, story.layout, step, {"LASTWORDS_JOB": name, "TORCHELASTIC_RESTART_COUNT": "1"})
    return happened


def finish_all(launches: list[Launch]) -> None:
    """What one leaves behind can be told from what another still uses only when all have ended."""
    for launch in launches:
        launch.job.wait(RUN_TIMEOUT_S)
        launch.job.wait_gone(GONE_TIMEOUT_S)
    for launch in launches:
        launch.finish()


def judge(rig: Rig, launch: Launch, blow: tuple[Fault, ...], step_before: int, happened: Counter[str]) -> int:
    """Check the end of one launch; returns the step of its last words, 0 if there are none."""
    layout = launch.layout
    dead = {rank for rank, code in launch.codes.items() if code == KILLED}
    victims = {fault.rank for fault in blow if fault.actions[-1].startswith("kill")}
    raising = {fault.rank for fault in blow if "raise" in fault.actions}
    if not dead <= victims:
        raise launch.fail(f"ranks {dead - victims} were killed by something else")
    raised = {rank for rank in raising if launch.codes[rank] == 1}
    torn = {fault.rank for fault in blow if "garbage" in fault.actions} & raised
    codes = {launch.codes[rank] for rank in range(layout.world_size) if rank not in dead | raised}
    if raised:
        happened["and one raised"] += 1
    if not codes:
        # Every rank but the one that raised is dead; if its update is torn, nobody holds a whole step.
        if torn and launch.new_checkpoint is None:
            happened["the last rank was torn"] += 1
            return 0
        codes = {EXIT_SAVED if launch.new_checkpoint is not None else EXIT_NOT_SAVED}
    if codes == {0}:
        # Everybody had left the loop before the blow fell, so there was nothing to save any more.
        happened["after the end"] += 1
        if launch.new_checkpoint is not None:
            raise launch.fail("the ranks ended well, but there are last words")
        assert all(launch.track.last_step(rank) == layout.steps for rank in range(layout.world_size))
        return 0
    if codes == {EXIT_NOT_SAVED}:
        happened["nothing to save"] += 1
        reached = max(launch.track.last_step(rank) for rank in range(layout.world_size) if rank not in dead)
        if reached in (layout.inf_steps or ()):  # its body is done, but without an update it is over with its end alone
            reached -= 1
        if launch.new_checkpoint is not None or reached:
            raise launch.fail(f"nothing was saved, though step {reached} was done")
        return 0
    if codes != {EXIT_SAVED}:
        raise launch.fail(f"the ranks ended with {launch.codes}")
    exact = launch.exact or not cut_off_in_the_first_step(launch)
    step = rig.check_step(launch, dead, range(max(step_before, 1), layout.steps + 1), exact=exact)
    happened[f"saved, {len(dead)} of {layout.world_size} dead"] += 1
    return step


def cut_off_in_the_first_step(launch: Launch) -> bool:
    """The one case that cannot be exact: nothing shows yet what the scheduler's step would have done."""
    layout = launch.layout
    return launch.saved_step == 1 and layout.scheduler and layout.log_reduce == "before"


def run(cluster: Cluster, seed: int, directory: Path, mode: str = "kill") -> Counter[str]:
    """The run with this seed, in a directory of its own that is removed unless it fails."""
    rig = Rig(cluster, directory / f"seed_{seed}", directory / "references")
    story = draw_story(seed, mode)
    try:
        if mode.startswith("heal"):
            happened = live_healed(rig, story)
        else:
            happened = live_side_by_side(rig, (story, story.other)) if story.other else live(rig, story)
    finally:
        rig.close()
    shutil.rmtree(rig.directory)
    return happened


def main(arguments: list[str] | None = None) -> int:
    """Exit code: how many runs have failed (99 at most)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=20, help="how many runs")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run")
    parser.add_argument("--mode", choices=MODES, default="kill", help="what happens beside the kills")
    options = parser.parse_args(arguments)
    directory = Path(tempfile.mkdtemp(prefix="lastwords-chaos-"))
    happened: Counter[str] = Counter()
    failed = []
    start_mono_s = time.monotonic()
    with cluster_for(options.mode, directory) as cluster:
        for seed in range(options.seed, options.seed + options.n):
            try:
                happened += run(cluster, seed, directory, options.mode)
            except AssertionError:
                failed.append(seed)
                traceback.print_exc()
                print(f"seed {seed} FAILED: {draw_story(seed, options.mode)}")
                print(f"replay: {replay_command(seed, options.mode)}", flush=True)
            else:
                took_s = time.monotonic() - start_mono_s
                print(f"seed {seed} ok, {seed - options.seed + 1} of {options.n} in {took_s:.0f} s", flush=True)
    for what, count in sorted(happened.items()):
        print(f"{count:5} x {what}")
    if failed:
        print(f"{len(failed)} of {options.n} runs failed; logs are in {directory}; replay them with")
        for seed in failed:
            print(f"    {replay_command(seed, options.mode)}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
        print(f"{options.n} runs of mode {options.mode}: every resumed run had the same bits")
    return min(len(failed), 99)


def cluster_for(mode: str, directory: Path) -> Cluster:
    """Raises LookupError where the mode needs a C compiler, and there is none."""
    if mode != "storage":
        return Cluster()
    library = build(directory)
    if library is None:
        raise LookupError("there is no C compiler, so that no library can make calls fail")
    return Cluster(preload=library)


def replay_command(seed: int, mode: str = "kill") -> str:
    """What to type to live through a seed again."""
    return f"python -m tests.integration.chaos --n 1 --seed {seed} --mode {mode}"


if __name__ == "__main__":
    sys.exit(main())
