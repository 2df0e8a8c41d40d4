"""Who starts in a directory: no two starts draw one generation, and a restart knows which job it is."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from lastwords.checkpoint import layout, starts
from lastwords.checkpoint.starts import Launch, Start, draw
from lastwords.checkpoint.system import REAL_OS, Os
from lastwords.errors import ConfigError, StorageError
from tests import golden
from tests.checkpoint.simulated_disk import Content, SimulatedOs
from tests.checkpoint.states import Job

ALONE = Launch(run="8f3a", agent="/tmp/torchelastic_a/8f3a_b", endpoint="node-1:40001", process="here/1/1")


def again(launch: Launch, **changes: object) -> Launch:
    """The next start, as torchrun makes it."""
    return dataclasses.replace(launch, process="here/2/2", restarted=True, **changes)  # type: ignore[arg-type]


def test_starts_at_once_in_one_directory_draw_different_generations(tmp_path: Path) -> None:
    drawn: list[int] = []

    def several() -> None:
        for _ in range(8):
            drawn.append(draw([tmp_path], Launch()).generation)

    threads = [threading.Thread(target=several) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(drawn) == list(range(1, 33))


def test_a_start_that_looked_before_another_one_drew_draws_the_next_generation(tmp_path: Path) -> None:
    class Slow(Os):
        raced = False

        def create(self, path: Path, *, direct: bool) -> int:
            if not self.raced:
                self.raced = True
                assert draw([tmp_path], Launch()).generation == 1
            return super().create(path, direct=direct)

    assert draw([tmp_path], Launch(), Slow()).generation == 2


@pytest.mark.parametrize("content", list(Content))
def test_a_power_loss_at_any_time_never_gives_a_generation_twice(content: Content) -> None:
    disk = SimulatedOs()
    disk.mkdir(Path("/ckpt"))
    sync(disk, Path("/"))
    draw([Path("/ckpt")], ALONE, disk)
    newest = draw([Path("/ckpt")], again(ALONE), disk)
    after = disk.crash((), content)
    next_one = draw([Path("/ckpt")], again(again(ALONE)), after)
    assert (next_one.generation, next_one.job) == (newest.generation + 1, newest.job)


def test_without_fsync_a_power_loss_gives_a_generation_twice() -> None:
    """Negative control of the one before."""
    disk = SimulatedOs()
    disk.mkdir(Path("/ckpt"))
    sync(disk, Path("/"))
    disk.skip_fsync = lambda path: True
    assert draw([Path("/ckpt")], ALONE, disk).generation == 1
    assert draw([Path("/ckpt")], ALONE, disk.crash((), Content.LOST)).generation == 1


def sync(disk: SimulatedOs, path: Path) -> None:
    fd = disk.open_directory(path)
    disk.fsync(fd)
    disk.close(fd)


@pytest.mark.parametrize("torn", [b"", b'{\n"che', bytes(300)])
def test_a_torn_file_of_a_start_still_takes_its_number(tmp_path: Path, torn: bytes) -> None:
    for _ in range(5):
        draw([tmp_path], ALONE)
    (tmp_path / layout.start_name(5)).write_bytes(torn)
    assert draw([tmp_path], ALONE).generation == 6


def test_a_lost_count_is_found_in_what_else_is_there(tmp_path: Path) -> None:
    assert draw([tmp_path], Launch()).generation == 1
    saved = Job(generation=7).save(tmp_path, 30)
    assert draw([tmp_path], Launch()).generation == 8
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/controller-digits-g11.log").touch()
    assert draw([tmp_path], Launch()).generation == 12
    layout.claim_path(tmp_path, "digits", 20).touch()
    assert draw([tmp_path], Launch()).generation == 21
    fallback = tmp_path / "fallback"
    Job(generation=40).write(fallback, 30)
    assert draw([tmp_path, fallback], Launch()).generation == 41
    assert saved.exists()


def test_a_directory_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="listing"):
        draw([tmp_path / "nowhere"], Launch())


# ---------------------------------------------------------------------- which job it is


def test_a_start_by_hand_is_a_job_of_its_own(tmp_path: Path) -> None:
    by_hand = Launch(process="here/1/1")
    first, second = draw([tmp_path], by_hand), draw([tmp_path], by_hand)
    assert first.job != second.job
    assert not second.restarted


def test_a_restart_by_the_same_torchrun_is_the_same_job(tmp_path: Path) -> None:
    first = draw([tmp_path], ALONE)
    draw([tmp_path], dataclasses.replace(ALONE, run="77aa", agent="/tmp/torchelastic_c/77aa_d"))  # somebody else
    second = draw([tmp_path], again(ALONE, endpoint="node-1:53987"))
    assert (second.job, second.restarted) == (first.job, True)


@pytest.mark.parametrize("whole", [False, True], ids=["the starts", "the directory"])
def test_a_job_whose_starts_are_deleted_while_it_runs_keeps_its_name_under_its_torchrun(
    tmp_path: Path, whole: bool
) -> None:
    root = tmp_path / "ckpt"
    root.mkdir()
    first = draw([root], ALONE)
    for path in root.iterdir():
        path.unlink()
    if whole:
        root.rmdir()
        root.mkdir()
    restart = draw([root], again(ALONE, endpoint="node-1:53987"))
    assert (restart.job, restart.restarted) == (first.job, True)


def test_jobs_of_other_directories_torchruns_and_run_ids_have_other_names(tmp_path: Path) -> None:
    names = []
    for number, launch in enumerate((ALONE, ALONE, again(ALONE, run="77aa"), again(ALONE, agent="/tmp/c/8f3a_d"))):
        root = tmp_path / str(number)
        root.mkdir()
        names.append(draw([root], launch).job)
    assert len(set(names)) == len(names)
    # Without a run id, or without torchrun, nothing tells two jobs apart: the name is random.
    for unknown in (dataclasses.replace(ALONE, run=""), dataclasses.replace(ALONE, agent="")):
        assert draw([tmp_path], unknown).job != draw([tmp_path], unknown).job


def test_a_restart_whose_leader_is_another_nodes_agent_is_the_same_job(tmp_path: Path) -> None:
    first = draw([tmp_path], ALONE)
    elsewhere = again(ALONE, agent="/tmp/torchelastic_e/8f3a_f", endpoint="node-2:41111")
    assert draw([tmp_path], elsewhere).job == first.job


def test_torchrun_that_starts_its_workers_restartwithout_a_failure_restarts_the_job(tmp_path: Path) -> None:
    """A node that joins or leaves: torchrun does not count that."""
    draw([tmp_path], ALONE)
    assert draw([tmp_path], dataclasses.replace(ALONE, process="here/2/2")).restarted
    # Negative control: the same process registers twice, as scripts with two trainings do.
    assert not draw([tmp_path], dataclasses.replace(ALONE, process="here/2/2")).restarted


def test_a_run_id_of_ones_own_that_is_launched_by_hand_restartis_another_job(tmp_path: Path) -> None:
    first = draw([tmp_path], ALONE)
    second = draw([tmp_path], dataclasses.replace(ALONE, agent="/tmp/torchelastic_e/8f3a_f", process="here/9/9"))
    assert first.job != second.job


def test_without_a_run_id_the_meeting_place_tells_jobs_apart(tmp_path: Path) -> None:
    one = Launch(run="none", endpoint="node-1:29500")
    other = Launch(run="none", endpoint="node-1:29501")
    first, _ = draw([tmp_path], one), draw([tmp_path], other)
    assert draw([tmp_path], again(one)).job == first.job
    with pytest.raises(ConfigError, match="LASTWORDS_JOB"):
        draw([tmp_path], again(one, endpoint="node-1:29502"))


def test_a_run_id_that_several_jobs_have_leads_to_none_but_by_the_meeting_place(tmp_path: Path) -> None:
    """`--rdzv-id=100`, as in torch's own examples, and a restart under another node's agent."""
    one = Launch(run="100", agent="/tmp/torchelastic_a/100_x", endpoint="node-1:40001", process="here/1/1")
    other = Launch(run="100", agent="/tmp/torchelastic_b/100_y", endpoint="node-2:40002", process="there/1/1")
    first, second = draw([tmp_path], one), draw([tmp_path], other)
    moved = again(one, agent="/tmp/torchelastic_c/100_z", endpoint="node-3:40003")
    with golden.raises(ConfigError):
        draw([tmp_path], moved)
    assert draw([tmp_path], dataclasses.replace(moved, endpoint=one.endpoint)).job == first.job
    assert draw([tmp_path], again(other, endpoint="node-4:1")).job == second.job  # its own torchrun


def test_a_name_that_the_user_gave_is_the_jobs_name_in_every_start(tmp_path: Path) -> None:
    named = Launch(job="digits")
    assert [draw([tmp_path], named).job for _ in range(2)] == ["digits", "digits"]


def test_a_restart_remembers_from_whose_checkpoints_its_job_has_resumed(tmp_path: Path) -> None:
    first = draw([tmp_path], ALONE)
    starts.note_resumed(tmp_path, first.generation, "grandfather")
    starts.note_resumed(tmp_path, first.generation, "grandfather")
    second = draw([tmp_path], again(ALONE))
    assert second.jobs == ("grandfather",)
    assert draw([tmp_path], again(again(ALONE))).jobs == ("grandfather",)


def test_only_so_many_starts_are_remembered_and_no_number_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "STARTS_KEPT", 3)
    first = draw([tmp_path], ALONE)
    starts.note_resumed(tmp_path, first.generation, "grandfather")
    for _ in range(5):
        newest = draw([tmp_path], again(ALONE))
    assert (newest.generation, newest.jobs) == (6, ("grandfather",))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_job_that_runs_for_long_is_not_forgotten_for_others_that_start_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "STARTS_KEPT", 3)
    first = draw([tmp_path], ALONE)
    starts.note_resumed(tmp_path, first.generation, "grandfather")
    for number in range(5):
        draw([tmp_path], Launch(run=f"other-{number}"))
    second = draw([tmp_path], again(ALONE))
    assert (second.job, second.jobs) == (first.job, ("grandfather",))


@pytest.mark.parametrize("lives", [True, False])
def test_a_start_whose_controller_lives_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    """Two starts of one LASTWORDS_JOB live at once; the older one is no longer its job's newest."""
    monkeypatch.setattr(starts, "STARTS_KEPT", 3)
    claim = starts.Claim.take(tmp_path, "digits", draw([tmp_path], Launch(job="digits")).generation)
    assert claim is not None
    if not lives:
        claim.release()
    for _ in range(5):
        draw([tmp_path], Launch(job="digits"))
    assert (tmp_path / layout.start_name(1)).exists() is lives


def test_nor_is_one_whose_controller_was_killed_and_may_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "STARTS_KEPT", 3)
    for _ in range(5):
        draw(
            [tmp_path], Launch(job="digits"), may_be_followed=lambda job, generation: (job, generation) == ("digits", 1)
        )
    found = sorted(
        start.generation for start in starts.read_starts(tmp_path, [path.name for path in tmp_path.iterdir()])
    )
    assert found == [1, 3, 4, 5]


def test_a_start_comes_back_from_its_file(tmp_path: Path) -> None:
    start = Start(3, "digits", dataclasses.replace(ALONE, job=""), ("a", "b"))
    assert Start.decode(start.encode(), tmp_path) == start
    assert REAL_OS.exists(tmp_path)


# ------------------------------------------------------------------ a fallback that two jobs share


def test_two_jobs_of_one_name_that_share_a_fallback_draw_different_generations(tmp_path: Path) -> None:
    one, two, shared = (tmp_path / name for name in ("one", "two", "shared"))
    for root in (one, two, shared):
        root.mkdir()
    drawn = [draw([root, shared], Launch(job="a")).generation for root in (one, two, one, two)]
    assert drawn == [1, 2, 3, 4]
    assert len({layout.TemporaryName(5, "a", number, 1, 1).under(shared) for number in drawn}) == 4
    assert len(list(shared.iterdir())) == 1, "the newest number is enough"


def test_a_number_that_was_taken_in_the_fallback_meanwhile_is_not_used(tmp_path: Path) -> None:
    one, shared = tmp_path / "one", tmp_path / "shared"
    one.mkdir()
    shared.mkdir()

    class Slow(Os):
        raced = False

        def create(self, path: Path, *, direct: bool) -> int:
            if not self.raced:
                self.raced = True
                (shared / layout.start_name(1)).touch()
            return super().create(path, direct=direct)

    assert draw([one, shared], Launch(job="a"), Slow()).generation == 2


def test_a_fallback_that_is_not_there_keeps_nobody_from_starting(tmp_path: Path) -> None:
    assert draw([tmp_path, tmp_path / "missing"], Launch(job="a")).generation == 1


def test_a_fallback_that_is_the_same_directory_by_another_name_is_refused(tmp_path: Path) -> None:
    root, link = tmp_path / "root", tmp_path / "link"
    root.mkdir()
    link.symlink_to(root)
    with golden.raises(ConfigError):
        draw([root, link], Launch())
    assert [*root.iterdir()] == [], "no generation was drawn"
    assert draw([link], Launch()).generation == 1, "the control: it may be a link"


def test_a_fallback_that_is_another_jobs_directory_keeps_that_jobs_starts(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    theirs.mkdir()
    draw([theirs], Launch(job="other"))
    assert draw([mine, theirs], Launch(job="a")).generation == 2
    assert [start.job for start in starts.read_starts(theirs, [path.name for path in theirs.iterdir()])] == ["other"]


def test_starts_by_hand_are_not_remembered_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "STARTS_KEPT", 4)
    monkeypatch.setattr(starts, "STARTS_MAX", 8)
    for generation in range(1, 21):
        assert draw([tmp_path], Launch()).generation == generation
    assert len(list(tmp_path.iterdir())) == 8
