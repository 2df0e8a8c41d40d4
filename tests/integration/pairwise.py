"""A small set of rows in which every pair of values of every two parameters occurs at least once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Mapping, Sequence

Row = dict[str, Hashable]
Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]


def pairs_of(row: Mapping[str, Hashable]) -> set[Pair]:
    """Every pair of settings in a row."""
    return set(itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def pairwise(
    parameters: Mapping[str, Sequence[Hashable]],
    is_allowed: Callable[[Mapping[str, Hashable]], bool],
    *,
    seed: int = 1,
    tries: int = 60,
) -> tuple[list[Row], set[Pair]]:
    """Rows that cover every pair, and the pairs that no allowed row was found for.

    Greedy: each row starts from a pair that is still missing and is filled at random; the best of `tries` is taken.
    The same arguments give the same rows. `is_allowed` gets whole rows only.

    >>> rows, never = pairwise({"a": (1, 2), "b": (1, 2), "c": (1, 2)}, lambda row: True)
    >>> len(rows) < 8, never
    (True, set())
    """
    draw = random.Random(seed)
    names = sorted(parameters)
    missing: list[Pair] = [
        ((first, x), (second, y))
        for first, second in itertools.combinations(names, 2)
        for x in parameters[first]
        for y in parameters[second]
    ]
    draw.shuffle(missing)
    # Sets of pairs are the bits of integers: a pair is in a row where it belongs to two of the row's settings.
    bits = {pair: 1 << number for number, pair in enumerate(missing)}
    pairs_with: dict[tuple[str, Hashable], int] = {}
    for pair, bit in bits.items():
        for setting in pair:
            pairs_with[setting] = pairs_with.get(setting, 0) | bit
    left = (1 << len(bits)) - 1
    rows: list[Row] = []
    never: set[Pair] = set()
    while missing:
        best: Row | None = None
        best_gain = 0
        for attempt in range(tries * 20):
            row = {name: _choice(draw, parameters[name]) for name in names} | dict(missing[0])
            once = twice = 0
            for setting in row.items():
                twice |= once & pairs_with[setting]
                once |= pairs_with[setting]
            gain = twice & left
            if gain.bit_count() > best_gain.bit_count() and is_allowed(row):
                best, best_gain = row, gain
            if best is not None and attempt >= tries:
                break
        if best is None:
            pair = missing.pop(0)
            never.add(pair)
            left &= ~bits[pair]
            continue
        rows.append(best)
        left &= ~best_gain
        missing = [pair for pair in missing if not bits[pair] & best_gain]
    return rows, never


def _choice(draw: random.Random, values: Sequence[Hashable]) -> Hashable:
    """`draw.choice`, inlined."""
    count = len(values)
    size = count.bit_length()
    while (number := draw.getrandbits(size)) >= count:
        pass
    return values[number]
