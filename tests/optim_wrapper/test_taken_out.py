"""Optimizer state that the loop takes out between two updates is saved as it was, or named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lastwords.optim_wrapper.capture.state_watch import AMOUNT, StateCounts
from lastwords.optim_wrapper.resume.state_restore import RestorePlan
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.processor.recurrence import Late, about_to_change
from lastwords.vocabulary import UNIT_REPLICATED, Phase, Stand
from tests import golden
from tests.optim_wrapper.test_state_watch import Job


def bias_of(job: Job) -> dict[str, Any]:
    return job.optimizer.state[job.net.trained.bias]  # type: ignore[no-any-return]


OUT: dict[str, Callable[[Job], Any]] = {
    "all state of a parameter": lambda job: job.optimizer.state.pop(job.net.trained.bias),
    "one key": lambda job: bias_of(job).pop("exp_avg"),
    "None in its place": lambda job: bias_of(job).update(exp_avg=None),
    "all there is": lambda job: job.optimizer.state.clear(),
}


@pytest.mark.parametrize("case", OUT)
def test_state_that_was_taken_out_after_the_step_s_end_is_saved_as_it_was(tmp_path: Path, case: str) -> None:
    job = Job(tmp_path)
    job.run(3)
    before, reasons = job.save()
    assert reasons == []
    trees = state_of(job)
    OUT[case](job)
    assert job.save() == (before, [])
    assert state_of(job) == trees


def state_of(job: Job) -> dict[str, dict[str, Any]]:
    state = job.source.unit_state(UNIT_REPLICATED, job.step, Stand(Phase.COMPUTING, job.step))
    return {name: dict(tree["dict"]) for name, tree in state.meta.optimizer_state.items()}


@pytest.mark.parametrize("case", OUT)
def test_what_was_written_to_since_or_is_gone_is_named(tmp_path: Path, case: str) -> None:
    job = Job(tmp_path)
    job.run(3)
    moment = bias_of(job)["exp_avg"]
    OUT[case](job)
    moment.mul_(2)
    reasons = job.save()[1]
    golden.says(reasons)


EMPTIED: dict[str, Callable[[torch.Tensor], Any]] = {
    "other data": lambda one: setattr(one, "data", torch.empty(0)),
    "memory given back": lambda one: one.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("case", EMPTIED)
def test_moments_without_memory_are_named_and_a_resume_begins_with_none(tmp_path: Path, case: str) -> None:
    job = Job(tmp_path)
    job.run(3)
    EMPTIED[case](bias_of(job)["exp_avg"])
    saved, reasons = job.save()
    assert "optim/trained.weight/exp_avg" in saved
    assert not any(name.startswith("optim/trained.bias") for name in saved)
    golden.says(reasons)
    state = job.source.unit_state(UNIT_REPLICATED, 3, Stand(Phase.COMPUTING, 3))
    (tmp_path / "again").mkdir()
    again = Job(tmp_path / "again")
    plan = RestorePlan(UnitView(again.net, again.optimizer), [spec for spec, _ in state.tensors], state.meta)
    for spec, source in state.tensors:
        plan.into(spec)[:] = source() if callable(source) else source
    plan.commit()
    again.run(1)


def test_state_that_is_out_when_the_step_ends_is_named_until_it_is_known_not_to_come_back(tmp_path: Path) -> None:
    job = Job(tmp_path)
    out: list[Any] = []
    job.run(1, after=lambda net: out.append(job.optimizer.state.pop(net.trained.bias)))
    golden.says(job.save()[1])
    job.run(1)
    assert job.save()[1] == [], "it was thrown away, as when a loop begins its moments anew"
    job.run(1, after=lambda net: out.append(job.optimizer.state.pop(net.trained.bias)))
    assert job.save()[1] == [], "and is so again"


def test_state_that_is_thrown_away_at_the_ends_of_epochs_is_due_there_alone() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    parameter = optimizer.param_groups[0]["params"][0]
    recorded, late = StateCounts([optimizer]), Late()
    told = []
    for step in range(1, 9):
        recorded.begin_update()
        optimizer.state[parameter] = {"momentum_buffer": torch.ones(1)}
        recorded.end_update(count=True)

        told.append(about_to_change(late.may_move([AMOUNT], step, step % 4 == 0)))
        assert not recorded.is_out()
        if step % 4 == 0:
            del optimizer.state[parameter]
        late.happened({AMOUNT: 1} if recorded.end_step(recorded.now()) else {}, step, step % 4 == 0)
    assert told[:-1] == [[]] * 7
    golden.says(told[-1][0])


def test_state_that_comes_back_for_each_update_is_named_from_then_on(tmp_path: Path) -> None:
    job = Job(tmp_path)
    out: list[Any] = []
    job.between = lambda net: job.optimizer.state.update({net.trained.bias: out.pop()}) if out else None
    for _ in range(3):
        job.run(1, after=lambda net: out.append(job.optimizer.state.pop(net.trained.bias)))
        golden.says(job.save()[1])
    job.run(1)
    golden.says(job.save()[1])


def test_state_that_is_put_in_between_two_steps_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(3)
    bias_of(job)["extra"] = torch.ones(8)
    golden.says(job.save()[1])


def test_state_that_is_taken_out_after_the_update_is_named_where_the_step_is_cut_off(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(3)
    job.compute()
    job.recorder.watch.begin_update()
    job.optimizer.step()
    job.recorder.watch.end_update()
    assert job.save(Phase.UPDATED, 4)[1] == []
    job.optimizer.state.pop(job.net.trained.bias)
    golden.says(job.save(Phase.UPDATED, 4)[1])


def test_a_key_that_comes_in_a_later_step_is_watched_from_then_on(tmp_path: Path) -> None:
    """Step 5 is none of those at whose end everything is looked at."""
    job = Job(tmp_path)
    job.run(4)
    job.run(1, after=lambda net: bias_of(job).update(extra=torch.ones(8)))
    before, _ = job.save()
    job.between = lambda net: bias_of(job)["extra"].mul_(2)
    job.compute()
    assert any("'trained.bias' (extra) changed" in reason for reason in job.save()[1])
    job.recorder.watch.begin_update()
    job.optimizer.step()
    job.recorder.watch.end_update()
    job.step += 1
    job.recorder.end_step(job.step, None)
    kept, _ = job.save()
    assert kept["optim/trained.bias/extra"] != before["optim/trained.bias/extra"]
    job.compute()
    assert job.save() == (kept, [])


def test_state_that_is_out_at_a_step_s_end_for_the_first_time_is_missed_without_a_look_after_the_update() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.state[parameter] = {"momentum_buffer": torch.ones(1)}
    counts = StateCounts([optimizer])
    counts.end_step(counts.now())
    assert counts.reasons() == []
    counts.begin_update()
    out, late = optimizer.state.pop(parameter), Late()
    late.happened({AMOUNT: 1} if counts.end_step(counts.now()) else {}, 2, None)
    assert counts.reasons() == ["optimizer state was removed between optimizer.step() and the end of the step"]
    optimizer.state[parameter] = out
    counts.begin_update()
    assert not counts.is_out()
    assert [*late.may_move([AMOUNT], 3, None)] == [AMOUNT], "it may be about to go again"
