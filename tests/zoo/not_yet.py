"""What the zoo asks for and does not get yet. These cases have to fail, or to be taken off this list."""

from __future__ import annotations

PHASES_OF: dict[str, str] = {
    "accum_noarg2": "fwd",
    "bigbuf_data": "fwd win bwd end",
    "buffer_first_change": "fwd",
    "byol_target_after": "win",
    "growing_cache": "bwd win fwd end",
    "lazy_none": "bwd win fwd",
    "lbfgs_local_loss": "bwd fwd",
    "moco": "end fwd",
    "prune": "end",
    "vq_data": "bwd fwd win",
    "vq_data_nb": "bwd fwd end win",
}

NOT_YET: frozenset[str] = frozenset(f"{name}:{phase}" for name, where in PHASES_OF.items() for phase in where.split())
"""`recipe:phase`. A death at any instant (`bwd`) may spare what is missing, so these only may fail."""
