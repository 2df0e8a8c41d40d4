"""Weights as safetensors files with an index, as transformers and plain safetensors read them.

Source of the layout: https://huggingface.co/docs/huggingface_hub/package_reference/serialization and the safetensors
format page. Files model-00001-of-0000K.safetensors with {"format": "pt"} in their header, and
model.safetensors.index.json: {"metadata": {"total_size": BYTES}, "weight_map": {NAME: FILE}}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lastwords.checkpoint.format import TensorSpec, encode_header, file_order
from lastwords.checkpoint.load import open_checkpoint
from lastwords.checkpoint.part import write_document
from lastwords.checkpoint.slice_reader import SliceReader
from lastwords.checkpoint.system import REAL_OS, Os, close, storage_errors, sync_directory
from lastwords.errors import ConfigError
from lastwords.integrations.catalogue import Whole, catalogue, find_checkpoint
from lastwords.integrations.destination import building, check_same, check_source
from lastwords.optim_wrapper.tensor_bytes import code_of_dtype

INDEX_NAME = "model.safetensors.index.json"
SHARD_BYTES_MAX = 5 * 1000**3
"""5 GB, what transformers has used as max_shard_size for most of its life; larger files are slow to move about."""


def export_safetensors(
    path: Path,
    out: Path,
    *,
    shard_bytes_max: int = SHARD_BYTES_MAX,
    units: Collection[str] = (),
    os: Os = REAL_OS,
    progress: Callable[[int], None] | None = None,
) -> list[Path]:
    """Writes parameters (frozen ones too) and persistent buffers of a checkpoint into the new directory `out`.

    Tied weights stand once, under their first name; the header of their file has the other names. Every byte of the
    source is checked first. Holds one tensor in memory. Returns the files, the index last.
    ConfigError if `out` exists or a type cannot be written; StorageError (then there is nothing at `out`).
    """
    if shard_bytes_max < 1:
        raise ConfigError(f"shard_bytes_max must be at least 1, not {shard_bytes_max}")
    checkpoint = open_checkpoint(find_checkpoint(path), os)
    found = catalogue(checkpoint, units)
    wholes = {name: whole for name, whole in found.model().items() if name not in found.aliases}
    specs = {name: _spec(name, whole) for name, whole in wholes.items()}
    check_source(checkpoint, os)
    shards = split([(name, whole.nbytes) for name, whole in wholes.items()], shard_bytes_max)
    files = {f"model-{at:05}-of-{len(shards):05}.safetensors": names for at, names in enumerate(shards, 1)}
    done = 0
    with building(out, os) as directory, SliceReader(checkpoint, checked=False, os=os) as reader:
        for file, names in files.items():
            metadata = {"format": "pt"} | {alias: name for alias, name in found.aliases.items() if name in names}
            ordered = [names[index] for index in file_order(specs[name] for name in names)]
            header = encode_header([specs[name] for name in ordered], metadata)
            with _File(directory / file, os) as stream:
                stream.write(header)
                for name in ordered:
                    memory = np.empty(wholes[name].nbytes, np.uint8)
                    whole = wholes[name]
                    reader.read([whole.target(whole.box, memory)])
                    stream.write(memory.data)
                    done += whole.nbytes
                    if progress is not None:
                        progress(done)
        write_document(directory / INDEX_NAME, index_of(files, wholes), os, durable=True)
        sync_directory(directory, os)
        check_same(checkpoint, os)
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


def index_of(files: dict[str, list[str]], wholes: dict[str, Whole]) -> bytes:
    """Content of the index file."""
    weight_map = {name: file for file, names in files.items() for name in names}
    content: dict[str, Any] = {
        "metadata": {"total_size": sum(whole.nbytes for whole in wholes.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def _spec(name: str, whole: Whole) -> TensorSpec:
    code = code_of_dtype(whole.dtype)
    if code is None:
        raise ConfigError(
            f"{name} is {whole.dtype}, for which safetensors has no code; register it as torch.view_as_real of it, or "
            "read the checkpoint with load_for_inference"
        )
    return TensorSpec(name, code, whole.shape)


class _File:
    """A new file, written from front to back and on the disk when closed."""

    def __init__(self, path: Path, os: Os) -> None:
        self._path, self._os, self._at = path, os, 0
        with storage_errors("writing", path):
            self._fd = os.create(path, direct=False)

    def __enter__(self) -> _File:
        return self

    def write(self, content: bytes | memoryview) -> None:
        view = memoryview(content)
        while len(view):
            with storage_errors("writing", self._path):
                count = self._os.pwrite(self._fd, view, self._at)
            self._at += count
            view = view[count:]

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                with storage_errors("writing", self._path):
                    self._os.fsync(self._fd)
        finally:
            close(self._fd, self._path, self._os)
