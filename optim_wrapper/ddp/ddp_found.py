"""Every DistributedDataParallel that holds a parameter of the job, wherever it is, and modules that only it leads to.

A loop may register the network and call a DDP around it, train a second DDP that it has not registered, put several
into one model, or mark a module with `replicate`, which keeps its DDP to itself. All are found by the parameters that
they hold: those that exist when the first TFTRegister is made among the collector's objects, later ones by torch's
registration hook, which tells of the moment in which a DDP takes its module.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

# What lastwords uses of DistributedDataParallel beyond its public face: looked up by name, tested, with reasons.

_MODEL_NAMES = (
    "reducer",
    "logger",
    "require_backward_grad_sync",
    "static_graph",
    "find_unused_parameters",
    "_build_params_for_reducer",
    "_get_ddp_logging_data",
)
_REDUCER_NAMES = ("_rebuild_buckets", "prepare_for_forward", "prepare_for_backward", "_delay_all_reduce")
_BUCKETS = "rebuilt_per_bucket_param_indices"


def find_ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel in a model as the loop calls it, looked for under wrappers; None if none."""
    inner: torch.nn.Module | None = model
    while inner is not None and not isinstance(inner, DistributedDataParallel):
        inner = one_layer_off(inner)
    return inner


def one_layer_off(model: torch.nn.Module) -> torch.nn.Module | None:
    """What is under DDP, DataParallel, torch.compile, or a wrapper that adds nothing to it; None for any other module.

    Such wrappers keep the model as `_forward_module` (Fabric) or, around DDP, as `module` (Accelerate and loops of
    one's own). A module with tensors of its own beside those is no wrapper.
    """
    if isinstance(model, DistributedDataParallel | DataParallel):
        return cast(torch.nn.Module, model.module)
    for name in ("_orig_mod", "_forward_module", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, torch.nn.Module) and (
            name == "_orig_mod"
            or ((name == "_forward_module" or find_ddp(inner) is not None) and _tensors(model) == _tensors(inner))
        ):
            return inner
    return None


def _tensors(model: torch.nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*model.parameters(), *model.buffers())}


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the compiler runs this module or one in it, and would trace what hooks do."""
    return any(
        isinstance(getattr(module, "_orig_mod", None), torch.nn.Module)
        or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def capability(ddp: DistributedDataParallel) -> list[str]:
    """Why the order of this model's buckets cannot be recorded or replayed; empty if it can."""
    missing = [f"DistributedDataParallel.{name}" for name in _MODEL_NAMES if not hasattr(ddp, name)]
    missing += [f"Reducer.{name}" for name in _REDUCER_NAMES if not hasattr(getattr(ddp, "reducer", None), name)]
    if not hasattr(getattr(ddp, "logger", None), "set_runtime_stats_and_log"):
        missing.append("Logger.set_runtime_stats_and_log")
    if missing:
        return [
            f"this torch ({torch.__version__}) has no {', '.join(missing)}, so the order of DDP's buckets "
            f"cannot be restored"
        ]
    reasons = []
    if getattr(ddp, "_use_python_reducer", False):
        reasons.append("DDP runs in the compiler's Python reducer mode, whose reduction order is not recorded")
    if getattr(ddp, "_delay_all_reduce_all_params", False) or getattr(ddp, "_delay_all_reduce_params", None):
        reasons.append("DDP delays the reduction of some parameters, which is not replayed")
    if getattr(ddp, "mixed_precision", None) is not None:
        reasons.append("DDP's own mixed precision is on, which is not replayed; use torch.autocast")
    return reasons


def build_parameters(ddp: DistributedDataParallel) -> tuple[list[torch.Tensor], list[bool]]:
    """The reducer's parameters in its own numbering, and whether each gets sparse gradients."""
    built: Any = ddp._build_params_for_reducer
    parameters, sparse = built()
    return list(parameters), list(sparse)


def reducer_parameters(ddp: DistributedDataParallel) -> tuple[list[str], list[torch.Tensor]]:
    """Names and parameters in the reducer's own numbering."""
    parameters: list[torch.Tensor] = build_parameters(ddp)[0]
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return [names.get(id(parameter), "?") for parameter in parameters], parameters


def buckets_from_log(ddp: DistributedDataParallel) -> list[list[int]] | None:
    """The rebuilt buckets as DDP's logging data show them, from the third iteration on; None before.

    Takes the reducer's lock: only for the training thread, outside of a backward pass.

    >>> parse_buckets("7 6 5 4, 2 3 1 0")
    [[7, 6, 5, 4], [2, 3, 1, 0]]
    """
    logged: Any = ddp._get_ddp_logging_data
    found = logged()
    text = found.get(_BUCKETS)
    if not found.get("has_rebuilt_buckets") or not isinstance(text, str):
        return None
    return parse_buckets(text)


def parse_buckets(text: str) -> list[list[int]] | None:
    """Indices by bucket, from DDP's text; None for a text of another form.

    >>> parse_buckets("5 4") , parse_buckets("?"), parse_buckets("")
    ([[5, 4]], None, None)
    """
    try:
        buckets = [[int(index) for index in bucket.split()] for bucket in text.split(",")]
    except ValueError:
        return None
    return buckets if all(buckets) else None


def kinds_of(ddp: DistributedDataParallel) -> list[tuple[str, str, bool]]:
    """What each of the reducer's parameters shares a bucket by: dtype, device, and whether its gradients are sparse."""
    parameters, sparse = build_parameters(ddp)
    return [(str(one.dtype), str(one.device), thin) for one, thin in zip(parameters, sparse, strict=True)]


def replicate_states(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Modules that `torch.distributed._composable.replicate` has marked, with its state, which holds their DDP.

    That is made in the first forward pass, or by the state's `lazy_init()`.
    """
    marking: Any = getattr(sys.modules.get("torch.distributed._composable.replicate"), "replicate", None)
    if marking is None:
        return
    for module in model.modules():
        state = marking.state(module)
        if hasattr(state, "lazy_init") and hasattr(state, "_param_list"):
            yield module, state


def agreed_order(
    order: Sequence[int], buckets: Sequence[Sequence[int]], kinds: Sequence[object] | None = None
) -> list[int]:
    """The order that leads to `buckets`: `order` itself if its items come as they do there, else the buckets' own.

    Buckets of one kind (see `kinds_of`) fill one after the other, so within a kind they stand in the order of the
    gradients; those of several kinds fill at the same time. kinds: by index; None: all are of one.
    In a static graph an item may come twice, of which the last time counts, or never.

    >>> agreed_order([3, 2, 1, 0], [[3, 2], [1, 0]]), agreed_order([3, 1, 2, 0], [[2, 3], [1, 0]])
    ([3, 2, 1, 0], [2, 3, 1, 0])
    >>> agreed_order([0, 1, 2], [[2], [1, 0]]), agreed_order([3, 1, 2, 0], [[3, 2], [1, 0]], ["a", "a", "b", "b"])
    ([2, 1, 0], [3, 1, 2, 0])
    >>> agreed_order([1, 0, 1], [[0, 1, 2]]), agreed_order([1, 0, 1], [[1, 0, 2]])
    ([1, 0, 1], [1, 1, 0])
    """
    last = {index: place for place, index in enumerate(order)}
    known = [index for bucket in buckets for index in bucket if index in last]
    of_kind: dict[object, list[int]] = {}
    for index in known:
        of_kind.setdefault(None if kinds is None else kinds[index], []).append(last[index])
    if all(places == sorted(places) for places in of_kind.values()):
        return list(order)
    earlier = [index for place, index in enumerate(order) if last[index] != place]
    return earlier + known


_M = TypeVar("_M", bound=torch.nn.Module)

_known: weakref.WeakKeyDictionary[DistributedDataParallel, int] = weakref.WeakKeyDictionary()  # as they came
listeners: weakref.WeakSet[Any] = weakref.WeakSet()
"""Their `found` is called with each DDP that is made, and its network, in the DDP's constructor."""
_looked = False


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


class ModulesBeside(torch.nn.Module):
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
    for module in {id(one): one for one in (unwrap(ddp) for ddp in holding(left))}.values():
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
    return ModulesBeside(model, others, trained) if others else model


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module under DDP, DataParallel, torch.compile and the like, in any order."""
    while (inner := one_layer_off(model)) is not None:
        model = inner
    return model


def _first(module: torch.nn.Module, places: dict[int, int]) -> int:
    return min((places[id(one)] for one in module.parameters() if id(one) in places), default=len(places))


def _largest(places: dict[int, int]) -> list[torch.nn.Module]:
    """Live modules that hold any of these parameters and are in no other such module."""
    holders = [module for module in _made(torch.nn.Module) if any(id(one) in places for one in module.parameters())]
    inside = {id(inner) for module in holders for inner in module.modules() if inner is not module}
    networks = (unwrap(module) for module in holders if id(module) not in inside)
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
        for listener in list(listeners):
            listener.found(module, submodule)


register_module_module_registration_hook(_registered)
