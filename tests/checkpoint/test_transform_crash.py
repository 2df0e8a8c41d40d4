"""A transformation that ends at any system call leaves the source, and of the result all or nothing; and it goes on."""

from __future__ import annotations

import errno
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from lastwords.checkpoint import load
from lastwords.checkpoint.boxes import Box
from lastwords.checkpoint.reshard.strategy import Cut, Held, Strategy, save_strategy_file
from lastwords.checkpoint.system import Os
from lastwords.errors import StorageError
from lastwords.integrations.transform import transform
from tests.checkpoint.elastic import gathered, save_naively
from tests.checkpoint.interposed import Crash, InterposedOs, counting, crashing_at, failing
from tests.checkpoint.simulated_disk import Content, SimulatedOs
from tests.checkpoint.test_crash import ROOT, Broken, crashes
from tests.checkpoint.test_rank_transform import W, job, rows

TO = Path("/to")
OUT = Path("/out")


def halves() -> Strategy:
    held = tuple(Held(Box((0, 3 * k), (8, 3)), (k,)) for k in range(2))
    return Strategy(2, {"model/w": Cut("F32", W, held)})


def disk() -> SimulatedOs:
    made = SimulatedOs()
    made.mkdir(ROOT)
    made.mkdir(OUT)
    made.fsync(made.open_directory(Path("/")))
    save_naively(ROOT, job(), rows(2), os=made)
    save_strategy_file(halves(), TO, made)
    return made.copy()


DISK = disk()
SOURCE = load.latest(ROOT, os=DISK)
BITS = {name: (dtype, array.tobytes()) for name, (dtype, array) in job().arrays.items()}


def move(root: Path, os: Os) -> None:
    transform(root, OUT, TO, os=os)


def check(os: Os, published: bool) -> None:
    """Broken if the source is not there, or there is anything in the destination but a whole result."""
    assert SOURCE is not None
    if load.verify(SOURCE, os=os):
        raise Broken("the source is damaged")
    found = load.scan(OUT, os)
    if published and not found:
        raise Broken("it was reported as published and is gone")
    for entry in found:
        if entry.status is not load.DirectoryStatus.COMPLETE or load.verify(entry.path, os=os):
            raise Broken(f"{entry.path.name} is visible but {entry.status.value}: {entry.why}")
        if gathered(entry.path, os) != BITS:
            raise Broken("it has another content")


@pytest.mark.ci
def test_power_lost_at_any_system_call_leaves_the_source_and_all_of_the_result_or_nothing() -> None:
    states = 0
    for label, after, published in crashes(DISK.copy, move):
        try:
            check(after, published)
        except Broken as verdict:
            pytest.fail(f"{label}: {verdict}")
        states += 1
    assert states > 20


@pytest.mark.thorough
def test_after_any_loss_of_power_the_same_call_goes_on() -> None:
    finished = 0
    for label, after, _ in crashes(DISK.copy, move):
        finished += not load.scan(OUT, after)
        done = transform(ROOT, OUT, TO, os=after)
        assert done.path is not None, label
        check(after, published=True)
        assert [name for name in after.listdir(OUT) if name.startswith(".")] == [], label
    assert finished > 20


def check_every_loss(made: SimulatedOs) -> None:
    """Of what is not durable when the result has been published."""
    for names in itertools.product((False, True), repeat=made.pending):
        for content in Content:
            check(made.crash([index for index, kept in enumerate(names) if kept], content), published=True)


@pytest.mark.parametrize(
    "skip",
    [
        lambda path: path.suffix == ".ckpt",
        lambda path: path.name == "manifest.json",
        lambda path: path.name.startswith("rank_"),
        lambda path: path.name.startswith(".transform-"),
        lambda path: path == OUT,
    ],
    ids=["file", "manifest", "rank directory", "hidden directory", "root"],
)
def test_each_left_out_fsync_is_caught(skip: Callable[[Path], bool]) -> None:
    made = DISK.copy()
    made.skip_fsync = skip
    move(ROOT, made)
    with pytest.raises(Broken):
        check_every_loss(made)


@pytest.mark.thorough
def test_killed_at_any_system_call_what_was_finished_is_kept() -> None:
    """The process ends, the machine does not: nothing that was written is lost."""
    kept, fatal, finished = 0, 0, False
    while not finished:
        fatal += 3  # about eighty places; losing power is tried at every one
        after = DISK.copy()
        dying = InterposedOs(crashing_at(fatal), after)
        try:
            move(ROOT, dying)
            finished = True
        except Crash:
            dying.close_leaked()
            if load.scan(OUT, after):
                continue
            done = transform(ROOT, OUT, TO, os=after)
            assert {*done.written, *done.already} == {0, 1}
            assert not done.missing
            kept += bool(done.already)
        check(after, published=True)
    assert kept > 10


def refused(os: Os) -> int:
    """The system's error number, 0 if there was none."""
    try:
        move(ROOT, os)
    except StorageError as error:
        return error.errno
    return 0


@pytest.mark.ci
def test_a_disk_that_is_full_at_any_call_is_told_and_the_same_call_goes_on() -> None:
    full = OSError(errno.ENOSPC, "no space left on device")
    calls: Counter[str] = Counter()
    move(ROOT, InterposedOs(lambda _, name, arguments: calls.update([name]), DISK.copy()))
    told = 0
    for call in ("create", "mkdir", "pwrite", "fallocate", "ftruncate", "fsync", "rename"):
        for at in range(1, calls[call] + 1):
            after = DISK.copy()
            told += refused(InterposedOs(failing(full, call, at), after)) == errno.ENOSPC
            check(after, published=False)
            if not load.scan(OUT, after):
                move(ROOT, after)
            check(after, published=True)
    assert told > 20


def test_the_number_of_system_calls_is_the_same_in_every_run() -> None:
    """Else `crashes` would miss some."""
    counts = set()
    for _ in range(3):
        os = InterposedOs(counting(), DISK.copy())
        move(ROOT, os)
        counts.add(os.count)
    assert len(counts) == 1
