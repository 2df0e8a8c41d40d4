"""Stages that number their layers from 0 move to other layouts, once `names=` says what these are in the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lastwords
from lastwords.checkpoint.reshard.strategy import load_strategy
from tests.integration.forked import on_ranks
from tests.integration.layouts import LAYOUTS, Net, Trial, adamw, stages
from tests.integration.test_layouts import SAVED, Rank, raw

pytestmark = pytest.mark.process


def named_stages() -> Trial:
    trial = stages()
    stage = dist.get_rank() // 2
    trial.names = lambda own: f"stages.{stage}.{own}"
    return trial


def both() -> Trial:
    model = nn.Module()
    model.stages = nn.ModuleList([Net(10), Net(14)])
    return Trial(model, [adamw(model)], 0)


def state_of(run: Rank) -> dict[str, bytes]:
    names = run.recorder.view.all_names()
    state = run.trial.optimizers[0].state
    found = {name: raw(tensor) for name, tensor in {**names.parameters, **names.buffers}.items()}
    return found | {
        f"{name}/{key}": raw(value)
        for name, parameter in names.parameters.items()
        for key, value in state.get(parameter, {}).items()
    }


def test_two_stages_of_the_same_names_are_one_model_and_two_stages_again(tmp_path: Path) -> None:
    LAYOUTS.update({"named stages": named_stages, "both": both})

    def run_as(name: str, ranks: int, seed: int, resume: str, save: str, steps: int = 0) -> dict[str, bytes]:
        def body(rank: int) -> dict[str, bytes]:
            run = Rank(name, seed)
            fresh = state_of(run)
            if resume:
                run.resume(tmp_path / resume)
            run.train(1, steps)
            arguments: Any = (run.trial.model, run.trial.optimizers, tmp_path / f"strategy of {save}")
            lastwords.save_strategy(*arguments, units=run.trial.units, names=run.trial.names)
            run.recorder.end_step(SAVED, run.recorder.position_under_way)
            run.save(tmp_path / save, SAVED)
            assert state_of(run) != fresh
            return state_of(run)

        (tmp_path / f"as {save}").mkdir()
        joined: dict[str, bytes] = {}
        for answer in on_ranks(body, tmp_path / f"as {save}", ranks):
            for tensor, content in answer.items():
                assert joined.setdefault(tensor, content) == content
        return joined

    trained = run_as("named stages", 4, 0, "", "first", SAVED)
    assert {"stages.0.frozen", "stages.1.frozen", "stages.1.blocks.1.up.weight/exp_avg"} < trained.keys()
    assert run_as("both", 1, 1, "first", "second") == trained
    assert run_as("named stages", 4, 2, "second", "third") == trained
    strategy = load_strategy(tmp_path / "strategy of third")
    assert strategy.tensors["optim/stages.1.blocks.0.gain"].held[0].ranks == (2, 3)
    assert strategy.tensors.keys() == load_strategy(tmp_path / "strategy of second").tensors.keys()


def test_a_naming_that_gives_no_name_or_one_name_twice_is_refused_before_anything_starts() -> None:
    net = nn.Linear(2, 2)
    wrapper = lastwords.OptTFTWrapper(torch.optim.SGD(net.parameters(), lr=0.1))

    def register(names: Any) -> None:
        lastwords.TFTRegister(0, "127.0.0.1", 30051, "unused", model=net, optimizer=wrapper, names=names)

    for names, words in (
        (lambda own: "w", "'weight' and 'bias'"),
        (lambda own: None, r"names\('weight'\) is None"),
        (lambda own: "~" + own, r"names\('weight'\) is '~weight'"),
        ("stage", r"names is 'stage'"),
    ):
        with pytest.raises(lastwords.ConfigError, match=words):
            register(names)
