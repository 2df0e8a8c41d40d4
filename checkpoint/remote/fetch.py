"""From where a run goes on, if there is a remote store beside its directories."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from lastwords.checkpoint import load
from lastwords.checkpoint.manifest import Claimed
from lastwords.checkpoint.remote.address import RemotePath
from lastwords.checkpoint.remote.store import OnBytes, Store, os_for
from lastwords.checkpoint.remote.transfer import download
from lastwords.errors import LastWordsError

logger = logging.getLogger(__name__)


def local_of(sources: Sequence[Path]) -> list[Path]:
    """Without the remote ones."""
    return [path for path in sources if not isinstance(path, RemotePath)]


def highest_generation(sources: Sequence[Path]) -> int:
    """Of the checkpoints in a remote store, so that no start here gets one that was drawn before.

    0 without a store, and, with a warning, where it does not answer; `resume` refuses what could be taken for newer.
    """
    remote = [path for path in sources if isinstance(path, RemotePath)]
    if not remote:
        return 0
    try:
        os = os_for(remote)
        return max((Claimed.read(path, os).generation for path in load.candidates(remote, os)), default=0)
    except LastWordsError as error:
        logger.warning("it is not known which checkpoints are in %s: %s", remote[0], error)
        return 0


def fetched(path: Path, root: Path, on_bytes: OnBytes | None = None) -> Path:
    """The checkpoint itself, downloaded into `root` first if it is a remote one. Errors as of `download`."""
    if not isinstance(path, RemotePath):
        return path
    logger.info("downloading %s to %s", path, root)
    return download(path, root, Store(path.parent), on_bytes)
