"""Whether a checkpoint of this job fits into the directories that it is to be saved in, looked at when it starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.errors import StorageError

_log = logging.getLogger(__name__)


_COPIES = {
    "ASGD": 1, "Adadelta": 2, "Adafactor": 0, "Adagrad": 1, "Adamax": 2, "LBFGS": 4, "Muon": 1, "NAdam": 2, "RAdam": 2,
    "RMSprop": 1, "Rprop": 2,
}  # fmt: skip
"""Tensors as large as the weight that torch's optimizers keep for it; LBFGS: and two for each step of its history."""


def checkpoint_bytes(weight_bytes: int, held_bytes: int, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """An estimate of a checkpoint's size: weights and buffers, and what the optimizers keep for those that they train.

    weight_bytes: of the whole job; held_bytes: of those, this rank's, whose share of trained weights counts for all.

    >>> weight = torch.nn.Parameter(torch.zeros(25))
    >>> [checkpoint_bytes(100, 100, [make([weight])]) for make in (torch.optim.AdamW, torch.optim.SGD)]
    [300, 100]
    """
    kept = sum(_kept_bytes(optimizer) for optimizer in optimizers)
    return round(weight_bytes * (1 + kept / held_bytes)) if held_bytes else weight_bytes


def _kept_bytes(optimizer: torch.optim.Optimizer) -> int:
    copies = _copies(type(getattr(optimizer, "optim", optimizer)).__name__, optimizer.defaults)  # ZeRO's is inside
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return copies * sum(_held_bytes(parameter) for parameter in parameters if parameter.requires_grad)


def _held_bytes(parameter: torch.Tensor) -> int:
    """Of a DTensor only this rank's piece."""
    with torch.no_grad():
        piece = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(piece.numel()) * piece.element_size()


def _copies(name: str, defaults: dict[str, Any]) -> int:
    """Of an unknown optimizer its arguments tell: `betas` make two, `amsgrad` one more, `momentum` one, else none."""
    if name == "LBFGS":
        return _COPIES[name] + 2 * int(defaults.get("history_size", 0))
    if name == "RMSprop":
        return _COPIES[name] + bool(defaults.get("momentum")) + bool(defaults.get("centered"))
    if name in _COPIES:
        return _COPIES[name]
    return (2 if "betas" in defaults else bool(defaults.get("momentum"))) + bool(defaults.get("amsgrad"))


def check_space(roots: Sequence[Path], needed_bytes: int, *, require: bool, os: Os = REAL_OS) -> None:
    """Warn of each directory that has no room for a checkpoint; StorageError if none has and `require` is set."""
    problems = []
    for root in roots:
        try:
            free_bytes = os.free_bytes(root)
        except OSError:
            continue  # a file system that does not say; it will when something is written
        if free_bytes < needed_bytes:
            problems.append(
                f"a checkpoint of this job needs about {_size(needed_bytes)} (an estimate), and {root} has "
                f"{_size(free_bytes)} free"
            )
    if require and len(problems) == len(roots):
        raise StorageError(
            f"{'; '.join(problems)}: an emergency checkpoint could not be saved; free some space or choose "
            f"another directory (LASTWORDS_REQUIRE_SPACE=0 starts anyway)"
        )
    for problem in problems:
        _log.warning("%s: free some space, or set fallback_path", problem)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
