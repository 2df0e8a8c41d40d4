"""Starts `lastwords run` for a drill, each time in a directory of its own, and reads what the ranks have written."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lastwords.checkpoint.appearing import read_end
from lastwords.clock import mono_s
from lastwords.drill.phases import RankLife, lives_in
from lastwords.errors import StorageError
from lastwords.optim_wrapper.launch.drill_plan import CHECKPOINTS, DRILL, PLAN_NAME, DrillPlan

NOT_FOR_A_DRILL = ("LASTWORDS_JOB", "LASTWORDS_REMOTE", "MS_ENABLE_TFT", "GROUP_INFO_FILE")
"""Variables that would have a drill meet the checkpoints of others, write elsewhere, or protect nothing."""

END_S = 60.0
"""How long a launcher may take to end its ranks, as it is asked to."""

OF_TORCH = "torch.distributed.elastic.multiprocessing.errors."
"""Begins the report of torch's launcher, which says less than what comes before it."""

LAST_LINES, OUTPUT_BYTES = 12, 64 << 10


@dataclass(frozen=True)
class RunOutcome:
    """How a run has ended. code: of the launcher; None: it was ended after `took_s`. lives: by rank."""

    folder: Path
    code: int | None
    took_s: float
    lives: dict[int, list[RankLife]]

    @property
    def last_lines(self) -> str:
        """Of its output."""
        with contextlib.suppress(OSError):
            lines = read_end(self.folder / "output.log", OUTPUT_BYTES).decode(errors="replace").splitlines()
            own = next((number for number, line in enumerate(lines) if line.startswith(OF_TORCH)), len(lines))
            lines = [*lines[max(0, own - LAST_LINES) : own], *(lines[-1:] if own < len(lines) else ())]
            return "\n".join(f"    {line}" for line in lines)
        return ""

    @property
    def firsts(self) -> dict[int, RankLife]:
        """The first life of each rank."""
        return {rank: lives[0] for rank, lives in sorted(self.lives.items()) if lives}

    @property
    def ended(self) -> dict[int, int]:
        """The newest step that each rank has ended."""
        return {rank: max(lives[-1].steps, default=lives[-1].begin.step) for rank, lives in self.lives.items() if lives}


class Runs:
    """flags: of `lastwords run`. command: script and arguments. folder: holds a directory for each run.

    Raises StorageError where the folder cannot be written.
    """

    def __init__(self, flags: Sequence[str], command: Sequence[str], folder: Path, timeout_s: float) -> None:
        self._flags, self._command = [*flags], [*command]
        self._folder, self._timeout_s = folder, timeout_s

    def run(self, name: str, ranks: int, plan: DrillPlan, checkpoints: Path | None = None) -> RunOutcome:
        """One run to its end. checkpoints: of an earlier run, which this one takes over."""
        folder = self._folder / name
        try:
            folder.mkdir(parents=True)
            (folder / PLAN_NAME).write_text(json.dumps(dataclasses.asdict(plan)))
            if checkpoints is not None:
                checkpoints.rename(folder / CHECKPOINTS)
            output = (folder / "output.log").open("wb")
        except OSError as error:
            raise StorageError(f"cannot write {folder}: {error.strerror}", errno=error.errno or 0) from error
        environment = {name: value for name, value in os.environ.items() if name not in NOT_FOR_A_DRILL}
        launcher = [sys.executable, "-m", "lastwords.cli", "run", "--standalone", f"--nproc-per-node={ranks}"]
        began_s = mono_s()
        with output:
            process = subprocess.Popen(
                [*launcher, *self._flags, *self._command],
                env={**environment, DRILL: str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                code: int | None = process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        return RunOutcome(folder, code, mono_s() - began_s, _lives(folder))

    @staticmethod
    def drop_checkpoints(outcome: RunOutcome) -> None:
        """They are as large as the job's state."""
        shutil.rmtree(outcome.folder / CHECKPOINTS, ignore_errors=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """It ends its ranks before it ends."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _lives(folder: Path) -> dict[int, list[RankLife]]:
    found = {}
    for path in folder.glob("rank_*.jsonl"):
        number = path.stem.removeprefix("rank_")
        if number.isdecimal():
            found[int(number)] = lives_in(path.read_text(errors="replace").splitlines(), path.name)
    return dict(sorted(found.items()))
