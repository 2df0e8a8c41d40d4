"""A communication hook's state is named wherever the hook keeps it, and hooks without any are not suspected."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lastwords.optim_wrapper.ddp.ddp_order import hidden_states
from tests import golden

ERRORS: dict[int, torch.Tensor] = {}
COUNT = 0
SCALE = 0.5


def told(hook: Any, state: object = None) -> list[str]:
    ddp: Any = SimpleNamespace(_comm_hooks=[(hook, state)])
    return hidden_states(ddp)


class Feedback:
    def __init__(self) -> None:
        self.error: dict[int, torch.Tensor] = {}

    def hook(self, state: object, bucket: Any) -> Any:
        return self.error

    def __call__(self, state: object, bucket: Any) -> Any:
        return self.error

    @staticmethod
    def plain(state: object, bucket: Any) -> Any:
        return bucket


def global_dict(state: object, bucket: Any) -> Any:
    ERRORS[bucket.index()] = bucket.buffer()


def global_count(state: object, bucket: Any) -> Any:
    global COUNT
    COUNT += 1


def scaled(state: object, bucket: Any) -> Any:
    return default_hooks.allreduce_hook(None, bucket).then(lambda done: done.value()[0] * SCALE)


def with_default(state: object, bucket: Any, kept: list[Any] = []) -> Any:  # noqa: B006
    kept.append(bucket)


def through(state: object, bucket: Any) -> Any:
    return global_dict(state, bucket)


def closure(kept: Any) -> Any:
    def hook(state: object, bucket: Any) -> Any:
        return kept, bucket

    return hook


def counting() -> Any:
    count = 0

    def hook(state: object, bucket: Any) -> Any:
        nonlocal count
        count += 1

    return hook


def with_attribute(state: object, bucket: Any) -> Any:
    return bucket


with_attribute.errors = {}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("hook", "where"),
    [
        (Feedback().hook, "the Feedback that it is a method of"),
        (Feedback(), "the Feedback that is called"),
        (closure({}), "'kept', a dict"),
        (closure([torch.zeros(1)]), "'kept', a list"),
        (closure(torch.zeros(1)), "'kept', a Tensor"),
        (closure(Feedback().hook), "'kept', a method"),
        (counting(), "'count', which it reassigns"),
        (functools.partial(scaled, {}), "a dict, an argument"),
        (functools.partial(global_dict), "'ERRORS', a dict"),
        (global_dict, "'ERRORS', a dict"),
        (global_count, "'COUNT', which it reassigns"),
        (through, "'global_dict', a function"),
        (with_default, "'kept', a list"),
        (with_attribute, "'errors', a dict"),
    ],
)
def test_state_that_no_checkpoint_has_is_named(hook: Any, where: str) -> None:
    found = told(hook)
    assert len(found) == 1
    assert where in found[0]


@pytest.mark.parametrize(
    "hook",
    [
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        default_hooks.bf16_compress_hook,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),  # type: ignore[no-untyped-call]
        powerSGD_hook.powerSGD_hook,
        powerSGD_hook.batched_powerSGD_hook,
        scaled,
        closure(0.5),
        closure((1, "two", None, torch.float16)),
        closure(scaled),
        functools.partial(scaled, None),
        Feedback.plain,
    ],
)
def test_a_hook_without_state_is_not_suspected(hook: Any) -> None:
    assert told(hook) == []


def test_a_state_that_is_given_to_the_hook_is_named() -> None:
    state = powerSGD_hook.PowerSGDState(None)  # type: ignore[no-untyped-call]
    golden.says(told(powerSGD_hook.powerSGD_hook, state)[0])


def test_a_hook_of_the_buffers_is_looked_at_too() -> None:
    of_buffers = SimpleNamespace(buffer_comm_hook=Feedback().hook, buffer_comm_hook_state=None)
    ddp: Any = SimpleNamespace(_comm_hooks=[], buffer_hook=of_buffers)
    golden.says(hidden_states(ddp)[0])
