"""Whether a checkpoint of very many ranks can be the newest one, at a cost that hardly grows with it."""

from __future__ import annotations

import re
from pathlib import Path

from lastwords.checkpoint import layout
from lastwords.checkpoint.document import Fields, damage, decode_document, lines_of, read_document
from lastwords.checkpoint.entries import FileEntry, facts_from_json
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

_NUMBERS = ("generation", "global_step", "published_unix_ns", "incident", "attempt")
_KEYS = ("job", "exact", *_NUMBERS, "tables_in_parts", "facts")
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
    fields = Fields(decode_document(raw, where=path, version_max=MANIFEST_FORMAT, only=_KEYS), path)
    problem = facts_problem(facts_from_json(fields, path))
    if problem is not None:
        raise FormatError(damage(path, problem))
    names = set(_RANK_DIR.findall(lines_of(raw, ("files",))))
    _check_presence(directory, {name.decode("ascii") for name in names}, os)
    few = len(names) <= SIZES_MAX
    if few or every_file:
        described = fields.truth("tables_in_parts")
        listed = decode_document(raw, where=path, version_max=MANIFEST_FORMAT, only=("files",))
        for item in Fields(listed, path).inners("files"):
            entry = FileEntry.from_json(item, path, described=described)
            (check_sizes if few else check_present)(directory, entry, os)
    check_name(directory, fields.integer("global_step", least=1))
    numbers = {name: fields.integer(name) for name in _NUMBERS}
    return Claimed(fields.text("job"), exact=fields.truth("exact"), **numbers)


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
