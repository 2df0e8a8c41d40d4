"""What the loop changes and no checkpoint has: its variables, closures, globals, and what these lead to; and what an
extra has that its own `state_dict()` leaves out.

It is only named. Most of it is read by nobody in the next step (a loss for the log, the batch in hand); some of it is
state that belongs into `extras`. Which is which only the user knows. So it is no reason against exactness, which is
about what is saved; the names stand in the checkpoint, and in what `resume()` returns. Those of which a resumed loop
begins with something else are told when it begins.
"""

from __future__ import annotations

import dis
import functools
import logging
import threading
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash

from lastwords import clock
from lastwords.checkpoint.storable import Place
from lastwords.errors import some
from lastwords.optim_wrapper.state.how_far import has
from lastwords.optim_wrapper.state.object_walk import (
    CODE,
    VARIABLES,
    Beyond,
    Cell,
    Walk,
    is_walked,
    own_of,
)
from lastwords.optim_wrapper.state.running import is_users, locals_of, user_frames
from lastwords.optim_wrapper.tensors.tensor_bytes import memory_of

_log = logging.getLogger(__name__)

NAMES_MAX = 64
SLOW_S = 0.25
"""Of processor time: so long a look may take."""

_ELEMENTS, _SHOWN_MAX = 64, 6

_SAVED = "(saved)"
"""Begins the paths of what is saved in another way."""


class Beside:
    """marks_of: what differs where this differs, of what a walk tells of a value."""

    def __init__(self, marks_of: Callable[[Any], Any]) -> None:
        self._marks_of = marks_of
        self._thread = 0
        self._first: dict[tuple[str, str], Any] | None = None
        self._places: Collection[str] = ()
        self._begun_at: dict[types.CodeType, int] = {}
        self._problem = ""
        self._kept_back: KeptBack | None = None

    def begin(self, walk: Walk, saved: Mapping[str, torch.Tensor], extras: Mapping[str, Any]) -> None:
        """The loop begins, on this thread: what there is now has not been changed by it."""
        self._kept_back = KeptBack(walk, extras, self._marks_of)
        self._thread, self._first, self._begun_at = threading.get_ident(), None, {}
        look = self._look(walk, saved, extras)
        self._problem = _TOO_SLOW if look.is_late else ""
        self._begun_at = {frame.f_code: frame.f_lasti for frame in look.frames}
        self._first, self._places = marked(look.cells, self._marks_of), {*look.objects, *look.places}

    def let_go(self, problem: str = "") -> None:
        self._first, self._problem, self._kept_back = None, problem, None

    def compare(self, walk: Walk, extras: Mapping[str, Any], said: Mapping[str, Any]) -> None:
        """See what extras keep back. said: their states, as of now."""
        try:
            if self._kept_back is not None:
                self._kept_back.look(walk, extras, said)
        except Exception as error:  # of objects that nobody has foreseen: handed to the log
            _log.info("what extras hold is not looked at: %r", error)
            self._kept_back = None

    def changed(
        self,
        walk: Walk,
        saved: Mapping[str, torch.Tensor],
        extras: Mapping[str, Any],
        forgets: Callable[[str], bool] = lambda name: False,
    ) -> dict[str, str]:
        """Names of what is not as it was when the loop began, and digests of what is there now, "" where that cannot be
        compared. Any thread, while no step is computed.
        """
        if self._first is None or self._problem:
            return {self._problem: ""} if self._problem else {}
        look = self._look(walk, saved, extras)
        if look.is_late:
            return {_TOO_SLOW: ""}
        found = {
            ".".join(name): _digest(mark)
            for name, mark in marked(look.cells, self._marks_of).items()
            if name[0] in self._places and not name[0].startswith(_SAVED) and self._first.get(name) != mark
        }
        found |= dict.fromkeys(self._kept_back.names if self._kept_back is not None else (), "")
        names = sorted(name for name in found if not forgets(name))
        more = {f"{len(names) - NAMES_MAX} more": ""} if len(names) > NAMES_MAX else {}
        return {name: found[name] for name in names[:NAMES_MAX]} | more

    def missing(self, changed: Mapping[str, str]) -> list[str]:
        """Of what another process's loop had `changed`, what this one has not begun with as it was there."""
        first = {".".join(name): _digest(mark) for name, mark in (self._first or {}).items()}
        return [name for name, then in changed.items() if not then or first.get(name) != then]

    def told(self, walk: Walk, saved: Mapping[str, torch.Tensor], extras: Mapping[str, Any]) -> dict[str, Any]:
        """By name, what all of it holds, as a walk tells it; as much as can be looked at in time. Training thread."""
        cells = self._look(walk, saved, extras).cells.items()
        return {
            ".".join(name): one.told for name, one in cells if one.told is not CODE and not name[0].startswith(_SAVED)
        }

    def _look(self, walk: Walk, saved: Mapping[str, torch.Tensor], extras: Mapping[str, Any]) -> _Everything:
        # An extra of lastwords' own stands for what it holds: a Trainer's callbacks, say.
        roots = {
            f"{_SAVED}{name}": [*(own_of(one) or {}).values()] if _is_ours(type(one)) else one
            for name, one in extras.items()
        }
        return _Everything(walk, roots, saved, self._thread, self._begun_at)


def words_on(missing: Sequence[str], *, variables: bool) -> str:
    """What to say where a loop begins of what is `missing`. variables: what local variables lead to is saved."""
    helps = not variables and any(VARIABLES in name for name in missing)
    more = "; variables=True saves what objects, lists and dicts in variables hold" if helps else ""
    return (
        f"the saved run's loop had changed {some(missing, _SHOWN_MAX)}, which no checkpoint has, and this loop begins "
        f"with something else there: what of it the loop reads belongs into extras and their state_dict(){more}"
    )


UNSEEN = "what cannot be looked at"
"""Begins what stands in a name's place."""

_TOO_SLOW = f"{UNSEEN} in {SLOW_S * 1e3:.0f} ms"


def _digest(mark: Any) -> str:
    """The same in another process; "" for what is told by its name alone."""
    return "" if type(mark) is str else xxhash.xxh3_64_hexdigest(repr(mark).encode())


def marked(cells: Mapping[tuple[str, str], Cell], marks_of: Callable[[Any], Any]) -> dict[tuple[str, str], Any]:
    """Marks of what these hold, but for code."""
    return {name: marks_of(cell.told) for name, cell in cells.items() if cell.told is not CODE}


class KeptBack:
    """Attributes of the user's own extras that move, and that their `state_dict()` has never told.

    marks_of: see `Beside`. names: of these attributes.
    """

    def __init__(self, walk: Walk, extras: Mapping[str, Any], marks_of: Callable[[Any], Any]) -> None:
        self._marks_of = marks_of
        self.names: dict[str, None] = {}
        self._first = marked(self._cells(walk, extras), marks_of)

    def look(self, walk: Walk, extras: Mapping[str, Any], said: Mapping[str, Any]) -> None:
        """See what has moved by now. said: states of extras; where one is missing, nothing is named."""
        cells = self._cells(walk, {name: one for name, one in extras.items() if name in said})
        moved = [name for name, mark in marked(cells, self._marks_of).items() if self._first.get(name) != mark]
        for called, state in said.items():
            inside = [name for name in moved if ".".join(name).startswith(f"{called}.")]
            told = [*_leaves(state)] if inside else []
            values = {self._marks_of(one) for one in told if not issubclass(type(one), torch.Tensor)}
            tensors = [one for one in told if issubclass(type(one), torch.Tensor)]
            for name in inside:
                every = _leaves(cells[name].told)
                if not all(
                    _is_among(one, tensors) if issubclass(type(one), torch.Tensor) else self._marks_of(one) in values
                    for one in every
                ):
                    self.names[".".join(name)] = None

    def _cells(self, walk: Walk, extras: Mapping[str, Any]) -> dict[tuple[str, str], Cell]:
        own = {name: one for name, one in extras.items() if is_users(type(one)) and has(type(one), "state_dict")}
        return _OfExtras(walk, own).cells if own else {}


def _leaves(told: Any) -> Iterator[Any]:
    """What is inside of containers. Objects are left out: their attributes are looked at for themselves."""
    if isinstance(told, dict | list | tuple | deque) and type(told) is not Place:
        for one in told.values() if isinstance(told, dict) else told:
            yield from _leaves(one)
    elif type(told) is not Place:
        yield told


def _is_among(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Whether one of them has the same shape and the same first elements."""
    some = tensor.detach().flatten()[:_ELEMENTS]
    return any(one.shape == tensor.shape and torch.equal(one.detach().flatten()[:_ELEMENTS], some) for one in others)


class _OfExtras(Walk):
    """What `walk` has not come to."""

    def __init__(self, walk: Walk, roots: Mapping[str, Any]) -> None:
        self._before = walk
        super().__init__(roots, {})

    def _go(self) -> None:
        walk = self._before
        self._paths, self._containers = walk._paths.copy(), walk._containers.copy()
        self._saved, self._pointers, self._storages = walk._saved, walk._pointers, walk._storages
        self._room += len(self._paths) + len(self._containers)
        super()._go()


class _Everything(Beyond):
    """Values, too, of all that `Beyond` comes to, beside what `walk` has come to.

    begun_at: where the functions were, by their code, when the loop began.
    """

    _values = True

    def __init__(
        self,
        walk: Walk,
        roots: Mapping[str, Any],
        saved: Mapping[str, torch.Tensor],
        thread: int,
        begun_at: Mapping[types.CodeType, int],
    ) -> None:
        self.frames = user_frames(thread, modules=True)
        self.places: dict[str, None] = {}
        self.is_late = False
        self._begun_at = begun_at
        self._until_s = clock.thread_s() + SLOW_S
        super().__init__(walk, roots, saved)

    def _met_before(self) -> None:
        """What is in the walk is saved, or told there; and so is what belongs to its optimizers, and gradients."""
        walk = self._walk
        self._paths, self._containers, self._memory = {**walk._paths}, {**walk._containers}, {**walk._memory}
        self.tensors = {**walk.tensors}
        tensors: list[torch.Tensor] = []
        for one in walk.objects.values():
            if issubclass(type(one), torch.optim.Optimizer):
                for table in (*one.param_groups, *one.state.values()):
                    self._containers[id(table)] = _SAVED
                    values = table.values() if type(table) is dict else ()
                    tensors += [value for value in values if issubclass(type(value), torch.Tensor)]
        self._storages = self._storages | {*walk.gradients} | {at for tensor in tensors if (at := memory_of(tensor))}

    def _running(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        for frame in self.frames:
            code, module = frame.f_code, frame.f_globals.get("__name__")
            if code.co_name == "<module>":
                continue
            names = locals_of(frame)
            carried = carried_by(code, frame.f_lasti, self._begun_at.get(code, frame.f_lasti))
            place = f"{code.co_qualname}{VARIABLES}{module}"
            yield place, {name: one for name, one in names.items() if name in carried}
            for name, one in names.items():
                if name not in carried and _is_holder(one):  # looked into, and not at
                    self.told(one, f"{place}.{name}", 0)

    def _names(self, place: str, names: Mapping[str, Any]) -> None:
        passing: Collection[str] = ()
        for frame in self.frames:
            if frame.f_code.co_name == "<module>" and frame.f_globals is names:
                passing = passing_in(frame.f_code, frame.f_lasti, self._begun_at.get(frame.f_code))
        super()._names(place, {name: one for name, one in names.items() if name not in passing} if passing else names)

    def _hold(self, place: str, key: str, value: Any, path: str, depth: int = 0) -> None:
        try:
            told = self.told(value, path, depth)
        except Exception as error:  # of an object that nobody has foreseen: handed to `odd`
            self.odd[path] = f"{error!r:.200}"
            return
        if place:  # else it is a root
            self.places[place] = None
            self.cells[place, key] = Cell(None, key, told)

    def _meet(self, path: str, one: Any) -> str:
        """Not an object whose `__dict__` is an extra."""
        known = self._containers.get(id(own_of(one)), "")
        return known if known.startswith(_SAVED) else super()._meet(path, one)

    def _code(self, value: Any, path: str, depth: int) -> None:
        """What a function has with it is not saved with the extra that holds the function."""
        super()._code(value, path.removeprefix(_SAVED), depth)

    def _look_into(self, path: str, one: Any) -> None:
        super()._look_into(path, one)
        if issubclass(type(one), torch.optim.Optimizer):
            for key in ("param_groups", "state"):
                self._cell(path, key, one)

    def told(self, value: Any, path: str, depth: int) -> Any:
        """Also what objects of libraries hold that have a state_dict()."""
        if self.is_late or clock.thread_s() > self._until_s:
            self.is_late = True
            return CODE
        if _has_state_dict(value):
            return Place(self._meet(path, value), type(value).__qualname__)
        return super().told(value, path, depth)


def _is_holder(value: Any) -> bool:
    """Whether it is looked into, and not at."""
    return is_walked(value) or _has_state_dict(value)


def _has_state_dict(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, type) or not has(kind, "state_dict") or own_of(value) is None:
        return False
    return not _is_ours(kind)


def _is_ours(kind: type[Any]) -> bool:
    return str(kind.__module__).startswith("lastwords")


@functools.lru_cache(maxsize=1024)
def carried_by(code: types.CodeType, at: int, begun_at: int | None = None) -> frozenset[str]:
    """Variables with a value, at this instruction, that is read before another one is put there.

    Inside a loop: with a value that the next round reads, or what comes after the loop. begun_at: where the function
    was when the loop began, inside of which other loops count for nothing.
    """
    flow = _Flow(code)
    here = flow.number_at(at)
    inner = flow.loops_around(here)
    around = [loop for loop in inner if loop in flow.loops_around(flow.number_at(at if begun_at is None else begun_at))]
    heads = {max(around)[0]} if around else set()
    heads |= {to for to, _ in inner if around and to > max(around)[0]}
    if not heads:
        return flow.live[min(here + 1, len(flow.every))]
    return frozenset.intersection(*(flow.live[to] for to in heads))


@functools.lru_cache(maxsize=64)
def passing_in(code: types.CodeType, at: int, begun_at: int | None = None) -> frozenset[str]:
    """Names that a module's loop around this instruction writes, and no round reads of another one.

    begun_at: where the loop began, if it has been left, as by an exception.
    """
    flow = _Flow(code)
    around = flow.loops_around(flow.number_at(at))
    if not around and begun_at is not None:
        around = flow.loops_around(flow.number_at(begun_at))
    if not around:
        return _NONE
    to, end = max(around)
    written = frozenset().union(*(writes for _, writes in flow.effects[to : end + 1]))
    return written - flow.live[to]


class _Flow:
    """The instructions of a function, and which names are live before each: read before they are written anew."""

    def __init__(self, code: types.CodeType) -> None:
        self.every = every = list(dis.get_instructions(code))
        self._index = {one.offset: number for number, one in enumerate(every)}
        self._jumps = {n: self._index.get(one.argval) for n, one in enumerate(every) if one.opcode in _JUMPS}
        self.live: list[frozenset[str]] = [_NONE] * (len(every) + 1)
        self.effects = [_effect(one) for one in every]
        changed = True
        while changed:
            changed = False
            for number in reversed(range(len(every))):
                after = _NONE if every[number].opname.startswith(_ENDS) else self.live[number + 1]
                if (to := self._jumps.get(number)) is not None:
                    after |= self.live[to]
                reads, writes = self.effects[number]
                before = (after - writes) | reads
                if before != self.live[number]:
                    self.live[number], changed = before, True

    def number_at(self, offset: int) -> int:
        """Of the instruction there."""
        return max((number for begin, number in self._index.items() if begin <= offset), default=0)

    def loops_around(self, number: int) -> list[tuple[int, int]]:
        """First and last instruction of each loop that an instruction is in; one entry for each way back."""
        ends: dict[int, int] = {}
        for end, to in self._jumps.items():
            if to is not None and to <= end:
                ends[to] = max(end, ends.get(to, 0))
        return [(to, end) for to, end in ends.items() if to <= number <= end]


_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_ENDS = ("RETURN_", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_NONE: frozenset[str] = frozenset()
_NAMES = ("_FAST", "_DEREF", "_NAME", "_GLOBAL", "LOAD_CLOSURE")


def _effect(one: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """Names that an instruction reads first, and writes."""
    name, value = one.opname, one.argval
    if not any(part in name for part in _NAMES) or name.startswith("IMPORT_"):
        return _NONE, _NONE
    names = frozenset(value if isinstance(value, tuple) else (value,))
    if name == "STORE_FAST_LOAD_FAST":
        return frozenset(value[1:]) - frozenset(value[:1]), frozenset(value[:1])
    if name.startswith("LOAD_"):
        return names, _NONE
    return _NONE, names if name.startswith(("STORE_", "DELETE_")) else _NONE
