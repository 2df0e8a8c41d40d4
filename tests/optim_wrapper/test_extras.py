"""Schedulers, scalers and other extras come back exactly, or are refused at the start with their path."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lastwords.checkpoint.codec import typed
from lastwords.checkpoint.meta import ExtrasMeta, InlineExtras, json_of
from lastwords.checkpoint.storable import pack, unpack
from lastwords.errors import ConfigError, MismatchError
from lastwords.optim_wrapper.state.extras import Extras, ExtrasSnapshot, pack_inline, restore_inline
from lastwords.processor.recurrence import Forecast, Late, about_to_change
from tests import golden

Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
}


def sgd(lr: Any = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=lr, momentum=0.9)


def through_storage(extras: Extras, snapshot: ExtrasSnapshot) -> tuple[Any, Callable[[str], torch.Tensor]]:
    """Tree and tensors as they come back from a file."""
    tree, sources = extras.store(snapshot, "replicated")
    stored = {spec.name: bytes(source() if callable(source) else source) for spec, source in sources}
    specs = {spec.name: spec for spec, _ in sources}
    dtypes = {
        "F32": torch.float32,
        "F64": torch.float64,
        "I64": torch.int64,
        "BF16": torch.bfloat16,
        "BOOL": torch.bool,
    }

    def read(node: dict[str, Any]) -> torch.Tensor:
        name = node["tensor"]
        tensor = torch.empty(specs[name].shape, dtype=dtypes[specs[name].dtype])
        if tensor.numel():
            tensor.view(-1).view(torch.uint8).copy_(torch.tensor(list(stored[name]), dtype=torch.uint8))
        return tensor

    return typed(unpack(json.loads(json.dumps(pack(json_of(tree))))), ExtrasMeta, "extras"), read


def quiet_steps(scheduler: Any, count: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(count):
            scheduler.step()


def rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    group = optimizer.param_groups[0]
    return [float(group["lr"]), group["momentum"]]


# ------------------------------------------------------------------ out and back


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_a_restored_scheduler_goes_on_as_the_saved_one(name: str, tensor_lr: bool) -> None:
    saved_optimizer, optimizer = (
        sgd(torch.tensor(0.1) if tensor_lr else 0.1),
        sgd(torch.tensor(0.1) if tensor_lr else 0.1),
    )
    saved, restored = SCHEDULERS[name](saved_optimizer), SCHEDULERS[name](optimizer)
    quiet_steps(saved, 4)
    extras = Extras({"scheduler": saved})
    tree, read = through_storage(extras, extras.first())
    Extras({"scheduler": restored}).restore(tree, read)
    for key in ("lr", "momentum"):  # these belong to the optimizer's groups, which the unit restores
        value = saved_optimizer.param_groups[0][key]
        optimizer.param_groups[0][key] = value.clone() if isinstance(value, torch.Tensor) else value
    for _ in range(5):
        quiet_steps(saved, 1)
        quiet_steps(restored, 1)
        assert rates(optimizer) == rates(saved_optimizer)


def test_plateau_and_grad_scaler_come_back() -> None:
    saved = lr_scheduler.ReduceLROnPlateau(sgd(), patience=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=2)
    scaler.scale(torch.ones(1))
    scaler.update(7.0)
    saved.step(1.5)
    extras = Extras({"plateau": saved, "scaler": scaler})
    tree, read = through_storage(extras, extras.first())
    restored, scaler_2 = lr_scheduler.ReduceLROnPlateau(sgd(), patience=1), torch.amp.GradScaler("cpu")
    assert restored.best == math.inf
    Extras({"plateau": restored, "scaler": scaler_2}).restore(tree, read)
    assert restored.state_dict() == saved.state_dict()
    assert scaler_2.state_dict() == scaler.state_dict()


VALUES: dict[str, Any] = {
    "tuple": (1, (2.5, "x")),
    "list": [1, [2]],
    "inf and nan": [math.inf, -math.inf, math.nan],
    "large integers": [2**53 + 1, -(2**200)],
    "negative zero": -0.0,
    "smallest float": 5e-324,
    "bytes": b"\x00\xff",
    "int keys": {1: "a", 2: "b"},
    "mixed keys": {1: 2, "1": 3},
    "none and bool": [None, True, False, 1, 0],
    "set": {3, 1, 2},
    "counter": Counter({2: 1, 4: 3}),
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "tilde": {"~tuple": [1]},
    "text": "ä\u2028\U0001f600",
    "tensor": torch.tensor([1.5, math.nan]),
    "bf16": torch.tensor([1.5, 3.0], dtype=torch.bfloat16),
    "scalar tensor": torch.tensor(7),
    "empty tensor": torch.empty(0, 3),
    "tensors inside": {"ema": [torch.ones(2), (torch.zeros(1), 4)], 3: torch.tensor(True)},
}


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(
            one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return np.float64(one).tobytes() == np.float64(other).tobytes()
    return bool(one == other)


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("name", sorted(VALUES))
def test_every_value_comes_back_as_it_was(name: str, inline: bool) -> None:
    extras = Extras({"mine": {"value": VALUES[name]}})
    target: dict[str, Any] = {"left over": 1}
    again = Extras({"mine": target})
    if inline:
        packed = InlineExtras.read(json.loads(json.dumps(pack(pack_inline(extras, extras.first()).to_json()))), "box")
        restore_inline(again, packed)
    else:
        again.restore(*through_storage(extras, extras.first()))
    assert list(target) == ["value"]
    assert same(target["value"], VALUES[name])


def test_tensors_and_dicts_in_a_dict_stay_the_same_objects() -> None:
    average = torch.ones(3)
    inner = {"a": average}
    target = {"ema": inner}
    saved = Extras({"mine": {"ema": {"a": torch.full((3,), 5.0), "b": 1}}})
    Extras({"mine": target}).restore(*through_storage(saved, saved.first()))
    assert target["ema"] is inner
    assert inner["a"] is average
    assert average.tolist() == [5.0, 5.0, 5.0]
    assert inner["b"] == 1


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "value",
    [
        {"f": lambda: 0},
        {"deep": [1, {"x": (object(),)}]},
        {"n": np.array([object()])},
        {"t": [torch.ones(2).to_mkldnn()]},
        {"t": {object(): torch.ones(1)}},
        {"t": {1: {torch.ones(1)}}},
    ],
)
def test_what_cannot_be_stored_is_refused_at_the_start_with_its_path(value: Any) -> None:
    with golden.raises(ConfigError):
        Extras({"mine": value})


def test_a_callable_with_state_in_a_lambda_scheduler_is_refused_with_its_path() -> None:
    class Warmup:
        def __init__(self) -> None:
            self.curve = lambda step: 1.0

        def __call__(self, step: int) -> float:
            return 1.0

    with pytest.raises(
        ConfigError, match=r"extras\['scheduler'\]\['lr_lambdas'\]\[0\]\['curve'\] is a builtins\.function"
    ):
        Extras({"scheduler": lr_scheduler.LambdaLR(sgd(), Warmup())})


@pytest.mark.parametrize("objects", [{"a/b": {}}, {"": {}}, {3: {}}, {"x": 3}, {"x": object()}, {"x": [1]}])
def test_names_and_things_that_are_no_extras_are_refused(objects: Any) -> None:
    with pytest.raises(ConfigError, match="extras"):
        Extras(objects)


def test_other_extras_than_in_the_checkpoint_are_refused_before_anything_changes() -> None:
    saved = Extras({"a": {"x": 1}, "b": {"x": 1}})
    target = {"x": 0}
    with pytest.raises(MismatchError) as caught:
        Extras({"a": target, "c": {}}).restore(*through_storage(saved, saved.first()))
    assert caught.value.missing == ("c",)
    assert caught.value.extra == ("b",)
    assert target == {"x": 0}


def test_an_object_that_refuses_its_state_is_named() -> None:
    disabled = Extras({"scaler": torch.amp.GradScaler("cpu", enabled=False)})
    enabled = Extras({"scaler": torch.amp.GradScaler("cpu")})
    with pytest.raises(MismatchError, match=r"extras\['scaler'\] \(GradScaler\)"):
        enabled.restore(*through_storage(disabled, disabled.first()))


# ------------------------------------------------------------------ snapshots


def test_a_snapshot_never_changes_afterwards_and_shares_what_did_not_move() -> None:
    average = torch.ones(2)
    mine: dict[str, Any] = {"still": [1, [2]], "moving": [0], "ema": average, "map": {"a": {"b": 1}}}
    extras = Extras({"mine": mine})
    first = extras.first()
    mine["moving"].append(1)
    mine["map"]["a"]["b"] = 2
    average.add_(1)
    second = extras.ended(first)
    assert first.states["mine"]["moving"] == [0]
    assert first.states["mine"]["ema"].tolist() == [1.0, 1.0]
    assert first.states["mine"]["map"] == {"a": {"b": 1}}
    assert second.states["mine"]["moving"] == [0, 1]
    assert second.states["mine"]["ema"].tolist() == [2.0, 2.0]
    assert second.states["mine"]["still"] is first.states["mine"]["still"]
    mine["moving"].append(2)
    mine["still"][1].append(3)
    assert second.states["mine"]["moving"] == [0, 1]
    assert second.states["mine"]["still"] == [1, [2]]


@pytest.mark.parametrize("change", [("x", True), ("x", 1.0), ("x", (1,)), ("new", 1), ("x", None)])
def test_a_change_of_type_or_key_is_a_move(change: tuple[str, Any]) -> None:
    mine: dict[str, Any] = {"x": 1, "nan": math.nan}
    extras = Extras({"mine": mine})
    before = extras.first()
    assert extras.ended(before).moved == {}
    mine[change[0]] = change[1]
    after = extras.ended(before)
    assert [leaf.removeprefix(f"extras['mine'][{change[0]!r}]") for leaf in after.moved] in ([""], ["[0]"])
    assert same(after.states["mine"], mine)


# ------------------------------------------------------------------ cut off between the update and the scheduler


def trained(extras: Extras, body: Callable[[], Any], steps: int = 3) -> tuple[ExtrasSnapshot, Late]:
    """The last step's end, and what has moved so far."""
    snapshot, late = extras.first(), Late()
    for step in range(1, steps + 1):
        body()
        snapshot = extras.ended(snapshot)
        late.happened(snapshot.moved, step, None)
    return snapshot, late


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_a_scheduler_that_was_about_to_step_is_stepped_on_resume(name: str) -> None:
    optimizer = sgd()
    scheduler = SCHEDULERS[name](optimizer)
    extras = Extras({"scheduler": scheduler})
    snapshot, late = trained(extras, lambda: quiet_steps(scheduler, 1))
    cut, found = extras.after_update(snapshot, late)
    assert found == {}
    assert cut.step_on_resume == ("scheduler",)
    tree, read = through_storage(extras, cut)
    again = sgd()
    restored = SCHEDULERS[name](again)
    for key in ("lr", "momentum"):
        again.param_groups[0][key] = optimizer.param_groups[0][key]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*epoch parameter in `scheduler.step")  # SequentialLR's own
        Extras({"scheduler": restored}).restore(tree, read)
    quiet_steps(scheduler, 1)
    assert rates(again) == rates(optimizer)
    assert cut.moved == {"extras['scheduler']": 1}, "by the time that it is resumed"


def test_a_scheduler_that_had_stepped_already_is_taken_as_it_is() -> None:
    scheduler = lr_scheduler.StepLR(sgd(), 1)
    extras = Extras({"scheduler": scheduler})
    snapshot, late = trained(extras, lambda: quiet_steps(scheduler, 1))
    quiet_steps(scheduler, 1)
    cut, found = extras.after_update(snapshot, late)
    assert (cut.step_on_resume, found) == ((), {})
    assert cut.states["scheduler"]["last_epoch"] == 4


def test_what_never_moved_may_begin_to_and_what_has_no_state_cannot() -> None:
    extras = Extras({"mine": {"x": 1}, "off": torch.amp.GradScaler("cpu", enabled=False)})
    cut, found = extras.after_update(*trained(extras, lambda: None))
    assert cut.step_on_resume == ()
    assert found == {"extras['mine']['x']": Forecast.NEVER.value}


def once_in_two() -> tuple[Any, Callable[[], None]]:
    scheduler = lr_scheduler.StepLR(sgd(), 1)
    turn = iter(range(99))
    return scheduler, lambda: quiet_steps(scheduler, next(turn) % 2)


def twice() -> tuple[Any, Callable[[], None]]:
    scheduler = lr_scheduler.CosineAnnealingLR(sgd(), 10)
    return scheduler, lambda: quiet_steps(scheduler, 2)


def fractions() -> tuple[Any, Callable[[], None]]:
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(sgd(), 3)
    turn = iter(range(1, 99))
    return scheduler, lambda: scheduler.step(next(turn) / 4)


def plateau() -> tuple[Any, Callable[[], None]]:
    scheduler = lr_scheduler.ReduceLROnPlateau(sgd())
    return scheduler, lambda: scheduler.step(1.0)


def scaler() -> tuple[Any, Callable[[], None]]:
    it = torch.amp.GradScaler("cpu")
    it.scale(torch.ones(1))
    turn = iter(range(2, 99))
    return it, lambda: it.update(float(next(turn)))


def second_optimizer() -> tuple[Any, Callable[[], None]]:
    it = sgd()
    parameter = it.param_groups[0]["params"][0]

    def step() -> None:
        parameter.grad = torch.ones(3)
        it.step()

    return it, step


@pytest.mark.parametrize(
    ("make", "forecast"),
    [
        (once_in_two, Forecast.UNKNOWN),
        (twice, Forecast.DUE),
        (fractions, Forecast.DUE),
        (plateau, Forecast.DUE),
        (scaler, Forecast.DUE),
        (second_optimizer, Forecast.DUE),
    ],
)
def test_what_cannot_be_caught_up_with_says_so_and_is_not_stepped(make: Any, forecast: Forecast) -> None:
    it, body = make()
    extras = Extras({"it": it})
    cut, found = extras.after_update(*trained(extras, body))
    assert cut.step_on_resume == ()
    assert forecast.value in found.values()
    assert all(leaf.startswith("extras['it']") for leaf in found)
    golden.says(about_to_change(found))


def test_in_the_first_step_of_a_run_nothing_shows_whether_it_would_have_moved() -> None:
    extras = Extras({"scheduler": lr_scheduler.StepLR(sgd(), 1)})
    for before in (extras.first(), None):
        cut, found = extras.after_update(before, Late())
        assert cut.step_on_resume == ()
        assert [*found.values()] == [Forecast.NEVER.value]


def test_two_extras_are_told_apart() -> None:
    scheduler = lr_scheduler.StepLR(sgd(), 1)
    mine = {"count": 0}
    extras = Extras({"scheduler": scheduler, "mine": mine})

    def body() -> None:
        quiet_steps(scheduler, 1)
        mine["count"] += 1

    snapshot, late = trained(extras, body)
    mine["count"] += 1
    cut, found = extras.after_update(snapshot, late)
    assert (cut.step_on_resume, found) == (("scheduler",), {})
    assert cut.states["mine"] == {"count": 4}
