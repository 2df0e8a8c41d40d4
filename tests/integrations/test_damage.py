"""Whatever byte of a checkpoint has flipped, none of the readers hands out what it has become."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from lastwords import LastWordsReader, load_for_inference
from lastwords.errors import FormatError
from lastwords.integrations.dcp_out import to_dcp
from lastwords.integrations.diff import diff
from lastwords.integrations.export import export_safetensors
from tests.integration.saved_layouts import bits
from tests.integrations.made import Small, flip, saved, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FLIPS = 40


def inference(path: Path, out: Path) -> None:
    load_for_inference(path, Small())


def reader(path: Path, out: Path, **more: Any) -> dict[str, torch.Tensor]:
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in Small().state_dict().items()}}
    dcp.load(state, storage_reader=LastWordsReader(path, **more))
    return state["model"]


def export(path: Path, out: Path) -> None:
    export_safetensors(path, out)


def convert(path: Path, out: Path) -> None:
    to_dcp(path, out)


def compare(path: Path, out: Path) -> None:
    diff(path, path)


def data_bytes(path: Path) -> tuple[Path, list[int]]:
    """A checkpoint's only file, and some places in it that are data."""
    (file,) = path.rglob("*.ckpt")
    begin = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    return file, random.Random(28).sample(range(begin, file.stat().st_size), FLIPS)


@pytest.mark.parametrize("read", [inference, reader, export, convert, compare])
def test_a_flipped_byte_anywhere_is_an_error_and_leaves_nothing(
    read: Callable[[Path, Path], Any], tmp_path: Path
) -> None:
    path = saved(tmp_path / "ours", *trained(0))
    file, places = data_bytes(path)
    for at in places:
        flip(file, at)
        with pytest.raises((FormatError, CheckpointException), match="checksum"):
            read(path, tmp_path / "out")
        assert [entry.name for entry in tmp_path.iterdir()] == ["ours"]
        flip(file, at)
    read(path, tmp_path / "out")


@pytest.mark.ci
def test_unchecked_is_an_option_and_reads_less_and_notices_less(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    path = saved(tmp_path, model, optimizer)
    file, places = data_bytes(path)
    wrong = 0
    for at in places:
        flip(file, at)
        other = Small()
        load_for_inference(path, other, checked=False)
        found = reader(path, tmp_path, checked=False)
        wrong += any(bits(found[name]) != bits(tensor) for name, tensor in model.state_dict().items())
        flip(file, at)
    assert wrong, "the control: without checksums a wrong weight is handed out"
    assert load_for_inference(path, Small(), checked=False).bytes_read < load_for_inference(path, Small()).bytes_read
