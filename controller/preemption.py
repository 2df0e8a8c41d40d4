"""The time that a platform leaves between a signal and SIGKILL, and how the waits of an incident are cut to fit. Pure.

Only waits after which something else can be done are cut: a rank that does not settle is left out, another one writes,
the fallback directory is used. If nothing can be saved without the rank that is late, it has the usual time, and what
a file system refuses is tried again for the usual time, until the end.
"""

from __future__ import annotations

from dataclasses import replace

from lastwords.controller.events import ControllerOptions

SIGINT = 2
"""Ctrl-C comes from a person, who may wait; the others from platforms and launchers, which kill later."""

PARTS = 3
"""No such wait may take more than one part of the grace period: for ranks, for a writer, and one is left to write."""

WAIT_S_MIN = 2.0
"""What cannot be cut further: a rank that is inside fsync says so once a second."""

FAREWELL_S_MAX = 2.0
FAREWELL_PART = 0.1
"""Before the end, for ranks to hear how it ends and to say so."""


def saving_s(options: ControllerOptions) -> float:
    """From the signal until nothing more is waited for.

    >>> saving_s(ControllerOptions(preemption_grace_s=30.0)), saving_s(ControllerOptions(preemption_grace_s=5.0))
    (28.0, 4.5)
    """
    grace_s = options.preemption_grace_s
    return grace_s - min(FAREWELL_S_MAX, FAREWELL_PART * grace_s)


def in_a_hurry(options: ControllerOptions) -> ControllerOptions:
    """The same deadlines, as far as the grace period has room for them.

    >>> options = in_a_hurry(ControllerOptions(preemption_grace_s=30.0))
    >>> options.settle_timeout_s, options.lost_confirm_s, options.progress_timeout_s, options.storage_timeout_s
    (10.0, 2.0, 10.0, 120.0)
    """
    part_s = max(options.preemption_grace_s / PARTS, WAIT_S_MIN)
    storage_s = options.storage_timeout_s
    return replace(
        options,
        settle_timeout_s=min(options.settle_timeout_s, part_s),
        lost_confirm_s=min(options.lost_confirm_s, part_s),
        newest_timeout_s=min(options.newest_timeout_s, part_s),
        progress_timeout_s=min(options.progress_timeout_s, part_s),
        storage_timeout_s=min(storage_s, part_s) if options.has_fallback_target else storage_s,
    )
