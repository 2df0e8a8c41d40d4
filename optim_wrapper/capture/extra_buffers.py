"""Buffers of modules among the extras (averaged models), which may differ by rank as the model's own do.

A BatchNorm's statistics are each rank's own until the next broadcast, and so is an average's copy of them. They are
taken into the black box in each step, like the model's, and each rank gets its own back. What one rank's extras are
otherwise, all ranks get.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.optim.swa_utils import AveragedModel

from lastwords.optim_wrapper.capture.rank_local import SMALL_BUFFER_BYTES_MAX
from lastwords.optim_wrapper.capture.source import EXTRA_BUFFER_PREFIX
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.state.extras import Extras
from lastwords.optim_wrapper.tensors.tensor_bytes import spec_of
from lastwords.processor.black_box import BlackBox, RegionCopy, RegionSpec
from lastwords.torch_private import NormBase


class _Buffer(NamedTuple):
    """extra, key: its name among the extras, and in their state_dict(). table, place: where the module has it."""

    extra: str
    key: str
    table: dict[str, torch.Tensor | None]
    place: str
    region: RegionSpec


class ExtraBuffers:
    """A `Capture` of them. A large buffer that is no statistic of a normalisation is left to the extras."""

    def __init__(self, extras: Extras, ledger: Ledger | None = None) -> None:
        self._buffers = [one for name, module in extras.modules() for one in _buffers_of(name, module)]
        self._targets: dict[int, list[torch.Tensor]] = {}
        self.ledger = ledger or Ledger()

    def of(self, extra: str) -> frozenset[str]:
        """Keys of the buffers of one extra, as its state_dict() calls them."""
        return frozenset(one.key for one in self._buffers if one.extra == extra)

    @property
    def regions(self) -> tuple[RegionSpec, ...]:
        """What each copy needs room for."""
        return tuple(one.region for one in self._buffers)

    def bind(self, box: BlackBox) -> None:
        """Prepare the captures into each step slot of `box`."""
        self._targets = {
            slot: [
                torch.frombuffer(box.region(slot, one.region.name), dtype=tensor.dtype).reshape(one.region.shape)
                for one, tensor in self._live()
            ]
            for slot in box.step_slots
        }

    def refresh(self) -> None:
        """Buffers are looked at when they are copied."""

    def capture(self, slot: int) -> None:
        """Take the buffers into an open step slot."""
        for (one, tensor), target in zip(self._live(), self._targets.get(slot, ()), strict=False):
            if (tensor.dtype, tensor.shape) == (target.dtype, target.shape):
                target.copy_(tensor.detach())
            else:
                self.ledger.tell(
                    f"extras[{one.extra!r}][{one.key!r}] has changed shape or dtype since the start and is not saved"
                )

    def restore(self, regions: Mapping[str, RegionCopy]) -> tuple[str, ...]:
        """Put this rank's own over those that came with the extras. Returns why the outcome is not exact."""
        missing = []
        for one, tensor in self._live():
            copy = regions.get(one.region.name)
            if copy is None or (copy.dtype, tuple(copy.shape)) != (one.region.dtype, one.region.shape):
                missing.append(f"extras[{one.extra!r}][{one.key!r}]")
                continue
            with torch.no_grad():
                data = torch.frombuffer(bytearray(copy.data), dtype=tensor.dtype)
                tensor.copy_(data.reshape(one.region.shape))
        if not missing:
            return ()
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return (f"this rank's own {missing[0]}{more} were not saved, or with a different shape or dtype than here",)

    # ------------------------------------------------------------------ inside

    def _live(self) -> list[tuple[_Buffer, torch.Tensor]]:
        """The buffers as they are now; one that is None has gone and stands as nothing of its form."""
        empty = torch.empty(0)
        return [(one, empty if (tensor := one.table.get(one.place)) is None else tensor) for one in self._buffers]


def _buffers_of(extra: str, module: torch.nn.Module) -> list[_Buffer]:
    found = []
    saved = module.state_dict().keys()
    for prefix, inside in module.named_modules():
        for place, tensor in inside._buffers.items():
            key = f"{prefix}.{place}" if prefix else place
            counted = isinstance(inside, AveragedModel)  # how many were averaged is the same everywhere
            if (
                tensor is None
                or counted
                or key not in saved
                or tensor.layout is not torch.strided
                or not tensor.numel()
            ):
                continue
            if isinstance(inside, NormBase) or tensor.nbytes <= SMALL_BUFFER_BYTES_MAX:
                region = RegionSpec(
                    f"{EXTRA_BUFFER_PREFIX}{extra}/{key}", spec_of(key, tensor).dtype, tuple(tensor.shape)
                )
                found.append(_Buffer(extra, key, inside._buffers, place, region))
    return found
