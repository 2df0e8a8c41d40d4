"""What a manifest says of the run, as frozen types (see `meta`): what its numbers depend on, where its loader stood.

The optimizer wrapper makes these, each rank's part.json and the manifest have them as JSON under `facts`, and a resume
compares them with its own. Keys that `RunFacts` does not know (`by_rank`, `dead_ranks`) are shown to people only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lastwords.checkpoint.codec import Number, Positive, T, typed
from lastwords.checkpoint.meta import json_of


def _labelled(label: str) -> Any:
    """A field that a resume compares with its own; None: not said."""
    return field(default=None, metadata={"label": label})


def differences(saved: T, here: T) -> dict[str, str]:
    """Labelled fields that differ, in a sentence each.

    >>> differences(Inputs(batch_size=4), Inputs(batch_size=8, seed=1))  # doctest: +NORMALIZE_WHITESPACE
    {'batch_size': 'batch size: 4 in the saved run, 8 here',
     'seed': 'seed of the sampler: unknown in the saved run, 1 here'}
    """
    found = {}
    for one in fields(saved):  # type: ignore[arg-type]
        was, now = (getattr(side, one.name) for side in (saved, here))
        if was != now and "label" in one.metadata:
            was, now = ("unknown" if value is None else value for value in (was, now))
            found[one.name] = f"{one.metadata['label']}: {was} in the saved run, {now} here"
    return found


@dataclass(frozen=True, slots=True)
class Moved:
    """What a transformation was of, and to: ranks of its destination, and sums of source's manifest and of strategy."""

    world_size: Positive
    manifest: str = ""
    strategy: str = ""


# ---------------------------------------------------------------------- the loader


@dataclass(frozen=True, slots=True)
class Dealing:
    """How a loader deals out its samples (see `global_samples`).

    replicas: 0 where that is not known, which is `{}` in the file. shuffle, seed: the sampler's; only compared.
    """

    samples: Number = 0
    shuffle: Any = False
    seed: Any = 0
    replicas: Number = 0
    batch_size: Number = 0
    drop_last: bool = False
    even: bool = False

    @property
    def known(self) -> bool:
        """Whether the loader has said it."""
        return self.replicas > 0

    def to_json(self) -> dict[str, Any]:
        """What stands in the file."""
        return asdict(self) if self.known else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the batches of a loader depend on, as far as it can be seen."""

    loader: str | None = _labelled("type of the loader")
    dataset: str | None = _labelled("type of the data set")
    samples: int | None = _labelled("samples in the data set")
    sampler: str | None = _labelled("type of the sampler")
    batch_sampler: str | None = _labelled("type of the batch sampler")
    batch_size: int | str | bool | None = _labelled("batch size")
    drop_last: int | str | bool | None = _labelled("drop_last of the loader")
    accumulate: int | None = _labelled("batches in a step")
    shuffle: int | str | bool | None = _labelled("shuffle of the sampler")
    seed: int | str | bool | None = _labelled("seed of the sampler")
    replacement: int | str | bool | None = _labelled("replacement of the sampler")
    drawn: int | str | bool | None = _labelled("samples that the sampler draws")
    workers: int | str | bool | None = _labelled("workers of the loader, in which the data set may draw random numbers")
    batches: int | None = _labelled("batches in an epoch")


@dataclass(frozen=True, slots=True)
class Drawn:
    """reason: why a resume in the middle of an epoch is not exact, as the loader draws random numbers; or empty."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """Where a run that was resumed on other ranks, or with other batches, had begun in `epoch`.

    `first` samples had been seen by then, in steps that ended with `first_step`.
    """

    epoch: Number
    first: Number
    first_step: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFacts:
    """What a resume has to know of a loop over `steps()`. dealing, inputs, world_size: None without `steps()`.

    carried: where it had begun itself, if not by the number of steps.
    """

    steps_per_epoch: Number = 0
    epochs: Number = 0
    accumulate: Number = 1
    batches_per_epoch: Number = 0
    mode: str = ""
    dealing: Dealing | None = None
    inputs: Inputs | None = None
    draws: Drawn = field(default_factory=Drawn)
    carried: Begun | None = None
    world_size: Number | None = None

    def begun(self, epoch: int) -> Begun | None:
        """Where the run had begun in `epoch`; None: at the epoch's start."""
        return self.carried if self.carried is not None and self.carried.epoch == epoch else None


# ---------------------------------------------------------------------- the run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a run is like: first what its arithmetic depends on, None in files that do not say.

    data: where the loader stood, and what it is like; None without `steps()`. buckets: the order of DDP's buckets,
    which `BucketRecord` reads. moved: of a checkpoint whose units were transformed into another layout. forgotten:
    state that is not saved, since the user says that nothing reads it. beside: names of what the loop had changed in
    variables, closures and globals, which is not saved either.
    """

    torch: str | None = _labelled("torch version")
    numpy: str | None = _labelled("numpy version")
    python: str | None = None
    threads: int | None = _labelled("threads per operator (OMP_NUM_THREADS)")
    machine: str | None = _labelled("processor")
    cpu_capability: str | None = _labelled("vector instructions")
    default_dtype: str | None = _labelled("default dtype")
    deterministic: bool | None = _labelled("torch.use_deterministic_algorithms")
    matmul_precision: str | None = _labelled("float32 matmul precision")
    compiled: bool | None = _labelled("torch.compile")
    ddp: Mapping[str, Any] | None = _labelled("options of DistributedDataParallel")
    optimizer: Mapping[str, Any] | None = _labelled("optimizer and its implementation")
    backend: str | None = _labelled("process group backend")
    accelerator: str | None = _labelled("GPU, its libraries and their settings")
    omp_num_threads: str | None = None
    data: LoopFacts | None = None
    buckets: Mapping[str, Any] | None = None
    moved: Moved | None = None
    forgotten: Sequence[str] | None = None
    beside: Sequence[str] | None = None

    @staticmethod
    def read(facts: Mapping[str, Any]) -> RunFacts:
        """FormatError for what is not as it should be."""
        return typed(facts, RunFacts, "facts")

    def to_json(self) -> dict[str, Any]:
        """What stands in the file."""
        return json_of(self)
