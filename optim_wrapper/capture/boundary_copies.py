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
from lastwords.errors import MismatchError, StorageError
from lastwords.optim_wrapper.capture.captured_buffer import region_dtype
from lastwords.optim_wrapper.capture.witness import StateName
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of, problem_of, writing
from lastwords.processor.black_box import BlackBox, RegionCopy, RegionSpec, SlotKind
from lastwords.torch_private import foreach_copy

_log = logging.getLogger(__name__)

BOX_EACH_BYTES_MAX, BOX_BYTES_MAX = 1 << 20, 16 << 20
"""Of one parameter, and of all: what goes into the black box, which has room for four copies. More is kept in host
memory only, and taken to be the same on every rank; that it is shows in the words that are looked at of it."""

MUCH_BYTES = 64 << 20
"""From here on the first line about copies is a warning."""

PREFIX = "model/"


class BoundaryCopies:
    """A `Capture` for the parameters among them; `take` and `at` are for all. Training thread, except `at`."""

    def __init__(self) -> None:
        self._tensors: dict[StateName, torch.Tensor] = {}
        self._host: dict[StateName, torch.Tensor] = {}
        self._resized: set[StateName] = set()
        self._step = -1
        self._frozen: dict[StateName, bool] = {}
        self._boxed: dict[StateName, RegionSpec] = {}
        self._targets: dict[int, dict[StateName, torch.Tensor]] = {}
        self._box: BlackBox | None = None
        self._untold: list[StateName] = []

    def __contains__(self, name: StateName) -> bool:
        return name in self._tensors

    def __bool__(self) -> bool:
        return bool(self._tensors)

    @property
    def names(self) -> list[StateName]:
        """Names of all."""
        return [*self._tensors]

    @property
    def unboxed(self) -> list[StateName]:
        """Names of those that no black box has: they have to be the same on every rank."""
        return [name for name in self._tensors if name not in self._boxed]

    def own(self) -> frozenset[str]:
        """Names of the parameters that each rank has for itself."""
        return frozenset(name.name for name in self._boxed)

    @property
    def late(self) -> list[StateName]:
        """Names of those that only a black box's committed copies have."""
        return [name for name in self._boxed if not self._frozen[name]]

    def add(self, tensors: Mapping[StateName, torch.Tensor], frozen: Callable[[StateName], bool]) -> bool:
        """Copy these as well from now on. Returns whether the black box has to be made anew, with room for them."""
        known = self._tensors.keys() | self._resized
        new = {name: tensor for name, tensor in tensors.items() if name not in known}
        before = len(self._boxed)
        for name, tensor in new.items():
            self._tensors[name] = tensor
            self._frozen[name] = frozen(name)
            code = region_dtype(tensor.dtype)
            room = BOX_BYTES_MAX - sum(region.nbytes for region in self._boxed.values())
            if name.kind == "model" and code and tensor.nbytes <= min(BOX_EACH_BYTES_MAX, room):
                shape, late = tuple(tensor.shape), not self._frozen[name]
                self._boxed[name] = RegionSpec(PREFIX + name.name, code, shape, lazy=True, committed_only=late)
        self._untold += new
        return len(self._boxed) != before

    def follow(self, tensor_of: Callable[[StateName], torch.Tensor | None]) -> None:
        """Tensors may have been replaced by others; what is gone, or has another form, is copied no more."""
        for name in [*self._tensors]:
            tensor = tensor_of(name)
            if tensor is self._tensors[name]:
                continue
            if tensor is None or not _same_form(tensor, self._tensors[name]):
                self._leave_out(name)
                continue
            self._tensors[name] = tensor

    def _leave_out(self, name: StateName) -> None:
        del self._tensors[name]
        self._host.pop(name, None)
        if self._boxed.pop(name, None) is not None and self._box is not None:
            self._box.deactivate(PREFIX + name.name)

    # ------------------------------------------------------------------ host memory

    def take(self, step: int) -> None:
        """All of them, as they are at the end of `step`."""
        self._step = -1
        mine = self._tensors
        for name in [name for name, host in self._host.items() if not _same_form(host, mine[name])]:
            self._leave_out(name)  # `resize_` has given it another form, and will again: it is named, not copied
            self._resized.add(name)
        tensors = {name: tensor for name, tensor in mine.items() if not problem_of(tensor)}
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
        same = {name: host for name, host in self._host.items() if _same_form(host, self._tensors[name])}
        return {name: memory for name, host in same.items() if (memory := bytes_of(host)) is not None}

    def _tell(self, took_s: float) -> None:
        nbytes = sum(self._tensors[name].nbytes for name in self._untold if name in self._tensors)
        which = f"the {self._untold[0]}" + (f" and {len(self._untold) - 1} more" if len(self._untold) > 1 else "")
        self._untold = []
        _log.log(
            logging.WARNING if nbytes >= MUCH_BYTES else logging.INFO,
            "%s (%.1f MB) changed outside of optimizer.step(), so from now on %s copied at each step's end (%.1f ms a "
            "step for all such tensors); local_copy=False avoids the copies, but makes resumes inexact",
            which,
            nbytes / 1e6,
            "it is" if which.endswith("'") else "they are",
            took_s * 1e3,
        )

    # ------------------------------------------------------------------ black box (Capture)

    @property
    def regions(self) -> tuple[RegionSpec, ...]:
        """What each copy needs room for."""
        return tuple(self._boxed.values())

    def bind(self, box: BlackBox) -> None:
        """Prepare the captures into each step slot of `box`; what finds no room there is kept in host memory alone."""
        self._box = box
        self._targets = {slot: {} for slot in box.step_slots}
        for name, region in [*self._boxed.items()]:
            try:
                box.activate(region.name)
            except StorageError as error:
                _log.warning("the %s is assumed to be the same on every rank: %s", name, error)
                box.deactivate(region.name)
                del self._boxed[name]
                continue
            for slot, targets in self._targets.items():
                view = torch.frombuffer(box.region(slot, region.name), dtype=self._tensors[name].dtype)
                targets[name] = view.reshape(region.shape)

    def refresh(self) -> None:
        """Nothing has to be looked at before a copy."""

    def capture(self, slot: int) -> None:
        """Take them into an open slot; a tentative copy has only what no update changes."""
        if not self._boxed or self._box is None:
            return
        early = self._box.open_kind is SlotKind.TENTATIVE
        targets = self._targets[slot]
        names = [name for name in self._boxed if name in targets and (self._frozen[name] or not early)]
        if names := [name for name in names if not problem_of(self._tensors[name])]:
            with torch.inference_mode():
                foreach_copy([targets[name] for name in names], [self._tensors[name] for name in names])

    def restore(self, regions: Mapping[str, RegionCopy]) -> tuple[str, ...]:
        """Put this rank's own back into tensors that were `add`ed; other regions are ignored.

        Raises MismatchError, before anything is changed, for one of another form.
        """
        saved = {name.removeprefix(PREFIX): copy for name, copy in regions.items() if name.startswith(PREFIX)}
        here = {name.name: tensor for name, tensor in self._tensors.items() if name.kind == "model"}
        different = {
            name: f"saved {copy.dtype} {tuple(copy.shape)}, here {_stored_form(here[name])}"
            for name, copy in saved.items()
            if name in here and (copy.dtype, tuple(copy.shape)) != _stored_form(here[name])
        }
        if different:
            raise MismatchError(f"saved parameters do not match this model: {different}", different=different)
        for name, copy in saved.items():
            if name in here:
                data = torch.frombuffer(bytearray(copy.data), dtype=here[name].dtype).reshape(here[name].shape)
                with writing(here[name]):
                    here[name].copy_(data)
        return ()


def names_in(regions: Iterable[str]) -> list[StateName]:
    """Of which parameters there are copies among these regions of a black box.

    >>> names_in(["rng/torch", "model/k.weight"])
    [StateName(kind='model', name='k.weight', key=None)]
    """
    return [StateName("model", name.removeprefix(PREFIX)) for name in regions if name.startswith(PREFIX)]


def _same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _stored_form(tensor: torch.Tensor) -> tuple[str | None, tuple[int, ...]]:
    return region_dtype(tensor.dtype), tuple(tensor.shape)
