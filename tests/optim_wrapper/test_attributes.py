"""Plain values in attributes of the model and the optimizers: what has moved is told, stored, and put back in place."""

from __future__ import annotations

import array
import dis
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lastwords.checkpoint.meta import StepDocument
from lastwords.checkpoint.storable import Place
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.state import attributes, generators, object_walk, running
from lastwords.optim_wrapper.state.attributes import Attributes, SavedValues, differing, of_job, saved_in
from lastwords.optim_wrapper.state.object_walk import Walk
from lastwords.optim_wrapper.state.state_view import UnitView
from tests import golden
from tests.ledgers import told
from tests.traceable import Eighth


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the random generators that tests have."""
    monkeypatch.setattr(generators, "Beyond", lambda walk, roots: Walk({}, {}))


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Meter:
    def __init__(self) -> None:
        self.total, self.seen = 0.0, [1, 2]


class Net(nn.Module):
    """Of each kind one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
        self.calls = 0
        self.rate: float | None = None
        self.queue = torch.zeros(3)
        self.table: dict[Any, Any] = {}
        self.recent: deque[float] = deque([0.5], maxlen=3)
        self.meter = Meter()
        self.done: set[int] = set()
        self.array = np.zeros(2)
        self.view = self.layer[0].weight
        self.both = [self.meter, self.meter]
        self.rule = lambda x: x
        self.gone_soon = 1
        self.by_id: dict[int, int] = {}


def watched(net: nn.Module) -> Attributes:
    watch = Attributes({"model": net}, lambda: {f"parameter {name}": one for name, one in net.named_parameters()})
    watch.begin()
    return watch


def move(net: Any) -> None:
    """Everything, in place where that is usual."""
    net.calls += 1
    net.rate = float("nan")
    net.queue[1] = 2
    net.table[2, 2] = torch.full((2,), -0.0)
    net.table["w"] = net.layer[0].weight
    net.recent.append(0.25)
    net.meter.total += 0.5
    net.meter.seen.append(3)
    net.by_id[id(net.layer[0].weight)] = net.layer[0].bias.data_ptr()
    net.by_id[id(net.meter)] = 1 << 40
    net.done.add(4)
    net.array[0] = 7
    net.layer[1].p = 0.3
    net.train(False)
    del net.gone_soon
    net.come = OrderedDict(a=(1, True))


def everything(watch: Attributes) -> SavedValues:
    """As it is read back."""
    return saved_in(StepDocument(**watch.document()), "x")


def saved(watch: Attributes) -> Any:
    """The values alone."""
    return everything(watch).values


def test_what_has_moved_is_put_back_into_the_very_objects() -> None:
    net, again = Net(), Net()
    watch = watched(net)
    move(net)
    watch.look()
    queue, seen, table = again.queue, again.meter.seen, again.table
    new = watched(again)
    assert new.put(saved(watch)) == []
    assert (again.calls, str(again.rate), again.queue.tolist()) == (1, "nan", [0, 2, 0])
    assert list(again.table) == [(2, 2), "w"]
    assert again.table["w"] is again.layer[0].weight
    assert again.table[2, 2].signbit().all()
    assert (again.recent, again.recent.maxlen, again.done, again.array.tolist()) == (deque([0.5, 0.25]), 3, {4}, [7, 0])
    assert (again.meter.total, again.meter.seen, again.layer[1].p) == (0.5, [1, 2, 3], 0.3)
    assert not any(module.training for module in again.modules())
    assert again.by_id == {id(again.layer[0].weight): again.layer[0].bias.data_ptr(), id(again.meter): 1 << 40}
    assert again.queue is queue
    assert again.meter.seen is seen
    assert again.table is table
    assert not hasattr(again, "gone_soon")
    assert again.come == OrderedDict(a=(1, True))  # type: ignore[comparison-overlap]
    assert saved(new).keys() == saved(watch).keys(), "what has moved once is state for good"


def test_what_has_not_moved_is_no_state_and_a_value_that_only_looks_alike_has_moved() -> None:
    net = Net()
    net.zero, net.flag = 0.0, 1
    watch = watched(net)
    watch.look()
    assert watch.document() == {}
    with torch.no_grad():
        net.view += 1  # a parameter, which is saved as such
    watch.look()
    assert watch.document() == {}
    net.zero, net.flag = -0.0, True
    watch.look()
    assert saved(watch).keys() == {"model"}
    assert saved(watch)["model"].keys() == {"zero", "flag"}


def test_what_has_moved_is_followed_from_step_to_step_without_a_look() -> None:
    net = Net()
    watch = watched(net)
    net.both.append(Meter())
    watch.look()
    before = watch.document()
    net.both[2].total = 3.0
    assert differing(before, watch.document()) == "model.both[2].total"
    net.calls = 5
    assert watch.unseen() == ["model.calls"]
    assert "calls" not in saved(watch)["model"]


def test_what_is_set_aside_is_no_state() -> None:
    """What telling a sampler its epoch sets, in whatever attributes."""
    meter = Meter()
    watch = Attributes({}, dict)
    watch.know(meter)
    watch.begin()
    for epoch in range(3):
        with watch.aside():
            meter.total, meter.seen = float(epoch), []
            assert watch.unseen() == [], "an incident may come in this moment"
        watch.look()
        assert watch.document() == {}
        assert watch.unseen() == []
    meter.seen.append(1)  # which the loop does, in this epoch and in the next
    with watch.aside():
        meter.total = 8.0
        assert watch.unseen() == ["loader.seen"], "it had moved before"
    watch.look()
    with watch.aside():
        meter.total, meter.seen = 9.0, [7]
    assert saved(watch)["loader"].keys() == {"seen"}
    assert saved(watch)["loader"]["seen"][0] == {"plain": [7]}


def test_what_is_set_aside_while_an_incident_looks_is_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    watch = Attributes({}, dict)
    watch.know(meter)
    watch.begin()
    walked = watch._new_walk
    monkeypatch.setattr(watch, "_new_walk", lambda: (walked(), set_aside())[0])

    def set_aside() -> None:
        with watch.aside():
            meter.total += 1.0

    assert watch.unseen() == []
    meter.seen.append(1)
    assert watch.unseen() == ["loader.seen"]
    meter.total = 7.0
    meter.extra = 1
    assert watch.unseen() == ["loader.total", "loader.seen", "loader.extra"], "they had moved before it was set"
    monkeypatch.undo()
    with watch.aside():
        assert watch.unseen() == ["loader.seen", "loader.extra"]


def test_a_function_that_is_assigned_is_no_state_and_objects_for_keys_are_left_where_they_are() -> None:
    net = Net()
    net.lazy, net.by_meter = None, {net.meter: 1}
    watch = watched(net)
    net.lazy = move
    watch.look()
    assert (watch.moved, watch.document(), watch.unseen()) == (set(), {}, [])
    net.by_meter[Meter()] = 2
    watch.look()
    assert watch.document() == {}
    assert "model.by_meter" in told(watch)[0]


def test_what_is_there_now_can_be_put_back() -> None:
    net = Net()
    watch = watched(net)
    move(net)
    watch.look()
    before, again = saved(watch), Net()
    new = watched(again)
    as_constructed = new.now(before)
    new.put(before)
    assert again.calls == 1
    as_constructed()
    assert (again.calls, again.rate, again.table, again.layer[1].p, hasattr(again, "come")) == (0, None, {}, 0.1, False)


def test_an_object_that_was_made_meanwhile_is_told_once_where_it_is_missing() -> None:
    net, again = Net(), Net()
    watch = watched(net)
    net.both.append(Meter())
    watch.look()
    reasons = watched(again).put(saved(watch))
    assert [reason.partition(" held ")[0] for reason in reasons] == ["model.both"]
    assert len(again.both) == 2
    assert watched(nn.Linear(2, 2)).put({"model.both[2]": saved(watch)["model.both[2]"]})


def test_what_is_too_large_for_a_document_is_told_once_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "EACH_BYTES_MAX", 8)
    net = Net()
    watch = watched(net)
    watch.look()
    net.queue += 1
    net.calls += 1
    watch.look()
    for _ in range(2):
        assert saved(watch)["model"].keys() == {"calls"}
    (reason,) = told(watch)
    assert "model.queue" in reason


def test_what_is_set_on_a_parameter_is_an_attribute_too() -> None:
    net, again = Net(), Net()
    for one in (net, again):
        one.layer[0].bias.score, one.layer[0].bias.seen = torch.zeros(2), 0
    watch, bias = watched(net), net.layer[0].bias
    bias.score += 2
    bias.seen = 5
    bias._torchs = 1
    watch.look()
    assert watch.moved == {"parameter layer.0.bias.score", "parameter layer.0.bias.seen"}
    assert watched(again).put(saved(watch)) == []
    assert (again.layer[0].bias.score.tolist(), again.layer[0].bias.seen) == ([2, 2], 5)


def numbers_of(sample: str) -> Any:
    return [[0, 0.0, sample] for _ in range(2000)]


@pytest.mark.parametrize(("many", "change"), [
    (lambda: np.zeros((1 << 14, 4)), lambda table: table[7].__setitem__(3, 1.0)),
    (lambda: [0.0] * 2000, lambda losses: losses.__setitem__(1001, -0.0)),
    (lambda: dict.fromkeys(range(2000), 1), lambda counts: counts.update({1001: 1.0})),
    (lambda: numbers_of("a"), lambda every: every[1001].__setitem__(1, 1.0)),
    (lambda: [Meter() for _ in range(2000)], lambda every: setattr(every[1001], "total", 1.0)),
    (lambda: [torch.zeros(1) for _ in range(2000)], lambda every: every[1001].add_(1)),
    (lambda: deque([np.zeros(1) for _ in range(2000)]), lambda every: every[1001].__iadd__(1)),
    (lambda: {*range(2000)}, lambda left: left.symmetric_difference_update({1001, 2001})),
])  # fmt: skip
def test_one_change_among_many_is_seen(many: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    net: Any = nn.Linear(1, 1)
    net.many = many()
    watch = watched(net)
    watch.look()
    assert not watch.moved
    change(net.many)
    watch.look()
    assert watch.moved == {"model.many"}
    assert not saved(watch)
    (reason,) = told(watch)
    assert "model.many" in reason


def test_where_there_is_too_much_to_compare_all_of_it_some_of_each_column_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_walk, "WHOLE_BYTES_MAX", 1 << 10)
    for column in range(4):
        net: Any = nn.Linear(1, 1)
        net.table = np.zeros((1 << 14, 4))
        net.text = ["a" * 64] * 2000
        watch = watched(net)
        net.table[:, column] = 1.0
        watch.look()
        assert watch.moved == {"model.table"}


WARM, COLD = array.array("d", [1.0]), array.array("d", [2.0])


def test_what_cannot_be_stored_is_told_once_and_where_it_is_something_else_on_a_resume() -> None:
    net, again = Net(), Net()
    for one in (net, again):
        one.mode, one.pair, one.view_of = WARM, [WARM, 0], one.layer[0].weight.data[:1]
    watch = watched(net)
    net.mode, net.pair, net.long = COLD, [COLD, 1], [0] * 2000
    with torch.no_grad():
        net.layer[0].weight += 1
    for _ in range(3):
        net.long.append(0)
        watch.look()
        assert saved(watch)["model"].keys() == {"pair"}
    golden.says(told(watch))
    golden.says(watched(again).put(saved(watch)))
    again.pair = [COLD, 0]
    assert watched(again).put(saved(watch)) == []
    assert again.pair == [COLD, 1]


def odd(net: Any) -> Any:
    net.adjacency = torch.eye(2).to_sparse()
    net.codes = Eighth(torch.ones(2, dtype=torch.int8), torch.tensor(0.5))
    net.levels = quantized(1.0)
    return net


def test_sparse_tensors_and_those_made_of_others_are_state_and_no_tensor_moves_unseen() -> None:
    net, again = odd(Net()), odd(Net())
    watch = watched(net)
    watch.look()
    assert watch.document() == {}
    net.adjacency._values().mul_(2)
    net.codes.scale.mul_(4)
    watch.look()
    new = watched(again)
    assert new.put(saved(watch)) == []
    assert again.adjacency.to_dense().tolist() == [[2, 0], [0, 2]]
    assert again.codes.whole().tolist() == [2, 2]
    net.levels.copy_(torch.zeros(2))
    watch.look()
    assert saved(watch)["model"].keys() == {"adjacency", "codes"}
    golden.says(told(watch))


class Graph(nn.Module):
    """A buffer whose bytes are not its elements."""

    def __init__(self, kind: str = "sparse") -> None:
        super().__init__()
        self.register_buffer("plain", torch.ones(2))
        made = torch.eye(2).to_sparse_csr() if kind == "sparse" else quantized(1.0)
        self.register_buffer("adjacency", made)


def quantized(value: float) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.full((2,), value), 0.1, 0, torch.quint8)


def watched_graph(net: Any) -> Attributes:
    view = UnitView(nn.Sequential(net, layer := nn.Linear(2, 2)), torch.optim.SGD(layer.parameters(), 0.1))
    assert [*view.names().buffers] == ["0.plain"]
    watch = of_job(view, [], Ledger(), {}, {})
    watch.begin()
    return watch


@pytest.mark.parametrize("kind", ["sparse", "quantized"])
def test_a_buffer_whose_bytes_are_not_its_elements_is_a_value_of_its_module(kind: str) -> None:
    net: Any = Graph(kind)
    again: Any = Graph(kind)
    watch, new = watched_graph(net), watched_graph(again)
    watch.look()
    assert watch.document() == {}, "its constructor makes it again"
    if kind == "sparse":
        net.adjacency.values().mul_(3)
        watch.look()
        assert new.put(saved(watch)) == []
        assert again.adjacency.to_dense().tolist() == [[3, 0], [0, 3]]
    else:
        net.adjacency = quantized(2.0)
        watch.look()
        golden.says(new.put(saved(watch)))
    assert again.plain is dict(again.named_buffers())["plain"]


def test_tensors_that_the_loop_never_changes_are_compared_with_those_of_the_saved_run() -> None:
    def made(anchor: float, large: float = 1.0) -> Any:
        net: Any = Net()
        net.anchor, net.large = [torch.full((2,), anchor)], torch.ones(1 << 20)
        net.large[5] = large
        net.numbers, net.made_at = np.arange(1 << 20), anchor  # no tensor: a process may well say another one
        return net

    net = made(1.0)
    watch = watched(net)
    constants = watch.constants()
    assert {"model.anchor", "model.large", "model.numbers", "model.queue"} <= constants.keys()
    assert "model.made_at" not in constants
    assert watched(made(1.0)).made_otherwise(constants, {}) == []
    golden.says(watched(made(2.0)).made_otherwise(constants, {}))
    restored: Any = {"model": {"anchor": ()}}
    assert watched(made(2.0)).made_otherwise(constants, restored) == []
    assert len(watched(made(2.0, 3.0)).made_otherwise(constants, {})) == 2
    net.anchor[0] += 1
    watch.look()
    assert "model.anchor" not in watch.constants(), "it is state now"


def test_an_object_that_cannot_be_looked_at_costs_exactness_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    watch = watched(net)
    net.calls = 1
    watch.look()
    monkeypatch.setattr(object_walk, "attributes_of", lambda one: 1 / 0)
    assert "ZeroDivisionError" in watch.unseen()[0]
    watch.look()
    watch.look()
    assert watch.unseen() == []
    assert all("ZeroDivisionError" in reason for reason in told(watch))


def test_classes_of_installed_packages_are_left_alone_but_for_those_of_torchs_kinds() -> None:
    class Frames(torch.utils.data.Dataset[int]):
        def __init__(self) -> None:
            self.cache = logging.LogRecord("x", 1, "", 1, "", (), None)
            self.mine = Meter()

    walk = Walk({"loader": torch.utils.data.DataLoader(Frames(), 2)}, {})
    assert walk.objects.keys() >= {"loader", "loader.dataset", "loader.dataset.mine", "loader.sampler"}
    assert walk.cells["loader.dataset", "cache"].told == Place("", "logging.LogRecord")


def test_what_is_known_by_the_id_of_an_object_that_is_met_later_is_known_by_its_path() -> None:
    net = torch.nn.Module()
    net.names = {}
    net.blocks = torch.nn.ModuleList([torch.nn.ModuleList([torch.nn.Identity()])])
    net.names = {id(net.blocks[0][0]): "inner", 1 << 40: "a number"}
    walk = Walk({"model": net}, {})
    assert walk.cells["model", "names"].told == {Place("model.blocks.0.0", "id"): "inner", 1 << 40: "a number"}


def test_the_walk_ends_somewhere_and_runs_nobodys_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loud:
        def __init__(self) -> None:
            self.inner = self

        def __getattribute__(self, name: str) -> Any:
            if name in ("inner", "hello"):
                raise AssertionError(name)
            return super().__getattribute__(name)

        def __eq__(self, other: object) -> bool:
            raise AssertionError

        __hash__ = None  # type: ignore[assignment]

    net = Net()
    net.loud = Loud()
    walk = Walk({"model": net}, {})
    assert walk.cells["model.loud", "inner"].told.path == "model.loud"
    assert not walk.ended_at
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    net.deep, net.long = deep, list(range(2000))
    assert type(Walk({"model": net}, {}).cells["model", "long"].told) is Place
    monkeypatch.setattr(object_walk, "OBJECTS_MAX", 3)
    assert Walk({"model": net}, {}).ended_at


class Scaled(nn.Linear):
    """With values of its own, as a class that is sharded may have."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.average, self._seen = 1.0, 0


LONG = "def f(self):\n" + "".join(f"    self.a{n} = self.b{n}\n" for n in range(300)) + "    del self.gone\n"


def test_what_code_assigns_to_is_what_dis_says_of_it() -> None:
    names: dict[str, Any] = {}
    exec(LONG, names)
    ddp = [one.__code__ for one in vars(DistributedDataParallel).values() if hasattr(one, "__code__")]
    for code in (*ddp, names["f"].__code__):
        said = [one.argval for one in dis.get_instructions(code) if one.opname == "STORE_ATTR"]
        assert [*running.stored_by(code)] == said
    assert len(said) == 300


@pytest.mark.parametrize(
    "wrap", [DistributedDataParallel, fully_shard, checkpoint_wrapper], ids=lambda one: one.__name__
)
def test_what_hangs_on_a_wrapper_of_torchs_is_state_too(wrap: Callable[[nn.Module], Any], group: None) -> None:
    """DDP's own attributes are not, nor what FSDP2 makes of a module: only what the user has set."""
    model: Any = wrap(Scaled())
    inner = getattr(model, "module", model)
    watch = watched(model)
    for _ in range(2):
        model(torch.randn(1, 2)).sum().backward()
    watch.look()
    assert watch.moved == set()
    model.average, inner._seen, model.best = 0.5, 3, 2.0
    watch.look()
    found = saved_in(StepDocument(**watch.document()), "x")
    model.average, inner._seen, model.best = 1.0, 0, 0.0
    assert watch.restore(found) == []
    assert (model.average, inner._seen, model.best) == (0.5, 3, 2.0)
