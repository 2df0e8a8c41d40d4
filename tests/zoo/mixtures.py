"""Recipes by name, and mixtures of several recipes."""

from __future__ import annotations

from tests.zoo import recipes
from tests.zoo.loop import CARDS, Card

assert recipes.__doc__


def card_of(name: str) -> Card:
    """The recipe of that name."""
    return CARDS[name]
