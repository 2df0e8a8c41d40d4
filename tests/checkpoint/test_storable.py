from __future__ import annotations

import datetime
import enum
import json
import math
import struct
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lastwords.checkpoint.storable import _FORMS, DEPTH_MAX, has_order, loses_order, pack, refuse_unstorable, unpack
from lastwords.errors import ConfigError, FormatError
from tests import golden

FLOATS = st.floats() | st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
NUMPY = st.builds(
    lambda code, content: np.frombuffer(content[: np.dtype(code).itemsize], code)[0],
    st.sampled_from(["?", "i1", "<i2", "<i8", "u8", "<f2", "<f4", "<f8", "<c8", "<c16", "<M8[ns]", "<m8[s]", "<f16"]),
    st.binary(min_size=32, max_size=32).map(lambda content: bytes([content[0] & 1]) + content[1:]),
)
ZONES = st.none() | st.sampled_from(
    [datetime.UTC, datetime.timezone(datetime.timedelta(minutes=-90), "here"), datetime.timezone.min]
)
RARE = st.one_of(
    NUMPY,
    st.text().map(np.str_),
    st.binary().map(np.bytes_),
    st.complex_numbers(),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.dates(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
    st.datetimes(timezones=ZONES),
    st.times(timezones=ZONES),
    st.sampled_from([Path("a/b"), Path("/"), PurePosixPath("x"), PureWindowsPath("c:\\y"), Path("\udcff")]),
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**200), 2**200) | FLOATS | st.text() | st.binary() | RARE
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
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(0, 3))
        | st.builds(
            lambda factory, items: defaultdict(factory, items),
            st.sampled_from([None, int, list, dict, float]),
            st.dictionaries(KEYS, inner, max_size=2),
        )
        | st.binary().map(bytearray)
        | st.slices(9)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal in type as well, all the way down: 1, True and 1.0 differ, and so do 0.0 and -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, defaultdict) and one.default_factory is not other.default_factory:
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(a, b) and same(x, y) for (a, x), (b, y) in pairs)
    if isinstance(one, list | tuple | deque):
        lengths = (len(one), getattr(one, "maxlen", 0)) == (len(other), getattr(other, "maxlen", 0))
        return lengths and all(map(same, one, other))
    if isinstance(one, set | frozenset):
        return sorted(map(str, map(pack, one))) == sorted(map(str, map(pack, other)))
    if isinstance(one, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, complex):
        return same((one.real, one.imag), (other.real, other.imag))
    if isinstance(one, datetime.datetime | datetime.time):
        return (str(one), one.tzname(), one.fold) == (str(other), other.tzname(), other.fold)
    return str(one) == str(other) if isinstance(one, Decimal) else bool(one == other)


@given(VALUES)
@example(np.str_("a\0"))
@example(Decimal("-sNaN7"))
def test_every_storable_value_comes_back_equal_and_of_the_same_types(value: Any) -> None:
    text = json.dumps(pack(value), allow_nan=False)
    assert same(unpack(json.loads(text)), value)


@given(VALUES)
def test_equal_values_give_equal_text(value: Any) -> None:
    assert json.dumps(pack(unpack(pack(value)))) == json.dumps(pack(value))


def test_nan_comes_back_as_nan() -> None:
    assert math.isnan(unpack(pack([float("nan")]))[0])


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = {level: value}
    return value


def test_what_a_user_may_store_can_be_packed_in_a_tree_and_then_once_more() -> None:
    """So it is with `local_extras`; formerly values between 16 and 64 levels deep were found out at the death."""
    value: Any = {"plain": nested(DEPTH_MAX)}
    refuse_unstorable(value["plain"], "extras")
    for _ in range(DEPTH_MAX):
        value = {"dict": [[1, value]]}
    packed = pack({"meta": pack(value)})
    assert same(unpack(unpack(json.loads(json.dumps(packed)))["meta"]), value)
    with golden.raises(ConfigError):
        refuse_unstorable(nested(DEPTH_MAX + 1), "extras")


def test_state_of_schedulers_is_storable() -> None:
    state = {"milestones": Counter({30: 1, 80: 2}), "best": float("inf"), "_step_count": 3, "base_lrs": [0.1]}
    assert same(unpack(pack(state)), state)


class Colour(enum.IntEnum):
    RED = 1


class Ratio(float):
    """Would come back as a mere float."""


zoned = datetime.datetime(2026, 11, 22, tzinfo=zoneinfo.ZoneInfo("UTC"))


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, object()]},
        {"a": (1, lambda: 0)},
        {3: np.zeros(1, "V4")[0]},
        {"a": zoned},
        {"a": Ratio(0.5)},
        {"a": np.zeros(1)},
        {"a": Colour.RED},
        {"a": defaultdict(lambda: 1)},
        {"a": deque([object()])},
        {Colour.RED: 1},
        {"a": 1 << 10_000},
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(value: Any) -> None:
    with golden.raises(ConfigError):
        refuse_unstorable(value, "extras")


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with golden.raises(ConfigError):
        refuse_unstorable(loop, "extras")


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=3)
            | st.sampled_from(
                ["~tuple", "~dict", "~set", "~frozenset", "~ordered", "~counter", "~bytes", "~float", "~class"]
                + [form.tag for form in _FORMS.values()]
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


@pytest.mark.parametrize(
    "value",
    [
        {"~bytearray": 5},
        {"~bytearray": [1, 2]},
        {"~numpy": ["bytes", 5]},
        {"~numpy": ["str", 5]},
        {"~numpy": ["|u1", {"~bytearray": {"~bytes": "AA=="}}]},
        {"~numpy": ["(1,", {"~bytes": "AAAA"}]},
        {"~numpy": ["(2,)|u1", {"~bytes": "AAA="}]},
        {"~numpy": ["u1,u1", {"~bytes": "AAA="}]},
        {"~numpy": ["uint8", {"~bytes": "AA=="}]},
        {"~numpy": [["|u1"], {"~bytes": "AA=="}]},
        {"~deque": {"~range": [0, 5, 1]}},
        {"~complex": {"~range": [0, 2, 1]}},
        {"~timedelta": {"~range": [0, 3, 1]}},
        {"~decimal": "1.0.0"},
        {"~decimal": 3},
        {"~fraction": [1, 0]},
        {"~fraction": [1.0, 2]},
        {"~slice": [1, 2]},
        {"~uuid": "00"},
        {"~range": {"~range": [0, 3, 1]}},
    ],
    ids=str,
)
def test_a_number_or_a_range_where_content_belongs_is_refused(value: Any) -> None:
    """A larger one would take all of the memory; 10**13 bytes for a line of 30."""
    with pytest.raises(FormatError):
        unpack(value)


def test_deep_nesting_is_a_format_error_and_no_recursion_error() -> None:
    value: Any = []
    for _ in range(900):
        value = [value]
    with pytest.raises(FormatError, match="nested"):
        unpack(value)


def shrunk() -> set[int]:
    """In a table as large as it was with more items."""
    kept = set(range(200))
    for item in range(200):
        if item not in (3, 64, 130):
            kept.discard(item)
    return kept


@pytest.mark.parametrize("items", [[8, 0], [0, 8], [16, 8, 0], [(1, 2), 7], [2.5, 1 << 70, -3]])
def test_the_order_of_a_set_comes_back(items: list[Any]) -> None:
    value = set(items)
    assert [*unpack(json.loads(json.dumps(pack(value))))] == [*value]
    assert [*unpack(pack(frozenset(items)))] == [*frozenset(items)]


def test_an_order_that_cannot_come_back_is_known_and_equal_sets_are_stored_alike() -> None:
    value = shrunk()
    assert not loses_order({*[*value]})
    assert [*value] == [3, 64, 130]
    assert loses_order(value)
    assert unpack(pack(value)) == value
    nan = float("nan")
    assert not has_order({nan, 1})
    assert pack({"a", "b"}) == pack({"b", "a"})
