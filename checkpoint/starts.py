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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from lastwords import clock
from lastwords.checkpoint import layout, removal
from lastwords.checkpoint.codec import Positive, typed
from lastwords.checkpoint.document import decode_document, encode_document, told
from lastwords.checkpoint.lock_file import has_name
from lastwords.checkpoint.manifest import CheckpointKind, Claimed, read_manifest
from lastwords.checkpoint.meta import START_FORMAT
from lastwords.checkpoint.system import (
    REAL_OS,
    Os,
    close,
    host_id,
    patiently,
    pwrite_all,
    read_whole,
    remove_tree,
    storage_errors,
    sync_directory,
)
from lastwords.errors import CheckpointError, ConfigError, FormatError, IncompleteError, StorageError

# Temporary directories that nobody will publish any more: whose they are, and when they may go.
#
# A directory may go when no process writes in it and the controller of its job and generation has ended. Locks tell:
# they end with the process that holds them, however it ends, also on another host of a shared file system. A writer
# locks the file that it writes; a controller locks its claim, since between a writer's last byte and the final name
# nobody has a file of that directory open.
#
# A lock that is free proves less where the file system keeps locks to one host, or has none. So a directory of another
# job goes at once only where its controller's claim says that it ran on this host; else it has to be quiet for a day.
# Nor does it prove that nobody publishes any more: another controller follows one that was killed, as long as a rank
# lives. Whether it can, the caller knows by what the ranks share.

logger = logging.getLogger(__name__)

QUIET_S = 86_400.0
"""A day without any change: longer than any save, and than clocks of two hosts differ."""

_CLAIM_TRIES = 20
_CLAIM_PAUSE_S = 0.05
"""Whoever looks whether a claim is held has it locked for that moment, and a start that waits looks all the time."""
_HOST_BYTES_MAX = 4096


class Claim:
    """Held by a controller as long as it lives: its temporary directories in `root` are its own. Made by `take`."""

    def __init__(self, path: Path, fd: int, os: Os) -> None:
        self._path = path
        self._fd = fd
        self._os = os

    @classmethod
    def take(cls, root: Path, job: str, generation: int, os: Os = REAL_OS) -> Claim | None:
        """None where the file system refuses, which is logged: other jobs may then tidy up what this one writes."""
        path = layout.claim_path(root, job, generation)
        try:
            for _ in range(_CLAIM_TRIES):
                fd = patiently(lambda: cls._lock(path, os), os)
                if fd is not None:
                    return cls(path, fd, os)
                os.pause(_CLAIM_PAUSE_S)
        except StorageError as error:
            logger.warning("cannot claim the temporary directories in %s: %s", root, error)
            return None
        logger.warning("%s belongs to another controller of this job and generation", path)
        return None

    @staticmethod
    def _lock(path: Path, os: Os) -> int | None:
        """None if somebody else holds it, or has removed it between its creation and the lock."""
        with storage_errors("claiming", path):
            try:
                fd = os.create(path, direct=False)
            except FileExistsError:
                fd = os.open_lock(path)
            try:
                if os.try_lock(fd) and has_name(path, fd, os):
                    pwrite_all(os, fd, host_id())
                    return fd
            except BaseException:
                close(fd, path, os)
                raise
            close(fd, path, os)
            return None

    def release(self) -> None:
        """Nothing of this controller is under way any more."""
        try:
            self._os.unlink(self._path)
            close(self._fd, self._path, self._os)
        except (OSError, StorageError) as error:
            logger.warning("could not release %s: %s", self._path, error)


def discard(tmp_dir: Path, os: Os = REAL_OS) -> bool:
    """Removes a directory that will never be published; a failure is only logged: nobody else can act on it.

    Returns whether it is gone.
    """
    try:
        remove_tree(tmp_dir, os)
    except StorageError as error:
        logger.warning("could not remove %s, which is no longer needed: %s", tmp_dir, error)
        return False
    return True


def discard_own(tmp_dir: Path, os: Os = REAL_OS) -> bool:
    """As `discard`, but only of what this directory's own attempt has written.

    If the publication exchanged this directory with another checkpoint, that checkpoint is renamed, not deleted,
    unless it is damaged or the published one replaces it.
    """
    name = layout.TemporaryName.parse(tmp_dir.name)
    said = Claimed.if_readable(tmp_dir, os)
    if name is None or said == Claimed():
        return discard(tmp_dir, os)
    own = removal.name_of(said) == name
    return (not own and _is_put_aside(tmp_dir, name.global_step, os)) or discard(tmp_dir, os)


def keep(tmp_dir: Path, kept: Path, os: Os = REAL_OS) -> Path | None:
    """Moves a directory with finished files out of the way of `remove_stale`; where it is now, None if it is empty.

    Raises StorageError; then it lies where it was.
    """
    with storage_errors("keeping", tmp_dir):
        if not os.is_directory(tmp_dir):
            return None
        names = [name for name in os.listdir(tmp_dir) if layout.parse_rank_dir(name) is not None]
        if not any(os.exists(tmp_dir / name / layout.PART_NAME) for name in names) and not os.exists(
            tmp_dir / layout.MANIFEST_NAME
        ):
            return None
        os.rename(tmp_dir, kept)
    sync_directory(kept.parent, os)
    return kept


MayBeFollowed = Callable[[str, int], bool]
"""Whether another controller may take the place of one of this job and generation, if that has ended."""


def nobody_follows(job: str, generation: int) -> bool:
    """`MayBeFollowed` where no rank lives any more."""
    return False


def remove_stale(
    root: Path, job: str, generation: int, os: Os = REAL_OS, *, may_be_followed: MayBeFollowed = nobody_follows
) -> list[Path]:
    """Removes what ended controllers and their writers left unfinished in `root`; returns what went.

    Directories of this job's own and later generations stay, and any in which a living process writes, whose controller
    may live, or which are a whole checkpoint that only lacks its name. Where another one has that name by now, which it
    does not make way for, it becomes `...-replaced-K`. One with a finished part of last words, of a step that its job
    has not published, is renamed to `unpublished-...`. What was being pruned goes, whosever it was. Failures are only
    logged.

    may_be_followed: what such a controller may still publish stays as well, until it has been quiet for a day.
    """
    removed: list[Path] = []
    try:
        names = os.listdir(root)
    except OSError as error:
        logger.warning("could not look for stale directories in %s: %s", root, error)
        return removed
    removed += removal.finish(root, names, os)
    claims = _Claims.read(root, names, (job, generation), os)
    for name in names:
        found = layout.TemporaryName.parse(name)
        if found is None or (found.job == job and found.generation >= generation):
            continue
        if claims.may_live(found) or _in_use(root / name, os):
            continue
        certain = claims.has_died_here(found) or found.job == job
        certain = certain and not may_be_followed(found.job, found.generation)
        if not (certain or _is_quiet(root / name, os)):
            continue
        if _lacks_only_its_name(root, root / name, found.global_step, os):
            continue
        if _is_put_aside(root / name, found.global_step, os):
            continue
        if not _is_kept(root, root / name, found, os):
            discard(root / name, os)
            removed.append(root / name)
    claims.remove_dead(root, os)
    return removed


def under_way(roots: Sequence[Path], own: tuple[str, int], os: Os = REAL_OS) -> dict[str, tuple[float, ...]]:
    """Temporary directories that controllers of earlier generations may still publish; for each, when what changed.

    Earlier by the claims in the first of `roots`, where the generations are drawn. own: this job and generation.
    Where the file system refuses to say, nothing is under way.
    """
    found: dict[str, tuple[float, ...]] = {}
    try:
        held = _Claims.read(roots[0], os.listdir(roots[0]), own, os).held
        for root in roots:
            for name in os.listdir(root):
                temporary = layout.TemporaryName.parse(name)
                whose = None if temporary is None else (temporary.job, temporary.generation)
                if whose in held and whose[1] < own[1]:
                    found[str(root / name)] = _changed(root / name, os)
    except OSError as error:
        logger.info("cannot determine what is being published in %s: %s", roots[0], error)
    return found


def held(root: Path, names: list[str], os: Os = REAL_OS) -> frozenset[tuple[str, int]]:
    """Job and generation of every controller whose claim, out of `names` in `root`, says that it may live."""
    return _Claims.read(root, names, ("", 0), os).held


def _changed(tmp_dir: Path, os: Os) -> tuple[float, ...]:
    try:
        return tuple(os.modified_unix_s(path) for path in _with_content(tmp_dir, os))
    except FileNotFoundError:
        return ()  # it has just been published, or removed; the next look knows


@dataclass(frozen=True, slots=True)
class _Claims:
    """What the claims in a directory say of other controllers, by (job, generation)."""

    held: frozenset[tuple[str, int]]
    dead: dict[tuple[str, int], bool]  # True: it ran on this host

    @staticmethod
    def read(root: Path, names: list[str], own: tuple[str, int], os: Os) -> _Claims:
        held: set[tuple[str, int]] = set()
        dead: dict[tuple[str, int], bool] = {}
        here = host_id()
        for name in names:
            whose = layout.parse_claim(name)
            if whose is None or whose == own or (whose[0] == own[0] and whose[1] > own[1]):
                continue
            try:
                if _unlocked(root / name, os):
                    dead[whose] = read_whole(root / name, os, bytes_max=_HOST_BYTES_MAX) == here
                else:
                    held.add(whose)
            except FileNotFoundError:
                pass  # its controller has just ended
            except (OSError, StorageError) as error:
                logger.info("cannot tell whether the controller of %s lives: %s", root / name, error)
                held.add(whose)
        return _Claims(frozenset(held), dead)

    def may_live(self, name: layout.TemporaryName) -> bool:
        return (name.job, name.generation) in self.held

    def has_died_here(self, name: layout.TemporaryName) -> bool:
        return self.dead.get((name.job, name.generation), False)

    def remove_dead(self, root: Path, os: Os) -> None:
        """Claims of which nothing is left, unless a controller that follows has locked its own by now."""
        try:
            left = {layout.TemporaryName.parse(name) for name in os.listdir(root)}
            needed = {(name.job, name.generation) for name in left if name is not None}
            for job, generation in sorted(self.dead.keys() - needed):
                path = layout.claim_path(root, job, generation)
                if self.dead[job, generation] or _is_quiet(path, os):
                    _unlink_unlocked(path, os)
        except FileNotFoundError:
            pass
        except (OSError, StorageError) as error:
            logger.info("could not remove the claims of ended controllers in %s: %s", root, error)


def _in_use(tmp_dir: Path, os: Os) -> bool:
    try:
        for rank_name in os.listdir(tmp_dir):
            rank_dir = tmp_dir / rank_name
            if layout.parse_rank_dir(rank_name) is None or not os.is_directory(rank_dir):
                continue
            for name in os.listdir(rank_dir):
                if name != layout.PART_NAME and not _unlocked(rank_dir / name, os):
                    return True
    except FileNotFoundError:
        return True  # somebody else is removing it
    except (OSError, StorageError) as error:
        logger.warning("could not look into %s: %s", tmp_dir, error)
        return True
    return False


def _with_content(path: Path, os: Os) -> Iterator[Path]:
    """It and everything in it: while one file grows, the times of the directories do not move."""
    inside = [path]
    for entry in inside:
        yield entry
        if os.is_directory(entry):
            inside += [entry / name for name in os.listdir(entry)]


def _is_quiet(path: Path, os: Os) -> bool:
    """Whether nothing in this directory, or of this file, has changed for a day."""
    try:
        for entry in _with_content(path, os):
            if clock.wall_ns() / 1e9 - os.modified_unix_s(entry) < QUIET_S:
                return False
    except OSError as error:
        logger.info("could not look into %s: %s", path, error)
        return False
    return True


def _lacks_only_its_name(root: Path, tmp_dir: Path, step: int, os: Os) -> bool:
    """A manifest is the last thing to be written: these are whole last words, and the only ones of their step."""
    final = layout.checkpoint_dir(root, step)
    if not os.exists(tmp_dir / layout.MANIFEST_NAME) or os.leads_to_directory(final):
        return False
    try:
        read_manifest(tmp_dir, os)
    except CheckpointError:
        return False
    logger.warning("%s is a complete checkpoint that was not published: rename it to %s, or remove it", tmp_dir, final)
    return True


def _is_put_aside(tmp_dir: Path, step: int, os: Os) -> bool:
    """A whole checkpoint whose name is another's: it was not published any more, or its name was taken a moment ago.

    What the one with the name replaces is left there when its publisher ends before it has removed it.
    """
    final = layout.checkpoint_dir(tmp_dir.parent, step)
    try:
        if not os.exists(tmp_dir / layout.MANIFEST_NAME) or read_manifest(tmp_dir, os).global_step != step:
            return False
        if _makes_way(tmp_dir, final, os):
            return False
        aside = removal.move_aside(tmp_dir, final, os)
        sync_directory(final.parent, os)
    except (CheckpointError, FileNotFoundError):
        return False  # damaged, or somebody else has it by now
    except OSError as error:
        logger.warning("could not give a name to %s, which is a complete checkpoint: %s", tmp_dir, error)
        return True
    logger.warning("%s is a complete checkpoint that was not published under its own name", aside)
    return True


def _makes_way(tmp_dir: Path, final: Path, os: Os) -> bool:
    try:
        return removal.is_older(tmp_dir, read_manifest(final, os), os)
    except (IncompleteError, FormatError):
        return False


def _is_kept(root: Path, tmp_dir: Path, name: layout.TemporaryName, os: Os) -> bool:
    """Whether finished parts are in it that their controller did not live to publish, or nobody can tell.

    Parts of a periodic checkpoint are not kept: jobs that end while they write one are nothing unusual.
    """
    if CheckpointKind.of(name.incident, name.attempt) is CheckpointKind.PERIODIC:
        return False
    final = layout.checkpoint_dir(root, name.global_step)
    if os.leads_to_directory(final) and name.job == Claimed.if_readable(final, os).job:
        return False
    try:
        kept = keep(tmp_dir, name.under(root, layout.UNPUBLISHED), os)
    except StorageError as error:
        logger.warning("left as it is: %s", error)
        return True
    if kept is not None:
        logger.warning("finished files of step %d were not published, and are kept in %s", name.global_step, kept)
    return kept is not None


def _unlink_unlocked(path: Path, os: Os) -> None:
    fd = os.open_lock(path)
    try:
        if os.try_lock(fd):  # until the name is gone: whoever locks the file after that sees that it is
            os.unlink(path)
    finally:
        close(fd, path, os)


def _unlocked(path: Path, os: Os) -> bool:
    fd = os.open_lock(path)
    try:
        return os.try_lock(fd)
    finally:
        close(fd, path, os)


# What incidents without a checkpoint have left for a human: finished parts that nobody could publish.


@dataclass(frozen=True, slots=True)
class Unpublished:
    """A directory `unpublished-...`. ranks: whose parts are finished; whole: a checkpoint, but for its name."""

    path: Path
    global_step: int
    job: str
    ranks: tuple[int, ...]
    whole: bool


def find_unpublished(root: Path, os: Os = REAL_OS) -> list[Unpublished]:
    """All of them in `root`, the newest step first. Raises StorageError where that cannot be listed.

    Of one that cannot be looked into (another user's), which is logged, no part is known.
    """
    with storage_errors("listing", root):
        names = os.listdir(root) if os.is_directory(root) else []
    found = []
    for name in names:
        left = layout.TemporaryName.parse(name, layout.UNPUBLISHED)
        if left is None:
            continue
        ranks: list[int] = []
        whole = False
        try:
            with storage_errors("looking into", root / name):
                for entry in os.listdir(root / name):
                    rank = layout.parse_rank_dir(entry)
                    if rank is not None and os.exists(root / name / entry / layout.PART_NAME):
                        ranks.append(rank)
                whole = os.exists(root / name / layout.MANIFEST_NAME)
        except StorageError as error:
            logger.warning("%s", error)
        found.append(Unpublished(root / name, left.global_step, left.job, tuple(sorted(ranks)), whole))
    return sorted(found, key=lambda one: (-one.global_step, one.path.name))


START_BYTES_MAX = 1 << 20
STARTS_KEPT = 64
"""Newest starts that are remembered, besides each job's newest and those whose controllers live or may be followed."""

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


def draw(
    roots: Iterable[Path],
    launch: Launch,
    os: Os = REAL_OS,
    *,
    above: int = 0,
    may_be_followed: MayBeFollowed = nobody_follows,
) -> Start:
    """Draw the next generation in the first of `roots`; returns once it is durable. Only rank ctrl_rank_id calls this.

    above: the highest one that was drawn elsewhere, by what a remote store has. may_be_followed: as of `remove_stale`;
    such a start is remembered, too.

    Raises StorageError if the file system refuses, ConfigError if it cannot be told which job is started again, or if
    two of `roots` are one directory.
    """
    root, *others = roots
    _refuse_twice(root, others, os)
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
        _forget(root, [*earlier, start], os, may_be_followed)
        return start
    raise StorageError(
        f"{root}: {_DRAWS_MAX} generations in a row were taken by other processes; find out which "
        "other jobs start there"
    )


def _refuse_twice(root: Path, others: Iterable[Path], os: Os) -> None:
    """Whoever drew a generation in one of them would find it taken in the other."""
    for other in others:
        with storage_errors("looking at", other):
            if os.leads_to_directory(other) and os.stamp(other)[:2] == os.stamp(root)[:2]:
                raise ConfigError(f"{other} leads to {root} itself; give a directory on another file system, or none")


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


def _forget(root: Path, starts: list[Start], os: Os, may_be_followed: MayBeFollowed) -> None:
    """Remove starts that nobody can need any more; failures are only logged."""
    ordered = sorted(starts, key=lambda start: start.generation)
    newest = {start.job: start.generation for start in ordered}
    ancient = ordered[:-STARTS_MAX]
    old = [*ancient, *(s for s in ordered[len(ancient) : -STARTS_KEPT] if s.generation != newest[s.job])]
    if not old:
        return
    try:
        names = os.listdir(root)
        living = held(root, names, os)
        ended = (start for start in old if (start.job, start.generation) not in living)
        gone = {start.generation for start in ended if not may_be_followed(start.job, start.generation)}
        for generation in sorted(gone):
            os.unlink(root / layout.start_name(generation))
        for generation, job in _resumed_from(names):
            if generation in gone:
                os.unlink(root / f"{layout.start_name(generation).removesuffix('.json')}-from-{job}")
    except OSError as error:
        logger.info("could not remove records of old starts in %s: %s", root, error)
