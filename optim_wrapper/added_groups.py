"""Param groups that the saved run added on its way (gradual unfreezing): resume() adds them to the optimizer as well.

Nothing else could: the loop adds them in a step that the resumed run does not come to, and which groups there are
decides which parameters are trained. A loop that adds one of them again is told apart from a mistake, and does no harm.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer

from lastwords.checkpoint.meta import UnitMeta, groups_of
from lastwords.optim_wrapper.joined_optimizer import JoinedOptimizer
from lastwords.sharding import zero

if TYPE_CHECKING:
    from lastwords.optim_wrapper.state.state_view import UnitView

_log = logging.getLogger(__name__)

_adopted: weakref.WeakKeyDictionary[Optimizer, list[frozenset[int]]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def adopted(view: UnitView, metas: Sequence[UnitMeta]) -> Iterator[None]:
    """Inside, and after it, the optimizer has the saved groups that it lacked; where an error comes, it has not.

    metas: of all units of this rank. Nothing is added where that would not make the groups those of the checkpoint
    (a parameter is unknown here, or in a group already), nor to several optimizers, of which any might lack it.
    """
    optimizer = view.optimizer
    before = len(optimizer.param_groups)
    new = _addable(view, metas)
    for number, parameters in enumerate(new, before):
        optimizer.add_param_group({"params": parameters, **_plain_options(metas, number)})
    try:
        yield
    except BaseException:
        del optimizer.param_groups[before:]
        raise
    if new:
        _adopted[optimizer] = [frozenset(map(id, parameters)) for parameters in new]
        _log.info("param groups %s to %s were added, as the saved run had added them", before, before + len(new) - 1)


def came_back(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the loop adds a group that resume() has added: it is there then, with the values that were saved.

    Once for each; a generator of parameters becomes a list in `group`.
    """
    waiting = _adopted.get(optimizer)
    if not waiting or "params" not in group:
        return False
    given = group["params"]
    if not isinstance(given, torch.Tensor | set):
        given = group["params"] = list(given)
    each = [given] if isinstance(given, torch.Tensor) else given
    ids = frozenset(id(one[1] if isinstance(one, tuple) else one) for one in each)  # (name, parameter)
    if ids not in waiting:
        return False
    waiting.remove(ids)
    _log.info("add_param_group(): resume() has already added this group, with the saved values")
    return True


def _addable(view: UnitView, metas: Sequence[UnitMeta]) -> list[list[torch.Tensor]]:
    """Parameters of each group to add; empty if it would not do."""
    optimizer = view.optimizer
    if isinstance(optimizer, JoinedOptimizer) or zero.is_zero(optimizer):
        return []
    names = groups_of(metas)[len(optimizer.param_groups) :]
    known = view.all_names().parameters
    taken = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found: list[list[torch.Tensor]] = []
    for group in names:
        if not group or any(name not in known or name.startswith("~") or id(known[name]) in taken for name in group):
            return []
        found.append([known[name] for name in group])
        taken |= {id(parameter) for parameter in found[-1]}
    return found


def _plain_options(metas: Sequence[UnitMeta], number: int) -> dict[str, Any]:
    """What add_param_group() may ask for; the restore sets all of it, tensors too."""
    for meta in metas:
        if number in meta.group_numbers:
            pairs = meta.groups[meta.group_numbers.index(number)]["dict"]
            return {key: node["plain"] for key, node in pairs if "plain" in node and key != "params"}
    return {}
