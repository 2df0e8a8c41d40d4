"""From "no controller yet" to "all ranks are registered": agreement, controller, black box, session.

Rank ctrl_rank_id draws the job's token and generation, starts the controller and tells the others through the
process group's store; everybody else waits for that word, so that an error on one rank is an error on all.
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastwords.controller import launch
from lastwords.errors import ConfigError, LastWordsError, StorageError, UnavailableError
from lastwords.optim_wrapper.config import Config
from lastwords.optim_wrapper.world import World, job_name, next_prefix

_log = logging.getLogger(__name__)

GENERATION_FILE = ".lastwords-generation"

STORE_WAIT_S = 300.0
"""How long a rank waits for another rank's word in the store; ranks may load data at very different speeds."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks of a job know before the first session. `token` never leaves memory, store and metadata."""

    job: str
    generation: int
    token: str
    prefix: str


def check_directory(path: Path, what: str) -> None:
    """Create `path` if need be and prove that a file can be written there, now rather than at a death.

    Raises StorageError that names the path, the system's reason and what to do.
    """
    probe = path / f".lastwords-probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.write(descriptor, b"lastwords\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            os.unlink(probe)
    except OSError as error:
        raise StorageError(
            f"{what} {str(path)!r} cannot be written: {error.strerror or error}; "
            "last words would be lost there: choose a directory that every rank can write, or mend this one",
            errno=error.errno or 0,
        ) from error


def agree(world: World, config: Config, settings: dict[str, Any]) -> Agreement:
    """Start the controller on rank ctrl_rank_id and share job, generation and token with all ranks.

    `settings` must be equal on all ranks (JSON). Raises ConfigError on every rank where one of them cannot go on.
    """
    prefix = next_prefix()
    own: LastWordsError | None = None
    try:
        _check(world, config, prefix, settings)
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
        return Agreement(word["job"], word["generation"], word["token"], prefix)
    try:
        agreement = Agreement(
            job=job_name() or f"job-{secrets.token_hex(6)}",
            generation=next_generation(config.ckpt_save_path),
            token=config.token or secrets.token_hex(16),
            prefix=prefix,
        )
        start_controller(world, config, agreement)
    except LastWordsError as error:
        world.publish(f"{prefix}/job", {"error": str(error)})
        raise
    word = {"job": agreement.job, "generation": agreement.generation, "token": agreement.token}
    world.publish(f"{prefix}/job", word)
    return agreement


def _check(world: World, config: Config, prefix: str, settings: dict[str, Any]) -> None:
    if config.ctrl_rank_id >= world.size:
        raise ConfigError(
            f"ctrl_rank_id is {config.ctrl_rank_id}, but this job has ranks 0 to {world.size - 1}; "
            "give the rank whose host has the address ctrl_ip"
        )
    check_directory(config.ckpt_save_path, "ckpt_save_path")
    if config.fallback_path is not None:
        check_directory(config.fallback_path, "fallback_path")
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


def next_generation(root: Path) -> int:
    """Draw the next generation of jobs that save under `root`; a file there remembers the newest.

    Only rank ctrl_rank_id calls this. Raises StorageError if the file cannot be replaced.
    """
    path = root / GENERATION_FILE
    try:
        try:
            newest = int(path.read_text())
        except (FileNotFoundError, ValueError):
            newest = 0
        temporary = path.with_suffix(".tmp")
        temporary.write_text(f"{newest + 1}\n")
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}; last words need it", errno=error.errno or 0) from error
    return newest + 1


def start_controller(world: World, config: Config, agreement: Agreement) -> launch.ControllerHandle:
    """Start the controller's process; returns once it serves."""
    try:
        return launch.start_controller(
            launch.ControllerSpec(
                ip=config.ctrl_ip,
                port=config.ctrl_port,
                job=agreement.job,
                generation=agreement.generation,
                world_size=world.size,
                root=config.ckpt_save_path,
                fallback_root=config.fallback_path,
                starter_pid=os.getpid(),
                settle_timeout_s=config.settle_timeout_s,
                lost_confirm_s=config.lost_confirm_s,
                progress_timeout_s=config.progress_timeout_s,
                leave_timeout_s=config.leave_timeout_s,
                exit_timeout_s=config.exit_timeout_s,
                start_timeout_s=config.start_timeout_s,
            ),
            token=agreement.token,
        )
    except OSError as error:
        raise UnavailableError(f"the controller's process could not be started: {error}") from error
