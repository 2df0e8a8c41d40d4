"""Tensors are put together from units, whatever the cuts; what is missing, twice or of two minds is named."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from lastwords.checkpoint import boxes as cut
from lastwords.checkpoint.load import open_checkpoint
from lastwords.checkpoint.slice_reader import SliceReader
from lastwords.errors import ConfigError, FormatError, IncompleteError
from lastwords.integrations.catalogue import Whole, catalogue
from lastwords.optim_wrapper.tensors.tensor_bytes import bytes_of
from tests import golden
from tests.integrations.made import Box, published, unit


def cuts(size: int, count: int, rng: random.Random) -> list[int]:
    """Uneven borders, some of them at the same place."""
    return [0, *sorted(rng.randint(0, size) for _ in range(count - 1)), size]


def grid(shape: tuple[int, ...], rng: random.Random) -> list[Box]:
    boxes: list[Box] = [((), ())]
    for size in shape:
        borders = cuts(size, rng.randint(1, 3), rng)
        boxes = [
            ((*offsets, begin), (*sizes, end - begin))
            for offsets, sizes in boxes
            for begin, end in itertools.pairwise(borders)
        ]
    return boxes


def read(reader: SliceReader, whole: Whole, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    target = torch.empty(sizes, dtype=getattr(torch, whole.dtype))
    view = bytes_of(target)
    assert view is not None
    reader.read([whole.target(cut.Box(offsets, sizes), view)])
    return target


@pytest.mark.parametrize("seed", range(25))
def test_any_box_of_any_cut_is_what_a_slice_of_the_whole_is(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 4)))
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128])
    whole = torch.randn(shape, dtype=torch.float64).mul(9).to(dtype)
    boxes = grid(shape, rng) if dtype is not torch.complex128 else [((0,) * len(shape), shape)]
    states = {
        rank: {name: unit(name, [("w", whole, box if box[1] != shape else None)], (rank,))}
        for rank, box in enumerate(boxes)
        for name in ["replicated" if len(boxes) == 1 else f"rank-{rank}"]
    }
    checkpoint = open_checkpoint(published(tmp_path, states))
    found = catalogue(checkpoint).parameters["w"]
    assert (found.shape, found.nbytes) == (shape, whole.nbytes)
    with SliceReader(checkpoint, checked=bool(seed % 2)) as reader:
        for _ in range(10):
            begins = tuple(rng.randint(0, size - 1) for size in shape)
            sizes = tuple(rng.randint(1, size - begin) for begin, size in zip(begins, shape, strict=True))
            place = tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))
            assert torch.equal(read(reader, found, begins, sizes), whole[place])


def test_a_missing_file_of_a_unit_is_named(tmp_path: Path) -> None:
    whole = torch.randn(4, 2)
    states = {
        rank: {f"rank-{rank}": unit(f"rank-{rank}", [("w", whole, ((2 * rank, 0), (2, 2)))], (rank,))}
        for rank in (0, 1)
    }
    path = published(tmp_path, states)
    (file,) = (path / "rank_1").glob("*.ckpt")
    file.unlink()
    with golden.raises(IncompleteError):
        open_checkpoint(path)


def test_a_region_that_no_unit_holds_and_one_that_two_hold_are_named(tmp_path: Path) -> None:
    whole = torch.randn(6, 2)
    boxes = {"hole": (((0, 0), (2, 2)), ((4, 0), (2, 2))), "twice": (((0, 0), (4, 2)), ((2, 0), (4, 2)))}
    for step, (name, pair) in enumerate(boxes.items(), 1):
        states = {
            rank: {f"rank-{rank}": unit(f"rank-{rank}", [("w", whole, box)], (rank,))} for rank, box in enumerate(pair)
        }
        checkpoint = open_checkpoint(published(tmp_path, states, step=step))
        with golden.raises(IncompleteError if name == "hole" else FormatError):
            catalogue(checkpoint)
    with golden.raises(IncompleteError):
        catalogue(checkpoint, ["rank-0"])


def test_one_name_for_different_tensors_is_refused_until_units_are_chosen(tmp_path: Path) -> None:
    stages = torch.randn(2, 3), torch.randn(4)
    states = {rank: {f"stage-{rank}": unit(f"stage-{rank}", [("w", stages[rank], None)], (rank,))} for rank in (0, 1)}
    checkpoint = open_checkpoint(published(tmp_path, states))
    with golden.raises(ConfigError):
        catalogue(checkpoint)
    assert catalogue(checkpoint, ["stage-1"]).parameters["w"].shape == (4,)
    assert set(catalogue(checkpoint, clash_by_unit=True).parameters) == {"w@stage-0", "w@stage-1"}
    with golden.raises(ConfigError):
        catalogue(checkpoint, ["stage-2"])
