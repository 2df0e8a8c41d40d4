"""The moment of a step at which the tentative copy is due: late, but before a collective that lets a peer update.

No peer updates before this rank has contributed every gradient that is reduced over all ranks. So any one of these
will do, at the moment it is ready and not reduced yet. DDP reduces all its parameters' gradients; the hook is put on
the first of them, the last one to be ready, so that also what moves in the loss and in most of the backward pass (a
checkpointed block that is computed again) is in the copy. It is put there once.

Of several DDPs (a GAN) each has its own, and the newest copy counts.

Where it is not certain that this gradient comes in every step (no DDP, or unused parameters are looked for), the
moment is the beginning of the backward pass: a forward hook puts a hook on the model's output, in every step anew,
which costs about 20 us a step instead of 10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lastwords.optim_wrapper.ddp.staying_hook import StayingHook


class BeforeCollective:
    """Calls `act` at that moment, at least once in each step that has a backward pass, from `__init__` to `remove`."""

    def __init__(
        self, model: torch.nn.Module, act: Callable[[], None], ddps: Sequence[DistributedDataParallel] = ()
    ) -> None:
        self._act = act
        self._due = False
        self._hooks: list[Any] = []
        beside = [ddp for ddp in ddps if ddp is not model]
        for module in [model, *beside]:
            always = _always_reduced(module)
            if always is not None:
                self._hooks.append(always.register_hook(self._on_gradient))  # type: ignore[no-untyped-call]
            elif module is not model or not _reduced_by(beside, model):
                self._hooks.append(module.register_forward_hook(StayingHook(self._after_forward)))

    def remove(self) -> None:
        """Take the hooks off again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        self._act()

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        self._due = True
        first = _first_differentiable(output)
        if first is None:
            self._once_a_forward()
        else:
            first.register_hook(self._before_backward)  # type: ignore[no-untyped-call]

    def _before_backward(self, gradient: torch.Tensor) -> None:
        self._once_a_forward()

    def _once_a_forward(self) -> None:
        if self._due:
            self._due = False
            self._act()


def _always_reduced(model: torch.nn.Module) -> torch.nn.Parameter | None:
    """The parameter whose gradient comes last of those that DDP reduces in every step; None if there may be none."""
    if not isinstance(model, DistributedDataParallel):
        return None
    # What is not known for certain (an attribute that is gone) counts against it.
    if getattr(model, "find_unused_parameters", True) or getattr(model, "mixed_precision", True):
        return None
    ignored: set[str] = getattr(model, "parameters_to_ignore", set())
    network: torch.nn.Module = model.module
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and name not in ignored:
            return parameter
    return None


def _reduced_by(ddps: Sequence[DistributedDataParallel], model: torch.nn.Module) -> bool:
    """Whether some of these DDPs reduce every gradient of the model in every step."""
    always = [ddp for ddp in ddps if _always_reduced(ddp) is not None]
    reduced = {id(parameter) for ddp in always for parameter in ddp.parameters()}
    return all(id(parameter) in reduced for parameter in model.parameters() if parameter.requires_grad)


def _first_differentiable(output: Any) -> torch.Tensor | None:
    """Any tensor in a model's output whose gradient will be asked for; tuples, lists, dicts and dataclasses."""
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    if isinstance(output, Mapping):
        items: Any = output.values()
    elif isinstance(output, list | tuple):
        items = output
    elif hasattr(output, "__dict__"):
        items = vars(output).values()
    else:
        return None
    for item in items:
        found = _first_differentiable(item) if not isinstance(item, str | bytes) else None
        if found is not None:
            return found
    return None
