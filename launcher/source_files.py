"""The files of the user's own code that this process has imported."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import sysconfig
from pathlib import Path

SOURCES_MAX = 4000
"""Files of the user's code that are compared between a replacement and the other ranks."""


def installed() -> tuple[str, ...]:
    """Directories, as prefixes of real paths, in which no file is the user's own."""
    return tuple({os.path.realpath(path) + os.sep for path in sysconfig.get_paths().values()})


def source_digests() -> dict[str, str]:
    """Of the files of the user's own code that are imported by now, by path; installed packages are left out."""
    others = installed()
    found = {}
    for module in [*sys.modules.values()]:
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.endswith(".py") and not os.path.realpath(path).startswith(others):
            with contextlib.suppress(OSError):
                found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    return dict([*found.items()][:SOURCES_MAX])
