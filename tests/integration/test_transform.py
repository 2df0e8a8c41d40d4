"""Four ranks are killed; what they left is moved to another layout; a resume from there is one from the original."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import lastwords
from demo.transformer.layouts import LAYOUTS, Task
from demo.transformer.model import Shape, Transformer
from demo.transformer.text import Text
from lastwords.checkpoint.boxes import whole
from lastwords.checkpoint.load import latest, open_checkpoint
from lastwords.checkpoint.reshard.strategy import Cut, Held, Strategy, save_strategy_file, strategy_of
from lastwords.cli.main import main
from lastwords.integrations.diff import diff
from tests.integration.forked import on_ranks
from tests.integration.parallel_layouts import parallel_layout
from tests.integration.rig import Rig
from tests.integration.test_elastic import KILL, Counter, live, naive_gather
from tests.integration.test_reshard import made, resumed_as, saved_as
from tests.integration.training import LEARNING_RATE, PhasedAdamW

pytestmark = pytest.mark.process


def first_ranks(strategy: Strategy, count: int) -> Strategy:
    """The same layout with the first ranks' replicas only."""
    tensors = {
        name: Cut(
            cut.dtype, cut.shape, tuple(Held(one.box, tuple(r for r in one.ranks if r < count)) for one in cut.held)
        )
        for name, cut in strategy.tensors.items()
    }
    return Strategy(count, tensors)


@pytest.mark.thorough
def test_a_resume_from_what_was_moved_is_a_resume_from_the_original(rig: Rig, tmp_path: Path) -> None:
    layout = parallel_layout("tp")
    launch, step = rig.die(layout, KILL)
    [path] = launch.checkpoints
    gathered = naive_gather(path)
    strategy = first_ranks(strategy_of(open_checkpoint(path).manifest), 2)
    save_strategy_file(strategy, tmp_path / "two")
    moved = {}
    for name, to in (("two", str(tmp_path / "two")), ("one", "whole")):
        root = tmp_path / f"moved to {name}"
        assert main(["transform", str(path), str(root), "--to", to]) == 0
        moved[name] = root
        assert not diff(path, root).differences
        found = open_checkpoint(root / path.name).manifest
        assert (found.world_size, found.holders_world_size) == (4, 2 if name == "two" else 1)
        assert found.locals.keys() == open_checkpoint(path).manifest.locals.keys()
        assert naive_gather(root / path.name) == gathered

    extras = open_checkpoint(path).manifest.units["replicated"].meta.extras
    assert extras is not None
    names = set(extras.states)
    shape = Shape(context=8, width=16, layers=2, dropout=0.1 if layout.dropout else 0.0)
    options = {"lr": LEARNING_RATE, "weight_decay": 0.1}

    def body(root: Path, ranks: int) -> Any:
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
        wrapped = lastwords.OptTFTWrapper(optimizer)
        with lastwords.TFTRegister(
            0, "127.0.0.1", 1, str(root), model=model, optimizer=wrapped, extras={name: Counter() for name in names}
        ) as tft:
            point = tft.resume()
            assert point is not None
            state = live(model, optimizer)
            streams = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
            epoch, number, batch = next(iter(tft.steps(loader, 2)))
            first = hashlib.sha256(repr([item.tolist() for item in batch]).encode()).hexdigest()
            return state, point.global_step, point.exact, point.reasons, streams, (epoch, number, first)

    for ranks, where in ((2, "two"), (1, "one")):
        answers = []
        for root in (path.parent, moved[where]):
            room = tmp_path / f"on {ranks} from {where} {len(answers)}"
            room.mkdir()
            answers.append(on_ranks(lambda rank, n=ranks, r=root: body(r, n), room, ranks))
        assert answers[0] == answers[1], "the place in the data, the streams and the reasons are those of the original"
        for state, global_step, exact, _, _, _ in answers[1]:
            assert {name for name in gathered.keys() | state.keys() if gathered.get(name) != state.get(name)} == set()
            assert (global_step, exact) == (step, False)


def dealt_out(strategy: Strategy, ranks: int) -> Strategy:
    """All weights on every rank, the optimizer's state of each parameter on one of them: what ZeRO's strategy says."""
    everyone = tuple(range(ranks))
    tensors: dict[str, Cut] = {}
    for place, (name, cut) in enumerate(sorted(strategy.tensors.items())):
        box = whole(cut.shape)
        if name.startswith("model/"):
            tensors[name] = Cut(cut.dtype, cut.shape, (Held(box, everyone),))
            tensors[f"optim/{name.removeprefix('model/')}"] = Cut("", cut.shape, (Held(box, (place % ranks,)),))
    return Strategy(ranks, tensors)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "resumed"), [("fsdp x tp", (("plain", 1), ("fsdp", 3))), ("zero1", (("zero1", 3),))]
)
def test_the_optimizer_can_be_dealt_out_and_shards_be_uneven(
    layout: str, resumed: tuple[tuple[str, int], ...], tmp_path: Path
) -> None:
    """From four ranks to the strategy of a ZeRO of three, and from there to others."""
    state = saved_as(layout, 4, tmp_path)
    path = latest(tmp_path / "ckpt")
    assert path is not None
    save_strategy_file(dealt_out(strategy_of(open_checkpoint(path).manifest), 3), tmp_path / "dealt out")
    assert main(["transform", str(path), str(tmp_path / "three"), "--to", str(tmp_path / "dealt out")]) == 0
    moved = latest(tmp_path / "three")
    assert moved is not None
    assert not diff(path, moved).differences
    units = open_checkpoint(moved).manifest.units
    assert not units["rank-1"].meta.parameters
    assert units["rank-1"].meta.optimizer_state
    assert not units["replicated"].meta.optimizer_state
    for name, ranks in resumed:
        found, reasons, _ = resumed_as(name, ranks, tmp_path / "three", tmp_path)
        assert {key for key in state.keys() | found.keys() if state.get(key) != found.get(key)} == set()
        assert any("in a different order" in reason for reason in reasons)


def test_the_strategy_of_a_live_job_that_has_not_taken_a_step_is_enough(tmp_path: Path) -> None:
    """ZeRO of four is moved to what a ZeRO of three says of itself, and resumed as that."""
    state = saved_as("zero1", 4, tmp_path)

    def describe(rank: int) -> None:
        run = made("zero1", 7)
        lastwords.save_strategy(run.trial.model, run.trial.optimizers[0], str(tmp_path / "live"))

    room = tmp_path / "describe"
    room.mkdir()
    on_ranks(describe, room, 3)
    path = latest(tmp_path / "ckpt")
    assert path is not None
    assert main(["transform", str(path), str(tmp_path / "three"), "--to", str(tmp_path / "live")]) == 0
    assert not diff(path, tmp_path / "three").differences
    found, _, _ = resumed_as("zero1", 3, tmp_path / "three", tmp_path)
    assert {key for key in state.keys() | found.keys() if state.get(key) != found.get(key)} == set()
