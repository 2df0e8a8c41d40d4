"""Every DistributedDataParallel that holds a parameter of the job, wherever it is, and modules that only it leads to.

A loop may register the network and call a DDP around it, train a second DDP that it has not registered, put several
into one model, or mark a module with `replicate`, which keeps its DDP to itself. All are found by the parameters that
they hold: those that exist when the first TFTRegister is made among the collector's objects, later ones by torch's
registration hook, which tells of the moment in which a DDP takes its module.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from lastwords.optim_wrapper.ddp.ddp_private import one_layer_off

_M = TypeVar("_M", bound=torch.nn.Module)
OnFound = Callable[[DistributedDataParallel, torch.nn.Module], None]

_known: weakref.WeakKeyDictionary[DistributedDataParallel, int] = weakref.WeakKeyDictionary()  # as they came
_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_looked = False


class Listener:
    """Hears of each DDP that is made while it lives, and of its network, in the DDP's constructor."""

    def __init__(self, found: OnFound) -> None:
        self.found = found
        _listeners.add(self)


def known_ddps() -> list[DistributedDataParallel]:
    """All that live, in no particular order. The first call looks through all objects (some 20 ms)."""
    global _looked
    if not _looked:
        _looked = True
        for ddp in _made(DistributedDataParallel):
            _note(ddp)
    return [ddp for ddp in _known if hasattr(ddp, "reducer")]


def holding(parameters: Sequence[torch.Tensor]) -> list[DistributedDataParallel]:
    """DDPs that hold any of `parameters`, in the order of those that each holds, and else as they came."""
    places = places_of(parameters)
    found = [(span_of(ddp.module, places), _known[ddp], ddp) for ddp in known_ddps()]
    return [ddp for span, _, ddp in sorted(found, key=lambda item: item[:2]) if span]


def places_of(parameters: Iterable[torch.Tensor]) -> dict[int, int]:
    """Where each parameter stands, by its id."""
    places: dict[int, int] = {}
    for parameter in parameters:
        places.setdefault(id(parameter), len(places))
    return places


def span_of(network: torch.nn.Module, places: dict[int, int]) -> tuple[int, ...]:
    """The places that the network holds a parameter of, sorted."""
    return tuple(sorted({places[id(one)] for one in network.parameters() if id(one) in places}))


class Beside(torch.nn.Module):
    """The registered model, and modules of trained parameters that are not in it (another network of a GAN).

    Names are those of the model. Of the modules beside it, the parameters that an optimizer has keep their names there
    (`~group1.0`); frozen ones and buffers have `~beside1.` in front. Never called.
    """

    def __init__(self, model: torch.nn.Module, others: Sequence[torch.nn.Module], trained: Iterable[torch.Tensor]):
        super().__init__()
        self.inner = model
        self.others = torch.nn.ModuleList(others)
        self._trained = frozenset(id(parameter) for parameter in trained)

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Those of the model under their own names, then those of each other module that are not in it."""
        memo = set() if memo is None else memo
        yield from self.inner.named_modules(memo, prefix, remove_duplicate)
        for number, other in enumerate(self.others, 1):
            yield from other.named_modules(memo, f"~beside{number}", True)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those of the model, then the frozen ones of the others."""
        own = {id(parameter) for parameter in self.inner.parameters()}
        yield from self.inner.named_parameters(prefix, recurse, remove_duplicate)
        for number, other in enumerate(self.others, 1):
            for name, parameter in other.named_parameters(f"~beside{number}"):
                if id(parameter) not in own and id(parameter) not in self._trained:
                    own.add(id(parameter))
                    yield name, parameter


def with_those_beside(model: torch.nn.Module, own: Collection[int], trained: Sequence[torch.Tensor]) -> torch.nn.Module:
    """`model`, together with the modules that alone hold some of the `trained` parameters, if there are any.

    own: ids of the parameters that the model leads to. Such a module is the network of a DDP if one holds the
    parameter, else the largest module that does.
    """
    left = [parameter for parameter in trained if id(parameter) not in own]
    if not left:
        return model
    places = places_of(left)
    found: dict[int, list[torch.nn.Module]] = {}
    for module in {id(one): one for one in (_network(ddp) for ddp in holding(left))}.values():
        found.setdefault(_first(module, places), []).append(module)
    covered = {id(one) for modules in found.values() for module in modules for one in module.parameters()}
    rest = {key: place for key, place in places.items() if key not in covered}
    if rest:
        for module in _largest(rest):
            found.setdefault(_first(module, places), []).append(module)
    skipped = frozenset(places).union(own)
    others = [
        module
        for place in sorted(found)
        for module in sorted(found[place], key=lambda one: type(one).__qualname__)
        if _has_more(module, model, skipped)
    ]
    return Beside(model, others, trained) if others else model


def _network(module: torch.nn.Module) -> torch.nn.Module:
    while (inner := one_layer_off(module)) is not None:
        module = inner
    return module


def _first(module: torch.nn.Module, places: dict[int, int]) -> int:
    return min((places[id(one)] for one in module.parameters() if id(one) in places), default=len(places))


def _largest(places: dict[int, int]) -> list[torch.nn.Module]:
    """Live modules that hold any of these parameters and are in no other such module."""
    holders = [module for module in _made(torch.nn.Module) if any(id(one) in places for one in module.parameters())]
    inside = {id(inner) for module in holders for inner in module.modules() if inner is not module}
    networks = (_network(module) for module in holders if id(module) not in inside)
    return list({id(network): network for network in networks}.values())


def _has_more(module: torch.nn.Module, model: torch.nn.Module, parameters: frozenset[int]) -> bool:
    """Whether the module has tensors that are neither of these parameters nor in the model."""
    known = parameters | {id(buffer) for buffer in model.buffers()}
    return any(id(tensor) not in known for tensor in (*module.parameters(), *module.buffers()))


def _made(kind: type[_M]) -> list[_M]:
    """Living modules whose constructors have come so far; no `__getattr__` of theirs is asked.

    Those that `gc.freeze()` has set aside, too. They are not set aside again: that would be whatever lives by then.
    """
    gc.unfreeze()
    # By type(): isinstance() would ask objects of all libraries for their __class__, and proxies answer with effects.
    found = [one for one in gc.get_objects() if issubclass(type(one), kind)]
    return [one for one in found if "_modules" in object.__getattribute__(one, "__dict__")]


def _note(ddp: DistributedDataParallel) -> None:
    _known.setdefault(ddp, 1 + max(_known.values(), default=0))


def _registered(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
    if name == "module" and submodule is not None and isinstance(module, DistributedDataParallel):
        _note(module)
        for listener in list(_listeners):
            listener.found(module, submodule)


register_module_module_registration_hook(_registered)
