"""Buffers that are copied together are what copies of each by itself are, whatever the loop does with their memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lastwords.optim_wrapper.capture import box_tensors
from lastwords.optim_wrapper.capture.box_tensors import BoxTensors
from lastwords.optim_wrapper.capture.buffers import Buffers
from lastwords.optim_wrapper.capture.rank_local import BoxRecorder, regions
from lastwords.processor.black_box import BlackBox
from lastwords.processor.box_layout import BoxLayout, BoxReader
from lastwords.processor.recurrence import Late

WIDE = box_tensors.GATHERED_BYTES_MAX // 4


def network() -> nn.Sequential:
    """Buffers of whole lines and of parts of one, some of odd bytes, some too large, and one of no normalisation."""
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.BatchNorm1d(width) for width in (16, 5, 16, 3, WIDE, WIDE + 1, 40, 2, 16)]
    layers[3].register_buffer("mask", torch.ones(6))
    model = nn.Sequential(*layers)
    scramble(model)
    return model


def scramble(model: nn.Module) -> None:
    """As a kernel writes that counts no versions."""
    for buffer in model.buffers():
        buffer.data.copy_(torch.randint(100, buffer.shape))


def bn(model: nn.Sequential, at: int = 0) -> nn.BatchNorm1d:
    layer = model[at]
    assert isinstance(layer, nn.BatchNorm1d)
    return layer


def opened(tmp_path: Path, model: nn.Module) -> tuple[BoxRecorder, BoxTensors]:
    capture = Buffers(model).tensors
    box = BlackBox.create(tmp_path / "rank_0.box", BoxLayout(regions((capture,))))
    return BoxRecorder(box, (capture,), Late()), capture


def assert_held(made: BoxRecorder, model: nn.Module, step: int) -> None:
    with BoxReader(made.box.path) as reader:
        copy = reader.read(step)
    assert copy is not None
    now = {f"buffer/{name}": bytes(one.detach().numpy().tobytes()) for name, one in model.named_buffers()}
    assert {name: bytes(region.data) for name, region in copy.regions.items()} == now


def test_each_region_has_its_buffers_bytes_and_equal_copies_are_equal(tmp_path: Path) -> None:
    model = network()
    made, capture = opened(tmp_path, model)
    assert capture._gathered is not None
    assert capture._rest[False], "some are copied one by one"
    for step in range(1, 6):
        scramble(model)
        made.tentative(step)
        assert made.committed(step, b"{}") is False, "nothing has moved in between"
        assert_held(made, model, step)
    made.tentative(6)
    bn(model, 8).running_var.data.view(torch.uint8)[-1] += 1
    assert made.committed(6, b"{}") is True
    assert {*made.late} == {"buffer/8.running_var"}


def other_memory(layer: nn.BatchNorm1d) -> None:
    layer.running_mean.data = torch.full((16,), 3.0)


def other_storage(layer: nn.BatchNorm1d) -> None:
    layer.running_mean.set_(torch.full((32,), 4.0).untyped_storage(), 8, (16,), (1,))


def resized(layer: nn.BatchNorm1d) -> None:
    layer.running_mean.untyped_storage().resize_(4096)
    layer.running_mean.fill_(5.0)


def swapped(layer: nn.BatchNorm1d) -> None:
    torch.utils.swap_tensors(layer.running_mean, torch.nn.Buffer(torch.full((16,), 6.0)))


def replaced(layer: nn.BatchNorm1d) -> None:
    layer.running_mean = torch.full((16,), 7.0)


MOVES = (other_memory, other_storage, resized, swapped, replaced)


@pytest.mark.parametrize("move", MOVES)
def test_a_buffer_that_lies_elsewhere_is_followed(tmp_path: Path, move: Callable[[nn.BatchNorm1d], None]) -> None:
    model = network()
    made, _ = opened(tmp_path, model)
    made.tentative(1)
    move(bn(model))
    for step in range(1, 4):
        made.committed(step, b"{}")
        assert_held(made, model, step)
        scramble(model)


def test_without_the_look_where_they_lie_other_memory_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    made, capture = opened(tmp_path, model)
    gathered = capture._gathered
    assert gathered is not None
    monkeypatch.setattr(type(gathered._places), "still", lambda self: True)
    other_memory(bn(model))
    made.committed(1, b"{}")
    with pytest.raises(AssertionError):
        assert_held(made, model, 1)


def test_a_buffer_that_fits_no_more_leaves_the_others_whole(tmp_path: Path) -> None:
    model = network()
    made, _ = opened(tmp_path, model)
    bn(model, 2).running_mean.data = torch.zeros(7)
    for step in (1, 2):
        made.committed(step, b"{}")
    with BoxReader(made.box.path) as reader:
        copy = reader.read(2)
    assert copy is not None
    assert "buffer/2.running_mean" not in copy.regions
    assert bytes(copy.regions["buffer/8.running_var"].data) == bn(model, 8).running_var.numpy().tobytes()


def test_what_comes_to_a_model_without_buffers_gets_room(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    buffers = Buffers(model)
    tensors = buffers.tensors
    box = BlackBox.create(tmp_path / "rank_0.box", BoxLayout(regions((tensors,))))
    BoxRecorder(box, (tensors,), Late()).committed(1, b"{}")
    model.register_buffer("late", torch.ones(3))
    buffers.admit_late()
    assert tensors.needs_room
