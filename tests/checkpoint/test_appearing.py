"""What gets its name at the end is whole under it, at every loss of power and whoever else writes there."""

from __future__ import annotations

import os as posix
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint.appearing import making_directory, making_file, refuse_checkpoint, write_file
from lastwords.checkpoint.lock_file import LockFile
from lastwords.checkpoint.part import write_document
from lastwords.checkpoint.reshard.strategy import Strategy, save_strategy_file
from lastwords.checkpoint.system import REAL_OS, Os, pwrite_all, read_whole
from lastwords.errors import BusyError, ConfigError, LastWordsError, StorageError
from lastwords.liveness import paths
from tests import golden
from tests.checkpoint.interleaving import Machine, at_random
from tests.checkpoint.simulated_disk import SimulatedOs
from tests.checkpoint.states import Job
from tests.checkpoint.test_crash import crashes
from tests.shortage import open_files

OUT = Path("/out/thing")
NEW = b"new" * 3000


def disk(old: bytes | None = None) -> SimulatedOs:
    made = SimulatedOs()
    made.mkdir(OUT.parent)
    made.fsync(made.open_directory(Path("/")))
    if old is not None:
        write_file(OUT, old, made)
    return made.copy()


def written(root: Path, os: Os) -> None:
    write_file(OUT, NEW, os)


def replaced(root: Path, os: Os) -> None:
    write_file(OUT, NEW, os, replace=True)


def file_made(root: Path, os: Os) -> None:
    with making_file(OUT, os) as hidden:
        pwrite_all(os, fd := os.create(hidden, direct=False), NEW)
        os.close(fd)


def directory_made(root: Path, os: Os) -> None:
    with making_directory(OUT, os) as hidden:
        write_document(hidden / "part", NEW, os)


def content(os: Os) -> bytes | None:
    """What a reader finds; b"" for a directory whose file is missing, None where there is nothing of that name."""
    if not os.exists(OUT):
        return None
    path = OUT / "part" if os.is_directory(OUT) else OUT
    return read_whole(path, os, bytes_max=1 << 20) if os.exists(path) else b""


@pytest.mark.parametrize(
    ("make", "old"),
    [(written, None), (replaced, None), (replaced, b"old"), (file_made, None), (directory_made, None)],
)
def test_power_lost_at_any_system_call_leaves_all_or_nothing(make: Callable[[Path, Os], None], old: bytes) -> None:
    states = 0
    for label, after, done in crashes(lambda: disk(old), make):
        assert content(after) in ((NEW,) if done else (NEW, old)), label
        states += 1
    assert states > 10


@pytest.mark.parametrize("make", [written, replaced, file_made, directory_made])
@pytest.mark.parametrize("skipped", [OUT.parent, OUT], ids=["the name", "the content"])
def test_each_left_out_fsync_is_caught(make: Callable[[Path, Os], None], skipped: Path) -> None:
    def careless() -> SimulatedOs:
        made = disk()
        made.skip_fsync = lambda path: path == skipped if skipped == OUT.parent else path.parent != Path("/")
        return made

    states = [(content(after), done) for _, after, done in crashes(careless, make)]
    assert any(found != NEW if done else found not in (NEW, None) for found, done in states)


@pytest.mark.parametrize("make", [written, file_made, directory_made])
def test_a_name_that_is_taken_is_refused_and_nothing_is_left_behind(make: Callable[[Path, Os], None]) -> None:
    made = disk(b"old")
    with pytest.raises((StorageError, ConfigError), match="exists"):
        make(OUT, made)
    assert content(made) == b"old"
    assert made.listdir(OUT.parent) == [OUT.name]


def test_what_a_killed_writer_has_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    child = posix.fork()
    if not child:
        patched = Os()
        patched.fsync = lambda fd: posix.kill(posix.getpid(), 9)  # type: ignore[method-assign]
        write_file(tmp_path / "thing", NEW, patched, replace=True)
        posix._exit(0)
    posix.waitpid(child, 0)
    [left] = tmp_path.iterdir()
    assert left.name.startswith(".tmp-thing-"), "negative control"
    living = tmp_path / ".tmp-thing-00000000"
    others = [tmp_path / name for name in (".tmp-thing-more-00000000", ".tmp-thing-x", ".tmp-other-00000000")]
    for path in others:
        path.touch()
    with LockFile(living).held() as mine:
        assert mine
        write_file(tmp_path / "thing", NEW, replace=True)
        assert sorted(tmp_path.iterdir()) == sorted([*others, living, tmp_path / "thing"])


@pytest.mark.parametrize("make", [making_file, making_directory])
def test_a_block_that_fails_leaves_nothing(make: Callable[..., Any], tmp_path: Path) -> None:
    def fail() -> None:
        with make(tmp_path / "thing", REAL_OS) as hidden:
            (hidden / "part" if hidden.exists() else hidden).write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def built(name: str) -> Callable[[Os], Any]:
    def body(os: Os) -> None:
        with making_directory(OUT, os) as hidden:
            for part in ("a", "b"):
                write_document(hidden / part, name.encode(), os)

    return body


@pytest.mark.parametrize("seed", range(60))
def test_of_several_writers_one_wins_whole_and_the_others_are_told_so(seed: int) -> None:
    made = disk()
    names = ["one", "two", "three"][: 2 + seed % 2]
    seen: list[set[bytes]] = []

    def look(number: int) -> None:
        if made.exists(OUT):
            seen.append({read_whole(OUT / part, made, bytes_max=99) for part in ("a", "b")})

    machine = Machine(made, at_random(seed, kills=seed % 3, switch=0.2), look)
    ended = machine.run([built(name) for name in names])
    for end in ended:
        assert end.error is None or isinstance(end.error, BusyError | ConfigError)
    done = [name for name, end in zip(names, ended, strict=True) if end.error is None and not end.killed]
    assert len(done) <= 1
    assert all(found == seen[0] and len(found) == 1 for found in seen), "torn, or written to after it had its name"
    if not made.exists(OUT):
        assert not done
        built("again")(made)
    with golden.raises(ConfigError):
        built("again")(made)
    assert made.exists(OUT / "a")
    assert not made.exists(OUT.parent / ".tmp-thing")


def test_without_its_lock_something_is_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedOs, "try_lock", lambda self, fd, shared=False: True)
    wrong = 0
    for seed in range(60):
        try:
            test_of_several_writers_one_wins_whole_and_the_others_are_told_so(seed)
        except (AssertionError, LastWordsError, OSError):
            wrong += 1
    assert wrong > 10


@pytest.mark.parametrize("seed", range(30))
def test_a_small_file_has_one_writer_s_bytes_at_every_moment(seed: int) -> None:
    made = disk(b"old" * 400)
    contents = [name * 400 for name in (b"one", b"two", b"six")]

    def look(number: int) -> None:
        assert content(made) in (b"old" * 400, *contents)

    def writer(raw: bytes) -> Callable[[Os], Any]:
        return lambda os: write_file(OUT, raw, os, replace=True)

    ended = Machine(made, at_random(seed, kills=seed % 3, switch=0.3), look).run([writer(raw) for raw in contents])
    assert [end.error for end in ended] == [None] * 3


def test_a_file_in_shared_memory_is_replaced_at_once_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "thing"
    path.write_bytes(b"old")
    before = open_files()

    def fail() -> None:
        with paths.replacing(path) as fd:
            posix.write(fd, b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"old"
    assert open_files() <= before, "a descriptor was leaked"
    with paths.replacing(path) as fd:
        posix.write(fd, b"new")
        assert path.read_bytes() == b"old"
    posix.close(fd)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("inside", [".", "rank_0", "new/deeper"])
@pytest.mark.parametrize("renamed", [False, True], ids=["by its name", "by its manifest"])
def test_nothing_appears_in_a_checkpoint(tmp_path: Path, inside: str, renamed: bool) -> None:
    checkpoint = Job().save(tmp_path, 37)
    if renamed:
        checkpoint = checkpoint.rename(tmp_path / "mine")
    (tmp_path / "link").symlink_to(checkpoint)
    before = sorted(checkpoint.rglob("*"))
    for directory in (checkpoint / inside, tmp_path / "link" / inside):
        with pytest.raises(ConfigError) as caught:
            refuse_checkpoint(directory)
        assert str(checkpoint) in str(caught.value)
        with pytest.raises(ConfigError), making_directory(directory / "x"):
            pass
        with pytest.raises(ConfigError):
            save_strategy_file(Strategy(1, {}), directory / "x")
    assert sorted(checkpoint.rglob("*")) == before


def test_a_manifest_json_of_another_program_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{\n"name": "an extension",\n"version": 3\n}\n')
    with making_directory(tmp_path / "out"):
        pass
    refuse_checkpoint(tmp_path)
