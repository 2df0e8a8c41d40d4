"""What a script's imports take before its training loop begins: each recovery takes as long again, without --preload.

The times are those of the modules that the script itself imports, with all that they import in turn.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from lastwords.clock import mono_s

NAMED_S, NAMES_MAX = 0.05, 5
"""How long a module takes that is named, and how many are."""

OWN = ("lastwords", "grpc")
"""What lastwords imports for itself, late, since a fork cannot take gRPC over."""

IMPORTS = "_find_and_load_unlocked"
"""The function of importlib that imports a module which is not there yet; two calls above a finder."""


class ImportTimes:
    """A finder that finds nothing of its own. left_out: modules that cannot be preloaded. One thread imports at a time.

    It is in sys.meta_path from `begin` to `end`. No function of it is on the stack while a module is executed, so no
    traceback shows it.
    """

    def __init__(self, left_out: Iterable[str] = ()) -> None:
        self._left_out = frozenset({*OWN, *left_out})
        self._seconds: dict[str, float] = {}
        self._under_way = ""
        self._begun_s = 0.0

    def begin(self) -> None:
        """The script begins."""
        sys.meta_path.insert(0, self)

    def end(self) -> Mapping[str, float]:
        """Its training loop begins: what has taken longest until now, in the order of the imports. Later: nothing."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        seconds, self._seconds = self._seconds, {}
        # Who imports a module imports its package first.
        within = {name: [other for other in seconds if other.startswith(f"{name}.")] for name in seconds}
        for name in sorted(seconds, key=len):
            if within[name]:
                seconds[within[name][0]] += seconds.pop(name)
        longest = sorted(seconds, key=lambda name: -seconds[name])[:NAMES_MAX]
        return {name: round(s, 3) for name, s in seconds.items() if name in longest and s >= NAMED_S}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """That of the first other finder that has one; it says when the module begins and ends.

        Of no interest is who only looks for a module: `importlib.util.find_spec`, or runpy for the script itself.
        """
        if self._under_way or sys._getframe(2).f_code.co_name != IMPORTS or self._is_left_out(name):
            return None
        for finder in [*sys.meta_path]:
            if finder is not self and (find := getattr(finder, "find_spec", None)) is not None:
                spec: ModuleSpec | None = find(name, path, target)
                if spec is not None:
                    if type(spec) is ModuleSpec:
                        spec.__class__ = _Timed
                        spec.__dict__["times"] = self
                    return spec
        return None

    def _is_left_out(self, name: str) -> bool:
        return name.partition(".")[0] in sys.stdlib_module_names or any(
            name == other or name.startswith(f"{other}.") for other in self._left_out
        )

    def is_executed(self, name: str, *, begins: bool) -> None:
        """This module is from now on, or has been."""
        if begins and not self._under_way:
            self._under_way, self._begun_s = name, mono_s()
        elif not begins and self._under_way == name:
            self._under_way = ""
            if name in sys.modules:  # it was imported
                self._seconds[name] = mono_s() - self._begun_s


class _Timed(ModuleSpec):
    """Of a module that is not yet imported: the import system notes there when it executes it, and when no more."""

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__["_initializing"])

    @_initializing.setter
    def _initializing(self, begins: bool) -> None:
        self.__dict__["_initializing"] = begins
        times: ImportTimes = self.__dict__["times"]
        if not begins:
            del self.__dict__["times"]
            self.__class__ = ModuleSpec  # type: ignore[assignment]
        times.is_executed(self.name, begins=begins)
