"""A model that only computes gets exactly the trained weights, or nothing and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lastwords import load_for_inference
from lastwords.checkpoint.direct_io import CHUNK_BYTES
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.part import LocalState
from lastwords.errors import ConfigError, FormatError, IncompleteError, MismatchError
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of
from tests import golden
from tests.integration.saved_layouts import bits
from tests.integrations.made import Small, flip, published, saved, trained, unit


def everything(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def test_weights_frozen_ones_and_all_buffers_come_back_and_logits_are_the_same(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    path = saved(tmp_path, model, optimizer)
    other, _ = trained(1)
    assert everything(other) != everything(model), "the control"
    loaded = load_for_inference(tmp_path, other)
    assert everything(other) == everything(model)
    assert (loaded.path, loaded.global_step, loaded.tensors) == (path, 7, 8)
    question = torch.randn(5, 3)
    assert torch.equal(other(question), model(question))


def test_a_model_on_the_meta_device_gets_memory_and_stays_tied(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    saved(tmp_path, model, optimizer)
    with torch.device("meta"):
        other = Small()
    load_for_inference(tmp_path, other)
    assert everything(other) == everything(model)
    assert other.head.weight is other.up.weight
    assert not other.frozen.requires_grad
    assert other.up.weight.requires_grad


def test_another_element_type_is_converted(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    saved(tmp_path, model, optimizer)
    other = Small().to(torch.bfloat16)
    load_for_inference(tmp_path, other)
    assert torch.equal(other.up.weight, model.up.weight.to(torch.bfloat16))


def test_another_model_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    saved(tmp_path, *trained(0))
    wider = Small(width=5)
    wider.extra = torch.nn.Linear(1, 1)
    del wider.frozen
    before = everything(wider)
    with golden.raises(MismatchError) as caught:
        load_for_inference(tmp_path, wider)
    assert everything(wider) == before
    assert set(caught.value.missing) == {"extra.weight", "extra.bias"}
    assert caught.value.extra == ("frozen",)
    assert caught.value.different["up.weight"] == "saved (4, 3), here (5, 3)"


def test_parameters_that_the_model_lacks_are_left_out_when_asked(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    saved(tmp_path, model, optimizer)
    other = Small()
    del other.frozen
    with pytest.raises(MismatchError, match="strict=False"):
        load_for_inference(tmp_path, other)
    load_for_inference(tmp_path, other, strict=False)
    assert torch.equal(other.up.weight, model.up.weight)


def test_a_cache_that_was_never_saved_is_missed_on_the_meta_device_only(tmp_path: Path) -> None:
    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(2))
            self.register_buffer("cache", torch.ones(2), persistent=False)

    published(tmp_path, {0: {"replicated": unit("replicated", [("w", torch.tensor([1.0, 2.0]), None)])}})
    model = Cached()
    load_for_inference(tmp_path, model)
    assert model.w.tolist() == [1.0, 2.0]
    with torch.device("meta"):
        empty = Cached()
    with golden.raises(MismatchError):
        load_for_inference(tmp_path, empty)


def test_meta_is_no_device_to_load_to_and_a_place_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, *trained(0))
    with torch.device("meta"):
        model = Small()
    with golden.raises(ConfigError):
        load_for_inference(path, model, device="meta")
    with golden.raises(IncompleteError):
        load_for_inference(tmp_path / "nowhere", model)


def test_a_flipped_byte_in_a_large_weight_is_noticed(tmp_path: Path) -> None:
    whole = torch.zeros(3 * CHUNK_BYTES // 4)
    path = published(tmp_path, {0: {"replicated": unit("replicated", [("weight", whole, None)])}})
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones_like(whole))
    load_for_inference(path, model)
    (file,) = path.rglob("*.ckpt")
    flip(file, CHUNK_BYTES + 1)
    with golden.raises(FormatError):
        load_for_inference(path, model)


def test_buffers_that_each_rank_saves_for_itself_are_those_of_the_lowest_rank(tmp_path: Path) -> None:
    def local(rank: int) -> LocalState:
        mean = torch.full((3,), float(rank))
        spec = TensorSpec(f"local/{rank}/buffer/running_mean", "F32", (3,))
        return LocalState([(spec, bytes_of(mean))])  # type: ignore[list-item]

    weights = torch.randn(3)
    locals_ = {rank: local(rank) for rank in (1, 2)}
    state = {0: {"replicated": unit("replicated", [("weight", weights, None)], (0, 1, 2))}}
    path = published(tmp_path, state, locals_=locals_, world_size=3)
    model = torch.nn.BatchNorm1d(3, affine=False)
    model.num_batches_tracked = model.running_var = None
    model.weight = torch.nn.Parameter(torch.zeros(3))
    load_for_inference(path, model)
    assert model.running_mean is not None
    assert model.running_mean.tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(model.weight, weights)
