"""Random generators that a loader's parts keep for themselves.

torch generators that are found are captured with the others. Python's and numpy's own (`random.Random`,
`numpy.random.default_rng`) are only watched: if one moves in the training process, a resume is not exact and says
so. In workers they do no harm, as every worker begins each epoch with a copy of the one in the training process.
"""

from __future__ import annotations

import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_DEPTH_MAX = 5
_ITEMS_MAX = 64
_OBJECTS_MAX = 5000
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, np.ndarray, type, types.ModuleType)


def own_generators(loader: Any) -> Iterator[tuple[str, Any]]:
    """(place, generator) of every generator object below a loader's dataset, samplers and collate function, once."""
    seen: set[int] = {id(loader)}
    for name in ("dataset", "collate_fn", "sampler", "batch_sampler"):
        part = getattr(loader, name, None)
        if part is not None:
            yield from _walk(part, name, 0, seen)
    if not hasattr(loader, "dataset"):
        seen.discard(id(loader))
        yield from _walk(loader, "loader", 0, seen)


def _walk(value: Any, place: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _PLAIN) or id(value) in seen or depth > _DEPTH_MAX or len(seen) > _OBJECTS_MAX:
        return
    seen.add(id(value))
    if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
        yield place, value
        return
    if isinstance(value, types.MethodType):
        yield from _walk(value.__self__, place, depth + 1, seen)
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                inside = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            yield from _walk(inside, f"{place}.{name}", depth + 1, seen)
    elif isinstance(value, dict):
        if len(value) <= _ITEMS_MAX:
            for key, item in list(value.items()):
                yield from _walk(item, f"{place}[{key!r}]", depth + 1, seen)
    elif isinstance(value, list | tuple):
        if len(value) <= _ITEMS_MAX:
            for index, item in enumerate(value):
                yield from _walk(item, f"{place}[{index}]", depth + 1, seen)
    else:
        for name, item in list(getattr(value, "__dict__", {}).items()):
            yield from _walk(item, f"{place}.{name}", depth + 1, seen)


class OwnStreams:
    """Watches generators that are not captured for whether they move in the training process."""

    def __init__(self, loader: Any) -> None:
        self._watched = {
            place: (generator, _state(generator))
            for place, generator in own_generators(loader)
            if not isinstance(generator, torch.Generator)
        }
        self._looks = 0

    def look(self) -> list[str]:
        """Places of generators that have moved, each told once. Looks at the first steps and at every 64th."""
        if not self._watched:
            return []
        self._looks += 1
        if self._looks > 4 and self._looks % 64:
            return []
        moved = [place for place, (generator, state) in self._watched.items() if _state(generator) != state]
        for place in moved:
            del self._watched[place]
        return moved


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    raw = generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state(False)
    return repr(raw) if not _holds_array(raw) else {key: _plain(item) for key, item in raw.items()}


def _holds_array(raw: Any) -> bool:
    return isinstance(raw, dict) and any(_holds_array(item) or isinstance(item, np.ndarray) for item in raw.values())


def _plain(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _plain(inner) for key, inner in item.items()}
    return item.tobytes() if isinstance(item, np.ndarray) else item
