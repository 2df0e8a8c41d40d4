"""Extras: schedulers, scalers and other objects of the user's that have to come along.

At each step's end their state is compared with the one before and copied where it differs, which costs a few
microseconds for a scheduler; it becomes JSON and tensors only when it is saved. A rank can be caught between the update
and the scheduler's own step: see `after_update`. Torch's schedulers, scalers and modules (averaged models) move as a
whole, in one call, which has come or has not. Of other objects and of dicts each value is looked at for itself, down
to a few levels.

What cannot be stored is refused at the start. Later on it is left out as soon as it appears, and that is said: it may
cost exactness, never the weights or a healthy run. Of an object all is left out, of a dict only the key in question.
"""

from __future__ import annotations

import inspect
import json
import logging
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import xxhash
from torch.optim.lr_scheduler import LRScheduler

from lastwords.checkpoint.entries import renamed
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import unit_tensor_name
from lastwords.checkpoint.meta import ExtrasMeta, InlineExtras, StepDocument, Tree
from lastwords.checkpoint.part import TensorSource
from lastwords.checkpoint.storable import pack
from lastwords.errors import ConfigError, FormatError, MismatchError, UnstorableError
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.state.own_state import OwnState
from lastwords.optim_wrapper.tensors.overwriting import Overwriting
from lastwords.optim_wrapper.tensors.tensor_bytes import Stage, source_of, spec_of
from lastwords.optim_wrapper.tensors.tensor_tree import (
    ATOMS,
    DICTS,
    UNORDERED,
    NamedTensor,
    advance,
    disordered,
    out_of,
    put_together,
    take_apart,
)
from lastwords.processor.recurrence import REPEATS_MIN, Forecast, Late
from lastwords.sharding.verify import HolderDifference

# What is known of schedulers of torch's kind: how often one was stepped, and whether a resume can step it.


def is_scheduler(target: Any) -> bool:
    return isinstance(target, LRScheduler) or callable(getattr(target, "get_last_lr", None))


def steps_without_argument(target: Any) -> bool:
    """Whether it is a scheduler whose step() can be called as it is."""
    step = getattr(target, "step", None)
    if not callable(step) or not callable(getattr(target, "get_last_lr", None)):
        return False  # a second optimizer, say, has a step() too; stepping it again is not what is due
    try:
        inspect.signature(step).bind()
    except (TypeError, ValueError):
        return False
    return True


def is_at_its_end(state: Any) -> bool:
    """Whether a scheduler has just made the last one of the steps that it was made for."""
    known = ("total_iters", "T_max", "total_steps")
    return isinstance(state, dict) and any(state.get(key, -1) == state.get("last_epoch") for key in known)


def times_stepped(before: Any, now: Any) -> int:
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
        return max(map(times_stepped, inner, inner_now), default=1)
    return 1


# Whether extras are the same on every rank, as they are promised to be: digests of their states are compared.
#
# Before the first step the ranks compare them with each other. Later each rank's black box has digests of now and
# then, and whoever resumes compares those of one step.

EVERY = 64
"""Steps after which there are new ones, besides the first, second, fourth, eighth, ... one."""

UNIT = "~extras"
"""Stands where a unit's name stands among digests of units."""

REMEDY = "a resume restores one rank's extras on all ranks; pass state that differs by rank as local_extras="


def digests(states: Mapping[str, Any], apart: Mapping[str, frozenset[str]]) -> dict[str, int]:
    """Digest of each item of each extra's state. apart: keys of those that are kept for each rank.

    What cannot be stored is left out: it is told anyway.

    >>> list(digests({"mine": {"seen": 1, "own": 2}}, {"mine": frozenset({"own"})}))
    ["extras['mine']['seen']"]
    """
    found: dict[str, int] = {}
    for name, state in states.items():
        items = state.items() if isinstance(state, dict) else [(None, state)]
        for key, item in items:
            path = f"extras[{name!r}]" + ("" if key is None else f"[{key!r}]")
            if key in apart.get(name, ()):
                continue
            try:
                found[path] = digest_of(item)
            except (UnstorableError, RecursionError):
                continue
    return found


def digest_of(item: Any) -> int:
    """Equal for equal bits, in every process. UnstorableError or RecursionError for what cannot be stored."""
    tree, tensors = take_apart(item, "x", "x")
    hashed = xxhash.xxh3_64(json.dumps(pack(tree)).encode())
    for one in tensors:
        source = source_of(one.tensor, None)
        hashed.update(source() if callable(source) else source)
    return hashed.intdigest()


def text(difference: HolderDifference) -> str:
    """What is said of extras that differ when ranks compare them."""
    more = "" if difference.count == 1 else f" and {difference.count - 1} more"
    ranks = " and ".join(str(camp[0]) for camp in difference.camps)
    return f"{difference.tensor}{more} is not the same on all ranks ({ranks}): {REMEDY}"


def differing(said: Mapping[int, StepDocument]) -> list[str]:
    """Reasons out of what the black boxes of ranks say: those of one step are compared.

    >>> one, other = StepDocument(extras=(4, {"ema": "a"})), StepDocument(extras=(4, {"ema": "b"}))
    >>> (reason,) = differing({0: one, 1: other, 2: StepDocument()})
    >>> reason.partition(":")[0]
    "extras['ema'] was not the same on all ranks after 4 steps of the saved run (0 and 1)"
    """
    seen: dict[tuple[int, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, document in sorted(said.items()):
        step, of_names = document.extras or (0, {})
        for name, digest in of_names.items():
            seen[step, name][digest].append(rank)
    return [
        f"extras[{name!r}] was not the same on all ranks after {step} steps of the saved run "
        f"({' and '.join(str(ranks[0]) for ranks in camps.values())}): {REMEDY}"
        for (step, name), camps in sorted(seen.items())
        if len(camps) > 1
    ]


def by_extra(found: Mapping[str, int], names: Mapping[str, Any]) -> dict[str, str]:
    """One digest of each extra, out of those of its items."""
    of = {name: {path: one for path, one in found.items() if path.startswith(f"extras[{name!r}]")} for name in names}
    return {name: xxhash.xxh3_64(json.dumps(items).encode()).hexdigest() for name, items in of.items()}


_log = logging.getLogger(__name__)

JSON_BYTES_MAX = 16 << 20
"""Of one extra without its tensors. A file's header holds 100 MB in all; more would cost the weights."""

_DEPTH_MAX = 9


_WHOLE_BELOW, _ITEMS_MAX = 4, 64
"""What is deeper, or has more items (averaged weights by name), is looked at as one value."""

_ODDLY = ", stepped otherwise than once,"
"""After the name of a scheduler: it has moved so."""

_MAY_COME = (Forecast.NEVER, Forecast.UNKNOWN)
_TAKEN_OVER = (*_MAY_COME, Forecast.STOPPED, Forecast.NOT_DUE)
"""What is forecast of a scheduler that has not moved, and of one that has, where it may take another one's place."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Stands in a snapshot for a value that cannot be stored. reason: which one, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class ExtrasSnapshot:
    """States of all extras at one moment, by name.

    Never changed once made: what has not moved is shared with the snapshot before. `LeftOut` may stand in it.
    moved: what of them has since the step before, by what messages call it. step_on_resume: schedulers whose step() for
    this step is still due.
    """

    states: Mapping[str, Any]
    moved: Mapping[str, int] = field(default_factory=dict)
    step_on_resume: tuple[str, ...] = ()


class _Taken(NamedTuple):
    """One extra at one moment. was: its state at the last step's end. differs: `now` is another one."""

    name: str
    called: str
    target: Any
    was: Any
    now: Any
    differs: bool

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it moves later in a step than the rest."""
        return is_scheduler(self.target) or isinstance(self.target, torch.amp.GradScaler | torch.nn.Module)

    def leaves(self, *, every: bool) -> Iterator[tuple[str, bool]]:
        """What of it moves by itself after an update, and whether it has moved; every: not only what has."""
        if isinstance(self.target, OwnState) and self.target.final_after_update:
            return
        if not self.is_whole:
            yield from _inner(self.was, self.now, self.called, _WHOLE_BELOW, every=every)
            return
        yield self.called, self.differs
        if self.differs and times_stepped(self.was, self.now) != 1:
            yield self.called + _ODDLY, True

    def may_move(self, forecast: Callable[[str], Forecast]) -> dict[str, str]:
        """What of it may be about to move where its step was cut off after the update, and what is known of that."""
        leaves, spared = dict(self.leaves(every=True)), {Forecast.NOT_DUE}
        if self.is_whole:
            if not self.now or isinstance(self.now, LeftOut):
                return {}
            if self.differs and forecast(self.called + _ODDLY) is not Forecast.NEVER:
                leaves.setdefault(self.called + _ODDLY, False)
            spared |= {Forecast.STOPPED} if is_scheduler(self.target) else set()
        elif not isinstance(self.target, dict):
            due = [moved for leaf, moved in leaves.items() if forecast(leaf) is Forecast.DUE]
            if due and all(due):
                spared.add(Forecast.NEVER)  # its own method has moved it, and spares what it always spares
        found = {leaf: forecast(leaf) for leaf, moved in leaves.items() if not moved}
        return {leaf: one.value for leaf, one in found.items() if one not in spared}


class Extras:
    """Named objects whose state is saved and restored with the training's.

    label: how the caller calls them ("extras", "local_extras"), for messages. Each value has state_dict() and
    load_state_dict(), or is a dict of plain values and tensors (restored in place).
    Raises ConfigError with the path of the first thing that cannot be stored.
    """

    def __init__(self, objects: Mapping[str, Any] | None, label: str = "extras", ledger: Ledger | None = None) -> None:
        if objects is not None and not isinstance(objects, Mapping):
            raise ConfigError(
                f"{label} must be a dict from names to objects, such as {label}={{'scheduler': scheduler}}, not "
                f"{objects!r:.80}"
            )
        self._label = label
        self._objects = dict(objects or {})
        for name, value in self._objects.items():
            if not isinstance(name, str) or not name or "/" in name:
                raise ConfigError(f"{label}: {name!r} is not a valid name; use a non-empty string without '/'")
            if not isinstance(value, dict) and not (
                callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
            ):
                raise ConfigError(
                    f"{label}[{name!r}] is a {type(value).__name__}; give an object with state_dict() and "
                    "load_state_dict(), or a dict of plain values"
                )
            take_apart(_state_of(value), "x", f"{label}[{name!r}]")
        self._own: dict[str, OwnState] = {}
        self._told: set[str] = set()
        self._stepped: frozenset[str] = frozenset()  # on resume, until a step has shown that the loop does so, too
        self.ledger = ledger or Ledger()

    def add(self, own: Mapping[str, OwnState]) -> None:
        """Take these too. What of them cannot be stored is left out with a reason, from the start on."""
        self._own |= own
        self._objects |= own

    @property
    def own_reasons(self) -> list[str]:
        """What those have said so far."""
        return [reason for own in self._own.values() for reason in own.reasons]

    def __bool__(self) -> bool:
        return bool(self._objects)

    def __contains__(self, target: object) -> bool:
        return any(value is target for value in self._objects.values())

    def are_users(self, name: str) -> bool:
        """Whether it is one that the user has named."""
        return name not in self._own

    def called(self, names: Iterable[str]) -> list[str]:
        return [*map(self._called, names)]

    def _called(self, name: str) -> str:
        return f"{self._label}[{name!r}]" if self.are_users(name) else name

    def modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return ((name, one) for name, one in self._objects.items() if isinstance(one, torch.nn.Module))

    def objects(self) -> dict[str, Any]:
        """The user's, which have a state_dict(), by what they are called."""
        every = self._objects.items()
        return {self._called(name): one for name, one in every if self.are_users(name) and not isinstance(one, dict)}

    def dicts(self) -> dict[str, dict[Any, Any]]:
        """Those that are dicts, by what they are called."""
        return {self._called(name): one for name, one in self._objects.items() if isinstance(one, dict)}

    def leaves(self) -> dict[str, torch.Tensor]:
        """Tensors in dicts among them that can have a gradient, such as a perturbation that is trained, by place."""
        return dict(pair for place, one in self.dicts().items() for pair in _leaves(one, place, _DEPTH_MAX))

    def parameters(self) -> dict[str, torch.Tensor]:
        """Those of all modules among them, by what they are called, and the `leaves`."""
        of_modules = {f"{self._called(name)}.{key}": p for name, m in self.modules() for key, p in m.named_parameters()}
        return of_modules | self.leaves()

    # ------------------------------------------------------------------ training thread

    def reopen_loaders(self) -> None:
        """After a resume: loaders among them have been asked for their state, and may have made an iterator for that.

        torchdata's StatefulDataLoader does, and its workers begin to fetch before the sampler knows its epoch.
        """
        for value in self._objects.values():
            if _is_loader(value):
                value.load_state_dict(value.state_dict())

    def first(self) -> ExtrasSnapshot:
        """States before the first step of this process."""
        return ExtrasSnapshot({name: self._taken(name, self._called(name), None)[0] for name in self._objects})

    def ended(self, before: ExtrasSnapshot, updated: bool = True) -> ExtrasSnapshot:
        """States at a step's end, `before` being those at the end of the step before. updated: it had an update."""
        if not self._objects:
            return before
        taken = self._all_taken(before)
        if updated and self._stepped:
            self._judge_stepped(taken)
        return ExtrasSnapshot({one.name: one.now for one in taken}, _moved(taken))

    def again(self, before: ExtrasSnapshot, *, loaders: bool = True) -> tuple[ExtrasSnapshot, list[str]]:
        """States at another look after the step end of `before`, and the names of what has moved since.

        loaders: those of loaders as well, which may have given the next step's batch by now.
        """
        if not self._objects:
            return before, []
        moved = {one.name: one.now for one in self._all_taken(before)
                 if one.differs and (loaders or not _is_loader(one.target))}  # fmt: skip
        return (replace(before, states={**before.states, **moved}), [*moved]) if moved else (before, [])

    # ------------------------------------------------------------------ writer's thread

    def after_update(
        self, before: ExtrasSnapshot | None, late: Late, ends_epoch: bool | None = None
    ) -> tuple[ExtrasSnapshot, dict[str, str]]:
        """States for a step whose update is done and whose end was never reached; and what these may lack, and why.

        What has moved since `before` is taken as it is. A scheduler that has not is marked to be stepped on resume
        where that is certain: it has moved once in each step, nothing else is about to take over, and its step() needs
        no argument. late: what has moved in the steps before.
        """
        taken = self._all_taken(before or self.first())
        schedulers = [one for one in taken if is_scheduler(one.target)]

        def forecast(leaf: str) -> Forecast:
            # One that takes over from another may do so at the end of an epoch, by chance.
            alone = len(schedulers) == 1 and leaf.startswith(schedulers[0].called)
            return late.forecast(leaf, late.steps + 1, ends_epoch, 1 if alone else REPEATS_MIN)

        def is_due(one: _Taken) -> bool:
            """No other scheduler may be about to take over, and the scheduler itself not about to end."""
            return (
                not one.differs
                and forecast(one.called) is Forecast.DUE
                and steps_without_argument(one.target)
                and one.called + _ODDLY not in late
                and not is_at_its_end(one.now)
                and not any(
                    forecast(other.called) in (_TAKEN_OVER if other.differs else _MAY_COME)
                    for other in schedulers
                    if other is not one
                )
            )

        due = [one for one in schedulers if is_due(one)]
        found = [one.may_move(forecast) for one in taken if one not in due]
        moved = {**_moved(taken), **dict.fromkeys((one.called for one in due), 1)}
        states = {one.name: one.now for one in taken}
        snapshot = ExtrasSnapshot(states, moved, tuple(one.name for one in due))
        return snapshot, {leaf: why for each in found for leaf, why in each.items()}

    def store(
        self,
        snapshot: ExtrasSnapshot,
        unit: str = "x",
        stage: Stage | None = None,
        json_bytes_max: int | None = None,
    ) -> tuple[ExtrasMeta, list[tuple[TensorSpec, TensorSource]]]:
        """Trees and tensors of a snapshot. What cannot be stored is left out; `left_out` has the reasons.

        json_bytes_max: of one extra's JSON.
        """
        trees: dict[str, Any] = {}
        tensors: dict[str, tuple[TensorSpec, TensorSource]] = {}
        left_out: dict[str, list[str]] = {}
        for name, state in snapshot.states.items():
            tree, found, reasons = self._stored(name, state, unit_tensor_name(unit, "extra", name))
            if tree is not None and json_bytes_max is not None:
                nbytes = len(json.dumps(pack(tree)))
                if nbytes > json_bytes_max:
                    tree, what = None, f"{nbytes} bytes of non-tensor values"
                    reasons.append(f"{self._called(name)} ({what}) cannot be stored")
            if reasons:
                left_out[name] = reasons
            if tree is not None:
                # "b" of the extra "a" and the extra "a.b" would give one name to two tensors.
                called = {one.name: one.name if one.name not in tensors else f"{one.name}~{name}" for one in found}
                trees[name] = renamed(tree, called.__getitem__, name)
                for one in found:
                    tensors[called[one.name]] = spec_of(called[one.name], one.tensor), source_of(one.tensor, stage)
        meta = ExtrasMeta(
            states=trees,
            left_out=left_out,
            step_on_resume=[name for name in snapshot.step_on_resume if name in trees],
        )
        return meta, list(tensors.values())

    # ------------------------------------------------------------------ resume

    def restore(
        self, meta: ExtrasMeta, read: Callable[[Tree], torch.Tensor], overwriting: Overwriting | None = None
    ) -> None:
        """Put stored states back; `read(node)` gives a stored tensor. overwriting: that of other extras, too.

        Raises MismatchError, before anything is changed, if the names differ.
        """
        trees, left_out = meta.states, frozenset(meta.left_out)
        for name in self._own.keys() - trees.keys() - left_out:
            self._own[name].not_saved()
        missing, extra = (
            sorted(self._objects.keys() - trees.keys() - left_out - self._own.keys()),
            sorted(trees.keys() - self._objects.keys()),
        )
        if missing or extra:
            raise MismatchError(
                f"{self._label} differ from the checkpoint's: missing in the checkpoint: "
                f"{', '.join(missing) or 'none'}; only in the checkpoint: {', '.join(extra) or 'none'}; "
                f"register the same {self._label} as the saved run did",
                missing=missing,
                extra=extra,
            )
        values = {name: put_together(trees[name], read, self._called(name)) for name in self._objects if name in trees}
        overwriting = overwriting or Overwriting()
        for name, value in values.items():
            target = self._objects[name]
            if isinstance(target, dict):
                if not isinstance(value, dict):
                    raise FormatError(f"the checkpoint's {self._label}[{name!r}] is not a dict, but it is here")
                overwriting.values(target, value, keep=name in left_out)
                continue
            try:
                target.load_state_dict(value)
            except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError) as error:
                raise MismatchError(
                    f"{self._called(name)} ({type(target).__name__}) rejected the state in the checkpoint "
                    f"({error!r}); "
                    "register the same kind of object as the saved run did",
                    different={self._called(name): repr(error)},
                ) from error
        for name in meta.step_on_resume:
            if not steps_without_argument(self._objects[name]):
                raise FormatError(f"{self._label}[{name!r}] has a pending scheduler step, but is not a scheduler here")
            with warnings.catch_warnings():
                # torch warns about a scheduler's step without an optimizer's before it; that one was in the saved run.
                warnings.simplefilter("ignore", UserWarning)
                self._objects[name].step()
            _log.info("%s[%r]: made the pending scheduler step", self._label, name)
        self._stepped = frozenset(meta.step_on_resume)

    # ------------------------------------------------------------------ inside

    def _all_taken(self, before: ExtrasSnapshot) -> list[_Taken]:
        taken = []
        for name, one in self._objects.items():
            called, was = self._called(name), before.states.get(name)
            taken.append(_Taken(name, called, one, was, *self._taken(name, called, was)))
        return taken

    def _judge_stepped(self, taken: list[_Taken]) -> None:
        self.ledger.tell(
            *(
                f"{self._label}[{one.name!r}] was stepped on resume, as in every earlier step, but the loop now "
                f"steps it differently"
                for one in taken
                if one.name in self._stepped and not one.differs
            )
        )
        self._stepped = frozenset()

    def _taken(self, name: str, path: str, before: Any) -> tuple[Any, bool]:
        """`advance` to the state as it is now, with what cannot be stored left out."""
        value = self._objects[name]
        try:
            now = _state_of(value)
        except Exception as error:  # of the user's own code: handed to the log and to the checkpoint
            return self._left_out(before, f"{path} cannot be stored: its state_dict() raised {error!r:.200}")
        try:
            copy, differs = advance(before, now)
            if differs and disordered(now):
                self.ledger.tell(f"{path} {UNORDERED}", leaf=path)
            return copy, differs
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
            _log.warning("%s: it is no longer saved, and a resume will not be exact", reason)
        return LeftOut(reason), before != LeftOut(reason)

    def _stored(self, name: str, state: Any, stored: str) -> tuple[Tree | None, list[NamedTensor], list[str]]:
        """Tree and tensors of one extra, and why something, or all of it (then there is no tree), is left out."""
        path = self._called(name)
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


def _leaves(value: Any, place: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.is_leaf:
            yield place, value
    elif isinstance(value, dict | list | tuple) and depth:
        for key, item in list(value.items()) if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{place}[{key!r}]", depth - 1)


def _moved(taken: list[_Taken]) -> dict[str, int]:
    return {leaf: 1 for one in taken if one.differs for leaf, moved in one.leaves(every=False) if moved}


def _inner(was: Any, now: Any, path: str, depth: int, *, every: bool) -> Iterator[tuple[str, bool]]:
    """Values inside of `now` by their paths, and whether `was` has others, an earlier copy that shares what is equal.

    every: not only in what is not shared.
    """
    if (was is now and not every) or isinstance(now, LeftOut):  # which is told anyway
        return
    kind = type(now)
    if depth and (kind in DICTS or kind is list) and 0 < len(now) <= _ITEMS_MAX:
        before = {} if type(was) is not kind else was if kind in DICTS else dict(enumerate(was))
        for key, item in now.items() if kind in DICTS else enumerate(now):
            yield from _inner(before.get(key, _ABSENT), item, f"{path}[{key!r}]", depth - 1, every=every)
    else:
        yield path, was is not now and (kind not in ATOMS or type(was) is not kind or advance(was, now)[1])


_ABSENT = object()


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


def pack_inline(extras: Extras, snapshot: ExtrasSnapshot) -> InlineExtras:
    """A snapshot as one plain value, tensors as bytes inside: for rank-local extras, which live in JSON."""
    meta, tensors = extras.store(snapshot)
    inline: dict[str, tuple[list[int], bytes]] = {}
    for spec, source in tensors:
        data = source() if callable(source) else source
        inline[spec.name] = list(spec.shape), bytes(data)
    return InlineExtras(meta, inline)


def restore_inline(extras: Extras, packed: InlineExtras, overwriting: Overwriting | None = None) -> None:
    """Inverse of `pack_inline`: puts the states back into the objects."""
    extras.restore(packed.tree, out_of(packed.tensors, "local_extras"), overwriting)


def _is_loader(extra: Any) -> bool:
    return not isinstance(extra, dict) and hasattr(type(extra), "__iter__")


def _state_of(extra: Any) -> Any:
    """Without a scheduler's functions, which its constructor was given; torch 2.7's SWALR has one."""
    state = extra if isinstance(extra, dict) else extra.state_dict()
    if isinstance(extra, LRScheduler) and isinstance(state, dict):
        return {key: value for key, value in state.items() if not isinstance(value, types.FunctionType)}
    return state
