"""Two checkpoints are the same if every tensor is, whatever their layouts; and one bit is enough to be different."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lastwords.cli.main import main
from lastwords.integrations.diff import diff
from tests import golden
from tests.integrations.made import published, saved, trained, unit


def cut(root: Path, whole: torch.Tensor, *borders: int, dtype: torch.dtype | None = None) -> Path:
    """`whole` as one checkpoint of as many ranks as there are pieces between the borders."""
    root.mkdir()
    edges = [0, *borders, len(whole)]
    kept = whole if dtype is None else whole.to(dtype)
    states = {
        rank: {
            f"rank-{rank}": unit(
                f"rank-{rank}", [("w", kept, ((edges[rank],), (edges[rank + 1] - edges[rank],)))], (rank,)
            )
        }
        for rank in range(len(edges) - 1)
    }
    return published(root, states)


def test_layouts_do_not_matter_and_one_element_does(tmp_path: Path) -> None:
    whole = torch.randn(11)
    a, b = cut(tmp_path / "a", whole, 4, 5), cut(tmp_path / "b", whole, 7)
    assert diff(a, b).differences == ()
    other = whole.clone()
    other[6] += 0.5
    (found,) = diff(a, cut(tmp_path / "c", other, 3)).differences
    assert (found.name, found.what, found.elements) == ("model/w", "values", 1)
    assert found.largest == pytest.approx(0.5)
    assert found.text == "1 of 11 elements"


def test_negative_zero_differs_and_nan_is_itself(tmp_path: Path) -> None:
    whole = torch.tensor([0.0, float("nan")])
    a = cut(tmp_path / "a", whole, 1)
    assert diff(a, cut(tmp_path / "b", whole.clone(), 1)).differences == ()
    (found,) = diff(a, cut(tmp_path / "c", torch.tensor([-0.0, float("nan")]), 1)).differences
    assert (found.elements, found.largest) == (1, 0.0)


def test_types_shapes_and_names_are_told_apart(tmp_path: Path) -> None:
    whole = torch.ones(4)
    a = cut(tmp_path / "a", whole, 2)
    (type_,) = diff(a, cut(tmp_path / "b", whole, 2, dtype=torch.bfloat16)).differences
    assert (type_.what, type_.text) == ("type", "float32, bfloat16")
    (shape,) = diff(a, cut(tmp_path / "c", torch.ones(5), 2)).differences
    assert (shape.what, shape.text) == ("shape", "(4,), (5,)")
    (tmp_path / "d").mkdir()
    other = published(tmp_path / "d", {0: {"replicated": unit("replicated", [("v", whole, None)])}})
    assert [(item.name, item.what) for item in diff(a, other).differences] == [
        ("model/v", "only in B"),
        ("model/w", "only in A"),
    ]


def test_moments_and_hyperparameters_count_unless_only_weights_are_asked_for(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    a = saved(tmp_path / "a", model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.state[model.up.weight]["exp_avg"][0, 0] += 1
    b = saved(tmp_path / "b", model, optimizer, step=9)
    assert [item.name for item in diff(a, b).differences] == ["group/0/lr", "optim/up.weight/exp_avg"]
    assert diff(a, b, weights_only=True).differences == ()
    assert diff(a, b).steps == (7, 9)


def test_the_command_says_it_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained(0)
    a = saved(tmp_path / "a", model, optimizer)
    b = saved(tmp_path / "b", *trained(1))
    assert main(["diff", str(a), str(tmp_path / "a")]) == 0
    assert "0 different" in capsys.readouterr().out
    assert main(["diff", str(a), str(b)]) == 1
    assert "model/up.weight" in capsys.readouterr().out
    assert main(["diff", str(a), str(b), "--json", "--weights"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["a"]["path"] == str(a)
    assert {item["what"] for item in told["differences"]} == {"values"}
    assert main(["diff", str(a), str(tmp_path / "nowhere")]) == 3
    golden.says(capsys.readouterr().err)


def test_the_export_command_prints_its_files_and_refuses_nonsense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = saved(tmp_path / "a", *trained(0))
    assert main(["export", str(a), str(tmp_path / "out"), "--shard-size", "1KB"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out" / "model.safetensors.index.json")
    assert main(["export", str(a), str(tmp_path / "out")]) == 2
    golden.says(capsys.readouterr().err)
    assert main(["export", str(a), str(tmp_path / "new"), "--shard-size", "big"]) == 2
    golden.says(capsys.readouterr().err)
