"""What the user's code can do with its tensors and modules is the same with and without lastwords."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lastwords.errors import UnstorableError
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.state.rank_units import RankUnits
from lastwords.optim_wrapper.tensors import tensor_bytes
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of, source_of, staged_bytes
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.sharding.verify import digest_units
from lastwords.vocabulary import UNIT_REPLICATED, Phase, Stand
from tests import golden


class Model(nn.Module):
    """Parameters and buffers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 40), nn.BatchNorm1d(40), nn.Linear(40, 40))
        self.frozen = nn.Parameter(torch.ones(2000), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("empty", torch.tensor([]))
        self.register_buffer("large", torch.zeros(20_000))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.register_buffer("turned", torch.ones(4, 3).T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scalar + self.frozen[0]  # type: ignore[no-any-return]


class Job:
    """A model in training; with `protected` everything is done to it that lastwords does in each step and in a save."""

    def __init__(self, folder: Path, *, protected: bool, steps: int = 4) -> None:
        torch.manual_seed(1)
        self.model, self.protected = Model(), protected
        self.inner = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])
        self.wrapped = OptTFTWrapper(self.inner) if protected else self.inner
        self.extras = {"mine": torch.ones(5), "array": np.ones(5), "text": bytearray(b"abc"), "empty": torch.tensor([])}
        if protected:
            self.recorder = StepRecorder(self.model, [self.wrapped], {"e": self.extras}, {"l": self.extras})  # type: ignore[list-item]
            self.units: RankUnits = self.recorder.agree_units(World(), next_prefix(), ())
            self.source = self.recorder.make_source(lambda rank: folder / "box", lambda step: {})
            self.recorder.open(folder / "box")
            digest_units(self.units.views.values())
            self.recorder.begin(0, None)
        for step in range(1, steps + 1):
            self.step(step)

    def step(self, step: int) -> None:
        self.wrapped.zero_grad()
        self.model(torch.randn(8, 4)).sum().backward()
        self.wrapped.step()
        if self.protected:
            self.recorder.watch.end_update()
            self.recorder.end_step(step, None)

    def tentative_copies(self, model: nn.Module) -> int:
        """How many a forward and a backward pass of `model` make."""
        assert self.recorder._box is not None
        before = self.recorder._box.box._counter
        model(torch.randn(8, 4)).sum().backward()
        return self.recorder._box.box._counter - before

    def save(self, step: int) -> None:
        """What a writer does, which keeps hold of nothing afterwards."""
        if self.protected:
            stand = Stand(Phase.COMPUTING, step)
            state = self.source.unit_state(UNIT_REPLICATED, step, stand)
            for _, content in state.tensors:
                bytes(content() if callable(content) else content)
            self.source.local_states([0], step)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()
        for number, state in enumerate(self.inner.state.values()):
            yield from ((f"state {number} {key}", item) for key, item in state.items() if torch.is_tensor(item))
        yield from ((key, item) for key, item in self.extras.items() if isinstance(item, torch.Tensor))


def outcome(act: Callable[[], Any]) -> str:
    try:
        act()
    except (RuntimeError, TypeError, ValueError, BufferError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def swapped(tensor: torch.Tensor) -> None:
    other = nn.Parameter(torch.zeros(2), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else torch.zeros(2)
    torch.utils.swap_tensors(tensor, other)


def resized(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.data.resize_(tensor.numel() + 3000)


def pointed_elsewhere(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(7)


def set_elsewhere(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.set_(torch.zeros(7).untyped_storage(), 0, (7,))  # type: ignore[call-overload]


TRICKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "resize_": resized,
    "storage.resize_": lambda tensor: tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() + 4096),
    "storage.resize_(0)": lambda tensor: tensor.untyped_storage().resize_(0),
    "swap_tensors": swapped,
    "data =": pointed_elsewhere,
    "set_": set_elsewhere,
    "share_memory_": lambda tensor: tensor.share_memory_(),
}


def outcomes(folder: Path, trick: str, *, protected: bool, steps: int, saved: bool) -> dict[str, str]:
    job = Job(folder, protected=protected, steps=steps)
    if saved:
        job.save(steps)
    return {name: outcome(partial(TRICKS[trick], tensor)) for name, tensor in list(job.tensors())}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.ci
@pytest.mark.parametrize(("steps", "saved"), [(0, False), (3, False), (3, True)])
@pytest.mark.parametrize("trick", TRICKS)
def test_every_tensor_can_be_treated_as_without_lastwords(tmp_path: Path, trick: str, steps: int, saved: bool) -> None:
    ours = outcomes(tmp_path, trick, protected=True, steps=steps, saved=saved)
    alone = outcomes(tmp_path, trick, protected=False, steps=steps, saved=saved)
    assert ours == alone
    assert "fine" in alone.values()


def test_what_numpy_does_to_a_storage_is_seen_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with Tensor.numpy() no tensor that was looked at can be resized."""
    monkeypatch.setattr(tensor_bytes.np, "asarray", lambda memory: memory._plain.view(-1).view(torch.uint8).numpy())
    ours = outcomes(tmp_path, "resize_", protected=True, steps=1, saved=True)
    assert "resizable" in ours["frozen"]


def test_a_job_goes_on_after_all_its_tensors_were_moved_about(tmp_path: Path) -> None:
    """Captures follow: no step after it raises, and a save has what is there now."""
    job = Job(tmp_path, protected=True)
    job.model.double().float()
    job.model.large = torch.zeros(3)
    job.model.empty.resize_(5000)
    job.model.inner[1].running_mean = torch.ones(40)  # type: ignore[union-attr]
    del job.model.cache
    del job.model.turned
    job.inner.state.clear()
    job.extras.clear()
    job.step(5)
    job.save(5)


@pytest.mark.parametrize("steps", [0, 3])
def test_models_and_optimizers_can_be_copied_and_pickled(tmp_path: Path, steps: int) -> None:
    """`best = copy.deepcopy(model)`, AveragedModel(model), torch.save(model): our hooks stay with the original."""
    job = Job(tmp_path, protected=True, steps=steps)
    file = io.BytesIO()
    torch.save(job.model, file)
    file.seek(0)
    for twin in (copy.deepcopy(job.model), torch.load(file, weights_only=False)):
        assert job.tentative_copies(twin) == 0
    assert job.tentative_copies(job.model) == 1
    copy.deepcopy(job.wrapped)
    torch.optim.swa_utils.AveragedModel(job.model)


def test_arrays_and_texts_among_the_extras_can_still_grow(tmp_path: Path) -> None:
    job = Job(tmp_path, protected=True)
    job.save(4)
    job.extras["array"].resize(10, refcheck=False)  # type: ignore[union-attr]
    job.extras["text"].extend(b"more")  # type: ignore[union-attr]


def test_the_memory_of_a_tensor_that_is_replaced_stays_while_its_bytes_are_held() -> None:
    tensor = torch.full((1 << 16,), 3, dtype=torch.uint8)
    view = bytes_of(tensor)
    assert view is not None
    tensor.data = torch.zeros(1)
    others = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(8)]
    assert bytes(view) == b"\3" * (1 << 16), len(others)


def test_a_small_tensor_that_is_resized_while_it_is_written_was_copied_before() -> None:
    tensor = torch.full((16,), 3, dtype=torch.uint8)
    content = source_of(tensor)
    tensor.untyped_storage().resize_(1 << 20)
    assert bytes(content) == b"\3" * 16  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [(8,), (4, 2)])
def test_a_tensor_whose_storage_is_gone_is_named_and_not_read(form: tuple[int, ...]) -> None:
    """Reading it would end the process."""
    tensor = torch.ones(8).view(form)
    turned = tensor.t() if tensor.ndim == 2 else tensor
    tensor.untyped_storage().resize_(0)
    with golden.raises(UnstorableError):
        source_of(tensor)
    with golden.raises(UnstorableError):
        staged_bytes(turned)
