"""Units of a source joined to one state: places that only the parameter knows, copies, groups, and contradictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lastwords.checkpoint.boxes import Box
from lastwords.checkpoint.entries import leaves, renamed
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.meta import UnitMeta
from lastwords.checkpoint.reshard.saved_state import SavedUnit, join, placed, read_unit
from lastwords.checkpoint.reshard.strategy import Cut, Held, Strategy
from lastwords.checkpoint.reshard.transform_plan import by_holders, meta_of, planned, whole_strategy
from lastwords.errors import FormatError, MismatchError
from tests import golden


def meta(parameters: dict[str, str], **more: Any) -> dict[str, Any]:
    return {
        "optimizer": "Adam", "parameters": parameters, "buffers": {}, "aliases": {}, "absent_buffers": [],
        "groups": [], "group_parameters": [], "group_numbers": [], "optimizer_state": {}, **more,
    }  # fmt: skip


def tensor(name: str, shape: tuple[int, ...], dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {"tensor": name, "dtype": dtype, "shape": list(shape), **more}


def unit(label: str, specs: list[TensorSpec], **of_meta: Any) -> SavedUnit:
    names = {spec.name.removeprefix("model/"): "float32" for spec in specs if spec.name.startswith("model/")}
    content = UnitMeta.read(meta(of_meta.pop("parameters", names), **of_meta))
    return placed(read_unit(label, label, content, "", {spec.name: spec for spec in specs}))


def half(name: str, place: int, more: tuple[int, ...] = (), dtype: str = "F32") -> TensorSpec:
    return TensorSpec(name, dtype, (2, *more), (4, *more), (2 * place, *(0 for _ in more)))


def test_a_moment_lies_where_its_parameter_does_and_a_counter_is_beside_each_part() -> None:
    state = {"w": {"dict": [["step", tensor("optim/w/step", ())], ["exp_avg", tensor("optim/w/exp_avg", (2,))]]}}
    units = [
        unit(
            f"unit {k}",
            [half("model/w", k), TensorSpec("optim/w/step", "F32", ()), TensorSpec("optim/w/exp_avg", "F32", (2,))],
            optimizer_state=state,
        )
        for k in range(2)
    ]
    saved = join(units, copies=False)
    saved.check()
    assert [str(shard.box) for shard in saved.tensors["optim/w/exp_avg"].shards] == ["[0:2]", "[2:4]"]
    assert saved.tensors["optim/w/step"].shards[0].where == "unit 0"
    assert saved.near("optim/w/step", {"unit 1"}).shards[0].where == "unit 1"
    assert saved.near("optim/w/step", {"elsewhere"}) == saved.tensors["optim/w/step"]


def test_elements_that_have_no_code_keep_their_bytes_together() -> None:
    """complex128: 16 bytes each, in the parameter and in its moment."""
    state = {"w": {"dict": [["exp_avg", tensor("optim/w/exp_avg", (2,), "complex128")]]}}
    units = [
        unit(
            f"unit {k}",
            [half("model/w", k, (16,), "U8"), TensorSpec("optim/w/exp_avg", "U8", (2, 16))],
            optimizer_state=state,
        )
        for k in range(2)
    ]
    saved = join(units, copies=False)
    saved.check()
    wanted = Strategy(
        2, {"model/w": Cut("U8", (4, 16), (Held(Box((0, 0), (1, 16)), (0,)), Held(Box((1, 0), (3, 16)), (1,))))}
    )
    holding = by_holders(saved, wanted)[(1,)]
    assert holding.boxes["optim/w/exp_avg"] == Box((1, 0), (3, 16))
    assert meta_of(saved, holding, str).optimizer_state["w"]["dict"][0][1]["shape"] == [3]
    of_float = replace(units[0], specs={**units[0].specs, "model/w": half("model/w", 0)})
    assert placed(of_float).specs["optim/w/exp_avg"].global_shape == (4, 16), "and of a parameter that has a code"


def test_tensors_inside_of_a_value_are_whole_wherever_the_state_is() -> None:
    node = {"list": [tensor("optim/w/hist.0", (3,)), {"plain": 7}]}
    specs = [TensorSpec("model/w", "F32", (4,)), TensorSpec("optim/w/hist.0", "F32", (3,))]
    saved = join([unit("one", specs, optimizer_state={"w": {"dict": [["hist", node]]}})], copies=False)
    halves = Strategy(2, {"model/w": Cut("F32", (4,), tuple(Held(Box((2 * k,), (2,)), (k,)) for k in range(2)))})
    for rank in range(2):
        holding = by_holders(saved, halves)[(rank,)]
        plans = {one.spec.name: one for one in planned(saved, holding, lambda name: f"unit/u/{name}")}
        assert plans["unit/u/optim/w/hist.0"].box == Box((0,), (3,))
        [[key, tree]] = meta_of(saved, holding, lambda name: f"unit/u/{name}").optimizer_state["w"]["dict"]
        assert (key, tree["list"][0]["tensor"], tree["list"][1]) == ("hist", "unit/u/optim/w/hist.0", {"plain": 7})
    parts = [
        unit(f"unit {k}", [half("model/w", k), TensorSpec("optim/w/hist.0", "F32", (30,))],
             optimizer_state={"w": {"dict": [["hist", {"list": [tensor("optim/w/hist.0", (30,))]}]]}})
        for k in range(2)
    ]  # fmt: skip
    with golden.raises(MismatchError):
        join(parts, copies=False)


def group(lr: float) -> dict[str, Any]:
    return {"dict": [["lr", {"plain": lr}], ["eps", {"plain": 1e-8}]]}


def staged(label: str, name: str, lr: float, ended: bool | None = None) -> SavedUnit:
    more = {} if ended is None else {"step_ended": ended}
    return unit(label, [TensorSpec(f"model/{name}", "F32", (2,))], groups=[group(lr)], group_parameters=[[name]],
                group_numbers=[0], **more)  # fmt: skip


def test_groups_of_one_number_are_one_where_their_values_are_equal() -> None:
    alike = join([staged("a", "v", 0.1), staged("b", "w", 0.1)], copies=False)
    assert [one.parameters for one in alike.groups] == [("v", "w")]
    apart = join([staged("a", "v", 0.1), staged("b", "w", 0.2)], copies=False)
    assert [one.parameters for one in apart.groups] == [("v",), ("w",)]
    meant = meta_of(apart, by_holders(apart, whole_strategy(apart))[(0,)], str)
    assert [pairs["dict"][0][1]["plain"] for pairs in meant.groups] == [0.1, 0.2]
    assert meant.group_numbers == [0, 0]


def test_what_a_scheduler_had_not_moved_yet_is_taken_from_the_extras_moment() -> None:
    saved = join([staged("a", "v", 0.1, ended=True), staged("b", "w", 0.2, ended=False)], copies=False)
    assert [(one.parameters, one.tree["dict"][0][1]["plain"]) for one in saved.groups] == [(("v", "w"), 0.1)]


def test_contradictions_are_named() -> None:
    two_types = [unit("a", [TensorSpec("model/w", "F32", (4,))]), unit("b", [TensorSpec("model/w", "BF16", (4,))])]
    with pytest.raises(FormatError, match=r"w is F32 \(4,\) in a and BF16 \(4,\) in b"):
        join(two_types, copies=False)
    stages = [unit(label, [TensorSpec("model/w", "F32", (4,))]) for label in "ab"]
    with golden.raises(FormatError):
        join(stages, copies=False).check()
    join(stages, copies=True).check()
    with golden.raises(FormatError):
        join([stages[0], unit("b", [TensorSpec("model/w", "F32", (4,))], parameters={"w": "bfloat16"})], copies=False)
    with golden.raises(FormatError):
        join([unit("a", [], parameters={"v": "float32"})], copies=False)
    keys = [
        unit(f"unit {k}", [half("model/w", k)], optimizer_state={"w": {"dict": [[f"key {k}", {"plain": 1}]]}})
        for k in range(2)
    ]
    with golden.raises(FormatError):
        join(keys, copies=False)
    differ = [
        unit(f"unit {k}", [half("model/w", k)], optimizer_state={"w": {"dict": [["n", {"plain": k}]]}})
        for k in range(2)
    ]
    with golden.raises(FormatError):
        join(differ, copies=False)


@pytest.mark.parametrize(
    "change",
    [{"optimizer_state": {"w": {"list": []}}}, {"group_numbers": [0]},
     {"optimizer_state": {"w": {"dict": [["k", {"unknown": 1}]]}}},
     {"optimizer_state": {"w": {"dict": [["k", tensor("optim/w/another", (4,))]]}}}],
)  # fmt: skip
def test_json_of_another_form_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"file\.ckpt"):
        read_unit("file.ckpt", "unit a", UnitMeta.read({**meta({}), **change}, "file.ckpt"), "", {})


def test_trees_that_are_none_are_refused() -> None:
    trees: list[Any] = [
        {}, {"tensor": 3}, {"list": 3}, {"dict": [["only a key"]]}, {"plain": 1, "list": []}, [1], {"tensor": "a"},
        {"dict": [[[], {"plain": 1}]]}, {"dict": ["ab"]}, {"object": ["dict", None, []]}, {"object": [1, None, []]},
        {"object": ["deque", None]}, {"object": ["deque", None, {}]}, {"other": []},
    ]  # fmt: skip
    for tree in trees:
        with pytest.raises(FormatError, match="here"):
            leaves(tree, "here")
    assert renamed({"tuple": [tensor("a", ())]}, str.upper, "here") == {"tuple": [tensor("A", ())]}
