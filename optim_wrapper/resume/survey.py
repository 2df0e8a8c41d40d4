"""What a rank that resumes in another layout has to know of a checkpoint: one look at each unit, and few are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lastwords.checkpoint.boxes import Box, overlap
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.reshard.saved_state import SavedUnit, units_of
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.state.state_view import Names, UnitView
from lastwords.sharding.pieces import Members

_COUNTER_BYTES_MAX = 16
"""State up to here (`step`) is the same beside each part of its parameter."""

Places = dict[str, list[tuple[Box, tuple[int, ...]] | None]]
"""Name of a parameter or buffer -> boxes of it and the shape of the whole; None: whatever there is of it."""


@dataclass(slots=True)
class Survey:
    """names: of all saved parameters and buffers. units: those that have something of what is wanted.

    optimizer_own: some unit has state of the optimizer that belongs to no parameter. at_other_moments: units that were
    written at another place of the step than the first one.
    """

    names: set[str] = field(default_factory=set)
    units: list[SavedUnit] = field(default_factory=list)
    optimizer_own: bool = False
    at_other_moments: list[str] = field(default_factory=list)


def survey(path: Path, manifest: Manifest, wanted: Places) -> Survey:
    """Looks at every unit. Of a large checkpoint only those stay in memory of which something is wanted.

    A part that is not wanted may contradict others unseen here; whoever wants it sees that. FormatError as of
    `units_of`.
    """
    found = Survey()
    seen: set[str] = set()
    moments: dict[str, bool | None] = {}
    for name, unit in units_of(path, manifest):
        found.names |= {*unit.meta.parameters, *unit.meta.buffers}
        found.optimizer_own |= bool(unit.meta.optimizer_own)
        ended = unit.meta.step_ended
        moments[name] = next(iter(moments.values()), None) if ended is None else ended
        if manifest.moved or _is_wanted(unit, wanted, seen):
            found.units.append(unit)
            seen |= {*unit.meta.parameters, *unit.meta.buffers, *unit.meta.absent_buffers}
        elif manifest.tables is not None:
            manifest.tables.forget(name)
    first = next(iter(moments.values()), None)
    found.at_other_moments = [name for name, moment in moments.items() if moment != first]
    return found


def places_of(recorder: StepRecorder) -> Places:
    """Everything that a rank holds or reads."""
    found: Places = {}
    for unit, view in recorder.units.views.items():
        _add_places(found, view, view.names(), unit)
    for unit, members in recorder.units.table.reads.items():
        names = recorder.view.part(unit, Members(members.parameters), ()).names()
        _add_places(found, recorder.view, names, unit)
    return found


def _add_places(found: Places, view: UnitView, names: Names, unit: str) -> None:
    tensors: list[tuple[str, torch.Tensor | None]] = [*names.parameters.items()]
    tensors += [(name, names.buffers.get(name)) for name in names.owners]
    for name, tensor in tensors:
        spec = None if tensor is None else view.spec_of(f"unit/{unit}/model/{name}", name, tensor)
        place = None if spec is None else (Box(spec.offsets, spec.shape), spec.global_shape)
        found.setdefault(name, []).append(place)


def _is_wanted(unit: SavedUnit, wanted: Places, seen: set[str]) -> bool:
    """Whether the unit has the job's extras, something of what is wanted, or the first sight of a name."""
    if unit.meta.extras is not None or any(name in wanted and name not in seen for name in _names_of(unit)):
        return True
    for name, spec in unit.specs.items():
        kind, _, fqn = name.partition("/")
        if kind == "optim":
            fqn = fqn.rpartition("/")[0]
            if spec.nbytes <= _COUNTER_BYTES_MAX and f"model/{fqn}" in unit.specs:
                continue  # it goes where the parameter's part goes
        if any(place is None or _shares(spec, *place) for place in wanted.get(fqn, ())):
            return True
    return False


def _names_of(unit: SavedUnit) -> Iterator[str]:
    yield from unit.meta.parameters
    yield from unit.meta.buffers
    yield from unit.meta.absent_buffers
    yield from (fqn for fqn in unit.states if f"model/{fqn}" not in unit.specs)


def _shares(spec: TensorSpec, box: Box, shape: tuple[int, ...]) -> bool:
    """Whether the tensor has elements of the box; True for one of another form, of which whoever compares it speaks."""
    dimensions = len(shape)
    if spec.global_shape[:dimensions] != shape:
        return True
    return overlap(Box(spec.offsets[:dimensions], spec.shape[:dimensions]), box) is not None
