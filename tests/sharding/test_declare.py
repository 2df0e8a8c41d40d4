"""Layouts that are declared: which ranks a mesh says are copies, and every declaration that cannot be true."""

from __future__ import annotations

import doctest
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lastwords.errors import ConfigError
from lastwords.sharding import declare
from lastwords.sharding.declare import Part, Unit, check_units, units_from_mesh
from lastwords.vocabulary import UNIT_REPLICATED
from tests import golden


def groups(units: Sequence[Unit]) -> list[list[int]]:
    return [list(unit.holders) for unit in units]


def unit_of(units: Sequence[Unit], rank: int, tensor: str) -> Unit:
    """The first declared unit that a rank holds and that matches."""
    return next(unit for unit in units if rank in unit.holders and unit.takes(tensor))


# ---------------------------------------------------------------------- what a mesh says


def test_eight_ranks_of_dp_2_and_tp_4_have_the_groups_of_the_upstream_example() -> None:
    assert groups(units_from_mesh(dp=2, tp=4)) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_eight_replicas_with_the_optimizer_over_four_have_the_same_groups() -> None:
    units = units_from_mesh(dp=8, optimizer_shard_size=4)
    assert groups(units) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [unit.name for unit in units] == ["shard0", "shard1", "shard2", "shard3"]


def test_data_parallel_ranks_are_all_copies_in_the_unit_that_every_job_has() -> None:
    assert units_from_mesh(dp=4) == (Unit(UNIT_REPLICATED, (0, 1, 2, 3), ("*",)),)


def test_an_optimizer_over_all_of_data_parallel_leaves_no_copy() -> None:
    assert groups(units_from_mesh(dp=4, optimizer_shard_size=4)) == [[0], [1], [2], [3]]


def test_tensor_parallel_alone_and_pipeline_alone_have_no_copies() -> None:
    assert groups(units_from_mesh(tp=2)) == [[0], [1]]
    assert groups(units_from_mesh(pp=3)) == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("order", "holders"),
    [
        ("pp-dp-tp", {"pp0-tp0": (0, 2), "pp0-tp1": (1, 3), "pp1-tp0": (4, 6), "pp1-tp1": (5, 7)}),
        ("dp-pp-tp", {"pp0-tp0": (0, 4), "pp0-tp1": (1, 5), "pp1-tp0": (2, 6), "pp1-tp1": (3, 7)}),
        ("dp-tp-pp", {"pp0-tp0": (0, 4), "pp0-tp1": (2, 6), "pp1-tp0": (1, 5), "pp1-tp1": (3, 7)}),
        ("tp-dp-pp", {"pp0-tp0": (0, 2), "pp0-tp1": (4, 6), "pp1-tp0": (1, 3), "pp1-tp1": (5, 7)}),
        ("pp-tp-dp", {"pp0-tp0": (0, 1), "pp0-tp1": (2, 3), "pp1-tp0": (4, 5), "pp1-tp1": (6, 7)}),
        ("tp-pp-dp", {"pp0-tp0": (0, 1), "pp0-tp1": (4, 5), "pp1-tp0": (2, 3), "pp1-tp1": (6, 7)}),
    ],
)
def test_order_goes_from_the_slowest_to_the_fastest_axis(order: str, holders: dict[str, tuple[int, ...]]) -> None:
    assert {unit.name: unit.holders for unit in units_from_mesh(dp=2, tp=2, pp=2, order=order)} == holders


@pytest.mark.parametrize("order", ["-".join(axes) for axes in itertools.permutations(declare.AXES)])
def test_ranks_are_numbered_as_an_array_with_these_axes_is(order: str) -> None:
    np = pytest.importorskip("numpy")
    sizes = {"dp": 2, "tp": 3, "pp": 4}
    axes = order.split("-")
    mesh = np.arange(24).reshape([sizes[axis] for axis in axes])
    for unit in units_from_mesh(**sizes, order=order):
        at = {"pp": int(unit.name[2]), "tp": int(unit.name.rpartition("tp")[2])}
        along_dp = mesh[tuple(at.get(axis, slice(None)) for axis in axes)]
        assert unit.holders == tuple(int(rank) for rank in along_dp)


def test_axes_of_size_one_may_be_left_out_of_the_order() -> None:
    assert units_from_mesh(dp=2, tp=2, order="tp-dp") == units_from_mesh(dp=2, tp=2, order="pp-tp-dp")
    assert groups(units_from_mesh(dp=3, order="dp")) == [[0, 1, 2]]


def test_blocks_of_the_optimizer_are_consecutive_members_of_data_parallel() -> None:
    """Neither every other rank nor consecutive ranks: consecutive along dp."""
    units = units_from_mesh(dp=4, tp=2, optimizer_shard_size=2)
    assert {unit.name: unit.holders for unit in units} == {
        "tp0-shard0": (0, 4),
        "tp0-shard1": (2, 6),
        "tp1-shard0": (1, 5),
        "tp1-shard1": (3, 7),
    }


def test_tensors_that_tensor_parallelism_leaves_whole_belong_to_all_its_ranks() -> None:
    units = units_from_mesh(dp=2, tp=2, replicated=("*norm*", "*.bias"))
    assert units[0] == Unit(UNIT_REPLICATED, (0, 1, 2, 3), ("*norm*", "*.bias"))
    assert unit_of(units, 3, "layers.0.norm.weight").holders == (0, 1, 2, 3)
    assert unit_of(units, 3, "layers.0.fc.weight").holders == (1, 3)


def test_what_tensor_parallelism_leaves_whole_stays_within_its_stage_and_shard() -> None:
    units = units_from_mesh(dp=2, tp=2, pp=2, replicated=("*norm*",))
    assert {unit.name: unit.holders for unit in units[:2]} == {
        "pp0-replicated": (0, 1, 2, 3),
        "pp1-replicated": (4, 5, 6, 7),
    }
    units = units_from_mesh(dp=2, tp=2, optimizer_shard_size=2, replicated=("*norm*",))
    assert [unit.name for unit in units[:2]] == ["shard0-replicated", "shard1-replicated"]
    assert groups(units[:2]) == [[0, 1], [2, 3]]


def test_without_tensor_parallelism_there_is_nothing_that_it_leaves_whole() -> None:
    assert units_from_mesh(dp=2, pp=2, replicated=("*norm*",)) == units_from_mesh(dp=2, pp=2)


def test_experts_are_held_by_the_ranks_of_equal_index_modulo_their_number() -> None:
    units = units_from_mesh(dp=4, expert_parallel=2)
    assert [(unit.name, unit.holders) for unit in units] == [
        ("expert0", (0, 2)),
        ("expert1", (1, 3)),
        (UNIT_REPLICATED, (0, 1, 2, 3)),
    ]
    assert unit_of(units, 3, "layers.1.experts.0.weight").name == "expert1"
    assert unit_of(units, 3, "layers.1.router.weight").name == UNIT_REPLICATED


def test_as_many_experts_as_replicas_have_no_copies() -> None:
    assert groups(units_from_mesh(dp=2, expert_parallel=2)[:2]) == [[0], [1]]


def test_experts_have_patterns_of_their_own() -> None:
    units = units_from_mesh(dp=4, expert_parallel=2, experts=("*.moe.*",))
    assert unit_of(units, 0, "moe.experts").name == UNIT_REPLICATED
    assert unit_of(units, 0, "layers.moe.w1").name == "expert0"


def test_a_norm_inside_an_expert_belongs_to_the_experts_ranks() -> None:
    """All tp ranks of all experts would claim copies that do not exist."""
    units = units_from_mesh(dp=2, tp=2, expert_parallel=2, replicated=("*norm*",))
    assert unit_of(units, 0, "experts.norm.weight").holders == (0,)
    assert unit_of(units, 0, "norm.weight").holders == (0, 1, 2, 3)


def test_an_experts_optimizer_is_sharded_among_the_ranks_that_hold_it() -> None:
    """Expert 0 is on the dp ranks 0, 2, 4, 6, in blocks of two: (0, 2) and (4, 6)."""
    units = units_from_mesh(dp=8, expert_parallel=2, optimizer_shard_size=2)
    assert unit_of(units, 0, "expert.w").holders == (0, 4)
    assert unit_of(units, 2, "expert.w").holders == (2, 6)
    assert unit_of(units, 0, "dense.w").holders == (0, 2, 4, 6)
    fewer = units_from_mesh(dp=4, expert_parallel=2, optimizer_shard_size=4)
    assert unit_of(fewer, 2, "expert.w").holders == (2,)


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp": 4},
        {"dp": 2, "tp": 2, "replicated": ("*norm*",)},
        {"dp": 4, "pp": 2, "tp": 2, "optimizer_shard_size": 2, "replicated": ("*norm*",)},
        {"dp": 8, "tp": 2, "expert_parallel": 4, "optimizer_shard_size": 2, "order": "tp-dp-pp"},
    ],
)
def test_every_rank_finds_one_unit_for_every_tensor_and_all_its_holders_find_the_same(mesh: dict[str, Any]) -> None:
    units = units_from_mesh(**mesh)
    world_size = mesh.get("dp", 1) * mesh.get("tp", 1) * mesh.get("pp", 1)
    check_units(units, world_size)
    for tensor in ("layers.0.norm.weight", "layers.0.expert.weight", "layers.0.fc.weight"):
        finds = {rank: unit_of(units, rank, tensor) for rank in range(world_size)}
        for rank, unit in finds.items():
            assert {other for other, found in finds.items() if found == unit} == set(unit.holders), (rank, tensor)


def test_names_are_short_and_say_where_the_unit_is() -> None:
    units = units_from_mesh(dp=4, pp=2, tp=2, expert_parallel=2, optimizer_shard_size=2, replicated=("*norm*",))
    names = [unit.name for unit in units]
    assert names[:3] == ["pp0-tp0-expert0-shard0", "pp0-tp0-expert0-shard1", "pp0-tp0-expert1-shard0"]
    assert "pp1-shard0-replicated" in names
    assert "pp1-tp1-shard1" in names
    assert len(set(names)) == len(names)


# ---------------------------------------------------------------------- meshes that cannot be


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp": 0},
        {"tp": -2},
        {"pp": 2.0},
        {"dp": True},
        {"dp": 4, "optimizer_shard_size": 0},
        {"dp": 4, "expert_parallel": 0},
        {"dp": 4, "optimizer_shard_size": 3},
        {"dp": 2, "optimizer_shard_size": 4},
        {"dp": 4, "expert_parallel": 3},
        {"dp": 12, "expert_parallel": 4, "optimizer_shard_size": 2},
        {"dp": 2, "tp": 2, "world_size": 8},
        {"dp": 2, "order": "pp-dp-ep"},
        {"dp": 2, "tp": 2, "order": "pp-dp"},
        {"dp": 2, "order": "dp-dp-tp"},
        {"dp": 2, "order": ""},
        {"dp": 2, "order": ("dp", "tp")},
        {"dp": 2, "tp": 2, "replicated": "*norm*"},
        {"dp": 2, "tp": 2, "replicated": ("",)},
        {"dp": 2, "expert_parallel": 2, "experts": ()},
        {"dp": 2, "expert_parallel": 2, "experts": (3,)},
    ],
)
def test_a_mesh_that_cannot_be_is_refused_in_words(mesh: dict[str, Any]) -> None:
    with golden.raises(ConfigError):
        units_from_mesh(**mesh)


def test_a_mesh_that_multiplies_to_the_world_size_is_taken() -> None:
    assert units_from_mesh(dp=2, tp=2, pp=2, world_size=8)


# ---------------------------------------------------------------------- declarations that cannot be

A = Unit("a", (0, 2), ("*.w",))
B = Unit("b", (1, 3), ("*.w",))


@pytest.mark.parametrize(
    "units",
    [
        [Unit("a", ())],
        [Unit("a", (0, 4))],
        [Unit("a", (-1, 0))],
        [Unit("a", (0, 0, 1))],
        [Unit("a", 3)],  # type: ignore[arg-type]
        [Unit("a", "01")],  # type: ignore[arg-type]
        [Unit("a", (0, 1.0))],  # type: ignore[arg-type]
        [Unit("a", (0, True))],
        [A, Unit("a", (1, 3))],
        [Unit("a b", (0,))],
        [Unit("a/b", (0,))],
        [Unit("", (0,))],
        [Unit("a", (0,), ())],
        [Unit("a", (0,), "*")],  # type: ignore[arg-type]
        [Unit("a", (0,), ("w", ""))],
        [Unit(UNIT_REPLICATED, (0, 1, 2))],
        [Unit("a", (0, 1)), Unit("b", (1, 2), ("*norm*",))],
        [("a", (0, 1))],
    ],
)
def test_a_declaration_that_cannot_be_true_is_refused_in_words(units: list[Any]) -> None:
    with golden.raises(ConfigError):
        check_units(units, 4)


@pytest.mark.parametrize(
    "units",
    [
        [],
        [A, B],
        [A, Unit("b", (0, 1), ("*.b",))],
        [Unit("norms", (0, 1), ("*norm*",)), Unit("rest", (0, 1)), Unit("other", (2, 3))],
        [Unit(UNIT_REPLICATED, (3, 1, 2, 0), ("*norm*",)), *units_from_mesh(dp=2, tp=2)],
    ],
)
def test_declarations_that_can_be_true_are_taken(units: list[Unit]) -> None:
    """Negative control: units of one rank need not nest, and not every tensor has to be declared."""
    check_units(units, 4)


def test_patterns_see_a_difference_between_small_and_capital_letters() -> None:
    assert Unit("a", (0,), ("Norm*",)).takes("Norm.weight")
    assert not Unit("a", (0,), ("Norm*",)).takes("norm.weight")


def test_examples_in_docstrings_are_true() -> None:
    found = doctest.testmod(declare)
    assert found.attempted
    assert not found.failed


def test_a_mesh_of_another_size_than_the_job_is_refused_although_nobody_gave_world_size() -> None:
    for mesh in (units_from_mesh(tp=2), units_from_mesh(dp=2), units_from_mesh(dp=2, tp=2)):
        with golden.raises(ConfigError):
            check_units(mesh, 3)


def test_a_name_that_is_no_text_is_refused() -> None:
    with golden.raises(ConfigError):
        check_units([Unit(None, (0,))], 1)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what was cut by hand


def test_a_mesh_says_which_part_each_tensor_parallel_unit_has_and_nothing_else_is_cut() -> None:
    units = units_from_mesh(dp=2, tp=2, pp=2, replicated=("*norm*",), cut={"*.up.weight": 0, "*.down.weight": 1})
    cuts = {unit.name: dict(unit.cuts) for unit in units}
    assert cuts["pp1-tp1"] == {
        "*.up.weight": Part(dim=0, index=1, of=2),
        "*.down.weight": Part(dim=1, index=1, of=2),
    }
    assert cuts["pp0-tp0"]["*.up.weight"].index == 0
    assert cuts["pp0-replicated"] == {}
    check_units(units, 8)


def test_a_mesh_without_tensor_parallelism_cuts_nothing() -> None:
    assert units_from_mesh(dp=2, cut={"*.up.weight": 0}) == units_from_mesh(dp=2)


@pytest.mark.parametrize(
    "cut",
    [
        ("*.up", 0),
        {"*.up": "0"},
        {"*.up": True},
        {"": 0},
        {3: 0},
    ],
)
def test_a_cut_that_is_no_pattern_and_dimension_is_refused(cut: Any) -> None:
    with golden.raises(ConfigError):
        units_from_mesh(tp=2, cut=cut)


@pytest.mark.parametrize(
    "cuts",
    [
        [Part(dim=0, index=0, of=2)],
        None,
        {"": Part(dim=0, index=0, of=2)},
        {"w": 0},
        {"w": Part(dim=0, index=2, of=2)},
    ],
)
def test_cuts_that_are_none_are_refused(cuts: Any) -> None:
    with golden.raises(ConfigError):
        check_units([Unit("a", (0,), ("*",), cuts)], 1)


# ---------------------------------------------------------------------- types


def test_lists_do_as_well_as_tuples() -> None:
    listed = Unit("a", [0, 2], ["*.w"])  # type: ignore[arg-type]
    assert listed == A
    assert hash(listed) == hash(A)
    check_units([listed], 4)


@pytest.mark.parametrize("world_size", ["4", 4.0, True, 0])
def test_a_world_size_that_is_no_number_of_ranks_is_refused(world_size: Any) -> None:
    with golden.raises(ConfigError):
        units_from_mesh(dp=4, world_size=world_size)


@pytest.mark.parametrize("unit", [Unit(["a"], (0,)), Unit("a", {0: 1}), Unit("a", (0,), None), Unit("a", iter([0]))])  # type: ignore[arg-type]
def test_arguments_of_a_wrong_type_are_refused_in_words(unit: Unit) -> None:
    with golden.raises(ConfigError):
        check_units([unit], 1)


@dataclass(frozen=True)
class OfMesh:
    """What is read of a DeviceMesh, which needs a process group to exist."""

    mesh_dim_names: tuple[str, ...] | None
    mesh: torch.Tensor


@pytest.mark.parametrize(
    ("names", "order"), [(("dp", "tp"), "dp-tp"), (("tp", "dp"), "tp-dp"), (("pp", "dp", "tp"), "pp-dp-tp")]
)
def test_a_device_mesh_gives_what_its_sizes_give(names: tuple[str, ...], order: str) -> None:
    sizes = {"pp": 2, "dp": 3, "tp": 4}
    shape = tuple(sizes[name] for name in names)
    mesh = OfMesh(names, torch.arange(math.prod(shape)).reshape(shape))
    given = {name: sizes[name] for name in names}
    assert units_from_mesh(mesh, cut={"*": 0}) == units_from_mesh(**given, order=order, cut={"*": 0})


def test_the_ranks_of_a_device_mesh_may_be_in_any_order() -> None:
    mesh = OfMesh(("dp", "tp"), torch.tensor([[3, 1], [0, 2]]))
    assert groups(units_from_mesh(mesh)) == [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        (OfMesh(("dp", "ep"), torch.arange(4).reshape(2, 2)), {}),
        (OfMesh(None, torch.arange(4)), {}),
        (OfMesh(("dp",), torch.tensor([1, 3])), {}),
        (OfMesh(("dp",), torch.arange(4)), {"dp": 4}),
        (OfMesh(("dp",), torch.arange(4)), {"world_size": 8}),
        (4, {}),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_by_name(mesh: Any, more: dict[str, int]) -> None:
    with golden.raises(ConfigError):
        units_from_mesh(mesh, **more)
