"""Every leaf of a rank's state by the name that a user knows it by, as a digest: what `lastwords drill` compares."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from lastwords.checkpoint.storable import Place, is_storable
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.state.extras import ExtrasSnapshot
from lastwords.optim_wrapper.state.object_walk import WHICH
from lastwords.optim_wrapper.state.state_view import buffers_in
from lastwords.optim_wrapper.tensors.tensor_bytes import problem_of, staged_bytes
from lastwords.sharding.dtensor import local_of

Leaves = dict[str, dict[str, str]]
"""Kind ("parameter", "optimizer", ...) -> name -> digest."""

_OF_TORCH = "__composable_api_state_key"
"""In the name of an attribute that is called otherwise in each process."""

_DEPTH = 2
"""Levels of an extra's state that have names of their own."""


def leaves_of(recorder: StepRecorder) -> Leaves:
    """All of this rank's state as it is now. Training thread, between two steps; runs no code of the user's."""
    view = recorder.view
    parameters = view.all_names().parameters
    buffers = buffers_in(view.model, view.called)
    attributes, beside = recorder.attributes.told()
    found = {
        "parameter": {name: digest(one) for name, one in parameters.items()},
        "buffer": {name: digest(one) for name, _, _, one in buffers if one is not None},
        "optimizer": dict(_of_optimizer(recorder)),
        "hyperparameter": dict(_hyperparameters(recorder)),
        "extras": dict(_of_extras(recorder.extras_now)),
        "local_extras": dict(_of_extras(recorder.local_extras_now)),
        "random stream": {name.removeprefix("rng/"): digest(one) for name, one in recorder.streams().items()},
        "attribute": {name: digest(one) for name, one in attributes.items() if _OF_TORCH not in name},
        "variable": {name: digest(without_paths(one)) for name, one in beside.items()},
    }
    return {kind: one for kind, one in found.items() if one}


def _of_optimizer(recorder: StepRecorder) -> Iterator[tuple[str, str]]:
    view = recorder.view
    names = {id(one): name for name, one in view.all_names().parameters.items()}
    numbers = itertools.count()
    for key, state in view.optimizer_state.items():
        where = names.get(id(key)) or (key if isinstance(key, str) else f"state {next(numbers)}")
        for name, value in state.items() if isinstance(state, Mapping) else [("", state)]:
            yield f"{where}.{name}", digest(value)


def _hyperparameters(recorder: StepRecorder) -> Iterator[tuple[str, str]]:
    for number, group in enumerate(recorder.view.optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                yield f"param_groups[{number}].{name}", digest(value)


def _of_extras(snapshot: ExtrasSnapshot) -> Iterator[tuple[str, str]]:
    def named(name: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
        if isinstance(value, Mapping) and value and depth:
            for key, item in value.items():
                yield from named(f"{name}.{key}", item, depth - 1)
        else:
            yield name, digest(value)

    for name, state in snapshot.states.items():
        yield from named(name, state, _DEPTH)


def without_paths(told: Any) -> Any:
    """What a variable holds: an object that it leads to may be met first in whatever other function runs just now."""
    kind = type(told)
    if kind is Place:
        return Place("", told.kind)
    if kind is dict:
        return {key: without_paths(item) for key, item in told.items()}
    return kind(map(without_paths, told)) if kind in (list, tuple) else told


def digest(value: Any) -> str:
    """Of any value: equal for equal bits, in every process. Of what has no bits to be read, its kind."""
    hashed = xxhash.xxh3_64()
    _feed(hashed, value, set())
    return hashed.hexdigest()


def _feed(hashed: xxhash.xxh3_64, value: Any, above: set[int]) -> None:
    kind = type(value)
    hashed.update(kind.__qualname__.encode())
    if isinstance(value, torch.Tensor):
        plain = local_of(value).detach()
        hashed.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        if not problem_of(plain):
            hashed.update(staged_bytes(plain))
        elif plain.layout is not torch.strided and not plain.is_meta:
            hashed.update(staged_bytes(plain.to_dense()))
    elif isinstance(value, np.ndarray) and value.dtype != object:
        hashed.update(f"{value.dtype}{value.shape}".encode())
        hashed.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, bytes | bytearray | memoryview):
        hashed.update(value)
    elif isinstance(value, Place):
        hashed.update(
            f"{value.path} {value.kind.partition(WHICH)[0]}".encode()
        )  # without what is of this process alone
    elif isinstance(value, float | complex | int | str) or value is None:
        hashed.update(repr(value).encode())
    elif id(value) in above:
        hashed.update(b"itself")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _feed(hashed, key, above | {id(value)})
            _feed(hashed, item, above | {id(value)})
    elif isinstance(value, set | frozenset):
        hashed.update("".join(sorted(map(digest, value))).encode())
    elif isinstance(value, list | tuple) or kind.__name__ == "deque":
        hashed.update(str(len(value)).encode())
        for item in value:
            _feed(hashed, item, above | {id(value)})
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            _feed(hashed, getattr(value, one.name, None), above | {id(value)})
    elif is_storable(value):
        hashed.update(repr(value).encode())
