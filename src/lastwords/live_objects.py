"""All objects that the garbage collector knows of."""

from __future__ import annotations

import gc
from typing import Any


def live_objects() -> list[Any]:
    """Every tracked object, those included that `gc.freeze()` has set aside: `gc.get_objects()` leaves them out.

    If there are such, whatever lives now is frozen with them. Any thread.
    """
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.unfreeze()
    found = gc.get_objects()
    gc.freeze()
    return found
