"""Arguments of a wrong type or value are refused by the constructor, with their name and what to pass instead."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lastwords import OptTFTWrapper, TFTRegister
from lastwords.controller.events import ControllerOptions
from lastwords.controller.handover import ControllerSpec
from lastwords.errors import ConfigError
from lastwords.optim_wrapper.launch import config
from lastwords.optim_wrapper.launch.config import Config
from lastwords.optim_wrapper.launch.reporter import LAUNCHER
from lastwords.processor.events import ProcessorOptions
from tests import golden

GOOD: dict[str, Any] = {"ctrl_rank_id": 0, "ctrl_ip": "127.0.0.1", "ctrl_port": 30051, "ckpt_save_path": "./ckpt"}


def register(**changes: Any) -> TFTRegister:
    model = torch.nn.Linear(2, 2)
    optimizer = OptTFTWrapper(torch.optim.SGD(model.parameters(), 0.1))
    return TFTRegister(**{**GOOD, "model": model, "optimizer": optimizer, **changes})


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("ctrl_rank_id", "0"),
        ("ctrl_rank_id", -1),
        ("ctrl_rank_id", True),
        ("ctrl_ip", "not an ip!"),
        ("ctrl_ip", ""),
        ("ctrl_ip", "127.0.0.1:30051"),
        ("ctrl_ip", "10.0.0"),
        ("ctrl_ip", 3),
        ("ctrl_ip", None),
        ("ctrl_ip", "0.0.0.0"),
        ("ctrl_port", "30051"),
        ("ctrl_port", -1),
        ("ctrl_port", 30051.0),
        ("ckpt_save_path", 3),
        ("ckpt_save_path", ""),
        ("ckpt_save_path", None),
        ("ckpt_save_path", b"/ckpt"),
        ("ckpt_save_path", "a\0b"),
        ("ckpt_save_path", "/ckpt\udcff"),
        ("fallback_path", 3),
        ("fallback_path", ""),
        ("fallback_path", "./ckpt"),
        ("fallback_path", Path.cwd() / "x" / ".." / "ckpt"),
        ("data", "jump"),
        ("extras", [1]),
        ("extras", []),
        ("extras", 0),
        ("local_extras", 3),
        ("extras", {"scheduler": 3}),
        ("local_extras", {3: {}}),
        ("model", 3),
        ("optimizer", 3),
    ],
    ids=repr,
)
def test_a_wrong_argument_is_named_with_what_to_pass(argument: str, value: Any) -> None:
    with golden.raises(ConfigError) as caught:
        register(**{argument: value})
    assert argument in str(caught.value)


@pytest.mark.parametrize("ip", ["10.0.0.7", "::1", "fe80::1%eth0", "node-3", "node_3.cluster.example", "localhost"])
def test_every_way_to_write_an_address_is_taken(ip: str) -> None:
    assert Config.from_env(**{**GOOD, "ctrl_ip": ip}, environ={}).ctrl_ip == ip


@pytest.mark.parametrize("path", ["ckpt", "./ckpt/", Path("ckpt"), Path.cwd() / "ckpt"])
def test_a_relative_directory_stays_the_same_where_the_process_goes(path: Any) -> None:
    assert Config.from_env(**{**GOOD, "ckpt_save_path": path}, environ={}).ckpt_save_path == Path.cwd() / "ckpt"


def test_a_second_directory_and_nothing_else_are_fine() -> None:
    register(fallback_path="./ckpt2", extras=None, local_extras={})


def test_the_constructor_touches_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    register(fallback_path="elsewhere")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan", ""])
def test_a_duration_that_is_none_is_refused_by_the_name_of_its_variable(text: str) -> None:
    with pytest.raises(ConfigError, match="LASTWORDS_SETTLE_TIMEOUT_S="):
        Config.from_env(**GOOD, environ={"LASTWORDS_SETTLE_TIMEOUT_S": text})


def durations(config: Config) -> dict[str, float]:
    """Every duration of a job by the variable that sets it."""
    options = (config, config.controller, config.processor)
    fields = [(one, field.name) for one in options for field in dataclasses.fields(one) if field.name.endswith("_s")]
    return {f"LASTWORDS_{name.upper()}": getattr(one, name) for one, name in fields}


DEFAULTS = durations(Config.from_env(**GOOD, environ={}))


def test_every_duration_of_every_part_can_be_set_and_reaches_that_part() -> None:
    wanted = {variable: 1000.0 + number for number, variable in enumerate(DEFAULTS)}
    config = Config.from_env(**GOOD, environ={variable: str(value) for variable, value in wanted.items()})
    assert durations(config) == wanted
    spec = ControllerSpec("127.0.0.1", 30051, "digits", 1, 4, Path("/ckpt"), options=config.controller)
    assert ControllerSpec.from_json(spec.to_json()).options == config.controller


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("LASTWORDS_SETTLE_TIMOUT_S", "did you mean LASTWORDS_SETTLE_TIMEOUT_S?"),
        ("LASTWORDS_STALL_TIMEOUT", "did you mean LASTWORDS_STALL_TIMEOUT_S?"),
        ("LASTWORDS_REQUIRES_SPACE", "did you mean LASTWORDS_REQUIRE_SPACE?"),
        ("LASTWORDS_XYZZY", "see docs/operating.md"),
    ],
)
def test_a_misspelt_setting_is_named_with_the_one_that_was_meant(
    given: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    Config.from_env(**GOOD, environ={given: "5", "LOCAL_RANK": "0"})
    (record,) = caplog.records
    assert given in record.getMessage()
    assert meant in record.getMessage()
    Config.from_env(**GOOD, environ={given: "5", "LOCAL_RANK": "3"})
    assert len(caplog.records) == 1, "once a host"


def test_what_can_be_set_is_not_taken_for_a_mistake(caplog: pytest.LogCaptureFixture) -> None:
    others = {"LASTWORDS_JOB": "j", "LASTWORDS_TOKEN": "t", "LASTWORDS_REQUIRE_SPACE": "1", "OTHER": "x"}
    others |= {"LASTWORDS_REMOTE": "s3://bucket/job", "LASTWORDS_SHARED_FROM_MB": "64"}
    others |= {"LASTWORDS_ON_INCIDENT": "./page.sh", "LASTWORDS_LOG": "text"}
    assert {*others, *DEFAULTS} - {"OTHER"} == set(config.variables())
    of_the_launcher = {LAUNCHER: "0 lastwords-7-0a1b"}
    Config.from_env(**GOOD, environ={**others, **of_the_launcher, **dict.fromkeys(DEFAULTS, "5")})
    assert caplog.records == []


def test_a_job_has_the_defaults_of_its_parts() -> None:
    config = Config.from_env(**GOOD, environ={})
    spec = ControllerSpec("127.0.0.1", 30051, "digits", 1, 4, Path("/ckpt"))
    assert (config.controller, config.processor) == (ControllerOptions(), ProcessorOptions())
    assert spec.options == config.controller


def test_the_examples_hold() -> None:
    import doctest

    assert doctest.testmod(config).failed == 0


def test_what_is_shared_out_is_a_number_of_megabytes() -> None:
    assert Config.from_env(**GOOD, environ={}).shared_from_mb == math.inf
    assert Config.from_env(**GOOD, environ={"LASTWORDS_SHARED_FROM_MB": "0"}).shared_from_mb == 0
    for text in ("-1", "many", "nan"):
        with golden.raises(ConfigError):
            Config.from_env(**GOOD, environ={"LASTWORDS_SHARED_FROM_MB": text})


@pytest.mark.parametrize("wrong", [{"LASTWORDS_ON_INCIDENT": "https://"}, {"LASTWORDS_LOG": "xml"}])
def test_what_tells_of_incidents_is_checked_before_any(wrong: dict[str, str]) -> None:
    with golden.raises(ConfigError):
        Config.from_env(0, "127.0.0.1", 30051, "/tmp/c", environ=wrong)
