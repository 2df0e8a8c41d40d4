"""Who is wrong, in which tensor, and in which words; and who may not be accused."""

from __future__ import annotations

import doctest
from collections.abc import Mapping

import pytest

from lastwords.sharding import verify
from lastwords.sharding.verify import HolderDifference, compare
from tests import golden

NAMES = ("unit/u/model/a.weight", "unit/u/optim/a.weight/exp_avg", "unit/u/model/b.weight", "unit/u/buffer/mask")
A, A_MOMENT, B, MASK = NAMES


def job(ranks: int, *changes: tuple[int, str, int], unit: str = "u") -> dict[int, Mapping[str, Mapping[str, int]]]:
    """Digests of ranks that hold one unit, with changes (rank, tensor, digest)."""
    digests = {rank: {name: index for index, name in enumerate(NAMES)} for rank in range(ranks)}
    for rank, tensor, digest in changes:
        digests[rank][tensor] = digest
    return {rank: {unit: tensors} for rank, tensors in digests.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_copies_do_not_differ(ranks: int) -> None:
    assert compare(job(ranks)) == []


def test_nothing_to_compare_is_no_difference() -> None:
    assert compare({}) == []
    assert compare({0: {}, 1: {}}) == []
    assert compare({0: {"a": {"unit/a/model/w": 1}}, 1: {"b": {"unit/b/model/w": 2}}}) == [], "two units, two holders"


@pytest.mark.parametrize("tensor", NAMES)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_of_three_holders_the_odd_one_is_named_with_its_tensor(rank: int, tensor: str) -> None:
    others = tuple(other for other in range(3) if other != rank)
    assert compare(job(3, (rank, tensor, 99))) == [HolderDifference("u", tensor, (rank,), True, (others, (rank,)), 1)]


def test_of_two_holders_nobody_can_tell() -> None:
    (found,) = compare(job(2, (1, A_MOMENT, 99)))
    assert found == HolderDifference("u", A_MOMENT, (0, 1), False, ((0,), (1,)), 1)


def test_two_against_two_is_no_majority() -> None:
    (found,) = compare(job(4, (1, A, 99), (3, A, 99)))
    assert (found.certain, found.suspects, found.camps) == (False, (0, 1, 2, 3), ((0, 2), (1, 3)))


def test_a_largest_camp_that_is_not_more_than_half_is_no_majority() -> None:
    """2 + 1 + 1: the two may be the ones that share a fault."""
    (found,) = compare(job(4, (2, A, 98), (3, A, 99)))
    assert (found.certain, found.camps) == (False, ((0, 1), (2,), (3,)))


def test_the_first_tensor_of_the_model_is_named_and_the_others_are_counted() -> None:
    (found,) = compare(job(3, (2, MASK, 99), (2, A_MOMENT, 99), (2, B, 99)))
    assert (found.tensor, found.count) == (A_MOMENT, 3)


def test_two_ranks_that_are_wrong_in_different_tensors_are_both_named() -> None:
    """No two of the three agree on everything, but each tensor has its majority."""
    found = compare(job(3, (1, B, 99), (2, A, 99)))
    assert [(item.suspects, item.tensor, item.certain) for item in found] == [((2,), A, True), ((1,), B, True)]


def test_two_wrong_ranks_of_five_are_both_named() -> None:
    found = compare(job(5, (1, A, 98), (3, A, 99)))
    assert [item.suspects for item in found] == [(1,), (3,)]
    assert all(item.camps == ((0, 2, 4), (1,), (3,)) for item in found)


def test_a_tensor_that_one_holder_lacks_is_a_difference() -> None:
    digests = job(3)
    del digests[1]["u"][MASK]  # type: ignore[attr-defined]
    assert compare(digests) == [HolderDifference("u", MASK, (1,), True, ((0, 2), (1,)), 1)]


def test_a_tensor_that_only_one_holder_has_is_a_difference() -> None:
    (found,) = compare(job(3, (2, "unit/u/model/new", 7)))
    assert (found.tensor, found.suspects, found.certain) == ("unit/u/model/new", (2,), True)


def test_each_unit_is_compared_among_its_own_holders() -> None:
    """Ranks of one unit may be in another one too, and units need not nest."""
    w = {"unit/u/model/w": 1}
    digests = {0: {"a": w, "b": w}, 1: {"a": w, "b": {"unit/u/model/w": 2}}, 2: {"a": w, "c": w}, 3: {"b": w}}
    (found,) = compare(digests)
    assert (found.unit, found.suspects, found.camps) == ("b", (1,), ((0, 3), (1,)))


def test_units_are_reported_in_the_same_order_whatever_order_they_come_in() -> None:
    one, other = job(2, (1, A, 9), unit="x"), job(2, (1, B, 9), unit="c")
    both = {rank: {**one[rank], **other[rank]} for rank in (1, 0)}
    assert [found.unit for found in compare(both)] == ["c", "x"]


# ---------------------------------------------------------------------- words


def test_a_certain_difference_says_who_and_what_and_what_to_do() -> None:
    (found,) = compare(job(3, (2, A_MOMENT, 99), (2, B, 99)))
    assert str(found) == (
        "rank 2 differs from ranks 0 and 1, which agree, in 'exp_avg', the optimizer's state of 'a.weight', of unit "
        "'u' (2 tensors differ, this is the first): its replica has diverged, and nothing is saved from it; check "
        "the memory of its host, and what this rank computes differently"
    )


def test_an_uncertain_difference_accuses_nobody() -> None:
    (found,) = compare(job(2, (1, A, 99)))
    assert str(found) == (
        "rank 0 and rank 1 hold different bytes of parameter 'a.weight' of unit 'u', and without a majority it is "
        "unknown which are right"
    )


def test_camps_that_look_like_tensor_parallel_parts_give_a_hint() -> None:
    (found,) = compare(job(4, (1, A, 99), (3, A, 99)))
    golden.says(found)
    (two,) = compare(job(2, (1, A, 99)))
    assert "dropout" not in str(two)


def test_words_stay_short_in_a_large_job() -> None:
    (found,) = compare(job(4096, (4095, A, 99)))
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4087 more" in str(found)
    (uncertain,) = compare(job(4096, *((rank, A, rank + 100) for rank in range(4096))))
    assert len(str(uncertain)) < 400


@pytest.mark.parametrize(
    ("tensor", "words"),
    [(B, "parameter 'b.weight'"), (MASK, "buffer 'mask'"), ("unit/u/extra/ema", "extra 'ema'"), ("odd", "'odd'")],
)
def test_every_kind_of_tensor_has_its_word(tensor: str, words: str) -> None:
    (found,) = compare({rank: {"u": {tensor: rank}} for rank in range(2)})
    golden.says(found)


def test_examples_in_docstrings_are_true() -> None:
    found = doctest.testmod(verify)
    assert found.attempted
    assert not found.failed
