"""What a choice is made from, and whether it is worth waiting for a better one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from lastwords.controller.context import JobContext
from lastwords.controller.decision import NO_TARGETS, Decision, NoDecision, NoDecisionKind, RankView
from lastwords.controller.events import LESSER_RETRY_S
from lastwords.controller.saving import Saving
from lastwords.controller.selection import select


def choose(
    context: JobContext,
    saving: Saving,
    views: Mapping[int, RankView],
    *,
    forgiven: bool = False,
    without: Collection[int] = (),
    back: bool = False,
) -> Decision | NoDecision:
    """The step and its writers; `forgiven`: as if all that may pass had passed; `without`: no such target.

    back: steps that a survivor has ended may be given up for one before.
    """
    targets = [target for target in saving.targets(forgiven=forgiven) if target not in without]
    if not targets:
        return NoDecision(NoDecisionKind.STORAGE, "no directory is left that can be written")
    if forgiven:
        barred = {rank: frozenset(targets) for rank, targets in saving.barred.items()}
        views = {r: replace(view, refused_targets=barred.get(r, NO_TARGETS)) for r, view in views.items()}
    members = context.members
    return select(
        views,
        members.units,
        saving.parts(),
        base_step=members.base_step,
        targets=targets,
        retry_refused=True,
        back=back,
    )


def or_steps_back(
    context: JobContext,
    saving: Saving,
    views: Mapping[int, RankView],
    answer: Decision | NoDecision,
    newest_step: int = 0,
) -> Decision | NoDecision:
    """Where a unit has no holder at the step that survivors have ended: a step before, if all can be had there.

    A rank has left its loop with its gradients not applied, and nobody else holds what it holds (docs/adr/0013), or has
    died, and its copy is of a step before. newest_step: of which there is a checkpoint; an older one would
    be none the better.
    """
    if isinstance(answer, Decision) or answer.kind is NoDecisionKind.NOTHING_TO_SAVE:
        return answer
    lower = choose(context, saving, views, back=True)
    if not isinstance(lower, Decision) or lower.step <= newest_step:
        return answer
    count = answer.step - lower.step
    given_up = "one step is" if count == 1 else f"{count} steps are"
    return replace(lower, reason=f"{lower.reason}; {given_up} given up, since {answer.reason}")


def retry_s(context: JobContext, saving: Saving, views: Mapping[int, RankView], answer: Decision | NoDecision) -> float:
    """For how long refused writers are worth another try before `answer` is carried out; 0.0 if it is as good.

    Where nothing can be saved without them, `storage_retry_s`. Where a lower step can, or the same one without the
    rank-local state of a host, only LESSER_RETRY_S: those who could write it may die meanwhile.
    """
    if not saving.refused:
        return 0.0
    back = not isinstance(answer, Decision)
    better = choose(context, saving, views, forgiven=True, back=back)
    if not isinstance(better, Decision):
        return 0.0
    answer = choose(context, saving, views, back=True) if back else answer
    if not isinstance(answer, Decision):
        return context.options.storage_retry_s
    more = (better.step, -len(better.lost_local_ranks)) > (answer.step, -len(answer.lost_local_ranks))
    return min(context.options.storage_retry_s, LESSER_RETRY_S) if more else 0.0


def files_retry_s(context: JobContext, saving: Saving, views: Mapping[int, RankView]) -> float:
    """For how long the newest attempt's files are worth another try: not long if all can be had in another place."""
    elsewhere = choose(context, saving, views, without=(saving.target,), back=True)
    limit_s = context.options.storage_retry_s
    return (
        min(limit_s, LESSER_RETRY_S) if isinstance(elsewhere, Decision) and elsewhere.step >= saving.step else limit_s
    )
