from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastwords.checkpoint.storable import pack, refuse_unstorable, unpack
from lastwords.errors import ConfigError, FormatError

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | st.text() | st.binary()
)
KEYS = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2), max_leaves=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.sets(KEYS, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal in type as well, all the way down: 1, True and 1.0 differ, and so do 0.0 and -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one.hex() == other.hex()
    return bool(one == other)


@given(VALUES)
def test_every_storable_value_comes_back_equal_and_of_the_same_types(value: Any) -> None:
    text = json.dumps(pack(value), allow_nan=False)
    assert same(unpack(json.loads(text)), value)


@given(VALUES)
def test_equal_values_give_equal_text(value: Any) -> None:
    assert json.dumps(pack(unpack(pack(value)))) == json.dumps(pack(value))


def test_nan_comes_back_as_nan() -> None:
    assert math.isnan(unpack(pack([float("nan")]))[0])


def test_a_numpy_float_comes_back_as_the_same_number() -> None:
    assert unpack(pack(np.float64(0.1))) == 0.1


def test_state_of_schedulers_is_storable() -> None:
    state = {"milestones": Counter({30: 1, 80: 2}), "best": float("inf"), "_step_count": 3, "base_lrs": [0.1]}
    assert same(unpack(pack(state)), state)


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, object()]}, r"extras\['a'\]\[1\] is a builtins.object"),
        ({"a": (1, lambda: 0)}, r"extras\['a'\]\[1\] is a builtins.function"),
        ({3: np.int64(1)}, r"extras\[3\] is a numpy.int64"),
        ({"a": np.zeros(1)}, r"extras\['a'\] is a numpy.ndarray"),
        ({"a": Colour.RED}, r"extras\['a'\] is a .*Colour"),
        ({"a": defaultdict(int)}, r"extras\['a'\] is a collections.defaultdict"),
        ({"a": 1j}, "builtins.complex"),
        ({Colour.RED: 1}, "extras key is a .*Colour"),
        ({"a": 1 << 10_000}, "10001 bits"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        refuse_unstorable(value, "extras")


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="contains itself"):
        refuse_unstorable(loop, "extras")


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=3)
            | st.sampled_from(
                ["~tuple", "~dict", "~set", "~frozenset", "~ordered", "~counter", "~bytes", "~float", "~class"]
            ),
            inner,
            max_size=2,
        )
    ),
    max_leaves=10,
)


@given(JSONS)
def test_no_json_raises_anything_but_format_error(value: Any) -> None:
    try:
        unpack(value)
    except FormatError:
        pass


@pytest.mark.parametrize(
    "value", [{"~class": []}, {"~tuple": 3}, {"~float": "1"}, {"~bytes": "?"}, {"~dict": [[1]]}, {"~a": 1, "b": 2}]
)
def test_forged_values_are_refused(value: Any) -> None:
    with pytest.raises(FormatError):
        unpack(value)


def test_deep_nesting_is_a_format_error_and_no_recursion_error() -> None:
    value: Any = []
    for _ in range(900):
        value = [value]
    with pytest.raises(FormatError, match="nested"):
        unpack(value)
