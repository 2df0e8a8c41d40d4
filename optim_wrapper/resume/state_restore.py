"""Putting a unit's stored state back into a live model and optimizer: checked as a whole before anything changes.

Tensors are overwritten in place. The optimizer's own load_state_dict is not used: it casts the fp32 moments of
bf16 parameters to bf16. Moments that do not exist yet are made in the type and on the device they were saved with.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import unit_tensor_name
from lastwords.checkpoint.meta import Tree, UnitMeta, groups_of
from lastwords.errors import FormatError, MismatchError, some
from lastwords.optim_wrapper.capture.buffers import BufferPlace, device_at, place_of, put
from lastwords.optim_wrapper.joined_optimizer import JoinedOptimizer, optimizer_kind, order_state
from lastwords.optim_wrapper.state.state_view import Names, UnitView
from lastwords.optim_wrapper.tensors.tensor_bytes import (
    bytes_of,
    dtype_name,
    dtype_named,
    overwrite,
    spec_of,
    tensor_over,
)
from lastwords.optim_wrapper.tensors.tensor_tree import put_together, tensor_nodes
from lastwords.optim_wrapper.wrapper import adopted_groups
from lastwords.sharding import zero
from lastwords.sharding.dtensor import empty_shard, is_dtensor, is_shard, local_of, placements_to_json

_log = logging.getLogger(__name__)

_SHOWN_MAX = 8


class Reading:
    """Tensors to be read and the memory they go to; `into` is for `Checkpoint.read_tensors`."""

    def __init__(self) -> None:
        self._targets: dict[str, torch.Tensor] = {}
        self._staged: dict[str, tuple[bytearray, torch.Tensor]] = {}

    @property
    def tensor_names(self) -> list[str]:
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
        """After everything has been read: what could not be read in place."""
        for memory, target in self._staged.values():
            overwrite(target, tensor_over(memory, target.dtype, tuple(local_of(target).shape)))
        self._staged.clear()


class RestorePlan(Reading):
    """What has to be read, and where to.

    The constructor raises MismatchError (or FormatError) if the state does not fit, and changes nothing. Then
    `lastwords.checkpoint.load.Checkpoint.read_tensors(plan.tensor_names, plan.into)` overwrites the weights, and
    `commit` does the rest. If reading fails half-way, the model holds rubbish: do not train on it.
    """

    def __init__(self, view: UnitView, specs: Iterable[TensorSpec], meta: UnitMeta) -> None:
        super().__init__()
        self._view = view
        self._meta = meta
        self._specs = {spec.name: spec for spec in specs}
        self._names = view.names()
        self._new_buffers: list[tuple[BufferPlace, torch.Tensor, bool]] = []
        self._check()

    def commit(self) -> None:
        """After everything has been read: staged tensors, optimizer state, hyperparameters."""
        super().commit()
        for place, buffer, volatile in self._new_buffers:
            put(place, buffer, volatile=volatile)
        owners = self._names.owners
        for module, key in [owners[name] for name in self._meta.absent_buffers if name in owners]:
            module._buffers[key] = None
        frozen = frozenset(self._meta.frozen or ())
        for name, parameter in self._names.parameters.items() if self._meta.frozen is not None else ():
            if parameter.requires_grad == (name in frozen) and parameter.is_leaf:
                parameter.requires_grad_(name not in frozen)  # unfrozen on the way, by a loop that does so once
        self._commit_optimizer()

    # ------------------------------------------------------------------ checks

    def _check(self) -> None:
        missing: list[str] = []
        extra: list[str] = []
        different: dict[str, str] = {}
        names, meta = self._names, self._meta
        self._check_tensors("model", names.parameters, meta.parameters, missing, extra, different)
        self._check_tensors("buffer", names.buffers, meta.buffers, missing, extra, different)
        for alias in sorted({*names.aliases, *meta.aliases}):
            here, saved = names.aliases.get(alias), meta.aliases.get(alias)
            if here != saved and alias not in missing and alias not in extra:
                different[alias] = f"saved {_tied(saved)}, here {_tied(here)}"
        self._check_optimizer(names, different)
        if missing or extra or different:
            raise MismatchError(
                _mismatch_text(type(self._view.model).__name__, missing, extra, different),
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
            free = kind == "buffer" and (name in names.volatile_buffers or name in meta.reshaped_buffers)
            if spec is None:
                # Tied in the checkpoint only: told below. A non-persistent buffer may simply not have been made yet.
                if name not in meta.aliases and not (free or (kind == "buffer" and name in meta.absent_buffers)):
                    missing.append(name)
            elif self._view.same_part(spec, name, tensor) and saved[name] == dtype_name(tensor.dtype):
                self._targets[stored] = tensor
            elif free:
                self._make_buffer(names.owners[name], name, stored)
            else:
                different[name] = _saved_and_here(spec, saved[name], self._view.spec_of(stored, name, tensor), tensor)
        known = {*here, *names.aliases, *excluded}
        for name in [name for name in saved if name not in known]:
            comes = name in {*meta.volatile_buffers, *meta.reshaped_buffers}
            place = place_of(self._view.model, self._view.called, name, comes=comes) if kind == "buffer" else None
            if place is None:
                extra.append(name)
            else:
                self._make_buffer(place, name, unit_tensor_name(self._view.unit, kind, name))

    def _check_optimizer(self, names: Names, different: dict[str, str]) -> None:
        kind, saved_kind = optimizer_kind(self._view.optimizer), self._meta.optimizer
        if kind != saved_kind:
            different["optimizer"] = f"saved {saved_kind}, here {kind}"
            return
        saved_groups = [tuple(group) for group in self._meta.group_parameters]
        if len(saved_groups) != len(names.groups):
            advice = _removed(saved_groups, names.groups)
            different["optimizer.param_groups"] = f"saved {len(saved_groups)} groups, here {len(names.groups)}{advice}"
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
        for name, tree in self._meta.optimizer_state.items():
            parameter = self._names.parameters.get(name)
            current = self._view.optimizer_state.get(parameter, {}) if parameter is not None else {}
            if parameter is None and not name.startswith("~"):
                raise FormatError(f"the unit has optimizer state of {name!r}, which is not one of its parameters")
            for key, node in tree["dict"]:
                for stored, leaf in tensor_nodes(node, f"optimizer.state[{name!r}][{key!r}]").items():
                    existing = current.get(key) if "tensor" in node else None
                    self._targets[stored] = self._state_tensor(stored, leaf, parameter, existing)
        for owner, _, tree in self._meta.optimizer_own:
            parameter = None if owner is None else self._names.parameters.get(owner)
            for stored, leaf in tensor_nodes(tree, "the optimizer's state").items():
                self._targets[stored] = self._state_tensor(stored, leaf, parameter, None)
        for alias, first_name in self._meta.shared.items():
            one, other = self._targets.get(alias), self._targets.get(first_name)
            if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
                raise FormatError(
                    f"{alias!r} shares memory with {first_name!r}, whose shape or dtype differs or which was not saved"
                )
            self._targets[alias] = other
        for g, tree in enumerate(self._meta.groups):
            first = next(iter(self._view.optimizer.param_groups[self._names.group_numbers[g]]["params"]), None)
            for stored, leaf in tensor_nodes(tree, f"optimizer.param_groups[{g}]").items():
                self._targets[stored] = self._state_tensor(stored, leaf, first, None)

    def _state_tensor(self, stored: str, leaf: Tree, parameter: torch.Tensor | None, existing: object) -> torch.Tensor:
        dtype = dtype_named(leaf["dtype"])
        shape = stored_shape(self._spec(stored), leaf["dtype"])
        device = torch.device("cpu") if parameter is None or "apart" in leaf else parameter.device
        if "placements" in leaf:
            return self._state_shard(stored, leaf, parameter, existing, torch.device(device))
        if (
            isinstance(existing, torch.Tensor)
            and not is_dtensor(existing)
            and existing.dtype == dtype
            and tuple(existing.shape) == shape
            and existing.device == device
        ):
            return existing
        if parameter is not None and not is_dtensor(parameter) and tuple(parameter.shape) == shape:
            return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=device)

    def _state_shard(
        self, stored: str, leaf: Tree, parameter: torch.Tensor | None, existing: object, device: torch.device
    ) -> torch.Tensor:
        if parameter is None or not is_dtensor(parameter):
            raise FormatError(f"{stored!r} was saved as a shard of a whole, but its parameter here is not sharded")
        spec, dtype, placements = self._spec(stored), dtype_named(leaf["dtype"]), leaf["placements"]
        if len(placements) != parameter.device_mesh.ndim:  # type: ignore[attr-defined]
            raise FormatError(f"{stored!r} was saved on a mesh of {len(placements)} dimensions; use such a mesh")
        if (
            isinstance(existing, torch.Tensor)
            and is_dtensor(existing)
            and existing.dtype == dtype
            and existing.device == device
            and placements_to_json(existing) == placements
            and spec_of(stored, existing) == spec
        ):
            return existing
        local, shape = local_of(parameter), stored_shape(spec, leaf["dtype"])
        if tuple(local.shape) == shape:
            part = torch.empty_like(local, dtype=dtype, device=device, requires_grad=False)
        else:
            part = torch.empty(shape, dtype=dtype, device=device)
        made = empty_shard(parameter, placements, leaf["global_shape"], part)
        if spec_of(stored, made) != spec:
            raise FormatError(
                f"{stored!r} was saved as {spec.shape} at {spec.offsets} of {spec.global_shape}, which is "
                f"not this rank's shard here; use the mesh of the saved run"
            )
        return made

    def _make_buffer(self, place: BufferPlace, name: str, stored: str) -> None:
        dtype, device = self._meta.buffers[name], device_at(place, self._view.model)
        shape = stored_shape(self._spec(stored), dtype)
        self._targets[stored] = buffer = torch.empty(shape, dtype=dtype_named(dtype), device=device)
        self._new_buffers.append((place, buffer, name in self._meta.volatile_buffers))

    def _spec(self, stored: str) -> TensorSpec:
        try:
            return self._specs[stored]
        except KeyError:
            raise FormatError(f"the unit's JSON names the tensor {stored!r}, but it is not in the file") from None

    # ------------------------------------------------------------------ optimizer

    def _commit_optimizer(self) -> None:
        optimizer, state, names = self._view.optimizer, self._view.optimizer_state, self._names
        restored: dict[Any, dict[str, Any]] = {}
        for name, tree in self._meta.optimizer_state.items():
            key = names.parameters.get(name, name.removeprefix("~"))
            restored[key] = put_together(tree, self._target_of, f"optimizer state of {name!r}")
        for owner, key, tree in self._meta.optimizer_own:
            target = key if owner is None else names.parameters[owner]
            restored[target] = put_together(tree, self._target_of, f"optimizer state of {owner or key!r}")
        self._keep_left_out(restored)
        own = {id(parameter) for parameter in names.parameters.values()}
        for key in list(state):
            if key not in restored and (self._view.members is None or id(key) in own):
                del state[key]
        for key, value in restored.items():
            state[key] = value
        if any(owner is not None for owner, _, _ in self._meta.optimizer_own):  # which are stored behind the others
            order_state(optimizer)
        for place, tree in enumerate(self._meta.groups):
            g = names.group_numbers[place]
            _fill_group(optimizer.param_groups[g], tree, self._targets, f"optimizer.param_groups[{g}]")

    def _target_of(self, node: Tree) -> torch.Tensor:
        return self._targets[node["tensor"]]

    def _keep_left_out(self, restored: dict[Any, dict[str, Any]]) -> None:
        """What could not be stored stays as the constructor has made it here, if it has."""
        live, parameters = self._view.optimizer_state, self._names.parameters
        left_out = self._meta.left_out
        for own in [own for own in live if not isinstance(own, torch.Tensor) and (f"~{own}", None) in left_out]:
            restored.setdefault(own, live[own])
        for name, key in left_out:
            there = live.get(parameters[name]) if name in parameters else None
            if there is None:
                continue
            if key is None:
                restored[parameters[name]] = there
            elif key in there:
                restored[parameters[name]][key] = there[key]


def _fill_group(group: dict[str, Any], tree: Tree, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Put stored hyperparameters into a param group."""
    for key, value in put_together(tree, lambda node: tensors[node["tensor"]], where).items():
        current = group.get(key)
        if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                current.copy_(value)  # schedulers and captured graphs hold on to this very tensor
        else:
            group[key] = value


def stored_shape(spec: TensorSpec, dtype: str) -> tuple[int, ...]:
    """Shape of a stored tensor of this type: the reverse of spec_of for the types that safetensors lacks."""
    probe = spec_of("unit/x/model/x", torch.empty((), dtype=dtype_named(dtype)))
    return spec.shape if probe.shape == () else spec.shape[:-1]


def _saved_and_here(spec: TensorSpec, dtype: str, here: TensorSpec, tensor: torch.Tensor) -> str:
    """How a stored tensor and the live one, which would be stored as `here`, differ in form."""
    was, now = stored_shape(spec, dtype), tuple(local_of(tensor).shape)
    text = f"saved {dtype} {was}, here {dtype_name(tensor.dtype)} {now}"
    if is_shard(tensor) or here.shape != here.global_shape or spec.shape != spec.global_shape:
        text = (
            f"saved {dtype} {was} at {spec.offsets} of {spec.global_shape}, "
            f"here {dtype_name(tensor.dtype)} {now} at {here.offsets} of {here.global_shape}"
        )
    return text


def _tied(name: str | None) -> str:
    return "not tied" if name is None else f"tied to {name}"


def _mismatch_text(model: str, missing: list[str], extra: list[str], different: dict[str, str]) -> str:
    """What a MismatchError says."""

    parts = []
    if missing:
        parts.append(f"missing in the checkpoint: {some(missing, _SHOWN_MAX)}")
    if extra:
        parts.append(f"only in the checkpoint: {some(extra, _SHOWN_MAX)}")
    if different:
        parts.append("different: " + some((f"{name} ({what})" for name, what in different.items()), _SHOWN_MAX))
    return (
        f"the checkpoint does not fit this {model} and its optimizer; nothing was changed. "
        + "; ".join(parts)
        + ". Build the model and optimizer as the saved run did, or choose another checkpoint"
    )


def _removed(saved: Sequence[tuple[str, ...]], here: Sequence[tuple[str, ...]]) -> str:
    """What to do about groups that are here only, if the others are those of the checkpoint.

    >>> _removed([("b",)], [("a",), ("b",)])
    "; if the saved run had removed that of 'a', do so before resume(): del optimizer.param_groups[0]"
    >>> _removed([("c",)], [("a",), ("b",)])
    ''
    """
    more = [number for number, group in enumerate(here) if group not in saved]
    if not more or [group for group in here if group in saved] != list(saved):
        return ""
    which = " and ".join(f"that of {here[number][0]!r}" if here[number] else "an empty one" for number in more)
    remedy = "; ".join(f"del optimizer.param_groups[{number}]" for number in reversed(more))
    return f"; if the saved run had removed {which}, do so before resume(): {remedy}"


# Param groups that the saved run added on its way (gradual unfreezing): resume() adds them to the optimizer as well.
#
# Nothing else could: the loop adds them in a step that the resumed run does not come to, and which groups there are
# decides which parameters are trained. A loop that adds one of them again is told apart from a mistake, and does no
# harm: `OptTFTWrapper.add_param_group`.


@contextlib.contextmanager
def adopted(view: UnitView, metas: Sequence[UnitMeta]) -> Iterator[None]:
    """Inside, and after it, the optimizer has the saved groups that it lacked; where an error comes, it has not.

    metas: of all units of this rank. Nothing is added where that would not make the groups those of the checkpoint
    (a parameter is unknown here, or in a group already), nor to several optimizers, of which any might lack it.
    """
    optimizer = view.optimizer
    before = [list(group["params"]) for group in optimizer.param_groups]
    new, moved = _addable(view, metas), _moved(view, metas)
    for number, parameters in enumerate(new, len(before)):
        optimizer.add_param_group({"params": parameters, **_plain_options(metas, number)})
    for group, parameters in zip(optimizer.param_groups, moved, strict=False):
        group["params"][:] = parameters
    try:
        yield
    except BaseException:
        del optimizer.param_groups[len(before) :]
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"][:] = parameters
        raise
    if moved:
        _log.info("parameters were moved between param groups, as the saved run had moved them")
    if new:
        adopted_groups[optimizer] = [frozenset(map(id, parameters)) for parameters in new]
        last = len(before) + len(new) - 1
        _log.info("param groups %s to %s were added, as the saved run had added them", len(before), last)


def _moved(view: UnitView, metas: Sequence[UnitMeta]) -> list[list[torch.Tensor]]:
    """Parameters of each group, where the groups are of the same ones in all, and others are in each; else empty."""
    optimizer = view.optimizer
    if isinstance(optimizer, JoinedOptimizer) or zero.is_zero(optimizer) or len(metas) != 1:
        return []
    names = view.all_names()
    saved, here = groups_of(metas), [tuple(group) for group in names.groups]
    same = len(saved) == len(here) and sorted(chain(*saved)) == sorted(chain(*here))
    if not same or [*map(tuple, saved)] == here or any(name.startswith("~") for name in chain(*saved)):
        return []
    return [[names.parameters[name] for name in group] for group in saved]


def _addable(view: UnitView, metas: Sequence[UnitMeta]) -> list[list[torch.Tensor]]:
    """Parameters of each group to add; empty if it would not do."""
    optimizer = view.optimizer
    if isinstance(optimizer, JoinedOptimizer) or zero.is_zero(optimizer):
        return []
    names = groups_of(metas)[len(optimizer.param_groups) :]
    known = view.all_names().parameters
    taken = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found: list[list[torch.Tensor]] = []
    for group in names:
        if not group or any(name not in known or name.startswith("~") or id(known[name]) in taken for name in group):
            return []
        found.append([known[name] for name in group])
        taken |= {id(parameter) for parameter in found[-1]}
    return found


def _plain_options(metas: Sequence[UnitMeta], number: int) -> dict[str, Any]:
    """What add_param_group() may ask for; the restore sets all of it, tensors too."""
    for meta in metas:
        if number in meta.group_numbers:
            pairs = meta.groups[meta.group_numbers.index(number)]["dict"]
            return {key: node["plain"] for key, node in pairs if "plain" in node and key != "params"}
    return {}
