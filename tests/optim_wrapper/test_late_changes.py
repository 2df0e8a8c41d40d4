"""What else than tensors the loop changes after its update is named where a step is cut off before that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from lastwords.optim_wrapper.capture.state_watch import LOOKS
from lastwords.optim_wrapper.state.own_state import OwnState
from lastwords.vocabulary import Phase
from tests.optim_wrapper.test_state_watch import Job, Net


def cut_off(job: Job) -> list[str]:
    """Why a step that is cut off after its update is not exact."""
    job.compute()
    job.recorder.watch.begin_update()
    job.optimizer.step()
    job.recorder.watch.end_update()
    return job.save(Phase.UPDATED, job.step + 1)[1]


def named(job: Job, reasons: list[str]) -> list[str]:
    """What is said to have been about to change."""
    prefix, suffix = (
        f"step {job.step + 1} was cut off before its end: ",
        " may have been about to change; this ",
    )
    assert all(reason.startswith(prefix) and suffix in reason for reason in reasons)
    return [reason.removeprefix(prefix).partition(suffix)[0] for reason in reasons]


def scale(job: Job, key: str, factor: float = 0.9) -> None:
    group = job.optimizer.param_groups[0]
    value = group[key]
    group[key] = tuple(factor * one for one in value) if isinstance(value, tuple) else factor * value


Act = Callable[[Job], Any]
NOTHING: Act = lambda job: None  # noqa: E731
COSINE: Act = lambda job: schedulers.CosineAnnealingLR(job.optimizer, 20)  # noqa: E731
CYCLE: Act = lambda job: schedulers.OneCycleLR(job.optimizer, 0.1, total_steps=20)  # noqa: E731
OTHER: Act = lambda job: schedulers.StepLR(torch.optim.SGD([torch.ones(1)], 0.1), 1)  # noqa: E731

SCHEDULES: dict[str, tuple[list[Act], Act, bool]] = {
    "none": ([], lambda job: scale(job, "lr"), True),
    "the scheduler alone": ([COSINE], NOTHING, False),
    "of a sequence": (
        [lambda job: schedulers.SequentialLR(job.optimizer, [COSINE(job), COSINE(job)], [3])], NOTHING, False,
    ),
    "two of one optimizer": ([COSINE, lambda job: schedulers.ExponentialLR(job.optimizer, 0.9)], NOTHING, False),
    "momentum, too": ([CYCLE], NOTHING, False),
    "weight decay by hand": ([COSINE], lambda job: scale(job, "weight_decay"), True),
    "betas by hand": ([COSINE], lambda job: scale(job, "betas"), True),
    "another value than the scheduler's": ([COSINE], lambda job: scale(job, "lr"), True),
    "another optimizer's scheduler": ([OTHER], lambda job: scale(job, "lr"), True),
    "a new key": ([COSINE], lambda job: job.optimizer.param_groups[0].update({f"key{job.step}": 1}), True),
}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("case", SCHEDULES)
def test_of_hyperparameters_only_what_a_scheduler_s_step_leaves_is_not_told(
    tmp_path: Path, case: str, tensor: bool
) -> None:
    made, by_hand, told = SCHEDULES[case]
    job = Job(tmp_path)
    if tensor:
        job.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    every = [make(job) for make in made]
    job.recorder.watch.schedulers = every

    def after(net: Net) -> None:
        for one in every:
            one.step()
        by_hand(job)

    job.run(2, after=after)
    group = job.optimizer.param_groups[0]
    shared = tensor and group["lr"] is group.get("initial_lr")  # by SequentialLR of torch 2.7, which changes both
    assert named(job, cut_off(job)) == (["hyperparameters"] if told or shared else [])


class Plain:
    """A scheduler that is not torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def get_last_lr(self) -> list[float]:
        return [0.1]


@pytest.mark.parametrize(("key", "told"), [("lr", False), ("weight_decay", True)])
def test_a_scheduler_that_does_not_show_what_it_leaves_explains_lr_alone(tmp_path: Path, key: str, told: bool) -> None:
    job = Job(tmp_path)
    job.recorder.watch.schedulers = [Plain(job.optimizer)]
    job.run(2, after=lambda net: scale(job, key))
    assert named(job, cut_off(job)) == (["hyperparameters"] if told else [])


def test_numbers_that_the_loop_changes_after_its_update_are_told(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(1)
    state = job.optimizer.state[job.net.trained.bias]
    state["scale"] = 1.0
    job.recorder.watch.list_tensors()
    job.run(1)
    assert cut_off(job) == []
    job.recorder.end_step(3, None)
    job.step = 3
    job.run(1, after=lambda net: state.update(scale=0.5))
    assert named(job, cut_off(job)) == ["the optimizer's numbers"]


def test_requires_grad_that_the_loop_changes_after_its_update_is_told(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(2)
    assert cut_off(job) == []
    job.step = 3
    job.net.frozen.requires_grad_()
    job.recorder.end_step(3, None)
    assert named(job, cut_off(job)) == ["requires_grad"]


class Counting(OwnState):
    """An optimizer's own counter, a list and a tensor."""

    def __init__(self) -> None:
        super().__init__("optimizer.state_dict()")
        self.state = {"count": 0, "list": [1.0], "small": torch.zeros(2), "large": torch.zeros(5000)}

    def state_dict(self) -> dict[str, Any]:
        return self.state


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a counter": lambda state: state.update(count=state["count"] + 1),
    "an item": lambda state: state["list"].append(2.0),
    "a tensor": lambda state: state["small"].add_(1),
    "a large tensor": lambda state: state["large"].add_(1),
}


@pytest.mark.parametrize("case", CHANGES)
def test_own_state_that_the_loop_changes_after_its_update_is_told(tmp_path: Path, case: str) -> None:
    job, own = Job(tmp_path), Counting()
    job.recorder.watch.know([own])
    job.run(2)
    assert cut_off(job) == []
    job.step = 3
    CHANGES[case](own.state)
    job.recorder.end_step(3, None)
    assert named(job, cut_off(job)) == ["what optimizer.state_dict() has"]


def test_a_state_dict_that_raises_does_not_stop_the_loop(tmp_path: Path) -> None:
    class Broken(Counting):
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("not now")

    job = Job(tmp_path)
    job.recorder.watch.know([Broken()])
    job.run(2)
    assert cut_off(job) == []


def test_what_has_been_seen_to_change_is_looked_at_in_every_step_from_then_on(tmp_path: Path) -> None:
    job, own = Job(tmp_path), Counting()
    job.recorder.watch.know([own])
    job.run(LOOKS + 8, after=lambda net: CHANGES["a counter"](own.state) if job.step % 3 == 0 else None)
    found = []
    for _ in range(3):
        found.append(bool(cut_off(job)))
        job.step += 1
        if job.step % 3 == 0:
            CHANGES["a counter"](own.state)
        job.recorder.end_step(job.step, None)
    assert found == [False, False, True], "in these steps alone, so all of them were looked at"
