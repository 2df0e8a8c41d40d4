"""Which checkpoint all ranks of a job resume from, and that all of them have opened the very same."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lastwords
from lastwords.checkpoint import drill_record, load, starts
from lastwords.checkpoint.drill_record import Drilled
from lastwords.checkpoint.layout import MANIFEST_NAME
from lastwords.checkpoint.load import Stamp, damage_told_from_replacement, stamp_of_chosen
from lastwords.checkpoint.manifest import Manifest, read_manifest
from lastwords.checkpoint.meta import COMMITTED, TENTATIVE, groups_of
from lastwords.checkpoint.remote.store import RemotePath, address_of, os_for, place
from lastwords.checkpoint.remote.transfer import fetched, local_roots
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.clock import mono_s
from lastwords.errors import (
    CheckpointError,
    ConfigError,
    FormatError,
    IncompleteError,
    LastWordsError,
    ReplacedError,
    StorageError,
    ranks_text,
)
from lastwords.optim_wrapper.launch.drill_plan import CHECKPOINTS, DRILL
from lastwords.sharding.agree import STORE_WAIT_S

if TYPE_CHECKING:  # `peek` needs no torch
    from lastwords.optim_wrapper.launch.startup import Agreement
    from lastwords.optim_wrapper.launch.world import World

_log = logging.getLogger(__name__)

FETCHING_SAID_S = 10.0
"""A rank 0 that downloads is waited for as long as it says so often that something has come."""

_SHARE_THEM = (
    "Nothing was changed, and no rank starts from the beginning. Give a ckpt_save_path on a file system that all hosts "
    "share and have mounted, or copy the newest checkpoint to where it is missing"
)

_IDENTITY = ("job", "generation", "incident", "attempt", "global_step", "published_unix_ns")


class OwnJobs(NamedTuple):
    """Whose checkpoints a restart may take: its job's, and, where that has none yet, those from which it resumed."""

    job: str
    adopted: tuple[str, ...] = ()


class Chosen(NamedTuple):
    """Where a checkpoint lies, what tells it from any other that may come to lie there, and where rank 0 has found it:
    somewhere else if it was downloaded."""

    path: Path
    identity: dict[str, Any]
    found: Path


def open_chosen(
    roots: list[Path], world: World, key: str, own: OwnJobs | None, missing_ok: bool
) -> tuple[load.Checkpoint, Stamp | None] | None:
    """The checkpoint that rank 0 chooses, opened by every rank, and its stamp; None as of `choose`.

    A controller may still publish, so another one may lie there when the last rank has opened it: then rank 0 chooses
    once more. ReplacedError on all ranks if that one is replaced too; errors as of `choose` and `open_checkpoint`.

    One that some rank does not see is passed over for the newest that all of them see; it stays where it is.
    ConfigError on all ranks if there is none of these, or rank 0 sees no checkpoint at all and another rank sees one:
    the directory is not the same, and nobody begins anew beside a checkpoint.
    """
    passed_over: dict[Path, str] = {}
    downloaded = False
    for attempt in itertools.count(1):
        of_this = f"{key}/{attempt}"
        chosen = choose(roots, world, of_this, own, missing_ok or bool(passed_over), passed_over)
        if chosen is None and passed_over:
            raise ConfigError(
                f"the ranks have no checkpoint in common: {'; '.join(passed_over.values())}. {_SHARE_THEM}"
            )
        if chosen is None:
            seen = world.problem_anywhere(f"{of_this}/none", _seen_here(roots, world, own), STORE_WAIT_S)
            if seen is None:
                return None
            if attempt == 1:
                continue  # it may have been published just now
            raise ConfigError(f"rank 0 finds no checkpoint in {local_roots(roots)[0]}, and {seen}. {_SHARE_THEM}")
        downloaded |= isinstance(chosen.found, RemotePath)
        opened, problem = None, None
        try:
            opened = _open(chosen)
        except LastWordsError as error:
            problem = error
            if isinstance(error, ReplacedError):
                world.note(f"{of_this}/{'replaced' if REAL_OS.exists(chosen.path) else 'unseen'}")
        said = world.problem_anywhere(f"{of_this}/opened", None if problem is None else str(problem), STORE_WAIT_S)
        replaced, unseen = world.noted(f"{of_this}/replaced"), world.noted(f"{of_this}/unseen")
        if attempt == 1 and (replaced or unseen or isinstance(problem, ReplacedError)):
            _log.warning("%s; choosing a checkpoint again", problem or said)
        elif unseen and not replaced:
            passed_over[chosen.found] = str(said)
            roots = local_roots(roots) if downloaded else roots  # the next one would not be seen there either
            if world.rank == 0:
                _log.warning("%s is passed over and stays there, since a rank does not see it: %s", chosen.found, said)
        else:
            raise_for_all(problem, said)
            return opened
        if opened is not None:
            opened[0].close()
    raise AssertionError


def _open(chosen: Chosen) -> tuple[load.Checkpoint, Stamp | None]:
    stamp = stamp_of_chosen(chosen.path)
    with damage_told_from_replacement(chosen.path, stamp):
        checkpoint = load.open_checkpoint(chosen.path)
    found = _identity_of(checkpoint.manifest)
    if found != chosen.identity:
        checkpoint.close()
        raise ReplacedError(
            f"{chosen.path} was replaced while the ranks opened it; nothing is damaged: rank 0 chose "
            f"{_words(chosen.identity)}, but the directory now holds {_words(found)}"
        )
    return checkpoint, stamp


def _seen_here(roots: list[Path], world: World, own: OwnJobs | None) -> str | None:
    """A checkpoint that this rank could resume from, in words; rank 0 has looked already."""
    if world.rank == 0:
        return None
    with contextlib.suppress(LastWordsError):  # what rank 0 could list is no reason to end here
        word = _look_for(local_roots(roots), own, REAL_OS)
        if word["path"]:
            return f"{word['path']} is there"
    return None


def _identity_of(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in _IDENTITY}


def _words(identity: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in identity.items())


def choose(
    roots: list[Path],
    world: World,
    key: str,
    own: OwnJobs | None,
    missing_ok: bool,
    passed_over: Collection[Path] = (),
) -> Chosen | None:
    """Newest complete checkpoint that is not passed over, chosen by rank 0 for all; with `own`, of this job only.

    IncompleteError if there is none (None with missing_ok), FormatError if there are only unusable ones, ConfigError if
    all are of other jobs: to start from the beginning over a checkpoint is nothing that may happen in silence.
    """
    word = _chosen_by_rank_0(roots, world, key, own, passed_over) if world.rank == 0 else _word_of_rank_0(world, key)
    if "error" in word:
        raise FormatError(f"rank 0 cannot determine the newest checkpoint: {word['error']}")
    return chosen_of(word, roots, own, missing_ok)


def _chosen_by_rank_0(
    roots: list[Path], world: World, key: str, own: OwnJobs | None, passed_over: Collection[Path]
) -> dict[str, Any]:
    """What it tells the others: now and then that a download has come further, at last the word itself."""
    numbers, said_mono_s = itertools.count(), mono_s()

    def further(_count: int) -> None:
        nonlocal said_mono_s
        if mono_s() - said_mono_s >= FETCHING_SAID_S:
            said_mono_s = mono_s()
            world.publish(f"{key}/{next(numbers)}", {"fetching": True})

    try:
        word = look_for(roots, own, passed_over)
        if word["path"]:
            word["found"] = word["path"]
            word["path"] = str(fetched(place(word["path"]), local_roots(roots)[0], further))
    except LastWordsError as error:
        word = {"path": "", "error": str(error)}
    world.publish(f"{key}/{next(numbers)}", word)
    return word


def _word_of_rank_0(world: World, key: str) -> dict[str, Any]:
    for number in itertools.count():
        word = world.read(f"{key}/{number}", STORE_WAIT_S, "rank 0 to choose the checkpoint")
        if "fetching" not in word:
            return word
    raise AssertionError


def refuse_later_start(manifest: Manifest, agreed: Agreement | None) -> None:
    """ConfigError if the checkpoint is of a start of this job that was drawn elsewhere, and is not before this one.

    What this start saves would be taken for older than it. The next start knows better: it finds the checkpoint here.
    """
    if agreed is not None and manifest.job == agreed.job and manifest.generation >= agreed.generation:
        raise ConfigError(
            f"the newest checkpoint was saved by start {manifest.generation} of job {agreed.job}, and this is start "
            f"{agreed.generation}, since the remote store did not answer when it began; start the job again"
        )


def look_for(roots: list[Path], own: OwnJobs | None, passed_over: Collection[Path] = ()) -> dict[str, Any]:
    """What `chosen_of` judges, as JSON: the newest complete checkpoint, or else what there is beside it.

    A remote store is one of `roots`. If it does not answer, a checkpoint that is here is taken, with a warning.
    Every file is looked at, however many there are: one that is missing would be found by the rank that reads it, and
    end all ranks, where an older checkpoint could be taken.
    """
    try:
        return _look_for(roots, own, os_for(roots), passed_over)
    except StorageError as error:
        here = local_roots(roots)
        word = _look_for(here, own, REAL_OS, passed_over) if here != roots else {"path": ""}
        if not word["path"]:
            raise
        _log.warning("resuming from %s, the newest checkpoint here; a remote one may be newer: %s", word["path"], error)
        return word


def _look_for(roots: list[Path], own: OwnJobs | None, os: Os, passed_over: Collection[Path] = ()) -> dict[str, Any]:
    newest = load.newest(roots, None if own is None else (own.job,), os, every_file=True, passed_over=passed_over)
    if newest is None and own is not None and own.adopted:
        newest = load.newest(roots, own.adopted, os, every_file=True, passed_over=passed_over)
    if newest is None:
        return {"path": "", **_what_is_there(roots, own, os)}
    try:
        return {"path": str(newest), "identity": _identity_of(read_manifest(newest, os))}
    except IncompleteError:
        return _look_for(roots, own, os, passed_over)  # it has just been pruned, so there is a newer one


def chosen_of(word: dict[str, Any], roots: list[Path], own: OwnJobs | None, missing_ok: bool) -> Chosen | None:
    """What `look_for` has found; None or an error as of `choose`."""
    if word["path"]:
        return Chosen(place(word["path"]), word["identity"], place(word.get("found", word["path"])))
    if "unusable" in word:
        raise FormatError(
            f"no checkpoint can be used: {word['unusable']}. See `lastwords verify PATH`; repair it, or move "
            f"it away to start from the beginning"
        )
    where = " or ".join(str(root) for root in roots)
    if own is not None and "others" in word:
        raise ConfigError(
            f"this start of job {own.job} finds no checkpoint of this job in {where}, only checkpoints of other jobs: "
            f"{word['others']}. To continue from one of these, end this job and start it by hand, without "
            f"LASTWORDS_JOB, with its own call of resume(); to start from the beginning, move them away, or "
            f"give each job its own ckpt_save_path. If that job is this job under another name, set "
            f"LASTWORDS_JOB={word['other']} for all of its "
            "starts"
        )
    if missing_ok:
        return None
    whose = f" of job {own.job}" if own else ""
    raise IncompleteError(
        f"there is no complete checkpoint{whose} in {where}; start without resume (or give missing_ok=True), "
        "or see what is there with `lastwords latest`",
        missing=tuple(str(root) for root in roots),
    )


def _what_is_there(roots: list[Path], own: OwnJobs | None, os: Os) -> dict[str, str]:
    """What there is beside a usable checkpoint: unusable ones, with the reason of each, and those of other jobs."""
    found = [entry for root in roots for entry in load.scan(root, os)]
    known = () if own is None else (own.job, *own.adopted)
    others = [] if own is None else [entry for entry in found if entry.manifest and entry.manifest.job not in known]
    unusable = [entry for entry in found if entry not in others and entry.status is not load.DirectoryStatus.COMPLETE]
    word = {}
    if unusable:
        word["unusable"] = "; ".join(f"{entry.path} ({entry.why})" for entry in unusable)
    if others and others[0].manifest:
        word["other"] = others[0].manifest.job
        word["others"] = "; ".join(f"{entry.path} of job {entry.manifest.job}" for entry in others if entry.manifest)
    return word


@contextlib.contextmanager
def all_or_none(world: World, key: str) -> Iterator[None]:
    """An error of one rank inside is an error on all of them where the block ends.

    What only one rank may meet, such as a file that it alone cannot read, belongs inside. What waits for the other
    ranks' word, or for a collective, comes after it: a rank that has failed would let them wait there in vain.
    """
    own: LastWordsError | None = None
    try:
        yield
    except LastWordsError as error:
        own = error
    problem = world.problem_anywhere(key, None if own is None else str(own), STORE_WAIT_S)
    raise_for_all(own, problem)


def raise_for_all(own: Exception | None, problem: str | None) -> None:
    """This rank's own error, else CheckpointError for that of another one, if there is any."""
    if own is not None:
        raise own
    if problem is not None:
        raise CheckpointError(f"another rank cannot resume, so none does: {problem}")


# Where a checkpoint's run stands: what `resume()` returns, and what can be seen of it without a model.


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a resumed run stands: after step `step` of epoch `epoch` (both from 1), which is `global_step` in all.

    Attributes:
        epoch: None where a loop of one's own had not said yet, with `step_end`, what it calls the step that was saved.
        step: likewise.
        global_step: always known.
        exact: every later step will be bitwise what it would have been. In a loop without `steps()` that holds if the
            loop sets its data back and draws no random numbers on the way.
        reasons: why it is not exact, one sentence each.
        path: the checkpoint.
        groups: names of the parameters in each of the optimizer's param groups, those that were added on the way
            included.
        beside: names of what the saved run's loop had changed in variables, closures and globals, and in objects that
            these lead to: it is as this process has made it. What of it the loop reads belongs into `extras`; `exact`
            says nothing of it.
        begun: the saved run's loop had come from the end of that step to the start of the next one, on all ranks: what
            it does in between (an evaluation, say) is done. False: it is not, or not on all; or the loop makes no
            difference.
        drilled: what the newest `lastwords drill --record` beside the checkpoints has covered, and in `drilled.changed`
            whether it still speaks for this script, these versions and this number of ranks. `exact` does not depend on
            it.
    """

    epoch: int | None
    step: int | None
    global_step: int
    exact: bool = True
    reasons: tuple[str, ...] = ()
    path: str = ""
    groups: tuple[tuple[str, ...], ...] = ()
    beside: tuple[str, ...] = ()
    begun: bool = False
    drilled: Drilled | None = None


def peek(path: str | os.PathLike[str], missing_ok: bool | None = None, *, agreed: bool = False) -> ResumePoint | None:
    """Where the run of a checkpoint stands, before any model, loader or process group is made.

    Reads the manifest, and sizes and headers of the files; any thread, any process. `exact` and `reasons` are those of
    the saved run: what differs here, another torch or number of ranks, only `resume()` can say. Only `resume()` knows,
    too, what is in a fallback_path; and, of a restart by torchrun on several nodes, that it is one where this node's
    torchrun has not restarted its workers (on the others only this job's checkpoints count).

    Args:
        path: a checkpoint, or a directory of them (ckpt_save_path), of which the one counts that `resume()` would take.
        missing_ok: as in `resume()`.
        agreed: all ranks of a process group call it, and have what rank 0 finds, or its error.

    Raises:
        IncompleteError: there is no checkpoint.
        FormatError: it is damaged, or only unusable ones are there.
        StorageError: the system does not let it be read.
        ConfigError: `path` is a file.
    """
    if agreed:
        return _agreed(lambda: peek(path, missing_ok))
    drill = os.environ.get(DRILL)
    root = beside = Path(drill) / CHECKPOINTS if drill else Path(path)
    if root.is_file():
        raise ConfigError(f"{root} is a file: give the directory of a checkpoint, or the one with all of them")
    if not (root / MANIFEST_NAME).exists():
        restarted, own = _restart(root)
        url = os.environ.get("LASTWORDS_REMOTE", "")
        roots = [root, *([address_of(url)] if url else [])]
        chosen = chosen_of(look_for(roots, own), roots, own, restarted if missing_ok is None else missing_ok)
        if chosen is None:
            return None
        root = chosen.path
    else:
        beside = root.absolute().parent
    found = load.examine(root, os_for([root]))
    if found.manifest is None or found.status is not load.DirectoryStatus.COMPLETE:
        if found.status is load.DirectoryStatus.UNREADABLE:
            raise StorageError(found.why, errno=found.errno)
        if found.status is load.DirectoryStatus.INCOMPLETE:
            raise IncompleteError(found.why, missing=(str(root),))
        raise FormatError(found.why)
    return replace(point_of(found.manifest, root), drilled=drilled_beside(beside, found.manifest.world_size)[0])


def _agreed(look: Callable[[], ResumePoint | None]) -> ResumePoint | None:
    from torch import distributed

    if not distributed.is_initialized():
        return look()
    found: list[Any] = [None]
    if distributed.get_rank() == 0:
        try:
            found = [look()]
        except LastWordsError as error:  # raised on all
            found = [error]
    distributed.broadcast_object_list(found, src=0)
    if isinstance(found[0], LastWordsError):
        raise found[0]
    return found[0]  # type: ignore[no-any-return]


def drilled_beside(root: Path, world_size: int, data: str = "") -> tuple[Drilled | None, str]:
    """What a drill has covered for the checkpoints in `root`, compared with this process; and why it is ignored.

    data: digest of the loader's samples, "" if it is not known. Never raises.
    """
    found, why = drill_record.read(root)
    if found is None:
        return None, why
    here = {"torch": version("torch"), "lastwords": lastwords.__version__}
    return found.beside(drill_record.running()[1], **here, world_size=world_size, data=data), ""


def _restart(root: Path) -> tuple[bool, OwnJobs | None]:
    """Whether this node's torchrun has restarted its workers; then, or where it is named, which job this is."""
    restarted, job = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0", os.environ.get("LASTWORDS_JOB", "")
    if not (restarted or job):
        return False, None
    from lastwords.optim_wrapper.launch.world import launch_of  # with torch, which a rank needs anyway

    names = os.listdir(root) if root.is_dir() else []
    before = starts.predecessor(starts.read_starts(root, names), launch_of(os.environ, job))
    if before is None:
        return restarted, OwnJobs(job or "(of which no earlier start is known)")  # else no checkpoint is its own
    return restarted, OwnJobs(before.job, starts.adopted(before, names))


def point_of(manifest: Manifest, path: Path) -> ResumePoint:
    """What a manifest says of the run's position."""
    begun, why = begun_of(manifest)
    return ResumePoint(
        manifest.epoch if manifest.named else None,
        manifest.step if manifest.named else None,
        manifest.global_step,
        manifest.exact and not why,
        (*map(str, manifest.reasons), *filter(None, [why])),
        str(path),
        groups_of([unit.meta for unit in manifest.units.values()]),
        tuple(manifest.run.beside or ()),
        begun,
    )


def begun_of(manifest: Manifest) -> tuple[bool, str]:
    """Whether all ranks had begun the step after the saved one; and why it matters if only some had, or nothing."""
    said = {rank: one.document for rank, one in manifest.locals.items() if one.meta.kind in (COMMITTED, TENTATIVE)}
    begun = [rank for rank, document in said.items() if document.begun]
    others = [rank for rank in said if rank not in begun]
    moved = list(dict.fromkeys(name for rank in begun for name in said[rank].between))
    if not others or not moved:
        return bool(begun) and not others, ""
    return False, (
        f"{', '.join(moved)} changed between step_end() and the next step, which {ranks_text(begun)} had begun, "
        f"and {ranks_text(others)} had not"
    )
