"""What a test asks the training script to do: the layout, the faults, the place of every file. Plain values, JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = (
    "before_loop",  # registered, before the first step
    "epoch_start",  # after set_epoch(), before the first batch of an epoch is fetched
    "body",  # the batch is here, nothing has been computed
    "forward",  # between two layers
    "backward",  # the later layers' gradients are final and their buckets under way
    "backward_last",  # every bucket is under way; DDP has not waited for any
    "before_step",
    "gate_enter",  # in jobs with a gate: ready for the update, about to enter the gate
    "gate",  # the gate has been entered, and not been looked at
    "update",  # inside the inner optimizer, which has written half
    "update_end",  # inside the inner optimizer, which has written everything
    "after_update",  # between optimizer.step() and whatever the loop does next
    "logged",  # after the logging all-reduce, if there is one
    "end",  # the last statement of the body
    "slot_tentative",  # the black box's copy for this step is half written
    "slot_committed",
    "slot_epoch",  # likewise, of the epoch's start; `step` is the epoch then
    "copying",  # beside the step after it: the whole copy of this step is not whole yet
    "left",  # the loop is over here, the registration is not
)


@dataclass(frozen=True)
class Layout:
    """Everything that may change a bit of what is computed."""

    world_size: int = 4
    parallel: str = ""  # a layout of demo/transformer/layouts.py; "": DDP with the models of network.py
    layers: int = 2  # of a parallel layout
    parts: int = 2  # of a parallel layout: ranks that share what is cut into pieces
    model: str = "small"  # "small" < 1 MB, "medium" < 25 MB, "large" > 25 MB of parameters
    batch_norm: bool = True
    dropout: bool = True
    tied: bool = False
    frozen: bool = False
    broadcast_buffers: bool = True
    accumulate: int = 1
    no_sync: bool = False  # skip the all-reduce of all but the last batch of a step
    loader: str = "distributed"  # or "plain": every rank shuffles the whole dataset with its own random numbers
    own_sampler: bool = True  # of a parallel layout; False: torch's DistributedSampler with nothing around it
    sequences: int = 0  # of a step, those of all ranks together, in a parallel layout; 0: two for each rank
    left_over: int = 0  # that many sequences less in an epoch: its last step has fewer
    even: bool = False  # drop what does not make equally many whole batches for each rank
    augment: bool = False  # the dataset draws torch, numpy and python random numbers
    workers: int = 0
    persistent_workers: bool = False
    clip: bool = True
    inf_steps: tuple[int, ...] | None = None  # None: no GradScaler; in parallel layouts the loop leaves the update out
    log_reduce: str = ""  # "before" or "after" scheduler.step()
    scheduler: bool = True
    static_graph: bool = False
    find_unused: bool = False
    epochs: int = 2
    steps_per_epoch: int = 4
    seed: int = 1
    device: str = "cpu"  # or "cuda": all ranks share the first GPU
    backend: str = "gloo"  # or "nccl"
    dropout_seed: int = 0  # added to the seed of a replica's random numbers

    @property
    def steps(self) -> int:
        """Global steps of the whole run."""
        return self.epochs * self.steps_per_epoch

    @property
    def key(self) -> str:
        """Short name of this layout, for directories and caches."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Fault:
    """On `rank`, when it comes by `phase` of global step `step`: carry out `actions` in order (see faults.py).

    Only the `micro`-th batch of an accumulated step counts, and only the `restart`-th launch by torchrun.
    """

    rank: int
    step: int
    phase: str
    actions: tuple[str, ...]
    micro: int = -1  # -1: the last one
    restart: int = 0

    def __post_init__(self) -> None:
        assert self.phase in PHASES, self.phase


@dataclass(frozen=True)
class Plan:
    """One launch of the training script."""

    layout: Layout
    directory: str  # where ranks record what they did
    mode: str = "tft"  # "plain": torch alone, no lastwords at all; "tft"
    api: str = "steps"  # or "step_end": a loop of the user's own
    context: bool = True  # False: without `with`, the excepthook has to hold the rank
    checkpoints: str = ""
    fallback: str = ""
    ctrl_rank: int = 0
    ctrl_port: int = 0
    recover: bool = False
    missing_ok: bool = False
    data: str = "refetch"
    whole: bool = False  # gather the state, and what the model answers, after a resume and at the end
    every: int = 0  # a periodic checkpoint after every so many steps; 0: none
    every_s: float = 0.0  # or one every so many seconds
    keep: int = 0  # so many of them, 0: all
    keep_minutes: int = 0  # or one in so many minutes
    config: dict[str, int] | None = None  # instead of these four numbers: arguments of a CheckpointConfig
    faults: tuple[Fault, ...] = ()
    sabotage: tuple[str, ...] = ()
    copy: bool | int = False  # each rank keeps whole copies of its state in shared memory, of every so manieth step
    bad_extra: bool = False  # register something that cannot be stored
    redirect: bool = False  # write stdout and stderr to files oneself (torchrun)
    overrides: tuple[tuple[int, str, Any], ...] = ()  # (rank, field of Layout or Plan, value): ranks that disagree

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read what `save` wrote."""
        raw = json.loads(path.read_text())
        layout = dict(raw.pop("layout"))
        if layout["inf_steps"] is not None:
            layout["inf_steps"] = tuple(layout["inf_steps"])
        faults = tuple(Fault(**{**fault, "actions": tuple(fault["actions"])}) for fault in raw.pop("faults"))
        overrides = tuple((int(rank), str(name), value) for rank, name, value in raw.pop("overrides"))
        sabotage = tuple(raw.pop("sabotage"))
        return cls(layout=Layout(**layout), faults=faults, overrides=overrides, sabotage=sabotage, **raw)

    def of_rank(self, rank: int) -> Plan:
        """The plan as this rank sees it, with its overrides applied."""
        plan = self
        for where, name, value in self.overrides:
            if where == rank and hasattr(plan.layout, name):
                plan = dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, **{name: value}))
            elif where == rank:
                plan = dataclasses.replace(plan, **{name: value})
        return plan
