"""What there is to go on from where an incident can save nothing. That is said when it is known, and cannot change."""

from __future__ import annotations

from lastwords.controller.context import JobContext
from lastwords.controller.events import LookForNewest, NewestKnown


class Newest:
    """The newest checkpoint, as far as one incident knows.

    It may be on disk before the controller has the answer about it: a periodic one that was complete when the incident
    began. So that is waited for, and then looked for again.
    """

    def __init__(self, context: JobContext, incident: int) -> None:
        self._context = context
        self._incident = incident
        self._looks = 0  # that have not been answered
        self._one_more_comes = False
        self._until_s: float | None = None
        self.known: NewestKnown | None = None

    def look(self) -> None:
        """Order a look; what older ones have found does not count any more."""
        self.known = None
        self._looks += 1
        self._one_more_comes = self._context.publishing
        self._context.emit(LookForNewest(self._incident))

    def on_storage_moved(self) -> None:
        """The work on a periodic checkpoint has come further, perhaps to its end."""
        if self._one_more_comes and not self._context.publishing:
            self.look()

    def on_found(self, found: NewestKnown) -> None:
        """A look has ended; they do in their order."""
        self._looks -= 1
        if not self._looks:
            self.known = found

    def is_awaited(self) -> bool:
        """Whether `known` may change; that is waited for, with the timer "newest", if only for `newest_timeout_s`."""
        context = self._context
        if not self._looks and not context.publishing:
            return False
        if self._until_s is None:
            self._until_s = context.now_s + context.options.newest_timeout_s
            context.timers.set("newest", self._until_s)
        return context.now_s < self._until_s
