"""A module that draws from all global random streams as it is imported."""

from __future__ import annotations

import random

import numpy
import torch

DRAWN = random.random(), numpy.random.rand(), torch.rand(1).item()
