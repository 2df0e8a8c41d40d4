"""`tft.every(...)`, and the same in MindSpore's words: what is meant, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lastwords.compat.mindspore import CheckpointConfig, ModelCheckpoint
from lastwords.errors import ConfigError
from lastwords.optim_wrapper.trainer.checkpoint_config import checked_schedule, schedule_of
from lastwords.vocabulary import Schedule
from tests import golden

HERE = Path("/ckpt")


@pytest.mark.parametrize(
    ("config", "schedule"),
    [
        ({}, Schedule(1, 0.0, 5, 0)),
        ({"save_checkpoint_steps": 100}, Schedule(100, 0.0, 5, 0)),
        ({"save_checkpoint_steps": 100, "save_checkpoint_seconds": 60}, Schedule(100, 0.0, 5, 0)),
        ({"save_checkpoint_steps": None, "save_checkpoint_seconds": 60}, Schedule(0, 60.0, 5, 0)),
        ({"keep_checkpoint_max": 3, "keep_checkpoint_per_n_minutes": 10}, Schedule(1, 0.0, 3, 0)),
        ({"keep_checkpoint_max": 0, "keep_checkpoint_per_n_minutes": 10}, Schedule(1, 0.0, 0, 10)),
        ({"keep_checkpoint_max": None}, Schedule(1, 0.0, 1, 0)),
    ],
    ids=str,
)
def test_steps_are_preferred_to_seconds_and_a_number_to_minutes(config: dict[str, Any], schedule: Schedule) -> None:
    assert CheckpointConfig(**config).schedule == schedule


NOTHING = {
    "save_checkpoint_steps": None,
    "save_checkpoint_seconds": 0,
    "keep_checkpoint_max": 0,
    "keep_checkpoint_per_n_minutes": None,
}


@pytest.mark.parametrize(
    "config",
    [
        NOTHING,
        {"save_checkpoint_steps": -1},
        {"save_checkpoint_steps": 1.5},
        {"save_checkpoint_seconds": True},
        {"keep_checkpoint_max": "5"},
        {"append_info": ["epoch_num"]},
        {"format": "hdf5"},
    ],
    ids=str,
)
def test_a_config_that_cannot_be_meant_is_refused(config: dict[str, Any]) -> None:
    with golden.raises(ConfigError) as caught:
        CheckpointConfig(**config)
    assert isinstance(caught.value, ValueError)


def test_a_config_after_which_nothing_is_due_is_refused() -> None:
    with golden.raises(ConfigError):
        assert CheckpointConfig(save_checkpoint_steps=0).schedule


@pytest.mark.parametrize("given", [{"prefix": "a/b"}, {"prefix": ""}, {"directory": 3}, {"config": {}}], ids=str)
def test_a_model_checkpoint_that_cannot_be_meant_is_refused(given: dict[str, Any]) -> None:
    with golden.raises(ConfigError):
        ModelCheckpoint(**given)


def test_a_model_checkpoint_saves_where_the_job_does() -> None:
    config = CheckpointConfig(save_checkpoint_steps=7)
    assert schedule_of(ModelCheckpoint(config=config), HERE) == config.schedule
    assert schedule_of(ModelCheckpoint("resnet", "/ckpt/", config), HERE) == config.schedule
    assert schedule_of(ModelCheckpoint(), HERE) == Schedule(1, 0.0, 5, 0)
    with golden.raises(ConfigError):
        schedule_of(ModelCheckpoint(directory="/elsewhere"), HERE)


def test_every_takes_no_other_config() -> None:
    with golden.raises(ConfigError):
        schedule_of({"steps": 3}, HERE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        (0, 0.0, 5, 0),
        (-1, 0.0, 5, 0),
        (True, 0.0, 5, 0),
        (0, -1.0, 5, 0),
        (0, float("inf"), 5, 0),
        (1, 0.0, -5, 0),
        (1, 0.0, 5, 10),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_meant_are_refused(given: tuple[Any, ...]) -> None:
    with golden.raises(ConfigError):
        checked_schedule(*given)


def test_numbers_are_taken_as_they_are() -> None:
    assert checked_schedule(10, 60, 3, 0) == Schedule(10, 60.0, 3, 0)
    assert checked_schedule(10, 0, None, 0) == Schedule(10, 0.0, 5, 0)
    assert checked_schedule(10, 0, None, 30) == Schedule(10, 0.0, 0, 30)
