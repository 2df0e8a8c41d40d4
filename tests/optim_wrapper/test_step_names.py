"""What a step is called: what the loop has said, and nothing that is only guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lastwords.checkpoint.meta import LocalMeta
from lastwords.checkpoint.part import LocalState
from lastwords.errors import ConfigError
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.loop.own_loop import named
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.box_layout import BoxReader
from lastwords.processor.saver import Position, _named_by
from tests import golden

COUNTER = {"seen": 0}


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepRecorder:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = torch.nn.Linear(2, 2)
    optimizer = OptTFTWrapper(torch.optim.SGD(model.parameters()))
    recorder = StepRecorder(model, [optimizer], {}, {"counter": COUNTER})
    recorder.agree_units(World(), next_prefix(), ())
    recorder.make_source(lambda rank: tmp_path / "box", lambda step: {})
    recorder.open(tmp_path / "box")
    recorder.begin(0, None)
    return recorder


def slot(path: Path, step: int) -> dict[str, Any]:
    """What the black box says of a step."""
    with BoxReader(path) as box:
        copy = box.read(step)
        assert copy is not None
        return dict(json.loads(json.dumps(copy.json)))


def position(recorder: StepRecorder, step: int) -> Position | None:
    assert recorder.source is not None
    return recorder.source.position(step)


def test_a_step_that_has_not_ended_has_no_name_unless_the_loop_has_said_it(recorder: StepRecorder) -> None:
    recorder.end_step(1, Position(1, 3))
    assert position(recorder, 1) == (1, 3)
    assert position(recorder, 2) is None, "it may be (1, 4) or (2, 1)"
    recorder.under_way(Position(2, 1))
    assert position(recorder, 2) == (2, 1)
    assert position(recorder, 3) is None


def test_the_name_of_a_step_that_has_ended_is_not_that_of_the_next_one(recorder: StepRecorder) -> None:
    """An update after the last step of `steps()`, say."""
    recorder.under_way(Position(1, 1))
    recorder.end_step(1, Position(1, 1))
    assert recorder.position_under_way is None
    assert position(recorder, 2) is None


def test_the_black_box_says_what_the_last_step_was_called(recorder: StepRecorder, tmp_path: Path) -> None:
    recorder.end_step(1, Position(1, 3))
    recorder.tentative()
    found = slot(tmp_path / "box", 2)
    assert (found["epoch"], found["step"], found["after"]) == (None, None, [1, 3])
    recorder.end_step(2, Position(2, 1))
    found = slot(tmp_path / "box", 2)
    assert (found["epoch"], found["step"]) == (2, 1)


def test_local_extras_that_change_after_the_backward_pass_are_told_once(
    recorder: StepRecorder, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training already, and not only by the checkpoint of a rank that was killed in between."""
    monkeypatch.setitem(COUNTER, "seen", 0)
    for step in (1, 2, 3):
        recorder.tentative()
        COUNTER["seen"] += 1
        recorder.end_step(step, None)
    (record,) = caplog.records
    golden.says(record.getMessage())
    with BoxReader(tmp_path / "box") as box:
        assert box.facts()["after_copy"] == {"local_extras['counter']": [1, 1, 1, 0, 0, 0, 1]}


def test_local_extras_that_change_before_the_backward_pass_are_in_order(
    recorder: StepRecorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COUNTER, "seen", 0)
    for step in (1, 2, 3):
        COUNTER["seen"] += 1
        recorder.tentative()
        recorder.end_step(step, None)
    assert caplog.records == []


def test_a_name_that_becomes_known_at_the_end_is_no_change_of_local_extras(
    recorder: StepRecorder, tmp_path: Path
) -> None:
    for step, name in enumerate([Position(1, 1), Position(1, 2), Position(2, 1)], 1):
        recorder.tentative()
        recorder.end_step(step, name)
    with BoxReader(tmp_path / "box") as box:
        assert box.facts()["after_copy"] == {}


def test_local_extras_that_do_change_are_still_seen(recorder: StepRecorder, tmp_path: Path) -> None:
    """Negative control."""
    recorder.end_step(1, Position(1, 1))
    recorder.tentative()
    COUNTER["seen"] += 1
    recorder.end_step(2, Position(1, 2))
    with BoxReader(tmp_path / "box") as box:
        assert box.facts()["after_copy"]


def test_a_gate_compares_what_the_loop_has_said(recorder: StepRecorder) -> None:
    assert recorder.position_at_gate is None
    recorder.end_step(1, Position(1, 3))
    assert recorder.position_at_gate == (1, 3), "the last one: what comes is not known"
    recorder.under_way(Position(2, 1))
    assert recorder.position_at_gate == (2, 1)


def test_a_loop_that_names_no_steps_is_told_from_one_that_has_not_yet(recorder: StepRecorder, tmp_path: Path) -> None:
    recorder.tentative()
    assert slot(tmp_path / "box", 1)["after"] is None
    recorder.names_steps = False
    recorder.end_step(1, None)
    assert slot(tmp_path / "box", 1)["after"] == []


def test_a_writer_learns_the_name_from_a_rank_of_its_host_that_has_ended_the_step() -> None:
    def local(slot: dict[str, Any]) -> LocalState:
        return LocalState([], LocalMeta(slot=slot))

    unknown = local({"epoch": None, "step": None, "after": [1, 3]})
    assert _named_by([unknown, LocalState([])]) is None
    assert _named_by([unknown, local({"epoch": 2, "step": 1})]) == (2, 1)


@pytest.mark.parametrize("given", [(None, 1), (1, None), (0, 1), (1, 0), (True, 1), (1.0, 1)])
def test_half_a_name_and_numbers_that_count_nothing_are_refused(given: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match=r"epoch|step"):
        named(*given)
