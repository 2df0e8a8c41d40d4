"""What is refused in place of the functions that `run` and `keep` take."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable

from lastwords.errors import ConfigError

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


def shown(value: object) -> str:
    """A value in a message: that of a data set may be long."""
    shown = repr(value)
    return shown if len(shown) <= SHOWN_CHARS_MAX else f"{shown[: SHOWN_CHARS_MAX - 3]}..."
