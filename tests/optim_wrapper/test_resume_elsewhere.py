"""Whose rank-local state a rank goes on with on another number of ranks: names of devices, and reasons told once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lastwords.optim_wrapper.resume import _reasons_of
from lastwords.optim_wrapper.resume_elsewhere import on_this_device, source_rank

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


def manifest(by_rank: dict[int, tuple[str, ...]], *more: str) -> Any:
    lines = [f"rank {rank}: {reason}" for rank, reasons in by_rank.items() for reason in reasons]
    return SimpleNamespace(
        locals={rank: SimpleNamespace(reasons=reasons, tensors=(1,)) for rank, reasons in by_rank.items()},
        reasons=(*lines, *more),
        world_size=4,
    )


def test_what_every_saved_rank_has_said_is_said_once_and_the_rest_as_it_was() -> None:
    saved = manifest({0: ("moved", "late"), 1: ("moved",), 2: ("moved",)}, "rank 3: lost", "unit a: cut off")
    assert _reasons_of(saved) == ["moved", "rank 0: late", "rank 3: lost", "unit a: cut off"]
    again = manifest({rank: tuple(_reasons_of(saved)) for rank in range(3)})
    assert _reasons_of(again) == _reasons_of(saved), "another resume adds nothing"
    assert _reasons_of(manifest({})) == []
    assert _reasons_of(manifest({0: (), 1: ("late",)})) == ["rank 1: late"]


def test_a_rank_takes_over_its_own_number_or_the_lowest_that_is_there() -> None:
    saved = manifest({0: (), 2: (), 3: ()})
    assert [source_rank(saved, rank) for rank in range(9)] == [0, 0, 2, 3, 0, 0, 2, 3, 0]
    assert source_rank(manifest({}), 0) == -1
