"""Small jobs to save: a state that depends on the step, so that mixing two steps cannot go unnoticed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lastwords.checkpoint import layout, load, publish
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.meta import EMPTY_UNIT, LocalMeta
from lastwords.checkpoint.part import LocalState, UnitState, share_of, write_part
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.vocabulary import Share

STEPS_PER_EPOCH = 10


class UnverifiedError(Exception):
    """`verify_parts` has found problems: (rank, text) each."""


@dataclass(frozen=True)
class Job:
    """Two units and two ranks; rank 0 writes both units' halves unless `writers` says otherwise."""

    name: str = "job"
    generation: int = 1
    incident: int = 1
    attempt: int = 1
    seed: int = 0
    elements: int = 33  # odd, so that files end in the middle of a block

    def unit(self, unit: str, step: int) -> UnitState:
        def values(kind: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
            return np.random.default_rng([step, self.seed, kind, len(unit)]).standard_normal(self.elements, np.float32)

        name = layout.unit_tensor_name
        shape = (self.elements,)
        return UnitState(
            [
                (TensorSpec(name(unit, "model", "fc.weight"), "F32", shape), values(0)),
                (TensorSpec(name(unit, "optim", "fc.weight", "exp_avg"), "F32", shape), lambda: values(1).data),
                (TensorSpec(name(unit, "optim", "fc.weight", "step"), "I64", ()), np.array(step)),
                (TensorSpec(name(unit, "buffer", "mask"), "BOOL", (3,)), b"\0\1\0"),
                (TensorSpec(name(unit, "model", "empty"), "BF16", (0, 4)), b""),
            ],
            replace(
                EMPTY_UNIT,
                optimizer="SGD",
                hyperparameters=[{"lr": 0.1 / step, "betas": (0.9, 0.999)}, {"best": float("inf"), "at": {3: 1}}],
            ),
        )

    def local(self, rank: int, step: int) -> LocalState:
        spec = TensorSpec(layout.local_tensor_name(rank, "rng/torch"), "U8", (21,))
        return LocalState(
            [(spec, bytes([rank, step % 256, self.seed] * 7))],
            LocalMeta(slot={"position": {"batch": step, "rank": rank}}),
        )

    def tmp_dir(self, root: Path, step: int) -> Path:
        return layout.TemporaryName(step, self.name, self.generation, self.incident, self.attempt).under(root)

    def units_of(self, rank: int, step: int) -> dict[str, UnitState]:
        """What this rank writes: rank 0 unit `a`, rank 1 unit `bb`; by their names in its part."""
        unit = ("a", "bb")[rank]
        return {unit: self.unit(unit, step)}

    def write(self, root: Path, step: int, os: Os = REAL_OS) -> Path:
        """Both parts: the units of each rank, and its own local state."""
        if os is REAL_OS and not root.exists():
            root.mkdir(parents=True)  # as a start does
        directory = self.tmp_dir(root, step)
        epoch, step_in_epoch = layout.epoch_and_step(step, STEPS_PER_EPOCH)
        for rank in (0, 1):
            write_part(
                directory,
                rank,
                epoch,
                step_in_epoch,
                step,
                self.units_of(rank, step),
                {rank: self.local(rank, step)},
                {"torch": "2.13", "threads": 1 + rank},
                job=self.name,
                os=os,
            )
        return directory

    def facts(self, step: int) -> publish.IncidentFacts:
        return publish.IncidentFacts(
            job=self.name,
            generation=self.generation,
            incident=self.incident,
            attempt=self.attempt,
            global_step=step,
            world_size=2,
            writers=(0, 1),
            reason="rank 1 died (kill -9?)" if self.incident else "every 10 steps",
            cause_ranks=(1,) if self.incident else (),
        )

    def verify(self, directory: Path, step: int, os: Os = REAL_OS) -> list[tuple[int, str]]:
        wanted = [unit for rank in (0, 1) for unit in self.units_of(rank, step)]
        return publish.verify_parts(directory, (0, 1), wanted, (0, 1), step, os, job=self.name)

    def save(self, root: Path, step: int, os: Os = REAL_OS) -> Path:
        """All of it, as writers and controller do together."""
        directory = self.write(root, step, os)
        problems = self.verify(directory, step, os)
        if problems:
            raise UnverifiedError(problems)
        return publish.publish(root, directory, self.facts(step), os, published_unix_ns=step * 1000 + self.generation)

    def save_inexact(self, root: Path, step: int, os: Os = REAL_OS) -> Path:
        """As `save`, of a job of three ranks, of which the last one's local state is lost."""
        facts = replace(self.facts(step), world_size=3)
        return publish.publish(root, self.write(root, step, os), facts, os, published_unix_ns=step * 1000)

    def again(self, **changes: int | str) -> Job:
        """The same job, started again."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SharedJob(Job):
    """Each rank writes a share of both units."""

    def units_of(self, rank: int, step: int) -> dict[str, UnitState]:
        shares = (Share(unit, rank, 2) for unit in ("a", "bb"))
        return {str(share): share_of(self.unit(share.unit, step), share) for share in shares}


def published(
    root: Path,
    states: Mapping[int, Mapping[str, UnitState]],
    *,
    step: int = 7,
    locals_: Mapping[int, LocalState] | None = None,
    facts: Mapping[str, Any] | None = None,
    os: Os = REAL_OS,
    **known: Any,
) -> Path:
    """Checkpoint of these units: writer -> unit -> state. Local state of a rank that writes no unit is the first's.

    known: what else the controller says of the incident, `world_size` for one.
    """
    directory = layout.TemporaryName(step, "job", 1, 1, 1).under(root)
    of_others = {rank: local for rank, local in (locals_ or {}).items() if rank not in states}
    for writer, units in states.items():
        own = {**of_others, **{rank: local for rank, local in (locals_ or {}).items() if rank == writer}}
        write_part(directory, writer, 1, step, step, units, own, facts or {}, job="job", os=os)
        of_others = {}
    said = {"world_size": len(states), "reason": "a test", **known}
    return publish.publish(
        root, directory, publish.IncidentFacts("job", 1, 1, 1, step, writers=tuple(states), **said), os
    )


def content_of(path: Path, os: Os = REAL_OS) -> dict[str, bytes]:
    """Every tensor of a checkpoint, read through the front door."""
    tensors = {}
    with load.open_checkpoint(path, os) as checkpoint:
        for unit in checkpoint.manifest.units:
            tensors |= checkpoint.read(checkpoint.manifest.units[unit])
        for rank in checkpoint.manifest.locals:
            tensors |= checkpoint.read(checkpoint.manifest.locals[rank])
    return {name: data.tobytes() for name, (_, data) in tensors.items()}


def content_written(job: Job, step: int) -> dict[str, bytes]:
    """What `content_of` must give for this job's checkpoint."""
    states = [*job.unit("a", step).tensors, *job.unit("bb", step).tensors]
    states += [*job.local(0, step).tensors, *job.local(1, step).tensors]
    return {
        spec.name: bytes(memoryview(source() if callable(source) else source).cast("B")) if spec.nbytes else b""  # type: ignore[arg-type]
        for spec, source in states
    }
