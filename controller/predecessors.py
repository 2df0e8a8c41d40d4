"""What controllers of earlier starts are still about to publish, and waiting for it.

Whoever starts again wants the checkpoint of the incident before. On the same address the new controller waits for the
old one (`handover`); a start that takes another port each time, or whose controller runs on another host, finds it by
what it does in the checkpoint directory: its claim is locked while it lives, and its files lie in a temporary
directory until they are published or given up. On the same host its run file says in addition which stage it is in.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lastwords import clock
from lastwords.checkpoint import stale
from lastwords.controller import handover
from lastwords.controller.spec import ControllerSpec
from lastwords.errors import BusyError, UnavailableError
from lastwords.liveness import paths

_log = logging.getLogger(__name__)

_BEFORE_PUBLICATION = ("settling", "proceeding", "saving", "verifying", "publishing")


def await_publications(
    spec: ControllerSpec,
    *,
    shm_root: Path = paths.SHM_ROOT,
    stall_s: float = handover.STALL_S,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once no controller of an earlier generation is about to publish in this job's directories.

    One that does not move for `stall_s` is given up: UnavailableError if it is of this very job, else a warning.
    BusyError where ranks of this job still train on this host: they outlive a launcher that was killed.
    """
    began_mono_s = clock.mono_s()
    while trains := next((one for one in _earlier_here(spec, shm_root) if _trains(one, spec)), None):
        if clock.mono_s() - began_mono_s > handover.LIVE_GRACE_S:
            raise BusyError(
                f"{trains.live} ranks of an earlier start of this job still train, with the {trains}: they go on when "
                "their launcher is killed. End them with SIGTERM, which saves, and start again; or give this job "
                "another name (LASTWORDS_JOB) and directory"
            )
        sleep(handover.POLL_INTERVAL_S)
    newest: object = None
    moved_mono_s = clock.mono_s()
    while found := _under_way(spec, shm_root):
        if found != newest:
            if newest is None:
                _log.info(
                    "waiting for an earlier start of this job, which may still publish a checkpoint: %s",
                    ", ".join(sorted(found)),
                )
            newest, moved_mono_s = found, clock.mono_s()
        if clock.mono_s() - moved_mono_s > stall_s:
            what = f"{', '.join(sorted(found))}: no progress for {stall_s:g} s"
            if any(f"-{spec.job}-g" in name or f" {spec.job}," in name for name in found):
                raise UnavailableError(
                    f"an earlier start of this job may still publish a checkpoint: {what}; read the controllers' "
                    f"logs in {spec.log_path.parent}, and end that controller if it hangs"
                )
            _log.warning("%s; continuing without it", what)
            return
        sleep(handover.POLL_INTERVAL_S)


def _under_way(spec: ControllerSpec, shm_root: Path) -> dict[str, object]:
    roots = [spec.root] if spec.fallback_root is None else [spec.root, spec.fallback_root]
    found: dict[str, object] = dict(stale.under_way(roots, (spec.job, spec.generation)))
    found |= {str(one): one for one in _earlier_here(spec, shm_root) if one.stage in _BEFORE_PUBLICATION}
    return found


def _earlier_here(spec: ControllerSpec, shm_root: Path) -> Iterator[handover.RunRecord]:
    """Controllers of earlier starts in this directory that run on this host."""
    for record in handover.running_here(root=shm_root):
        if Path(record.log).parent == spec.log_path.parent and record.generation < spec.generation:
            yield record


def _trains(record: handover.RunRecord, spec: ControllerSpec) -> bool:
    return record.job == spec.job and record.is_idle_stage and record.live > 0
