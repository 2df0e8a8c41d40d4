"""Extras: schedulers, scalers and other objects of the user's that have to come along.

At each step's end their state is compared with the one before and copied where it differs, which costs a few
microseconds for a scheduler; it becomes JSON and tensors only when it is saved. Which of them moved in which step
is remembered, because a rank can be caught between the update and the scheduler's own step (see `after_update`).
"""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections import Counter, OrderedDict
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

    Never changed once made: what has not moved is shared with the snapshot before.
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

    def __init__(self, objects: Mapping[str, Any] | None, label: str = "extras") -> None:
        if objects is not None and not isinstance(objects, Mapping):
            raise ConfigError(
                f"{label} must be a dict from names to objects, such as {label}={{'scheduler': scheduler}}, not "
                f"{objects!r:.80}"
            )
        self._label = label
        self._objects = dict(objects or {})
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
        states, regular, moved = {}, set(before.regular), set(before.moved)
        for name, value in self._objects.items():
            was = before.states[name]
            states[name], differs = _advance(was, value if isinstance(value, dict) else value.state_dict())
            if differs:
                moved.add(name)
            if name in regular and (not differs or _moves(was, states[name]) != 1):
                regular.discard(name)
        return ExtrasSnapshot(states, before.steps + 1, frozenset(regular), frozenset(moved))

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
            if _advance(before.states[name], state)[1] or (before.steps and name not in before.moved):
                continue
            what = f"{self._label}[{name!r}] had not moved yet when its step was cut off after the update"
            if not before.steps:
                reasons.append(f"{what}, and no step before shows whether it would have")
            elif name not in before.regular:
                reasons.append(f"{what}, and it does not move exactly once in every step")
            elif not _steps_without_argument(self._objects[name]):
                reasons.append(f"{what}, and it is no scheduler that steps without an argument")
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
                _overwrite(target, value)
                continue
            try:
                target.load_state_dict(value)
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise MismatchError(
                    f"{self._label}[{name!r}] ({type(target).__name__}) refused the state in the checkpoint "
                    f"({error!r}); "
                    "register the same kind of object as the saved run did",
                    different={f"{self._label}[{name!r}]": repr(error)},
                ) from error
        for name in history.step_on_resume:
            with warnings.catch_warnings():
                # torch warns about a scheduler's step without an optimizer's before it; that one was in the saved run.
                warnings.simplefilter("ignore", UserWarning)
                self._objects[name].step()
            _log.info("%s[%r] made the step that was still due", self._label, name)
        return history

    # ------------------------------------------------------------------ inside

    def _state(self, name: str) -> Any:
        value = self._objects[name]
        return _advance(None, value if isinstance(value, dict) else value.state_dict())[0]


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


_ATOMS = frozenset({type(None), bool, int, float, str, bytes})


def _advance(before: Any, now: Any) -> tuple[Any, bool]:
    """A copy of `now` that shares with `before` (a copy made earlier) what is equal; and whether anything differs."""
    kind = type(now)
    if now is before and kind in _ATOMS:
        return now, False
    if type(before) is not kind:
        before = None
    if kind in _ATOMS:
        return now, before is None or (now != before and not (now != now and before != before))
    if kind is list or kind is tuple:
        pairs = [_advance(old, item) for old, item in zip(before, now, strict=True)] if _as_long(before, now) else None
        if pairs is None:
            return kind([_advance(None, item)[0] for item in now]), True
        if not any(pair[1] for pair in pairs):
            return before, False
        return kind([pair[0] for pair in pairs]), True
    if kind is dict or kind is OrderedDict:
        known = before if before is not None else {}
        differs = before is None or len(before) != len(now)
        result = kind()
        for key, item in now.items():
            result[key], moved = _advance(known.get(key), item)
            differs = differs or moved or key not in known
        return (result, True) if differs else (before, False)
    if isinstance(now, torch.Tensor):
        if before is not None and bytes_equal(before, now.detach()):
            return before, False
        return now.detach().clone(), True
    # Counters, sets and whatever else: either the checkpoint can store it or `store` refused it at the start.
    if kind in (Counter, set, frozenset) and before == now:
        return before, False
    return copy.deepcopy(now), True


def _as_long(before: Any, now: Any) -> bool:
    return before is not None and len(before) == len(now)


def _moves(before: Any, now: Any) -> int:
    """How often a scheduler stepped between two states of it: 1, or 2 for anything else; other objects: always 1.

    torch's schedulers count in last_epoch and most in _step_count as well (CosineAnnealingWarmRestarts does not);
    one that is stepped with an argument, such as a fraction of an epoch, does not count up by one.
    """
    if not isinstance(before, dict) or not isinstance(now, dict):
        return 1
    if isinstance(now.get("last_epoch"), int | float) and isinstance(before.get("last_epoch"), int | float):
        counts = before.get("_step_count"), now.get("_step_count")
        known = isinstance(counts[0], int) and isinstance(counts[1], int)
        extra = known and counts[1] - counts[0] not in (0, 1)  # type: ignore[operator]
        return 2 if extra or now["last_epoch"] - before["last_epoch"] != 1 else 1
    inner, inner_now = before.get("_schedulers"), now.get("_schedulers")
    if isinstance(inner, list) and isinstance(inner_now, list) and len(inner) == len(inner_now):
        return max(map(_moves, inner, inner_now), default=1)
    return 1


def _overwrite(target: dict[Any, Any], value: dict[Any, Any]) -> None:
    """Make `target` equal to `value`; tensors and dicts in it that have the right form stay the same objects."""
    for key in [key for key in target if key not in value]:
        del target[key]
    for key, item in value.items():
        here = target.get(key)
        if isinstance(here, torch.Tensor) and isinstance(item, torch.Tensor):
            if here.shape == item.shape and here.dtype == item.dtype:
                with torch.no_grad():
                    here.copy_(item)
                continue
        elif type(here) is dict and type(item) is dict:
            _overwrite(here, item)
            continue
        target[key] = item


def bytes_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits (a NaN equals itself)."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    views = bytes_of(one.cpu().contiguous()), bytes_of(other.cpu().contiguous())
    return views[0] is not None and views[1] is not None and views[0] == views[1]


def _steps_without_argument(target: Any) -> bool:
    step = getattr(target, "step", None)
    if not callable(step) or not callable(getattr(target, "get_last_lr", None)):
        return False  # a second optimizer, say, has a step() too; stepping it again is not what is due
    try:
        inspect.signature(step).bind()
    except (TypeError, ValueError):
        return False
    return True
