"""What Slurm's `slurmstepd` does to a job: SIGTERM to its processes, `KillWait` seconds, SIGKILL. With real ranks.

The batch script is deploy/slurm/train.sbatch; `srun` and `scontrol` are played.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lastwords.checkpoint import load
from lastwords.processor.departure import EXIT_SAVED
from tests import golden
from tests.integration.zygote import command_line, descendants
from tests.launcher.test_heal import ROOT, SCRIPT, environment, pids
from tests.launcher.test_launcher_ends import until
from tests.selection import more

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

SBATCH = ROOT / "deploy" / "slurm" / "train.sbatch"
RANKS = 2
KILL_WAIT_S, SHORT_KILL_WAIT_S = 60, 5
PROGRAMS = {
    "srun": 'shift; SLURM_NNODES=1 SLURM_NODEID=0 exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$*" >> told; fi',
    "lastwords": f'exec {sys.executable} -m lastwords.cli "$@"',
}


@dataclass(frozen=True)
class Step:
    """A job's only step: its batch shell, and the launcher that the shell has started."""

    folder: Path
    shell: subprocess.Popen[bytes]
    launcher_pid: int

    def end(self, told: Iterable[int], kill_wait_s: float) -> tuple[int, str]:
        """SIGTERM to these, and SIGKILL to all that are left after so long. The shell's exit code, and what it said."""
        processes = [self.launcher_pid, *descendants(self.launcher_pid)]
        send(told, signal.SIGTERM)
        try:
            self.shell.wait(kill_wait_s)
        except subprocess.TimeoutExpired:
            send({*processes, *descendants(self.launcher_pid)}, signal.SIGKILL)
        code = self.shell.wait(60)
        told_slurm = self.folder / "told"
        return code, told_slurm.read_text() if told_slurm.exists() else ""


def send(processes: Iterable[int], number: signal.Signals) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Step]:
    """Its ranks train."""
    for program, text in PROGRAMS.items():
        (tmp_path / program).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / program).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_JOB_NODELIST": "x", "RANKS_PER_NODE": str(RANKS)}
    env = {**environment(), **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", SBATCH, "-m", SCRIPT, tmp_path, "100000"]
    with (tmp_path / "log").open("wb") as log:
        shell = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=log, stderr=log)
    try:
        until(lambda: all((tmp_path / f"trace-{rank}").exists() for rank in range(RANKS)), "all ranks train")
        (launcher_pid,) = [pid for pid in descendants(shell.pid) if "lastwords.cli run" in command_line(pid)]
        yield Step(tmp_path, shell, launcher_pid)
    finally:
        send([*descendants(shell.pid), shell.pid], signal.SIGKILL)
        shell.wait()


@pytest.mark.parametrize("whom", ["launcher", more("all")])
def test_at_the_time_limit_the_job_is_saved_and_requeued(step: Step, whom: str) -> None:
    told = [step.launcher_pid, *(descendants(step.launcher_pid) if whom == "all" else [])]
    assert step.end(told, KILL_WAIT_S) == (EXIT_SAVED, "requeue 7\n"), (step.folder / "log").read_text()
    assert load.latest(step.folder / "ckpt") is not None


@pytest.mark.thorough
def test_a_job_that_is_cancelled_is_saved_and_not_requeued(step: Step) -> None:
    told = [step.shell.pid, step.launcher_pid, *descendants(step.launcher_pid)]
    assert step.end(told, KILL_WAIT_S) == (EXIT_SAVED, ""), (step.folder / "log").read_text()
    assert load.latest(step.folder / "ckpt") is not None


@pytest.mark.thorough
def test_where_kill_wait_is_too_short_for_a_rank_nothing_is_saved_and_the_job_is_not_requeued(step: Step) -> None:
    """Negative control: rank 1 is stopped, which takes longer to be left out."""
    os.kill(pids(step.folder, 1)[-1], signal.SIGSTOP)
    assert step.end([step.launcher_pid], SHORT_KILL_WAIT_S) == (128 + signal.SIGKILL, "")
    assert load.latest(step.folder / "ckpt") is None


CONTAINER = ("unshare", "--user", "--map-root-user", "--mount")
COPIES = """
import sys, torch, torch.distributed as dist, lastwords
dist.init_process_group("gloo")
net = torch.nn.Linear(2048, 2048)
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
model = torch.nn.parallel.DistributedDataParallel(net)
with lastwords.protect("ckpt", model=model, optimizer=optimizer, copy=True if "copy" in sys.argv else "auto") as tft:
    for _, _, (x,) in tft.steps(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(3, 2048))), 1):
        model(x).square().mean().backward()
        tft.optimizer.step()
        tft.optimizer.zero_grad()
        tft.step_end()
dist.destroy_process_group()
"""


def complaints(folder: Path, *arguments: str) -> list[str]:
    """What two ranks say of /dev/shm that is as small as a container's: 64 MB. They train all the same."""
    (folder / "train.py").write_text(COPIES)
    launch = f"{sys.executable} -m lastwords.cli run --standalone --nproc-per-node {RANKS} train.py"
    typed = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {launch} {' '.join(arguments)}"
    done = subprocess.run(
        [*CONTAINER, "bash", "-c", typed], cwd=folder, env=environment(), text=True, capture_output=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stderr.splitlines() if "/dev/shm" in line)


@pytest.mark.thorough
def test_copies_that_have_no_room_in_a_containers_shared_memory_are_complained_of_once_by_each_rank(
    tmp_path: Path,
) -> None:
    if subprocess.run([*CONTAINER, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    assert complaints(tmp_path) == []
    lines = complaints(tmp_path, "copy")
    assert len(lines) == RANKS
    golden.says(re.sub(r"(?<=for )\d+", "_", lines[0]))
