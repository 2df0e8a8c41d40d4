"""A controller that was killed is followed by another one: what is kept for it, and how it begins.

It knows what `Memory` says and what the ranks repeat. An incident that was open and might have been a false alarm is
one: whoever still is in doubt will be again. Any other begins anew, with a number of its own, so that nothing of the
old one counts any more; only a checkpoint that was verified, and lacked no more than its name, is published first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lastwords.controller.context import Ended, JobContext
from lastwords.controller.events import (
    WARNING,
    Discard,
    Effect,
    Keep,
    Log,
    Published,
    PublishFailed,
    Remember,
    StartPublish,
    StorageEvent,
)
from lastwords.controller.incident import Incident
from lastwords.controller.memory import Gone, Memory, Registered
from lastwords.vocabulary import DeathSource, ExitKind, Hello, Left, Phase, Stand


class Succession:
    """What was taken over, as long as it matters, and what is remembered for the next controller."""

    TIMERS = ("absent",)

    def __init__(self, context: JobContext, before: Remember | None) -> None:
        self._context = context
        self.before = before
        self._members: tuple[Registered, ...] = ()
        self.remembered: Remember | None = None
        self._absent: set[int] = set()  # ranks that have not come back yet
        self._attempts: tuple[Discard, ...] = ()  # directories of incidents before
        self._publishing: StartPublish | None = None
        if before is not None:
            self._members = before.members
            self._attempts, self._publishing = before.memory.attempts, before.memory.publishing
            self._recall_members(before.memory)

    def _recall_members(self, memory: Memory) -> None:
        members = self._context.members
        start = Stand(Phase.COMPUTING, memory.base_step)
        for rank, known in enumerate(self._members):
            hello = Hello(rank, members.generation, members.world_size, known.process, known.units, start, known.shared)
            member = members.admit(hello)
            member.connected, member.loop_agreed = False, memory.loop
        members.base_step = memory.base_step
        members.loop, members.loop_go_sent = memory.loop, memory.loop is not None
        for gone in memory.gone if self._members else ():  # before all are registered, nobody is known by name
            members.bury(gone.rank, gone.source)
            if gone.left is not None:
                members.leave(Left(gone.rank, members.generation, gone.left))
        self._absent = set(members.living)

    # ------------------------------------------------------------------ who is back

    def begin(self) -> None:
        """From now on ranks may come back; those that do not within `lost_confirm_s` are as if they were lost now."""
        self._context.timers.set("absent", self._context.now_s + self._context.options.lost_confirm_s)

    def is_last_to_return(self, rank: int) -> bool:
        """A rank is back; True if it was the last one of those that may come."""
        waited = bool(self._absent)
        self._absent.discard(rank)
        if waited and not self._absent:
            self._context.timers.clear(*self.TIMERS)
        return waited and not self._absent

    def take_absent(self) -> list[int]:
        """The ranks that have not come back, sorted; they are not waited for here any more."""
        absent, self._absent = sorted(self._absent), set()
        return absent

    # ------------------------------------------------------------------ what the controller before was doing

    def publish_first(self) -> None:
        """An incident begins anew: what was about to be published needs no rank any more."""
        if self._publishing is not None:
            self._context.emit(self._publishing)

    def on_storage(self, event: StorageEvent, incident: Incident) -> None:
        """About files that this controller has not ordered."""
        order = self._publishing
        if order is None or (event.incident, event.attempt) != (order.incident, order.attempt):
            return
        if isinstance(event, Published):
            if incident.verdict is None:
                incident.saving.discard_all()
                incident.verdict = Ended(ExitKind.SAVED, order.step, event.path, incident.words())
        elif isinstance(event, PublishFailed):
            self._publishing = None
            self._context.log(
                WARNING, f"step {order.step} is saved again, since it could not be published: {event.reason}"
            )

    def clear_up(self, *, saved: bool) -> None:
        """The incident is over: directories of those before go, or are kept for a human if nothing was saved."""
        for left in self._attempts:
            if saved:
                self._context.emit(left)
            else:
                self._context.emit(Keep(left.incident, left.attempt, left.step, left.target))
        self._attempts, self._publishing = (), None

    # ------------------------------------------------------------------ for the next one

    def may_wait(self, effects: Sequence[Effect], incident: Incident | None, *, wanted: bool, pace_s: float) -> bool:
        """Whether these effects do nothing that the next controller would have to know of. The rest: see `Memory`.

        The successor reopens a certain incident and detects its dead ranks itself, so single deaths need not be
        persisted: a thousand deaths at once are written once, before what is done about them.
        """
        kept = None if self.remembered is None else self.remembered.memory
        if not effects:
            # Before that, ranks may say where they start; and before the first time nobody knows who serves now.
            known = kept is not None and (kept.wanted, kept.pace_s) == (wanted, pace_s)
            return self._context.members.loop_go_sent and known
        if incident is None or kept is None or not kept.certain or kept.incident != incident.number:
            return False
        return all(isinstance(effect, Log) for effect in effects)

    def remember(self, known: Memory, incident: Incident | None) -> Remember | None:
        """What has to be kept before the effects of an event are carried out; None if that is kept already.

        known: what the core knows of it; the rest is found here.
        """
        members = self._context.members
        if members.complete and not self._members:
            ordered = (member for _, member in sorted(members.members.items()))
            self._members = tuple(Registered(member.process, member.units, member.shared) for member in ordered)
        dead = (members.members[rank] for rank in sorted(members.dead))
        memory = replace(
            known,
            gone=tuple(Gone(one.rank, one.source or DeathSource.STREAM, one.left) for one in dead),
            base_step=members.base_step,
            loop=members.loop,
            certain=incident is not None and self._context.certain,
            attempts=self._attempts + (() if incident is None else incident.saving.attempts),
            publishing=(None if incident is None else incident.saving.publishing) or self._publishing,
        )
        if (
            self.remembered is not None
            and memory == self.remembered.memory
            and self.remembered.members is self._members
        ):
            return None
        self.remembered = Remember(self._members, memory)
        return self.remembered
