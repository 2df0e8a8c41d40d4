"""What follows from who holds what: a gate or none, windows, and the table that the user sees at the start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.launch.config import Config
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.departure import say
from lastwords.sharding.declare import Unit
from lastwords.sharding.describe import describe, warnings_of
from lastwords.sharding.pieces import UnitTable
from lastwords.vocabulary import UNIT_REPLICATED

_log = logging.getLogger(__name__)

GateMode = Literal["auto", "existing"]
CopyMode = bool | int | Literal["auto", "now"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may choose about a sharded job.

    gate: "auto" makes a gate where one is needed; "existing" says that the loop has a collective of its own with the
    gate's property (every rank enters it when its gradients are final, and no rank updates before all have).
    verify_every: compare the replicas every so many steps, 0: only when the loop begins; and look then at all bytes for
    what changes outside of updates. copy: "auto" copies, at each step's end, what has been seen to change outside of
    `optimizer.step()`; True copies everything while the next step is computed, as always with LBFGS; "now" within the
    step's end; a number is True for every so many steps. False copies nothing, and reports such changes.
    forget, variables: see `TFTRegister`.
    """

    gate: GateMode = "auto"
    verify_every: int = 0
    copy: CopyMode = "auto"
    forget: tuple[str, ...] = ()
    variables: bool = False

    def __post_init__(self) -> None:
        if self.gate not in ("auto", "existing"):
            raise ConfigError(f"gate must be 'auto' or 'existing', not {self.gate!r}")
        if isinstance(self.verify_every, bool) or not isinstance(self.verify_every, int) or self.verify_every < 0:
            raise ConfigError(
                f"verify_every must be a number of steps, 0 for the start alone, not {self.verify_every!r}"
            )
        if not (
            isinstance(self.copy, bool) or self.copy in ("auto", "now") or (type(self.copy) is int and self.copy > 0)
        ):
            raise ConfigError(f"copy must be 'auto', True, 'now', a number of steps or False, not {self.copy!r}")
        if not isinstance(self.variables, bool):
            raise ConfigError(f"variables must be True, False or a dict of objects, not {self.variables!r}")

    @property
    def copies_every(self) -> int:
        """Everything is copied at the end of each step whose number this divides; of none if it is 0."""
        return int(self.copy) if isinstance(self.copy, int) else int(self.copy == "now")

    @property
    def copies_all(self) -> bool:
        return self.copies_every == 1

    def suited_to(self, optimizers: Sequence[OptTFTWrapper]) -> Options:
        """With what these optimizers need. LBFGS runs backward passes, collectives and all, on weights half-way."""
        needed = any(isinstance(wrapper.inner, torch.optim.LBFGS) for wrapper in optimizers)
        return replace(self, copy=True) if needed and not self.copies_all else self


def settings_of(config: Config, options: Options, optimizers: int, world_size: int) -> dict[str, Any]:
    """Settings that must be equal on all ranks of a job."""
    names = ("ctrl_rank_id", "ctrl_ip", "ctrl_port", "ckpt_save_path", "fallback_path", "data", "job")
    given = {name: getattr(config, name) for name in names}
    written = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    told = {**asdict(options), "forget": list(options.forget)}  # as it comes out of JSON
    return {**written, **told, "optimizers": optimizers, "world_size": world_size}


def wrappers_of(optimizer: OptTFTWrapper | Sequence[OptTFTWrapper]) -> tuple[OptTFTWrapper, ...]:
    """The job's optimizers. ConfigError for anything that is no OptTFTWrapper, or twice the same one."""
    wrappers = (optimizer,) if not isinstance(optimizer, list | tuple) else tuple(optimizer)
    for wrapper in wrappers:
        if not isinstance(wrapper, OptTFTWrapper):
            raise ConfigError(
                f"optimizer must be an OptTFTWrapper (or a list of them), not {type(wrapper).__name__}; "
                "write optimizer = lastwords.OptTFTWrapper(optimizer) before it is used anywhere"
            )
    if not wrappers or len({id(wrapper) for wrapper in wrappers}) != len(wrappers):
        raise ConfigError("optimizer must name each of the job's optimizers once")
    return wrappers


def forgotten_by(forget: Sequence[str]) -> tuple[str, ...]:
    """ConfigError for anything but a list of names."""
    if not isinstance(forget, list | tuple) or not all(isinstance(name, str) and name for name in forget):
        raise ConfigError(f"forget must be a list of names such as 'model.*.last_attention', not {forget!r}")
    return tuple(forget)


def declared_units(units: Sequence[Unit] | None) -> tuple[Unit, ...]:
    """The units that a user declares, if any; ConfigError for anything else."""
    if units is None:
        return ()
    if not isinstance(units, list | tuple) or not all(isinstance(unit, Unit) for unit in units):
        raise ConfigError(f"units must be a list of lastwords.Unit (see lastwords.units_from_mesh), not {units!r}")
    return tuple(units)


def needs_gate(table: UnitTable, options: Options) -> bool:
    """Whether each step has to pass a gate of ours: some rank lacks something that another one has."""
    return options.gate == "auto" and any(holders != table.units[UNIT_REPLICATED] for holders in table.units.values())


def announce(table: UnitTable, world_size: int, options: Options, optimizers: int) -> None:
    """The start-up table, for rank 0: on stderr where it says more than "all ranks hold everything", else logged."""
    lines = []
    if needs_gate(table, options):
        lines.append("gate: one small collective before each update")
    elif options.gate == "existing":
        lines.append("gate: the loop's own collective (gate='existing')")
    if optimizers > 1:
        between = f"{optimizers} optimizers form one update: "
        if options.copies_all:
            lines.append(between + "a death between two of them falls back to the copy of the last step")
        else:
            lines.append(
                between + "if a collective runs between two of them, a death there loses the step and "
                "possibly everything; copy=True prevents this"
            )
    copied = bool(options.copies_every)
    if copied:
        often = "" if options.copies_all else f", every {options.copies_every} steps"
        lines.append(f"whole copies: two of each rank's state, in shared memory of its host{often}")
    text = describe(table, world_size, lines, copied=copied)
    if table.pure and optimizers == 1:
        _log.info("%s", text)
    else:
        say(f"lastwords: {text}")
    for warning in warnings_of(table, copied=copied):
        _log.warning("%s", warning)
