"""What a checkpoint says beside its tensors, as frozen types: `meta` of units and of local states, and what is in them.

A file's JSON becomes one of these where it is read (`read`), and one of these becomes JSON where it is written
(`to_json`); in between nothing looks at a key. Fields stand in the order of the file. A field that is None is not
written: whoever wrote the file did not say. Keys of a later version are left out on reading.
"""

from __future__ import annotations

import dataclasses
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta

from lastwords.checkpoint.codec import Index, Number, T, typed
from lastwords.checkpoint.storable import unpack
from lastwords.errors import FormatError
from lastwords.vocabulary import RANKS_MAX

# Versions of everything that is written into files, and that a later reader may meet. See docs/format.md.

MANIFEST_FORMAT: Final = 1
"""manifest.json: newest `format_version` that this code reads, and the one that it writes."""

PART_FORMAT: Final = 1
"""part.json, likewise."""

FILE_FORMAT: Final = 1
"""The JSON in a .ckpt file's header, likewise."""

STRATEGY_FORMAT: Final = 1
"""A strategy's file: newest version that this code reads, and the one that it writes."""

START_FORMAT: Final = 1
"""The record of a start (`starts`)."""

UPLOADED_FORMAT: Final = 1
"""What of a directory has been uploaded (`remote.uploader.Record`)."""

ABOUT_VERSION: Final = 1
"""What `convert --to dcp` adds to a directory of torch.distributed.checkpoint."""

IDENTITY_FORMAT: Final = 1
"""What a transformation says of its source and destination (`facts.moved`)."""

Tree = dict[str, Any]
"""A value in which tensors are named: see `entries.node_of`."""

Rank = Annotated[int, Meta(ge=0, lt=RANKS_MAX)]
WorldSize = Annotated[int, Meta(ge=1, le=RANKS_MAX)]
Holders = Annotated[Sequence[Rank], Meta(min_length=1)]


StoredValue = tuple[Tree, Mapping[str, tuple[Sequence[Number], bytes]]]
"""A value of one rank: its tree, and of each tensor in it the shape and the bytes."""


class Marks(NamedTuple):
    """What shows whether ranks have something alike: what it is; its checksum at a step's end, and the one before."""

    what: str
    now: int | None
    before: int | None


NO_MARKS = Marks("", None, None)


StoredLate = Mapping[str, tuple[Number, Number, Number, Number, Number, Number, Number]]
"""What moves late in a step, and the numbers of its `Recurrence`."""


def json_of(value: Any) -> dict[str, Any]:
    """Fields of a frozen type that say something, and those of the frozen types in them."""
    said = ((one.name, getattr(value, one.name)) for one in dataclasses.fields(value))
    return {name: _json(item) for name, item in said if item is not None}


def _json(item: Any) -> Any:
    if dataclasses.is_dataclass(item):
        return item.to_json() if hasattr(item, "to_json") else json_of(item)
    return list(item) if type(item) is tuple else item


def _path_in(where: str) -> str:
    return f"{where}: meta" if where else "meta"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtrasMeta:
    """Extras (schedulers, averaged weights) by their names. left_out: name -> why it, or some of it, is not stored.

    step_on_resume: those whose step() a resume has to call once.
    """

    states: Mapping[str, Tree]
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    step_on_resume: Sequence[str]

    @property
    def reasons(self) -> list[str]:
        """Why some of them, or parts of them, are not stored."""
        return [reason for reasons in self.left_out.values() for reason in reasons]


@dataclass(frozen=True, slots=True)
class InlineExtras:
    """Extras of one rank, with the bytes of their tensors: name -> shape and bytes."""

    tree: ExtrasMeta
    tensors: Mapping[str, tuple[Sequence[Number], bytes]]

    def to_json(self) -> dict[str, Any]:
        """What stands in the black box, once it is packed."""
        return {"tree": json_of(self.tree), "tensors": {name: [*one] for name, one in self.tensors.items()}}

    @staticmethod
    def read(packed: Any, path: str) -> InlineExtras:
        """In the black box it is JSON already, so that in the manifest it is packed twice."""
        return typed(unpack(packed, path), InlineExtras, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitMeta:
    """Everything of a unit that is no tensor. Names are those of the model.

    optimizer: its class. parameters, buffers: name -> torch's element type. aliases: other name of a tied tensor -> the
    name that it stands under. absent_buffers: registered, but None. groups: hyperparameters of each param group as a
    tree; group_parameters: their members; group_numbers: their places in the optimizer. volatile_buffers: not in a
    state_dict(), in the unit or of single ranks. reshaped_buffers: of another form than when the run began, or
    registered since. frozen: parameters without `requires_grad`; None if the layout was transformed or converted.
    optimizer_state: parameter -> tree; optimizer_own: state that is not of the usual form, as (parameter or None, key
    or None, tree). shared: name of a tensor of the state that lies in another one's memory -> that one's name.
    left_out: (parameter, key or None) of state that could not be stored. reasons: why the unit is not exact. holders:
    the ranks that hold it; None for what all hold. extras: of the job, in `replicated`.
    step_ended: whether its writer had ended the step; hyperparameters: the plain ones of all groups, at that moment.
    buckets: the order of DDP's buckets in its writer's group, which `BucketRecord` reads.
    """

    optimizer: str
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    aliases: Mapping[str, str]
    absent_buffers: Sequence[str]
    groups: Sequence[Tree]
    group_parameters: Sequence[Sequence[str]]
    group_numbers: Sequence[Index]
    volatile_buffers: Sequence[str] = ()
    reshaped_buffers: Sequence[str] = ()
    frozen: Sequence[str] | None = None
    optimizer_state: Mapping[str, Tree]
    optimizer_own: Sequence[tuple[str | None, Any, Tree]] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[tuple[str, str | None]] = ()
    reasons: Sequence[str] = ()
    holders: Holders | None = None
    extras: ExtrasMeta | None = None
    step_ended: bool | None = None
    hyperparameters: Sequence[Mapping[str, Any]] | None = None
    buckets: Mapping[str, Any] | None = None

    @staticmethod
    def read(said: Mapping[str, Any], where: str = "") -> UnitMeta:
        """FormatError for anything that is not as it should be. where: the file, for the message."""
        return typed(said, UnitMeta, _path_in(where))

    def to_json(self) -> dict[str, Any]:
        """What stands in the file."""
        found = json_of(self)
        for name in ("group_parameters", "optimizer_own", "left_out"):
            found[name] = [list(one) for one in found[name]]
        return found


EMPTY_UNIT = UnitMeta(
    optimizer="",
    parameters={},
    buffers={},
    aliases={},
    absent_buffers=(),
    groups=(),
    group_parameters=(),
    group_numbers=(),
    optimizer_state={},
)
"""Of a unit in which there is nothing but tensors that nobody has named."""


@dataclass(frozen=True, slots=True)
class StepDocument:
    """What a rank's black box says of a step beside its regions (made by `recorder`).

    epoch, step: what its loop calls the step; None if it has not said. after: the name of the step before; () if the
    loop gives no names, None if it was not recorded. ends_epoch: None if not known. begun: whether the copy is as of
    the start of the next step, None where the loop makes no difference; between: what had changed by then since the
    step's end. reasons: why the copy is not exact,
    `early` those that hold for a copy of before the update. extras: after how many steps, and a digest of each.
    alike: kind -> its marks. state: those of the optimizer's state and what it trains, with what it may be compared.
    numbers: the optimizer's own, and local_extras, both packed. attributes: path of an object and name of an attribute
    -> what was in it, packed. generators: path of a random generator -> its kind, and its state in base64. order: how
    many items the loader's sampler had given in the epoch, or batches the loader, and their digest; None: not known.
    """

    epoch: Number | None = None
    step: Number | None = None
    after: Sequence[Number] | None = None
    needs_epoch_start: bool = False
    ends_epoch: bool | None = None
    begun: bool | None = None
    between: Sequence[str] = ()
    reasons: Sequence[str] = ()
    early: Sequence[str] = ()
    extras: tuple[Number, Mapping[str, str]] | None = None
    alike: Mapping[str, Marks] = field(default_factory=dict)
    state: Marks = NO_MARKS
    numbers: Mapping[str, Any] = field(default_factory=dict)
    local_extras: Any = None
    attributes: Any = None
    generators: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    order: tuple[Number, str] | None = None

    def extras_inline(self, path: str) -> InlineExtras | None:
        """This rank's own extras; FormatError if they are damaged."""
        return None if self.local_extras is None else InlineExtras.read(self.local_extras, path)

    def attributes_inline(self, path: str) -> Mapping[str, Mapping[str, StoredValue]]:
        """This rank's own attributes; FormatError if they are damaged."""
        return typed(unpack(self.attributes or {}, path), dict[str, dict[str, StoredValue]], path)

    def generators_inline(self, path: str) -> dict[str, tuple[str, bytes]]:
        """Path of each random generator -> its kind, and its state; FormatError if they are damaged."""
        said = typed(self.generators, dict[str, tuple[str, str]], path)
        try:
            return {name: (kind, b64decode(state, validate=True)) for name, (kind, state) in said.items()}
        except ValueError as error:
            raise FormatError(f"{path} are damaged: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What a rank has learned of its loop, by which a resumed run judges a step that is cut off.

    after_copy: what of the black box has moved between the tentative copy and the step's end. after_update: what else
    has moved after the update of a step, which `updates` counts. early_reasons: what moves between an early end of a
    step and the next one, in words. names_go_back: the loop has called a step what is no later than the one before.
    passes: backward passes in a step, 0 where that number changes, None where it is not known. constants: digests of
    tensors in attributes that the loop has not changed. data: digest of what the loader iterates over; "": not seen.
    draws: whether random numbers are drawn between the end of each step and the start of the next one; None: not known.
    """

    after_copy: StoredLate = field(default_factory=dict)
    after_update: StoredLate = field(default_factory=dict)
    updates: Number = 0
    early_reasons: Sequence[str] = ()
    names_go_back: bool = False
    passes: Number | None = None
    constants: Mapping[str, str] = field(default_factory=dict)
    data: str = ""
    draws: bool | None = None

    @staticmethod
    def read(said: Any, path: str) -> Habits:
        """Out of a black box's facts, which say more. FormatError for what is not as it should be."""
        return typed(said, Habits, path)

    def to_json(self) -> dict[str, Any]:
        """What stands in the file, or in the black box."""
        said = json_of(self)
        for table in ("after_copy", "after_update"):
            said[table] = {name: [*when] for name, when in said[table].items()}
        for name in ("constants", "data"):
            if not said[name]:
                del said[name]
        return said


NO_STATE = "none"
COMMITTED = "committed"
TENTATIVE = "tentative"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMeta:
    """What a rank's local state says beside its tensors. kind: COMMITTED, TENTATIVE (of before the update), or "none".

    slot: JSON of the black box, kept as it is. epoch_start: likewise, of the start of the epoch; None if not needed.
    habits: the rank's own, where its black box is lost those of the writer.
    """

    kind: str = ""
    slot: Mapping[str, Any] = field(default_factory=dict)
    epoch_start: Mapping[str, Any] | None = None
    habits: Habits = field(default_factory=Habits)

    @staticmethod
    def read(said: Mapping[str, Any], where: str = "") -> LocalMeta:
        """FormatError for what is not as it should be; `document` asks for the slot."""
        return typed(said, LocalMeta, _path_in(where))

    @property
    def document(self) -> StepDocument:
        """The slot. FormatError for what is not as it should be."""
        return typed(self.slot, StepDocument, "meta.slot")

    @property
    def epoch_document(self) -> StepDocument:
        """The same of the epoch's start. FormatError for what is not as it should be."""
        return typed(self.epoch_start or {}, StepDocument, "meta.epoch_start")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRecord:
    """The order of one DDP's gradient buckets after global step `step`, as `ddp_buckets` records it; None: of no step.

    passes: places in `parameters`, in the order in
    which the gradients came, of each pass that orders the buckets. buckets: as DDP's logging data show them; None if
    they had not yet. reasons: why they cannot be made again; hooks: states of hooks that are not saved; unconfirmed:
    why the order may not be that of rank 0. synced: what the next passes would hand round (`ddp_order.synced`).
    options: those of the DDP that change the sums.
    """

    step: Number | None
    static_graph: bool
    find_unused_parameters: bool
    parameters: Sequence[str]
    passes: Sequence[Sequence[Number]]
    buckets: Sequence[Sequence[Number]] | None
    reasons: Sequence[str]
    hooks: Sequence[str] = ()
    unconfirmed: str = ""
    synced: Mapping[str, bool] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(said: Mapping[str, Any], path: str = "buckets") -> list[BucketRecord]:
        """Those in a record of one DDP or of several; empty without DDP. FormatError if they are damaged."""
        if "ddps" in said:
            return typed(said["ddps"], list[BucketRecord], f"{path}.ddps")
        return [typed(said, BucketRecord, path)] if said else []

    @staticmethod
    def stored(records: Sequence[BucketRecord]) -> dict[str, Any]:
        """What stands in the file, which `read` takes apart."""
        every = [{one.name: getattr(record, one.name) for one in dataclasses.fields(record)} for record in records]
        return {"ddps": every} if len(every) > 1 else every[0] if every else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContent:
    """JSON in the header of a .ckpt file. units, local: packed `meta` of each, in a file of last words.

    In a rank's own file (`transform_checkpoint_by_rank`) instead: world_size; boxes: offsets, and shape of the whole,
    of each tensor that is a part; meta: that of a unit with everything, packed.
    """

    format: Number
    rank: Number
    world_size: WorldSize | None = None
    global_step: Number
    epoch: Number
    step: Number
    job: str
    units: Mapping[str, Any] | None = None
    local: Mapping[str, Any] | None = None
    boxes: Mapping[str, tuple[Sequence[Number], Sequence[Number]]] | None = None
    meta: Mapping[str, Any] | None = None


def groups_of(metas: Iterable[UnitMeta]) -> tuple[tuple[str, ...], ...]:
    """Parameters of each param group, out of the `meta` of units; a group may have some in each of them.

    >>> one = dataclasses.replace(EMPTY_UNIT, group_numbers=[0, 1], group_parameters=[["a"], ["c"]])
    >>> groups_of([one, dataclasses.replace(EMPTY_UNIT, group_numbers=[1], group_parameters=[["b", "c"]])])
    (('a',), ('c', 'b'))
    """
    found: dict[int, dict[str, None]] = {}
    for meta in metas:
        for number, names in zip(meta.group_numbers, meta.group_parameters, strict=True):
            found.setdefault(number, {}).update(dict.fromkeys(names))
    return tuple(tuple(found.get(number, ())) for number in range(max(found, default=-1) + 1))


# What a manifest says of the run, as frozen types (see `meta`): what its numbers depend on, where its loader stood.
#
# The optimizer wrapper makes these, each rank's part.json and the manifest have them as JSON under `facts`, and a
# resume compares them with its own. Keys that `RunFacts` does not know (`by_rank`, `dead_ranks`) are shown to people
# only.


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

    world_size: WorldSize
    manifest: str = ""
    strategy: str = ""


# ---------------------------------------------------------------------- the loader


@dataclass(frozen=True, slots=True)
class Dealing:
    """How a loader deals out its samples (see `loader_changes.dealing`).

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
    """reason: why a resume after more than so many batches of an epoch is not exact, by how the loader draws them."""

    reason: str = ""
    batches: Number = 1


@dataclass(frozen=True, slots=True)
class EpochBegun:
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
    carried: EpochBegun | None = None
    world_size: WorldSize | None = None

    def begun(self, epoch: int) -> EpochBegun | None:
        """Where the run had begun in `epoch`; None: at the epoch's start."""
        return self.carried if self.carried is not None and self.carried.epoch == epoch else None


# ---------------------------------------------------------------------- the run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a run is like: first what its arithmetic depends on, None in files that do not say.

    data: where the loader stood, and what it is like; None without `steps()`. buckets: the order of DDP's buckets,
    which `BucketRecord` reads. moved: of a checkpoint whose units were transformed into another layout. forgotten:
    state that is not saved, since the user says that nothing reads it. beside: names of what the loop had changed in
    variables, closures and globals, which is not saved either, with a digest each of what was there.
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
    beside: Mapping[str, str] | None = None

    @staticmethod
    def read(facts: Mapping[str, Any]) -> RunFacts:
        """FormatError for what is not as it should be."""
        return typed(facts, RunFacts, "facts")
