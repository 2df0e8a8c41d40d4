"""What the variables of the functions that run a loop hold: a trainer, a pool, a table of one's own."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lastwords.checkpoint.meta import StepDocument
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.state.attributes import Attributes, SavedValues, saved_in
from lastwords.optim_wrapper.state.object_walk import AttributesOf
from tests import golden
from tests.ledgers import told

HERE = "tests.optim_wrapper.test_variables"


class Meter:
    def __init__(self) -> None:
        self.mean, self.seen = 0.0, 0


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.meter = Meter()
        self.average: float | None = None

    def fit(self, act: Callable[..., None], watch: Attributes) -> None:
        pool: list[torch.Tensor] = []
        recent: deque[int] = deque(maxlen=2)
        slow = torch.zeros(2)
        best = 1.0
        watch.begin()
        act(self, pool, recent, slow)
        best *= 0.5
        act = print


def watch_of(model: nn.Module, *, variables: bool = True, **more: Any) -> Attributes:
    saved = lambda: {f"parameter {n}": one for n, one in model.named_parameters()}  # noqa: E731
    return Attributes({"model": model}, saved, variables=variables, **more)


def train(trainer: Trainer, pool: list[torch.Tensor], recent: deque[int], slow: torch.Tensor) -> None:
    trainer.meter.mean, trainer.meter.seen = 0.25, 3
    trainer.average = 0.5
    pool += [torch.ones(1), torch.full((2,), 2.0)]
    recent += [1, 2, 3]
    slow += 1


def saved(watch: Attributes) -> SavedValues:
    """As it is read back."""
    return saved_in(StepDocument(**watch.document()), "x")


def run(act: Callable[..., None], watch: Attributes | None = None) -> Attributes:
    """A loop in which a step does this."""
    model = nn.Linear(2, 2)
    watch = watch or watch_of(model)
    trainer = Trainer(model)
    trainer.fit(act, watch)
    return watch


def taken(act: Callable[..., None] = train, **more: Any) -> tuple[SavedValues, Attributes]:
    """What is saved of a loop in which a step does this."""
    found: list[SavedValues] = []

    def step(*of: Any) -> None:
        watch.look()
        assert watch.document() == {}
        act(*of)
        watch.look()
        found.append(saved(watch))

    watch = watch_of(nn.Linear(2, 2), **more)
    run(step, watch)
    return found[0], watch


def test_what_they_lead_to_is_put_back_into_the_very_objects_of_a_new_process() -> None:
    state, _ = taken()
    assert {path: set(keys) for path, keys in state.values.items()} == {
        f"run() of {HERE}.trainer": {"average"},
        f"run() of {HERE}.trainer.meter": {"mean", "seen"},
        f"Trainer.fit() of {HERE}": {"pool", "recent", "slow"},
    }
    assert state.before_the_loop.values == {}

    def restored(trainer: Trainer, pool: list[torch.Tensor], recent: deque[int], slow: torch.Tensor) -> None:
        assert watch.restore(state.at_its_place) == []
        assert (trainer.meter.mean, trainer.meter.seen, trainer.average) == (0.25, 3, 0.5)
        assert [one.tolist() for one in pool] == [[1], [2, 2]]
        assert (recent, slow.tolist()) == (deque([2, 3], 2), [1, 1])

    watch = watch_of(nn.Linear(2, 2))
    run(restored, watch)


def test_an_incident_finds_what_has_moved_since_the_last_look_from_another_thread() -> None:
    found: list[list[str]] = []

    def step(trainer: Trainer, *_: Any) -> None:
        trainer.meter.seen += 1
        thread = threading.Thread(target=lambda: found.append(watch.unseen()))
        thread.start()
        thread.join()

    watch = watch_of(nn.Linear(2, 2))
    run(step, watch)
    assert found == [[f"run() of {HERE}.trainer.meter.seen"]]


def test_extras_are_saved_as_such_and_forgotten_variables_not_at_all() -> None:
    meter = Meter()

    def step(*_: Any) -> None:
        meter.seen += 1

    assert len(taken(step)[0].values) == 1
    assert taken(step, apart={"meter": meter})[0].values == {}
    assert taken(step, variables=False)[0].values == {}, "nobody has asked for that"
    state, watch = taken(ledger=Ledger(["*() of *"]))
    assert state.values == {}
    assert told(watch) == []


def test_a_tensor_of_another_form_cannot_be_put_into_a_variable() -> None:
    def grow(trainer: Trainer, pool: list[Any], recent: Any, slow: torch.Tensor) -> None:
        slow.resize_(3).fill_(7)

    state, _ = taken(grow)
    said: list[str] = []
    watch = watch_of(nn.Linear(2, 2))
    run(lambda *_: said.extend(watch.restore(state.at_its_place)), watch)
    golden.says(said)
    assert told(watch) == []
    run(lambda *_: said.extend(watch.put_where_it_is(state.values)[0]), watch)
    assert said[0] in said[1:]


def test_what_the_loop_alone_makes_is_named_where_resume_cannot_find_it() -> None:
    state, _ = taken()
    watch = watch_of(nn.Linear(2, 2))
    watch.begin()
    reasons, missing = watch.put_where_it_is(state.values)
    assert reasons == []
    assert f"Trainer.fit() of {HERE}.pool" in missing
    assert len(missing) == 6


@pytest.mark.ci
def test_what_a_variable_held_is_not_kept_alive_behind_the_next_look() -> None:
    def body(watch: Attributes) -> weakref.ref[Any]:
        meter = Meter()
        kept = weakref.ref(meter)
        watch.begin()
        watch.look()
        assert meter is kept()
        del meter
        watch.look()
        return kept

    kept = body(watch_of(nn.Linear(2, 2)))
    gc.collect()
    assert kept() is None


def test_objects_that_are_named_instead_are_state_without_what_a_library_sets_in_them() -> None:
    def of(meter: Meter, averaged: nn.Module) -> Attributes:
        meter.averaged = averaged  # type: ignore[attr-defined]
        held = {"meter": AttributesOf(meter, {"seen"})}
        return Attributes({}, dict, variables=held, apart={"averaged": averaged})

    meter, other, averaged = Meter(), Meter(), nn.Linear(2, 2)
    watch = of(meter, averaged)
    watch.begin()
    meter.mean, meter.seen, averaged.training = 0.5, 3, False
    watch.look()
    state = saved(watch)
    assert {path: set(keys) for path, keys in state.values.items()} == {"meter": {"mean"}}
    here = of(other, nn.Linear(2, 2))
    here.begin()
    assert here.restore(state) == []
    assert (other.mean, other.seen) == (0.5, 0)
