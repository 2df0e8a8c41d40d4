"""Loaders that accelerate has prepared: they fetch a batch more than they have given."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import data_loader

from lastwords import Batches, ConfigError
from lastwords.integrations import pins

VERSIONS = ">=1.15,<1.16"

PINNED = {
    "accelerate.data_loader:DataLoaderShard": "3df4701cc83c816d",
    "accelerate.data_loader:SeedableRandomSampler": "7873137e94ae17af",
    "accelerate.data_loader:get_sampler": "b77e0470db836a46",
    "accelerate.optimizer:AcceleratedOptimizer": "c7b5f604565cd38b",
    "accelerate.optimizer:patch_optimizer_step": "3ac7f79af6904fd1",
    "accelerate.accelerator:Accelerator.backward": "f12f7bf1be89d8cb",
}
"""What is replaced here, or read, and what lies around it."""


def check() -> None:
    """ConfigError if accelerate is not one that this was made for."""
    pins.check("accelerate", VERSIONS, PINNED)


def set_in_each_epoch(loader: Any) -> list[str]:
    """For `forget`: what a loop that calls the prepared loader's `set_epoch` as an epoch starts sets there itself."""
    return ["loader*.sampler.epoch"] * isinstance(data_loader.get_sampler(loader), data_loader.SeedableRandomSampler)


def batches_of(loader: Any) -> Batches:
    """What a prepared loader draws its batches from, from now on: for `local_extras`. Called once, before an iterator.

    ConfigError for one that a rank fetches for all of them.
    """
    if not isinstance(loader, data_loader.DataLoaderShard):
        raise ConfigError(
            f"the training loader is a {type(loader).__name__} and not a DataLoaderShard of accelerate's, so its place "
            "in the data is not known: prepare it, and use dispatch_batches=False for an IterableDataset (in a "
            "Trainer: accelerator_config={'dispatch_batches': False})"
        )
    sampler = data_loader.get_sampler(loader)
    if isinstance(sampler, data_loader.SeedableRandomSampler) and sampler.generator is None:
        sampler.generator = torch.Generator()  # as its first iterator would, which is too late to be put back
    batches = Batches(ahead=True)
    batches.given_by = loader
    batches.stand_in(loader.base_dataloader)
    return batches
