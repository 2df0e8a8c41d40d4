"""What the scripts here have in common: a probe that looks at every step, deaths, and data.

Arguments of a script: a directory, and deaths as rank:step:phase that happen once; with ! at the end, an exception.
Each rank adds a line per step to {directory}/trace-{rank}: its number, a digest of all that it trains with, and the
pid. final-{rank} is what is there at the end, raised-{rank} what Trainer.train() or fit() has raised, and
checkpoints-{rank} has a digest of each file that the library's own checkpoints consist of.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

DIRECTORY, DEATHS = Path(sys.argv[1]), sys.argv[2:]
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "2"))
PROTECTED = os.environ.get("PROTECTED") == "1"
"""By the line that a user adds; else not at all, or by --auto."""
BROKEN = os.environ.get("BROKEN", "")
CASE = os.environ.get("CASE", "")
"""A variant of the script, or what of the adaptor is broken."""
WORDS = 12
TIMES = ("runtime", "per_second", "speed", "time_elapsed")
"""In keys of what is logged."""


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


def break_it() -> None:
    """Leave out the part of the adaptor that BROKEN names."""
    import lastwords
    from lastwords import Batches

    load, left_out = Batches.load_state_dict, {"streams of the batch in hand": "fetch", "streams of the epoch": "start"}

    def load_part(self: Batches, state: Any) -> None:
        streams = left_out[BROKEN]
        load(self, {**state, streams: {**state[streams], "torch": torch.get_rng_state().numpy().tobytes()}})

    if BROKEN in left_out:
        Batches.load_state_dict = load_part  # type: ignore[method-assign]
    elif BROKEN == "what was cut off":
        resume = lastwords.TFTRegister.resume

        def resume_as_if_begun(self: Any, missing_ok: bool | None = None) -> Any:
            point = resume(self, missing_ok)
            return None if point is None else dataclasses.replace(point, begun=True)

        lastwords.TFTRegister.resume = resume_as_if_begun  # type: ignore[method-assign]
    elif BROKEN == "end of the epoch":
        Batches.over = property(lambda self: False, lambda self, over: None)  # type: ignore[assignment]
    elif BROKEN == "step_begin":
        from lastwords.optim_wrapper.trainer.run import ProtectedRun

        ProtectedRun.begin_step = lambda run: None  # type: ignore[method-assign]


def protect_trainer(trainer: Any) -> None:
    """The line for a Trainer of transformers."""
    if PROTECTED:
        from lastwords.integrations import hf

        break_it()
        hf.protect(trainer, DIRECTORY / "ckpt")


def lightning_callbacks() -> list[Any]:
    """The callback for Lightning."""
    if not PROTECTED:
        return []
    ours = "pytorch_lightning" if ("pytorch_lightning" in sys.modules) != (CASE == "other name") else "lightning"
    break_it()
    last_words = importlib.import_module(f"lastwords.integrations.{ours}").LastWords
    return [last_words(DIRECTORY / "ckpt", **({"copy": True} if "two backwards" in CASE else {}))]


def die(step: int, phase: str) -> None:
    """Here, if the plan says so; in a forward pass, or half of an update, once all ranks have come to it."""
    due = [one for one in DEATHS if one.removesuffix("!").endswith(f":{step}:{phase}") and not mark_of(one).exists()]
    if due and phase in ("fwd", "half"):
        dist.barrier()
    for death in due:
        if death.startswith(f"{RANK}:"):
            mark_of(death).touch()
            if death.endswith("!"):
                raise RuntimeError(death)
            os.kill(os.getpid(), signal.SIGKILL)


def mark_of(death: str) -> Path:
    """A file that is there once it has happened."""
    return DIRECTORY / f"died-{death.replace(':', '-')}"


@contextmanager
def telling() -> Iterator[None]:
    """Inside, a Trainer trains, and a user looks at what it raises."""
    try:
        yield
    except Exception as error:
        (DIRECTORY / f"raised-{RANK}").write_text(str(error))
        raise


def ended(step: int, *state: Any) -> None:
    """This step has: a line of the trace."""
    with (DIRECTORY / f"trace-{RANK}").open("a") as file:
        file.write(f"{step} {digest([*state, torch.get_rng_state()])} {os.getpid()}\n")


def shown(*what: Any) -> None:
    """A progress bar shows this: a line of bar-{rank}."""
    with (DIRECTORY / f"bar-{RANK}").open("a") as file:
        file.write(f"{' '.join(map(str, what))}\n")


def final(*state: Any) -> None:
    (DIRECTORY / f"final-{RANK}").write_text(digest([*state, torch.get_rng_state()]))


def end() -> None:
    """Torch alone aborts now and then as the interpreter ends (1 of 37 runs, with lastwords and without)."""
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def checkpoints(folder: Path) -> None:
    """Digests of all files below: called by each rank once nobody writes there any more."""
    dist.barrier()
    kinds = (".json", ".safetensors", ".pt", ".pth", ".bin", ".ckpt")
    files = [one for one in sorted(folder.rglob("*")) if one.suffix in kinds and "last_words" not in one.parts]
    found = {str(path.relative_to(folder)): digest(content(path)) for path in files}
    (DIRECTORY / f"checkpoints-{RANK}").write_text(json.dumps(found, indent=1))


def content(path: Path) -> Any:
    """What is in a file of a checkpoint, without times."""
    if path.suffix == ".safetensors":
        return path.read_bytes()
    return timeless(json.loads(path.read_text()) if path.suffix == ".json" else torch.load(path, weights_only=False))


def timeless(value: Any) -> Any:
    """All but what no two runs have alike."""
    if isinstance(value, dict):
        return {name: timeless(one) for name, one in value.items() if not any(time in str(name) for time in TIMES)}
    return [timeless(one) for one in value] if isinstance(value, list) else value


def digest(value: Any) -> str:
    """Of all tensors and numbers in it; paths in this directory are those of any."""
    found = hashlib.sha256()

    def anywhere(one: Any) -> bytes:
        return repr(one).replace(str(DIRECTORY), "").encode()

    def add(one: Any) -> None:
        if isinstance(one, dict):
            for name in sorted(one, key=str):
                found.update(str(name).replace(str(DIRECTORY), "").encode())
                add(one[name])
        elif isinstance(one, list | tuple):
            for each in one:
                add(each)
        else:
            found.update(one.numpy().tobytes() if isinstance(one, torch.Tensor) else anywhere(one))

    add(value)
    return found.hexdigest()
