"""What the scripts here have in common: a probe that looks at every step, deaths, and data.

Arguments of a script: a directory, and deaths as rank:step:phase that happen once. Each rank adds a line per step to
{directory}/trace-{rank}: its number, a digest of all that it trains with, and the pid. final-{rank} is what is there at
the end. PLAIN=1: the script does without lastwords. RESUME=1 in the environment is not needed: it resumes where it can.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

DIRECTORY, DEATHS = Path(sys.argv[1]), sys.argv[2:]
RANK = int(os.environ.get("RANK", "0"))
PLAIN = os.environ.get("PLAIN") == "1"
CASE = os.environ.get("CASE", "")
"""A variant of the script, or what of the adaptor is broken."""
WORDS = 12


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Of WORDS words each, of a language of 32."""

    def __init__(self, count: int) -> None:
        self.texts = torch.randint(0, 32, (count, WORDS), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


def masked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch in which words are left out at random, by the process's own generator."""
    texts, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    return {"input_ids": torch.where(torch.rand(texts.shape) < 0.3, 0, texts), "labels": labels}


def die(step: int, phase: str) -> None:
    """Here, if the plan says so; in a forward pass once all ranks have come to it."""
    for death in DEATHS:
        mark = DIRECTORY / f"died-{death.replace(':', '-')}"
        if death.endswith(f":{step}:{phase}") and not mark.exists():
            if phase == "fwd":
                dist.barrier()
            if death.startswith(f"{RANK}:"):
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def ended(step: int, *state: Any) -> None:
    """This step has: a line of the trace."""
    with (DIRECTORY / f"trace-{RANK}").open("a") as file:
        file.write(f"{step} {digest([*state, torch.get_rng_state()])} {os.getpid()}\n")


def final(*state: Any) -> None:
    (DIRECTORY / f"final-{RANK}").write_text(digest([*state, torch.get_rng_state()]))


def digest(value: Any) -> str:
    """Of all tensors and numbers in it."""
    found = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, dict):
            for name in sorted(one, key=str):
                found.update(str(name).encode())
                add(one[name])
        elif isinstance(one, list | tuple):
            for each in one:
                add(each)
        else:
            found.update(one.numpy().tobytes() if isinstance(one, torch.Tensor) else repr(one).encode())

    add(value)
    return found.hexdigest()
