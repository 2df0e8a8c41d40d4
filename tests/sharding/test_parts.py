"""Parts cut by hand: each declaration gives one box, all boxes of a name are one whole, or the error says why not."""

from __future__ import annotations

import doctest
import itertools
import random
import re
from typing import Any

import pytest

from lastwords.errors import ConfigError
from lastwords.sharding import declare as parts
from lastwords.sharding.declare import Part, Unit, check_cuts
from lastwords.sharding.grouping import divide
from lastwords.sharding.pieces import ANY_FORM, Piece
from tests import golden

Lists = list[tuple[list[Piece], tuple[int, ...]]]


def test_examples_in_docstrings_are_true() -> None:
    found = doctest.testmod(parts)
    assert found.attempted
    assert not found.failed


def test_an_equal_part_lies_behind_those_before_it_along_its_dimension_alone() -> None:
    assert Part(dim=1, index=2, of=3).place((4, 5), "w") == ((4, 15), (0, 10))
    assert Part(dim=-1, index=2, of=3).place((4, 5), "w") == ((4, 15), (0, 10))
    assert Part(dim=0, index=0, of=1).place((4,), "w") == ((4,), (0,)), "one part is the whole"


def test_a_part_of_any_size_has_the_size_of_its_tensor() -> None:
    part = Part(offsets=[1, 2], shape=[9, 9])  # type: ignore[arg-type] # lists are taken
    assert part.place((8, 7), "w") == ((9, 9), (1, 2))
    assert part == Part(offsets=(1, 2), shape=(9, 9))
    with golden.raises(ConfigError):
        part.place((8, 8), "w")
    with golden.raises(ConfigError):
        part.place((8,), "w")


def test_a_dimension_that_the_tensor_lacks_is_refused() -> None:
    for dim in (1, -2):
        with golden.raises(ConfigError):
            Part(dim=dim, index=0, of=2).place((4,), "w")
    with golden.raises(ConfigError):
        Part(dim=0, index=0, of=2).place((), "w")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({}, r"write Part\(dim=0, index=1, of=4\) for equal parts, Part\(offsets="),
        ({"dim": 0, "index": 1}, "for equal parts"),
        ({"dim": 0, "index": 1, "of": 2, "offsets": (0,)}, "for equal parts"),
        ({"offsets": (0,)}, "for any others"),
        ({"dim": 0, "index": 2, "of": 2}, "index is 2; of 2 parts they are 0 to 1"),
        ({"dim": 0, "index": -1, "of": 2}, "index is -1"),
        ({"dim": 0, "index": 0, "of": 0}, "index is 0; of 0 parts"),
        ({"dim": "0", "index": 0, "of": 2}, "dim, index and of"),
        ({"dim": 0, "index": True, "of": 2}, "dim, index and of"),
        ({"offsets": (-1,), "shape": (4,)}, r"offsets is \(-1,\); it must be a tuple"),
        ({"offsets": (0,), "shape": "4"}, "shape is '4'"),
        ({"offsets": (0,), "shape": (4, 4)}, "differ in dimensions"),
    ],
)
def test_a_part_that_cannot_be_is_refused_in_words(part: dict[str, Any], words: str) -> None:
    with golden.raises(ConfigError):
        Part(**part).check("the part")


# ------------------------------------------------------------------ all parts together


def held(unit: str, part: Part, *shape: int, name: str = "w", dtype: str = "float32") -> Piece:
    return Piece(name, "model", dtype, shape, *part.place(shape, name), unit=unit)


def grid(draw: random.Random) -> tuple[Lists, list[Unit]]:
    """A random whole, cut at random places of each dimension, a rank or two for each box."""
    shape = [draw.randint(1, 9) for _ in range(draw.randint(1, 3))]
    ends = [[*sorted(draw.sample(range(1, size), draw.randint(0, min(2, size - 1)))), size] for size in shape]
    runs = [list(itertools.pairwise([0, *cuts])) for cuts in ends]
    boxes = [(tuple(low for low, _ in box), tuple(high - low for low, high in box)) for box in itertools.product(*runs)]
    lists: Lists = []
    units = []
    ranks = itertools.count()
    for number, (offsets, sizes) in enumerate(boxes):
        holders = tuple(itertools.islice(ranks, draw.randint(1, 2)))
        part = Part(offsets=offsets, shape=tuple(shape))
        units.append(Unit(f"u{number}", holders, ("*",), {"w": part}))
        lists.append(([held(f"u{number}", part, *sizes)], holders))
    return lists, units


UNIT, BOX = re.compile(r"'(u\d+)'"), re.compile(r"\[[\d:, ]+\]")


def box_of(piece: Piece) -> str:
    runs = zip(piece.offsets, piece.shape, strict=True)
    return f"[{', '.join(f'{low}:{low + size}' for low, size in runs)}]"


def test_random_cuts_of_random_wholes_are_taken_and_every_hole_and_overlap_is_found() -> None:
    refused = 0
    for seed in range(300):
        draw = random.Random(seed)
        lists, units = grid(draw)
        world = sum(len(ranks) for _, ranks in lists)
        division = divide(lists, units, world)
        assert {unit.name for unit in units} <= division.units.keys(), f"seed {seed}"
        [[piece], holders], *others = draw.sample(lists, len(lists))
        if not others:
            continue
        with pytest.raises(ConfigError) as hole:
            check_cuts(others, units)
        assert BOX.findall(str(hole.value)) == [box_of(piece)], f"seed {seed}"
        assert {*UNIT.findall(str(hole.value))} <= {other.unit for [[other], _] in others}, f"seed {seed}"
        everything = Part(offsets=(0,) * len(piece.shape), shape=piece.global_shape)
        wider = held(piece.unit, everything, *piece.global_shape)
        with pytest.raises(ConfigError) as overlap:
            check_cuts([([wider], holders), *others], units)
        both = [({piece.unit, other.unit}, [box_of(other)]) for [[other], _] in others]
        assert ({*UNIT.findall(str(overlap.value))}, BOX.findall(str(overlap.value))) in both, f"seed {seed}"
        refused += 1
    assert refused > 100


HALVES = [Unit(f"tp{k}", (k,), ("*",), {"w": Part(dim=0, index=k, of=2)}) for k in range(2)]


def test_parts_of_two_wholes_are_refused() -> None:
    lists: Lists = [([held("tp0", HALVES[0].cuts["w"], 2, 3)], (0,)), ([held("tp1", HALVES[1].cuts["w"], 4, 3)], (1,))]
    with golden.raises(ConfigError):
        check_cuts(lists, HALVES)


def test_a_pattern_that_takes_nothing_anywhere_is_refused_with_its_unit() -> None:
    part = Part(dim=0, index=0, of=1)
    whole = held("a", part, 4)
    cache = Piece("cache", "buffer", ANY_FORM, (), (), (), unit="a")
    for cuts in ({"w": part, "*.up": part}, {"w": part, "cache": part}, {"*": part, "w": part}):
        with golden.raises(ConfigError):
            check_cuts([([whole, cache], (0,))], [Unit("a", (0,), ("*",), cuts)])
    check_cuts([([whole, cache], (0,))], [Unit("a", (0,), ("*",), {"w": part})])
    both = [Unit("a", (0,), ("*",), {"w": part}), Unit("b", (1,), ("*",), {"w": part})]
    check_cuts([([whole], (0,)), ([held("b", Part(dim=0, index=0, of=1), 3, name="v")], (1,))], both)


def test_an_empty_part_is_a_part() -> None:
    units = [Unit(f"u{at}", (at // 4,), ("*",), {"w": Part(offsets=(at,), shape=(4,))}) for at in (0, 4)]
    lists: Lists = [([held("u0", units[0].cuts["w"], 4)], (0,)), ([held("u4", units[1].cuts["w"], 0)], (1,))]
    check_cuts(lists, units)
    assert divide(lists, units, 2).of_list == (("u0",), ("u4",))
