"""What a controller is started with goes through its command line unchanged, and nothing impossible gets through."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lastwords.controller.events import ControllerOptions
from lastwords.controller.handover import ControllerSpec
from lastwords.errors import ConfigError
from tests import golden

SPEC = ControllerSpec("127.0.0.1", 30051, "digits", 3, 4, Path("/ckpt"))


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        dataclasses.replace(
            SPEC, ip="fe80::1%eth0", fallback_root=Path("/other"), options=ControllerOptions(settle_timeout_s=0.25)
        ),
        dataclasses.replace(SPEC, ip="node-3", root=Path("/with space/=and equals"), starter_pid=77, nonce="5f3a"),
    ],
    ids=["plain", "every kind of value", "odd path"],
)
def test_a_spec_survives_the_command_line(spec: ControllerSpec) -> None:
    assert ControllerSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    "changes",
    [
        {"ip": "0.0.0.0"},
        {"ip": "::"},
        {"ip": ""},
        {"port": -1},
        {"port": 65536},
        {"job": "../escape"},
        {"nonce": "../escape"},
        {"world_size": 0},
        {"generation": -1},
        {"root": Path("relative")},
        {"fallback_root": Path("relative")},
        {"options": ControllerOptions(settle_timeout_s=0.0)},
        {"options": ControllerOptions(keepalive_time_s=float("nan"))},
        {"options": ControllerOptions(exit_timeout_s=float("inf"))},
    ],
)
def test_a_spec_is_refused_with_the_name_of_what_is_wrong(changes: dict[str, Any]) -> None:
    with golden.raises(ConfigError):
        dataclasses.replace(SPEC, **changes).check()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "truncated"),
        ("[1]", "object"),
        ('{"other":' + "[" * 100_000, "recursion"),
        (SPEC.to_json().replace('"job"', '"jib"'), "job"),
        (SPEC.to_json().replace("30051", '"many"'), "port"),
        (SPEC.to_json().replace('"settle_timeout_s":15.0', '"settle_timeout_s":"soon"'), "settle_timeout_s"),
        (SPEC.to_json().replace('"/ckpt"', "3"), "root"),
        (SPEC.to_json().replace("30051", "-1"), "ctrl_port"),
    ],
)
def test_settings_that_are_wrong_are_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ControllerSpec.from_json(text)
