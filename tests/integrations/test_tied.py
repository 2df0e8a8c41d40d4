"""One weight on two pipeline stages: one unit if both call it the same, and made one again if they did not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lastwords.checkpoint.load import open_checkpoint
from lastwords.checkpoint.part import UnitState
from lastwords.cli.main import main
from lastwords.errors import ConfigError, MismatchError
from lastwords.integrations.catalogue import catalogue
from lastwords.integrations.inference import load_for_inference
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.sharding.discover import pieces_of
from lastwords.sharding.pieces import Members, UnitTable
from tests import golden
from tests.integrations.made import published, unit
from tests.sharding.stores import tables

TIES = {"head.weight": "embedding.weight"}


class Model(torch.nn.Module):
    def __init__(self, seed: int = 0, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(8, width)
        self.head = torch.nn.Linear(width, 8, bias=False)
        self.head.weight = self.embedding.weight


def two_stages(root: Path, embedding: torch.Tensor, head: torch.Tensor) -> Path:
    root.mkdir()
    first = unit("rank-0", [("embedding.weight", embedding, None)], (0,))
    last = unit("rank-1", [("head.weight", head, None)], (1,))
    return published(root, {0: {"rank-0": first}, 1: {"rank-1": last}}, world_size=2)


def test_a_tied_model_loads_what_two_stages_have_saved(tmp_path: Path) -> None:
    weight = Model().embedding.weight.detach()
    path = two_stages(tmp_path / "saved", weight, weight.clone())
    model = Model(1)
    with golden.raises(MismatchError):
        load_for_inference(path, model)
    for checked in (True, False):
        assert load_for_inference(path, model, tied=TIES, checked=checked).tensors == 1
        assert torch.equal(model.head.weight, weight)
    load_for_inference(path, model, tied={"embedding.weight": "head.weight"})


def test_what_is_not_the_same_bit_for_bit_is_not_tied(tmp_path: Path) -> None:
    weight = Model().embedding.weight.detach()
    changed = weight.clone()
    changed[-1, -1] = torch.nextafter(changed[-1, -1], torch.tensor(9.0))
    path = two_stages(tmp_path / "values", weight, changed)
    model = Model(1)
    before = model.head.weight.detach().clone()
    with golden.raises(MismatchError) as caught:
        load_for_inference(path, model, tied=TIES)
    assert list(caught.value.different) == ["head.weight"]
    assert torch.equal(model.head.weight, before)
    for name, other in (("shape", weight[:4].clone()), ("type", weight.double())):
        with golden.raises(MismatchError):
            load_for_inference(two_stages(tmp_path / name, weight, other), model, tied=TIES)
    with golden.raises(ConfigError):
        load_for_inference(path, model, tied={"tail": "tail"})


def test_the_commands_write_it_once_and_the_other_name_points_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = Model().embedding.weight.detach()
    path = two_stages(tmp_path / "saved", weight, weight.clone())
    tied = ["--tied", "head.weight=embedding.weight"]
    assert main(["export", str(path), str(tmp_path / "out"), *tied, "--name", "head.*"]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == ["embedding.weight"]
    with safe_open(tmp_path / "out" / "model-00001-of-00001.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"} | TIES
        assert torch.equal(file.get_tensor("embedding.weight"), weight)
    assert main(["convert", str(path), str(tmp_path / "dcp"), "--to", "dcp", *tied]) == 0
    keys = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert {"model.head.weight", "model.embedding.weight"} < set(keys)
    capsys.readouterr()
    back = ["convert", str(tmp_path / "dcp"), str(tmp_path / "back"), "--to", "lastwords"]
    assert main([*back, *tied]) == 2
    capsys.readouterr()
    assert main(back) == 0
    found = catalogue(open_checkpoint(Path(capsys.readouterr().out.strip())))
    assert list(found.parameters) == ["embedding.weight"]
    assert found.aliases == TIES
    for wrong in ("head.weight", "=embedding.weight", "head.weight="):
        assert main(["export", str(path), str(tmp_path / "no"), "--tied", wrong]) == 2
    other = two_stages(tmp_path / "other", weight, weight + 1)
    assert main(["export", str(other), str(tmp_path / "no"), *tied]) not in (0, 1)
    assert not (tmp_path / "no").exists()


class First(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding.from_pretrained(Model().embedding.weight.detach().clone(), freeze=False)
        self.up = torch.nn.Linear(3, 3)


class Last(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(3)
        self.head = torch.nn.Linear(3, 8, bias=False)
        self.head.weight = torch.nn.Parameter(Model().embedding.weight.detach().clone())


def stages(names: Any = None) -> tuple[list[UnitView], list[UnitTable]]:
    """Whole views of three stages after one update, and what they agree on."""
    views = []
    for rank, model in enumerate((First(), torch.nn.Linear(2, 2), Last())):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        views.append(UnitView(model, optimizer, names=names if rank == 2 else None))
    found = [pieces_of(view.all_names(), view.optimizer, (), rank) for rank, view in enumerate(views)]
    return views, tables(found)


def part(view: UnitView, table: UnitTable, unit: str, names: Any = None) -> UnitState:
    whole = UnitView(view.model, view.optimizer, names=names)
    return whole.part(unit, table.mine[unit], table.units[unit]).state()


def as_the_first_calls_it(own: str) -> str:
    return TIES.get(own, own)


def test_with_names_two_stages_hold_one_unit_and_either_can_save_it(tmp_path: Path) -> None:
    views, agreed = stages(as_the_first_calls_it)
    (shared,) = (unit for unit, holders in agreed[0].units.items() if holders == (0, 2))
    assert agreed[0].mine[shared] == agreed[2].mine[shared] == Members(("embedding.weight",))
    first, last = part(views[0], agreed[0], shared), part(views[2], agreed[2], shared, as_the_first_calls_it)
    assert [spec for spec, _ in first.tensors] == [spec for spec, _ in last.tensors]
    assert first.meta == last.meta
    assert list(first.meta.optimizer_state) == ["embedding.weight"]
    own = {unit: part(views[2], agreed[2], unit, as_the_first_calls_it) for unit in agreed[2].mine if unit != shared}
    path = published(tmp_path, {2: {shared: last} | own}, world_size=3)
    model = Model(1)
    load_for_inference(path, model, strict=False)
    assert torch.equal(model.head.weight, views[0].model.embedding.weight)


def test_two_names_are_two_units_and_of_tied_ones_the_state_of_one_stays(tmp_path: Path) -> None:
    views, agreed = stages()
    assert (0, 2) not in agreed[0].units.values()
    parts = {
        rank: {unit: part(views[rank], agreed[rank], unit) for unit in agreed[rank].mine if unit != "replicated"}
        for rank in (0, 2)
    }
    checkpoint = open_checkpoint(published(tmp_path, parts, world_size=3))
    every = catalogue(checkpoint)
    assert {*TIES, *TIES.values()} < every.state.keys()
    found = every.tied(TIES, checkpoint)
    assert every.state.keys() - found.state.keys() == set(TIES)
    assert sorted(found.groups[0].parameters) == [
        "embedding.weight",
        "norm.bias",
        "norm.weight",
        "up.bias",
        "up.weight",
    ]
