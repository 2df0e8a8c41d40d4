"""Extras that are promised to be the same on all ranks and are not: named, or kept for each rank."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import lastwords
from lastwords.checkpoint.meta import StepDocument
from lastwords.optim_wrapper.capture.buffers import ExtraBuffers
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.state import extras
from lastwords.optim_wrapper.state.extras import Extras
from lastwords.optim_wrapper.trainer.agreed_layout import compare_replicas
from lastwords.processor.black_box import BlackBox
from lastwords.processor.box_layout import BoxLayout, BoxReader, SlotKind
from lastwords.sharding import verify
from tests.ledgers import told

REASON = "is not the same on all ranks (0 and 1)"


def averaged() -> AveragedModel:
    return AveragedModel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), use_buffers=True)


def write(box: BlackBox, capture: ExtraBuffers, step: int) -> None:
    capture.tensors.refresh()
    slot = box.begin(SlotKind.COMMITTED, step)
    capture.tensors.capture(slot)
    box.commit(slot)


def digests(**states: Any) -> dict[str, int]:
    return extras.digests(states, {})


def check(monkeypatch: pytest.MonkeyPatch, mine: dict[str, int], other: dict[str, int]) -> list[str]:
    """What rank 0 says, rank 1 having `other`."""

    def all_gather(value: tuple[int, dict[str, Any]]) -> list[Any]:
        of_units = value[1]
        digest = verify._digest(other) if not isinstance(of_units[extras.UNIT], dict) else other
        return [value, (1, {**of_units, extras.UNIT: digest})]

    monkeypatch.setattr(
        "lastwords.optim_wrapper.trainer.agreed_layout.exchange_digests",
        lambda group, digests: verify.exchange(all_gather, 0, digests),
    )
    units: Any = type("Units", (), {"views": {}, "table": type("Table", (), {"units": {}})})
    error, own, reasons = compare_replicas(units, 0, None, mine, "before the first step")
    assert (error, own) == (None, False), "a loop may mean it so"
    return reasons


def test_extras_are_compared_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = digests(mine={"seen": 1, "same": 5}), digests(mine={"seen": 2, "same": 5})
    assert check(monkeypatch, mine, mine) == []
    (reason,) = check(monkeypatch, mine, other)
    assert reason.startswith(f"extras['mine']['seen'] {REASON}")
    assert "local_extras=" in reason


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (0.0, -0.0),
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        ({"a": [torch.ones(1)]}, {"a": [torch.zeros(1)]}),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    ],
)
def test_a_digest_is_of_bits_and_types(one: Any, other: Any) -> None:
    assert digests(mine={"x": one}) != digests(mine={"x": other})
    assert digests(mine={"x": one}) == digests(mine={"x": one})


def test_what_ranks_have_come_to_is_compared_by_whoever_resumes() -> None:
    slots = {rank: StepDocument(extras=(4, {"ema": "a", "count": str(rank // 2)})) for rank in range(4)}
    (reason,) = extras.differing(slots)
    assert reason.startswith("extras['count'] was not the same on all ranks after 4 steps of the saved run (0 and 2)")
    others = {0: StepDocument(extras=(4, {"ema": "a"})), 1: StepDocument(extras=(2, {"ema": "b"})), 2: StepDocument()}
    assert extras.differing(others) == []


def test_the_black_box_has_digests_of_the_first_steps_and_of_some_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model, mine = nn.Linear(2, 2), {"seen": 0}
    wrapped = lastwords.OptTFTWrapper(torch.optim.SGD(model.parameters(), 0.1))
    recorder = StepRecorder(model, [wrapped], {"mine": mine}, None)
    recorder.agree_units(World(), next_prefix(), ())
    recorder.make_source(lambda rank: tmp_path / "box", lambda step: {})
    recorder.open(tmp_path / "box")
    recorder.begin(0, None)
    looked = []
    for step in range(1, 2 * extras.EVERY + 1):
        mine["seen"] = step
        recorder.end_step(step, None)
        with BoxReader(tmp_path / "box") as box:
            copy = box.read(step)
        assert copy is not None
        at, found = copy.json["extras"]
        looked.append(at)
        expected = extras.digests({"mine": {"seen": at}}, {})
        assert found == extras.by_extra(expected, {"mine": {}})
    assert looked[:9] == [1, 2, 2, 4, 4, 4, 4, 8, 8]
    assert looked[-1] == 2 * extras.EVERY


# ------------------------------------------------------------------ buffers of modules among them


def test_each_rank_gets_the_buffers_of_its_own_average_back(tmp_path: Path) -> None:
    saved, restored = averaged(), averaged()
    capture = ExtraBuffers(Extras({"ema": saved}))
    box = BlackBox.create(tmp_path / "box", BoxLayout(capture.tensors.regions))
    capture.tensors.bind(box)
    with torch.no_grad():
        saved.module[1].running_mean.fill_(3.0)
        saved.module[1].num_batches_tracked.fill_(7)
    write(box, capture, 1)
    with BoxReader(tmp_path / "box") as reader:
        copy = reader.read(1)
    assert copy is not None
    assert ExtraBuffers(Extras({"ema": restored})).restore(copy.regions) == ()
    for name, buffer in saved.named_buffers():
        assert torch.equal(buffer, dict(restored.named_buffers())[name]), name


def test_they_are_not_compared_and_all_the_rest_of_the_average_is() -> None:
    ema = averaged()
    held = Extras({"ema": ema})
    apart = {"ema": ExtraBuffers(held).of("ema")}
    before = extras.digests(held.first().states, apart)
    assert apart["ema"] == {f"module.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    with torch.no_grad():
        ema.module[1].running_mean.fill_(3.0)
    assert extras.digests(held.first().states, apart) == before
    assert extras.digests(held.first().states, {}) != extras.digests(averaged_states(), {}), "control"
    with torch.no_grad():
        ema.module[0].bias.fill_(3.0)
    assert extras.digests(held.first().states, apart) != before


def averaged_states() -> dict[str, Any]:
    return {"ema": averaged().state_dict()}


def test_a_rank_whose_own_were_lost_or_have_another_form_is_told() -> None:
    (reason,) = ExtraBuffers(Extras({"ema": averaged()})).restore({})
    assert reason.startswith("this rank's own extras['ema']['module.1.running_mean'] and 2 more")


def test_a_buffer_that_gets_another_form_gets_room_for_it(tmp_path: Path) -> None:
    ema = averaged()
    capture = ExtraBuffers(Extras({"ema": ema}))
    box = BlackBox.create(tmp_path / "box", BoxLayout(capture.tensors.regions))
    capture.tensors.bind(box)
    ema.module[1].running_mean = torch.full((5,), 2.0)
    write(box, capture, 1)
    capture.tensors.make_room()
    assert capture.tensors.needs_room
    box = BlackBox.create(tmp_path / "box", BoxLayout(capture.tensors.regions))
    capture.tensors.bind(box)
    write(box, capture, 2)
    with BoxReader(tmp_path / "box") as reader:
        copy = reader.read(2)
    assert copy is not None
    assert copy.regions["extra_buffer/ema/module.1.running_mean"].shape == (5,)
    assert told(capture.tensors) == []


def test_the_examples_hold() -> None:
    assert doctest.testmod(extras).failed == 0
