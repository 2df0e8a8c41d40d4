"""What a controller keeps for the one that follows it, if it is killed: one file in shared memory.

    /dev/shm/lastwords-{uid}-{job}-g{generation}-{nonce}/controller.json    mode 0600: it holds the job's token
    /dev/shm/lastwords-{uid}-{job}-g{generation}-{nonce}/controller.lock    held by the controller that serves

A controller can only run on the host whose address the ranks know, and shared memory lives as long as that. So writing
takes some microseconds, needs no fsync, and is done before each act that rests on it. A controller that ends by itself
removes the file with the directory: where it is left, its controller was killed. While it serves, it touches the file
every fifth of a second: where the time of the last change stands still, the controller is stopped or hangs.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lastwords.checkpoint.codec import from_json
from lastwords.controller.events import Remember
from lastwords.controller.memory import Memory, Registered
from lastwords.controller.spec import ControllerSpec
from lastwords.errors import ConfigError, FormatError, UnavailableError, is_shortage
from lastwords.liveness import paths, process_id

_log = logging.getLogger(__name__)

VERSION = 1

STATE_BYTES_MAX = 64 << 20
"""Of 16 384 ranks it is some 4 MB."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that serves, or did. `begun_mono_s`: when it began, and when those before it did, newest last."""

    pid: int
    start_ticks: int
    begun_mono_s: tuple[float, ...] = ()

    @property
    def is_running(self) -> bool:
        """Whether that very process still runs."""
        return process_id.runs(self.pid, self.start_ticks)


@dataclass(frozen=True, slots=True)
class KeptState:
    """The file's content: how the controller was started, and what it remembered last."""

    version: int
    owner: Owner
    spec: ControllerSpec
    token: str
    members: tuple[Registered, ...]
    memory: Memory

    @property
    def remembered(self) -> Remember:
        """As the next core takes it."""
        return Remember(self.members, self.memory)


@dataclass(frozen=True, slots=True)
class _Written:
    """The same on its way out; the members never change once they are there."""

    version: int
    owner: Owner
    spec: ControllerSpec
    token: str
    members: msgspec.Raw
    memory: Memory


@dataclass(frozen=True, slots=True)
class _OfAnyVersion:
    version: int = 0


@dataclass(frozen=True, slots=True)
class _Owned:
    owner: Owner


class StateFile:
    """The file of the controller that serves. One thread."""

    def __init__(self, path: Path, owner: Owner, spec: ControllerSpec, token: str) -> None:
        self.path = path
        self._facts = (VERSION, owner, spec, token)
        self._members: tuple[tuple[Registered, ...], msgspec.Raw] | None = None
        self._problem = ""

    def write(self, remembered: Remember) -> None:
        """Keep this. What cannot be written is said once, and an older content does not stay: it would be wrong."""
        if self._members is None or self._members[0] is not remembered.members:
            self._members = remembered.members, msgspec.Raw(msgspec.json.encode(remembered.members))
        content = _Written(*self._facts, self._members[1], remembered.memory)
        try:
            raw = msgspec.json.encode(content, enc_hook=str)
            with paths.replacing(self.path) as fd:
                paths.write_all(fd, raw)
            os.close(fd)
            self._problem = ""
        except (OSError, ValueError) as error:  # a path that is no text cannot be encoded
            with contextlib.suppress(OSError):
                self.path.unlink()
            if str(error) != self._problem:
                _log.error("no controller can follow if this one is killed: %s cannot be written: %s", self.path, error)
            self._problem = str(error)

    def beat(self) -> None:
        """A sign of life: the time of the file's last change moves."""
        with contextlib.suppress(OSError):  # there may be no file: then no controller can follow either
            os.utime(self.path)


def read(path: Path) -> KeptState:
    """Content of the file of a job on this host.

    Raises UnavailableError if there is none, or it cannot be opened for now, ConfigError if it is another user's,
    FormatError for anything else that is wrong with it. Nothing is ever removed or changed here.
    """
    raw = _raw(path)
    try:
        version = from_json(raw, _OfAnyVersion).version
        kept = from_json(raw, KeptState, dec_hook=_path) if version == VERSION else None
        if kept is not None:
            kept.spec.check()
    except (FormatError, ConfigError) as error:
        raise FormatError(
            f"{path} is damaged, so no controller can follow; the ranks go on without one, and the job can be started "
            f"again from its newest checkpoint: {error}"
        ) from error
    if kept is None:
        raise FormatError(
            f"{path} is of version {version}, and this lastwords reads version {VERSION}; use the lastwords of the "
            "running job"
        )
    own = paths.state_path(kept.spec.job, kept.spec.generation, kept.spec.nonce)
    if own.parent.name != path.resolve().parent.name:
        raise FormatError(f"{path} belongs to another job or start, whose files are in {own.parent}; use the one there")
    return kept


def owner(path: Path) -> Owner | None:
    """Whose file it is; None if there is none, or nobody can tell.

    Raises UnavailableError where the system is short of something: then nobody can tell yet.
    """
    try:
        return from_json(_raw(path), _Owned).owner
    except (UnavailableError, ConfigError, FormatError) as error:
        if is_shortage(error):
            raise
        return None


def beat(path: Path) -> int | None:
    """The newest sign of life of the controller whose file this is: another number each time. None without a file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _raw(path: Path) -> bytes:
    try:
        return paths.read_own(path, STATE_BYTES_MAX)
    except FileNotFoundError as error:
        raise UnavailableError(
            f"there is no {path}: the job's controller has ended by itself, or has never run on this host"
        ) from error
    except OSError as error:
        kind = UnavailableError if is_shortage(error) else ConfigError
        raise kind(f"{path} cannot be opened: {error.strerror}") from error


def _path(kind: type[Path], text: Any) -> Path:
    """What JSON has no type for: only the directories."""
    return kind(text)
