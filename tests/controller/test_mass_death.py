"""Many ranks die at once: a host with all of its ranks, or half of the job."""

from __future__ import annotations

import pytest

from lastwords.controller.core import ControllerCore
from lastwords.controller.events import ControllerOptions, Effect, JobStage, Remember
from lastwords.vocabulary import DeathSource, Exit, ExitKind, PeerDied, Save
from tests import golden
from tests.controller.job_driver import GENERATION, JobDriver, computing

OPTIONS = ControllerOptions(silence_timeout_s=10.0, lost_confirm_s=2.0)
RANKS, EACH = 512, 8


class Job(JobDriver):
    """Counts what is kept for the next controller."""

    kept: tuple[Remember, ...] = ()

    def tell(self, event: object) -> list[Effect]:
        effects = super().tell(event)  # type: ignore[arg-type]
        self.kept = (*self.kept, *(effect for effect in effects if isinstance(effect, Remember)))
        return effects


def training(ranks: int, hosts: str, units: tuple[str, ...] = ()) -> Job:
    job = Job(ranks, options=OPTIONS, hosts=hosts, units=units)
    job.begin_loop()
    job.at(6)
    job.kept = ()
    return job


def large() -> Job:
    return training(RANKS, "".join(chr(0x4E00 + rank // EACH) for rank in range(RANKS)))


def test_of_many_deaths_at_once_what_is_kept_is_written_a_few_times() -> None:
    job = large()
    for rank in range(RANKS // 2, RANKS):
        job.kill(rank)
    assert len(job.kept) == 1, "the first death freezes all others; nothing is done about the next ones yet"
    for rank in range(RANKS // 2):
        job.settle(rank, computing(6))
    assert job.core.state is JobStage.SAVING
    assert len(job.kept) == 2
    assert {gone.rank for gone in job.kept[-1].memory.gone} == set(range(RANKS // 2, RANKS)), "before they are ordered"


def test_the_control_kept_at_each_event_it_would_be_written_for_each_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lastwords.controller.core.Log", ())
    job = large()
    for rank in range(RANKS // 2, RANKS):
        job.kill(rank)
    assert len(job.kept) == RANKS // 2


def test_after_a_death_that_nothing_was_done_about_the_next_controller_misses_the_rank() -> None:
    """It has not been kept; the rank does not come back, so it is asked for."""
    job = training(6, "aabbcc")
    job.kill(4)
    job.kill(5)
    assert {gone.rank for gone in job.kept[-1].memory.gone} == {4}
    job.core = ControllerCore(6, GENERATION, OPTIONS, job.kept[-1])
    for rank in range(4):
        job.hello(rank, stand=computing(6))
    job.wait(OPTIONS.lost_confirm_s)
    for rank in range(4):
        job.settle(rank, computing(6), incident=job.core.incident)
    job.wait(OPTIONS.lost_confirm_s)
    assert {order.step for order in job.sent(Save).values()} == {6}
    assert job.core.members.dead == {4, 5}


@pytest.mark.parametrize("reported", [False, True])
def test_a_host_that_is_lost_with_all_its_ranks_is_one_incident(reported: bool) -> None:
    """Its last rank may just have told of another one's death, which shortens the wait for the rest."""
    job = training(6, "aabbcc")
    others = (0, 1, 4, 5)
    if reported:
        job.hear(PeerDied(3, GENERATION, 2, DeathSource.ROBUST_MUTEX))
    for rank in (2, 3):
        job.close(rank)
    for rank in others:
        job.settle(rank, computing(6))
    wait_s = OPTIONS.lost_confirm_s if reported else OPTIONS.silence_timeout_s
    job.wait(wait_s - 0.1)
    assert job.core.state is JobStage.SETTLING
    job.wait(OPTIONS.lost_confirm_s)
    assert {order.step for order in job.sent(Save).values()} == {6}
    assert job.core.incident == 1
    for rank in others:
        job.saved(rank, 6)
    job.verified()
    job.published()
    exits = job.sent(Exit)
    assert {rank: order.kind for rank, order in exits.items()} == dict.fromkeys(others, ExitKind.SAVED)
    golden.says(exits[0].reason)


def test_what_only_the_lost_host_held_is_lost_and_said_in_one_line() -> None:
    job = training(6, "aabbcc", ("u", "u", "v", "v", "u", "u"))
    for rank in (2, 3):
        job.close(rank)
    for rank in (0, 1, 4, 5):
        job.settle(rank, computing(6))
    job.wait(OPTIONS.silence_timeout_s)
    exits = job.sent(Exit)
    assert {exit_.kind for exit_ in exits.values()} == {ExitKind.NOT_SAVED}
    golden.says(next(iter(exits.values())).reason)
