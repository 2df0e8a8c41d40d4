"""All recipes: importing this module registers them."""

from __future__ import annotations

from tests.zoo import (
    recipes_ddp,
    recipes_early,
    recipes_gradients,
    recipes_loading,
    recipes_moving,
    recipes_optimizing,
    recipes_quantised,
    recipes_random,
    recipes_schedules,
    recipes_sharded,
    recipes_state,
    recipes_strangers,
    recipes_wild,
)

__all__ = [
    "recipes_ddp",
    "recipes_early",
    "recipes_gradients",
    "recipes_loading",
    "recipes_moving",
    "recipes_optimizing",
    "recipes_quantised",
    "recipes_random",
    "recipes_schedules",
    "recipes_sharded",
    "recipes_state",
    "recipes_strangers",
    "recipes_wild",
]
