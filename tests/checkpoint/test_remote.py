"""Checkpoints in a remote store: nobody ever sees half of one, whatever is killed and whatever is refused."""

from __future__ import annotations

import errno
import os as posix
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lastwords.checkpoint import layout, load, starts
from lastwords.checkpoint.manifest import Claimed
from lastwords.checkpoint.remote import store, transfer, uploader
from lastwords.checkpoint.remote import store as store_module
from lastwords.checkpoint.remote.store import RemoteOs, RemotePath, Store, address_of, os_for
from lastwords.checkpoint.remote.transfer import download, upload
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.errors import BusyError, ConfigError, FormatError, ReplacedError, StorageError
from tests import golden
from tests.checkpoint.states import Job, content_of, content_written
from tests.checkpoint.stores import KilledError, WatchedStore, file_store, half_put, torn

JOB = Job()
FILES = 3
"""Of a checkpoint of `JOB`: two of ranks and the manifest."""


@pytest.fixture(params=["memory", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemotePath]:
    """An empty directory in a store."""
    if request.param == "file":
        yield file_store(tmp_path / "store")
        return
    at = address_of(f"memory://{tmp_path.name}-{posix.getpid()}")
    yield at
    store = Store(at)
    if RemoteOs(store).exists(at):
        store.remove(at)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A published checkpoint."""
    return JOB.save(tmp_path / "ckpt", 37)


def kill_at(store: WatchedStore, number: int) -> None:
    """At the end of the process's `number`-th look: two for each file."""
    looks = 0

    def on_put(_: RemotePath) -> None:
        nonlocal looks
        looks += 1
        if looks == number:
            raise KilledError

    store.on_put = on_put


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket/job",
        "s3://",
        "s3:///",
        "simplecache::s3://bucket",
        "s3://bucket?x=1",
        "S3://bucket",
        "s3://bucket/job[12]",
        "memory://job*",
        "hdfs:///user/me",
        "file://mnt/job",
    ],
)
def test_what_is_no_directory_of_a_store_is_refused(url: str) -> None:
    with golden.raises(ConfigError):
        address_of(url)


def test_a_place_of_the_command_line_is_local_or_remote() -> None:
    assert isinstance(store.place("s3://bucket/job"), RemotePath)
    assert not isinstance(store.place("./s3:/bucket"), RemotePath)
    assert os_for([Path("x")]) is REAL_OS


def test_a_store_that_nobody_knows_is_refused() -> None:
    with golden.raises(ConfigError):
        Store(address_of("nostore://bucket/job"))


def test_two_checkpoints_of_one_step_lie_beside_each_other(root: RemotePath, tmp_path: Path) -> None:
    first = upload(JOB.save(tmp_path / "a", 37), Store(root))
    second = upload(JOB.again(generation=2, seed=1).save(tmp_path / "b", 37), Store(root))
    assert first != second
    assert {layout.CheckpointName.parse(path.name).global_step for path in (first, second)} == {37}  # type: ignore[union-attr]
    assert load.newest([root], os=os_for([root])) == second


# ---------------------------------------------------------------------- up


def test_what_is_uploaded_is_read_there_as_it_is_here(root: RemotePath, saved: Path) -> None:
    sent: list[int] = []
    there = upload(saved, Store(root), sent.append)
    os = os_for([there])
    assert content_of(there, os) == content_written(JOB, 37)
    assert load.verify(there, os=os) == []
    assert load.latest(root, os=os) == there
    assert str(there).startswith(str(root))
    assert not sent or sum(sent) == sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())


def test_the_manifest_is_uploaded_last_and_once(root: RemotePath, saved: Path) -> None:
    store = WatchedStore(root)
    there = upload(saved, store)
    assert store.puts[-1] == there / layout.MANIFEST_NAME
    assert len(store.puts) == FILES
    assert upload(saved, store) == there
    assert len(store.puts) == FILES


@pytest.mark.parametrize("number", range(1, 2 * FILES + 1))
def test_killed_at_any_file_nothing_half_is_visible_and_the_next_upload_finishes_it(
    root: RemotePath, saved: Path, number: int
) -> None:
    store = WatchedStore(root)
    kill_at(store, number)
    with pytest.raises(KilledError):
        upload(saved, store)
    assert not torn(root)
    complete = number == 2 * FILES
    assert (load.newest([root], os=os_for([root])) is not None) == complete
    again = WatchedStore(root)
    there = upload(saved, again)
    assert not set(again.puts) & set(store.puts)
    assert load.verify(there, os=os_for([there])) == []


def seen_torn(root: RemotePath, saved: Path) -> list[RemotePath]:
    """What a reader sees between any two files of an upload and should not."""
    seen: list[RemotePath] = []
    upload(saved, WatchedStore(root, lambda _: seen.extend(torn(root))))
    return seen


def test_a_reader_never_sees_half_a_checkpoint(root: RemotePath, saved: Path) -> None:
    assert seen_torn(root, saved) == []


def test_with_the_manifest_first_a_reader_would(root: RemotePath, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_order = transfer.items_of
    monkeypatch.setattr(transfer, "items_of", lambda *of: in_order(*of)[::-1])
    assert seen_torn(root, saved)


@pytest.mark.parametrize("which", range(FILES))
def test_a_file_that_the_store_has_half_is_sent_again(tmp_path: Path, saved: Path, which: int) -> None:
    root = file_store(tmp_path / "store")
    store = WatchedStore(root)

    def on_put(path: RemotePath) -> None:
        if len(store.puts) == which:
            half_put(saved / Path(*path.parts[len(root.parts) + 1 :]), path)
            raise KilledError

    store.on_put = on_put
    with pytest.raises(KilledError):
        upload(saved, store)
    assert load.newest([root], os=os_for([root])) is None
    there = upload(saved, Store(root))
    assert load.verify(there, os=os_for([there])) == []


def shorter(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def another(path: Path) -> None:
    """Of the same size."""
    path.write_bytes(path.read_bytes()[::-1])


@pytest.mark.parametrize("torn_by", [shorter, Path.unlink])
@pytest.mark.parametrize("file", ["rank_0/*.ckpt", "rank_1/*.ckpt", layout.MANIFEST_NAME])
def test_what_is_torn_in_the_store_is_uploaded_again(
    tmp_path: Path, saved: Path, file: str, torn_by: Callable[[Path], None]
) -> None:
    """By a lifecycle rule, say, or a disk below the store."""
    check_uploaded_again(tmp_path, saved, file, torn_by)


def test_a_manifest_of_the_same_size_that_is_another_is_uploaded_again(tmp_path: Path, saved: Path) -> None:
    check_uploaded_again(tmp_path, saved, layout.MANIFEST_NAME, another)


def check_uploaded_again(tmp_path: Path, saved: Path, file: str, torn_by: Callable[[Path], None]) -> None:
    root = file_store(tmp_path / "store")
    there = upload(saved, Store(root))
    (path,) = Path("/", *there.parts[1:]).glob(file)
    torn_by(path)
    assert load.verify(there, os=os_for([there]))
    store = WatchedStore(root)
    assert upload(saved, store) == there
    assert load.verify(there, os=os_for([there])) == []
    assert {put.name for put in store.puts} == {path.name, layout.MANIFEST_NAME}


@pytest.mark.parametrize("file", ["rank_0/*.ckpt", "rank_1/*.ckpt"])
def test_a_file_that_is_damaged_in_the_store_is_sent_again_if_all_is_read(
    tmp_path: Path, saved: Path, file: str
) -> None:
    root = file_store(tmp_path / "store")
    there = upload(saved, Store(root))
    (path,) = Path("/", *there.parts[1:]).glob(file)
    another(path)
    store = WatchedStore(root)
    assert upload(saved, store) == there
    assert store.puts == [], "the size is right"
    assert upload(saved, store, verify=True) == there
    assert [put.name for put in store.puts] == [path.name, layout.MANIFEST_NAME]
    assert load.verify(there, os=os_for([there])) == []
    assert upload(saved, store, verify=True) == there
    assert len(store.puts) == 2


@pytest.mark.parametrize(("file", "verify"), [(layout.MANIFEST_NAME, False), ("rank_1", True)])
def test_a_store_that_damages_what_it_is_sent_is_told(tmp_path: Path, saved: Path, file: str, verify: bool) -> None:
    root = file_store(tmp_path / "store")
    store = WatchedStore(root)

    def on_put(path: RemotePath) -> None:
        there = Path("/", *path.parts[1:])
        if file in path.parts and there.exists():
            another(there)

    store.on_put = on_put
    with golden.raises(StorageError):
        upload(saved, store, verify=verify)
    assert load.newest([root], os=os_for([root])) is None
    there = upload(saved, Store(root), verify=verify)
    assert load.verify(there, os=os_for([there])) == []


class Flaky:
    """Of the calls of a store every third one fails, whichever it is, until it is well."""

    def __init__(self, store: Store, number: int = errno.ECONNRESET) -> None:
        self.calls = 0
        for name in ("facts", "read", "put", "get", "names", "remove"):
            setattr(store, name, self._failing(getattr(store, name), number))

    def _failing(self, call: Callable[..., object], number: int) -> Callable[..., object]:
        def once(*of: object) -> object:
            self.calls += 1
            if self.calls % 3 == 0:
                raise OSError(number, posix.strerror(number))
            return call(*of)

        return once


class Patient(Os):
    """Pauses take no time; they are added up."""

    def __init__(self) -> None:
        self.paused_s = 0.0

    def pause(self, seconds: float) -> None:
        self.paused_s += seconds


def test_a_call_that_fails_is_made_again(root: RemotePath, saved: Path, tmp_path: Path) -> None:
    store, os = Store(root), Patient()
    Flaky(store)
    there = upload(saved, store, None, os, verify=True)
    assert upload(saved, store, None, os, verify=True) == there
    assert content_of(download(there, tmp_path / "other", store, None, os)) == content_written(JOB, 37)
    assert os.paused_s > 0


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC])
def test_what_is_refused_for_good_is_not_asked_again(root: RemotePath, saved: Path, number: int) -> None:
    store, os = Store(root), Patient()
    Flaky(store, number)
    with pytest.raises(StorageError):
        upload(saved, store, None, os)
    assert os.paused_s == 0


def test_a_store_that_loses_a_file_gets_no_manifest(tmp_path: Path, saved: Path) -> None:
    root = file_store(tmp_path / "store")
    store = WatchedStore(root)

    def on_put(path: RemotePath) -> None:
        if len(store.puts) == 2:
            Path("/", *store.puts[0].parts[1:]).unlink(missing_ok=True)

    store.on_put = on_put
    with golden.raises(StorageError):
        upload(saved, store)
    assert load.newest([root], os=os_for([root])) is None


def test_what_is_damaged_here_is_not_uploaded(root: RemotePath, saved: Path) -> None:
    file = next((saved / "rank_1").glob("*.ckpt"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with golden.raises(FormatError):
        upload(saved, Store(root))
    assert not RemoteOs(Store(root)).exists(root)


def test_one_that_is_replaced_meanwhile_is_given_up_or_uploaded_as_it_was(root: RemotePath, saved: Path) -> None:
    store = WatchedStore(root)
    newer = JOB.again(attempt=2, seed=5)

    def on_put(_: RemotePath) -> None:
        if not store.puts:
            newer.save(saved.parent, 37)

    store.on_put = on_put
    with golden.raises(ReplacedError):
        upload(saved, store)
    assert not torn(root)
    there = upload(saved, Store(root))
    assert content_of(there, os_for([there])) == content_written(newer, 37)


def test_a_store_that_refuses_is_told_as_a_storage_error(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file stands where a directory is needed")
    with golden.raises(StorageError):
        upload(saved, Store(file_store(tmp_path / "store")))


# ---------------------------------------------------------------------- down


def test_what_comes_down_is_what_went_up(root: RemotePath, saved: Path, tmp_path: Path) -> None:
    there = upload(saved, Store(root))
    here = tmp_path / "other"
    found = download(there, here, Store(root))
    assert found == here / there.name
    assert content_of(found) == content_written(JOB, 37)
    assert load.latest(here) == found
    store = WatchedStore(root)
    assert download(there, here, store) == found
    assert store.gets == []
    assert upload(found, store) == there


def test_nothing_comes_down_into_a_checkpoint(root: RemotePath, saved: Path) -> None:
    there = upload(saved, Store(root))
    before = sorted(saved.rglob("*"))
    with golden.raises(ConfigError):
        download(there, saved, Store(root))
    assert sorted(saved.rglob("*")) == before


@pytest.mark.parametrize("file", ["rank_1/*.ckpt", layout.MANIFEST_NAME])
def test_a_copy_that_is_damaged_here_is_downloaded_again_and_kept_beside_it(
    root: RemotePath, saved: Path, tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    there = upload(saved, Store(root))
    here = download(there, tmp_path / "other", Store(root))
    shorter(next(here.glob(file)))
    assert load.latest(here.parent) is None
    caplog.clear()
    assert download(there, here.parent, Store(root)) == here
    golden.says(caplog.messages)
    assert content_of(here) == content_written(JOB, 37)
    aside = here.with_name(str(layout.CheckpointName(37, replaced=1)))
    assert {path for path in here.parent.iterdir() if path.is_dir()} == {here, aside}
    assert load.latest(here.parent) == here


def test_a_copy_here_that_cannot_be_read_may_be_whole_and_stays(root: RemotePath, saved: Path, tmp_path: Path) -> None:
    there = upload(saved, Store(root))
    here = download(there, tmp_path / "other", Store(root))

    class Ill(Os):
        def open_read(self, path: Path) -> int:
            if here in path.parents:
                raise OSError(errno.EIO, posix.strerror(errno.EIO))
            return super().open_read(path)

    with golden.raises(StorageError):
        download(there, here.parent, Store(root), os=Ill())
    assert [path.name for path in here.parent.iterdir() if path.is_dir()] == [here.name]
    assert content_of(here) == content_written(JOB, 37)


def test_what_goes_to_a_directory_here_is_durable_before_its_manifest_is_there(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been uploaded is pruned elsewhere."""
    synced: list[Path] = []
    fsync = posix.fsync

    def noted(fd: int) -> None:
        synced.append(Path(posix.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(posix, "fsync", noted)
    there = Path("/", *upload(saved, Store(file_store(tmp_path / "store"))).parts[1:])
    manifest = there / layout.MANIFEST_NAME
    before = synced[: synced.index(manifest)]
    assert {*there.rglob("*")} - {manifest} <= {*before}, "files and directories of ranks"
    assert {there, there.parent} <= {*synced[len(before) :]}


@pytest.mark.parametrize("number", range(FILES))
def test_killed_while_it_comes_down_nothing_is_visible_and_nothing_is_left(
    root: RemotePath, saved: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, other = upload(saved, Store(root)), upload(JOB.save(saved.parent, 38), Store(root))
    here = tmp_path / "other"
    store = WatchedStore(root)

    def on_get(_: RemotePath) -> None:
        if len(store.gets) == number:
            raise KilledError

    store.on_get = on_get
    with monkeypatch.context() as patch:  # a process that is killed removes nothing
        patch.setattr("lastwords.checkpoint.appearing.remove_tree", lambda *_: None)
        with pytest.raises(KilledError):
            download(there, here, store)
    assert load.scan(here) == []
    assert list(here.iterdir())
    download(other, here, Store(root))
    assert [path.name for path in here.iterdir()] == [other.name]


def test_a_disk_that_is_full_here_is_not_said_of_the_store(tmp_path: Path, saved: Path) -> None:
    root = file_store(tmp_path / "store")
    there, store = upload(saved, Store(root)), WatchedStore(root)

    def on_get(_: RemotePath) -> None:
        raise OSError(errno.ENOSPC, posix.strerror(errno.ENOSPC))

    store.on_get = on_get
    with golden.raises(StorageError):
        download(there, tmp_path / "other", store)


def test_damage_in_the_store_never_gets_a_name_here(tmp_path: Path, saved: Path) -> None:
    root = file_store(tmp_path / "store")
    there = upload(saved, Store(root))
    file = next(Path("/", *there.parts[1:]).glob("rank_0/*.ckpt"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with golden.raises(FormatError):
        download(there, tmp_path / "other", Store(root))
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize("number", range(FILES))
def test_one_that_is_pruned_there_meanwhile_is_told_from_damage(
    root: RemotePath, saved: Path, tmp_path: Path, number: int
) -> None:
    there = upload(saved, Store(root))
    store = WatchedStore(root)

    def on_get(_: RemotePath) -> None:
        if len(store.gets) == number:
            removed_there(there, Store(root))

    store.on_get = on_get
    with pytest.raises(ReplacedError):
        download(there, tmp_path / "other", store)
    assert list((tmp_path / "other").iterdir()) == []


def test_two_processes_do_not_download_one_checkpoint_at_once(root: RemotePath, saved: Path, tmp_path: Path) -> None:
    there = upload(saved, Store(root))
    store = WatchedStore(root)
    refused: list[BusyError] = []

    def on_get(_: RemotePath) -> None:
        with pytest.raises(BusyError) as caught:
            download(there, tmp_path / "other", Store(root))
        refused.append(caught.value)

    store.on_get = on_get
    assert load.verify(download(there, tmp_path / "other", store)) == []
    golden.says(refused[0])


# ---------------------------------------------------------------------- removal and retention


def removed_there(there: RemotePath, store: Store) -> None:
    transfer.remove(there, Claimed.read(there, RemoteOs(store)), store)


def test_removed_there_the_manifest_goes_first(tmp_path: Path, saved: Path) -> None:
    root = file_store(tmp_path / "store")
    there = upload(saved, Store(root))

    class Killed(Store):
        def remove(self, path: RemotePath) -> None:
            super().remove(path)
            raise KilledError

    with pytest.raises(KilledError):
        removed_there(there, Killed(root))
    assert not torn(root)
    assert load.newest([root], os=os_for([root])) is None
    removed_there(there, Store(root))
    assert not RemoteOs(Store(root)).exists(there)


def test_another_one_that_has_the_name_by_now_stays_there(root: RemotePath, saved: Path) -> None:
    there = upload(saved, Store(root))
    said = Claimed.read(there, RemoteOs(Store(root)))
    with pytest.raises(ReplacedError):
        transfer.remove(there, replace(said, attempt=said.attempt + 1), Store(root))
    assert load.verify(there, os=os_for([there])) == []


@pytest.mark.parametrize("where", [".", "rank_0", "rank_7"])
def test_a_file_of_another_program_keeps_a_checkpoint_there(root: RemotePath, saved: Path, where: str) -> None:
    store = Store(root)
    there = upload(saved, store)
    store.put(saved / layout.MANIFEST_NAME, there / where / "precious.txt")
    with pytest.raises(FormatError):
        removed_there(there, store)
    assert load.verify(there, os=os_for([there])) == []
    assert RemoteOs(store).exists(there / where / "precious.txt")


@pytest.mark.parametrize("inside", ["", "rank_0"])
def test_a_link_there_is_never_followed(tmp_path: Path, saved: Path, inside: str) -> None:
    root = file_store(tmp_path / "store")
    there = upload(saved, Store(root))
    link, outside = Path("/", *(there / inside).parts[1:]), tmp_path / "outside"
    link.rename(outside)
    link.symlink_to(outside)
    kept = {file: file.read_bytes() for file in outside.rglob("*") if file.is_file()}
    with pytest.raises(FormatError):
        removed_there(there, Store(root))
    assert link.is_symlink()
    assert {file: file.read_bytes() for file in outside.rglob("*") if file.is_file()} == kept
    assert load.verify(there, os=os_for([there])) == []


def test_a_fifo_there_is_no_file(tmp_path: Path, saved: Path) -> None:
    root = file_store(tmp_path / "store")
    there = upload(saved, Store(root))
    (file,) = Path("/", *there.parts[1:]).glob("rank_0/*.ckpt")
    file.unlink()
    posix.mkfifo(file)
    assert load.verify(there, os=os_for([there]))


def test_only_what_the_record_of_this_store_names_has_been_uploaded(saved: Path) -> None:
    here = saved.parent
    assert not uploader.not_uploaded(here)(saved)
    assert uploader.not_uploaded(here, "s3://bucket/job")(saved)
    uploader.write(here, uploader.Record("s3://bucket/job", frozenset((uploader.name_here(saved),))))
    assert not uploader.not_uploaded(here, "s3://bucket/job")(saved)
    assert not uploader.not_uploaded(here)(saved)
    assert uploader.not_uploaded(here, "s3://bucket/other")(saved)
    (here / uploader.FILE_NAME).write_bytes(b"{}")
    assert uploader.not_uploaded(here)(saved)


# ---------------------------------------------------------------------- what a start and a resume know


def test_a_start_draws_above_every_generation_in_the_store(root: RemotePath, saved: Path, tmp_path: Path) -> None:
    upload(JOB.again(generation=7).save(tmp_path / "before", 40), Store(root))
    here = tmp_path / "new"
    here.mkdir()
    above = transfer.highest_generation([here, root])
    assert above == 7
    assert starts.draw([here], starts.Launch(), above=above).generation == 8
    assert transfer.highest_generation([here]) == 0


def test_a_store_that_does_not_answer_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert transfer.highest_generation([address_of("nostore://bucket/job")]) == 0
    golden.says(caplog.messages)


def test_a_store_that_connects_when_it_is_made_may_refuse_and_answer_later(
    root: RemotePath, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of ftp, sftp and hdfs do."""
    refused = [True]
    made = store_module._core().url_to_fs

    def url_to_fs(*args: object, **options: object) -> object:
        if refused:
            raise ConnectionRefusedError(errno.ECONNREFUSED, posix.strerror(errno.ECONNREFUSED))
        return made(*args, **options)

    store = Store(root)
    monkeypatch.setattr(store_module, "_core", lambda: SimpleNamespace(url_to_fs=url_to_fs))
    with pytest.raises(StorageError):
        upload(saved, store, None, Patient())
    refused.clear()
    upload(saved, store)
    assert load.latest(root, os=RemoteOs(store)) is not None


def test_a_library_has_errors_of_its_own(root: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(root)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(type(store._files), "info", refuse)
    with pytest.raises(OSError) as caught:
        store.size(root)
    assert caught.value.errno == errno.EREMOTEIO
