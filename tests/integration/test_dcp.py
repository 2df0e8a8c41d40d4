"""torch.distributed.checkpoint reads our directories into other layouts, and gets every bit that torch would gather."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from lastwords.checkpoint.load import open_checkpoint
from lastwords.integrations.catalogue import catalogue
from lastwords.integrations.dcp import LastWordsReader
from lastwords.integrations.dcp_in import from_dcp
from lastwords.integrations.dcp_out import to_dcp
from lastwords.integrations.diff import diff
from tests.integration.forked import on_ranks
from tests.integration.layouts import Net, Trial, adamw, build
from tests.integration.saved_layouts import differing, gathered, write
from tests.selection import usually

pytestmark = pytest.mark.process


def load_into(trial: Trial, path: Path) -> None:
    weights, moments = get_state_dict(trial.model, trial.optimizers)
    state: dict[str, Any] = {"model": weights, "optim": moments}
    ours = LastWordsReader.validate_checkpoint_id(path)
    dcp.load(state, storage_reader=LastWordsReader(path) if ours else FileSystemReader(path))
    set_state_dict(trial.model, trial.optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"])


def read_by(path: Path, name: str, ranks: int, tmp_path: Path, width: int = 10) -> dict[str, Any]:
    """The whole state after `ranks` processes of layout `name` have loaded it over weights of another seed."""
    where = tmp_path / f"read by {ranks}"
    where.mkdir()

    def body(rank: int) -> Any:
        if name == "one":
            torch.manual_seed(1)
            model = Net(width)
            trial = Trial(model, [adamw(model)], 0)
        else:
            trial = build(name, seed=1)
        for optimizer in trial.optimizers:
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # adds initial_lr to the groups
        before = copy.deepcopy(gathered(trial.model, trial.optimizers))
        load_into(trial, path)
        after = gathered(trial.model, trial.optimizers)
        if rank == 0:
            torch.save((before, after), where / "state.pt")

    on_ranks(body, where, ranks)
    before, after = torch.load(where / "state.pt", weights_only=False)
    assert differing(before["model"], after["model"]), "the control: it was another model before"
    result: dict[str, Any] = after
    return result


@pytest.mark.parametrize("saved", usually(["hsdp", "fsdp x tp", "fsdp"], ["fsdp x tp"]))
def test_fewer_ranks_read_what_four_wrote_bit_for_bit(saved: str, tmp_path: Path) -> None:
    path, whole = write(saved, tmp_path)
    for name, ranks in (("one", 1), ("fsdp", 2), ("fsdp", 3)):
        assert differing(whole, read_by(path, name, ranks, tmp_path)) == [], (name, ranks)


def test_a_tensor_parallel_job_is_read_by_one_and_by_two_ranks(tmp_path: Path) -> None:
    path, whole = write("tp", tmp_path)
    for name, ranks in (("one", 1), ("tp", 2)):
        assert differing(whole, read_by(path, name, ranks, tmp_path, width=8)) == [], (name, ranks)


@pytest.mark.thorough
def test_a_ddp_job_is_read_by_a_fully_sharded_one(tmp_path: Path) -> None:
    path, whole = write("ddp", tmp_path, ranks=2)
    assert differing(whole, read_by(path, "fsdp", 3, tmp_path)) == []


def test_a_sharded_job_converted_is_read_by_torch_alone_and_comes_back_the_same(tmp_path: Path) -> None:
    path, whole = write("fsdp x tp", tmp_path)
    out = to_dcp(path, tmp_path / "dcp")
    assert differing(whole, read_by(out, "fsdp", 2, tmp_path)) == []
    assert diff(path, from_dcp(out, tmp_path / "back")).differences == ()


@pytest.mark.thorough
def test_param_groups_of_a_sharded_job_are_put_together_again_with_their_numbers(tmp_path: Path) -> None:
    path, whole = write("tp", tmp_path)
    groups = catalogue(open_checkpoint(path)).groups
    assert [sorted(group.parameters) for group in groups] == [
        sorted(group["params"]) for group in whole["optim"]["param_groups"]
    ]
    assert [group.values["weight_decay"] for group in groups] == [0.1, 0.01]
