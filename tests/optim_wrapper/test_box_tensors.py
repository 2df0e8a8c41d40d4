"""Whatever the loop does with a tensor in the black box: its copy is of now, or there is none, or it is told."""

from __future__ import annotations

import errno
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from lastwords.errors import MismatchError
from lastwords.optim_wrapper.capture.box_tensors import BoxTensor, BoxTensors
from lastwords.optim_wrapper.capture.buffers import ExtraBuffers, SavedForms
from lastwords.optim_wrapper.capture.rank_local import BoxRecorder
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.state.extras import Extras
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor import black_box
from lastwords.processor.black_box import BlackBox
from lastwords.processor.box_layout import BoxLayout, BoxReader, RegionCopy
from lastwords.processor.recurrence import Late
from tests.ledgers import told
from tests.optim_wrapper.test_rank_local import held


class Loop:
    """A model without buffers, in which gradients are added up over steps without an update."""

    def __init__(self, folder: Path) -> None:
        self.net = nn.Linear(2, 2, bias=False)
        self.weight = self.net.weight
        optimizer = OptTFTWrapper(torch.optim.SGD(self.net.parameters(), 0.1))
        self.recorder = StepRecorder(self.net, [optimizer], None, None)
        self.recorder.agree_units(World(), next_prefix(), ())
        self.recorder.make_source(lambda rank: folder / "box", lambda step: {})
        self.recorder.open_box(lambda make: make(folder / "box"), at_gate=True)
        self.recorder.begin(0, None)
        self.step, self.folder = 0, folder

    def accumulate(self) -> None:
        self.step += 1
        self.net(torch.ones(1, 2)).sum().backward()
        self.recorder.end_step(self.step, None, updated=False)

    @property
    def saved(self) -> list[float] | None:
        with BoxReader(self.folder / "box") as box:
            copy = box.read(self.step)
        assert copy is not None
        region = copy.regions.get("grad/weight")
        return None if region is None else torch.frombuffer(bytearray(region.data), dtype=torch.float32).tolist()


def test_gradients_of_a_model_without_buffers_are_in_the_copy(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for times in (1.0, 2.0, 3.0):
        loop.accumulate()
        assert loop.saved == [times] * 4


@pytest.mark.parametrize("dropped", [False, True])
def test_a_copy_that_is_taken_again_has_the_gradient_of_now(tmp_path: Path, dropped: bool) -> None:
    loop = Loop(tmp_path)
    loop.accumulate()
    loop.recorder.ends_early = True
    loop.accumulate()
    loop.weight.grad = None if dropped else torch.full((2, 2), 7.0)
    loop.recorder.look_again()
    assert loop.saved == (None if dropped else [7.0] * 4)


@pytest.mark.ci
def test_a_gradient_that_the_loop_has_dropped_is_not_kept_alive(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.accumulate()
    assert loop.weight.grad is not None
    gone = weakref.ref(loop.weight.grad)
    loop.weight.grad = None
    gc.collect()
    assert gone() is None


def test_a_gradient_of_a_class_that_cannot_be_copied_is_told(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.accumulate()
    loop.weight.grad = AsyncCollectiveTensor(torch.full((2, 2), 3.0))
    loop.recorder.end_step(2, None, updated=False)
    (reason,) = told(loop.recorder)
    assert reason.startswith("the gradient of 'weight' cannot be captured")


def test_gradients_of_another_type_are_refused_before_anything_changes(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    double = RegionCopy("F64", (2, 2), memoryview(bytes(32)))
    buffer = RegionCopy("F32", (2,), memoryview(bytes(8)))
    loop.net.register_buffer("mean", torch.ones(2))
    loop.recorder.buffers.admit_late()
    with pytest.raises(MismatchError):
        loop.recorder.restore_own({"grad/weight": double, "buffer/mean": buffer}, SavedForms())
    assert loop.net.mean.tolist() == [1.0, 1.0]  # type: ignore[union-attr,operator]


def boxed(folder: Path, tensors: BoxTensors) -> BoxRecorder:
    return BoxRecorder(BlackBox.create(folder / "rank_0.box", BoxLayout(tensors.regions)), (tensors,), Late())


def values(made: BoxRecorder, step: int, name: str) -> list[float] | None:
    region = held(made, step).regions.get(name)
    return None if region is None else torch.frombuffer(bytearray(region.data), dtype=torch.float32).tolist()


def test_memory_that_is_freed_behind_an_offset_is_not_read(tmp_path: Path) -> None:
    base = torch.arange(float(1 << 20))
    table = {"w": base[-4:]}
    tensors = BoxTensors()
    tensors.add(BoxTensor("model/w", "w", table, "w", optional=True))
    made = boxed(tmp_path, tensors)
    made.committed(1, b"{}")
    base.untyped_storage().resize_(16)
    made.committed(2, b"{}")
    assert "model/w" not in held(made, 2).regions


def test_a_tensor_that_becomes_sparse_ends_no_training(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(4))
    tensors = BoxTensors()
    tensors.add(BoxTensor("model/w", "w", {"w": weight}, "w", optional=True))
    made = boxed(tmp_path, tensors)
    made.committed(1, b"{}")
    torch.utils.swap_tensors(weight, nn.Parameter(torch.ones(4).to_sparse()))
    made.committed(2, b"{}")
    assert "model/w" not in held(made, 2).regions


@pytest.mark.parametrize("count", [2, 4, 40])
def test_what_does_not_fit_while_it_is_copied_is_in_no_copy(tmp_path: Path, count: int) -> None:
    norms = nn.Sequential(*[nn.BatchNorm1d(2) for _ in range(count)])
    extras = ExtraBuffers(Extras({"ema": norms}))
    made = boxed(tmp_path, extras.tensors)
    made.committed(1, b"{}")
    one: Any = norms[1]
    one.running_mean.data = torch.full((3,), 6.0)
    made.committed(2, b"{}")
    assert values(made, 2, "extra_buffer/ema/1.running_mean") is None
    assert values(made, 2, "extra_buffer/ema/0.running_mean") == [0.0, 0.0]
    one.running_var.data = torch.full((1,), 5.0)
    made.committed(3, b"{}")
    assert values(made, 3, "extra_buffer/ema/1.running_var") is None, "not broadcast"
    norms[0].running_var.data = norms[0].running_var.data[:1]  # type: ignore[union-attr, operator]
    made.committed(4, b"{}")
    assert values(made, 4, "extra_buffer/ema/0.running_var") is None, "although it lies where it did"


def test_buffers_of_an_average_are_those_of_the_module_that_stands_there_now(tmp_path: Path) -> None:
    norms = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    extras = ExtraBuffers(Extras({"ema": norms}))
    made = boxed(tmp_path, extras.tensors)
    made.committed(1, b"{}")
    nn.Sequential(nn.Linear(1, 1))
    assert not extras.modules_change
    norms[1] = nn.BatchNorm1d(2)
    assert extras.modules_change
    extras.follow()
    norms[1].running_mean.fill_(6.0)  # type: ignore[union-attr, operator]
    made.committed(2, b"{}")
    assert values(made, 2, "extra_buffer/ema/1.running_mean") == [6.0, 6.0]
    assert not extras.modules_change


def test_a_buffer_of_an_average_that_has_got_another_form_is_put_back() -> None:
    average = nn.Module()
    average.register_buffer("scale", torch.zeros(1))
    extras = ExtraBuffers(Extras({"ema": average}))
    average.scale = torch.full((2,), -1.0)  # as its load_state_dict() may have made it
    saved = {"extra_buffer/ema/scale": RegionCopy("F32", (2,), memoryview(torch.ones(2).numpy().tobytes()))}
    assert extras.restore(saved) == ()
    assert average.scale.tolist() == [1.0, 1.0]


def test_a_shortage_of_memory_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {number: torch.ones(4) for number in range(9)}
    tensors = BoxTensors()
    for number in table:
        what = "the gradients that are carried from step to step"
        tensors.add(BoxTensor(f"grad/{number}", what, table, number, late=True, optional=True, alone=True))
    box = BlackBox.create(tmp_path / "rank_0.box", BoxLayout(tensors.regions))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(black_box.os, "posix_fallocate", full)
    BoxRecorder(box, (tensors,), Late()).committed(1, b"{}")
    assert len(told(tensors)) == 1
