"""Training that stands still: which rank is behind, where the others wait, and what becomes of it."""

from __future__ import annotations

import pytest

from lastwords.controller.events import ControllerOptions, JobStage, Send
from lastwords.controller.loop import ANSWER_S, QUIET_STEPS
from lastwords.core_events import Log
from lastwords.vocabulary import Exit, ExitKind, Freeze, Left, Notice, Phase, Resume, Save, Stack, Stand, Status
from tests import golden
from tests.controller.job_driver import GENERATION, JobDriver, computing

NOTICE_S = ControllerOptions().hang_notice_s
STEP_S = 0.5
NEWEST = 8


def training(ranks: int = 4, options: ControllerOptions | None = None, step_s: float = STEP_S) -> JobDriver:
    """A job that has ended `NEWEST` steps, the newest one just now."""
    job = JobDriver(ranks, options=options)
    job.begin_loop(0, 0)
    for step in range(NEWEST + 1):
        job.at(step)
        job.wait(step_s if step < NEWEST else 0.0)
    return job


def stuck(job: JobDriver, late: tuple[int, ...] = (2,), step: int = NEWEST) -> None:
    """All ranks but some are in the backward pass of the next step."""
    for rank in range(job.ranks):
        places = ("", "model.py:12") if rank in late else ("train.py:41", "")
        job.hear(Status(rank, GENERATION, computing(step), *places))


def said(job: JobDriver) -> list[tuple[int, str, bool]]:
    """Lines that ranks print since the last call, which rank, and whether with its stack."""
    orders = [(e.rank, e.order) for e in job.effects if isinstance(e, Send) and isinstance(e.order, Notice)]
    return [(rank, order.text, order.stack) for rank, order in orders]


def test_the_rank_that_is_behind_is_asked_for_its_stack_and_then_named() -> None:
    job = training()
    stuck(job)
    job.wait(NOTICE_S - 0.1)
    assert said(job) == []
    job.wait(0.1)
    ((rank, text, stack),) = said(job)
    assert (rank, stack) == (2, True)
    golden.says(text)
    job.hear(Stack(2, GENERATION, "model.py ..."))
    job.wait(ANSWER_S)
    ((rank, text, stack),) = said(job)
    assert (rank, stack) == (0, False)
    golden.says(text)
    assert any(isinstance(effect, Log) and effect.text == text for effect in job.effects)
    assert job.core.state is JobStage.WATCHING


def test_steps_that_are_over_before_the_first_word_of_them_count() -> None:
    """Ranks say where they are ten times a second: the first word may be of the last step that ever ends."""
    job = JobDriver(4)
    job.begin_loop(0, 0)
    job.at(NEWEST)
    stuck(job)
    job.wait(NOTICE_S + ANSWER_S)
    assert [rank for rank, _, stack in said(job) if stack] == [2]


def test_a_rank_that_does_not_answer_is_said_not_to() -> None:
    job = training()
    stuck(job)
    job.wait(NOTICE_S + ANSWER_S)
    golden.says([text for _, text, stack in said(job) if not stack])


def test_it_is_said_again_after_growing_pauses_and_once_more_when_a_step_ends() -> None:
    job = training()
    stuck(job)
    instants = []
    for second in range(1, 400):
        job.wait(1.0)
        instants += [second for _, _, stack in said(job) if not stack]
    assert instants == [11, 32, 97, 290]
    job.hear(Status(0, GENERATION, computing(NEWEST + 1)))
    ((_, text, _),) = said(job)
    golden.says(text)
    job.wait(NOTICE_S - 0.1)
    assert said(job) == []
    job.wait(0.1)
    assert said(job) != [], "the time starts anew"


@pytest.mark.parametrize("busy", [1, 3])
def test_ranks_whose_steps_end_are_never_named_however_long_they_take(busy: int) -> None:
    """A rank that validates between two steps for as long as nine of them take, say."""
    job = training(step_s=6.0)
    for step in range(NEWEST + 1, NEWEST + 6):
        for rank in range(job.ranks):
            places = ("", f"evaluate.py:{step}") if rank == busy else ("train.py:41", "")
            job.hear(Status(rank, GENERATION, computing(step - 1), *places))
        job.wait(6.0 * QUIET_STEPS - 1.0)
        assert said(job) == []
        job.at(step)
        assert said(job) == []


def test_the_control_the_same_wait_is_said_where_steps_are_short() -> None:
    job = training()
    stuck(job)
    job.wait(6.0 * QUIET_STEPS - 1.0)
    assert said(job) != []


def test_who_waits_is_not_behind() -> None:
    """At the same point of the step, but in a collective; and the lowest point counts before that."""
    job = training(3)
    for rank, stand, place in ((0, computing(8), "a.py:1"), (1, Stand(Phase.READY, 9), ""), (2, computing(8), "")):
        job.hear(Status(rank, GENERATION, stand, place))
    job.wait(NOTICE_S)
    assert [rank for rank, _, stack in said(job) if stack] == [2]
    job.wait(ANSWER_S)
    golden.says([text for _, text, stack in said(job) if not stack])


def test_where_all_are_at_one_point_nobody_is_called_behind() -> None:
    job = training(3)
    stuck(job, late=())
    job.wait(NOTICE_S + ANSWER_S)
    golden.says([text for _, text, stack in said(job) if not stack])


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_the_first_steps_may_take_long(ended: int) -> None:
    job = JobDriver(3)
    job.begin_loop(0, 0)
    for step in range(ended + 1):
        job.at(step)
        job.wait(STEP_S)
    job.wait(1000.0)
    assert said(job) == []


def test_of_two_ranks_one_is_the_other() -> None:
    job = training(2)
    stuck(job, late=(1,))
    job.wait(NOTICE_S + 2 * ANSWER_S)
    golden.says(next(text for _, text, stack in said(job) if not stack))


def test_nothing_is_said_of_ranks_that_have_left_and_the_rule_for_those_is_another() -> None:
    job = training()
    job.hear(Left(0, GENERATION, Stand(Phase.DONE, NEWEST)))
    job.wait(NOTICE_S + 2 * ANSWER_S)
    assert not any(stack for _, _, stack in said(job))


def test_after_a_false_alarm_the_time_starts_anew() -> None:
    job = training()
    job.wait(NOTICE_S - 1.0)
    job.close(1)
    job.wait(1.5)
    job.hello(1, stand=computing(NEWEST))
    for rank in range(4):
        job.settle(rank, computing(NEWEST))
    assert job.sent(Resume)
    job.wait(NOTICE_S - 0.1)
    assert said(job) == []
    job.wait(0.2)
    assert said(job) != []


def asked(job: JobDriver) -> list[int]:
    """Ranks that are asked for their stacks, in that order."""
    return [rank for rank, _, stack in said(job) if stack]


def test_before_an_incident_some_of_the_others_are_asked_for_their_stacks_too() -> None:
    job = training(20, ControllerOptions(hang_timeout_s=60.0))
    stuck(job, late=(17, 18))
    job.wait(60.0)
    assert asked(job) == [17, 18, 17, 18, 17, 18, 0, 1, 2, 3, 4, 5], "notices after 10 s and 32 s, then the incident"
    job.wait(ANSWER_S)
    golden.says(job.sent(Freeze)[0].reason)


def test_an_incident_that_is_due_while_stacks_are_waited_for_has_all_of_them() -> None:
    """The notice is due a moment before it."""
    job = training(3, ControllerOptions(hang_timeout_s=NOTICE_S + ANSWER_S / 2))
    stuck(job, late=(1,))
    job.wait(NOTICE_S + 2 * ANSWER_S)
    assert asked(job) == [1, 1, 0, 2]
    assert job.core.state is JobStage.SETTLING


def test_by_default_a_hang_is_no_incident() -> None:
    job = training()
    stuck(job)
    job.wait(100_000.0)
    assert not job.sent(Freeze)
    assert job.core.state is JobStage.WATCHING


def test_with_a_time_out_it_is_one_and_whoever_can_be_reached_saves() -> None:
    job = training(3, ControllerOptions(hang_timeout_s=60.0))
    stuck(job, late=(1,))
    job.wait(60.0)
    assert not job.sent(Freeze)
    assert asked(job)[-3:] == [1, 0, 2], "the stacks come before the incident, and that of the stuck rank first"
    job.hear(Stack(1, GENERATION, "model.py ..."))
    job.wait(ANSWER_S)
    assert sorted(job.sent(Freeze)) == [0, 1, 2]
    golden.says(job.sent(Freeze)[0].reason)
    for rank in (0, 2):
        job.settle(rank, computing(NEWEST))
    job.wait(ControllerOptions().settle_timeout_s)
    (writer,) = {rank for rank, order in job.sent(Save).items() if order.units}
    assert writer == 0
    job.progress(0, 10)
    job.saved(0, NEWEST)
    job.saved(2, NEWEST)
    job.verified()
    job.published()
    orders = job.sent(Exit)
    assert {order.kind for order in orders.values()} == {ExitKind.SAVED}
    assert all(order.cause_ranks == (1,) for order in orders.values())
    assert 1 in orders
