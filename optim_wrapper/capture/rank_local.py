"""What no other rank holds: random number streams and tensors, taken in every step into the black box.

The training thread calls `BoxRecorder.tentative` in a step's backward pass, before the collective that lets a peer
update, `committed` at the step's end, `epoch_start` when an epoch begins. See black_box.py for why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lastwords.errors import MismatchError
from lastwords.optim_wrapper.capture.box_tensors import BoxTensors
from lastwords.optim_wrapper.ddp.staying_hook import StayingHook
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.streams.rng_streams import NumpyStream, Stream, default_streams
from lastwords.processor.black_box import BlackBox
from lastwords.processor.box_layout import RegionCopy, RegionSpec, SlotKind
from lastwords.processor.recurrence import Late

# The moment of a step at which the tentative copy is due: late, but before a collective that lets a peer update.
#
# No peer updates before this rank has contributed every gradient that is reduced over all ranks. So any one of these
# will do, at the moment it is ready and not reduced yet. DDP reduces all its parameters' gradients; the hook is put on
# the first of them, the last one to be ready, so that also what moves in the loss and in most of the backward pass (a
# checkpointed block that is computed again) is in the copy. It is put there once.
#
# Of several DDPs (a GAN) each has its own, and the newest copy counts.
#
# Where it is not certain that this gradient comes in every step (no DDP, or unused parameters are looked for), the
# moment is the beginning of the backward pass: a forward hook puts a hook on the model's output, in every step anew,
# which costs about 20 us a step instead of 10.


class BeforeCollective:
    """Calls `act` at that moment, at least once in each step that has a backward pass, from `__init__` to `remove`."""

    def __init__(
        self, model: torch.nn.Module, act: Callable[[], None], ddps: Sequence[DistributedDataParallel] = ()
    ) -> None:
        self._act = act
        self._due = False
        self._hooks: list[Any] = []
        beside = [ddp for ddp in ddps if ddp is not model]
        for module in [model, *beside]:
            always = _always_reduced(module)
            if always is not None:
                self._hooks.append(always.register_hook(self._on_gradient))  # type: ignore[no-untyped-call]
            elif module is not model or not _reduced_by(beside, model):
                self._hooks.append(module.register_forward_hook(StayingHook(self._after_forward)))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        self._act()

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        self._due = True
        first = first_differentiable(output)
        if first is None:
            self._once_a_forward()
        else:
            first.register_hook(self._once_a_forward)  # type: ignore[no-untyped-call]

    def _once_a_forward(self, *_: object) -> None:
        if self._due:
            self._due = False
            self._act()


def _always_reduced(model: torch.nn.Module) -> torch.nn.Parameter | None:
    """The parameter whose gradient comes last of those that DDP reduces in every step; None if there may be none."""
    if not isinstance(model, DistributedDataParallel):
        return None
    # What is not known for certain (an attribute that is gone) counts against it.
    if getattr(model, "find_unused_parameters", True) or getattr(model, "mixed_precision", True):
        return None
    ignored: set[str] = getattr(model, "parameters_to_ignore", set())
    network: torch.nn.Module = model.module
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and name not in ignored:
            return parameter
    return None


def _reduced_by(ddps: Sequence[DistributedDataParallel], model: torch.nn.Module) -> bool:
    """Whether some of these DDPs reduce every gradient of the model in every step."""
    always = [ddp for ddp in ddps if _always_reduced(ddp) is not None]
    reduced = {id(parameter) for ddp in always for parameter in ddp.parameters()}
    return all(id(parameter) in reduced for parameter in model.parameters() if parameter.requires_grad)


def first_differentiable(output: Any) -> torch.Tensor | None:
    """Any tensor in a model's output whose gradient will be asked for; tuples, lists, dicts and dataclasses."""
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    if isinstance(output, Mapping):
        items: Any = output.values()
    elif isinstance(output, list | tuple):
        items = output
    elif hasattr(output, "__dict__"):
        items = vars(output).values()
    else:
        return None
    for item in items:
        found = first_differentiable(item) if not isinstance(item, str | bytes) else None
        if found is not None:
            return found
    return None


class RngCapture:
    """The random number streams that every process has: python, numpy, torch, the accelerator."""

    def __init__(self, *, ledger: Ledger | None = None) -> None:
        self._streams: list[Stream] = default_streams()
        self._takes: dict[int, list[Callable[[], None]]] = {}
        self._numpy = next(stream for stream in self._streams if isinstance(stream, NumpyStream))
        self.ledger = ledger or Ledger()

    @property
    def regions(self) -> tuple[RegionSpec, ...]:
        return tuple(stream.region for stream in self._streams)

    def bind(self, box: BlackBox) -> None:
        """Prepare the captures into each slot of `box`, whose layout has `regions`; tell which streams have none."""
        self.ledger.tell(*(stream.problem for stream in self._streams if stream.problem))
        for slot in box.step_slots + box.epoch_slots:
            self._takes[slot] = [stream.into(box.region(slot, stream.region.name)) for stream in self._streams]

    def capture(self, slot: int) -> None:
        """Take all streams into an open slot."""
        for take in self._takes[slot]:
            take()
        if self._numpy.problem:
            self.ledger.tell(self._numpy.problem)

    def snapshot(self) -> dict[str, RegionCopy]:
        """All streams as they are now, beside the box: for putting them back after something that must not count."""
        copies = {}
        for stream in self._streams:
            data = bytearray(stream.region.nbytes)
            stream.into(memoryview(data))()
            copies[stream.region.name] = RegionCopy(stream.region.dtype, stream.region.shape, data)
        return copies

    def restore(self, regions: Mapping[str, RegionCopy]) -> tuple[str, ...]:
        """Put the streams back; other regions are ignored. Returns why the outcome is not exact, if it is not.

        Raises MismatchError, before anything is changed, if a stream's size is not the one of this platform.
        """
        reasons = []
        known = {stream.region.name: stream for stream in self._streams}
        saved = {name: copy for name, copy in regions.items() if name.startswith("rng/")}
        for name in sorted(known.keys() & saved.keys()):
            if len(memoryview(saved[name].data)) != known[name].region.nbytes:
                text = f"saved {len(saved[name].data)} bytes, here {known[name].region.nbytes}"
                raise MismatchError(
                    f"the random number stream {name!r} has a different size: {text}; use the torch and "
                    f"numpy versions of the saved run",
                    different={name: text},
                )
        for name in sorted(known.keys() | saved.keys()):
            if name not in saved:
                reasons.append(f"the random number stream {name!r} was not saved")
            elif name not in known:
                reasons.append(f"the random number stream {name!r} was saved but does not exist here")
            else:
                try:
                    known[name].restore(saved[name].data)
                except MismatchError as error:
                    reasons.append(str(error))
        return tuple(reasons)


Capture = RngCapture | BoxTensors
"""A part of the rank-local state. `refresh` comes before each copy is begun, `capture` while it is open."""


class BoxRecorder:
    """Writes rank-local state into the black box, in step with training. Belongs to the training thread.

    None of its methods raises because of what is captured: what cannot be kept is told to the captures' ledger.
    """

    def __init__(self, box: BlackBox, captures: Sequence[Capture], late: Late) -> None:
        """`box` was made with `regions(captures)` in its layout.

        late: gets to know which regions move between the tentative and the committed copy of a step.
        """
        self.box = box
        self._captures = tuple(captures)
        self.late = late
        for capture in self._captures:
            capture.bind(box)

    def tentative(self, step: int, json_bytes: bytes = b"{}") -> None:
        """Take the state for `step`, which is under way: after its forward, before its last collective."""
        self._record(SlotKind.TENTATIVE, step, json_bytes)

    def committed(
        self, step: int, json_bytes: bytes, *, comparable: bool = True, ends_epoch: bool | None = None
    ) -> bool:
        """Take the state at the end of `step` and compare it with the tentative copy, unless that has other regions.

        ends_epoch: `step` is the last one of its epoch, None: not known. True if they differ, as `late` knows now.
        """
        self._record(SlotKind.COMMITTED, step, json_bytes)
        moved = self.box.compare_tentative() if comparable else None
        if moved is not None:
            self.late.happened({moved: 1}, step, ends_epoch)
        return moved is not None

    def committed_again(self, step: int, document: Callable[[str | None], bytes]) -> None:
        """`committed` once more, for a step after whose end the state may have moved.

        document: is given the first region that has, and gives the JSON.
        """
        before, moved = self.box.slot_of(step), None

        def compared(slot: int) -> bytes:
            nonlocal moved
            moved = None if before is None else self.box.first_difference(before, slot)
            return document(moved)

        self._record(SlotKind.COMMITTED, step, compared)
        # What the tentative copy has is not what the next step begins with either.
        if moved is not None and (late := self.box.compare_tentative()) is not None:
            self.late.happened({late: 1}, step, None)

    def drawn_since(self, step: int, others: Callable[[], str] = str, kind: SlotKind = SlotKind.TENTATIVE) -> str:
        """A stream that has moved since the copy of `step`, if it is of this kind. Writer's thread, settled.

        others: says so of the random generators that are in the document.
        """
        committed, slot = self.box.slot_of(step, committed=True), self.box.slot_of(step)
        if slot is None or (committed is None) is not (kind is SlotKind.TENTATIVE):
            return ""
        for capture in self._captures:
            for name, now in capture.snapshot().items() if isinstance(capture, RngCapture) else ():
                if self.box.region(slot, name)[: len(now.data)] != now.data:
                    return name
        return others()

    def epoch_start(self, epoch: int, json_bytes: bytes = b"{}") -> None:
        """Take the random number streams before the first batch of `epoch` is asked for."""
        slot = self.box.begin(SlotKind.EPOCH, epoch)
        for capture in self._captures:
            if any(region.in_epoch for region in capture.regions):
                capture.capture(slot)
        self.box.commit(slot, json_bytes)

    def _record(self, kind: SlotKind, step: int, said: bytes | Callable[[int], bytes]) -> None:
        """said: the JSON, or what makes it once the slot is filled."""
        captures = self._captures
        for capture in captures:
            if isinstance(capture, BoxTensors):
                capture.refresh()
        box = self.box
        slot = box.begin(kind, step)
        for capture in captures:
            capture.capture(slot)
        box.commit(slot, said if isinstance(said, bytes) else said(slot))


def regions(captures: Sequence[Capture]) -> tuple[RegionSpec, ...]:
    """Regions of all captures together, for the box's layout."""
    return tuple(region for capture in captures for region in capture.regions)
