"""A loop of the user's own is told when it begins with other random numbers than resume() has put back."""

from __future__ import annotations

import doctest
import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lastwords.checkpoint.meta import LoopFacts
from lastwords.errors import ConfigError
from lastwords.optim_wrapper.capture import recorder
from lastwords.optim_wrapper.capture.rank_local import RngCapture
from lastwords.optim_wrapper.capture.recorder import BackwardPasses, LoopHabits
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.loop import own_loop
from lastwords.optim_wrapper.loop.own_loop import look_at_first_forward
from lastwords.optim_wrapper.resume.resume import Resumed
from lastwords.optim_wrapper.trainer.run import Run
from lastwords.processor.saver import Position
from tests import golden

Log = pytest.LogCaptureFixture


@pytest.fixture(autouse=True)
def at_info(caplog: Log) -> None:
    caplog.set_level(logging.INFO, logger="lastwords")


LOADER = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
"""It does not even shuffle; its iterator draws a seed all the same."""


def resumed(*, own: bool = True) -> torch.nn.Module:
    """A model right after resume()."""
    model = torch.nn.Linear(2, 2)
    rng = RngCapture()
    streams = lambda: {name: bytes(one.data) for name, one in rng.snapshot().items()}  # noqa: E731
    look_at_first_forward(model, streams, 7, lambda: own)
    return model


def test_building_an_iterator_after_resume_is_told_once_at_the_first_forward(caplog: Log) -> None:
    model = resumed()
    for (batch,) in LOADER:
        model(batch)
    (record,) = caplog.records
    golden.says(record.getMessage())


def test_a_step_that_draws_its_own_batch_is_not_warned_and_told_that_it_is_in_order(caplog: Log) -> None:
    """Nobody can tell it from a loop that has drawn too many, and putting the streams back would spoil it."""
    resumed()(torch.randn(1, 2))
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    golden.says(record.getMessage())


def test_putting_the_streams_back_after_it_is_in_order(caplog: Log) -> None:
    model = resumed()
    state = torch.get_rng_state()
    batches = iter(LOADER)
    torch.set_rng_state(state)
    for (batch,) in batches:
        model(batch)
    assert caplog.records == []


def test_a_loop_over_steps_looks_after_its_streams_itself(caplog: Log) -> None:
    model = resumed(own=False)
    for (batch,) in LOADER:
        model(batch)
    assert caplog.records == []


def test_what_is_drawn_in_and_after_the_first_forward_is_training(caplog: Log) -> None:
    model = resumed()
    model.register_forward_hook(lambda *_: torch.rand(1))
    for _ in range(3):
        model(torch.ones(1, 2))
    assert caplog.records == []


def test_every_stream_that_moved_is_named(caplog: Log) -> None:
    model = resumed()
    random.random()
    np.random.rand()
    model(torch.ones(1, 2))
    golden.says(caplog.messages)


def test_nothing_stays_on_the_model() -> None:
    model = resumed()
    model(torch.ones(1, 2))
    assert not model._forward_pre_hooks


def test_the_examples_hold() -> None:
    assert doctest.testmod(own_loop).failed == doctest.testmod(recorder).failed == 0


class Loop:
    """A loop of one's own that resumes after `last`, and calls its steps so until it is refused."""

    def __init__(
        self, last: Position | None, *names: Position, moved: bool = False, went_back: bool = False, inexact: str = ""
    ) -> None:
        self.habits = LoopHabits(lambda: None)
        self.habits.know(names_go_back=went_back)
        recorder: Any = SimpleNamespace(
            named=None, loop=self.habits, begin=lambda *_, **__: None, ledger=Ledger(), known=lambda saved: saved,
            attributes=SimpleNamespace(put_where_it_is=lambda values: ([inexact] * bool(inexact), [])),
        )  # fmt: skip
        run = Run(cast(Any, None), recorder, cast(Any, None), cast(Any, None))
        self.resumed = Resumed(Path("/c"), "j", 4, 0, 0, LoopFacts(), {}, {}, last_named=last, moved=moved)
        run.resume_after(self.resumed)
        self.ledger = recorder.ledger
        for name in names:
            run.look_at_name(name)
            recorder.named = name


N = Position


def test_what_variables_cannot_be_put_back_is_a_reason_of_the_resume() -> None:
    loop = Loop(None, inexact="main() of __main__.average is another object by now")
    assert [*map(str, loop.resumed.reasons)] == ["main() of __main__.average is another object by now"]
    assert (*loop.resumed.reasons,) == loop.ledger.reasons


@pytest.mark.parametrize(
    ("last", "names"),
    [
        (N(1, 3), [N(1, 4), N(2, 1)]),  # in the middle of an epoch
        (N(1, 3), [N(2, 1), N(2, 2)]),  # at its end
        (N(1, 30), [N(2, 31)]),  # steps are not counted from each epoch's start
        (N(1, 3), [N(1, 7)]),  # left out, or counted by batches
        (None, [N(1, 1)]),  # the saved run gave no names
    ],
)  # fmt: skip
def test_a_loop_that_goes_on_is_left_alone(last: Position | None, names: list[Position], caplog: Log) -> None:
    Loop(last, *names)
    assert caplog.records == []


@pytest.mark.parametrize("name", [N(1, 1), N(1, 9), N(2, 2), N(2, 3)], ids=str)
def test_a_first_step_that_is_done_already_is_refused(name: Position) -> None:
    with golden.raises(ConfigError):
        Loop(N(2, 3), name)


def test_on_other_ranks_an_epoch_may_have_fewer_steps_but_no_epoch_comes_again() -> None:
    Loop(N(2, 3), N(2, 2), moved=True)
    with golden.raises(ConfigError):
        Loop(N(2, 3), N(1, 9), moved=True)


def test_names_that_go_back_later_are_told_once_and_a_resume_does_not_refuse_them(caplog: Log) -> None:
    loop = Loop(N(2, 3), N(2, 4), N(1, 1), N(1, 2), N(1, 1))
    (record,) = caplog.records
    golden.says(record.getMessage())
    assert loop.habits.known.names_go_back
    Loop(N(2, 3), N(1, 1), went_back=True)


@pytest.mark.parametrize(
    ("saved", "counts", "said", "usual"),
    [
        (None, [4, 4, 2, 4], [], 4),  # an epoch's last step has fewer
        (None, [4, 4, 2, 2, 4, 4], [], 0),
        (None, [4, 2, 4, 2], [], None),
        (None, [4, 0, 4], [], 4),  # a step that was left out
        (4, [2, 4, 4], [], 4),
        (4, [2, 2, 2], [(4, 2)], 2),
        (4, [2, 2, 4, 4], [(4, 2)], 0),
        (4, [2], [], 4),
        (0, [2, 2, 4, 4], [], 0),
    ],
)  # fmt: skip
def test_another_number_of_backward_passes_is_seen_once(
    saved: int | None, counts: list[int], said: list[tuple[int, int]], usual: int | None
) -> None:
    passes, heard = BackwardPasses(saved), list[tuple[int, int]]()
    passes.when_other = lambda *numbers: heard.append(numbers)
    for count in counts:
        passes.count = count
        passes.end_step()
    assert (heard, passes.usual) == (said, usual)
