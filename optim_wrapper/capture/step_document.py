"""What a black box says of a step beside its regions: JSON, put together from parts written when it is cheap."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lastwords.checkpoint.storable import pack
from lastwords.optim_wrapper.capture.state_watch import StateWatch
from lastwords.optim_wrapper.state.extras import Extras, ExtrasSnapshot, pack_inline
from lastwords.processor.saver import Position

_log = logging.getLogger(__name__)


def begin(
    position: Position | None,
    last: Position | None,
    names_steps: bool,
    *,
    ahead: bool,
    ends_epoch: bool | None = None,
) -> bytes:
    """The document of a step that the loop calls so, open for more members.

    last: what it called the step before, where this one has no name yet. ahead: the step needs its epoch's start.
    ends_epoch: it is the last one of its epoch; None: not known.

    >>> begin(Position(2, 7), None, True, ahead=False)
    b'{"epoch":2,"step":7,"needs_epoch_start":false'
    """
    needs = b"true" if ahead else b"false"
    if position is not None:
        ends = b"" if ends_epoch is None else b',"ends_epoch":true' if ends_epoch else b',"ends_epoch":false'
        return b'{"epoch":%d,"step":%d,"needs_epoch_start":%s%s' % (*position, needs, ends)
    # What the loop called the last step: null if no step has ended, nothing if it gives no names.
    after = b"[]" if not names_steps else b"null" if last is None else b"[%d,%d]" % last
    return b'{"epoch":null,"step":null,"after":%s,"needs_epoch_start":%s' % (after, needs)


def of_rank(extras: Extras, snapshot: ExtrasSnapshot) -> bytes:
    """The members that hold rank-local extras."""
    inline = pack_inline(extras, snapshot)
    members: dict[str, Any] = {"local_extras": pack(inline.to_json(), "local_extras")}
    if inline.tree.left_out:
        members["reasons"] = inline.tree.reasons
    return b",%s" % json.dumps(members).encode()[1:-1]


def of_extras(step: int, digests: Mapping[str, str]) -> bytes:
    """The member that shows whether extras are the same on all ranks, as of that many steps; empty without extras."""
    return b',"extras":%s' % json.dumps([step, digests]).encode() if digests else b""


def what_differs(extras: Extras, one: ExtrasSnapshot, other: ExtrasSnapshot) -> str:
    """Which rank-local extras are not stored alike in two snapshots."""

    def alone(snapshot: ExtrasSnapshot, name: str) -> bytes:
        return of_rank(extras, dataclasses.replace(snapshot, states={name: snapshot.states[name]}))

    names = [name for name in one.states if alone(one, name) != alone(other, name)]
    return ", ".join(extras.called(names)) or "local_extras"


def alike(watch: StateWatch) -> bytes:
    """The members that show what is alike on all ranks, and the optimizer's numbers that are kept for this one."""
    kind, now, before = watch.state_marks()
    words = f',"state":["{kind}",{now},{before}]'.replace("None", "null").encode()
    return watch.values.members(watch.alike() if watch.copies else {}) + words


def begun(moved: Sequence[str] | None) -> bytes:
    """The members of a loop that says when the next step begins. moved: since the end of this one; None: still there.

    >>> begun(None), begun([]), begun(["rng/torch"])
    (b',"begun":false', b',"begun":true', b',"begun":true,"between":["rng/torch"]')
    """
    if moved is None:
        return b',"begun":false'
    return b',"begun":true,"between":%s' % json.dumps(moved).encode() if moved else b',"begun":true'


def changed_after_the_end(moved: Sequence[str], step: int, *, expected: bool) -> str:
    """Say that this changed after the end of a step; the reason for a death in between.

    expected: the loop says where the next step begins.
    """
    _log.log(
        logging.INFO if expected else logging.WARNING,
        "after step_end() of step %s, %s changed: if a rank is killed before that change, the resume is not "
        "exact; change state that the next step reads before step_end()",
        step,
        ", ".join(moved),
    )
    return f"{', '.join(moved)} changed between step_end() and the next batch in an earlier step"
