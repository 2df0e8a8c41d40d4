from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lastwords.checkpoint.format import (
    DTYPE_BITS,
    HEADER_BYTES_MAX,
    TensorSpec,
    decode_header,
    encode_header,
    file_order,
    header_length,
)
from lastwords.errors import ConfigError, FormatError
from tests import golden

NAMES = st.text(st.characters(blacklist_categories=("C", "Z")), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
SPECS = st.lists(
    st.builds(TensorSpec, NAMES, st.sampled_from(sorted(DTYPE_BITS)), SHAPES), max_size=6, unique_by=lambda s: s.name
)
METADATA = st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3)


def ordered(specs: list[TensorSpec]) -> list[TensorSpec]:
    return [specs[index] for index in file_order(specs)]


def raw_header(table: Any) -> bytes:
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text


def decode(raw: bytes, data_bytes: int = 0) -> Any:
    return decode_header(raw, file_bytes=len(raw) + data_bytes, where="x.ckpt")


# ---------------------------------------------------------------------- round trip, and safetensors as the judge


@pytest.mark.ci
@given(SPECS, METADATA)
def test_a_header_comes_back_as_it_was_written(specs: list[TensorSpec], metadata: dict[str, str]) -> None:
    specs = ordered(specs)
    raw = encode_header(specs, metadata)
    size = sum(spec.nbytes for spec in specs)
    header = decode(raw, size)
    assert [spec for spec, _, _ in header.tensors.values()] == sorted(
        specs, key=lambda spec: list(header.tensors).index(spec.name)
    )
    assert dict(header.metadata) == metadata
    assert header.header_bytes == len(raw)
    assert len(raw) % 64 == 0
    at = len(raw)
    for spec in specs:
        _, begin, end = header.tensors[spec.name]
        assert end - begin == spec.nbytes
        if spec.nbytes:
            assert begin == at
        at += spec.nbytes


@pytest.mark.ci
@given(specs=SPECS, metadata=METADATA)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_safetensors_opens_what_is_written_and_every_tensor_is_aligned(
    specs: list[TensorSpec], metadata: dict[str, str], tmp_path: Path
) -> None:
    specs = ordered(specs)
    raw = encode_header(specs, metadata)
    content = raw + bytes(sum(spec.nbytes for spec in specs))
    (tmp_path / "x.safetensors").write_bytes(content)
    with safetensors.safe_open(str(tmp_path / "x.safetensors"), framework="numpy") as file:
        assert set(file.keys()) == {spec.name for spec in specs}
        assert (file.metadata() or {}) == metadata
        for spec in specs:
            assert tuple(file.get_slice(spec.name).get_shape()) == spec.shape
    header = decode(raw, len(content) - len(raw))
    for spec, begin, _ in header.tensors.values():
        assert begin % (DTYPE_BITS[spec.dtype] // 8) == 0


@pytest.mark.ci
@given(SPECS, METADATA, st.data())
@settings(max_examples=200)
def test_what_safetensors_refuses_is_refused_here(specs: list[TensorSpec], metadata: dict[str, str], data: Any) -> None:
    """One byte of the header is changed: whenever safetensors says no, so do we, and nothing but FormatError comes."""
    specs = ordered(specs)
    raw = bytearray(encode_header(specs, metadata) + bytes(sum(spec.nbytes for spec in specs)))
    header_bytes = 8 + struct.unpack("<Q", raw[:8])[0]
    raw[data.draw(st.integers(0, header_bytes - 1))] ^= data.draw(st.integers(1, 255))
    try:
        ours = decode_header(bytes(raw[:header_bytes]), file_bytes=len(raw), where="x")
    except FormatError:
        return
    theirs = safetensors.deserialize(bytes(raw))
    assert {name for name, _ in theirs} == set(ours.tensors)


@given(st.binary(max_size=200))
@example(b"\2\0\0\0\0\0\0\0{}")
@example(b"\2\0\0\0\0\0\0\0[]")
@example(b"\xff" * 8)
def test_no_bytes_at_all_raise_anything_but_format_error(raw: bytes) -> None:
    try:
        decode_header(raw, file_bytes=len(raw), where="x")
    except FormatError:
        pass


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.ci
@given(
    st.dictionaries(
        st.text(max_size=3) | st.just("__metadata__"),
        JSONS
        | st.fixed_dictionaries(
            {"dtype": st.sampled_from(["F32", "U8"]) | JSONS, "shape": JSONS, "data_offsets": JSONS}
        ),
        max_size=3,
    )
)
def test_no_json_at_all_raises_anything_but_format_error(table: Any) -> None:
    try:
        decode(raw_header(table), 4)
    except FormatError:
        pass


# ---------------------------------------------------------------------- one error for each defect


GOOD = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "table",
    [
        {"a": {**GOOD, "data_offsets": [1, 5]}},
        {"a": {**GOOD, "data_offsets": [0, 3]}},
        {"a": {**GOOD, "shape": [3], "data_offsets": [0, 3]}},
        {"a": GOOD, "b": GOOD},
        {"a": {**GOOD, "dtype": "F33"}},
        {"a": {**GOOD, "shape": [-4]}},
        {"a": {**GOOD, "shape": [4.0]}},
        {"a": {**GOOD, "shape": [True, 4]}},
        {"a": {**GOOD, "data_offsets": [0]}},
        {"a": {**GOOD, "shape": [2**62, 2**62]}},
        {"a": {**GOOD, "more": 1}},
        {"a": 1},
        {"": GOOD},
        {"a\n": GOOD},
        {"a": GOOD, "__metadata__": {"k": 1}},
        [GOOD],
    ],
)
def test_each_defect_of_a_header_is_named(table: Any) -> None:
    with golden.raises(FormatError):
        decode(raw_header(table), 4)


def test_a_name_that_stands_twice_is_refused() -> None:
    text = b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    with pytest.raises(FormatError, match="twice"):
        decode(struct.pack("<Q", len(text)) + text)


def test_deep_nesting_is_a_format_error_and_no_recursion_error() -> None:
    text = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(FormatError, match="not JSON"):
        decode(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize(
    ("first", "size"),
    [(b"", 0), (b"\1\0\0", 3), (struct.pack("<Q", 2**63), 10**9), (struct.pack("<Q", HEADER_BYTES_MAX + 1), 10**9),
     (struct.pack("<Q", 100), 107), (struct.pack("<Q", 1), 100)],
)  # fmt: skip
def test_an_impossible_header_length_is_refused_before_anything_is_allocated(first: bytes, size: int) -> None:
    with pytest.raises(FormatError, match="damaged"):
        header_length(first, file_bytes=size, where="x")


# ---------------------------------------------------------------------- what cannot be stored


@pytest.mark.parametrize(
    "arguments",
    [
        ("", "F32", (1,)),
        ("__metadata__", "F32", (1,)),
        ("a\ud800", "F32", (1,)),
        ("a", "C128", (1,)),
        ("a", "F32", (-1,)),
        ("a", "F32", (2,), (3,), (2,)),
        ("a", "F32", (2,), (3, 3), (0, 0)),
        ("a", "F32", (2**40, 2**40)),
    ],
)
def test_each_tensor_that_cannot_be_stored_is_named(arguments: tuple[Any, ...]) -> None:
    with golden.raises(ConfigError):
        TensorSpec(*arguments)


def test_two_tensors_of_one_name_are_refused() -> None:
    spec = TensorSpec("a", "F32", (1,))
    with golden.raises(ConfigError):
        encode_header([spec, spec], {})


@pytest.mark.ci
def test_metadata_beyond_the_format_s_limit_are_refused() -> None:
    with golden.raises(ConfigError):
        encode_header([], {"lastwords": "x" * (HEADER_BYTES_MAX + 1)})


def test_a_shard_keeps_its_place_in_the_whole() -> None:
    spec = TensorSpec("a", "F32", (2, 3), (4, 3), (2, 0))
    assert (spec.nbytes, spec.global_shape, spec.offsets) == (24, (4, 3), (2, 0))
    assert TensorSpec("s", "F32", ()).nbytes == 4
    assert math.prod(TensorSpec("e", "F32", (0, 3)).global_shape) == 0


def test_every_element_type_of_whole_bytes_that_safetensors_knows_is_stored() -> None:
    """A new one in safetensors shows up here: its own list is in the message of the error."""
    text = json.dumps({"a": {"dtype": "NOT_A_TYPE", "shape": [0], "data_offsets": [0, 0]}}).encode()
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(struct.pack("<Q", len(text)) + text)
    known = {word.strip("`") for word in str(caught.value).replace(",", " ").split() if word.startswith("`")}
    known -= {"NOT_A_TYPE", "F4", "F6_E2M3", "F6_E3M2"}
    if not known:
        pytest.skip("this version of safetensors does not list them")
    assert known <= set(DTYPE_BITS)
