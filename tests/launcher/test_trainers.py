"""Scripts that use a Trainer, or accelerate, where these are installed: healed bit for bit, by the public calls.

Adaptors would spare the scripts these calls; trainer_training.py shows which they are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.test_heal import check_equal, run, trace

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]

RANKS, STEPS = 2, 18
DEATHS = ("1:4:fwd", "0:10:win", "1:13:fwd")
"""In an epoch, after an update, and in the first step of an epoch."""
OF_A_LOOP = ("1:4:fwd", "0:6:win", "0:10:evaluating", "1:13:fwd", "1:16:saving")
"""Also after the update at an epoch's end, in an evaluation, and in a save of the framework's own."""
TOLD = ("fabric, a collator that draws",)
"""Bit for bit all the same: how far ahead Fabric's loaders fetch is not known."""
PACKAGES = {"fabric": "lightning"}
"""Where a framework is not the name of its package."""


def train(directory: Path, framework: str, *deaths: str, left_out: str = "", **how: Any) -> Path:
    """A job, in this directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FRAMEWORK", framework)
        patch.setenv("LEFT_OUT", left_out)
        run(directory, *deaths, ranks=RANKS, steps=STEPS, script="tests.launcher.trainer_training", **how)
    return directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of a framework, the job under torchrun in which nobody dies; it is run once."""
    ran: dict[str, Path] = {}

    def of(framework: str) -> Path:
        package = framework.partition(",")[0]
        package = PACKAGES.get(package, package)
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        if framework not in ran:
            ran[framework] = train(tmp_path_factory.mktemp("whole"), framework, launcher="torchrun")
        return ran[framework]

    return of


@pytest.mark.parametrize(
    "framework",
    [
        "transformers",
        "transformers, a collator that draws",
        "lightning",
        "accelerate",
        "accelerate, a collator that draws",
        "fabric",
        "fabric, a collator that draws",
    ],
)
def test_a_script_that_uses_a_trainer_is_healed_bit_for_bit(
    framework: str, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    check_equal(train(tmp_path / "undisturbed", framework), whole(framework), heals=0, ranks=RANKS)
    package = framework.partition(",")[0]
    deaths = OF_A_LOOP if package in ("accelerate", "fabric") else DEATHS
    for name, more in (("healed", {}), ("preloaded", {"preload": PACKAGES.get(package, package)})):
        healed = train(tmp_path / name, framework, *deaths, **more)
        check_equal(healed, whole(framework), heals=len(deaths), ranks=RANKS)
        for rank in range(RANKS):
            first = (healed / f"resumed-{rank}").read_text().splitlines()[0]
            assert first.startswith("False") if framework in TOLD else first == "True ()"


@pytest.mark.parametrize(
    ("framework", "left_out"),
    [
        ("transformers", "scheduler"),
        ("transformers, a collator that draws", "step_begin"),
        ("transformers, a batch ahead", ""),  # accelerate's loader has drawn the next batch when a step ends
        ("lightning", "step_begin"),
        ("accelerate", "scheduler"),
        ("accelerate, a collator that draws", "batches"),
    ],
)
def test_a_script_that_leaves_out_what_it_has_to_say_goes_on_otherwise(
    framework: str, left_out: str, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    healed = train(tmp_path / "healed", framework, "1:11:fwd", left_out=left_out)
    for rank in range(RANKS):
        found, right = trace(healed, rank), trace(whole(framework), rank)
        assert found[10] == right[10]
        assert found[STEPS] != right[STEPS]
