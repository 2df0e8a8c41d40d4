"""Torch's, numpy's and Python's global random streams as they were when `run` was called.

A replacement enters `main` with the streams of a process in which only the script has been imported. A survivor's have
moved on, so `main` would draw other weights or another split of the data from them: they are put back first.
"""

from __future__ import annotations

import random
from typing import Any


class Streams:
    """Taken once; `put_back` comes before every `main`."""

    def __init__(self) -> None:
        import numpy
        import torch

        self._python = random.getstate()
        self._numpy: Any = numpy.random.get_state()
        self._torch = torch.get_rng_state()
        self._seed = torch.initial_seed()

    def put_back(self) -> None:
        """All of them. A device's generators, which start with the CPU's seed, begin anew where it is in use."""
        import numpy
        import torch

        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(self._seed)
