"""Versions of everything that is written into files, and that a later reader may meet. See docs/format.md."""

from __future__ import annotations

from typing import Final

MANIFEST_FORMAT: Final = 4
"""manifest.json: newest `format_version` that this code reads. Version 1 has everything in one file. Of a large
checkpoint version 2 is written, which leaves the tables in the parts (`part_tables`). Versions 3 and 4 are the same
where units were written in shares, which older readers do not know."""

PART_FORMAT: Final = 2
"""part.json; 1 without shares."""

FILE_FORMAT: Final = 2
"""The JSON in a .ckpt file's header; 1 without shares."""


def manifest_format(*, described: bool, shared: bool) -> int:
    """What is written. described: the tables stay in the parts; shared: some unit was written in shares."""
    return 1 + described + 2 * shared


def is_described(manifest_format: int) -> bool:
    """Whether the tables are in the parts.

    >>> [is_described(version) for version in (1, 2, 3, 4)]
    [False, True, False, True]
    """
    return manifest_format % 2 == 0


def older_unless(*, shared: bool) -> int:
    """Of PART_FORMAT and FILE_FORMAT: the version that is written."""
    return 2 if shared else 1


META_VERSION: Final = 1
"""What a unit's `meta` says (`meta.UnitMeta`)."""

BUCKETS_VERSION: Final = 1
"""The order of one DDP's buckets (`meta.BucketRecord`)."""

SEVERAL_BUCKETS_VERSION: Final = 2
"""In the place of such a record one that holds a record for each DDP."""

STRATEGY_FORMAT: Final = 1
"""A strategy's file: newest version that this code reads, and the one that it writes."""

START_FORMAT: Final = 1
"""The record of a start (`starts`)."""

UPLOADED_FORMAT: Final = 1
"""What of a directory has been uploaded (`remote.record`)."""

ABOUT_VERSION: Final = 1
"""What `convert --to dcp` adds to a directory of torch.distributed.checkpoint."""

IDENTITY_FORMAT: Final = 1
"""What a transformation says of its source and destination (`facts.moved`)."""
