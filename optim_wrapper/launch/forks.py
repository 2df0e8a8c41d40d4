"""A forked child has none of its parent's threads, but everything else: it must not act for its parent.

Data loaders, `subprocess` with a `preexec_fn` and scripts of their own fork in the middle of a protected run. In the
child nobody answers: a wait for the controller would never end, a copy of the state would go into the black box of the
parent, and gRPC does not survive a fork. So the child lets go of all of it, before anything else runs in it.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

_living: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[object] = []


def watch(thing: Any) -> None:
    """Call `thing.leave_to_parent()` in every child that is forked from now on: it lets go of what is the parent's.

    It takes no lock, since the lock's holder may be gone.
    """
    _living.add(thing)


def inherited(thing: object) -> None:
    """Keep what a child must not even destroy: the destructors of gRPC wait for threads that are not there."""
    _inherited.append(thing)


def _after_fork_in_child() -> None:
    for thing in list(_living):
        thing.leave_to_parent()
    _living.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
