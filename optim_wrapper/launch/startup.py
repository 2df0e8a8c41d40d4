"""From "no controller yet" to "all ranks are registered": agreement, controller, black box, session.

Rank ctrl_rank_id draws the job's token and generation, starts the controller and tells the others through the
process group's store; everybody else waits for that word, so that an error on one rank is an error on all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lastwords.checkpoint import starts
from lastwords.checkpoint.remote.transfer import highest_generation
from lastwords.checkpoint.system import REAL_OS, Os, probe
from lastwords.controller import handover
from lastwords.controller import launch as controller_launch
from lastwords.errors import ConfigError, LastWordsError, StorageError, UnavailableError
from lastwords.optim_wrapper.launch.config import Config
from lastwords.optim_wrapper.launch.world import World, launch_of, next_prefix, restart_count
from lastwords.sharding.agree import STORE_WAIT_S
from lastwords.sharding.dtensor import local_of

# Whether a checkpoint of this job fits into the directories that it is to be saved in, looked at when it starts.

_log = logging.getLogger(__name__)


_COPIES = {
    "ASGD": 1, "Adadelta": 2, "Adafactor": 0, "Adagrad": 1, "Adamax": 2, "LBFGS": 4, "Muon": 1, "NAdam": 2, "RAdam": 2,
    "RMSprop": 1, "Rprop": 2,
}  # fmt: skip
"""Tensors as large as the weight that torch's optimizers keep for it; LBFGS: and two for each step of its history."""


def checkpoint_bytes(weight_bytes: int, held_bytes: int, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """An estimate of a checkpoint's size: weights and buffers, and what the optimizers keep for those that they train.

    weight_bytes: of the whole job; held_bytes: of those, this rank's, whose share of trained weights counts for all.

    >>> weight = torch.nn.Parameter(torch.zeros(25))
    >>> [checkpoint_bytes(100, 100, [make([weight])]) for make in (torch.optim.AdamW, torch.optim.SGD)]
    [300, 100]
    """
    kept = sum(_kept_bytes(optimizer) for optimizer in optimizers)
    return round(weight_bytes * (1 + kept / held_bytes)) if held_bytes else weight_bytes


def _kept_bytes(optimizer: torch.optim.Optimizer) -> int:
    copies = _copies(type(getattr(optimizer, "optim", optimizer)).__name__, optimizer.defaults)  # ZeRO's is inside
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return copies * sum(local_of(parameter).nbytes for parameter in parameters if parameter.requires_grad)


def _copies(name: str, defaults: dict[str, Any]) -> int:
    """Of an unknown optimizer its arguments tell: `betas` make two, `amsgrad` one more, `momentum` one, else none."""
    if name == "LBFGS":
        return _COPIES[name] + 2 * int(defaults.get("history_size", 0))
    if name == "RMSprop":
        return _COPIES[name] + bool(defaults.get("momentum")) + bool(defaults.get("centered"))
    if name in _COPIES:
        return _COPIES[name]
    return (2 if "betas" in defaults else bool(defaults.get("momentum"))) + bool(defaults.get("amsgrad"))


def check_space(roots: Sequence[Path], needed_bytes: int, *, require: bool, os: Os = REAL_OS) -> None:
    """Warn of each directory that has no room for a checkpoint; StorageError if none has and `require` is set."""
    problems = []
    for root in roots:
        try:
            free_bytes = os.free_bytes(root)
        except OSError:
            continue  # a file system that does not say; it will when something is written
        if free_bytes < needed_bytes:
            problems.append(
                f"a checkpoint of this job needs about {_size(needed_bytes)} (an estimate), and {root} has "
                f"{_size(free_bytes)} free"
            )
    if require and len(problems) == len(roots):
        raise StorageError(
            f"{'; '.join(problems)}: an emergency checkpoint could not be saved; free some space or choose "
            f"another directory (LASTWORDS_REQUIRE_SPACE=0 starts anyway)"
        )
    for problem in problems:
        _log.warning("%s: free some space, or set fallback_path", problem)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


OTHERS_NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks of a job know before the first session. `token` never leaves memory, store and metadata.

    restarted: a launcher has started this job before. jobs: other jobs from whose checkpoints it has resumed then.
    nonce: of this start, in the names of what it keeps in shared memory. port: where the controller listens.
    """

    job: str
    generation: int
    token: str
    prefix: str
    restarted: bool = False
    jobs: tuple[str, ...] = ()
    nonce: str = ""
    port: int = 0


def check_directory(path: Path, what: str) -> tuple[str, ...]:
    """Create `path` if need be and try what a death will need there, now; what its file system cannot do (`probe`).

    Raises StorageError that names the path, the system's reason and what to do; ConfigError if it is no directory.
    """
    try:
        if restart_count() and not path.exists():
            _log.warning(
                "%s %s is not there, although this job was started before: it is made anew, without any checkpoint; if "
                "its disk is not mounted any more, end the job, and mount it",
                what,
                path,
            )
        path.mkdir(parents=True, exist_ok=True)
        return probe(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(
            f"{what} {str(path)!r} cannot be used: there is a file where a directory is needed; choose another path"
        ) from error
    except (OSError, StorageError) as error:
        raise StorageError(
            f"{what} {str(path)!r} cannot be written: {error}; no checkpoint could be saved there; choose a "
            f"directory that every rank can write, or repair this directory",
            errno=error.errno or 0,
        ) from error


def agree(world: World, config: Config, settings: dict[str, Any], checkpoint_bytes: int = 0) -> Agreement:
    """Start the controller on rank ctrl_rank_id and share job, generation and token with all ranks.

    `settings` must be equal on all ranks (JSON). Raises ConfigError on every rank where one of them cannot go on.
    """
    prefix = next_prefix()
    own: LastWordsError | None = None
    launch = launch_of(os.environ, config.job)
    if launch.restarted:
        world.note(f"{prefix}/restarted")
    try:
        _check(world, config, prefix, settings)
        if world.rank == config.ctrl_rank_id:
            check_space(config.roots, checkpoint_bytes, require=config.require_space)
    except LastWordsError as error:
        own = error
    problem = world.problem_anywhere(f"{prefix}/check", None if own is None else str(own), STORE_WAIT_S)
    if own is not None:
        raise own
    if problem is not None:
        raise ConfigError(f"another rank cannot start: {problem}")
    if world.rank != config.ctrl_rank_id:
        word = world.read(f"{prefix}/job", STORE_WAIT_S, f"rank {config.ctrl_rank_id} to start the controller")
        if "error" in word:
            raise ConfigError(f"rank {config.ctrl_rank_id} could not start the controller: {word['error']}")
        return Agreement(prefix=prefix, **{**word, "jobs": tuple(word["jobs"])})
    try:
        # One node's torchrun has seen a failure, the others only that the job starts again.
        launch = dataclasses.replace(launch, restarted=launch.restarted or world.noted(f"{prefix}/restarted"))
        above = highest_generation(config.sources)
        drawn = starts.draw(config.roots, launch, above=above, may_be_followed=handover.may_be_followed)
        agreement = Agreement(
            drawn.job,
            drawn.generation,
            config.token or secrets.token_hex(16),
            prefix,
            drawn.restarted,
            drawn.jobs,
            secrets.token_hex(4),
        )
        agreement = dataclasses.replace(agreement, port=start_controller(world, config, agreement))
        if not config.job:
            _tell_of_others(config.ckpt_save_path, drawn.job)
    except LastWordsError as error:
        world.publish(f"{prefix}/job", {"error": str(error)})
        raise
    word = dataclasses.asdict(agreement)
    del word["prefix"]
    world.publish(f"{prefix}/job", word)
    return agreement


def _tell_of_others(root: Path, job: str) -> None:
    """Without a name this job is not told apart from others that live in its directory, where it resumes."""
    with contextlib.suppress(OSError):
        names = os.listdir(root)
        others = sorted({other for other, _ in starts.held(root, names)} - {job})
        if others:
            _log.warning(
                "another job (%s) runs in %s, and this one has no name: what they write is kept apart, but resume() "
                "takes the newest checkpoint of any job; give each job a directory of its own, or a name "
                "(LASTWORDS_JOB)",
                ", ".join(others[:OTHERS_NAMED_MAX]),
                root,
            )


def _check(world: World, config: Config, prefix: str, settings: dict[str, Any]) -> None:
    if config.ctrl_rank_id >= world.size:
        raise ConfigError(
            f"ctrl_rank_id is {config.ctrl_rank_id}, but this job has ranks 0 to {world.size - 1}; "
            "use the rank whose host has the address ctrl_ip"
        )
    level = logging.WARNING if world.rank == config.ctrl_rank_id else logging.DEBUG
    for root, what in zip(config.roots, ("ckpt_save_path", "fallback_path"), strict=False):
        for missing in check_directory(root, what):
            _log.log(level, "%s %s: %s", what, root, missing)
    if world.size > 1:
        _compare(world, prefix, settings)


def _compare(world: World, prefix: str, settings: dict[str, Any]) -> None:
    # Rank 0's settings are the reference: one write and size - 1 reads, whatever the size of the job.
    if world.rank == 0:
        world.publish(f"{prefix}/settings", settings)
        return
    reference = world.read(f"{prefix}/settings", STORE_WAIT_S, "rank 0 to register")
    different = [
        f"{key}: {reference.get(key)!r} on rank 0, {settings.get(key)!r} on rank {world.rank}"
        for key in sorted(reference.keys() | settings.keys())
        if reference.get(key) != settings.get(key)
    ]
    if different:
        raise ConfigError("the ranks were registered with different settings: " + "; ".join(different))


def start_controller(world: World, config: Config, agreement: Agreement) -> int:
    """Start the controller's process; returns its port once it serves."""
    spec = controller_launch.ControllerSpec(
        ip=config.ctrl_ip,
        port=config.ctrl_port,
        job=agreement.job,
        generation=agreement.generation,
        world_size=world.size,
        root=config.ckpt_save_path,
        fallback_root=config.fallback_path,
        starter_pid=os.getpid(),
        options=config.controller,
        nonce=agreement.nonce,
        remote=config.remote,
        own_only=bool(config.job) or agreement.restarted,
    )
    try:
        return controller_launch.start_controller(spec, token=agreement.token).port
    except OSError as error:
        raise UnavailableError(f"the controller's process could not be started: {error}") from error
