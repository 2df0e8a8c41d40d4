"""A unit's state goes out and comes back bit for bit, or is refused before anything has changed."""

from __future__ import annotations

import copy
import itertools
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.optimizer import Optimizer

from lastwords.checkpoint import layout
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.meta import UnitMeta
from lastwords.checkpoint.part import UnitState, write_part
from lastwords.checkpoint.storable import pack, unpack
from lastwords.errors import ConfigError, FormatError, MismatchError, NotAnOptimizerError
from lastwords.optim_wrapper.ddp.ddp_found import find_ddp, unwrap
from lastwords.optim_wrapper.joined_optimizer import JoinedOptimizer
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.resume.state_restore import RestorePlan
from lastwords.optim_wrapper.state.attributes import of_job
from lastwords.optim_wrapper.state.plain_values import PlainValues, copy_groups
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors import tensor_bytes
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.whole_copies import WholeCopies
from tests import golden

Stored = tuple[list[TensorSpec], dict[str, bytes], Any]


def store(state: UnitState) -> Stored:
    """What would be on disk."""
    contents = {}
    for spec, source in state.tensors:
        raw: Any = source() if callable(source) else source
        contents[spec.name] = bytes(raw)
        assert len(contents[spec.name]) == spec.nbytes
    return [spec for spec, _ in state.tensors], contents, UnitMeta.read(unpack(pack(state.meta.to_json())))


def restore(view: UnitView, stored: Stored) -> None:
    specs, contents, meta = stored
    by_name = {spec.name: spec for spec in specs}
    plan = RestorePlan(view, specs, meta)
    assert sorted(plan.tensor_names) == sorted(by_name)
    for name in plan.tensor_names:
        plan.into(by_name[name])[:] = contents[name]
    plan.commit()


class Net(nn.Module):
    """Tied weights, a frozen parameter, BatchNorm, persistent and other buffers, a scalar, odd strides."""

    scale: torch.Tensor
    mask: torch.Tensor
    cache: torch.Tensor | None

    def __init__(self, turned: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(4, 6).t(), requires_grad=turned)
        self.register_buffer("scale", torch.randn(3, dtype=torch.complex128))
        self.register_buffer("mask", torch.rand(4) > 0.5, persistent=False)
        self.register_buffer("cache", None, persistent=False)
        self.register_buffer("wide", torch.randn(1, 3).expand(4, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(tokens)) * self.temperature
        out: torch.Tensor = self.head(hidden) + self.turned.sum()
        return out


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    for k in range(steps):
        optimizer.zero_grad()
        model(torch.arange(6) % (k + 3)).square().mean().backward()
        optimizer.step()


def made(seed: int, make: Any = None, steps: int = 3) -> tuple[Net, Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = (make or (lambda ps: torch.optim.AdamW(ps, lr=0.05, weight_decay=0.1)))(model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def assert_same(left: tuple[nn.Module, Optimizer], right: tuple[nn.Module, Optimizer]) -> None:
    for kind in ("parameters", "buffers"):
        ours, theirs = dict(getattr(left[0], f"named_{kind}")()), dict(getattr(right[0], f"named_{kind}")())
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name].dtype == theirs[name].dtype
            assert torch.equal(ours[name], theirs[name]), name
    ours, theirs = left[1].state_dict(), right[1].state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, state in ours["state"].items():
        assert list(state) == list(theirs["state"][key])
        for name, value in state.items():
            other = theirs["state"][key][name]
            if isinstance(value, torch.Tensor):
                assert value.dtype == other.dtype
                assert torch.equal(value, other)
            elif isinstance(value, list):
                pairs = zip(value, other, strict=True)
                assert all(a is b or torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)
            else:
                assert value == other


# ------------------------------------------------------------------ out and back

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "AdamW amsgrad, tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.05), amsgrad=True, foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.002),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.002, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.005),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.05, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("used_before", [False, True])
def test_a_restored_run_goes_on_as_the_saved_one_with_every_optimizer(name: str, used_before: bool) -> None:
    saved = made(0, OPTIMIZERS[name])
    stored = store(UnitView(*saved).state())
    restored = made(1, OPTIMIZERS[name], steps=2 if used_before else 0)
    ids = [id(p) for p in restored[0].parameters()]
    restore(UnitView(*restored), stored)
    assert_same(restored, saved)
    train(*saved)
    train(*restored)
    assert_same(restored, saved)
    assert [id(p) for p in restored[0].parameters()] == ids


def test_state_that_is_nested_in_lists_comes_back_with_lbfgs() -> None:
    def run(seed: int, calls: int) -> tuple[Net, Optimizer]:
        torch.manual_seed(seed)
        model = Net(turned=False).eval()
        optimizer = torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], lr=0.1, max_iter=3)
        for _ in range(calls):
            lbfgs_step(model, optimizer)
        return model, optimizer

    def lbfgs_step(model: nn.Module, optimizer: Optimizer) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = model(torch.arange(6)).square().mean()
            loss.backward()
            return float(loss)

        optimizer.step(closure)

    saved, restored = run(0, 2), run(1, 0)
    restore(UnitView(*restored), store(UnitView(*saved).state()))
    assert_same(restored, saved)
    for model, optimizer in (saved, restored):
        lbfgs_step(model, optimizer)
    assert_same(restored, saved)


def test_contiguous_tensors_are_handed_out_without_a_copy_and_others_when_their_turn_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_bytes, "COPIED_BYTES_MAX", 0)
    model, optimizer = made(0)
    sources = {spec.name: source for spec, source in UnitView(model, optimizer).state().tensors}
    live = sources["unit/replicated/model/embedding.weight"]
    assert isinstance(live, memoryview)
    with torch.no_grad():
        model.embedding.weight.fill_(2.0)
    assert bytes(live[:4]) == b"\0\0\0@"
    assert callable(sources["unit/replicated/model/turned"])
    assert callable(sources["unit/replicated/buffer/wide"])


def test_half_precision_and_float8_and_integers_keep_their_types_and_the_moments_stay_fp32() -> None:
    def build(seed: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 3).to(torch.bfloat16)
        model.register_buffer("eight", torch.randn(5).to(torch.float8_e4m3fn))
        model.register_buffer("empty", torch.empty(0, 3))
        model.register_buffer("tiny", torch.randn(2, dtype=torch.complex64).to(torch.complex32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for p in model.parameters():
            moment = torch.randn(p.shape)
            optimizer.state[p] = {"step": 3, "moment": moment, "sign": p.detach() > 0, "best": float("inf")}
        return model, optimizer

    saved, restored = build(0), build(1)
    restored[1].state.clear()
    restore(UnitView(*restored), store(UnitView(*saved).state()))
    for p, q in zip(saved[0].parameters(), restored[0].parameters(), strict=True):
        assert restored[1].state[q]["moment"].dtype == torch.float32
        assert torch.equal(restored[1].state[q]["moment"], saved[1].state[p]["moment"])
        assert restored[1].state[q]["step"] == 3
        assert restored[1].state[q]["best"] == float("inf")
        assert torch.equal(p, q)
    for name in ("eight", "tiny"):
        assert torch.equal(getattr(saved[0], name).view(torch.uint8), getattr(restored[0], name).view(torch.uint8))
    # The control: torch's own way loses the precision of the moments.
    restored[1].load_state_dict(copy.deepcopy(saved[1].state_dict()))
    assert restored[1].state[next(restored[0].parameters())]["moment"].dtype == torch.bfloat16


class Shell(nn.Module):
    """A wrapper as frameworks make them: Fabric keeps the model twice, Accelerate's and one's own once."""

    def __init__(self, inner: nn.Module, fabric: bool = False, head: nn.Module | None = None) -> None:
        super().__init__()
        if fabric:
            self._forward_module = inner
            self._original_module = getattr(inner, "module", inner)
        else:
            self.module = inner
        self.head = head


class FakeDdp(nn.parallel.DistributedDataParallel):
    """One without a process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.parametrize("fabric", [True, False])
def test_ddp_is_found_inside_wrappers_and_names_are_those_of_the_users_module(fabric: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ddp = FakeDdp(net)
    for model in (Shell(ddp, fabric), Shell(Shell(ddp), fabric), torch.compile(Shell(ddp, fabric), backend="eager")):
        assert find_ddp(model) is ddp  # type: ignore[arg-type]
        assert unwrap(model) is net  # type: ignore[arg-type]


def test_a_module_with_tensors_of_its_own_beside_ddp_is_no_wrapper() -> None:
    """Negative control: nothing of it may be left out."""
    model = Shell(FakeDdp(nn.Linear(2, 2)), head=nn.Linear(2, 1))
    assert unwrap(model) is model
    assert find_ddp(model) is None


def test_a_users_own_module_attribute_keeps_its_name() -> None:
    model = Shell(nn.Linear(2, 2))
    assert unwrap(model) is model


def test_names_are_those_of_the_users_own_module_under_ddp_and_compile() -> None:
    class Ddp(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

    net = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager"))
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for model in (net, Ddp(net), torch.compile(Ddp(net), backend="eager"), Ddp(torch.compile(net, backend="eager"))):  # type: ignore[arg-type]
        assert unwrap(model) is net  # type: ignore[arg-type]
        view = UnitView(model, torch.optim.SGD(net.parameters(), lr=0.1))  # type: ignore[arg-type]
        assert list(view.names().parameters) == [name for name, _ in plain.named_parameters()]


def test_the_wrapper_and_its_inner_optimizer_give_the_same_state() -> None:
    model, inner = made(0)
    assert UnitView(model, OptTFTWrapper(inner)).optimizer is inner


@pytest.mark.ci
def test_parameters_that_only_the_optimizer_has_are_named_by_group_and_index() -> None:
    def build(seed: int) -> tuple[nn.Module, Optimizer, nn.Parameter]:
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        alone = nn.Parameter(torch.randn(3))
        groups = [{"params": list(model.parameters())}, {"params": [alone], "lr": 0.5}]
        return model, torch.optim.SGD(groups, lr=0.1), alone

    model, optimizer, alone = build(0)
    stored = store(UnitView(model, optimizer).state())
    assert "unit/replicated/model/~group1.0" in stored[1]
    model_2, optimizer_2, alone_2 = build(1)
    restore(UnitView(model_2, optimizer_2), stored)
    assert torch.equal(alone, alone_2)


class Looking(nn.Linear):
    """Another thread calls `look` in the middle of its forward pass, as an incident comes at any instant."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.look: Any = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        looking = threading.Thread(target=self.look)
        looking.start()
        looking.join()
        return super().forward(x)


def by_functional_call(net: Looking) -> None:
    torch.func.functional_call(net, {name: 2 * one for name, one in net.named_parameters()}, (torch.ones(1, 2),))


def by_vmap(net: Looking) -> None:
    """As differential privacy has it: gradients of each sample."""

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, parameters, (x,)).sum()

    own = {name: one.detach() for name, one in net.named_parameters()}
    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(own, torch.ones(3, 2))


@pytest.mark.parametrize("call", [by_functional_call, by_vmap])
def test_what_stands_in_a_parameters_place_for_a_call_is_not_taken_for_it(call: Any) -> None:
    net = Looking()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    view = UnitView(net, optimizer)
    attributes = of_job(view, [OptTFTWrapper(optimizer)], Ledger(), {}, {})
    attributes.begin()
    before, found = store(view.state()), []

    def look() -> None:
        assert {type(one) for one in net._parameters.values()} == {torch.Tensor}
        view.let_go()
        found.append((store(view.state()), attributes.unseen()))

    net.look = look
    call(net)
    attributes.look()
    assert found == [(before, [])]
    net.weight = nn.Parameter(torch.zeros(1, 2))
    assert {"weight", "~group0.0"} < view.names().parameters.keys(), "the control: this one stays"


def test_hyperparameters_of_an_earlier_moment_can_be_stored_instead_of_the_live_ones() -> None:
    model, optimizer = made(0, OPTIMIZERS["AdamW amsgrad, tensor lr"])
    groups = copy_groups(optimizer)
    optimizer.param_groups[0]["lr"].fill_(9.0)
    optimizer.param_groups[0]["weight_decay"] = 7.0
    other = made(1, OPTIMIZERS["AdamW amsgrad, tensor lr"])
    rate = other[1].param_groups[0]["lr"]
    restore(UnitView(*other), store(UnitView(model, optimizer).state(groups)))
    assert other[1].param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.05)
    assert other[1].param_groups[0]["weight_decay"] == 0.01


@pytest.mark.parametrize("kind", ["AdamW amsgrad, tensor lr", "SGD"])
def test_hyperparameters_are_copied_anew_once_anything_in_them_is_another_object(kind: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = OPTIMIZERS[kind]([parameter])
    copies, group = PlainValues(optimizer, dict), optimizer.param_groups[0]
    first = copies.groups()
    assert first == copy_groups(optimizer)
    plain = not isinstance(group["lr"], torch.Tensor)
    assert (copies.groups() is first) is plain
    for key, value in (("weight_decay", 7.0), ("weight_decay", True), ("weight_decay", 1.0), ("new", None)):
        group[key] = value
        assert [repr(one) for one in copies.groups()] == [repr(one) for one in copy_groups(optimizer)]
    group["newer"] = group.pop("new")
    assert "newer" in copies.groups()[0]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(copies.groups()) == 2
    if not plain:  # the same object, with another value
        group["lr"].fill_(9.0)
        assert copies.groups()[0]["lr"] == 9.0
    assert first[0]["lr"] != 9.0


def in_place(value: Any) -> None:
    """Changes what can be changed inside a value, and leaves the objects where they are."""
    if isinstance(value, torch.Tensor):
        value.fill_(9.0)
    elif isinstance(value, list):
        value[0] = 9.0
    elif isinstance(value, dict):
        in_place(value["beta"])
    else:
        in_place(value[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: [0.9, 0.99],
        lambda: (torch.tensor(0.9), 0.99),
        lambda: ([0.9], 0.99),
        lambda: {"beta": [0.9, 0.99]},
        lambda: torch.tensor(0.9),
    ],
)
def test_hyperparameters_that_change_in_place_keep_the_values_of_their_moment(make: Any) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [parameter], "betas": make()}], lr=0.1)
    group, copies = optimizer.param_groups[0], PlainValues(optimizer, dict)
    first = copies.groups()
    moments = [(copy_groups(optimizer), "at once"), (first, "first"), (copies.groups(), "again")]
    group["lr"] = 0.2
    moments.append((copies.groups(), "beside a value that is another object"))
    in_place(group["betas"])
    for groups, which in moments:
        assert repr(groups[0]["betas"]) == repr(make()), which
    assert repr(copies.groups()[0]["betas"]) == repr(group["betas"]) != repr(make())
    assert copies.groups()[0]["lr"] == 0.2
    assert first[0]["lr"] == 0.1


def test_a_group_without_anything_that_can_change_in_place_keeps_its_copy() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.1, betas=(0.9, 0.99))
    copies = PlainValues(optimizer, dict)
    assert copies.groups() is copies.groups()


def test_hyperparameters_that_cannot_be_stored_do_not_stop_a_step() -> None:
    parameter = nn.Parameter(torch.ones(2))
    endless: list[Any] = []
    endless.append(endless)
    optimizer = torch.optim.SGD([{"params": [parameter], "endless": endless, "object": [object()]}], lr=0.1)
    PlainValues(optimizer, dict).groups()
    model = nn.ParameterList([parameter])
    assert len(UnitView(model, optimizer).left_out()) == 2


@pytest.mark.parametrize("beside", [(), (torch.ones(1),)])
def test_a_whole_copy_keeps_lists_in_the_optimizers_state_as_they_were(beside: Any, tmp_path: Path) -> None:
    model, optimizer = linear(2, 1)
    losses = [1.0]
    optimizer.state[next(model.parameters())]["own"] = {"losses": losses, "beside": beside}
    copy_of_step = WholeCopies(0, lambda: tmp_path)
    copy_of_step.copy(1, {"u": UnitView(model, optimizer).state()})
    losses[0] = 9.0
    kept = copy_of_step.get("u", 1)
    assert kept is not None
    assert "9.0" not in repr(kept.meta.optimizer_state)
    assert "[1.0]" in repr(kept.meta.optimizer_state)


def test_rank_local_buffers_are_left_out_and_left_alone() -> None:
    names = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    saved, restored = made(0), made(1)
    view, into = UnitView(*saved), UnitView(*restored)
    view.exclude_buffers = into.exclude_buffers = frozenset(names)
    stored = store(view.state())
    assert not any("norm.running" in name for name in stored[1])
    before = restored[0].norm.running_mean.clone()  # type: ignore[union-attr]
    restore(into, stored)
    assert torch.equal(restored[0].norm.running_mean, before)  # type: ignore[arg-type]


def test_buffers_that_come_and_go_are_made_as_they_were_saved() -> None:
    saved, restored = made(0), made(1)
    saved[0].cache = torch.randn(9)
    restored[0].mask = torch.rand(2) > 0.5
    restore(UnitView(*restored), store(UnitView(*saved).state()))
    assert restored[0].cache is not None
    assert torch.equal(restored[0].cache, saved[0].cache)
    assert torch.equal(restored[0].mask, saved[0].mask)
    saved[0].cache = None
    restore(UnitView(*restored), store(UnitView(*saved).state()))
    assert restored[0].cache is None


def test_frozen_weights_and_buffers_that_were_made_under_inference_mode_come_back() -> None:
    def build(value: float) -> tuple[nn.Module, Optimizer]:
        with torch.inference_mode():
            frozen = nn.Linear(3, 3).requires_grad_(False)
            frozen.weight.fill_(value)
            frozen.register_buffer("table", torch.full((4,), value))
        model = nn.Sequential(frozen, nn.Linear(3, 1))
        return model, torch.optim.SGD(model[1].parameters(), lr=0.1)

    saved, restored = build(1.0), build(2.0)
    restore(UnitView(*restored), store(UnitView(*saved).state()))
    assert_same(saved, restored)


def test_tied_weights_are_written_once() -> None:
    state = UnitView(*made(0)).state()
    names = [spec.name for spec, _ in state.tensors]
    assert "unit/replicated/model/embedding.weight" in names
    assert not any("head.weight" in name for name in names)
    assert state.meta.aliases == {"head.weight": "embedding.weight"}


def test_a_unit_goes_through_a_real_file(tmp_path: Path) -> None:
    saved = made(0)
    state = UnitView(*saved).state()
    directory = layout.TemporaryName(3, "job", 1, 1, 1).under(tmp_path)
    directory.mkdir(parents=True, exist_ok=True)
    part = write_part(directory, 0, 1, 3, 3, {"replicated": state}, {}, {}, job="j")
    assert {spec.name for spec in part.units["replicated"].tensors} == {spec.name for spec, _ in state.tensors}


# ------------------------------------------------------------------ refusals at the start


def test_a_model_and_an_optimizer_that_share_no_parameters_are_refused() -> None:
    with golden.raises(ConfigError):
        UnitView(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    others = [kind(nn.Linear(2, 2).parameters()) for kind in (torch.optim.AdamW, torch.optim.Adagrad)]
    with golden.raises(ConfigError):
        UnitView(nn.Linear(2, 2), JoinedOptimizer(others))


def test_an_optimizer_that_has_none_of_the_models_parameters_may_be_deepspeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    with golden.raises(ConfigError):
        UnitView(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with golden.raises(NotAnOptimizerError):
        OptTFTWrapper(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_an_optimizer_that_has_lost_the_models_parameters_since_the_start_is_refused() -> None:
    """As by DeepSpeed's ZeRO, after protect()."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    view = UnitView(model, optimizer)
    view.refuse_strangers()
    optimizer.param_groups[0]["params"] = [torch.cat([one.detach().flatten() for one in model.parameters()])]
    with golden.raises(ConfigError):
        view.refuse_strangers()


def test_a_model_that_is_no_module_and_an_optimizer_that_is_none_are_refused() -> None:
    model = nn.Linear(2, 2)
    with golden.raises(ConfigError):
        UnitView(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
    with golden.raises(ConfigError):
        UnitView(model, model)  # type: ignore[arg-type]


def test_tensors_without_plain_content_are_refused_with_their_name() -> None:
    lazy = nn.LazyLinear(3)
    with golden.raises(ConfigError):
        UnitView(lazy, torch.optim.SGD([lazy.weight], lr=0.1))
    sparse = nn.Linear(2, 2)
    sparse.edges = nn.Parameter(torch.eye(3).to_sparse())
    with golden.raises(ConfigError):
        UnitView(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1))
    meta = nn.Linear(2, 2, device="meta")
    with golden.raises(ConfigError):
        UnitView(meta, torch.optim.SGD(meta.parameters(), lr=0.1))


def test_optimizer_state_that_cannot_be_stored_is_named_with_its_path() -> None:
    model, optimizer = made(0)
    view = UnitView(model, optimizer)
    assert view.left_out() == []
    optimizer.state[model.temperature]["callback"] = print
    optimizer.param_groups[0]["schedule"] = lambda step: step
    assert view.left_out() == [
        "optimizer.state['temperature']['callback'] (builtins.builtin_function_or_method) cannot be stored",
        "optimizer.param_groups[0]['schedule'] (builtins.function) cannot be stored",
    ]
    view.check()


# ------------------------------------------------------------------ another model


def snapshot(model: nn.Module, optimizer: Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def assert_untouched(before: Any, model: nn.Module, optimizer: Optimizer) -> None:
    now = snapshot(model, optimizer)
    assert all(torch.equal(value, now[0][name]) for name, value in before[0].items())
    assert str(before[1]) == str(now[1])


def linear(*sizes: int, make: Any = torch.optim.AdamW, seed: int = 0) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    optimizer = make(model.parameters(), lr=0.1)
    model(torch.ones(2, sizes[0])).sum().backward()
    optimizer.step()
    return model, optimizer


def test_another_model_is_named_missing_extra_and_of_another_shape_and_nothing_changes() -> None:
    stored = store(UnitView(*linear(3, 4, 2)).state())
    here = linear(3, 5, seed=1)
    here[0].register_parameter("more", nn.Parameter(torch.ones(1)))
    before = snapshot(*here)
    with pytest.raises(MismatchError) as caught:
        RestorePlan(UnitView(*here), stored[0], stored[2])
    assert caught.value.missing == ("more",)
    assert caught.value.extra == ("1.weight", "1.bias")
    assert caught.value.different["0.weight"] == "saved float32 (4, 3), here float32 (5, 3)"
    golden.says(caught.value)
    assert_untouched(before, *here)


def test_another_type_optimizer_or_grouping_is_refused_and_nothing_changes() -> None:
    stored = store(UnitView(*linear(3, 2)).state())
    sgd = linear(3, 2, make=torch.optim.SGD, seed=1)
    half = linear(3, 2, seed=1)
    half[0].to(torch.bfloat16)
    groups = linear(3, 2, seed=1, make=lambda ps, lr: torch.optim.AdamW([{"params": [p]} for p in ps], lr))
    order = linear(3, 2, seed=1, make=lambda ps, lr: torch.optim.AdamW(list(ps)[::-1], lr))
    fewer = linear(3, 2, seed=1, make=lambda ps, lr: torch.optim.AdamW(list(ps)[:1], lr))
    for here, name, text in (
        (sgd, "optimizer", "saved AdamW, here SGD"),
        (half, "0.bias", "saved float32 (2,), here bfloat16 (2,)"),
        (groups, "optimizer.param_groups", "saved 1 groups, here 2"),
        (order, "optimizer.param_groups[0]", "saved 0.weight at index 0, here 0.bias"),
        (fewer, "optimizer.param_groups[0]", "saved 2 parameters, here 1"),
    ):
        before = snapshot(*here)
        with pytest.raises(MismatchError) as caught:
            RestorePlan(UnitView(*here), stored[0], stored[2])
        assert caught.value.different[name] == text
        assert_untouched(before, *here)


def test_tied_there_and_not_here_is_refused_both_ways() -> None:
    tied = made(0)
    untied = made(1)
    untied[0].head.weight = nn.Parameter(torch.randn(7, 5))
    untied[1].param_groups[0]["params"] = list(untied[0].parameters())
    for saved, here, text in (
        (tied, untied, "saved tied to embedding.weight, here not tied"),
        (untied, tied, "saved not tied, here tied to embedding.weight"),
    ):
        stored = store(UnitView(*saved).state())
        with pytest.raises(MismatchError) as caught:
            RestorePlan(UnitView(*here), stored[0], stored[2])
        assert caught.value.different["head.weight"] == text


def parametrized(net: nn.Module) -> None:
    parametrize.register_parametrization(net[0], "weight", nn.Identity())  # type: ignore[index]


CHANGES: dict[str, tuple[Any, str]] = {
    "more layers": (lambda net: net.append(nn.Linear(2, 2)), "parameter '3.weight' has come (and 2 more)"),
    "fewer layers": (lambda net: net.pop(1), "parameter '1.bias' is gone (and 4 more)"),
    "untied": (
        lambda net: setattr(net[1], "weight", nn.Parameter(torch.ones(2, 2))),
        "parameter '1.weight' is tied otherwise",
    ),
    "another dtype": (lambda net: net.bfloat16(), "parameter '0.weight' is now torch.bfloat16 (2, 2) (and 2 more)"),
    "parametrized": (parametrized, "parameter '0.weight' is gone (and 6 more)"),
    "another activation": (
        lambda net: setattr(net, "2", nn.Sigmoid()),
        "module '2' is now a torch.nn.modules.activation.Sigmoid",
    ),
    "no activation": (lambda net: net.pop(2), "module '2' is gone"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_model_that_the_loop_gives_another_structure_is_told(kind: str) -> None:
    """A new process builds it as it was, so that resume() would refuse what was saved as exact."""
    change, what = CHANGES[kind]
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh())
    net[1].weight = net[0].weight
    view = UnitView(net, torch.optim.SGD(net.parameters(), 0.1))
    view.begin()
    assert view.state().meta.reasons == [] == view.restructured(), "the control: as it was"
    change(net)
    why = f"the loop has changed the model: {what}; change it likewise before resume()"
    assert view.state().meta.reasons == [why] == view.restructured()
    view.begin()
    assert view.state().meta.reasons == [], "before the loop, a script may change what it likes"


def test_json_that_names_an_absent_tensor_is_a_format_error() -> None:
    here = linear(3, 2)
    specs, _, meta = store(UnitView(*here).state())
    with golden.raises(FormatError):
        RestorePlan(UnitView(*here), specs[:-1], meta)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_cache_that_was_registered_in_a_forward_pass_is_registered_on_resume(persistent: bool) -> None:
    """It is not persistent, so it says nothing of another model; a persistent one does, and is refused."""
    saved, fresh = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    saved[0].register_buffer("cache", torch.full((3,), 7.0), persistent=persistent)
    stored = store(UnitView(saved, torch.optim.SGD(saved.parameters(), 0.1)).state())
    view = UnitView(fresh, torch.optim.SGD(fresh.parameters(), 0.1))
    if persistent:
        with golden.raises(MismatchError):
            restore(view, stored)
    else:
        restore(view, stored)
        assert torch.equal(fresh[0].cache, saved[0].cache)
        assert "0.cache" not in fresh.state_dict()
