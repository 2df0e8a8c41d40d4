"""Whether all ranks run the same version of the user's code, pure.

Each rank says one digest of all its files. The list of them, which may be long, is asked of one rank for each digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sources:
    """The answer to `Ask`: a digest of each file of the user's code that `rank` has imported, by path."""

    rank: int
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ask:
    """`rank` says its `Sources`: no other rank with the same digest has."""

    rank: int


@dataclass(slots=True)
class Versions:
    """What is known of the files behind each digest. "" is that of a rank that has none."""

    _known: set[str] = field(default_factory=lambda: {""})
    _files: dict[str, str] = field(default_factory=dict)
    _held: dict[str, dict[int, None]] = field(default_factory=dict)
    """Ranks that wait until the files behind their digest are known, by digest; the first one was asked for them."""

    def knows(self, version: str) -> bool:
        """Whether its files have been compared with those of the others."""
        return version in self._known

    def hold(self, rank: int, version: str) -> tuple[int, ...]:
        """`rank` waits for what becomes of `version`. Who is to be asked for its files, unless that has been done."""
        held = self._held.setdefault(version, {})
        held[rank] = None
        return (rank,) if len(held) == 1 else ()

    def ended(self, rank: int) -> tuple[int, ...]:
        """The process of `rank` has ended. Who is to be asked in its place."""
        for version, held in [*self._held.items()]:
            if rank in held:
                was_asked = next(iter(held)) == rank
                del held[rank]
                if not held:
                    del self._held[version]
                return (*held,)[:1] if was_asked else ()
        return ()

    def compare(self, rank: int, files: Mapping[str, str]) -> tuple[str | None, tuple[int, ...]]:
        """The files of `rank`: one of which the others have another version, and the ranks that wait no longer."""
        version = next((version for version, held in self._held.items() if rank in held), None)
        if version is None:
            return None, ()
        changed = next((path for path, digest in files.items() if self._files.setdefault(path, digest) != digest), None)
        if changed is not None:
            return changed, ()
        self._known.add(version)
        return None, tuple(self._held.pop(version))
