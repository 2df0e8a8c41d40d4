"""A script with a Trainer of Lightning, as a user has it: validation, logs, checkpoints, early stopping."""

from __future__ import annotations

import json
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torchmetrics import MeanMetric

from tests.frameworks.script import (
    CASE,
    DIRECTORY,
    RANK,
    RANKS,
    Texts,
    checkpoints,
    die,
    digest,
    end,
    ended,
    final,
    lightning_callbacks,
    masked,
    shown,
    telling,
)

EPOCHS, STEPS, BATCH = 3, 6, 4
VARIANTS: dict[str, dict[str, Any]] = {
    "floats": {"limit_train_batches": 0.75, "val_check_interval": 0.25, "gradient_clip_val": 0.5},
    "second epochs": {"val_check_interval": 1.0, "check_val_every_n_epoch": 2},
    "overfits": {"overfit_batches": 4, "val_check_interval": 1.0},
    "timed": {"max_time": {"hours": 2}, "precision": "bf16-mixed"},
    "schedules": {"accumulate_grad_batches": 1},
    "stream": {"limit_train_batches": 1.0},
    "max steps": {"max_epochs": None, "max_steps": 18},
    "across": {"val_check_interval": 10, "check_val_every_n_epoch": None},
}
"""Arguments of a Trainer, by a word of the case."""
TWO = "two optimizers" in CASE
ACCUMULATE = 1 if TWO else 2


def done(trainer: Any) -> int:
    """Steps."""
    return int(trainer.global_step) // (2 if TWO else 1)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not TWO
        self.words = nn.Embedding(32, 16)
        norm = nn.LayerNorm(16) if CASE == "averaging" else nn.BatchNorm1d(12)
        self.rest = nn.Sequential(nn.Dropout(0.2), norm, nn.Linear(16, 32))
        self.mean, self.losses, self.scale = MeanMetric(), [0.0], 1.0
        self.means = nn.ModuleList([MeanMetric(), MeanMetric()])

    def on_train_start(self) -> None:
        if "hook draws" in CASE:
            torch.rand(3)

    def on_train_epoch_start(self) -> None:
        if "scales" in CASE:
            self.scale *= 0.9
            die(done(self.trainer), "begin")

    def on_train_batch_start(self, batch: Any, number: int) -> int | None:
        return -1 if "leaves epochs" in CASE and number == 7 - self.current_epoch else None

    def loss_of(self, batch: Any) -> torch.Tensor:
        scores = self.rest(self.words(batch["input_ids"])).transpose(1, 2)
        return self.scale * nn.functional.cross_entropy(scores, batch["labels"])

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.loss_of(batch)
        die(done(self.trainer) + 1, "fwd")
        if "counts" in CASE:
            self.losses.append(float(loss.detach()))
            loss = loss * (1 + 0.01 * sum(self.losses[-20:]))
        if "metric" in CASE:
            self.mean.update(loss.detach())
            self.log("mean", self.mean, on_step=False, on_epoch=True)
        if "nested metrics" in CASE:
            for place, one in enumerate(self.means):
                one.update(loss.detach() * place)
                self.log(f"mean {place}", one, on_step=False, on_epoch=True)
        self.trainer.should_stop = "stops" in CASE and self.trainer.global_step == 8
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        if not TWO:
            return loss
        self.manual_backward(loss)
        for place, one in enumerate(self.optimizers()):  # type: ignore[arg-type]
            if place and "two backwards" in CASE:
                self.zero_grad()
                die(done(self.trainer) + 1, "half")
                self.manual_backward(self.loss_of(batch))
            one.step()
            one.zero_grad()
            die(done(self.trainer) + 1, "between")
        self.zero_grad()
        return None

    def validation_step(self, batch: Any, number: int) -> None:
        die(done(self.trainer), "evaluating")
        noise = torch.rand(()) if "draws" in CASE else 0.0
        self.log("val_loss", self.loss_of(batch) + noise, sync_dist=True)

    def test_step(self, batch: Any, number: int) -> None:
        self.log("test_loss", self.loss_of(batch), sync_dist=True)

    def predict_step(self, batch: Any, number: int) -> torch.Tensor:
        scores: torch.Tensor = self.rest(self.words(batch["input_ids"]))
        return scores

    def configure_optimizers(self) -> Any:
        if TWO:
            return [torch.optim.AdamW(self.words.parameters(), 1e-2), torch.optim.SGD(self.rest.parameters(), 1e-2)]
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        if "one cycle" in CASE:
            total = self.trainer.estimated_stepping_batches
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=int(total))
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]
        kind = "epoch" if "by epoch" in CASE else "step"
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1 if kind == "epoch" else 3, 0.8),
                "interval": kind,
            },
        }


class Counts(pl.Callback):
    """State in plain attributes, on which the rate depends, some of which changes between two steps."""

    def __init__(self) -> None:
        self.seen, self.validated, self.lowest = 0, 0, {"loss": float("inf")}

    def on_train_batch_start(self, trainer: Any, module: Any, *of: Any) -> None:
        self.seen += 1
        for group in trainer.optimizers[0].param_groups:
            group["weight_decay"] = 0.01 * self.seen + self.validated + min(self.lowest["loss"], 10)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.validated += 1
        self.lowest["loss"] = min(self.lowest["loss"], float(trainer.callback_metrics["val_loss"]))


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Texts without a length, a part of them for each rank."""

    def __init__(self, count: int) -> None:
        self.texts = Texts(count)

    def __iter__(self) -> Any:
        yield from (self.texts[number] for number in range(RANK, len(self.texts), RANKS))


class Own(Sampler[int]):
    """Draws from numpy, and remembers how often it was asked."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        self.asked += 1
        yield from (np.random.default_rng(self.asked).permutation(2 * self.count)[RANK::2]).tolist()


class Data(pl.LightningDataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader, self.handed_out = loader, 0

    def train_dataloader(self) -> Any:
        return self.loader

    def val_dataloader(self) -> Any:
        return DataLoader(Texts(16), BATCH)

    def on_after_batch_transfer(self, batch: Any, number: int) -> Any:
        self.handed_out += int(self.trainer.training)  # type: ignore[union-attr]
        return {**batch, "input_ids": batch["input_ids"].roll(self.handed_out)}


NEWEST = [0]
AVERAGING: list[Any] = [EMAWeightAveraging(decay=0.9)] if "averaging" in CASE else []


class Probe(pl.Callback):
    """Looks at each step, and dies where the plan says so."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        NEWEST[0] = done(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, *of: Any) -> None:
        step, bar = done(trainer), trainer.progress_bar_callback
        if bar is not None and bar.is_enabled:
            tqdm, metrics = "bar" in CASE, trainer.progress_bar_metrics
            now = bar.train_progress_bar
            shown(now.desc if tqdm else now.description, now.n if tqdm else now.completed, now.total, metrics)
        if step > NEWEST[0]:
            die(step, "win")
            rates = [one["lr"] for optimizer in trainer.optimizers for one in optimizer.param_groups]
            states = [one.state_dict()["state"] for one in trainer.optimizers]
            NEWEST[0] = step
            ended(
                step,
                AVERAGING[0]._average_model.state_dict() if AVERAGING else [],
                module.state_dict(),
                states,
                rates,
                float(trainer.callback_metrics.get("val_loss", 0.0)),
            )

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        die(done(trainer), "saving")
        if [*(DIRECTORY / "out").glob(f"*step={trainer.global_step}.ckpt")]:
            die(done(trainer), "saved")  # the newest one: last.ckpt comes after it

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        die(done(trainer), "evaluated")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        die(done(trainer), "epoch")
        with (DIRECTORY / f"epochs-{RANK}").open("a") as file:
            file.write(f"{trainer.current_epoch} {float(trainer.callback_metrics['loss_epoch'])!r}\n")


def main() -> None:
    pl.seed_everything(7)
    callbacks: list[Any] = [
        EarlyStopping("val_loss", *((100.0, 3) if "early" in CASE else (0.0, 5))),
        ModelCheckpoint(DIRECTORY / "out", monitor="val_loss", save_top_k=2, save_last=True),
    ]
    callbacks += [
        *AVERAGING,
        *([StochasticWeightAveraging(1e-2, swa_epoch_start=1)] if "swa" in CASE else []),
        *([GradientAccumulationScheduler({0: 1, 1: 2})] if "schedules" in CASE else []),
        *([LearningRateMonitor()] if "csv" in CASE else []),
        *([Counts()] if "counts" in CASE else []),
        *([TQDMProgressBar()] if "bar" in CASE else []),
        *([RichProgressBar(refresh_rate=1)] if "rich" in CASE else []),
    ]
    callbacks += [*lightning_callbacks(), Probe()]
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": RANKS,
        "strategy": "ddp",
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": ACCUMULATE,
        "val_check_interval": 6 if not TWO else 1.0,
        "default_root_dir": DIRECTORY,
        "logger": CSVLogger(DIRECTORY, flush_logs_every_n_steps=1) if "csv" in CASE else False,
        "log_every_n_steps": 1,
        "enable_progress_bar": "bar" in CASE or "rich" in CASE,
        "enable_model_summary": False,
        "callbacks": callbacks,
    }
    for word, values in VARIANTS.items():
        arguments |= values if word in CASE else {}
    trainer = pl.Trainer(**arguments, use_distributed_sampler="own sampler" not in CASE)
    collate = masked if "draws" in CASE else None
    count = RANKS * STEPS * ACCUMULATE * BATCH
    train: Any = DataLoader(
        Stream(count) if "stream" in CASE else Texts(count),
        BATCH,
        shuffle=None if "stream" in CASE else "own sampler" not in CASE,
        sampler=Own(count // RANKS) if "own sampler" in CASE else None,
        collate_fn=collate,
        num_workers=2 if "workers" in CASE else 0,
    )
    module = Module()
    more: Any = {"ckpt_path": DIRECTORY / "out" / "last.ckpt"} if "resumes by itself" in CASE else {}
    for _ in range(2 if "twice" in CASE else 1):
        if "module data" in CASE:
            trainer.fit(module, datamodule=Data(train), **more)
        else:
            with telling():
                trainer.fit(module, train, DataLoader(Texts(16), BATCH), **more)
    checkpoints(DIRECTORY / "out")
    best = [float(v) for v in trainer.checkpoint_callback.best_k_models.values()]  # type: ignore[union-attr]
    if "csv" in CASE:
        best += [one["test_loss"] for one in trainer.test(module, DataLoader(Texts(8), BATCH))]
    if not CASE:
        best.append(digest(trainer.predict(module, DataLoader(Texts(8), BATCH))))
    (DIRECTORY / f"log-{RANK}").write_text(json.dumps(best))
    final(module.state_dict(), torch.get_rng_state())
    end()


if __name__ == "__main__":
    main()
