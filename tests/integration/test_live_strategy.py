"""What `save_strategy` reads from a live job is what a checkpoint of that job is found to be divided into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lastwords
from lastwords.checkpoint.load import latest, open_checkpoint
from lastwords.checkpoint.reshard.strategy import Strategy, load_strategy, strategy_of
from lastwords.errors import ConfigError, LastWordsError, StorageError
from lastwords.integrations.catalogue import catalogue
from lastwords.sharding.declare import Unit
from tests.integration.forked import on_ranks
from tests.integration.layouts import LAYOUTS, Net, build
from tests.integration.test_hand_cut import MADE
from tests.integration.test_layouts import SAVED, Rank

pytestmark = pytest.mark.process

SAME = {
    "ddp": 1,
    "hsdp": 2,
    "fsdp x tp": 4,
    "ddp over tp": 2,
    "fsdp, two optimizers": 4,
    "zero1 halves beside another optimizer": 1,
    "2 x 2": 2,
    "2 x 2, zero": 2,
}
"""Layout, and into how many parts its most divided tensor is cut."""


def saved(path: Path, trial: Any, **options: Any) -> None:
    lastwords.save_strategy(trial.model, trial.optimizers, path, units=trial.units, **options)


@pytest.mark.thorough
def test_the_file_says_what_a_checkpoint_of_the_job_says_before_its_first_step_too(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        LAYOUTS.update(MADE)
        for number, name in enumerate(SAME):
            run = Rank(name, 0)
            saved(tmp_path / f"before-{number}", run.trial)
            run.train(1, SAVED)
            saved(tmp_path / f"after-{number}", run.trial)
            run.save(tmp_path / f"ckpt-{number}", SAVED)

    on_ranks(body, tmp_path, 4)
    for number, (name, parts) in enumerate(SAME.items()):
        path = latest(tmp_path / f"ckpt-{number}")
        assert path is not None
        published = strategy_of(open_checkpoint(path).manifest)
        before = load_strategy(tmp_path / f"before-{number}")
        assert before == load_strategy(tmp_path / f"after-{number}"), "a step changes nothing about who holds what"
        assert max(len(cut.held) for cut in before.tensors.values()) == parts, name
        before.check()
        _same(name, before, published)
        whole = catalogue(open_checkpoint(path))
        moments = [
            (fqn, value)
            for fqn, state in whole.state.items()
            for key, value in state.items()
            if key in ("exp_avg", "exp_avg_sq", "momentum_buffer")
        ]
        assert len(moments) > 2
        for fqn, moment in moments:
            assert moment.shape == whole.parameters[fqn].shape, f"{name}: a moment of {fqn} is not seen whole"


def _same(name: str, found: Strategy, published: Strategy) -> None:
    assert found.world_size == published.world_size == 4
    for tensor, cut in published.tensors.items():
        kind, _, rest = tensor.partition("/")
        if kind == "optim":
            fqn, _, key = rest.rpartition("/")
            assert found.state_held(fqn, key, cut.shape) == cut.held, (name, tensor)
            continue
        listed = found.tensors[tensor]
        assert (listed.dtype, listed.shape) == (cut.dtype, cut.shape)
        if "zero" in name and f"optim/{rest}" in found.tensors:
            # Weights are on all ranks and their state on the owners; a checkpoint has both where the owners are.
            owners = found.tensors[f"optim/{rest}"]
            for everybody, own in zip(listed.held, owners.held, strict=True):
                dealt_out = rest != "blocks.1.down.bias"  # which is another optimizer's
                assert (own.ranks != everybody.ranks) == dealt_out
                assert {*own.ranks} <= {*everybody.ranks}
            listed = owners
        assert listed.held == cut.held, (name, tensor)
    of_model = [{one for one in strategy.tensors if one[:5] != "optim"} for strategy in (found, published)]
    assert of_model[0] == of_model[1], name


def stage_of(rank: int) -> nn.Module:
    """Two stages of two replicas each, with names of their own, and one weight that both have."""
    stage = rank // 2
    model = nn.Module()
    model.layers = nn.ModuleDict({str(stage): nn.Linear(4, 4 + stage)})
    model.tied = nn.Parameter(torch.ones(3))
    return model


def test_each_stage_writes_its_own_file_and_they_are_joined(tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()

    def body(rank: int) -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = stage_of(rank)
        optimizer = torch.optim.AdamW(model.parameters())
        stage = rank // 2
        lastwords.save_strategy(model, optimizer, tmp_path / "stages" / f"stage-{stage}", group=groups[stage])
        if stage == 1:  # not every stage has to call it as often as the others
            lastwords.save_strategy(model, optimizer, tmp_path / "once more", group=groups[stage])
        lastwords.save_strategy(model, optimizer, tmp_path / "whole job")

    on_ranks(body, tmp_path, 4)
    lastwords.merge_pipeline_strategys(str(tmp_path / "stages"), str(tmp_path / "joined"))
    joined = load_strategy(tmp_path / "joined")
    assert joined == load_strategy(tmp_path / "whole job")
    assert joined.world_size == 4
    assert joined.tensors["optim/layers.1.weight"].held[0].ranks == (2, 3)
    assert joined.tensors["model/tied"].held[0].ranks == (0, 1, 2, 3)
    assert load_strategy(tmp_path / "once more") == load_strategy(tmp_path / "stages" / "stage-1")
    assert lastwords.rank_list_for_transform(0, str(tmp_path / "joined")) == [0, 2]


def test_what_has_no_strategy_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("older")

    def body(rank: int) -> list[str]:
        texts: list[str] = []

        def refused(kind: type[LastWordsError], *arguments: Any, **options: Any) -> None:
            with pytest.raises(LastWordsError) as caught:
                lastwords.save_strategy(*arguments, **options)
            assert type(caught.value) is kind
            texts.append(str(caught.value))

        for name in ("tp by hand", "pipeline stages"):
            trial = build(name, 0)
            refused(ConfigError, trial.model, trial.optimizers, tmp_path / "none", units=trial.units)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        refused(StorageError, net, optimizer, tmp_path / "there")
        refused(ConfigError, net, "sgd" if rank == 2 else optimizer, tmp_path / "none")
        refused(ConfigError, net, optimizer, None if rank == 0 else tmp_path / "none")
        refused(ConfigError, net, optimizer, tmp_path / "none", units=(Unit("a", (rank,)),))
        refused(ConfigError, net, optimizer, tmp_path / "none", units=7 if rank == 1 else ())
        refused(ConfigError, net, optimizer, tmp_path / f"of rank {rank // 2}")
        refused(StorageError, net, optimizer, tmp_path / "no such directory" / "file")
        lastwords.save_strategy(net, optimizer, tmp_path / "good")  # nobody has lost count
        return texts

    for texts in on_ranks(body, tmp_path, 4):
        by_hand, stages, there, no_optimizer, no_path, units, no_units, paths, nowhere = texts
        assert f"(rank 0, 1: '{tmp_path}/of rank 0'; rank 2, 3: '{tmp_path}/of rank 1')" in paths
        assert "parameter 'up', a whole of (4, 6): the declared unit 'tp-0' and the declared unit 'tp-1'" in by_hand
        assert "both hold [0:4, 0:6] of it, as two tensors; if these are parts of one tensor" in by_hand
        assert "give them different names" in stages
        assert "exists already, and a strategy is never overwritten" in there
        assert "optimizer must be a torch.optim.Optimizer" in no_optimizer
        assert "path is None" in no_path
        assert "rank 1 has different units= than rank 0" in units
        assert "units must be a list of lastwords.Unit" in no_units
        assert "No such file or directory" in nowhere
    assert (tmp_path / "there").read_text() == "older"
    assert not (tmp_path / "none").exists()
    assert not list(tmp_path.glob(".tmp-*"))
