"""Extras: schedulers, scalers and other objects of the user's that have to come along.

At each step's end their state is copied structurally (containers rebuilt, tensors cloned), which costs a few
microseconds for a scheduler; it becomes JSON and tensors only when it is saved. Which of them moved in which step
is remembered, because a rank can be caught between the update and the scheduler's own step (see `after_update`).
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import unit_tensor_name
from lastwords.errors import ConfigError, FormatError, MismatchError
from lastwords.optim_wrapper.tensor_bytes import Source, bytes_of, dtype_named, source_of, spec_of, tensor_over
from lastwords.optim_wrapper.tensor_tree import put_together, take_apart, tensor_nodes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExtrasSnapshot:
    """States of all extras at one moment, by name, and what is known of how they move.

    steps: step ends seen so far. regular: names of those that moved in each of these steps, schedulers exactly once.
    moved: names of those that have ever moved. step_on_resume: schedulers whose step() for this step is still due.
    """

    states: Mapping[str, Any]
    steps: int = 0
    regular: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()
    step_on_resume: tuple[str, ...] = ()


class Extras:
    """Named objects whose state is saved and restored with the training's.

    label: how the caller calls them ("extras", "local_extras"), for messages. Each value has state_dict() and
    load_state_dict(), or is a dict of plain values and tensors (restored in place).
    Raises ConfigError with the path of the first thing that cannot be stored.
    """

    def __init__(self, objects: Mapping[str, Any], label: str = "extras") -> None:
        self._label = label
        self._objects = dict(objects)
        for name, value in self._objects.items():
            if not isinstance(name, str) or not name or "/" in name:
                raise ConfigError(f"{label}: {name!r} is no name; use a non-empty string without '/'")
            if not isinstance(value, dict) and not (
                callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
            ):
                raise ConfigError(
                    f"{label}[{name!r}] is a {type(value).__name__}; give an object with state_dict() and "
                    "load_state_dict(), or a dict of plain values"
                )
        self.store(self.first())

    def __bool__(self) -> bool:
        return bool(self._objects)

    # ------------------------------------------------------------------ training thread

    def first(self, history: ExtrasSnapshot | None = None) -> ExtrasSnapshot:
        """States before the first step of this process; `history` is that of the run which is resumed."""
        states = {name: self._state(name) for name in self._objects}
        if history is None:
            return ExtrasSnapshot(states, 0, frozenset(self._objects), frozenset())
        return ExtrasSnapshot(states, history.steps, history.regular & states.keys(), history.moved & states.keys())

    def ended(self, before: ExtrasSnapshot) -> ExtrasSnapshot:
        """States at a step's end, `before` being those at the end of the step before."""
        if not self._objects:
            return before
        states = {name: self._state(name) for name in self._objects}
        moves = {name: self._moves(name, before.states[name], state) for name, state in states.items()}
        return ExtrasSnapshot(
            states,
            before.steps + 1,
            frozenset(name for name in before.regular if moves[name] == 1),
            before.moved | {name for name, count in moves.items() if count},
        )

    # ------------------------------------------------------------------ writer's thread

    def after_update(self, before: ExtrasSnapshot | None) -> tuple[ExtrasSnapshot, list[str]]:
        """States for a step whose update is done and whose end was never reached; and why they are not exact.

        What has moved since `before` is taken as it is. A scheduler that has not moved, although it moved exactly
        once in each step before, and whose step() needs no argument, is marked to be stepped on resume.
        """
        if before is None:
            before = self.first()
        states = {name: self._state(name) for name in self._objects}
        due: list[str] = []
        reasons: list[str] = []
        for name, state in states.items():
            if self._moves(name, before.states[name], state) or (before.steps and name not in before.moved):
                continue
            what = f"{self._label}[{name!r}] had not moved yet when its step was cut off after the update"
            if not before.steps:
                reasons.append(f"{what}, and no step before shows whether it would have")
            elif name not in before.regular:
                reasons.append(f"{what}, and it does not move exactly once in every step")
            elif not _steps_without_argument(self._objects[name]):
                reasons.append(f"{what}, and it cannot be stepped without an argument")
            else:
                due.append(name)
        return ExtrasSnapshot(states, before.steps, before.regular, before.moved, tuple(due)), reasons

    def store(
        self, snapshot: ExtrasSnapshot, unit: str = "x"
    ) -> tuple[dict[str, Any], list[tuple[TensorSpec, Source]]]:
        """JSON and tensors of a snapshot; ConfigError with the path of what cannot be stored."""
        trees: dict[str, Any] = {}
        tensors: list[tuple[TensorSpec, Source]] = []
        for name, state in snapshot.states.items():
            stored = unit_tensor_name(unit, "extra", name)
            trees[name], found = take_apart(state, stored, f"{self._label}[{name!r}]")
            tensors += [(spec_of(item.name, item.tensor), source_of(item.tensor)) for item in found]
        tree = {
            "states": trees,
            "steps": snapshot.steps,
            "regular": sorted(snapshot.regular),
            "moved": sorted(snapshot.moved),
            "step_on_resume": list(snapshot.step_on_resume),
        }
        return tree, tensors

    # ------------------------------------------------------------------ resume

    def restore(self, tree: Mapping[str, Any], read: Callable[[str], torch.Tensor]) -> ExtrasSnapshot:
        """Put stored states back; `read(name)` gives a stored tensor. Returns the history they come with.

        Raises MismatchError, before anything is changed, if the names differ.
        """
        try:
            trees: Mapping[str, Any] = tree["states"]
            history = ExtrasSnapshot(
                {},
                int(tree["steps"]),
                frozenset(tree["regular"]),
                frozenset(tree["moved"]),
                tuple(tree["step_on_resume"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"the checkpoint's {self._label} are damaged: {error!r}") from error
        missing, extra = sorted(self._objects.keys() - trees.keys()), sorted(trees.keys() - self._objects.keys())
        if missing or extra:
            raise MismatchError(
                f"{self._label} differ from the checkpoint's: missing there: {', '.join(missing) or 'none'}; only "
                f"there: {', '.join(extra) or 'none'}; register the same {self._label} as the saved run did",
                missing=missing,
                extra=extra,
            )
        values = {name: put_together(trees[name], read, f"{self._label}[{name!r}]") for name in self._objects}
        for name, value in values.items():
            target = self._objects[name]
            if isinstance(target, dict):
                target.clear()
                target.update(value)
            else:
                target.load_state_dict(value)
        for name in history.step_on_resume:
            self._objects[name].step()
            _log.info("%s[%r] made the step that was still due", self._label, name)
        return history

    # ------------------------------------------------------------------ inside

    def _state(self, name: str) -> Any:
        value = self._objects[name]
        return _copy(value if isinstance(value, dict) else value.state_dict())

    def _moves(self, name: str, before: Any, now: Any) -> int:
        """How often an extra moved between two states: exact for schedulers, else 0 or 1."""
        if isinstance(before, dict) and isinstance(now, dict):
            counts = before.get("_step_count"), now.get("_step_count")
            if isinstance(counts[0], int) and isinstance(counts[1], int):
                return counts[1] - counts[0]
        return 0 if _equal(before, now) else 1


def pack_inline(extras: Extras, snapshot: ExtrasSnapshot) -> dict[str, Any]:
    """A snapshot as one plain value, tensors as bytes inside: for rank-local extras, which live in JSON."""
    tree, tensors = extras.store(snapshot)
    inline = {}
    for spec, source in tensors:
        data = source() if callable(source) else source
        inline[spec.name] = [list(spec.shape), bytes(data)]
    return {"tree": tree, "tensors": inline}


def restore_inline(extras: Extras, packed: Mapping[str, Any]) -> ExtrasSnapshot:
    """Inverse of `pack_inline`: puts the states back into the objects."""
    nodes: dict[str, Mapping[str, Any]] = {}
    for name, tree in packed["tree"]["states"].items():
        nodes |= tensor_nodes(tree, name)

    def read(name: str) -> torch.Tensor:
        shape, data = packed["tensors"][name]
        return tensor_over(bytearray(data), dtype_named(nodes[name]["dtype"]), tuple(shape))

    return extras.restore(packed["tree"], read)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    kind = type(value)
    if kind is dict:
        return {key: _copy(item) for key, item in value.items()}
    if kind is list:
        return [_copy(item) for item in value]
    if kind is tuple:
        return tuple(_copy(item) for item in value)
    if kind is OrderedDict:
        return OrderedDict((key, _copy(item)) for key, item in value.items())
    return value.copy() if hasattr(value, "copy") and not isinstance(value, str | bytes) else value


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and bytes_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(item, other[key]) for key, item in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other) or (one != one and other != other)


def bytes_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits (a NaN equals itself)."""
    views = bytes_of(one.cpu().contiguous()), bytes_of(other.cpu().contiguous())
    return views[0] is not None and views[1] is not None and bytes(views[0]) == bytes(views[1])


def _steps_without_argument(target: Any) -> bool:
    step = getattr(target, "step", None)
    if not callable(step):
        return False
    try:
        inspect.signature(step).bind()
    except (TypeError, ValueError):
        return False
    return True
