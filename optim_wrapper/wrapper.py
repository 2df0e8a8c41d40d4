"""`OptTFTWrapper`: an optimizer that says where its step stands.

It is a `torch.optim.Optimizer` to everything around it and owns nothing: `state`, `param_groups` and
`defaults` are the inner optimizer's own objects at any time. Until `attach` is called (by `TFTRegister`),
and after `detach`, its step is the inner optimizer's step and nothing else.

The order inside an attached step:

1. the wrapper's own step pre-hooks, then the inner optimizer's (torch's global ones first), so that whatever
   they do to the gradients is done;
2. `begin_update()`: the gradients are final; may pass a gate, may block, which parks the rank;
3. the inner optimizer writes;
4. `end_update()`, or `tear_update()` if it raised while it wrote;
5. the inner optimizer's step post-hooks, then the wrapper's own.

A ZeroRedundancyOptimizer writes its shard with an optimizer of its own and then broadcasts: 2 to 4 lie around the
writing alone, because a shard that is written is whole even if a broadcast fails after it.

With a closure 2 comes after the closure's first backward pass, as only then the gradients are final. An
optimizer that calls its closure again and again (LBFGS) does so while it writes: a rank that dies then tears
the update of every other rank, and that step's checkpoint has to come from a rank that is not yet so far.
An optimizer that writes before it calls its closure (SAM) is found out in its first step, which therefore
counts as an update from its beginning to its end, and so do all later ones.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer

from lastwords.errors import ConfigError, NotAnOptimizerError
from lastwords.sharding import zero
from lastwords.sharding.dtensor import local_of
from lastwords.torch_private import global_step_hooks

# Finding out whether an optimizer writes before it calls its closure (SAM does, LBFGS does not).


def fingerprint_of(inner: Optimizer) -> list[Any]:
    """Enough of parameters and state to see whether an optimizer has written; entries (place, version, norm)."""
    entries: list[Any] = []

    def add(place: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                plain = local_of(value).detach()  # a DTensor's norm would be a collective
                has_norm = plain.is_complex() or (plain.is_floating_point() and plain.element_size() > 1)
                norm = plain.norm() if has_norm else plain.double().norm()
            # Writing through `.data` leaves the version as it is, so the norm is looked at too.
            entries.append((place, value._version, repr(norm.item())))
        elif isinstance(value, int | float | str | bool | None):
            entries.append((place, value, ""))

    for g, group in enumerate(inner.param_groups):
        for i, parameter in enumerate(group["params"]):
            add((g, i), parameter)
            for key, value in inner.state.get(parameter, {}).items() if parameter in inner.state else ():
                add((g, i, key), value)
    return entries


def same_fingerprint(before: list[Any], now: list[Any]) -> bool:
    """Whether everything that was there before is unchanged.

    >>> same_fingerprint([((0, 0), 1, "2.0")], [((0, 0), 1, "2.0"), ((0, 0, "step"), 0, "")])
    True
    """
    # State that an optimizer creates on its first step (LBFGS sets its counters up) is new, not written over.
    known = {entry[0]: entry[1:] for entry in now}
    return all(known.get(place) == tuple(rest) for place, *rest in before)


_HOOK_KEY = "lastwords"
"""Key of our entry in the inner optimizer's hook tables; torch's own keys are integers."""

_STANDS_IN = "_lastwords_stands_in"

_log = logging.getLogger(__name__)

_wrappers: weakref.WeakKeyDictionary[Optimizer, weakref.ref[OptTFTWrapper]] = weakref.WeakKeyDictionary()


adopted_groups: weakref.WeakKeyDictionary[Optimizer, list[frozenset[int]]] = weakref.WeakKeyDictionary()
"""Of the groups that resume() has added, and that the loop has not added again: ids of the parameters of each."""


def _came_back(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the loop adds a group that resume() has added: it is there then, with the values that were saved.

    Once for each; a generator of parameters becomes a list in `group`.
    """
    waiting = adopted_groups.get(optimizer)
    if not waiting or "params" not in group:
        return False
    given = group["params"]
    if not isinstance(given, torch.Tensor | set):
        given = group["params"] = list(given)
    each = [given] if isinstance(given, torch.Tensor) else given
    ids = frozenset(id(one[1] if isinstance(one, tuple) else one) for one in each)  # (name, parameter)
    if ids not in waiting:
        return False
    waiting.remove(ids)
    _log.info("add_param_group(): resume() has already added this group, with the saved values")
    return True


class StepHooks(Protocol):
    """Who is told where a step stands. All are called on the thread that calls `step`."""

    def begin_update(self) -> None:
        """The gradients are final and the optimizer is about to write. May block (the rank is parked), may raise."""

    def end_update(self) -> None:
        """The optimizer has written everything."""

    def tear_update(self) -> None:
        """The optimizer raised while it wrote; the error goes on to the caller afterwards."""


class _Inners:
    """An attribute of the inner optimizer; what is set before there is one passes by."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type) -> Any:
        return self if wrapper is None else getattr(wrapper._inner, self._name)

    def __set__(self, wrapper: Any, value: Any) -> None:
        if "_inner" in wrapper.__dict__:
            setattr(wrapper._inner, self._name, value)

    def __delete__(self, wrapper: Any) -> None:
        delattr(wrapper._inner, self._name)


class OptTFTWrapper(Optimizer):
    """Wraps any `torch.optim.Optimizer`; hand it to schedulers, scalers and loops in the inner one's place.

    Copies made by deepcopy or pickle are not attached, just as they have no hooks.

    Args:
        optimizer: the inner one.

    Raises:
        NotAnOptimizerError: it is not an Optimizer.
        ConfigError: it is wrapped already.
    """

    _inner: Optimizer

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            kind = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
            raise NotAnOptimizerError(
                f"OptTFTWrapper takes a torch.optim.Optimizer, not {kind}; "
                "pass an instance, for example OptTFTWrapper(torch.optim.AdamW(model.parameters(), lr=1e-3))"
                f"{zero.told_of_deepspeed()}"
            )
        _refuse_second_wrapper(optimizer)
        _refuse_unmade(optimizer)
        self._adopt(optimizer)

    def _adopt(self, inner: Optimizer) -> None:
        # Optimizer.__init__ makes the hook tables and would make a state and groups of its own; `_inner` is not
        # set yet, so what is set of `_Inners` and add_param_group let those pass by without touching the inner ones.
        self.__dict__.pop("_inner", None)
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner
        self._writer = zero.stateful(inner)
        self._hooks: StepHooks | None = None
        self._admit: Callable[[dict[str, Any]], None] | None = None
        self._zeroed: Callable[..., None] | None = None
        self._begun = False
        self._ended = False
        self._stepping = False
        self._tears_unsaid = False
        self._guard: Any = None
        self._hook_tables_work = True
        self._writes_before_closure: bool | None = None
        _wrappers[inner] = weakref.ref(self)

    # ------------------------------------------------------------------ the lastwords side

    @property
    def inner(self) -> Optimizer:
        """The wrapped optimizer."""
        return self._inner

    @property
    def writer(self) -> Optimizer:
        """The optimizer that writes weights and state: the local one inside a ZeroRedundancyOptimizer, else `inner`."""
        return self._writer

    def attach(self, hooks: StepHooks, *, copied: bool = True) -> None:
        """Report every later step to `hooks`. copied: copies of the last step are there meanwhile."""
        if self._hooks is not None:
            raise ConfigError("this optimizer is already attached to a TFTRegister; exit that TFTRegister first")
        self._hooks, self._tears_unsaid = hooks, not copied
        if "_optimizer_step_pre_hooks" in self._inner.__dict__:
            self._guard = self._inner.register_step_pre_hook(self._refuse_foreign_step)

    def detach(self) -> None:
        """Back to a plain step. Harmless if nothing is attached."""
        self._hooks = self._admit = self._zeroed = None
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    def stand_in(self) -> None:
        """The inner optimizer's own `step` and `zero_grad` are these from now on, while attached.

        So whoever holds the inner one, a scheduler or a framework, goes on with it.
        """
        for name in ("step", "zero_grad"):
            self._stand_in(name)

    def _stand_in(self, name: str) -> None:
        plain, ours, inside = getattr(self._inner, name), getattr(self, name), False

        @functools.wraps(plain)  # with the marks that torch's schedulers leave on it
        def call(inner: Optimizer, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside or self._stepping or self._hooks is None:
                return plain(*args, **kwargs)
            inside = True
            try:
                return ours(*args, **kwargs)
            finally:
                inside = False

        call.__dict__[_STANDS_IN] = True
        setattr(self._inner, name, types.MethodType(call, self._inner))  # torch's schedulers look for its function

    def watch_groups(self, admit: Callable[[dict[str, Any]], None]) -> None:
        """Show each new group to `admit` first; it raises for one that nobody would save."""
        self._admit = admit

    def watch_zero_grad(self, zeroed: Callable[..., None]) -> None:
        """Call `zeroed` after each `zero_grad`, with its arguments."""
        self._zeroed = zeroed

    # ------------------------------------------------------------------ the step

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The inner optimizer's step; see the head of this module for what is reported when."""
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            return self._step_with_own_hooks(closure, *args, **kwargs)
        hooks, inner = self._hooks, self._inner
        if hooks is None:
            if closure is None and not args:
                return inner.step(**kwargs)
            return inner.step(closure, *args, **kwargs)  # type: ignore[call-overload]
        if closure is not None or args or self._writer is not inner or _has_step_hooks(inner):
            return self._reported_step(closure, args, kwargs)
        # What nearly every step is: no closure and no hooks, so nothing of ours has to go between the inner one's.
        hooks.begin_update()
        self._stepping = True
        try:
            value = inner.step(**kwargs)
        except BaseException:  # handed to the caller
            hooks.tear_update()
            raise
        finally:
            self._stepping = False
        hooks.end_update()
        return value

    # torch would wrap `step` once more, to run hooks and to open a profiler range. The inner step does both
    # itself; done twice, torch's global step hooks would count every step twice.
    step.hooked = True  # type: ignore[attr-defined]

    def _step_with_own_hooks(self, *args: Any, **kwargs: Any) -> Any:
        call_args: tuple[Any, ...] = (self, *(args if args[0] is not None or len(args) > 1 else ()))
        for pre_hook in tuple(self._optimizer_step_pre_hooks.values()):
            result = pre_hook(self, call_args, kwargs)
            if result is not None:
                if not (isinstance(result, tuple) and len(result) == 2):
                    raise RuntimeError(f"step pre-hook must return None or (args, kwargs), but got {result}")
                call_args, kwargs = result
        closure = kwargs.get("closure") if len(call_args) < 2 else call_args[1]
        if self._hooks is None:
            value = self._inner.step(*call_args[1:], **kwargs)
        else:
            rest = {key: item for key, item in kwargs.items() if key != "closure"}
            value = self._reported_step(closure, call_args[2:], rest)
        for post_hook in tuple(self._optimizer_step_post_hooks.values()):
            post_hook(self, call_args, kwargs)
        return value

    def _reported_step(self, closure: Callable[[], Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hooks = self._hooks
        assert hooks is not None
        inner: Any = self._inner
        self._begun = self._ended = False
        in_tables = self._hook_tables_work and (self._writer is not inner or _has_step_hooks(inner))
        if in_tables:
            self._put_into_tables(before=closure is None)
        self._stepping = True
        try:
            if closure is not None:
                value = inner.step(self._wrap_closure(closure), *args, **kwargs)
            else:
                if not in_tables:
                    self._begin_update(hooks)
                # No None in the call without a closure: some optimizers' steps take no argument at all.
                value = inner.step(None, *args, **kwargs) if args else inner.step(**kwargs)
        except BaseException:  # handed to the caller
            if self._begun and not self._ended:
                hooks.tear_update()
            raise
        finally:
            self._stepping = False
            if in_tables:
                self._take_from_tables()
        if not self._begun:
            # The step ran neither our pre-hook nor the closure: it has been replaced by something that knows no
            # hooks. Report this step afterwards and, from the next one on, do not count on the tables.
            self._hook_tables_work = False
            self._begin_update(hooks)
        if not self._ended:
            self._end_update(hooks)
        return value

    def _begin_update(self, hooks: StepHooks) -> None:
        hooks.begin_update()
        self._begun = True

    def _end_update(self, hooks: StepHooks) -> None:
        self._ended = True
        hooks.end_update()

    def _wrap_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        hooks = self._hooks
        assert hooks is not None
        fingerprint: list[Any] | None = None
        called = False
        if self._writes_before_closure is None:
            fingerprint = fingerprint_of(self._inner)
        if self._writes_before_closure is not False:
            self._begin_update(hooks)

        def reported_closure() -> Any:
            nonlocal fingerprint, called
            if fingerprint is not None:
                self._writes_before_closure = not same_fingerprint(fingerprint, fingerprint_of(self._inner))
                fingerprint = None
            if self._tears_unsaid and (called or self._writes_before_closure):
                self._tears_unsaid = False
                _log.warning(
                    "%s calls its closure while it writes: if a rank dies in there, no other one has a state that can "
                    "be saved; pass copy=True to TFTRegister, which keeps a copy of the step before",
                    type(self._inner).__name__,
                )
            called = True
            value = closure()
            if not self._begun:
                self._begin_update(hooks)
            return value

        return reported_closure

    def _refuse_foreign_step(self, *_: object) -> None:
        """Before the inner optimizer writes, whoever stepped it."""
        if not self._stepping and self._hooks is not None:
            raise ConfigError(
                f"the {type(self._inner).__name__} inside OptTFTWrapper was stepped directly, so lastwords "
                f"would not know which step its weights belong to; call step() of the wrapper "
                f"(`tft.optimizer` after protect()), "
                "and pass the wrapper to gradient scalers and frameworks. Nothing was written"
            )

    # -------- our place between the inner optimizer's hooks and its writing

    def _put_into_tables(self, *, before: bool) -> None:
        pre: Any = self._writer._optimizer_step_pre_hooks
        post: Any = self._writer._optimizer_step_post_hooks
        if before:
            pre[_HOOK_KEY] = self._on_inner_pre_hook
        post[_HOOK_KEY] = self._on_inner_post_hook
        post.move_to_end(_HOOK_KEY, last=False)

    def _take_from_tables(self) -> None:
        tables: Any = (self._writer._optimizer_step_pre_hooks, self._writer._optimizer_step_post_hooks)
        for table in tables:
            table.pop(_HOOK_KEY, None)

    def _on_inner_pre_hook(self, *_: object) -> None:
        if self._hooks is not None and not self._begun:
            self._begin_update(self._hooks)

    def _on_inner_post_hook(self, *_: object) -> None:
        if self._hooks is not None and self._begun and not self._ended:
            self._end_update(self._hooks)

    # ------------------------------------------------------------------ the Optimizer side, all the inner one's

    state: Any = _Inners()
    param_groups: Any = _Inners()
    defaults: Any = _Inners()
    # GradScaler's scale and verdict while it steps a fused optimizer, which reads them.
    grad_scale: Any = _Inners()
    found_inf: Any = _Inners()

    def __getattr__(self, name: str) -> Any:
        # Only for names that the wrapper does not have: `train`, `consolidate_state_dict`,
        # `_step_supports_amp_scaling`, whatever else the inner optimizer offers.
        inner = self.__dict__.get("_inner")
        if inner is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "_step_supports_amp_scaling" and "grad_scaler" in inspect.signature(inner.step).parameters:
            # The old contract hands the scaler to step(), found by its signature, which is not visible here: let
            # GradScaler unscale and skip by itself, as it does for every plain optimizer.
            return False
        return getattr(inner, name)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The inner optimizer's zero_grad."""
        self._inner.zero_grad(*args, **kwargs)
        if self._zeroed is not None:
            self._zeroed(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        if "_inner" in self.__dict__:
            if self._admit is not None:
                self._admit(param_group)
            if not _came_back(self._inner, param_group):
                self._inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state_dict; hooks of both run, each with its own optimizer."""
        for pre_hook in tuple(self._optimizer_state_dict_pre_hooks.values()):
            pre_hook(self)
        state_dict = self._inner.state_dict()
        for post_hook in tuple(self._optimizer_state_dict_post_hooks.values()):
            result = post_hook(self, state_dict)
            if result is not None:
                state_dict = result
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the inner optimizer; hooks of both run, each with its own optimizer."""
        state_dict = state_dict.copy()
        for pre_hook in tuple(self._optimizer_load_state_dict_pre_hooks.values()):
            result = pre_hook(self, state_dict)
            if result is not None:
                state_dict = result
        self._inner.load_state_dict(state_dict)
        for post_hook in tuple(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self._inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Code that swaps the state in place (as torch's own load_state_dict does) calls this on a live optimizer.
        if "inner" in state:
            self._adopt(state["inner"])
        else:
            self._inner.__setstate__(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"


def _refuse_unmade(optimizer: Optimizer) -> None:
    """ConfigError for one that has never called `Optimizer.__init__`, as `PostLocalSGDOptimizer` does not."""
    if hasattr(optimizer, "defaults"):
        return
    name = type(optimizer).__name__
    inside = isinstance(getattr(optimizer, "optim", None), Optimizer)
    raise ConfigError(
        f"{name} has never called Optimizer.__init__, so it lacks what every torch optimizer has; "
        + (
            "wrap its `.optim` instead, and do what it adds (averaging weights, say) in the loop, before the step ends"
            if inside
            else f"call super().__init__(params, defaults) in {name}.__init__"
        )
    )


def _refuse_second_wrapper(optimizer: Optimizer) -> None:
    seen: Any = optimizer
    for _ in range(8):  # wrappers of other libraries (Accelerate's, for one) keep theirs under this name
        if isinstance(seen, OptTFTWrapper):
            raise ConfigError("this optimizer is already an OptTFTWrapper, or contains one; wrap it once")
        seen = getattr(seen, "__dict__", {}).get("optimizer")
    earlier = _wrappers.get(optimizer)
    if earlier is not None and earlier() is not None:
        raise ConfigError(
            f"this {type(optimizer).__name__} is already wrapped by another OptTFTWrapper; wrap it once and "
            f"use that wrapper"
        )


def stands_in(method: object) -> bool:
    """Whether it is an `OptTFTWrapper`'s, in the place of an optimizer's own."""
    return bool(getattr(method, _STANDS_IN, False))


def _has_step_hooks(inner: Optimizer) -> bool:
    """Whether any run around an optimizer's own step, beside our guard."""
    own = inner.__dict__
    before, after = own.get("_optimizer_step_pre_hooks"), own.get("_optimizer_step_post_hooks")
    if before is None:
        return bool(after)
    return bool(len(before) > 1 or after or _before_all or _after_all)


_before_all, _after_all = global_step_hooks
