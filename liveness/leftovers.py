"""What jobs leave in shared memory when nobody cleaned up: black boxes of other hosts, or of a killed controller.

The controller removes its job's directory on its own host. Everywhere else, and after `kill -9` of the controller, the
directory stays and holds memory until somebody calls this: whoever starts next on the host.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from lastwords import clock
from lastwords.errors import LastWordsError
from lastwords.liveness import paths
from lastwords.liveness.robust_mutex import state_of

_log = logging.getLogger(__name__)

YOUNG_S = 60.0
"""A job that is just starting may have a directory and no life line that is held yet."""


def remove_dead_job_dirs(
    may_be_followed: Callable[[Path], bool], *, root: Path = paths.SHM_ROOT, young_s: float = YOUNG_S
) -> list[Path]:
    """Remove every job directory of this user all of whose ranks on this host have ended; returns what went.

    A directory without any life line, with one that cannot be read, or changed less than `young_s` ago stays. So does
    that of a controller that serves: it may save for ranks of other hosts, and be followed if it is killed. Where one
    was killed that `may_be_followed` by what is in the directory, only the memory of its ranks goes: no rank is left
    that could read it. Harmless at any time and from any process; failures are only logged.
    """
    removed = []
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        _log.warning("cannot look for files of ended jobs in %s: %s", root, error)
        return []
    for name in names:
        found = paths.JOB_DIR.fullmatch(name)
        if found is None or int(found[1]) != os.getuid():
            continue
        path = root / name
        try:
            if not _is_dead(path, young_s):
                continue  # without a look at its lock: a controller that starts there takes it at the first try
            with no_controller_serves(path) as nobody:
                if nobody and _is_dead(path, young_s):
                    followed = may_be_followed(path)
                    paths.remove_job_dir(found[2], int(found[3]), found[4] or "", root=root, followed=followed)
                    removed += [] if followed else [path]
        except (LastWordsError, OSError) as error:
            _log.info("%s is not removed: %s", path, error)
    if removed:
        _log.info("removed files of ended jobs: %s", ", ".join(map(str, removed)))
    return removed


@contextlib.contextmanager
def no_controller_serves(path: Path) -> Iterator[bool]:
    """Whether nobody holds the lock of the job's controller, nor does so before the end of the block. OSError."""
    try:
        fd = os.open(path / paths.LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield True
        return
    with os.fdopen(fd, "rb"):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = True
        except BlockingIOError:
            is_free = False
        try:
            yield is_free
        finally:
            if is_free:
                fcntl.flock(fd, fcntl.LOCK_UN)  # whoever has forked meanwhile would keep it


def _is_dead(path: Path, young_s: float) -> bool:
    found = path.lstat()
    if found.st_uid != os.getuid() or clock.wall_ns() / 1e9 - found.st_mtime < young_s:
        return False
    lives = sorted(path.glob("rank_*.life"))
    return bool(lives) and all(state_of(life) is not None for life in lives)
