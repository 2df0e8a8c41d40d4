"""Buffers of modules as this rank's own state: which of them are in the black box, and how they come back.

Those of BatchNorm-like modules and small ones always are, larger ones once they have changed: kernels of the former
write them without counting their version up. The buffers of modules among the extras (averaged models) may differ by
rank as the model's own do; of those the larger ones are left to the extras.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel

from lastwords.errors import MismatchError, some
from lastwords.optim_wrapper.capture.box_tensors import BoxTensor, BoxTensors, tensor_of, unstorable
from lastwords.optim_wrapper.state.extras import Extras
from lastwords.optim_wrapper.state.state_view import buffers_in, own_name
from lastwords.optim_wrapper.tensors.tensor_tree import is_composite
from lastwords.processor.box_layout import RegionCopy
from lastwords.sharding.dtensor import local_of
from lastwords.torch_private import NormBase, non_persistent

SMALL_BUFFER_BYTES_MAX = 64 * 1024
"""Copying this much takes about 5 us; looking whether it has changed would not be cheaper for native kernels that
change a buffer without counting its version up."""

PREFIX = "buffer/"

EXTRA_PREFIX = "extra_buffer/"
"""Of modules among the extras: `extra_buffer/{extra}/{name}`."""


class SavedForms(NamedTuple):
    """What a checkpoint says of its buffers. volatile: names of those that no state_dict() has. reshaped: of those that
    had got another form, or come, since the saved run began."""

    volatile: Collection[str] = ()
    reshaped: Collection[str] = ()


NO_FORMS = SavedForms()


BufferPlace = tuple[torch.nn.Module, str]
"""Where a buffer is, or is to be: a module, and the name in it."""


def place_of(model: torch.nn.Module, called: Callable[[str], str], name: str, *, comes: bool) -> BufferPlace | None:
    """That of a buffer which is registered, but None so far; None if there is no such place.

    comes: it may also be there in another form, or not yet: the first forward pass registers it.
    """
    key = name.rpartition(".")[2]
    for prefix, module in model.named_modules():
        there = key in module._buffers
        free = (there or not hasattr(module, key)) if comes else (there and module._buffers[key] is None)
        if free and called(own_name(prefix, key)) == name:
            return module, key
    return None


def device_at(place: BufferPlace, model: torch.nn.Module) -> torch.device:
    """Where a buffer's memory is to be: where it is now, or else the model's first parameter."""
    module, key = place
    known = (one.device for one in (module._buffers.get(key), *model.parameters()) if one is not None)
    return next(known, torch.device("cpu"))


def put(place: BufferPlace, buffer: torch.Tensor, *, volatile: bool = False) -> None:
    """Give a module's buffer this content and form. It stays the same tensor where it can: DDP has a list of them.

    volatile: if it is new, no state_dict() is to have it.

    >>> module = torch.nn.BatchNorm1d(2)
    >>> before = module.running_mean
    >>> put((module, "running_mean"), torch.ones(3))
    >>> before is module.running_mean, before
    (True, tensor([1., 1., 1.]))
    """
    module, key = place
    live = module._buffers.get(key)
    if key not in module._buffers and volatile:
        non_persistent(module).add(key)
    if (
        live is None
        or is_composite(live)
        or live.is_inference()
        or type(live) is not type(buffer)
        or (live.dtype, live.device) != (buffer.dtype, buffer.device)
    ):
        module._buffers[key] = buffer
    else:
        live.data = buffer


_followed: weakref.WeakSet[_OfModules] = weakref.WeakSet()


class _OfModules:
    """What modules have. modules_change: whether one has been put into a known one since `_know` was called last."""

    modules_change = False
    _modules: weakref.WeakSet[torch.nn.Module]

    def _know(self, modules: Iterable[torch.nn.Module]) -> None:
        self.modules_change, self._modules = False, weakref.WeakSet(modules)
        _followed.add(self)


def _registered(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
    for one in [*_followed]:
        one.modules_change = one.modules_change or module in one._modules


register_module_module_registration_hook(_registered)


class Buffers(_OfModules):
    """Those of a model, in `tensors`.

    model: the module itself, not its DDP wrapper; names are as in `model.named_buffers()`, or as `called` makes them of
    those, a tied buffer under its first name; of a DTensor the part on this rank.
    """

    def __init__(
        self, model: torch.nn.Module, tensors: BoxTensors | None = None, *, called: Callable[[str], str] = str
    ) -> None:
        self._model = model
        self._called = called
        self.tensors = tensors or BoxTensors()
        self._seen: set[str] = set()
        self.always: frozenset[str] = frozenset()
        """Names of those that are captured from the start: no unit of a sharded job has them."""
        self._know(model.modules())
        self._admit(late=False)

    def _admit(self, *, late: bool) -> None:
        """See which there are. late: they count as larger ones, whose first form is that of now."""
        seen = {id(kept.tensor) for kept in self._known.values()}
        always = {*self.always}
        for name, module, key, tensor in self._unseen():
            problem = unstorable(tensor)
            if not problem and local_of(tensor).numel() == 0:
                continue
            self._seen.add(name)
            if id(tensor) in seen:
                continue
            if problem:
                self.tensors.ledger.tell(f"the buffer {name!r} {problem}")
                continue
            seen.add(id(tensor))
            # Of what was made under torch.inference_mode nobody counts the versions.
            at_once = (_is_small(module, tensor) and not late) or tensor.is_inference()
            always |= {name} if at_once else set()
            what, steady = f"the buffer {name!r}", isinstance(module, NormBase)
            self.tensors.add(BoxTensor(PREFIX + name, what, module._buffers, key, waits=not at_once, steady=steady))
        self.always = frozenset(always)

    @property
    def _known(self) -> dict[str, BoxTensor]:
        return self.tensors.of_kind(PREFIX)

    def _unseen(self) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
        """Name, module, name in it and tensor of the buffers that are not known, or were empty."""
        for name, module, key, tensor in buffers_in(self._model, self._called):
            if tensor is not None and name not in self._seen and not is_composite(tensor):
                yield name, module, key, tensor

    @property
    def captured(self) -> frozenset[str]:
        """Names of those that are captured from now on; `at` says which are in a copy that was taken."""
        return self.always | {name for name, kept in self._known.items() if not kept.waits and not kept.given_up}

    @property
    def larger(self) -> frozenset[str]:
        """Names of those that are captured once they have changed."""
        return frozenset(self._known.keys() - self.always)

    def keep(self, name: str) -> bool:
        """Take this one into each copy from now on; returns whether it is taken. It has changed in a way that torch
        does not count."""
        self.tensors.want(PREFIX + name)
        return name in self.captured or self.tensors.reshaped(PREFIX + name)  # then from the step's end on

    def admit_late(self) -> None:
        """See which have come, and which have gone."""
        self.follow()
        self._admit(late=True)

    def look_up(self) -> dict[str, BufferPlace]:
        """See which modules have the buffers now, where some have been put in the place of others."""
        places = {name: (module, key) for name, module, key, _ in buffers_in(self._model, self._called)}
        for name, (module, _) in places.items():
            self.tensors.look_in(PREFIX + name, module._buffers)
        return places

    def follow(self) -> None:
        """The same at a step's end: what is gone by then is copied no more."""
        places = self.look_up()
        self._know(self._model.modules())
        for name in self._known.keys() - places.keys():
            self.tensors.remove(PREFIX + name)
            self._seen.discard(name)
            self.always -= {name}

    def at(self, slot: int | None) -> tuple[frozenset[str], dict[str, str]]:
        """Which buffers no unit is to have, where `slot` has the step's copy: those in it, and what cannot be stored.

        All others are saved as they are now; the dictionary says of which of them (and of those that are in no file)
        that this is perhaps not what they were at the step's end.
        """
        every = self.tensors.held(slot)
        held = frozenset(name.removeprefix(PREFIX) for name in every if name.startswith(PREFIX))
        apart: set[str] = set(held)
        known = self._known
        moved = {
            name: f"the buffer {name!r} keeps changing shape or dtype; it may have had a different one at "
            f"the step's end"
            for name, kept in known.items()
            if kept.reforms > 1
        }
        live = {name: kept.tensor for name, kept in known.items()}
        for name, tensor in [*live.items(), *((name, tensor) for name, _, _, tensor in self._unseen())]:
            if name in held or tensor is None or (name not in live and not tensor.numel()):
                continue
            if problem := unstorable(tensor):
                apart.add(name)
                moved[name] = f"the buffer {name!r} {problem}"
            elif name not in self.larger or known[name].changed():
                moved[name] = (
                    f"the buffer {name!r} is saved as of the start of the incident: its first change was "
                    f"seen after the step's copy was taken, or could not be copied"
                )
        return frozenset(apart), moved

    def restore(self, regions: Mapping[str, RegionCopy], forms: SavedForms = NO_FORMS) -> tuple[str, ...]:
        """Put the buffers back; other regions are ignored. Returns why the outcome is not exact, if it is not.

        Those that come with the first forward pass are made here, and those that were reshaped get their form.
        A larger buffer that is not among them had not changed and stays as it is.
        Raises MismatchError, before anything is changed, for a buffer that has another form here.
        """
        known, model = self._known, self._model
        saved = {name.removeprefix(PREFIX): copy for name, copy in regions.items() if name.startswith(PREFIX)}
        misfits = {name for name, copy in saved.items() if name not in known or not known[name].fits(copy)}
        different = {
            name: f"saved {saved[name].dtype} {saved[name].shape}, here {known[name].region.dtype} "
            f"{known[name].region.shape}"
            for name in sorted(misfits & known.keys() - {*forms.reshaped})
        }
        places = {
            name: place
            for name in misfits - different.keys()
            if (place := place_of(model, self._called, name, comes=name in {*forms.volatile, *forms.reshaped}))
        }
        if different:
            raise MismatchError(f"saved buffers do not fit this model: {different}", different=different)
        extra = sorted(misfits - places.keys())  # the loop may have removed a layer since, or before
        for name, place in places.items():
            buffer = tensor_of(saved[name]).to(device_at(place, model), copy=True)  # that can be resized
            put(place, buffer, volatile=name in forms.volatile)
            self._seen.discard(name)
            self.tensors.remove(PREFIX + name)
        if places:
            self._admit(late=True)
        for name, copy in sorted(saved.items()):
            if name in extra:
                continue
            if name not in places:
                known[name].write(copy)
            # A larger one differs from what a fresh model has: whoever reads the next copy needs it too.
            self.tensors.want(PREFIX + name)
        missing = sorted(self.always - saved.keys())
        return (
            *(f"the buffer {name!r} was not saved" for name in missing),
            *(f"the buffer {name!r} was saved, and is not in this model" for name in extra),
        )


class ExtraBuffers(_OfModules):
    """Those of modules among the extras, in `tensors`."""

    def __init__(self, extras: Extras, tensors: BoxTensors | None = None) -> None:
        self.tensors = tensors or BoxTensors()
        self._extras = extras
        saved = {extra: module.state_dict().keys() for extra, module in extras.modules()}
        for extra, key, inside, place in self._every():
            tensor = inside._buffers[place]
            counted = isinstance(inside, AveragedModel)  # how many were averaged is the same everywhere
            if tensor is None or counted or key not in saved[extra] or unstorable(tensor) or not tensor.numel():
                continue
            if _is_small(inside, tensor):
                what, steady = f"extras[{extra!r}][{key!r}]", isinstance(inside, NormBase)
                region = f"{EXTRA_PREFIX}{extra}/{key}"
                self.tensors.add(BoxTensor(region, what, inside._buffers, place, steady=steady))
        self._know(inside for _, module in extras.modules() for inside in module.modules())

    def _every(self) -> Iterator[tuple[str, str, torch.nn.Module, str]]:
        """Each buffer: the extra, the name in it, the module, the name there."""
        for extra, module in self._extras.modules():
            for prefix, inside in module.named_modules():
                for place in [*inside._buffers]:
                    yield extra, f"{prefix}.{place}" if prefix else place, inside, place

    def look_up(self) -> None:
        """See which modules have them now."""
        for extra, key, inside, _ in self._every():
            self.tensors.look_in(f"{EXTRA_PREFIX}{extra}/{key}", inside._buffers)

    def follow(self) -> None:
        """The same at a step's end."""
        self.look_up()
        self._know(inside for _, module in self._extras.modules() for inside in module.modules())

    def of(self, extra: str) -> frozenset[str]:
        """Keys of the buffers of one extra, as its state_dict() calls them."""
        return frozenset(self.tensors.of_kind(f"{EXTRA_PREFIX}{extra}/"))

    def restore(self, regions: Mapping[str, RegionCopy]) -> tuple[str, ...]:
        """Put this rank's own over those that came with the extras. Returns why the outcome is not exact."""
        missing = []
        for kept in self.tensors.of_kind(EXTRA_PREFIX).values():
            copy = regions.get(kept.name)
            if (twin := kept if not kept.misfit() else kept.reformed()) is None or copy is None or not twin.fits(copy):
                missing.append(kept.what)
                continue
            if twin is not kept:
                self.tensors.add(twin)
            twin.write(copy)
        if not missing:
            return ()
        return (f"this rank's own {some(missing, 1)} were not saved, or with a different shape or dtype than here",)


def _is_small(module: torch.nn.Module, tensor: torch.Tensor) -> bool:
    return isinstance(module, NormBase) or local_of(tensor).nbytes <= SMALL_BUFFER_BYTES_MAX
