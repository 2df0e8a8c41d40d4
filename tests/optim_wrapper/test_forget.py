"""State that nothing reads after a step, as the user says: neither saved nor a reason."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lastwords import TFTRegister
from lastwords.checkpoint.meta import StepDocument
from lastwords.errors import ConfigError
from lastwords.optim_wrapper.launch.config import Config
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.state.attributes import Attributes, saved_in
from lastwords.optim_wrapper.trainer.job_shape import Options, settings_of
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from tests import golden
from tests.ledgers import told


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.levels: Any = None
        self.calls = 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.box_pool, self.mask_pool = Pool(), Pool()

    def forward(self) -> None:
        for pool in (self.box_pool, self.mask_pool):
            pool.levels = logging.Formatter()  # of a class of an installed package, as a detector's levels are
            pool.calls += 1


def looked_at(*forget: str) -> tuple[Attributes, dict[str, Any]]:
    """After a few steps; and what is saved of them."""
    net = Net()
    watch = Attributes({"model": net}, dict, Ledger(forget))
    watch.begin()
    for _ in range(3):
        net()
        watch.look()
        watch.end_step()
        document = watch.document()
        watch.ended()
    net()
    return watch, dict(saved_in(StepDocument(**document), "x").values)


def about(watch: Attributes) -> set[str]:
    return {pool for pool in ("box_pool", "mask_pool") if any(f"{pool}.levels" in why for why in told(watch))}


@pytest.mark.parametrize(
    ("forget", "left"),
    [
        ((), {"box_pool", "mask_pool"}),
        (("model.*.levels",), set()),
        (("model.mask_pool.levels",), {"box_pool"}),
        (("model.mask_pool",), {"box_pool"}),
        (("model.levels", "*_pool.level"), {"box_pool", "mask_pool"}),
        (("model.*pool.level?",), {"box_pool", "mask_pool"}),  # only * stands for something else
    ],
)
def test_what_is_forgotten_is_neither_told_nor_saved(forget: tuple[str, ...], left: set[str]) -> None:
    watch, saved = looked_at(*forget)
    assert about(watch) == left
    assert not {path for path in saved if path.endswith(".levels") and path.split(".")[1] not in left}
    assert {name.split(".")[1] for name in watch.moved if ".levels" in name} == left
    calls = {path for path, keys in saved.items() if "calls" in keys}
    assert calls == {"model.box_pool", "model.mask_pool"} - {*forget}
    assert {one.split(".")[1] for one in watch.ledger.forgotten} == {"box_pool", "mask_pool"} - left


def test_an_incident_does_not_find_it_either() -> None:
    class Late(Net):
        def forward(self) -> None:
            self.box_pool.levels = logging.Formatter()

    net = Late()
    for forget, found in (((), ["model.box_pool.levels"]), (("model.*.levels",), [])):
        net.box_pool.levels = None
        watch = Attributes({"model": net}, dict, Ledger(forget))
        watch.begin()
        net()
        assert watch.unseen() == found


def test_what_an_older_checkpoint_has_of_it_is_not_put_back() -> None:
    """And where it is missing nothing is said."""
    net, again = Net(), Net()
    for one in (net, again):
        one.box_pool.meters = []
    watch = Attributes({"model": net}, dict)
    watch.begin()
    net.box_pool.meters.append(Pool())
    net.box_pool.calls = 3
    watch.look()
    saved = saved_in(StepDocument(**watch.document()), "x").values
    for forget, missing in ((("model.*.meters",), False), ((), True)):
        other = Attributes({"model": again}, dict, Ledger(forget))
        other.begin()
        assert bool(other.put(saved)) is missing
        assert again.box_pool.calls == 3


@pytest.mark.parametrize("forget", ["model.x", [""], [3], None, {"model.x"}])
def test_only_a_list_of_names_is_taken(tmp_path: Path, forget: Any) -> None:
    model = nn.Linear(1, 1)
    optimizer = OptTFTWrapper(torch.optim.SGD(model.parameters(), 0.1))
    with golden.raises(ConfigError):
        TFTRegister(0, "127.0.0.1", 1, tmp_path, model=model, optimizer=optimizer, forget=forget)


def test_ranks_compare_it_as_it_comes_out_of_json(tmp_path: Path) -> None:
    config = Config.from_env(0, "127.0.0.1", 1, tmp_path, environ={})
    settings = settings_of(config, Options(forget=("model.*.cache", "loader.seen")), 1, 2)
    assert json.loads(json.dumps(settings)) == settings
    assert settings["forget"] == ["model.*.cache", "loader.seen"]


@pytest.mark.parametrize("forget", ["model.box_pool.shared", "model.mask_pool.shared"])
def test_what_has_another_name_too_is_saved_under_that_one(forget: str) -> None:
    net = Net()
    net.box_pool.shared = net.mask_pool.shared = []
    watch = Attributes({"model": net}, dict, Ledger([forget]))
    watch.begin()
    net.box_pool.shared.append(1)
    watch.look()
    saved = dict(saved_in(StepDocument(**watch.document()), "x").values)
    kept = "model.mask_pool" if "box" in forget else "model.box_pool"
    assert saved == {kept: {"shared": ({"plain": [1]}, {})}}


def test_generators_and_odd_objects_are_forgotten_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    for forget, found in (((), True), (("model.box_pool",), False)):
        net = Net()
        watch = Attributes({"model": net}, dict, Ledger(forget))
        watch.begin()
        net.box_pool.generator = torch.Generator()
        assert ("model.box_pool.generator" in watch.unseen()) is found
        watch.look()
        assert ("model.box_pool.generator" in watch.generators.names) is found
