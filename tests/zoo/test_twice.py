"""A job that dies twice: what the first run had learned of its loop is known to the one that is killed next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import Cluster
from tests.selection import more
from tests.zoo.verdict import Keeper

pytestmark = pytest.mark.process

TWICE = [
    ("clamp_after_log", "fwd@3", "win@3", "may have been about to change"),
    ("byol_target_after", "fwd@4", "win@4", "may have been about to change"),
    ("lr_after_log", "fwd@3", "win@3", "hyperparameters may have been about to change"),
    (
        "buffer_after_update",
        "fwd@4",
        "win@4",
        "average may have been about to change",
    ),
    ("metrics_local", "fwd@4", "win@4", "local_extras['metric'] may have been about to change"),
    ("early_log_draws", "fwd@3", "win@3", "between step_end() and the next batch"),
    ("val_eval_ddp", "fwd@5", "win@6", "may have been about to change"),
    ("relora", "fwd@5", "win@8", "may have been about to change"),
    ("lr_drop_epoch", "fwd@5", "win@8", "hyperparameters may have been about to change"),
]


def cases(*usual: str) -> list[object]:
    """All of them; the thorough run alone has those that are not `usual`."""
    return [case if case[0] in usual else more(*case) for case in TWICE]


@pytest.fixture
def keeper(cluster: Cluster, references: Path, tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(cluster, tmp_path, references)
    yield keeper
    keeper.close()


def test_what_changes_after_the_first_step_of_a_resumed_run_is_told(keeper: Keeper) -> None:
    verdict = keeper.judge("between_values", "epoch@3", before="fwd@3")
    assert verdict.kind == "told", verdict.text


def test_generators_that_a_loop_of_ones_own_has_got_back_are_not_called_new_by_the_resumed_run(keeper: Keeper) -> None:
    verdict = keeper.judge("stream_own", "fwd@6", before="fwd@3")
    assert verdict.kind == "exact", verdict.text


@pytest.mark.parametrize(("name", "first", "second", "words"), cases("buffer_after_update"))
def test_what_the_first_run_had_seen_move_late_is_told_of_the_second(
    keeper: Keeper, name: str, first: str, second: str, words: str
) -> None:
    verdict = keeper.judge(name, second, before=first)
    assert verdict.kind == "told", verdict.text
    assert any(words in reason for reason in verdict.reasons), verdict.text


@pytest.mark.parametrize(("name", "first", "second", "words"), cases("lr_after_log"))
def test_without_its_habits_a_job_that_dies_twice_differs_and_nobody_says_so(
    keeper: Keeper, name: str, first: str, second: str, words: str
) -> None:
    verdict = keeper.judge(name, second, ["habits", "attributes"], before=first)
    assert verdict.kind == "silent", verdict.text
    assert not any(words in reason for reason in verdict.reasons)
