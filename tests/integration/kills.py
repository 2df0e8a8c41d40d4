"""Deaths in a phase, made of faults, and the steps that the last words may then be of."""

from __future__ import annotations

from dataclasses import dataclass

from tests.integration.plan import Fault, Layout

BEFORE_ALL_REDUCE = ("epoch_start", "body", "forward", "slot_tentative", "backward")
"""Phases in which no survivor can have the step's gradients: it can neither be ahead nor be split from others."""

IN_UPDATE = ("update", "update_end")


@dataclass(frozen=True)
class Kill:
    """kill -9 of `victims`, all within a fraction of a millisecond, when the last of them comes by `phase`.

    survivors: what the others do meanwhile.
    "free":   they run on as they can.
    "ahead":  one of them has finished the step before the victims die.
    "behind": they are held before their update until the victims are dead and the job is frozen.
    "split":  one has finished the step, the others are held as in "behind".
    """

    phase: str
    step: int
    victims: tuple[int, ...]
    survivors: str = "free"

    def __post_init__(self) -> None:
        assert self.survivors in ("free", "ahead", "behind", "split")
        assert self.survivors == "free" or self.phase not in BEFORE_ALL_REDUCE

    def survivor_ranks(self, layout: Layout) -> list[int]:
        """Ranks that are not killed."""
        return [rank for rank in range(layout.world_size) if rank not in self.victims]

    def is_possible(self, layout: Layout) -> bool:
        """Whether the layout ever comes by this phase in the way that is asked for."""
        skipped = layout.inf_steps is not None and self.step in layout.inf_steps
        if self.phase in IN_UPDATE and skipped:
            return False
        if self.phase == "epoch_start" and (self.step - 1) % layout.steps_per_epoch:
            return False
        if self.phase == "epoch_start" and layout.loader == "plain":
            return False
        if self.phase == "end" and layout.log_reduce and self.survivors in ("behind", "split"):
            return False  # the victims wait for the held ranks in the all-reduce
        if self.survivors == "split" and len(self.survivor_ranks(layout)) < 2:
            return False
        return 1 <= self.step <= layout.steps

    def faults(self, layout: Layout) -> tuple[Fault, ...]:
        """What each rank has to do, so that this happens and nothing else."""
        leader, *others = self.victims
        survivors = self.survivor_ranks(layout)
        here = f"step{self.step}"  # several kills of one run have marks of their own
        faults = [Fault(rank, self.step, self.phase, (f"mark:{here}-victim-{rank}", "hang")) for rank in others]
        actions = [f"await:{here}-victim-{rank}" for rank in others]
        if self.step > 1:
            # Nobody dies before every survivor has ended the step before, or N could be smaller still.
            for rank in survivors:
                faults.append(Fault(rank, self.step, "body", (f"mark:{here}-before-{rank}",), micro=0))
                actions.append(f"await:{here}-before-{rank}")
        held = survivors if self.survivors == "behind" else survivors[1:] if self.survivors == "split" else []
        hold_phase = "backward_last" if self.phase == "backward_last" else "before_step"
        for rank in held:
            actions_held = tuple(f"await_death:{victim}" for victim in self.victims)
            faults.append(Fault(rank, self.step, hold_phase, (*actions_held, "await_frozen")))
        if self.survivors in ("ahead", "split"):
            faults.append(Fault(survivors[0], self.step, self._ahead_phase(layout), (f"mark:{here}-ahead",)))
            actions.append(f"await:{here}-ahead")
        actions += [f"kill:{rank}" for rank in others]
        faults.append(Fault(leader, self.step, self.phase, (*actions, "kill")))
        return tuple(faults)

    def _ahead_phase(self, layout: Layout) -> str:
        # With an all-reduce after the update no survivor gets further than that without the victims.
        return "after_update" if layout.log_reduce else "end"

    def steps_expected(self, layout: Layout) -> set[int]:
        """Steps that the last words may be of; 0 stands for nothing to save."""
        skipped = layout.inf_steps is not None and self.step in layout.inf_steps
        if self.phase in BEFORE_ALL_REDUCE or self.survivors == "behind":
            return {self.step - 1}
        if self.survivors in ("ahead", "split") and not skipped:
            return {self.step}
        return {self.step - 1, self.step}

    def is_exact(self, layout: Layout, step: int) -> bool:
        """Whether the last words of `step` make an exact resume.

        One case does not: the very first step, cut off before its scheduler's step. Nothing shows what that would do.
        """
        cut_off = layout.log_reduce == "before" and self.phase not in ("logged", "end")
        return not (layout.scheduler and step == self.step == 1 and cut_off)

    def __str__(self) -> str:
        victims = "+".join(map(str, self.victims))
        return f"{self.phase}-step{self.step}-rank{victims}-{self.survivors}"
