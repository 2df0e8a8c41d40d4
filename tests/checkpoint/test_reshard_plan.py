"""Slices planned from boxes give the same bytes as gathering everything and cutting again, whatever the layouts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastwords.checkpoint.boxes import (
    Box,
    BoxIndex,
    Divided,
    Shard,
    between,
    check_shards,
    first_overlap,
    is_run,
    overlap,
    slabs,
    slices_for,
    span,
    uncovered,
    whole,
    without,
)
from lastwords.errors import FormatError, IncompleteError, MismatchError
from tests import golden

Shape = tuple[int, ...]


def cut(extent: int, parts: int) -> list[tuple[int, int]]:
    """(offset, size) of each part as torch's chunk makes them: the last ones may be smaller, or empty."""
    size = -(-extent // parts) if extent else 0
    bounds = [min(k * size, extent) for k in range(parts + 1)]
    return [(low, high - low) for low, high in itertools.pairwise(bounds)]


def uneven(extent: int, at: Sequence[int]) -> list[tuple[int, int]]:
    bounds = [0, *sorted(min(place, extent) for place in at), extent]
    return [(low, high - low) for low, high in itertools.pairwise(bounds)]


@st.composite
def layouts(draw: st.DrawFn, shape: Shape) -> list[Box]:
    """Boxes of a mesh of 1..16 parts in all, even (as torch cuts) or not; strided sharding is a second cut of each."""
    left = 16
    axes = []
    for extent in shape:
        parts = draw(st.integers(1, min(left, 16)))
        left //= parts
        if draw(st.booleans()):
            pieces = cut(extent, parts)
        else:
            pieces = uneven(extent, draw(st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1)))
        again = draw(st.integers(1, max(1, left)))
        if again > 1 and draw(st.booleans()):  # FSDP2 x TP: each of tensor parallelism's parts is cut once more
            left //= again
            pieces = [(at + more, size) for at, whole in pieces for more, size in cut(whole, again)]
        axes.append(pieces)
    return [
        Box(tuple(at for at, _ in corner), tuple(size for _, size in corner)) for corner in itertools.product(*axes)
    ]


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def place(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))


def divided(shape: Shape, boxes: Sequence[Box]) -> Divided:
    return Divided("w", "I64", shape, tuple(Shard(f"shard {k}", box) for k, box in enumerate(boxes)))


def reshard(shape: Shape, held: dict[Box, np.ndarray], boxes: Sequence[Box]) -> dict[Box, np.ndarray]:
    """Each new box filled from planned slices, element by element of its memory."""
    tensor = divided(shape, list(held))
    check_shards(tensor)
    slices_for(tensor, whole(shape))
    result = {}
    for box in boxes:
        out = np.full(box.sizes, -1, np.int64)
        for piece in slices_for(tensor, box):
            source = held[piece.shard.box]
            out[place(moved(piece.region, box))] = source[place(moved(piece.region, piece.shard.box))]
        result[box] = out
    return result


def moved(region: Box, into: Box) -> Box:
    return Box(tuple(a - b for a, b in zip(region.offsets, into.offsets, strict=True)), region.sizes)


@pytest.mark.ci
@given(st.data())
def test_slices_equal_a_full_gather_and_a_chain_of_layouts_gives_the_first_back(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    values = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    first, second, third = (data.draw(layouts(shape)) for _ in range(3))
    held = {box: values[place(box)].copy() for box in first}
    there = reshard(shape, held, second)
    assert all(np.array_equal(there[box], values[place(box)]) for box in second)
    back = reshard(shape, reshard(shape, there, third), first)
    assert all(np.array_equal(back[box], held[box]) for box in first)


@pytest.mark.ci
@given(st.data())
def test_a_lost_shard_is_named_with_the_region_that_is_missing(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    boxes = data.draw(layouts(shape))
    lost = data.draw(st.sampled_from([box for box in boxes if box.elements]))
    with pytest.raises(IncompleteError) as caught:
        slices_for(divided(shape, [box for box in boxes if box != lost]), whole(shape))
    assert caught.value.missing == (f"w{lost}",)


@given(st.data())
def test_what_lies_between_two_places_of_memory_is_found_once_and_in_order(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple))
    outer = whole(shape)
    region = data.draw(st.sampled_from([box for box in data.draw(layouts(shape)) if box.elements]))
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, outer.elements + 2)] * 2)))
    numbers = np.arange(outer.elements).reshape(shape)
    parts = between(outer, region, first, last)
    found = [number for part in parts for number in numbers[place(part)].ravel()]
    assert found == [number for number in numbers[place(region)].ravel() if first <= number < last]
    for part in parts:
        low, high = span(outer, part)
        assert (low, high - 1) == (numbers[place(part)].flat[0], numbers[place(part)].flat[-1])
        assert is_run(outer, part) == (high - low == part.elements)


@given(st.data())
def test_slabs_cover_a_box_once_in_order_and_none_is_larger_than_it_may_be(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    box = data.draw(st.sampled_from(data.draw(layouts(shape))))
    most = data.draw(st.integers(1, 30))
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    parts = list(slabs(box, most))
    assert [number for part in parts for number in numbers[place(part)].ravel()] == list(numbers[place(box)].ravel())
    assert all(0 < part.elements <= most for part in parts)


def test_what_is_left_of_a_box_is_disjoint_and_complete() -> None:
    left = without(Box((0, 0), (4, 4)), Box((1, 1), (2, 2)))
    assert sum(part.elements for part in left) == 12
    assert uncovered(Box((0, 0), (4, 4)), [*left, Box((1, 1), (2, 2))]) == []


def test_shards_that_share_elements_are_refused_with_tensor_and_region() -> None:
    tensor = divided((4, 2), [Box((0, 0), (3, 2)), Box((2, 0), (2, 2))])
    with golden.raises(FormatError):
        check_shards(tensor)
    check_shards(divided((4, 2), [Box((0, 0), (3, 2)), Box((3, 0), (1, 2))]))  # the control


def test_shards_outside_the_whole_are_refused() -> None:
    with golden.raises(FormatError):
        check_shards(divided((4,), [Box((3,), (2,))]))


def test_a_box_of_another_shape_is_another_model() -> None:
    tensor = divided((4, 2), [whole((4, 2))])
    for wanted in (whole((4, 3)), whole((8,)), Box((3, 0), (2, 2))):
        with golden.raises(MismatchError):
            slices_for(tensor, wanted)


def test_gaps_are_named_with_tensor_and_region() -> None:
    with golden.raises(IncompleteError) as caught:
        slices_for(divided((4,), [Box((0,), (2,)), Box((3,), (1,))]), whole((4,)))
    assert caught.value.missing == ("w[2:3]",)


@st.composite
def any_boxes(draw: st.DrawFn) -> list[Box]:
    """Up to ten boxes of one tensor, which may share elements or be empty."""
    dimensions = draw(st.integers(0, 3))
    numbers = st.lists(st.integers(0, 6), min_size=dimensions, max_size=dimensions).map(tuple)
    return draw(st.lists(st.builds(Box, numbers, numbers), min_size=1, max_size=10))


@pytest.mark.ci
@given(any_boxes())
def test_an_index_finds_what_a_look_at_every_box_finds(boxes: list[Box]) -> None:
    index = BoxIndex(boxes)
    for wanted in boxes:
        by_hand = [number for number, box in enumerate(boxes) if overlap(box, wanted) is not None]
        assert index.overlapping(wanted) == by_hand
    pairs = [pair for pair in itertools.combinations(boxes, 2) if overlap(*pair) is not None]
    assert (first_overlap(boxes) is not None) == bool(pairs)


def test_a_slice_is_found_without_a_look_at_every_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Box] = []

    def counted(one: Box, other: Box) -> Box | None:
        looked.append(one)
        return overlap(one, other)

    monkeypatch.setattr("lastwords.checkpoint.boxes.overlap", counted)
    monkeypatch.setattr("lastwords.checkpoint.boxes.overlap", counted)
    grid = [Box((row, 8 * column), (1, 8)) for row in range(32) for column in range(32)]
    tensor = Divided("w", "F32", (32, 256), tuple(Shard(str(number), box) for number, box in enumerate(grid)))
    check_shards(tensor)  # sorted by rows alone, each box would be held against the other 31 of its row
    assert [piece.shard.name for piece in slices_for(tensor, Box((3, 12), (2, 8)))] == ["97", "98", "129", "130"]
    assert len(looked) <= 8
