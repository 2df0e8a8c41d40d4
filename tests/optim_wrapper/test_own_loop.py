"""A loop of the user's own is told when it begins with other random numbers than resume() has put back."""

from __future__ import annotations

import doctest
import logging
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lastwords.optim_wrapper.capture.rank_local import RngCapture
from lastwords.optim_wrapper.loop import own_loop
from lastwords.optim_wrapper.loop.own_loop import look_at_first_forward
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
    look_at_first_forward(model, RngCapture(), 7, lambda: own)
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
    assert doctest.testmod(own_loop).failed == 0
