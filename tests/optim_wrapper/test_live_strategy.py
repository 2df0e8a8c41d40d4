"""`save_strategy` in a job of one, whatever stage the model is in; and what cannot be described is said in words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lastwords
from lastwords.checkpoint.boxes import whole
from lastwords.checkpoint.reshard.strategy import Held, load_strategy
from lastwords.errors import ConfigError, StorageError, UnavailableError
from tests import golden


class Net(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.up = nn.Linear(3, 4, device=device)
        self.odd = nn.Parameter(torch.zeros(2, dtype=torch.complex128, device=device))
        self.down = nn.Module()
        self.down.tied = self.up.weight
        self.frozen = nn.Parameter(torch.zeros(2, device=device), requires_grad=False)
        self.register_buffer("table", torch.zeros(20_000, device=device))
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("cache", None, persistent=False)


def trained(net: Net) -> list[nn.Parameter]:
    return [parameter for parameter in net.parameters() if parameter.requires_grad]


def test_one_process_holds_everything_whole_and_its_rank_local_buffers_are_in_no_strategy(tmp_path: Path) -> None:
    net = Net()
    lastwords.save_strategy(net, torch.optim.AdamW(trained(net)), tmp_path / "one")
    strategy = load_strategy(tmp_path / "one")
    assert strategy.world_size == 1
    assert sorted(strategy.tensors) == [
        "buffer/table", "model/frozen", "model/odd", "model/up.bias", "model/up.weight",
        "optim/odd", "optim/up.bias", "optim/up.weight",
    ]  # fmt: skip
    assert all(cut.held == (Held(whole(cut.shape), (0,)),) for cut in strategy.tensors.values())
    odd, state = strategy.tensors["model/odd"], strategy.tensors["optim/odd"]
    assert (odd.dtype, odd.shape) == ("U8", (2, 16)), "as a checkpoint stores it"
    assert (state.dtype, state.shape) == ("", (2, 16))


def test_a_model_without_content_has_the_same_strategy(tmp_path: Path) -> None:
    for device in ("cpu", "meta"):
        net = Net(device)
        lastwords.save_strategy(net, torch.optim.SGD(trained(net), lr=0.1), str(tmp_path / device))
    assert load_strategy(tmp_path / "meta") == load_strategy(tmp_path / "cpu")


def test_wrappers_and_several_optimizers_are_taken(tmp_path: Path) -> None:
    net = Net()
    first, *others = trained(net)
    wrapped = [lastwords.OptTFTWrapper(torch.optim.SGD([first], 0.1)), torch.optim.AdamW(others)]
    lastwords.save_strategy(net, wrapped, tmp_path / "two")
    lastwords.save_strategy(net, torch.optim.SGD(trained(net), 0.1), tmp_path / "one")
    assert load_strategy(tmp_path / "two") == load_strategy(tmp_path / "one")


@pytest.mark.parametrize(
    "change",
    [
        {"model": 3},
        {"optimizer": None},
        {"optimizer": []},
        {"path": b"file"},
        {"path": ""},
        {"units": "all"},
        {"units": [lastwords.Unit("a", (5,))]},
        {"units": [lastwords.Unit("a", (0,), ("up.*",), {"down.*": lastwords.Part(dim=0, index=0, of=1)})]},
        {"units": [lastwords.Unit("a", (0,), cuts={"up.weight": lastwords.Part(dim=0, index=0, of=2)})]},
        {"group": "world"},
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_in_words_and_nothing_is_written(change: dict[str, Any], tmp_path: Path) -> None:
    net = Net()
    right: dict[str, Any] = {
        "model": net, "optimizer": torch.optim.SGD(trained(net), lr=0.1), "path": tmp_path / "file"
    }  # fmt: skip
    with golden.raises(ConfigError):
        lastwords.save_strategy(**{**right, **change})
    assert os.listdir(tmp_path) == []
    lastwords.save_strategy(**right)


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(trained(net), lr=0.1)
    lastwords.save_strategy(net, optimizer, tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    with golden.raises(StorageError):
        lastwords.save_strategy(net, optimizer, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]


def test_ranks_without_a_process_group_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    net = Net()
    with pytest.raises((ConfigError, UnavailableError), match="init_process_group"):
        lastwords.save_strategy(net, torch.optim.SGD(trained(net), lr=0.1), tmp_path / "file")
