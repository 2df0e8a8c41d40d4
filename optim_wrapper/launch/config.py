"""What can be set, in one frozen value built once. Explicit arguments win over the environment."""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from lastwords import log_lines
from lastwords.checkpoint import layout
from lastwords.checkpoint.remote.store import address_of
from lastwords.controller import timeline
from lastwords.controller.events import ControllerOptions
from lastwords.errors import ConfigError
from lastwords.optim_wrapper.launch.drill_plan import CHECKPOINTS, DRILL
from lastwords.optim_wrapper.launch.reporter import AUTO, LAUNCHER
from lastwords.processor.core import ProcessorOptions

_log = logging.getLogger(__name__)

VARIABLE = "MS_ENABLE_TFT"
"""The switch of the upstream system: whether last words are on."""
RIGHT_FORM = "{TTP:1} (on) or {TTP:0} (off)"
IGNORED_KEYS = ("UCE", "ARF", "TSP", "HCCE", "RSC")
"""Keys that the upstream system knows beside TTP. Nothing here answers to them."""

_ENTRY = re.compile(r"""\s*(["']?)([A-Za-z_]+)\1\s*:\s*(["']?)([01])\3\s*""")


@dataclass(frozen=True, slots=True)
class Switch:
    """Whether last words are on, and which upstream keys were set to 1 without effect here."""

    enabled: bool
    ignored: tuple[str, ...] = ()


def parse_switch(text: str | None) -> Switch:
    """Read the value of MS_ENABLE_TFT; None and an empty text are the default, on.

    Quotes round keys and values, spaces and a trailing comma are accepted, as upstream does. Without a TTP
    key the default stands. Raises ConfigError that shows the value and the right form.

    >>> parse_switch(None), parse_switch("{TTP:0}")
    (Switch(enabled=True, ignored=()), Switch(enabled=False, ignored=()))
    >>> parse_switch("{ 'TTP': 1, UCE:1 }")
    Switch(enabled=True, ignored=('UCE',))
    """
    if text is None or not text.strip():
        return Switch(True)
    body = text.strip()
    if len(body) >= 2 and body[0] == body[-1] and body[0] in "\"'":
        body = body[1:-1].strip()
    if not (body.startswith("{") and body.endswith("}")):
        raise _malformed(text, "the braces are missing")
    entries = body[1:-1].split(",")
    if not entries[-1].strip():
        entries.pop()
    values: dict[str, bool] = {}
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise _malformed(text, f"{entry.strip()!r} is not of the form KEY:0 or KEY:1")
        key = match[2]
        if key != "TTP" and key not in IGNORED_KEYS:
            raise _malformed(text, f"{key!r} is not one of the keys TTP, {', '.join(IGNORED_KEYS)}")
        if key in values:
            raise _malformed(text, f"{key} is given twice")
        values[key] = match[4] == "1"
    return Switch(values.get("TTP", True), tuple(key for key in IGNORED_KEYS if values.get(key)))


def switch_from_env(environ: Mapping[str, str] | None = None) -> Switch:
    """The switch as the environment sets it; logs one line for keys that have no effect here."""
    switch = parse_switch((os.environ if environ is None else environ).get(VARIABLE))
    if switch.ignored:
        _log.warning("%s: %s has no effect in lastwords; only TTP has an effect", VARIABLE, ", ".join(switch.ignored))
    return switch


def _malformed(text: str, why: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}={text!r} is malformed: {why}; set it to {RIGHT_FORM}, or unset it (on)")


DataMode = Literal["refetch", "skip"]
_Options = TypeVar("_Options", "Config", ControllerOptions, ProcessorOptions)


_PREFIX = "LASTWORDS_"

SHARED_FROM_MB = math.inf
"""Nothing is written in shares unless somebody asks for it: on a local disk one writer may be as fast."""
_HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?")


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting of a rank; the same on all ranks.

    ctrl_port 0: any free one, which rank ctrl_rank_id finds and tells the others.
    remote: URL of a store, or "".
    shared_from_mb: a unit of at least so many MB in a checkpoint is written by several of its holders.
    Durations are seconds; each, also those of `controller` and `processor`, can be set by an environment variable
    named LASTWORDS_ and its name in capitals (for example LASTWORDS_LOST_CONFIRM_S=5).
    """

    ctrl_rank_id: int
    ctrl_ip: str
    ctrl_port: int
    ckpt_save_path: Path
    fallback_path: Path | None = None
    data: DataMode = "refetch"
    job: str = ""
    token: str | None = field(default=None, repr=False)
    require_space: bool = False
    remote: str = ""
    connect_timeout_s: float = 30.0
    gate_timeout_s: float = 1800.0
    gate_notice_s: float = 60.0
    shared_from_mb: float = SHARED_FROM_MB
    controller: ControllerOptions = field(default_factory=ControllerOptions)
    processor: ProcessorOptions = field(default_factory=ProcessorOptions)

    @classmethod
    def from_env(
        cls,
        ctrl_rank_id: int,
        ctrl_ip: str,
        ctrl_port: int,
        ckpt_save_path: str | os.PathLike[str],
        *,
        fallback_path: str | os.PathLike[str] | None = None,
        data: DataMode = "refetch",
        environ: Mapping[str, str] | None = None,
    ) -> Config:
        """Check the arguments, add what the environment sets. Raises ConfigError naming what is wrong.

        >>> environ = {"LASTWORDS_LOST_CONFIRM_S": "5"}
        >>> Config.from_env(0, "127.0.0.1", 30051, "/tmp/c", environ=environ).controller.lost_confirm_s
        5.0
        """
        environ = os.environ if environ is None else environ
        if isinstance(ctrl_rank_id, bool) or not isinstance(ctrl_rank_id, int) or ctrl_rank_id < 0:
            raise ConfigError(f"ctrl_rank_id must be a rank (an int from 0), not {ctrl_rank_id!r}")
        ctrl_ip = checked_address("ctrl_ip", ctrl_ip, f"rank ctrl_rank_id={ctrl_rank_id}")
        if isinstance(ctrl_port, bool) or not isinstance(ctrl_port, int) or not 0 <= ctrl_port <= 65535:
            raise ConfigError(
                "ctrl_port must be a port, an int from 1 to 65535 such as 30051, or 0 for any free one, "
                f"not {ctrl_port!r}"
            )
        root = _path("ckpt_save_path", ckpt_save_path)
        fallback = None if fallback_path is None else _path("fallback_path", fallback_path)
        if drill := environ.get(DRILL):
            root, fallback = Path(drill) / CHECKPOINTS, None
        # A constructor does no I/O, so no links are followed (`starts.draw` does); `..` is seen through.
        if fallback is not None and os.path.normpath(fallback) == os.path.normpath(root):
            raise ConfigError(
                f"fallback_path is ckpt_save_path itself ({root}); give a directory on another file system, "
                f"or omit fallback_path"
            )
        if data not in ("refetch", "skip"):
            raise ConfigError(f"data must be 'refetch' or 'skip', not {data!r}")
        log_lines.check(environ.get(log_lines.VARIABLE, ""))
        timeline.check_target(environ.get(timeline.VARIABLE, ""))
        _warn_of_unknown(environ)
        job = environ.get("LASTWORDS_JOB", "")
        if job:
            layout.check_job_name(job)
        remote = address_of(environ["LASTWORDS_REMOTE"]) if environ.get("LASTWORDS_REMOTE") else None
        config = cls(
            ctrl_rank_id=ctrl_rank_id,
            ctrl_ip=ctrl_ip,
            ctrl_port=ctrl_port,
            ckpt_save_path=root,
            fallback_path=fallback,
            data=data,
            job=job,
            token=environ.get("LASTWORDS_TOKEN") or None,
            require_space=_switch("LASTWORDS_REQUIRE_SPACE", environ),
            remote=str(remote or ""),
            shared_from_mb=_megabytes("LASTWORDS_SHARED_FROM_MB", environ, SHARED_FROM_MB),
            controller=_with_seconds(ControllerOptions(), environ),
            processor=_with_seconds(ProcessorOptions(), environ),
        )
        return _with_seconds(config, environ)

    @property
    def roots(self) -> list[Path]:
        """Where checkpoints may be: the directory, and the fallback if there is one."""
        return [path for path in (self.ckpt_save_path, self.fallback_path) if path is not None]

    @property
    def sources(self) -> list[Path]:
        """`roots`, and the remote store if there is one: from where a run may resume."""
        return [*self.roots, *([address_of(self.remote)] if self.remote else [])]

    def with_copy(self) -> Config:
        """The same for a rank that keeps a copy of its last step."""
        return dataclasses.replace(self, processor=dataclasses.replace(self.processor, has_copy=True))


def variables() -> list[str]:
    """Every environment variable that is read here, sorted; each is named like the setting that it sets.

    >>> [name for name in variables() if not name.endswith("_S")]
    ['LASTWORDS_JOB', 'LASTWORDS_LOG', 'LASTWORDS_ON_INCIDENT', 'LASTWORDS_REMOTE', 'LASTWORDS_REQUIRE_SPACE', \
'LASTWORDS_SHARED_FROM_MB', 'LASTWORDS_TOKEN']
    """
    parts = (Config, ControllerOptions, ProcessorOptions)
    names = [setting.name for part in parts for setting in dataclasses.fields(part) if setting.name.endswith("_s")]
    others = ("job", "token", "remote", "require_space", "shared_from_mb")
    of_processes = (log_lines.VARIABLE, timeline.VARIABLE)  # each reads them itself: a URL is nothing for command lines
    return sorted({*of_processes, *(f"{_PREFIX}{name.upper()}" for name in {*names, *others})})


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    """A misspelt setting would be ignored without a word. Said by one rank of each host, whose environment it is."""
    known = [*variables(), LAUNCHER, AUTO, DRILL]
    unknown = sorted(name for name in environ if name.startswith(_PREFIX) and name not in known)
    for name in unknown if environ.get("LOCAL_RANK", "0") == "0" else ():
        # Without the prefix, or whatever has it would be near to something.
        near = difflib.get_close_matches(name[len(_PREFIX) :], [each[len(_PREFIX) :] for each in known], n=1)
        meant = f"; did you mean {_PREFIX}{near[0]}?" if near else ", see docs/operating.md"
        _log.warning("%s is set, but lastwords has no such setting, so it is ignored%s", name, meant)


def checked_address(name: str, given: object, runs_on: str) -> str:
    """A usable address, without the brackets of a URL. Raises ConfigError that calls the setting `name`.

    runs_on: the rank on whose host the controller runs, for the message.

    >>> checked_address("MASTER_ADDR", "[::1]", "rank 0")
    '::1'
    """
    text = given[1:-1] if isinstance(given, str) and given.startswith("[") and given.endswith("]") else given
    if text in ("0.0.0.0", "::", "*"):
        raise ConfigError(
            f"{name}={given!r} would listen on every interface; use the address at which all ranks reach the host of "
            f"{runs_on}"
        )
    if not isinstance(text, str) or not _is_address(text) or (text != given and ":" not in text):
        raise ConfigError(
            f"{name} must be an address of the host of {runs_on}, without a port, such as '10.0.0.7', '::1' or "
            f"'node-3', not {given!r}"
        )
    return text


def _switch(name: str, environ: Mapping[str, str]) -> bool:
    text = environ.get(name) or "0"
    if text not in ("0", "1"):
        raise ConfigError(f"{name}={text!r}: must be 0 or 1")
    return text == "1"


def _megabytes(name: str, environ: Mapping[str, str], default: float) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise ConfigError(f"{name}={text!r}: must be a number of megabytes from 0, such as 64")
    return value


def _is_address(text: str) -> bool:
    """Whether this may be an IP address or a host name; looks nothing up.

    >>> [_is_address(text) for text in ("10.0.0.7", "fe80::1%eth0", "node-3.rack_1", "localhost")]
    [True, True, True, True]
    >>> [_is_address(text) for text in ("", "not an ip!", "10.0.0", "10.0.0.7:30051", "[::1]", "-x", "a..b")]
    [False, False, False, False, False, False, False]
    """
    try:
        ipaddress.ip_address(text)
    except ValueError:
        # A name's last label is never a number (RFC 3696): what ends in one is an address with a mistake in it.
        return bool(_HOST_NAME.fullmatch(text)) and not text.rpartition(".")[2].isdigit()
    return True


def _path(name: str, value: object) -> Path:
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(
            f"{name} must be a directory, a str or pathlib.Path such as './ttp_checkpoints/', not {value!r}"
        )
    path = Path(text).absolute()
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name}={str(path)!r} has bytes that are not UTF-8, which no message can carry: choose another name"
        ) from error
    return path


def _with_seconds(options: _Options, environ: Mapping[str, str]) -> _Options:
    """`options` with every duration that the environment sets."""
    given: dict[str, Any] = {}
    for duration in (each.name for each in dataclasses.fields(options) if each.name.endswith("_s")):
        variable = f"{_PREFIX}{duration.upper()}"
        if variable in environ:
            given[duration] = _seconds(variable, environ[variable], or_zero=not getattr(options, duration))
    return dataclasses.replace(options, **given)


def _seconds(name: str, text: str, *, or_zero: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 < value < float("inf") or (or_zero and value == 0)):
        raise ConfigError(f"{name}={text!r}: must be a positive number of seconds, such as 2.5")
    return value
