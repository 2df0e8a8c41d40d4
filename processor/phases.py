"""The phases of a step as data: which call of the training thread leads where.

`TRANSITIONS` is the whole of it; docs/protocol.md draws the same table. `PARKED` is what a call leads to if the rank
is frozen and has to answer False.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lastwords.errors import ConfigError
from lastwords.vocabulary import Phase, Stand

_COMPUTING, _READY, _UPDATING = Phase.COMPUTING, Phase.READY, Phase.UPDATING
_UPDATED, _SKIPPED, _TORN, _DONE = Phase.UPDATED, Phase.SKIPPED, Phase.TORN, Phase.DONE

TRANSITIONS: Final[Mapping[tuple[Phase, str], Phase]] = {
    (_COMPUTING, "begin_loop"): _COMPUTING,
    (_COMPUTING, "mark_ready"): _READY,
    (_READY, "mark_ready"): _READY,  # the closure ran twice, or the gate was given up and entered again
    (_READY, "try_update"): _UPDATING,
    (_UPDATING, "mark_updated"): _UPDATED,
    (_UPDATING, "mark_torn"): _TORN,
    (_COMPUTING, "mark_corrupt"): _TORN,  # its replicas say that its weights are wrong
    (_UPDATED, "mark_corrupt"): _TORN,  # its loop has trained steps again that are saved already
    (_COMPUTING, "mark_skipped"): _SKIPPED,
    (_READY, "mark_skipped"): _SKIPPED,  # the update itself found that there is nothing to do (found_inf)
    (_READY, "mark_gate_failed"): _READY,  # the gradients can still be applied, if Proceed says so
    (_SKIPPED, "mark_gate_failed"): _SKIPPED,
    (_UPDATED, "try_end_step"): _COMPUTING,
    (_SKIPPED, "try_end_step"): _COMPUTING,
    (_COMPUTING, "try_end_step"): _COMPUTING,  # a step without an update, by way of SKIPPED
    (_COMPUTING, "mark_left"): _DONE,
    (_READY, "mark_left"): _DONE,
    (_DONE, "mark_left"): _DONE,
    (_TORN, "mark_left"): _TORN,  # reported as an exception: these weights are of no step
    (_COMPUTING, "mark_raised"): _COMPUTING,
    (_READY, "mark_raised"): _COMPUTING,  # nobody is left to apply the gradients: N+1 is out of reach
    (_UPDATING, "mark_raised"): _TORN,
    (_UPDATED, "mark_raised"): _UPDATED,
    (_SKIPPED, "mark_raised"): _SKIPPED,
    (_TORN, "mark_raised"): _TORN,
    (_DONE, "mark_raised"): _DONE,
}
"""Phase after a call of the training thread that does not park. Every pair that is missing is a ConfigError."""

PARKED: Final[Mapping[tuple[Phase, str], Phase]] = {
    (_READY, "try_update"): _READY,
    (_UPDATED, "try_end_step"): _UPDATED,
    (_SKIPPED, "try_end_step"): _SKIPPED,
    (_COMPUTING, "try_end_step"): _SKIPPED,
}
"""Phase after a call that answers False because the rank is frozen."""

_MISUSE: Final[Mapping[str, str]] = {
    "begin_loop": "a training loop was started in the middle of a step",
    "mark_ready": "optimizer.step() was called again before the step was ended; call step_end() once after each "
    "step(), also where the loop catches an exception in between",
    "try_update": "an update was entered without READY",
    "mark_updated": "an update was ended that had not begun",
    "mark_torn": "an update was torn that had not begun",
    "mark_skipped": "a step was marked as skipped in which an update took place",
    "mark_corrupt": "weights were found to be wrong in the middle of an update",
    "mark_gate_failed": "a gate failed outside of a step",
    "try_end_step": "step_end() was called in the middle of an update or without a step",
    "mark_left": "the loop was left in the middle of a step; end the step first",
}

ENDED_PHASES: Final = (_COMPUTING, _DONE)
"""Phases whose stand carries the step that was ended; the others carry the one under way."""


def row(method: str) -> tuple[Phase | None, ...]:
    """The entries of TRANSITIONS for one method, indexed by phase: quicker than a dict of pairs."""
    return (None, *(TRANSITIONS.get((phase, method)) for phase in Phase))


def misuse(rank: int, stand: Stand, method: str) -> ConfigError:
    """The error for a call that TRANSITIONS does not have; its text is for the author of the training loop."""
    text = _MISUSE.get(method, "the calls of the training loop are out of order")
    if stand.phase is _TORN:
        text = "an update failed half-way, so the weights belong to no step; this rank cannot continue training"
    elif stand.phase is _DONE:
        text = "the training loop has been left already"
    return ConfigError(f"rank {rank} at {stand}: {text}")
