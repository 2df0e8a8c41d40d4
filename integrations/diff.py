"""Two checkpoints compared by tensor, whatever layouts they were saved in. Rank-local state is not compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lastwords.checkpoint.boxes import slabs
from lastwords.checkpoint.load import Checkpoint, read_checkpoint
from lastwords.checkpoint.slice_reader import SliceReader
from lastwords.integrations.catalogue import Catalogue, Whole, ambiguous_numbers, catalogue, read_box
from lastwords.optim_wrapper.tensors.tensor_bytes import dtype_named

_BLOCK_BYTES = 16 << 20
"""Of each tensor that much is in memory at a time: large enough for long reads."""

_EXACT = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same. what: "only in A", "only in B", "type", "shape" or "values".

    elements: how many differ in their bits. largest: the largest absolute difference, None where there is no number.
    """

    name: str
    what: str
    text: str
    elements: int = 0
    largest: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `diff`. same: how many tensors and values are equal bit for bit."""

    a: Path
    b: Path
    steps: tuple[int, int]
    same: int
    differences: tuple[Difference, ...]


def diff(a: Path, b: Path, *, weights_only: bool = False) -> Comparison:
    """Compares parameters, buffers, optimizer state and hyperparameters by name, bit by bit, in bounded memory.

    Names that stand for different tensors in several units are compared unit by unit. FormatError, IncompleteError,
    ReplacedError or StorageError if one of the two cannot be read.
    """

    def with_b(one: Checkpoint) -> Comparison:
        return read_checkpoint(b, lambda other: _compared((one, other), weights_only))

    return read_checkpoint(a, with_b)


def _compared(checkpoints: tuple[Checkpoint, Checkpoint], weights_only: bool) -> Comparison:
    with ExitStack() as stack:
        readers = [
            stack.enter_context(SliceReader(checkpoint, checked=True, keep_edges=True)) for checkpoint in checkpoints
        ]
        one, other = (
            _items(catalogue(checkpoint, clash_by_unit=True), weights_only=weights_only) for checkpoint in checkpoints
        )
        same = 0
        differences: list[Difference] = []
        for name in sorted(one.keys() | other.keys()):
            found = _compare(name, one, other, readers[0], readers[1])
            if found is None:
                same += 1
            else:
                differences.append(found)
    paths = [checkpoint.path for checkpoint in checkpoints]
    steps = [checkpoint.manifest.global_step for checkpoint in checkpoints]
    return Comparison(paths[0], paths[1], (steps[0], steps[1]), same, tuple(differences))


def _items(found: Catalogue, *, weights_only: bool) -> dict[str, Any]:
    items: dict[str, Any] = {f"model/{name}": whole for name, whole in found.parameters.items()}
    items |= {f"buffer/{name}": whole for name, whole in found.buffers.items()}
    items |= {f"tied/{alias}": name for alias, name in found.aliases.items()}
    if weights_only:
        return items
    items["optim"] = found.optimizer
    for name, keys in found.state.items():
        for key, value in keys.items():
            items |= dict(_flat(f"optim/{name}/{key}", value))
    ambiguous = ambiguous_numbers(found.groups)
    for group in found.groups:
        name = f"group/{group.number}"
        if group.number in ambiguous:
            name += f"@{min(group.parameters, default='')}"
        for key, value in group.values.items():
            items |= dict(_flat(f"{name}/{key}", value))
        # Units list their parameters one after another, so the order in a group depends on the layout.
        items[f"{name}/params"] = sorted(group.parameters)
    return items


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple) and any(isinstance(inner, Whole | Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _flat(f"{name}.{index}", inner)
    else:
        yield name, value


def _compare(
    name: str, one: Mapping[str, Any], other: Mapping[str, Any], reader: SliceReader, reader_b: SliceReader
) -> Difference | None:
    if name not in one or name not in other:
        side, value = ("A", one[name]) if name in one else ("B", other[name])
        return Difference(name, f"only in {side}", _text(value))
    mine, theirs = one[name], other[name]
    if not (isinstance(mine, Whole) and isinstance(theirs, Whole)):
        same = type(mine) is type(theirs) and (mine == theirs or repr(mine) == repr(theirs))  # nan is nan
        number = isinstance(mine, float | int) and isinstance(theirs, float | int)
        largest = abs(float(mine) - float(theirs)) if number and not same else None
        return None if same else Difference(name, "values", f"{_text(mine)}, {_text(theirs)}", 1, largest)
    for what in ("dtype", "shape"):
        pair = getattr(mine, what), getattr(theirs, what)
        if pair[0] != pair[1]:
            return Difference(name, "type" if what == "dtype" else what, f"{pair[0]}, {pair[1]}")
    elements, largest = _values(mine, theirs, reader, reader_b)
    if not elements:
        return None
    return Difference(name, "values", f"{elements} of {math.prod(mine.shape)} elements", elements, largest)


def _values(mine: Whole, theirs: Whole, reader: SliceReader, reader_b: SliceReader) -> tuple[int, float | None]:
    elements, largest = 0, 0.0
    exact = True
    width = dtype_named(mine.dtype).itemsize
    for box in slabs(mine.box, _BLOCK_BYTES // width):
        a, b = (read_box(side, whole, box) for side, whole in ((reader, mine), (reader_b, theirs)))
        changed = (_raw(a).view(-1, width) != _raw(b).view(-1, width)).any(dim=1)
        count = int(changed.sum())
        if count:
            elements += count
            flat_a, flat_b = a.reshape(-1)[changed], b.reshape(-1)[changed]
            wide = torch.complex128 if a.is_complex() else torch.int64 if a.dtype in _EXACT else torch.float64
            gap = (flat_a.to(wide) - flat_b.to(wide)).abs().max()
            exact = exact and not bool(gap.isnan())
            largest = max(largest, float(gap)) if exact else largest
    return elements, largest if exact else None


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _text(value: Any) -> str:
    text = f"{value.dtype} {value.shape}" if isinstance(value, Whole) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
