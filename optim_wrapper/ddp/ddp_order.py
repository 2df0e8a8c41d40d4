"""The order of one DDP's gradients: recorded in its first synchronised backward passes, and replayed.

See `ddp_buckets`, which does so for all DDPs of a job.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import json
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lastwords import threads
from lastwords.checkpoint.codec import from_json
from lastwords.checkpoint.meta import BucketRecord
from lastwords.errors import FormatError, UnavailableError
from lastwords.optim_wrapper.ddp.ddp_found import (
    agreed_order,
    buckets_from_log,
    build_parameters,
    capability,
    kinds_of,
    reducer_parameters,
)
from lastwords.optim_wrapper.ddp.staying_hook import StayingHook
from lastwords.torch_private import Store

# What DDP's communication hooks keep from one step to the next: found where a hook can keep it, and named.
#
# DDP holds a hook and its `state`. A hook may keep more: what it is bound to, what its closure and its defaults hold,
# attributes of its own, globals of its module. Whatever there can change from one step to the next is state that no
# checkpoint has. What cannot be looked into counts as state; functions of torch itself keep none.

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


# Rank 0's order of gradients, told to the other ranks of its DDP once, through the process group's store.
#
# Until DDP's logging data show the buckets, nobody else knows that order, and it is the one that counts. No collective:
# a rank that has died must keep nobody waiting, so a thread of its own writes the order, or looks for it now and then.

_log = logging.getLogger(__name__)

_LOOK_S = 0.02
_LOOKS_MAX = 3000
"""A minute of looks: rank 0 may reach its first backward pass later than this rank."""

Passes = list[list[int]]


class OrderBoard:
    """One DDP's entry in the store. key: the same on all ranks of its process group; writes: this is its rank 0."""

    def __init__(self, store: Store, key: str, *, writes: bool) -> None:
        self._store = store
        self._key = key
        self._writes = writes
        self._there = threading.Event()
        self._over = threading.Event()
        self._found: Passes | None = None
        self._thread: threading.Thread | None = None

    def exchange(self, passes: Passes) -> None:
        """Write these passes, or begin to look for those of rank 0; returns at once."""
        if self._thread is None:
            act = self._write if self._writes else self._look
            try:
                self._thread = threads.start(act, passes, name="lastwords-gradient-order")
            except UnavailableError as error:
                _log.info("the order of DDP's gradients is not exchanged yet: %s", error)

    def found(self, wait_s: float) -> Passes | None:
        """Rank 0's passes; None if they have not come after `wait_s`."""
        if self._thread is not None:
            self._there.wait(wait_s)
        return self._found

    def close(self) -> None:
        self._over.set()

    def _write(self, passes: Passes) -> None:
        try:
            self._store.set(self._key, json.dumps(passes))
        except (dist.DistError, RuntimeError) as error:
            _log.info("the order of DDP's gradients could not be sent to the other ranks: %s", error)

    def _look(self, _: Passes) -> None:
        try:
            for _look in range(_LOOKS_MAX):
                if self._store.check([self._key]):
                    self._found = _passes(self._store.get(self._key))
                    break
                if self._over.wait(_LOOK_S):
                    break
        except (dist.DistError, RuntimeError) as error:
            _log.info("rank 0's order of DDP's gradients could not be read: %s", error)
        self._there.set()


def _passes(text: bytes) -> Passes | None:
    """
    >>> _passes(b"[[1, 0]]"), _passes(b"{}"), _passes(b"[[true]]"), _passes(b"\\xff")
    ([[1, 0]], None, None, None)
    """
    try:
        return from_json(text, list[list[int]])
    except FormatError:
        return None


_ORDER_LOOKS_MAX = 8
"""Steps after which the logging data are no longer asked for the buckets; torch shows them in the third."""

_EMPTY_LOOKS = frozenset({3, 4, 8, 16, 32})
"""Steps after which the logging data are asked where no pass was seen to be whole."""

_FETCH_WAIT_S = 1.0
"""How long a writer waits for rank 0's order, which is in the store since that rank's first backward pass."""

_replaying = threading.Event()

OPTIONS = ("bucket_bytes_cap", "broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")


class GradientOrder:
    """Watches the first synchronised backward passes of one DDP, which it does not keep alive.

    Made before the first of them, at the earliest when the DDP takes its module. span: which of the job's parameters it
    holds. called: the module whose forward pass is DDP's, None where hooks on it would be traced. board: where rank 0's
    order is told.
    `end_step` belongs to the training thread; `record` may be called from any thread at any time, during a collective
    too (it never calls into DDP, whose lock a hanging all-reduce can hold).
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        network: torch.nn.Module,
        span: tuple[int, ...],
        called: torch.nn.Module | None,
        board: Callable[[DistributedDataParallel], OrderBoard | None],
    ) -> None:
        self.span = span
        self._ddp = weakref.ref(ddp)
        self._called = called
        self._known = False
        self._reasons: list[str] = []
        self._hidden: list[str] = []
        self._passes: list[list[int]] = []
        self._passes_at_step: dict[int, int] = {}
        self._current: list[int] = []
        self._hooks: list[Any] = []
        self._buckets: list[list[int]] | None = None
        self._kinds: Sequence[object] = ()
        self._looks_left = _ORDER_LOOKS_MAX
        self._names: list[str] = []
        self._index: dict[int, int] = {}
        self._options: dict[str, Any] = {}
        self._expects: bool | None = None
        self._ended: tuple[int, dict[str, bool]] | None = None
        self.was_called = called is None
        """Whether it has been, as far as can be seen: an older one may live on beside the one that the loop calls."""
        self._first_call = None if called is None else called.register_forward_pre_hook(StayingHook(self._note_call))
        self._make_board = board
        self._board: OrderBoard | None = None
        self._sole = True
        self._joins = False
        if hasattr(ddp, "reducer"):
            self._learn(ddp)
        if not self._reasons and not (self._known and ddp.find_unused_parameters and not ddp.static_graph):
            self._attach(ddp, network)

    @property
    def living(self) -> DistributedDataParallel | None:
        """The DDP as long as it lives, complete or not."""
        return self._ddp()

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The DDP, if it lives and is complete."""
        ddp = self._ddp()
        if ddp is None or not hasattr(ddp, "reducer"):
            return None
        if not self._known:
            self._learn(ddp)
        return ddp

    # ------------------------------------------------------------------ training thread

    def _note_call(self, *_: Any) -> None:
        self.was_called = True
        self.forget_call()

    def forget_call(self) -> None:
        """Wait for no call any more."""
        if self._first_call is not None:
            self._first_call.remove()

    def end_step(self, step: int, *, look: bool) -> None:
        """Global step `step` has ended. Costs a few microseconds; look: at the hooks too."""
        ddp = self.ddp
        if ddp is None:
            return
        self._ended = step, synced(ddp)
        if look:
            self._tell_of_join(ddp)
            self._hidden += [reason for reason in hidden_states(ddp) if reason not in self._hidden]
        if self._reasons:
            return
        if self._hooks:
            self._pass_ends()
            self._passes_at_step[step] = len(self._passes)
            if len(self._passes) >= self._passes_wanted:
                self.close()
            elif not self._passes and not ddp.static_graph and step in _EMPTY_LOOKS:
                self._take_unseen(ddp)
        elif self._buckets is None and self._passes and self._looks_left:
            self._looks_left -= 1
            self._buckets = buckets_from_log(ddp)
            if self._buckets is not None:
                self._confirm(self._buckets)

    def _tell_of_join(self, ddp: DistributedDataParallel) -> None:
        config: Any = getattr(ddp, "_join_config", None)
        if getattr(config, "enable", False) and not config.throw_on_early_termination and not self._joins:
            self._joins = True
            _log.warning(
                "torch's Join lets ranks end the loop after different numbers of steps: if a rank dies when another "
                "one has ended, the job cannot be resumed there; give all ranks equally many batches, or use "
                "Join(throw_on_early_termination=True)"
            )

    # ------------------------------------------------------------------ any thread

    @property
    def reasons(self) -> list[str]:
        """Why a resume cannot be made exact as far as this DDP goes; empty if it can."""
        return [*self._reasons, *self._hidden]

    def record(self, step: int | None = None) -> BucketRecord:
        """What `replay` needs after global step `step` (None: now)."""
        ddp = self.ddp
        assert ddp is not None
        self._take_shared(wait_s=_FETCH_WAIT_S)
        passes = [list(one) for one in self._passes]
        current = list(self._current)
        if ddp.static_graph and current:
            passes.append(current)
        if step is not None:
            # A step that has not ended here has been updated, so no pass of a later one has begun.
            passes = passes[: self._passes_at_step.get(step, len(passes))]
        ended = self._ended
        return BucketRecord(
            step=step,
            static_graph=ddp.static_graph,
            find_unused_parameters=ddp.find_unused_parameters,
            parameters=list(self._names),
            passes=passes,
            buckets=self._buckets,
            reasons=list(self._reasons),
            hooks=list(self._hidden),
            unconfirmed=self._unconfirmed() if len(passes) >= self._passes_wanted else "",
            synced=ended[1] if ended is not None and ended[0] == step else synced(ddp),
            options=self._options,
        )

    # ------------------------------------------------------------------ resume

    def adopt(self, record: BucketRecord) -> None:
        """These passes have been replayed: they count as this model's first ones, on all ranks."""
        self._passes = [list(one) for one in record.passes]
        self._buckets = None if record.buckets is None else [list(one) for one in record.buckets]
        self._sole = True
        self._current.clear()
        if record.step is not None:
            self._passes_at_step = {record.step: len(self._passes)}
        if len(self._passes) >= self._passes_wanted:
            self.close()

    # ------------------------------------------------------------------ inside

    def _learn(self, ddp: DistributedDataParallel) -> None:
        self._known = True
        self._reasons = capability(ddp)
        self._hidden = hidden_states(ddp)
        self._options = options_of(ddp)
        if not self._reasons:
            self._names, parameters = reducer_parameters(ddp)
            self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
            self._kinds = kinds_of(ddp)
            self._sole = dist.get_world_size(ddp.process_group) <= 2 or dist.get_rank(ddp.process_group) == 0

    @property
    def _passes_wanted(self) -> int:
        # A static graph counts in its first pass how often each gradient arrives, and orders in its second.
        ddp = self._ddp()
        return 2 if ddp is not None and getattr(ddp, "static_graph", False) else 1

    def _attach(self, ddp: DistributedDataParallel, network: torch.nn.Module) -> None:
        def noting(key: int) -> Callable[[torch.Tensor], None]:
            return lambda _: self._note(key)

        for parameter in network.parameters():
            if parameter.requires_grad and (not self._known or id(parameter) in self._index):
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(noting(id(parameter))))
        if self._called is not None:
            self._hooks.append(self._called.register_forward_hook(StayingHook(self._forward_done)))
        if getattr(ddp, "static_graph", not self._known):
            hook = StayingHook(lambda *_: self._pass_ends())
            self._hooks.append((self._called or ddp).register_forward_pre_hook(hook))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._current.clear()

    def _forward_done(self, *_: Any) -> None:
        # DDP decides here, not in the backward pass, whether that one is to reduce gradients.
        ddp = self.ddp
        if ddp is not None:
            self._expects = bool(self._expects) or (torch.is_grad_enabled() and ddp.require_backward_grad_sync)

    def _note(self, key: int) -> None:
        ddp = self.ddp
        index = self._index.get(key)
        if ddp is None or index is None or _replaying.is_set() or len(self._passes) >= self._passes_wanted:
            return
        if not (ddp.require_backward_grad_sync if self._called is None else self._expects):
            return
        if ddp.static_graph:
            self._current.append(index)  # perhaps more than once in a pass
            return
        if index in self._current:
            self._current = []  # the pass before was given up half-way
        self._current.append(index)
        if len(self._current) == len(self._names):
            self._pass_is_whole()

    def _pass_ends(self) -> None:
        # Only a static graph's passes have no end of their own: parameters may be missing in them or come twice,
        # and a callback at the end of a backward pass would also be called at the end of a nested one (checkpoints).
        ddp = self._ddp()
        if ddp is not None and getattr(ddp, "static_graph", False) and self._current:
            self._pass_is_whole()

    def _pass_is_whole(self) -> None:
        self._passes.append(self._current)
        self._current, self._expects = [], False
        if len(self._passes) >= self._passes_wanted:
            self._tell()

    def _tell(self) -> None:
        ddp = self.ddp
        if ddp is None or self._buckets is not None:
            return
        self._board = self._board or self._make_board(ddp)
        if self._board is not None:
            self._board.exchange([list(one) for one in self._passes])

    def _take_shared(self, wait_s: float) -> None:
        """Rank 0's order instead of this rank's: it is the one that all of them follow."""
        if self._board is None or self._sole or self._buckets is not None or not self._passes:
            return
        found = self._board.found(wait_s)
        if found is not None and len(found) == len(self._passes) and self._fits(found):
            self._passes, self._sole = found, True

    def _fits(self, passes: list[list[int]]) -> bool:
        ddp, every = self._ddp(), range(len(self._names))
        if ddp is not None and not ddp.static_graph:
            return all(sorted(one) == [*every] for one in passes)
        return all(index in every for one in passes for index in one)

    def _unconfirmed(self) -> str:
        if self._sole or self._buckets is not None:
            return ""
        return (
            "the recorded order of DDP's buckets is this rank's: rank 0's order, which DDP uses, had not "
            "arrived when the step was saved"
        )

    def _take_unseen(self, ddp: DistributedDataParallel) -> None:
        """No pass was seen to be whole, and yet the buckets may have been rebuilt."""
        buckets = buckets_from_log(ddp)
        if buckets is not None:
            self._passes, self._buckets = [[index for bucket in buckets for index in bucket]], buckets
            self.close()

    def _confirm(self, buckets: list[list[int]]) -> None:
        self._take_shared(wait_s=0.0)
        last = self._passes[-1]
        order = agreed_order(last, buckets, self._kinds)
        if order != last:
            # This rank's gradients come in another order than rank 0's, whose order counts.
            _log.info("DDP's buckets follow another rank's order of gradients; recording that rank's order")
            self._passes[-1] = order


def synced(ddp: DistributedDataParallel) -> dict[str, bool]:
    """Whether the next forward pass hands rank 0's buffers round, and the next backward pass reduces gradients."""
    forward = bool(getattr(ddp, "require_forward_param_sync", True))
    return {"forward": forward, "backward": bool(ddp.require_backward_grad_sync)}


def options_of(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Constructor options that change the sums."""
    return {name: getattr(ddp, name) for name in OPTIONS if isinstance(getattr(ddp, name, None), bool | int)}


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Inside, backward passes belong to no record."""
    _replaying.set()
    try:
        yield
    finally:
        _replaying.clear()


def replay_passes(ddp: DistributedDataParallel, passes: Sequence[Sequence[int]]) -> None:
    """Send zero gradients through the reducer in the order of `passes`; gradients are None afterwards.

    Collectives, on all ranks of the DDP's process group.
    """
    parameters, sparse = build_parameters(ddp)
    reducer: Any = ddp.reducer
    with torch.enable_grad():
        for number, order in enumerate(passes):
            ddp.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
            reducer.prepare_for_forward()
            _rebuild(ddp)
            reducer.prepare_for_backward([])
            for index in order:
                _zero_backward(parameters[index], sparse[index])
            if ddp.static_graph and number == 0:
                # In its first pass a static graph reduces everything at the end; DDP queues this call by itself
                # only from the module's own output.
                reducer._delay_all_reduce()
                ddp._static_graph_delay_allreduce_enqueued = True
        if len(passes) >= (2 if ddp.static_graph else 1):
            _rebuild(ddp)
    for parameter in parameters:
        parameter.grad = None


def _rebuild(ddp: DistributedDataParallel) -> None:
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True


def _zero_backward(parameter: torch.Tensor, sparse: bool) -> None:
    if sparse:
        row = torch.zeros(1, dtype=torch.long, device=parameter.device)
        value = torch.nn.functional.embedding(row, parameter, sparse=True)
    else:
        value = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    (value.sum() * 0).backward()  # type: ignore[no-untyped-call]
