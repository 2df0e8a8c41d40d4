"""Who has started a job in a directory, and when: the one place from which a job knows itself again after a restart.

Each start draws a generation by creating `.lastwords-start-g{N}.json` exclusively, so no two starts can have the same
one, also on two hosts of a shared file system, where locks may not work. The file says which job it is and how it was
launched; it is durable before anybody uses the generation, and never written again. A number is taken as soon as the
name is there: a file that a power loss has left empty or torn counts as well.

A restart knows its job from the launcher's words (see `Launch`), never from process ids: wrappers stand between
launcher and trainer, and another node's agent may be the leader after a restart. Where the files are gone, a job that
the same torchrun restarts still has its name, which follows from those words.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from lastwords.checkpoint import layout, stale
from lastwords.checkpoint.codec import Positive, typed
from lastwords.checkpoint.document import decode_document, encode_document, told
from lastwords.checkpoint.manifest import Claimed
from lastwords.checkpoint.system import REAL_OS, Os, close, pwrite_all, read_whole, storage_errors, sync_directory
from lastwords.checkpoint.versions import START_FORMAT
from lastwords.errors import ConfigError, FormatError, StorageError

logger = logging.getLogger(__name__)

START_BYTES_MAX = 1 << 20
STARTS_KEPT = 64
"""Newest starts that are remembered, besides each job's newest and those whose controllers live."""

STARTS_MAX = 256
"""A job that was not started in so many starts is remembered only as long as it lives: each start reads them all."""

_DRAWS_MAX = 1000
_OF_LAUNCH = ("run", "agent", "endpoint", "process")
_LOG = re.compile(r"controller-.*-g([0-9]{1,18})\.log")
_FROM = re.compile(r"\.lastwords-start-g([0-9]{1,18})-from-([A-Za-z0-9_.-]{1,64})")


@dataclass(frozen=True, slots=True)
class Launch:
    """What the environment of a start says of its launcher. "" where it says nothing.

    job: its name, where the user gave one. run: torchrun's run id. agent: a directory that this very torchrun process
    has made for itself. endpoint: where the ranks meet. process: who draws. restarted: the launcher says so.
    """

    job: str = ""
    run: str = ""
    agent: str = ""
    endpoint: str = ""
    process: str = ""
    restarted: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a job. jobs: other jobs from whose checkpoints it, or an earlier start of this job, has resumed."""

    generation: Positive
    job: Annotated[str, Meta(pattern=layout.JOB.pattern)]
    launch: Launch
    jobs: tuple[str, ...] = ()
    restarted: bool = False

    def encode(self) -> bytes:
        launch = {key: getattr(self.launch, key) for key in _OF_LAUNCH}
        content = {"generation": self.generation, "job": self.job, "jobs": self.jobs, **launch}
        return encode_document({"format_version": START_FORMAT, **content})

    @staticmethod
    def decode(raw: bytes, where: Path) -> Start:
        """FormatError."""
        content = decode_document(raw, where=where, version_max=START_FORMAT)
        launch = {key: content.get(key) for key in _OF_LAUNCH}
        with told(where):  # a file has to say `jobs`, and nothing of a restart
            return typed({"jobs": None, **content, "launch": launch, "restarted": False}, Start, "")


def draw(roots: Iterable[Path], launch: Launch, os: Os = REAL_OS, *, above: int = 0) -> Start:
    """Draw the next generation in the first of `roots`; returns once it is durable. Only rank ctrl_rank_id calls this.

    above: the highest one that was drawn elsewhere, by what a remote store has.

    Raises StorageError if the file system refuses, ConfigError if it cannot be told which job is started again.
    """
    root, *others = roots
    for _ in range(_DRAWS_MAX):
        with storage_errors("listing", root):
            names = os.listdir(root)
        earlier = read_starts(root, names, os)
        before = predecessor(earlier, launch)
        generation = 1 + max(
            _newest(root, names, os), *(_newest(other, _names(other, os), os) for other in others), above
        )
        if not all(_reserve(other, generation, os) for other in others):
            continue
        start = _next(root, generation, launch, before, names)
        path = root / layout.start_name(generation)
        try:
            _create(path, start.encode(), os)
        except FileExistsError:
            continue  # another job has drawn it
        sync_directory(root, os)
        _forget(root, [*earlier, start], os)
        return start
    raise StorageError(
        f"{root}: {_DRAWS_MAX} generations in a row were taken by other processes; find out which "
        "other jobs start there"
    )


def _reserve(root: Path, generation: int, os: Os) -> bool:
    """Take a generation in a directory that other jobs may use, too: a fallback; False if somebody else has it.

    Jobs that have one name and different directories would else write into one temporary directory there. The file is
    empty, so it is no start of anybody; the newest is enough to tell the next number.
    """
    try:
        _create(root / layout.start_name(generation), b"", os)
        for name in os.listdir(root):
            number = layout.parse_start(name)
            if number is None or number >= generation:
                continue
            if not read_whole(root / name, os, bytes_max=START_BYTES_MAX):
                os.unlink(root / name)
    except FileExistsError:
        return False
    except (OSError, StorageError) as error:
        logger.info("cannot take generation %d in %s: %s", generation, root, error)
    return True


def _next(root: Path, generation: int, launch: Launch, before: Start | None, names: list[str]) -> Start:
    if before is None:
        return Start(generation, launch.job or _name(root, launch), launch, (), launch.restarted)
    restarted = launch.restarted or (_same_agent(before, launch) and before.launch.process != launch.process)
    return Start(generation, before.job, launch, adopted(before, names), restarted)


def _name(root: Path, launch: Launch) -> str:
    """Of a job that has none and no start in `root`.

    The same in all starts by one torchrun, so that a job keeps it though its starts were deleted while it ran: a random
    one would make its last words another job's. With `root`: one script may train twice, in two directories.
    """
    run = re.sub(r"[^A-Za-z0-9]", "-", launch.run)[:20]
    if launch.run and launch.agent:
        said = "\0".join((str(root.absolute()), launch.run, launch.agent)).encode(errors="surrogateescape")
        return f"{run}-{hashlib.sha256(said).hexdigest()[:12]}"
    return f"{run or 'job'}-{secrets.token_hex(6)}"


def adopted(start: Start, names: Iterable[str]) -> tuple[str, ...]:
    """Other jobs from whose checkpoints a start or an earlier one of its job has resumed, by what the root lists."""
    jobs = {*start.jobs, *(job for number, job in _resumed_from(names) if number == start.generation)}
    return tuple(sorted(jobs - {start.job}))


def adopted_by(root: Path, generation: int, os: Os = REAL_OS) -> tuple[str, ...]:
    """`adopted` of the start with that generation; () if it is not to be found. StorageError if `root` is not."""
    with storage_errors("listing", root):
        names = os.listdir(root)
    starts = (start for start in read_starts(root, names, os) if start.generation == generation)
    return next((adopted(start, names) for start in starts), ())


def predecessor(starts: Iterable[Start], launch: Launch) -> Start | None:
    """The newest earlier start of the job that is launched now; None if this is its first.

    ConfigError where several jobs could be meant.
    """
    newest = sorted(starts, key=lambda start: -start.generation)
    if launch.job:
        return next((start for start in newest if start.job == launch.job), None)
    same = [start for start in newest if launch.run and start.launch.run == launch.run]
    certain = next((start for start in same if _same_agent(start, launch)), None)
    if certain is not None or not launch.restarted:
        return certain
    here = next((start for start in same if start.launch.endpoint == launch.endpoint), None)
    jobs = sorted({start.job for start in same})
    if here is None and len(jobs) > 1:
        raise ConfigError(
            f"torchrun has restarted this job, but {len(jobs)} jobs with the run id {launch.run!r} were started in "
            f"this directory ({', '.join(jobs[:4])}) and none met at "
            f"{launch.endpoint or 'the same address'}: give torchrun a unique --rdzv-id, or set "
            f"LASTWORDS_JOB to the name of the job to continue"
        )
    return here or next(iter(same), None)


def _same_agent(start: Start, launch: Launch) -> bool:
    return bool(launch.agent) and start.launch.agent == launch.agent


def read_starts(root: Path, names: Iterable[str], os: Os = REAL_OS) -> list[Start]:
    """Every start in `names` that can be read; one that was being written when the power failed is no start."""
    found = []
    for name in names:
        generation = layout.parse_start(name)
        if generation is None:
            continue
        try:
            start = Start.decode(read_whole(root / name, os, bytes_max=START_BYTES_MAX), root / name)
        except FileNotFoundError:
            continue  # it has just been forgotten
        except (FormatError, StorageError) as error:
            logger.info("%s cannot be read: %s", root / name, error)
            continue
        if start.generation == generation:
            found.append(start)
    return found


def note_resumed(root: Path, generation: int, job: str, os: Os = REAL_OS) -> None:
    """Remember that this start has resumed from a checkpoint of another job: after a restart that is its own, too."""
    path = root / f"{layout.start_name(generation).removesuffix('.json')}-from-{layout.check_job_name(job)}"
    try:
        _create(path, b"", os)
    except FileExistsError:
        return
    sync_directory(root, os)


def _resumed_from(names: Iterable[str]) -> list[tuple[int, str]]:
    return [(int(found[1]), found[2]) for name in names if (found := _FROM.fullmatch(name))]


def _create(path: Path, content: bytes, os: Os) -> None:
    """A new file, durable but for its name; FileExistsError if the name is taken."""
    try:
        fd = os.create(path, direct=False)
    except FileExistsError:
        raise
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error}; lastwords needs it to save checkpoints", errno=error.errno or 0
        ) from error
    try:
        with storage_errors("writing", path):
            pwrite_all(os, fd, content)
            os.fsync(fd)
    finally:
        close(fd, path, os)


def _names(root: Path, os: Os) -> list[str]:
    try:
        return os.listdir(root)
    except OSError as error:
        logger.info("cannot list the generations in %s: %s", root, error)
        return []


def _newest(root: Path, names: list[str], os: Os) -> int:
    """The highest generation of which anything is left: starts, claims, temporary directories, checkpoints, logs."""
    found = [0]
    for name in names:
        start, claim, temporary = layout.parse_start(name), layout.parse_claim(name), layout.TemporaryName.parse(name)
        if start is not None:
            found.append(start)
        if claim is not None:
            found.append(claim[1])
        if temporary is not None:
            found.append(temporary.generation)
        if layout.CheckpointName.parse(name) is not None:
            found.append(Claimed.if_readable(root / name, os).generation)
    if "logs" in names:
        found += [int(log[1]) for name in _names(root / "logs", os) if (log := _LOG.fullmatch(name))]
    return max(found)


def _forget(root: Path, starts: list[Start], os: Os) -> None:
    """Remove starts that nobody can need any more; failures are only logged."""
    ordered = sorted(starts, key=lambda start: start.generation)
    newest = {start.job: start.generation for start in ordered}
    ancient = ordered[:-STARTS_MAX]
    old = [*ancient, *(s for s in ordered[len(ancient) : -STARTS_KEPT] if s.generation != newest[s.job])]
    if not old:
        return
    try:
        names = os.listdir(root)
        living = stale.held(root, names, os)
        gone = {start.generation for start in old if (start.job, start.generation) not in living}
        for generation in sorted(gone):
            os.unlink(root / layout.start_name(generation))
        for generation, job in _resumed_from(names):
            if generation in gone:
                os.unlink(root / f"{layout.start_name(generation).removesuffix('.json')}-from-{job}")
    except OSError as error:
        logger.info("could not remove records of old starts in %s: %s", root, error)
