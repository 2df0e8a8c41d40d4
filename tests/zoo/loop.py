"""A training loop made of hooks. A recipe is a class that replaces a few of them, as a user would write these lines.

`Loop` alone is the plainest loop: DDP, BatchNorm, dropout, AdamW, a logged loss. Hooks that call `super()` can be
mixed with those of other recipes; of the hooks in `EXCLUSIVE` a mixture can have only one. Without lastwords the same
class trains with torch alone, which is what the recipe is compared with.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WIDTH_IN, WIDTH, WIDTH_OUT, BATCH = 8, 16, 4, 4
PHASES: dict[str, int] = {"fwd": 4, "bwd": 5, "win": 5, "end": 3, "epoch": 4, "mid": 5}
"""Phase -> step in which the rank dies, where a recipe says nothing else."""

EXCLUSIVE = frozenset(
    {"net", "wrap", "optimizers", "loader", "loss", "backward", "update", "train", "body", "run", "registered"}
)
"""Hooks that two recipes cannot both replace in a mixture of them."""

Words = tuple[str, ...]
NO_NAME = "global step"
"""A step of an own loop that was cut off before its end: the loop has not said what it calls it."""


def no_step_end() -> None:
    """`tft.step_end()` where there is no lastwords."""


class Loop:
    """The loop of one rank. `at` is called where the rank may die."""

    card: Card
    ranks = 2
    epochs = 2
    per_epoch = 4
    accumulate = 1
    own_loop = False
    begins = False

    def __init__(self, rank: int, shield: Callable[[Any], Any], at: Callable[[str], None]) -> None:
        self.rank, self.shield, self.at = rank, shield, at
        self.step = 0
        self.epoch = 0
        self.ends_step = True
        self.end_step: Callable[[], Any] = no_step_end
        self.values: dict[str, Any] = {}
        self.extras: dict[str, Any] = {}
        self.local_extras: dict[str, Any] = {}
        self.generators: dict[str, Any] = {}  # the user's own, compared like torch's
        self.seed(1)
        self.bare = self.net()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a newer torch has another name for some option
            self.model = self.wrap(self.bare)
        self.inner = self.optimizers()
        self.opts = [shield(optimizer) for optimizer in self.inner]
        self.opt: Any = self.opts[0]
        self.setup()
        self.seed(100 + rank)

    @staticmethod
    def seed(number: int) -> None:
        """Put all global streams to one place."""
        torch.manual_seed(number)
        np.random.seed(number)
        random.seed(number)

    # ------------------------------------------------------------------ what is built

    def blocks(self) -> list[nn.Module]:
        """Layers in the middle, from WIDTH to WIDTH."""
        return [nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1)]

    def net(self) -> nn.Module:
        """The network."""
        return nn.Sequential(nn.Linear(WIDTH_IN, WIDTH), *self.blocks(), nn.Linear(WIDTH, WIDTH_OUT))

    def ddp(self) -> dict[str, Any]:
        """Options of DistributedDataParallel."""
        return {}

    def wrap(self, net: nn.Module) -> nn.Module:
        """What the loop calls."""
        return DDP(net, **self.ddp())

    def optimizers(self) -> list[Any]:
        """Torch's own, before they are wrapped."""
        return [torch.optim.AdamW([p for p in self.bare.parameters() if p.requires_grad], lr=0.01)]

    def setup(self) -> None:
        """Schedulers, averages and so on; they go into `extras`."""

    def options(self) -> dict[str, Any]:
        """More arguments of TFTRegister."""
        return {}

    def registered(self) -> Any:
        """`model=` of TFTRegister."""
        return self.model

    def resumed(self) -> None:
        """After TFTRegister has been entered, and after resume(), if the run is resumed; without lastwords too."""

    def modules(self) -> Mapping[str, nn.Module]:
        """All networks whose state is compared."""
        return {"": self.bare}

    # ------------------------------------------------------------------ batches

    def dataset(self) -> Dataset[Any]:
        """All samples."""
        generator = torch.Generator().manual_seed(7)
        count = self.ranks * self.per_epoch * self.accumulate * BATCH
        x = torch.randn(count, WIDTH_IN, generator=generator)
        return TensorDataset(x, torch.randn(count, WIDTH_OUT, generator=generator))

    def loader(self) -> Any:
        """What `steps()` is given."""
        dataset: Any = self.dataset()
        sampler = DistributedSampler(dataset, self.ranks, self.rank, seed=3)
        return DataLoader(dataset, BATCH, sampler=sampler, generator=torch.Generator() if self.own_loop else None)

    # ------------------------------------------------------------------ one step

    def before_forward(self, batch: Any) -> Any:
        """Comes first in each step; returns the batch."""
        return batch

    def loss(self, x: Any, y: Any) -> Any:
        """The forward pass."""
        return nn.functional.mse_loss(self.model(x), y)

    def backward(self, loss: Any) -> None:
        """The backward pass."""
        loss.backward()

    def after_backward(self) -> None:
        """Between backward pass and update."""

    def update(self) -> None:
        """The optimizers' steps."""
        for number, optimizer in enumerate(self.opts):
            if number:
                self.at("mid")
            optimizer.step()

    def after_update(self) -> None:
        """Between the update and the log."""

    def log(self, loss: Any) -> None:
        """The mean loss over all ranks: the collective in which the survivors stand when a rank dies in `win`."""
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.mean = mean / self.ranks
        self.values["log"] = self.mean

    def after_log(self) -> None:
        """Between the log and the end of the step."""

    def epoch_end(self) -> None:
        """After an epoch's last step."""

    def train(self, x: Any, y: Any) -> Any:
        """From zero_grad to the update; returns the loss."""
        if self.begins_step:
            for optimizer in self.opts:
                optimizer.zero_grad()
        loss = self.loss(x, y) / self.accumulate
        if self.ends_step:
            self.at("fwd")
        self.backward(loss)
        if self.ends_step:
            self.after_backward()
            self.update()
        return loss

    def body(self, batch: Any) -> None:
        """What stands in the loop, but for the end of an epoch."""
        x, y = self.before_forward(batch)
        loss = self.train(x, y)
        self.values["loss"] = loss
        if self.ends_step:
            self.at("win")
            self.after_update()
            self.log(loss)
            self.after_log()

    # ------------------------------------------------------------------ the loop

    def run(self, batches: Iterable[tuple[int, int, Any]], ended: Callable[[int, int], None]) -> None:
        """All steps. ended: records the step, and ends it in a loop of one's own."""
        for epoch, step, batch in batches:
            self.epoch, self.step = epoch, (epoch - 1) * self.per_epoch + step
            if self.begins_step:
                self.at("begin")
            self.body(batch)
            if self.ends_step:
                self.finish(step, ended)

    def finish(self, step: int, ended: Callable[[int, int], None]) -> None:
        """The end of the body; that of an epoch is inside its last step, unless the loop is the user's own."""
        last = step == self.per_epoch
        if last and not self.own_loop:
            self.at("epoch")
            self.epoch_end()
        ended(self.epoch, step)
        if last and self.own_loop:
            self.at("epoch")
            self.epoch_end()

    @property
    def begins_step(self) -> bool:
        """Whether the batch in hand is the first one of its step."""
        return self.micro == 0

    micro = 0

    def plain(self, loader: Any, done: int, ready: Callable[[], None]) -> Iterator[tuple[int, int, Any]]:
        """The batches without `steps()`, from after step `done`; `ready` is called once the data is there.

        Where the loop `begins` its steps, it is called at the start of each of them, and nowhere else.
        """
        for epoch in range(1, self.epochs + 1):
            first = (epoch - 1) * self.per_epoch
            if done >= first + self.per_epoch:
                if done == first + self.per_epoch and self.own_loop:
                    self.epoch = epoch
                    self.epoch_end()  # which comes after the step's end, and so was not saved
                continue
            if done == first and not self.begins:
                ready()
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch - 1)
            for index, batch in enumerate(loader):
                step, self.micro = index // self.accumulate + 1, index % self.accumulate
                self.ends_step = self.micro == self.accumulate - 1
                if first + step > done:
                    if self.begins_step and (self.begins or (done > first and first + step == done + 1)):
                        ready()
                    yield epoch, step, batch


@dataclass(frozen=True)
class Card:
    """What is known and expected of a recipe.

    phases: where a rank may die, and in which step. told: phase, or "all" -> words, of which the reasons have to hold
    one, where "not exact" is an answer; everywhere else the resumed run has to be equal. nothing: phases in which
    there may be nothing to save. beside: names, of which one is named where the run differs, since the state is saved
    by nobody. price: what exactness costs the user, or the job. heavy: left to the thorough run. mixes: may be a part
    of a mixture. victim: the rank that dies; -1 is the last.
    """

    name: str
    what: str
    loop: type[Loop]
    phases: Mapping[str, int]
    told: Mapping[str, Words] = field(default_factory=dict)
    nothing: Words = ()
    beside: Words = ()
    price: str = ""
    heavy: bool = False
    mixes: bool = True
    victim: int = -1

    def words(self, phase: str) -> Words:
        """Of which one has to be in the reasons, if the resume is not exact; none: it has to be exact.

        A death at any instant may be one in the window, where the step of an own loop has no name yet, or find others
        at the end of the step before.
        """
        everywhere = self.told.get("all", ())
        anywhen = (*self.told.get("win", ()), *self.told.get("end", ())) if phase == "bwd" else ()
        words = self.told.get(phase, anywhen or everywhere)
        return (*words, NO_NAME) if self.loop.own_loop and phase in ("bwd", "win") else words


CARDS: dict[str, Card] = {}
L = TypeVar("L", bound=type[Loop])


def recipe(
    name: str, what: str, phases: str = "bwd win", told: Mapping[str, str | Words] | None = None, **more: Any
) -> Callable[[L], L]:
    """Register a loop. phases: those in which ranks may die, each with `@step` if not in the usual one.

    told: phase (or several, or "all") -> a word or words.
    """

    def register(loop: L) -> L:
        assert name not in CARDS, name
        places: dict[str, int] = {}
        for part in phases.split():
            phase, _, step = part.partition("@")
            assert phase not in places, f"{name} dies twice in {phase}: that takes two recipes"
            places[phase] = int(step or PHASES[phase])
        words: dict[str, Words] = {}
        for where, which in (told or {}).items():
            for phase in where.split():
                words[phase] = (which,) if isinstance(which, str) else which
        CARDS[name] = loop.card = Card(name, what, loop, places, words, **more)
        return loop

    return register
