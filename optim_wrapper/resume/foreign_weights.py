"""Weights that a rank has although other ranks hold their unit.

ZeroRedundancyOptimizer's owners bring everybody's weights up to date in `step()`, but the first forward pass of a
resumed run comes before it. A rank may own no parameter of a group, and yet shows its hyperparameters to schedulers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.layout import unit_tensor_name
from lastwords.checkpoint.meta import Tree, UnitMeta
from lastwords.errors import FormatError, MismatchError
from lastwords.optim_wrapper.resume.state_restore import (
    Reading,
    fill_group,
    mismatch_text,
    saved_and_here,
    stored_shape,
)
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.optim_wrapper.tensors.tensor_bytes import dtype_name, dtype_named
from lastwords.optim_wrapper.tensors.tensor_tree import tensor_nodes


class ForeignWeights(Reading):
    """Those weights out of the file of the unit that has them, and the hyperparameters of their groups.

    Used like a `RestorePlan`. Raises MismatchError where the saved weights are of another form.
    """

    def __init__(
        self, view: UnitView, unit: str, names: Iterable[str], specs: Iterable[TensorSpec], meta: UnitMeta
    ) -> None:
        super().__init__()
        every = view.all_names()
        here = every.parameters
        saved = {spec.name: spec for spec in specs}
        missing, different = [], {}
        for name in names:
            stored = unit_tensor_name(unit, "model", name)
            if stored not in saved:
                missing.append(name)
            elif not view.same_part(saved[stored], name, here[name]):
                live = view.spec_of(stored, name, here[name])
                different[name] = saved_and_here(saved[stored], dtype_name(here[name].dtype), live, here[name])
            else:
                self._targets[stored] = here[name]
        if missing or different:
            raise MismatchError(
                mismatch_text(type(view.model).__name__, missing, [], different), missing=missing, different=different
            )
        self._groups: list[tuple[dict[str, Any], Tree]] = []
        number_of = {name: number for number, group in enumerate(every.groups) for name in group}
        for group_names, tree in zip(meta.group_parameters, meta.groups, strict=True):
            number = number_of.get(group_names[0]) if group_names else None
            group = None if number is None else view.optimizer.param_groups[number]
            if group is not None:
                self._groups.append((group, tree))
                for stored, leaf in tensor_nodes(tree, "hyperparameters").items():
                    if stored not in saved:
                        raise FormatError(f"the unit's JSON names the tensor {stored!r}, but it is not in the file")
                    shape = stored_shape(saved[stored], leaf["dtype"])
                    self._targets[stored] = torch.empty(shape, dtype=dtype_named(leaf["dtype"]))

    def commit(self) -> None:
        """After everything has been read: what could not be read in place, and hyperparameters."""
        super().commit()
        for group, tree in self._groups:
            fill_group(group, tree, self._targets, "hyperparameters")
