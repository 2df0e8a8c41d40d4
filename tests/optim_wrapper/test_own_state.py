"""State that an optimizer or a module keeps in a form of its own is saved and restored, or named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lastwords.checkpoint.meta import Habits, InlineExtras
from lastwords.checkpoint.part import UnitState
from lastwords.optim_wrapper import joined_optimizer
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.resume.resume import _ExtraTensors
from lastwords.optim_wrapper.resume.state_restore import RestorePlan
from lastwords.optim_wrapper.state import own_state
from lastwords.optim_wrapper.state.attributes import Attributes
from lastwords.optim_wrapper.state.extras import restore_inline
from lastwords.optim_wrapper.state.own_state import OwnOptimizerState
from lastwords.optim_wrapper.tensors.tensor_tree import put_together
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.box_layout import BoxReader
from lastwords.vocabulary import UNIT_REPLICATED, Phase, Stand
from tests.ledgers import told


class Counting(torch.optim.SGD):
    """A counter that its own state_dict() carries."""

    count = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Each step is smaller than the one before."""
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """With the counter."""
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """And back."""
        self.count = state_dict["count"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})


class Slow(torch.optim.AdamW):
    """Slow weights in a list of their own, synchronised in every third step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Follow the fast ones."""
        super().step(closure)
        self.count += 1
        if self.count % 3 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                p.copy_(slow.lerp_(p.to(slow.dtype), 0.5))

    def state_dict(self) -> dict[str, Any]:
        """With slow weights."""
        return {**super().state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """And back."""
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.slow, self.count = [one.clone() for one in state_dict["slow"]], state_dict["count"]


class Around(Optimizer):
    """As SAM's implementations: groups shared with the inner optimizer, whose state is in no state_dict()."""

    def __init__(self, params: Any, share: bool = True) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base_optimizer = torch.optim.SGD(self.param_groups if share else self.param_groups[0]["params"], lr=0.1,
                                              momentum=0.9)  # fmt: skip
        if share:
            self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Perturb and go back, then step."""
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.clone()
        self.base_optimizer.param_groups[0]["lr"] *= 0.9
        return self.base_optimizer.step()


class FastAndSlow(Optimizer):
    """As an often copied Lookahead: a state_dict() without "state", with the inner optimizer's under another name."""

    def __init__(self, params: Any) -> None:
        self.optimizer = torch.optim.AdamW(params, lr=0.1)
        self.param_groups = self.optimizer.param_groups
        self.defaults = self.optimizer.defaults
        self.state = defaultdict(dict)
        self.fast_state = self.optimizer.state
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}  # type: ignore[assignment]
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Fast, and now and then slow."""
        self.optimizer.step()
        for group in self.param_groups:
            group["counter"] += 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow_param", p.clone())
                if group["counter"] % 2 == 0:
                    p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self) -> dict[str, Any]:
        """Two states."""
        fast, slow = self.optimizer.state_dict(), own_state._packed(self)
        return {"fast_state": fast["state"], "slow_state": slow["state"], "param_groups": fast["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Both back."""
        groups = state_dict["param_groups"]
        self._optimizer_load_state_dict_pre_hooks = self._optimizer_load_state_dict_post_hooks = {}  # type: ignore
        super().load_state_dict({"state": state_dict["slow_state"], "param_groups": groups})
        self.optimizer.load_state_dict({"state": state_dict["fast_state"], "param_groups": groups})
        self.fast_state = self.optimizer.state


class Hidden(torch.optim.SGD):
    """State that no state_dict() has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen, self.mean, self.config = 0, {"of": [torch.zeros(3)]}, {"every": 5}

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One of SGD."""
        self.seen += 1
        if self.seen > 2:
            self.mean["of"][0] += 1
        return super().step(closure)


class Listening(nn.Module):
    """State of a form of its own, which moves in forward."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.calls, self.scale = seed, torch.tensor([float(seed)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.scale = self.scale + 0.5
        return x * self.scale.to(x.dtype)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.scale = state["calls"], state["scale"]


class Job:
    """One rank's training, up to a save and from a restore on."""

    def __init__(self, folder: Path, make: Callable[[Any], Optimizer], seed: int = 1, half: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 6), Listening(seed), nn.Linear(6, 2))
        if half:
            self.model.to(torch.bfloat16)
        self.inner = make(list(self.model.parameters()))
        self.wrapper = OptTFTWrapper(self.inner)
        self.recorder = StepRecorder(self.model, [self.wrapper], {}, {})
        self.recorder.agree_units(World(), next_prefix(), ())
        self.source = self.recorder.make_source(lambda rank: folder / "box", lambda step: {})
        self.recorder.open(folder / "box")
        self.recorder.begin(0, None)
        self.folder, self.done = folder, 0

    def update(self) -> None:
        generator = torch.Generator().manual_seed(self.done)
        x = torch.randn(3, 4, generator=generator).to(self.model[0].weight.dtype)  # type: ignore[union-attr]
        self.wrapper.zero_grad()
        self.model(x).tanh().sum().backward()
        self.wrapper.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.update()
            self.done += 1
            self.recorder.end_step(self.done, None)

    def save(self, *, updated: bool = False) -> UnitState:
        stand = Stand(Phase.UPDATED, self.done + 1) if updated else Stand(Phase.COMPUTING, self.done)
        return self.source.unit_state(UNIT_REPLICATED, stand.step, stand)

    def restore(self, saved: UnitState, box: Path, done: int) -> None:
        contents = {spec.name: bytes(c() if callable(c) else c) for spec, c in saved.tensors}
        specs = {spec.name: spec for spec, _ in saved.tensors}
        [view] = self.recorder.units.views.values()
        plan = RestorePlan(view, list(specs.values()), saved.meta)
        for name in plan.tensor_names:
            plan.into(specs[name])[:] = contents[name]
        plan.commit()
        assert saved.meta.extras is not None
        extras = _ExtraTensors(saved.meta.extras, tuple(specs.values()))
        for name in extras.tensor_names:
            extras.into(specs[name])[:] = contents[name]
        self.recorder.extras.restore(saved.meta.extras, extras.read)
        with BoxReader(box) as reader:
            copy = reader.read(done)
            assert copy is not None
            restore_inline(self.recorder.local_extras, InlineExtras.read(copy.json["local_extras"], "box"))
        self.recorder.learn(Habits())
        self.done = done
        self.recorder.begin(done, None)

    def bits(self) -> list[Any]:
        found: list[Any] = [p.detach().clone() for p in self.model.parameters()]
        return [*found, self.model[1].calls, self.model[1].scale.clone()]  # type: ignore[union-attr,operator]


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(one, other, strict=True))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "counter": lambda params: Counting(params, lr=0.1, momentum=0.9),
    "slow weights": lambda params: Slow(params, lr=0.05),
    "nested": Around,
    "nested, groups apart": lambda params: Around(params, share=False),
    "fast and slow": FastAndSlow,
    "plain": lambda params: torch.optim.AdamW(params, lr=0.05),
}


@pytest.mark.ci
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_the_resumed_run_has_the_bits_of_the_one_that_went_on(
    tmp_path: Path, kind: str, updated: bool, half: bool
) -> None:
    """Saved at a step's end, and after an update whose step has not ended; the fp32 moments of bf16 weights stay so."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    job = Job(tmp_path / "a", MAKERS[kind], half=half)
    job.train(4)
    if updated:
        job.update()
        saved = job.save(updated=True)
        job.done += 1
        job.recorder.end_step(job.done, None)
    else:
        saved = job.save()
    assert saved.meta.reasons == []
    other = Job(tmp_path / "b", MAKERS[kind], seed=7, half=half)
    other.restore(saved, tmp_path / "a" / "box", job.done)
    assert other.recorder.extras.own_reasons == other.recorder.local_extras.own_reasons == []
    for _ in range(4):
        job.train(1)
        other.train(1)
        assert equal(job.bits(), other.bits())
    assert told(job.recorder) == told(other.recorder) == []


@pytest.mark.parametrize("kind", ["counter", "slow weights", "nested, groups apart"])
def test_without_the_extra_the_runs_differ(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control; and what is not saved any more is named as what moves."""
    monkeypatch.setattr(own_state, "_speaks_for_itself", lambda wrapper: False)
    with pytest.raises(AssertionError):
        test_the_resumed_run_has_the_bits_of_the_one_that_went_on(tmp_path, kind, False, False)


def test_without_the_nested_state_the_runs_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    for module in (joined_optimizer, own_state):
        monkeypatch.setattr(module, "nested_in", lambda optimizer: {})
    with pytest.raises(AssertionError):
        test_the_resumed_run_has_the_bits_of_the_one_that_went_on(tmp_path, "nested", False, False)


def test_without_the_module_states_the_runs_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(own_state.ModuleStates, "load_state_dict", lambda *_: None)
    with pytest.raises(AssertionError):
        test_the_resumed_run_has_the_bits_of_the_one_that_went_on(tmp_path, "plain", False, False)


def test_moments_are_not_cast_by_load_state_dict(tmp_path: Path) -> None:
    job = Job(tmp_path, MAKERS["slow weights"], half=True)
    job.train(2)
    for state in job.inner.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-9
    before = [state["exp_avg"].clone() for state in job.inner.state.values()]
    own = OwnOptimizerState(job.wrapper, "optimizer", lambda: True)
    own.load_state_dict(own.state_dict())
    after = [state["exp_avg"] for state in job.inner.state.values()]
    assert [one.dtype for one in after] == [torch.float32] * len(after)
    assert equal(before, after)


def test_torchs_own_optimizers_cost_nothing_and_are_not_suspected(tmp_path: Path) -> None:
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]
    assert len(kinds) > 10
    for kind in kinds:
        if kind in (Optimizer, torch.optim.SparseAdam, torch.optim.LBFGS):
            continue
        weights = nn.Linear(4, 4).requires_grad_(True)
        params = [weights.weight] if kind.__name__ == "Muon" else list(weights.parameters())
        for options in ({}, {"fused": True}, {"capturable": False}):
            try:
                inner = kind(params, lr=0.1, **options)  # type: ignore[call-arg]
            except (TypeError, RuntimeError, ValueError):
                continue
            torch.optim.lr_scheduler.StepLR(inner, 1)
            assert own_state.of_optimizers([OptTFTWrapper(inner)], lambda: True) == {}
            attributes = Attributes({"model": weights, "optimizer": inner}, dict(weights.named_parameters()).copy)
            attributes.begin()
            for _ in range(3):
                weights(torch.randn(2, 4)).sum().backward()
                inner.step()
                attributes.look()
                assert attributes.moved == set()


def test_attributes_that_move_and_are_in_no_state_dict_are_kept(tmp_path: Path) -> None:
    job = Job(tmp_path, lambda params: Hidden(params, lr=0.1))
    job.train(4)
    said = job.recorder.attributes.document()["attributes"]
    assert said["optimizer"].keys() == {"seen", "mean"}


def test_an_optimizer_that_takes_back_something_else_is_named(tmp_path: Path) -> None:
    class Forgets(Counting):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Only a part."""
            super().load_state_dict({**state_dict, "count": 0})

    job = Job(tmp_path, lambda params: Forgets(params, lr=0.1))
    job.train(2)
    own = OwnOptimizerState(job.wrapper, "optimizer", lambda: True)
    own.load_state_dict(own.state_dict())
    assert own.reasons == [
        "optimizer.state_dict()['count'] differs from the state that was passed to load_state_dict()"
    ]


def test_a_checkpoint_without_it_can_be_resumed_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    job = Job(tmp_path / "a", MAKERS["plain"])
    job.train(2)
    saved = job.save()
    job.inner = job.wrapper._inner = Counting(list(job.model.parameters()), lr=0.1)
    other = Job(tmp_path / "b", MAKERS["counter"])
    other.recorder.extras.restore(saved.meta.extras, put_together)  # type: ignore[arg-type]
    assert other.recorder.extras.own_reasons == [
        "optimizer.state_dict() has state beside its parameters' state, and the checkpoint has none of it"
    ]


def test_what_cannot_be_stored_of_a_module_is_named_and_the_rest_is_saved(tmp_path: Path) -> None:
    job = Job(tmp_path, MAKERS["plain"])
    job.model.add_module("odd", Listening(3))
    job.model.odd.scale = object()  # type: ignore[assignment,union-attr]
    states = own_state.ModuleStates(job.model, str)
    assert states.state_dict().keys() == {"1"}
    assert states.reasons == ["odd.get_extra_state()['scale'] (builtins.object) cannot be stored"]


def test_in_a_sharded_job_tensors_of_nobody_knows_whose_part_are_named(tmp_path: Path) -> None:
    job = Job(tmp_path, MAKERS["slow weights"])
    job.train(1)
    own = OwnOptimizerState(job.wrapper, "optimizer", lambda: False)
    assert own.state_dict() == {"count": 1}
    [reason] = own.reasons
    assert reason.startswith("optimizer.state_dict()['slow'] holds tensors that are in no parameter's state")
