"""What a file system refuses may pass in a moment: which refusals, and how often it is asked again."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import TypeVar

from lastwords.checkpoint.system import UNSUPPORTED, Os
from lastwords.errors import StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAUSES_S = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""8 s between tries: a mount that fails over takes longer, a descriptor does not."""

NO_FILE = frozenset((errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG))
"""What the system says of a thing that is no file, or too large to be the one: it is damage, not a failure to look."""

LASTING = NO_FILE | UNSUPPORTED | {0, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
"""What is refused now is refused again in a moment."""


def patiently(what: Callable[[], T], os: Os, level: int = logging.WARNING) -> T:
    """`what()`, again after growing pauses while it raises a StorageError that may pass; then that error.

    Waits on the caller's thread. level: of what is logged about each try, where that is too common for a warning.
    """
    for pause_s in PAUSES_S:
        try:
            return what()
        except StorageError as error:
            if error.errno in LASTING:
                raise
            logger.log(level, "trying again in %s s: %s", pause_s, error)
            os.pause(pause_s)
    return what()
