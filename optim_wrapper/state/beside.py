"""What the loop changes and no checkpoint has: its variables, closures, globals, and what these lead to.

It is only named. Most of it is read by nobody in the next step (a loss for the log, the batch in hand); some of it is
state that belongs into `extras`. Which is which only the user knows. So it is no reason against exactness, which is
about what is saved; the names stand in the checkpoint, and in what `resume()` returns.
"""

from __future__ import annotations

import dis
import functools
import logging
import operator
import threading
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from lastwords import clock
from lastwords.checkpoint.storable import Place
from lastwords.optim_wrapper.state.object_walk import CODE, VARIABLES, Beyond, Cell, Walk, has, is_walked, own_of
from lastwords.optim_wrapper.state.running import locals_of, user_frames

_log = logging.getLogger(__name__)

NAMES_MAX = 64
SLOW_S = 0.05
"""Of processor time: where a look takes longer, there is no other one."""

_SAVED = "(saved)"
"""Begins the paths of what is saved in another way."""


class Beside:
    """marks_of: what differs where this differs, of what a walk tells of a value."""

    def __init__(self, marks_of: Callable[[Any], Any]) -> None:
        self._marks_of = marks_of
        self._thread = 0
        self._first: dict[tuple[str, str], Any] | None = None
        self._places: Collection[str] = ()

    def begin(self, walk: Walk, saved: Mapping[str, torch.Tensor], extras: Iterable[Any]) -> None:
        """The loop begins, on this thread: what there is now has not been changed by it."""
        self._thread, began_s = threading.get_ident(), clock.thread_s()
        look = self._look(walk, saved, extras)
        self._first, self._places = self._marks(look), {*look.objects, *look.places}
        if (took_s := clock.thread_s() - began_s) > SLOW_S:
            self._first = None
            _log.info("what variables and globals hold is not looked at, which takes %.0f ms", took_s * 1e3)

    def let_go(self) -> None:
        """Nothing is looked at any more."""
        self._first = None

    def changed(self, walk: Walk, saved: Mapping[str, torch.Tensor], extras: Iterable[Any]) -> list[str]:
        """Names of what is not as it was when the loop began. Any thread, while no step is computed."""
        if self._first is None:
            return []
        now = self._marks(self._look(walk, saved, extras))
        names = [
            ".".join(name)
            for name, mark in now.items()
            if name[0] in self._places and not name[0].startswith(_SAVED) and self._first.get(name) != mark
        ]
        return sorted(names)[:NAMES_MAX]

    def _look(self, walk: Walk, saved: Mapping[str, torch.Tensor], extras: Iterable[Any]) -> _Everything:
        return _Everything(walk, {f"{_SAVED}{number}": one for number, one in enumerate(extras)}, saved, self._thread)

    def _marks(self, look: Walk) -> dict[tuple[str, str], Any]:
        return {name: self._marks_of(cell.told) for name, cell in look.cells.items() if cell.told is not CODE}


class _Everything(Beyond):
    """Values, too, of all that `Beyond` comes to, beside what `walk` has come to."""

    _values = True

    def __init__(self, walk: Walk, roots: Mapping[str, Any], saved: Mapping[str, torch.Tensor], thread: int) -> None:
        self._frames = user_frames(thread)
        self.places: dict[str, None] = {}
        super().__init__(walk, roots, saved)

    def _met_before(self) -> None:
        """What is in the walk is saved, or told there."""
        walk = self._walk
        self._paths, self._containers, self._memory = {**walk._paths}, {**walk._containers}, {**walk._memory}

    def _running(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        for frame in self._frames:
            names, carried = locals_of(frame), carried_by(frame.f_code, frame.f_lasti)
            place = f"{frame.f_code.co_qualname}{VARIABLES}{frame.f_globals.get('__name__')}"
            yield place, {name: one for name, one in names.items() if name in carried or _is_holder(one)}

    def _hold(self, place: str, key: str, value: Any, path: str, depth: int = 0) -> None:
        told = self.told(value, path, depth)
        if place:  # else it is a root
            self.places[place] = None
            self.cells[place, key] = Cell(None, key, told)

    def told(self, value: Any, path: str, depth: int) -> Any:
        """Also how far an iterator has come, and what objects of libraries hold that have a state_dict()."""
        kind = type(value)
        if has(kind, "__next__"):
            own = own_of(value) or {}
            at = own.get("_num_yielded", operator.length_hint(value, -1) if kind.__module__ == "builtins" else -1)
            return Place("", f"{kind.__qualname__} at {at}")
        if _has_state_dict(value):
            return Place(self._meet(path, value), kind.__qualname__)
        return super().told(value, path, depth)


def _is_holder(value: Any) -> bool:
    """Whether it is looked into, and not at."""
    return is_walked(value) or _has_state_dict(value)


def _has_state_dict(value: Any) -> bool:
    kind = type(value)
    ours = str(kind.__module__).startswith("lastwords")
    return has(kind, "state_dict") and not ours and own_of(value) is not None and not isinstance(value, type)


@functools.lru_cache(maxsize=1024)
def carried_by(code: types.CodeType, at: int) -> frozenset[str]:
    """Variables with a value, at this instruction, that is read before another one is put there.

    Inside a loop: with a value that the next round reads, or what comes after the loop.
    """
    every = list(dis.get_instructions(code))
    index = {one.offset: number for number, one in enumerate(every)}
    jumps = {number: index.get(one.argval) for number, one in enumerate(every) if one.opcode in _JUMPS}
    loops = [(to, number) for number, to in jumps.items() if to is not None and to <= number]
    here = max((number for offset, number in index.items() if offset <= at), default=0)
    around = [to for to, number in loops if to <= here <= number]
    live: list[frozenset[str]] = [frozenset()] * (len(every) + 1)
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(every))):
            one = every[number]
            after = frozenset() if one.opname.startswith(_ENDS) else live[number + 1]
            if (to := jumps.get(number)) is not None:
                after |= live[to]
            reads, writes = _effect(one)
            before = (after - writes) | reads
            if before != live[number]:
                live[number], changed = before, True
    return live[max(around)] if around else live[min(here + 1, len(every))]


_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_ENDS = ("RETURN_", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_NONE: frozenset[str] = frozenset()


def _effect(one: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """Variables that an instruction reads first, and writes."""
    name, value = one.opname, one.argval
    if "_FAST" not in name and "_DEREF" not in name and name != "LOAD_CLOSURE":
        return _NONE, _NONE
    names = frozenset(value if isinstance(value, tuple) else (value,))
    if name == "STORE_FAST_LOAD_FAST":
        return frozenset(value[1:]) - frozenset(value[:1]), frozenset(value[:1])
    if name.startswith("LOAD_"):
        return names, _NONE
    return _NONE, names if name.startswith(("STORE_", "DELETE_")) else _NONE
