"""Where a training thread stands still: its Python frames say so, looked at from another thread and only then.

A thread that is in a backward pass or in a collective for seconds may wait for a rank that never comes. Which line of
the user's that is, no one else can tell.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable

from lastwords import threads
from lastwords.errors import UnavailableError
from lastwords.vocabulary import Stack, Stand

_log = logging.getLogger(__name__)

STILL_S = 3.0
"""So long a thread may take for a phase of its step before anybody looks where it is; most steps are shorter."""

LOOK_S = 1.0

_COLLECTIVES = ("torch.distributed", "torch.nn.parallel.distributed")
_BACKWARD = "torch.autograd.graph"
_OTHERS = sys.stdlib_module_names | {"torch", "lastwords"}

STACK_FRAMES = 64
"""So many of the innermost frames are shown; a model of nested modules has some three for each level."""


class Whereabouts:
    """Of one thread. Not thread-safe: for the one thread that looks."""

    def __init__(self, thread_id: int) -> None:
        self._thread_id = thread_id
        self._stand: Stand | None = None
        self._look_at_s = 0.0
        self._found = ("", "")

    def places(self, stand: Stand, now_s: float) -> tuple[str, str]:
        """File and line where it has been since `STILL_S` or longer; else "".

        The first one if that is in a collective or a backward pass, the second one if it is in anything else.
        """
        if stand != self._stand:
            self._stand, self._look_at_s, self._found = stand, now_s + STILL_S, ("", "")
        elif now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._found = places_of(sys._current_frames().get(self._thread_id))
        return self._found

    def show(self, text: str, rank: int, generation: int, report: Callable[[Stack], None]) -> threading.Thread | None:
        """Report the thread's stack, and log `text` and the stack below it; from a thread of its own.

        That one waits where the thread has stopped inside the log. Without one, the stack is only reported.
        """

        def look() -> None:
            try:
                report(Stack(rank, generation, stack := self.stack()))
                _log.warning("%s\n%s", text, stack)
            except Exception:  # the outermost frame of this thread: it only tells people
                _log.exception("the stack of rank %d could not be told", rank)

        try:
            return threads.start(look, name="lastwords-stack")
        except UnavailableError:
            report(Stack(rank, generation, self.stack()))
            return None

    def stack(self) -> str:
        """The thread's Python frames, the innermost last, each with its line."""
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return "(the thread has ended)"
        return "".join(traceback.format_list(traceback.extract_stack(frame)[-STACK_FRAMES:])).rstrip()


def places_of(frame: types.FrameType | None) -> tuple[str, str]:
    """The innermost line of the user's that `frame` has come from, as in `Whereabouts.places`."""
    waits = False
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(_COLLECTIVES) or module == _BACKWARD:
            waits = True
        elif module.split(".", 1)[0] not in _OTHERS:
            place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            return (place, "") if waits else ("", place)
        frame = frame.f_back
    return "", ""
