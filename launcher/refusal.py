"""How a process ends that lastwords refuses: one line, and an exit code of its own."""

from __future__ import annotations

import os
import sysconfig
import traceback

import lastwords
from lastwords.errors import BusyError

EXIT_REFUSED, EXIT_BUSY = 2, 5
"""Those of the command `lastwords` for the same errors."""


def exit_code_of_refusal(error: BaseException) -> int:
    """Of a ConfigError or a BusyError."""
    return EXIT_BUSY if isinstance(error, BusyError) else EXIT_REFUSED


def refusal_line(error: BaseException, rank: str) -> str:
    """For whoever reads the output: which rank, the last line of the user's own code on the way to it, and what."""
    others = (*_installed(), os.path.realpath(os.path.dirname(lastwords.__file__)) + os.sep)
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not _is_below(one.filename, others)]
    where = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}: " if own else ""
    return f"{f'rank {rank}: ' if rank.isdecimal() else ''}{where}{error}"


def _installed() -> tuple[str, ...]:
    """Directories, as prefixes of real paths, in which no file is the user's own."""
    return tuple({os.path.realpath(path) + os.sep for path in sysconfig.get_paths().values()})


def _is_below(path: str, directories: tuple[str, ...]) -> bool:
    """Also where it is reached through a link of the source tree."""
    if path.startswith("<"):  # frozen, or of the fork server's command line
        return True
    return path.startswith(os.path.dirname(lastwords.__file__) + os.sep) or os.path.realpath(path).startswith(
        directories
    )
