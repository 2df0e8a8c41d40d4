"""How ranks and units are named to people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from lastwords.controller.events import NewestKnown
from lastwords.errors import NAMED_RANKS_MAX

NAMED_UNITS_MAX: Final = 3


def first_texts(texts: Iterable[str], between: str = "; ") -> str:
    """What is said of ranks, one text each: a reason goes to every rank, and may not grow with their number.

    >>> first_texts(["rank 3 raised x", "rank 7 died"]), first_texts("abcdefghijk")
    ('rank 3 raised x; rank 7 died', 'a; b; c; d; e; f; g; h; 3 more')
    """
    every = list(texts)
    more = [f"{len(every) - NAMED_RANKS_MAX} more"] if len(every) > NAMED_RANKS_MAX else []
    return between.join(every[:NAMED_RANKS_MAX] + more)


def units_text(units: Sequence[str]) -> str:
    """Units for people.

    >>> units_text(["a", "b"]), units_text("abcd")
    ('a + b', '4 units')
    """
    return " + ".join(units) if len(units) <= NAMED_UNITS_MAX else f"{len(units)} units"


def newest_text(newest: NewestKnown | None, reached: int = 0) -> str:
    """What there is to go on from instead; "" if nobody has looked yet.

    reached: the step that cannot be saved; 0: what is lost is not said. Nor is it where the checkpoint is of a later
    step: that is another job's, or of a start that had come farther.

    >>> newest_text(NewestKnown(1, 36, "/ckpt/tft_saved_checkpoints-step_36"), 40)
    'the newest checkpoint is of step 36: /ckpt/tft_saved_checkpoints-step_36; 4 steps are lost'
    >>> newest_text(NewestKnown(1, 0, ""), 1)
    'there is no older checkpoint; 1 step is lost'
    """
    if newest is None:
        return ""
    known = f"the newest checkpoint is of step {newest.step}: {newest.path}"
    words = known if newest.path else "there is no older checkpoint"
    return f"{words}; {_lost_text(reached - newest.step)}" if reached and reached >= newest.step else words


def _lost_text(steps: int) -> str:
    return f"{steps} steps are lost" if steps > 1 else f"{steps or 'no'} step is lost"
