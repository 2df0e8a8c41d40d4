"""A controller follows one that was killed: what it knows, whom it waits for, and what it finishes."""

from __future__ import annotations

import pytest

from lastwords.controller.core import ControllerCore
from lastwords.controller.events import (
    ControllerOptions,
    Died,
    Discard,
    FromRank,
    JobStage,
    KeepParts,
    OutcomeKind,
    Published,
    PublishFailed,
    Remember,
    StartPublish,
    Watched,
)
from lastwords.controller.loop import QUIET_STEPS
from lastwords.core_events import Tick
from lastwords.vocabulary import (
    DeathSource,
    Exit,
    ExitKind,
    Freeze,
    Left,
    LoopBegin,
    LoopGo,
    Notice,
    Phase,
    Release,
    Resume,
    Save,
    SaveWanted,
    Schedule,
    Stand,
    Welcome,
)
from tests import golden
from tests.controller.job_driver import GENERATION, JobDriver, computing

OPTIONS = ControllerOptions(lost_confirm_s=2.0, silence_timeout_s=10.0, exit_timeout_s=5.0)


class Line(JobDriver):
    """A job whose controller may be followed by another one; what was remembered last survives it."""

    kept: Remember | None = None

    def tell(self, event: object) -> list:  # type: ignore[type-arg]
        effects = super().tell(event)  # type: ignore[arg-type]
        places = [place for place, effect in enumerate(effects) if isinstance(effect, Remember)]
        assert places in ([], [0]), "what is remembered comes before everything that follows from it"
        if places:
            self.kept = effects[0]  # type: ignore[assignment]
        return effects

    def follow(self) -> None:
        """kill -9 of the controller, and another one."""
        self.core = ControllerCore(self.ranks, GENERATION, OPTIONS, self.kept)
        self.now_s += 0.5
        self.tell(Tick())

    def come_back(self, *ranks: int, stand: Stand | None = None) -> None:
        """They say Hello again, and where they stand."""
        for rank in ranks:
            self.hello(rank, stand=stand or computing(6))


def training(ranks: int = 3, start_step: int = 0, schedule: Schedule | None = None) -> Line:
    """A job that has ended step 6."""
    line = Line(ranks, options=OPTIONS)
    line.begin_loop(start_step=start_step, **({} if schedule is None else {"schedule": schedule}))
    line.at(6)
    return line


def saving(line: Line) -> None:
    """Rank 2 has died, and rank 0 writes step 6."""
    line.kill(2)
    for rank in (0, 1):
        line.settle(rank, computing(6))
    assert line.core.state is JobStage.SAVING


def test_who_serves_stands_in_what_is_kept_before_anybody_hears_of_it() -> None:
    """Else the state file names the one that was killed, until a rank is back, and a rank starts one more."""
    line = training()
    line.follow()
    assert line.effects == [line.kept]


def test_a_job_that_trains_goes_on_and_is_saved_when_a_rank_dies() -> None:
    line = training(start_step=4)
    line.follow()
    line.come_back(0, 1, 2)
    assert line.core.state is JobStage.WATCHING
    assert line.sent(Welcome).keys() == {2}
    line.kill(2)
    assert line.sent(Freeze).keys() == {0, 1}
    for rank in (0, 1):
        line.settle(rank, computing(6))
    (order,) = line.sent(Save).values()
    assert (order.step, order.incident) == (6, 1)


def test_up_to_the_step_of_the_start_there_is_nothing_to_save() -> None:
    line = training(start_step=6)
    line.follow()
    line.come_back(0, 1, 2)
    line.kill(2)
    line.settle(0, computing(6))
    line.settle(1, computing(6))
    assert {order.kind for order in line.sent(Exit).values()} == {ExitKind.NOTHING_TO_SAVE}


def test_a_rank_that_died_meanwhile_is_known_when_the_host_watch_says_so() -> None:
    line = training()
    line.follow()
    line.tell(Died(2, DeathSource.ROBUST_MUTEX))
    line.come_back(0, 1)
    assert line.sent(Freeze).keys() == {1}
    line.settle(0, computing(6))
    line.settle(1, computing(6))
    assert line.sent(Save).keys() == {0}


def test_a_rank_that_does_not_come_back_is_in_doubt_and_then_dead() -> None:
    line = training()
    line.follow()
    line.come_back(0, 1)
    line.wait(OPTIONS.lost_confirm_s - 0.1)
    assert line.core.state is JobStage.WATCHING
    line.wait(0.2)
    assert line.sent(Freeze).keys() == {0, 1}
    line.settle(0, computing(6))
    line.settle(1, computing(6))
    line.wait(OPTIONS.silence_timeout_s)
    assert line.sent(Save).keys() == {0}


def test_a_rank_that_comes_back_late_stops_nobody_for_long() -> None:
    line = training()
    line.follow()
    line.come_back(0, 1)
    line.wait(3.0)
    assert line.core.state is JobStage.SETTLING
    line.settle(0, computing(6))
    line.settle(1, computing(6))
    line.come_back(2)
    assert line.core.state is JobStage.WATCHING
    assert line.sent(Resume).keys() == {0, 1, 2}


def test_a_false_alarm_that_is_over_stays_over() -> None:
    line = training()
    line.close(2)
    line.come_back(2)
    assert line.core.incident == 1
    line.follow()
    line.come_back(0, 1, 2)
    line.settle(0, computing(6))
    assert line.sent(Resume)[0].incident == 1
    line.kill(1)
    assert line.sent(Freeze)[0].incident == 2


def test_doubts_of_the_one_before_are_forgotten_and_come_again() -> None:
    line = training()
    line.close(2)
    assert line.core.state is JobStage.SETTLING
    line.follow()
    line.come_back(0, 1, stand=computing(6))
    assert line.sent(Resume)[1].incident == 1
    line.wait(OPTIONS.lost_confirm_s)
    assert line.sent(Freeze)[0].incident == 2


def test_an_incident_that_cannot_be_a_false_alarm_begins_anew() -> None:
    line = training()
    saving(line)
    line.saved(0, 6)
    line.follow()
    line.come_back(0, 1)
    assert line.sent(Freeze)[1].incident == 2
    assert line.sent(Freeze)[1].reason == "rank 2 died (killed or crashed)"
    line.settle(0, computing(6), incident=1)
    line.settle(1, computing(6), incident=1)
    assert line.core.state is JobStage.SETTLING, "answers to the older incident do not count"
    line.settle(0, computing(6), incident=2)
    line.settle(1, computing(6), incident=2)
    assert line.sent(Save)[0].incident == 2
    line.saved(0, 6, incident=1)
    assert line.core.state is JobStage.SAVING
    line.saved(0, 6, incident=2)
    line.verified(incident=2)
    line.published(incident=2)
    assert line.core.outcome is not None
    assert Discard(1, 1, 6, 0) in line.effects, "what the older one had written is not needed"


def test_what_the_older_one_has_written_is_kept_where_nothing_is_saved() -> None:
    line = training()
    saving(line)
    line.saved(0, 6)
    line.follow()
    for rank in range(2):
        line.kill(rank)
    assert KeepParts(1, 1, 6, 0) in line.effects


def publishing(line: Line) -> StartPublish:
    saving(line)
    line.saved(0, 6)
    line.verified()
    order = line.starts()
    assert isinstance(order, StartPublish)
    return order


def test_what_only_lacked_its_name_is_published_whoever_lives() -> None:
    line = training()
    order = publishing(line)
    line.follow()
    assert order in line.effects
    for rank in range(2):
        line.kill(rank)
    line = training()
    publishing(line)
    line.follow()
    line.come_back(0, 1)
    line.tell(Published(1, 1, "/c/step_6"))
    assert {(order.kind, order.step, order.path) for order in line.sent(Exit).values()} == {
        (ExitKind.SAVED, 6, "/c/step_6")
    }
    line.settle(0, computing(6), incident=2)
    assert not line.sent(Save)


def test_what_cannot_be_published_is_saved_again() -> None:
    line = training()
    publishing(line)
    line.follow()
    line.come_back(0, 1)
    line.tell(PublishFailed(1, 1, "read-only file system"))
    line.settle(0, computing(6), incident=2)
    line.settle(1, computing(6), incident=2)
    assert line.sent(Save)[0].incident == 2
    line.tell(Published(1, 1, "/c/step_6"))
    assert line.core.outcome is None


def test_a_verdict_is_told_to_those_who_have_not_heard_it() -> None:
    line = training()
    publishing(line)
    line.published()
    line.follow()
    assert line.core.state is JobStage.EXITING
    line.come_back(1)
    assert line.sent(Exit)[1].path == "/c/step"
    assert line.sent(Exit)[1].cause_ranks == (2,)
    line.wait(OPTIONS.exit_timeout_s + 1.0)
    assert line.stops()
    assert line.core.outcome is not None
    assert line.core.outcome.kind is OutcomeKind.SAVED


def test_ranks_that_have_left_are_released() -> None:
    line = training(ranks=2)
    for rank in range(2):
        line.hear(Left(rank, GENERATION, Stand(Phase.DONE, 20)))
    assert line.core.state is JobStage.RELEASING
    line.follow()
    line.come_back(1, stand=Stand(Phase.DONE, 20))
    assert line.sent(Release).keys() == {1}


def test_who_had_left_and_died_is_not_waited_for() -> None:
    line = training(ranks=2)
    line.at(20)
    line.hear(Left(0, GENERATION, Stand(Phase.DONE, 20)))
    line.kill(0)
    assert line.core.state is JobStage.WATCHING
    line.follow()
    line.come_back(1, stand=computing(20))
    line.hear(Left(1, GENERATION, Stand(Phase.DONE, 20)))
    assert line.sent(Release).keys() == {1}


def test_a_rank_that_missed_the_start_of_the_loop_is_told() -> None:
    line = training()
    line.follow()
    line.come_back(0, 1, 2)
    line.hear(LoopBegin(1, GENERATION, 10, 2, 0))
    assert line.sent(LoopGo).keys() == {1}


def test_before_all_are_registered_it_begins_from_the_beginning() -> None:
    line = Line(2, options=OPTIONS, registered=False)
    line.hello(0)
    line.follow()
    assert line.core.state is JobStage.REGISTERING
    line.hello(0)
    line.hello(1)
    assert line.sent(Welcome).keys() == {0, 1}


def test_a_death_before_all_were_registered_ends_the_start_under_whoever_follows() -> None:
    """It was started by hand, and knows of that rank only that it is dead."""
    line = Line(2, options=OPTIONS, registered=False)
    line.newest = None  # killed before it knew how the start ends
    line.hello(0)
    line.kill(0)
    assert line.kept is not None
    assert line.kept.memory.gone
    assert line.kept.memory.outcome is None
    line.follow()
    line.hello(1)
    line.wait(60.0)
    assert line.core.outcome is not None
    assert line.core.outcome.kind is OutcomeKind.NOT_SAVED


def test_no_number_of_a_periodic_checkpoint_is_used_twice() -> None:
    line = training(schedule=Schedule(steps=5))
    assert line.kept is not None
    newest = line.kept.memory.periodic
    assert newest is not None
    line.follow()
    assert newest in line.effects, "what is left of it goes"
    line.come_back(0, 1)
    assert not line.sent(Save)
    line.come_back(2)
    assert {(order.attempt > newest.attempt, order.step % 5) for order in line.sent(Save).values()} == {(True, 0)}


@pytest.mark.parametrize("another", [False, True])
def test_a_checkpoint_that_was_asked_for_is_written_under_whoever_follows(another: bool) -> None:
    """Another one is written when it is asked for, or it is ordered itself."""
    line = training(schedule=Schedule(steps=7))
    if another:
        line.saved(0, 7, incident=0)
    line.hear(SaveWanted(0, GENERATION, 6))
    line.follow()
    stand = computing(8)
    line.come_back(0, 1, stand=stand)
    assert not line.sent(Save)
    line.come_back(2, stand=stand)
    assert {order.step for order in line.sent(Save).values()} == {9}, "not that of the schedule"


def test_one_that_was_copied_for_the_schedule_is_written_under_whoever_follows_if_it_was_wanted() -> None:
    """The wish was lost with the controller, and the rank says it to the next one, having its copy."""
    line = training(schedule=Schedule(steps=7))
    line.follow()
    line.come_back(0, 1, 2, stand=computing(7))
    assert {order.step for order in line.sent(Save).values()} == {14}
    line.hear(SaveWanted(0, GENERATION, 6))
    assert {order.step for order in line.sent(Save).values()} == {8}


def test_checkpoints_go_on_after_a_rank_that_was_late_has_come_back() -> None:
    line = training(schedule=Schedule(steps=7))
    line.follow()
    line.come_back(0, 1)
    line.wait(OPTIONS.lost_confirm_s + 0.1)
    assert line.core.state is JobStage.SETTLING
    line.come_back(2)
    assert line.core.state is JobStage.WATCHING
    assert {order.step for order in line.sent(Save).values()} == {7}


@pytest.mark.parametrize("others_left", [0, 2])
def test_one_that_was_asked_for_after_the_last_step_is_of_that_step_under_whoever_follows(others_left: int) -> None:
    line = training()
    for rank in range(1, 1 + others_left):
        line.hear(Left(rank, GENERATION, computing(6)))
    line.hear(SaveWanted(0, GENERATION, 6))
    line.follow()
    for rank in range(3):
        line.come_back(rank, stand=computing(6))
        line.hear(Left(rank, GENERATION, computing(6)))
    assert {order.step for order in line.sent(Save).values()} == {6}
    assert not line.sent(Release)


@pytest.mark.parametrize("heard", [False, True])
def test_one_that_may_lack_its_name_is_still_wanted(heard: bool) -> None:
    """Unless the controller has heard of the name before it is killed."""
    line = training()
    line.hear(SaveWanted(0, GENERATION, 6))
    for rank in range(3):
        line.saved(rank, 7, incident=0)
    line.verified(incident=0)
    if heard:
        line.published(incident=0)
    line.follow()
    line.come_back(0, 1, 2, stand=computing(8))
    assert bool(line.sent(Save)) is not heard


def test_a_process_that_has_ended_without_dying_is_silent() -> None:
    """It has given its life line back: nobody knows more of it, and nothing else will be heard."""
    line = training()
    line.follow()
    for rank in range(3):
        line.tell(Watched(rank))
    line.come_back(0, 1)
    line.wait(OPTIONS.lost_confirm_s + 0.1)
    assert line.core.state is JobStage.SETTLING
    line.tell(Watched(2, ended=True))
    line.settle(0, computing(6))
    line.settle(1, computing(6))
    line.wait(OPTIONS.silence_timeout_s)
    assert line.sent(Save).keys() == {0}


def test_the_next_one_knows_what_this_one_has_learnt() -> None:
    line = training()
    line.kill(2)
    line.follow()
    line.follow()
    line.come_back(0, 1)
    assert line.sent(Freeze)[1].incident == 3
    assert line.sent(Freeze)[1].reason == "rank 2 died (killed or crashed)"


def test_the_next_one_knows_how_long_steps_take() -> None:
    """Else it would call a step that is as long as every other one a hang, and say that others take no time."""
    line, notice_s = training(), OPTIONS.hang_notice_s
    for step in range(7, 12):
        line.wait(2 * notice_s)
        line.at(step)
    line.follow()
    line.come_back(0, 1, 2, stand=computing(11))
    line.at(11)
    line.wait(QUIET_STEPS * 2 * notice_s - 1.0)
    assert not line.sent(Notice)
    line.wait(2.0)
    golden.says(line.sent(Notice)[0].text)


def test_what_is_kept_is_not_rewritten_in_each_step() -> None:
    line = training()
    written = set()
    for step in range(7, 60):
        line.wait(0.1 + 0.01 * (step % 3))
        line.at(step)
        written.add(line.kept)
    assert len(written) <= 2


def test_another_process_is_no_member() -> None:
    line = training()
    line.follow()
    assert line.replies() == []
    line.hello(1, process=line.process(2))
    assert len(line.replies()) == 1
    line.tell(FromRank(LoopBegin(1, GENERATION, 10, 2, 0)))
    assert not line.sent(LoopGo)
