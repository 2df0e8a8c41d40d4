"""Which checkpoints of a job are kept, and the removal of the others.

`chosen` is the rule, pure: no clock and no file decides anything. `plan` looks at directories, `carry_out` removes.
Never removed are: the newest complete checkpoint of the job, the one of the latest step (where a start has begun anew
and is not as far), one that is being read, and what is no whole checkpoint of this job. So whatever several processes
prune at once, each holds the newest one that it knows as a reader does.

Nothing goes before every byte of the newest has been read: else the only sound one could go for a damaged one's sake.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from lastwords.checkpoint import layout, load, removal
from lastwords.checkpoint.load import Stamp, refuse_replaced, stamp_of
from lastwords.checkpoint.lock_file import ReaderLock
from lastwords.checkpoint.manifest import CheckpointKind, Claimed
from lastwords.checkpoint.system import REAL_OS, Os, storage_errors
from lastwords.errors import BusyError, CheckpointError, ConfigError, FormatError, StorageError, UnavailableError

# Checkpoints that this process has read byte for byte, so that nobody is removed for the sake of a damaged one.
#
# A published file's checksums were taken from memory, while it was written: what the disk has made of it shows only
# when it is read. That takes as long as the disk takes, so each checkpoint is read once.

Watch = Callable[[Path], AbstractContextManager[Callable[[int], None] | None]]
"""Entered while a checkpoint is read. It gives what hears of the bytes so far; what that raises ends the reading."""


class VerifiedOnce:
    """What reading has shown of checkpoints. It holds while their files stay as they are, by the stamps of all of them.

    For one thread at a time. watch: see `Watch`.
    """

    def __init__(self, watch: Watch = lambda _: contextlib.nullcontext()) -> None:
        self._watch = watch
        self._known: dict[Claimed, tuple[int, str]] = {}

    def problem(self, path: Path, said: Claimed, os: Os = REAL_OS) -> str:
        """What is wrong with the checkpoint, "" if it is sound; it is read, unless that is known.

        Raises StorageError if it could not be read, which says nothing about it, BusyError or ReplacedError if another
        process removes or replaces it.
        """
        stamps = _stamps(path, os)
        known = self._known.get(said)
        if known is None or known[0] != stamps:
            known = self._known[said] = stamps, self._read(path, os)
        return known[1]

    def known_problem(self, path: Path, said: Claimed, os: Os = REAL_OS) -> str:
        """As `problem`, as far as that is known: nothing is read. StorageError."""
        known = self._known.get(said)
        return known[1] if known is not None and known[1] and known[0] == _stamps(path, os) else ""

    def forget(self, said: Claimed) -> None:
        """The checkpoint is gone."""
        self._known.pop(said, None)

    def _read(self, path: Path, os: Os) -> str:
        before = stamp_of(path, os)
        with self._watch(path) as progress:
            found = load.examine_data(path, os, progress)
        if found.status is load.DirectoryStatus.COMPLETE:
            return ""
        refuse_replaced(path, before, os)
        if found.status is load.DirectoryStatus.UNREADABLE:
            raise StorageError(found.why, errno=found.errno)
        return found.why


def _stamps(path: Path, os: Os) -> int:
    """Of all files of a checkpoint, as one number."""
    seen = xxhash.xxh3_64()
    with storage_errors("looking at the files of", path):
        for name in os.listdir(path):
            inside = path / name
            files = os.listdir(inside) if layout.parse_rank_dir(name) is not None and os.is_directory(inside) else []
            for file in [inside / one for one in files] or [inside]:
                seen.update(repr((name, file.name, os.stamp(file))).encode())
    return int(seen.intdigest())


logger = logging.getLogger(__name__)

_NS_PER_MINUTE = 60 * 1_000_000_000
_SAME_MOMENT_NS = 1_000_000
"""Publishing takes longer. Stamps that are closer were given where a clock had been set back (`later_than_all`)."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What to keep of a job's checkpoints beside the newest.

    keep_max: so many of the newest. keep_per_minutes: if that is 0, one in so many minutes. Both 0: all of them.
    last_words: they are counted, and go, as periodic ones; otherwise they stay, and do not count.
    """

    keep_max: int = 5
    keep_per_minutes: int = 0
    last_words: bool = False

    def check(self) -> Rules:
        """This value, if it makes sense; ConfigError otherwise."""
        for name in ("keep_max", "keep_per_minutes"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ConfigError(f"{name}={number!r} must be a whole number, 0 or more")
        return self

    @staticmethod
    def upstream(keep_checkpoint_max: int | None = 5, keep_checkpoint_per_n_minutes: int | None = 0) -> Rules:
        """As MindSpore's CheckpointConfig understands them: the maximum counts if it is given; without any, it is 1.

        ConfigError, a ValueError, for what is no whole number from 0.

        >>> Rules.upstream(3, 10), Rules.upstream(0, 10).keep_per_minutes, Rules.upstream(None, None).keep_max
        (Rules(keep_max=3, keep_per_minutes=0, last_words=False), 10, 1)
        """
        maximum = 0 if keep_checkpoint_max is None else keep_checkpoint_max
        minutes = 0 if keep_checkpoint_per_n_minutes is None else keep_checkpoint_per_n_minutes
        Rules(maximum, minutes).check()
        if maximum:
            return Rules(maximum, 0)
        return Rules(0, minutes) if minutes else Rules(1, 0)


@dataclass(frozen=True, slots=True)
class CompleteCheckpoint:
    """A complete checkpoint of the job."""

    path: Path
    said: Claimed


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What is kept and what goes, each newest first.

    spared: of what is kept, what would go if it needed not stay for now. others: what does not count and is left alone,
    with the reason of each. damaged: those of them that have turned out to be damaged when they were read just now.
    """

    keep: tuple[CompleteCheckpoint, ...]
    remove: tuple[CompleteCheckpoint, ...]
    spared: tuple[CompleteCheckpoint, ...] = ()
    others: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RemovalOutcome:
    """What became of a checkpoint that was to go. left: why it is still there; None if it is gone."""

    path: Path
    said: Claimed
    left: CheckpointError | None = None


def chosen(found: Sequence[CompleteCheckpoint], rules: Rules) -> RetentionPlan:
    """The rule. found: the complete checkpoints of one job, newest first."""
    kinds = {CheckpointKind.PERIODIC, CheckpointKind.LAST_WORDS} if rules.last_words else {CheckpointKind.PERIODIC}
    counted = [one for one in found if one.said.kind in kinds]
    kept = set(counted)
    if rules.keep_max:
        kept = set(counted[: rules.keep_max])
    elif rules.keep_per_minutes:
        kept = _one_in(counted, rules.keep_per_minutes * _NS_PER_MINUTE)
    kept |= _of_later_step(counted, found)
    goes = [one for one in counted if one not in kept and one != found[0]]
    return RetentionPlan(tuple(one for one in found if one not in goes), tuple(goes))


def _of_later_step(
    counted: Sequence[CompleteCheckpoint], found: Sequence[CompleteCheckpoint]
) -> set[CompleteCheckpoint]:
    """Where a start has begun anew: the farthest of those before it, until it has come as far."""
    farthest = max(counted, key=lambda one: one.said.global_step, default=None)
    return {farthest} if farthest and farthest.said.global_step > found[0].said.global_step else set()


def _one_in(newest_first: Sequence[CompleteCheckpoint], pause_ns: int) -> set[CompleteCheckpoint]:
    """The first one of all, and each that was published `pause_ns` after the one that was kept before it.

    Where a clock had been set back, a checkpoint has an earlier time than the one before it, or one that it was given
    only so that it has a later one: how long after it, and how long before the next, is not known, so both stay. So
    does the one before it: without that one, the next look would not see that the clock had jumped.
    """
    kept: set[CompleteCheckpoint] = set()
    before: CompleteCheckpoint | None = None
    last_ns: int | None = None
    for one in reversed(newest_first):
        at_ns = one.said.published_unix_ns
        jumped = before is not None and at_ns - before.said.published_unix_ns < _SAME_MOMENT_NS
        if jumped and before is not None:
            kept.add(before)
        if jumped or last_ns is None or at_ns - last_ns >= pause_ns:
            kept.add(one)
            last_ns = None if jumped else at_ns
        before = one
    return kept


def plan(
    roots: Sequence[Path],
    job: str,
    rules: Rules,
    os: Os = REAL_OS,
    *,
    verified: VerifiedOnce | None = None,
    spared: Callable[[Path], bool] = lambda _: False,
) -> RetentionPlan:
    """What is to be done about the checkpoints of `job` in these directories. StorageError, BusyError, ReplacedError.

    Complete is what `resume` takes for complete. If anything is to go, the newest one is read as well, and the next one
    if that is damaged: what is damaged does not count. A link is never followed. spared: what stays for now, such as
    what is to be uploaded first.
    """
    verified = VerifiedOnce() if verified is None else verified
    found, others = _complete(roots, job, os)
    for one in list(found):
        if problem := verified.known_problem(one.path, one.said, os):
            found.remove(one)
            others.append(problem)
    damaged: list[str] = []
    while True:
        made = _sparing(chosen(found, rules), spared)
        newest = made.keep[0] if made.remove else None
        problem = "" if newest is None else verified.problem(newest.path, newest.said, os)
        if newest is None or not problem:
            return replace(made, others=(*damaged, *others), damaged=tuple(damaged))
        found.remove(newest)
        damaged.append(problem)


def _complete(roots: Sequence[Path], job: str, os: Os) -> tuple[list[CompleteCheckpoint], list[str]]:
    """The complete checkpoints of a job, newest first, and what was found beside them. No data are read."""
    layout.check_job_name(job)
    found: dict[Path, Claimed] = {}
    others: list[str] = []
    met: set[Stamp] = set()
    for path in load.candidates(roots, os):
        if not os.is_directory(path):
            others.append(f"{path} is a link")
            continue
        if Claimed.if_readable(path, os).job not in ("", job):
            continue
        seen, said = load.glance_or_examine(path, os, every_file=True)
        if said is None or seen.status is not load.DirectoryStatus.COMPLETE:
            others.append(seen.why)
        elif said.job == job and (stamp := stamp_of(path, os)) is not None and stamp not in met:
            met.add(stamp)  # two of the roots may lead to one directory
            found[path] = said
    # Once more in order: since its place was drawn, a name may have been given to the newest.
    return [CompleteCheckpoint(path, found[path]) for path in load.newest_first(found)], others


def _sparing(made: RetentionPlan, spared: Callable[[Path], bool]) -> RetentionPlan:
    stays = tuple(one for one in made.remove if spared(one.path))
    goes = tuple(one for one in made.remove if one not in stays)
    return RetentionPlan((*made.keep, *stays), goes, spared=stays)


def carry_out(
    made: RetentionPlan,
    os: Os = REAL_OS,
    *,
    verified: VerifiedOnce | None = None,
    remove: Callable[[Path, Claimed, Os], None] = removal.remove,
) -> list[RemovalOutcome]:
    """Removes what the plan says, the oldest first. What cannot be removed is said, not raised.

    verified: as for the plan; what is not known is read once more. remove: how, where it is no local directory.
    """
    if not made.remove:
        return []
    verified = VerifiedOnce() if verified is None else verified
    newest = made.keep[0]
    try:
        held = ReaderLock.take(newest.path, os)
    except BusyError as error:
        return [RemovalOutcome(one.path, one.said, error) for one in made.remove]
    with held:
        why = _unheld(newest, held, os) or _unsound(newest, verified, os)
        return [
            RemovalOutcome(one.path, one.said, why or _removed(one, verified, os, remove))
            for one in reversed(made.remove)
        ]


def _unheld(newest: CompleteCheckpoint, held: ReaderLock, os: Os) -> CheckpointError | None:
    """Why it is not sure that this one stays; None if it is."""
    if Claimed.if_readable(newest.path, os) != newest.said:
        return BusyError(f"nothing is removed, since {newest.path}, which is to stay, is not there any more")
    if not held.held:
        return StorageError(f"nothing is removed, since the file system cannot lock {newest.path}, which is to stay")
    return None


def _unsound(newest: CompleteCheckpoint, verified: VerifiedOnce, os: Os) -> CheckpointError | None:
    """Why this one is not known to be sound; None if it is."""
    try:
        problem = verified.problem(newest.path, newest.said, os)
    except CheckpointError as error:
        return error
    return FormatError(f"nothing is removed, since the one that is to stay is damaged: {problem}") if problem else None


def _removed(
    one: CompleteCheckpoint, verified: VerifiedOnce, os: Os, remove: Callable[[Path, Claimed, Os], None]
) -> CheckpointError | None:
    try:
        remove(one.path, one.said, os)
    except CheckpointError as error:
        return error
    verified.forget(one.said)
    return None


def finish(roots: Sequence[Path], os: Os = REAL_OS) -> None:
    """Removes what others had begun to remove when they ended. Raises StorageError where nothing can be listed."""
    for root in roots:
        with storage_errors("listing", root):
            names = os.listdir(root) if os.leads_to_directory(root) else []
        removal.finish(root, names, os)


def prune(
    roots: Sequence[Path],
    job: str,
    rules: Rules,
    os: Os = REAL_OS,
    *,
    verified: VerifiedOnce | None = None,
    spared: Callable[[Path], bool] = lambda _: False,
) -> list[Path]:
    """For the controller: removes what the rules do not keep, logs a line about each, and raises nothing.

    verified, spared: as for `plan`.
    """
    verified = VerifiedOnce() if verified is None else verified
    gone: list[Path] = []
    try:
        finish(roots, os)
        made = plan(roots, job, rules, os, verified=verified, spared=spared)
        for text in made.damaged:
            logger.warning("%s; it does not count as one that is kept", text)
        if made.spared:
            logger.info("%d checkpoints stay until they are uploaded", len(made.spared))
        for outcome in carry_out(made, os, verified=verified):
            if outcome.left is not None:
                logger.info("%s", outcome.left)
            else:
                what = outcome.said.kind.value
                logger.info("removed %s (%s); %d checkpoints of the job are kept", outcome.path, what, len(made.keep))
                gone.append(outcome.path)
    except UnavailableError as error:
        logger.info("old checkpoints are not removed yet: %s", error)
    except Exception as error:  # outermost: the job goes on, whatever becomes of its old checkpoints
        logger.warning("old checkpoints are not removed this time: %s", error)
    return gone


def jobs_in(root: Path, os: Os = REAL_OS) -> list[str]:
    """Whose checkpoints are in `root`, by what they claim."""
    claims = [Claimed.if_readable(path, os) for path in load.candidates([root], os)]
    return sorted({said.job for said in claims if said.job})
