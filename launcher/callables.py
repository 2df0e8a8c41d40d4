"""What is refused in place of the functions that `run` and `keep` take, and how a refusal is said."""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
from collections.abc import Callable

import lastwords
from lastwords.errors import ConfigError
from lastwords.launcher.source_files import installed

SHOWN_CHARS_MAX = 60


def refuse_main(main: Callable[[], object]) -> None:
    """ConfigError for what cannot be the `main` of a script."""
    if not callable(main) or inspect.iscoroutinefunction(main):
        hint = ": write lastwords.run(main), not lastwords.run(main())" if main is None else ""
        raise ConfigError(f"lastwords.run(main) takes a function without arguments, not {shown(main)}{hint}")
    refuse_needed(main, "main", "run(main)")


def refuse_needed(function: Callable[[], object], name: str, call: str) -> None:
    """ConfigError for a function that cannot be called without arguments."""
    needed: list[str] = []
    with contextlib.suppress(ValueError, TypeError):  # one in C may not say what it takes
        needed = [
            one.name
            for one in inspect.signature(function).parameters.values()
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
    if needed:
        raise ConfigError(
            f"{name}() takes {', '.join(needed)}, and lastwords.{call} has nothing to give: wrap it in a function "
            f"without arguments, such as lambda: {name}(arguments)"
        )


def refusal_line(error: BaseException, rank: str) -> str:
    """For whoever reads the output: which rank, the last line of the user's own code on the way to it, and what."""
    others = (*installed(), os.path.realpath(os.path.dirname(lastwords.__file__)) + os.sep)
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not _is_below(one.filename, others)]
    where = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}: " if own else ""
    return f"{f'rank {rank}: ' if rank.isdecimal() else ''}{where}{error}"


def _is_below(path: str, directories: tuple[str, ...]) -> bool:
    """Also where it is reached through a link of the source tree."""
    return path.startswith(os.path.dirname(lastwords.__file__) + os.sep) or os.path.realpath(path).startswith(
        directories
    )


def shown(value: object) -> str:
    """A value in a message: that of a data set may be long."""
    shown = repr(value)
    return shown if len(shown) <= SHOWN_CHARS_MAX else f"{shown[: SHOWN_CHARS_MAX - 3]}..."
