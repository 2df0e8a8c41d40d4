"""The gate: a collective that every rank enters once a step, when its gradients are final and before it updates.

Where not all ranks hold everything, it makes a common step exist (docs/protocol.md): if any rank has passed the gate
of a step, every rank has entered it. It is asynchronous, on a gloo group of its own, and looked at now and then
(`Agent.pass_gate`): a rank that is parked by an incident sits in no collective, and an incident can take the training
thread away from the gate. A gate that is given up keeps its group and its work until the process ends, because
dropping the work of a group whose peer hangs blocks for ever.
"""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lastwords import threads
from lastwords.clock import mono_s
from lastwords.errors import ConfigError, GateFailedError, LastWordsError, UnavailableError, ranks_text
from lastwords.optim_wrapper.launch.world import World
from lastwords.processor.saver import Position

_log = logging.getLogger(__name__)

NAMELESS = Position(0, 0)
"""What goes through the gate where the loop names no steps."""

_LOOKS_BETWEEN_CLOCKS = 64
"""The clock is read once in so many looks at a gate that is not passed yet."""

_PLACES = 1 << 20
"""Epoch and step go through the gate as one number below this, so that its square times any number of ranks fits."""

ROLL_CALL_RANKS_MAX = 8
"""So many ranks, the lowest ones, look for who is missing; the others would find the same."""

_given_up: list[object] = []
"""Groups and works that must not be destroyed while the process lives."""


class Gate:
    """One per job, made by all ranks together (a collective). Training thread only.

    timeout_s: after so long a gate that is not passed has failed, as any collective does. notice_s: after so long the
    ranks that are missing are logged. Raises LastWordsError if the group cannot be made.
    """

    def __init__(self, world: World, key: str, *, timeout_s: float, notice_s: float = 60.0) -> None:
        self._world = world
        self._key = key
        self._notice_s = notice_s
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._values = torch.zeros(4, dtype=torch.int64)
        self._work: Any = None
        self._step = 0
        self._position = NAMELESS
        self._looks = 0
        self._since_mono_s = 0.0
        self._noticed = False
        self._missing: list[int] = []

    @property
    def group(self) -> Any:
        """The gate's own gloo group, with every rank in it; free for others while no gate is under way."""
        return self._group

    def enter(self, step: int, position: Position | None = None) -> None:
        """This rank's gradients of `step` are final, or there is no update in it. Returns at once.

        position: what the loop calls the step, or, if it says that at the step's end, what it called the last one.
        Only names that the loop has said are compared; None: it has said none.
        """
        self._step, self._position = step, position or NAMELESS
        place = _place(self._position)
        self._values[0] = step
        self._values[1] = step * step
        self._values[2] = place
        self._values[3] = place * place
        self._looks = 0
        self._noticed = False
        self._work = dist.all_reduce(self._values, group=self._group, async_op=True)

    def passed(self) -> bool:
        """Whether all ranks have entered. GateFailedError if a peer is gone, ConfigError if one is somewhere else."""
        work = self._work
        if not work.is_completed():
            self._looks += 1
            if self._looks % _LOOKS_BETWEEN_CLOCKS == 0:
                self._look_at_clock()
            return False
        # Completed is not passed: a work whose peer has died is completed, too, and says so only when it is asked.
        try:
            work.wait()
        except (RuntimeError, dist.DistError) as error:
            self.give_up()
            raise GateFailedError(self._failure_text(error)) from error
        self._work = None
        size, step, place = self._world.size, self._step, _place(self._position)
        # Equal numbers are the only ones whose sum and sum of squares are both those of `size` equal numbers.
        if self._values.tolist() != [size * step, size * step * step, size * place, size * place * place]:
            raise ConfigError(self._disagreement())
        return True

    def give_up(self) -> None:
        """This gate will not be passed: keep what would block when it is destroyed."""
        if self._work is not None:
            _given_up.extend((self._work, self._group, self._values))

    # ------------------------------------------------------------------ words

    def _disagreement(self) -> str:
        every: list[Any] = [None] * self._world.size
        dist.all_gather_object(every, (self._step, *self._position), group=self._group)
        steps = [step for step, _, _ in every]
        common = max(set(every), key=lambda one: (every.count(one), *(-number for number in one)))
        if len(set(steps)) > 1:
            astray = [f"rank {rank} in step {step}" for rank, step in enumerate(steps) if step != common[0]]
            return (
                f"the ranks are at different steps: {', '.join(astray[:8])}, all other ranks in step {common[0]}; "
                f"every rank "
                "has to end each step exactly once (step_end, or steps() with the same accumulate on all ranks)"
            )
        places = [f"epoch {epoch}, step {step}" for _, epoch, step in every]
        astray = [f"rank {rank} at {place}" for rank, place in enumerate(places) if every[rank] != common]
        return (
            f"the ranks have ended the same number of steps, but not the same steps: "
            f"{', '.join(astray[:8])}, all other ranks at epoch {common[1]}, step {common[2]}; a rank has "
            f"skipped a step and its step_end(), so collectives since then mixed different steps; call "
            f"step_end() for every batch on every rank, and resume from an older checkpoint"
        )

    def _failure_text(self, error: BaseException) -> str:
        who = f" (missing: {ranks_text(self._missing)})" if self._missing else ""
        return f"the gate of step {self._step} has failed{who}: {' '.join(str(error).split())[:200]}"

    def _look_at_clock(self) -> None:
        now_s = mono_s()
        if self._looks == _LOOKS_BETWEEN_CLOCKS:
            self._since_mono_s = now_s
        elif not self._noticed and now_s - self._since_mono_s > self._notice_s:
            self._noticed = True
            # In a thread of its own: the store may hang with the rank that is missing, and an incident may need us.
            try:
                threads.start(self._roll_call, self._step, name="lastwords-gate")
            except UnavailableError:
                self._since_mono_s, self._noticed = now_s, False  # it only tells who is missing: later

    def _roll_call(self, step: int) -> None:
        """Every rank that waits says so in the store; the lowest ones tell who does not."""
        world = self._world
        try:
            world.publish(f"{self._key}/{step}/{world.rank}", {"rank": world.rank})
            if world.rank >= ROLL_CALL_RANKS_MAX or world.store is None:
                return
            threading.Event().wait(min(1.0, self._notice_s))  # the others notice at about the same time
            missing = [rank for rank in range(world.size) if not world.store.check([f"{self._key}/{step}/{rank}"])]
            if missing and self._step == step and self._work is not None:
                self._missing = missing
                _log.warning(
                    "rank %d has waited at the gate of step %d for more than %g s; missing: %s. A missing "
                    "rank is still computing, hangs in another collective, or has skipped optimizer.step() "
                    "or step_end()",
                    world.rank,
                    step,
                    self._notice_s,
                    ranks_text(missing),
                )
        except (RuntimeError, LastWordsError, dist.DistError) as error:
            _log.info("cannot determine which ranks are missing at the gate: %s", error)


def _place(position: Position) -> int:
    return (position.epoch * 1_000_003 + position.step) % _PLACES
