"""What `save_strategy` reads from a live job is what a checkpoint of that job is found to be divided into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lastwords
from lastwords.checkpoint.load import latest, open_checkpoint
from lastwords.checkpoint.strategy import Strategy, load_strategy, strategy_of
from tests.integration.forked import on_ranks
from tests.integration.test_layouts import SAVED
from tests.integration.test_reshard import made

pytestmark = pytest.mark.process

SAME = ["ddp", "hsdp", "fsdp x tp", "ddp over tp", "fsdp, two optimizers", "zero1 halves beside another optimizer"]


def trained_and_saved(name: str, tmp_path: Path, ranks: int = 4) -> tuple[Strategy, Strategy, Strategy]:
    """Strategies of a job before its first step, after some, and of its checkpoint."""

    def body(rank: int) -> None:
        run = made(name, 0)
        arguments: Any = (run.trial.model, run.trial.optimizers)
        lastwords.save_strategy(*arguments, tmp_path / "before", units=run.trial.units)
        run.train(1, SAVED)
        lastwords.save_strategy(*arguments, tmp_path / "after", units=run.trial.units)
        run.save(tmp_path / "ckpt", SAVED)

    on_ranks(body, tmp_path, ranks)
    path = latest(tmp_path / "ckpt")
    assert path is not None
    return (
        load_strategy(tmp_path / "before"),
        load_strategy(tmp_path / "after"),
        strategy_of(open_checkpoint(path).manifest),
    )


@pytest.mark.parametrize("name", SAME)
def test_the_file_says_what_a_checkpoint_of_the_job_says(name: str, tmp_path: Path) -> None:
    before, after, published = trained_and_saved(name, tmp_path)
    assert before == after, "a step changes nothing about who holds what"
    assert before.world_size == published.world_size == 4
    before.check()
    sharded = any(len(cut.held) > 1 for cut in before.tensors.values())
    assert sharded == (name not in ("ddp", "zero1 halves beside another optimizer"))
    for tensor, cut in published.tensors.items():
        kind, _, rest = tensor.partition("/")
        if kind != "optim":
            found = before.tensors[tensor]
            if "zero1" in name and f"optim/{rest}" in before.tensors:
                assert found.held[0].ranks == (0, 1, 2, 3), "weights are on all ranks, their state on the owners"
                found = before.tensors[f"optim/{rest}"]
            assert found.held == cut.held, tensor
            assert before.tensors[tensor].shape == cut.shape
            assert before.tensors[tensor].dtype == cut.dtype
        else:
            fqn, _, key = rest.rpartition("/")
            assert before.state_held(fqn, key, cut.shape) == cut.held, tensor
    names = {tensor for tensor in before.tensors if not tensor.startswith("optim/")}
    assert names == {tensor for tensor in published.tensors if not tensor.startswith("optim/")}
