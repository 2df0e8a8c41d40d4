"""All recipes: importing this module registers them."""

from __future__ import annotations

from tests.zoo import recipes_moving

__all__ = ["recipes_moving"]
