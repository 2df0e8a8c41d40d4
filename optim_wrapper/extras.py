"""Extras: schedulers, scalers and other objects of the user's that have to come along.

At each step's end their state is compared with the one before and copied where it differs, which costs a few
microseconds for a scheduler; it becomes JSON and tensors only when it is saved. Which of them moved in which step
is remembered, because a rank can be caught between the update and the scheduler's own step (see `after_update`).

What cannot be stored is refused at the start. Later on it is left out as soon as it appears, and that is said: it may
cost exactness, never the weights or a healthy run. Of an object all is left out, of a dict only the key in question.
"""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import unit_tensor_name
from lastwords.checkpoint.state_trees import renamed
from lastwords.checkpoint.storable import pack
from lastwords.errors import ConfigError, FormatError, MismatchError, UnstorableError
from lastwords.optim_wrapper.own_state import OwnState
from lastwords.optim_wrapper.tensor_bytes import Source, Stage, dtype_named, source_of, spec_of, tensor_over
from lastwords.optim_wrapper.tensor_tree import NamedTensor, Tree, put_together, take_apart, tensor_nodes
from lastwords.optim_wrapper.value_copies import advance, overwrite_values

_log = logging.getLogger(__name__)

JSON_BYTES_MAX = 16 << 20
"""Of one extra without its tensors. A file's header holds 100 MB in all; more would cost the weights."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Stands in a snapshot for a value that cannot be stored. reason: which one, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class ExtrasSnapshot:
    """States of all extras at one moment, by name, and what is known of how they move.

    Never changed once made: what has not moved is shared with the snapshot before. `LeftOut` may stand in it.
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
            self._refuse_unstorable(name, value)
        self._told: set[str] = set()

    def add(self, own: Mapping[str, OwnState]) -> None:
        """Take these too. What of them cannot be stored is left out with a reason, from the start on."""
        self._objects |= own

    def __bool__(self) -> bool:
        return bool(self._objects)

    def __contains__(self, target: object) -> bool:
        return any(value is target for value in self._objects.values())

    # ------------------------------------------------------------------ training thread

    def reopen_loaders(self) -> None:
        """After a resume: loaders among them have been asked for their state, and may have made an iterator for that.

        torchdata's StatefulDataLoader does, and its workers begin to fetch before the sampler knows its epoch.
        """
        for value in self._objects.values():
            if not isinstance(value, dict) and hasattr(type(value), "__iter__"):
                value.load_state_dict(value.state_dict())

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
        for name in self._objects:
            was = before.states[name]
            states[name], differs = self._taken(name, was)
            if differs:
                moved.add(name)
            if name in regular and (not differs or _moves(was, states[name]) != 1):
                regular.discard(name)
        return ExtrasSnapshot(states, before.steps + 1, frozenset(regular), frozenset(moved))

    def again(self, before: ExtrasSnapshot) -> tuple[ExtrasSnapshot, list[str]]:
        """States at another look after the step end of `before`, and the names of what has moved since."""
        taken = {name: self._taken(name, before.states[name]) for name in self._objects}
        moved = [f"{self._label}[{name!r}]" for name, (_, differs) in taken.items() if differs]
        return (replace(before, states={name: one[0] for name, one in taken.items()}), moved) if moved else (before, [])

    # ------------------------------------------------------------------ writer's thread

    def after_update(self, before: ExtrasSnapshot | None) -> tuple[ExtrasSnapshot, list[str]]:
        """States for a step whose update is done and whose end was never reached; and why they are not exact.

        What has moved since `before` is taken as it is. A scheduler that has not moved, although it moved exactly
        once in each step before, and whose step() needs no argument, is marked to be stepped on resume.
        """
        if before is None:
            before = self.first()
        taken = {name: self._taken(name, before.states[name]) for name in self._objects}
        due: list[str] = []
        reasons: list[str] = []
        for name, (state, differs) in taken.items():
            if differs or isinstance(state, LeftOut) or (before.steps and name not in before.moved):
                continue
            if isinstance(own := self._objects[name], OwnState) and own.final_after_update:
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
        states = {name: state for name, (state, _) in taken.items()}
        return ExtrasSnapshot(states, before.steps, before.regular, before.moved, tuple(due)), reasons

    def store(
        self,
        snapshot: ExtrasSnapshot,
        unit: str = "x",
        stage: Stage | None = None,
        json_bytes_max: int | None = None,
    ) -> tuple[dict[str, Any], list[tuple[TensorSpec, Source]]]:
        """JSON and tensors of a snapshot. What cannot be stored is left out; `left_out` in the JSON has the reasons.

        json_bytes_max: of one extra's JSON.
        """
        trees: dict[str, Any] = {}
        tensors: dict[str, tuple[TensorSpec, Source]] = {}
        left_out: dict[str, list[str]] = {}
        for name, state in snapshot.states.items():
            tree, found, reasons = self._stored(name, state, unit_tensor_name(unit, "extra", name))
            if tree is not None and json_bytes_max is not None:
                nbytes = len(json.dumps(pack(tree)))
                if nbytes > json_bytes_max:
                    tree, what = None, f"{nbytes} bytes of values that are no tensors"
                    reasons.append(f"{self._label}[{name!r}] ({what}) cannot be stored")
            if reasons:
                left_out[name] = reasons
            if tree is not None:
                # "b" of the extra "a" and the extra "a.b" would give one name to two tensors.
                called = {one.name: one.name if one.name not in tensors else f"{one.name}~{name}" for one in found}
                trees[name] = renamed(tree, called.__getitem__, name)
                for one in found:
                    tensors[called[one.name]] = spec_of(called[one.name], one.tensor), source_of(one.tensor, stage)
        document = {
            "states": trees,
            "left_out": left_out,
            "steps": snapshot.steps,
            "regular": sorted(snapshot.regular),
            "moved": sorted(snapshot.moved),
            "step_on_resume": [name for name in snapshot.step_on_resume if name in trees],
        }
        return document, list(tensors.values())

    # ------------------------------------------------------------------ resume

    def restore(self, tree: Mapping[str, Any], read: Callable[[str], torch.Tensor]) -> ExtrasSnapshot:
        """Put stored states back; `read(name)` gives a stored tensor. Returns the history they come with.

        Raises MismatchError, before anything is changed, if the names differ.
        """
        try:
            trees: Mapping[str, Any] = tree["states"]
            left_out = frozenset(tree.get("left_out", ()))
            history = ExtrasSnapshot(
                {},
                int(tree["steps"]),
                frozenset(tree["regular"]),
                frozenset(tree["moved"]),
                tuple(tree["step_on_resume"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"the checkpoint's {self._label} are damaged: {error!r}") from error
        own = {name: value for name, value in self._objects.items() if isinstance(value, OwnState)}
        for name in own.keys() - trees.keys() - left_out:
            own[name].not_saved()
        missing, extra = (
            sorted(self._objects.keys() - trees.keys() - left_out - own.keys()),
            sorted(trees.keys() - self._objects.keys()),
        )
        if missing or extra:
            raise MismatchError(
                f"{self._label} differ from the checkpoint's: missing there: {', '.join(missing) or 'none'}; only "
                f"there: {', '.join(extra) or 'none'}; register the same {self._label} as the saved run did",
                missing=missing,
                extra=extra,
            )
        values = {
            name: put_together(trees[name], read, f"{self._label}[{name!r}]") for name in self._objects if name in trees
        }
        for name, value in values.items():
            target = self._objects[name]
            if isinstance(target, dict):
                if not isinstance(value, dict):
                    raise FormatError(f"the checkpoint's {self._label}[{name!r}] is no dict, as it is here")
                overwrite_values(target, value, keep=name in left_out)
                continue
            try:
                target.load_state_dict(value)
            except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError) as error:
                raise MismatchError(
                    f"{self._label}[{name!r}] ({type(target).__name__}) refused the state in the checkpoint "
                    f"({error!r}); "
                    "register the same kind of object as the saved run did",
                    different={f"{self._label}[{name!r}]": repr(error)},
                ) from error
        for name in history.step_on_resume:
            if not _steps_without_argument(self._objects[name]):
                raise FormatError(f"{self._label}[{name!r}] has a step due, but is no scheduler here")
            with warnings.catch_warnings():
                # torch warns about a scheduler's step without an optimizer's before it; that one was in the saved run.
                warnings.simplefilter("ignore", UserWarning)
                self._objects[name].step()
            _log.info("%s[%r] made the step that was still due", self._label, name)
        return history

    # ------------------------------------------------------------------ inside

    def _refuse_unstorable(self, name: str, value: Any) -> None:
        path = f"{self._label}[{name!r}]"
        take_apart(value if isinstance(value, dict) else value.state_dict(), "x", path)

    def _state(self, name: str) -> Any:
        return self._taken(name, None)[0]

    def _taken(self, name: str, before: Any) -> tuple[Any, bool]:
        """`advance` to the state as it is now, with what cannot be stored left out."""
        value, path = self._objects[name], f"{self._label}[{name!r}]"
        try:
            now = value if isinstance(value, dict) else value.state_dict()
        except Exception as error:  # of the user's own code: handed to the log and to the checkpoint
            return self._left_out(before, f"{path} cannot be stored: its state_dict() raised {error!r:.200}")
        try:
            return advance(before, now)
        except (UnstorableError, RecursionError):
            pass
        if not isinstance(value, dict):
            return self._left_out(before, _reason(now, path))
        known = before if isinstance(before, dict) else {}
        items: dict[Any, tuple[Any, bool]] = {}
        for key, item in now.items():
            try:
                items[key] = advance(known.get(key), item)
            except (UnstorableError, RecursionError):
                items[key] = self._left_out(known.get(key), _reason(item, f"{path}[{key!r}]"))
        differs = known.keys() != items.keys() or any(pair[1] for pair in items.values())
        return {key: pair[0] for key, pair in items.items()}, differs

    def _left_out(self, before: Any, reason: str) -> tuple[LeftOut, bool]:
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("%s, so from now on it is left out of what is saved, and a resume is not exact", reason)
        return LeftOut(reason), before != LeftOut(reason)

    def _stored(self, name: str, state: Any, stored: str) -> tuple[Tree | None, list[NamedTensor], list[str]]:
        """Tree and tensors of one extra, and why something, or all of it (then there is no tree), is left out."""
        path = f"{self._label}[{name!r}]"
        try:
            return *take_apart(state, stored, path), []
        except UnstorableError:
            pass
        if not isinstance(state, dict) or not isinstance(self._objects[name], dict):
            return None, [], [_reason(state, path)]
        kept, reasons = {}, []
        for key, item in state.items():
            try:
                take_apart({key: item}, stored, path)
            except UnstorableError:
                reasons.append(_reason(item, f"{path}[{key!r}]"))
            else:
                kept[key] = item
        return *take_apart(kept, stored, path), reasons


def _reason(value: Any, path: str) -> str:
    """Why a value was left out."""
    if isinstance(value, LeftOut):
        return value.reason
    try:
        take_apart(value, "x", path)
    except UnstorableError as error:
        return f"{error.reason} cannot be stored"
    except RecursionError:
        return f"{path} (contains itself) cannot be stored"
    return f"{path} (with its key) cannot be stored"


def left_out_of(document: Mapping[str, Any]) -> list[str]:
    """All reasons in what `Extras.store` gave."""
    return [reason for reasons in document["left_out"].values() for reason in reasons]


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
        return tensor_over(
            bytearray(packed["tensors"][name][1]), dtype_named(nodes[name]["dtype"]), nodes[name]["shape"]
        )

    return extras.restore(packed["tree"], read)


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


def _steps_without_argument(target: Any) -> bool:
    step = getattr(target, "step", None)
    if not callable(step) or not callable(getattr(target, "get_last_lr", None)):
        return False  # a second optimizer, say, has a step() too; stepping it again is not what is due
    try:
        inspect.signature(step).bind()
    except (TypeError, ValueError):
        return False
    return True
