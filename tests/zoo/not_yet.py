"""What the zoo asks for and does not get yet. These cases have to fail, or to be taken off this list."""

from __future__ import annotations

PHASES_OF: dict[str, str] = {}

NOT_YET: frozenset[str] = frozenset(f"{name}:{phase}" for name, where in PHASES_OF.items() for phase in where.split())
"""`recipe:phase`. Whether a death at any instant (`bwd`), or while others go on (`end`), costs anything, is chance."""
