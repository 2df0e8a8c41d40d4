"""What a controller is started with: one frozen value, and its way through a command line.

The token is not part of it: command lines can be read by every user of a host. It travels in LASTWORDS_TOKEN.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastwords.errors import ConfigError
from lastwords.liveness import paths

TOKEN_VARIABLE = "LASTWORDS_TOKEN"
LOG_DIRECTORY = "logs"
INCIDENTS_FILE = "incidents.jsonl"


@dataclass(frozen=True, slots=True)
class ControllerSpec:
    """Everything that a controller needs to know, except for the job's token.

    ip: the one address to listen on (literal or host name). root, fallback_root: checkpoint directories, absolute.
    starter_pid: process on this host without which nobody will ever connect. Durations are described in
    `controller.events.ControllerOptions`; keepalive_* say when a silent host counts as lost.
    """

    ip: str
    port: int
    job: str
    generation: int
    world_size: int
    root: Path
    fallback_root: Path | None = None
    starter_pid: int = 0
    settle_timeout_s: float = 30.0
    lost_confirm_s: float = 2.0
    progress_timeout_s: float = 30.0
    verify_timeout_s: float = 120.0
    publish_timeout_s: float = 120.0
    leave_timeout_s: float = 30.0
    finish_timeout_s: float = 600.0
    exit_timeout_s: float = 10.0
    start_timeout_s: float = 300.0
    keepalive_time_s: float = 0.8
    keepalive_timeout_s: float = 1.0

    def check(self) -> ControllerSpec:
        """This value, if it can work; raises ConfigError that names the field."""
        paths.check_job(self.job)
        if self.ip in ("", "0.0.0.0", "::", "*"):
            raise ConfigError(f"ctrl_ip={self.ip!r}: give the one address of this host that all ranks reach")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"ctrl_port={self.port} must be 1 to 65535")
        if self.world_size < 1 or self.generation < 0:
            raise ConfigError(f"world size {self.world_size} or generation {self.generation} is impossible")
        for path in (self.root, self.fallback_root):
            if path is not None and not path.is_absolute():
                raise ConfigError(f"{path} must be an absolute path, since the controller runs elsewhere")
        for field in dataclasses.fields(self):
            if field.name.endswith("_s") and not 0 < getattr(self, field.name) < float("inf"):
                raise ConfigError(f"{field.name}={getattr(self, field.name)} must be a positive number of seconds")
        return self

    def to_argv(self) -> list[str]:
        """Arguments from which `from_argv` builds this value again.

        >>> spec = ControllerSpec("127.0.0.1", 30051, "digits", 1, 4, Path("/ckpt"))
        >>> ControllerSpec.from_argv(spec.to_argv()) == spec
        True
        """
        argv = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                argv.append(f"--{field.name.replace('_', '-')}={value}")
        return argv

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> ControllerSpec:
        """Raises ConfigError for an argument that is unknown, missing or malformed."""
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for argument in argv:
            name, equals, text = argument.partition("=")
            field = name.removeprefix("--").replace("-", "_")
            if not name.startswith("--") or not equals or field not in hints:
                raise ConfigError(f"unknown argument {argument!r}")
            values[field] = _parse(field, hints[field], text)
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING and field.name not in values
        ]
        if missing:
            raise ConfigError(f"missing arguments: {', '.join(missing)}")
        return cls(**values).check()

    @property
    def log_path(self) -> Path:
        """Where the controller's output goes."""
        return self.root / LOG_DIRECTORY / f"controller-{self.job}-g{self.generation}.log"

    @property
    def incidents_path(self) -> Path:
        """Where each incident leaves one line of JSON."""
        return self.root / LOG_DIRECTORY / INCIDENTS_FILE


def _parse(field: str, hint: Any, text: str) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    try:
        return kinds[0](text)
    except ValueError as error:
        raise ConfigError(f"--{field.replace('_', '-')}={text!r} is no {kinds[0].__name__}") from error
