"""Whether extras are the same on every rank, as they are promised to be: digests of their states are compared.

Before the first step the ranks compare them with each other. Later each rank's black box has digests of now and then,
and whoever resumes compares those of one step.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import xxhash

from lastwords.checkpoint.meta import StepDocument
from lastwords.checkpoint.storable import pack
from lastwords.errors import UnstorableError
from lastwords.optim_wrapper.tensors.tensor_bytes import source_of
from lastwords.optim_wrapper.tensors.tensor_tree import take_apart
from lastwords.sharding.differences import Difference

EVERY = 64
"""Steps after which there are new ones, besides the first, second, fourth, eighth, ... one."""

UNIT = "~extras"
"""Stands where a unit's name stands among digests of units."""

REMEDY = "a resume restores one rank's extras on all ranks; pass state that differs by rank as local_extras="


def digests(states: Mapping[str, Any], apart: Mapping[str, frozenset[str]]) -> dict[str, int]:
    """Digest of each item of each extra's state. apart: keys of those that are kept for each rank.

    What cannot be stored is left out: it is told anyway.

    >>> list(digests({"mine": {"seen": 1, "own": 2}}, {"mine": frozenset({"own"})}))
    ["extras['mine']['seen']"]
    """
    found: dict[str, int] = {}
    for name, state in states.items():
        items = state.items() if isinstance(state, dict) else [(None, state)]
        for key, item in items:
            path = f"extras[{name!r}]" + ("" if key is None else f"[{key!r}]")
            if key in apart.get(name, ()):
                continue
            try:
                found[path] = _digest(item)
            except (UnstorableError, RecursionError):
                continue
    return found


def _digest(item: Any) -> int:
    tree, tensors = take_apart(item, "x", "x")
    hashed = xxhash.xxh3_64(json.dumps(pack(tree)).encode())
    for one in tensors:
        source = source_of(one.tensor, None)
        hashed.update(source() if callable(source) else source)
    return hashed.intdigest()


def text(difference: Difference) -> str:
    """What is said of extras that differ when ranks compare them."""
    more = "" if difference.count == 1 else f" and {difference.count - 1} more"
    ranks = " and ".join(str(camp[0]) for camp in difference.camps)
    return f"{difference.tensor}{more} is not the same on all ranks ({ranks}): {REMEDY}"


def short(found: Mapping[str, int]) -> str:
    """One digest of all of them."""
    return xxhash.xxh3_64(json.dumps(found).encode()).hexdigest()


def differing(said: Mapping[int, StepDocument]) -> list[str]:
    """Reasons out of what the black boxes of ranks say: those of one step are compared.

    >>> one, other = StepDocument(extras=(4, {"ema": "a"})), StepDocument(extras=(4, {"ema": "b"}))
    >>> (reason,) = differing({0: one, 1: other, 2: StepDocument()})
    >>> reason.partition(":")[0]
    "extras['ema'] was not the same on all ranks after 4 steps of the saved run (0 and 1)"
    """
    seen: dict[tuple[int, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, document in sorted(said.items()):
        step, of_names = document.extras or (0, {})
        for name, digest in of_names.items():
            seen[step, name][digest].append(rank)
    return [
        f"extras[{name!r}] was not the same on all ranks after {step} steps of the saved run "
        f"({' and '.join(str(ranks[0]) for ranks in camps.values())}): {REMEDY}"
        for (step, name), camps in sorted(seen.items())
        if len(camps) > 1
    ]


def by_extra(found: Mapping[str, int], names: Mapping[str, Any]) -> dict[str, str]:
    """One digest of each extra, out of those of its items."""
    return {
        name: short({path: digest for path, digest in found.items() if path.startswith(f"extras[{name!r}]")})
        for name in names
    }
