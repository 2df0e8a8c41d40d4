"""Who holds a controller's address, and how a new controller comes to hold it.

Every controller keeps a *run file* while it serves, `/dev/shm/lastwords-{uid}-controllers/{ip}-{port}.json`, mode 0600:
pid and start ticks, job, generation, token, where its log is, and a few numbers that show whether it moves. A job that
is started again on the same address finds the controller of the incident before, perhaps still publishing: it asks it
to end (SIGTERM means "when no rank is left and no incident is open") and waits as long as it moves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import json
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lastwords import clock
from lastwords.checkpoint import starts
from lastwords.checkpoint.codec import from_json
from lastwords.controller.events import ControllerOptions, JobMemory, Registered, Remember
from lastwords.errors import (
    BusyError,
    ConfigError,
    FormatError,
    LastWordsError,
    StorageError,
    UnavailableError,
    is_shortage,
    ranks_text,
)
from lastwords.liveness import leftovers, paths, process_id
from lastwords.liveness.robust_mutex import state_of

# What a controller is started with: one frozen value, which its command line carries as JSON.
#
# The token is not part of it: command lines can be read by every user of a host. It travels in LASTWORDS_TOKEN.

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
        record = from_json(paths.read_own(path, RUN_FILE_BYTES_MAX), RunRecord)
    except (OSError, ConfigError, FormatError):
        return None
    return record if record.pid > 0 else None


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


# What controllers of earlier starts are still about to publish, and waiting for it.
#
# Whoever starts again wants the checkpoint of the incident before. On the same address the new controller waits for
# the old one (`handover`); a start that takes another port each time, or whose controller runs on another host, finds
# it by what it does in the checkpoint directory: its claim is locked while it lives, and its files lie in a temporary
# directory until they are published or given up. On the same host its run file says in addition which stage it is in.

_BEFORE_PUBLICATION = ("settling", "proceeding", "saving", "verifying", "publishing")


def await_publications(
    spec: ControllerSpec,
    *,
    shm_root: Path = paths.SHM_ROOT,
    stall_s: float = STALL_S,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Return once no controller of an earlier generation is about to publish in this job's directories.

    Nor one that follows a controller of this job that was killed on this host. True if that took time, in which such a
    one may have taken the address of this job. One that does not move for `stall_s` is given up: UnavailableError if it
    is of this very job, else a warning. BusyError where ranks of this job still live on this host, and train or are
    left without a controller: they outlive a launcher that was killed.
    """
    newest: dict[str, object] = {}
    living: object = None
    given_up: set[str] = set()
    waited = False
    moved_mono_s = lived_mono_s = clock.mono_s()
    while True:
        killed = _killed_here(spec, shm_root)  # first: who follows one of them has a run file later
        running = list(_earlier_here(spec, shm_root))
        serving = {one.generation for one in running if one.job == spec.job}
        trains = next((one for one in running if _trains(one, spec)), None)
        orphans = {path: one for path, one in killed.items() if not one.followed and path not in given_up}
        following = {path: one for path, one in killed.items() if one.followed and one.spec.generation not in serving}
        found = _under_way(spec, running) | following | orphans
        now_s = clock.mono_s()
        if trains is None and not found:
            return waited
        if (trains and trains.pid, orphans) != living:
            living, lived_mono_s = (trains and trains.pid, orphans), now_s
        elif (trains or orphans) and now_s - lived_mono_s > LIVE_GRACE_S:
            _refuse_living(trains, orphans)
            given_up.update(orphans)
            continue
        if found != newest:
            if not newest:
                _log.info(
                    "waiting for an earlier start of this job, which may still publish a checkpoint: %s",
                    ", ".join(sorted(found)),
                )
            newest, moved_mono_s = found, now_s
        if found and now_s - moved_mono_s > stall_s:
            what = f"{', '.join(sorted(found))}: no progress for {stall_s:g} s"
            if any(f"-{spec.job}-g" in name or f" {spec.job}," in name for name in found):
                raise UnavailableError(
                    f"an earlier start of this job may still publish a checkpoint: {what}; read the controllers' "
                    f"logs in {spec.log_path.parent}, and end that controller if it hangs"
                )
            _log.warning("%s; continuing without it", what)
            return waited
        sleep(POLL_INTERVAL_S)
        waited = True


def _refuse_living(trains: RunRecord | None, orphans: Mapping[str, _Orphans]) -> None:
    """BusyError if ranks of this host are among them; what a launcher has not seen to by now nobody waits for."""
    if trains is not None:
        raise BusyError(
            f"{trains.live} ranks of an earlier start of this job still train, with the {trains}: they go on when "
            "their launcher is killed. End them with SIGTERM, which saves, and start again; or give this job "
            "another name (LASTWORDS_JOB) and directory"
        )
    for path, one in orphans.items():
        if one.here:
            raise BusyError(
                "the controller of an earlier start of this job was killed, no other one has followed it, and ranks of "
                f"that start still live on this host ({ranks_text(one.here)}). To save what they hold, start a "
                f"controller for them (lastwords controller --recover {path}) and end them with SIGTERM; to discard "
                "it, end them with SIGKILL. Then start again"
            )
        _log.warning(
            "the controller of an earlier start of this job was killed, and no other one has followed it for %g s; "
            "what it has left is not waited for any longer: %s (%s)",
            LIVE_GRACE_S,
            one.left,
            path,
        )


def _under_way(spec: ControllerSpec, running: list[RunRecord]) -> dict[str, object]:
    roots = [spec.root] if spec.fallback_root is None else [spec.root, spec.fallback_root]
    found: dict[str, object] = dict(starts.under_way(roots, (spec.job, spec.generation)))
    for one in running:
        # One without a rank follows another one: they come back at once, or count as dead and an incident begins.
        follows = one.job == spec.job and one.stage == "watching" and one.live == 0
        if follows or one.stage in _BEFORE_PUBLICATION:
            found[str(one)] = one
    return found


def _killed_here(spec: ControllerSpec, shm_root: Path) -> dict[str, _Orphans]:
    """What killed controllers of earlier starts of this job may have left to be published, by state file.

    UnavailableError where this process is short of something: then nobody can tell.
    """
    found: dict[str, _Orphans] = {}
    try:
        for directory in paths.job_dirs(spec.job, root=shm_root):
            try:
                one = _orphans(directory)
            except (ConfigError, FormatError) as error:
                _log.debug("%s says nothing of an earlier start: %s", directory, error)
                continue
            if one is None or one.spec.root != spec.root or one.spec.generation >= spec.generation or one.is_over:
                continue
            with leftovers.no_controller_serves(directory) as nobody:
                followed = not nobody
            if followed or one.here or one.left:
                found[str(directory / paths.STATE_NAME)] = dataclasses.replace(one, followed=followed)
    except OSError as error:
        if is_shortage(error):
            raise UnavailableError(
                f"cannot tell whether an earlier start of job {spec.job} may still publish, by what is in {shm_root}: "
                f"{error.strerror}; raise that limit, or wait, and start again"
            ) from error
        _log.debug("cannot look for controllers of earlier starts that were killed in %s: %s", shm_root, error)
    return found


def _earlier_here(spec: ControllerSpec, shm_root: Path) -> Iterator[RunRecord]:
    """Controllers of earlier starts in this directory that run on this host."""
    for record in running_here(root=shm_root):
        if Path(record.log).parent == spec.log_path.parent and record.generation < spec.generation:
            yield record


def _trains(record: RunRecord, spec: ControllerSpec) -> bool:
    return record.job == spec.job and record.is_idle_stage and record.live > 0


# What a controller keeps for the one that follows it, if it is killed: one file in shared memory.
#
#     /dev/shm/lastwords-{uid}-{job}-g{generation}-{nonce}/controller.json    mode 0600: it holds the job's token
#     /dev/shm/lastwords-{uid}-{job}-g{generation}-{nonce}/controller.lock    held by the controller that serves
#
# A controller can only run on the host whose address the ranks know, and shared memory lives as long as that. So
# writing takes some microseconds, needs no fsync, and is done before each act that rests on it. A controller that ends
# by itself removes the file with the directory: where it is left, its controller was killed. While it serves, it
# touches the file every fifth of a second: where the time of the last change stands still, the controller is stopped
# or hangs.

STATE_BYTES_MAX = 64 << 20
"""Of 16 384 ranks it is some 4 MB."""


@dataclass(frozen=True, slots=True)
class StateOwner:
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

    owner: StateOwner
    spec: ControllerSpec
    token: str
    members: tuple[Registered, ...]
    memory: JobMemory

    @property
    def remembered(self) -> Remember:
        """As the next core takes it."""
        return Remember(self.members, self.memory)


@dataclass(frozen=True, slots=True)
class _StateDocument:
    """The same on its way out; the members never change once they are there."""

    owner: StateOwner
    spec: ControllerSpec
    token: str
    members: msgspec.Raw
    memory: JobMemory


@dataclass(frozen=True, slots=True)
class _Owned:
    owner: StateOwner


class StateFile:
    """The file of the controller that serves. One thread."""

    def __init__(self, path: Path, owner: StateOwner, spec: ControllerSpec, token: str) -> None:
        self.path = path
        self._facts = (owner, spec, token)
        self._members: tuple[tuple[Registered, ...], msgspec.Raw] | None = None
        self._unwritten: Remember | None = None
        self._problem = ""

    def write(self, remembered: Remember) -> None:
        """Keep this. What cannot be written is said once, and an older content does not stay: it would be wrong."""
        if self._members is None or self._members[0] is not remembered.members:
            self._members = remembered.members, msgspec.Raw(msgspec.json.encode(remembered.members))
        content = _StateDocument(*self._facts, self._members[1], remembered.memory)
        try:
            raw = msgspec.json.encode(content, enc_hook=str)
            with paths.replacing(self.path) as fd:
                paths.write_all(fd, raw)
            os.close(fd)
            self._unwritten, self._problem = None, ""
        except (OSError, ValueError) as error:  # a path that is no text cannot be encoded
            self._unwritten = remembered
            with contextlib.suppress(OSError):
                self.path.unlink()
            if str(error) != self._problem:
                _log.error("no controller can follow if this one is killed: %s cannot be written: %s", self.path, error)
            self._problem = str(error)

    def write_again(self) -> None:
        """What could not be written, if anything: nothing else may happen for the rest of the job."""
        if self._unwritten is not None:
            self.write(self._unwritten)

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
        kept = from_json(raw, KeptState, dec_hook=_path)
        kept.spec.check()
    except (FormatError, ConfigError) as error:
        raise FormatError(
            f"{path} is damaged, so no controller can follow; the ranks go on without one, and the job can be started "
            f"again from its newest checkpoint: {error}"
        ) from error
    own = paths.state_path(kept.spec.job, kept.spec.generation, kept.spec.nonce)
    if own.parent.name != path.resolve().parent.name:
        raise FormatError(f"{path} belongs to another job or start, whose files are in {own.parent}; use the one there")
    return kept


def owner(path: Path) -> StateOwner | None:
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


def may_be_followed(job: str, generation: int, *, elsewhere: bool = True, root: Path = paths.SHM_ROOT) -> bool:
    """Whether another controller may follow one of this start that was killed on this host, or nobody can tell.

    It may as long as the state is there and a rank that is not known to be dead lives on this host, or (if `elsewhere`)
    was on another one. So it may where a process holds the lock beside the state: that one follows already.
    """
    try:
        return any(_may_be_followed(at, elsewhere) for at in paths.job_dirs(job, generation, root=root))
    except (OSError, LastWordsError) as error:
        _log.info("cannot tell whether job %s, generation %d has living ranks here: %s", job, generation, error)
        return True


def _may_be_followed(directory: Path, elsewhere: bool) -> bool:
    with leftovers.no_controller_serves(directory) as nobody:
        if not nobody:
            return True
    orphans = _orphans(directory)
    return orphans is not None and bool(orphans.here or (elsewhere and orphans.left))


def state_is_needed(directory: Path, *, job: str, root: Path) -> bool:
    """Whether another controller may follow one that was killed by what is in `directory`, or nobody can tell.

    For `leftovers.remove_dead_job_dirs`. job, root: of the job that starts; its earlier ranks had ended on other hosts.
    """
    try:
        orphans = _orphans(directory)
    except (OSError, LastWordsError) as error:
        _log.info("cannot tell whether %s is needed: %s", directory, error)
        return not (isinstance(error, ConfigError | FormatError) and _is_quiet(directory))
    if orphans is None:
        return False
    is_own = (orphans.spec.job, orphans.spec.root) == (job, root)
    return bool(orphans.here or (orphans.left and not is_own))


@dataclass(frozen=True, slots=True)
class _Orphans:
    """What a controller that was killed on this host has left behind.

    here: ranks that live on this host, one of which starts another controller. left: for what else a launcher, or a
    person, may start one, in words: ranks of other hosts that are not known to be dead, or an order to publish.
    is_over: how the job ends is decided, and nothing will be published any more. followed: a process holds the lock.
    """

    spec: ControllerSpec
    here: tuple[int, ...]
    left: str
    is_over: bool
    followed: bool = False


def _orphans(directory: Path) -> _Orphans | None:
    """None without the state: then nobody can follow. Raises as `read`, where there is one. Leaves the lock alone."""
    try:
        kept, is_quiet = read(directory / paths.STATE_NAME), _is_quiet(directory)
    except UnavailableError as error:
        if is_shortage(error):
            raise
        return None
    except FileNotFoundError:
        return None
    gone = {one.rank for one in kept.memory.gone}
    places = {rank: one.process for rank, one in enumerate(kept.members) if rank not in gone}
    here = {rank: one for rank, one in places.items() if one.host_id == process_id.host_id()}
    living = tuple(rank for rank, one in here.items() if process_id.is_alive(one) and not _has_left(directory, rank))
    away = [rank for rank in places.keys() - here.keys() if not _has_left(directory, rank)]  # in another pid namespace
    left = [f"{ranks_text(away)} on other hosts"] if away else []
    if kept.memory.publishing is not None:
        left.append(f"the publication of step {kept.memory.publishing.step}")
    if is_quiet:
        left.clear()
    return _Orphans(kept.spec, living, ", ".join(left), kept.memory.outcome is not None)


def _is_quiet(directory: Path) -> bool:
    """Whether the state was written so long ago that nobody waits for another controller. OSError."""
    return clock.wall_ns() / 1e9 - (directory / paths.STATE_NAME).stat().st_mtime > starts.QUIET_S


def _has_left(directory: Path, rank: int) -> bool:
    """Whether its life line here says that it has ended, or given it back and does not watch a controller any more."""
    try:
        return state_of(directory / f"rank_{rank}.life") is not None
    except LastWordsError:
        return False


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
