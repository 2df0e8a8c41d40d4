"""What a controller is started with: one frozen value, and its way through a command line.

The token is not part of it: command lines can be read by every user of a host. It travels in LASTWORDS_TOKEN.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastwords.controller.events import ControllerOptions
from lastwords.errors import ConfigError
from lastwords.liveness import paths

TOKEN_VARIABLE = "LASTWORDS_TOKEN"
LOG_DIRECTORY = "logs"
INCIDENTS_FILE = "incidents.jsonl"


@dataclass(frozen=True, slots=True)
class ControllerSpec:
    """Everything that a controller needs to know, except for the job's token.

    ip: the one address to listen on (literal or host name). root, fallback_root: checkpoint directories, absolute.
    starter_pid: process on this host without which nobody will ever connect. keepalive_*: when a session counts as
    broken because nothing is heard, not even an answer to a ping. nonce: of this start, see `paths`.
    """

    ip: str
    port: int
    job: str
    generation: int
    world_size: int
    root: Path
    fallback_root: Path | None = None
    starter_pid: int = 0
    options: ControllerOptions = field(default_factory=ControllerOptions)
    keepalive_time_s: float = 0.8
    keepalive_timeout_s: float = 1.0
    nonce: str = ""

    def check(self) -> ControllerSpec:
        """This value, if it can work; raises ConfigError that names the field."""
        paths.check_job(self.job)
        paths.check_nonce(self.nonce)
        if self.ip in ("", "0.0.0.0", "::", "*"):
            raise ConfigError(f"ctrl_ip={self.ip!r} must be the address of this host that all ranks reach")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"ctrl_port={self.port} must be 1 to 65535")
        if self.world_size < 1 or self.generation < 0:
            raise ConfigError(f"world size {self.world_size} or generation {self.generation} is impossible")
        for path in (self.root, self.fallback_root):
            if path is not None and not path.is_absolute():
                raise ConfigError(
                    f"{path} must be an absolute path, since the controller has another working directory"
                )
        for name, value in self._flat().items():
            if name.endswith("_s") and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value} must be a positive number of seconds")
        return self

    def _flat(self) -> dict[str, Any]:
        """Every field by its name, those of `options` beside the others."""
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "options"}
        return own | dataclasses.asdict(self.options)

    def to_argv(self) -> list[str]:
        """Arguments from which `from_argv` builds this value again.

        >>> spec = ControllerSpec("127.0.0.1", 30051, "digits", 1, 4, Path("/ckpt"))
        >>> ControllerSpec.from_argv(spec.to_argv()) == spec
        True
        """
        values = {name: value for name, value in self._flat().items() if value is not None}
        return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> ControllerSpec:
        """Raises ConfigError for an argument that is unknown, missing or malformed."""
        optional = typing.get_type_hints(ControllerOptions)
        hints = {name: hint for name, hint in typing.get_type_hints(cls).items() if name != "options"} | optional
        values: dict[str, Any] = {}
        for argument in argv:
            name, equals, text = argument.partition("=")
            key = name.removeprefix("--").replace("-", "_")
            if not name.startswith("--") or not equals or key not in hints:
                raise ConfigError(f"unknown argument {argument!r}")
            values[key] = _parse(key, hints[key], text)
        missing = [
            each.name
            for each in dataclasses.fields(cls)
            if each.name not in values and each.default is each.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ConfigError(f"missing arguments: {', '.join(missing)}")
        options = ControllerOptions(**{name: values.pop(name) for name in optional.keys() & values.keys()})
        return cls(**values, options=options).check()

    @property
    def log_path(self) -> Path:
        """Where the controller's output goes."""
        return self.root / LOG_DIRECTORY / f"controller-{self.job}-g{self.generation}.log"

    @property
    def incidents_path(self) -> Path:
        """Where each incident leaves one line of JSON."""
        return self.root / LOG_DIRECTORY / INCIDENTS_FILE


def _parse(field: str, hint: Any, text: str) -> Any:
    if hint is bool and text in ("True", "False"):
        return text == "True"
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    try:
        return kinds[0](text)
    except ValueError as error:
        raise ConfigError(f"--{field.replace('_', '-')}={text!r} is not a valid {kinds[0].__name__}") from error
