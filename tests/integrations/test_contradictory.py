"""Units that contradict each other: no use of a checkpoint takes the first one's word for all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader

from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.load import open_checkpoint
from lastwords.checkpoint.part import UnitState
from lastwords.cli.main import main
from lastwords.integrations.catalogue import catalogue
from lastwords.integrations.dcp import LastWordsReader
from lastwords.integrations.diff import diff
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of
from tests import golden
from tests.integrations.made import published, unit

NAMES = "vw"


def staged(root: Path, *rates: float) -> Path:
    """Two stages of a pipeline, each with an optimizer of its own: both call their only param group number 0."""
    root.mkdir()
    states: dict[int, dict[str, UnitState]] = {0: {"replicated": unit("replicated", [], (0, 1))}, 1: {}}
    for rank, (name, lr) in enumerate(zip(NAMES, rates, strict=True)):
        made = unit(f"stage-{rank}", [(name, torch.full((2,), float(rank)), None)], (rank,))
        groups: Any = {"groups": [{"dict": [["lr", {"plain": lr}]]}], "group_parameters": [[name]]}
        states[rank][f"stage-{rank}"] = UnitState(made.tensors, replace(made.meta, **groups, group_numbers=[0]))
    return published(root, states)


def halves(root: Path, key: str, values: tuple[Any, Any]) -> Path:
    """A parameter in two parts, beside each of them state of its own: a tensor or a plain value."""
    root.mkdir()
    states = {}
    for rank, value in enumerate(values):
        name = f"rank-{rank}"
        made = unit(name, [("w", torch.arange(4.0), ((2 * rank,), (2,)))], (rank,))
        tensors, node = list(made.tensors), {"plain": value}
        if isinstance(value, torch.Tensor):
            spec = TensorSpec(f"unit/{name}/optim/w/{key}", "F32", tuple(value.shape))
            tensors.append((spec, bytes_of(value)))
            node = {"tensor": spec.name, "dtype": "float32", "shape": list(value.shape)}
        meta = replace(made.meta, optimizer_state={"w": {"dict": [[key, node]]}})
        states[rank] = {name: UnitState(tensors, meta)}
    return published(root, states)


def rates_of(path: Path) -> list[tuple[tuple[str, ...], float]]:
    return [(group.parameters, group.values["lr"]) for group in catalogue(open_checkpoint(path)).groups]


def test_groups_of_one_number_stay_apart_where_units_differ_in_their_values(tmp_path: Path) -> None:
    apart = [(("v",), 0.1), (("w",), 0.2)]
    path = staged(tmp_path / "a", 0.1, 0.2)
    assert rates_of(path) == apart
    assert rates_of(staged(tmp_path / "alike", 0.1, 0.1)) == [(("v", "w"), 0.1)]
    assert main(["transform", str(path), str(tmp_path / "whole"), "--to", "whole"]) == 0
    (moved,) = (tmp_path / "whole").iterdir()
    assert rates_of(moved) == apart
    assert main(["diff", str(path), str(moved)]) == 0


def test_a_difference_in_the_second_of_two_groups_of_one_number_is_shown(tmp_path: Path) -> None:
    path = staged(tmp_path / "a", 0.1, 0.2)
    (found,) = diff(path, staged(tmp_path / "b", 0.1, 0.3)).differences
    assert (found.name, found.text) == ("group/0@w/lr", "0.2, 0.3")
    names = {item.name for item in diff(path, staged(tmp_path / "c", 0.1, 0.1)).differences}
    assert names >= {"group/0/lr", "group/0@v/lr", "group/0@w/lr"}


def test_weights_are_exported_and_hyperparameters_read_by_parameter_whatever_groups_say(tmp_path: Path) -> None:
    path = staged(tmp_path / "a", 0.1, 0.2)
    assert main(["export", str(path), str(tmp_path / "out")]) == 0
    with safe_open(tmp_path / "out" / "model-00001-of-00001.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["v", "w"]
    reader = LastWordsReader(path)
    keys = reader.read_metadata().state_dict_metadata
    assert {key for key in keys if "param_groups." in key} == {f"optim.param_groups.{name}.lr" for name in NAMES}


def test_a_conversion_asks_for_the_units_whose_group_is_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", str(staged(tmp_path / "a", 0.1, 0.2)), str(tmp_path / "dcp"), "--to", "dcp"]
    assert main(command) == 2
    golden.says(capsys.readouterr().err)
    assert not (tmp_path / "dcp").exists()
    assert main([*command, "--unit", "stage-1"]) == 0
    assert "optim.param_groups.0.lr" in FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata


def test_state_that_differs_between_the_parts_of_its_parameter_is_refused_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = str(halves(tmp_path / "a", "n", (1, 2))), str(tmp_path / "out")
    for command in (
        ["export", path, out],
        ["convert", path, out, "--to", "dcp"],
        ["diff", path, path],
        ["transform", path, out, "--to", "whole"],
    ):
        capsys.readouterr()
        assert main(command) == 3, command
        golden.says(capsys.readouterr().err)


def test_a_tensor_of_its_own_beside_each_part_of_a_parameter_is_kept_with_its_unit(tmp_path: Path) -> None:
    rows = torch.zeros(5), torch.ones(5)
    path = halves(tmp_path / "a", "row", rows)
    state = catalogue(open_checkpoint(path)).state["w"]
    assert {key: tensor.name for key, tensor in state.items()} == {
        f"row@rank-{rank}": f"optim/w/row@rank-{rank}" for rank in (0, 1)
    }
    changed = halves(tmp_path / "b", "row", (rows[0], rows[0]))
    assert [item.name for item in diff(path, changed).differences] == ["optim/w/row@rank-1"]
    counters = halves(tmp_path / "c", "step", (torch.ones(()), torch.ones(())))
    assert list(catalogue(open_checkpoint(counters)).state["w"]) == ["step"]
