"""What incidents without a checkpoint have left for a human: finished parts that nobody could publish."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lastwords.checkpoint import layout
from lastwords.checkpoint.system import REAL_OS, Os, storage_errors


@dataclass(frozen=True, slots=True)
class Unpublished:
    """A directory `unpublished-...`. ranks: whose parts are finished; whole: a checkpoint, but for its name."""

    path: Path
    global_step: int
    job: str
    ranks: tuple[int, ...]
    whole: bool


def find_unpublished(root: Path, os: Os = REAL_OS) -> list[Unpublished]:
    """All of them in `root`, the newest step first. Raises StorageError."""
    found = []
    with storage_errors("listing", root):
        for name in os.listdir(root) if os.is_directory(root) else ():
            left = layout.parse_unpublished(name)
            if left is None:
                continue
            ranks = [
                rank
                for entry in os.listdir(root / name)
                if (rank := layout.parse_rank_dir(entry)) is not None
                and os.exists(root / name / entry / layout.PART_NAME)
            ]
            whole = os.exists(root / name / layout.MANIFEST_NAME)
            found.append(Unpublished(root / name, left.global_step, left.job, tuple(sorted(ranks)), whole))
    return sorted(found, key=lambda one: (-one.global_step, one.path.name))
