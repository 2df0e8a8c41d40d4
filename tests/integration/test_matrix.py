"""The full cross product of phase x victims x launcher x layout: hours, for `make matrix`."""

from __future__ import annotations

import itertools

import pytest

from tests.integration.kills import BEFORE_ALL_REDUCE, Kill
from tests.integration.plan import Layout
from tests.integration.rig import Rig
from tests.integration.test_kills import PARAMETERS, STEPS, VICTIMS

pytestmark = [pytest.mark.process, pytest.mark.slow]

LAYOUTS = {
    "small": Layout(),
    "medium": Layout(model="medium", tied=True, frozen=True, accumulate=2, no_sync=True),
    "large": Layout(model="large"),
    "local buffers": Layout(model="medium", broadcast_buffers=False, augment=True, log_reduce="before"),
    "plain loader": Layout(loader="plain", augment=True, accumulate=2),
    "plain loader, workers": Layout(loader="plain", augment=True, workers=2, log_reduce="after"),
    "workers": Layout(augment=True, workers=2, inf_steps=(2,)),
    "skips": Layout(model="medium", inf_steps=(1, 3, 5), augment=True, log_reduce="after"),
}
LAUNCHERS = ("fork", "hand", "torchrun")


def rows() -> list[tuple[str, str, Kill]]:
    """Every phase x victims x launcher x layout; what the survivors do and which step it is take turns."""
    found = []
    product = itertools.product(PARAMETERS["phase"], VICTIMS.values(), LAUNCHERS, LAYOUTS.items())
    for turn, (phase, victims, launcher, (name, layout)) in enumerate(product):
        survivors = ("free",) if phase in BEFORE_ALL_REDUCE else PARAMETERS["survivors"]
        kills = [Kill(str(phase), step, victims, str(how)) for how in survivors for step in STEPS.values()]
        possible = [kill for kill in kills if kill.is_possible(layout)]
        if possible:
            found.append((launcher, name, possible[turn * 7 % len(possible)]))
    return found


@pytest.mark.parametrize(("launcher", "name", "kill"), rows(), ids=str)
def test_a_killed_run_resumes_with_the_same_bits(rig: Rig, launcher: str, name: str, kill: Kill) -> None:
    rig.survive(LAYOUTS[name], kill, launcher=launcher)
