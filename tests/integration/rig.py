"""Runs the training script for a test: references, launches with faults, resumes, and what must hold after each."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.integration.compare import Difference, Track, differing, first_difference, resumed_difference
from tests.integration.harness import Cluster, Job, Port, with_texts
from tests.integration.kills import Kill
from tests.integration.plan import Fault, Layout, Plan
from tests.integration.zygote import AGENTS

MODULE = "tests.integration.training"
PARALLEL_MODULE = "tests.integration.parallel_training"
RUN_TIMEOUT_S = 90.0
HEALED_TIMEOUT_S = 400.0
"""The fork server imports torch, which takes half a minute where other tests run beside it."""

GONE_TIMEOUT_S = 20.0
EXIT_SAVED = 75
EXIT_NOT_SAVED = 76
KILLED = -9
FINAL_PREFIX = "tft_saved_checkpoints-step_"


@dataclass
class Launch:
    """One launch of the training script."""

    job: Job
    plan: Plan
    directory: Path
    before: set[int] = field(default_factory=set)  # inodes of checkpoints that were there already
    name: str = ""  # of the job, where another one saves to the same place

    @property
    def layout(self) -> Layout:
        """What is trained."""
        return self.plan.layout

    @property
    def codes(self) -> dict[int, int]:
        """Exit codes so far: by rank, or of torchrun as -1."""
        return {rank: end.code for rank, end in self.job.exits.items()}

    @cached_property
    def track(self) -> Track:
        """What the ranks recorded; read once the launch is over."""
        return Track(self.directory, self.layout.world_size)

    def track_now(self, rank: int) -> int:
        """Newest step that a rank has recorded so far."""
        return Track(self.directory, self.layout.world_size).last_step(rank)

    @property
    def checkpoints(self) -> list[Path]:
        """Published directories, oldest step first; of this job, if it has a name."""
        found = [path for path in Path(self.plan.checkpoints).glob(f"{FINAL_PREFIX}*") if path.name[-1].isdigit()]
        if self.name:
            found = [path for path in found if self.manifest(path)["job"] == self.name]
        return sorted(found, key=lambda path: int(path.name.removeprefix(FINAL_PREFIX).split("-")[0]))

    @property
    def new_checkpoint(self) -> Path | None:
        """The newest directory that was not there when this launch started."""
        found = [path for path in self.checkpoints if path.stat().st_ino not in self.before]
        return found[-1] if found else None

    @property
    def saved_step(self) -> int:
        """Step of the new checkpoint; 0 if there is none."""
        checkpoint = self.new_checkpoint
        return 0 if checkpoint is None else int(self.manifest(checkpoint)["global_step"])

    @property
    def exact(self) -> bool:
        """Whether the new checkpoint says that it is exact; True where there is none."""
        checkpoint = self.new_checkpoint
        return checkpoint is None or bool(self.manifest(checkpoint)["exact"])

    @property
    def leftovers(self) -> list[str]:
        """Temporary directories and shared memory that should not be there any more."""
        shared = {Path(line).parent for path in self.directory.glob("rank_*.shm") for line in path.read_text().split()}
        partial = list(Path(self.plan.checkpoints).glob(".tmp-*")) if self.plan.checkpoints else []
        return sorted(str(path) for path in [*shared, *partial] if path.exists())

    def finish(self, timeout_s: float = RUN_TIMEOUT_S) -> None:
        """Wait for the ranks, then for every other process of the job, and see that nothing is left lying about."""
        self.job.wait(timeout_s)
        self.job.wait_gone(GONE_TIMEOUT_S)
        deadline_mono_s = time.monotonic() + 5
        while self.leftovers and time.monotonic() < deadline_mono_s:
            time.sleep(0.02)
        assert not self.leftovers, f"left behind: {self.leftovers}\n{self.job.report()}"
        self.job.close()

    def manifest(self, checkpoint: Path) -> dict[str, Any]:
        """The manifest's JSON, with the reasons as people read them."""
        return with_texts(json.loads((checkpoint / "manifest.json").read_text()))

    def incidents(self) -> list[dict[str, Any]]:
        """What the controllers have noted about each incident, oldest first."""
        path = Path(self.plan.checkpoints) / "logs" / "incidents.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def resumed_after(self) -> int:
        """Step after which rank 0 has resumed most recently."""
        record = self.track.one(0, "resumed")
        assert record is not None, self.job.report()
        return int(record["step"])

    def last_words(self, rank: int) -> list[str]:
        """The lines on stderr that lastwords has written for people."""
        return [line for line in self.job.output(rank).splitlines() if line.startswith(f"lastwords: rank {rank}:")]

    def fail(self, message: str) -> AssertionError:
        """An error with everything that a person needs to see."""
        return AssertionError(f"{message}\n{self.job.report()}")


_DEATHS: dict[Path, tuple[Launch, int]] = {}


class Rig:
    """Runs jobs in a directory of the test's own. References are shared by all tests of a session."""

    def __init__(self, cluster: Cluster, directory: Path, references: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.references = references
        self.launches: list[Launch] = []
        self._count = 0

    def launch(
        self,
        layout: Layout,
        *,
        faults: Sequence[Fault] = (),
        launcher: str = "fork",
        launcher_arguments: Sequence[str] = (),
        checkpoints: Path | None = None,
        port: Port | None = None,
        env: Mapping[str, str] | None = None,
        ignored: Sequence[int] = (),
        **settings: Any,
    ) -> Launch:
        """Start the training script; `settings` are fields of Plan, `ignored` as of `Cluster.start`."""
        self._count += 1
        directory = self.directory / f"launch_{self._count}"
        port = port or Port()
        saved = checkpoints or self.directory / "checkpoints"
        plan = Plan(
            layout,
            str(directory),
            checkpoints=str(saved),
            ctrl_port=settings.pop("ctrl_port", port.number),
            faults=tuple(faults),
            redirect=launcher in AGENTS,
            **settings,
        )
        plan.save(directory / "plan.json")
        before = {path.stat().st_ino for path in saved.glob(f"{FINAL_PREFIX}*")}
        job = self.cluster.start(
            directory,
            module=PARALLEL_MODULE if layout.parallel else MODULE,
            arguments=[str(directory / "plan.json")],
            world_size=layout.world_size,
            launcher=launcher,
            launcher_arguments=launcher_arguments,
            env=env,
            watched=[saved],
            ports=[port],
            ignored=ignored,
        )
        launch = Launch(job, plan, directory, before, (env or {}).get("LASTWORDS_JOB", ""))
        self.launches.append(launch)
        return launch

    def reference(self, layout: Layout) -> Track:
        """What the ranks compute when nothing happens, with torch alone; run once per layout and session."""

        def run(directory: Path) -> None:
            launch = Rig(self.cluster, directory, self.references).launch(layout, mode="plain")
            self.launches.append(launch)
            launch.finish()
            if set(launch.codes.values()) != {0}:
                raise launch.fail(f"the uninterrupted run ended with {launch.codes}")

        track = Track(once(self.references / layout.key, run) / "launch_1", layout.world_size)
        assert all(track.last_step(rank) == layout.steps for rank in range(layout.world_size))
        return track

    def close(self) -> None:
        """End everything that this rig has started."""
        for launch in self.launches:
            launch.job.close()

    # ------------------------------------------------------------------ what must hold

    def die(self, layout: Layout, kill: Kill, **settings: Any) -> tuple[Launch, int]:
        """Launch, kill, and check everything about the last words; returns the launch and N (0: nothing to save)."""
        launch = self.launch(layout, faults=kill.faults(layout), **settings)
        launch.finish()
        exact = kill.is_exact(layout, launch.saved_step)
        every = launch.plan.copy or 1  # what only the dead have held is of a step that was copied
        expected = {step - step % every for step in kill.steps_expected(layout)}
        return launch, self.check_last_words(launch, kill.victims, expected, exact=exact)

    def died(self, layout: Layout, kill: Kill) -> tuple[Launch, int]:
        """The same, once for all tests of this process that need its checkpoint: each gets a copy of its own."""
        place = self.references / f"killed-{os.getpid()}" / f"{layout.key}-{kill}"
        if place not in _DEATHS:
            _DEATHS[place] = Rig(self.cluster, place, self.references).die(layout, kill)
        launch, step = _DEATHS[place]
        copy = self.directory / "checkpoints"
        shutil.copytree(launch.plan.checkpoints, copy)
        return dataclasses.replace(launch, plan=dataclasses.replace(launch.plan, checkpoints=str(copy))), step

    def check_last_words(
        self, launch: Launch, victims: Collection[int], expected: Collection[int], *, exact: bool = True
    ) -> int:
        """The launch has ended as it has to: one sound checkpoint of an expected step, and every survivor says so.

        Returns N; 0 where nothing was to be saved.
        """
        step = self.check_step(launch, victims, expected, exact=exact)
        code = EXIT_SAVED if step else EXIT_NOT_SAVED
        codes = {rank: KILLED if rank in victims else code for rank in range(launch.layout.world_size)}
        if launch.job.launcher not in AGENTS and launch.codes != codes:
            raise launch.fail(f"the ranks ended with {launch.codes}")
        for rank in set(codes) - set(victims):
            lines = launch.last_words(rank)
            said = f"{FINAL_PREFIX}{step}" if step else "nothing new to save"
            if len(lines) != 1 or said not in lines[0]:
                raise launch.fail(f"rank {rank} said {lines}, and should say once {said!r}")
        return step

    def check_step(
        self, launch: Launch, victims: Collection[int], expected: Collection[int], *, exact: bool = True
    ) -> int:
        """One sound checkpoint was published, of an expected step (0: none). Returns N."""
        layout = launch.layout
        before = first_difference(self.reference(layout), launch.track)
        if before is not None:
            raise launch.fail(f"already before the incident {before}")
        survivors = [rank for rank in range(layout.world_size) if rank not in victims]
        if launch.new_checkpoint is None:
            if 0 not in expected:
                raise launch.fail(f"no checkpoint was published; expected one of step {sorted(expected)}")
            return 0
        checkpoint = launch.new_checkpoint
        manifest = launch.manifest(checkpoint)
        step = int(manifest["global_step"])
        if step not in expected:
            raise launch.fail(f"the last words are of step {step}, expected {sorted(expected)}: {manifest['reason']}")
        # Another job may have pushed it aside, which must not have moved anything in it.
        assert checkpoint.name == f"{FINAL_PREFIX}{step}" or (launch.name and "-replaced-" in checkpoint.name)
        reached = max(launch.track.last_step(rank) for rank in survivors)
        if reached in (layout.inf_steps or ()):
            # A step without an update has been recorded, but not ended: nothing moves before its end (or its gate).
            reached -= 1
        if step < reached - launch.plan.copy:  # a step of which the dead had no copy yet is done again
            raise launch.fail(f"the last words are of step {step}, but a survivor had updated at step {reached}")
        if manifest["exact"] is not exact and not _first_step_is_doubted(step, manifest["reasons"]):
            raise launch.fail(f"the manifest says exact={manifest['exact']}, because {manifest['reasons']}")
        check_sound(checkpoint)
        return step

    def resume(self, killed: Launch, **settings: Any) -> Launch:
        """Start again from the last words and train to the end."""
        arguments: dict[str, Any] = {"api": killed.plan.api, "recover": True, **settings}
        launch = self.launch(killed.layout, checkpoints=Path(killed.plan.checkpoints), **arguments)
        launch.finish()
        if launch.job.launcher not in AGENTS and set(launch.codes.values()) != {0}:
            raise launch.fail(f"the resumed run ended with {launch.codes}")
        return launch

    def difference(self, resumed: Launch, step: int) -> Difference | None:
        """First bit in which the run resumed after `step` differs from the uninterrupted one; None if none does."""
        reference, layout = self.reference(resumed.layout), resumed.layout
        restored = resumed_difference(reference, resumed.track)
        if restored is not None:
            return restored
        later = first_difference(reference, resumed.track, steps=range(step + 1, layout.steps + 1))
        if later is not None:
            return later
        return self._difference_at_the_end(reference, resumed)

    def check_resume(self, killed: Launch, step: int, **settings: Any) -> Launch:
        """Resume after `step` and compare every bit of every rank with the uninterrupted run."""
        resumed = self.resume(killed, **settings)
        for rank in range(resumed.layout.world_size):
            record = resumed.track.one(rank, "resumed")
            if record is None or record["step"] != step:
                raise resumed.fail(f"rank {rank} resumed at {record and record['step']}, not after step {step}")
            if not record["exact"] and not _first_step_is_doubted(record["step"], record["reasons"]):
                raise resumed.fail(f"rank {rank} was told that its resume is not exact: {record['reasons']}")
        difference = self.difference(resumed, step)
        if difference is not None:
            raise resumed.fail(str(difference))
        return resumed

    def check_untouched(self, launch: Launch) -> None:
        """Every rank has trained to the end, computed the reference's bits, and nothing was saved."""
        if launch.job.launcher not in AGENTS and set(launch.codes.values()) != {0}:
            raise launch.fail(f"the ranks ended with {launch.codes}")
        steps = range(1, launch.layout.steps + 1)
        difference = first_difference(self.reference(launch.layout), launch.track, steps=steps)
        if difference is not None:
            raise launch.fail(str(difference))
        if launch.checkpoints:
            raise launch.fail(f"nothing happened, but there is {launch.checkpoints}")

    def check_inexact_resume(self, killed: Launch, step: int) -> None:
        """The resume is not exact: every rank is told so, and it is true."""
        resumed = self.resume(killed)
        for rank in range(resumed.layout.world_size):
            record = resumed.track.one(rank, "resumed")
            if record is None or record["step"] != step or record["exact"] or not record["reasons"]:
                raise resumed.fail(f"rank {rank} was told {record and record['reasons']}")
        if self.difference(resumed, step) is None:
            raise resumed.fail("the resume was said to be inexact, but nothing differs")

    def survive(self, layout: Layout, kill: Kill, **settings: Any) -> int:
        """The whole story of one death: last words, resume, the same bits. Returns N."""
        killed, step = self.die(layout, kill, **settings)
        if step and kill.is_exact(layout, step):
            self.check_resume(killed, step)
        elif step:
            self.check_inexact_resume(killed, step)
        return step

    def heal(self, layout: Layout, kill: Kill, **settings: Any) -> Launch:
        """Kill under `lastwords run`: all ranks are started again, and every bit is as if nobody had died."""
        launch, difference = self.healed(layout, kill.faults(layout), **settings)
        for rank in range(layout.world_size):
            record = launch.track.one(rank, "resumed")
            if record is not None and not record["exact"]:
                raise launch.fail(f"rank {rank} was told that its resume is not exact: {record['reasons']}")
        if difference is not None:
            raise launch.fail(str(difference))
        return launch

    def healed(
        self,
        layout: Layout,
        faults: Sequence[Fault],
        *,
        launcher: str = "healing",
        meanwhile: Callable[[Launch], None] = lambda _: None,
        **settings: Any,
    ) -> tuple[Launch, Difference | None]:
        """A run under `lastwords run` to its end, and the first bit in which it differs from one without faults.

        meanwhile: called while it runs. A failure after the last step of all ranks is not healed: the job fails, and
        there is no end to compare.
        """
        arguments: dict[str, Any] = {"faults": faults, "recover": True, "missing_ok": True, **settings}
        launch = self.launch(layout, launcher=launcher, **arguments)
        meanwhile(launch)
        launch.finish(HEALED_TIMEOUT_S)
        ranks = range(layout.world_size)
        is_over = all(launch.track.last_step(rank) == layout.steps for rank in ranks)
        if launch.codes != {-1: 0}:
            if is_over:
                return launch, first_difference(self.reference(layout), launch.track)
            raise launch.fail(f"lastwords run ended with {launch.codes}")
        saved = {incident["step"] for incident in launch.incidents() if incident["outcome"] == "SAVED"}
        return launch, self._healed_difference(launch, saved)

    def _healed_difference(self, launch: Launch, saved: Collection[int]) -> Difference | None:
        """A rank that was stopped in a step that was `saved` has no record of it."""
        reference = self.reference(launch.layout)
        for rank in range(launch.layout.world_size):
            missing = set(range(1, launch.layout.steps + 1)) - launch.track.steps(rank).keys() - {*saved}
            if missing:
                return Difference(rank, min(missing), (), "this step was never recorded")
        return first_difference(reference, launch.track) or self._difference_at_the_end(reference, launch)

    def _difference_at_the_end(self, reference: Track, launch: Launch) -> Difference | None:
        for rank in range(launch.layout.world_size):
            ours, theirs = launch.track.one(rank, "done"), reference.one(rank, "done")
            names = differing(theirs["values"] if theirs else {}, ours["values"] if ours else {})
            if names or ours is None:
                return Difference(rank, launch.layout.steps, tuple(names), f"at the very end {names}")
        return None


def once(directory: Path, make: Callable[[Path], None]) -> Path:
    """A folder that `make` has filled: in the first worker of the session that asks for it, while the others wait."""
    directory.mkdir(parents=True, exist_ok=True)
    made = directory / "made"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            room = Path(tempfile.mkdtemp(dir=directory))
            make(room)
            room.rename(made)
    return made


def check_sound(checkpoint: Path) -> None:
    """Every byte of a published checkpoint is what was written."""
    from lastwords.checkpoint import load

    problems = load.verify(checkpoint, deep=True)
    assert not problems, problems


def _first_step_is_doubted(step: int, reasons: Sequence[Any]) -> bool:
    """The trainer clears its gradients after the log, which nobody has seen where its first step is cut off before."""
    return step == 1 and all("gradients may have been carried" in str(reason) for reason in reasons)
