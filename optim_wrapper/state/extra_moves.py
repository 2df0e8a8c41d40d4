"""In which steps the extras move, leaf by leaf, and what follows for a step that was cut off after its update.

Torch's schedulers, scalers and modules (averaged models) move as a whole: in one call, which has come or has not. Of
other objects and of dicts each value is looked at for itself, down to a few levels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lastwords.checkpoint.meta import ExtrasMeta, StoredMove
from lastwords.optim_wrapper.state.own_state import OwnState
from lastwords.optim_wrapper.tensors.tensor_tree import ATOMS
from lastwords.optim_wrapper.tensors.value_copies import DICTS, advance
from lastwords.processor.recurrence import Forecast, Recurrence

_DEPTH_MAX, _ITEMS_MAX = 4, 64
"""What is deeper, or has more items (averaged weights by name), is one leaf."""

WHOLE, ODDLY, ORDER = "", "oddly", "order"
"""Instead of a leaf: the whole object; that a scheduler has moved otherwise than once; the order of a dict's keys."""

REMEDY = "(to avoid this, run no collective between optimizer.step() and tft.step_end())"

Moves = Mapping[tuple[str, str], Recurrence]
"""By the name of the extra and the leaf's path."""

_NOTHING = Recurrence()

_MAY_COME = (Forecast.NEVER, Forecast.UNKNOWN)
_TAKEN_OVER = (*_MAY_COME, Forecast.STOPPED, Forecast.NOT_DUE)
"""What is forecast of a scheduler that has not moved, and of one that has, where it may take another one's place."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Stands in a snapshot for a value that cannot be stored. reason: which one, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Taken:
    """One extra at one moment. was: its state at the last step's end. differs: `now` is another one."""

    name: str
    target: Any
    was: Any
    now: Any
    differs: bool

    def moved(self) -> list[str]:
        """What has moved since the last step's end: keys for `Moves`, without the extra's name."""
        if not self.differs:
            return []
        if not is_whole(self.target):
            return list(_moved(self.was, self.now, WHOLE, 0)) or [ORDER]
        return [WHOLE] if times_stepped(self.was, self.now) == 1 else [WHOLE, ODDLY]


def is_whole(target: Any) -> bool:
    """Whether nothing of an object moves later in a step than the rest of it."""
    return is_scheduler(target) or isinstance(target, torch.amp.GradScaler | torch.nn.Module)


def is_scheduler(target: Any) -> bool:
    """Whether it is a scheduler of torch's kind."""
    return isinstance(target, torch.optim.lr_scheduler.LRScheduler) or callable(getattr(target, "get_last_lr", None))


def noted(moves: Moves, taken: list[Taken], step: int, ends_epoch: bool | None) -> Moves:
    """`moves` with those of `step`."""
    new = {(one.name, leaf): None for one in taken for leaf in one.moved()}
    if not new:
        return moves
    return {**moves, **{key: moves.get(key, _NOTHING).happened(step, ends_epoch) for key in new}}


class CutOff:
    """What is known of the extras in a step that was cut off after its update.

    moves: those of the steps before `step`. ends_epoch: whether it is the last of its epoch, None: not known.
    """

    def __init__(self, taken: list[Taken], moves: Moves, step: int, ends_epoch: bool | None) -> None:
        self._taken = taken
        self._moves = moves
        self._step = step
        self._ends_epoch = ends_epoch
        # One that takes over from another may do so at the end of an epoch, by chance.
        self._alone = sum(is_scheduler(one.target) for one in taken) == 1

    def due(self) -> list[str]:
        """Names of schedulers that would have been stepped for certain: they are in each step, without an argument."""
        return [one.name for one in self._taken if not one.differs and self._is_due(one)]

    def reasons(self, called: Callable[[str], str]) -> list[str]:
        """Why what is saved of the extras may lack something. called: what messages call one of a name."""
        due = self.due()
        return [
            f"{called(one.name)}{why} {REMEDY}"
            for one in self._taken
            if one.name not in due and (why := self._why(one))
        ]

    def _why(self, one: Taken) -> str:
        if isinstance(one.target, OwnState) and one.target.final_after_update:
            return ""
        return self._of_whole(one) if is_whole(one.target) else self._of_leaves(one)

    def _of_whole(self, one: Taken) -> str:
        if one.differs:
            once = times_stepped(one.was, one.now) == 1
            return (
                " had been stepped once when its step was interrupted, but is not stepped exactly once in every step"
                if once and self._oddly(one)
                else ""
            )
        forecast = self._forecast(one.name, WHOLE)
        if (
            not one.now
            or isinstance(one.now, LeftOut)
            or forecast is Forecast.NOT_DUE
            or (forecast is Forecast.STOPPED and is_scheduler(one.target))
        ):
            return ""
        more = ", but cannot be made up for on resume" if forecast is Forecast.DUE else ""
        return _unmoved(WHOLE, forecast, more)

    def _of_leaves(self, one: Taken) -> str:
        moved = set(one.moved())
        forecasts = {leaf: self._forecast(one.name, leaf) for leaf in _leaves(one.now, WHOLE, 0)}
        due = {leaf for leaf, forecast in forecasts.items() if forecast is Forecast.DUE}
        harmless = {Forecast.NOT_DUE}
        if due and due <= moved and not isinstance(one.target, dict):
            harmless.add(Forecast.NEVER)  # its own method has moved it, and spares what it always spares
        for leaf, forecast in forecasts.items():
            if leaf not in moved and forecast not in harmless:
                return _unmoved(leaf, forecast)
        return ""

    def _forecast(self, name: str, leaf: str) -> Forecast:
        ends_min = 1 if self._alone and any(one.name == name and is_scheduler(one.target) for one in self._taken) else 2
        return self._moves.get((name, leaf), _NOTHING).forecast(self._step, self._ends_epoch, ends_min)

    def _oddly(self, one: Taken) -> bool:
        return (one.name, ODDLY) in self._moves

    def _is_due(self, one: Taken) -> bool:
        """No other scheduler may be about to take over, and the scheduler itself not about to end."""
        others = [other for other in self._taken if other is not one and is_scheduler(other.target)]
        return (
            self._forecast(one.name, WHOLE) is Forecast.DUE
            and steps_without_argument(one.target)
            and not self._oddly(one)
            and not _at_its_end(one.now)
            and not any(
                self._forecast(other.name, WHOLE) in (_TAKEN_OVER if other.differs else _MAY_COME) for other in others
            )
        )


def _unmoved(leaf: str, forecast: Forecast, more: str = "") -> str:
    return f"{leaf} had not changed yet when its step was interrupted after the update; this {forecast.value}{more}"


def _at_its_end(state: Any) -> bool:
    """Whether a scheduler has just made the last one of the steps that it was made for."""
    known = ("total_iters", "T_max", "total_steps")
    return isinstance(state, dict) and any(state.get(key, -1) == state.get("last_epoch") for key in known)


def _moved(was: Any, now: Any, path: str, depth: int) -> Iterator[str]:
    """Leaves of `now` that are other ones in `was`, a copy made earlier with which `now` shares what is equal."""
    if was is now:
        return
    inside = _items(now, depth)
    if inside is None:
        if _differs(was, now):
            yield path
        return
    if type(was) is not type(now):
        yield from _leaves(now, path, depth)
        return
    before = dict(_items(was, depth) or ())
    for key, item in inside:
        yield from _moved(before.get(key, _ABSENT), item, path + key, depth + 1)


_ABSENT = object()


def _differs(was: Any, now: Any) -> bool:
    if isinstance(now, LeftOut):
        return bool(was != now)
    return type(now) not in ATOMS or type(was) is not type(now) or advance(was, now)[1]


def _leaves(now: Any, path: str, depth: int) -> Iterator[str]:
    inside = _items(now, depth)
    if inside is None:
        if not isinstance(now, LeftOut):  # which is told anyway
            yield path
        return
    for key, item in inside:
        yield from _leaves(item, path + key, depth + 1)


def _items(value: Any, depth: int) -> list[tuple[str, Any]] | None:
    """What is looked at for itself inside of a value; None for a leaf."""
    if (
        depth >= _DEPTH_MAX
        or (type(value) not in DICTS and type(value) is not list)
        or not 0 < len(value) <= _ITEMS_MAX
    ):
        return None
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return [(f"[{key!r}]", item) for key, item in pairs]


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


def moves_of(meta: ExtrasMeta) -> Moves:
    """The moves that were stored."""
    return {(name, leaf): Recurrence(*numbers) for name, leaf, *numbers in meta.moves}


def stored_moves(moves: Moves) -> list[StoredMove]:
    """As they are stored."""
    return [(name, leaf, *recurrence.numbers) for (name, leaf), recurrence in sorted(moves.items())]
