"""Exported files are what plain safetensors reads, with an index as transformers has it."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model

from lastwords.checkpoint.system import Os
from lastwords.cli.main import ExitCode, main
from lastwords.errors import ConfigError, FormatError, StorageError
from lastwords.integrations.dcp_out import to_dcp
from lastwords.integrations.export import export_safetensors
from tests import golden
from tests.integration.saved_layouts import bits
from tests.integrations.made import Small, flip, published, saved, trained, unit


def test_shards_and_index_hold_every_weight_and_persistent_buffer_once(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    saved(tmp_path, model, optimizer)
    files = export_safetensors(tmp_path, tmp_path / "out", shard_bytes_max=64)
    index = json.loads(files[-1].read_text())
    count = len(files) - 1
    assert count > 2
    assert [file.name for file in files[:-1]] == [
        f"model-{k:05}-of-{count:05}.safetensors" for k in range(1, count + 1)
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(file.name for file in files)
    found = {name: tensor for file in files[:-1] for name, tensor in load_file(file).items()}
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    assert {name: bits(tensor) for name, tensor in found.items()} == {n: bits(t) for n, t in state.items()}
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in state.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert set(index["weight_map"]) == set(found)
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
            assert opened.metadata()["format"] == "pt"


def test_a_single_file_is_loaded_by_safetensors_with_its_tied_weights(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    saved(tmp_path, model, optimizer)
    file, _ = export_safetensors(tmp_path, tmp_path / "out")
    other = Small()
    assert load_model(other, file) == (set(), [])
    assert torch.equal(other.head.weight, model.up.weight)
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["head.weight"] == "up.weight"


def test_names_are_chosen_by_patterns_and_floating_point_tensors_get_another_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained(0)
    model.register_buffer("count", torch.arange(3))
    saved(tmp_path / "saved", model, optimizer)
    out = tmp_path / "out"
    command = ["export", str(tmp_path / "saved"), str(out), "--name", "head.*", "--name", "count", "--name", "scale"]
    assert main([*command, "--dtype", "bfloat16", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert sorted(printed["files"]) == sorted(path.name for path in out.iterdir())
    found = load_file(out / printed["files"][0])
    # head.weight is tied: it stands under its first name.
    assert set(found) == {"up.weight", "head.bias", "count", "scale"}
    assert found["count"].dtype is torch.int64
    assert torch.equal(found["up.weight"], model.up.weight.detach().to(torch.bfloat16))
    index = json.loads((out / printed["files"][-1]).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    for wrong in (["--name", "nothing*"], ["--dtype", "int8"], ["--dtype", "float99"]):
        assert main(["export", str(tmp_path / "saved"), str(tmp_path / "no"), *wrong]) == 2
    assert not (tmp_path / "no").exists()


def test_shards_of_a_sharded_job_are_joined(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    boxes = (((0, 0), (6, 1)), ((0, 1), (6, 3)))
    states = {
        rank: {f"rank-{rank}": unit(f"rank-{rank}", [("w", whole, box)], (rank,))} for rank, box in enumerate(boxes)
    }
    file, _ = export_safetensors(published(tmp_path, states), tmp_path / "out")
    assert torch.equal(load_file(file)["w"], whole)


def test_a_destination_that_exists_is_left_alone(tmp_path: Path) -> None:
    saved(tmp_path, *trained(0))
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    with golden.raises(ConfigError):
        export_safetensors(tmp_path, out)
    assert [path.name for path in out.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    "command",
    [
        ("export", "CK", "CK/out"),
        ("convert", "CK", "CK/rank_0/out", "--to", "dcp"),
        ("convert", "DCP", "CK", "--to", "lastwords"),
        ("transform", "CK", "CK", "--to", "whole"),
        ("transform", "CK", "CK/deeper", "--to", "whole", "--dry-run"),
        ("upload", "ROOT", "file://CK"),
        ("upload", "ROOT", "file://CK/deeper"),
    ],
    ids=" ".join,
)
def test_nothing_is_written_into_a_checkpoint(
    tmp_path: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "ckpt"
    checkpoint = saved(root, *trained(0))
    places = {"CK": checkpoint, "ROOT": root, "DCP": to_dcp(root, tmp_path / "dcp")}
    before = sorted(root.rglob("*"))
    arguments = [*command]
    for name, place in places.items():
        arguments = [word.replace(name, str(place)) for word in arguments]
    assert main(arguments) == ExitCode.USAGE
    assert str(checkpoint) in capsys.readouterr().err
    assert sorted(root.rglob("*")) == before


def test_a_damaged_source_and_a_type_without_a_code_leave_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", *trained(0))
    (file,) = path.rglob("*.ckpt")
    flip(file, file.stat().st_size - 1)
    with golden.raises(FormatError):
        export_safetensors(path, tmp_path / "out")
    (tmp_path / "b").mkdir()
    odd = published(
        tmp_path / "b", {0: {"replicated": unit("replicated", [("w", torch.zeros(2, dtype=torch.complex128), None)])}}
    )
    with golden.raises(ConfigError):
        export_safetensors(odd, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


class FullDisk(Os):
    """Takes `room` bytes, then has no space."""

    def __init__(self, room: int) -> None:
        self.room = room

    def create(self, path: Path, *, direct: bool) -> int:
        if direct:
            raise OSError(errno.EINVAL, "Invalid argument")  # else each write is of whole blocks
        return super().create(path, direct=direct)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(data)
        return super().pwrite(fd, data, offset)


@pytest.mark.parametrize("room", [0, 100, 500, 1000])
def test_a_full_disk_half_way_leaves_nothing(room: int, tmp_path: Path) -> None:
    saved(tmp_path / "saved", *trained(0))
    with golden.raises(StorageError):
        export_safetensors(tmp_path / "saved", tmp_path / "out", shard_bytes_max=64, os=FullDisk(room))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    export_safetensors(tmp_path / "saved", tmp_path / "out", shard_bytes_max=64, os=FullDisk(10**6))
