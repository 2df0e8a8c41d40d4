"""The simulated disk: temporary directories, parts, verification, publication. Contents are step numbers."""

from __future__ import annotations

from lastwords.controller.events import Discard, StartPublish, StartVerify
from tests.sim.ledger import Directory, Publication, Renaming, Written

AttemptKey = tuple[int, int, int, int]
"""target, step, incident, attempt: what the name of a temporary directory is made of (and the generation)."""


class Disk:
    """What is on disk. It outlives the processes; each method is one indivisible change."""

    __slots__ = ("attempts", "generation", "published", "unreadable", "verified")

    def __init__(self, generation: int, older: dict[tuple[int, int], Directory] | None = None) -> None:
        self.generation = generation
        self.attempts: dict[AttemptKey, dict[int, Written]] = {}
        self.published: dict[tuple[int, int], Directory] = dict(older or {})
        self.verified: set[tuple[AttemptKey, tuple[Written, ...]]] = set()
        self.unreadable: set[int] = set()
        """Ranks whose finished files lose a bit before they are verified."""

    def copy(self) -> Disk:
        twin = Disk.__new__(Disk)
        twin.generation = self.generation
        twin.attempts = {key: dict(files) for key, files in self.attempts.items()}
        twin.published = dict(self.published)
        twin.verified = set(self.verified)
        twin.unreadable = set(self.unreadable)
        return twin

    def key(self) -> object:
        """Equal for disks that nobody can tell apart."""
        return (
            tuple(sorted((name, tuple(sorted(files.items()))) for name, files in self.attempts.items())),
            tuple(sorted(self.published.items())),
            tuple(sorted(self.verified)),
        )

    def put(self, target: int, file: Written) -> None:
        """A part and its description are complete and fsynced."""
        name = (target, file.step, file.incident, file.attempt)
        self.attempts.setdefault(name, {})[file.writer] = file

    def gather(self, effect: StartVerify) -> AttemptKey:
        """Move parts that an earlier attempt has finished to those of this one, as the shell does."""
        here = (effect.target, effect.step, effect.incident, effect.attempt)
        for part in effect.parts:
            there = (effect.target, effect.step, effect.incident, part.attempt)
            if there != here and part.rank in self.attempts.get(there, {}):
                self.attempts.setdefault(here, {})[part.rank] = self.attempts[there].pop(part.rank)
        return here

    def verify(self, effect: StartVerify) -> tuple[tuple[int, str], ...]:
        """Problems by the rank that wrote the file; what a reader of headers and checksums can see, no more."""
        name = self.gather(effect)
        files = self.attempts.get(name, {})
        problems: list[tuple[int, str]] = []
        for part in effect.parts:
            file = files.get(part.rank)
            if file is None:
                problems.append((part.rank, "its file is missing"))
            elif not file.whole or part.rank in self.unreadable:
                files[part.rank] = file._replace(whole=False)
                problems.append((part.rank, "a checksum differs"))
            elif file.step != effect.step or set(part.units) - {unit for unit, _, _ in file.units}:
                problems.append((part.rank, "its file is of another step or lacks a unit"))
            elif set(part.local_ranks) - {rank for rank, _ in file.local_steps}:
                problems.append((part.rank, "its file lacks rank-local state"))
        if not problems:
            self.verified.add((name, self._files(name, effect.writers)))
        return tuple(problems)

    def publish(self, effect: StartPublish) -> tuple[Publication, Renaming]:
        """The rename. The manifest has been written into the temporary directory before."""
        name = (effect.target, effect.step, effect.incident, effect.attempt)
        files = self._files(name, tuple(sorted(part.rank for part in effect.parts)))
        before = self.visible()
        units = tuple(sorted({unit for file in files for unit, _, _ in file.units}))
        wanted = {unit for part in effect.parts for unit in part.units}
        whole = all(file.whole for file in files) and len(files) == len(effect.parts) and wanted <= set(units)
        self.published[(effect.target, effect.step)] = Directory(self.generation, effect.step, units, whole)
        publication = Publication(
            self.generation,
            effect.incident,
            effect.attempt,
            effect.step,
            effect.target,
            files,
            effect.lost_local_ranks,
            (name, files) in self.verified,
        )
        self.attempts.pop(name, None)
        return publication, Renaming(before, self.visible())

    def discard(self, effect: Discard) -> None:
        """Remove a temporary directory, if it is there."""
        self.attempts.pop((effect.target, effect.step, effect.incident, effect.attempt), None)

    def unpublished(self) -> set[tuple[int, int, int, str]]:
        """(target, writer, step, unit) of whole files of incidents without a final name."""
        return {
            (target, rank, step, unit)
            for (target, step, incident, _), files in self.attempts.items()
            if incident
            for rank, file in files.items()
            if file.whole
            for unit, _, _ in file.units
        }

    def visible(self) -> tuple[tuple[str, Directory], ...]:
        """What stands under final names."""
        return tuple(
            (f"target {target}, step_{step}", directory) for (target, step), directory in sorted(self.published.items())
        )

    def _files(self, name: AttemptKey, writers: tuple[int, ...]) -> tuple[Written, ...]:
        files = self.attempts.get(name, {})
        return tuple(files[rank] for rank in writers if rank in files)
