"""Weights as safetensors files with an index, as transformers and plain safetensors read them.

Source of the layout: https://huggingface.co/docs/huggingface_hub/package_reference/serialization and the safetensors
format page. Files model-00001-of-0000K.safetensors with {"format": "pt"} in their header, and
model.safetensors.index.json: {"metadata": {"total_size": BYTES}, "weight_map": {NAME: FILE}}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from lastwords.checkpoint.appearing import making_directory, refuse_existing
from lastwords.checkpoint.format import TYPE_NAMES, TensorSpec
from lastwords.checkpoint.load import Checkpoint, read_checkpoint
from lastwords.checkpoint.part import write_document, write_tensors
from lastwords.checkpoint.slice_reader import SliceReader
from lastwords.checkpoint.system import REAL_OS, Os, sync_directory
from lastwords.errors import ConfigError
from lastwords.integrations.catalogue import Catalogue, Whole, catalogue
from lastwords.optim_wrapper.tensors.tensor_bytes import code_of_dtype, dtype_named

INDEX_NAME = "model.safetensors.index.json"
Progress = Callable[[int, int], None]
"""Called with the bytes that are read or written, and how many there will be."""

SHARD_BYTES_MAX = 5 * 1000**3
"""5 GB, what transformers has used as max_shard_size for most of its life; larger files are slow to move about."""


def export_safetensors(
    path: Path,
    out: Path,
    *,
    shard_bytes_max: int = SHARD_BYTES_MAX,
    units: Collection[str] = (),
    names: Sequence[str] = (),
    dtype: str = "",
    tied: Mapping[str, str] = MappingProxyType({}),
    os: Os = REAL_OS,
    progress: Progress | None = None,
) -> list[Path]:
    """Writes parameters (frozen ones too) and persistent buffers of a checkpoint into the new directory `out`.

    Tied weights stand once, under their first name; the header of their file has the other names. Every byte is
    checked as it is read. Holds one tensor in memory. Returns the files, the index last.
    names: patterns such as "layers.*"; only what has a name that fits one of them. dtype: such as "bfloat16", for all
    floating-point tensors. tied: other name -> name, of what was saved twice (see `load_for_inference`).
    ConfigError if `out` exists or a type cannot be written; StorageError, FormatError, IncompleteError or ReplacedError
    (then there is nothing at `out`).
    """
    if shard_bytes_max < 1:
        raise ConfigError(f"a shard takes at least 1 byte, not {shard_bytes_max}")
    check_dtype(dtype)
    refuse_existing(out, os)

    def write(checkpoint: Checkpoint) -> list[Path]:
        found = catalogue(checkpoint, units).tied(tied, checkpoint).only(names)
        wholes = {name: whole for name, whole in found.model().items() if name not in found.aliases}
        return _export(checkpoint, found, wholes, out, shard_bytes_max, dtype, os, progress)

    return read_checkpoint(path, write, os)


def check_dtype(dtype: str) -> None:
    """ConfigError for what is no floating-point type, nor ""."""
    if dtype and not (code_of_dtype(dtype) and dtype_named(dtype).is_floating_point):
        raise ConfigError(
            f"{dtype!r} is not a floating-point type that safetensors can store; pass one such as bfloat16"
        )


def _export(
    checkpoint: Checkpoint,
    found: Catalogue,
    wholes: dict[str, Whole],
    out: Path,
    shard_bytes_max: int,
    dtype: str,
    os: Os,
    progress: Progress | None,
) -> list[Path]:
    specs = {name: _spec(name, whole, dtype) for name, whole in wholes.items()}
    shards = split([(name, spec.nbytes) for name, spec in specs.items()], shard_bytes_max)
    files = {f"model-{at:05}-of-{len(shards):05}.safetensors": names for at, names in enumerate(shards, 1)}
    done, total = 0, sum(spec.nbytes for spec in specs.values())

    def read(name: str) -> memoryview:
        nonlocal done
        whole, memory = wholes[name], np.empty(wholes[name].nbytes, np.uint8)
        reader.read([whole.target(whole.box, memory)])
        done += specs[name].nbytes
        if progress is not None:
            progress(done, total)
        return _as_type(memory, whole.dtype, TYPE_NAMES[specs[name].dtype])

    with (
        making_directory(out, os) as directory,
        SliceReader(checkpoint, checked=True, keep_edges=True, os=os) as reader,
    ):
        for file, names in files.items():
            metadata = {"format": "pt"} | {alias: name for alias, name in found.aliases.items() if name in names}
            write_tensors(directory / file, [(specs[name], partial(read, name)) for name in names], metadata, os)
        write_document(directory / INDEX_NAME, index_of(files, specs), os)
        sync_directory(directory, os)
    return [*(out / file for file in files), out / INDEX_NAME]


def split(tensors: Sequence[tuple[str, int]], most: int) -> list[list[str]]:
    """Names in groups of at most `most` bytes, in order; a larger tensor has a group to itself.

    >>> split([("a", 3), ("b", 3), ("c", 9), ("d", 1)], 6)
    [['a', 'b'], ['c'], ['d']]
    """
    groups: list[list[str]] = []
    room = -1
    for name, nbytes in tensors:
        if not groups or nbytes > room:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= nbytes
    return groups or [[]]


def index_of(files: dict[str, list[str]], specs: dict[str, TensorSpec]) -> bytes:
    """Content of the index file."""
    weight_map = {name: file for file, names in files.items() for name in names}
    content: dict[str, Any] = {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def _as_type(memory: np.ndarray[Any, Any], saved: str, wanted: str) -> memoryview:
    """The bytes of a tensor's elements in another type."""
    if saved == wanted or not memory.size:
        return memory.data
    converted = torch.from_numpy(memory).view(dtype_named(saved)).to(dtype_named(wanted))
    return converted.view(torch.uint8).numpy().data


def _spec(name: str, whole: Whole, dtype: str) -> TensorSpec:
    code = code_of_dtype(whole.dtype)
    if dtype and code is not None and dtype_named(whole.dtype).is_floating_point:
        code = code_of_dtype(dtype)
    if code is None:
        raise ConfigError(
            f"{name} is {whole.dtype}, which safetensors cannot store; register torch.view_as_real of it, or read "
            "the checkpoint with load_for_inference"
        )
    return TensorSpec(name, code, whole.shape)
