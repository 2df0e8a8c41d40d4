"""Plain values of an optimizer: hyperparameters, and the numbers, lists and generators in its state.

At each step's end they are copied: groups as a whole, which are saved as they were then, and of the state what consists
of numbers alone. Of lists with tensors it is known which objects were in them; the tensors are looked at elsewhere.

Nothing keeps these values the same on every rank. A rank's own loss makes LBFGS' `prev_loss`, or a step size, this
rank's own, and a checkpoint has those of the rank that wrote it. So each rank's step document has checksums of them;
and of the numbers in the state the values themselves as long as they are few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
import xxhash
from torch.optim.optimizer import Optimizer

from lastwords.checkpoint.entries import UnitEntry
from lastwords.checkpoint.meta import Marks
from lastwords.checkpoint.reshard.saved_state import MOVED_BY_SCHEDULERS
from lastwords.checkpoint.storable import DEPTH_MAX, NUMPY_KINDS, is_storable, pack, unpack
from lastwords.errors import some
from lastwords.optim_wrapper.joined_optimizer import with_state
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of, problem_of
from lastwords.optim_wrapper.tensors.tensor_tree import ATOMS, copied, differ, is_fixed
from lastwords.vocabulary import UNIT_REPLICATED

KEPT_MAX = 64
"""As many numbers are kept for each rank, and looked at in a step: 64 take some 10 us. Of more, others in each step."""

_NUMBERS = frozenset({bool, int, float, complex, str, type(None)})
_EQUAL = _NUMBERS | {bytes}
_LEAVES = _EQUAL | {torch.Tensor, torch.nn.Parameter}
"""Known as such at once: to ask whether a tensor is a list takes ten times as long."""
_LISTS = (list, tuple, dict, deque)
_INSIDE = (*_LISTS, torch.Generator)
"""What is looked into; of a generator its state counts."""
_SHOWN_MAX = 6
_HASHED_BYTES_MAX = 4096
"""Of larger tensors and arrays among the hyperparameters only the type goes into the checksum."""
_WHOLE = object()
"""In a key's place: the state of this parameter is no dict."""
_GONE = object()
"""In a value's place: there is none any more."""


@dataclass(eq=False, slots=True)
class _StatePlace:
    """A value of the state: `state[owner][key]`. numbers: how many it consists of; 0: of other things too.

    leaves: of the last step's end in which it was looked at; of numbers there is a copy as well.
    """

    state: MutableMapping[Any, Any]
    owner: Any
    key: Any
    name: str
    numbers: int
    leaves: list[Any] = field(default_factory=list)
    copy: Any = None

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


class PlainValues:
    """Looks at `optimizer`. parameters: by name, all that there are now. Training thread, except `moved`.

    The checksums go into every document of a black box, and are compared on a resume.
    """

    def __init__(self, optimizer: Optimizer, parameters: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._seen: list[tuple[list[str], list[Any]]] = []
        self._fixed = True
        self._copies: list[dict[str, Any]] = []
        self.groups_ended: list[dict[str, Any]] = []
        """Hyperparameters as of the last step's end."""
        self._places: list[_StatePlace] = []
        self._mixed: list[_StatePlace] = []
        self._lists: list[_StatePlace] = []
        """What is looked at in each step beside the numbers: `_mixed`; where those are too many, all lists."""
        self._taken: list[_StatePlace] = []
        self._keeps = True
        self._step = -1
        self._now: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._called = {"groups": "optimizer's param_groups"}
        self._said: tuple[object, dict[str, Any]] = None, {}

    def list_values(self) -> None:
        """See which values there are now: microseconds for each parameter."""
        every = [*_places_in(self._optimizer, {id(tensor): name for name, tensor in self._parameters().items()})]
        self._places = [place for place in every if place.numbers]
        self._keeps = sum(place.numbers for place in self._places) <= KEPT_MAX
        lists = [place for place in every if isinstance(place.get(), _INSIDE)]
        self._mixed = [place for place in lists if not place.numbers]
        self._lists = self._mixed if self._keeps else lists
        self._taken = []
        self._said = None, {}
        self._called |= {"numbers": _some(self._places), "lists": _some(self._mixed)}

    def groups(self) -> list[dict[str, Any]]:
        """Copies of all groups as they are now, not to be changed; the same list where nothing can have moved."""
        groups = self._optimizer.param_groups
        same = self._fixed and len(groups) == len(self._seen)
        for group, (keys, values) in zip(groups, self._seen, strict=False):
            same = same and [*group] == keys and all(map(is_, group.values(), values))
        if not same:
            self._seen = [([*group], [*group.values()]) for group in groups]
            self._copies = copy_groups(self._optimizer)
            self._fixed = all(is_fixed(one) for copy in self._copies for one in copy.values() if type(one) not in ATOMS)
        return self._copies

    def mark_end(self, step: int) -> None:
        """The end of `step`, which may come twice."""
        if step != self._step:
            self._before, self._step = dict(self._now), step
        groups = self.groups()
        if groups is not self.groups_ended:
            self.groups_ended = groups
            self._now["groups"] = _sum(b"", _forms(flattened([[*group.values()] for group in groups]), in_memory=True))
        for place in self._lists:
            place.leaves = flattened(place.get())
        if self._mixed:
            self._now["lists"] = _sum(b"", _forms(leaf for place in self._mixed for leaf in place.leaves))
        if not self._places:
            return
        places = self._of_turn(step)  # whatever has differed once is remembered
        seen = b"" if self._keeps else self._before.get("numbers", 0).to_bytes(8, "little")
        for place in places:
            value = place.get()
            if type(value) in _NUMBERS:
                place.leaves, place.copy = [value], value
            elif _count(value):
                place.leaves, place.copy = flattened(value), copied(value)
            else:
                self.list_values()  # another key, or a tensor now, as in LBFGS after its first iteration
                self.mark_end(step)
                return
        self._taken = places
        self._now["numbers"] = _sum(seen, _forms(leaf for place in places for leaf in place.leaves))

    def now(self, step: int) -> str:
        """What shows whether numbers have changed since an earlier call for `step`."""
        return repr(_forms(leaf for place in self._of_turn(step) for leaf in flattened(place.get())))

    def moved(self) -> tuple[list[tuple[Any, Any, Any]], str]:
        """What is not as it was at the last step's end: keys and values of states; and what else, or nothing.

        Any thread. The values are those of then: owner, key, value.
        """
        every = dict.fromkeys([*self._taken, *self._lists])
        changed = [place for place in every if not _same(place.leaves, flattened(place.get()))]
        known = [
            place
            for place in changed
            if place in self._taken and place.key is not _WHOLE and isinstance(place.owner, torch.Tensor)
        ]
        unknown = [place for place in changed if place not in known]
        return [(place.owner, place.key, place.copy) for place in known], _some(unknown) if unknown else ""

    def _of_turn(self, step: int) -> list[_StatePlace]:
        """All numbers, or of too many those that are looked at in `step`."""
        turns = 1 if self._keeps else -(-len(self._places) // KEPT_MAX)
        return self._places if turns == 1 else self._places[step % turns :: turns]

    def members(self, copies: Mapping[str, Marks]) -> dict[str, Any]:
        """What a document says of all this, and of `copies`, other things that have to be alike."""
        marks = None if copies else (self._now.copy(), self._before)
        if marks is None or marks != self._said[0]:  # else nothing has moved, as in most loops
            alike = {kind: Marks(self._called[kind], now, self._before.get(kind, 0)) for kind, now in self._now.items()}
            named = {place.name: place.copy for place in self._taken}
            # Of two with one name one's would be put into the other.
            own = pack(named, "numbers") if self._keeps and len(named) == len(self._places) else {}
            said = {"alike": {**copies, **alike}, "numbers": own}
            self._said = marks, said
        return self._said[1]

    def restore(self, saved: Mapping[str, Any]) -> list[str]:
        """Put this rank's own numbers into the state, which a checkpoint's other ones have been put into.

        Returns why the outcome is not exact, if it is not.
        """
        self.list_values()
        if not saved:
            return []
        own = unpack(saved, "numbers")
        for place in self._places:
            if place.name in own:
                place.set(own.pop(place.name))
        lost = ", ".join([*own][:_SHOWN_MAX])
        return [f"the checkpoint holds this rank's own {lost}, which the optimizer's state here lacks"] if own else []


# ---------------------------------------------------------------------- groups


def copy_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Hyperparameters of every group, without the parameters: nothing changes the copies later."""
    groups = optimizer.param_groups
    return [
        {key: one if type(one) in ATOMS else copied(one) for key, one in group.items() if key != "params"}
        for group in groups
    ]


def groups_differ(
    before: list[dict[str, Any]],
    now: list[dict[str, Any]],
    groups: Sequence[Mapping[str, Any]] = (),
    schedulers: Sequence[Any] = (),
) -> bool:
    """Whether two copies of `groups` differ in what no step of these schedulers has made so.

    A scheduler explains the `lr` of its own optimizer's groups that it left there, and one that cycles momentum that.
    """
    return before is not now and (len(before) != len(now) or any(
        was.keys() != one.keys() or any(
            value is not was[key] and differ(was[key], value)
            and not any(_is_left_by(scheduler, key, value, group) for scheduler in schedulers)
            for key, value in one.items()
        )
        for was, one, group in zip(before, now, groups or now, strict=True)
    ))  # fmt: skip


def _is_left_by(scheduler: Any, key: str, value: Any, group: Mapping[str, Any]) -> bool:
    own = getattr(scheduler, "optimizer", None)
    place = next((at for at, one in enumerate(getattr(own, "param_groups", ())) if one is group), None)
    if key not in MOVED_BY_SCHEDULERS or (own is not None and place is None):
        return False
    if key != "lr":
        return any(getattr(one, "cycle_momentum", False) for one in (scheduler, *getattr(scheduler, "_schedulers", ())))
    left = getattr(scheduler, "_last_lr", None)
    # Another kind than torch's, which does not show it.
    return left is None or place is None or (place < len(left) and not differ(left[place], value))


def align(groups: list[dict[str, Any]], entries: Mapping[str, UnitEntry], restored: Iterable[str]) -> list[str]:
    """Take over the values of the extras' moment where one of the `restored` units was written at another one.

    In a sharded job one writer may have ended the step, and another not have come to its scheduler, which is restored
    from the extras' writer.

    groups: the optimizer's, as restored. Returns why the resume is not exact where that cannot be told.
    """
    extras = entries[UNIT_REPLICATED].meta
    elsewhere = [unit for unit in restored if entries[unit].meta.step_ended not in (None, extras.step_ended)]
    if not elsewhere:
        return []
    saved = extras.hyperparameters or []
    if len(saved) != len(groups) or not all(map(_may_take_over, groups, saved)):
        return [
            f"{' and '.join(elsewhere)} and the extras were written by ranks at different points of the "
            f"step, and their optimizers' param_groups differ: a scheduler step may be missing"
        ]
    for group, values in zip(groups, saved, strict=True):
        group.update({key: value for key, value in values.items() if key in MOVED_BY_SCHEDULERS})
    return []


def _may_take_over(group: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    here = plain_part(group)
    same = all(here.get(key) == value for key, value in saved.items() if key not in MOVED_BY_SCHEDULERS)
    return same and here.keys() == saved.keys() and not isinstance(group.get("lr"), torch.Tensor)


def plain_part(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a group can be stored without a tree of tensors."""
    return {key: value for key, value in group.items() if key != "params" and is_storable(value)}


# ---------------------------------------------------------------------- state


def _places_in(optimizer: Optimizer, called: Mapping[int, str]) -> Iterator[_StatePlace]:
    for prefix, one in with_state(optimizer).items():
        for owner, values in list(one.state.items()):
            # What belongs to no named parameter is called the same in another process, too.
            own = called.get(id(owner)) or (repr(owner) if type(owner) in _NUMBERS else type(owner).__name__)
            for key, value in list(values.items()) if isinstance(values, dict) else [(_WHOLE, values)]:
                if type(value) in _NUMBERS or isinstance(value, (np.generic, *_INSIDE)):
                    yield _StatePlace(one.state, owner, key, f"{prefix}{_called(key)} of {own}", _count(value))


def _called(key: Any) -> str:
    if key is _WHOLE or isinstance(key, str):
        return key if isinstance(key, str) else "state"
    forms = _forms(flattened(key))
    return repr(forms if len(forms) > 1 else forms[0])


def _some(places: Sequence[_StatePlace]) -> str:
    """
    >>> _some([_StatePlace({}, 0, "step", "step of w", 1), _StatePlace({}, 1, "step", "step of v", 1)])
    "optimizer's step"
    """
    names = [*dict.fromkeys(place.name.rpartition(" of ")[0] for place in places)]
    return f"optimizer's {some(names, _SHOWN_MAX)}"


def _count(value: Any) -> int:
    """How many numbers a value is made of, keys included; 0 if of anything else too, or if it cannot be stored.

    >>> _count(0.5), _count({"a": [1, 2], 3: (np.float64(4), "b")}), _count([1, torch.ones(2)]), _count([])
    (1, 6, 0, 1)
    """
    leaves = [leaf for leaf in flattened(value) if not isinstance(leaf, type)]
    numbers = all(type(leaf) in _NUMBERS or isinstance(leaf, np.generic) for leaf in leaves)
    return max(len(leaves), 1) if numbers and is_storable(value) else 0


# ---------------------------------------------------------------------- what is inside


def flattened(value: Any, depth: int = DEPTH_MAX) -> list[Any]:
    """All that is inside, in its order, and a type where a list or dict begins or ends. No more than so deep.

    >>> flattened([1, {"a": (2,)}])
    [<class 'list'>, 1, <class 'dict'>, 'a', <class 'tuple'>, 2, <class 'type'>, <class 'type'>, <class 'type'>]
    """
    if type(value) in _LEAVES:
        return [value]
    if isinstance(value, torch.Generator):
        return [value.get_state().numpy().tobytes()]
    if not isinstance(value, _LISTS) or not depth:
        return [value]
    found: list[Any] = [type(value)]
    for one in chain.from_iterable(value.items()) if isinstance(value, dict) else value:
        if type(one) not in _LEAVES and isinstance(one, _INSIDE):
            found += flattened(one, depth - 1)
        else:
            found.append(one)
    found.append(type)
    return found


def _same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether these leaves are the same objects, or equal numbers."""
    return len(before) == len(now) and all(
        one is other or ((type(one) in _EQUAL or isinstance(one, np.generic)) and not differ(one, other))
        for one, other in zip(before, now, strict=True)
    )


def _sum(seen: bytes, values: Any) -> int:
    """Of what is the same in every process."""
    return xxhash.xxh3_64_intdigest(seen + repr(values).encode())


def _forms(leaves: Iterable[Any], *, in_memory: bool = False) -> list[Any]:
    """What of these is the same in every process; of tensors and arrays nothing: those of the state are seen elsewhere.

    in_memory: with the bytes of small ones in the host's memory.
    """
    return [leaf if type(leaf) in _EQUAL else _form(leaf, in_memory) for leaf in leaves]


def _form(leaf: Any, in_memory: bool) -> Any:
    if isinstance(leaf, type):
        return leaf.__name__
    if isinstance(leaf, np.generic):
        return type(leaf).__name__, leaf.item()
    if in_memory and isinstance(leaf, torch.Tensor) and not problem_of(leaf) and leaf.nbytes <= _HASHED_BYTES_MAX:
        memory = bytes_of(leaf)
        return type(leaf).__name__ if memory is None else bytes(memory)
    if (
        in_memory
        and isinstance(leaf, np.ndarray)
        and leaf.dtype.kind in NUMPY_KINDS
        and leaf.nbytes <= _HASHED_BYTES_MAX
    ):
        return leaf.dtype.str, leaf.shape, leaf.tobytes()
    return type(leaf).__name__


def seen(own: Any) -> str:
    """What shows that its state_dict() has changed: values, small tensors' bytes, torch's count of writes to others."""
    try:
        leaves = flattened(own.state_dict())
    except Exception:  # of the user's own code: handed to the log by `Extras`, which asks again at the step's end
        return ""
    return repr([*map(_word, leaves, _forms(leaves, in_memory=True))])


def _word(leaf: Any, form: Any) -> Any:
    large = isinstance(leaf, torch.Tensor) and isinstance(form, str) and not torch.nn.parameter.is_lazy(leaf)
    return leaf._version if large and not leaf.is_inference() else form
