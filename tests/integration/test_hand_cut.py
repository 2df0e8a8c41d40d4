"""Tensors that were cut by hand move to other layouts like DTensors, once their units say which parts they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import lastwords
from lastwords.checkpoint.load import latest
from lastwords.errors import ConfigError, FormatError
from lastwords.integrations.diff import diff
from lastwords.processor.saver import Position
from lastwords.sharding.declare import Part, Unit, units_from_mesh
from lastwords.sharding.zero import stateful
from tests.integration.forked import on_ranks
from tests.integration.layouts import LAYOUTS, Halves, Trial, adamw, average_over, mesh_of
from tests.integration.test_layouts import SAVED, Rank

pytestmark = pytest.mark.process

Wholes = dict[str, tuple[tuple[int, ...], tuple[int, ...], np.ndarray]]


def by_hand(dp: int, tp: int, units: Any) -> Callable[[], Trial]:
    """Megatron's way over a mesh of dp x tp ranks; one matrix of 8 rows is cut, the norm is whole."""

    def make() -> Trial:
        mesh = mesh_of((dp, tp), "dp", "tp")
        model = Halves(mesh["tp"].get_group())
        replicas = mesh["dp"]
        of_part = average_over([model.up], replicas.get_group(), dp)
        of_norm = average_over(list(model.norm.parameters()), None, dp * tp)

        def average() -> None:
            of_part()
            of_norm()

        return Trial(model, [adamw(model)], replicas.get_local_rank(), average, units)

    return make


def fsdp() -> Trial:
    model = Halves(mesh_of((dist.get_world_size(), 1), "dp", "tp")["tp"].get_group())
    fully_shard(model, mesh=mesh_of((dist.get_world_size(),), "dp"))
    return Trial(model, [adamw(model)], dist.get_rank())


TWICE: list[tuple[int, ...]] = [(0, 2), (1, 3)]


def rows(starts: list[int], holders: list[tuple[int, ...]], of: int = 8) -> list[Unit]:
    """Parts of other sizes: each begins at one of these rows."""
    return [
        Unit(f"rows-{start}", ranks, ["up"], {"u*": Part(offsets=(start, 0), shape=(of, 6))})
        for start, ranks in zip(starts, holders, strict=True)
    ]


def with_zero() -> Trial:
    """The same 2 x 2, its optimizer's state dealt out along dp."""
    trial = by_hand(2, 2, units_from_mesh(dp=2, tp=2, replicated=("norm.*",), cut=CUT))()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    parameters = list(trial.model.parameters())
    trial.optimizers = [ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, groups[dist.get_rank() % 2], lr=1e-2)]
    return trial


def one_group() -> Trial:
    trial = by_hand(1, 1, ())()
    trial.optimizers = [torch.optim.AdamW(trial.model.parameters(), lr=1e-2)]
    return trial


CUT = {"up": 0}
MADE = {
    "2 x 2": by_hand(2, 2, units_from_mesh(dp=2, tp=2, replicated=("norm.*",), cut=CUT)),
    "2 x 2, undeclared": by_hand(2, 2, units_from_mesh(dp=2, tp=2, replicated=("norm.*",))),
    "4 parts": by_hand(1, 4, units_from_mesh(tp=4, replicated=("norm.*",), cut=CUT)),
    "3 uneven parts": by_hand(1, 3, rows([0, 3, 6], [(0,), (1,), (2,)])),
    "2 x 2, zero": with_zero,
    "whole": by_hand(1, 1, ()),
    "one group": one_group,
    "fsdp": fsdp,
}


def parts_of(run: Rank) -> Wholes:
    """Every tensor of this rank: shape of its whole, where it lies there, and its content."""
    view = run.recorder.view
    found: Wholes = {}
    for name, parameter in view.all_names().parameters.items():
        spec = view.spec_of("x", name, parameter)
        state = stateful(run.trial.optimizers[0]).state.get(parameter, {})
        for key, tensor in {"": parameter, **state}.items():
            local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().numpy().copy()
            place = (spec.global_shape, spec.offsets) if local.shape == spec.shape else (local.shape, (0,) * local.ndim)
            found[f"{name}/{key}"] = (*place, local)
    return found


def together(answers: list[Wholes]) -> dict[str, bytes]:
    """Whole tensors; where several ranks hold an element they agree on it, and every element is held."""
    wholes: dict[str, np.ndarray] = {}
    for answer in answers:
        for name, (shape, offsets, content) in answer.items():
            whole = wholes.setdefault(name, np.full(shape, np.nan, np.float32))
            region = tuple(slice(at, at + size) for at, size in zip(offsets, content.shape, strict=True))
            assert bool(np.all(np.isnan(whole[region]) | (whole[region] == content))), name
            whole[region] = content
    assert not any(np.isnan(whole).any() for whole in wholes.values())
    return {name: whole.tobytes() for name, whole in sorted(wholes.items())}


def run_as(name: str, ranks: int, room: Path, body: Callable[[Rank], Any], seed: int) -> list[Any]:
    room.mkdir()

    def on_rank(rank: int) -> Any:
        LAYOUTS.update(MADE)
        return body(Rank(name, seed))

    return on_ranks(on_rank, room, ranks)


def saved_as(name: str, tmp_path: Path) -> dict[str, bytes]:
    def body(run: Rank) -> Wholes:
        run.train(1, SAVED)
        at = run.bits()
        run.save(tmp_path / "ckpt", SAVED)
        again = Rank(name, 1)
        assert again.bits() != at
        again.resume(tmp_path / "ckpt")
        assert again.bits() == at, "in the layout that saved it nothing is moved"
        return parts_of(run)

    return together(run_as(name, 4, tmp_path / "save", body, 0))


def resumed_as(name: str, ranks: int, tmp_path: Path) -> dict[str, bytes]:
    def body(run: Rank) -> Wholes:
        run.resume(tmp_path / "ckpt")
        parts = parts_of(run)
        run.train(SAVED + 1, SAVED + 1)
        return parts

    return together(run_as(name, ranks, tmp_path / f"resume {name}", body, 1))


@pytest.mark.thorough
def test_parts_of_two_are_one_whole_four_parts_three_uneven_ones_and_a_dtensor_bit_for_bit(tmp_path: Path) -> None:
    state = saved_as("2 x 2", tmp_path)
    assert len(state["up/"]) == 8 * 6 * 4
    assert {"up/exp_avg", "up/step", "norm.weight/exp_avg_sq"} < state.keys()
    for name, ranks in (("whole", 1), ("4 parts", 4), ("3 uneven parts", 3), ("fsdp", 2)):
        assert resumed_as(name, ranks, tmp_path) == state, name


def test_what_is_cut_by_hand_and_has_its_optimizer_dealt_out_is_whole_again(tmp_path: Path) -> None:
    state = saved_as("2 x 2, zero", tmp_path)
    assert {"up/exp_avg", "norm.weight/exp_avg_sq"} < state.keys()
    assert resumed_as("one group", 1, tmp_path) == state


@pytest.mark.thorough
def test_models_that_only_compute_and_comparisons_see_the_whole(tmp_path: Path) -> None:
    state = saved_as("2 x 2", tmp_path)
    path = latest(tmp_path / "ckpt")
    assert path is not None
    model = nn.Module()
    model.up = nn.Parameter(torch.zeros(8, 6))
    model.norm = nn.LayerNorm(6)
    lastwords.load_for_inference(path, model)
    assert model.up.detach().numpy().tobytes() == state["up/"]
    # The same state saved by three ranks in uneven parts is the same checkpoint.

    def body(run: Rank) -> None:
        run.resume(tmp_path / "ckpt")
        run.recorder.end_step(SAVED, Position(1, SAVED))
        run.save(tmp_path / "again", SAVED)

    run_as("3 uneven parts", 3, tmp_path / "again as three", body, 1)
    again = latest(tmp_path / "again")
    assert again is not None
    report = diff(path, again)
    assert report.same > 8
    assert not report.differences


@pytest.mark.thorough
def test_without_cuts_another_layout_is_refused_and_the_same_one_is_not(tmp_path: Path) -> None:
    """The control, and the way of a job that declares its cuts only later: its older checkpoints stay good."""

    def body(run: Rank) -> None:
        run.train(1, SAVED)
        at = run.bits()
        run.save(tmp_path / "ckpt", SAVED)
        for name in ("2 x 2, undeclared", "2 x 2"):
            again = Rank(name, 1)
            assert again.bits() != at
            again.resume(tmp_path / "ckpt")
            assert again.bits() == at, name

    run_as("2 x 2, undeclared", 4, tmp_path / "save", body, 0)

    def refused(run: Rank) -> str:
        with pytest.raises(FormatError) as caught:
            run.resume(tmp_path / "ckpt")
        return str(caught.value)

    [text] = run_as("whole", 1, tmp_path / "refuse", refused, 1)
    assert "unit tp0 and " in text
    assert "both have [0:4, 0:6], so these are two different tensors with one name" in text


WRONG: dict[str, list[Unit]] = {
    "float32 (8, 6) in the declared unit 'rows-0', and of float32 (4, 6) in what no": rows([0, 4], TWICE)[:1],
    "no rank holds [8:9, 0:6] of it": rows([0, 4], TWICE, of=9),
    "'rows-0' and the declared unit 'rows-3' both hold [3:4, 0:6] of it": rows([0, 3], TWICE),
    "is (4, 6) here; at (5, 0) that does not fit into the declared whole (8, 6)": rows([0, 5], TWICE),
}


def test_a_wrong_cut_is_an_error_on_every_rank_that_names_tensor_unit_and_region(tmp_path: Path) -> None:
    def body(rank: int) -> list[str]:
        texts = []
        for units in WRONG.values():
            LAYOUTS["wrong"] = by_hand(2, 2, units)
            with pytest.raises(ConfigError) as caught:
                Rank("wrong", 0)
            texts.append(str(caught.value))
        return texts

    for texts in on_ranks(body, tmp_path, 4):
        for text, words in zip(texts, WRONG, strict=True):
            assert words in text
            assert "parameter 'up'" in text
