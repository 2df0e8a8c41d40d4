"""What goes to the store, in which order, how often, and what is said when it refuses."""

from __future__ import annotations

import errno
import logging
import os as posix
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastwords import clock
from lastwords.checkpoint import layout, load, retention
from lastwords.checkpoint.lock_file import LockFile
from lastwords.checkpoint.remote import uploader
from lastwords.checkpoint.remote.store import RemotePath, Store, address_of, os_for
from lastwords.checkpoint.remote.uploader import LAST_TRIES_S, LOOK_S, PAUSES_S, Uploader, follow, wait_on
from lastwords.checkpoint.system import Os
from lastwords.errors import BusyError, ConfigError, StorageError
from tests import golden
from tests.checkpoint.states import Job
from tests.checkpoint.stores import KilledError, WatchedStore, file_store
from tests.checkpoint.test_retention import filled, steps_in

PERIODIC = Job(incident=0)


@pytest.fixture
def store(tmp_path: Path) -> WatchedStore:
    return WatchedStore(file_store(tmp_path / "store"))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Periodic checkpoints of the steps 31 to 33."""
    return filled(tmp_path / "ckpt", range(31, 34))


def steps_of(store: WatchedStore) -> list[int]:
    """Of the manifests that were uploaded, in order."""
    directories = [path.parent.name for path in store.puts if path.name == layout.MANIFEST_NAME]
    return [name.global_step for name in map(layout.CheckpointName.parse, directories) if name is not None]


def upload_all(here: Path, store: WatchedStore, job: str | None = "job", *, again: bool = False) -> list[int]:
    found = Uploader([here], store.root, job, store=store).upload_missing(again=again)
    return [one.said.global_step for one in found]


def test_the_newest_goes_first_and_each_goes_once(here: Path, store: WatchedStore) -> None:
    assert upload_all(here, store) == [33, 32, 31]
    assert steps_of(store) == [33, 32, 31]
    assert upload_all(here, store) == []
    filled(here, range(34, 35))
    assert upload_all(here, store) == [34]


def test_what_is_pruned_in_the_store_is_not_uploaded_again_unless_asked(here: Path, store: WatchedStore) -> None:
    upload_all(here, store)
    store.remove(store.root)
    assert upload_all(here, store) == []
    assert upload_all(here, store, again=True) == [33, 32, 31]
    assert len(load.scan(store.root, os_for([store.root]))) == 3


def test_another_store_has_nothing_yet(here: Path, store: WatchedStore, tmp_path: Path) -> None:
    upload_all(here, store)
    assert upload_all(here, WatchedStore(file_store(tmp_path / "other"))) == [33, 32, 31]


def test_other_jobs_and_what_is_not_whole_stay_here(
    here: Path, store: WatchedStore, caplog: pytest.LogCaptureFixture
) -> None:
    filled(here, range(41, 42), PERIODIC.again(name="other"))
    (layout.checkpoint_dir(here, 32) / layout.MANIFEST_NAME).unlink()
    damaged = next(layout.checkpoint_dir(here, 31).glob("rank_0/*.ckpt"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    mine = Uploader([here], store.root, "job", store=store)
    assert [one.said.global_step for one in mine.upload_missing()] == [33]
    assert mine.upload_missing() == []
    golden.says([one.getMessage() for one in caplog.records if one.levelno == logging.WARNING])
    assert upload_all(here, store, None) == [41]


def test_one_process_at_a_time(here: Path, store: WatchedStore) -> None:
    with LockFile(here / uploader.LOCK_NAME).held(), golden.raises(BusyError):
        upload_all(here, store)
    assert upload_all(here, store) == [33, 32, 31]


def test_a_killed_upload_is_finished_by_the_next(here: Path, store: WatchedStore) -> None:
    def on_put(path: RemotePath) -> None:
        if len(store.puts) == 4:
            raise KilledError

    store.on_put = on_put
    with pytest.raises(KilledError):
        upload_all(here, store)
    store.on_put = lambda _: None
    assert upload_all(here, store) == [32, 31]
    assert len(store.puts) == len(set(store.puts)) == 9


class FullDisk(Os):
    """Nothing can be written, until it is well."""

    def __init__(self) -> None:
        self.is_well = False

    def create(self, path: Path, *, direct: bool) -> int:
        if uploader.FILE_NAME in path.name and not self.is_well:
            raise OSError(errno.ENOSPC, posix.strerror(errno.ENOSPC))
        return super().create(path, direct=direct)


def test_a_full_disk_stops_no_upload_and_the_record_is_written_when_it_has_room(
    here: Path, store: WatchedStore
) -> None:
    """Uploads are what lets `keep=` make room."""
    disk = FullDisk()
    mine = Uploader([here], store.root, "job", disk, store=store)
    for _ in range(2):
        with golden.raises(StorageError):
            mine.upload_missing()
        assert steps_of(store) == [33, 32, 31]
    assert uploader.read(here) is None
    disk.is_well = True
    mine.upload_missing()
    assert steps_of(store) == [33, 32, 31], "nothing is sent twice"
    assert mine.upload_missing() == []
    assert not any(map(uploader.not_uploaded(here), here.glob("tft_*")))


def test_a_fallback_directory_has_a_record_of_its_own_as_soon_as_it_is_there(
    here: Path, store: WatchedStore, tmp_path: Path
) -> None:
    other = tmp_path / "fallback"
    mine = Uploader([here, other], store.root, "job", store=store)
    mine.upload_missing()
    assert not other.exists()
    waits = PERIODIC.again(attempt=9).save(other, 34)
    mine.upload_missing()
    assert not uploader.not_uploaded(other)(waits)
    assert uploader.not_uploaded(other)(PERIODIC.again(attempt=10).save(other, 35))
    assert uploader.read(other) == uploader.read(here)


def test_one_checkpoint_is_no_directory_of_them(here: Path, store: WatchedStore) -> None:
    with golden.raises(ConfigError):
        upload_all(layout.checkpoint_dir(here, 33), store)
    assert store.puts == []


def test_progress_of_a_long_one_is_said(
    here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    now_s = 0.0

    def mono_s() -> float:
        nonlocal now_s
        now_s += 5.0
        return now_s

    monkeypatch.setattr(clock, "mono_s", mono_s)
    caplog.set_level(logging.INFO)
    at = address_of(f"memory://{tmp_path.name}-{posix.getpid()}")
    Uploader([here], at, "job").upload_missing()
    Store(at).remove(at)
    golden.says([text.partition(" to memory")[0] for text in caplog.messages])


# ---------------------------------------------------------------------- what is pruned


def test_nothing_is_pruned_before_it_is_uploaded(
    here: Path, store: WatchedStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    url = str(store.root)

    def pruned() -> list[int]:
        retention.prune([here], "job", retention.Rules(1), spared=uploader.not_uploaded(here, url))
        return steps_in(here)

    assert pruned() == [31, 32, 33]
    golden.says(caplog.messages)

    def on_put(path: RemotePath) -> None:
        if len(store.puts) == 7:
            raise KilledError

    store.on_put = on_put
    with pytest.raises(KilledError):
        upload_all(here, store)
    assert pruned() == [31, 33]
    store.on_put = lambda _: None
    upload_all(here, store)
    assert pruned() == [33]
    assert len(load.scan(store.root, os_for([store.root]))) == 3


# ---------------------------------------------------------------------- on and on


class Script:
    """What each try gives and each wait says; notes what was waited for."""

    def __init__(self, tries: Iterator[BaseException | None], comes: Callable[[int], bool]) -> None:
        self.tries = tries
        self.comes = comes
        self.waits: list[float] = []
        self.now_s = 0.0

    def missing(self) -> None:
        error = next(self.tries)
        if error is not None:
            raise error

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now_s += seconds
        return self.comes(len(self.waits))


def refusing(times: int) -> Iterator[BaseException | None]:
    yield from [StorageError("uploading s3://bucket/job failed: no")] * times
    while True:
        yield None


def test_a_store_that_refuses_is_said_once_and_asked_after_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    script = Script(refusing(8), lambda waits: waits < 9)
    assert follow(script.missing, script.wait)
    assert script.waits == [*PAUSES_S, PAUSES_S[-1], PAUSES_S[-1], LOOK_S]
    golden.says(caplog.messages)


def test_at_the_end_what_is_left_is_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(refusing(3), lambda _: False)
    monkeypatch.setattr(clock, "mono_s", lambda: script.now_s)
    assert follow(script.missing, script.wait)
    assert script.waits == list(PAUSES_S[:3])


def test_at_the_end_a_store_that_refuses_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(refusing(1000), lambda _: False)
    monkeypatch.setattr(clock, "mono_s", lambda: script.now_s)
    assert not follow(script.missing, script.wait)
    assert LAST_TRIES_S <= script.now_s - PAUSES_S[0] <= LAST_TRIES_S + PAUSES_S[-1]
    golden.says(caplog.messages)


def test_a_line_is_something_new_and_the_end_of_the_input_is_the_end() -> None:
    reading, writing = posix.pipe()
    wait = wait_on(reading)
    posix.write(writing, b"\n\n")
    assert wait(30.0)
    posix.close(writing)
    assert not wait(30.0)
    assert not wait(0.0)
    posix.close(reading)
