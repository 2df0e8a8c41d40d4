"""`OptTFTWrapper` is an Optimizer to everything around it, and says where its step stands."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lastwords.errors import ConfigError, NotAnOptimizerError
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from tests import golden


class Trace:
    """StepHooks that write down what they hear; `weights` is the parameter's value at that moment."""

    def __init__(self, parameter: torch.Tensor | None = None) -> None:
        self.words: list[str] = []
        self.parameter = parameter
        self.weights: dict[str, torch.Tensor] = {}

    def _hear(self, word: str) -> None:
        self.words.append(word)
        if self.parameter is not None:
            self.weights[word] = self.parameter.detach().clone()

    def begin_update(self) -> None:
        self._hear("begin")

    def end_update(self) -> None:
        self._hear("end")

    def tear_update(self) -> None:
        self._hear("tear")


WHOLE = ["begin", "end"]


def net(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


def backward(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    return loss


def wrapped(model: nn.Module, **kwargs: Any) -> OptTFTWrapper:
    return OptTFTWrapper(torch.optim.AdamW(model.parameters(), lr=0.1, **kwargs))


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("what", [None, 3, nn.Linear(1, 1), torch.optim.AdamW, "adam", [nn.Parameter(torch.ones(1))]])
def test_anything_but_an_optimizer_is_refused(what: Any) -> None:
    with pytest.raises(NotAnOptimizerError, match=r"takes a torch\.optim\.Optimizer") as caught:
        OptTFTWrapper(what)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ConfigError)


class Unmade(torch.optim.SGD):
    def __init__(self) -> None:
        self.param_groups = []


def test_an_optimizer_that_was_not_made_like_any_other_is_refused_with_what_to_wrap_instead() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for one in (PostLocalSGDOptimizer(inner, None), Unmade()):  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as caught:
            OptTFTWrapper(one)
        golden.says(str(caught.value))


def test_wrapping_twice_is_refused_whether_the_wrapper_or_its_optimizer_is_given() -> None:
    inner = torch.optim.SGD(net().parameters(), lr=0.1)
    first = OptTFTWrapper(inner)
    with golden.raises(ConfigError):
        OptTFTWrapper(first)
    with golden.raises(ConfigError):
        OptTFTWrapper(inner)

    class Foreign(torch.optim.SGD):  # keeps an optimizer of its own, as Accelerate's does
        optimizer: Optimizer

    foreign = Foreign(net().parameters(), lr=0.1)
    foreign.optimizer = first
    with golden.raises(ConfigError):
        OptTFTWrapper(foreign)
    del first, foreign.optimizer
    OptTFTWrapper(inner)  # the first wrapper is gone


# ------------------------------------------------------------------ what it says


def test_an_update_begins_and_ends_around_the_writing() -> None:
    model = net()
    optimizer = wrapped(model)
    trace = Trace(model.weight)
    optimizer.attach(trace)
    before = model.weight.detach().clone()
    backward(model)
    optimizer.step()
    assert trace.words == WHOLE
    assert torch.equal(trace.weights["begin"], before)
    assert not torch.equal(trace.weights["end"], before)


def test_detached_or_never_attached_nothing_is_said() -> None:
    model = net()
    optimizer = wrapped(model)
    trace = Trace()
    backward(model)
    optimizer.step()
    optimizer.attach(trace)
    with pytest.raises(ConfigError, match="attached"):
        optimizer.attach(trace)
    optimizer.detach()
    optimizer.step()
    assert trace.words == []


@pytest.mark.parametrize("own_hook", [False, True])
def test_a_step_of_the_inner_optimizer_by_itself_is_refused_before_it_writes(own_hook: bool) -> None:
    model = net()
    optimizer = wrapped(model)
    trace = Trace()
    if own_hook:
        optimizer.inner.register_step_post_hook(lambda *_: None)
    optimizer.attach(trace)
    backward(model)
    before = model.weight.detach().clone()
    with golden.raises(ConfigError):
        optimizer.inner.step()
    assert torch.equal(model.weight, before)
    assert trace.words == []
    optimizer.step()
    assert trace.words == WHOLE
    optimizer.detach()
    optimizer.inner.step()  # nobody counts steps any more
    assert trace.words == WHOLE


def test_an_update_that_raises_is_torn_and_the_error_goes_on() -> None:
    model = net()
    optimizer = wrapped(model)
    trace = Trace()
    optimizer.attach(trace)
    backward(model)
    optimizer.param_groups[0]["lr"] = "no number"
    with pytest.raises(TypeError):
        optimizer.step()
    assert trace.words == ["begin", "tear"]
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert trace.words[2:] == WHOLE


def test_raising_instead_of_beginning_is_not_torn() -> None:
    model = net()
    optimizer = wrapped(model)

    class Stop(Trace):
        def begin_update(self) -> None:
            super().begin_update()
            raise KeyboardInterrupt

    trace = Stop()
    optimizer.attach(trace)
    before = copy.deepcopy(model.state_dict())
    backward(model)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert trace.words == ["begin"]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# ------------------------------------------------------------------ hooks


def hook(words: list[str], word: str) -> Any:
    return lambda *_: words.append(word)


@pytest.mark.parametrize("closure", [False, True])
def test_hooks_on_both_optimizers_run_outside_of_the_update(closure: bool) -> None:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = OptTFTWrapper(inner)
    trace = Trace()
    optimizer.attach(trace)
    inner.register_step_pre_hook(hook(trace.words, "inner pre"))
    inner.register_step_post_hook(hook(trace.words, "inner post"))
    optimizer.register_step_pre_hook(hook(trace.words, "pre"))
    optimizer.register_step_post_hook(hook(trace.words, "post"))
    handles = [
        register_optimizer_step_pre_hook(hook(trace.words, "global pre")),
        register_optimizer_step_post_hook(hook(trace.words, "global post")),
    ]
    try:
        for _ in range(2):
            trace.words.clear()
            backward(model)
            optimizer.step((lambda: backward(model)) if closure else None)
        expected = ["pre", "global pre", "inner pre", *WHOLE, "inner post", "global post", "post"]
        assert trace.words == expected
    finally:
        for handle in handles:
            handle.remove()
    assert list(inner._optimizer_step_pre_hooks) == [k for k in inner._optimizer_step_pre_hooks if isinstance(k, int)]


def test_a_hook_that_raises_before_the_update_leaves_it_untorn_and_one_after_leaves_it_whole() -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a hook")

    for where, expected in (("pre", []), ("post", WHOLE)):
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = OptTFTWrapper(inner)
        trace = Trace()
        optimizer.attach(trace)
        getattr(inner, f"register_step_{where}_hook")(fail)
        backward(model)
        with pytest.raises(ValueError, match="a hook"):
            optimizer.step()
        assert trace.words == expected
        assert "lastwords" not in inner._optimizer_step_pre_hooks
        assert "lastwords" not in inner._optimizer_step_post_hooks


def test_a_pre_hook_can_replace_the_arguments_as_torch_allows() -> None:
    model = net()
    optimizer = OptTFTWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[Any] = []

    def replace(opt: Optimizer, args: Any, kwargs: Any) -> Any:
        assert opt is optimizer
        return (args[0], lambda: seen.append("replaced")), kwargs

    optimizer.register_step_pre_hook(replace)
    optimizer.step()
    optimizer.attach(Trace())
    optimizer.step()
    assert seen == ["replaced", "replaced"]
    optimizer.register_step_pre_hook(lambda *_: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(RuntimeError, match="pre-hook"):
        optimizer.step()


def test_a_step_that_knows_no_hooks_is_reported_all_the_same() -> None:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = OptTFTWrapper(inner)
    trace = Trace(model.weight)
    optimizer.attach(trace)
    inner.register_step_pre_hook(hook(trace.words, "pre"))
    plain = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))
    inner.step = types.MethodType(lambda self: plain(self), inner)  # type: ignore[method-assign]
    for _ in range(2):
        trace.words.clear()
        before = model.weight.detach().clone()
        backward(model)
        optimizer.step()
        assert trace.words == WHOLE
        assert not torch.equal(model.weight, before)
    assert torch.equal(trace.weights["begin"], before)


# ------------------------------------------------------------------ closures


def test_with_a_closure_ready_comes_after_its_backward_and_before_the_writing() -> None:
    model = net()
    optimizer = wrapped(model)
    trace = Trace(model.weight)
    optimizer.attach(trace)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        trace.words.append("closure")
        return backward(model)

    optimizer.step(closure)  # the first one finds out how the optimizer treats its closure
    trace.words.clear()
    before = model.weight.detach().clone()
    loss = optimizer.step(closure)
    assert isinstance(loss, torch.Tensor)
    assert trace.words == ["closure", *WHOLE]
    assert torch.equal(trace.weights["begin"], before)


def test_lbfgs_calls_its_closure_again_inside_the_update() -> None:
    model = net()
    optimizer = OptTFTWrapper(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    plain_model = net()
    plain = torch.optim.LBFGS(plain_model.parameters(), lr=0.1, max_iter=3)
    trace = Trace()
    optimizer.attach(trace)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        trace.words.append("closure")
        return backward(model)

    def plain_closure() -> torch.Tensor:
        plain.zero_grad()
        return backward(plain_model)

    for _ in range(2):
        trace.words.clear()
        assert torch.equal(optimizer.step(closure), plain.step(plain_closure))  # type: ignore[arg-type]
    assert trace.words[:3] == ["closure", "begin", "closure"]
    assert trace.words[-1] == "end"
    assert torch.equal(model.weight, plain_model.weight)


class Sam(torch.optim.SGD):
    """Writes before it calls its closure."""

    through_data = False

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if self.through_data:
                    p.data.add_(p.grad, alpha=0.05)
                else:
                    with torch.no_grad():
                        p.add_(p.grad, alpha=0.05)
        loss = closure()
        super().step()
        return loss


class SneakySam(Sam):
    through_data = True


@pytest.mark.parametrize("kind", [Sam, SneakySam])
def test_an_optimizer_that_writes_before_its_closure_is_updating_from_the_start(kind: type[Sam]) -> None:
    model = net()
    optimizer = OptTFTWrapper(kind(model.parameters(), lr=0.1))
    trace = Trace(model.weight)
    optimizer.attach(trace)
    for _ in range(2):
        backward(model)
        trace.words.clear()
        before = model.weight.detach().clone()
        optimizer.step(lambda: trace.words.append("closure") or backward(model))  # type: ignore[func-returns-value]
        assert trace.words == ["begin", "closure", "end"]
        assert torch.equal(trace.weights["begin"], before)


@pytest.mark.parametrize("copied", [False, True])
def test_who_dies_in_a_closure_that_is_called_while_its_optimizer_writes_is_said_once_unless_there_are_copies(
    caplog: pytest.LogCaptureFixture, copied: bool
) -> None:
    model = net()
    for made, tears in ((torch.optim.SGD, False), (Sam, True)):
        optimizer = OptTFTWrapper(made(model.parameters(), lr=0.1))
        optimizer.attach(Trace(), copied=copied)
        for _ in range(3):
            backward(model)
            optimizer.step(lambda: backward(model))
        assert len(caplog.messages) == (tears and not copied)
    golden.says(caplog.messages)


def test_a_closure_that_raises_is_torn_only_if_the_update_had_begun() -> None:
    model = net()
    optimizer = wrapped(model)
    trace = Trace()
    optimizer.attach(trace)
    optimizer.step(lambda: backward(model))
    trace.words.clear()

    def fail() -> Any:
        raise ValueError("in the closure")

    with golden.raises(ValueError):
        optimizer.step(fail)
    assert trace.words == []


# ------------------------------------------------------------------ schedulers

SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
}


def all_schedulers() -> set[str]:
    bases = {"LRScheduler", "_LRScheduler"}
    return {
        n for n, c in vars(lr_scheduler).items() if inspect.isclass(c) and issubclass(c, lr_scheduler.LRScheduler)
    } - bases


def test_the_table_of_schedulers_is_complete() -> None:
    assert all_schedulers() <= set(SCHEDULERS)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_every_scheduler_moves_the_wrapper_as_it_moves_the_plain_optimizer(name: str, attached: bool) -> None:
    def rates(wrap: bool) -> list[Any]:
        model = net()
        optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if wrap:
            optimizer = OptTFTWrapper(optimizer)
            if attached:
                optimizer.attach(Trace())
        scheduler = SCHEDULERS[name](optimizer)
        seen = []
        for _ in range(6):
            backward(model)
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            seen.append(
                (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"], model.weight.sum().item())
            )
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*epoch parameter in `scheduler.step")  # SequentialLR's own
        assert rates(wrap=True) == rates(wrap=False)


def test_a_scheduler_made_before_the_wrapper_goes_on_working() -> None:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(inner, 1)
    optimizer = OptTFTWrapper(inner)
    trace = Trace()
    optimizer.attach(trace)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(model)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert trace.words == WHOLE


def test_the_warning_about_a_missing_step_is_still_given() -> None:
    scheduler = lr_scheduler.StepLR(wrapped(net()), 1)
    with pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`"):
        scheduler.step()


# ------------------------------------------------------------------ GradScaler


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler_steps_skips_and_scales_as_with_the_plain_optimizer(fused: bool, unscale_first: bool) -> None:
    def run(wrap: bool) -> tuple[torch.Tensor, list[float], list[str]]:
        model = net()
        optimizer: Optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        trace = Trace()
        if wrap:
            optimizer = OptTFTWrapper(optimizer)
            optimizer.attach(trace)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scales = []
        for k in range(5):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum()
            if k == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            assert not hasattr(optimizer, "grad_scale")
            assert not hasattr(optimizer, "found_inf")
        return model.weight.detach(), scales, trace.words

    plain_weight, plain_scales, _ = run(wrap=False)
    weight, scales, words = run(wrap=True)
    assert torch.equal(weight, plain_weight)
    assert scales == plain_scales
    assert words == WHOLE * (5 if fused else 4)  # a fused step does its own skipping


def test_an_optimizer_that_wants_the_scaler_itself_is_unscaled_by_the_scaler_instead() -> None:
    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
            assert grad_scaler is None
            return super().step(closure)

    model = net()
    optimizer = OptTFTWrapper(Old(model.parameters(), lr=0.1))
    plain_model = net()
    plain = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    for m, o in ((model, optimizer), (plain_model, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(m(torch.ones(2, 4)).square().sum()).backward()
        scaler.step(o)
        scaler.update()
    assert torch.equal(model.weight, plain_model.weight)


# ------------------------------------------------------------------ state


def test_state_and_groups_are_the_inner_optimizers_own_objects_before_and_after_loading() -> None:
    model = net()
    inner = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=0.1)
    params_before = [id(group["params"]) for group in inner.param_groups]
    optimizer = OptTFTWrapper(inner)
    assert isinstance(optimizer, Optimizer)
    assert [id(group["params"]) for group in inner.param_groups] == params_before
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    backward(model)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert set(saved) == {"state", "param_groups"}
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.state[model.weight]["step"] == 1
    groups = [dict(group) for group in inner.param_groups]
    optimizer.param_groups = groups
    assert inner.param_groups is groups
    optimizer.state = {}
    assert inner.state == {}


def test_hooks_on_state_dict_and_load_run_once_each_with_their_own_optimizer() -> None:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = OptTFTWrapper(inner)
    seen: list[tuple[str, Any]] = []
    for name, target in (("wrapper", optimizer), ("inner", inner)):
        target.register_state_dict_pre_hook(lambda o, name=name: seen.append((f"{name} pre", o)))
        target.register_state_dict_post_hook(lambda o, d, name=name: seen.append((f"{name} post", o)))
        target.register_load_state_dict_pre_hook(lambda o, d, name=name: seen.append((f"{name} load pre", o)))
        target.register_load_state_dict_post_hook(lambda o, name=name: seen.append((f"{name} load post", o)))
    optimizer.register_state_dict_post_hook(lambda o, d: {**d, "more": 1})
    state_dict = optimizer.state_dict()
    assert state_dict["more"] == 1
    assert [word for word, _ in seen] == ["wrapper pre", "inner pre", "inner post", "wrapper post"]
    seen.clear()
    optimizer.load_state_dict(state_dict)
    assert [word for word, _ in seen] == ["wrapper load pre", "inner load pre", "inner load post", "wrapper load post"]
    assert all(o is (inner if word.startswith("inner") else optimizer) for word, o in seen)


def test_add_param_group_and_zero_grad_reach_the_inner_optimizer() -> None:
    model = net()
    inner = torch.optim.SGD([model.weight], lr=0.1)
    optimizer = OptTFTWrapper(inner)
    optimizer.add_param_group({"params": [model.bias], "lr": 0.5})
    assert [group["lr"] for group in inner.param_groups] == [0.1, 0.5]
    backward(model)
    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad is not None
    assert model.weight.grad.abs().sum() == 0
    optimizer.zero_grad()
    assert model.weight.grad is None


def same_after_a_step(model: nn.Module, optimizer: OptTFTWrapper, other: nn.Module, copied: OptTFTWrapper) -> None:
    assert copied.param_groups is copied.inner.param_groups
    assert copied.param_groups[0]["params"][0] is next(other.parameters())
    for m, o in ((model, optimizer), (other, copied)):
        o.zero_grad()
        backward(m)
        o.step()
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)
        assert left is not right


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_train_on_alone_and_unattached(how: str) -> None:
    model = net()
    optimizer = wrapped(model)
    trace = Trace()
    optimizer.attach(trace)
    lr_scheduler.StepLR(optimizer, 1)  # replaces optimizer.step on the instance
    backward(model)
    optimizer.step()
    if how == "deepcopy":
        other, copied = copy.deepcopy((model, optimizer))
    elif how == "pickle":
        other, copied = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        buffer = io.BytesIO()
        torch.save((model, optimizer), buffer)
        buffer.seek(0)
        other, copied = torch.load(buffer, weights_only=False)
    optimizer.detach()
    same_after_a_step(model, optimizer, other, copied)
    assert trace.words == WHOLE


def test_set_state_on_a_live_wrapper_changes_the_inner_optimizer() -> None:
    model = net()
    optimizer = wrapped(model)
    backward(model)
    optimizer.step()
    optimizer.__setstate__({"state": {}, "param_groups": optimizer.param_groups})
    assert optimizer.inner.state == {}
    assert optimizer.state is optimizer.inner.state


def test_repr_shows_the_inner_optimizer_and_unknown_names_are_the_inner_ones() -> None:
    class Extra(torch.optim.SGD):
        def train(self) -> str:
            return "training"

    optimizer = OptTFTWrapper(Extra(net().parameters(), lr=0.1))
    assert repr(optimizer).startswith("OptTFTWrapper(Extra (")
    assert optimizer.train() == "training"
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = optimizer.nothing_of_the_kind
    with pytest.raises(AttributeError):
        _ = OptTFTWrapper.__new__(OptTFTWrapper).train


# ------------------------------------------------------------------ other libraries' habits


def test_a_step_swapped_by_a_method_and_swapped_back_still_reports() -> None:
    model = net()
    optimizer = wrapped(model)
    trace = Trace()
    optimizer.attach(trace)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    original = optimizer.step
    called: list[bool] = []

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(True)
        return original(*args, **kwargs)

    for _ in range(2):
        optimizer.step = types.MethodType(patched, optimizer)  # type: ignore[method-assign]
        backward(model)
        optimizer.step()
        optimizer.step = original  # type: ignore[method-assign]
        scheduler.step()
    assert called == [True, True]
    assert trace.words == WHOLE * 2


def test_the_profiler_sees_one_step() -> None:
    model = net()
    optimizer = wrapped(model)
    optimizer.attach(Trace())
    backward(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    steps = [event.key for event in profile.key_averages() if event.key.startswith("Optimizer.step")]
    assert steps == ["Optimizer.step#AdamW.step"]


@pytest.mark.ci
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("how", ["inner step", "wrapper step", "function"])
def test_a_compiled_step_still_steps_and_reports(how: str, attached: bool) -> None:
    model, plain_model = net(), net()
    optimizer = wrapped(model)
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.1)
    trace = Trace()
    if attached:
        optimizer.attach(trace)
    torch._dynamo.reset()
    if how == "inner step":
        optimizer.inner.step = torch.compile(optimizer.inner.step, backend="eager")  # type: ignore[method-assign]
        step: Any = optimizer.step
    elif how == "wrapper step":
        step = torch.compile(optimizer.step, backend="eager")
    else:

        @torch.compile(backend="eager")
        def step() -> None:
            optimizer.step()

    for _ in range(3):
        for m in (model, plain_model):
            m.zero_grad()
            backward(m)
        step()
        plain.step()
    torch._dynamo.reset()
    assert trace.words == WHOLE * 3 * attached
    torch.testing.assert_close(model.weight, plain_model.weight)


# ---------------------------------------------------------------------- in the plain one's place


def test_whoever_holds_the_plain_optimizer_steps_the_wrapper_once_it_stands_in() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([parameter], lr=1.0)
    before = torch.optim.lr_scheduler.StepLR(plain, 1)
    wrapper = OptTFTWrapper(plain)
    wrapper.stand_in()
    after = torch.optim.lr_scheduler.StepLR(plain, 1)
    hooks = Trace()
    wrapper.attach(hooks)
    for one, count in ((plain, 2), (wrapper, 4)):
        parameter.grad = torch.ones(2)
        one.step()
        assert len(hooks.words) == count
        before.step()
        after.step()
    zeroed: list[tuple[object, ...]] = []
    wrapper.watch_zero_grad(lambda *of: zeroed.append(of))
    plain.zero_grad()
    assert parameter.grad is None
    assert len(zeroed) == 1
    wrapper.detach()
    parameter.grad = torch.ones(2)
    plain.step()
    assert len(hooks.words) == 4


def test_a_plain_optimizer_that_is_not_stood_in_for_refuses_to_step() -> None:
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    wrapper = OptTFTWrapper(plain)
    wrapper.attach(Trace())
    with golden.raises(ConfigError):
        plain.step()
