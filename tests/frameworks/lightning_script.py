"""A script with a Trainer of Lightning, as a user has it: validation, logs, checkpoints, early stopping."""

from __future__ import annotations

import json
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from tests.frameworks.script import CASE, DIRECTORY, RANK, Texts, die, ended, final, lightning_callbacks, masked

RANKS, EPOCHS, STEPS, BATCH = 2, 3, 6, 4
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
        self.rest = nn.Sequential(nn.Dropout(0.2), nn.BatchNorm1d(12), nn.Linear(16, 32))

    def loss_of(self, batch: Any) -> torch.Tensor:
        scores = self.rest(self.words(batch["input_ids"])).transpose(1, 2)
        return nn.functional.cross_entropy(scores, batch["labels"])

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.loss_of(batch)
        die(done(self.trainer) + 1, "fwd")
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        if not TWO:
            return loss
        self.manual_backward(loss)
        for one in self.optimizers():  # type: ignore[union-attr]
            one.step()
            one.zero_grad()
            die(done(self.trainer) + 1, "between")
        return None

    def validation_step(self, batch: Any, number: int) -> None:
        die(done(self.trainer), "evaluating")
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if TWO:
            return [torch.optim.AdamW(self.words.parameters(), 1e-2), torch.optim.SGD(self.rest.parameters(), 1e-2)]
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        kind = "epoch" if "by epoch" in CASE else "step"
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1 if kind == "epoch" else 3, 0.8),
                "interval": kind,
            },
        }


class Probe(pl.Callback):
    """Looks at each step, and dies where the plan says so."""

    def on_train_batch_end(self, trainer: Any, module: Any, *of: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready % ACCUMULATE == 0:
            step = done(trainer)
            die(step, "win")
            rates = [one["lr"] for optimizer in trainer.optimizers for one in optimizer.param_groups]
            states = [one.state_dict()["state"] for one in trainer.optimizers]
            ended(step, module.state_dict(), states, rates, float(trainer.callback_metrics.get("val_loss", 0.0)))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        die(done(trainer), "evaluated")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        die(done(trainer), "epoch")
        with (DIRECTORY / f"epochs-{RANK}").open("a") as file:
            file.write(f"{trainer.current_epoch} {float(trainer.callback_metrics['loss_epoch'])!r}\n")


def main() -> None:
    pl.seed_everything(7)
    callbacks: list[Any] = [
        EarlyStopping("val_loss", patience=5),
        ModelCheckpoint(DIRECTORY / "out", monitor="val_loss", save_top_k=2, save_last=True),
    ]
    callbacks += [*lightning_callbacks(), Probe()]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        val_check_interval=6 if not TWO else 1.0,
        default_root_dir=DIRECTORY,
        logger=False,
        enable_progress_bar="bar" in CASE,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    collate = masked if "draws" in CASE else None
    train = DataLoader(
        Texts(RANKS * STEPS * ACCUMULATE * BATCH),
        BATCH,
        shuffle=True,
        collate_fn=collate,
        num_workers=2 if "workers" in CASE else 0,
    )
    module = Module()
    more: Any = {"ckpt_path": DIRECTORY / "out" / "last.ckpt"} if "resumes by itself" in CASE else {}
    for _ in range(2 if "twice" in CASE else 1):
        trainer.fit(module, train, DataLoader(Texts(16), BATCH), **more)
    best = [float(v) for v in trainer.checkpoint_callback.best_k_models.values()]  # type: ignore[union-attr]
    (DIRECTORY / f"log-{RANK}").write_text(json.dumps(best))
    final(module.state_dict(), torch.get_rng_state())


if __name__ == "__main__":
    main()
