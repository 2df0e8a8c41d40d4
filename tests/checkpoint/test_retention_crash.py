"""I5 and I9 for removals: a crash at any system call, and other processes at any of them."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import layout, load, publish, removal, starts
from lastwords.checkpoint.lock_file import ReaderLock
from lastwords.checkpoint.retention import RetentionPlan, Rules, VerifiedOnce, carry_out, plan, prune
from lastwords.checkpoint.system import REAL_OS, Os, remove_tree
from lastwords.errors import BusyError, IncompleteError, LastWordsError
from tests.checkpoint.interleaving import Choose, Machine, at_random, stopped_once
from tests.checkpoint.interposed import Crash, InterposedOs, crashing_at
from tests.checkpoint.simulated_disk import SimulatedOs
from tests.checkpoint.states import Job, content_of, content_written
from tests.checkpoint.test_crash import Broken, crashes
from tests.selection import more

ROOT = Path("/ckpt")
JOB = Job(incident=0)
STEPS = (34, 35, 36)
KEEP = 1


def filled(root: Path, os: Os = REAL_OS) -> None:
    for attempt, step in enumerate(STEPS, 1):
        JOB.again(attempt=attempt).save(root, step, os)


def pruned(root: Path, os: Os, verified: VerifiedOnce | None = None) -> None:
    prune([root], "job", Rules(KEEP), os, verified=SEEN if verified is None else verified)


def disk() -> SimulatedOs:
    return _FILLED.copy()


def _filled_disk() -> SimulatedOs:
    made = SimulatedOs()
    made.mkdir(ROOT)
    made.fsync(made.open_directory(Path("/")))
    filled(ROOT, made)
    return made


_FILLED = _filled_disk()


SEEN = VerifiedOnce()
"""Whoever prunes the filled disk has read what is on it, but for the tests that begin with that."""
assert [SEEN.problem(one.path, one.said, _FILLED) for one in plan([ROOT], "job", Rules(0), _FILLED).keep] == [""] * 3


def check(root: Path, os: Os, *, finished: bool) -> None:
    """What is visible is whole, what is to be kept is there, and a later start leaves nothing else."""
    whole(root, os)
    starts.remove_stale(root, "job", 9, os)
    left = sorted(os.listdir(root))
    if any(name.startswith(".removed-") for name in left):
        raise Broken(f"a later start leaves {left}")
    visible = whole(root, os)
    if finished and visible != [*STEPS[-KEEP:]]:
        raise Broken(f"it was told that they are removed, and there are {visible}")


def whole(root: Path, os: Os) -> list[int]:
    """Steps of all that is visible; Broken for one that is not whole, or without those that are to be kept."""
    steps = []
    try:
        for found in load.scan(root, os):
            if found.status is not load.DirectoryStatus.COMPLETE or load.verify(found.path, os=os):
                raise Broken(f"{found.path.name} is visible but {found.status.value}: {found.why}")
            assert found.manifest is not None
            if content_of(found.path, os) != content_written(JOB, found.manifest.global_step):
                raise Broken(f"{found.path.name} has the content of another one")
            steps.append(found.manifest.global_step)
    except LastWordsError as error:
        raise Broken(f"the directory cannot be listed any more: {error}") from error
    if not {*STEPS[-KEEP:]} <= {*steps}:
        raise Broken(f"of what is to be kept only {steps} is there")
    return sorted(steps)


def broken(found: Iterable[tuple[str, SimulatedOs, bool]]) -> Iterator[str]:
    for label, after, finished in found:
        try:
            check(ROOT, after, finished=finished)
        except Broken as verdict:
            yield f"{label}: {verdict}"


@pytest.mark.ci
def test_power_lost_at_any_system_call_leaves_whole_checkpoints_and_nothing_that_stays() -> None:
    found = [*crashes(disk, pruned)]
    assert len(found) > 20
    assert list(broken(found)) == []


@pytest.mark.thorough
def test_a_process_killed_at_any_system_call_leaves_the_real_directory_sound(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    filled(before)
    for fatal in itertools.count(1):
        root = tmp_path / str(fatal)
        shutil.copytree(before, root)
        os = InterposedOs(crashing_at(fatal))
        finished = True
        try:
            pruned(root, os, VerifiedOnce())
        except Crash:
            finished = False
        finally:
            os.close_leaked()
        check(root, REAL_OS, finished=finished)
        shutil.rmtree(root)
        if finished:
            break
    assert fatal > 60


# ---------------------------------------------------------------------- negative controls: the checker can fail


def test_removing_in_place_is_caught() -> None:
    def in_place(root: Path, os: Os) -> None:
        for one in plan([root], "job", Rules(KEEP), os).remove:
            remove_tree(one.path, os)

    assert any("visible" in text for text in broken(crashes(disk, in_place)))


def test_a_name_that_is_not_made_durable_before_the_files_go_is_caught() -> None:
    def lazy() -> SimulatedOs:
        made = disk()
        made.skip_fsync = lambda path: path == ROOT
        return made

    assert any("visible" in text for text in broken(crashes(lazy, pruned)))


def test_a_rule_that_takes_the_newest_is_caught() -> None:
    def all_of_them(root: Path, os: Os) -> None:
        made = plan([root], "job", Rules(KEEP), os)
        for one in (*made.keep, *made.remove):
            removal.remove(one.path, one.said, os)

    assert any("kept" in text for text in broken(crashes(disk, all_of_them)))


def test_a_later_start_that_does_not_go_on_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "finish", lambda root, names, os: [])
    assert any("leaves" in text for text in broken(crashes(disk, pruned)))


# ---------------------------------------------------------------------- other processes

Body = Callable[[InterposedOs], Any]


def pruner(keep: int, *, reads: bool = False) -> Body:
    return lambda os: prune([ROOT], "job", Rules(keep), os, verified=VerifiedOnce() if reads else SEEN)


def reader(step: int) -> Body:
    """What it has read of this step; None if it was told, before it began, that there is none."""

    def read(os: InterposedOs) -> dict[str, bytes] | None:
        path = layout.checkpoint_dir(ROOT, step)
        try:
            with load.open_checkpoint(path, os) as opened:
                tensors = (
                    opened.read(opened.manifest.units["a"])
                    | opened.read(opened.manifest.units["bb"])
                    | opened.read(opened.manifest.locals[0])
                    | opened.read(opened.manifest.locals[1])
                )
        except BusyError:
            return None
        except IncompleteError as error:
            if error.missing == (layout.MANIFEST_NAME,):
                return None
            raise
        return {name: data.tobytes() for name, (_, data) in tensors.items()}

    return read


def later_start(os: InterposedOs) -> None:
    """Publishes the very step that others remove, as the newest one of a later start."""
    JOB.again(generation=2, seed=9).save(ROOT, STEPS[0], os)


SCHEDULES: list[tuple[str, Choose]] = [
    *((f"stopped at call {at}", stopped_once(at)) for at in range(1, 210, 3)),
    *((f"the second stopped at call {at}", stopped_once(at, who=1)) for at in range(1, 120, 3)),
    *((f"seed {seed}", at_random(seed, kills=seed % 2, switch=(0.05, 0.2, 0.5)[seed % 3])) for seed in range(60)),
]


def judged(
    bodies: list[Body], judge: Callable[[SimulatedOs, list[Any]], str], *, can_exchange: bool = True
) -> Iterator[str]:
    for label, choose in SCHEDULES:
        made = disk()
        made._can_exchange = can_exchange
        ended = Machine(made, choose).run(bodies)
        for one in ended:
            if one.error is not None:
                yield f"{label}: {type(one.error).__name__}: {one.error}"
        problem = judge(made, ended)
        if problem:
            yield f"{label}: {problem}"


def never_wrong(made: SimulatedOs, ended: list[Any]) -> str:
    got = ended[0].result
    return "" if got is None or got == content_written(JOB, STEPS[0]) else "wrong bytes"


@pytest.mark.ci
def test_a_reader_that_has_begun_is_never_disturbed() -> None:
    bodies = [reader(STEPS[0]), pruner(KEEP)]
    assert list(judged(bodies, never_wrong)) == []


@pytest.mark.ci
def test_without_its_lock_a_reader_is_disturbed_and_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the one above; and still nobody reads wrong bytes."""
    monkeypatch.setattr(
        ReaderLock,
        "take",
        classmethod(lambda cls, directory, os: cls(os.open_read(directory / "manifest.json"), directory, os)),
    )
    told = list(judged([reader(STEPS[0]), pruner(KEEP)], never_wrong))
    assert told
    assert not any("wrong" in text for text in told)


def one_is_left(made: SimulatedOs, ended: list[Any]) -> str:
    try:
        whole(ROOT, made)
    except Broken as verdict:
        return str(verdict)
    return ""


@pytest.mark.ci
def test_several_that_prune_at_once_leave_what_each_has_to_keep() -> None:
    assert (
        list(judged([pruner(KEEP), pruner(2), lambda os: starts.remove_stale(ROOT, "job", 9, os)], one_is_left)) == []
    )


@pytest.mark.thorough
def test_several_that_prune_at_once_and_read_before_leave_what_each_has_to_keep() -> None:
    assert list(judged([pruner(KEEP, reads=True), pruner(2, reads=True)], one_is_left)) == []


def two_that_disagree() -> list[Body]:
    """Each takes another one for the newest, as if it could not look at the newest of the other."""

    def prune_but(unseen: int) -> Body:
        def body(os: InterposedOs) -> None:
            made = plan([ROOT], "job", Rules(0), os)
            keep = [one for one in made.keep if one.said.global_step == (35 if unseen == 36 else 36)]
            if keep:
                goes = tuple(one for one in made.keep if one not in keep)
                carry_out(RetentionPlan(tuple(keep), goes), os, verified=SEEN)

        return body

    return [prune_but(36), prune_but(35)]


def some_are_left(made: SimulatedOs, ended: list[Any]) -> str:
    return "" if load.scan(ROOT, made) else "nothing is left"


@pytest.mark.thorough
def test_two_that_disagree_about_the_newest_leave_one() -> None:
    assert list(judged(two_that_disagree(), some_are_left)) == []


def test_two_that_disagree_and_hold_nothing_leave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the one above."""

    def unheld(directory: Path, os: Os) -> ReaderLock:
        lock = ReaderLock()
        lock.held = True
        return lock

    monkeypatch.setattr(ReaderLock, "take", unheld)
    assert any("nothing" in text for text in judged(two_that_disagree(), some_are_left))


def the_newest_is_there(made: SimulatedOs, ended: list[Any]) -> str:
    if ended[1].killed:
        return ""
    starts.remove_stale(ROOT, "job", 9, made)
    newest = load.latest(ROOT, os=made)
    if newest is None or content_of(newest, made) != content_written(JOB.again(seed=9), STEPS[0]):
        return f"what was published last is gone: {newest}"
    return ""


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.thorough
def test_what_a_later_start_publishes_under_a_name_that_goes_is_not_lost(can_exchange: bool) -> None:
    assert list(judged([pruner(KEEP), later_start], the_newest_is_there, can_exchange=can_exchange)) == []


@pytest.mark.thorough
def test_without_a_look_at_what_was_renamed_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the one above."""
    monkeypatch.setattr(removal, "is_at", lambda path, fd, os: True)
    assert any("gone" in text for text in judged([pruner(KEEP), later_start], the_newest_is_there))


# ---------------------------------------------------------------------- who goes on, while the one that began lives


def while_another_goes_on(made: SimulatedOs, fatal: int) -> tuple[list[Path], bool]:
    """One prunes; when it has renamed the first one, another finishes that, and dies at its call `fatal`.

    Returns what the other one took away, and whether it died.
    """
    other = InterposedOs(crashing_at(fatal), made)
    went: list[Path] | None = None
    begun = False

    def before(number: int, name: str, args: tuple[Any, ...]) -> None:
        nonlocal went, begun
        names = made.listdir(ROOT)
        removed = [one for one in names if layout.TemporaryName.parse(one, layout.REMOVED)]
        if begun or name != "open_directory" or not removed:
            return
        begun = True
        try:
            went = removal.finish(ROOT, names, other)
        except Crash:
            other.close_leaked()

    pruned(ROOT, InterposedOs(before, made))
    assert begun
    return went or [], went is None


def torsos(make: Callable[[], SimulatedOs]) -> Iterator[str]:
    for fatal in itertools.count(1):
        made = make()
        _, died = while_another_goes_on(made, fatal)
        verdict = one_is_left(made, [])
        if verdict:
            yield f"killed at call {fatal}: {verdict}"
        if not died:
            break


class LocksOfOneHost(SimulatedOs):
    """As some network file systems: each host has its own locks, and here each process is on its own host."""

    def try_lock(self, fd: int, *, shared: bool = False) -> bool:
        return True


def disk_of_two_hosts() -> SimulatedOs:
    made = disk()
    made.__class__ = LocksOfOneHost
    return made


@pytest.mark.parametrize("make", [disk, disk_of_two_hosts])
def test_nothing_that_is_half_removed_gets_a_final_name(make: Callable[[], SimulatedOs]) -> None:
    assert list(torsos(make)) == []


def test_what_a_living_process_removes_is_left_to_it() -> None:
    assert while_another_goes_on(disk(), 10_000)[0] == []
    assert while_another_goes_on(disk_of_two_hosts(), 10_000)[0] != []  # control: it is the lock


def test_giving_back_without_a_look_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the first one."""
    monkeypatch.setattr(removal, "_give_back_another", lambda hidden, final, of, os: os.rename(hidden, final))
    assert any("visible" in text for text in torsos(disk_of_two_hosts))


@pytest.mark.parametrize("sound", [True, False])
def test_only_a_sound_manifest_gets_a_checkpoint_its_name_back(sound: bool) -> None:
    made = disk()
    caught = layout.checkpoint_dir(ROOT, STEPS[1])
    hidden = ROOT / ".removed-step_34-job-g0-i0-a1"
    made.rename(layout.checkpoint_dir(ROOT, STEPS[0]), ROOT / "elsewhere")
    made.rename(caught, hidden)
    if not sound:
        fd = made.open_lock(hidden / layout.MANIFEST_NAME)
        made.pwrite(fd, memoryview(b"["), made.size(fd) - 30)
        made.close(fd)
    assert removal.finish(ROOT, made.listdir(ROOT), made) == []
    assert (made.exists(caught), made.exists(hidden)) == (sound, not sound)


# ---------------------------------------------------------------------- two jobs publish one step

OTHER = Job(name="other", seed=9)
REPLACES = JOB.again(incident=1, seed=5)


@functools.cache
def _written(can_exchange: bool) -> tuple[SimulatedOs, list[tuple[Job, Path]]]:
    """What both have written, and neither has published."""
    made = SimulatedOs(can_exchange=can_exchange)
    made.mkdir(ROOT)
    JOB.save(ROOT, 34, made)
    return made, [(job, job.write(ROOT, 34, made)) for job in (REPLACES, OTHER)]


def published_together(choose: Choose, can_exchange: bool) -> tuple[list[Any], SimulatedOs]:
    """One replaces its own checkpoint of a step while another job publishes that step."""
    before, written = _written(can_exchange)
    made = before.copy()
    assert all(starts.Claim.take(ROOT, job.name, job.generation, made) for job in (JOB, OTHER))
    bodies = [lambda os, job=job, at=at: publish.publish(ROOT, at, job.facts(34), os) for job, at in written]
    return Machine(made, choose).run(bodies), made


def lost_by_publication(can_exchange: bool) -> Iterator[str]:
    schedules: list[tuple[str, Choose]] = [
        *((f"{who} stopped at call {at}", stopped_once(at, who)) for who in (0, 1) for at in range(1, 140)),
        *((f"seed {seed}", at_random(seed, switch=(0.05, 0.2, 0.5)[seed % 3])) for seed in range(40)),
    ]
    for label, choose in schedules:
        ended, made = published_together(choose, can_exchange)
        for one in ended:
            if one.error is not None:
                yield f"{label}: {type(one.error).__name__}: {one.error}"
        for job in (REPLACES, OTHER):
            newest = load.latest(ROOT, job.name, made)
            if newest is None or content_of(newest, made) != content_written(job, 34):
                yield f"{label}: what {job.name} has published is gone"
        if any(found.status is not load.DirectoryStatus.COMPLETE for found in load.scan(ROOT, made)):
            yield f"{label}: something is not whole"


@pytest.mark.ci
@pytest.mark.parametrize("can_exchange", [True, more(False)])
def test_what_two_jobs_publish_as_one_step_is_kept(can_exchange: bool) -> None:
    assert list(lost_by_publication(can_exchange)) == []


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.thorough
def test_without_a_second_look_it_is_lost(monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    """Control of the one above: what lies in the temporary directory or aside is taken for what was there before."""
    looks = publish.is_older
    monkeypatch.setattr(publish, "is_older", lambda at, manifest, os: looks(at, manifest, os) if is_final(at) else True)
    assert any("gone" in text for text in lost_by_publication(can_exchange))


def is_final(path: Path) -> bool:
    return path == layout.checkpoint_dir(path.parent, 34)
