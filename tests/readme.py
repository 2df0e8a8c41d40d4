"""README.md's code blocks as programs: what a reader copies, and how a test runs it like a person.

`torchrun`, `lastwords` and `python` are those of an environment, which is given; so it may be one of its own.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.launch import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
RANKS = 2
VICTIM = 1
KILLED_AT = 13
"""Batches of the victim, which is killed in the forward pass of the last one."""
EPOCH_STEPS = 8

IMPORTS = """
import itertools, json, os, signal
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
"""
BEFORE = f"""
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
images = TensorDataset(torch.randn({EPOCH_STEPS * 8 * RANKS}, 16), torch.arange({EPOCH_STEPS * 8 * RANKS}) % 4)
loader = DataLoader(images, batch_size=8, sampler=DistributedSampler(images, shuffle=False))
torch.manual_seed(2 + rank)
batches = itertools.count(1)

def loss_fn(predicted, labels):
    if rank == {VICTIM} and next(batches) == {KILLED_AT} and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(predicted, labels)

"""
AFTER = """
end = [net.state_dict(), optimizer.state_dict(), scheduler.state_dict(), torch.get_rng_state()]
Path(f"end_{rank}.json").write_text(json.dumps(end, default=torch.Tensor.tolist))
dist.destroy_process_group()
"""
"""JSON has all digits of a float, so that two texts are equal where all bits are."""


def block(language: str, word: str, text: str = README) -> str:
    """The only code block of this language with the word in it."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    (found,) = [inside for name, inside in blocks if name == language and word in inside]
    return str(found)


def script(diff: str, *, added: bool = True) -> str:
    """The diff's new side, or its old one, with the names that it leaves open, and a file that holds the end state."""
    dropped = "-" if added else "+"
    return IMPORTS + BEFORE + "\n".join(line[1:] for line in diff.splitlines() if line[0] != dropped) + AFTER


CONTAINED = """
import subprocess, sys
from demo.launch import no_process_left_behind
with no_process_left_behind():
    sys.exit(subprocess.run(sys.argv[2:], cwd=sys.argv[1]).returncode)
"""


def run(
    command: Sequence[str | Path], folder: Path, env: Mapping[str, str], *, stdin: str = "", timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; none of its processes is left, whatever happens to it. stdout has its stderr, too."""
    contained = [sys.executable, "-c", CONTAINED, str(folder), *map(str, command)]
    process = subprocess.Popen(
        contained, cwd=ROOT, env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = process.communicate(stdin, timeout=timeout_s)
    except BaseException:
        process.send_signal(signal.SIGTERM)
        print(process.communicate()[0])
        raise
    return subprocess.CompletedProcess(contained, process.returncode, said)


@dataclass(frozen=True)
class Ended:
    """How a run has ended: what each rank has at the end, and how many losses all ranks have printed."""

    states: list[Any]
    losses: int

    def after_the_kill(self) -> Ended:
        """The same for a run that goes on at the step in which the victim is killed."""
        return Ended(self.states, self.losses - RANKS * (KILLED_AT - 1))


def trained(launcher: Sequence[str | Path], text: str, folder: Path, env: Mapping[str, str]) -> Ended:
    """Run the script in the folder under a launcher like torchrun; only under `lastwords run` its victim is killed."""
    (folder / "train.py").write_text(text)
    if launcher[-1] != "run":
        (folder / "killed").touch()
    command = [*launcher, "--standalone", f"--nproc-per-node={RANKS}", "train.py"]
    done = run(command, folder, env)
    assert done.returncode == 0, done.stdout
    assert (folder / "killed").exists(), done.stdout
    return Ended([json.loads((folder / f"end_{rank}.json").read_text()) for rank in range(RANKS)], losses(done.stdout))


def resumed(launcher: Sequence[str | Path], text: str, folder: Path, env: Mapping[str, str]) -> Ended:
    """Run the script until its victim is killed, and again."""
    (folder / "train.py").write_text(text)
    died = run([*launcher, "--standalone", f"--nproc-per-node={RANKS}", "train.py"], folder, env)
    assert died.returncode != 0, died.stdout
    assert (folder / "killed").exists(), died.stdout
    return trained(launcher, text, folder, env)


def losses(said: str) -> int:
    """How many `print(loss)` there were."""
    return said.count("tensor(")
