"""What the zoo asks for and does not get yet. These cases have to fail, or to be taken off this list."""

from __future__ import annotations

NOT_YET: frozenset[str] = frozenset(
    [
        "moco:fwd",
        "moco:end",
        "moco:bwd",
        "moco_inplace:fwd",
        "moco_inplace:end",
        "moco_inplace:bwd",
        "frozen_bn_data:fwd",
        "frozen_bn_data:bwd",
        "ema_first:win",
        "ema_first:bwd",
    ]
)
"""`recipe:phase`. A death at any instant (`bwd`) may spare what is missing, so these only may fail."""
