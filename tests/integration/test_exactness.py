"""A resumed run equals the uninterrupted one bit for bit on every rank: one test for each thing that could break it."""

from __future__ import annotations

import dataclasses

import pytest

from tests.integration.kills import Kill
from tests.integration.plan import Layout
from tests.integration.rig import Rig
from tests.selection import usually

pytestmark = pytest.mark.process

AHEAD = Kill("before_step", 6, (2,), "ahead")
"""The dead rank had not ended the step that is saved: its own state comes from the tentative slot."""

FREE = Kill("forward", 7, (0,))

LAYOUTS = {
    "as simple as can be": (Layout(batch_norm=False, dropout=False, clip=False, scheduler=False), FREE),
    "smaller than the first bucket": (Layout(model="small"), AHEAD),
    "larger than every bucket": (Layout(model="large", steps_per_epoch=3), Kill("before_step", 4, (2,), "ahead")),
    "large, killed in the all-reduce": (Layout(model="large", steps_per_epoch=3), Kill("backward", 5, (0, 3))),
    "buffers that differ by rank": (Layout(broadcast_buffers=False), AHEAD),
    "tied and frozen parameters": (Layout(model="medium", tied=True, frozen=True), AHEAD),
    "accumulation, most without all-reduce": (Layout(accumulate=3, no_sync=True, model="medium"), FREE),
    "plain shuffling": (Layout(loader="plain", augment=True), AHEAD),
    "augmentation": (Layout(augment=True), AHEAD),
    "augmentation in workers": (Layout(augment=True, workers=2), AHEAD),
    "a skipped step before": (Layout(inf_steps=(5,)), AHEAD),
    "a skipped step at the kill": (Layout(inf_steps=(6,)), AHEAD),
    "a skipped first step": (Layout(inf_steps=(1,)), Kill("forward", 3, (1,))),
    "a kill in the skipped step": (Layout(inf_steps=(6,), model="medium"), Kill("backward", 6, (1,))),
    "three ranks": (Layout(world_size=3), Kill("update", 3, (0,), "ahead")),
    "eight ranks": (Layout(world_size=8, model="medium"), Kill("update", 6, (0, 5), "split")),
    "the last step": (Layout(), Kill("before_step", 8, (1,), "ahead")),
    "the end of the last step": (Layout(), Kill("end", 8, (0,), "ahead")),
    "the last step of an epoch": (Layout(augment=True, workers=2), Kill("end", 4, (1,), "ahead")),
    "the second step": (Layout(model="medium"), Kill("forward", 2, (3,))),
    "a logging all-reduce after the scheduler": (Layout(log_reduce="after"), Kill("after_update", 6, (1,), "ahead")),
    "a static graph": (Layout(static_graph=True, model="medium"), AHEAD),
    "unused parameters": (Layout(find_unused=True, model="medium"), AHEAD),
}


# Tied and frozen parameters, accumulation without all-reduce and workers that augment are in rows of test_kills.py that
# run each time; a kill in the all-reduce of several buckets is the one in the skipped step. Kills at an epoch's end are
# in the zoo, and a static graph is in test_ddp_buckets.py.
USUAL = (
    "buffers that differ by rank",
    "a kill in the skipped step",
)


@pytest.mark.parametrize("name", usually(LAYOUTS, USUAL))
def test_the_resumed_run_has_the_same_bits(rig: Rig, name: str) -> None:
    layout, kill = LAYOUTS[name]
    rig.survive(layout, kill)


def test_a_loop_of_ones_own_resumes_with_the_same_weights_and_position(rig: Rig) -> None:
    layout = Layout(augment=True, accumulate=2)
    killed, step = rig.die(layout, AHEAD, api="step_end")
    rig.check_resume(killed, step)


def test_the_controller_may_belong_to_any_rank(rig: Rig) -> None:
    layout = Layout()
    killed, step = rig.die(layout, dataclasses.replace(AHEAD, victims=(2, 3)), ctrl_rank=2)
    rig.check_resume(killed, step, ctrl_rank=1)


def test_a_run_that_nobody_kills_has_the_same_bits_and_leaves_nothing(rig: Rig) -> None:
    layout = Layout(model="medium", augment=True, workers=2, accumulate=2, inf_steps=(3,), log_reduce="before")
    launch = rig.launch(layout)
    launch.finish()
    rig.check_untouched(launch)
