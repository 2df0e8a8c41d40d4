"""What `lastwords drill` tells the ranks of a run, and how they call what they come by."""

from __future__ import annotations

from dataclasses import dataclass

DRILL = "LASTWORDS_DRILL"
"""Names the directory of a drilled run, for its ranks. In it:

    plan.json         what all ranks do, see `DrillPlan`
    checkpoints/      in place of the script's ckpt_save_path, so that nothing of the user's is touched
    rank_{r}.jsonl    what rank r has said: a line when its loop begins, at the end of each step, and before it dies
    came-{n}-{r}      rank r has come to the place of the nth death
    dies-{n}-{r}      there it dies, once
"""

CHECKPOINTS, PLAN_NAME = "checkpoints", "plan.json"

FORWARD, BACKWARD, UPDATE, END, EVALUATION = "forward", "backward", "update", "end", "evaluation"
"""What a rank comes by: a module's forward pass with gradients, one without or in evaluation mode, the way back through
a module, the end of an optimizer's update, and that of a step."""

STREAM = "random stream"

STATE = (STREAM, "hyperparameter", "extras", "local_extras", "buffer", "parameter", "optimizer")
"""Kinds of leaves that have to be equal in two runs; causes before effects."""

BESIDE = ("variable", "attribute")
"""Kinds of leaves in which may be what nothing reads: a time, a path, a sum for the log."""

MAY_DIFFER = (STREAM, "local_extras", *BESIDE)
"""Kinds of leaves of which one may differ in two runs of equal state: a stream that nobody seeds or draws from, times
in a log that is handed over.
"""


@dataclass(frozen=True)
class Death:
    """The `ranks` get kill -9, at once, where they come for the `nth` time in global step `step` by `event`.

    published: not before the checkpoint of this step is there; 0: whenever.
    """

    ranks: tuple[int, ...]
    step: int
    event: str
    nth: int
    published: int = 0


@dataclass(frozen=True)
class DrillPlan:
    """steps: global step after which the run ends. every: steps between periodic checkpoints; 0: as the script says.

    spoils: a run that goes on from a checkpoint flips one bit of a parameter on rank 0, which the drill has to find.
    """

    steps: int
    deaths: tuple[Death, ...] = ()
    every: int = 0
    spoils: bool = False
