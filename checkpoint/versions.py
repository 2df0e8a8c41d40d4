"""Versions of everything that is written into files, and that a later reader may meet. See docs/format.md."""

from __future__ import annotations

from typing import Final

MANIFEST_FORMAT: Final = 1
"""manifest.json: newest `format_version` that this code reads, and the one that it writes."""

PART_FORMAT: Final = 1
"""part.json, likewise."""

FILE_FORMAT: Final = 1
"""The JSON in a .ckpt file's header, likewise."""

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
