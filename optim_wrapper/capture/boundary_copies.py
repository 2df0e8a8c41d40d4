"""Copies, taken at each step's end, of tensors that something else than the optimizer writes.

By the time of an incident such a tensor (a momentum encoder's, a codebook, weights that a second backward pass
perturbs) has moved on, and there is no rank that still has what it was. So from the first time that one is seen to
move, it is copied here. The writer of its unit saves the copy in the tensor's place. Small parameters go into the
black box as well, as this rank's own: they may differ from rank to rank, since nothing keeps them alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import torch
import xxhash

from lastwords import clock
from lastwords.errors import MismatchError
from lastwords.optim_wrapper.capture.box_tensors import BoxTensors, Kept, region_dtype, tensor_of
from lastwords.optim_wrapper.capture.witness import StateName
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of, overwrite, problem_of
from lastwords.processor.black_box import RegionCopy
from lastwords.sharding.dtensor import local_of
from lastwords.torch_private import foreach_copy

_log = logging.getLogger(__name__)

BOX_EACH_BYTES_MAX, BOX_BYTES_MAX = 1 << 20, 16 << 20
"""Of one parameter, and of all: what goes into the black box, which has room for four copies. More is kept in host
memory only, and taken to be the same on every rank; that it is shows in the words that are looked at of it."""

MUCH_BYTES = 64 << 20
"""From here on the first line about copies is a warning."""

PREFIX = "model/"


class BoundaryCopies:
    """Keeps them in host memory for the writer, and small parameters in `tensors` too. Training thread, except `at`."""

    def __init__(self, tensors: BoxTensors | None = None) -> None:
        self.tensors = tensors or BoxTensors()
        self._live: dict[StateName, torch.Tensor] = {}
        self._host: dict[StateName, torch.Tensor] = {}
        self._resized: set[StateName] = set()
        self._step = -1
        self._untold: list[StateName] = []

    def __contains__(self, name: StateName) -> bool:
        return name in self._live

    def __bool__(self) -> bool:
        return bool(self._live)

    @property
    def names(self) -> list[StateName]:
        """Names of all."""
        return [*self._live]

    @property
    def _boxed(self) -> dict[StateName, Kept]:
        every = self.tensors.of_kind(PREFIX).items()
        return {StateName("model", name): kept for name, kept in every if not kept.given_up}

    @property
    def unboxed(self) -> list[StateName]:
        """Names of those that no black box has: they have to be the same on every rank."""
        boxed = self._boxed
        return [name for name in self._live if name not in boxed]

    def own(self) -> frozenset[str]:
        """Names of the parameters that each rank has for itself."""
        return frozenset(name.name for name in self._boxed)

    @property
    def late(self) -> list[StateName]:
        """Names of those that only a black box's committed copies have."""
        return [name for name, kept in self._boxed.items() if kept.region.committed_only]

    def add(self, tensors: Mapping[StateName, torch.Tensor], frozen: Callable[[StateName], bool]) -> None:
        """Copy these as well from now on."""
        known = self._live.keys() | self._resized
        new = {name: tensor for name, tensor in tensors.items() if name not in known}
        room = BOX_BYTES_MAX - sum(kept.region.nbytes for kept in self._boxed.values())
        for name, tensor in new.items():
            self._live[name] = tensor
            small = region_dtype(tensor.dtype) and tensor.nbytes <= min(BOX_EACH_BYTES_MAX, room)
            if name.kind == "model" and small:
                late = not frozen(name)  # else no update changes it
                region = PREFIX + name.name
                self.tensors.add(Kept(region, f"the {name}", self._live, name, late=late, optional=True, alone=True))
                room -= tensor.nbytes
        self._untold += new

    def follow(self, tensor_of: Callable[[StateName], torch.Tensor | None]) -> None:
        """Tensors may have been replaced by others; what is gone, or has another form, is copied no more."""
        for name in [*self._live]:
            tensor = tensor_of(name)
            if tensor is self._live[name]:
                continue
            if tensor is None or not _same_form(tensor, self._live[name]):
                self._leave_out(name)
                continue
            self._live[name] = tensor

    def _leave_out(self, name: StateName) -> None:
        del self._live[name]
        self._host.pop(name, None)
        if name.kind == "model":
            self.tensors.remove(PREFIX + name.name)

    # ------------------------------------------------------------------ host memory

    def take(self, step: int) -> None:
        """All of them, as they are at the end of `step`."""
        self._step = -1
        live = self._live
        for name in [name for name, host in self._host.items() if not _same_form(host, live[name])]:
            self._leave_out(name)  # `resize_` has given it another form, and will again: it is named, not copied
            self._resized.add(name)
        tensors = {name: tensor for name, tensor in live.items() if not problem_of(tensor)}
        for name in self._host.keys() - tensors.keys():
            del self._host[name]  # freed for now: it is named if it is to be saved
        if not tensors:
            return
        began_s = clock.mono_s()
        for name, tensor in tensors.items():
            if name not in self._host:
                self._host[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        with torch.inference_mode():
            foreach_copy([self._host[name] for name in tensors], [*tensors.values()])
        self._step = step
        if self._untold:
            self._tell(clock.mono_s() - began_s)

    def checksum(self, names: Iterable[StateName]) -> int:
        """Of the newest copies of some of them."""
        digest = xxhash.xxh3_64()
        for name in names:
            memory = bytes_of(self._host[name]) if name in self._host else b""
            digest.update(b"?" if memory is None else memory)
        return digest.intdigest()

    def at(self, step: int) -> dict[StateName, memoryview]:
        """Bytes of each as it was at the end of `step`; none if they were taken at another one. Any thread.

        Not of one that has another form by now: what is stored beside the bytes is the form of today.
        """
        if self._step != step:
            return {}
        same = {name: host for name, host in self._host.items() if _same_form(host, self._live[name])}
        return {name: memory for name, host in same.items() if (memory := bytes_of(host)) is not None}

    def _tell(self, took_s: float) -> None:
        nbytes = sum(self._live[name].nbytes for name in self._untold if name in self._live)
        which = f"the {self._untold[0]}" + (f" and {len(self._untold) - 1} more" if len(self._untold) > 1 else "")
        self._untold = []
        _log.log(
            logging.WARNING if nbytes >= MUCH_BYTES else logging.INFO,
            "%s (%.1f MB) changed outside of optimizer.step(), so from now on %s copied at each step's end (%.1f ms a "
            "step for all such tensors); copy=False avoids the copies, but makes resumes inexact",
            which,
            nbytes / 1e6,
            "it is" if which.endswith("'") else "they are",
            took_s * 1e3,
        )

    def restore(self, regions: Mapping[str, RegionCopy]) -> None:
        """Put this rank's own back into tensors that were `add`ed; other regions are ignored.

        Raises MismatchError, before anything is changed, for one of another form.
        """
        saved = {name: regions[PREFIX + name.name] for name in self._live if PREFIX + name.name in regions}
        different = {
            name.name: f"saved {copy.dtype} {tuple(copy.shape)}, here {form}"
            for name, copy in saved.items()
            if (form := _stored_form(self._live[name])) != (copy.dtype, tuple(copy.shape))
        }
        if different:
            raise MismatchError(f"saved parameters do not match this model: {different}", different=different)
        for name, copy in saved.items():
            overwrite(self._live[name], tensor_of(copy))


def names_in(regions: Iterable[str]) -> list[StateName]:
    """Of which parameters there are copies among these regions of a black box.

    >>> names_in(["rng/torch", "model/k.weight"])
    [StateName(kind='model', name='k.weight', key=None)]
    """
    return [StateName("model", name.removeprefix(PREFIX)) for name in regions if name.startswith(PREFIX)]


def _stored_form(tensor: torch.Tensor) -> tuple[str | None, tuple[int, ...]]:
    local = local_of(tensor)
    return region_dtype(local.dtype), tuple(local.shape)


def _same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype
