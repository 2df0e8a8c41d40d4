"""Recipes by name, and mixtures of several recipes, drawn at random.

A mixture is a loop that inherits from several recipes' loops: `moco+cosine+nprng_model`. What each of them may be told
for, the mixture may be told for. Recipes that replace the same exclusive hook, or share a base, are not mixed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.zoo import recipes, recipes_strangers
from tests.zoo.loop import CARDS, EXCLUSIVE, NO_NAME, Card, Loop, Words
from tests.zoo.recipes_ddp import ValidateInner
from tests.zoo.recipes_early import Early
from tests.zoo.recipes_loading import Adaptive, LengthWarmUp, Mining
from tests.zoo.recipes_moving import Lazy, Moco, SamByHand
from tests.zoo.recipes_optimizing import GradientNoise, GrowGroups
from tests.zoo.recipes_schedules import Averaged, SwaSwitch

assert recipes.__doc__

OF_STEPS = (Mining, Adaptive, LengthWarmUp, Early)
"""Loops over `steps()` alone."""

STEPS = range(2, 8)
MOST = 4


def card_of(name: str) -> Card:
    """The recipe of that name, or the mixture of those that are joined by `+`; `:phase@step` may follow."""
    names, _, place = name.partition(":")
    parts = [CARDS[part] for part in names.split("+")]
    if len(parts) == 1 and not place:
        return parts[0]
    phase, _, step = (place or "bwd@5").partition("@")
    loop = parts[0].loop if len(parts) == 1 else mixed([part.loop for part in parts])
    words = {phase: allowed(parts, phase, int(step), loop)}
    silenced = tuple({phase for part in parts for phase in part.nothing})
    return Card(name, " + ".join(part.what for part in parts), loop, {phase: int(step)}, words, silenced)


def mixed(loops: Sequence[type[Loop]]) -> type[Loop]:
    """A loop with the hooks of all of these."""
    members = {
        "ranks": max(loop.ranks for loop in loops),
        "epochs": max(loop.epochs for loop in loops),
        "accumulate": max(loop.accumulate for loop in loops),
        "own_loop": any(loop.own_loop for loop in loops),
    }
    return type("Mixture", tuple(loops), members)


def allowed(parts: Sequence[Card], phase: str, step: int, loop: type[Loop]) -> Words:
    """What one of the reasons may say: whatever one of the parts may be told in any phase in which the step may end so.

    A part in which the step under way is lost may be told in the window alone; which step that is was drawn. The
    others go on from an epoch's last step into what comes after it, in a loop of one's own. An average has the buffers
    of all parts, which may differ by rank.
    """
    early = phase in ("fwd", "end")
    phases = ("fwd", "end") if early else ("fwd", "end", "win", "bwd", "epoch", "mid")
    if loop.own_loop and phase == "end" and step % loop.per_epoch == 0:
        phases = (*phases, "epoch")
    words = [word for part in parts for where in phases for word in part.words(where)]
    if any(issubclass(part.loop, Averaged | SwaSwitch) for part in parts):
        words.append("was not the same on all ranks")
    words += together([part.loop for part in parts], phase, step)
    return tuple(dict.fromkeys([*words, *((NO_NAME,) if loop.own_loop and not early else ())]))


def together(loops: Sequence[type[Loop]], phase: str, step: int) -> Words:
    """What a mixture may be told for although none of its parts is: in a step of which no part dies, or of a pair."""

    def has(*kinds: type[Loop]) -> bool:
        return all(any(issubclass(loop, kind) for loop in loops) for kind in kinds)

    words = []
    if has(Early) and any(loop.after_log is not Loop.after_log for loop in loops):  # which comes after the step's end
        words.append("between step_end() and the next")
    if has(Lazy) and step == 2 and phase in ("fwd", "bwd"):  # it came in step 1, and moves for the first time
        words.append("its first change was seen after the step's copy was taken")
    if has(GradientNoise) and step % 4 == 0 and phase != "fwd":  # the only step in which it draws
        words.append("rng")
    if has(SamByHand, GrowGroups) and phase != "fwd":  # SAM moves weights that no optimizer has, which are each rank's
        words.append("may have been about to change")
    if has(Moco, ValidateInner) and step + 1 >= 2 * Loop.per_epoch and phase in ("bwd", "mid", "win", "epoch"):
        # The validation at the end of an epoch moves the encoder after the update, as one before has shown.
        words.append("may have been about to change")
    return tuple(words)


def go_together(loops: Sequence[type[Loop]]) -> bool:
    """Whether no two of these replace the same exclusive hook or share a base of their own.

    An update of one's own may step one optimizer alone, so nobody else brings others. A loop of one's own passes over
    its data by itself: only `steps()` sees a sampler give them in another order then. And it ends each step once.
    """
    if any(loop.own_loop for loop in loops) and any(issubclass(loop, OF_STEPS) for loop in loops):
        return False
    taken: set[object] = set()
    for loop in loops:
        bases = [base for base in loop.__mro__ if base not in (Loop, object)]
        hooks = {hook for base in bases for hook in EXCLUSIVE & vars(base).keys()}
        own: set[object] = {*bases, *("update" if hook == "optimizers" else hook for hook in hooks)}
        if taken & own:
            return False
        taken |= own
    return True


def draw(seed: int, number: int) -> str:
    """The name of a mixture with its phase and step, always the same for these two numbers.

    >>> draw(1, 0) == draw(1, 0)
    True
    """
    rng = random.Random(f"{seed}:{number}")
    able = [card for card in CARDS.values() if card.mixes and not card.beside and not card.heavy]
    able = [card for card in able if card.loop.__module__ != recipes_strangers.__name__]  # they have known holes
    count = rng.randint(2, MOST)
    chosen: list[Card] = []
    while len(chosen) < count:
        card = rng.choice(able)
        if card not in chosen and go_together([*(other.loop for other in chosen), card.loop]):
            chosen.append(card)
    phase = rng.choice(("fwd", "bwd", "win", "end", "epoch"))
    step = Loop.per_epoch if phase == "epoch" else rng.choice(STEPS)
    return f"{'+'.join(card.name for card in chosen)}:{phase}@{step}"
