"""Loaders that accelerate has prepared: they fetch a batch more than they have given."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler, get_sampler

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.loop.batches import Batches


def batches_of(loader: Any) -> Batches:
    """What a prepared loader draws its batches from, from now on: for `local_extras`. Called once, before an iterator.

    ConfigError for one that a rank fetches for all of them.
    """
    if not isinstance(loader, DataLoaderShard):
        raise ConfigError(
            f"the training loader is a {type(loader).__name__} and not a DataLoaderShard of accelerate's, so its place "
            "in the data is not known: prepare it, and use dispatch_batches=False for an IterableDataset (in a "
            "Trainer: accelerator_config={'dispatch_batches': False})"
        )
    sampler = get_sampler(loader)
    if isinstance(sampler, SeedableRandomSampler) and sampler.generator is None:
        sampler.generator = torch.Generator()  # as its first iterator would, which is too late to be put back
    batches = Batches(loader.base_dataloader, ahead=True)
    loader.base_dataloader.__iter__ = batches.__iter__
    return batches
