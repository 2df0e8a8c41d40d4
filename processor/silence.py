"""When a controller that lives and shows no sign of life is to be followed by another one. Pure.

A sign of life is a beat: the controller's event loop leaves one every fifth of a second, where every process of its
host sees it, and it counts for a rank while its session is up. A controller that is stopped leaves none, nor does one
that hangs, although the threads of its gRPC go on answering pings. What is decided here is only that somebody should
go and ask. Whoever does so ends the controller only if that does not answer either (`controller.takeover`), so a wrong
decision costs a process that looks and leaves again.

A rank of any host counts every word of its session as a sign of life, too. Without one for `unanswered_s`, and with
something to say, it asks there (`processor.session.Session.look`), since nobody may be left who could do more.
"""

from __future__ import annotations

from lastwords.processor.events import ProcessorOptions

ASK_TURN_S = 3.0
"""The first living rank of the host asks, for 2 s, and starts the next controller; the others give it that time.

Where the controller is known to be dead nobody is asked: `START_TURN_S` of optim_wrapper/launch/successor.py."""


class Silence:
    """How long the controller has been silent, for one rank of its host. `now_s`: own time (`clock.OwnTime`).

    >>> silence = Silence(ProcessorOptions(unanswered_s=5.0, controller_silent_s=10.0))
    >>> silence.look(beat=1, now_s=0.0)
    >>> silence.look(beat=2, now_s=0.5)
    >>> [silence.is_over(asks, is_first=True, now_s=5.5) for asks in (True, False)]
    [True, False]
    >>> [silence.is_over(asks, is_first=True, now_s=10.5) for asks in (True, False)]
    [True, True]
    """

    def __init__(self, options: ProcessorOptions) -> None:
        self._asking_s = options.unanswered_s
        self._training_s = max(options.unanswered_s, options.controller_silent_s)
        self._beat: int | None = None
        self._since_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Another controller serves, or this one has answered: it has all its time again."""
        self._since_s = now_s

    def look(self, beat: int | None, now_s: float) -> None:
        """`beat`: the newest one, None while nothing can be heard from the controller."""
        if self._since_s is None or (beat is not None and beat != self._beat):
            self._since_s = now_s
        self._beat = self._beat if beat is None else beat

    def is_over(self, asks: bool, *, is_first: bool, now_s: float) -> bool:
        """Whether it is time to ask. asks: this rank has something to say that only a controller can act upon."""
        if self._since_s is None:
            return False
        patience_s = self._asking_s if asks else self._training_s
        return now_s - self._since_s >= patience_s + (0.0 if is_first else ASK_TURN_S)
