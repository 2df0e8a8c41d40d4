"""Python numbers in an optimizer's state and groups, which nothing keeps the same on every rank.

A rank's own loss makes LBFGS' `prev_loss`, or a step size, this rank's own, and a checkpoint has those of the rank that
wrote it. So each rank's step document has checksums of them, and those of the state themselves as long as they are few.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
import xxhash
from torch.optim.optimizer import Optimizer

from lastwords.checkpoint.storable import pack, unpack
from lastwords.optim_wrapper.nested_optimizers import nested_in
from lastwords.optim_wrapper.state.group_copies import GroupCopies
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors.tensor_bytes import problem_of
from lastwords.sharding import zero

KEPT_MAX = 64
"""As many are kept for each rank, and looked at in a step: 64 take some 10 us. Of more, other ones in each step."""

_NUMBERS = (bool, int, float, complex, str, type(None))
_SHOWN_MAX = 6
_NOTHING: dict[str, Any] = {}


class OwnNumbers:
    """Looks at the optimizer of `view`. Training thread.

    The checksums go into every document of a black box; `alike` says what they are compared with on a resume.
    """

    def __init__(self, view: UnitView) -> None:
        self._view = view
        self._copies = GroupCopies(view.optimizer)
        self._groups: list[dict[str, Any]] | None = None
        self._places: list[tuple[MutableMapping[Any, Any], Any, str, str]] = []
        self._step = -1
        self._now: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._values: list[Any] = []
        self._called: dict[str, str] = {}
        self._said: tuple[object, bytes] = None, b""

    def look(self) -> None:
        """See which numbers there are now: microseconds for each parameter."""
        called = {id(tensor): name for name, tensor in self._view.all_names().parameters.items()}
        self._places = [
            (state, parameter, key, f"{prefix}{key} of {called.get(id(parameter)) or _owner(parameter)}")
            for prefix, state in _states(self._view.optimizer)
            for parameter, values in list(state.items())
            if isinstance(values, dict)
            for key, value in list(values.items())
            if type(value) in _NUMBERS and isinstance(key, str)
        ]
        names = [*dict.fromkeys(key for *_, key, _ in self._places)]
        more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
        self._called = {
            "groups": "optimizer's param_groups",
            "numbers": f"optimizer's {', '.join(names[:_SHOWN_MAX])}{more}",
        }

    def take(self, step: int) -> None:
        """The end of `step`, which may come twice."""
        if step != self._step:
            self._before, self._step = dict(self._now), step
        groups = self._copies.take()
        if groups is not self._groups:
            self._groups = groups
            self._now["groups"] = _sum(b"", [[*group.values()] for group in groups])
        if not self._places:
            return
        places, seen = self._places, b""
        if len(places) > KEPT_MAX:  # whatever has differed once is remembered
            turns = -(-len(places) // KEPT_MAX)
            places, seen = places[step % turns :: turns], self._before.get("numbers", 0).to_bytes(8, "little")
        self._values = [state.get(one, _NOTHING).get(key) for state, one, key, _ in places]
        self._now["numbers"] = _sum(seen, self._values)

    def alike(self) -> dict[str, Any]:
        """For each kind what it is, its checksum at the last step's end, and at the one before. JSON values."""
        return {kind: [self._called[kind], now, self._before.get(kind, 0)] for kind, now in self._now.items()}

    def values(self) -> dict[str, Any]:
        """This rank's own, as of the last step's end, in JSON; empty if there are none, or too many."""
        if not self._places or len(self._places) > KEPT_MAX:
            return {}
        named = {name: value for (*_, name), value in zip(self._places, self._values, strict=True)}
        if len(named) < len(self._places):
            return {}  # two of one name: one's would be put into the other
        return pack(named, "numbers")  # type: ignore[no-any-return]

    def members(self, copies: Mapping[str, Any]) -> bytes:
        """What a document says of all this, and of `copies`, other things that have to be alike; with a comma first."""
        marks = None if copies else (self._now.copy(), self._before, self._called)
        if marks is None or marks != self._said[0]:  # else nothing has moved, as in most loops
            said = {"alike": {**copies, **self.alike()}, "numbers": self.values()}
            text = json.dumps({name: value for name, value in said.items() if value}).encode()
            self._said = marks, b",%s" % text[1:-1] if len(text) > 2 else b""
        return self._said[1]

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put this rank's own into the state, which a checkpoint's other numbers have been put into."""
        self.look()
        own = unpack(saved, "numbers") if saved else {}
        for state, parameter, key, name in self._places:
            if name in own:
                state[parameter][key] = own[name]


def _states(optimizer: Optimizer) -> Iterator[tuple[str, MutableMapping[Any, Any]]]:
    for number, part in enumerate(getattr(optimizer, "parts", (optimizer,))):
        prefix = f"[{number}]." if hasattr(optimizer, "parts") else ""
        yield prefix, zero.stateful(part).state
        for name, one in nested_in(part).items():
            yield f"{prefix}{name}.", one.state


def _owner(key: Any) -> str:
    """What a state that belongs to no named parameter is called: the same in another process."""
    return repr(key) if type(key) in _NUMBERS else type(key).__name__


def _sum(seen: bytes, values: Any) -> int:
    """Of what is the same in every process; of a tensor its number, where that can be had without waiting."""
    return xxhash.xxh3_64_intdigest(seen + repr(_plain(values)).encode())


def _plain(value: Any) -> Any:
    if type(value) in _NUMBERS:
        return value
    if isinstance(value, list | tuple):
        return [*map(_plain, value)]
    if isinstance(value, dict):
        return [(_plain(key), _plain(one)) for key, one in value.items()]
    if isinstance(value, torch.Tensor) and not problem_of(value) and value.numel() == 1 and value.device.type == "cpu":
        return value.item()
    return type(value).__name__
