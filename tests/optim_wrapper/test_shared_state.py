"""Optimizer state that shares memory shares it after a resume, or is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lastwords.errors import FormatError, MismatchError
from lastwords.optim_wrapper.resume.state_restore import RestorePlan
from lastwords.optim_wrapper.state.own_state import shared_in
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors.tensor_tree import NamedTensor
from lastwords.vocabulary import UNIT_REPLICATED, Phase, Stand
from tests import golden
from tests.optim_wrapper.test_state_watch import Job


def one_step_for_all(job: Job) -> list[dict[str, Any]]:
    states = [*job.optimizer.state.values()]
    for state in states:
        state["step"] = states[0]["step"]
    return states


def restored(folder: Path, job: Job, change: Callable[[Any], Any] = lambda meta: meta) -> Job:
    """Another process' view of what is saved of this one."""
    state = job.source.unit_state(UNIT_REPLICATED, job.step, Stand(Phase.COMPUTING, job.step))
    folder.mkdir()
    again = Job(folder)
    plan = RestorePlan(UnitView(again.net, again.optimizer), [spec for spec, _ in state.tensors], change(state.meta))
    for spec, source in state.tensors:
        plan.into(spec)[:] = source() if callable(source) else source
    plan.commit()
    return again


def test_one_tensor_in_two_places_is_one_again(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(2, after=lambda net: one_step_for_all(job))
    assert job.save()[1] == []
    again = restored(tmp_path / "again", job)
    steps = [state["step"] for state in again.optimizer.state.values()]
    assert len(steps) == 2
    assert steps[0] is steps[1]
    assert float(steps[0]) == float(one_step_for_all(job)[0]["step"]) == 3.0


def test_tensors_of_their_own_stay_so(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(2)
    again = restored(tmp_path / "again", job)
    steps = [state["step"] for state in again.optimizer.state.values()]
    assert steps[0] is not steps[1]


@pytest.mark.parametrize("first", ["nothing", "unit/replicated/optim/trained.weight/exp_avg"])
def test_sharing_what_does_not_fit_is_refused(tmp_path: Path, first: str) -> None:
    job = Job(tmp_path)
    job.run(1)
    shared = {"unit/replicated/optim/trained.bias/step": first}
    with golden.raises(FormatError):
        restored(tmp_path / "again", job, lambda meta: replace(meta, shared=shared))


def named(**tensors: torch.Tensor) -> list[NamedTensor]:
    return [NamedTensor(name, name, tensor) for name, tensor in tensors.items()]


def test_what_lies_partly_in_the_same_memory_is_named() -> None:
    flat = torch.zeros(10)
    assert shared_in(named(a=flat[:4], b=flat[4:])) == ({}, [])
    assert shared_in(named(a=flat, b=flat.view(10), c=torch.zeros(0))) == ({"b": "a"}, [])
    shared, [reason] = shared_in(named(a=flat[:4], b=flat))
    assert shared == {}
    assert "a and b" in reason or "b and a" in reason
    assert shared_in(named(a=flat, b=flat.view(2, 5)))[1], "of another form"
    [reason] = shared_in(named(a=flat), [flat])[1]
    golden.says(reason)


def test_a_parameter_that_the_loop_has_registered_is_named_where_it_is_missing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(2)
    job.net.register_parameter("anchor", nn.Parameter(torch.ones(2), requires_grad=False))
    job.run(1)
    with golden.raises(MismatchError):
        restored(tmp_path / "again", job)
