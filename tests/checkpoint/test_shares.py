"""Units that several ranks write together: cut into shares, checked that they belong together, and read as one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastwords.checkpoint import layout, publish
from lastwords.checkpoint.boxes import Box, Divided, Shard, slices_for
from lastwords.checkpoint.cuts import joined, plan_sum, split
from lastwords.checkpoint.direct_io import as_bytes
from lastwords.checkpoint.entries import UnitEntry, together
from lastwords.checkpoint.format import DTYPE_BITS, TensorSpec
from lastwords.checkpoint.load import open_checkpoint, verify
from lastwords.checkpoint.meta import EMPTY_UNIT
from lastwords.checkpoint.part import UnitState, share_of, write_part
from lastwords.checkpoint.slice_reader import SliceReader, Target
from lastwords.errors import FormatError
from lastwords.vocabulary import Share, whole_units
from tests import golden
from tests.checkpoint.states import content_of

UNIT = "replicated"
STEP = 7

SIZES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    """A unit's table: sharded or whole, empty, without dimensions, of every width, of all kinds."""
    found = []
    for number in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["model", "model", "buffer", "optim", "extra", "group"]))
        name = f"extra/ema/{number}" if kind == "extra" else f"{kind}/layer.{number}"
        if kind == "optim":
            name = f"optim/layer.{number}/exp_avg"
        elif kind == "group":
            name = f"optim/~groups.{number}/lr"
        shape = draw(SIZES)
        if draw(st.booleans()):
            shape = (draw(st.integers(1, 400)), *shape[:1])
        before, after = (draw(st.tuples(*(st.integers(0, 3) for _ in shape))) for _ in range(2))
        whole = tuple(map(sum, zip(shape, before, after, strict=True)))
        found.append(TensorSpec(f"unit/{UNIT}/{name}", draw(st.sampled_from([*DTYPE_BITS])), shape, whole, before))
    return found


def content(spec: TensorSpec, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([seed, len(spec.name), spec.nbytes]).integers(0, 256, spec.nbytes, np.uint8)


def state(table: Sequence[TensorSpec], seed: int = 0) -> UnitState:
    return UnitState([(spec, content(spec, seed)) for spec in table], dataclasses.replace(EMPTY_UNIT, optimizer="SGD"))


@pytest.mark.ci
@settings(max_examples=300, deadline=None)
@given(specs(), st.integers(2, 9))
def test_shares_put_together_are_the_unit(table: list[TensorSpec], count: int) -> None:
    unit = state(table)
    shares = [share_of(unit, share) for share in Share(UNIT, 0, count).all]
    assert len({share.plan for share in shares}) == 1
    wholes = joined(UNIT, [[spec for spec, _ in share.tensors] for share in shares])
    stored = {spec.name: as_bytes(data).tobytes() for share in shares for spec, data in share.tensors}  # type: ignore[arg-type]
    assert sum(map(len, stored.values())) == sum(spec.nbytes for spec in table)
    assert {name: whole.spec for name, whole in wholes.items()} == {spec.name: spec for spec in table}
    for spec in table:
        pieces = wholes[spec.name].pieces
        assert b"".join(stored[piece.spec.name] for piece in pieces) == content(spec).tobytes()
        assert len({piece.share for piece in pieces}) == len(pieces)
        assert all(
            len(data := stored[piece.spec.name]) == piece.spec.nbytes and (data or not spec.nbytes) for piece in pieces
        )


@pytest.mark.ci
@settings(max_examples=100, deadline=None)
@given(specs(), st.integers(2, 9), st.randoms())
def test_the_order_of_a_writers_table_changes_nothing(table: list[TensorSpec], count: int, random: Any) -> None:
    other = list(table)
    random.shuffle(other)
    one, two = (plan_sum([cut.spec for cut in share] for share in split(UNIT, some, count)) for some in (table, other))
    assert one == two


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(2, 8))
def test_shares_are_equally_large(rows: list[int], count: int) -> None:
    table = [TensorSpec(f"unit/{UNIT}/model/{number}", "F32", (size, 8)) for number, size in enumerate(rows)]
    total = sum(spec.nbytes for spec in table)
    largest = max(sum(cut.spec.nbytes for cut in share) for share in split(UNIT, table, count))
    assert largest <= total / count * (1 + 1 / 16) + 64


@given(specs(), st.integers(2, 9))
def test_only_parameters_and_their_state_are_shared_out(table: list[TensorSpec], count: int) -> None:
    fixed = [spec for spec in table if not spec.name.startswith((f"unit/{UNIT}/model/", f"unit/{UNIT}/optim/layer"))]
    first, *others = [[cut.spec.name.split("/", 3)[3] for cut in share] for share in split(UNIT, table, count)]
    assert {spec.name.split("/", 2)[2] for spec in fixed} <= set(first)
    assert all(name.startswith(("model/", "optim/layer")) for share in others for name in share)


CUTS = {
    "at the nearest row": ([("U8", 10, 3)], 3, [[9], [12], [9]]),
    "half-way, at the later one": ([("U8", 3, 2)], 2, [[4], [2]]),
    "where a tensor ends": ([("U8", 4, 3), ("U8", 4, 3)], 2, [[12], [12]]),
    "along the first axis that is longer than 1": ([("U8", 1, 8)], 2, [[4], [4]]),
    "not in a single element, but before it": ([("F32", 1, 1)] * 3, 2, [[4], [4, 4]]),
    "not in a single element, but after it": ([("U8", 2, 1), ("F32", 1, 1), ("U8", 4, 1)], 2, [[2, 4], [4]]),
    "not in a small tensor, but before it": ([("U8", 32, 1), ("U8", 2, 1), ("U8", 66, 1)], 3, [[32], [2, 32], [34]]),
    "not in a small tensor, but after it": ([("U8", 98, 1), ("U8", 3, 1), ("U8", 99, 1)], 2, [[98, 3], [99]]),
    "in what is just a sixteenth": ([("U8", 31, 1), ("U8", 2, 1), ("U8", 31, 1)], 2, [[31, 1], [1, 31]]),
}


@pytest.mark.parametrize("case", CUTS)
def test_where_shares_end(case: str) -> None:
    """Bytes of each tensor in each share."""
    tensors, count, expected = CUTS[case]
    table = [
        TensorSpec(f"unit/{UNIT}/model/{number}", dtype, (rows, columns))
        for number, (dtype, rows, columns) in enumerate(tensors)
    ]
    assert [[cut.spec.nbytes for cut in share] for share in split(UNIT, table, count)] == expected


@pytest.mark.parametrize(("kept", "expected"), [(0, (5, 5)), (4, (3, 7)), (10, (0, 10)), (99, (0, 10))])
def test_what_the_first_share_has_already_counts(kept: int, expected: tuple[int, int]) -> None:
    table = [TensorSpec(f"unit/{UNIT}/buffer/b", "U8", (kept,)), TensorSpec(f"unit/{UNIT}/model/w", "U8", (10,))]
    moved = [sum(cut.spec.nbytes for cut in share if "model" in cut.spec.name) for share in split(UNIT, table, 2)]
    assert tuple(moved) == expected


def entries(unit: UnitState, count: int) -> dict[str, UnitEntry]:
    found = {}
    for share in Share(UNIT, 0, count).all:
        part = share_of(unit, share)
        found[str(share)] = UnitEntry(
            share.index,
            f"rank_{share.index}/x",
            tuple(spec for spec, _ in part.tensors),
            part.meta.to_json(),
            part.plan,
        )
    return found


TABLE = [
    TensorSpec(f"unit/{UNIT}/model/w", "F32", (40, 3)),
    TensorSpec(f"unit/{UNIT}/model/b", "BF16", (5,)),
    TensorSpec(f"unit/{UNIT}/model/empty", "BF16", (0, 4)),
    TensorSpec(f"unit/{UNIT}/optim/w/exp_avg", "F32", (40, 3)),
    TensorSpec(f"unit/{UNIT}/optim/w/step", "F32", ()),
    TensorSpec(f"unit/{UNIT}/buffer/mask", "BOOL", (3,)),
]


@pytest.mark.ci
@settings(max_examples=100, deadline=None)
@given(specs(), st.integers(2, 4), st.data())
def test_a_lost_or_foreign_share_is_never_taken_for_a_unit(
    table: list[TensorSpec], count: int, data: st.DataObject
) -> None:
    sound = entries(state(table), count)
    broken = dict(sound)
    name = data.draw(st.sampled_from(sorted(sound)))
    match data.draw(st.sampled_from(["lost", "other count", "other table"])):
        case "lost":
            del broken[name]
        case "other count":
            broken |= entries(state(table), count + 1)
        case "other table":
            more = [*table, TensorSpec(f"unit/{UNIT}/model/more", "F32", (9,))]
            broken[name] = entries(state(more), count)[name]
    assert together(sound)
    with pytest.raises(FormatError):
        together(broken)


def write(root: Path, unit: UnitState, count: int, *, writers: Sequence[int] = ()) -> Path:
    """Parts of a checkpoint whose one unit is written in shares; writers: who writes each of them."""
    directory = layout.TemporaryName(STEP, "job", 1, 1, 1).under(root)
    named = list(writers) or list(range(count))
    for rank in sorted(set(named)):
        own = [share for share, writer in zip(Share(UNIT, 0, count).all, named, strict=True) if writer == rank]
        write_part(
            directory, rank, 1, STEP, STEP, {str(share): share_of(unit, share) for share in own}, {}, {}, job="job"
        )
    return directory


def published(root: Path, unit: UnitState, count: int, *, writers: Sequence[int] = ()) -> Path:
    directory = write(root, unit, count, writers=writers)
    ranks = tuple(sorted(set(writers or range(count))))
    wanted = [str(share) for share in Share(UNIT, 0, count).all]
    assert publish.verify_parts(directory, ranks, wanted, (), STEP) == []
    incident = publish.IncidentFacts("job", 1, 1, 1, STEP, world_size=4, writers=ranks, reason="a test")
    return publish.publish(root, directory, incident)


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("writers", [(0, 1, 2, 3), (2, 0, 0, 2), (1, 1, 1, 1)])
def test_what_several_wrote_is_read_as_one(
    tmp_path: Path, writers: tuple[int, ...], described: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if described:
        monkeypatch.setattr(publish, "TABLES_BYTES_MAX", 0)
    unit = state(TABLE)
    path = published(tmp_path, unit, 4, writers=writers)
    assert verify(path) == []
    assert content_of(path) == {spec.name: content(spec).tobytes() for spec in TABLE}
    with open_checkpoint(path) as checkpoint:
        manifest = checkpoint.manifest
        assert (manifest.tables is not None) == described
        assert [*manifest.units] == [UNIT]
        assert manifest.units[UNIT].writers == writers
        assert manifest.units[UNIT].meta.optimizer == "SGD"
        assert sorted(spec.name for spec in manifest.units[UNIT].tensors) == sorted(spec.name for spec in TABLE)
        assert len(manifest.units[UNIT].wholes[TABLE[0].name].pieces) > 1
        assert math.prod(checkpoint.read(manifest.units[UNIT])[TABLE[0].name][0].shape) == 120


@pytest.mark.parametrize("checked", [True, False])
def test_a_slice_comes_out_of_several_files(tmp_path: Path, checked: bool) -> None:
    path = published(tmp_path, state(TABLE), 4)
    spec = TABLE[0]
    with open_checkpoint(path) as checkpoint, SliceReader(checkpoint, checked=checked) as reader:
        assert len(checkpoint.stored(spec.name)) > 1
        # In the whole it begins at row 10, as the second part of a parameter does.
        divided = Divided("w", "F32", (60, 3), (Shard(spec.name, Box((10, 0), (40, 3))),))
        for wanted in (Box((10, 0), (40, 3)), Box((23, 1), (19, 2)), Box((49, 2), (1, 1))):
            memory = np.zeros((*wanted.sizes, 4), np.uint8)
            reader.read([Target(wanted, memory, slices_for(divided, wanted))])
            rows, columns = (slice(at, at + size) for at, size in zip(wanted.offsets, wanted.sizes, strict=True))
            expected = content(spec).reshape(40, 3, 4)[rows.start - 10 : rows.stop - 10, columns]
            assert memory.tobytes() == expected.tobytes()


def test_shares_of_different_tables_are_not_published(tmp_path: Path) -> None:
    directory = write(tmp_path, state(TABLE), 2)
    other = share_of(state([*TABLE, TensorSpec(f"unit/{UNIT}/model/more", "F32", (9,))]), Share(UNIT, 1, 2))
    write_part(directory, 2, 1, STEP, STEP, {f"{UNIT}/1of2": other}, {}, {}, job="job")
    problems = publish.verify_parts(directory, (0, 2), (f"{UNIT}/0of2", f"{UNIT}/1of2"), (), STEP)
    assert [rank for rank, _ in problems] == [publish.NO_RANK]
    golden.says(problems[0][1])


def test_shares_of_different_numbers_are_not_published(tmp_path: Path) -> None:
    """Not even where they were asked for."""
    directory = write(tmp_path, state(TABLE), 2)
    write_part(
        directory, 2, 1, STEP, STEP, {f"{UNIT}/2of3": share_of(state(TABLE), Share(UNIT, 2, 3))}, {}, {}, job="job"
    )
    problems = publish.verify_parts(directory, (0, 2), (f"{UNIT}/0of2", f"{UNIT}/2of3"), (), STEP)
    assert {rank for rank, _ in problems} == {publish.NO_RANK}
    golden.says("; ".join(text for _, text in problems))


def test_a_lost_share_is_noticed(tmp_path: Path) -> None:
    directory = write(tmp_path, state(TABLE), 3)
    problems = publish.verify_parts(directory, (0, 2), tuple(map(str, Share(UNIT, 0, 3).all)), (), STEP)
    assert len(problems) == 2
    golden.says("; ".join(text for _, text in problems))


def test_a_share_of_the_step_before_is_noticed(tmp_path: Path) -> None:
    directory = write(tmp_path, state(TABLE), 2)
    stale = share_of(state(TABLE, seed=1), Share(UNIT, 1, 2))
    write_part(directory, 2, 1, STEP - 1, STEP - 1, {f"{UNIT}/1of2": stale}, {}, {}, job="job")
    problems = publish.verify_parts(directory, (0, 2), (f"{UNIT}/0of2", f"{UNIT}/1of2"), (), STEP)
    assert [rank for rank, _ in problems] == [2]


def test_slices_of_other_dimensions_are_no_tensor() -> None:
    """As a forged table may say; it is refused, not an error of Python."""
    row = TensorSpec(f"unit/{UNIT}/0of2/model/w", "F32", (2,), (4,), (0,))
    plane = TensorSpec(f"unit/{UNIT}/1of2/model/w", "F32", (2, 1), (4, 2), (0, 1))
    with golden.raises(FormatError):
        joined(UNIT, [[row], [plane]])


FIRST = TensorSpec(f"unit/{UNIT}/0of2/model/w", "F32", (2, 3), (6, 8), (1, 1))
NEXT = dataclasses.replace(FIRST, name=f"unit/{UNIT}/1of2/model/w", offsets=(3, 1))
FORGED = {
    "of another type": {"dtype": "I32"},
    "of another whole": {"global_shape": (6, 9)},
    "after a gap": {"offsets": (4, 1)},
    "over the one before": {"offsets": (2, 1)},
    "in its place": {"offsets": (1, 1)},
    "aside": {"offsets": (3, 2)},
    "wider": {"shape": (2, 4)},
    "narrower": {"shape": (2, 2)},
    "empty": {"shape": (0, 3)},
    "along another axis": {"offsets": (1, 4)},
}
"""What a slice may be that does not follow `FIRST`."""


def test_a_slice_that_follows_another_one_is_put_after_it() -> None:
    longer = dataclasses.replace(NEXT, shape=(3, 3))
    [(name, whole)] = joined(UNIT, [[FIRST], [longer]]).items()
    assert name == whole.spec.name == f"unit/{UNIT}/model/w"
    assert (whole.spec.shape, whole.spec.global_shape, whole.spec.offsets) == ((5, 3), (6, 8), (1, 1))
    assert [(piece.offsets, piece.share, piece.spec) for piece in whole.pieces] == [
        ((0, 0), 0, FIRST),
        ((2, 0), 1, longer),
    ]


@pytest.mark.parametrize("forged", FORGED)
def test_slices_that_do_not_follow_each_other_are_no_tensor(forged: str) -> None:
    with golden.raises(FormatError):
        joined(UNIT, [[FIRST], [dataclasses.replace(NEXT, **FORGED[forged])]])  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (2,), (1,)])
def test_two_whole_tensors_of_one_name_are_no_tensor(shape: tuple[int, ...]) -> None:
    specs = [TensorSpec(f"unit/{UNIT}/{number}of2/model/w", "F32", shape) for number in range(2)]
    with golden.raises(FormatError):
        joined(UNIT, [[spec] for spec in specs])


def test_a_tensor_of_another_share_is_not_listed_in_this_one() -> None:
    with golden.raises(FormatError):
        joined(UNIT, [[NEXT], [FIRST]])


def test_names() -> None:
    assert whole_units(["a", "b/1of2", "c/0of2", "c/1of2", "d/0of2", "d/0of3"]) == {"a", "c"}
    assert [Share.parse(text).count for text in ("a/2of2", "a/0of1", "a/01of2", "/0of2", "a/b/0of2")] == [1] * 5
