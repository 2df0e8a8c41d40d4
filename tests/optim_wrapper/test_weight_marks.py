"""A write by something else than the optimizer is seen in some parameters of each kind."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lastwords.optim_wrapper import weight_marks
from lastwords.optim_wrapper.weight_marks import EACH_MAX, WeightMarks, runs_of


def watched(frozen: int = 2) -> tuple[dict[str, torch.Tensor], WeightMarks]:
    tensors: dict[str, torch.Tensor] = {f"w{n}": nn.Parameter(torch.ones(2)) for n in range(9)}
    tensors |= {f"k{n}": nn.Parameter(torch.ones(2), requires_grad=False) for n in range(frozen)}
    marks = WeightMarks(lambda: tensors)
    marks.choose()
    return tensors, marks


@pytest.mark.parametrize("kind", ["w", "k"])
@pytest.mark.parametrize("pointer", [False, True])
def test_what_writes_all_of_a_kind_is_seen(kind: str, pointer: bool) -> None:
    tensors, marks = watched()
    since = marks.take()
    assert marks.moved(since) == []
    for name, tensor in tensors.items():
        if name.startswith(kind) and pointer:
            tensor.data = tensor.data.clone()
        elif name.startswith(kind):
            with torch.no_grad():
                tensor.mul_(2)
    moved = marks.moved(since)
    assert moved[0] == f"{kind}0"
    assert all(name.startswith(kind) for name in moved)


def test_few_are_looked_at_and_marks_of_others_say_nothing() -> None:
    tensors, marks = watched()
    since = marks.take()
    assert len(since[0]) == EACH_MAX + 2
    tensors["k2"] = nn.Parameter(torch.ones(1), requires_grad=False)
    marks.choose()
    assert marks.moved(since) == []


def swap_in(tensors: dict[str, torch.Tensor], averages: float) -> None:
    """As torch_ema and diffusers do it: neither the memory nor torch's count of writes shows it."""
    for tensor in tensors.values():
        tensor.data.copy_(torch.full_like(tensor, averages))


def test_a_write_through_data_into_the_same_memory_is_seen_in_the_values() -> None:
    tensors, marks = watched()
    since = marks.take()
    swap_in(tensors, 2)
    assert marks.moved(since) == ["w0", "w2", "w5", "w8", "k0", "k1"]
    swap_in(tensors, 1)
    assert marks.moved(since) == []  # they are those of the step again


def test_without_the_values_such_a_write_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, and the limit that the module names for devices."""
    monkeypatch.setattr(weight_marks, "runs_of", lambda tensor: [])
    tensors, marks = watched()
    since = marks.take()
    swap_in(tensors, 2)
    assert marks.moved(since) == []


def test_the_values_are_those_of_the_memory_that_a_parameter_has_now() -> None:
    tensors, marks = watched()
    old = tensors["w0"].data
    tensors["w0"].data = torch.zeros(2)
    since = marks.take()
    old.mul_(2)
    assert marks.moved(since) == []
    tensors["w0"].data.add_(1)
    assert marks.moved(since) == ["w0"]


def test_what_is_written_before_a_mark_belongs_to_it() -> None:
    tensors, marks = watched()
    marks.take()
    swap_in(tensors, 0.5)
    assert marks.moved(marks.take()) == []


def test_looking_at_values_leaves_the_storage_one_that_can_be_resized() -> None:
    tensors, marks = watched()
    since = marks.take()
    tensors["w0"].untyped_storage().resize_(0)
    assert marks.moved(since) == ["w0"]


def test_one_that_lies_elsewhere_leaves_the_values_of_the_others_where_they_are() -> None:
    tensors, marks = watched()
    marks.take()
    tensors["w2"].data = torch.empty(0)
    since = marks.take()
    assert since[3][:3] == [8, 0, 8]  # bytes of two numbers each
    tensors["w5"].data.mul_(2)
    assert marks.moved(since) == ["w5"]
    tensors["w2"].data = torch.ones(3)
    assert marks.moved(since) == ["w2", "w5"]


def test_a_row_of_its_own_in_the_middle_of_a_large_tensor_is_seen() -> None:
    table = torch.zeros(91, 40)
    runs = b"".join(runs_of(table))
    table[30, 12:28] = 1
    assert b"".join(runs_of(table)) != runs


ODD = {
    "scalar": torch.tensor(3.0),
    "one": torch.ones(1, 1),
    "bfloat16": torch.ones(40, dtype=torch.bfloat16),
    "complex128": torch.ones(5, 5, dtype=torch.complex128),
    "float8": torch.ones(9).to(torch.float8_e4m3fn),
    "bool": torch.ones(3, dtype=torch.bool),
    "expanded": torch.ones(1).expand(4, 4),
    "channels last": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", ODD)
def test_values_of_every_form_are_looked_at(name: str) -> None:
    runs = runs_of(ODD[name])
    before = b"".join(runs)
    assert before == b"".join(runs) != b""
    ODD[name].untyped_storage().fill_(7)
    assert b"".join(runs) != before


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(2, device="meta"), torch.eye(2).to_sparse(),
                                    torch.ones(2, dtype=torch.complex64).conj()])  # fmt: skip
def test_what_has_no_plain_memory_is_left_alone(tensor: torch.Tensor) -> None:
    assert runs_of(tensor) == []


@settings(max_examples=60, deadline=None)
@given(shape=st.lists(st.integers(1, 12), min_size=1, max_size=3), order=st.randoms(use_true_random=False))
def test_the_values_are_the_tensor_s_own_whatever_lies_between_them(shape: list[int], order: random.Random) -> None:
    whole = torch.zeros([size + 2 for size in shape])
    own = whole[tuple(slice(1, 1 + size) for size in shape)].permute(order.sample(range(len(shape)), len(shape)))
    own.fill_(1)
    values = np.frombuffer(b"".join(runs_of(own)), np.float32)
    assert values.tolist() == [1.0] * len(values) != []
    whole.fill_(2)
    assert (np.frombuffer(b"".join(runs_of(own)), np.float32) == 2).all()


def test_weights_that_were_made_under_inference_mode_are_told_by_their_values() -> None:
    with torch.inference_mode():
        made = nn.Parameter(torch.ones(2), requires_grad=False)
    tensors: dict[str, torch.Tensor] = {"trained": nn.Parameter(torch.ones(2)), "frozen": made}
    marks = WeightMarks(lambda: tensors)
    marks.choose()
    since = marks.take()
    assert marks.moved(since) == []
    with torch.inference_mode():
        made.mul_(2)
    assert marks.moved(since) == ["frozen"]
    tensors["trained"].data.mul_(1)
    with torch.no_grad():
        tensors["trained"].mul_(1)  # the same values: only the count of writes tells
    assert marks.moved(since) == ["trained", "frozen"]
