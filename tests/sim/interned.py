"""The shipped cores, run once for each different (state, call): what lets the exploration visit a million states.

A core is a deterministic function of its state and of what it is told. `Table` numbers the states that have
occurred and remembers what each call did, so that a core's own code runs once for each distinct pair and is looked
up afterwards. Two states with the same number hold equal values throughout, whatever the order in which dictionaries
and sets were filled.
"""

from __future__ import annotations

import enum
import functools
import pickle
import zlib
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any

from lastwords.vocabulary import Stand

ONLY_FOR_PEOPLE = frozenset(
    {
        ("Member", "stand"),
        ("Member", "source"),
        ("Incident", "causes"),
        ("Incident", "_first_words"),
        ("Incident", "_told"),
        ("Succession", "remembered"),
        ("HangWatch", "_newest"),
        ("HangWatch", "_paces"),
        ("HangWatch", "kept_pace_s"),
        ("JobMemory", "pace_s"),
        ("HangWatch", "_since_s"),
    }
)
"""Fields of the controller's core that are only told, logged or kept: states that differ in nothing else are one.

(`source` also decides whether a dead rank may come back; no rank comes back in the exploration.)"""


Fields = frozenset[tuple[str, str]]


class Frozen:
    """Numbers for values: equal numbers for equal contents, and what is equal is kept once."""

    def __init__(self, ignored: Fields = frozenset()) -> None:
        self.ignored = ignored
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Any) -> int:
        """The number of this value. What has changed since it was last asked for has another one."""
        return self._of(self._frozen(value, {}))

    def _of(self, contents: Hashable) -> int:
        return self._numbers.setdefault(contents, len(self._numbers))

    def _frozen(self, value: Any, seen: dict[int, int]) -> Hashable:
        """A hashable value. Objects that occur twice become numbers, so cycles end."""
        kind = type(value)
        if kind in (int, str, float, bool, bytes) or value is None:
            return value  # type: ignore[no-any-return]
        if isinstance(value, enum.Enum):
            return value
        if kind in (tuple, list):
            return (kind, *(self._inner(item, seen) for item in value))
        if kind in (set, frozenset):
            return (kind, frozenset(self._inner(item, seen) for item in value))
        if isinstance(value, dict):
            if all(isinstance(key, int | str) for key in value):
                return (dict, *((key, self._inner(value[key], seen)) for key in sorted(value, key=repr)))
            return (dict, frozenset((self._inner(key, seen), self._inner(item, seen)) for key, item in value.items()))
        if isinstance(value, type) or (callable(value) and not hasattr(value, "__dict__")):
            return value  # type: ignore[no-any-return]
        if hasattr(value, "__dataclass_params__") and value.__dataclass_params__.frozen:
            return value  # type: ignore[no-any-return]
        number = seen.get(id(value))
        if number is not None:
            return ("seen", number)
        seen[id(value)] = len(seen)
        names = {*getattr(value, "__dict__", ()), *_slots(kind)}
        told = [name for name in sorted(names) if (kind.__name__, name) not in self.ignored and hasattr(value, name)]
        return (kind, *((name, self._inner(getattr(value, name), seen)) for name in told))

    def _inner(self, value: Any, seen: dict[int, int]) -> Hashable:
        contents = self._frozen(value, seen)
        return ("number", self._of(contents)) if type(contents) is tuple else contents


@functools.cache
def _slots(kind: Hashable) -> tuple[str, ...]:
    return tuple(name for base in getattr(kind, "__mro__", ()) for name in getattr(base, "__slots__", ()))


class Table:
    """The states of one kind of core, numbered; `queries` are read once for each state."""

    def __init__(self, queries: tuple[str, ...], ignored: Fields, tidies: bool = False) -> None:
        self.queries = queries
        self.tidies = tidies
        self.pickles: list[bytes] = []
        self.answers: list[tuple[Any, ...]] = []
        self.frozen = Frozen(ignored)
        self.number_of: dict[int, int] = {}
        self.same: dict[Hashable, Any] = {}
        self.moves: dict[tuple[Any, ...], tuple[int, Any, tuple[Any, ...]]] = {}

    def number(self, core: Any) -> int:
        """The number of this state."""
        key = self.frozen.number(core)
        known = self.number_of.get(key)
        if known is None:
            known = self.number_of[key] = len(self.pickles)
            self.pickles.append(zlib.compress(pickle.dumps(core, pickle.HIGHEST_PROTOCOL), 1))
            self.answers.append(tuple(attrgetter(name)(core) for name in self.queries))
        return known

    def core(self, number: int) -> Any:
        """A fresh copy of the core in that state."""
        return pickle.loads(zlib.decompress(self.pickles[number]))

    def call(
        self, number: int, name: str, arguments: tuple[Any, ...], drain: Callable[[Any, Any], tuple[Any, ...]]
    ) -> tuple[int, Any, tuple[Any, ...]]:
        """State, value and effects after calling `name` in a state."""
        move = self.moves.get((number, name, arguments))
        if move is None:
            core = self.core(number)
            value = getattr(core, name)(*arguments)
            effects = drain(core, value)
            effects = self.same.setdefault(effects, effects)
            move = self.moves[(number, name, arguments)] = (self.number(core), value, effects)
        return move


class InternedController:
    """Looks like a ControllerCore; is a number in a table."""

    __slots__ = ("state", "table")

    QUERIES = ("deadline_s", "_incident_resumed")

    def __init__(self, table: Table, state: int) -> None:
        self.table = table
        self.state = state

    def handle(self, event: Any, now_s: float) -> tuple[Any, ...]:
        drain = _returned_and_tidied if self.table.tidies else _returned
        self.state, _, effects = self.table.call(self.state, "handle", (event, now_s), drain)
        return effects

    @property
    def deadline_s(self) -> float | None:
        deadline_s: float | None = self.table.answers[self.state][0]
        return deadline_s

    @property
    def resumed(self) -> int:
        """Newest incident that was a false alarm; for the exploration only."""
        resumed: int = self.table.answers[self.state][1]
        return resumed


def _returned(core: Any, value: Any) -> tuple[Any, ...]:
    return tuple(value)


def _returned_and_tidied(core: Any, value: Any) -> tuple[Any, ...]:
    """Forget what makes no difference any more: timers that would find nobody."""
    suspects, timers, incident = core.members.suspects, core._timers, core._incident
    if not suspects:
        timers.clear("suspects")
    for rank, member in core.members.members.items():
        if rank not in suspects:
            member.suspect_since_s = 0.0
    if incident is not None and not incident._proceeding:
        timers.clear("proceed")
        incident._proceed_step = 0
    return tuple(value)


def _taken(core: Any, value: Any) -> tuple[Any, ...]:
    return tuple(core.take_effects())


class InternedProcessor:
    """Looks like a ProcessorCore; is a number in a table, and the effects that wait to be taken."""

    __slots__ = ("effects", "state", "table")

    QUERIES = (
        "deadline_s", "frozen", "leaving", "may_end_step", "stand", "released", "may_train", "_part._over", "copy_due",
    )  # fmt: skip

    def __init__(self, table: Table, state: int) -> None:
        self.table = table
        self.state = state
        self.effects: tuple[Any, ...] = ()

    def _call(self, name: str, *arguments: Any) -> Any:
        self.state, value, effects = self.table.call(self.state, name, arguments, _taken)
        self.effects += effects
        return value

    def handle(self, event: Any, now_s: float) -> None:
        self._call("handle", event, now_s)

    def mark_ready(self) -> None:
        self._call("mark_ready")

    def mark_skipped(self) -> None:
        self._call("mark_skipped")

    def mark_gate_failed(self, text: str) -> None:
        self._call("mark_gate_failed", text)

    def try_update(self) -> bool:
        return bool(self._call("try_update"))

    def mark_updated(self) -> None:
        self._call("mark_updated")

    def mark_torn(self) -> None:
        self._call("mark_torn")

    def try_end_step(self) -> bool:
        return bool(self._call("try_end_step"))

    def mark_left(self) -> None:
        self._call("mark_left")

    def mark_raised(self, text: str, secondary: bool) -> None:
        self._call("mark_raised", text, secondary)

    def mark_copied(self, order: Any) -> None:
        self._call("mark_copied", order)

    def mark_not_copied(self, order: Any, reason: str) -> None:
        self._call("mark_not_copied", order, reason)

    @property
    def copy_due(self) -> Any:
        return self.table.answers[self.state][8]

    def take_effects(self) -> tuple[Any, ...]:
        effects, self.effects = self.effects, ()
        return effects

    @property
    def deadline_s(self) -> float | None:
        deadline_s: float | None = self.table.answers[self.state][0]
        return deadline_s

    @property
    def frozen(self) -> bool:
        return bool(self.table.answers[self.state][1])

    @property
    def leaving(self) -> bool:
        return bool(self.table.answers[self.state][2])

    @property
    def may_train(self) -> bool:
        return bool(self.table.answers[self.state][6])

    @property
    def may_end_step(self) -> bool:
        return bool(self.table.answers[self.state][3])

    @property
    def stand(self) -> Stand:
        stand: Stand = self.table.answers[self.state][4]
        return stand

    @property
    def resumed(self) -> int:
        """Newest incident that this rank knows to be over; for the exploration only."""
        resumed: int = self.table.answers[self.state][7]
        return resumed

    @property
    def released(self) -> bool:
        return bool(self.table.answers[self.state][5])
