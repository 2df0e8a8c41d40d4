"""Deaths in sharded jobs, which have a gate: at each place of a step, and what the last words may then be of."""

from __future__ import annotations

from dataclasses import dataclass

from tests.integration.kills import Kill
from tests.integration.parallel_layouts import groups, partners
from tests.integration.plan import Fault, Layout

BEFORE_GATE = ("forward", "backward", "before_step", "gate_enter", "copying")
"""Phases in which a victim has not entered the gate, so nobody passes it."""

AFTER_GATE = ("gate", "update", "update_end", "after_update", "end")
"""Phases in which it has, so that others may pass. "gate": it has not passed itself."""

WHOLE_UPDATE = ("after_update", "end")
"""Phases that a rank reaches only when its own update is over."""


@dataclass(frozen=True)
class ShardedKill(Kill):
    """The same in a job with a gate.

    survivors, where it differs:
    "behind": they do not see that the gate is passed, so they have final gradients and have not updated.
    "split":  whoever of those that are held is the only holder of something has to proceed.
    """

    def __post_init__(self) -> None:
        assert self.survivors in ("free", "ahead", "behind", "split")

    def ahead_rank(self, layout: Layout) -> int | None:
        """The survivor that can finish the step while the victims stand at their phase; None if there is none."""
        for rank in self.survivor_ranks(layout):
            if self.phase in WHOLE_UPDATE or not partners(layout, rank) & set(self.victims):
                return rank
        return None

    def held_ranks(self, layout: Layout) -> list[int]:
        """Survivors that do not get past the gate."""
        survivors = self.survivor_ranks(layout)
        if self.survivors == "behind":
            return survivors
        ahead = self.ahead_rank(layout)
        if self.survivors != "split" or ahead is None:
            return []
        return [rank for rank in survivors if rank != ahead and rank not in partners(layout, ahead)]

    def must_proceed(self, layout: Layout) -> bool:
        """Whether something is held by laggards only, so that the step can be saved only if one of them catches up."""
        held = set(self.held_ranks(layout))
        living = [set(group) - set(self.victims) for group in groups(layout)]
        return self.survivors == "split" and any(group and group <= held for group in living)

    def is_lost(self, layout: Layout) -> bool:
        """Whether a whole redundancy group dies: nothing can be saved."""
        return any(set(group) <= set(self.victims) for group in groups(layout))

    def is_possible(self, layout: Layout) -> bool:
        """Whether the layout ever comes by this phase in the way that is asked for."""
        if not 1 <= self.step <= layout.steps or not self.survivor_ranks(layout):
            return False
        in_update = self.phase in ("gate", "update", "update_end") and self.survivors != "behind"
        if self.step == 1 and in_update and partners(layout, 0):
            return False  # who waits for a victim in its first update may write the extras: not exact, and it says so
        if self._is_skipped(layout):
            # The gate of a step without an update is at the step's end, after the body.
            is_there = self.phase in ("forward", "backward", "gate_enter", "gate")
            behind = self.survivors == "behind" and self.phase == "gate" and not self.is_lost(layout)
            return is_there and (self.survivors == "free" or behind)
        if self.survivors == "free":
            return True
        if self.phase in BEFORE_GATE or self.is_lost(layout):
            return False
        held = set(self.held_ranks(layout))
        if self.survivors in ("ahead", "split") and self.ahead_rank(layout) is None:
            return False
        if self.survivors in ("behind", "split") and not held:
            return False
        if self.phase in WHOLE_UPDATE and any(partners(layout, victim) & held for victim in self.victims):
            return False  # they wait for the held ranks inside the update
        return not (held and self.phase == "end" and layout.log_reduce)  # likewise, in the all-reduce after it

    def faults(self, layout: Layout) -> tuple[Fault, ...]:
        """What each rank has to do, so that this happens and nothing else."""
        leader, *others = self.victims
        survivors = self.survivor_ranks(layout)
        faults = [Fault(rank, self.step, self.phase, (f"mark:victim-{rank}", "hang")) for rank in others]
        actions = [f"await:victim-{rank}" for rank in others]
        if self.step > 1:
            # Nobody dies before every survivor has ended the step before, or N could be smaller still.
            for rank in survivors:
                faults.append(Fault(rank, self.step, "body", (f"mark:before-{rank}",)))
                actions.append(f"await:before-{rank}")
        for rank in self.held_ranks(layout):
            faults.append(Fault(rank, self.step, "gate", (f"mark:held-{rank}", "hold")))
            actions.append(f"await:held-{rank}")
        if self.survivors in ("ahead", "split"):
            ahead = self.ahead_rank(layout)
            assert ahead is not None
            phase = "after_update" if layout.log_reduce else "end"
            faults.append(Fault(ahead, self.step, phase, ("mark:ahead",)))
            actions.append("await:ahead")
        actions += [f"kill:{rank}" for rank in others]
        faults.append(Fault(leader, self.step, self.phase, (*actions, "kill")))
        return tuple(faults)

    def steps_expected(self, layout: Layout) -> set[int]:
        """Steps that the last words may be of; 0 stands for nothing to save. "copying" is the step that is copied."""
        if self.phase in BEFORE_GATE or self.survivors == "behind":
            return {self.step - 1}
        if self.survivors in ("ahead", "split") and not self.is_lost(layout):  # else: the victims' copies count
            return {self.step}
        return {self.step - 1, self.step}

    def _is_skipped(self, layout: Layout) -> bool:
        return layout.inf_steps is not None and self.step in layout.inf_steps
