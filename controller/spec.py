"""What a controller is started with: one frozen value, which its command line carries as JSON.

The token is not part of it: command lines can be read by every user of a host. It travels in LASTWORDS_TOKEN.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lastwords.checkpoint.codec import from_json
from lastwords.controller.events import ControllerOptions
from lastwords.errors import ConfigError, FormatError
from lastwords.liveness import paths

TOKEN_VARIABLE = "LASTWORDS_TOKEN"
LOG_DIRECTORY = "logs"
INCIDENTS_FILE = "incidents.jsonl"


@dataclass(frozen=True, slots=True)
class ControllerSpec:
    """Everything that a controller needs to know, except for the job's token.

    ip: the one address to listen on (literal or host name). root, fallback_root: checkpoint directories, absolute.
    starter_pid: process on this host without which nobody will ever connect. nonce: of this start, see `paths`.
    remote: URL of the store to which checkpoints are uploaded; "" for none. own_only: the job has a name, or a launcher
    has started it before, so that it resumes from no job's checkpoints but its own.
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
    nonce: str = ""
    remote: str = ""
    own_only: bool = False

    def check(self) -> ControllerSpec:
        """This value, if it can work; raises ConfigError that names the field."""
        paths.check_job(self.job)
        paths.check_nonce(self.nonce)
        if self.ip in ("", "0.0.0.0", "::", "*"):
            raise ConfigError(f"ctrl_ip={self.ip!r} must be the address of this host that all ranks reach")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"ctrl_port={self.port} must be 1 to 65535, or 0 for any free one")
        if self.world_size < 1 or self.generation < 0:
            raise ConfigError(f"world size {self.world_size} or generation {self.generation} is impossible")
        for path in (self.root, self.fallback_root):
            if path is not None and not path.is_absolute():
                raise ConfigError(
                    f"{path} must be an absolute path, since the controller has another working directory"
                )
        for name, value in dataclasses.asdict(self.options).items():
            if name.endswith("_s") and not (0 < value < float("inf") or value == getattr(ControllerOptions(), name)):
                raise ConfigError(f"{name}={value} must be a positive number of seconds")
        return self

    def to_json(self) -> str:
        """A line of JSON from which `from_json` builds this value again.

        >>> spec = ControllerSpec("127.0.0.1", 30051, "digits", 1, 4, Path("/ckpt"))
        >>> ControllerSpec.from_json(spec.to_json()) == spec
        True
        """
        return msgspec.json.encode(self, enc_hook=str).decode()

    @classmethod
    def from_json(cls, text: str) -> ControllerSpec:
        """Raises ConfigError that names what is missing, malformed or impossible."""
        try:
            return from_json(text, cls, dec_hook=_path).check()
        except FormatError as error:
            raise ConfigError(f"the controller's settings cannot be read: {error}") from error

    @property
    def log_path(self) -> Path:
        """Where the controller's output goes."""
        return self.root / LOG_DIRECTORY / f"controller-{self.job}-g{self.generation}.log"

    @property
    def incidents_path(self) -> Path:
        """Where each incident leaves one line of JSON."""
        return self.root / LOG_DIRECTORY / INCIDENTS_FILE


def _path(kind: type[Path], text: Any) -> Path:
    """What JSON has no type for: only the directories."""
    return kind(text)
