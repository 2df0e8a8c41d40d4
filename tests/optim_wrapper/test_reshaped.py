"""Buffers that are resized while the model trains are kept for each rank in the form that they have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lastwords.errors import MismatchError
from lastwords.optim_wrapper.capture import box_tensors
from lastwords.optim_wrapper.capture.buffers import SavedForms
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.black_box import BlackBox
from lastwords.processor.box_layout import BoxReader, RegionCopy
from tests import golden
from tests.ledgers import told

NAMES = ["0.low", "0.scale"]


class Observing(nn.Module):
    """As quantization-aware training's observers: one buffer is empty at first, one has another size."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor([]))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.low.numel() == 0:
            self.low.resize_(x.shape[1]).fill_(0)
            self.scale.resize_(x.shape[1]).fill_(1)
        self.low.sub_(1)
        self.scale.mul_(2)
        return x * self.scale


class Rank:
    def __init__(self, folder: Path, cache: torch.Tensor | None = None) -> None:
        folder.mkdir()
        self.path = folder / "box"
        self.model = nn.Sequential(Observing(), nn.Linear(3, 2))
        self.model.register_buffer("cache", cache)
        self.wrapper = OptTFTWrapper(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.recorder = StepRecorder(self.model, [self.wrapper], {}, {})
        self.recorder.agree_units(World(), next_prefix(), ())
        self.recorder.make_source(lambda rank: self.path, lambda step: {})

        def use(make: Callable[[Path], BlackBox]) -> None:
            make(self.path)

        self.recorder.open_box(use, at_gate=False)
        self.recorder.begin(0, None)

    def train(self, step: int) -> None:
        self.wrapper.zero_grad()
        self.model(torch.ones(2, 3)).sum().backward()
        self.recorder.watch.begin_update()
        self.wrapper.step()
        self.recorder.watch.end_update()
        self.recorder.end_step(step, None)

    def regions(self, step: int) -> dict[str, RegionCopy]:
        with BoxReader(self.path) as box:
            copy = box.read(step)
            assert copy is not None
            return {name: RegionCopy(r.dtype, r.shape, bytes(r.data)) for name, r in copy.regions.items()}

    def buffers(self) -> dict[str, list[float]]:
        return {name: buffer.tolist() for name, buffer in self.model.named_buffers()}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def trained(tmp_path: Path, steps: int = 4) -> Rank:
    rank = Rank(tmp_path / "saved")
    for step in range(1, steps + 1):
        rank.train(step)
    return rank


def test_each_copy_has_them_in_their_form_and_a_new_model_gets_them_as_the_same_tensors(tmp_path: Path) -> None:
    rank = trained(tmp_path)
    saved = rank.regions(4)
    assert saved["buffer/0.scale"].shape == (3,)
    assert told(rank.recorder) == []
    other = Rank(tmp_path / "resumed")
    known = dict(other.model.named_buffers())
    assert other.recorder.restore_own(saved, SavedForms(reshaped=NAMES)) == []
    other.recorder.begin(4, None)
    assert other.buffers() == rank.buffers() == {"0.low": [-4.0] * 3, "0.scale": [16.0] * 3}
    assert all(buffer is known[name] for name, buffer in other.model.named_buffers())
    for one in (rank, other):
        one.train(5)
    assert other.regions(5)["buffer/0.scale"].data == rank.regions(5)["buffer/0.scale"].data
    other.model.get_buffer("0.scale").resize_(9)


def test_a_buffer_that_is_given_up_is_not_in_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, and what becomes of one that changes its form too often."""
    monkeypatch.setattr(box_tensors, "REFORMS_MAX", 0)
    rank = trained(tmp_path)
    assert "buffer/0.scale" not in rank.regions(4)
    assert told(rank.recorder) == ["the buffer '0.scale' was replaced by one of torch.float32 (3,)"]


def test_one_that_grows_in_each_step_ends_no_run(tmp_path: Path) -> None:
    rank = trained(tmp_path)
    for step in range(5, 30):
        rank.model[0].scale.resize_(step)  # type: ignore[union-attr,operator]
        rank.recorder.tentative()
        rank.recorder.watch.begin_update()
        rank.recorder.end_step(step, None)
        if step < 10:
            assert rank.regions(step)["buffer/0.scale"].shape == (step,)
    assert any("0.scale" in reason for reason in told(rank.recorder))


def test_another_form_of_a_buffer_that_was_not_resized_is_refused(tmp_path: Path) -> None:
    other = Rank(tmp_path / "resumed")
    with pytest.raises(MismatchError, match=r"0\.scale"):
        other.recorder.restore_own(trained(tmp_path).regions(4), SavedForms(reshaped=["0.low"]))


def test_a_buffer_whose_storage_is_freed_ends_no_run_and_is_named(tmp_path: Path) -> None:
    """Copying it would read at address 0."""
    cache = torch.ones(4)
    rank = Rank(tmp_path / "saved", cache)
    rank.train(1)
    cache.untyped_storage().resize_(0)
    rank.train(2)
    golden.says(told(rank.recorder))
    assert "buffer/cache" not in rank.regions(2)
