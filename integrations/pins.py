"""Private names of other libraries: a version, or a line, that nobody has looked at is refused by name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from typing import Any

from lastwords.errors import ConfigError


def check(package: str, versions: str, pinned: Mapping[str, str]) -> None:
    """ConfigError if what is installed is not what an adaptor was made for.

    versions: a specifier such as ">=5.24,<5.25". pinned: names with their module ("transformers.trainer:Trainer.train")
    and the first 16 digits of `digest` of each; "" asks only that it is there.
    """
    from packaging.specifiers import SpecifierSet

    found = importlib.metadata.version(package)
    if found not in SpecifierSet(versions, prereleases=True):
        raise ConfigError(f"lastwords knows {package} {versions}, and {found} is installed: install one that it knows")
    strange = [name for name, known in pinned.items() if not _is_known(name, known)]
    if strange:
        raise ConfigError(
            f"{package} {found} is not what lastwords knows by that version: {', '.join(strange)} "
            f"{'is' if len(strange) == 1 else 'are'} not there, or other code (patched, or overridden); install "
            f"{package} {versions} as it was released"
        )


_MIRRORS = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
"""Packages that are another one's text under their own name."""


def digest(name: str) -> str:
    """Of the source of what this is, without indentation; LookupError if it is not there."""
    source = inspect.getsource(_found(name))
    for mirror, package in _MIRRORS.items():
        source = source.replace(mirror, package)
    return hashlib.sha256("\n".join(line.strip() for line in source.splitlines()).encode()).hexdigest()[:16]


def _is_known(name: str, known: str) -> bool:
    try:
        return digest(name) == known if known else _found(name) is not None
    except (LookupError, ImportError, OSError, TypeError):
        return False


def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        if not hasattr(found, part):
            raise LookupError(name)
        found = getattr(found, part)
    return found
