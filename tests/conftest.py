"""Hypothesis without its clock: on a busy machine a slow example is no defect."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no-clock", deadline=None, print_blob=True)
settings.load_profile("no-clock")
