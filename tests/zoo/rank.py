"""One rank of a recipe: `python -m tests.zoo.rank PLAN.json`.

The plan: recipe (its name, or several names joined by `+`), plain, recover, checkpoints, port, out, kill ([rank, step,
phase, delay in milliseconds] or null), without (mechanisms that are taken out), every (steps between two periodic
checkpoints, if there are any).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.integration import recording
from tests.integration.odd_training import described
from tests.integration.recording import random_streams, text_digest
from tests.zoo import mixtures, without
from tests.zoo.loop import Loop

WAIT_S = 60.0
STANDING_S = 0.03
"""What a survivor needs to get from there into the collective after it, on an idle machine."""


class Stage:
    """Where this rank dies, if it does, and where the others are by then."""

    def __init__(self, plan: dict[str, Any], rank: int, size: int) -> None:
        self.out, self.rank, self.size = Path(plan["out"]), rank, size
        self.victim, self.step, self.phase, self.delay_ms = plan["kill"] or (-1, 0, "", 0.0)
        self.loop: Loop | None = None

    def at(self, phase: str) -> None:
        """The rank comes by here: the victim dies as soon as the others are where the phase wants them."""
        loop = self.loop
        if loop is None or loop.step != self.step:
            return
        if phase == "begin":
            if self.phase == "bwd" and self.rank == self.victim:
                threading.Timer(self.delay_ms / 1000, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif phase == self.phase:
            (self.out / f"{phase}_{self.rank}").touch()
            if self.rank == self.victim:
                self.wait(phase)
                os.kill(os.getpid(), signal.SIGKILL)

    def wait(self, phase: str) -> None:
        """Until the others are there too, and where that leads them: into the collective that comes next."""
        deadline_mono_s = time.monotonic() + WAIT_S
        others = [rank for rank in range(self.size) if rank != self.rank]
        while not all((self.out / f"{phase}_{rank}").exists() for rank in others):
            assert time.monotonic() < deadline_mono_s, f"the others never came to {phase} of step {self.step}"
            time.sleep(0.001)
        time.sleep(STANDING_S)


class Recorder:
    """Writes what a rank computed, and all of its state, after each step."""

    def __init__(self, loop: Loop, out: Path) -> None:
        self.loop = loop
        self.path = out / f"rank_{loop.rank}.jsonl"

    def write(self, kind: str, step: int, **more: Any) -> None:
        """One record."""
        line = json.dumps({"kind": kind, "step": step, **more})
        with self.path.open("a") as file:
            file.write(line + "\n")

    def step_done(self) -> None:
        """Everything at the end of a step's body."""
        loop = self.loop
        values = {name: said(value) for name, value in loop.values.items()}
        loop.values = {}
        self.write("step", loop.step, values={**values, **self.state()})

    def state(self) -> dict[str, str]:
        """A digest of each piece of state."""
        loop, found = self.loop, {}
        for part, module in loop.modules().items():
            prefix = f"{part}." if part else ""
            found |= {f"model/{prefix}{name}": digest(value) for name, value in module.named_parameters()}
            found |= {f"buffer/{prefix}{name}": digest(value) for name, value in module.named_buffers()}
        names = {id(p): name for module in loop.modules().values() for name, p in module.named_parameters()}
        for number, optimizer in enumerate(loop.inner):
            found |= optimizer_state(f"optim{number}", optimizer, names)
        for kind, extras in (("extra", loop.extras), ("local", loop.local_extras)):
            for name, value in extras.items():
                found[f"{kind}/{name}"] = said(value if isinstance(value, dict) else value.state_dict())
        for name, generator in loop.generators.items():
            found[f"gen/{name}"] = said(generator)
        return found | random_streams()


def optimizer_state(label: str, optimizer: Any, names: dict[int, str]) -> dict[str, str]:
    """State, groups and whatever else its `state_dict()` holds."""
    found = {}
    for key, state in getattr(optimizer, "optim", optimizer).state.items():
        where = names.get(id(key), str(key) if isinstance(key, str) else "?")
        items = state.items() if isinstance(state, dict) else [("", state)]
        found |= {f"{label}/{where}/{name}": said(value) for name, value in items}
    found[f"{label}/order"] = said(
        [
            names.get(id(key), str(key) if isinstance(key, str) else "?")
            for key in getattr(optimizer, "optim", optimizer).state
        ]
    )
    for number, group in enumerate(optimizer.param_groups):
        found[f"{label}/group{number}"] = said({key: value for key, value in group.items() if key != "params"})
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict and not hasattr(optimizer, "optim"):
        whole = optimizer.state_dict()
        found[f"{label}/own"] = said({key: whole[key] for key in whole if key not in ("state", "param_groups")})
    return dict(sorted(found.items()))


def digest(tensor: torch.Tensor) -> str:
    """Of a copy: a tensor that numpy has seen can no longer be resized."""
    plain = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return recording.digest(plain.clone())


def said(value: Any) -> str:
    """A digest of any value, short enough to be read in a message."""
    if isinstance(value, np.random.Generator):
        value = value.bit_generator.state
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.layout is torch.strided:
        return float(value.detach()).hex()
    if isinstance(value, torch.Tensor):
        return digest(value)
    text = re.sub(r" at 0x[0-9a-f]+", "", described(value))
    return text if len(text) < 80 else text_digest(text)


OF_THE_ZOO = ("values", "mean", "step", "epoch", "micro", "ends_step", "end_step")
"""Attributes of a loop that no recipe reads in another step than the one in which they are set."""


@contextlib.contextmanager
def protected(plan: dict[str, Any], loop: Loop) -> Iterator[Any]:
    """The register, entered."""
    import lastwords

    options = loop.options()
    if options.get("variables"):
        options["forget"] = [*options.get("forget", ()), *(f"*() of *.loop.{name}" for name in OF_THE_ZOO)]
    tft = lastwords.TFTRegister(
        0,
        "127.0.0.1",
        plan["port"],
        plan["checkpoints"],
        model=loop.registered(),
        optimizer=loop.opts if len(loop.opts) > 1 else loop.opt,
        extras=loop.extras or None,
        local_extras=loop.local_extras or None,
        **options,
    )
    with tft:
        yield tft


class Late(logging.Handler):
    """Why the resume is not exact, as far as that is found only when the loop begins."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("lastwords: not exact"):
            self.reasons += map(str, record.args or ())


def run_protected(plan: dict[str, Any], loop: Loop, recorder: Recorder, stage: Stage) -> None:
    """With lastwords, resumed or not."""
    with protected(plan, loop) as tft:
        if plan.get("every"):
            tft.every(steps=plan["every"])
        done = 0
        if plan["recover"]:
            point = tft.resume()
            done = loop.step = point.global_step
            said = {one: getattr(point, one) for one in ("exact", "reasons", "beside", "begun")}
            recorder.write("resumed", done, values=recorder.state(), **said)
        loop.resumed()
        loop.end_step = tft.step_end
        logging.getLogger("lastwords").addHandler(late := Late())

        def ended(epoch: int, step: int) -> None:
            recorder.step_done()
            stage.at("end")
            if loop.own_loop:
                tft.step_end(epoch, step)

        if loop.own_loop:
            loop.run(loop.plain(loop.loader(), done, beginning(loop, recorder, tft.step_begin)), ended)
        else:
            loop.run(named_steps(tft, loop), ended)
        recorder.write("late", loop.step, reasons=late.reasons)


def named_steps(tft: Any, loop: Loop) -> Iterator[tuple[int, int, Any]]:
    """`steps()`, and which batch of its step each one is."""
    micro = 0
    for item in tft.steps(loop.loader(), loop.epochs, accumulate=loop.accumulate):
        loop.micro, loop.ends_step = micro, tft.ends_step
        micro = 0 if tft.ends_step else micro + 1
        yield item


def beginning(loop: Loop, recorder: Recorder, begin: Callable[[], None]) -> Callable[[], None]:
    """What a loop of one's own calls where it begins a step; once, after a resume, unless it `begins` each of them."""

    def begun() -> None:
        begin()
        recorder.write("begun", loop.step, values=recorder.state())

    return begun if loop.begins else begin


def nothing() -> None:
    """There is nothing to put back where nothing was resumed."""


def main(arguments: list[str]) -> None:
    plan = json.loads(Path(arguments[0]).read_text())
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    shield: Any = lambda optimizer: optimizer  # noqa: E731
    if not plan["plain"]:
        import lastwords

        without.take_out(plan["without"])
        shield = lastwords.OptTFTWrapper
    stage = Stage(plan, rank, dist.get_world_size())
    loop = stage.loop = mixtures.card_of(plan["recipe"]).loop(rank, shield, stage.at)
    recorder = Recorder(loop, Path(plan["out"]))
    if plan["plain"]:
        loop.resumed()
        loop.run(
            loop.plain(loop.loader(), 0, beginning(loop, recorder, nothing)), lambda epoch, step: recorder.step_done()
        )
        dist.barrier()
    else:
        run_protected(plan, loop, recorder, stage)
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's end is not what the zoo is for


if __name__ == "__main__":
    main(sys.argv[1:])
