"""A run that `lastwords drill` has started: it writes what it computed, dies where it is told to, and ends early.

Imported only where LASTWORDS_DRILL is set.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lastwords.checkpoint.codec import typed
from lastwords.checkpoint.drill_record import running
from lastwords.checkpoint.layout import MANIFEST_NAME, checkpoint_dir
from lastwords.checkpoint.storable import Place
from lastwords.clock import mono_s
from lastwords.errors import UnstorableError
from lastwords.optim_wrapper.capture.rank_local import first_differentiable
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.ddp.ddp_found import is_compiled
from lastwords.optim_wrapper.launch.drill_plan import (
    BACKWARD,
    CHECKPOINTS,
    DRILL,
    END,
    EVALUATION,
    FORWARD,
    PLAN_NAME,
    UPDATE,
    Death,
    DrillPlan,
)
from lastwords.optim_wrapper.state.extras import ExtrasSnapshot, digest_of
from lastwords.optim_wrapper.state.how_far import WHICH
from lastwords.optim_wrapper.state.state_view import buffers_in
from lastwords.optim_wrapper.tensors.tensor_tree import DICTS
from lastwords.optim_wrapper.trainer.checkpoint_config import checked_schedule
from lastwords.optim_wrapper.trainer.run import ProtectedRun
from lastwords.processor.departure import flush
from lastwords.processor.saver import Position
from lastwords.sharding.dtensor import local_of

# Every leaf of a rank's state by the name that a user knows it by, as a digest: what `lastwords drill` compares.

Leaves = dict[str, dict[str, str]]
"""Kind ("parameter", "optimizer", ...) -> name -> digest."""

_OF_TORCH = "__composable_api_state_key"
"""In the name of an attribute that is called otherwise in each process."""

_DEPTH = 2
"""Levels of an extra's state that have names of their own."""


def leaves_of(recorder: StepRecorder) -> Leaves:
    """All of this rank's state as it is now. Training thread, between two steps; runs no code of the user's."""
    view = recorder.view
    parameters = view.all_names().parameters
    buffers = buffers_in(view.model, view.called)
    attributes, beside = recorder.attributes.told()
    found = {
        "parameter": {name: digest(one) for name, one in parameters.items()},
        "buffer": {name: digest(one) for name, _, _, one in buffers if one is not None},
        "optimizer": dict(_of_optimizer(recorder)),
        "hyperparameter": dict(_hyperparameters(recorder)),
        "extras": dict(_of_extras(recorder.extras_now)),
        "local_extras": dict(_of_extras(recorder.local_extras_now)),
        "random stream": {name.removeprefix("rng/"): digest(one) for name, one in recorder.streams().items()},
        "attribute": {name: digest(one) for name, one in attributes.items() if _OF_TORCH not in name},
        "variable": {name: digest(one, paths=False) for name, one in beside.items()},
    }
    return {kind: one for kind, one in found.items() if one}


def _of_optimizer(recorder: StepRecorder) -> Iterator[tuple[str, str]]:
    view = recorder.view
    names = {id(one): name for name, one in view.all_names().parameters.items()}
    numbers = itertools.count()
    for key, state in view.optimizer_state.items():
        where = names.get(id(key)) or (key if isinstance(key, str) else f"state {next(numbers)}")
        for name, value in state.items() if isinstance(state, Mapping) else [("", state)]:
            yield f"{where}.{name}", digest(value)


def _hyperparameters(recorder: StepRecorder) -> Iterator[tuple[str, str]]:
    for number, group in enumerate(recorder.view.optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                yield f"param_groups[{number}].{name}", digest(value)


def _of_extras(snapshot: ExtrasSnapshot) -> Iterator[tuple[str, str]]:
    def named(name: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
        if isinstance(value, Mapping) and value and depth:
            for key, item in value.items():
                yield from named(f"{name}.{key}", item, depth - 1)
        else:
            yield name, digest(value)

    for name, state in snapshot.states.items():
        yield from named(name, state, _DEPTH)


def digest(value: Any, *, paths: bool = True) -> str:
    """Of any value: equal for equal bits, in every process. Of what cannot be stored, its kind.

    paths: else of an object, too: a variable's may be met first in whatever other function runs just now.
    """
    if isinstance(value, torch.Tensor):
        value = local_of(value).detach()
    try:
        return f"{digest_of(_of_any_process(value, paths)):016x}"
    except (UnstorableError, RecursionError):
        return type(value).__qualname__


def _of_any_process(told: Any, paths: bool) -> Any:
    """What is told, without what is of this process alone."""
    kind = type(told)
    if kind is Place:
        return Place(told.path if paths else "", told.kind.partition(WHICH)[0])
    if kind in DICTS:
        made = told.copy()
        for key, item in told.items():
            made[key] = _of_any_process(item, paths)
        return made
    return kind(_of_any_process(item, paths) for item in told) if kind in (list, tuple, deque) else told


WAIT_S = 20.0
"""How long a rank waits for those that die with it, and for a checkpoint that it is not to die before."""

MEET_S = 3.0
"""How long it waits for all others to come there, too, so that it is this step that is saved. Not all may come: one
rank alone evaluates, a stage waits for the one before it."""

MODULES_MAX = 64
"""In the way back through so many modules a rank may die."""


@dataclass
class Passes:
    """What this rank has come by since the last step's end."""

    step: int
    counts: Counter[str] = field(default_factory=Counter)


class DrilledRun(ProtectedRun):
    """A protected run that is drilled. Training thread."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._folder = Path(os.environ[DRILL])
        plan = json.loads((self._folder / PLAN_NAME).read_bytes())
        self._plan = typed(plan, DrillPlan, PLAN_NAME)
        self._passes: Passes | None = None
        path = self._folder / f"rank_{self.world.rank}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _open_loop(self, steps_per_epoch: int, epochs: int) -> None:
        for number, wrapper in enumerate(self._optimizers):
            wrapper.register_step_post_hook(lambda *_, what=f"optimizer {number}": self._come_by(UPDATE, what))
        hear_passes(self.recorder.model, self.recorder.view.model, self._come_by)
        if self._plan.every:
            self.schedule = checked_schedule(self._plan.every, 0.0, None, 0)
        super()._open_loop(steps_per_epoch, epochs)
        resumed = self.resumed
        if resumed is not None and self._plan.spoils and self.world.rank == 0:
            self._write("spoilt", name=_flip_bit(self.recorder.view.all_names().parameters))
        script, (digest, arguments) = running()
        self._write(
            "begin",
            script=script,
            sha256=digest,
            arguments_sha256=arguments,
            data=self.recorder.loop.known.data,
            step=self.start_step,
            world=self.world.size,
            own_loop=self.steps is None,
            steps_per_epoch=steps_per_epoch,
            resumes=self.resumes,
            resumed=resumed is not None,
            begun=resumed is not None and resumed.begun,
            reasons=[] if resumed is None else [*map(str, self.recorder.ledger.reasons)],
            beside=[] if resumed is None or self.world.rank else self.missing_beside(resumed.beside),
            leaves=leaves_of(self.recorder),
        )
        self._passes = Passes(self.start_step + 1)
        if self.start_step >= self._plan.steps:
            self._end()

    def end_step(self, position: Position | None) -> None:
        """A step is over: what it has left is written down. Does not return after the plan's last one."""
        super().end_step(position)
        passes, number = self._passes, self.protection.agent.stand.ended_step
        assert passes is not None
        self._passes = None  # what is looked at now counts for nothing
        reasons = [*map(str, self.recorder.ledger.reasons)]
        self._write(
            "step",
            step=number,
            epoch=None if position is None else position.epoch,
            passes=passes.counts,
            reasons=reasons,
            unsaved=self.recorder.ledger.leaves,
            leaves=leaves_of(self.recorder),
        )
        if number >= self._plan.steps:
            self._end()
        self._passes = Passes(number)
        self._come_by(END)
        self._passes = Passes(number + 1)

    def _end(self) -> None:
        self.stop()
        flush()
        os._exit(0)  # what comes after the loop is for a job that has done all of its steps

    def _write(self, kind: str, **fields: object) -> None:
        """In one call, so that a rank that is killed leaves whole lines."""
        os.write(self._file, json.dumps({"kind": kind, **fields}).encode() + b"\n")

    # ------------------------------------------------------------------ deaths

    def _come_by(self, event: str, what: str = "") -> None:
        passes = self._passes
        if passes is None:
            return
        passes.counts[event] += 1
        for number, death in enumerate(self._plan.deaths):
            if (death.step, death.event, death.nth) == (passes.step, event, passes.counts[event]):
                (self._folder / f"came-{number}-{self.world.rank}").touch()
                if self.world.rank in death.ranks:
                    self._die(number, death, what)

    def _die(self, number: int, death: Death, what: str) -> None:
        mine = self._folder / f"dies-{number}-{self.world.rank}"
        try:
            with mine.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return  # that was in an earlier life
        self._write("dies", step=death.step, event=death.event, what=what)
        if death.published:
            manifest = checkpoint_dir(self._folder / CHECKPOINTS, death.published) / MANIFEST_NAME
            _wait(manifest.exists)
        ranks = range(self.world.size)
        _wait(lambda: all((self._folder / f"came-{number}-{rank}").exists() for rank in ranks), MEET_S)
        others = [mine.with_name(f"dies-{number}-{rank}") for rank in death.ranks if rank != self.world.rank]
        _wait(lambda: all(one.exists() for one in others))
        # The last one to come ends all of them: the first would give the others time to notice.
        for one in others:
            with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
                os.kill(int(one.read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _wait(until: Callable[[], bool], seconds: float = WAIT_S) -> None:
    pause, deadline_mono_s = threading.Event(), mono_s() + seconds
    while not until() and mono_s() < deadline_mono_s:
        pause.wait(0.002)


def _flip_bit(parameters: Mapping[str, torch.Tensor]) -> str:
    """The sign of the largest element of a parameter in the middle: no update rounds that away. Its name."""
    name = [*parameters][len(parameters) // 2]
    with torch.no_grad():
        flat = local_of(parameters[name]).detach().view(-1)
        flat[flat.abs().argmax()].neg_()
    return name


# ---------------------------------------------------------------------- where a rank comes by


def hear_passes(called: torch.nn.Module, bare: torch.nn.Module, come_by: Callable[[str, str], None]) -> None:
    """Call `come_by` in each forward pass, and in the way back through a module, with what it is and the module's name.

    called: the model as the loop calls it. bare: the user's own module in it.
    """
    compiled = is_compiled(called)
    whole = called if compiled else bare

    def passed(module: torch.nn.Module, _given: Any, _made: Any) -> None:
        come_by(FORWARD if torch.is_grad_enabled() and module.training else EVALUATION, "")

    for one in _callable(whole):
        one.register_forward_hook(passed)
    for name, one in [("", whole)] if compiled else _some(bare):
        one.register_forward_hook(functools.partial(_hear_way_back, functools.partial(come_by, BACKWARD, name)))


def _callable(module: torch.nn.Module) -> list[torch.nn.Module]:
    """It, or the modules in it that a loop can call, if it is a mere holder of these."""
    if type(module).forward is not torch.nn.Module.forward:
        return [module]
    return [one for child in module.children() for one in _callable(child)]


def _some(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Modules without others in them, so many at most, evenly chosen."""
    every = [(name, one) for name, one in module.named_modules() if next(one.children(), None) is None]
    return every[:: -(-len(every) // MODULES_MAX) or 1]


def _hear_way_back(come_by: Callable[[], None], _module: torch.nn.Module, _given: Any, made: Any) -> None:
    if (one := first_differentiable(made)) is not None:
        one.register_hook(lambda _gradient: come_by())  # type: ignore[no-untyped-call]
