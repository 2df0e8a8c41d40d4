"""Whose rank-local state a rank goes on with on another number of ranks: names of devices, and reasons told once."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lastwords.checkpoint.entries import Cause, Reason, merged
from lastwords.checkpoint.format import TensorSpec
from lastwords.errors import MismatchError
from lastwords.optim_wrapper.capture.buffers import Buffers
from lastwords.optim_wrapper.resume import resume_elsewhere
from lastwords.optim_wrapper.resume.resume import EARLIER_MOVE, _reasons_of
from lastwords.optim_wrapper.resume.resume_elsewhere import (
    TakenOver,
    buffers_by_name,
    on_this_device,
    source_rank,
    take_over,
)
from lastwords.processor.box_layout import RegionCopy
from tests import golden

HERE = ("rng/python", "rng/torch", "rng/cuda:3")


def region(value: int) -> Any:
    return SimpleNamespace(data=bytes([value]))


def test_the_stream_of_a_card_follows_its_rank_to_another_card() -> None:
    cuda, start, torch = region(1), region(2), region(3)
    saved = {"rng/cuda:0": cuda, "epoch/rng/cuda:0": start, "rng/torch": torch}
    assert on_this_device(saved, HERE) == {"rng/cuda:3": cuda, "epoch/rng/cuda:3": start, "rng/torch": torch}


def test_streams_of_several_cards_or_of_another_kind_keep_their_names() -> None:
    for names in (["rng/cuda:0", "rng/cuda:1"], ["rng/xpu:0"], ["rng/torch", "rng/loader"]):
        saved = {name: region(0) for name in names}
        assert on_this_device(saved, HERE) == saved
    assert on_this_device({"rng/cuda:0": region(0)}, ("rng/torch",)).keys() == {"rng/cuda:0"}


def manifest(by_rank: dict[int, tuple[Reason, ...]], *more: Reason) -> Any:
    said = [reason.of_rank(rank) for rank, reasons in by_rank.items() for reason in reasons]
    return SimpleNamespace(
        locals={rank: SimpleNamespace(tensors=(1,)) for rank in by_rank},
        local_reasons=by_rank,
        reasons=merged([*said, *more]),
        world_size=4,
    )


def test_what_every_saved_rank_has_said_is_said_once_and_the_rest_as_it_was() -> None:
    slow, late = Reason("slow"), Reason("late")
    lost, cut = Reason("gone", Cause.LOCAL_STATE_LOST, (3,)), Reason("cut off", unit="a")
    saved = manifest({0: (slow, late), 1: (slow,), 2: (slow,)}, lost, cut)
    here = _reasons_of(saved)
    assert here == [slow, late.of_rank(0), lost.of_the_past(), cut]
    assert [*map(str, here)] == ["slow", "rank 0: late", str(lost), "unit a: cut off"]
    assert not any(reason.cause is Cause.LOCAL_STATE_LOST for reason in here), "the next checkpoint has it"
    again = manifest({rank: tuple(_reasons_of(saved)) for rank in range(3)})
    assert _reasons_of(again) == _reasons_of(saved), "another resume adds nothing"
    assert _reasons_of(manifest({})) == []
    assert _reasons_of(manifest({0: (), 1: (late,)})) == [late.of_rank(1)]
    moves = manifest({0: (Reason("on 3 ranks", Cause.RESHARDED),), 1: (EARLIER_MOVE,)})
    assert _reasons_of(moves) == [EARLIER_MOVE], "once, and in the past tense"


def test_a_rank_takes_over_its_own_number_or_the_lowest_that_is_there() -> None:
    saved = manifest({0: (), 2: (), 3: ()})
    assert [source_rank(saved, rank) for rank in range(9)] == [0, 0, 2, 3, 0, 0, 2, 3, 0]
    assert source_rank(manifest({}), 0) == -1


class Stage(torch.nn.Module):
    """A stage of a pipeline, with a small buffer under its name in the whole."""

    def __init__(self, index: int, width: int = 2) -> None:
        super().__init__()
        self.register_buffer(f"mean{index}", torch.zeros(width))


class Stored:
    """A checkpoint of which each rank has a buffer of its own stage."""

    def __init__(self, ranks: int) -> None:
        self._bytes = {
            f"local/{rank}/buffer/mean{rank}": struct.pack("<2f", rank + 1, rank + 2) for rank in range(ranks)
        }
        self.manifest = SimpleNamespace(
            units={"replicated": None, "rank-1": None},
            locals={
                rank: SimpleNamespace(tensors=(TensorSpec(f"local/{rank}/buffer/mean{rank}", "F32", (2,)),))
                for rank in range(ranks)
            },
        )

    def read_tensors(self, names: list[str], into: Any) -> None:
        for name in names:
            into(TensorSpec(name, "F32", (2,)))[:] = self._bytes[name]


def stage_recorder(index: int, width: int = 2) -> Any:
    buffers = Buffers(Stage(index, width))
    return SimpleNamespace(buffers=buffers, tensors=buffers.tensors, units=SimpleNamespace(pure=False),
                           rng=SimpleNamespace(snapshot=dict))  # fmt: skip


def test_a_stage_takes_its_buffers_by_name_from_the_rank_that_had_them() -> None:
    of_another_stage = {"buffer/mean0": RegionCopy("F32", (2,), memoryview(bytes(8)))}
    recorder = stage_recorder(1)
    found = buffers_by_name(Stored(2), of_another_stage, recorder)
    assert found.keys() == {"buffer/mean1"}
    recorder.buffers.restore(found)
    assert recorder.buffers._model.mean1.tolist() == [2.0, 3.0]
    golden.says(recorder.buffers.restore(of_another_stage))  # the control: as they were taken by rank


def test_a_buffer_of_another_form_is_refused_by_name() -> None:
    with pytest.raises(MismatchError, match=r"mean1: saved F32 \(2,\), here F32 \(3,\)"):
        buffers_by_name(Stored(2), {}, stage_recorder(1, width=3))


def test_ranks_that_are_seeded_alike_share_streams_and_buffers_but_not_local_extras(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_the_rule(_: Any, rank: int, __: Any) -> TakenOver:
        return TakenOver({"rng/torch": RegionCopy("U8", (1,), memoryview(bytes([rank])))}, rank, [], rank)

    monkeypatch.setattr(resume_elsewhere, "_by_the_rule", by_the_rule)
    monkeypatch.setattr(
        resume_elsewhere, "_torch_streams", lambda regions, _: str(regions and list(regions["rng/torch"].data))
    )
    world = SimpleNamespace(
        rank=1, size=2, publish=lambda *_: None, read=lambda *_: {"here": "{}", "then": "[0]"},
    )  # fmt: skip
    taken = take_over(Stored(2), world, "key", stage_recorder(1))
    assert taken.regions["rng/torch"].data[0] == 0, "as rank 0 does"
    assert (taken.source, taken.extras_of) == (0, 1)
    [line] = taken.reasons
    assert line.cause is Cause.RESHARDED
    assert "(mean1)" in line.detail
    world.read = lambda *_: {"here": "seeded otherwise", "then": "[0]"}
    assert take_over(Stored(2), world, "key", stage_recorder(1)).regions["rng/torch"].data[0] == 1, "the control"
