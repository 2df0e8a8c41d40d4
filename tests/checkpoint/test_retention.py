"""Which checkpoints are kept, and what is never removed."""

from __future__ import annotations

import errno
import itertools
import logging
import os as posix
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastwords.checkpoint import layout, load, retention, starts
from lastwords.checkpoint.load import read_checkpoint
from lastwords.checkpoint.manifest import CheckpointKind, Claimed
from lastwords.checkpoint.retention import (
    CompleteCheckpoint,
    Rules,
    VerifiedOnce,
    carry_out,
    chosen,
    jobs_in,
    plan,
    prune,
)
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.errors import BusyError, ConfigError, IncompleteError, StorageError
from tests import golden
from tests.checkpoint.states import Job, content_of, content_written

MINUTE_NS = 60 * 10**9
PERIODIC = Job(incident=0)
LAST_WORDS = Job(attempt=2)

# ---------------------------------------------------------------------- the rule


def made(times_min: list[float], kinds: str = "") -> list[CompleteCheckpoint]:
    """Checkpoints, newest first; times in order of steps. kinds: p for periodic, w for last words, c for converted."""
    numbers = {"p": (0, 1), "w": (1, 1), "c": (0, 0)}
    found = []
    for step, (at_min, kind) in enumerate(zip(times_min, kinds or "p" * len(times_min), strict=True), 1):
        said = Claimed("job", 1, step, int(at_min * MINUTE_NS), *numbers[kind], exact=True)
        found.append(CompleteCheckpoint(Path(f"/ckpt/tft_saved_checkpoints-step_{step}"), said))
    return found[::-1]


def kept(found: list[CompleteCheckpoint], rules: Rules) -> list[int]:
    """Steps, oldest first."""
    result = chosen(found, rules)
    assert {*result.keep} | {*result.remove} == {*found}
    return sorted(one.said.global_step for one in result.keep)


def test_so_many_of_the_newest_are_kept() -> None:
    found = made([0, 10, 20, 30, 40, 50, 60])
    assert kept(found, Rules()) == [3, 4, 5, 6, 7]
    assert kept(found, Rules(2)) == [6, 7]
    assert kept(found, Rules(1)) == [7]
    assert kept(found, Rules(99)) == [1, 2, 3, 4, 5, 6, 7]
    assert kept(found, Rules(0, 0)) == [1, 2, 3, 4, 5, 6, 7]
    assert kept(made([0, 0.1, 0.2]), Rules(0).check()) == [1, 2, 3]


def test_one_in_so_many_minutes_is_kept_and_the_newest() -> None:
    found = made([0, 10, 20, 30, 40, 50, 60])
    assert kept(found, Rules(0, 30)) == [1, 4, 7]
    assert kept(found, Rules(0, 25)) == [1, 4, 7]
    assert kept(found, Rules(0, 40)) == [1, 5, 7]
    assert kept(found, Rules(2, 30)) == [6, 7]  # the maximum counts
    assert kept(made([0, 30 - 1 / MINUTE_NS, 31, 40]), Rules(0, 30)) == [1, 3, 4]


def test_last_words_stay_and_do_not_count_unless_asked() -> None:
    found = made([0, 10, 20, 30, 40, 50], "wpwppw")
    assert kept(found, Rules(2)) == [1, 3, 4, 5, 6]
    assert kept(found, Rules(2, last_words=True)) == [5, 6]
    assert kept(found, Rules(1)) == [1, 3, 5, 6]
    assert kept(found, Rules(0, 60)) == [1, 2, 3, 6]


def test_what_was_converted_stays() -> None:
    assert kept(made([0, 10, 20], "cpp"), Rules(1, last_words=True)) == [1, 3]


def test_a_start_that_begins_anew_removes_the_farthest_one_only_when_it_has_come_as_far() -> None:
    old, older = (replace(one, said=replace(one.said, global_step=one.said.global_step + 9)) for one in made([0, 10]))
    anew = [replace(one, said=replace(one.said, generation=2)) for one in made([20, 30, 40])]
    assert kept([*anew[2:], old, older], Rules(1)) == [1, 11]
    assert kept([*anew, old, older], Rules(1)) == [3, 11]
    assert kept([*anew, old, older], Rules(0, 100)) == [3, 10, 11]
    as_far = replace(anew[0], said=replace(anew[0].said, global_step=11))
    assert kept([as_far, *anew, old, older], Rules(1)) == [11]
    last_words = replace(as_far, said=replace(as_far.said, incident=1))
    assert kept([last_words, *anew, old, older], Rules(1)) == [3, 11]


def test_around_a_jump_of_the_clock_more_is_kept() -> None:
    assert kept(made([0, 10, 20, 5, 12, 25, 36]), Rules(0, 30)) == [1, 3, 4, 5, 7]
    assert kept(made([0, 10, 20, 20, 30, 51]), Rules(0, 30)) == [1, 3, 4, 5, 6]


RULES = st.builds(Rules, st.integers(0, 4), st.integers(0, 90), st.booleans())
KINDS = st.text("pwc", min_size=1, max_size=12)


@given(KINDS, RULES, st.data())
def test_the_newest_is_always_kept_and_a_second_look_removes_nothing(
    kinds: str, rules: Rules, data: st.DataObject
) -> None:
    times = data.draw(st.lists(st.floats(0, 600), min_size=len(kinds), max_size=len(kinds)))  # in any order
    found = made(times, kinds)
    first = chosen(found, rules)
    assert found[0] in first.keep
    assert all(one.said.kind is CheckpointKind.PERIODIC or rules.last_words for one in first.remove)
    if rules.keep_max:
        counted = [one for one in first.keep if one.said.kind is CheckpointKind.PERIODIC]
        assert len(counted) >= min(rules.keep_max, kinds.count("p")) or rules.last_words
    if times == sorted(times):
        assert chosen(list(first.keep), rules).remove == ()


@given(
    st.lists(st.floats(1, 200), min_size=1, max_size=15), st.integers(0, 14), st.floats(1, 3000), st.integers(1, 300)
)
def test_a_clock_that_was_ahead_for_a_while_removes_no_more(
    pauses: list[float], first_right: int, ahead_min: float, minutes: int
) -> None:
    """Until it was right again it gave times in the future, and later ones were given so that they come after those."""
    true_min = [sum(pauses[: place + 1]) for place in range(len(pauses))]
    shown: list[float] = []
    for place, at_min in enumerate(true_min):
        clock_min = at_min + (ahead_min if place < first_right else 0)
        shown.append(max([clock_min, *(before + 1 / MINUTE_NS for before in shown)]))
    rules = Rules(0, minutes)
    jumped = made(shown)
    caught_up_unseen = any(
        place >= first_right > 0 and 0 < shown[place] - shown[place - 1] < true_min[place] - true_min[place - 1]
        for place in (first_right,)
        if place < len(shown) and shown[place] - shown[place - 1] > 1e-3
    )  # set back by less than the pause: nothing tells, and it may cost one
    assert len(kept(jumped, rules)) + caught_up_unseen >= len(kept(made(true_min), rules))


def test_without_what_is_known_of_jumps_more_would_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the one above: an hour apart, and the clock was a day ahead at the first one."""
    times = [1440.0, *(1440 + step / MINUTE_NS for step in (2, 4, 6)), 1500]
    assert kept(made(times), Rules(0, 60)) == [1, 2, 3, 4, 5]
    monkeypatch.setattr(retention, "_SAME_MOMENT_NS", -(10**30))
    assert kept(made(times), Rules(0, 60)) == [1, 5]


@pytest.mark.parametrize("wrong", [{"keep_max": -1}, {"keep_max": 2.0}, {"keep_max": True}, {"keep_per_minutes": "9"}])
def test_rules_that_are_none_are_refused(wrong: dict[str, int]) -> None:
    with golden.raises(ConfigError):
        Rules(**wrong).check()
    with pytest.raises(ValueError):
        Rules(**wrong).check()


def test_upstream_s_numbers() -> None:
    assert Rules.upstream() == Rules(5, 0)
    assert Rules.upstream(3, 10) == Rules(3, 0)
    assert Rules.upstream(None, 10) == Rules.upstream(0, 10) == Rules(0, 10)
    assert Rules.upstream(0) == Rules.upstream(0, 0) == Rules.upstream(None, None) == Rules(1, 0)
    with pytest.raises(ConfigError):
        Rules.upstream(-1)


def test_rules_travel_as_json() -> None:
    rules = Rules(3, 10, last_words=True)
    assert msgspec.json.decode(msgspec.json.encode(rules), type=Rules) == rules


# ---------------------------------------------------------------------- what is removed, and what never is


def steps_in(root: Path) -> list[int]:
    return sorted(name.global_step for path in root.iterdir() if (name := layout.CheckpointName.parse(path.name)))


def filled(root: Path, steps: range = range(31, 37), job: Job = PERIODIC) -> Path:
    for attempt, step in enumerate(steps, 1):
        job.again(attempt=attempt).save(root, step)
    return root


def test_the_older_ones_go_with_a_line_for_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    gone = prune([filled(tmp_path)], "job", Rules(2))
    assert [path.name[-2:] for path in gone] == ["31", "32", "33", "34"]
    assert sorted(path.name[-2:] for path in tmp_path.iterdir()) == ["35", "36"]
    golden.says(caplog.messages)
    assert prune([tmp_path], "job", Rules(2)) == []


def test_of_several_roots_the_newest_are_kept_wherever_they_are(tmp_path: Path) -> None:
    one, other = filled(tmp_path / "a", range(31, 34)), filled(tmp_path / "b", range(34, 37))
    (tmp_path / "link").symlink_to(other)
    prune([one, other, tmp_path / "link", tmp_path / "missing"], "job", Rules(4))
    assert (steps_in(one), steps_in(other)) == ([33], [34, 35, 36])


def test_other_jobs_keep_theirs(tmp_path: Path) -> None:
    filled(tmp_path, range(31, 34))
    filled(tmp_path, range(41, 44), PERIODIC.again(name="other"))
    assert jobs_in(tmp_path) == ["job", "other"]
    prune([tmp_path], "job", Rules(1))
    assert steps_in(tmp_path) == [33, 41, 42, 43]
    prune([tmp_path], "nobody", Rules(1))
    assert steps_in(tmp_path) == [33, 41, 42, 43]
    shutil.rmtree(layout.checkpoint_dir(tmp_path, 42) / "rank_1")
    assert plan([tmp_path], "job", Rules(1)).others == (), "nor is told what is wrong with them"


def test_whose_it_is_counts_also_where_that_could_not_be_read_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, range(31, 33))
    filled(tmp_path, range(41, 43), PERIODIC.again(name="other"))
    monkeypatch.setattr(Claimed, "if_readable", lambda *_: Claimed())
    made_plan = plan([tmp_path], "job", Rules(1))
    assert [one.said.global_step for one in (*made_plan.keep, *made_plan.remove)] == [32, 31]


def test_last_words_stay_unless_asked(tmp_path: Path) -> None:
    LAST_WORDS.save(tmp_path, 30)
    filled(tmp_path)
    LAST_WORDS.again(generation=2).save(tmp_path, 37)
    prune([tmp_path], "job", Rules(1))
    assert steps_in(tmp_path) == [30, 36, 37]
    prune([tmp_path], "job", Rules(1, last_words=True))
    assert steps_in(tmp_path) == [37]


def test_damaged_unreadable_and_foreign_things_stay_and_do_not_count(tmp_path: Path) -> None:
    filled(tmp_path, range(31, 39))
    path = {step: layout.checkpoint_dir(tmp_path, step) for step in range(30, 40)}
    (path[31] / layout.MANIFEST_NAME).unlink()
    (path[32] / layout.MANIFEST_NAME).write_text("{}")
    next((path[33] / "rank_1").iterdir()).unlink()
    (path[34] / "best.safetensors").write_text("a person's own")
    (path[35] / "rank_0" / "notes").mkdir()
    next((path[38] / "rank_0").iterdir()).write_text("x")  # the newest is damaged
    path[30].symlink_to(path[36])
    path[39].write_text("a file")
    (tmp_path / "tft_saved_checkpoints-step_7-mine").mkdir()
    made_plan = plan([tmp_path], "job", Rules(1))
    assert [one.path for one in made_plan.keep] == [path[37]]
    golden.says(sorted(made_plan.others))
    outcomes = carry_out(made_plan)
    golden.says([str(outcome.left) for outcome in outcomes if outcome.left])
    assert not path[36].exists()
    assert steps_in(tmp_path) == [30, 31, 32, 33, 34, 35, 37, 38, 39]
    assert (tmp_path / "tft_saved_checkpoints-step_7-mine").is_dir()


def test_one_that_is_read_stays_until_it_has_been_read(tmp_path: Path) -> None:
    filled(tmp_path)
    with load.open_checkpoint(layout.checkpoint_dir(tmp_path, 33)) as checkpoint:
        prune([tmp_path], "job", Rules(1))
        assert steps_in(tmp_path) == [33, 36]
        assert content_of(checkpoint.path) == content_written(PERIODIC, 33)
        prune([tmp_path], "job", Rules(1))
    assert steps_in(tmp_path) == [33, 36]
    prune([tmp_path], "job", Rules(1))
    assert steps_in(tmp_path) == [36]


def test_a_reader_that_forgot_to_close_it_holds_it_as_long_as_its_object_lives(tmp_path: Path) -> None:
    filled(tmp_path)
    checkpoint = load.open_checkpoint(layout.checkpoint_dir(tmp_path, 33))
    prune([tmp_path], "job", Rules(1))
    assert steps_in(tmp_path) == [33, 36]
    del checkpoint
    prune([tmp_path], "job", Rules(1))
    assert steps_in(tmp_path) == [36]


def test_a_child_that_was_forked_meanwhile_does_not_hold_it(tmp_path: Path) -> None:
    filled(tmp_path)
    checkpoint = load.open_checkpoint(layout.checkpoint_dir(tmp_path, 33))
    inherited = posix.dup(next(fd for fd in open_fds() if name_of(fd) == str(checkpoint.path / layout.MANIFEST_NAME)))
    checkpoint.close()
    prune([tmp_path], "job", Rules(1))
    posix.close(inherited)
    assert steps_in(tmp_path) == [36]


@pytest.mark.parametrize("forgets", [True, False])
def test_a_child_that_was_forked_meanwhile_gives_nothing_back(tmp_path: Path, forgets: bool) -> None:
    filled(tmp_path)
    checkpoint = load.open_checkpoint(layout.checkpoint_dir(tmp_path, 33))
    child = posix.fork()
    if child == 0:
        if forgets:
            del checkpoint
        else:
            checkpoint.close()
        posix._exit(0)
    assert posix.waitpid(child, 0)[1] == 0
    prune([tmp_path], "job", Rules(1))
    assert steps_in(tmp_path) == [33, 36]
    checkpoint.close()
    prune([tmp_path], "job", Rules(1))
    assert steps_in(tmp_path) == [36]


def open_fds() -> list[int]:
    return [int(name) for name in posix.listdir("/proc/self/fd")]


def name_of(fd: int) -> str:
    try:
        return posix.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_a_checkpoint_that_only_may_be_read_is_held_too(tmp_path: Path) -> None:
    """As on a mount that is read-only for this host: a shared lock needs no right to write."""

    class ReadOnly(Os):
        def open_lock(self, path: Path) -> int:
            raise PermissionError(errno.EACCES, posix.strerror(errno.EACCES), str(path))

    filled(tmp_path)
    with load.open_checkpoint(layout.checkpoint_dir(tmp_path, 33), ReadOnly()):
        prune([tmp_path], "job", Rules(1))
    assert steps_in(tmp_path) == [33, 36]
    assert prune([tmp_path], "job", Rules(1), ReadOnly()) == []


class WithoutLocks(Os):
    def try_lock(self, fd: int, *, shared: bool = False) -> bool:
        raise OSError(errno.ENOLCK, posix.strerror(errno.ENOLCK))


def test_where_there_are_no_locks_everything_is_readable_and_nothing_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    filled(tmp_path, range(35, 37))
    os = WithoutLocks()
    assert content_of(layout.checkpoint_dir(tmp_path, 35), os) == content_written(PERIODIC, 35)
    assert prune([tmp_path], "job", Rules(1), os) == []
    assert steps_in(tmp_path) == [35, 36]
    golden.says(sorted({*caplog.messages}))


def test_a_reader_without_a_lock_is_told_that_it_was_removed(tmp_path: Path) -> None:
    """As one on another host of a file system that keeps locks to one host."""
    path = layout.checkpoint_dir(filled(tmp_path), 33)

    def read(checkpoint: load.Checkpoint) -> None:
        prune([tmp_path], "job", Rules(1))
        checkpoint.read(checkpoint.manifest.units["a"])

    with golden.raises(IncompleteError):
        read_checkpoint(path, read, WithoutLocks())


def test_whoever_comes_while_one_is_removed_waits_a_little(tmp_path: Path) -> None:
    path = layout.checkpoint_dir(filled(tmp_path), 33)
    fd = REAL_OS.open_lock(path / layout.MANIFEST_NAME)
    assert REAL_OS.try_lock(fd)
    paused: list[float] = []

    class Hasty(Os):
        def pause(self, seconds: float) -> None:
            paused.append(seconds)

    with golden.raises(BusyError):
        load.open_checkpoint(path, Hasty())
    assert sum(paused) == pytest.approx(5.0)

    class Freed(Os):
        def pause(self, seconds: float) -> None:
            REAL_OS.unlock(fd)

    load.open_checkpoint(path, Freed()).close()
    REAL_OS.close(fd)


@pytest.mark.parametrize("by", ["a later start", "whoever prunes"])
def test_what_was_being_removed_is_removed_by_others(tmp_path: Path, by: str) -> None:
    class Stuck(Os):
        def unlink(self, path: Path) -> None:
            raise OSError(errno.EIO, posix.strerror(errno.EIO), str(path))

    filled(tmp_path, range(35, 37))
    assert prune([tmp_path], "job", Rules(1), Stuck()) == []
    hidden = tmp_path / ".removed-step_35-job-g1-i0-a1"
    assert {path.name for path in tmp_path.iterdir()} == {hidden.name, "tft_saved_checkpoints-step_36"}
    assert [found.path.name[-2:] for found in load.scan(tmp_path)] == ["36"]
    if by == "a later start":
        assert starts.remove_stale(tmp_path, "another", 1) == [hidden]
    else:
        prune([tmp_path], "another", Rules(1))
    assert [path.name for path in tmp_path.iterdir()] == ["tft_saved_checkpoints-step_36"]


class Nfs(Os):
    """As a client of NFS: a file that is removed while it has it open keeps a name until it is closed."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}
        self._left: dict[int, Path] = {}

    def open_lock(self, path: Path) -> int:
        fd = super().open_lock(path)
        self._open[fd] = posix.fstat(fd).st_ino
        return fd

    def unlink(self, path: Path) -> None:
        inode = posix.stat(path).st_ino
        if inode not in self._open.values():
            return super().unlink(path)
        self._left[inode] = path.with_name(".nfs01")
        posix.rename(path, self._left[inode])

    def close(self, fd: int) -> None:
        super().close(fd)
        inode = self._open.pop(fd, 0)
        if inode in self._left:
            posix.unlink(self._left.pop(inode))


def test_on_nfs_nothing_is_left_of_what_goes(tmp_path: Path) -> None:
    filled(tmp_path, range(34, 37))
    hidden = tmp_path / ".removed-step_34-job-g1-i0-a1"
    posix.rename(layout.checkpoint_dir(tmp_path, 34), hidden)
    gone = prune([tmp_path], "job", Rules(1), Nfs())
    assert [path.name for path in gone] == ["tft_saved_checkpoints-step_35"]
    assert [path.name for path in tmp_path.iterdir()] == ["tft_saved_checkpoints-step_36"]


def test_another_checkpoint_that_was_caught_by_the_rename_gets_its_name_back(tmp_path: Path) -> None:
    """Published by a later start between the look and the rename; its controller, or the machine, then ended."""
    caught = PERIODIC.again(generation=2, attempt=7).save(tmp_path, 35)
    caught.rename(tmp_path / ".removed-step_35-job-g1-i0-a1")
    assert starts.remove_stale(tmp_path, "job", 3) == []
    assert content_of(caught) == content_written(PERIODIC, 35)


def test_one_that_is_replaced_just_before_the_rename_is_not_removed(tmp_path: Path) -> None:
    newer = PERIODIC.again(generation=2, seed=9)

    class Late(Os):
        def rename(self, source: Path, target: Path) -> None:
            if target.name.startswith(".removed-"):
                newer.save(tmp_path, 35)
            super().rename(source, target)

    filled(tmp_path, range(35, 37))
    made_plan = plan([tmp_path], "job", Rules(1))
    [outcome] = carry_out(made_plan, Late())
    golden.says(outcome.left)
    newest = load.latest(tmp_path)
    assert newest is not None
    assert content_of(newest) == content_written(newer, 35)


def test_if_the_newest_is_gone_when_it_is_to_be_held_nothing_goes(tmp_path: Path) -> None:
    made_plan = plan([filled(tmp_path)], "job", Rules(1))
    layout.checkpoint_dir(tmp_path, 36).rename(tmp_path / "elsewhere")
    golden.says({str(outcome.left) for outcome in carry_out(made_plan)})
    assert steps_in(tmp_path) == [31, 32, 33, 34, 35]


def test_the_newest_is_held_no_longer_than_others_are_removed_whatever_is_raised(tmp_path: Path) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    made_plan = plan([filled(tmp_path, range(35, 37))], "job", Rules(1))
    with pytest.raises(KeyboardInterrupt) as raised:
        carry_out(made_plan, remove=interrupted)
    PERIODIC.again(attempt=3).save(tmp_path, 37)
    prune([tmp_path], "job", Rules(1))  # while the exception, and with it the frame of who held it, still lives
    assert steps_in(tmp_path) == [37]
    assert raised.tb is not None


def test_nothing_is_raised_where_a_directory_cannot_be_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Os):
        def listdir(self, path: Path) -> list[str]:
            raise OSError(errno.EIO, posix.strerror(errno.EIO), str(path))

    filled(tmp_path)
    assert prune([tmp_path], "job", Rules(1), Failing()) == []
    golden.says(caplog.messages)
    with pytest.raises(StorageError):
        plan([tmp_path], "job", Rules(1), Failing())


def test_a_large_checkpoint_is_kept_and_goes_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lastwords.checkpoint.publish.TABLES_BYTES_MAX", 0)
    monkeypatch.setattr("lastwords.checkpoint.manifest.EXAMINED_BYTES_MAX", 0)
    filled(tmp_path)
    next((layout.checkpoint_dir(tmp_path, 35) / "rank_1").glob("*.ckpt")).unlink()
    prune([tmp_path], "job", Rules(2))
    assert steps_in(tmp_path) == [34, 35, 36]


def test_claims_tell_apart_what_has_one_name(tmp_path: Path) -> None:
    """A name that another checkpoint has taken since the plan was made: nothing goes."""
    made_plan = plan([filled(tmp_path, range(35, 37))], "job", Rules(1))
    [victim] = made_plan.remove
    PERIODIC.again(generation=2).save(tmp_path, 35)
    assert [type(outcome.left).__name__ for outcome in carry_out(replace(made_plan, remove=(victim,)))] == [
        "ReplacedError"
    ]
    assert steps_in(tmp_path) == [35, 36]


def test_what_is_read_through_read_checkpoint_is_held_and_given_back(tmp_path: Path) -> None:
    path = layout.checkpoint_dir(filled(tmp_path), 33)

    def read(checkpoint: load.Checkpoint) -> None:
        prune([tmp_path], "job", Rules(1))
        checkpoint.read(checkpoint.manifest.units["a"])
        raise StorageError("the reader fails")

    with pytest.raises(StorageError) as failed:
        read_checkpoint(path, read)
    assert steps_in(tmp_path) == [33, 36]
    prune([tmp_path], "job", Rules(1))  # while the error, and with it the reader's frame, still lives
    assert steps_in(tmp_path) == [36]
    assert failed.value.errno == 0


# ---------------------------------------------------------------------- what is damaged


def flipped(root: Path, *steps: int) -> None:
    """One bit of the data of each is wrong."""
    for step in steps:
        file = next((layout.checkpoint_dir(root, step) / "rank_1").iterdir())
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)


def sound_in(root: Path) -> list[int]:
    return [step for step in steps_in(root) if not load.verify(layout.checkpoint_dir(root, step))]


class Counted(Os):
    """Knows of which steps data were read: what lies behind a file's header."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        count = super().preadv(fd, views, offset)
        path = Path(name_of(fd))
        step = layout.CheckpointName.parse(path.parents[1].name)
        if step is not None and count == self.size(fd):
            self.read += [step.global_step] * (step.global_step not in self.read[-1:])
        return count


def test_a_damaged_newest_one_removes_no_sound_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path, range(34, 37))
    flipped(tmp_path, 36)
    prune([tmp_path], "job", Rules(1))
    assert (steps_in(tmp_path), sound_in(tmp_path)) == ([35, 36], [35])
    golden.says(caplog.messages)


def test_without_the_look_the_only_sound_one_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the one above."""
    monkeypatch.setattr(VerifiedOnce, "problem", lambda *_: "")
    filled(tmp_path, range(34, 37))
    flipped(tmp_path, 36)
    prune([tmp_path], "job", Rules(1))
    assert (steps_in(tmp_path), sound_in(tmp_path)) == ([36], [])


def test_what_is_damaged_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    filled(tmp_path, range(31, 37))
    flipped(tmp_path, 35, 36)
    made_plan = plan([tmp_path], "job", Rules(2))
    assert [one.said.global_step for one in made_plan.keep] == [34, 33]
    assert [one.said.global_step for one in made_plan.remove] == [32, 31]
    assert len(made_plan.damaged) == 2
    carry_out(made_plan)
    assert (steps_in(tmp_path), sound_in(tmp_path)) == ([33, 34, 35, 36], [33, 34])


def test_what_was_found_to_be_damaged_once_is_left_alone_and_told_as_such_later(tmp_path: Path) -> None:
    filled(tmp_path, range(34, 37))
    flipped(tmp_path, 36)
    verified = VerifiedOnce()
    first, second = (plan([tmp_path], "job", Rules(1), verified=verified) for _ in range(2))
    assert first.damaged == first.others == second.others != ()
    assert second.damaged == ()
    assert [one.said.global_step for one in second.remove] == [34]


def test_what_is_spared_stays_and_that_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    filled(tmp_path, range(33, 37))
    spared = {layout.checkpoint_dir(tmp_path, 33)}
    gone = prune([tmp_path], "job", Rules(1), spared=lambda path: path in spared)
    assert [path.name[-2:] for path in gone] == ["34", "35"]
    assert steps_in(tmp_path) == [33, 36]
    assert [text for text in caplog.messages if "uploaded" in text]
    caplog.clear()
    spared.clear()
    prune([tmp_path], "job", Rules(1), spared=lambda path: path in spared)
    assert steps_in(tmp_path) == [36]
    assert not [text for text in caplog.messages if "uploaded" in text]


def test_a_truncated_one_does_not_count_either_and_is_not_read(tmp_path: Path) -> None:
    filled(tmp_path, range(33, 37))
    file = next((layout.checkpoint_dir(tmp_path, 36) / "rank_1").iterdir())
    posix.truncate(file, file.stat().st_size - 1)
    os = Counted()
    prune([tmp_path], "job", Rules(1), os)
    assert (steps_in(tmp_path), sound_in(tmp_path), os.read) == ([35, 36], [35], [35])


def test_where_all_are_damaged_all_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path, range(34, 37))
    flipped(tmp_path, 34, 35, 36)
    assert prune([tmp_path], "job", Rules(1)) == []
    assert steps_in(tmp_path) == [34, 35, 36]
    assert (
        plan([tmp_path], "job", Rules(1)).keep[0].said.global_step == 34
    )  # alone it makes nobody go, so it is not read


DAMAGED = [set(steps) for count in range(5) for steps in itertools.combinations(range(31, 35), count)]


@pytest.mark.ci
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_whichever_are_damaged_the_newest_sound_one_stays(tmp_path: Path, keep: int) -> None:
    whole = filled(tmp_path / "whole", range(31, 35))
    for number, damaged in enumerate(DAMAGED):
        root = shutil.copytree(whole, tmp_path / str(number))
        flipped(root, *damaged)
        verified = VerifiedOnce()
        for _ in range(2):
            prune([root], "job", Rules(keep), verified=verified)
            assert {*sound_in(root)} >= {*[step for step in range(31, 35) if step not in damaged][-1:]}, damaged
            assert {*steps_in(root)} >= {step for step in damaged if step > max(sound_in(root), default=0)}


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_what_cannot_be_read_is_not_damaged_and_nothing_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    class Failing(Os):
        fails = True

        def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
            count = super().preadv(fd, views, offset)
            if self.fails and name_of(fd).endswith("-4_6.ckpt") and count == self.size(fd):
                raise OSError(number, posix.strerror(number))
            return count

    filled(tmp_path, range(34, 37))
    os, verified = Failing(), VerifiedOnce()
    assert prune([tmp_path], "job", Rules(1), os, verified=verified) == []
    assert steps_in(tmp_path) == [34, 35, 36]
    golden.says(caplog.messages)
    os.fails = False
    prune([tmp_path], "job", Rules(1), os, verified=verified)
    assert steps_in(tmp_path) == [36]


def test_each_is_read_once_and_only_if_something_is_to_go(tmp_path: Path) -> None:
    filled(tmp_path, range(34, 37))
    os, verified = Counted(), VerifiedOnce()
    prune([tmp_path], "job", Rules(3), os, verified=verified)
    assert os.read == []
    flipped(tmp_path, 36)
    for _ in range(2):
        prune([tmp_path], "job", Rules(1), os, verified=verified)
        assert (os.read, steps_in(tmp_path)) == ([36, 35], [35, 36])
    filled(tmp_path, range(37, 39), PERIODIC.again(generation=2))
    prune([tmp_path], "job", Rules(2), os, verified=verified)
    assert (os.read, steps_in(tmp_path)) == ([36, 35, 38], [36, 37, 38])


def test_one_look_reads_nothing_twice_where_nobody_remembers_for_it(tmp_path: Path) -> None:
    filled(tmp_path, range(34, 37))
    os = Counted()
    assert len(prune([tmp_path], "job", Rules(1), os)) == 2
    assert os.read == [36]


def test_what_is_written_again_is_read_again(tmp_path: Path) -> None:
    """A person has put the right file back, or what was sound has been damaged since."""
    filled(tmp_path, range(34, 37))
    verified = VerifiedOnce()
    flipped(tmp_path, 36)
    prune([tmp_path], "job", Rules(1), verified=verified)
    assert steps_in(tmp_path) == [35, 36]
    flipped(tmp_path, 36)
    made_plan = plan([tmp_path], "job", Rules(1), verified=verified)
    assert [one.said.global_step for one in made_plan.remove] == [35]
    flipped(tmp_path, 36)
    [outcome] = carry_out(made_plan, verified=verified)
    golden.says(outcome.left)
    assert steps_in(tmp_path) == [35, 36]


def test_one_that_is_replaced_while_it_is_read_is_not_called_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(Os):
        came = False

        def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
            count = super().preadv(fd, views, offset)
            if not self.came and "step_36/rank_0" in name_of(fd) and count == self.size(fd):
                self.came = True
                PERIODIC.again(generation=2, seed=9).save(tmp_path, 36)
            return count

    filled(tmp_path, range(34, 37))
    assert prune([tmp_path], "job", Rules(1), Late()) == []
    golden.says(caplog.messages)
    assert sound_in(tmp_path) == [34, 35, 36]


def test_a_large_one_is_read_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lastwords.checkpoint.publish.TABLES_BYTES_MAX", 0)
    monkeypatch.setattr("lastwords.checkpoint.manifest.EXAMINED_BYTES_MAX", 0)
    filled(tmp_path, range(34, 37))
    for file in (layout.checkpoint_dir(tmp_path, 36) / "rank_1").glob("*.ckpt"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    prune([tmp_path], "job", Rules(1))
    assert (steps_in(tmp_path), sound_in(tmp_path)) == ([35, 36], [35])


def test_a_name_that_no_job_can_have_is_refused(tmp_path: Path) -> None:
    with golden.raises(ConfigError):
        plan([tmp_path], "two/jobs", Rules(1))
