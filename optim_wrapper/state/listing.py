"""Whether a model and an optimizer are still made of what they were: a fraction of the time that it takes to list it.

To list thousands of tensors with their names, forms and places takes tens of milliseconds. Nearly always the list is
the one of the step before. What it is made from is kept, so no other object can have the same identity; and compared by
identity, name by name, with what is there now. Numbers that change stay out of a list: it has tensors only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from lastwords.optim_wrapper.joined_optimizer import state_of
from lastwords.optim_wrapper.tensors.tensor_places import TensorPlaces
from lastwords.optim_wrapper.tensors.tensor_tree import ATOMS, inner_names
from lastwords.sharding.dtensor import is_dtensor, local_of
from lastwords.torch_private import non_persistent


class Listing:
    """Of what these objects are made. tensors: all that their list depends on."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, tensors: Iterable[torch.Tensor]) -> None:
        self._modules = [*model.modules()]
        self._optimizer = optimizer
        self._tensors = [*tensors]
        self._locals = [*map(local_of, self._tensors)]
        self._parts = [(one, local) for one, local in zip(self._tensors, self._locals, strict=True) if is_dtensor(one)]
        self._found, self._names = self._now(state_of(optimizer))
        self._forms = self._formed()
        self._unsaved = self._volatile()
        self._places = TensorPlaces(self._locals).settle()

    @staticmethod
    def suits(state: Mapping[Any, Any], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether identities tell: of a list in the optimizer's state, or a tensor around others, they do not."""
        states = [*state.values()]
        return (
            all(type(state) is dict for state in states)
            and all(
                type(one) in ATOMS or (isinstance(one, torch.Tensor) and not inner_names(one))
                for state in states
                for one in [*state.values()]
            )
            and all(
                local.layout is torch.strided and not local.is_complex() and not local.is_inference()
                for local in map(local_of, tensors)
            )
        )

    def still(self, optimizer: Optimizer) -> bool:
        """Whether all is as it was. optimizer: that of now."""
        state = state_of(optimizer)
        if optimizer is not self._optimizer or not all(type(one) is dict for one in [*state.values()]):
            return False
        found, names = self._now(state)
        return (
            len(found) == len(self._found)
            and all(map(is_, found, self._found))
            and names == self._names
            and all(local_of(one) is local for one, local in self._parts)
            and self._places.still()
            and self._formed() == self._forms
            and self._volatile() == self._unsaved
        )

    def _now(self, state: Mapping[Any, Any]) -> tuple[list[Any], list[Any]]:
        """Each object in each place, and the places' names."""
        tables = [*self._tables(), *state.values()]
        members = [group["params"] for group in self._optimizer.param_groups]
        objects = [*tables, *state, *chain.from_iterable(map(dict.values, tables))]
        names = [*chain.from_iterable(tables), *map(len, tables), *map(len, members)]
        return [*objects, *chain.from_iterable(members)], names

    def _tables(self) -> Iterator[dict[Any, Any]]:
        for module in self._modules:
            yield module._modules
            yield module._parameters
            yield module._buffers

    def _formed(self) -> list[Any]:
        return [
            (local.shape, local.stride(), local.dtype, local.is_neg(), type(one), one.requires_grad)
            for one, local in zip(self._tensors, self._locals, strict=True)
        ]

    def _volatile(self) -> list[Any]:
        return [frozenset(non_persistent(module)) for module in self._modules]
