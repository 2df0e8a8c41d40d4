"""Before the first step replicas are compared, but for what is each rank's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lastwords
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.launch.config import Config
from lastwords.optim_wrapper.launch.world import World
from lastwords.optim_wrapper.trainer.agreed_layout import AgreedLayout
from lastwords.optim_wrapper.trainer.job_shape import Options
from lastwords.sharding.verify import Digests
from tests import golden
from tests.ledgers import told

ROWS = 4096
"""A buffer of this many rows of 16 is a large one: it is kept once it has changed."""


class Net(nn.Module):
    """A codebook that is written past torch's counters, one that is counted, one that stays, and a renormalised
    embedding.
    """

    def __init__(self) -> None:
        super().__init__()
        for name in ("uncounted", "counted", "still"):
            self.register_buffer(name, torch.zeros(ROWS, 16))
        self.words = nn.Embedding(8, 16, max_norm=1.0)
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> Any:
        self.uncounted.data[0] = x.mean()
        self.counted[0] = x.mean()
        return self.head(self.words(torch.tensor([1])))


class Job:
    """Rank 0 of two that hold the same."""

    def __init__(self, folder: Path) -> None:
        self.model = Net()
        wrapped = lastwords.OptTFTWrapper(torch.optim.SGD(self.model.parameters(), 0.1))
        recorder = StepRecorder(self.model, [wrapped], {}, {})
        config = Config.from_env(0, "127.0.0.1", 0, folder, environ={})
        self.layout = AgreedLayout(World(), recorder, [wrapped], (), Options(verify_every=1), config)
        recorder.make_source(lambda rank: folder / "box", lambda step: {})
        recorder.open(folder / "box")
        recorder.begin(0, None)
        self.recorder, table = recorder, self.layout.units.table
        self.layout.units.table = replace(table, units=dict.fromkeys(table.units, (0, 1)))

    def begin(self, *other: str) -> list[str]:
        """What is told as the loop begins, rank 1 having other bytes of these."""
        return self._told(lambda: self.layout.compare_at_start(lambda: None), other)

    def compare(self, *other: str) -> list[str]:
        """What is told at the end of a step."""
        return self._told(lambda: self.layout.compare(1, lambda: None), other)

    def _told(self, compare: Callable[[], None], other: tuple[str, ...]) -> list[str]:
        def exchange(group: Any, mine: Digests) -> dict[int, Digests]:
            theirs = {
                unit: {name: digest ^ any(part in name for part in other) for name, digest in found.items()}
                for unit, found in mine.items()
            }
            return {0: mine, 1: theirs}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lastwords.optim_wrapper.trainer.agreed_layout.exchange_digests", exchange)
            compare()
        return told(self.recorder)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    torch.manual_seed(1)
    return Job(tmp_path)


def test_buffers_that_the_first_forward_pass_of_an_own_loop_has_moved_are_each_rank_s_own(job: Job) -> None:
    job.model(torch.ones(2))
    assert job.begin("buffer/uncounted", "buffer/counted") == []


def test_weights_that_have_moved_before_the_first_step_are_compared(job: Job) -> None:
    job.model.head.weight.data.zero_()
    with pytest.raises(lastwords.MismatchError, match="head"):
        job.begin("head.weight")


def test_an_embedding_that_the_first_forward_pass_of_an_own_loop_has_scaled_is_each_rank_s_own(job: Job) -> None:
    job.model(torch.ones(2))
    assert job.begin("words") == []


def test_weights_that_are_each_rank_s_own_are_not_compared_later(job: Job) -> None:
    job.model(torch.ones(2))
    assert job.begin() == []
    assert job.compare("buffer/counted", "words") == []


def test_a_buffer_that_has_not_changed_is_compared(job: Job) -> None:
    job.model(torch.ones(2))
    (reason,) = job.begin("still")
    golden.says(reason)
    assert "'still'" in reason


def test_before_any_forward_pass_everything_is_compared(job: Job) -> None:
    (reason,) = job.begin("uncounted")
    assert "'uncounted'" in reason
    with pytest.raises(lastwords.MismatchError, match="words"):
        job.begin("words")


def test_generators_in_the_optimizer_are_each_rank_s_own(job: Job) -> None:
    optimizer = job.recorder.view.optimizer
    optimizer.param_groups[0]["noise"] = torch.Generator()
    optimizer.state[job.model.head.weight]["draws"] = [torch.Generator()]
    assert job.begin("noise", "draws") == []
    optimizer.param_groups[0]["factor"] = torch.ones(2)
    with pytest.raises(lastwords.MismatchError, match="factor"):
        job.begin("factor")
