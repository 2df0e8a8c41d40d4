"""The tests' training script: `python -m tests.integration.training PLAN.json`, one process per rank.

It trains what the plan's layout says, with lastwords or (mode "plain") with torch alone, comes by every phase
that a fault may wait in, and records each step. A reference run and a resumed run differ in nothing else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from tests.integration import gpu, sabotage
from tests.integration.faults import Faults, restart_count
from tests.integration.network import Net, make_loader
from tests.integration.plan import Plan
from tests.integration.recording import Recording, digest, floats, random_streams

GROUP_TIMEOUT_S = 120
LEARNING_RATE = 3e-3

Batch = tuple[torch.Tensor, ...]


class PhasedAdamW(torch.optim.AdamW):
    """AdamW that comes by the phases "update" and "update_end" where it has begun and finished to write."""

    faults: Faults

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One AdamW step; nothing else unless a fault is armed."""
        self.faults.at("update")
        result = super().step(closure)
        self.faults.at("update_end")
        return result


class Trainer:
    """Model, optimizer, loader and the body of the training loop of one rank."""

    uses_scaler = True
    net: Any
    model: nn.Module
    inner: torch.optim.Optimizer
    loader: DataLoader[Batch]

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.layout, self.rank = plan, plan.layout, rank
        layout = plan.layout
        self.faults = faults = Faults(plan, rank)
        self.replica = rank
        torch.manual_seed(layout.seed)
        self.build()
        faults.write_garbage = self._write_garbage
        faults.flip = self._flip
        self.optimizer: torch.optim.Optimizer = self.inner
        if plan.mode == "tft":
            import lastwords

            self.optimizer = lastwords.OptTFTWrapper(self.inner)
        self.extras: dict[str, Any] = {}
        self.scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        if layout.scheduler:
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=layout.steps)
            self.extras["scheduler"] = self.scheduler
        self.scaler: torch.amp.GradScaler | None = None
        if layout.inf_steps is not None and self.uses_scaler:
            self.scaler = torch.amp.GradScaler(layout.device, init_scale=256.0, growth_interval=2)
            self.extras["scaler"] = self.scaler
        self.recording = Recording(Path(plan.directory), rank, self.net, self.inner)
        seed = 1000 * layout.seed + self.replica + layout.dropout_seed
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.epoch = 0
        self.micro = 0
        self.values: dict[str, str] = {}

    def build(self) -> None:
        """Network, model, optimizer and loader; `replica` seeds the random numbers."""
        layout, faults = self.layout, self.faults
        self.net = Net(layout, faults).to(layout.device)
        options: dict[str, Any] = {} if layout.broadcast_buffers else {"broadcast_buffers": False}
        if layout.static_graph:
            options["static_graph"] = True
        if layout.find_unused:
            options["find_unused_parameters"] = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch has another name for broadcast_buffers
            self.model = DDP(self.net, **options)
        decayed = [p for p in self.net.parameters() if p.requires_grad and p.ndim > 1]
        others = [p for p in self.net.parameters() if p.requires_grad and p.ndim <= 1]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        self.inner = optimizer = PhasedAdamW(groups, lr=LEARNING_RATE)
        type(optimizer).faults = faults  # the test, and no state of the optimizer
        self.loader = make_loader(layout, self.rank, self.on_epoch_start)

    def parameter(self) -> torch.Tensor:
        """What garbage is written over."""
        return torch.as_tensor(self.net.second.weight)

    def _write_garbage(self) -> None:
        with torch.no_grad():
            self.parameter().add_(1.0)

    def _flip(self) -> None:
        with torch.no_grad():
            self.parameter().neg_()

    def on_epoch_start(self) -> None:
        self.faults.step = self.epoch * self.layout.steps_per_epoch + 1
        self.faults.is_last_micro = True
        self.faults.at("epoch_start")

    def set_epoch(self, epoch: int) -> None:
        """Of a loop of one's own: what DistributedSampler wants to be told; 1-based."""
        sampler = self.loader.sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch - 1)

    def batches(self) -> Iterator[tuple[int, int, Batch]]:
        """Epoch, step in the epoch and batch, from the beginning, without lastwords."""
        for epoch in range(1, self.layout.epochs + 1):
            self.set_epoch(epoch)
            for index, batch in enumerate(self.loader):
                yield epoch, index // self.layout.accumulate + 1, batch

    def train_batch(self, epoch: int, step_in_epoch: int, batch: Batch) -> bool:
        """The body of the loop; False asks the loop to break. A step ends with every `accumulate`-th call."""
        layout, faults = self.layout, self.faults
        self.epoch = epoch
        step = (epoch - 1) * layout.steps_per_epoch + step_in_epoch
        is_last = self.micro == layout.accumulate - 1
        faults.step, faults.micro, faults.is_last_micro = step, self.micro, is_last
        faults.at("body")
        batch = tuple(part.to(layout.device) for part in batch)
        self.values[f"batch{self.micro}"] = f"{digest(batch[0])} {digest(batch[1])}"
        loss = self.forward_backward(batch)
        self.values[f"loss{self.micro}"] = floats([loss.item()])
        self.micro = 0 if is_last else self.micro + 1
        if is_last:
            self.finish_step(loss.detach().clone())
            self.recording.write_step(step, epoch, self.values, self.extras)
            self.values = {}
            faults.at("end")
        return not faults.leave

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """The loss; the gradients are there when it returns."""
        layout, faults = self.layout, self.faults
        model: Any = self.model
        quiet = model.no_sync() if layout.no_sync and not faults.is_last_micro else contextlib.nullcontext()
        with quiet:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1]) / layout.accumulate
            if layout.inf_steps is not None and faults.step in layout.inf_steps:
                loss = loss * float("inf")
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss

    def finish_step(self, loss: torch.Tensor) -> None:
        """Everything after the last backward of a step."""
        layout, faults = self.layout, self.faults
        self.update()
        faults.at("after_update")
        if layout.log_reduce == "before":
            self.log_mean(loss)
        if self.scheduler is not None:
            self.scheduler.step()
        if layout.log_reduce == "after":
            self.log_mean(loss)
        faults.at("logged")
        self.optimizer.zero_grad()

    def update(self) -> None:
        """Clip, and let the optimizer write."""
        if self.layout.clip:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.faults.at("before_step")
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def log_mean(self, loss: torch.Tensor) -> None:
        """The collective between update and step end that many loops have."""
        dist.all_reduce(loss)
        self.values["logged"] = floats([loss.item()])

    def train_plain(self) -> None:
        """The uninterrupted run: torch alone."""
        for epoch, step, batch in self.batches():
            if not self.train_batch(epoch, step, batch):
                break

    def train_protected(self) -> None:
        """The run with lastwords."""
        import lastwords

        plan = self.plan
        more = self.more_settings()
        if plan.fallback:
            more["fallback_path"] = plan.fallback
        if plan.copy:
            more["copy"] = plan.copy
            sabotage.copy_beside(self.faults)
        if plan.bad_extra:
            self.extras["odd"] = {"thing": object()}
        tft = lastwords.TFTRegister(
            plan.ctrl_rank,
            "127.0.0.1",
            plan.ctrl_port,
            plan.checkpoints,
            model=self.model,
            optimizer=self.optimizer,
            extras=self.extras,
            data=plan.data,
            **more,
        )
        if plan.context:
            with tft:
                self.run_registered(tft)
        else:
            tft.start()
            self.run_registered(tft)
            tft.stop()

    def more_settings(self) -> dict[str, Any]:
        """What else TFTRegister is told."""
        return {}

    def write_whole(self, moment: str) -> None:
        """The plan's `whole`: of parallel layouts only."""
        raise NotImplementedError

    def run_registered(self, tft: Any) -> None:
        """What stands inside `with tft:`."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        shared = sorted({line.split()[5] for line in maps if "/dev/shm/lastwords-" in line})
        (Path(self.plan.directory) / f"rank_{self.rank}.shm").write_text("\n".join(shared))
        if any(fault.phase.startswith("slot_") for fault in self.plan.faults):
            sabotage.watch_slots(self.faults)
        tft.on_leave(Path(self.plan.directory, f"rank_{self.rank}.left").touch)
        self.faults.frozen = lambda: sabotage.is_frozen(tft)
        self.faults.told = lambda: sabotage.is_told(tft)
        self.faults.at("before_loop")
        plan = self.plan
        if plan.config:
            from lastwords import CheckpointConfig

            tft.every(CheckpointConfig(**plan.config))
        elif plan.every or plan.every_s:
            kept = {"keep_per_minutes": plan.keep_minutes} if plan.keep_minutes else {"keep": plan.keep}
            tft.every(steps=plan.every, seconds=plan.every_s, **kept)
        self.faults.save = tft.save
        point = None
        if self.plan.recover or restart_count():
            point = tft.resume(**({"missing_ok": True} if self.plan.missing_ok else {}))
        if point is not None:
            where: dict[str, Any] = {"epoch": point.epoch, "step_in_epoch": point.step, "step": point.global_step}
            where |= {"exact": point.exact, "reasons": point.reasons}
            self.recording.write("resumed", **where, values=self.recording.state(), streams=random_streams())
            if self.plan.whole:
                self.write_whole("resumed")
        if self.plan.api == "steps":
            for epoch, step, batch in tft.steps(
                self.loader, epochs=self.layout.epochs, accumulate=self.layout.accumulate
            ):
                if not self.train_batch(epoch, step, batch):
                    break
        else:
            self.train_own_loop(tft, point)
        if self.plan.whole:
            self.write_whole("end")
        self.faults.is_last_micro = True
        self.faults.at("left")

    def train_own_loop(self, tft: Any, point: Any) -> None:
        """A loop of the user's own: `step_end` once a step, and its own way back to where it was in the data."""
        done = 0 if point is None else point.global_step
        streams = None if point is None else get_streams()
        for epoch, step, batch in self.batches():
            if (epoch - 1) * self.layout.steps_per_epoch + step <= done:
                assert streams is not None
                set_streams(streams)  # fetching this batch again has moved them
                continue
            more = self.train_batch(epoch, step, batch)
            if self.micro == 0:
                tft.step_end(epoch, step)
            if not more:
                break


def get_streams() -> tuple[Any, Any, torch.Tensor]:
    """The random streams as they are now."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_streams(streams: tuple[Any, Any, torch.Tensor]) -> None:
    """Put the random streams back."""
    random.setstate(streams[0])
    np.random.set_state(streams[1])
    torch.set_rng_state(streams[2])


def take_output(directory: Path, rank: int) -> None:
    """Append stdout and stderr to files of this rank's own, as the forking launcher does."""
    for number, stream in ((1, "out"), (2, "err")):
        file = os.open(directory / f"rank_{rank}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)


def main(arguments: list[str], make: Callable[[Plan, int], Trainer] = Trainer) -> None:
    """Train as the plan says; the exit code is the interpreter's."""
    plan = Plan.load(Path(arguments[0])).of_rank(int(os.environ["RANK"]))
    rank = int(os.environ["RANK"])
    if plan.redirect:
        take_output(Path(plan.directory), rank)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    if plan.layout.device != "cpu":
        gpu.set_up(rank)
    dist.init_process_group(plan.layout.backend, timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    sabotage.apply(plan, rank)
    trainer = make(plan, rank)
    if plan.mode == "plain":
        trainer.train_plain()
    else:
        trainer.train_protected()
    trainer.recording.write("done", values={**trainer.recording.state()})
    dist.destroy_process_group()
    if plan.mode == "plain":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the interpreter's end is not what reference runs are for, and takes longer than they do


if __name__ == "__main__":
    main(sys.argv[1:])
