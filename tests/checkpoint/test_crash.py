"""I5: a crash at any system call leaves the older checkpoints, and either the whole new one or none."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastwords.checkpoint import layout, load, publish, starts
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.errors import CheckpointError, LastWordsError
from tests.checkpoint.interposed import Crash, InterposedOs, counting, crashing_at
from tests.checkpoint.simulated_disk import SimulatedOs
from tests.checkpoint.states import Job, SharedJob, content_of, content_written
from tests.selection import usually

ROOT = Path("/ckpt")
OLDER = Job(generation=1)
NEWER = Job(generation=2, seed=7)
OTHER = Job(name="other", generation=2, seed=7)

Save = Callable[[Path, Os], object]


class Broken(AssertionError):
    """The checker's verdict; its own class, so that a negative control cannot pass by another assertion."""


def check(root: Path, os: Os, *, older: tuple[Job, int], newer: tuple[Job, int], published: bool) -> None:
    """The checker. `published`: the writer was told that the new one is published, so it has to be there."""
    try:
        found = load.scan(root, os)
    except LastWordsError as error:
        raise Broken(f"the directory cannot be listed any more: {error}") from error
    seen: list[tuple[Job, int]] = []
    for entry in found:
        if entry.status is not load.DirectoryStatus.COMPLETE:
            raise Broken(f"{entry.path.name} is visible but {entry.status.value}: {entry.why}")
        problems = load.verify(entry.path, os=os)
        if problems:
            raise Broken(f"{entry.path.name} is visible but damaged: {problems}")
        assert entry.manifest is not None
        content = content_of(entry.path, os)
        whose = [item for item in (older, newer) if content == content_written(item[0], item[1])]
        if not whose or entry.manifest.global_step != whose[0][1] or entry.manifest.job != whose[0][0].name:
            raise Broken(f"{entry.path.name} has the content of no checkpoint that was ever saved")
        seen += whose
    replaces = older[1] == newer[1] and older[0].name == newer[0].name
    if older not in seen and not (replaces and newer in seen):
        raise Broken("the older checkpoint is gone")
    if published and newer not in seen:
        raise Broken("it was reported as published and is gone")
    newest = load.latest(root, os=os)
    if newest is None or content_of(newest, os) != content_written(*(newer if newer in seen else older)):
        raise Broken(f"latest() says {newest}")


def crashes(make: Callable[[], SimulatedOs], save: Save) -> Iterator[tuple[str, SimulatedOs, bool]]:
    """Every distinct state in which a machine can be found after losing power at any system call of `save`."""
    known = set()
    fatal = 0
    finished = False
    while not finished:
        fatal += 1
        disk = make()
        os = InterposedOs(crashing_at(fatal), disk)
        where = "the end"
        try:
            save(ROOT, os)
            finished = True
        except Crash as crash:
            where = str(crash)
        for names, content, found in disk.crashes():
            state = hash((found, finished))
            if state not in known:
                known.add(state)
                label = f"crash at {where}; names kept {names}, content {content.value}"
                after = disk.crash([index for index, kept in enumerate(names) if kept], content)
                assert after.snapshot() == found
                yield label, after, finished


def disk_with(older: tuple[Job, int], **features: bool) -> SimulatedOs:
    return _disk_with(older, **features).copy()


@functools.cache
def _disk_with(older: tuple[Job, int], **features: bool) -> SimulatedOs:
    disk = SimulatedOs(**features)
    disk.mkdir(ROOT)
    disk.fsync(disk.open_directory(Path("/")))
    older[0].save(ROOT, older[1], disk)
    return disk


CASES = {
    "the next step": ((OLDER, 36), (NEWER, 37), {}),
    "the same step of the same job": ((OLDER, 37), (NEWER, 37), {}),
    "the same step, no exchange of names": ((OLDER, 37), (NEWER, 37), {"can_exchange": False}),
    "the same step of another job": ((OLDER, 37), (OTHER, 37), {}),
    "written in shares": ((OLDER, 36), (SharedJob(generation=2, seed=7), 37), {}),
    "a periodic one": ((OLDER, 36), (OLDER.again(incident=0, seed=7), 37), {}),
    "last words after a periodic one": ((OLDER.again(incident=0), 36), (OLDER.again(seed=7), 37), {}),
    "the same step as a periodic one": ((OLDER.again(incident=0), 37), (OLDER.again(seed=7), 37), {}),
    "no O_DIRECT": ((OLDER, 36), (NEWER, 37), {"direct": False}),
}


@pytest.mark.parametrize(
    "case", usually(CASES, ["the next step", "the same step, no exchange of names", "written in shares"])
)
def test_power_lost_at_any_system_call_leaves_the_older_and_the_whole_new_one_or_none(case: str) -> None:
    older, newer, features = CASES[case]
    states = 0
    for label, disk, published in crashes(
        lambda: disk_with(older, **features), lambda root, os: newer[0].save(root, newer[1], os)
    ):
        try:
            check(ROOT, disk, older=older, newer=newer, published=published)
        except Broken as broken:
            pytest.fail(f"{label}: {broken}")
        states += 1
    print(f"{states} distinct states after a crash")
    assert states > 20


@pytest.mark.ci
@pytest.mark.parametrize("case", usually(CASES, ["the next step"]))
def test_after_any_crash_the_next_generation_saves_and_tidies_up(case: str) -> None:
    older, newer, features = CASES[case]
    for label, disk, _ in crashes(
        lambda: disk_with(older, **features), lambda root, os: newer[0].save(root, newer[1], os)
    ):
        restarted = newer[0].again(generation=9, seed=11)
        restarted.save(ROOT, 38, disk)
        for name in disk.listdir(ROOT):
            # All that may stay are last words that lack nothing but their name, where no others are of that step.
            unnamed = layout.TemporaryName.parse(name)
            if unnamed is not None:
                assert not disk.exists(layout.checkpoint_dir(ROOT, unnamed.global_step)), label
                assert not load.verify(ROOT / name, True, os=disk), label
        newest = load.latest(ROOT, os=disk)
        assert newest is not None
        assert content_of(newest, disk) == content_written(restarted, 38), label


@pytest.mark.ci
@pytest.mark.parametrize("case", usually(sorted({*CASES} - {"no O_DIRECT"}), ["the same step of the same job"]))
def test_a_process_killed_at_any_system_call_leaves_the_real_directory_sound(case: str, tmp_path: Path) -> None:
    older, newer, _ = CASES[case]
    before = tmp_path / "before"
    older[0].save(before, older[1])
    fatal, finished = 0, False
    while not finished:
        fatal += 1
        root = tmp_path / str(fatal)
        shutil.copytree(before, root)
        os = InterposedOs(crashing_at(fatal), _WithoutFsync())
        try:
            newer[0].save(root, newer[1], os)
            finished = True
        except Crash:
            pass
        finally:
            os.close_leaked()
        check(root, REAL_OS, older=older, newer=newer, published=finished)
    assert fatal > 60


# ---------------------------------------------------------------------- negative controls: the checker can fail


def first_broken(make: Callable[[], SimulatedOs], save: Save) -> str:
    older, newer, _ = CASES["the next step"]
    for _, disk, published in crashes(make, save):
        try:
            check(ROOT, disk, older=older, newer=newer, published=published)
        except Broken as broken:
            return str(broken)
    return ""


def lazy_disk(skip: Callable[[Path], bool]) -> SimulatedOs:
    disk = disk_with(CASES["the next step"][0])
    disk.skip_fsync = skip
    return disk


@pytest.mark.ci
@pytest.mark.parametrize(
    ("skip", "verdict"),
    [
        (lambda path: path.suffix == ".ckpt", "visible but"),
        (lambda path: path.name == layout.MANIFEST_NAME, "visible but"),
        (lambda path: path.name.startswith("rank_"), "visible but"),
        (lambda path: path.name.startswith(".tmp-"), "visible but"),
        (lambda path: path == ROOT, "reported as published"),
    ],
    ids=["file", "manifest", "rank directory", "temporary directory", "root"],
)
def test_each_left_out_fsync_is_caught(skip: Callable[[Path], bool], verdict: str) -> None:
    def save(root: Path, os: Os) -> None:
        NEWER.save(root, 37, os)

    assert verdict in first_broken(lambda: lazy_disk(skip), save)


@pytest.mark.thorough
def test_rename_before_fsync_is_caught() -> None:
    def save(root: Path, os: Os) -> None:
        directory = NEWER.write(root, 37, _without_fsync(os))
        final = layout.checkpoint_dir(root, 37)
        publish.publish(root, directory, NEWER.facts(37), _without_fsync(os))
        for path in (*(final / f"rank_{rank}" for rank in (0, 1)), final, root):
            fd = os.open_directory(path)
            os.fsync(fd)
            os.close(fd)

    assert "visible" in first_broken(lambda: disk_with(CASES["the next step"][0]), save)


def test_manifest_written_after_the_rename_is_caught() -> None:
    def save(root: Path, os: Os) -> None:
        directory = NEWER.write(root, 37, os)
        final = layout.checkpoint_dir(root, 37)
        os.rename(directory, final)
        heads = [publish.read_part_head(final / f"rank_{rank}", os) for rank in (0, 1)]
        parts = [publish.read_part(final / f"rank_{rank}", os) for rank in (0, 1)]
        manifest = publish.build_manifest(NEWER.facts(37), heads, parts, published_unix_ns=1)
        publish.write_document(final / layout.MANIFEST_NAME, manifest.encode(), os)

    assert "incomplete" in first_broken(lambda: disk_with(CASES["the next step"][0]), save)


@pytest.mark.ci
def test_publishing_before_verifying_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def truncated_and_unverified(root: Path, os: Os) -> None:
        directory = NEWER.write(root, 37, os)
        part = publish.read_part(directory / "rank_1", os)
        os.unlink(directory / part.file.path)
        os.close(os.create(directory / part.file.path, direct=False))
        for check in ("check_unchanged", "check_present"):
            monkeypatch.setattr(publish, check, lambda *_: None)
        publish.publish(root, directory, NEWER.facts(37), os)

    assert "visible" in first_broken(lambda: disk_with(CASES["the next step"][0]), truncated_and_unverified)


def test_publish_itself_refuses_what_was_not_verified(tmp_path: Path) -> None:
    directory = NEWER.write(tmp_path, 37)
    part = publish.read_part(directory / "rank_1")
    with open(directory / part.file.path, "r+b") as file:
        file.truncate(part.file.bytes - 1)
    with pytest.raises(CheckpointError, match="truncated"):
        publish.publish(tmp_path, directory, NEWER.facts(37))
    assert load.scan(tmp_path) == []


def test_deleting_the_older_one_first_is_caught() -> None:
    def save(root: Path, os: Os) -> None:
        starts.discard(layout.checkpoint_dir(root, 36), os)
        NEWER.save(root, 37, os)

    verdict = first_broken(lambda: disk_with(CASES["the next step"][0]), save)
    assert "visible" in verdict or "gone" in verdict


def test_the_number_of_system_calls_is_the_same_in_every_run() -> None:
    """Else `crashes` would miss some."""
    counts = set()
    for _ in range(3):
        os = InterposedOs(counting(), disk_with((OLDER, 36)))
        NEWER.save(ROOT, 37, os)
        counts.add(os.count)
    assert len(counts) == 1


class _WithoutFsync(Os):
    """What a process sees does not depend on fsync, which takes most of the time of a real save."""

    def fsync(self, fd: int) -> None:
        pass


def _without_fsync(os: Os) -> Os:
    class Lazy(InterposedOs):
        def fsync(self, fd: int) -> None:
            pass

    return Lazy(counting(), os)
