"""The thread that keeps a rank's time: ticks for its core, its newest status. It outlives whatever goes wrong in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from lastwords.errors import named
from lastwords.processor.interfaces import STATUS_INTERVAL_S

_log = logging.getLogger(__name__)


def keep_up(beat: Callable[[], bool], rank: int) -> None:
    """Call `beat` until it says False. What it raises is logged, once where it comes again and again."""
    said = ""
    while True:
        try:
            if not beat():
                return
        except Exception as error:  # outermost loop of this thread: without ticks its rank would wait for ever
            if named(error) != said:
                _log.exception("the pulse of rank %d failed, and goes on", rank)
            said = named(error)
            time.sleep(STATUS_INTERVAL_S)
