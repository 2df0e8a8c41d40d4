"""Names of what a job keeps in shared memory: one directory for each start of a job, private to its user.

    /dev/shm/lastwords-{uid}-{job}-g{generation}-{nonce}/rank_{k}.life   the robust mutex of rank k
    /dev/shm/lastwords-{uid}-{job}-g{generation}-{nonce}/rank_{k}.box    the black box of rank k
    /dev/shm/lastwords-{uid}-{job}-g{generation}-{nonce}/rank_{k}.copy*  its whole copies, where they are asked for
    /dev/shm/lastwords-{uid}-{job}-g{generation}-{nonce}/controller.*    what the controller keeps for its successor

Generations are drawn for each checkpoint directory, so two jobs of one name on one host may have the same one. The
nonce, random and agreed upon by the ranks of a start, keeps their files apart; "" leaves it out.
A job's name comes from the environment or from the wire, so it is checked here before it becomes a path.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from lastwords.errors import ConfigError, StorageError

SHM_ROOT = Path("/dev/shm")
"""A tmpfs on every Linux: pages that outlive the process that wrote them, and no disk behind them."""

_JOB = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NONCE = re.compile(r"[0-9a-f]{0,32}")
STATE_NAME = "controller.json"
LOCK_NAME = "controller.lock"

JOB_DIR = re.compile(r"lastwords-(\d+)-([A-Za-z0-9_.-]{1,64})-g(\d+)(?:-([0-9a-f]{1,32}))?")
"""Name of a job's directory: user, job, generation, nonce."""

_OURS = re.compile(r"(rank_\d+\.(life|box|copy[01])|controller\.(json|lock))(\.\d+\.new)?")
_OF_RANKS = re.compile(r"rank_\d+\.(box|copy[01])(\.\d+\.new)?")
"""What only ranks of the same host read."""


def check_job(job: str) -> str:
    """The job's name, unchanged, if it may become part of a path; raises ConfigError otherwise.

    >>> check_job("digits-42")
    'digits-42'
    """
    if not _JOB.fullmatch(job):
        raise ConfigError(f"job name {job!r} must have 1 to 64 characters, each one of A-Z a-z 0-9 _ . -")
    return job


def check_nonce(nonce: str) -> str:
    """The nonce, unchanged, if it may become part of a path; raises ConfigError otherwise."""
    if not _NONCE.fullmatch(nonce):
        raise ConfigError(f"nonce {nonce!r} must have at most 32 characters, each one of 0-9 a-f")
    return nonce


def job_dir(job: str, generation: int, nonce: str = "", *, root: Path = SHM_ROOT) -> Path:
    """Directory of one start of a job; not created here.

    >>> job_dir("digits", 2, "5f3a").name.endswith("-digits-g2-5f3a")
    True
    """
    if generation < 0:
        raise ConfigError(f"generation {generation} must not be negative")
    name = f"lastwords-{os.getuid()}-{check_job(job)}-g{generation}"
    return root / (f"{name}-{check_nonce(nonce)}" if nonce else name)


def job_dirs(job: str, generation: int | None = None, *, root: Path = SHM_ROOT) -> list[Path]:
    """Directories of the starts with this job and generation (None: any), of any user and nonce. OSError."""
    found = ((name, JOB_DIR.fullmatch(name)) for name in sorted(os.listdir(root)))
    of_job = ((root / name, int(of[3])) for name, of in found if of is not None and of[2] == job)
    return [path for path, number in of_job if generation in (None, number)]


def life_path(job: str, generation: int, rank: int, nonce: str = "", *, root: Path = SHM_ROOT) -> Path:
    """File of rank `rank`'s robust mutex.

    >>> life_path("digits", 2, 3).name
    'rank_3.life'
    """
    return job_dir(job, generation, nonce, root=root) / f"rank_{_check_rank(rank)}.life"


def box_path(job: str, generation: int, rank: int, nonce: str = "", *, root: Path = SHM_ROOT) -> Path:
    """File of rank `rank`'s black box.

    >>> box_path("digits", 2, 3).name
    'rank_3.box'
    """
    return job_dir(job, generation, nonce, root=root) / f"rank_{_check_rank(rank)}.box"


def state_path(job: str, generation: int, nonce: str = "", *, root: Path = SHM_ROOT) -> Path:
    """File of what the controller keeps for the one that follows it, on the controller's host.

    >>> state_path("digits", 2).name
    'controller.json'
    """
    return job_dir(job, generation, nonce, root=root) / STATE_NAME


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[int]:
    """A descriptor of a new file of this user alone, which takes the name `path` at the end of the block.

    Whoever opens the name finds the older file or the new one, whole. Afterwards the descriptor is the caller's to
    close; if the block fails, file and descriptor are gone, and an older file is as it was. Nothing is made durable:
    shared memory ends with the host. OSError.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    draft.unlink(missing_ok=True)
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
        os.replace(draft, path)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_all(fd: int, raw: bytes) -> None:
    """`os.write` until all is written: a full file system takes a part, and refuses only the next one. OSError."""
    left = memoryview(raw)
    while left:
        left = left[os.write(fd, left) :]


def read_own(path: Path, bytes_max: int) -> bytes:
    """Content of a regular file of this user, up to `bytes_max`.

    Raises ConfigError if it is another user's or no regular file, since /dev/shm is writable for everybody; OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is not a file of user {os.getuid()}")
        with open(fd, "rb", closefd=False) as file:
            return file.read(bytes_max)
    finally:
        os.close(fd)


def make_private_dir(path: Path, instead: str = "") -> None:
    """Create the directory (mode 0700), or accept the one that is there. instead: what else helps, beside removing it.

    Raises ConfigError if something else has the name (a link, a file, another user's directory): /dev/shm is
    writable for everybody. Raises StorageError if the system refuses.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise StorageError(
            f"cannot create {path}: {error.strerror}; lastwords keeps files of running jobs there",
            errno=error.errno or 0,
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{path} is not a directory of mode 0700 of user {os.getuid()}; remove it{instead}")


def make_job_dir(job: str, generation: int, nonce: str = "", *, root: Path = SHM_ROOT) -> Path:
    """Create a job's directory, as `make_private_dir`; every rank of a host may call it."""
    path = job_dir(job, generation, nonce, root=root)
    make_private_dir(path, instead=" or rename the job")
    return path


def remove_job_dir(
    job: str, generation: int, nonce: str = "", *, root: Path = SHM_ROOT, followed: bool = False
) -> None:
    """Remove the directory with everything of ours in it; a file of another name stays, and so does the directory then.

    Harmless when nothing is there. Processes that still have a file mapped keep their memory. followed: what another
    controller needs in the place of one that was killed stays: its state, and the life lines.
    """
    path = job_dir(job, generation, nonce, root=root)
    if path.is_symlink() or not path.is_dir():
        return
    for entry in sorted(path.iterdir()):
        if (_OF_RANKS if followed else _OURS).fullmatch(entry.name):
            entry.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()


def _check_rank(rank: int) -> int:
    if rank < 0:
        raise ConfigError(f"rank {rank} must not be negative")
    return rank
