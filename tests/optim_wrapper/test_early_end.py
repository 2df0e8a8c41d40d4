"""A step that the loop ends before its log: what moves after that is looked at again, and told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lastwords
from lastwords.checkpoint.meta import COMMITTED, StepDocument
from lastwords.errors import ConfigError
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.loop.own_loop import refuse_begin_after_update, refuse_update_after_end
from lastwords.optim_wrapper.resume.resume_choice import begun_of
from lastwords.processor.black_box import BlackBox
from lastwords.processor.box_layout import BoxReader
from lastwords.processor.saver import Position
from lastwords.vocabulary import Phase, Stand
from tests import golden


class Rank:
    """A recorder with a box, and everything that may move."""

    def __init__(self, folder: Path) -> None:
        self.box = folder / "box"
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.mine, self.local = {"seen": 0}, {"seen": 0, "delta": torch.zeros(2, requires_grad=True)}
        wrapped = lastwords.OptTFTWrapper(self.optimizer)
        self.recorder = StepRecorder(self.model, [wrapped], {"mine": self.mine}, {"local": self.local})
        self.recorder.agree_units(World(), next_prefix(), ())
        self.source = self.recorder.make_source(lambda rank: self.box, lambda step: {})
        self.recorder.open_box(self.make_box, at_gate=False)
        self.recorder.begin(0, None)

    def make_box(self, make: Callable[[Path], BlackBox]) -> None:
        make(self.box)

    def end_early(self, step: int) -> None:
        self.recorder.ends_early = True
        self.recorder.end_step(step, Position(1, step))

    def reasons(self, step: int) -> list[str]:
        """What a writer says of this rank's state of the step, should it be asked now."""
        return [*map(str, self.source.local_states([0], step)[0].reasons)]


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return Rank(tmp_path)


def draw(rank: Rank) -> None:
    torch.rand(1)


def count(rank: Rank) -> None:
    rank.mine["seen"] += 1


def count_here(rank: Rank) -> None:
    rank.local["seen"] += 1


def perturb(rank: Rank) -> None:
    rank.local["delta"].grad = torch.ones(2)


def average(rank: Rank) -> None:
    rank.model[1].running_mean.add_(1.0)  # type: ignore[operator, union-attr]


def clamp(rank: Rank) -> None:
    with torch.no_grad():
        rank.model[0].weight.clamp_(-0.01, 0.01)  # type: ignore[operator, union-attr]


def slow_down(rank: Rank) -> None:
    rank.optimizer.param_groups[0]["lr"] = 0.05


@pytest.mark.parametrize(
    ("log", "what"),
    [
        (draw, "rng/torch"),
        (count, r"extras['mine']"),
        (count_here, r"local_extras['local']"),
        (perturb, "the gradient of local_extras['local']['delta']"),
        (average, "buffer/1.running_mean"),
        (clamp, "the parameter '0.weight'"),
        (slow_down, "the optimizer's hyperparameters"),
    ],
)
def test_what_moves_after_the_early_end_is_told_of_later_deaths_in_between(rank: Rank, log: Any, what: str) -> None:
    rank.end_early(1)
    assert rank.reasons(1) == []
    log(rank)
    rank.recorder.look_again()
    assert rank.reasons(1) == [], "it is in the second copy"
    rank.end_early(2)
    (reason,) = rank.reasons(2)
    assert what in reason


def test_the_second_look_is_what_the_next_step_begins_with(rank: Rank) -> None:
    rank.end_early(1)
    for log in (draw, count, slow_down, perturb):
        log(rank)
    rank.recorder.look_again()
    with BoxReader(rank.box) as box:
        copy = box.read(1)
    assert copy is not None
    assert "grad/local_extras['local']['delta']" in copy.regions
    assert bytes(copy.regions["rng/torch"].data)[: 5 * 8] == bytes(torch.get_rng_state().numpy().tobytes())[: 5 * 8]
    state = rank.source.unit_state("replicated", 1, Stand(Phase.COMPUTING, 1))
    extras = state.meta.extras
    assert extras is not None
    assert extras.states["mine"] == {"plain": {"seen": 1}}
    assert state.meta.reasons == []


def test_a_log_that_moves_nothing_is_not_spoken_of(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lastwords")
    for step in (1, 2, 3):
        rank.end_early(step)
        assert rank.reasons(step) == []
        rank.recorder.look_again()
    assert caplog.records == []


def test_an_update_after_the_end_of_its_step_is_refused() -> None:
    refuse_update_after_end(Stand(Phase.COMPUTING, 3))
    with golden.raises(ConfigError):
        refuse_update_after_end(Stand(Phase.UPDATED, 4))


def test_a_step_that_begins_before_the_last_one_has_ended_is_refused() -> None:
    refuse_begin_after_update(Stand(Phase.COMPUTING, 3))
    with golden.raises(ConfigError):
        refuse_begin_after_update(Stand(Phase.UPDATED, 4))


@pytest.mark.parametrize("log", [draw, count, slow_down])
def test_what_has_moved_before_the_next_step_begins_is_told_from_the_first_time_on(rank: Rank, log: Any) -> None:
    rank.end_early(1)
    assert rank.reasons(1) == []
    log(rank)
    assert rank.reasons(1), "the first time, in the incident itself"
    rank.recorder.look_again(expected=True)
    draw(rank)
    assert rank.reasons(1) == [], "it has begun: what moves now is the next step's"


@pytest.mark.parametrize(
    ("documents", "begun", "told"),
    [
        ([{}, {}], False, False),
        ([{"begun": True, "between": ["rng/torch"]}, {"begun": True}], True, False),
        ([{"begun": True}, {"begun": False}], False, False),
        ([{"begun": True, "between": ["rng/torch"]}, {"begun": False}], False, True),
        ([{"begun": True, "between": ["rng/torch"]}, {}], False, True),
    ],
    ids=["no difference", "all", "some, but nothing moved", "some", "some, for the first time"],
)
def test_only_where_all_ranks_had_begun_the_next_step_it_is_the_one_that_goes_on(
    documents: list[Any], begun: bool, told: bool
) -> None:
    locals_ = {rank: SimpleNamespace(document=StepDocument(**one), meta=SimpleNamespace(kind=COMMITTED))
               for rank, one in enumerate(documents)}  # fmt: skip
    manifest: Any = SimpleNamespace(locals=locals_)
    found, why = begun_of(manifest)
    assert (found, bool(why)) == (begun, told)


def test_the_block_of_a_step_ends_it_unless_an_exception_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("MS_ENABLE_TFT", "{TTP:0}")
    model = torch.nn.Linear(2, 2)
    optimizer = lastwords.OptTFTWrapper(torch.optim.SGD(model.parameters()))
    tft: Any = lastwords.TFTRegister(0, "127.0.0.1", 30051, tmp_path, model=model, optimizer=optimizer)
    ended: list[Any] = []
    with tft:
        monkeypatch.setattr(tft._run, "end_step", ended.append)
        for _, _, batch in tft.steps([1, 2, 3], 1, accumulate=2):
            with tft.step():
                assert ended == ([] if batch < 3 else [(1, 1)])
            assert ended == [[], [(1, 1)], [(1, 1), (1, 2)]][batch - 1]
    tft = lastwords.TFTRegister(0, "127.0.0.1", 30051, tmp_path, model=model, optimizer=optimizer)
    ended.clear()
    with tft:
        monkeypatch.setattr(tft._run, "end_step", ended.append)
        with tft.step(2, 1):
            pass
        with pytest.raises(ValueError), tft.step(2, 2):
            raise ValueError
        assert ended == [(2, 1)]


@pytest.mark.parametrize(
    ("drew", "draws"),
    [
        ([True], None),
        ([True, True], True),
        ([True, True, True, False], False),
        ([False, True, True], False),
    ],
    ids=["once", "twice, and every time", "not every time", "not the first time"],
)
def test_a_loop_draws_before_each_step_if_it_has_done_so_in_every_one_but_one_may_be_chance(
    rank: Rank, drew: list[bool], draws: bool | None
) -> None:
    """As it does where a batch is fetched before `step_begin()`, and its data set draws."""
    for step, drawn in enumerate(drew, 1):
        rank.end_early(step)
        if drawn:
            draw(rank)
        rank.recorder.look_again(expected=True)
    assert rank.recorder.loop.known.draws is draws
    with BoxReader(rank.box) as box:
        assert box.facts().get("draws") is draws
    draw(rank)
    assert rank.recorder.drawn_early() == ("rng/torch" if draws else "")
