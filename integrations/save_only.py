"""`--auto` in a loop of a script's own: last words are written at a death, and nothing is resumed by guessing.

Where a step of the loop ends can be seen from outside: where the model is called again after an update. Where the loop
stands in its data, and what it keeps in variables, cannot. So what was trained is saved, with the lines that the script
needs to go on from there, and whoever resumes from it is told what it does not have.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from lastwords.checkpoint.load import scan
from lastwords.errors import ConfigError
from lastwords.optim_wrapper.trainer.protect import protect
from lastwords.optim_wrapper.trainer.register import TFTRegister

LINES = """write these lines into it:
    with lastwords.protect({path!r}, model=model, optimizer=optimizer{extras}) as tft:
        tft.resume(missing_ok=True)
        for epoch, step, batch in tft.steps(loader, epochs):  # for both loops, with tft.optimizer"""

EXTRAS = """, extras={"scheduler": scheduler}"""


class UnknownLoop:
    """The one loop of this process, and what of it is known from outside. Training thread only."""

    def __init__(self, directory: str, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._say = say
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers and schedulers."""
        self._model: torch.nn.Module | None = None
        self._tft: TFTRegister | None = None
        self._updated = False
        self.is_known = False
        """Somebody else protects it, who knows it."""
        self.is_seen = False
        """A model has been called in training."""

    def install(self) -> None:
        """What the script makes from now on is seen."""
        self._after(torch.optim.Optimizer, self._made.add)
        self._after(LRScheduler, self._made.add)
        called = torch.compiler.disable(self._before_forward)  # type: ignore[no-untyped-call]
        self._after(DistributedDataParallel, lambda model: model.register_forward_pre_hook(called))
        plain = torch.distributed.destroy_process_group

        @functools.wraps(plain)
        def destroy_process_group(group: Any = None) -> None:
            if group is None:
                self._stop()
            plain(group)

        torch.distributed.destroy_process_group = destroy_process_group
        atexit.register(self._stop)

    def _after(self, kind: type[Any], made: Callable[[Any], Any]) -> None:
        plain = kind.__init__

        @functools.wraps(plain)
        def init(one: Any, *of: Any, **more: Any) -> None:
            plain(one, *of, **more)
            made(one)

        kind.__init__ = init

    def _before_forward(self, model: torch.nn.Module, args: Any) -> None:
        if self.is_known or not (model.training and torch.is_grad_enabled()):
            return
        self.is_seen = True
        if self._tft is None:
            self._begin(model)
        elif model is not self._model:
            raise ConfigError(_refused("trains two models"))
        elif self._updated:
            self._updated = False
            self._tft.step_end()

    def _begin(self, model: torch.nn.Module) -> None:
        """Model and optimizer are there, and no step is done."""
        optimizers = [one for one in self._made if isinstance(one, torch.optim.Optimizer)]
        schedulers = [one for one in self._made if isinstance(one, LRScheduler)]
        if len(optimizers) != 1:
            raise ConfigError(_refused(f"has {len(optimizers)} optimizers"))
        extras = {"scheduler": schedulers[0]} if len(schedulers) == 1 else {}
        path = unused(Path(self._directory))
        self._model = model
        self._tft = tft = protect(path, model=model, optimizer=optimizers[0], in_place=True, extras=extras)
        tft.start()
        lines = LINES.format(path=str(path), extras=EXTRAS if extras else "")
        tft.save_only(lines)
        optimizers[0].register_step_post_hook(self._has_updated)
        self._say(
            f"--auto saves the last words of this loop below {path}, and cannot resume what it does not know; to be "
            f"resumed and healed, {lines}"
        )

    def _has_updated(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._updated = True

    def _stop(self) -> None:
        if self._tft is not None:
            self._tft.stop()


def unused(path: Path) -> Path:
    """`path`, or with a number behind, where no checkpoint of an earlier start lies: that stays as it is."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([path], numbered) if not scan(one))


def _refused(what: str) -> str:
    return (
        f"--auto saves the last words of a loop with one model in DistributedDataParallel and one optimizer, and this "
        f"one {what}: call lastwords.protect() in it, or leave --auto out"
    )
