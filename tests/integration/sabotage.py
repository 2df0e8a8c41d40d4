"""Parts of the product or the system, broken inside the ranks of a test.

no_bucket_replay          a resumed run lets DDP sum in whatever order it likes
no_tentative_slot         the black box gets no copy of the step under way
no_random_numbers:2       rank 2 does not restore its random streams
no_local_buffers          no rank restores its own buffers
no_proceed                a rank that is told to proceed stays where it is
no_one_moment             hyperparameters stay as the writer of each unit had them
no_carrying               a run on other ranks finds its place in the data by the number of steps
no_shared_streams         ranks that share a replica's work go on with streams of several replicas
no_epoch_start            the random streams at the start of the epoch are not restored
dies_while_writing:0      rank 0 is killed when its part of a checkpoint is written but for the end
hangs_while_writing:0     rank 0 makes no progress in the middle of its part
disk_full, disk_full:0    every write of a checkpoint fails with ENOSPC (on rank 0)
disk_full_at:NAME         likewise, but only for files below a directory of that name
fsync_fails:0             every fsync on rank 0 fails with EIO
fsync_fails_once          the first fsync of each rank fails with EIO
another_host              every rank says that it is of a host on which the controller is not
in_cgroup:1=FOLDER        rank 1 is in this cgroup
no_controller             rank ctrl_rank_id believes that it has started a controller
"""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.faults import Faults
from tests.integration.plan import Plan
from tests.liveness.cgroups import put

HANG_S = 60.0
_done: list[str] = []


def apply(plan: Plan, rank: int) -> None:
    """Carry out every sabotage that the plan names, in this process; once, should `main` be entered again."""
    entries, _done[:] = [entry for entry in plan.sabotage if entry not in _done], plan.sabotage
    for entry in entries:
        name, _, argument = entry.partition(":")
        if argument.isdigit() and int(argument) != rank:
            continue
        _SABOTAGE[name](argument)


def is_frozen(tft: Any) -> bool:
    """Whether lastwords has frozen this rank."""
    return bool(tft._run is not None and tft._run.protection.agent.incident_open)


def is_told(tft: Any) -> bool:
    """Whether this rank knows how the job ends."""
    return bool(tft._run is not None and tft._run.leaving)


def watch_slots(faults: Faults) -> None:
    """Come by the phases "slot_..." whenever a slot of the black box has been filled, but is not valid yet."""
    from lastwords.processor.black_box import BlackBox
    from lastwords.processor.box_layout import SlotKind

    begin, commit = BlackBox.begin, BlackBox.commit
    under_way: list[tuple[str, int]] = []

    def watched_begin(self: BlackBox, kind: SlotKind, step: int) -> int:
        under_way[:] = [(f"slot_{kind.name.lower()}", step)]
        return begin(self, kind, step)

    def watched_commit(self: BlackBox, slot: int, json_bytes: bytes = b"{}") -> None:
        phase, step = under_way.pop()
        faults.at_step(phase, step)
        commit(self, slot, json_bytes)

    BlackBox.begin = watched_begin  # type: ignore[method-assign]
    BlackBox.commit = watched_commit  # type: ignore[method-assign]


def copy_beside(faults: Faults) -> None:
    """Copy beside the training what is small, too, and come by the phase "copying" there."""
    from lastwords.processor import whole_copies

    whole_copies.BESIDE_BYTES_MIN = 0
    put = whole_copies._CopyFile.put

    def watched_put(self: whole_copies._CopyFile, *what: Any) -> None:
        if threading.current_thread().name == "lastwords-copy":
            faults.at_step("copying", self._said[0])
        put(self, *what)

    whole_copies._CopyFile.put = watched_put  # type: ignore[method-assign]


def _another_host(_: str) -> None:
    from lastwords.optim_wrapper.trainer import protection

    original = protection.this_process
    protection.this_process = lambda nonce: dataclasses.replace(original(nonce), host_id="another-host")


def watch_gate(faults: Faults) -> None:
    """Come by the phases "gate_enter" and "gate", and let the action "hold" keep this rank at its gate."""
    from lastwords.optim_wrapper.trainer.gate import Gate

    enter, passed = Gate.enter, Gate.passed

    def watched_enter(self: Gate, *place: Any) -> None:
        faults.at("gate_enter")
        enter(self, *place)
        faults.at("gate")

    def watched_passed(self: Gate) -> bool:
        return False if faults.holds_gate else passed(self)

    Gate.enter = watched_enter  # type: ignore[method-assign]
    Gate.passed = watched_passed  # type: ignore[method-assign]


def _no_controller(_: str) -> None:
    from lastwords.controller import launch

    def start(spec: launch.ControllerSpec, **_more: object) -> launch.ControllerHandle:
        return launch.ControllerHandle(0, spec.port, spec.log_path, None)

    launch.start_controller = start  # type: ignore[assignment]


def _no_bucket_replay(_: str) -> None:
    from lastwords.optim_wrapper.ddp import ddp_buckets

    ddp_buckets.replay = lambda *_args, **_more: []


def _no_tentative_slot(_: str) -> None:
    from lastwords.optim_wrapper.capture.rank_local import BoxRecorder

    BoxRecorder.tentative = lambda *_args, **_more: None  # type: ignore[method-assign]


def _no_random_numbers(_: str) -> None:
    from lastwords.optim_wrapper.capture.rank_local import RngCapture

    RngCapture.restore = lambda *_args, **_more: ()  # type: ignore[method-assign]


def _no_carrying(_: str) -> None:
    from lastwords.optim_wrapper.loop import loader_changes

    loader_changes.carry = lambda *_args, **_more: (None, "")  # type: ignore[attr-defined]


def _no_shared_streams(_: str) -> None:
    from lastwords.optim_wrapper.resume import resume_elsewhere

    resume_elsewhere._torch_streams = lambda *_: ""


def _no_local_buffers(_: str) -> None:
    from lastwords.optim_wrapper.capture.buffers import Buffers

    Buffers.restore = lambda *_args, **_more: ()  # type: ignore[method-assign]


def _no_epoch_start(_: str) -> None:
    from lastwords.optim_wrapper.trainer.run import Run

    original = Run.resume_at.fget
    assert original is not None

    def resume_at(run: Run) -> Any:
        return dataclasses.replace(original(run), restore_epoch_start=lambda: None)

    Run.resume_at = property(resume_at)  # type: ignore[assignment]


def _no_one_moment(_: str) -> None:
    from lastwords.optim_wrapper.state import plain_values

    plain_values.align = lambda *_args, **_more: []


def _no_proceed(_: str) -> None:
    from lastwords.processor.participation import Participation

    Participation.on_proceed = lambda *_args, **_more: False  # type: ignore[method-assign]


def _on_pwrite(act: Callable[[Path], None]) -> None:
    """Call `act(path)` in front of every write of a checkpoint's file (and not in the probe at the start)."""
    from lastwords.checkpoint.system import Os

    original = Os.pwrite

    def pwrite(self: Os, fd: int, data: memoryview, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "/.tmp-" in path:
            act(Path(path))
        return original(self, fd, data, offset)

    Os.pwrite = pwrite  # type: ignore[method-assign]


def _in_cgroup(place: str) -> None:
    rank, _, folder = place.partition("=")
    if os.environ["RANK"] == rank:
        put(os.getpid(), Path(folder))


def _disk_full(_: str) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    _on_pwrite(refuse)


def _disk_full_at(name: str) -> None:
    def refuse(path: Path) -> None:
        if name in path.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    _on_pwrite(refuse)


def _hangs_while_writing(_: str) -> None:
    _on_pwrite(lambda _path: time.sleep(HANG_S))


def _dies_while_writing(_: str) -> None:
    from lastwords.checkpoint.direct_io import DirectWriter

    def die(_writer: DirectWriter) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    DirectWriter.finish = die  # type: ignore[method-assign]


def _fsync_fails(_: str) -> None:
    _on_fsync(times=1000)


def _fsync_fails_once(_: str) -> None:
    _on_fsync(times=1)


def _on_fsync(times: int) -> None:
    """So many times fsync fails in what is being saved (and not in the probe at the start)."""
    from lastwords.checkpoint.system import Os

    fsync = Os.fsync
    left = [None] * times

    def failing(self: Os, fd: int) -> None:
        if left and "/.tmp-" in os.readlink(f"/proc/self/fd/{fd}"):
            left.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(self, fd)

    Os.fsync = failing  # type: ignore[method-assign]


_SABOTAGE: dict[str, Callable[[str], None]] = {
    "another_host": _another_host,
    "disk_full": _disk_full,
    "disk_full_at": _disk_full_at,
    "dies_while_writing": _dies_while_writing,
    "fsync_fails": _fsync_fails,
    "fsync_fails_once": _fsync_fails_once,
    "in_cgroup": _in_cgroup,
    "hangs_while_writing": _hangs_while_writing,
    "no_bucket_replay": _no_bucket_replay,
    "no_controller": _no_controller,
    "no_epoch_start": _no_epoch_start,
    "no_carrying": _no_carrying,
    "no_shared_streams": _no_shared_streams,
    "no_local_buffers": _no_local_buffers,
    "no_one_moment": _no_one_moment,
    "no_proceed": _no_proceed,
    "no_random_numbers": _no_random_numbers,
    "no_tentative_slot": _no_tentative_slot,
}
