"""The short form, what is checked at once, and what a run that is switched off leaves alone."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import lastwords
from lastwords.checkpoint import starts
from lastwords.errors import ConfigError, NotAnOptimizerError
from lastwords.optim_wrapper.launch.config import Config
from lastwords.optim_wrapper.trainer.protect import More, controller_address
from tests import golden

OFF, ON = "{TTP:0}", "{TTP:1}"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(path: Path, **more: Any) -> lastwords.TFTRegister:
    model = nn.Linear(2, 2)
    return lastwords.protect(path, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), **more)


# ---------------------------------------------------------------------- protect


def test_it_takes_what_the_long_form_takes() -> None:
    taken = inspect.signature(lastwords.TFTRegister).parameters.values()
    assert {one.name for one in taken if one.kind is one.KEYWORD_ONLY} - {"model", "optimizer"} == set(
        More.__annotations__
    )


def test_a_plain_optimizer_is_wrapped_and_a_wrapped_one_stays_as_it_is(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    plain, wrapped = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
    wrapper = lastwords.OptTFTWrapper(wrapped)
    tft = lastwords.protect(tmp_path, model=nn.ModuleList([model, other]), optimizer=[plain, wrapper])
    assert [one.inner for one in tft.optimizers] == [plain, wrapped]
    assert tft.optimizers[1] is wrapper
    with golden.raises(ConfigError):
        _ = tft.optimizer


def test_what_is_no_optimizer_is_refused(tmp_path: Path) -> None:
    with golden.raises(NotAnOptimizerError):
        lastwords.protect(tmp_path, model=nn.Linear(2, 2), optimizer="adam")  # type: ignore[arg-type]


def test_what_cannot_be_called_before_the_end_is_refused(tmp_path: Path) -> None:
    tft = made(tmp_path)
    tft.on_leave(lambda: None)
    with golden.raises(ConfigError):
        tft.on_leave("close()")  # type: ignore[arg-type]


def test_the_ranks_meet_where_their_launcher_says() -> None:
    assert controller_address({"MASTER_ADDR": "node-3"}, 8) == "node-3"
    assert controller_address({}, 1) == "127.0.0.1"
    with golden.raises(ConfigError):
        controller_address({}, 8)


@pytest.mark.parametrize("address", ["0.0.0.0", "10.0.0.7:30051", "[node-3]", "not an address"])
def test_what_is_wrong_with_the_launchers_address_is_said_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    with pytest.raises(ConfigError, match=r"^MASTER_ADDR") as caught:
        made(tmp_path)
    assert "ctrl_" not in str(caught.value)


def test_an_address_in_brackets_is_taken_as_it_is_meant() -> None:
    assert controller_address({"MASTER_ADDR": "[::1]"}, 8) == "::1"
    assert Config.from_env(0, "[fe80::1]", 30051, "ckpts", environ={}).ctrl_ip == "fe80::1"


def test_an_unknown_argument_is_said_to_be_of_protect(tmp_path: Path) -> None:
    with golden.raises(TypeError):
        made(tmp_path, ctrl_port=30051)


def test_a_plain_optimizer_that_is_stepped_by_itself_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), 0.1)
    with lastwords.protect(tmp_path, model=model, optimizer=plain) as tft:
        model(torch.ones(1, 2)).sum().backward()
        before = model.weight.detach().clone()
        with golden.raises(ConfigError):
            plain.step()
        assert torch.equal(model.weight, before)
        tft.optimizer.step()
        tft.step_end()
    plain.step()


# ---------------------------------------------------------------------- steps()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(([1, 2], -1), "epochs"), (([1, 2], 1, 0), "accumulate"), ((iter([1]), 1), "length|len")],
)
def test_a_wrong_argument_is_told_by_the_call_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...], named: str
) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", OFF)
    with made(tmp_path) as tft:
        with pytest.raises(ConfigError, match=named):
            tft.steps(*arguments)
        assert [step for _, step, _ in tft.steps([1, 2], 1)] == [1, 2], "a call that was refused counts for nothing"


def test_steps_outside_of_its_block_or_twice_is_told_by_the_call_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", OFF)
    tft = made(tmp_path)
    with golden.raises(ConfigError):
        tft.steps([1], 1)
    with tft:
        tft.steps([1], 1)
        with golden.raises(ConfigError):
            tft.steps([1], 1)


# ---------------------------------------------------------------------- what stays behind


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, int]]:
    """How many hooks of each kind there are on modules, parameters and the optimizer."""
    found = []
    for name, module in model.named_modules():
        found += [(f"{name} {key}", len(hooks)) for key, hooks in vars(module).items() if key.endswith("_hooks")]
    for name, parameter in model.named_parameters():
        found.append((name, len(parameter._post_accumulate_grad_hooks or ())))
    found += [(key, len(hooks)) for key, hooks in vars(optimizer).items() if key.endswith("_hooks")]
    return found


def process() -> tuple[Any, ...]:
    return sys.excepthook, threading.enumerate(), dist.all_reduce, dist.broadcast, torch.Tensor.backward


def trained(tft: lastwords.TFTRegister, model: nn.Module) -> None:
    for _ in tft.steps([1, 2], epochs=1):
        tft.optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        tft.optimizer.step()


def test_a_run_that_is_switched_off_has_no_hook_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: None
) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", OFF)
    model: Any = DDP(nn.Linear(2, 2))
    plain = torch.optim.SGD(model.parameters(), 0.1)
    before, around = hooks_of(model, plain), process()
    tft = lastwords.protect(tmp_path, model=model, optimizer=plain)
    assert hooks_of(model, plain) == before
    with tft:
        trained(tft, model)
        assert hooks_of(model, plain) == before
        assert process() == around
        later: Any = DDP(model.module)
        later(torch.ones(1, 2)).sum().backward()
        assert hooks_of(model, plain) == before, "nor does a DDP that is made later get any"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_a_run_that_is_over_leaves_no_hook_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: None) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", ON)
    model: Any = DDP(nn.Linear(2, 2))
    plain = torch.optim.SGD(model.parameters(), 0.1)
    before = hooks_of(model, plain)
    tft = lastwords.protect(tmp_path, model=model, optimizer=plain)
    assert hooks_of(model, plain) != before, "what is counted below would be nothing"
    tft.start()
    tft.stop()
    tft.stop()
    assert hooks_of(model, plain) == before


@pytest.mark.process
def test_of_its_controller_a_normal_end_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", ON)
    caplog.set_level(logging.DEBUG, "lastwords")
    model = nn.Linear(2, 2)
    tft: Any = lastwords.protect(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    with tft:
        session = tft._run.protection._session
        assert session._wanted()
        for _ in tft.steps([1, 2], epochs=1):
            tft.optimizer.step()
    assert not session._wanted()
    of_it = [one for one in caplog.records if one.name.startswith("lastwords.processor")]
    assert [one.getMessage() for one in of_it if one.levelno > logging.DEBUG] == []


@pytest.mark.process
@pytest.mark.parametrize("case", ["alone", "another lives", "named"])
def test_a_job_without_a_name_is_told_of_another_one_that_lives_in_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", ON)
    monkeypatch.setenv("LASTWORDS_JOB", "digits" if case == "named" else "")
    model = nn.Linear(2, 2)
    other = None if case == "alone" else starts.Claim.take(tmp_path, "letters", 1)
    tft = lastwords.protect(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    tft.start()
    tft.stop()
    if other is not None:
        other.release()
    said = [one.getMessage().replace(str(tmp_path), "/ckpt") for one in caplog.records if "letters" in one.getMessage()]
    assert bool(said) == (case == "another lives")
    if said:
        golden.says("\n".join(said))
