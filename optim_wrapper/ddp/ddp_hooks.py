"""What DDP's communication hooks keep from one step to the next: found where a hook can keep it, and named.

DDP holds a hook and its `state`. A hook may keep more: what it is bound to, what its closure and its defaults hold,
attributes of its own, globals of its module. Whatever there can change from one step to the next is state that no
checkpoint has. What cannot be looked into counts as state; functions of torch itself keep none.
"""

from __future__ import annotations

import dis
import enum
import functools
import logging
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

_DEPTH_MAX = 6

_FIXED = (
    type(None), bool, int, float, complex, str, bytes, range, type, types.ModuleType, enum.Enum, logging.Logger,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, dist.ProcessGroup, dist.ReduceOp,
    DeviceMesh, types.BuiltinFunctionType, types.MethodDescriptorType, types.GenericAlias,
)  # fmt: skip
"""What does not change, or is set up anew by every start."""


def hidden_states(ddp: DistributedDataParallel) -> list[str]:
    """Why the sums of this DDP depend on more than is saved: one sentence for each hook with a state of its own."""
    reasons = []
    hooks = [("communication hook", hook, state) for hook, state in getattr(ddp, "_comm_hooks", ())]
    of_buffers = getattr(ddp, "buffer_hook", None)
    if of_buffers is not None:
        hooks.append(("buffer hook", of_buffers.buffer_comm_hook, of_buffers.buffer_comm_hook_state))
    for kind, hook, state in hooks:
        kept = next(_kept(hook, state), None)
        if kept is not None:
            reasons.append(f"DDP's {kind} {_name(hook)} has its own state ({kept}), which is not saved")
    return reasons


def _kept(hook: Any, state: object) -> Iterator[str]:
    """Where the hook keeps what can change."""
    if not _is_fixed(state, 0):
        yield f"a {type(state).__name__}, its state"
    yield from _kept_by(hook, 0)


def _kept_by(hook: Any, depth: int) -> Iterator[str]:
    if isinstance(hook, functools.partial):
        for value in (*hook.args, *hook.keywords.values()):
            if not _is_fixed(value, depth + 1):
                yield f"a {type(value).__name__}, an argument of functools.partial"
        yield from _kept_by(hook.func, depth + 1)
    elif isinstance(hook, types.MethodType):
        if not isinstance(hook.__self__, type | types.ModuleType):
            yield f"the {type(hook.__self__).__name__} that it is a method of"
        yield from _kept_by(hook.__func__, depth + 1)
    elif isinstance(hook, types.FunctionType):
        yield from _kept_by_function(hook, depth)
    elif not isinstance(hook, _FIXED):
        yield f"the {type(hook).__name__} that is called"


def _kept_by_function(hook: types.FunctionType, depth: int) -> Iterator[str]:
    for name, value in _reached(hook):
        if not _is_fixed(value, depth + 1):
            yield f"{name!r}, a {type(value).__name__}"
    if not hook.__module__.startswith("torch."):
        for name in _rebound(hook.__code__):
            yield f"{name!r}, which it reassigns"


def _reached(hook: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Names and values that a function finds in its closure, its defaults, its attributes and its module's globals."""
    code = hook.__code__
    for name, cell in zip(code.co_freevars, hook.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            yield name, None  # nothing yet
    defaults = hook.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (hook.__kwdefaults__ or {}).items()
    yield from ((name, value) for name, value in vars(hook).items() if name != "__wrapped__")
    if not hook.__module__.startswith("torch."):
        for name in _global_names(code):
            if name in hook.__globals__:
                yield name, hook.__globals__[name]


def _global_names(code: types.CodeType) -> list[str]:
    names = [str(one.argval) for one in dis.get_instructions(code) if one.opname in {"LOAD_GLOBAL", "LOAD_NAME"}]
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names += _global_names(inner)
    return list(dict.fromkeys(names))


def _rebound(code: types.CodeType, free: tuple[str, ...] | None = None) -> list[str]:
    """Variables outside of the function that it gives other values."""
    free = code.co_freevars if free is None else free
    names = [
        str(one.argval)
        for one in dis.get_instructions(code)
        if one.opname in {"STORE_GLOBAL", "DELETE_GLOBAL"} or (one.opname == "STORE_DEREF" and one.argval in free)
    ]
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names += _rebound(inner, free)
    return list(dict.fromkeys(names))


def _is_fixed(value: object, depth: int) -> bool:
    """Whether a value cannot change from one step to the next, or is the same in every start."""
    if depth > _DEPTH_MAX:
        return False
    if isinstance(value, tuple | frozenset):
        return all(_is_fixed(one, depth + 1) for one in value)
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return next(_kept_by(value, depth + 1), None) is None
    return isinstance(value, _FIXED)


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))
