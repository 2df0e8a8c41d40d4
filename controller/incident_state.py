"""What one incident consists of, and what is said of it. Pure; its course is in `controller.incident`."""

from __future__ import annotations

from lastwords.controller.context import JobContext, Verdict
from lastwords.controller.detection import Causes
from lastwords.controller.events import RESEND_INTERVAL_S, State
from lastwords.controller.grace_period import GracePeriod
from lastwords.controller.newest_checkpoint import Newest
from lastwords.controller.saving import Saving
from lastwords.controller.words import first_texts
from lastwords.vocabulary import Proceed, Settled

NOTICE_S = 3.0
"""From the beginning of an incident until people are told for whom all wait; ranks settle within milliseconds."""


class IncidentState:
    """The facts of one incident, and the queries on them."""

    def __init__(self, context: JobContext, number: int) -> None:
        self._context = context
        self.number = number
        self.causes = Causes()
        self.verdict: Verdict | None = None
        self.excluded: dict[int, str] = {}  # living ranks that are not waited for any more, and why
        self.opened = False  # everybody has been told
        self._first_words = ""
        self._settled: dict[int, Settled] = {}
        self._unsettled: set[int] = set()
        self._late: dict[int, float] = {}  # ranks that are awaited since later -> their own deadline
        self._awaited: set[int] = set()  # laggards that were waited for: once each
        self._proceeding: dict[int, float] = {}  # rank -> deadline
        self._proceed_step = 0
        self._selected = False
        self.saving = Saving(context, number)
        self._grace_period = GracePeriod(context, self.saving)
        self._told = ""
        self._resend_pause_s = RESEND_INTERVAL_S
        self.newest = Newest(context, number)

    def words(self) -> str:
        """Why this incident is on, for people."""
        return self.causes.text() or self._first_words

    def _proceed(self) -> Proceed:
        return Proceed(self._context.generation, self.number, self._proceed_step)

    @property
    def _awaited_ranks(self) -> set[int]:
        members = self._context.members
        silent = members.suspects - self.excluded.keys()
        return silent | (self._unsettled & members.living) | self._proceeding.keys()

    def _tell_for_whom_all_wait(self) -> None:
        context, members = self._context, self._context.members
        silent = members.suspects - self.excluded.keys()
        awaited = self._awaited_ranks
        if not awaited or context.state not in (State.SETTLING, State.PROCEEDING):
            return
        who = first_texts(
            (f"rank {rank} (process {members.members[rank].process.pid})" for rank in sorted(awaited)), ", "
        )
        why = "no answer, as of a process that is stopped" if silent else "in an update, or hanging"
        words = f"{self.words()}; all ranks wait for {who}, for {context.longest_wait_s(silent):.0f} s at most: {why}"
        context.tell_people(words, about=awaited)
