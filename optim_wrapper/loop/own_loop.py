"""A resumed loop of the user's own: whether it begins with the random streams that resume() has put back.

Such a loop sets its data back by itself, and what it draws on the way (building a DataLoader's iterator draws a seed)
is not drawn by the run that was never killed. Whether numbers that were drawn are too many cannot be told from here:
a step that draws its own batch, or augments it, draws them rightly before its forward pass. So this makes no reason
against exactness and no warning, which would be wrong in every such loop; it is information, with the condition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.ddp.staying_hook import StayingHook
from lastwords.processor.saver import Position
from lastwords.vocabulary import Phase, Stand

_log = logging.getLogger(__name__)

_position: Callable[[tuple[int, int]], Position] = partial(tuple.__new__, Position)  # quicker, and called in every step


def left_to_the_loop(generators: Collection[str]) -> list[str]:
    """Why a loop of one's own that begins may not be exact: these generators, which only `steps()` knows."""
    where = ", ".join(sorted(generators))
    of_steps = f"the loader's random generators ({where}) were saved by steps(), and only steps() restores them"
    return [of_steps] if generators else []


def look_at_first_forward(
    model: torch.nn.Module, streams: Callable[[], Mapping[str, bytes]], step: int, is_own: Callable[[], bool]
) -> None:
    """Log, once, if the streams are elsewhere at the model's next forward pass than now, right after resume().

    step: the one that was resumed after. is_own: asked then; `steps()` puts the streams where they belong.
    """
    restored = streams()

    def look(module: torch.nn.Module, args: Any) -> None:
        hook.remove()
        if not is_own():
            return
        now = streams()
        moved = [name for name, was in restored.items() if now.get(name) != was]
        if moved:
            _log.info("%s", moved_text(step, sorted(name.removeprefix("rng/") for name in moved)))

    hook = model.register_forward_pre_hook(StayingHook(look))


def moved_text(step: int, streams: list[str]) -> str:
    """What the user is told.

    >>> moved_text(7, ["torch"]).startswith("random numbers (torch) were drawn between resume() and the first forward")
    True
    """
    return (
        f"random numbers ({', '.join(streams)}) were drawn between resume() and the first forward pass of "
        f"your custom loop, after step {step}. If the step itself draws them (its batch, an augmentation), "
        f"this is expected. If they were drawn while restoring the data position (building a DataLoader's "
        f"iterator draws random numbers), call step_begin() at the start of each step; otherwise the resume is not "
        f"exact: see 'Custom training loops' in docs/training-loop.md"
    )


def goes_back(named: Position, last: Position, global_step: int, path: object) -> str:
    """Why a loop is refused that calls its first step after resume() `named`, where `last` is what is done.

    >>> goes_back(Position(1, 1), Position(2, 3), 6, "/c").startswith("the loop does not go on from the checkpoint: ")
    True
    """
    return (
        f"the loop does not go on from the checkpoint: step_end{tuple(named)} ended its first step after resume(), but "
        f"{tuple(last)} is done (global step {global_step}). Training would repeat steps that the weights have seen, "
        f"so nothing of this run is saved; {path} stays as it is. Begin the loop after the epoch, step or global_step "
        "that resume() returns, as 'Custom training loops' in docs/training-loop.md shows, or use steps(). If the loop "
        "is right, and only counts otherwise than the saved run, call step_end() without a name"
    )


def names_went_back(named: Position, last: Position) -> None:
    """Say that a resume of this loop will not be checked."""
    _log.warning(
        "step_end%s came after step_end%s: names of steps that do not increase cannot show whether a resumed loop "
        "goes on from the checkpoint",
        tuple(named),
        tuple(last),
    )


def passes_differ(saved: int, here: int) -> None:
    """Say that the loop that goes on accumulates over another number of batches, as it seems."""
    _log.warning(
        "a step of this loop has %d backward pass%s, and had %d in the run that saved the checkpoint: if each takes a "
        "batch (gradient accumulation), the number of steps that are done leads to another position in the data; see "
        "'Custom training loops' in docs/training-loop.md",
        here,
        "" if here == 1 else "es",
        saved,
    )


def refuse_update_after_end(stand: Stand) -> None:
    """ConfigError for a loop over `steps()` that updates again after it has ended its step.

    >>> refuse_update_after_end(Stand(Phase.COMPUTING, 3))
    """
    if stand.phase is not Phase.COMPUTING:
        raise ConfigError(
            f"optimizer.step() was called after step_end() of step {stand.step - 1}, for the same batch: "
            f"call step_end() at the very end of the step"
        )


def moved_too_early(names: Collection[str]) -> list[str]:
    """Why a resumed loop is not exact in which these have changed before it has said where its first step begins."""
    why = (
        f"{', '.join(sorted(names))} changed between resume() and the first step_begin(): the checkpoint may have that "
        "change already; change it after step_end(), and call step_begin() first in each step"
    )
    return [why] if names else []


def refuse_begin_after_update(stand: Stand) -> None:
    """ConfigError for a loop that says that a step begins although the one before has not ended, or all have.

    >>> refuse_begin_after_update(Stand(Phase.COMPUTING, 3))
    """
    if stand.phase is Phase.DONE:
        raise ConfigError("step_begin() was called after the end of `with tft:` (or tft.stop())")
    if stand.phase is not Phase.COMPUTING:
        raise ConfigError(
            f"step_begin() was called after optimizer.step() of step {stand.step} and before its step_end(): "
            f"call step_end() first"
        )


def named(epoch: object, step: object) -> Position | None:
    """What the loop calls the step that step_end() ends; None if it does not say. ConfigError names the argument.

    >>> named(2, 1), named(None, None)
    (Position(epoch=2, step=1), None)
    """
    if type(epoch) is int and type(step) is int and epoch >= 1 and step >= 1:
        return _position((epoch, step))
    if epoch is None and step is None:
        return None
    for name, value in (("epoch", epoch), ("step", step)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be an integer of at least 1, not {value!r}; or omit both epoch and step")
    return Position(int(epoch), int(step))  # type: ignore[call-overload]
