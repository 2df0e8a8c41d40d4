"""What of the program is the user's own: its modules, and the functions that are running on this thread."""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise, takewhile
from typing import Any

_FRAMES_MAX = 32
_STORE_ATTR = dis.opmap["STORE_ATTR"]
_OUTSIDE = frozenset({"torch", "numpy", "lastwords", *sys.stdlib_module_names}) - {"__main__"}
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages, wherever they are: the system's, the user's, those of another environment."""
_MADE_BY_CYTHON = ("_cython_", "cython_runtime")
"""Begin the names of modules in which compiled ones keep what they share."""
_SHOW_LOCALS = frozenset({"locals", "vars"})


def is_of_the_user(names: Mapping[str, Any]) -> bool:
    """Whether a module with these global names is the user's, and not of the library or an installed package."""
    return _is_of_the_user(str(names.get("__name__", "")), str(names.get("__file__") or _without_a_file(names)))


def _without_a_file(names: Mapping[str, Any]) -> str:
    """Where a module comes from that has none: a folder of several packages, or what has made it in memory."""
    maker = sys.modules.get(type(names.get("__loader__")).__module__)
    return next(iter(names.get("__path__", ())), "") or getattr(maker, "__file__", None) or ""


@functools.lru_cache(maxsize=4096)
def _is_of_the_user(module: str, file: str) -> bool:
    if module == "__main__":
        return True
    installed = file.startswith(_INSTALLED) or not _PACKAGES.isdisjoint(file.split(os.sep))
    return not (module.partition(".")[0] in _OUTSIDE or module.startswith(_MADE_BY_CYTHON) or installed)


def is_users(kind: type[Any]) -> bool:
    """Whether a class is the user's own."""
    home = sys.modules.get(str(kind.__module__))
    return home is None or is_of_the_user(vars(home))


def user_modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of the user's modules, and their global names."""
    seen: set[int] = set()
    for name in _user_names(len(sys.modules), next(reversed(sys.modules))):
        # Spawned processes have their script under two names.
        if isinstance(module := sys.modules.get(name), types.ModuleType) and id(names := vars(module)) not in seen:
            seen.add(id(names))
            yield name, names


_users: dict[str, None] = {}
"""Names of modules that were judged to be the user's, in the order of `sys.modules`."""
_last_judged = [""]


@functools.lru_cache(maxsize=1)
def _user_names(count: int, newest: str) -> list[str]:
    """Of modules, once for as long as no other one is imported.

    There are thousands. Those that were judged before are not touched: in a fork that would copy them, one by one.
    """
    new = [*takewhile(_last_judged[0].__ne__, reversed(sys.modules))]  # at once: another thread may import meanwhile
    if len(new) == len(sys.modules):  # the last one that was judged is gone
        _users.clear()
    for name in reversed(new):
        _users.pop(name, None)
        if isinstance(module := sys.modules.get(name), types.ModuleType) and is_of_the_user(vars(module)):
            _users[name] = None
    _last_judged[:] = new[:1] or _last_judged
    return [*_users]


def program_files() -> list[str]:
    """Paths of what another version of the program would differ in: the user's modules, as they were loaded, and the
    packages beside them, each by its first file.
    """
    names = {name for name in [*sys.modules] if not ("." in name or name in sys.stdlib_module_names)}
    found = set()
    for name in names.union(name for name, _ in user_modules()):
        file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")  # one that is loaded later has only that
        if isinstance(file, str) and os.path.isabs(file) and (file.endswith(".py") or name == "__main__"):
            found.add(file)
    return sorted(found)


def named_modules(names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of these names, those of modules, and their global names."""
    for name in names:
        if isinstance(module := sys.modules.get(name), types.ModuleType):
            yield name, vars(module)


def user_frames(thread: int | None = None, *, modules: bool = False) -> list[types.FrameType]:
    """The functions of the user's that are being run on a thread (this one), the outermost first; modules as well."""
    found: list[types.FrameType] = []
    frame = sys._getframe(1) if thread is None else sys._current_frames().get(thread)
    while frame is not None:
        if (modules or frame.f_code.co_name != "<module>") and is_of_the_user(frame.f_globals):
            found.append(frame)
        frame = frame.f_back
    return found[: -_FRAMES_MAX - 1 : -1]


def called(frame: types.FrameType) -> str:
    """The name of a function, the same in every process."""
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"


def locals_of(frame: types.FrameType) -> Mapping[str, Any]:
    """A function's local variables; nothing where it `shows_locals`."""
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:  # a class, whose names are a dict anyway
        return frame.f_locals
    if shows_locals(code):
        return {}
    names: Any = frame.f_locals
    found = dict(names)
    if type(names) is dict:  # up to Python 3.12: it would keep a batch alive that the loop has let go of
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            names.pop(name, None)  # other ones are what `exec()` has made
    return found


@functools.lru_cache(maxsize=4096)
def shows_locals(code: types.CodeType) -> bool:
    """Whether it may call `locals()` or `vars()`, whose dict a look at its variables would write into (Python 3.12)."""
    if sys.version_info >= (3, 13) or _SHOW_LOCALS.isdisjoint(code.co_names):
        return False
    every = [one for one in dis.get_instructions(code) if one.opname != "PRECALL"]
    return any(
        one.opname == "LOAD_GLOBAL"
        and one.argval in _SHOW_LOCALS
        and not (after.opname.startswith("LOAD_") and (one.arg or 0) & 1)  # `vars(args)` is another thing
        for one, after in pairwise(every)
    )


def stored_by(code: types.CodeType) -> Iterator[str]:
    """Attributes that it assigns to. Reads the bytes, as `dis` takes fifty times as long."""
    high = 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = high | low
        if operation == _STORE_ATTR:
            yield code.co_names[argument]
        high = argument << 8 if operation == dis.EXTENDED_ARG else 0
