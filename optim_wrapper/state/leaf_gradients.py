"""The `.grad` of tensors in the dicts among the extras, such as a perturbation that is trained without an optimizer.

They are each rank's own, so they stand among the `local_extras`, once there is a tensor that requires a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lastwords.optim_wrapper.state.own_state import OwnState
from lastwords.optim_wrapper.tensors.value_copies import put_gradient

_DEPTH_MAX = 8


class LeafGradients(OwnState):
    """extras, local_extras: the user's, of which only dicts are looked into; a module's parameters are not meant."""

    def __init__(self, extras: Mapping[str, Any] | None, local_extras: Mapping[str, Any] | None) -> None:
        super().__init__("gradients of extras")
        every = {"extras": extras or {}, "local_extras": local_extras or {}}
        self._dicts = [
            (f"{label}[{name!r}]", one)
            for label, objects in every.items()
            for name, one in objects.items()
            if isinstance(one, dict)
        ]

    def __bool__(self) -> bool:
        """Whether any of them requires a gradient, or has one."""
        return any(one.requires_grad or one.grad is not None for _, one in self._leaves())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Those that there are, by the place of their tensor."""
        return {path: one.grad for path, one in self._leaves() if one.grad is not None}

    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Give each tensor the one that it had, or none."""
        here = dict(self._leaves())
        for path, one in here.items():
            if path not in saved:
                one.grad = None
        for path, gradient in saved.items():
            if path in here and _fits(here[path], gradient):
                put_gradient(here[path], gradient.to(here[path].device))
            else:
                self.say(f"the saved gradient of {path} fits no tensor here")

    def _leaves(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, one in self._dicts:
            yield from _leaves(one, path, 0)


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.is_leaf:
            yield path, value
    elif isinstance(value, dict | list | tuple) and depth < _DEPTH_MAX:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{path}[{key!r}]", depth + 1)


def _fits(tensor: torch.Tensor, gradient: torch.Tensor) -> bool:
    return (tensor.shape, tensor.dtype) == (gradient.shape, gradient.dtype)
