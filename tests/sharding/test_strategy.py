"""What all ranks hold, as a strategy: every element is somewhere once, and owners of state are told from copies."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import replace

from lastwords.checkpoint.boxes import Box, whole
from lastwords.checkpoint.reshard.strategy import Held
from lastwords.errors import ConfigError
from lastwords.sharding.declare import Unit
from lastwords.sharding.pieces import ANY_FORM, Piece
from lastwords.sharding.strategy import VOLATILE, strategy_from
from tests import golden
from tests.sharding.stores import piece


def stored(dtype: str) -> tuple[str, tuple[int, ...]]:
    return {"float32": ("F32", ()), "bool": ("BOOL", ()), "complex128": ("U8", (16,))}[dtype]


def test_random_layouts_come_back_as_they_are_held() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        ranks = draw.randint(1, 8)
        lists: dict[int, list[Piece]] = {rank: [] for rank in range(ranks)}
        expected: dict[str, dict[Box, set[int]]] = defaultdict(dict)
        for number in range(draw.randint(1, 4)):
            name, rows, parts = f"t{number}", draw.randint(1, 9), draw.randint(1, ranks)
            ends = sorted(draw.choices(range(rows + 1), k=parts - 1))
            runs = list(itertools.pairwise([0, *ends, rows]))
            for rank in range(ranks):
                low, high = runs[rank % parts]
                lists[rank].append(piece(name, high - low, 2, at=(low, 0), of=(rows, 2)))
                lists[rank].append(replace(lists[rank][-1], kind="optim"))
                expected[name].setdefault(Box((low, 0), (high - low, 2)), set()).add(rank)
        strategy = strategy_from([(own, (rank,)) for rank, own in lists.items()], (), ranks, stored)
        strategy.check()
        assert len(strategy.tensors) == 2 * len(expected)
        for name, boxes in expected.items():
            held = tuple(Held(box, tuple(sorted(at))) for box, at in sorted(boxes.items()))
            assert strategy.tensors[f"model/{name}"].held == held, f"seed {seed}"
            assert strategy.tensors[f"optim/{name}"].held == held, f"seed {seed}"
            assert strategy.tensors[f"optim/{name}"].dtype == ""


def test_what_rank_zero_owns_of_an_optimizer_is_state_there_and_weight_everywhere() -> None:
    weight = piece("w", 4)
    owner = [weight, replace(weight, kind="optim")]
    lists = [(owner, (0, 2)), ([replace(weight, owner=0)], (1,)), ([replace(weight, owner=2)], (3,))]
    strategy = strategy_from(lists, (), 4, stored)
    assert strategy.tensors["model/w"].held == (Held(whole((4,)), (0, 1, 2, 3)),)
    assert strategy.tensors["optim/w"].held == (Held(whole((4,)), (0, 2)),)


def test_only_some_ranks_of_a_world_keep_their_global_numbers() -> None:
    unit = Unit("all", tuple(range(8)))
    strategy = strategy_from([([piece("w", 4, unit="all")], (4, 6))], [unit, Unit("others", (0,))], 8, stored)
    assert strategy.world_size == 8
    assert strategy.tensors["model/w"].held[0].ranks == (4, 6)


def test_a_type_that_safetensors_lacks_has_its_bytes_as_a_dimension() -> None:
    halves = [replace(piece("w", 2, at=(2 * k,), of=(4,)), dtype="complex128") for k in range(2)]
    lists = [([half, replace(half, kind="optim")], (k,)) for k, half in enumerate(halves)]
    strategy = strategy_from(lists, (), 2, stored)
    strategy.check()
    for name, dtype in (("model/w", "U8"), ("optim/w", "")):
        cut = strategy.tensors[name]
        assert (cut.dtype, cut.shape) == (dtype, (4, 16))
        assert [held.box for held in cut.held] == [Box((0, 0), (2, 16)), Box((2, 0), (2, 16))]


def test_state_that_lies_elsewhere_than_its_parameter_is_listed_by_its_key() -> None:
    rows = [replace(piece("w/sums", 2, at=(2 * k,), of=(4,)), kind="state") for k in range(2)]
    strategy = strategy_from([([piece("w", 4, 4), row], (k,)) for k, row in enumerate(rows)], (), 2, stored)
    strategy.check()
    assert strategy.state_held("w", "sums", (4,)) == (Held(Box((0,), (2,)), (0,)), Held(Box((2,), (2,)), (1,)))


def test_a_buffer_without_a_promised_form_is_listed_only_where_all_agree() -> None:
    def cache(size: int) -> Piece:
        return replace(piece("cache", size), kind="buffer", scope=VOLATILE)

    agreed = strategy_from([([cache(3)], (0, 1))], (), 2, stored)
    assert agreed.tensors.keys() == {"buffer/cache"}
    weight = piece("w", 1)
    differs = strategy_from([([weight, cache(3)], (0,)), ([weight, cache(4)], (1,))], (), 2, stored)
    nothing = Piece("cache", "buffer", ANY_FORM, (), (), ())
    absent = strategy_from([([weight, cache(3)], (0,)), ([weight, nothing], (1,))], (), 2, stored)
    assert differs.tensors.keys() == absent.tensors.keys() == {"model/w"}


def test_two_tensors_of_one_name_are_refused_with_both_units() -> None:
    units = [Unit("a", (0,)), Unit("b", (1,))]
    lists = [([piece("w", 4, unit="a")], (0,)), ([piece("w", 4, unit="b")], (1,))]
    with golden.raises(ConfigError):
        strategy_from(lists, units, 2, stored)
    other = [lists[0], ([piece("w", 5, unit="b")], (1,))]
    with golden.raises(ConfigError):
        strategy_from(other, units, 2, stored)
    with golden.raises(ConfigError):
        strategy_from([([piece("w", 4)], (0,)), ([piece("w", 5)], (1,))], (), 2, stored)


def test_a_part_that_nobody_holds_is_named() -> None:
    with golden.raises(ConfigError):
        strategy_from([([piece("w", 2, at=(0,), of=(4,))], (0,))], (), 4, stored)


def test_a_declared_holder_without_the_tensor_is_refused() -> None:
    lists = [([piece("w", 4, unit="a")], (0,)), ([piece("v", 4, unit="a")], (1,))]
    with golden.raises(ConfigError):
        strategy_from(lists, [Unit("a", (0, 1))], 2, stored)
