"""A rank that keeps a copy of the last step can leave an update that never ends, or that failed, behind."""

from __future__ import annotations

from lastwords.processor.core import ProcessorOptions
from lastwords.processor.events import CancelSave, StartSave
from lastwords.vocabulary import Phase, SaveFailed, Settled, Stand
from tests import golden
from tests.processor.rank_driver import RankDriver, reports

COPY = ProcessorOptions(has_copy=True, update_grace_s=1.0)
STUCK = Stand(Phase.UPDATING, 8)
COPIED = Stand(Phase.COMPUTING, 7)


def _stands(rank: RankDriver) -> list[Stand]:
    return [report.stand for report in reports(rank.core.take_effects()) if isinstance(report, Settled)]


def _stuck(options: ProcessorOptions = COPY) -> RankDriver:
    rank = RankDriver(ended_step=7, options=options)
    rank.walk(Phase.UPDATING, 8)
    rank.core.take_effects()
    return rank


def test_a_rank_that_is_stuck_in_its_update_stands_by_its_copy() -> None:
    rank = _stuck()
    assert not [report for report in reports(rank.freeze()) if isinstance(report, Settled)]
    assert [r.stand for r in reports(rank.wait(1.1)) if isinstance(r, Settled)] == [COPIED]
    assert rank.core.stand == STUCK
    assert any(isinstance(effect, StartSave) for effect in rank.save(step=7))


def test_without_a_copy_it_never_settles() -> None:
    """Negative control."""
    rank = _stuck(ProcessorOptions())
    rank.freeze()
    assert not [report for report in reports(rank.wait(60.0)) if isinstance(report, Settled)]


def test_an_update_that_ends_in_time_settles_as_ever() -> None:
    rank = _stuck()
    rank.freeze()
    rank.core.mark_updated()
    assert rank.core.try_end_step()
    assert _stands(rank) == [Stand(Phase.COMPUTING, 8)]


def test_once_it_has_gone_back_it_stays_there_even_if_the_update_ends_after_all() -> None:
    rank = _stuck()
    rank.freeze()
    rank.wait(1.1)
    rank.core.mark_updated()
    assert not rank.core.try_end_step(), "the step must not end: the copy may be being read"
    assert _stands(rank) == []
    assert any(isinstance(effect, StartSave) for effect in rank.save(step=7))
    assert not any(isinstance(effect, StartSave) for effect in rank.save(step=8, attempt=2))


def test_a_false_alarm_lets_it_go_on_with_its_update() -> None:
    rank = _stuck()
    rank.freeze()
    rank.wait(1.1)
    rank.resume()
    rank.core.mark_updated()
    assert rank.core.try_end_step()
    answers = reports(rank.freeze(incident=2))
    assert [report.stand for report in answers if isinstance(report, Settled)] == [Stand(Phase.COMPUTING, 8)]


def test_a_torn_update_is_no_loss_either() -> None:
    rank = _stuck()
    rank.core.mark_torn()
    rank.core.mark_raised("RuntimeError: connection closed by peer", secondary=True)
    rank.core.take_effects()
    answers = reports(rank.freeze())
    assert [report.stand for report in answers if isinstance(report, Settled)] == [COPIED]
    assert any(isinstance(effect, StartSave) for effect in rank.save(step=7))


def test_without_a_copy_a_torn_rank_holds_nothing() -> None:
    """Negative control."""
    rank = _stuck(ProcessorOptions())
    rank.core.mark_torn()
    rank.freeze()
    assert not any(isinstance(effect, StartSave) for effect in rank.save(step=7))


def test_a_rank_whose_weights_are_found_wrong_takes_back_what_it_was_told_to_save() -> None:
    rank = RankDriver(ended_step=7, options=COPY)
    rank.freeze()
    assert any(isinstance(effect, StartSave) for effect in rank.save(step=7))
    rank.core.mark_corrupt()
    effects = rank.core.take_effects()
    assert any(isinstance(effect, CancelSave) for effect in effects)
    (failed,) = (report for report in reports(effects) if isinstance(report, SaveFailed))
    golden.says(failed.reason)
    assert not any(isinstance(effect, StartSave) for effect in rank.save(step=7, attempt=2)), "nor the copy"
