"""Units that a user declares, for layouts that cannot be seen from the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lastwords.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that exactly the ranks `holders` hold, bit for bit the same.

    tensors: patterns (fnmatch) over names of parameters and buffers. The first declared unit that a rank holds and
    whose patterns match takes the tensor.
    """

    name: str
    holders: tuple[int, ...]
    tensors: tuple[str, ...] = ("*",)


def check_units(units: Sequence[Unit], world_size: int) -> None:
    """ConfigError for declarations that contradict themselves or the job."""
    for unit in units:
        if not unit.holders or not all(0 <= rank < world_size for rank in unit.holders):
            raise ConfigError(f"unit {unit.name!r} has the holders {unit.holders} in a job of {world_size} ranks")
