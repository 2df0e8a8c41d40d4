"""Models of transformers and torchvision in a plain loop: killed in each phase, healed, and exact.

`make ci-frameworks` installs them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.frameworks import test_frameworks
from tests.frameworks.test_frameworks import NOT_EXACT, check_equal, run, whole

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]

__all__ = ["whole"]

DEATHS = ("1:2:fwd", "0:4:bwd", "1:5:win", "0:7:win", "1:9:fwd")
"""One of them at an epoch's end."""
MODELS = ("bert", "gpt2", "vit", "detector forgets")
LEAF = "model.roi_heads.box_roi_pool.map_levels"


@pytest.fixture(autouse=True)
def _script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_frameworks.SCRIPTS, "transformers", "models_script")


@pytest.fixture(autouse=True)
def _detector(request: pytest.FixtureRequest) -> None:
    if "detector" in request.node.name and not (Path(sys.prefix) / "torchvision").exists():
        pytest.skip("torchvision is not installed: make ci-frameworks")


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_healed_bit_for_bit_and_exact(model: str, whole: Callable[[str, str], Path], tmp_path: Path) -> None:
    undisturbed = whole("transformers", model)
    said = run(tmp_path, "transformers", model, *DEATHS, PROTECTED="1")
    check_equal(tmp_path, undisturbed, files=("final",))
    assert len([*tmp_path.glob("died-*")]) == len(DEATHS)
    assert NOT_EXACT not in said, said


def test_the_object_that_a_detector_makes_in_its_first_step_is_told_and_nothing_else(
    whole: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """It is one of torchvision's own, which is not made here: `forget` is the word for it."""
    undisturbed = whole("transformers", "detector")
    said = run(tmp_path, "transformers", "detector", *DEATHS, PROTECTED="1")
    check_equal(tmp_path, undisturbed, files=("final",))
    reasons = {line.partition(NOT_EXACT)[2] for line in said.splitlines() if line.startswith(NOT_EXACT)}
    assert reasons == {f" {LEAF} held a torchvision.ops.poolers.LevelMapper, which cannot be made again"}


def test_what_cannot_be_stored_in_such_a_model_is_told(whole: Callable[[str, str], Path], tmp_path: Path) -> None:
    """The control: the models are looked into."""
    undisturbed = whole("transformers", "bert asks")
    said = run(tmp_path, "transformers", "bert asks", *DEATHS, PROTECTED="1")
    with pytest.raises(AssertionError):
        check_equal(tmp_path, undisturbed, files=("final",))
    assert NOT_EXACT in said
    assert "model.bert.embeddings.dropout.numbers" in said
