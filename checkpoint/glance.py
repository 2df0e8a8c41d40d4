"""Whether a checkpoint of very many ranks can be the newest one, at a cost that hardly grows with it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from lastwords.checkpoint import layout
from lastwords.checkpoint.codec import typed
from lastwords.checkpoint.document import decode_document, lines_of, read_document, told
from lastwords.checkpoint.entries import FileEntry, unpacked
from lastwords.checkpoint.manifest import Claimed
from lastwords.checkpoint.meta_checks import facts_problem
from lastwords.checkpoint.partfile import check_present, check_sizes
from lastwords.checkpoint.system import Os, storage_errors
from lastwords.checkpoint.versions import MANIFEST_FORMAT
from lastwords.errors import FormatError, IncompleteError

EXAMINED_BYTES_MAX = 64 << 10
"""Of a manifest up to here everything is decoded in a few milliseconds, so it gets no mere glance."""

SIZES_MAX = 256
"""So many files are opened for a look at their sizes; of more it is only seen that their directories are there, unless
every file is asked for: then its name and size are looked at, and it is not opened."""

_KEYS = (*(field.name for field in fields(Claimed)), "tables_in_parts", "facts")
_RANK_DIR = re.compile(rb'"path":"(rank_[0-9]+)/')


def glance(directory: Path, os: Os, *, every_file: bool = False) -> Claimed | None:
    """What the manifest of a large checkpoint says of itself, and truly so: its checksum is right.

    None for a small one, or where there is no manifest: `load.examine` says more of those. IncompleteError, FormatError
    or StorageError for one that cannot be used. Files that are damaged are found by whoever reads them. every_file: the
    presence and size of each, however many there are; 16 384 of them take a second.
    """
    path = directory / layout.MANIFEST_NAME
    try:
        raw = read_document(path, os)
    except FileNotFoundError:
        return None
    if len(raw) <= EXAMINED_BYTES_MAX:
        return None
    content = decode_document(raw, where=path, version_max=MANIFEST_FORMAT, only=_KEYS)
    with told(path):
        claimed = typed(content, Claimed, "")
        described = typed(content["tables_in_parts"], bool, "tables_in_parts")
        problem = facts_problem(unpacked(content["facts"], "facts"))
        if problem is not None:
            raise FormatError(problem)
    names = set(_RANK_DIR.findall(lines_of(raw, ("files",))))
    _check_presence(directory, {name.decode("ascii") for name in names}, os)
    few = len(names) <= SIZES_MAX
    if few or every_file:
        listed = decode_document(raw, where=path, version_max=MANIFEST_FORMAT, only=("files",))
        with told(path):
            files = typed(listed["files"], tuple[FileEntry, ...], "files")
            if any(bool(entry.part_sum) != described for entry in files):
                raise FormatError("it does not say of each file where its tables are")
        for entry in files:
            (check_sizes if few else check_present)(directory, entry, os)
    check_name(directory, claimed.global_step)
    return claimed


def _check_presence(directory: Path, names: set[str], os: Os) -> None:
    with storage_errors("listing", directory):
        missing = sorted(names.difference(os.listdir(directory)))
    if missing:
        raise IncompleteError(
            f"{directory / missing[0]} is missing; restore it or use another checkpoint", missing=tuple(missing)
        )


def check_name(directory: Path, global_step: int) -> None:
    """FormatError for a checkpoint that has the name of another step."""
    name = layout.CheckpointName.parse(directory.name)
    if name is not None and name.global_step != global_step:
        raise FormatError(
            f"{directory} holds a checkpoint of global step {global_step}: the directory was renamed; give it its own "
            "name back"
        )
