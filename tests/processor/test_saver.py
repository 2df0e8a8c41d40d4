"""The writer's thread: what it reports while the file system takes its time, and what its failures mean."""

from __future__ import annotations

import dataclasses
import errno
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import layout, part
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.system import SyncWatch
from lastwords.processor import saver
from lastwords.processor.events import Event, SaveErrored, SaveFinished, SaveProgressed
from lastwords.processor.saver import Position, SaveJob, SaverSpec
from lastwords.vocabulary import Phase, Save, Stand

WAIT_S = 20.0
ORDER = Save(1, 1, 1, 7, ("u",), (0,), 0, "rank 1 died")


class Source:
    """One small tensor; `error` comes instead of the black boxes."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def position(self, step: int) -> Position:
        return Position(1, step)

    def unit_state(self, unit: str, step: int, stand: Stand) -> part.UnitState:
        return part.UnitState([(TensorSpec("unit/u/model/w", "U8", (64,)), bytes(64))])

    def local_states(self, ranks: Sequence[int], step: int) -> Mapping[int, part.LocalState]:
        if self.error is not None:
            raise self.error
        return {rank: part.LocalState([]) for rank in ranks}

    def facts(self, step: int) -> dict[str, Any]:
        return {}


class SlowSync(SyncWatch):
    """A file system whose fsync (or close) takes until it is let go."""

    def __init__(self, slow: str) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self._slow = slow

    def fsync(self, fd: int) -> None:
        with self._noted():
            assert self._slow != "fsync" or self.let_go.wait(WAIT_S)
        super().fsync(fd)

    def close(self, fd: int) -> None:
        with self._noted():
            assert self._slow != "close" or self.let_go.wait(WAIT_S)
        super().close(fd)


Said = tuple[Any, ...]


def job(tmp_path: Path, said: queue.Queue[Said], source: Source, watch: SyncWatch | None = None) -> SaveJob:
    def handle(event: Event) -> None:
        assert isinstance(event, SaveProgressed | SaveFinished | SaveErrored)
        assert (event.incident, event.attempt) == (ORDER.incident, ORDER.attempt)
        match event:
            case SaveProgressed():
                said.put(("progress", event.bytes_written, event.syncing))
            case SaveFinished():
                said.put(("done", event.bytes_written))
            case SaveErrored():
                said.put(("failed", event.reason, event.storage))

    spec = SaverSpec(0, "digits", (tmp_path,), source)
    return SaveJob(ORDER, Stand(Phase.COMPUTING, 7), spec, handle, watch=watch)


@pytest.mark.parametrize("slow", ["fsync", "close"])
def test_a_writer_inside_fsync_or_close_is_said_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    monkeypatch.setattr(saver, "SYNC_INTERVAL_S", 0.01)
    said: queue.Queue[Said] = queue.Queue()
    watch = SlowSync(slow)
    job(tmp_path, said, Source(), watch).start()
    syncs = 0
    while syncs < 3:  # beside them there are words of bytes written, where that took long
        what, _, syncing = said.get(timeout=WAIT_S)
        assert what == "progress"
        syncs += syncing
    watch.let_go.set()
    while (last := said.get(timeout=WAIT_S))[0] == "progress":
        pass
    assert last[0] == "done"
    assert not watch.inside
    assert (layout.TemporaryName(7, "digits", 1, 1, 1).under(tmp_path) / "rank_0" / layout.PART_NAME).exists()


def test_a_cancelled_writer_says_nothing_more_from_inside_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "SYNC_INTERVAL_S", 0.01)
    said: queue.Queue[Said] = queue.Queue()
    watch = SlowSync("fsync")
    writer = job(tmp_path, said, Source(), watch)
    writer.start()
    said.get(timeout=WAIT_S)
    writer.cancel()
    watch.let_go.set()
    writer.wait()
    assert all(word[0] == "progress" for word in list(said.queue))


@pytest.mark.parametrize(
    ("error", "storage"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (ValueError("a mistake"), False),
    ],
)
def test_what_may_work_later_is_told_from_what_will_not(tmp_path: Path, error: Exception, storage: bool) -> None:
    said: queue.Queue[Said] = queue.Queue()
    job(tmp_path, said, Source(error)).start()
    what, reason, later = said.get(timeout=WAIT_S)
    assert (what, later) == ("failed", storage)
    assert type(error).__name__ in reason


class Moving(Source):
    """The loop writes the tensor for the first time while it is read, `times` times; each time it is named."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.moved = 0

    def unit_state(self, unit: str, step: int, stand: Stand) -> part.UnitState:
        def read() -> bytes:
            self.moved += self.moved < self.times
            return bytes([self.moved]) * 64

        state = part.UnitState([(TensorSpec("unit/u/model/w", "U8", (64,)), read)])
        reasons = [f"moved {self.moved}"] if self.moved else []
        return dataclasses.replace(state, meta=dataclasses.replace(state.meta, reasons=reasons))


@pytest.mark.parametrize("times", [0, 1, 2])
def test_what_changes_while_it_is_read_is_read_again_and_named(tmp_path: Path, times: int) -> None:
    said: queue.Queue[Said] = queue.Queue()
    job(tmp_path, said, Moving(times)).start()
    while (last := said.get(timeout=WAIT_S))[0] == "progress":
        pass
    assert last[0] == "done", last
    directory = layout.TemporaryName(7, "digits", 1, 1, 1).under(tmp_path)
    said_of_unit = part.read_part(directory / "rank_0").units["u"].meta
    assert list(said_of_unit.reasons) == ([f"moved {times}"] if times else [])


def test_what_never_stays_as_it_was_is_not_saved(tmp_path: Path) -> None:
    said: queue.Queue[Said] = queue.Queue()
    job(tmp_path, said, Moving(1000)).start()
    while (last := said.get(timeout=WAIT_S))[0] == "progress":
        pass
    assert last[0] == "failed"
