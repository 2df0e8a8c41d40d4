"""Where a checkpoint's run stands: what `resume()` returns, and what can be seen of it without a model."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import lastwords
from lastwords.checkpoint import drill_record, load, starts
from lastwords.checkpoint.drill_record import Drilled
from lastwords.checkpoint.layout import MANIFEST_NAME
from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.meta import COMMITTED, TENTATIVE, groups_of
from lastwords.checkpoint.remote.store import address_of, os_for
from lastwords.errors import ConfigError, FormatError, IncompleteError, StorageError
from lastwords.optim_wrapper.launch.drill_plan import CHECKPOINTS, DRILL
from lastwords.optim_wrapper.resume.resume_choice import OwnJobs, chosen_of, look_for
from lastwords.sharding.describe import ranks_text


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a resumed run stands: `step` of `epoch` (both 1-based) was the last one done, `global_step` in all.

    epoch, step: None where a loop of one's own had not said yet, with `step_end`, what it calls the step that was saved
    (or never says it). `global_step` is always known.
    exact: every later step will be bitwise what it would have been; if not, `reasons` says why, one sentence each.
    In a loop without `steps()` that holds if the loop sets its data back and draws no random numbers on the way.
    groups: names of the parameters in each of the optimizer's param groups, those that were added on the way included.
    beside: names of what the saved run's loop had changed in variables, closures and globals, and in objects that these
    lead to: it is as this process has made it. What of it the loop reads belongs into `extras`; `exact` says nothing of
    it.
    drilled: what the newest `lastwords drill --record` beside the checkpoints has covered, and in `drilled.changed`
    whether it still speaks for this script, these versions and this number of ranks. `exact` does not depend on it.
    begun: the saved run's loop had come from the end of that step to the begin of the next one, on all ranks: what it
    does in between (an evaluation, say) is done. False: it is not, or not on all; or the loop makes no difference.
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


def peek(path: str | os.PathLike[str], missing_ok: bool | None = None) -> ResumePoint | None:
    """Where the run of a checkpoint stands, before any model, loader or process group is made.

    path: a checkpoint, or a directory of them (ckpt_save_path), of which the one counts that `resume()` would take.
    Reads the manifest, and sizes and headers of the files; any thread, any process. missing_ok: as in `resume()`.
    `exact` and `reasons` are those of the saved run: what differs here, another torch or number of ranks, only
    `resume()` can say. Raises IncompleteError if there is none, FormatError if it is damaged or only unusable ones are
    there, StorageError if the system does not let it be read, ConfigError if `path` is a file.

    What only `resume()` knows: what is in a fallback_path; and, of a restart by torchrun on several nodes, that it is
    one where this node's torchrun has not restarted its workers (on the others only this job's checkpoints count).
    """
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
    if found.manifest is None or found.status is not load.Status.COMPLETE:
        if found.status is load.Status.UNREADABLE:
            raise StorageError(found.why, errno=found.errno)
        if found.status is load.Status.INCOMPLETE:
            raise IncompleteError(found.why, missing=(str(root),))
        raise FormatError(found.why)
    return replace(point_of(found.manifest, root), drilled=drilled_beside(beside, found.manifest.world_size)[0])


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
        f"{', '.join(moved)} changed between step_end() and the next step, which ranks {ranks_text(begun)} had begun, "
        f"and ranks {ranks_text(others)} had not"
    )
