"""Carries out what the core decides about files: verify parts, publish them, discard them. Threads, no asyncio.

A file system can take seconds, or hang for ever, so nothing of it runs in the loop's thread; a job that hangs keeps
its daemon thread, and the core's time-outs go on without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from lastwords import clock, threads
from lastwords.checkpoint import layout, load, publish, retention, starts
from lastwords.checkpoint.manifest import Claimed, IncidentFacts
from lastwords.checkpoint.remote import uploader
from lastwords.checkpoint.remote.store import address_of
from lastwords.checkpoint.retention import VerifiedOnce
from lastwords.checkpoint.system import REAL_OS, make_directories, patiently, storage_errors, sync_directory
from lastwords.controller import events, handover
from lastwords.controller.handover import ControllerSpec
from lastwords.controller.timeline import append_record
from lastwords.errors import LastWordsError, StorageError, UnavailableError, named

# The process that uploads a job's checkpoints: `lastwords upload --follow`, started by the controller.
#
# A process, not a thread: the library of a store would keep the controller's loop from a death, and what is left at
# the end of the job is uploaded after the controller has ended. Its input is a pipe: a line says that there is a new
# checkpoint, the end that no more come.

_log = logging.getLogger(__name__)

USAGE = 2
"""Exit code of a command that cannot work, so it is not started again."""


class Uploads:
    """For the thread of one storage queue. Starts nothing before `wake`."""

    def __init__(self, spec: ControllerSpec, roots: Sequence[Path]) -> None:
        self._roots, self._remote = roots, str(address_of(spec.remote))
        fallback = [f"--fallback={root}" for root in roots[1:]]
        self._command = [
            *(sys.executable, "-P", "-m", "lastwords.cli", "upload", str(roots[0]), spec.remote),
            *("--follow", "--job", spec.job, *fallback),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process that runs; None if there is none."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def wake(self) -> None:
        """There may be a new checkpoint. A process that was killed is started again."""
        process = self._process
        if process is None or process.poll() not in (None, USAGE):
            self._start()
        elif process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended, or has lines enough to read
                os.write(process.stdin.fileno(), b"\n")

    def close(self) -> None:
        """No more checkpoints come: the process ends when it has uploaded what there is."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _start(self) -> None:
        try:
            uploader.begin(self._roots, self._remote)
        except StorageError as error:
            _log.warning("until the first upload, `lastwords prune` may remove what has not been uploaded: %s", error)
        try:
            # Its output goes to the controller's log. A session of its own: whoever ends this one does not end it.
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            _log.warning("checkpoints are not uploaded: the process for it cannot be started: %s", error)
            return
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)


_Attempt = events.StartVerify | events.StartPublish | events.Discard | events.KeepParts

KEEP_PAUSES_S = (0.5, 2.0, 5.0)
"""Before further tries to rename what is kept: a human does not see a directory under its temporary name."""
OnEvent = Callable[[events.Event], None]

PRUNING = "pruning"
"""A queue of its own: before others are removed, a whole checkpoint is read, and nobody is to wait behind that."""

PRUNING_NICE = 10
"""Training goes first. More than any priority that this process may have."""

DISCARDED_MAX = 64
"""So many attempts are discarded once more at the end, and older ones when others follow them: a job drops a periodic
checkpoint now and then for months, and a writer is not that late."""

PROGRESS_INTERVAL_S = 1.0
"""A verification, or a publication, says so often that it has come further."""


class StorageJobs:
    """Runs one job after the other for each target directory; results go to `on_event`, from the job's thread.

    may_read: whether checkpoints may be read although nobody waits for that; any thread.
    """

    def __init__(
        self,
        spec: ControllerSpec,
        on_event: OnEvent,
        *,
        may_read: Callable[[], bool] = lambda: True,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._tell = tell
        self._spec = spec
        self._on_event = on_event
        self._may_read = may_read
        self._kept = VerifiedOnce(self._at_leisure)
        self._prune_waits = False
        self._lines: dict[str, queue.SimpleQueue[Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self._pending = 0
        self._claims: list[starts.Claim] = []
        self._verified: tuple[Path, dict[int, publish.SeenPart]] | None = None
        self._discarded: dict[Path, None] = {}  # the newest ones
        self._uploads = Uploads(spec, self._roots) if spec.remote else None

    @property
    def busy(self) -> bool:
        """Whether a job waits or runs, other than of the queue that may be left at any time."""
        return self._pending > 0

    def start(self) -> None:
        """Start the threads now: at a death, memory or the number of processes may be at its limit.

        UnavailableError where it is so already, after some seconds.
        """
        targets = (f"target {number}" for number in range(len(self._roots)))
        for line in ("tidying", "newest", "lines", *targets, PRUNING):
            self._submit(line, lambda: None)

    def clear_up(self) -> None:
        """Claim what this controller is going to write, and remove what dead ones have left; gives nothing."""
        self._submit("tidying", self._clear_up)

    def release(self) -> None:
        """Nothing is going to be written any more."""
        self._submit("tidying", self._release)

    def carry_out(self, effect: _Attempt | events.LookForNewest | events.Prune) -> None:
        """Do what the core wants of files. Beside the answers, StorageProgress comes now and then.

        One order to prune waits at most: what it finds is what is there when its turn comes.
        """
        match effect:
            case events.StartVerify(target=target):
                self._submit(f"target {target}", partial(self._verify, effect))
            case events.StartPublish(target=target):
                self._submit(f"target {target}", partial(self._publish, effect))
            case events.Discard(target=target):
                self._submit(f"target {target}", partial(self._discard, self._tmp_dir(effect)))
            case events.KeepParts(target=target):
                self._submit(f"target {target}", partial(self._keep, effect))
            case events.LookForNewest():
                self._submit("newest", partial(self._look_for_newest, effect))
            case events.Prune() if not self._prune_waits:
                self._prune_waits = True
                self._submit(PRUNING, partial(self._prune, effect))

    def record(self, path: Path, line: str) -> None:
        """Append an incident's line to a file, for people, and then `tell` of it; a failure is only logged."""

        def append_and_tell() -> None:
            _append(path, line)
            self._tell(line)

        self._submit("lines", append_and_tell)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until all jobs are done; False if that takes longer. Not for the loop's thread."""
        done = threading.Event()
        with self._lock:
            names = list(self._lines)
        for name in names:
            done.clear()
            self._submit(name, done.set)
            if not done.wait(timeout_s):
                return False
        return True

    # ------------------------------------------------------------------ the jobs' threads

    @property
    def _roots(self) -> tuple[Path, ...]:
        fallback = self._spec.fallback_root
        return (self._spec.root,) if fallback is None else (self._spec.root, fallback)

    def _root(self, target: int) -> Path:
        if target == 0:
            return self._spec.root
        assert self._spec.fallback_root is not None, "the core was told that there is no fallback directory"
        return self._spec.fallback_root

    def _tmp_dir(self, effect: _Attempt, prefix: str = layout.WRITTEN) -> Path:
        job, generation = self._spec.job, self._spec.generation
        name = layout.TemporaryName(effect.step, job, generation, effect.incident, effect.attempt)
        return name.under(self._root(effect.target), prefix)

    def _gather(self, effect: events.StartVerify) -> Path:
        """Move parts that an earlier attempt has finished to those of this one."""
        here = self._tmp_dir(effect)
        for part in effect.parts:
            there = self._tmp_dir(replace(effect, attempt=part.attempt)) / layout.rank_dir_name(part.rank)
            if part.attempt == effect.attempt or not REAL_OS.exists(there):
                continue  # moved before, or missing, which the verification will say
            make_directories(here, REAL_OS)
            with storage_errors("moving", there):
                REAL_OS.rename(there, here / there.name)
            sync_directory(here, REAL_OS)
        return here

    def _clear_up(self) -> None:
        spec = self._spec
        for root in self._roots:
            claim = starts.Claim.take(root, spec.job, spec.generation)
            if claim is not None:
                self._claims.append(claim)
            removed = starts.remove_stale(root, spec.job, spec.generation, may_be_followed=self._may_be_followed)
            if removed:
                _log.info("removed files of ended jobs: %s", ", ".join(map(str, removed)))
        if self._uploads is not None:
            self._uploads.wake()

    def _may_be_followed(self, job: str, generation: int) -> bool:
        # This job's own ranks on other hosts had ended before it was started again.
        return handover.may_be_followed(job, generation, elsewhere=job != self._spec.job)

    def _look_for_newest(self, effect: events.LookForNewest) -> None:
        try:
            path = self._newest()
            claimed = None if path is None else Claimed.read(path)  # true of what was just found to be sound
        except LastWordsError as error:
            _log.info("cannot determine the newest checkpoint: %s", error)
            return
        if path is None or claimed is None:
            self._on_event(events.NewestKnown(effect.incident, 0, ""))
        else:
            own = claimed.job == self._spec.job
            self._on_event(events.NewestKnown(effect.incident, claimed.global_step, str(path), own))

    def _newest(self) -> Path | None:
        """What a start of this job resumes from: its own newest one, or else one of a job that it has resumed from.

        If there is none of those either, a start by hand of a job without a name takes the newest one of any job.
        """
        spec = self._spec
        found = load.newest(self._roots, (spec.job,))
        if found is None and (jobs := starts.adopted_by(spec.root, spec.generation)):
            found = load.newest(self._roots, jobs)
        return found if found is not None or spec.own_only else load.newest(self._roots)

    def _progress_of(self, effect: events.StartVerify | events.StartPublish) -> Callable[[], None]:
        """To be called after each file; tells the core now and then, so that its deadline runs from there."""
        told_mono_s = clock.mono_s()

        def progress() -> None:
            nonlocal told_mono_s
            if clock.mono_s() - told_mono_s >= PROGRESS_INTERVAL_S:
                told_mono_s = clock.mono_s()
                self._on_event(events.StorageProgress(effect.incident, effect.attempt))

        return progress

    def _prune(self, effect: events.Prune) -> None:
        self._prune_waits = False
        with contextlib.suppress(OSError):  # this thread alone, and those that it starts
            os.setpriority(os.PRIO_PROCESS, 0, max(PRUNING_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
        rules = retention.Rules(effect.keep_max, effect.keep_minutes)
        remote = self._spec.remote
        spared = uploader.not_uploaded(self._spec.root, remote) if remote else lambda _: False
        retention.prune(self._roots, self._spec.job, rules, verified=self._kept, spared=spared)

    @contextlib.contextmanager
    def _at_leisure(self, path: Path) -> Iterator[Callable[[int], None]]:
        """While a checkpoint is read that is to stay: for as long as nothing else needs the disk."""

        def on_bytes(_: int) -> None:
            if not self._may_read():
                raise UnavailableError(f"{path} has to be read first, and there is no time for that now")

        yield on_bytes

    def _discard(self, tmp_dir: Path) -> None:
        with self._lock:
            self._discarded[tmp_dir] = None
            oldest = next(iter(self._discarded)) if len(self._discarded) > DISCARDED_MAX else None
            if oldest is not None:
                del self._discarded[oldest]
        for one in filter(None, (tmp_dir, oldest)):
            starts.discard_own(one)

    def _release(self) -> None:
        # Once more: what was in the way, such as too many open files, may have passed, and a writer that had its order
        # just before the end may have made its directory again.
        for tmp_dir in [*self._discarded]:  # the threads of the directories may still add to it
            starts.discard_own(tmp_dir)
        while self._claims:
            self._claims.pop().release()
        if self._uploads is not None:
            self._uploads.close()

    def _keep(self, effect: events.KeepParts) -> None:
        tmp_dir, kept = self._tmp_dir(effect), self._tmp_dir(effect, layout.UNPUBLISHED)
        for pause_s in (*KEEP_PAUSES_S, None):
            try:
                if starts.keep(tmp_dir, kept) is not None:
                    _log.warning(
                        ("finished files of step %d are kept in %s; remove the directory when you no longer need it"),
                        effect.step,
                        kept,
                    )
                else:
                    self._discard(tmp_dir)
                return
            except StorageError as error:
                if pause_s is None:
                    _log.error("%s may have finished files, but could not be renamed to %s: %s", tmp_dir, kept, error)
                else:
                    time.sleep(pause_s)

    def _verify(self, effect: events.StartVerify) -> None:
        heads: dict[int, publish.SeenPart] = {}
        try:
            tmp_dir = self._gather(effect)
            problems = publish.verify_parts(
                tmp_dir,
                effect.writers,
                effect.units,
                effect.local_ranks,
                effect.step,
                progress=self._progress_of(effect),
                job=self._spec.job,
                heads=heads,
            )
        except Exception as error:  # outermost for this job: the core waits for an answer, whatever happened
            if not isinstance(error, StorageError):
                _log.exception("verifying attempt %d of incident %d failed", effect.attempt, effect.incident)
            reason = str(error) if isinstance(error, LastWordsError) else named(error)
            self._on_event(events.VerifyBlocked(effect.incident, effect.attempt, reason))
            return
        if problems:
            self._on_event(events.VerifyFailed(effect.incident, effect.attempt, tuple(problems)))
        else:
            self._verified = tmp_dir, heads
            self._on_event(events.Verified(effect.incident, effect.attempt))

    def _publish(self, effect: events.StartPublish) -> None:
        incident = IncidentFacts(
            job=self._spec.job,
            generation=self._spec.generation,
            incident=effect.incident,
            attempt=effect.attempt,
            global_step=effect.step,
            world_size=self._spec.world_size,
            writers=tuple(sorted(part.rank for part in effect.parts)),
            reason=effect.reason,
            cause_ranks=effect.cause_ranks,
            lost_locals=dict.fromkeys(effect.lost_local_ranks, "no process of its host was left to read its black box"),
            facts={"dead_ranks": list(effect.dead_ranks)},
            doubts=dict(effect.doubts),
        )
        root, tmp_dir, progress = self._root(effect.target), self._tmp_dir(effect), self._progress_of(effect)
        verified, self._verified = self._verified, None  # once: what is published again is read again
        heads = verified[1] if verified is not None and verified[0] == tmp_dir else None
        try:
            path = publish.publish(
                root, tmp_dir, incident, progress=progress, heads=heads, may_be_followed=self._may_be_followed
            )
        except Exception as error:  # outermost for this job: the core waits for an answer, whatever happened
            if not isinstance(error, LastWordsError):
                _log.exception("publishing attempt %d of incident %d failed", effect.attempt, effect.incident)
            reason = str(error) if isinstance(error, LastWordsError) else named(error)
            self._on_event(events.PublishFailed(effect.incident, effect.attempt, reason))
        else:
            self._on_event(events.Published(effect.incident, effect.attempt, str(path)))
            if self._uploads is not None:
                self._submit("tidying", self._uploads.wake)

    # ------------------------------------------------------------------ queues

    def _submit(self, line: str, job: Callable[[], None]) -> None:
        with self._lock:
            jobs = self._lines.get(line)
            if jobs is None:
                jobs = queue.SimpleQueue()
                threads.start_patiently(self._run, line, jobs, name=f"lastwords-{line}")
                self._lines[line] = jobs
            self._pending += line != PRUNING
        jobs.put(job)

    def _run(self, line: str, jobs: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            job = jobs.get()
            try:
                job()
            except Exception:  # outermost loop of a thread: a mistake in one job must not keep the next from running
                _log.exception("a storage job failed")
            finally:
                with self._lock:
                    self._pending -= line != PRUNING


def _append(path: Path, line: str) -> None:
    """A rank that slept through the end of its job reads there how it ended, so a failure that may pass is no end."""
    try:
        patiently(lambda: append_record(path, line), REAL_OS)
    except StorageError as error:
        _log.warning("cannot write to %s: %s", path, error)
