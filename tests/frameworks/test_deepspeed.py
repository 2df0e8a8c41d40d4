"""A script with DeepSpeed's engine: healed bit for bit without ZeRO, and refused by name with it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from lastwords.optim_wrapper.trainer.run import COUNTS_ITSELF
from tests.frameworks import test_frameworks
from tests.frameworks.test_frameworks import NOT_EXACT, check_equal, run, started, whole

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="not installed: make ci-frameworks"),
]
__all__ = ["whole"]

DEATHS = ("1:3:fwd", "0:5:win", "1:6:fwd", "0:9:win")
"""In a forward pass, between an update and the end of its step at an epoch's end, and at an epoch's start."""


@pytest.fixture(autouse=True)
def _script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_frameworks.SCRIPTS, "deepspeed", "deepspeed_script")


@pytest.mark.parametrize("case", ["", "odd engine's"])
def test_an_engine_without_zero_is_healed_bit_for_bit(
    case: str, whole: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """odd: an epoch's last step has fewer batches than others."""
    undisturbed = whole("deepspeed", case)
    said = run(tmp_path, "deepspeed", case, *DEATHS, PROTECTED="1")
    check_equal(tmp_path, undisturbed, files=("final",))
    assert len([*tmp_path.glob("died-*")]) == len(DEATHS)
    assert NOT_EXACT not in said, said


def test_an_engine_goes_on_when_it_is_started_again(whole: Callable[[str, str], Path], tmp_path: Path) -> None:
    undisturbed = whole("deepspeed", "")
    assert started(tmp_path, "deepspeed", "", "1:3:fwd", launcher="torchrun", PROTECTED="1").returncode != 0
    run(tmp_path, "deepspeed", "", "1:3:fwd", launcher="torchrun", PROTECTED="1")
    check_equal(tmp_path, undisturbed, files=("final",))


def test_without_its_scheduler_it_differs(whole: Callable[[str, str], Path], tmp_path: Path) -> None:
    """The control."""
    undisturbed = whole("deepspeed", "")
    run(tmp_path, "deepspeed", "", "1:3:fwd", PROTECTED="1", BROKEN="scheduler")
    with pytest.raises(AssertionError):
        check_equal(tmp_path, undisturbed, files=("final",))


def test_an_engine_that_counts_batches_by_itself_is_told(tmp_path: Path) -> None:
    """The last step of an epoch has fewer: its engine goes on with their gradients in the next epoch."""
    assert COUNTS_ITSELF in run(tmp_path, "deepspeed", "odd by itself", "1:6:fwd", PROTECTED="1")


@pytest.mark.parametrize("case", ["zero 1", "zero 1 early", "zero 2 engine's", "zero 3", "bf16"])
def test_flat_copies_are_refused_by_name(case: str, tmp_path: Path) -> None:
    done = started(tmp_path, "deepspeed", case, PROTECTED="1")
    assert done.returncode == 1
    assert "torch_autocast" in done.stderr
    assert not [*tmp_path.glob("trace-*")]
