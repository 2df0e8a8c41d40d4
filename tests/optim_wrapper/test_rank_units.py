"""A rank of a sharded job writes its units one by one, restores them one by one, and notices what has no unit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lastwords.checkpoint.meta import UnitMeta
from lastwords.checkpoint.part import UnitState
from lastwords.checkpoint.storable import pack, unpack
from lastwords.errors import ConfigError, MismatchError
from lastwords.optim_wrapper.capture.buffers import Buffers
from lastwords.optim_wrapper.capture.source import Snapshot, TrainerSource
from lastwords.optim_wrapper.capture.state_watch import StateWatch
from lastwords.optim_wrapper.resume.state_restore import RestorePlan
from lastwords.optim_wrapper.state.attributes import Attributes
from lastwords.optim_wrapper.state.extras import Extras
from lastwords.optim_wrapper.state.plain_values import copy_groups
from lastwords.optim_wrapper.state.rank_units import RankUnits
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.recurrence import Late
from lastwords.processor.saver import Position
from lastwords.sharding.discover import pieces_of
from lastwords.sharding.pieces import Members, UnitTable
from lastwords.vocabulary import Phase, Stand
from tests import golden


class Net(nn.Module):
    cache: torch.Tensor | None

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.down = nn.Linear(4, 3)
        self.down.bias = self.up.weight  # type: ignore[assignment] # tied, across two units
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("table", torch.randn(5))
        self.register_buffer("cache", None, persistent=False)


def watched(view: UnitView) -> StateWatch:
    return StateWatch(view, Buffers(view.model, called=view.called))


def recorded(units: RankUnits, extras: Extras, watch: StateWatch | None = None) -> Any:
    """What a recorder knows and these tests are not about."""
    watch = watch or watched(next(iter(units.views.values())))
    return SimpleNamespace(
        units=units, extras=extras, watch=watch, attributes=Attributes({}, dict),
        gradients=SimpleNamespace(doubts=lambda *, ended: []), buffers_at=lambda step: (frozenset(), {}),
        position_under_way=None, ends_epoch=lambda position: None,
        drawn_since=lambda step: "", moved_between=lambda step: [],
    )  # fmt: skip


TABLE = UnitTable(
    units={"replicated": (0, 1), "tp0": (0,), "tp1": (1,)},
    mine={
        "replicated": Members(("norm.weight", "norm.bias", "frozen"), ("cache",)),
        "tp0": Members(("up.weight", "up.bias", "down.weight"), ("table",)),
    },
    nbytes={},
)


def grouped(net: Net, **options: Any) -> torch.optim.Optimizer:
    groups: Any = [
        {"params": [net.norm.weight], "lr": 0.3},
        {"params": [net.up.weight, net.norm.bias, net.down.weight], "lr": 0.2},
        {"params": [net.up.bias], "lr": 0.1},
    ]
    return torch.optim.AdamW(groups, **options)


def trained(seed: int, steps: int) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(seed)
    optimizer = grouped(net)
    for _ in range(steps):
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
        optimizer.step()
    return net, optimizer


def units_of(net: nn.Module, optimizer: torch.optim.Optimizer, table: UnitTable = TABLE) -> RankUnits:
    view = UnitView(net, optimizer)
    return RankUnits(view, table, pieces_of(view.all_names(), view.optimizer, (), 0), (), 0)


Stored = tuple[list[Any], dict[str, bytes], Any]


def store(state: UnitState) -> Stored:
    contents = {}
    for spec, source in state.tensors:
        raw: Any = source() if callable(source) else source
        contents[spec.name] = bytes(raw)
    return [spec for spec, _ in state.tensors], contents, UnitMeta.read(unpack(pack(state.meta.to_json())))


def restore(view: UnitView, stored: Stored) -> None:
    specs, contents, meta = stored
    plan = RestorePlan(view, specs, meta)
    by_name = {spec.name: spec for spec in specs}
    for name in plan.tensor_names:
        plan.into(by_name[name])[:] = contents[name]
    plan.commit()


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {name: value.tolist() for name, value in net.state_dict().items()}
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names[id(parameter)]}/{key}": value.tolist() for key, value in state.items()}
    found["groups"] = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    return found


def test_the_units_together_are_everything_and_have_nothing_in_common() -> None:
    net, optimizer = trained(0, 2)
    optimizer.param_groups[2]["lr"] = 0.77
    stored = {unit: store(view.state()) for unit, view in units_of(net, optimizer).views.items()}
    names = [name.partition("/")[2].partition("/")[2] for parts in stored.values() for name in parts[1]]
    whole = store(UnitView(net, optimizer).state())
    assert sorted(names) == sorted(name.partition("/")[2].partition("/")[2] for name in whole[1])
    other_net, other_optimizer = trained(1, 1)
    for unit, view in units_of(other_net, other_optimizer).views.items():
        restore(view, stored[unit])
    assert everything(other_net, other_optimizer) == everything(net, optimizer)


def test_restoring_one_unit_leaves_the_others_as_they_are() -> None:
    stored = store(units_of(*trained(0, 2)).views["tp0"].state())
    net, optimizer = trained(1, 1)
    before = everything(net, optimizer)
    restore(units_of(net, optimizer).views["tp0"], stored)
    after = everything(net, optimizer)
    assert after["norm.weight"] == before["norm.weight"]
    assert after["norm.weight/exp_avg"] == before["norm.weight/exp_avg"]
    assert after["up.weight"] != before["up.weight"]
    assert after["up.weight/step"] == 2.0


def test_a_unit_says_who_holds_it_and_only_its_own_groups() -> None:
    views = units_of(*trained(0, 1)).views
    meta = views["tp0"].state().meta
    assert meta.holders == (0,)
    assert meta.group_parameters == (("up.weight", "down.weight"), ("up.bias",))
    assert meta.aliases == {"down.bias": "up.weight"}
    assert views["replicated"].state().meta.group_parameters == (("norm.weight",), ("norm.bias",))


def test_a_file_of_another_unit_is_refused() -> None:
    stored = store(units_of(*trained(0, 1)).views["replicated"].state())
    with pytest.raises(MismatchError) as caught:
        RestorePlan(units_of(*trained(1, 1)).views["tp0"], stored[0], stored[2])
    assert "up.weight" in caught.value.missing
    assert "norm.weight" in caught.value.extra


def test_a_pure_job_has_one_view_of_everything_that_follows_the_model() -> None:
    net, optimizer = trained(0, 1)
    pure = UnitTable(units={"replicated": (0, 1)}, mine={"replicated": Members(("up.weight",))}, nbytes={})
    units = units_of(net, optimizer, pure)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    units.admit(optimizer.param_groups[-1])
    units.check_step()
    units.check()
    meta = units.views["replicated"].state().meta
    assert "~group3.0" in meta.parameters
    assert "holders" not in meta.to_json(), "the file of a data-parallel job is what it always was"


# ------------------------------------------------------------------ what has no unit


def test_a_parameter_without_a_unit_is_refused_in_add_param_group() -> None:
    net, inner = trained(0, 1)
    optimizer = OptTFTWrapper(inner)
    units = units_of(net, optimizer)
    optimizer.watch_groups(units.admit)
    new = nn.Parameter(torch.ones(7))
    for params in (new, [new], iter([new]), [("new", new)]):
        with golden.raises(ConfigError):
            optimizer.add_param_group({"params": params})
    assert len(optimizer.param_groups) == 3
    optimizer.add_param_group({"params": iter([net.frozen])})  # a generator is walked once only
    assert optimizer.param_groups[3]["params"] == [net.frozen]
    units.check_step()
    units.check()


def test_a_parameter_that_went_past_the_wrapper_is_refused_at_the_end_of_the_step() -> None:
    net, optimizer = trained(0, 1)
    units = units_of(net, optimizer)
    units.check_step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
    with golden.raises(ConfigError):
        units.check_step()
    with golden.raises(ConfigError):
        units.check()


def test_a_new_persistent_buffer_is_refused_and_a_cache_is_not() -> None:
    net, optimizer = trained(0, 1)
    units = units_of(net, optimizer)
    net.register_buffer("late_cache", torch.ones(3), persistent=False)
    units.check()
    net.register_buffer("late", torch.ones(3))
    with golden.raises(ConfigError):
        units.check()


def test_a_buffer_that_was_absent_at_first_is_stored_with_its_unit() -> None:
    net, optimizer = trained(0, 1)
    units = units_of(net, optimizer)
    net.cache = torch.ones(2)
    units.check()
    assert "unit/replicated/buffer/cache" in store(units.views["replicated"].state())[1]


def test_a_model_that_was_converted_after_the_agreement_is_refused() -> None:
    net, optimizer = trained(0, 1)
    units = units_of(net, optimizer)
    net.up.to(torch.bfloat16)
    with golden.raises(ConfigError):
        units.check_layout()


def test_state_that_belongs_to_no_parameter_is_left_out_and_named_in_a_sharded_job() -> None:
    net, optimizer = trained(0, 1)
    units = units_of(net, optimizer)
    optimizer.state["global"] = {"count": 3}  # type: ignore[index]
    units.check()
    for view in units.views.values():
        [reason] = view.state().meta.reasons
        assert reason == (
            "optimizer.state['global'] (it belongs to no parameter, so it is unknown which ranks hold it) "
            "cannot be stored"
        )


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("stand", [Stand(Phase.COMPUTING, 1), Stand(Phase.UPDATED, 2)])
def test_every_unit_says_that_its_weights_were_written_outside_of_the_optimizer(stand: Stand, written: bool) -> None:
    net, optimizer = trained(1, 1)
    units, extras = units_of(net, optimizer), Extras({}, "extras")
    watch = watched(UnitView(net, optimizer))
    watch.list_tensors()
    watch.mark_end(1)
    source = TrainerSource(recorded(units, extras, watch), lambda rank: None, lambda step: {})  # type: ignore[arg-type, return-value]
    source.committed(Snapshot(1, Position(1, 1), copy_groups(optimizer), extras.first(), Late()))
    watch.end_update()
    if written:
        for parameter in net.parameters():
            parameter.data.mul_(2)
    for unit in units.names:
        reasons = source.unit_state(unit, stand.step, stand).meta.reasons
        assert any("change" in reason for reason in reasons) == written, unit
