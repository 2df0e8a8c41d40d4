"""What the scheduler of a cluster keeps for the one that follows it, in a directory of its own below MS_RECOVERY_PATH.

    cluster/token       what every process of the cluster knows, and nobody else
    cluster/state.json  version, address, workers, generation (the newest one), step, and the members by name
    cluster/state.lock  held by the scheduler that runs

The directory has mode 0700. The state is durable before whatever rests on it is done: a name is given away, a
generation begins. It is removed once all workers have come to their end.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os.path import exists
from pathlib import Path
from typing import Annotated

import msgspec

from lastwords.checkpoint.appearing import write_file
from lastwords.checkpoint.codec import INTEGER_MAX, Number, from_json
from lastwords.checkpoint.layout import check_job_name
from lastwords.checkpoint.lock_file import LockFile
from lastwords.checkpoint.system import REAL_OS, read_whole, storage_errors
from lastwords.errors import BusyError, ConfigError, FormatError, StorageError, UnavailableError
from lastwords.launcher.environment import Cluster, is_name
from lastwords.launcher.registry import Process, Worker

_log = logging.getLogger(__name__)

VERSION = 1
TOKEN_CHARS = 32
GENERATIONS_MAX = 1 << 53
"""More than any cluster has, and with room for the next ones."""

STATE_BYTES_MAX = 64 << 20
"""Some 200 bytes a worker: more than any cluster has."""


@dataclass(frozen=True, slots=True)
class KeptCluster:
    """The file's content. generation: of the newest one, -1 before the first. step: saved by then.

    No field has a default: what a file lacks would have it.
    """

    version: Annotated[int, msgspec.Meta(ge=VERSION, le=VERSION)]
    address: str
    workers: Annotated[int, msgspec.Meta(ge=1, le=INTEGER_MAX)]
    job: str
    generation: Annotated[int, msgspec.Meta(ge=-1, le=GENERATIONS_MAX)]
    step: Number
    members: Mapping[str, Worker]


@dataclass(frozen=True, slots=True)
class _StateOfAnyVersion:
    version: int = 0


class ClusterState:
    """The directory of `cluster`. One thread."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._directory = directory_of(cluster.path)
        self._state = self._directory / "state.json"
        self._lock = self._directory / "state.lock"
        self._locks = contextlib.ExitStack()
        self._lock_inode: int | None = None
        """While it is held; no other file has it as long."""
        self._token = ""
        self._written = False

    @contextlib.contextmanager
    def held(self) -> Iterator[KeptCluster]:
        """What there is, or what a new cluster begins with; nobody else schedules meanwhile.

        BusyError if somebody does, ConfigError for the path of another cluster, FormatError for a file that is damaged
        or newer, StorageError.
        """
        with self._locks:
            self._hold()
            kept = self._read()
            self._written = self._state.exists()
            try:
                yield kept
            finally:
                self._lock_inode = None

    def _hold(self) -> None:
        """BusyError, StorageError."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot create {self._directory}: {error.strerror}", errno=error.errno or 0) from error
        with contextlib.ExitStack() as lock, storage_errors("locking", self._lock):
            if not lock.enter_context(LockFile(self._lock).held()):
                raise BusyError(
                    f"another scheduler runs with MS_RECOVERY_PATH={self._cluster.path}: end it first, or give this "
                    "cluster a path of its own"
                )
            if self._has_others_token:  # its scheduler is down
                raise BusyError(
                    f"MS_RECOVERY_PATH={self._cluster.path} was removed, and is another cluster's by now: give each "
                    "cluster a path of its own"
                )
            self._lock_inode = self._lock.stat().st_ino
            self._locks.push(lock.pop_all())

    @property
    def is_removed(self) -> bool:
        """Whether somebody has removed the token, the state or the lock since; also where they cannot be looked at."""
        token, state = exists(token_path(self._cluster.path)), exists(self._state)
        return self._has_lost_lock or (self._token != "" and not token) or (self._written and not state)

    @property
    def _has_lost_lock(self) -> bool:
        try:
            return self._lock_inode not in (None, self._lock.stat().st_ino)
        except OSError:
            return self._lock_inode is not None

    @property
    def _has_others_token(self) -> bool:
        """StorageError."""
        try:
            return self._token != "" and self._token != read_token(self._cluster.path)
        except (UnavailableError, FormatError):
            return False

    def write(self, kept: KeptCluster) -> None:
        """Durable on return; so is the token, and the directory held, where somebody has removed them.

        StorageError, BusyError if another scheduler has the directory by now, or has had it since.
        """
        if is_removed := self.is_removed:
            self._restore()
        write_file(self._state, msgspec.json.encode(kept), replace=True)
        self._written = True
        if is_removed:
            _log.warning(
                "%s was removed while its cluster runs; its token and state are written again: remove it once the "
                "cluster has ended",
                self._directory,
            )

    def _restore(self) -> None:
        if self._has_lost_lock:
            self._hold()
        if self._token:
            write_file(token_path(self._cluster.path), self._token.encode(), replace=True)

    def token(self) -> str:
        """The cluster's; drawn by its first scheduler. StorageError, FormatError."""
        path = token_path(self._cluster.path)
        if not path.exists():
            write_file(path, secrets.token_hex(TOKEN_CHARS // 2).encode(), replace=True)
        self._token = read_token(self._cluster.path)
        return self._token

    def remove(self) -> None:
        """The cluster has come to its end; the next one with this path is another one. StorageError.

        One that has taken the path already, since somebody had removed it, keeps what it has.
        """
        if self._has_lost_lock:
            if not self._directory.exists():
                return
            try:
                self._hold()
            except BusyError:
                return
        try:
            for path in (self._state, token_path(self._cluster.path)):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(
                f"all workers have come to their end, and {self._directory} cannot be removed ({error.strerror}): "
                "remove it, or the next start with this MS_RECOVERY_PATH finds nothing left to do",
                errno=error.errno or 0,
            ) from error

    def _read(self) -> KeptCluster:
        cluster = self._cluster
        try:
            raw = read_whole(self._state, REAL_OS, bytes_max=STATE_BYTES_MAX)
        except FileNotFoundError:
            return KeptCluster(VERSION, cluster.address, cluster.workers, f"cluster-{secrets.token_hex(6)}", -1, 0, {})
        try:
            kept = None if from_json(raw, _StateOfAnyVersion).version > VERSION else from_json(raw, KeptCluster)
            if kept is not None:
                check_job_name(kept.job)
                _check_members(kept)
        except (FormatError, ConfigError) as error:
            raise FormatError(
                f"{self._state} is damaged ({error}): if no worker of this cluster runs any more, remove it; training "
                "then goes on from the newest checkpoint"
            ) from error
        if kept is None:
            raise FormatError(
                f"{self._state} was written by a newer lastwords: start the scheduler with that one, or give this "
                "cluster another MS_RECOVERY_PATH"
            )
        for what, there, here in (
            ("at", kept.address, cluster.address),
            ("with MS_WORKER_NUM", kept.workers, cluster.workers),
        ):
            if there != here:
                raise ConfigError(
                    f"MS_RECOVERY_PATH={cluster.path} belongs to a cluster {what} {there}, and this one is {what} "
                    f"{here}: give it a path of its own, or remove {self._directory} once that cluster has ended"
                )
        return kept


def _check_members(kept: KeptCluster) -> None:
    """Each name has a rank and a process of its own, and once a generation has begun each rank has a name. FormatError.

    The types of registry.py say nothing of ranges, since it is pure.
    """
    names: dict[int, str] = {}
    processes: dict[Process, str] = {}
    for name, one in kept.members.items():
        if not is_name(name):
            raise FormatError(f"{name!r:.80} is no name of a worker")
        if not 0 <= one.rank < kept.workers:
            raise FormatError(f"{name!r} is rank {one.rank}, and there are {kept.workers} workers")
        pid, ticks = one.process.pid, one.process.start_ticks
        if not (0 < pid <= INTEGER_MAX and 0 <= ticks <= INTEGER_MAX):
            raise FormatError(f"{name!r} is process {pid} of {ticks} ticks, which is none")
        if not is_name(one.process.host):
            raise FormatError(f"{name!r} runs on host {one.process.host!r:.80}, which is none")
        if (other := processes.setdefault(one.process, name)) != name:
            raise FormatError(f"{other!r} and {name!r} are both process {pid}")
        if one.rank in names:
            raise FormatError(f"{names[one.rank]!r} and {name!r} are both rank {one.rank}")
        names[one.rank] = name
    if kept.generation >= 0 and len(names) < kept.workers:
        missing = next(rank for rank in range(kept.workers) if rank not in names)
        raise FormatError(f"{kept.workers} workers have begun, and rank {missing} has no name")


def directory_of(path: Path) -> Path:
    """The scheduler's directory below MS_RECOVERY_PATH."""
    return path / "cluster"


def token_path(path: Path) -> Path:
    """Where the processes of a cluster find its token."""
    return directory_of(path) / "token"


def read_token(path: Path) -> str:
    """The cluster's token, below MS_RECOVERY_PATH.

    UnavailableError where there is none, StorageError if it cannot be read, FormatError for what is no token.
    """
    file = token_path(path)
    try:
        token = read_whole(file, REAL_OS, bytes_max=STATE_BYTES_MAX)
    except FileNotFoundError:
        raise UnavailableError(
            f"MS_RECOVERY_PATH={path} has no cluster yet: its scheduler has not started, or was started with another "
            "MS_RECOVERY_PATH"
        ) from None
    if len(token) != TOKEN_CHARS or not token.isalnum():
        raise FormatError(f"{file} is damaged: remove it, and start the scheduler and all workers again")
    return token.decode("ascii")
