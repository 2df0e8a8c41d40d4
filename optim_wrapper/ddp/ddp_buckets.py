"""The order of DDP's gradient buckets, recorded while training and made again before a resumed run's first step.

DistributedDataParallel sums its first backward pass in buckets of the parameters' own order, then rebuilds the
buckets, once, in the order in which the gradients became ready (rank 0's order, which it broadcasts). A sum over
three or more ranks depends on where in its buffer a number stands (gloo, and ring algorithms in general), so a new
process, which would begin with unrebuilt buckets, would differ from its first step on.

Recording: a post-accumulate hook on every parameter notes the order during the first synchronised backward passes,
and is gone afterwards. Rank 0 tells its order to the others through the store, and DDP's logging data confirm it later
(they show the buckets from the third iteration on).
Replaying: the same order of gradients, all zero, is sent through DDP's reducer on all ranks, which therefore
rebuilds as it did then. Everything used of DDP beyond its public face is looked up by name first (`capability`);
where a name is gone in another torch, the answer is a reason why a resume is not exact, never a guess.

A job may have several DDPs (`ddp_found`); each has its own record. What else a DDP takes from one step to the next is
whether its next forward pass hands rank 0's buffers round, which a pass without gradients switches off.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel

from lastwords.checkpoint.meta import BucketRecord
from lastwords.optim_wrapper.ddp.ddp_found import (
    buckets_from_log,
    capability,
    find_ddp,
    holding,
    is_compiled,
    listeners,
    places_of,
    reducer_parameters,
    replicate_states,
    span_of,
)
from lastwords.optim_wrapper.ddp.ddp_order import GradientOrder, OrderBoard, options_of, replay_passes, unwatched
from lastwords.optim_wrapper.ddp.staying_hook import StayingHook
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.torch_private import Store

_observers: weakref.WeakKeyDictionary[DistributedDataParallel, weakref.ref[GradientOrder]] = weakref.WeakKeyDictionary()


class BucketOrder:
    """Watches each DDP of a job that holds a parameter of `model` or one that is `trained`, also those to come.

    Made before the first backward pass; harmless where there is no DDP. None for `trained` watches nothing.
    `end_step` and `close` belong to the training thread; `record` may be called from any thread at any time.
    """

    def __init__(
        self, model: torch.nn.Module, trained: Iterable[torch.Tensor] | None = (), ledger: Ledger | None = None
    ) -> None:
        self._model = model
        self._kept = [] if trained is None else [*model.parameters(), *trained]  # or their ids could be those of others
        self._places = places_of(self._kept)
        self._orders: list[GradientOrder] = []
        self._boards: list[OrderBoard] = []
        self._store: tuple[Store, str] | None = None
        self.ledger = ledger or Ledger()
        listeners.add(self)
        for ddp in holding(self._kept) if self._kept else ():
            self.found(ddp, ddp.module)

    # ------------------------------------------------------------------ training thread

    def share(self, store: Store | None, key: str) -> None:
        """Rank 0 of each DDP tells its order to the others, below `key`, the same on all ranks."""
        if store is not None:
            self._store = store, key

    def end_step(self, step: int) -> None:
        """Global step `step` has ended. Costs a few microseconds for each DDP."""
        look = step & (step - 1) == 0
        for order in self._orders:
            order.end_step(step, look=look)
        if look:
            self.ledger.tell(*self.reasons)

    def close(self) -> None:
        """Training is over: no hook of ours stays."""
        for order in self._orders:
            order.close()
            order.forget_call()
        for board in self._boards:
            board.close()

    # ------------------------------------------------------------------ any thread

    @property
    def reasons(self) -> list[str]:
        return list(dict.fromkeys(reason for order in self._orders for reason in order.reasons))

    def record(self, step: int | None = None) -> dict[str, Any]:
        """A `BucketRecord` of each DDP after global step `step` (None: now), as stored. Empty for a job without DDP."""
        living = sorted((one for one in self._orders if one.ddp is not None), key=lambda one: one.span)
        called = {one.span for one in living if one.was_called}
        living = [one for one in living if one.was_called or one.span not in called]
        return BucketRecord.stored([one.record(step) for one in living])

    # ------------------------------------------------------------------ inside

    def found(self, ddp: DistributedDataParallel, network: torch.nn.Module) -> None:
        """A DDP, which may not be complete yet."""
        span = span_of(network, self._places)
        if not span or ddp in _observed_by(self._orders):
            return
        called = next((one for one, state in replicate_states(self._model) if state._param_list is network), ddp)
        traced = is_compiled(network) or is_compiled(self._model)
        number = sum(one.span == span for one in self._orders)
        order = GradientOrder(
            ddp, network, span, None if traced else called, lambda one: self._board(one, span, number)
        )
        self._orders.append(order)
        _observers[ddp] = weakref.ref(order)

    def _board(self, ddp: DistributedDataParallel, span: tuple[int, ...], number: int) -> OrderBoard | None:
        """number: of those that hold the same, as they came."""
        if self._store is None:
            return None
        store, key = self._store
        first = dist.get_process_group_ranks(ddp.process_group)[0]
        held = xxhash.xxh3_64_hexdigest(repr(span).encode())
        board = OrderBoard(store, f"{key}/{first}/{held}/{number}", writes=dist.get_rank(ddp.process_group) == 0)
        self._boards.append(board)
        return board


def _observed_by(orders: Iterable[GradientOrder]) -> list[DistributedDataParallel]:
    return [ddp for ddp in (one.living for one in orders) if ddp is not None]


def replay(model: torch.nn.Module, records: Sequence[BucketRecord], trained: Iterable[torch.Tensor] = ()) -> list[str]:
    """Bring the buckets of every DDP to where `records` say they were; returns why that is not exact, empty if it is.

    Runs collectives: call it on every rank of the model's process group, with the same records, before the state is
    restored and before the first forward pass. Gradients are None afterwards. Draws no random numbers.
    """
    begin_replicates(model)
    ddps = holding([*model.parameters(), *trained])
    if not ddps:
        return ["the saved run used DistributedDataParallel, this run does not"] if records else []
    if not records:
        return ["the saved run did not use DistributedDataParallel, this run does"]
    pairs, problems = _paired(ddps, records)
    with unwatched():
        for ddp, one in pairs:
            problems += _replay_one(ddp, one, whole_model=ddp is find_ddp(model))
    return list(dict.fromkeys(problems))


def groups_of(model: torch.nn.Module, trained: Iterable[torch.Tensor]) -> list[tuple[frozenset[int], int]]:
    """Ranks of each DDP's process group, and the place of its record; there may be more DDPs than are found here."""
    begin_replicates(model)
    ddps = holding([*model.parameters(), *trained])
    return [(frozenset(dist.get_process_group_ranks(ddp.process_group)), at) for at, ddp in enumerate(ddps)]


def begin_replicates(model: torch.nn.Module) -> None:
    """Let `replicate` make its DDPs now, and not in the first forward pass. Collectives."""
    for module, state in replicate_states(model):
        if state.has_initialized:
            continue
        state.lazy_init()

        # What is registered from here on would only be taken over by the call that has been made.
        def take_over_hooks(*_: Any, state: Any = state) -> None:
            state.register_comm_hook()

        module.register_forward_pre_hook(StayingHook(take_over_hooks), prepend=True)


def _paired(
    ddps: Sequence[DistributedDataParallel], records: Sequence[BucketRecord]
) -> tuple[list[tuple[DistributedDataParallel, BucketRecord]], list[str]]:
    """Each DDP with the record of the one that held the same, in the order of the job's parameters."""
    if len(ddps) == len(records):
        return list(zip(ddps, records, strict=True)), []
    left = list(records)
    pairs = []
    problems = []
    for ddp in ddps:
        names = _plain([] if capability(ddp) else reducer_parameters(ddp)[0])
        found = next((one for one in left if _plain(one.parameters) == names), None)
        if found is None:
            problems.append(f"the saved run had no DistributedDataParallel around {_some(names)}, this run has")
        else:
            left.remove(found)
            pairs.append((ddp, found))
    problems += [
        f"the saved run had a DistributedDataParallel around {_some(_plain(one.parameters))}, which is "
        "missing here; wrap the module before resume()"
        for one in left
        if one.passes or not all(one.synced.values())
    ]
    return pairs, problems


def _plain(names: Iterable[str]) -> list[str]:
    # A model that is compiled inside of DDP has longer names, and the same order; that it is compiled is another fact.
    return [name.replace("_orig_mod.", "") for name in names]


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:2])} ... ({len(names)} parameters)" if names else "nothing"


def _replay_one(ddp: DistributedDataParallel, record: BucketRecord, *, whole_model: bool) -> list[str]:
    found = _observers.get(ddp)
    observer = found() if found is not None else None
    problems = _refuse(ddp, record)
    if problems:
        return problems
    # The whole model's options are among the job's facts, which are compared as such.
    here = options_of(ddp)
    problems = [
        f"a DistributedDataParallel around {_some(record.parameters)} has {name}={here[name]} here, the saved run "
        f"had {value}"
        for name, value in record.options.items()
        if not whole_model and here.get(name, value) != value
    ]
    problems += [reason for reason in (*record.hooks, record.unconfirmed) if reason]
    passes = record.passes
    if passes and (not ddp.find_unused_parameters or ddp.static_graph):
        replay_passes(ddp, passes)
        problems += _compare(ddp, record)
    if observer is not None:
        observer.adopt(record)
    _restore_synced(ddp, record.synced)
    return problems


def _restore_synced(ddp: DistributedDataParallel, saved: Mapping[str, bool]) -> None:
    ddp.require_forward_param_sync = saved.get("forward", ddp.require_forward_param_sync)
    ddp.require_backward_grad_sync = saved.get("backward", ddp.require_backward_grad_sync)


def _refuse(ddp: DistributedDataParallel, record: BucketRecord) -> list[str]:
    reasons = [*record.reasons, *(reason for reason in capability(ddp) if reason not in record.reasons)]
    if reasons:
        return reasons
    for option in ("static_graph", "find_unused_parameters"):
        if getattr(ddp, option) != getattr(record, option):
            return [f"DDP has {option}={getattr(ddp, option)} here, the saved run had {getattr(record, option)}"]
    if _plain(reducer_parameters(ddp)[0]) != _plain(record.parameters):
        return ["DDP reduces different parameters here than in the saved run; check their names and requires_grad"]
    if getattr(ddp, "_has_rebuilt_buckets", False):
        return ["a backward pass was run before resume(), so DDP's buckets have been rebuilt already; resume first"]
    if not all(index < len(record.parameters) for one in record.passes for index in one):
        return ["the recorded order of DDP's buckets is damaged"]
    return []


def _compare(ddp: DistributedDataParallel, record: BucketRecord) -> list[str]:
    if record.buckets is None:
        return []
    ddp.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
    buckets = buckets_from_log(ddp)
    if buckets is None or buckets == record.buckets:
        return []
    at = next(i for i in range(len(buckets) + 1) if buckets[i : i + 1] != record.buckets[i : i + 1])
    return [f"DDP's buckets could not be restored: bucket {at} differs; check bucket_cap_mb and the torch version"]
