"""A classifier trained with Lightning's Trainer. It knows nothing of lastwords: run it with --auto.

lastwords run --auto --standalone --nproc-per-node 2 examples/lightning_fit.py
"""

import argparse
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    """Of points in a cube of 16 dimensions, in 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics.get("val_loss", float("nan"))
        self.print(f"step {self.global_step}: val_loss {loss:.3f}", flush=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="lightning-out")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=int(os.environ.get("WORLD_SIZE", "2")))
    parsed = parser.parse_args()
    pl.seed_everything(0)
    points = torch.rand(1200, 16)
    classes = (points[:, :2] > 0.5).long() @ torch.tensor([1, 2])
    train, val = TensorDataset(points[:1000], classes[:1000]), TensorDataset(points[1000:], classes[1000:])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=parsed.ranks,
        strategy="ddp",
        max_epochs=parsed.epochs,
        default_root_dir=parsed.out,
        val_check_interval=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            EarlyStopping("val_loss", patience=10),
            ModelCheckpoint(parsed.out, monitor="val_loss", enable_version_counter=False),
        ],
    )
    trainer.fit(Classifier(), DataLoader(train, 20, shuffle=True), DataLoader(val, 50))


if __name__ == "__main__":
    main()
