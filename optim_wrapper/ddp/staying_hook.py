"""Hooks on the user's model that stay with it: a copy or a pickle of the model has a function there that does nothing.

`best = copy.deepcopy(model)`, `AveragedModel(model)` and `torch.save(model)` take a module's hooks along. Ours hold
on to the black box, which can be neither copied nor pickled, and would count the copy's passes as the model's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from lastwords.torch_private import in_transform


class StayingHook:
    """Calls `act`, but in no transform of torch.func, where nothing may be copied; for `register_forward_hook`.

    >>> import copy
    >>> hook = StayingHook(print)
    >>> hook("called"), copy.deepcopy(hook)("not called")
    called
    (None, None)
    """

    def __init__(self, act: Callable[..., Any]) -> None:
        self._act = act

    def __call__(self, *args: Any) -> Any:
        return None if in_transform() else self._act(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of the standard library that takes anything and returns None: who loads the model needs no
        # lastwords for it.
        return getattr, (contextlib.nullcontext(), "__exit__")
