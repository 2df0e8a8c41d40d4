"""The keys that torch.distributed.checkpoint may ask for, and what it says where it cannot have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)

from lastwords.errors import ReplacedError
from lastwords.integrations.dcp import LastWordsReader
from tests import golden
from tests.integration.saved_layouts import differing
from tests.integrations.made import published, saved, trained, unit

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_all_keys_of_get_state_dict_are_there_and_no_bit_differs(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    path = saved(tmp_path, model, optimizer)
    weights, moments = get_state_dict(*trained(1))
    state = {"model": weights, "optim": moments}
    dcp.load(state, storage_reader=LastWordsReader(path))
    whole = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    assert differing(whole, state) == []
    assert {"head.weight", "up.weight", "frozen", "scale"} <= set(state["model"])
    assert "cache" not in state["model"]


def test_an_optimizer_by_parameter_and_a_model_at_the_top_are_read_too(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    path = saved(tmp_path, model, optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def whole(model: Any, optimizer: Any) -> dict[str, Any]:
        return {**get_model_state_dict(model), "opt": get_optimizer_state_dict(model, optimizer, options=flat)}

    state = whole(*trained(1))
    dcp.load(state, storage_reader=LastWordsReader(path, model="", optimizer="opt"))
    assert "param_groups.up.weight.lr" in state["opt"]
    assert differing(whole(model, optimizer), state) == []


def test_the_newest_checkpoint_of_a_directory_is_read(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    saved(tmp_path, model, optimizer, step=7)
    with torch.no_grad():
        model.frozen.add_(1)
    saved(tmp_path, model, optimizer, step=8)
    state = {"model": {"frozen": torch.zeros_like(model.frozen)}}
    dcp.load(state, storage_reader=LastWordsReader(tmp_path))
    assert torch.equal(state["model"]["frozen"], model.frozen)


def test_ranks_that_have_found_different_checkpoints_do_not_load(tmp_path: Path) -> None:
    older = saved(tmp_path, *trained(0), step=3)
    readers = [LastWordsReader(tmp_path)]
    readers[0].read_metadata()
    saved(tmp_path, *trained(0), step=4)
    readers.append(LastWordsReader(tmp_path))
    readers[1].read_metadata()
    plans = [reader.prepare_local_plan(LoadPlan([])) for reader in readers]
    with golden.raises(ReplacedError):
        readers[0].prepare_global_plan(plans)
    named = LastWordsReader(older)
    named.read_metadata()
    assert readers[0].prepare_global_plan([plans[0], named.prepare_local_plan(LoadPlan([]))])


def test_another_model_and_a_place_without_a_checkpoint_are_refused_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path, *trained(0))
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (path, {"up.weight": torch.zeros(9, 3)}, "mismatch"),
        (path, {"up.wait": torch.zeros(4, 3)}, "model.up.wait"),
        (tmp_path / "nowhere", {"up.weight": torch.zeros(4, 3)}, "nowhere"),
    ]
    for where, weights, text in cases:
        with pytest.raises(CheckpointException, match=text):
            dcp.load({"model": weights}, storage_reader=LastWordsReader(where))


def test_a_stage_is_read_by_choosing_its_units(tmp_path: Path) -> None:
    stages = torch.randn(3), torch.randn(3)
    states = {rank: {f"stage-{rank}": unit(f"stage-{rank}", [("w", stages[rank], None)], (rank,))} for rank in (0, 1)}
    path = published(tmp_path, states)
    for stage, whole in enumerate(stages):
        state = {"model": {"w": torch.zeros(3)}}
        dcp.load(state, storage_reader=LastWordsReader(path, units=[f"stage-{stage}"]))
        assert torch.equal(state["model"]["w"], whole)
    with pytest.raises(CheckpointException, match=r"stage-0 .* stage-1"):
        dcp.load({"model": {"w": torch.zeros(3)}}, storage_reader=LastWordsReader(path))
