"""`lastwords run --auto`: an unchanged script with a Trainer of transformers or lightning is protected and healed.

Under torchrun `import lastwords.auto`, before anything else in the script, does the same, and the job goes on when it
is started again. What is known of each library is in `integrations.hf` and `integrations.lightning`; a version that is
not known is refused by name. Of any other script last words are saved, and nothing is resumed (`save_only`): resuming a
loop by guessing what belongs to it goes wrong in silence.
"""

from __future__ import annotations

import ast
import atexit
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lastwords.errors import ConfigError
from lastwords.integrations.save_only import UnknownLoop
from lastwords.processor.departure import say

DIRECTORY = "last_words"
"""Below the directory that a Trainer writes into."""

LIBRARIES = {
    "transformers": "transformers.trainer",
    "lightning": "lightning.pytorch",
    "pytorch_lightning": "pytorch_lightning",
}
"""What is known, and what of it takes long to import."""

_TRAINS = "a script trains once with --auto, and this one begins again: use lastwords.protect() in it"

_trained: list[Any] = []


def imported_by(script: str, names: Collection[str]) -> list[str]:
    """Which of these packages a script imports anywhere. Empty for what is no file of Python."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    found: set[str] = set()
    for one in ast.walk(tree):
        if isinstance(one, ast.Import):
            found |= {alias.name for alias in one.names}
        elif isinstance(one, ast.ImportFrom) and one.module and not one.level:
            found.add(one.module)
    found.discard("lastwords.auto")
    return [name for name in names if any(one.partition(".")[0] == name for one in found)]


def install(script: str = "") -> None:
    """Trainers are protected from now on. script: what runs; one that uses lastwords itself is left alone."""
    if any(isinstance(one, _Finder) for one in sys.meta_path):
        return
    if script and imported_by(script, ["lastwords"]):
        _say(f"{script} uses lastwords itself, so --auto does nothing")
        return
    for name, patch in _PATCHES.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _Finder())
    atexit.register(_say_if_nothing)
    _loop.install()


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        say(f"lastwords: {text}")


def _say_if_nothing() -> None:
    if not _trained and not _loop.is_seen:
        _say(
            f"--auto has found neither a Trainer of {' or '.join(LIBRARIES)} that trains nor a model in "
            "DistributedDataParallel, so nothing was protected: in a loop of your own it takes three lines (protect, "
            "resume, steps; see the README)"
        )


def _begins(trainer: Any) -> None:
    if _trained:
        raise ConfigError(_TRAINS)
    _trained.append(trainer)
    _loop.is_known = True


_loop = UnknownLoop(DIRECTORY, _say)


# ---------------------------------------------------------------------- the libraries


def _patch_transformers(module: ModuleType) -> None:
    trainer: Any = module.Trainer
    plain = trainer.train

    @functools.wraps(plain)
    def train(self: Any, *of: Any, **more: Any) -> Any:
        from lastwords.integrations import hf

        if not hf.is_protected(self):
            _begins(self)
            hf.protect(self, Path(self.args.output_dir) / DIRECTORY)
        return plain(self, *of, **more)

    trainer.train = train


def _patch_lightning(module: ModuleType) -> None:
    trainer: Any = module.Trainer
    plain = trainer.fit
    ours = "pytorch_lightning" if module.__name__.startswith("pytorch_lightning") else "lightning"

    @functools.wraps(plain)
    def fit(self: Any, *of: Any, **more: Any) -> Any:
        last_words = importlib.import_module(f"lastwords.integrations.{ours}").LastWords
        if not any(isinstance(one, last_words) for one in self.callbacks):
            _begins(self)
            self.callbacks.append(last_words(Path(self.default_root_dir) / DIRECTORY))
        return plain(self, *of, **more)

    trainer.fit = fit


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "transformers.trainer": _patch_transformers,
    "lightning.pytorch.trainer.trainer": _patch_lightning,
    "pytorch_lightning.trainer.trainer": _patch_lightning,
}
"""Modules, and what is done with each once it is there."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finds these modules as everybody else does, and patches them once they are there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _PATCHES:
            return None
        others = (one for one in sys.meta_path if one is not self)
        spec = next((found for one in others if (found := one.find_spec(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            plain = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                plain(module)
                _PATCHES[fullname](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
