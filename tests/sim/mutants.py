"""Deliberately broken rules: each a variant of a shipped core that differs in exactly one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lastwords.controller.core import ControllerCore
from lastwords.processor.core import ProcessorCore
from tests.sim.timed import ControllerFactory, ProcessorFactory


@dataclass(frozen=True, slots=True)
class Cores:
    """How to make the cores of a job."""

    controller: ControllerFactory = ControllerCore
    processor: ProcessorFactory = ProcessorCore


SHIPPED = Cores()
MUTANTS: Mapping[str, Cores] = {}
