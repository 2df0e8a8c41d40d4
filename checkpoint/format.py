"""The .ckpt file: safetensors, with what is not a tensor as JSON in its `__metadata__`. See docs/format.md.

Source of the rules: https://github.com/huggingface/safetensors (README, "Format"), checked with version 0.8.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lastwords.checkpoint.document import damage
from lastwords.errors import ConfigError, FormatError

METADATA_KEY = "lastwords"
HEADER_BYTES_MAX = 100_000_000
"""Limit of the safetensors format for the JSON part of the header."""

_ALIGN_BYTES = 64
"""The data starts at a multiple of this: safetensors asks for 8; 64 is what torch gives its own tensors."""

_OF_TORCH_SAVE = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""How a zip file begins, and a pickle."""

_STEP_TENSORS = 256
"""So many are encoded at once, a millisecond: one call for 100 000 tensors would keep every other thread waiting."""

_DIMENSIONS_MAX = 64
_ELEMENTS_MAX = 2**63 - 1

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of each element type that is stored. Types below a byte are left out: torch cannot address their elements."""

TYPE_NAMES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32",
    "I64": "int64", "U64": "uint64", "F64": "float64", "C64": "complex64",
}  # fmt: skip
"""What torch calls them."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of a stored tensor besides its bytes.

    dtype: safetensors code ("F32", "BF16", ...). shape: of this shard, in elements.
    global_shape, offsets: of the whole tensor and of this shard in it, in elements; left out, the shard is the whole.
    Raises ConfigError for what cannot be stored.

    >>> TensorSpec("unit/replicated/model/w", "F32", (2, 3))
    TensorSpec(name='unit/replicated/model/w', dtype='F32', shape=(2, 3), global_shape=(2, 3), offsets=(0, 0))
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...] = field(default_factory=tuple)  # no default: they stand in every file (`brief`)
    offsets: tuple[int, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if not self.global_shape and not self.offsets:
            object.__setattr__(self, "global_shape", self.shape)
            object.__setattr__(self, "offsets", (0,) * len(self.shape))
        if not self.name or self.name == "__metadata__":
            raise ConfigError(f"a tensor cannot be stored under the name {self.name!r}: rename it")
        if not self.name.isprintable():
            # Control characters and lone surrogates: other readers of the header stumble over them.
            raise ConfigError(f"a tensor's name contains characters that cannot be stored: {self.name!r}")
        if self.dtype not in DTYPE_BITS:
            raise ConfigError(
                f"tensor {self.name!r} has element type {self.dtype!r}, which safetensors cannot store; "
                "store a view of it as another type (a complex tensor as `torch.view_as_real`)"
            )
        ndim = len(self.shape)
        if ndim > _DIMENSIONS_MAX or len(self.global_shape) != ndim or len(self.offsets) != ndim:
            raise ConfigError(
                f"tensor {self.name!r}: shape {self.shape}, global shape {self.global_shape} and offsets "
                f"{self.offsets} must have the same number of dimensions, at most {_DIMENSIONS_MAX}"
            )
        for axis in range(ndim):
            if self.offsets[axis] < 0 or not 0 <= self.shape[axis] <= self.global_shape[axis] - self.offsets[axis]:
                raise ConfigError(
                    f"tensor {self.name!r}: a shard of shape {self.shape} at {self.offsets} is not inside "
                    f"the global shape {self.global_shape}"
                )
        if math.prod(self.shape) * 8 > _ELEMENTS_MAX:
            raise ConfigError(f"tensor {self.name!r} of shape {self.shape} is larger than any file")

    @property
    def nbytes(self) -> int:
        """Bytes of the shard in the file."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header. `ranges` are (begin, end) in bytes from the start of the *file*, in file order."""

    header_bytes: int
    data_bytes: int
    tensors: Mapping[str, tuple[TensorSpec, int, int]]
    metadata: Mapping[str, str]

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.data_bytes


def file_order(specs: Iterable[TensorSpec]) -> list[int]:
    """Indices of `specs` in the order of the file: wide element types first, else as given.

    Then every tensor starts at a multiple of its element size without any hole, which safetensors forbids;
    readers such as torch cannot view misaligned bytes.

    >>> file_order([TensorSpec("a", "U8", (3,)), TensorSpec("b", "F32", (1,)), TensorSpec("c", "F32", (1,))])
    [1, 2, 0]
    """
    bits = [DTYPE_BITS[spec.dtype] for spec in specs]
    return sorted(range(len(bits)), key=lambda index: -bits[index])


def encode_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Header of a file whose data are `specs` back to back, in this order; padded with spaces to 64 bytes.

    Raises ConfigError if two tensors have one name or the header would exceed the format's limit.
    """
    names: set[str] = set()
    at = 0
    steps = [_members({"__metadata__": dict(metadata)})] if metadata else []
    for first in range(0, len(specs), _STEP_TENSORS):
        table: dict[str, Any] = {}
        for spec in specs[first : first + _STEP_TENSORS]:
            if spec.name in names:
                raise ConfigError(f"two tensors have the name {spec.name!r}: store one of them, or rename it")
            names.add(spec.name)
            table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
            at += spec.nbytes
        steps.append(_members(table))
    text = b"{" + b",".join(steps) + b"}"
    text += b" " * (-(8 + len(text)) % _ALIGN_BYTES)
    if len(text) > HEADER_BYTES_MAX:
        raise ConfigError(
            f"the names of {len(specs)} tensors and the JSON beside them take {len(text)} bytes; a file can hold "
            f"{HEADER_BYTES_MAX}: store large values as tensors"
        )
    return len(text).to_bytes(8, "little") + text


def _members(table: Mapping[str, Any]) -> bytes:
    return json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()[1:-1]


def header_length(first_8_bytes: bytes, *, file_bytes: int, where: str) -> int:
    """Bytes of the whole header, its 8-byte length included; FormatError if that cannot be."""
    if len(first_8_bytes) < 8:
        _damaged(where, f"it has {file_bytes} bytes, less than the smallest header")
    length = int.from_bytes(first_8_bytes, "little")
    if length < 2 or length > HEADER_BYTES_MAX or 8 + length > file_bytes:
        if first_8_bytes.startswith(_OF_TORCH_SAVE):
            raise FormatError(
                f"{where} is not a safetensors file (it looks like a file of torch.save); pass a "
                "file that lastwords wrote"
            )
        _damaged(where, f"its header claims {length} bytes in a file of {file_bytes}")
    return 8 + length


def decode_header(raw: bytes, *, file_bytes: int, where: str) -> Header:
    """Checks and reads a header. `raw` is the whole header (see `header_length`), `file_bytes` the file's size.

    Everything that safetensors demands is checked: names once, known types, sizes that fit, data without overlap
    or hole up to the very end of the file. FormatError names `where`, a path.
    """
    header_bytes = header_length(raw[:8], file_bytes=file_bytes, where=where)
    text = raw[8:header_bytes]
    if len(text) != header_bytes - 8:
        _damaged(where, "its header is cut off")
    if text[:1] != b"{":
        _damaged(where, "its header does not begin with '{'")
    try:
        table = json.loads(text.decode("utf-8"), object_pairs_hook=_once(where), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(damage(where, f"its header is not JSON ({error})")) from error
    if not isinstance(table, dict):
        _damaged(where, "its header is not a JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _damaged(where, "its __metadata__ is not a map from strings to strings")
    entries = sorted((_entry(name, value, where) for name, value in table.items()), key=lambda entry: entry[1:])
    tensors: dict[str, tuple[TensorSpec, int, int]] = {}
    at = 0
    for spec, begin, end in entries:
        if begin != at:
            _damaged(where, f"tensor {spec.name!r} begins at {begin}, the data before it ends at {at}")
        if end - begin != spec.nbytes:
            _damaged(where, f"tensor {spec.name!r} has {end - begin} bytes, its type and shape need {spec.nbytes}")
        tensors[spec.name] = (spec, header_bytes + begin, header_bytes + end)
        at = end
    if header_bytes + at != file_bytes:
        _damaged(where, f"its tensors end at byte {header_bytes + at}, the file at {file_bytes}")
    return Header(header_bytes=header_bytes, data_bytes=at, tensors=tensors, metadata=metadata)


def _entry(name: str, value: Any, where: str) -> tuple[TensorSpec, int, int]:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        _damaged(where, f"the header's entry for {name!r} is not a tensor")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if str(dtype) not in DTYPE_BITS or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        _damaged(where, f"the header's entry for {name!r} has a wrong type, shape or offset")
    try:
        return TensorSpec(name, dtype, tuple(shape)), offsets[0], offsets[1]
    except ConfigError as error:
        raise FormatError(damage(where, str(error))) from error


def _sizes(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    for item in value:  # noqa: SIM110 - all() with a generator takes three times as long, thousands of times
        if type(item) is not int or not 0 <= item <= _ELEMENTS_MAX:
            return False
    return True


def _once(where: str) -> Any:
    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            _damaged(where, "its header has one name twice")
        return table

    return hook


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _damaged(where: str, what: str) -> NoReturn:
    raise FormatError(damage(where, what))


def is_checksum(text: str) -> bool:
    """True for 16 lower-case hexadecimal digits, the form of every xxh3_64 here."""
    return re.fullmatch(r"[0-9a-f]{16}", text) is not None
