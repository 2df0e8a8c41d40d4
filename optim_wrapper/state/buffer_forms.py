"""Buffers that get another shape or type while a model trains: observers that resize theirs, growing caches.

A checkpoint names them, since a new model has them in their first form and would be taken for another model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lastwords.optim_wrapper.tensors.tensor_bytes import problem_of
from lastwords.sharding.dtensor import local_of

Form = tuple[torch.dtype, tuple[int, ...]]


class BufferForms:
    """The forms that a model's buffers have now. called: makes names of the job of the model's own."""

    def __init__(self, model: torch.nn.Module, called: Callable[[str], str]) -> None:
        self._model = model
        self._called = called
        self._first = self._forms()

    def changed(self) -> list[str]:
        """Names of those that have another form since, or are there only since then. Any thread."""
        return sorted(name for name, form in self._forms().items() if self._first.get(name) != form)

    def _forms(self) -> dict[str, Form]:
        return {
            self._called(f"{prefix}.{key}".replace("_orig_mod.", "") if prefix else key): (
                buffer.dtype,
                tuple(buffer.shape),
            )
            for prefix, module in self._model.named_modules()
            for key, buffer in list(module._buffers.items())
            if buffer is not None and not problem_of(local_of(buffer), meta=True)
        }


def put(table: dict[str, torch.Tensor | None], key: str, buffer: torch.Tensor) -> None:
    """Give a module's buffer this content and form. It stays the same tensor where it can: DDP has a list of them.

    >>> module = torch.nn.BatchNorm1d(2)
    >>> before = module.running_mean
    >>> put(module._buffers, "running_mean", torch.ones(3))
    >>> before is module.running_mean, before
    (True, tensor([1., 1., 1.]))
    """
    live = table.get(key)
    if (
        live is None
        or live.is_inference()
        or type(live) is not type(buffer)
        or (live.dtype, live.device) != (buffer.dtype, buffer.device)
    ):
        table[key] = buffer
    else:
        live.data = buffer
