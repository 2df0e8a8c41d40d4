"""`tft.every(...)`, and the same in MindSpore's words: what is meant, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lastwords
from lastwords.checkpoint import load
from lastwords.checkpoint.manifest import CheckpointKind, Claimed
from lastwords.checkpoint.system import REAL_OS
from lastwords.compat.mindspore import CheckpointConfig, ModelCheckpoint
from lastwords.errors import ConfigError, WrongTypeError
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
    ("config", "upstream"),
    [
        (NOTHING, ValueError),
        ({"save_checkpoint_steps": -1}, ValueError),
        ({"keep_checkpoint_per_n_minutes": -1}, ValueError),
        ({"save_checkpoint_steps": 1.5}, TypeError),
        ({"save_checkpoint_seconds": True}, TypeError),
        ({"keep_checkpoint_max": "5"}, TypeError),
        ({"keep_checkpoint_per_n_minutes": float("inf")}, TypeError),
        ({"integrated_save": 1}, TypeError),
        ({"exception_save": None}, TypeError),
        ({"crc_check": "yes"}, TypeError),
        ({"async_save": 0}, TypeError),
        ({"append_info": "epoch_num"}, TypeError),
        ({"append_info": ["epoch_num"]}, ValueError),
        ({"format": "hdf5"}, ValueError),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_meant_is_refused_as_upstream_refuses_it(
    config: dict[str, Any], upstream: type[Exception]
) -> None:
    """Its code raises TypeError where its page says ValueError: ours is both."""
    with golden.raises(ConfigError) as caught:
        CheckpointConfig(**config)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, upstream)


def test_what_changes_nothing_here_is_accepted() -> None:
    plain = CheckpointConfig()
    assert CheckpointConfig(1, 0, 5, 0, False, "thread", [], True, True, "safetensors").schedule == plain.schedule


def test_a_config_after_which_nothing_is_due_is_refused() -> None:
    with golden.raises(ConfigError):
        assert CheckpointConfig(save_checkpoint_steps=0).schedule


@pytest.mark.parametrize(
    ("given", "upstream"),
    [
        ({"prefix": "a/b"}, ValueError),
        ({"prefix": ""}, ValueError),
        ({"prefix": 3}, ValueError),
        ({"directory": 3}, TypeError),
        ({"config": {}}, TypeError),
    ],
    ids=str,
)
def test_a_model_checkpoint_that_cannot_be_meant_is_refused_as_upstream_refuses_it(
    given: dict[str, Any], upstream: type[Exception]
) -> None:
    with golden.raises(ConfigError) as caught:
        ModelCheckpoint(**given)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, upstream)


def test_a_model_checkpoint_saves_where_the_job_does() -> None:
    config = CheckpointConfig(save_checkpoint_steps=7)
    assert schedule_of(ModelCheckpoint(config=config), HERE) == config.schedule
    assert schedule_of(ModelCheckpoint("resnet", "/ckpt/", config), HERE) == config.schedule
    assert schedule_of(ModelCheckpoint(), HERE) == Schedule(1, 0.0, 5, 0)
    with golden.raises(ConfigError):
        schedule_of(ModelCheckpoint(directory="/elsewhere"), HERE)


def test_every_takes_no_other_config() -> None:
    with golden.raises(WrongTypeError):
        schedule_of({"steps": 3}, HERE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        (0, 0.0, 5, 0),
        (-1, 0.0, 5, 0),
        (True, 0.0, 5, 0),
        (0, -1.0, 5, 0),
        (0, float("inf"), 5, 0),
        (0, "60", 5, 0),
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


# ---------------------------------------------------------------------- tft.every itself


def made(path: Path) -> lastwords.TFTRegister:
    model = nn.Linear(2, 2)
    return lastwords.protect(path, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))


def train(tft: lastwords.TFTRegister, model: nn.Module, steps: int) -> None:
    for _, _, batch in tft.steps([torch.ones(1, 2)] * steps, epochs=1):
        tft.optimizer.zero_grad()
        model(batch).sum().backward()
        tft.optimizer.step()


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", "{TTP:0}")


CONFIG = CheckpointConfig(save_checkpoint_steps=2, keep_checkpoint_max=1)


@pytest.mark.parametrize(
    "numbers", [{"steps": 3}, {"seconds": 60}, {"keep": 1}, {"keep": 0}, {"keep_per_minutes": 7}], ids=str
)
@pytest.mark.parametrize("config", [CONFIG, ModelCheckpoint(config=CONFIG)], ids=lambda one: type(one).__name__)
@pytest.mark.usefixtures("off")
def test_a_config_and_numbers_beside_it_are_refused(tmp_path: Path, config: Any, numbers: dict[str, Any]) -> None:
    with made(tmp_path) as tft, golden.raises(ConfigError):
        tft.every(config, **numbers)


@pytest.mark.parametrize("again", [{"steps": 20, "keep": 2}, {"config": CONFIG}], ids=["numbers", "a config"])
@pytest.mark.usefixtures("off")
def test_a_second_call_is_refused_and_does_not_replace_the_first(tmp_path: Path, again: dict[str, Any]) -> None:
    with made(tmp_path) as tft:
        with pytest.raises(ConfigError):
            tft.every()  # a call that is refused is none
        tft.every(steps=10, keep=3)
        with golden.raises(ConfigError):
            tft.every(**again)
        assert tft._started("every").schedule == Schedule(10, 0.0, 3, 0)


@pytest.mark.usefixtures("off")
def test_every_outside_of_its_block_or_in_the_loop_is_refused(tmp_path: Path) -> None:
    tft = made(tmp_path)
    with golden.raises(ConfigError):
        tft.every(steps=1)
    with tft:
        for _ in tft.steps([1, 2], epochs=1):
            with golden.raises(ConfigError):
                tft.every(steps=1)


@pytest.mark.usefixtures("off")
def test_a_directory_that_differs_is_refused_also_where_nothing_would_be_written(tmp_path: Path) -> None:
    with made(tmp_path / "ckpt") as tft:
        with golden.raises(ConfigError):
            tft.every(ModelCheckpoint(directory=tmp_path / "elsewhere", config=CONFIG))
        tft.every(ModelCheckpoint("resnet", tmp_path / "ckpt", CONFIG))


@pytest.mark.process
@pytest.mark.parametrize("switch", ["{TTP:1}", "{TTP:0}"])
def test_a_model_checkpoint_writes_unless_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, switch: str
) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", switch)
    model = nn.Linear(2, 2)
    tft = lastwords.protect(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    with tft:
        tft.every(ModelCheckpoint("resnet", tmp_path, CONFIG))
        train(tft, model, 4)
    caplog.clear()
    tft.save()
    if switch == "{TTP:1}":
        golden.says("\n".join(caplog.messages))
    written = [Claimed.read(path) for path in load.candidates([tmp_path], REAL_OS)]
    if switch == "{TTP:1}":
        assert written
        assert all(said.kind is CheckpointKind.PERIODIC and said.global_step in (2, 4) for said in written)
        assert not list(tmp_path.rglob("resnet*"))
    else:
        assert list(tmp_path.iterdir()) == []
