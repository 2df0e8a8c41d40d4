"""What simulations have found: each bug as the shortest transcript that shows it, with the seed that found it.

Seeds belong to the commit before the one that mends the bug: schedules change as the simulation learns more.
"""

from __future__ import annotations

from lastwords.controller.events import ControllerOptions, JobStage, OutcomeKind, StartVerify
from lastwords.processor.events import SaveFinished
from lastwords.vocabulary import Phase, Proceed, Raised, Save, Settled, Stand, WholeCopy
from tests.controller import job_driver
from tests.controller.job_driver import JobDriver, computing
from tests.processor import rank_driver
from tests.processor.rank_driver import RankDriver, reports


def _ready_and_frozen() -> RankDriver:
    rank = RankDriver()
    rank.walk(Phase.READY, 1)
    rank.freeze()
    assert not rank.core.try_update()
    return rank


def test_a_rank_that_only_copied_black_boxes_can_still_proceed() -> None:
    """Seed 11938: the only unit writer hung, the last rank that could reach the step refused, nothing was saved."""
    rank = _ready_and_frozen()
    rank.save(step=1, units=())
    rank.tell(SaveFinished(1, 1, 10))
    rank.proceed(step=1)
    assert rank.core.try_update()
    rank.core.mark_updated()
    assert rank.core.try_end_step()
    assert reports(rank.core.take_effects())[-1] == Settled(1, rank_driver.GENERATION, 1, 2, computing(1))


def test_a_rank_whose_weights_were_read_for_a_checkpoint_never_proceeds() -> None:
    """Negative control: had they been read, the update would tear the file."""
    rank = _ready_and_frozen()
    rank.save(step=0, units=("replicated",))
    rank.proceed(step=1)
    assert not rank.core.try_update()


def _job(*units: str) -> JobDriver:
    """Ranks 0 and 1 on one host, 2 on another."""
    options = ControllerOptions(has_fallback_target=True)
    return JobDriver(3, hosts="aab", units=units or ("replicated",) * 3, options=options)


def test_a_dead_writers_file_is_used_although_another_directory_was_tried_meanwhile() -> None:
    """Seed 31262: the one file of the newest step was thrown away when a box's file next to it could not be read."""
    job = _job()
    job.kill(1)
    job.settle(0, computing(3))
    job.settle(2, computing(4))
    orders = job.sent(Save)
    assert orders[2].units == ("replicated",)
    assert (orders[0].units, orders[0].target) == ((), 0)
    job.saved(0, 4)
    job.saved(2, 4)
    # when the file of rank 0 cannot be read back, all is to be written to the fallback directory ...
    job.verify_failed(0)
    assert {order.target for order in job.sent(Save).values()} == {1}
    # ... but rank 2 dies before it can; rank 0 gets another chance in the first directory, where its file still lies
    job.kill(2)
    job.wait(0.3)
    again = job.sent(Save)[0]
    assert (again.units, again.target) == ((), 0)
    job.saved(0, 4, again.attempt)
    verify = job.starts()
    assert isinstance(verify, StartVerify)
    assert (verify.step, verify.target, verify.units, verify.writers) == (4, 0, ("replicated",), (0, 2))


def test_a_rank_that_answered_before_it_came_to_the_gate_is_waited_for() -> None:
    """Seed 69123: a frozen rank still computed when it settled; its way to the gate let another one update."""
    job = _job("tp0", "tp1", "tp0")
    job.kill(2)
    job.settle(1, computing(4))
    job.settle(0, computing(5))
    assert job.core.outcome is None, "tp1 has no holder at step 5 yet, but rank 1 must have come to the gate"
    assert not job.sent(Save)
    job.settle(1, Stand(Phase.READY, 5))
    assert job.sent(Proceed)[1] == Proceed(job_driver.GENERATION, 1, 5)


def test_a_rank_that_never_comes_to_the_gate_is_not_waited_for_for_ever() -> None:
    """Negative control: its word was true after all (it raised), so time runs out, and nothing can be saved."""
    job = _job("tp0", "tp1", "tp0")
    job.kill(2)
    job.settle(1, computing(4))
    job.settle(0, computing(5))
    job.wait(30.0)
    assert job.core.outcome is not None
    assert job.core.outcome.kind is OutcomeKind.NOT_SAVED


def _only_writer_hangs(other: Stand) -> JobDriver:
    job = _job()
    job.kill(2)
    job.settle(1, other)
    job.settle(0, computing(1))
    assert [*job.sent(Save)] == [0]
    job.wait(30.0)
    return job


def test_a_step_that_only_an_excluded_rank_had_begun_is_not_owed() -> None:
    """Seeds 7018913, 122152: the writes of rank 0 hang, and it alone had ended the first step. The other one could
    still reach that step, but a rank without progress is no survivor: the run begins again where it had started."""
    core = _only_writer_hangs(other=Stand(Phase.READY, 1)).core
    assert core.outcome is not None
    assert core.outcome.kind is OutcomeKind.NOTHING_TO_SAVE


def test_a_step_that_a_survivor_had_begun_is_written_by_it() -> None:
    """Negative control."""
    core = _only_writer_hangs(other=Stand(Phase.UPDATED, 1)).core
    assert core.outcome is None
    assert core.state is JobStage.SAVING


def test_files_of_a_step_that_is_given_up_for_the_one_before_stay_as_long_as_nothing_is_published() -> None:
    """Seed 1001160: the step before could not be saved either, and the files of the newer one had been removed."""
    job = JobDriver(3, hosts="aab", units=("u0", "u1", "u2"))
    job.hear(Raised(0, job_driver.GENERATION, "out of memory", False, computing(9)))
    for rank, of in enumerate([(0, 1), (0, 1), (2,)]):
        job.settle(rank, computing(9), copies=tuple(WholeCopy(one, 8) for one in of))
    job.saved(0, 9)
    job.kill(1)
    assert {order.step for order in job.sent(Save).values()} == {8}
    assert not job.discards()
    job.kill(2)
    assert job.core.outcome is not None
    assert job.core.outcome.kind is OutcomeKind.NOT_SAVED
    assert job.keeps() == [(1, 9)]


def test_and_are_removed_once_the_one_before_is_published() -> None:
    job = JobDriver(2, units=("u0", "u1"))
    job.hear(Raised(0, job_driver.GENERATION, "out of memory", False, computing(9)))
    for rank in range(2):
        job.settle(rank, computing(9), copies=(WholeCopy(0, 8), WholeCopy(1, 8)))
    job.saved(0, 9)
    job.kill(1)
    job.saved(0, 8, attempt=2)
    job.verified(attempt=2)
    job.published(attempt=2)
    assert job.discards() == [(1, 9)]
