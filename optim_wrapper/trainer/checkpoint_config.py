"""When periodic checkpoints are due and which are kept, in MindSpore's words: `CheckpointConfig`, `ModelCheckpoint`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastwords.checkpoint.retention import Rules
from lastwords.errors import ConfigError, NotTextError, WrongTypeError
from lastwords.vocabulary import Schedule

FORMATS = ("ckpt", "safetensors")
KEEP = 5
"""So many periodic checkpoints remain where nobody says otherwise, as upstream."""


@dataclass(frozen=True)
class CheckpointConfig:
    """For `tft.every(config)`. As upstream: steps are preferred to seconds, and `keep_checkpoint_max` to minutes.

    Unlike upstream, training never waits for a checkpoint (`async_save`), every rank writes its own part, which any
    layout can load (`integrated_save`), everything has a checksum (`crc_check`), and an exception is always saved
    (`exception_save`): these four change nothing here. `append_info` is refused: register such values with `extras=`.

    Raises:
        ConfigError: all four numbers are 0 or None, or anything that cannot be meant (a ValueError).
        WrongTypeError: where upstream raises TypeError (a TypeError as well).
    """

    save_checkpoint_steps: int | None = 1
    save_checkpoint_seconds: int | None = 0
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_per_n_minutes: int | None = 0
    integrated_save: bool = True
    async_save: bool | str = False
    append_info: Any = None
    exception_save: bool = False
    crc_check: bool = False
    format: str = "ckpt"

    def __post_init__(self) -> None:
        numbers = {
            "save_checkpoint_steps": self.save_checkpoint_steps,
            "save_checkpoint_seconds": self.save_checkpoint_seconds,
            "keep_checkpoint_max": self.keep_checkpoint_max,
            "keep_checkpoint_per_n_minutes": self.keep_checkpoint_per_n_minutes,
        }
        for name, number in numbers.items():
            checked_count(name, 0 if number is None else number)
        if not any(numbers.values()):
            raise ConfigError(f"CheckpointConfig needs one of {', '.join(numbers)}; all are None or 0")
        for name in ("integrated_save", "exception_save", "crc_check"):
            if not isinstance(getattr(self, name), bool):
                raise WrongTypeError(f"{name} must be a bool, not {getattr(self, name)!r}")
        if not isinstance(self.async_save, bool | str):
            raise WrongTypeError(f"async_save must be a bool or a str, not {self.async_save!r}")
        if self.append_info is not None and not isinstance(self.append_info, list):
            raise WrongTypeError(f"append_info must be a list, not {self.append_info!r}")
        if self.append_info:
            raise ConfigError(
                "append_info is not supported: register such values with extras=, which also restores them"
            )
        if self.format not in FORMATS:
            raise ConfigError(f"format must be one of {FORMATS} (both are written alike), not {self.format!r}")

    @property
    def schedule(self) -> Schedule:
        """The same as `tft.every(...)` has it. ConfigError where nothing says when a checkpoint is due."""
        steps, seconds = self.save_checkpoint_steps or 0, self.save_checkpoint_seconds or 0
        if not steps and not seconds:
            raise ConfigError("save_checkpoint_steps and save_checkpoint_seconds are both None or 0: none would be due")
        rules = Rules.upstream(self.keep_checkpoint_max, self.keep_checkpoint_per_n_minutes)
        return Schedule(steps, 0.0 if steps else float(seconds), rules.keep_max, rules.keep_per_minutes)


@dataclass(frozen=True)
class ModelCheckpoint:
    """For `tft.every(ModelCheckpoint(...))`, instead of a callback of `Model.train`.

    Args:
        prefix: accepted, and not used: periodic checkpoints have the names of last words, so that every tool finds
            them.
        directory: None, or the `ckpt_save_path` of the job.
        config: None for `CheckpointConfig()`.
    """

    prefix: str = "CKP"
    directory: str | os.PathLike[str] | None = None
    config: CheckpointConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.prefix, str) or not self.prefix or "/" in self.prefix:
            raise ConfigError(f"prefix must be a str that can begin a file's name, not {self.prefix!r}")
        if self.directory is not None and not isinstance(self.directory, str | os.PathLike):
            raise NotTextError(f"directory must be a path, not a {type(self.directory).__name__}")
        if self.config is not None and not isinstance(self.config, CheckpointConfig):
            raise WrongTypeError(f"config must be a CheckpointConfig, not a {type(self.config).__name__}")


def schedule_of(given: CheckpointConfig | ModelCheckpoint, ckpt_save_path: Path) -> Schedule:
    """What `tft.every` was given; ConfigError if it cannot be done in this job."""
    if isinstance(given, CheckpointConfig):
        return given.schedule
    if not isinstance(given, ModelCheckpoint):
        raise WrongTypeError(f"every() takes a CheckpointConfig or a ModelCheckpoint, not a {type(given).__name__}")
    if given.directory is not None and Path(given.directory).absolute() != ckpt_save_path:
        raise ConfigError(
            f"ModelCheckpoint(directory={str(given.directory)!r}) is not ckpt_save_path ({ckpt_save_path}): one "
            "directory has all checkpoints of a job, so that resume() finds the newest one; omit directory"
        )
    return (given.config or CheckpointConfig()).schedule


def checked_schedule(steps: int, seconds: float, keep: int | None, keep_per_minutes: int) -> Schedule:
    """The numbers of `tft.every`; ConfigError for what cannot be meant."""
    checked_count("steps", steps)
    checked_count("keep_per_minutes", keep_per_minutes)
    if keep is None:
        keep = 0 if keep_per_minutes else KEEP
    checked_count("keep", keep)
    if keep and keep_per_minutes:
        raise ConfigError(f"every(keep={keep}, keep_per_minutes={keep_per_minutes}): only one of them can decide")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise WrongTypeError(f"seconds must be a number from 0, not {seconds!r}")
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"seconds must be a number from 0, not {seconds!r}")
    if not steps and not seconds:
        raise ConfigError("every() needs steps=... or seconds=..., or both")
    return Schedule(steps, float(seconds), keep, keep_per_minutes)


def checked_count(name: str, number: object) -> None:
    """ConfigError unless it is an int from 0; WrongTypeError, which is one, for what is no int."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise WrongTypeError(f"{name} must be an int from 0, not {number!r}")
    if number < 0:
        raise ConfigError(f"{name} must be an int from 0, not {number!r}")
