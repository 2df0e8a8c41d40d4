"""What a checkpoint says beside its tensors: frozen types, whose mistakes are told with the path of the value."""

from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint.codec import typed
from lastwords.checkpoint.entries import UnitEntry, by_name, entries
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.meta import (
    EMPTY_UNIT,
    ExtrasMeta,
    FileContent,
    Habits,
    InlineExtras,
    LocalMeta,
    StepDocument,
    UnitMeta,
    json_of,
)
from lastwords.checkpoint.storable import pack
from lastwords.errors import FormatError
from tests import golden

ROOT = Path(__file__).parents[2]

EXTRAS = ExtrasMeta(
    states={"ema": {"plain": 1}},
    left_out={"probe": ["extras['probe'] cannot be stored"]},
    step_on_resume=[],
)
FULL = UnitMeta(
    optimizer="AdamW",
    parameters={"w": "float32"},
    buffers={"mean": "float64"},
    aliases={"tied": "w"},
    absent_buffers=["cache"],
    groups=[{"dict": [["lr", {"plain": 0.1}]]}],
    group_parameters=(("w",),),
    group_numbers=(0,),
    volatile_buffers=["mean"],
    reshaped_buffers=["mean"],
    frozen=["w"],
    optimizer_state={"w": {"dict": []}},
    optimizer_own=[(None, ("odd", 1), {"plain": (1, 2)})],
    left_out=[("w", None)],
    reasons=["a reason"],
    holders=(0, 2),
    extras=EXTRAS,
    step_ended=True,
    hyperparameters=[{"lr": 0.1, "betas": (0.9, 0.99)}],
    buckets={"step": 1},
)


def test_all_that_a_unit_says_comes_back_and_stands_in_the_order_of_the_fields() -> None:
    said = FULL.to_json()
    assert [*said] == [one.name for one in fields(UnitMeta)]
    assert "~tuple" not in str({key: value for key, value in pack(said).items() if key in ("holders", "groups")})
    again = UnitMeta.read(said)
    assert again.to_json() == said
    assert again.optimizer_own == FULL.optimizer_own, "keys and values that are tuples stay tuples"
    assert again.extras == EXTRAS


def test_what_nobody_has_said_is_not_written_and_not_guessed() -> None:
    said = EMPTY_UNIT.to_json()
    assert {"holders", "extras", "step_ended", "hyperparameters", "frozen"}.isdisjoint(said)
    again = UnitMeta.read(said)
    assert (again.holders, again.extras, again.frozen) == (None, None, None)


def test_keys_of_a_later_version_are_left_out() -> None:
    assert UnitMeta.read({**FULL.to_json(), "later": 1}).to_json() == FULL.to_json()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"optimizer": 3}, "f: meta.optimizer: expected `str`, got `int`"),
        ({"parameters": {"a.b": "float32", "c.d": 3, "e": 4}}, "f: meta.parameters['c.d']: expected `str`, got `int`"),
        ({"parameters": {1: "float32"}}, "a key of f: meta.parameters: expected `str`, got `int`"),
        ({"group_parameters": [["w"], ["v", None]]}, "f: meta.group_parameters[1][1]: expected `str`, got `null`"),
        ({"holders": []}, "f: meta.holders: expected `array` of length >= 1"),
        ({"holders": [0, -1]}, "f: meta.holders[1]: expected `int` >= 0"),
        ({"holders": [True]}, "f: meta.holders[0]: expected `int`, got `bool`"),
        ({"extras": {**json_of(EXTRAS), "left_out": {"one": [], "the other": [1]}}},
         "f: meta.extras.left_out['the other'][0]: expected `str`, got `int`"),
        ({"optimizer_own": [["w", None]]}, "f: meta.optimizer_own[0]: expected `array` of length 3, got 2"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_path(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(FormatError) as caught:
        UnitMeta.read({**FULL.to_json(), **wrong}, "f")
    assert str(caught.value) == told


@pytest.mark.parametrize(
    "key", ["optimizer", "parameters", "buffers", "aliases", "absent_buffers", "groups", "group_parameters",
            "optimizer_state"],
)  # fmt: skip
def test_what_every_writer_says_is_missed(key: str) -> None:
    said = FULL.to_json()
    del said[key]
    with golden.raises(FormatError):
        UnitMeta.read(said)


@pytest.mark.parametrize("bad", [0, 1, 499, 998, 999])
def test_the_first_wrong_one_of_many_is_found(bad: int) -> None:
    table: dict[str, Any] = {f"layer.{number}": [number] for number in range(1000)}
    table[f"layer.{bad}"] = [1, "x"]
    table["layer.999"] = ["x"] if bad != 999 else [1, "x"]
    with pytest.raises(FormatError, match=rf"^sizes\['layer\.{bad}'\]\[[01]\]: expected `int`, got `str`$"):
        typed(table, dict[str, list[int]], "sizes")


def test_a_local_state_keeps_the_words_of_the_black_box_and_says_what_they_mean() -> None:
    slot = {"epoch": 2, "step": 7, "needs_epoch_start": True, "extras": [4, {"ema": "a"}], "of_later": {"x": 1}}
    meta = LocalMeta(kind="committed", slot=slot)
    again = LocalMeta.read(json_of(meta))
    assert again.slot == slot
    assert again.document == StepDocument(2, 7, needs_epoch_start=True, extras=(4, {"ema": "a"}))
    assert "epoch_start" not in json_of(meta)
    for wrong, path in (({"epoch": "2"}, "epoch"), ({"alike": {"all": [1, 2, 3]}}, r"alike\.all\[0\]")):
        with pytest.raises(FormatError, match=rf"meta\.slot\.{path}: expected"):
            assert replace(meta, slot={**slot, **wrong}).document


def test_habits_come_back_and_those_of_an_older_file_are_not_known() -> None:
    when = (3, 1, 3, 1, 2, 0, 1)
    habits = Habits(
        after_copy={"rng/torch": when}, after_update={"parameter 'w'": when}, updates=3, early_reasons=["e"]
    )
    said = json.loads(json.dumps(json_of(LocalMeta(habits=habits))))
    assert LocalMeta.read(said).habits == habits
    assert LocalMeta.read({"kind": "committed", "slot": {}}).habits == Habits()
    for table in ("after_copy", "after_update"):
        with pytest.raises(FormatError, match=rf"meta\.habits\.{table}\.w"):
            LocalMeta.read({**said, "habits": {table: {"w": [1, 2]}}})


def test_extras_of_one_rank_are_packed_twice_and_come_back() -> None:
    inline = InlineExtras(EXTRAS, {"extra/ema/w": ([2], b"12345678")})
    document = StepDocument(local_extras=pack(inline.to_json()))
    assert document.extras_inline("box") == inline
    assert StepDocument().extras_inline("box") is None
    with pytest.raises(FormatError, match="box"):
        replace(document, local_extras={"tree": {}, "tensors": {}}).extras_inline("box")


def test_a_header_says_what_its_writer_said_in_one_order() -> None:
    content = FileContent(format=1, rank=2, global_step=3, epoch=1, step=3, job="j", units={"u": {}}, local={})
    assert [*json_of(content)] == ["format", "rank", "global_step", "epoch", "step", "job", "units", "local"]
    assert typed(json_of(content), FileContent, "lastwords") == content


@pytest.mark.parametrize("kind", [UnitMeta, ExtrasMeta, LocalMeta, StepDocument, InlineExtras, FileContent])
def test_nothing_of_it_can_be_changed(kind: type) -> None:
    one = {
        UnitMeta: FULL,
        ExtrasMeta: EXTRAS,
        InlineExtras: InlineExtras(EXTRAS, {}),
        StepDocument: StepDocument(),
        LocalMeta: LocalMeta(),
        FileContent: FileContent(format=1, rank=0, global_step=1, epoch=1, step=1, job=""),
    }
    with pytest.raises(FrozenInstanceError):
        setattr(one[kind], fields(kind)[0].name, None)  # fmt: skip


KEYS = re.compile(r"(\b(meta|metas|_meta)(\[\"|\.get\(\"))|\.said\b(\[|\.get\()")


def test_no_module_but_those_of_the_format_looks_at_a_key() -> None:
    """`said` is JSON that publication passes on; what publication needs of it is summed up in `entries`."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("checkpoint", "optim_wrapper", "integrations", "sharding", "processor", "controller", "cli")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if KEYS.search(line) and path.name not in ("meta.py", "entries.py")
    ]
    assert found == []
    assert KEYS.search('names = unit.meta["parameters"]')
    assert KEYS.search('if entry.meta.get("holders")'), "negative controls"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"shape": [1, "2"]}, r"units\.u\.tensors\[1\]\.shape\[1\]: expected `int`, got `str`"),
        ({"name": 3}, r"units\.u\.tensors\[1\]\.name: expected `str`, got `int`"),
        ({"dtype": "F7"}, r"units\.u\.tensors\[1\]: tensor 'b' has element type 'F7'"),
        ({"shape": [1, -2]}, r"units\.u\.tensors\[1\]: tensor 'b': a shard of shape \(1, -2\)"),
        ({"offsets": None, "global_shape": None}, r"units\.u\.tensors\[1\] does not record which region"),
        ({"offsets": None}, r"units\.u\.tensors\[1\]: .* must have the same number of dimensions"),
        ({"global_shape": None}, r"units\.u\.tensors\[1\]: .* must have the same number of dimensions"),
    ],
)
def test_a_tensor_that_cannot_be_is_told_with_its_path(change: dict[str, Any], told: str) -> None:
    sound = {"name": "a", "dtype": "F32", "shape": [1, 2], "global_shape": [2, 2], "offsets": [1, 0]}
    wrong = {key: value for key, value in {**sound, "name": "b", **change}.items() if value is not None}

    def tensors_of(specs: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
        unit = {"writer": 0, "file": "rank_0/ttp_rank_0-1_1.ckpt", "tensors": specs, "meta": {}}
        return entries(by_name({"u": unit}, "units"), UnitEntry, "units")["u"].tensors

    assert tensors_of([sound]) == (TensorSpec("a", "F32", (1, 2), (2, 2), (1, 0)),)
    with golden.raises(FormatError):
        tensors_of([sound, wrong])
