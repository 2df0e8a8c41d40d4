"""The order of DDP's gradient buckets, recorded while training and made again before a resumed run's first step.

DistributedDataParallel sums its first backward pass in buckets of the parameters' own order, then rebuilds the
buckets, once, in the order in which the gradients became ready (rank 0's order, which it broadcasts). A sum over
three or more ranks depends on where in its buffer a number stands (gloo, and ring algorithms in general), so a new
process, which would begin with unrebuilt buckets, would differ from its first step on.

Recording: a post-accumulate hook on every parameter notes the order during the first synchronised backward passes,
and is gone afterwards. DDP's logging data confirm it later (they show the buckets from the third iteration on).
Replaying: the same order of gradients, all zero, is sent through DDP's reducer on all ranks, which therefore
rebuilds as it did then. Everything used of DDP beyond its public face is looked up by name first (`capability`);
where a name is gone in another torch, the answer is a reason why a resume is not exact, never a guess.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lastwords.optim_wrapper.ddp_private import (
    agreed_order,
    buckets_from_log,
    build_parameters,
    capability,
    find_ddp,
    reducer_parameters,
)

_log = logging.getLogger(__name__)

VERSION = 1

_LOOKS_MAX = 8
"""Steps after which the logging data are no longer asked for the buckets; torch shows them in the third."""

_observers: weakref.WeakKeyDictionary[DistributedDataParallel, weakref.ref[BucketOrder]] = weakref.WeakKeyDictionary()


class BucketOrder:
    """Watches the first synchronised backward passes of a DDP model. Made by `observe`.

    `step_ended` belongs to the training thread; `record` may be called from any thread at any time, during a
    collective too (it never calls into DDP, whose lock a hanging all-reduce can hold).
    """

    def __init__(self, ddp: DistributedDataParallel | None, reasons: list[str]) -> None:
        self._ddp = ddp
        self._reasons = reasons
        self._passes: list[list[int]] = []
        self._passes_at_step: dict[int, int] = {}
        self._current: list[int] = []
        self._hooks: list[Any] = []
        self._buckets: list[list[int]] | None = None
        self._looks_left = _LOOKS_MAX
        self.muted = False
        self._parameters: list[torch.Tensor] = []
        self._names: list[str] = []

    @classmethod
    def observe(cls, model: torch.nn.Module) -> BucketOrder:
        """Begin to watch `model`; call it before the first backward pass. Harmless for a model without DDP."""
        ddp = find_ddp(model)
        order = cls(ddp, _inside(model) if ddp is None else capability(ddp))
        if ddp is not None and not order._reasons:
            order._names, order._parameters = reducer_parameters(ddp)
            if not ddp.find_unused_parameters or ddp.static_graph:
                order._attach()
            _observers[ddp] = weakref.ref(order)
        return order

    # ------------------------------------------------------------------ training thread

    def step_ended(self, step: int) -> None:
        """Global step `step` has ended. Costs a few microseconds for the first steps, nothing afterwards."""
        if self._ddp is None or self._reasons:
            return
        if self._hooks:
            self._pass_ends()
            self._passes_at_step[step] = len(self._passes)
            if len(self._passes) >= self._passes_wanted:
                self._detach()
        elif self._buckets is None and self._passes and self._looks_left:
            self._looks_left -= 1
            self._buckets = buckets_from_log(self._ddp)
            if self._buckets is not None:
                self._confirm(self._buckets)

    # ------------------------------------------------------------------ any thread

    @property
    def reasons(self) -> list[str]:
        """Why a resume cannot be made exact as far as DDP's buckets go; empty if it can."""
        return list(self._reasons)

    def record(self, step: int | None = None) -> dict[str, Any]:
        """What `replay` needs after global step `step` (None: now), as JSON. Empty for a model without DDP."""
        if self._ddp is None:
            return {}
        passes = [list(one) for one in self._passes]
        current = list(self._current)
        if self._ddp.static_graph and current:
            passes.append(current)
        if step is not None:
            # A step that has not ended here has been updated, so no pass of a later one has begun.
            passes = passes[: self._passes_at_step.get(step, len(passes))]
        return {
            "version": VERSION,
            "step": step,
            "static_graph": self._ddp.static_graph,
            "find_unused_parameters": self._ddp.find_unused_parameters,
            "parameters": list(self._names),
            "passes": passes,
            "buckets": self._buckets,
            "reasons": list(self._reasons),
        }

    # ------------------------------------------------------------------ inside

    @property
    def _passes_wanted(self) -> int:
        # A static graph counts in its first pass how often each gradient arrives, and orders in its second.
        return 2 if self._ddp is not None and self._ddp.static_graph else 1

    def adopt(self, record: Mapping[str, Any]) -> None:
        """These passes have been replayed: they count as this model's first ones."""
        self._passes = [list(one) for one in record["passes"]]
        self._buckets = record["buckets"]
        self._current.clear()
        if record["step"] is not None:
            self._passes_at_step = {record["step"]: len(self._passes)}
        if len(self._passes) >= self._passes_wanted:
            self._detach()

    def _attach(self) -> None:
        def noting(index: int) -> Callable[[torch.Tensor], None]:
            return lambda _: self._note(index)

        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(noting(index)))
        if self._ddp is not None and self._ddp.static_graph:
            self._hooks.append(self._ddp.register_forward_pre_hook(lambda *_: self._pass_ends()))

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._parameters.clear()
        self._current.clear()

    def _note(self, index: int) -> None:
        ddp = self._ddp
        if self.muted or ddp is None or not ddp.require_backward_grad_sync or len(self._passes) >= self._passes_wanted:
            return
        if ddp.static_graph:
            self._current.append(index)  # perhaps more than once in a pass
            return
        if index in self._current:
            self._current = []  # the pass before was given up half-way
        self._current.append(index)
        if len(self._current) == len(self._names):
            self._passes.append(self._current)
            self._current = []

    def _pass_ends(self) -> None:
        # Only a static graph's passes have no end of their own: parameters may be missing in them or come twice,
        # and a callback at the end of a backward pass would also be called at the end of a nested one (checkpoints).
        if self._ddp is not None and self._ddp.static_graph and self._current:
            self._passes.append(self._current)
            self._current = []

    def _confirm(self, buckets: list[list[int]]) -> None:
        last = self._passes[-1]
        order = agreed_order(last, buckets)
        if order != last:
            # This rank's gradients come in another order than rank 0's, whose order counts.
            _log.info("DDP's buckets follow another rank's order of gradients; recording that")
            self._passes[-1] = order


def replay(model: torch.nn.Module, record: Mapping[str, Any]) -> list[str]:
    """Bring DDP's buckets to where `record` says they were; returns why that is not exact, empty if it is.

    Runs collectives: call it on every rank of the model's process group, with the same record, before the state is
    restored and before the first forward pass. Gradients are None afterwards. Draws no random numbers.
    """
    ddp = find_ddp(model)
    if ddp is None:
        return ["the saved run used DistributedDataParallel, this one does not"] if record else []
    if not record:
        return ["the saved run did not use DistributedDataParallel, this one does"]
    found = _observers.get(ddp)
    observer = found() if found is not None else None
    problems = _refuse(ddp, record)
    if problems:
        return problems
    names, parameters = reducer_parameters(ddp)
    passes = record["passes"]
    if passes and (not ddp.find_unused_parameters or ddp.static_graph):
        if observer is not None:
            observer.muted = True
        try:
            _replay_passes(ddp, parameters, passes)
        finally:
            if observer is not None:
                observer.muted = False
        problems = _compare(ddp, record, names)
        if observer is not None:
            observer.adopt(record)
    return problems


def _refuse(ddp: DistributedDataParallel, record: Mapping[str, Any]) -> list[str]:
    if record.get("version") != VERSION:
        return [
            f"the order of DDP's buckets was recorded in form {record.get('version')!r}, this lastwords reads {VERSION}"
        ]
    reasons = [*record["reasons"], *(reason for reason in capability(ddp) if reason not in record["reasons"])]
    if reasons:
        return reasons
    for option in ("static_graph", "find_unused_parameters"):
        if getattr(ddp, option) != record[option]:
            return [f"DDP has {option}={getattr(ddp, option)} here, the saved run had {record[option]}"]
    # A model that is compiled inside of DDP has longer names, and the same order; that it is compiled is another fact.
    here, saved = ([name.replace("_orig_mod.", "") for name in names]
                   for names in (reducer_parameters(ddp)[0], record["parameters"]))  # fmt: skip
    if here != saved:
        return ["DDP reduces other parameters here than in the saved run (requires_grad differs?)"]
    if getattr(ddp, "_has_rebuilt_buckets", False):
        return ["a backward pass was run before resume(), so DDP's buckets have been rebuilt already; resume first"]
    count = len(record["parameters"])
    if not all(isinstance(index, int) and 0 <= index < count for one in record["passes"] for index in one):
        return ["the recorded order of DDP's buckets is damaged"]
    return []


def _replay_passes(ddp: DistributedDataParallel, parameters: list[torch.Tensor], passes: list[list[int]]) -> None:
    reducer: Any = ddp.reducer
    sparse = build_parameters(ddp)[1]
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


def _compare(ddp: DistributedDataParallel, record: Mapping[str, Any], names: list[str]) -> list[str]:
    if record["buckets"] is None:
        return []
    ddp.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
    buckets = buckets_from_log(ddp)
    if buckets is None or buckets == record["buckets"]:
        return []
    at = next(i for i in range(len(names)) if buckets[i : i + 1] != record["buckets"][i : i + 1])
    return [f"DDP's buckets could not be made as they were: bucket {at} differs (bucket_cap_mb or torch differ?)"]


def _inside(model: torch.nn.Module) -> list[str]:
    """Why the buckets of DDP modules inside a model are not replayed: nobody knows when each takes part in a step."""
    inside = [name for name, module in model.named_modules() if isinstance(module, DistributedDataParallel)]
    if not inside:
        return []
    return [
        f"DistributedDataParallel stands inside the model ({', '.join(inside[:4])}), and only the order of its buckets "
        "where it is the whole model is recorded; its sums may differ after a resume"
    ]
