"""Loops that use accelerate or Fabric: killed in each phase, healed, and exact. `make ci-frameworks` installs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.frameworks import test_frameworks
from tests.frameworks.test_frameworks import NOT_EXACT, check_equal, run, whole

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]

__all__ = ["whole"]

PACKAGES = {"accelerate": "accelerate", "fabric": "lightning"}
DEATHS = ("1:4:fwd", "0:6:win", "0:9:evaluating", "1:13:fwd", "1:15:saving")
"""In an epoch, after the update at an epoch's end, in an evaluation, in an epoch's first step, in a save."""
TOLD = ("fabric draws",)
"""Bit for bit all the same: how far ahead Fabric's loaders fetch is not known."""


@pytest.fixture(autouse=True)
def _script(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES.values():
        monkeypatch.setitem(test_frameworks.SCRIPTS, package, "loops_script")


@pytest.mark.parametrize("case", ["accelerate", "accelerate draws wrapped", "fabric wrapped", "fabric draws"])
def test_a_loop_is_healed_bit_for_bit(case: str, whole: Callable[[str, str], Path], tmp_path: Path) -> None:
    package = PACKAGES[case.split()[0]]
    undisturbed = whole(package, case)
    preload = {"PRELOAD": package} if "draws" in case else {}
    said = run(tmp_path, package, case, *DEATHS, PROTECTED="1", **preload)
    check_equal(tmp_path, undisturbed, files=("final",))
    assert len([*tmp_path.glob("died-*")]) == len(DEATHS)
    assert case in TOLD or is_exact(said), said
    assert case not in TOLD or NOT_EXACT in said, said


def is_exact(said: str) -> bool:
    """accelerate's loader counts as an epoch ends, which `set_epoch` does again: told if a survivor had come so far."""
    reasons = [line for line in said.splitlines() if line.startswith(NOT_EXACT)]
    return all("loader.iteration changed" in line for line in reasons)


@pytest.mark.parametrize(("case", "broken"), [("accelerate", "scheduler"), ("accelerate draws wrapped", "batches")])
def test_a_script_that_leaves_out_what_it_has_to_say_goes_on_otherwise(
    case: str, broken: str, whole: Callable[[str, str], Path], tmp_path: Path
) -> None:
    undisturbed = whole("accelerate", case)
    run(tmp_path, "accelerate", case, "1:11:fwd", PROTECTED="1", BROKEN=broken)
    with pytest.raises(AssertionError):
        check_equal(tmp_path, undisturbed, files=("final",))
