"""An incident in a grace period: deadlines that run already are cut, and what the time was not enough for is said."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lastwords.controller.choice import choose
from lastwords.controller.context import JobContext
from lastwords.controller.decision import Decision
from lastwords.controller.events import State
from lastwords.controller.preemption import SIGINT
from lastwords.controller.saving import Saving
from lastwords.controller.views import rank_views
from lastwords.controller.words import ranks_text
from lastwords.vocabulary import Settled


class GracePeriod:
    """Of one incident; nothing happens without a grace period."""

    def __init__(self, context: JobContext, saving: Saving) -> None:
        self._context = context
        self._saving = saving

    def begin(self, signal_number: int, late: dict[int, float]) -> None:
        """A rank was asked to stop. late: deadlines of ranks of their own."""
        context = self._context
        if signal_number == SIGINT or not context.begin_grace():
            return
        settled_s = context.now_s + context.options.settle_timeout_s
        late.update({rank: min(at_s, settled_s) for rank, at_s in late.items()})
        ends_s = {
            "settle": settled_s,
            "proceed": settled_s,
            "storage": context.now_s + context.options.storage_timeout_s,
        }
        for name in filter(context.timers.running, ends_s):
            context.timers.set_earlier(name, ends_s[name])
        context.timers.set_earlier("suspects", context.now_s)
        self._saving.hurry()

    def more_s(
        self, option: str, overdue: Collection[int], settled: Mapping[int, Settled], excluded: Mapping[int, str]
    ) -> float:
        """What a deadline was cut by, if nothing can be saved without those that have missed it; 0.0 otherwise."""
        context = self._context
        if not context.preempted or not overdue:
            return 0.0
        views = rank_views(context.members, self._saving, settled, {**excluded, **dict.fromkeys(overdue, "is late")})
        answer = choose(context, self._saving, views, back=True)
        return 0.0 if isinstance(answer, Decision) else context.uncut_s(option)

    def missing_text(self, awaited: Collection[int]) -> str:
        """What could not be done in time. awaited: ranks that have not settled."""
        saving = self._saving
        match self._context.state:
            case State.SAVING:
                what = f"{ranks_text(saving.writing)} had not finished writing step {saving.step}"
            case State.VERIFYING:
                what = f"the files of step {saving.step} were being verified"
            case State.PUBLISHING:
                what = f"step {saving.step} was about to get its final name; `lastwords latest` says whether it has"
            case _:
                what = f"{ranks_text(awaited)} had not stopped" if awaited else saving.storage_reason
        return f"the grace period of {self._context.options.preemption_grace_s:g} s is over: {what}"
