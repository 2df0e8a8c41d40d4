"""Who holds a controller's address, and how a new controller comes to hold it.

Every controller keeps a *run file* while it serves, `/dev/shm/lastwords-{uid}-controllers/{ip}-{port}.json`, mode 0600:
pid and start ticks, job, generation, token, where its log is, and a few numbers that show whether it moves. A job that
is started again on the same address finds the controller of the incident before, perhaps still publishing: it asks it
to end (SIGTERM means "when no rank is left and no incident is open") and waits as long as it moves.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import os
import re
import signal
import socket
import time
import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lastwords import clock
from lastwords.checkpoint.codec import from_json
from lastwords.errors import ConfigError, FormatError, StorageError, UnavailableError, is_shortage
from lastwords.liveness import paths, process_id

_log = logging.getLogger(__name__)

LIVE_GRACE_S = 5.0
"""A controller is believed to serve living ranks only after this long: when a launcher has just killed a whole job,
its controller may need lost_confirm_s (2 s: ranks of its own host have died) and a keepalive (1.8 s) to see that a rank
of another host is gone."""

STALL_S = 150.0
"""Longer than a controller that still works is silent, by the defaults: writers report every second, inside fsync too,
and its own work on the finished files has storage_timeout_s (120 s). On another host only its files are seen, so there
a writer's fsync that takes longer than this looks like a hang."""

IN_USE_GRACE_S = 1.0
"""A controller that has just ended may still be closing its port."""

POLL_INTERVAL_S = 0.05
ASK_AGAIN_S = 5.0
RUN_FILE_BYTES_MAX = 64 * 1024
_ADDRESS = "the controller's address (ctrl_ip, or MASTER_ADDR with protect)"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Content of a run file. `live`: ranks that can be expected to go on. `progress` grows while anything moves."""

    address: str
    pid: int
    start_ticks: int
    job: str
    generation: int
    token: str
    log: str
    stage: str = "registering"
    live: int = 0
    progress: int = 0

    @property
    def is_running(self) -> bool:
        """Whether that very process still runs."""
        return process_id.runs(self.pid, self.start_ticks)

    @property
    def is_idle_stage(self) -> bool:
        """Whether it is in no incident: it waits for ranks, or watches them train."""
        return self.stage in ("registering", "watching")

    def __str__(self) -> str:
        return f"controller of job {self.job}, generation {self.generation} (process {self.pid}, log {self.log})"


def run_directory(*, root: Path = paths.SHM_ROOT) -> Path:
    """Where this user's run files are."""
    return root / f"lastwords-{os.getuid()}-controllers"


def run_file_path(ip: str, port: int, *, root: Path = paths.SHM_ROOT) -> Path:
    """Run file for an address; a host name and its address give the same one.

    >>> run_file_path("::1", 30051).name
    '__1-30051.json'
    """
    address = resolve(ip, port)[1][0]
    return run_directory(root=root) / f"{re.sub(r'[^A-Za-z0-9.-]', '_', address)}-{port}.json"


def resolve(ip: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """First address of `ip`, with its family; raises ConfigError if there is none."""
    try:
        found = socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{_ADDRESS} {ip!r} is neither an IP address nor a known host name: {error}") from error
    family, _, _, _, address = found[0]
    if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback and not _means_loopback(ip):
        _log.warning(
            "%s %r resolves to %s on this host, which other hosts cannot reach; use its IP address instead",
            _ADDRESS,
            ip,
            address[0],
        )
    return family, address  # type: ignore[return-value]


def _means_loopback(ip: str) -> bool:
    try:
        return ipaddress.ip_address(ip.partition("%")[0]).is_loopback
    except ValueError:
        return ip.startswith(("localhost", "ip6-"))


class RunFile:
    """This controller's own run file; written on the first `update`. One thread."""

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = path
        self._record = record
        self._written: RunRecord | None = None

    def update(self, *, stage: str, live: int, progress: int) -> None:
        """Make the file say this; costs nothing if it does already. Raises StorageError or ConfigError."""
        record = RunRecord(**{**asdict(self._record), "stage": stage, "live": live, "progress": progress})
        if record == self._written:
            return
        paths.make_private_dir(self.path.parent)
        try:
            with paths.replacing(self.path) as fd:
                paths.write_all(fd, json.dumps(asdict(record)).encode())
            os.close(fd)
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error}", errno=error.errno or 0) from error
        self._written = record

    def remove(self) -> None:
        """Remove the file, unless a newer controller has put its own there."""
        found = read_run_file(self.path)
        if found is not None and (found.pid, found.start_ticks) == (self._record.pid, self._record.start_ticks):
            with contextlib.suppress(OSError):
                self.path.unlink()
                self.path.parent.rmdir()  # stays if other controllers run


def read_run_file(path: Path) -> RunRecord | None:
    """Content of a run file of this user; None if there is none, or none that can be believed."""
    try:
        record = RunRecord(**from_json(paths.read_own(path, RUN_FILE_BYTES_MAX), dict[str, Any]))
        hints = typing.get_type_hints(RunRecord)
        believable = record.pid > 0 and all(type(value) is hints[name] for name, value in asdict(record).items())
        return record if believable else None
    except (OSError, ConfigError, FormatError, TypeError):
        return None


def running_here(*, root: Path = paths.SHM_ROOT) -> list[RunRecord]:
    """Every controller of this user that runs on this host, sorted by address."""
    try:
        names = sorted(os.listdir(run_directory(root=root)))
    except OSError:
        return []
    found = [read_run_file(run_directory(root=root) / name) for name in names if name.endswith(".json")]
    return [record for record in found if record is not None and record.is_running]


def remove_dead_run_files(*, root: Path = paths.SHM_ROOT, young_s: float = 60.0) -> None:
    """Remove run files of controllers that were killed. Young ones stay, in case a new one is just being put there."""
    directory = run_directory(root=root)
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(directory)):
            record = read_run_file(directory / name)
            age_s = clock.wall_ns() / 1e9 - (directory / name).lstat().st_mtime
            if record is not None and not record.is_running and age_s > young_s:
                (directory / name).unlink(missing_ok=True)


def port_is_free(ip: str, port: int) -> bool:
    """Whether a server could listen there now. ConfigError where it never could, UnavailableError in a shortage."""
    family, address = resolve(ip, port)
    with _socket(family, ip) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger are no servers
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"{_ADDRESS} {ip!r} is not an address of this host ({socket.gethostname()}), on which the "
                    "controller has to run"
                ) from error
            if error.errno == errno.EACCES:
                raise ConfigError(f"ctrl_port={port} needs root privileges; choose a port from 1024 on") from error
            raise ConfigError(f"cannot listen on {ip} port {port}: {error.strerror}") from error
    return True


def _socket(family: socket.AddressFamily, ip: str) -> socket.socket:
    try:
        return socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        if not is_shortage(error):
            raise ConfigError(f"{_ADDRESS} {ip!r} cannot be used: {error.strerror}") from error
        raise UnavailableError(
            f"cannot look for a free port: {error.strerror}; raise the limit on open files (ulimit -n), or close some"
        ) from error


def ask_to_end(record: RunRecord) -> None:
    """Send SIGTERM to exactly that process; harmless if it has ended."""
    try:
        fd = os.pidfd_open(record.pid)
    except OSError:
        return
    try:
        # Looked at with the pidfd open: the pid cannot be another process's now.
        if process_id.start_ticks(record.pid) == record.start_ticks:
            signal.pidfd_send_signal(fd, signal.SIGTERM)
    except (OSError, UnavailableError):
        pass
    finally:
        os.close(fd)


def await_address(
    ip: str,
    port: int,
    *,
    root: Path = paths.SHM_ROOT,
    stall_s: float = STALL_S,
    live_grace_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once a controller may listen on this address; ends an idle controller that is still there. Port 0 is free.

    Raises ConfigError if the address is impossible, is held by something else, or by a controller whose ranks are
    alive; UnavailableError if the controller there does not move for `stall_s`.
    """
    path = run_file_path(ip, port, root=root)
    live_grace_s = LIVE_GRACE_S if live_grace_s is None else live_grace_s
    asked_mono_s: float | None = None
    unheld_mono_s: float | None = None
    newest: RunRecord | None = None
    began_mono_s = moved_mono_s = clock.mono_s()
    while True:
        free = port_is_free(ip, port)
        record = read_run_file(path)
        now_s = clock.mono_s()
        if record is None or not record.is_running:
            if free:
                return
            unheld_mono_s = now_s if unheld_mono_s is None else unheld_mono_s
            if now_s - unheld_mono_s > IN_USE_GRACE_S:
                raise ConfigError(_in_use(ip, port))
            sleep(POLL_INTERVAL_S)
            continue
        unheld_mono_s = None
        if record != newest:
            if newest is None or record.stage != newest.stage:
                _log.info("waiting for the %s, which is %s", record, record.stage)
            newest, moved_mono_s = record, now_s
        if record.is_idle_stage and record.live > 0 and now_s - began_mono_s > live_grace_s:
            raise ConfigError(
                f"{ip} port {port} is in use by the {record}, which is {record.stage} with {record.live} living "
                "ranks; end that job first, or choose another ctrl_port"
            )
        if now_s - moved_mono_s > stall_s:
            raise UnavailableError(
                f"{ip} port {port} is in use by the {record}, which has been {record.stage} without progress for "
                f"{stall_s:g} s; read its log, and end it (kill -9 {record.pid}) if it hangs"
            )
        if asked_mono_s is None or now_s - asked_mono_s > ASK_AGAIN_S:
            ask_to_end(record)
            asked_mono_s = now_s
        sleep(POLL_INTERVAL_S)


def _in_use(ip: str, port: int) -> str:
    return (
        f"{ip} port {port} is in use by a process that is not a lastwords controller of this user; choose another "
        f"ctrl_port, or end that process (ss -ltnp 'sport = :{port}' shows it)"
    )
