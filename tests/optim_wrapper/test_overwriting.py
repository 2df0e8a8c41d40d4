"""What is one object at two places of a new process does not hide that the saved run had two values there."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from lastwords.checkpoint.meta import InlineExtras
from lastwords.checkpoint.storable import pack
from lastwords.optim_wrapper.state import generators
from lastwords.optim_wrapper.state.extras import Extras, pack_inline, restore_inline
from lastwords.optim_wrapper.state.object_walk import Walk
from lastwords.optim_wrapper.tensors.overwriting import Overwriting
from tests import golden
from tests.optim_wrapper.test_attributes import saved, watched
from tests.optim_wrapper.test_extras import same


def of_one_tensor() -> Any:
    zero = torch.zeros(2)
    return {"h": zero, "c": zero, "all": [zero] * 3}


def of_one_list() -> Any:
    inner: list[float] = [0.0]
    return {"rows": [inner] * 3}


def of_one_dict() -> Any:
    inner = {"sum": torch.zeros(1)}
    return {"rows": [inner, inner], "again": inner}


def of_one_array() -> Any:
    zero = np.zeros(3)
    return {"a": zero, "b": [zero, zero[1:]]}


def of_one_array_and_a_tensor_over_it() -> Any:
    zero = np.zeros(3)
    return {"a": zero, "b": torch.from_numpy(zero)}


def of_a_tensor_and_a_view() -> Any:
    zero = torch.zeros(2, 2)
    return {"row": zero[1], "all": zero, "column": zero[:, 0]}


def of_one_set_and_bytearray() -> Any:
    numbers, memory = {0}, bytearray(2)
    return {"sets": [numbers, numbers], "memory": [memory, memory]}


def of_one_generator() -> Any:
    draws = torch.Generator()
    return {"draws": [draws, draws]}


def apart(value: Any, count: list[float]) -> Any:
    """The same, with other values at each place and nothing that is one thing at two."""
    count[0] += 1
    number = count[0]
    match value:
        case dict():
            return {key: apart(item, count) for key, item in value.items()}
        case list():
            return [apart(item, count) for item in value]
        case torch.Tensor():
            return torch.full_like(value, number)
        case np.ndarray():
            return np.full_like(value, number)
        case set():
            return {number}
        case bytearray():
            return bytearray([int(number), 0])
        case torch.Generator():
            return torch.Generator().manual_seed(int(number))
    return number


MADE = [
    of_one_tensor, of_one_list, of_one_dict, of_one_array, of_one_array_and_a_tensor_over_it, of_a_tensor_and_a_view,
    of_one_set_and_bytearray, of_one_generator,
]  # fmt: skip


def told(value: Any) -> Any:
    """What can be compared."""
    match value:
        case dict():
            return {key: told(item) for key, item in value.items()}
        case list():
            return [*map(told, value)]
        case np.ndarray():
            return value.tolist()
        case torch.Generator():
            return value.get_state()
    return value


@pytest.mark.parametrize("make", MADE)
def test_extras_that_are_one_thing_at_two_places_are_two_where_they_were(make: Callable[[], Any]) -> None:
    of_the_run, here = apart(make(), [0]), make()
    extras = Extras({"mine": of_the_run})
    packed = json.loads(json.dumps(pack(pack_inline(extras, extras.first()).to_json())))
    restore_inline(Extras({"mine": here}), InlineExtras.read(packed, "box"))
    assert same(told(here), told(of_the_run))


@pytest.mark.parametrize("make", MADE[:-1])
def test_attributes_that_are_one_thing_at_two_places_are_two_where_they_were(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generators, "Beyond", lambda walk, roots: Walk({}, {}))
    net, again = nn.Linear(1, 1), nn.Linear(1, 1)
    net.mine, again.mine = make(), make()
    watch, new = watched(net), watched(again)
    net.mine = apart(net.mine, [0])  # type: ignore[arg-type]
    watch.look()
    assert new.put(saved(watch)) == []
    assert same(told(again.mine), told(net.mine))


def test_what_is_one_thing_and_was_one_stays_one() -> None:
    run, here = of_a_tensor_and_a_view(), of_a_tensor_and_a_view()
    run["all"] += torch.arange(4).view(2, 2)
    row, whole = here["row"], here["all"]
    Overwriting().values(here, {name: one.clone() for name, one in run.items()})
    assert (here["row"] is row, here["all"] is whole) == (True, True)
    whole[1, 0] = 7
    assert (float(row[0]), float(here["column"][1])) == (7, 7)


def test_extras_do_not_write_into_the_weights() -> None:
    """`best = model.state_dict()` before the loop, and a copy of it later on."""
    net = nn.Linear(1, 1)
    here = {"best": net.weight.detach(), "bias": net.bias.detach()}
    weight, bias = net.weight.detach().clone(), here["bias"]
    saved = {"best": weight + 1, "bias": bias.clone()}
    overwriting = Overwriting(net.parameters())
    overwriting.values(here, saved)
    assert (net.weight.equal(weight), here["best"].equal(weight + 1), here["bias"] is bias) == (True, True, True)


class Item(NamedTuple):
    state: torch.Tensor
    after: torch.Tensor


def replay(states: list[torch.Tensor]) -> Any:
    """Pairs of what was and what came then: the second of one is the first of the next."""
    pairs = [(one, {"after": other}) for one, other in itertools.pairwise(states)]
    return {
        "pairs": deque(pairs, 9),
        "items": [Item(*two) for two in itertools.pairwise(states)],
        "lists": [states, states],
    }


@pytest.mark.parametrize("live", [0, 3])
def test_a_tensor_that_an_attribute_holds_twice_is_one_again(live: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "Beyond", lambda walk, roots: Walk({}, {}))
    net, again = nn.Linear(1, 1), nn.Linear(1, 1)
    rows = torch.arange(12.0).view(4, 3)
    net.mine, again.mine = None, replay([torch.zeros(3) for _ in range(live)]) if live else None
    watch, new = watched(net), watched(again)
    states = [rows[at].clone() for at in range(3)]
    net.mine = replay(states)  # type: ignore[assignment]
    watch.look()
    assert new.put(saved(watch)) == []
    here: Any = again.mine
    assert here["pairs"][0][1]["after"] is here["pairs"][1][0] is here["items"][0].after is here["lists"][0][1]
    assert here["lists"][0] is here["lists"][1]
    assert [one.tolist() for one in here["lists"][0]] == [one.tolist() for one in states]
    assert here["pairs"].maxlen == 9


def test_rows_of_one_tensor_are_not_taken_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "Beyond", lambda walk, roots: Walk({}, {}))
    net, again = nn.Linear(1, 1), nn.Linear(1, 1)
    net.mine, again.mine = [], []  # type: ignore[assignment]
    watch, new = watched(net), watched(again)
    rows = torch.arange(6.0).view(2, 3)
    net.mine = [rows[1], rows[0], rows[1]]  # type: ignore[assignment]
    watch.look()
    golden.says(new.put(saved(watch)))
    assert again.mine == []


def shrunk() -> set[int]:
    """In a table as large as it was with more items, so that its order is another than that of a new set."""
    numbers = {*range(200)}
    for one in {*range(200)} - {3, 64, 130}:
        numbers.discard(one)
    return numbers


def test_the_order_of_sets_comes_back_or_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "Beyond", lambda walk, roots: Walk({}, {}))
    net, again = nn.Linear(1, 1), nn.Linear(1, 1)
    net.mine, again.mine = set(), {*range(100)}  # type: ignore[assignment]
    watch, new = watched(net), watched(again)
    net.mine.update([8, 0])  # type: ignore[operator]
    assert new.put(saved(watch_again(watch))) == []
    assert [*again.mine] == [8, 0]  # type: ignore[arg-type]
    assert watch.ledger.reasons == ()
    net.mine = shrunk()  # type: ignore[assignment]
    watch_again(watch).document()
    mine: dict[str, Any] = {"pool": [{8, 0}]}
    extras = Extras({"mine": mine})
    first = extras.first()
    assert extras.ledger.reasons == ()
    packed = json.loads(json.dumps(pack(pack_inline(extras, first).to_json())))
    here: dict[str, Any] = {"pool": [{*range(100)}]}
    restore_inline(Extras({"mine": here}), InlineExtras.read(packed, "box"))
    assert [*here["pool"][0]] == [8, 0]
    mine["pool"][0] = shrunk()
    extras.ended(first)
    golden.says([*map(str, watch.ledger.reasons), *map(str, extras.ledger.reasons)])


def watch_again(watch: Any) -> Any:
    watch.look()
    return watch
