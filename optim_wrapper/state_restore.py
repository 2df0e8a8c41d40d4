"""Putting a unit's stored state back into a live model and optimizer: checked as a whole before anything changes.

Tensors are overwritten in place. The optimizer's own load_state_dict is not used: it casts the fp32 moments of
bf16 parameters to bf16. Moments that do not exist yet are made in the type and on the device they were saved with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import unit_tensor_name
from lastwords.errors import FormatError, MismatchError
from lastwords.optim_wrapper.state_view import META_VERSION, Names, UnitView
from lastwords.optim_wrapper.tensor_bytes import bytes_of, dtype_name, dtype_named, overwrite, spec_of, tensor_over
from lastwords.optim_wrapper.tensor_tree import Tree, put_together, tensor_nodes

_SHOWN_MAX = 8


class RestorePlan:
    """What has to be read, and where to.

    The constructor raises MismatchError (or FormatError) if the state does not fit, and changes nothing. Then
    `lastwords.checkpoint.load.Checkpoint.read_tensors(plan.tensor_names, plan.into)` overwrites the weights, and
    `commit` does the rest. If reading fails half-way, the model holds rubbish: do not train on it.
    """

    def __init__(self, view: UnitView, specs: Iterable[TensorSpec], meta: Mapping[str, Any]) -> None:
        self._view = view
        self._meta = meta
        self._specs = {spec.name: spec for spec in specs}
        if meta.get("version") != META_VERSION:
            raise FormatError(
                f"the unit's state is of version {meta.get('version')!r}, "
                f"this lastwords reads {META_VERSION}; upgrade it"
            )
        self._names = view.names()
        self._targets: dict[str, torch.Tensor] = {}
        self._new_buffers: dict[str, torch.Tensor] = {}
        self._staged: dict[str, tuple[bytearray, torch.Tensor]] = {}
        self._homes: dict[str, torch.Tensor] = {}
        self._check()

    @property
    def tensor_names(self) -> list[str]:
        """Names of all tensors to read, as they stand in the file."""
        return list(self._targets)

    def into(self, spec: TensorSpec) -> memoryview:
        """Memory for one tensor: the live tensor's own where possible, else a staging copy."""
        target = self._targets[spec.name]
        view = bytes_of(target)
        if view is not None:
            return view
        memory = bytearray(spec.nbytes)
        self._staged[spec.name] = (memory, target)
        return memoryview(memory)

    def commit(self) -> None:
        """After everything has been read: staged tensors, optimizer state, hyperparameters."""
        for memory, target in self._staged.values():
            overwrite(target, tensor_over(memory, target.dtype, tuple(target.shape)))
        self._staged.clear()
        for name, buffer in self._new_buffers.items():
            module, key = self._names.owners[name]
            module._buffers[key] = buffer
        for name in self._meta["absent_buffers"]:
            if name in self._names.owners:
                module, key = self._names.owners[name]
                module._buffers[key] = None
        self._commit_optimizer()

    # ------------------------------------------------------------------ checks

    def _check(self) -> None:
        missing: list[str] = []
        extra: list[str] = []
        different: dict[str, str] = {}
        names, meta = self._names, self._meta
        self._check_tensors("model", names.parameters, meta["parameters"], missing, extra, different)
        self._check_tensors("buffer", names.buffers, meta["buffers"], missing, extra, different)
        for alias in sorted({*names.aliases, *meta["aliases"]}):
            here, saved = names.aliases.get(alias), meta["aliases"].get(alias)
            if here != saved and alias not in missing and alias not in extra:
                different[alias] = f"saved {_tied(saved)}, here {_tied(here)}"
        self._check_optimizer(names, different)
        if missing or extra or different:
            raise MismatchError(
                _mismatch(type(self._view.model).__name__, missing, extra, different),
                missing=missing,
                extra=extra,
                different=different,
            )
        self._plan_optimizer()

    def _check_tensors(
        self,
        kind: str,
        here: dict[str, torch.Tensor],
        saved: Mapping[str, str],
        missing: list[str],
        extra: list[str],
        different: dict[str, str],
    ) -> None:
        names, meta = self._names, self._meta
        excluded = self._view.exclude_buffers if kind == "buffer" else frozenset()
        for name, tensor in here.items():
            stored = unit_tensor_name(self._view.unit, kind, name)
            spec = self._spec(stored) if name in saved else None
            free = kind == "buffer" and name in names.volatile_buffers
            if spec is None:
                # Tied in the checkpoint only: told below. A non-persistent buffer may simply not have been made yet.
                if name not in meta["aliases"] and not (free or (kind == "buffer" and name in meta["absent_buffers"])):
                    missing.append(name)
            elif spec == spec_of(stored, tensor) and saved[name] == dtype_name(tensor.dtype):
                self._targets[stored] = tensor
            elif free:
                self._make_buffer(name, stored, saved[name], spec, tensor.device)
            else:
                was, now = _shape(spec, saved[name]), tuple(tensor.shape)
                different[name] = f"saved {saved[name]} {was}, here {dtype_name(tensor.dtype)} {now}"
        for name, dtype in saved.items():
            if name in here or name in names.aliases or name in excluded:
                continue
            if kind == "buffer" and name in names.owners:  # registered here, but None so far
                stored = unit_tensor_name(self._view.unit, kind, name)
                device = next((p.device for p in self._view.model.parameters()), torch.device("cpu"))
                self._make_buffer(name, stored, dtype, self._spec(stored), device)
            else:
                extra.append(name)

    def _check_optimizer(self, names: Names, different: dict[str, str]) -> None:
        kind, saved_kind = type(self._view.optimizer).__name__, self._meta["optimizer"]
        if kind != saved_kind:
            different["optimizer"] = f"saved {saved_kind}, here {kind}"
            return
        saved_groups = [tuple(group) for group in self._meta["group_parameters"]]
        if len(saved_groups) != len(names.groups):
            different["optimizer.param_groups"] = f"saved {len(saved_groups)} groups, here {len(names.groups)}"
            return
        for g, (saved, here) in enumerate(zip(saved_groups, names.groups, strict=True)):
            if saved != here:
                at = next((i for i, pair in enumerate(zip(saved, here, strict=False)) if pair[0] != pair[1]), None)
                what = (
                    f"{len(saved)} parameters, here {len(here)}"
                    if at is None
                    else f"{saved[at]} at index {at}, here {here[at]}"
                )
                different[f"optimizer.param_groups[{g}]"] = f"saved {what}"

    def _plan_optimizer(self) -> None:
        for name, tree in self._meta["optimizer_state"].items():
            parameter = self._names.parameters.get(name)
            current = self._view.optimizer.state.get(parameter, {}) if parameter is not None else {}
            for key, node in tree["dict"]:
                for stored, leaf in tensor_nodes(node, f"optimizer state of {name!r}").items():
                    existing = current.get(key) if "tensor" in node else None
                    self._targets[stored] = self._state_tensor(stored, leaf, parameter, existing)
        for g, tree in enumerate(self._meta["groups"]):
            first = next(iter(self._view.optimizer.param_groups[g]["params"]), None)
            for stored, leaf in tensor_nodes(tree, f"optimizer.param_groups[{g}]").items():
                self._targets[stored] = self._state_tensor(stored, leaf, first, None)

    def _state_tensor(self, stored: str, leaf: Tree, parameter: torch.Tensor | None, existing: object) -> torch.Tensor:
        dtype = dtype_named(leaf["dtype"])
        shape = _shape(self._spec(stored), leaf["dtype"])
        device = torch.device("cpu") if parameter is None or "apart" in leaf else parameter.device
        if (
            isinstance(existing, torch.Tensor)
            and existing.dtype == dtype
            and tuple(existing.shape) == shape
            and existing.device == device
        ):
            return existing
        if parameter is not None and tuple(parameter.shape) == shape:
            return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=device)

    def _make_buffer(self, name: str, stored: str, dtype: str, spec: TensorSpec, device: torch.device) -> None:
        buffer = torch.empty(_shape(spec, dtype), dtype=dtype_named(dtype), device=device)
        self._new_buffers[name] = self._targets[stored] = buffer

    def _spec(self, stored: str) -> TensorSpec:
        try:
            return self._specs[stored]
        except KeyError:
            raise FormatError(f"the unit's JSON names the tensor {stored!r}, but it is not in the file") from None

    # ------------------------------------------------------------------ optimizer

    def _commit_optimizer(self) -> None:
        optimizer, names = self._view.optimizer, self._names
        restored: dict[Any, dict[str, Any]] = {}
        for name, tree in self._meta["optimizer_state"].items():
            key = names.parameters.get(name, name.removeprefix("~"))
            restored[key] = put_together(tree, self._targets.__getitem__, f"optimizer state of {name!r}")
        for key in list(optimizer.state):
            if key not in restored:
                del optimizer.state[key]
        for key, value in restored.items():
            optimizer.state[key] = value
        for g, tree in enumerate(self._meta["groups"]):
            group = optimizer.param_groups[g]
            for key, value in put_together(tree, self._targets.__getitem__, f"optimizer.param_groups[{g}]").items():
                current = group.get(key)
                if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                    with torch.no_grad():
                        current.copy_(value)  # schedulers and captured graphs hold on to this very tensor
                else:
                    group[key] = value


def _shape(spec: TensorSpec, dtype: str) -> tuple[int, ...]:
    # The reverse of spec_of for the types that safetensors lacks.
    probe = spec_of("unit/x/model/x", torch.empty((), dtype=dtype_named(dtype)))
    return spec.shape if probe.shape == () else spec.shape[:-1]


def _tied(name: str | None) -> str:
    return "not tied" if name is None else f"tied to {name}"


def _mismatch(model: str, missing: list[str], extra: list[str], different: dict[str, str]) -> str:
    def some(items: list[str]) -> str:
        more = f" and {len(items) - _SHOWN_MAX} more" if len(items) > _SHOWN_MAX else ""
        return ", ".join(items[:_SHOWN_MAX]) + more

    parts = []
    if missing:
        parts.append(f"missing in the checkpoint: {some(missing)}")
    if extra:
        parts.append(f"only in the checkpoint: {some(extra)}")
    if different:
        parts.append("different: " + some([f"{name} ({what})" for name, what in different.items()]))
    return (
        f"the checkpoint does not fit this {model} and its optimizer; nothing was changed. "
        + "; ".join(parts)
        + ". Build the model and optimizer as the saved run did, or choose another checkpoint"
    )
