"""Four ranks, tensor parallelism of two by two replicas, are killed; two ranks and one go on with what they left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

import lastwords
from demo.transformer.layouts import LAYOUTS, Task
from demo.transformer.model import Shape, Transformer
from demo.transformer.text import Text
from lastwords.checkpoint.load import open_checkpoint
from tests.integration.forked import on_ranks
from tests.integration.moving import naive_gather
from tests.integration.parallel_kills import ShardedKill
from tests.integration.parallel_layouts import parallel_layout
from tests.integration.rig import Rig
from tests.integration.training import LEARNING_RATE, PhasedAdamW

pytestmark = pytest.mark.process

KILL = ShardedKill("gate", 2, (0,), "free")


class Counter:
    """Extras of the killed run that nothing here looks into."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def live(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    found = {}
    for name, parameter in model.named_parameters():
        tensors = {name: parameter, **{f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}}
        for key, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[key] = whole.detach().contiguous().numpy().tobytes()
    return found


def test_killed_on_four_ranks_it_goes_on_on_two_and_on_one_with_the_same_state(rig: Rig, tmp_path: Path) -> None:
    layout = parallel_layout("tp")
    launch, step = rig.die(layout, KILL)
    [path] = launch.checkpoints
    whole = naive_gather(path)
    extras = open_checkpoint(path).manifest.units["replicated"].meta.extras
    assert extras is not None
    names = set(extras.states)
    shape = Shape(context=8, width=16, layers=2, dropout=0.1 if layout.dropout else 0.0)
    options = {"lr": LEARNING_RATE, "weight_decay": 0.1}

    def body(rank: int, ranks: int) -> Any:
        # Nothing has to be protected here, and gRPC must not be started in the fork of a process that has used it.
        os.environ["MS_ENABLE_TFT"] = "{TTP:0}"
        torch.manual_seed(99)
        model: torch.nn.Module
        if ranks == 1:
            model = Transformer(shape)
            optimizer: Any = PhasedAdamW(model.parameters(), **options)
        else:
            parallel = LAYOUTS["tp"](Task(shape, 8, 2, PhasedAdamW, options))
            model, optimizer = parallel.model, parallel.optimizer
        text = Text(shape.context, 24)
        loader = DataLoader(text, 4, sampler=DistributedSampler(text, 1, 0))
        extras = {name: Counter() for name in names}
        wrapped = lastwords.OptTFTWrapper(optimizer)
        with lastwords.TFTRegister(
            0, "127.0.0.1", 1, str(path.parent), model=model, optimizer=wrapped, extras=extras
        ) as tft:
            point = tft.resume()
            assert point is not None
            state = live(model, optimizer)
            first = next(iter(tft.steps(loader, 2)))[:2]
            return state, point.global_step, point.exact, point.reasons, first

    for ranks in (2, 1):
        room = tmp_path / f"on{ranks}"
        room.mkdir()
        for state, global_step, exact, reasons, _ in on_ranks(lambda rank, n=ranks: body(rank, n), room, ranks):
            assert {name for name in whole.keys() | state.keys() if whole.get(name) != state.get(name)} == set()
            assert global_step == step
            assert not exact
            line = f"resumed on {ranks} rank" + "s" * (ranks > 1) + " from a checkpoint saved on 4"
            assert next(reason for reason in reasons if reason.startswith("resumed on")).startswith(line)
