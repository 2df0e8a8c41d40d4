"""Buffers of a model as part of the rank-local state: which of them are taken, and how."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from operator import is_

import torch

from lastwords.errors import MismatchError, StorageError
from lastwords.optim_wrapper.capture.captured_buffer import (
    NO_FORMS,
    CapturedBuffer,
    Form,
    SavedForms,
    empty_of,
    form_of,
    has_memory,
    unstorable,
)
from lastwords.optim_wrapper.capture.gathered_buffers import FEWEST, GatheredBuffers, can_be_gathered
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.state.buffer_forms import put
from lastwords.optim_wrapper.tensors.tensor_bytes import writing
from lastwords.processor.black_box import BlackBox, RegionCopy, RegionSpec
from lastwords.sharding.dtensor import local_of
from lastwords.torch_private import NormBase, foreach_copy, non_persistent

_log = logging.getLogger(__name__)

SMALL_BUFFER_BYTES_MAX = 64 * 1024
"""Copying this much takes about 5 us; looking whether it has changed would not be cheaper for native kernels that
change a buffer without counting its version up."""


class BufferCapture:
    """Buffers of a model: of BatchNorm-like modules and small ones always, larger ones once they have changed.

    model: the module itself, not its DDP wrapper; names are as in `model.named_buffers()`, or as `called` makes them of
    those, a tied buffer under its first name; of a DTensor the part on this rank. A larger buffer counts as changed
    when it is another tensor or its `_version` has moved; what changes the memory of a larger buffer without either is
    not seen (kernels that do so belong to `NormBase`). A buffer that gets another form is taken again from the next
    `look` on.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        small_bytes_max: int = SMALL_BUFFER_BYTES_MAX,
        called: Callable[[str], str] = str,
        ledger: Ledger | None = None,
    ) -> None:
        self._model = model
        self._eager: dict[str, CapturedBuffer] = {}
        self._lazy: dict[str, CapturedBuffer] = {}
        self._box: BlackBox | None = None
        self._active: list[CapturedBuffer] = []
        self._known: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []  # the same, but of a DTensor the part that lies here
        self._targets: dict[int, list[torch.Tensor]] = {}
        self._gathered: GatheredBuffers | None = None
        self._others: list[int] = []  # places in `_sources` of those that are copied one by one
        self._checked: list[int] = []  # places in `_sources` whose form may change under the same object
        self._forms: list[Form] = []
        self._names: frozenset[str] = frozenset()
        self._held: dict[int, frozenset[str]] = {}
        self._called = called
        self._seen: set[str] = set()
        self._reshaped: set[str] = set()
        self._activated_early: set[str] = set()
        self.ledger = ledger or Ledger()
        self._small_bytes_max = small_bytes_max
        self._admit(late=False)

    def _admit(self, *, late: bool) -> bool:
        """See which buffers there are; returns whether there are new ones. late: they count as larger ones, whose
        first form is that of now."""
        seen = {id(buffer.first) for buffer in (*self._eager.values(), *self._lazy.values())}
        before = len(seen)
        for name, module, key, tensor in self._unseen():
            problem = unstorable(tensor)
            if not problem and local_of(tensor).numel() == 0:
                continue
            self._seen.add(name)
            if id(tensor) in seen:
                continue
            if problem:
                self.ledger.tell(f"the buffer {name!r} {problem}")
                continue
            seen.add(id(tensor))
            always = isinstance(module, NormBase) or local_of(tensor).nbytes <= self._small_bytes_max
            always = (always and not late) or tensor.is_inference()  # nobody counts its versions
            (self._eager if always else self._lazy)[name] = CapturedBuffer(name, module, key, tensor, lazy=not always)
        return len(seen) != before

    def _unseen(self) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
        """Name, module, name in it and tensor of the buffers that are not known, or were empty."""
        for prefix, module in self._model.named_modules():
            for key, tensor in module._buffers.items():
                name = self._called(f"{prefix}.{key}" if prefix else key)
                if tensor is not None and name not in self._seen:
                    yield name, module, key, tensor

    @property
    def regions(self) -> tuple[RegionSpec, ...]:
        """What each copy needs room for; larger buffers take memory only once they change."""
        return tuple(buffer.region for buffer in (*self._eager.values(), *self._lazy.values()))

    @property
    def captured(self) -> frozenset[str]:
        """Names of the buffers that are captured from now on; `at` says which are in a copy that was taken."""
        names = self._eager.keys() | self._activated_early
        if self._box is not None:
            names |= {name for name, buffer in self._lazy.items() if self._box.is_active(buffer.region.name)}
        return frozenset(names)

    def keep(self, name: str) -> bool:
        """Take this buffer into each copy from now on; returns whether it is taken. It has changed in a way that torch
        does not count."""
        if name in self._lazy:
            self._activate_lazy(name)
        return name in self.captured or name in self._reshaped  # then from the step's end on

    @property
    def larger(self) -> frozenset[str]:
        """Names of the buffers that are captured once they have changed."""
        return frozenset(self._lazy)

    @property
    def always(self) -> frozenset[str]:
        """Names of the buffers that are captured from the start: no unit of a sharded job has them."""
        return frozenset(self._eager)

    def look(self, *, late: bool = True) -> bool:
        """See which buffers have another form, or (late) have come; returns whether the box needs room for them."""
        if not late and not self._reshaped:
            return False
        names, self._reshaped = sorted(self._reshaped), set()
        reshaped = [self._reform(name) for name in names]
        return (late and self._admit(late=True)) or any(reshaped)

    def _reform(self, name: str) -> bool:
        among = self._eager if name in self._eager else self._lazy
        twin = among[name].reformed()
        if twin is not None:
            among[name] = twin
        return twin is not None

    def at(self, slot: int | None) -> tuple[frozenset[str], dict[str, str]]:
        """Which buffers no unit is to have, where `slot` has the step's copy: those in it, and what cannot be stored.

        All others are saved as they are now; the dictionary says of which of them (and of those that are in no file)
        that this is perhaps not what they were at the step's end.
        """
        held = frozenset() if slot is None else self._held.get(slot, frozenset())
        apart: set[str] = set(held)
        moved: dict[str, str] = {}
        known = self._eager | self._lazy
        moved |= {
            name: f"the buffer {name!r} keeps changing shape or dtype; it may have had a different one at "
            f"the step's end"
            for name, buffer in known.items()
            if buffer.reforms > 1
        }
        live = {name: buffer.table.get(buffer.key) for name, buffer in known.items()}
        for name, tensor in [*live.items(), *((name, tensor) for name, _, _, tensor in self._unseen())]:
            if name in held or tensor is None or (name not in live and not tensor.numel()):
                continue
            if problem := unstorable(tensor):
                apart.add(name)
                moved[name] = f"the buffer {name!r} {problem}"
            elif name not in self._lazy or self._lazy[name].changed():
                moved[name] = (
                    f"the buffer {name!r} is saved as of the start of the incident: its first change was "
                    f"seen after the step's copy was taken, or could not be copied"
                )
        return frozenset(apart), moved

    def bind(self, box: BlackBox) -> None:
        """Prepare the captures into each step slot of `box`, whose layout has `regions`; replaces an earlier box."""
        wanted = self._activated_early | {buffer.name for buffer in self._active if buffer.name in self._lazy}
        self._box = box
        self._active, self._known, self._sources = [], [], []  # of the box before this one, if there was one
        self._targets = {slot: [] for slot in box.step_slots}
        self._held = {}
        for buffer in self._eager.values():
            if buffer.given_up:
                box.deactivate(buffer.region.name)
            elif self._fits(buffer):
                self._activate(buffer)
        for name in sorted(wanted):
            self._activate_lazy(name)
        self._note_forms()

    def refresh(self) -> None:
        """See which larger buffers have changed, and whether any buffer was replaced; before a copy is begun."""
        if self._lazy:
            for name in [name for name, buffer in self._lazy.items() if buffer.changed()]:
                self._activate_lazy(name)
        if (
            not all(map(is_, self._known, [buffer.table.get(buffer.key) for buffer in self._active]))
            or [form_of(self._sources[place]) for place in self._checked] != self._forms
            or not all(has_memory(self._sources[place]) for place in self._checked)
        ):
            self._adopt_replaced()

    def capture(self, slot: int) -> None:
        """Take the buffers into an open step slot."""
        gathered, sources, targets = self._gathered, self._sources, self._targets[slot]
        if gathered is not None and gathered.copy(slot):
            sources, targets = [sources[at] for at in self._others], [targets[at] for at in self._others]
        elif gathered is not None:
            self._note_forms()
        if sources:
            try:
                foreach_copy(targets, sources)
            except RuntimeError:
                self._adopt_replaced()  # what does not fit is named now, so its older bytes count for nothing
                foreach_copy(self._targets[slot], self._sources)
        self._held[slot] = self._names

    def restore(self, regions: Mapping[str, RegionCopy], forms: SavedForms = NO_FORMS) -> tuple[str, ...]:
        """Put the buffers back; other regions are ignored. Returns why the outcome is not exact, if it is not.

        Those that come with the first forward pass are made here, and those that were reshaped get their form.
        A larger buffer that is not among them had not changed and stays as it is.
        Raises MismatchError, before anything is changed, for a buffer that does not exist here or has another form.
        """
        known = self._eager | self._lazy
        saved = {name.removeprefix("buffer/"): copy for name, copy in regions.items() if name.startswith("buffer/")}
        different = {
            name: f"saved {saved[name].dtype} {saved[name].shape}, here {known[name].region.dtype} "
            f"{known[name].region.shape}"
            for name in sorted(known.keys() & saved.keys() - {*forms.reshaped})
            if (saved[name].dtype, tuple(saved[name].shape)) != (known[name].region.dtype, known[name].region.shape)
        }
        places = {
            name: place for name in saved.keys() - known.keys() if (place := self._place_of(name, forms)) is not None
        }
        extra = sorted(saved.keys() - known.keys() - places.keys())
        if extra or different:
            raise MismatchError(
                f"saved buffers do not fit this model: not in it {extra}, of another form {different}",
                extra=extra,
                different=different,
            )
        self._make({name: (*places[name], saved[name]) for name in places}, forms)
        for name in sorted(known.keys() & saved.keys() & {*forms.reshaped}):
            buffer, copy = known[name], saved[name]
            if (copy.dtype, tuple(copy.shape)) != (buffer.region.dtype, buffer.region.shape):
                put(buffer.table, buffer.key, empty_of(copy.dtype, tuple(copy.shape), buffer.first.device))
                self._reform(name)
        known = self._eager | self._lazy
        for name, copy in sorted(saved.items()):
            buffer = known[name]
            data = torch.frombuffer(bytearray(copy.data), dtype=buffer.dtype).reshape(buffer.region.shape)
            tensor = buffer.table[buffer.key]
            assert tensor is not None
            with writing(tensor):
                local_of(tensor).copy_(data)
            if name in self._lazy:
                # It differs from what a fresh model has: whoever reads the next copy needs it too.
                self._activate_lazy(name)
        missing = sorted(self._eager.keys() - saved.keys())
        return tuple(f"the buffer {name!r} was not saved" for name in missing)

    def _place_of(self, name: str, forms: SavedForms) -> tuple[torch.nn.Module, str] | None:
        """Module, and name in it, of a buffer that is not there yet; None where it can have no place."""
        key = name.rpartition(".")[2]
        for prefix, module in self._model.named_modules():
            come = name in forms.volatile or name in forms.reshaped
            free = key in module._buffers or (come and not hasattr(module, key))
            if free and self._called(f"{prefix}.{key}" if prefix else key) == name:
                return module, key
        return None

    def _make(self, new: Mapping[str, tuple[torch.nn.Module, str, RegionCopy]], forms: SavedForms) -> None:
        device = next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))
        for name, (module, key, copy) in new.items():
            if key not in module._buffers and name in forms.volatile:
                non_persistent(module).add(key)
            put(module._buffers, key, empty_of(copy.dtype, tuple(copy.shape), device))
        if new:
            self._admit(late=True)

    def _activate_lazy(self, name: str) -> None:
        buffer = self._lazy.get(name)
        if self._box is None or buffer is None or buffer.region not in self._box.layout.regions:
            self._activated_early.add(name)  # in the next box
            return
        if buffer.given_up or any(one.name == name for one in self._active) or not self._fits(buffer):
            return
        try:
            self._box.activate(buffer.region.name)
        except StorageError as error:
            buffer.given_up = True
            self._say(f"the buffer {name!r} has changed but could not be copied: {error}")
            return
        self._activate(buffer)
        self._note_forms()

    def _activate(self, buffer: CapturedBuffer) -> None:
        tensor = buffer.table[buffer.key]
        assert tensor is not None
        self._active.append(buffer)
        self._known.append(tensor)
        self._sources.append(local_of(tensor))
        for slot, targets in self._targets.items():
            view = torch.frombuffer(self._bound.region(slot, buffer.region.name), dtype=buffer.dtype)
            targets.append(view.reshape(buffer.region.shape))

    @property
    def _bound(self) -> BlackBox:
        assert self._box is not None, "bind() comes first"
        return self._box

    def _adopt_replaced(self) -> None:
        """Follow buffers that are another tensor now; one that does not fit any more is given up."""
        for index in reversed(range(len(self._active))):
            buffer = self._active[index]
            tensor = buffer.table.get(buffer.key)
            if self._fits(buffer):
                assert tensor is not None
                self._known[index], self._sources[index] = tensor, local_of(tensor)
                continue
            del self._active[index], self._known[index], self._sources[index]
            for targets in self._targets.values():
                del targets[index]
        self._note_forms()

    def _fits(self, buffer: CapturedBuffer) -> bool:
        """Whether the buffer can still be copied into its region; if not, it is given up, and that is said."""
        problem = buffer.misfit()
        if problem:
            buffer.given_up = True
            if buffer.reformed() is not None:
                self._reshaped.add(buffer.name)
            else:
                self._say(f"the buffer {buffer.name!r} {problem}")
            self._bound.deactivate(buffer.region.name)
        return not problem

    def _note_forms(self) -> None:
        self._names = frozenset(buffer.name for buffer in self._active)
        # Nobody gives the buffers of a BatchNorm another form under the same object, and there may be hundreds.
        self._checked = [place for place, buffer in enumerate(self._active) if not buffer.of_norm]
        self._forms = [form_of(self._sources[place]) for place in self._checked]
        self._arrange()

    def _arrange(self) -> None:
        """Which of them are copied together: those whose form nobody changes."""
        targets = next(iter(self._targets.values()), [])
        together = [
            place
            for place, (buffer, source, target) in enumerate(zip(self._active, self._sources, targets, strict=True))
            if buffer.of_norm and can_be_gathered(source, target)
        ]
        self._gathered = None
        self._others = sorted({*range(len(self._active))} - {*together})
        if len(together) >= FEWEST:
            into = {slot: [every[place] for place in together] for slot, every in self._targets.items()}
            self._gathered = GatheredBuffers([self._sources[place] for place in together], into)

    def _say(self, reason: str) -> None:
        if self.ledger.tell(reason):
            _log.warning("%s: a resume will not be exact", reason)
