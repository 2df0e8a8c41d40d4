"""A file system that refuses: every failing system call is a StorageError, and nothing older is touched."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import load, publish
from lastwords.checkpoint.system import Os
from lastwords.errors import StorageError
from tests import golden
from tests.checkpoint.interposed import CALLS, InterposedOs, counting, failing
from tests.checkpoint.simulated_disk import Content, SimulatedOs
from tests.checkpoint.states import Job
from tests.checkpoint.test_crash import CASES, NEWER, OLDER, ROOT, check, disk_with
from tests.selection import usually

EIO = OSError(errno.EIO, "Input/output error")


def calls_of_a_save(disk: SimulatedOs, newer: tuple[Job, int]) -> int:
    os = InterposedOs(counting(), disk)
    newer[0].save(ROOT, newer[1], os)
    return os.count


def error_of_a_save(newer: tuple[Job, int], os: Os) -> StorageError | None:
    try:
        newer[0].save(ROOT, newer[1], os)
    except StorageError as error:
        return error
    return None


@pytest.mark.ci
@pytest.mark.parametrize("case", usually(CASES, ["the next step", "the same step of the same job"]))
def test_any_failing_call_is_a_storage_error_or_does_not_matter(case: str) -> None:
    older, newer, features = CASES[case]
    harmless = set()
    for at in range(1, calls_of_a_save(disk_with(older, **features), newer) + 1):
        disk = disk_with(older, **features)
        called = ""

        def before(number: int, name: str, args: tuple[Any, ...], at: int = at) -> None:
            nonlocal called
            if number == at:
                called = name
                raise OSError(errno.EIO, "Input/output error")

        os = InterposedOs(before, disk)
        error = error_of_a_save(newer, os)
        if error is None:
            harmless.add(called)
        else:
            assert error.errno == errno.EIO
            assert str(ROOT) in str(error)
            assert ";" in str(error), "the message says what to do"
        check(ROOT, disk, older=older, newer=newer, published=error is None)
        assert len(os.open_fds) <= (called == "close"), f"{called} failed and left a file open"
    assert harmless <= set(CALLS) - {"fsync", "rename", "mkdir", "ftruncate"}


@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.parametrize("call", ["pwrite", "fallocate"])
def test_a_full_disk_leaves_the_older_checkpoint_and_no_partial_file(call: str, at: int) -> None:
    disk = disk_with((OLDER, 36))
    os = InterposedOs(failing(OSError(errno.ENOSPC, "No space left on device"), call, at), disk)
    error = error_of_a_save((NEWER, 37), os)
    writes = {"fallocate": ["file 0", "file 1"], "pwrite": ["file 0", "part 0", "file 1", "part 1", "manifest"]}[call]
    if at > len(writes):
        assert error is None
        return
    assert error is not None
    assert error.errno == errno.ENOSPC
    golden.says(error)
    check(ROOT, disk, older=(OLDER, 36), newer=(NEWER, 37), published=False)
    if writes[at - 1] != "manifest":
        rank = writes[at - 1][-1]
        left = disk.listdir(NEWER.tmp_dir(ROOT, 37) / f"rank_{rank}")
        assert left == [], "the space of what was written is free again"


def test_a_disk_without_room_for_the_new_one_says_how_much_was_needed() -> None:
    disk = disk_with((OLDER, 36))
    disk._bytes_max = disk._used() + 100
    with golden.raises(StorageError):
        NEWER.save(ROOT, 37, disk)
    check(ROOT, disk, older=(OLDER, 36), newer=(NEWER, 37), published=False)


def test_the_next_attempt_succeeds_beside_the_failed_one() -> None:
    disk = disk_with((OLDER, 36))
    with pytest.raises(StorageError):
        NEWER.save(ROOT, 37, InterposedOs(failing(EIO, "fsync"), disk))
    retry = NEWER.again(attempt=2)
    retry.save(ROOT, 37, disk)
    check(ROOT, disk, older=(OLDER, 36), newer=(retry, 37), published=True)


class FsyncWatch(InterposedOs):
    """Fails the `at`-th fsync and remembers which files are fsynced after theirs had failed."""

    def __init__(self, at: int, inner: Os) -> None:
        super().__init__(counting(), inner)
        self.at = at
        self.fsyncs = 0
        self.files: dict[int, Path] = {}
        self.failed: set[Path] = set()
        self.fsynced_again: list[Path] = []

    def create(self, path: Path, *, direct: bool) -> int:
        fd = super().create(path, direct=direct)
        self.files[fd] = path
        return fd

    def fsync(self, fd: int) -> None:
        self.fsyncs += 1
        path = self.files.get(fd)
        if path in self.failed:
            self.fsynced_again.append(path)
        if self.fsyncs == self.at:
            self.failed |= {path} if path else set()
            raise EIO
        super().fsync(fd)


def test_a_file_whose_fsync_failed_is_never_fsynced_again() -> None:
    """Whichever fsync it is; those of directories may be repeated, since their names are journalled anew."""
    files = 0
    for at in range(1, 40):
        os = FsyncWatch(at, disk_with((OLDER, 36)))
        if error_of_a_save((NEWER, 37), os) is None:
            break
        assert not os.fsynced_again
        files += len(os.failed)
    assert files == 5, "two files, what each says of itself, and one manifest"


@pytest.mark.ci
@pytest.mark.parametrize("case", usually(CASES, ["the next step"]))
def test_a_publication_goes_on_after_any_call_that_failed_once(case: str) -> None:
    """And what it then says is published is durable: power is lost at once, with everything that may get lost."""
    older, newer, features = CASES[case]

    def publish_with(os: Os, disk: SimulatedOs) -> Path:
        stamp = newer[1] * 1000 + newer[0].generation
        return publish.publish(ROOT, directory, newer[0].facts(newer[1]), os, published_unix_ns=stamp)

    at, failed = 0, True
    while failed:
        at += 1
        disk = disk_with(older, **features)
        directory = newer[0].write(ROOT, newer[1], disk)
        os = InterposedOs(lambda number, name, args, at=at: fail_at(number, at), disk)
        try:
            publish_with(os, disk)
            failed = os.count >= at
        except StorageError:
            assert publish_with(disk, disk).name == f"tft_saved_checkpoints-step_{newer[1]}"
        check(ROOT, disk, older=older, newer=newer, published=True)
        check(ROOT, disk.crash((), Content.LOST), older=older, newer=newer, published=True)
    assert at > 20


def fail_at(number: int, at: int) -> None:
    if number == at:
        raise EIO


@pytest.mark.parametrize("call", ["open_read", "preadv", "size", "close"])
def test_a_part_that_could_not_be_looked_at_is_not_called_bad(call: str) -> None:
    disk = disk_with((OLDER, 36))
    directory = NEWER.write(ROOT, 37, disk)
    for at in range(1, 5):
        with pytest.raises(StorageError):
            NEWER.verify(directory, 37, InterposedOs(failing(EIO, call, at), disk))
    assert NEWER.verify(directory, 37, disk) == []


def test_what_is_known_to_be_bad_counts_although_another_part_could_not_be_looked_at() -> None:
    disk = disk_with((OLDER, 36))
    directory = NEWER.write(ROOT, 37, disk)
    disk.unlink(directory / "rank_1" / "part.json")
    problems = NEWER.verify(directory, 37, InterposedOs(failing(EIO, "open_read"), disk))
    assert [rank for rank, _ in problems] == [1]


def test_a_failed_last_fsync_says_that_the_checkpoint_is_visible() -> None:
    fsyncs = 0

    def count(number: int, name: str, args: tuple[Any, ...]) -> None:
        nonlocal fsyncs
        fsyncs += name == "fsync"

    NEWER.save(ROOT, 37, InterposedOs(count, disk_with((OLDER, 36))))
    disk = disk_with((OLDER, 36))
    with golden.raises(StorageError):
        NEWER.save(ROOT, 37, InterposedOs(failing(EIO, "fsync", fsyncs), disk))
    assert load.latest(ROOT, os=disk) == ROOT / "tft_saved_checkpoints-step_37"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ESTALE, errno.EMFILE, 9999])
def test_every_errno_comes_with_something_to_do(number: int) -> None:
    disk = disk_with((OLDER, 36))
    with pytest.raises(StorageError, match=r"errno \d+\); .{10,}") as caught:
        NEWER.save(ROOT, 37, InterposedOs(failing(OSError(number, "no"), "mkdir"), disk))
    assert caught.value.errno == number


def test_a_file_where_a_directory_is_needed_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with golden.raises(StorageError):
        NEWER.save(tmp_path / "file", 37)


def test_a_path_that_is_too_long_is_told_as_such() -> None:
    too_long = OSError(errno.ENAMETOOLONG, "File name too long")
    with golden.raises(StorageError):
        NEWER.save(ROOT, 37, InterposedOs(failing(too_long, "mkdir"), disk_with((OLDER, 36))))


@pytest.mark.parametrize("nothing_from", [1, 2, 5], ids=["file", "part", "manifest"])
def test_a_file_system_that_writes_nothing_is_an_error_and_no_endless_loop(nothing_from: int) -> None:
    disk, writes = disk_with((OLDER, 36)), 0

    class Nothing(InterposedOs):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            nonlocal writes
            writes += 1
            assert writes < 20, "an endless loop"
            return 0 if writes >= nothing_from else disk.pwrite(fd, data, offset)

    error = error_of_a_save((NEWER, 37), Nothing(counting(), disk))
    assert error is not None
    assert error.errno == errno.EIO
    check(ROOT, disk, older=(OLDER, 36), newer=(NEWER, 37), published=False)


def test_unreadable_directories_are_storage_errors_and_not_nothing_found() -> None:
    for broken in ("listdir", "open_read", "preadv", "size"):

        def before(number: int, name: str, args: tuple[Any, ...], broken: str = broken) -> None:
            if name == broken:
                raise EIO

        os = InterposedOs(before, disk_with((OLDER, 36)))
        if broken == "listdir":
            with pytest.raises(StorageError):
                load.latest(ROOT, os=os)
            continue
        [found] = load.scan(ROOT, os)
        assert found.status is load.DirectoryStatus.UNREADABLE
        golden.says(found.why)


@pytest.mark.parametrize("call", ["listdir", "open_read", "preadv", "size"])
def test_a_newest_one_that_cannot_be_read_for_a_moment_is_asked_for_again(call: str) -> None:
    for failures in range(1, 7):
        disk, before = unreadable(call, failures)
        assert load.latest(ROOT, os=InterposedOs(before, disk)) == ROOT / "tft_saved_checkpoints-step_37"


@pytest.mark.parametrize("call", ["open_read", "preadv", "size"])
def test_a_newest_one_that_stays_unreadable_is_an_error_and_no_older_one_is_taken(call: str) -> None:
    disk, before = unreadable(call, 10_000)
    with golden.raises(StorageError) as caught:
        load.latest(ROOT, os=InterposedOs(before, disk))
    assert caught.value.errno == errno.EIO
    assert load.latest(ROOT, os=disk) == ROOT / "tft_saved_checkpoints-step_37", "the control"


def unreadable(call: str, failures: int) -> tuple[SimulatedOs, Callable[[int, str, tuple[Any, ...]], None]]:
    """Two checkpoints, of which the newer one's first reads fail so often."""
    disk = disk_with((OLDER, 36))
    NEWER.save(ROOT, 37, disk)
    opened = ""
    left = failures

    def before(number: int, name: str, args: tuple[Any, ...]) -> None:
        nonlocal opened, left
        if name == "open_read":
            opened = str(args[0])
        if name == call and left and (name == "listdir" or "step_37" in opened):
            left -= 1
            raise EIO

    return disk, before


def test_a_root_that_has_gone_since_the_start_is_made_again_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where its disk is not mounted any more."""
    root = tmp_path / "gone" / "root"
    with caplog.at_level("WARNING"):
        saved = Job().save(root, 7, Os())
        (said,) = caplog.messages
        golden.says(said)
        Job().save(root, 8, Os())
    assert caplog.messages == [said], "the control: it is there"
    assert load.verify(saved) == []
