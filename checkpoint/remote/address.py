"""Where a checkpoint lies in a remote store.

A store has no rename, so nothing in it is ever overwritten: the name of a directory says the step and the checksum of
the manifest, which has the checksums of everything else. Whoever writes a name writes the same bytes.
"""

from __future__ import annotations

import re
from pathlib import Path, PosixPath

import xxhash

from lastwords.checkpoint.layout import CheckpointName
from lastwords.errors import ConfigError

_PATTERN = re.compile(r"[*\[\]]")
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.ASCII)


class RemotePath(PosixPath):
    """A place in a remote store. Its text is the URL; the local file system has nothing of that name.

    >>> str(RemotePath("s3://bucket/job") / "rank_0")
    's3://bucket/job/rank_0'
    >>> str(RemotePath("file:///mnt/job"))
    'file:///mnt/job'
    """

    def __str__(self) -> str:
        protocol, _, rest = super().__str__().partition(":/")
        return f"{protocol}:///{rest}" if protocol == "file" else f"{protocol}://{rest}"


def is_url(text: str) -> bool:
    """Whether a PATH of the command line means a remote store."""
    return _URL.fullmatch(text) is not None


def address_of(url: str) -> RemotePath:
    """The directory that a URL names. ConfigError for what is no URL of one.

    >>> address_of("s3://bucket/job/").name
    'job'
    """
    found = _URL.fullmatch(url)
    if found is None or not found[2].strip("/") or "::" in url or "?" in url:
        raise ConfigError(f"{url!r} is no URL of a directory in a remote store; give one such as s3://bucket/job")
    if found := _PATTERN.search(url):
        raise ConfigError(f"{url!r} has {found[0]!r}, which stores take for a pattern: choose a directory without it")
    if (url.startswith("file://")) != url.startswith(f"{url.partition(':')[0]}:///"):
        raise ConfigError(
            f"{url!r} names no place: file:///PATH has three slashes, any other URL a host or bucket first"
        )
    return RemotePath(url)


def place(text: str) -> Path:
    """A PATH of the command line: local, or of a remote store."""
    return address_of(text) if is_url(text) else Path(text)


def name_of(global_step: int, manifest: bytes) -> str:
    """Name in any remote store of the checkpoint with this manifest.

    >>> name_of(37, b"")
    'tft_saved_checkpoints-step_37-2d06800538d394c2'
    """
    return str(CheckpointName(global_step, checksum=xxhash.xxh3_64_hexdigest(manifest)))
