"""Python values in an optimizer's state and groups, which nothing keeps the same on every rank.

A rank's own loss makes LBFGS' `prev_loss`, or a step size, this rank's own, and a checkpoint has those of the rank that
wrote it. So each rank's step document has checksums of them; and of the numbers, alone or in lists and dicts without
tensors, the values themselves as long as they are few.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.optim.optimizer import Optimizer

from lastwords.checkpoint.meta import Marks
from lastwords.checkpoint.storable import DEPTH_MAX, NUMPY_KINDS, pack, unpack
from lastwords.errors import UnstorableError
from lastwords.optim_wrapper.joined_optimizer import with_state
from lastwords.optim_wrapper.state.group_copies import copied
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of, problem_of

KEPT_MAX = 64
"""As many numbers are kept for each rank, and looked at in a step: 64 take some 10 us. Of more, others in each step."""

_NUMBERS = frozenset({bool, int, float, complex, str, type(None)})
_LISTS = (list, tuple, dict, deque)
_INSIDE = (*_LISTS, torch.Generator)
"""What is looked into; of a generator its state counts."""
_EQUAL = _NUMBERS | {bytes}
_SHOWN_MAX = 6
_HASHED_BYTES_MAX = 4096
"""Of larger tensors and arrays among the hyperparameters only the type goes into the checksum."""
_WHOLE = object()
"""In a key's place: the state of this parameter is no dict."""
_GONE = object()
"""In a value's place: there is none any more."""


class _Place(NamedTuple):
    """Where a value is: `state[owner][key]`. numbers: how many it has, if they are kept; 0: there are tensors too."""

    state: MutableMapping[Any, Any]
    owner: Any
    key: Any
    name: str
    numbers: int

    def get(self) -> Any:
        values = self.state.get(self.owner, _GONE)
        if self.key is _WHOLE:
            return values
        return values.get(self.key, _GONE) if isinstance(values, dict) else _GONE

    def set(self, value: Any) -> None:
        if self.key is _WHOLE:
            self.state[self.owner] = value
        else:
            self.state[self.owner][self.key] = value


class OwnNumbers:
    """Looks at the optimizer of `view`. Training thread, except `moved`.

    The checksums go into every document of a black box; `alike` says what they are compared with on a resume.
    """

    def __init__(self, view: UnitView) -> None:
        self._view = view
        self._groups: list[dict[str, Any]] | None = None
        self._places: list[_Place] = []
        self._lists: list[_Place] = []
        self._leaves: list[list[Any]] = []
        self._taken: list[_Place] = []
        self._numbers = 0
        self._step = -1
        self._now: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._values: list[Any] = []
        self._called: dict[str, str] = {}
        self._said: tuple[object, bytes] = None, b""

    def look(self) -> None:
        """See which values there are now: microseconds for each parameter."""
        called = {id(tensor): name for name, tensor in self._view.all_names().parameters.items()}
        every = [*_places_in(self._view.optimizer, called)]
        self._places = [place for place in every if place.numbers]
        self._numbers = sum(place.numbers for place in self._places)
        self._lists = [place for place in every if isinstance(place.get(), _INSIDE)]
        mixed = [place for place in self._lists if not place.numbers]
        self._said = None, b""
        self._called = {"groups": "optimizer's param_groups", "numbers": _some(self._places), "lists": _some(mixed)}

    def take(self, step: int, groups: list[dict[str, Any]]) -> None:
        """The end of `step`, which may come twice. groups: its hyperparameters, another list where they are others."""
        if step != self._step:
            self._before, self._step = dict(self._now), step
        if groups is not self._groups:
            self._groups = groups
            self._now["groups"] = _sum(b"", [[_plain(one) for one in group.values()] for group in groups])
        if self._lists:
            values = [place.get() for place in self._lists]
            self._leaves = [_leaves(value) for value in values]
            mixed = [value for place, value in zip(self._lists, values, strict=True) if not place.numbers]
            if mixed:
                self._now["lists"] = _sum(b"", [*map(_form, mixed)])
        if not self._places:
            self._taken = []
            return
        places = self._of_turn(step)  # whatever has differed once is remembered
        seen = b"" if self._keeps else self._before.get("numbers", 0).to_bytes(8, "little")
        values = [place.get() for place in places]
        if not all(type(value) in _NUMBERS or _count(value) for value in values):
            self.look()  # another key has come for it; or it is a tensor now, as in LBFGS after its first iteration
            self.take(step, groups)
            return
        self._taken, self._values = places, [*map(copied, values)]
        self._now["numbers"] = _sum(seen, [*map(_form, self._values)])

    def now(self, step: int) -> str:
        """What shows whether numbers have changed since an earlier call for `step`."""
        return repr([_form(place.get()) for place in self._of_turn(step)])

    def moved(self) -> tuple[list[tuple[Any, Any, Any]], str]:
        """What is not as it was at the last step's end: keys and values of states; and what else, or nothing.

        Any thread. The values are those of then: owner, key, value.
        """
        known: list[tuple[Any, Any, Any]] = []
        unknown: list[_Place] = []
        for place, was in zip(self._taken, self._values, strict=True):
            if repr(_form(was)) == repr(_form(place.get())):
                continue
            if place.key is _WHOLE or not isinstance(place.owner, torch.Tensor):
                unknown.append(place)
            else:
                known.append((place.owner, place.key, was))
        taken = {id(place) for place in self._taken}
        lists = [
            place
            for place, was in zip(self._lists, self._leaves, strict=True)
            if id(place) not in taken and not _same(was, _leaves(place.get()))
        ]
        return known, _some([*unknown, *lists]) if unknown or lists else ""

    def _of_turn(self, step: int) -> list[_Place]:
        """All, or of too many those that are looked at in `step`."""
        turns = 1 if self._keeps else -(-len(self._places) // KEPT_MAX)
        return self._places if turns == 1 else self._places[step % turns :: turns]

    @property
    def _keeps(self) -> bool:
        return self._numbers <= KEPT_MAX

    def alike(self) -> dict[str, Marks]:
        """For each kind, as of the last step's end."""
        return {kind: Marks(self._called[kind], now, self._before.get(kind, 0)) for kind, now in self._now.items()}

    def values(self) -> dict[str, Any]:
        """This rank's own, as of the last step's end, in JSON; empty if there are none, or too many."""
        if not self._places or not self._keeps:
            return {}
        named = {place.name: value for place, value in zip(self._taken, self._values, strict=True)}
        if len(named) < len(self._places):
            return {}  # two of one name: one's would be put into the other
        return pack(named, "numbers")  # type: ignore[no-any-return]

    def members(self, copies: Mapping[str, Marks]) -> bytes:
        """What a document says of all this, and of `copies`, other things that have to be alike; with a comma first."""
        marks = None if copies else (self._now.copy(), self._before, self._called)
        if marks is None or marks != self._said[0]:  # else nothing has moved, as in most loops
            said = {"alike": {**copies, **self.alike()}, "numbers": self.values()}
            text = json.dumps({name: value for name, value in said.items() if value}).encode()
            self._said = marks, b",%s" % text[1:-1] if len(text) > 2 else b""
        return self._said[1]

    def restore(self, saved: Mapping[str, Any]) -> list[str]:
        """Put this rank's own into the state, which a checkpoint's other numbers have been put into.

        Returns why the outcome is not exact, if it is not.
        """
        self.look()
        if not saved:
            return []
        own = unpack(saved, "numbers")
        for place in self._places:
            if place.name in own:
                place.set(own.pop(place.name))
        lost = ", ".join([*own][:_SHOWN_MAX])
        return [f"the checkpoint holds this rank's own {lost}, which the optimizer's state here lacks"] if own else []


def _places_in(optimizer: Optimizer, called: Mapping[int, str]) -> Iterator[_Place]:
    for prefix, one in with_state(optimizer).items():
        state = one.state
        for owner, values in list(state.items()):
            whose = f"of {called.get(id(owner)) or _owner(owner)}"
            if not isinstance(values, dict):
                if _is_value(values):
                    yield _Place(state, owner, _WHOLE, f"{prefix}state {whose}", _count(values))
                continue
            for key, value in list(values.items()):
                if _is_value(value):
                    name = f"{prefix}{key if isinstance(key, str) else repr(_form(key))} {whose}"
                    yield _Place(state, owner, key, name, _count(value))


def _owner(key: Any) -> str:
    """What a state that belongs to no named parameter is called: the same in another process."""
    return repr(key) if type(key) in _NUMBERS else type(key).__name__


def _some(places: Sequence[_Place]) -> str:
    """
    >>> _some([_Place({}, 0, "step", "step of w", 1), _Place({}, 1, "step", "step of v", 1)])
    "optimizer's step"
    """
    names = [*dict.fromkeys(place.name.rpartition(" of ")[0] for place in places)]
    more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    return f"optimizer's {', '.join(names[:_SHOWN_MAX])}{more}"


def _is_value(value: Any) -> bool:
    return type(value) in _NUMBERS or isinstance(value, (np.generic, *_INSIDE))


def _count(value: Any) -> int:
    """How many numbers a value is made of, keys included; 0 if of anything else too, or if it cannot be stored.

    >>> _count(0.5), _count({"a": [1, 2], 3: (np.float64(4), "b")}), _count([1, torch.ones(2)]), _count([])
    (1, 6, 0, 1)
    """
    leaves = [leaf for leaf in _leaves(value) if not isinstance(leaf, type)]
    if not all(type(leaf) in _NUMBERS or isinstance(leaf, np.generic) for leaf in leaves):
        return 0
    try:
        pack(value)
    except (UnstorableError, RecursionError):
        return 0
    return max(len(leaves), 1)


def _leaves(value: Any) -> list[Any]:
    """All that is inside, in its order, and a type where a list or dict begins or ends. No more than so deep.

    >>> _leaves([1, {"a": (2,)}])
    [<class 'list'>, 1, <class 'dict'>, 'a', <class 'tuple'>, 2, <class 'type'>, <class 'type'>, <class 'type'>]
    """
    found: list[Any] = []
    _gather(value, found, DEPTH_MAX)
    return found


def _gather(value: Any, found: list[Any], depth: int) -> None:
    if isinstance(value, torch.Generator):
        found.append(value.get_state().numpy().tobytes())
        return
    if not isinstance(value, _LISTS) or not depth:
        found.append(value)
        return
    found.append(type(value))
    inside = [one for pair in value.items() for one in pair] if isinstance(value, dict) else value
    if any(isinstance(one, _INSIDE) for one in inside):
        for one in inside:
            _gather(one, found, depth - 1)
    else:
        found += inside
    found.append(type)


def _same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether these are the same objects, or equal numbers."""
    return len(before) == len(now) and all(
        one is other or (type(one) is type(other) and type(one) in _EQUAL and one == other)
        for one, other in zip(before, now, strict=True)
    )


def seen(own: Any) -> str:
    """What shows that its state_dict() has changed: values, small tensors' bytes, torch's count of writes to others."""
    try:
        leaves = _leaves(own.state_dict())
    except Exception:  # of the user's own code: handed to the log by `Extras`, which asks again at the step's end
        return ""
    return repr([leaf.__name__ if isinstance(leaf, type) else _word(leaf) for leaf in leaves])


def _word(leaf: Any) -> Any:
    word = _plain(leaf)
    large = (
        isinstance(leaf, torch.Tensor)
        and not torch.nn.parameter.is_lazy(leaf)
        and isinstance(word, str)
        and not leaf.is_inference()
    )
    return leaf._version if large else word


def _sum(seen: bytes, values: Any) -> int:
    """Of what is the same in every process."""
    return xxhash.xxh3_64_intdigest(seen + repr(values).encode())


def _form(value: Any) -> Any:
    """What of a value in the state is the same in every process; of a tensor nothing, which is looked at elsewhere."""
    if type(value) in _EQUAL:
        return value
    if isinstance(value, np.generic):
        return type(value).__name__, value.item()
    if isinstance(value, _INSIDE):
        return [_form(leaf) if not isinstance(leaf, type) else leaf.__name__ for leaf in _leaves(value)]
    return type(value).__name__


def _plain(value: Any) -> Any:
    """What of a hyperparameter is the same in every process, with the bytes of small tensors in the host's memory."""
    if isinstance(value, _INSIDE):
        return [_plain(leaf) if not isinstance(leaf, type) else leaf.__name__ for leaf in _leaves(value)]
    if isinstance(value, torch.Tensor) and not problem_of(value) and value.nbytes <= _HASHED_BYTES_MAX:
        memory = bytes_of(value)
        return type(value).__name__ if memory is None else bytes(memory)
    if isinstance(value, np.ndarray) and value.dtype.kind in NUMPY_KINDS and value.nbytes <= _HASHED_BYTES_MAX:
        return value.dtype.str, value.shape, value.tobytes()
    return _form(value)
