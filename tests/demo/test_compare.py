"""The demo's verdict: it says "identical" only where every bit is, and names the first thing that is not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from demo.compare import RankLog, first_difference, read_logs
from tests import golden

STEPS = 6


def run(first: int = 1, last: int = STEPS, *, finished: bool = True) -> dict[int, RankLog]:
    """Logs of four ranks that took the steps first..last."""
    sums = {"model/0.weight": "aa", "optim/0.weight/exp_avg": "bb", "rng/torch": "cc"} if finished else {}
    return {
        rank: RankLog(steps=STEPS, losses={step: 2.0 / step + rank for step in range(first, last + 1)}, sums=sums)
        for rank in range(4)
    }


def with_loss(logs: Mapping[int, RankLog], rank: int, step: int, loss: float) -> dict[int, RankLog]:
    return {**logs, rank: dataclasses.replace(logs[rank], losses={**logs[rank].losses, step: loss})}


def test_a_run_that_goes_on_where_the_killed_one_stopped_is_identical() -> None:
    assert first_difference(run(), run(1, 3, finished=False), run(4), step=3) is None


def test_a_rank_that_was_killed_before_its_last_loss_was_logged_is_no_difference() -> None:
    killed = run(1, 3, finished=False)
    killed[1] = dataclasses.replace(killed[1], losses={1: killed[1].losses[1], 2: killed[1].losses[2]})
    assert first_difference(run(), killed, run(4), step=3) is None


def test_one_bit_of_one_loss_is_a_difference_that_names_step_and_rank() -> None:
    loss = run()[2].losses[5]
    resumed = with_loss(run(4), 2, 5, loss + 2**-52 * loss)
    found = first_difference(run(), run(1, 3, finished=False), resumed, step=3)
    assert found is not None
    assert found.startswith("step 5, rank 2: loss is")


def test_a_difference_before_the_kill_is_found_too() -> None:
    found = first_difference(run(), with_loss(run(1, 3, finished=False), 0, 2, 9.0), run(4), step=3)
    assert found is not None
    assert "step 2, rank 0" in found
    golden.says(found)


def test_a_step_that_is_trained_twice_is_a_difference() -> None:
    assert first_difference(run(), run(1, 3, finished=False), run(3), step=3) == (
        "step 3: the resumed run took it, which it should not have"
    )


def test_a_step_that_is_left_out_is_a_difference() -> None:
    found = first_difference(run(), run(1, 3, finished=False), run(5), step=3)
    assert found is not None
    assert found.startswith("step 4, rank 0")


def test_negative_zero_is_not_zero_and_a_nan_equals_itself() -> None:
    nan = float("nan")
    same = first_difference(with_loss(run(), 1, 5, nan), run(1, 3), with_loss(run(4), 1, 5, nan), step=3)
    assert same is None
    assert first_difference(with_loss(run(), 1, 5, 0.0), run(1, 3), with_loss(run(4), 1, 5, -0.0), step=3)


def test_a_tensor_that_differs_is_named() -> None:
    resumed = run(4)
    resumed[3] = dataclasses.replace(resumed[3], sums={**resumed[3].sums, "optim/0.weight/exp_avg": "xx"})
    found = first_difference(run(), run(1, 3, finished=False), resumed, step=3)
    assert found is not None
    assert found.startswith("tensor optim/0.weight/exp_avg on rank 3")


def test_a_tensor_that_only_one_run_has_is_a_difference() -> None:
    resumed = run(4)
    resumed[0] = dataclasses.replace(resumed[0], sums={**resumed[0].sums, "model/9.weight": "xx"})
    found = first_difference(run(), run(1, 3, finished=False), resumed, step=3)
    assert found is not None
    golden.says(found)


def test_a_run_that_did_not_finish_is_not_called_identical() -> None:
    assert first_difference(run(finished=False), run(1, 3), run(4, finished=False), step=3)
    assert first_difference({}, {}, {}, step=3)
    missing = run(4)
    del missing[2]
    assert first_difference(run(), run(1, 3), missing, step=3)


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    step = {"epoch": 1, "step": 1, "global_step": 1, "loss": 2.302585, "mono_s": 7.0}
    lines = [{"rank": 0, "pid": 12, "steps": 6}, step, {"tensor": "model/0.weight", "xxh3": "aa"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "rank_0.jsonl").write_text(text + '{"epoch": 1, "st', encoding="utf-8")
    (log,) = read_logs(tmp_path).values()
    assert log == RankLog(12, 6, {1: 2.302585}, {1: 7.0}, {"model/0.weight": "aa"})
