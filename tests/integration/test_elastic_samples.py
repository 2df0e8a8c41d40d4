"""Every sample of an epoch is seen once, over runs on several numbers of ranks that were killed one after another."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lastwords.optim_wrapper.resume.resume import EARLIER_MOVE
from tests.integration.moving import elastic, move, samples_seen
from tests.integration.parallel_kills import ShardedKill
from tests.integration.plan import Layout
from tests.integration.rig import Launch, Rig

pytestmark = pytest.mark.process

STEPS = 6


def killed_at(rig: Rig, layout: Layout, step: int, after: Launch | None = None) -> Launch:
    """A run, from the beginning or after another one, whose last rank gets kill -9; last words of `step`."""
    kill = ShardedKill("end", step, (layout.world_size - 1,), "ahead")
    if after is None:
        launch = rig.launch(layout, faults=kill.faults(layout))
        launch.finish()
    else:
        launch = move(rig, after, layout, faults=kill.faults(layout), whole=False)
    assert launch.saved_step == step, launch.job.report()
    return launch


def ddp(world_size: int, sequences: int = 12, **more: Any) -> Layout:
    return elastic("ddp", world_size, sequences=sequences, steps_per_epoch=72 // sequences, **more)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="even", marks=pytest.mark.thorough),
        pytest.param({"accumulate": 2, "sequences": 24, "steps_per_epoch": 4}, id="accumulate"),
        pytest.param({"workers": 2, "augment": True}, id="workers", marks=pytest.mark.thorough),
    ],
)
def test_four_ranks_then_three_then_two_see_every_sample_of_both_epochs_once(rig: Rig, more: dict[str, Any]) -> None:
    def layout(ranks: int) -> Layout:
        return elastic("ddp", ranks, **{"sequences": 12, "steps_per_epoch": STEPS, **more})

    steps = layout(4).steps_per_epoch
    first = killed_at(rig, layout(4), 1)
    second = killed_at(rig, layout(3), 3, after=first)
    third = move(rig, second, layout(2), whole=False)
    parts = [(first.track, range(1, 2)), (second.track, range(2, 4)), (third.track, range(4, 2 * steps + 1))]
    whole = dict.fromkeys(range(steps * layout(4).sequences), 1)
    assert samples_seen(parts, epoch=1) == whole
    assert samples_seen(parts, epoch=2) == whole
    said = third.track.one(0, "resumed")
    assert said is not None
    assert [reason.split(":")[0] for reason in said["reasons"]] == [
        "resumed on 2 ranks from a checkpoint saved on 3",
        str(EARLIER_MOVE),
    ]


def smaller_steps(rig: Rig, *, even: bool = False, left_over: int = 0, **settings: Any) -> tuple[Counter[int], Launch]:
    """Four ranks with three sequences each, then two: what was seen of the first epoch, of 72 - left_over samples."""
    first = killed_at(rig, ddp(4, even=even, left_over=left_over), 2)
    second = move(rig, first, ddp(2, sequences=6, even=even, left_over=left_over), whole=False, **settings)
    assert set(second.codes.values()) == {0}, second.job.report()
    return samples_seen([(first.track, range(1, 3)), (second.track, range(3, 13))], epoch=1), second


def test_fewer_ranks_with_the_batch_of_a_rank_kept_see_every_sample_once(rig: Rig) -> None:
    seen, second = smaller_steps(rig)
    assert seen == dict.fromkeys(range(72), 1)
    # 24 samples were seen in 2 steps; the other 48 take 8 steps of 6, so this epoch has 10 steps and the next one 12.
    assert sorted(second.track.steps(0)) == [*range(3, 11), *range(13, 25)]


@pytest.mark.thorough
def test_going_on_by_the_number_of_steps_would_see_samples_twice(rig: Rig) -> None:
    seen, _ = smaller_steps(rig, sabotage=("no_carrying",))
    assert set(seen) == set(range(72))
    assert sorted(set(seen.values())) == [1, 2]


def test_what_does_not_divide_is_seen_again_by_the_last_ranks_only(rig: Rig) -> None:
    seen, _ = smaller_steps(rig, left_over=5)
    assert set(seen) == set(range(67))
    assert seen.total() == 68, "an odd number of samples is left for two ranks"


@pytest.mark.thorough
def test_what_does_not_divide_is_left_out_with_drop_last(rig: Rig) -> None:
    seen, _ = smaller_steps(rig, even=True, left_over=5)
    assert set(seen.values()) == {1}
    assert seen.total() == 66, "24 before and 7 steps of 6 after"
