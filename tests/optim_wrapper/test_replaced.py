"""Values and random generators of objects that the loop replaces, and of ordinary objects of all kinds."""

from __future__ import annotations

import argparse
import array
import ctypes
import dataclasses
import enum
import itertools
import multiprocessing
import queue
import threading
import uuid
import weakref
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from lastwords.checkpoint.meta import StepDocument
from lastwords.errors import FormatError
from lastwords.optim_wrapper.state import attributes, object_walk, running
from lastwords.optim_wrapper.state.attributes import NOTHING, Attributes, SavedValues, saved_in
from lastwords.optim_wrapper.state.object_walk import Walk
from tests import golden
from tests.ledgers import told
from tests.optim_wrapper import test_generators
from tests.optim_wrapper.test_attributes import everything


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    test_generators.alone(monkeypatch)


class Meter:
    def __init__(self, start: int = 0) -> None:
        self.count = start


class Noise:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)


@dataclasses.dataclass(frozen=True)
class State:
    step: int = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    step: int = 0
    seen: list[int] = dataclasses.field(default_factory=list)


class Pair(NamedTuple):
    step: int
    seen: Any


class Buffer(list[int]):
    """A list with a name."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "b"

    def __iter__(self) -> Any:
        raise AssertionError("the user's code was run")


class Recent(OrderedDict[str, int]):
    """A cache."""


class Table(dict[str, int]):
    """A dict of one's own."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def made(**attributes: Any) -> Any:
    net = Net()
    for name, value in attributes.items():
        setattr(net, name, value)
    return net


def watched(net: nn.Module) -> Attributes:
    watch = Attributes({"model": net}, lambda: {f"parameter {name}": one for name, one in net.named_parameters()})
    watch.begin()
    return watch


def resumed(watch: Attributes, net: Any) -> Any:
    """A new process in which this is what the constructors have made."""
    watch.end_step()
    saved = everything(watch)
    assert watched(net).restore(saved) == []
    return net


def replaced_state(net: Any, step: int) -> int:
    net.state = dataclasses.replace(net.state, step=step)
    return step


def replaced_meter(net: Any, step: int) -> int:
    net.meter = Meter()
    net.meter.count = step
    return step


def rotated(net: Any, step: int) -> int:
    net.many = [*net.many[1:], Meter(step)]
    return step


ALL: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any], Callable[[Any], Any]]] = {
    "a dataclass": (lambda: made(state=State()), replaced_state, lambda net: net.state.step),
    "a meter": (lambda: made(meter=Meter()), replaced_meter, lambda net: net.meter.count),
    "objects in a list": (lambda: made(many=[Meter(), Meter()]), rotated, lambda net: net.many[-1].count),
}


@pytest.mark.parametrize("kind", ALL)
def test_an_object_that_is_replaced_between_two_looks_is_saved_as_it_is_now(kind: str) -> None:
    make, replace, read = ALL[kind]
    net = make()
    watch = watched(net)
    for step in range(1, 10):
        replace(net, step)
        if step <= 2:
            watch.look()
        assert read(resumed(watch, make())) == step, "the newest look was at step 2"


def test_a_generator_whose_holder_is_replaced_is_the_one_that_lies_there_now() -> None:
    for make, replace in (
        (lambda: made(noise=Noise(1)), lambda net, seed: setattr(net, "noise", Noise(seed))),
        (lambda: made(rngs=[1, np.random.default_rng(1)]),
         lambda net, seed: setattr(net, "rngs", [1, np.random.default_rng(seed)])),
    ):  # fmt: skip
        net = make()  # type: ignore[no-untyped-call]
        watch = watched(net)
        draw = lambda one: float((one.noise.rng if hasattr(one, "noise") else one.rngs[1]).random())  # noqa: E731
        for seed in (5, 6):
            replace(net, seed)  # type: ignore[no-untyped-call]
            draw(net)
            again = resumed(watch, make())  # type: ignore[no-untyped-call]
            assert draw(again) == draw(net)


def test_a_generator_in_a_list_that_a_variable_gets_anew_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_walk, "user_frames", running.user_frames)
    rngs = [np.random.default_rng(1)]
    watch = Attributes({}, dict)
    watch.begin()
    (path,) = [path for path in watch.generators.names if "test_a_generator_in_a_list" in path]
    rngs = [np.random.default_rng(2)]
    rngs[0].random()
    watch.end_step()
    assert watch.generators.states()[path] == test_generators.state_of(rngs[0]).read()  # type: ignore[union-attr]


def test_an_array_is_written_into_and_an_alias_stays_one() -> None:
    net, weights = made(), np.zeros(3)
    net.weights, net.seen, net.also = np.zeros(3), [], None
    again = made(weights=weights, seen=[], also=None)
    watch = watched(net)
    net.weights[1] = 4
    net.also = net.seen
    net.seen.append(1)
    watch.look()
    resumed(watch, again)
    assert weights.tolist() == [0, 4, 0]
    assert again.also is again.seen == [1]
    net.weights, net.two, net.one = net.weights * 2, [net.seen, net.seen], net.seen
    watch.look()
    again = resumed(watch, made(weights=weights, seen=[], also=None, two=[[], []]))
    assert again.two[0] is again.two[1] is again.seen


def test_what_belongs_to_something_else_as_well_is_not_written_by_the_way() -> None:
    """A constructor's alias or view of a parameter, which the loop has replaced by values of its own."""

    def build() -> Any:
        net = made()
        net.anchor, net.old = net.layer.weight.detach(), [*net.layer.parameters()]
        net.array, net.mean = net.layer.bias.detach().numpy(), torch.zeros(4)
        net.start, net.head, net.first, net.wide = net.mean, net.mean[:2], [], torch.zeros(1).expand(3)
        net.second = net.first
        return net

    net, again = build(), build()
    watch = watched(net)
    net.anchor, net.old = net.anchor.clone() + 1, [one.detach().clone() + 1 for one in net.old]
    net.array, net.mean, net.head = net.array + 1, net.mean + 1, net.head + 2
    net.second, net.wide = [3], net.wide + 1
    watch.look()
    before = [one.detach().clone() for one in again.parameters()]
    resumed(watch, again)
    assert all(map(torch.equal, before, again.parameters()))
    assert torch.equal(again.anchor, net.anchor)
    assert all(map(torch.equal, again.old, net.old))
    assert again.array.tolist() == net.array.tolist()
    for one in (net, again):
        assert [one.mean.tolist(), one.start.tolist(), one.head.tolist()] == [[1] * 4, [0] * 4, [2] * 2]
    assert (again.first, again.second, again.wide.tolist()) == ([], [3], [1] * 3)


def test_an_alias_of_a_tensor_stays_one_and_a_view_of_a_parameter_is_no_value() -> None:
    net, again = made(), made()
    for one in (net, again):
        one.mean = one.also = torch.zeros(2)
        one.view, one.tensor_view = one.layer.bias.detach().numpy(), one.layer.bias.detach()
    watch = watched(net)
    with torch.no_grad():
        net.mean += 1
        net.layer.bias += 1
    watch.look()
    assert everything(watch).values["model"].keys() == {"mean"}
    mean = again.mean
    resumed(watch, again)
    assert again.mean is again.also is mean
    assert mean.tolist() == [1, 1]


def test_an_ordered_dict_of_ones_own_keeps_its_order() -> None:
    net, again = made(it=Recent(a=1, b=2)), made(it=Recent(a=1, b=2))
    watch = watched(net)
    net.it.move_to_end("a")
    net.it["c"] = 3
    watch.look()
    assert [*resumed(watch, again).it.items()] == [("b", 2), ("a", 1), ("c", 3)]


@pytest.mark.parametrize(("kind", "make", "move"), [
    ("slots", lambda: Slotted(), lambda one: (setattr(one, "step", 3), one.seen.append(1))),
    ("namespace", lambda: SimpleNamespace(step=0), lambda one: setattr(one, "step", 3)),
    ("arguments", lambda: argparse.Namespace(step=0), lambda one: setattr(one, "step", 3)),
    ("list", Buffer, lambda one: one.append(3)),
    ("dict", Table, lambda one: one.update(a=3)),
    ("factory", lambda: defaultdict(lambda: 7), lambda one: one.update(a=3)),
    ("numpy keys", dict, lambda one: one.update({np.int64(1): 3})),
])  # fmt: skip
def test_ordinary_objects_are_looked_into(kind: str, make: Any, move: Any) -> None:
    net, again = made(it=make()), made(it=make())
    watch = watched(net)
    move(net.it)
    watch.look()
    resumed(watch, again)
    assert type(again.it) is type(net.it)
    assert repr(again.it).partition(" at ")[0] == repr(net.it).partition(" at ")[0]
    assert kind != "factory" or again.it["b"] == 7


def test_named_tuples_are_values_of_their_class() -> None:
    net = made(pair=Pair(0, None), late=None)
    watch = watched(net)
    net.pair = net.late = net.pair._replace(step=2, seen=[torch.ones(2)])
    watch.look()
    again = resumed(watch, made(pair=Pair(0, None), late=None))
    assert (type(again.pair), again.pair.step, type(again.late)) == (Pair, 2, Pair)
    assert torch.equal(again.late.seen[0], torch.ones(2))


def test_what_is_told_by_less_than_its_content_is_seen_to_change() -> None:
    net = made(large=np.zeros(100_000), table=dict.fromkeys(range(2000), 0), recent=deque(range(2000), 2000))
    watch = watched(net)
    net.large[:] = 1
    net.table[3] = 1
    net.recent.append(1)
    watch.look()
    watch.document()
    assert [one.split()[2] for one in sorted(told(watch))] == ["model.large", "model.recent", "model.table"]


def test_of_a_large_container_no_code_of_its_items_runs() -> None:
    class Item:
        def __repr__(self) -> str:
            raise AssertionError

    net = made(table={Item(): Item() for _ in range(2000)}, row=[Item()] * 2000)
    watch = watched(net)
    net.table[0] = 0
    watch.look()
    watch.document()
    assert [one.split()[2] for one in told(watch)] == ["model.table"]


def test_items_of_large_containers_cost_nothing_and_documents_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_walk, "ALL_ITEMS_MAX", 5000)
    net = made(samples=list(range(300_000)), where={"at": 0})
    watch = watched(net)
    net.where["at"] = 3
    watch.look()
    for _ in range(6000):
        assert watch.document()
    assert resumed(watch, made(samples=[], where={"at": 0})).where == {"at": 3}
    net.many = [[0] * 900 for _ in range(9)]
    assert watched(net)._walk.ended_at == "model.many[6]"


def test_what_constructors_have_made_is_put_back_even_where_it_cannot_be_stored() -> None:
    for first in (torch.zeros(100_000), defaultdict(lambda: 0), 1 << 9000):
        net = made(it=first)
        stored = SavedValues({"model": {"it": ({"plain": None}, {})}}, {})
        watch = watched(net)
        as_constructed = watch.now(stored.values)
        watch.restore(stored)
        assert net.it is None
        as_constructed()
        assert net.it is first or net.it == first


def test_a_rank_lacks_only_what_has_moved_first_in_the_step_in_which_it_has_died() -> None:
    net = made(calls=0, best=0)
    watch = watched(net)
    watch.ended()
    net.best = 1
    watch.look()
    assert watch.moved_first(ended=False) == {"model.best"}
    watch.ended()
    assert watch.moved_first(ended=True) == {"model.best"}
    assert watch.moved_first(ended=False) == set()
    watch.ended()
    assert watch.moved_first(ended=True) == set()


class Proxy:
    """Runs code when it is asked for its class."""

    @property
    def __class__(self) -> Any:
        raise AssertionError("the user's code was run")


def test_files_and_locks_are_no_values_and_nobody_asks_an_object_for_its_class() -> None:
    net = made(file=None, lock=None, held=[Proxy()])
    watch = watched(net)
    with open(__file__) as net.file:
        net.lock = threading.Lock()
        watch.look()
        assert watch.document() == {}
    assert told(watch) == []


def test_a_traced_module_is_looked_at_like_any_other_and_one_odd_object_costs_itself_alone() -> None:
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(2))  # type: ignore[no-untyped-call]
    net = made(traced=traced, calls=0)
    watch = watched(net)
    net.calls = 1
    watch.look()
    assert everything(watch).values["model"].keys() == {"calls"}
    assert told(watch) == []


def test_objects_under_parameters_are_named_after_these() -> None:
    net = made()
    net.of = {net.layer.weight: Meter()}
    watch = watched(net)
    net.of[net.layer.weight].count = 2
    watch.look()
    again = made()
    again.of = {again.layer.weight: Meter()}
    resumed(watch, again)
    assert again.of[again.layer.weight].count == 2


class Loader(DataLoader[int]):
    """Counts for itself."""

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self._seen = 0


def test_private_attributes_of_a_loader_of_ones_own_are_looked_at() -> None:
    loader = Loader([1, 2])
    assert ("loader", "_seen") in Walk({"loader": loader}, {}).cells
    assert ("loader", "_iterator") not in Walk({"loader": loader}, {}).cells


def test_where_a_loader_is_in_itself_the_loop_knows() -> None:
    """Ray's keeps the iterator over torch's loader in an attribute."""

    def look(root: str, one: Any) -> list[str]:
        watch = Attributes({root: one}, dict)
        watch.begin()
        next(one.it)
        watch.look()
        watch.document()
        return told(watch)

    assert look("loader", SimpleNamespace(it=iter(DataLoader(SEVEN)))) == []  # type: ignore[arg-type]
    assert look("loader", SimpleNamespace(it=iter(SEVEN))) != []
    assert look("model", SimpleNamespace(it=iter(DataLoader(SEVEN)))) != []  # type: ignore[arg-type]


@pytest.mark.parametrize("document", [
    {"generators": {"a": 5}}, {"generators": {"a": ["k", 5]}}, {"generators": [1]}, {"generators": {"a": ["k", "?"]}},
])  # fmt: skip
def test_forged_generators_are_refused(document: Any) -> None:
    with pytest.raises(FormatError):
        saved_in(StepDocument(**document), "x")


def test_what_no_walk_gives_is_not_put_anywhere() -> None:
    net = made()
    for name in ("_modules", "_forward_hooks"):
        with golden.raises(FormatError):
            watched(net).put({"model": {name: ({"plain": 1}, {})}})
    assert watched(net).restore(NOTHING) == []


def test_what_a_look_after_a_steps_end_finds_may_have_moved_before_it_unless_there_was_a_look_at_that_end() -> None:
    net = made(calls=0, best=0)
    watch = watched(net)
    watch.end_step()
    net.calls = 1
    watch.ended()
    watch.document(look=True)
    assert watch.moved_since() == {"model.calls"}
    watch.end_step()
    watch.look()
    watch.ended()
    assert watch.moved_since() == set()
    net.best = 1
    watch.document(look=True)
    assert watch.moved_since() == set()


def test_a_slow_look_is_said_once_and_noted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lastwords")
    monkeypatch.setattr(attributes, "SLOW_S", -1.0)
    watch = watched(made())
    watch.look(beyond=True)
    watch.look()
    assert not watch.is_slow
    for _ in range(3):
        watch.look()
        assert watch.is_slow
    assert len(caplog.messages) == 1


class Part(enum.Enum):
    HEAD = 1
    TAIL = 2


class Bits(enum.Flag):
    LOW, HIGH = 1, 2


class Numbers:
    """An iterator of the user's own."""

    at = 0

    def __next__(self) -> int:
        self.at += 1
        return self.at


class Names(set[int]):
    """A set with a name."""


class Level(int):
    """A number with a name."""


def named(one: Any, name: int) -> Any:
    one.name = name
    return one


class Row(tuple[int, ...]):
    """A row with a name."""


class Rows(np.ndarray[Any, Any]):
    """As np.memmap is one."""


def filled(one: Any, *items: Any) -> Any:
    for item in items:
        one.put(item)
    return one


SEVEN, FIELDS = [*range(7)], [("loss", "f4"), ("seen", "i4")]
MOVING: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "generator": (lambda: (one for one in SEVEN), next),
    "generator of numbers": (lambda: (0.9**step for step in itertools.count()), next),
    "list": (lambda: iter(SEVEN), next),
    "count": (itertools.count, next),
    "cycle": (lambda: itertools.cycle(SEVEN), next),
    "zip": (lambda: zip(SEVEN, SEVEN, strict=True), next),
    "enumerate": (lambda: enumerate(SEVEN), next),
    "map": (lambda: map(str, SEVEN), next),
    "chain": (lambda: itertools.chain(SEVEN, SEVEN), next),
    "loader": (lambda: iter(DataLoader(SEVEN)), next),  # type: ignore[arg-type]
    "keys": (lambda: {Part: 0}, lambda one: one.update({Part: one[Part] + 1})),
    "array": (lambda: array.array("d", [0.0]), lambda one: one.append(1.0)),
    "ctypes": (lambda: ctypes.c_int(0), lambda one: setattr(one, "value", one.value + 1)),
    "fields": (lambda: np.zeros(3, FIELDS), lambda one: one["seen"].__setitem__(1, 5)),
    "record": (lambda: np.zeros(3, FIELDS).view(np.recarray), lambda one: one.seen.__setitem__(1, 5)),
    "array of objects": (lambda: np.array([[], None, 1.0], object), lambda one: one.__setitem__(2, 2.0)),
    "masked": (lambda: np.ma.zeros(3), lambda one: one.__setitem__(1, 5.0)),
    "mask": (lambda: np.ma.array([1.0, 2.0], mask=[True, False]), lambda one: one.mask.__setitem__(0, False)),
    "array of one's own": (lambda: np.zeros(3).view(Rows), lambda one: one.__setitem__(1, 5)),
    "queue": (queue.Queue, lambda one: one.put(1)),
    "queue by priority": (lambda: filled(queue.PriorityQueue(), 2), lambda one: one.put(1)),
    "weak keys": (lambda: weakref.WeakKeyDictionary({Part: 0}), lambda one: one.__setitem__(Part, 1)),
    "weak values": (lambda: weakref.WeakValueDictionary({0: Part}), lambda one: one.__setitem__(0, Bits)),
    "weak set": (lambda: weakref.WeakSet([Part]), lambda one: one.add(Bits)),
    "shared": (lambda: multiprocessing.Value("i", 0), lambda one: setattr(one, "value", one.value + 1)),
}


@pytest.mark.parametrize("kind", MOVING)
def test_what_cannot_be_stored_is_told_once_it_moves_and_not_before(kind: str) -> None:
    make, move = MOVING[kind]
    net = made(it=make())
    watch = watched(net)
    watch.look()
    assert watch.moved == (set() if kind != "cycle" else {"model.it"}), "a cycle does not show where it is"
    move(net.it)
    watch.look()
    assert watch.document() == {}
    assert [reason.partition(": ")[0] for reason in told(watch)] == ["the attribute model.it changes, and is not saved"]


@pytest.mark.parametrize("before", [Level(1), Row([1, 2])])
def test_a_value_of_ones_own_class_is_told_once_another_one_stands_there(before: Any) -> None:
    net = made(it=before)
    watch = watched(net)
    net.it = Level(1) if before == 1 else Row([1, 2])
    watch.look()
    assert told(watch) == []
    net.it = Level(2) if before == 1 else Row([1, 3])
    watch.look()
    watch.document()
    assert [reason.partition(": ")[0] for reason in told(watch)] == ["the attribute model.it changes, and is not saved"]


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "members for keys": (lambda: {Part.HEAD: [0]}, lambda one: one[Part.HEAD].append(1), dict),
    "beside flags": (lambda: [Bits.LOW | Bits.HIGH, 0], lambda one: one.__setitem__(1, 1), list),
    "a new member": (lambda: {Part.HEAD: 0}, lambda one: one.update({Part.TAIL: Part.TAIL}), dict),
    "iterator of one's own": (Numbers, next, lambda one: one.at),
    "ChainMap": (lambda: ChainMap({}, {}), lambda one: one.update(a=1), dict),
    "set of one's own": (Names, lambda one: one.add(1), set),
    "a number with attributes": (lambda: named(Level(1), 0), lambda one: named(one, 5), lambda one: one.name),
    "exact numbers": (lambda: [Decimal("1.0"), Fraction(1)],
                      lambda one: one.__setitem__(slice(None), [Decimal("1.90"), Fraction(9, 10)]), repr),
    "slices and ids": (lambda: [slice(0, 2), uuid.UUID(int=0)],
                       lambda one: one.__setitem__(slice(None), [slice(1, None, 3), uuid.UUID(int=7)]), repr),
    "UserDict": (UserDict, lambda one: one.update(a=1), dict),
    "scaler": (lambda: torch.amp.GradScaler("cpu"),
               lambda one: setattr(one, "_init_scale", 2.0), lambda one: one._init_scale),
    "scheduler": (lambda: StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 1),
                  lambda one: setattr(one, "last_epoch", 3), lambda one: one.last_epoch),
}  # fmt: skip


@pytest.mark.parametrize("kind", KEPT)
def test_objects_of_pythons_and_torchs_own_that_hang_on_a_module_are_state(kind: str) -> None:
    make, move, seen = KEPT[kind]
    net = made(it=make())
    watch = watched(net)
    move(net.it)
    watch.look()
    there = made(it=make())
    assert seen(there.it) != seen(net.it)
    assert seen(resumed(watch, there).it) == seen(net.it)
    assert told(watch) == []
