"""In every parallel layout the units are found, each is written by one holder, and all ranks go on bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lastwords.checkpoint import layout as disk
from lastwords.checkpoint.part import write_part
from lastwords.checkpoint.publish import Incident, publish, verify_parts
from lastwords.optim_wrapper.ddp_buckets import BucketOrder
from lastwords.optim_wrapper.recorder import StepRecorder
from lastwords.optim_wrapper.resume import resume_from
from lastwords.optim_wrapper.world import World, next_prefix
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.saver import Position
from lastwords.sharding.dtensor import local_of
from lastwords.sharding.zero import stateful
from lastwords.vocabulary import Phase, Stand
from tests.integration.forked import on_ranks
from tests.integration.layouts import LAYOUTS, Trial, build

pytestmark = pytest.mark.process

SAVED = 3
STEPS = 7


class Rank:
    """One rank of a run: what `TFTRegister` does, without a controller."""

    def __init__(self, name: str, seed: int) -> None:
        self.world = World()
        self.trial: Trial = build(name, seed)
        self.optimizer = OptTFTWrapper(self.trial.optimizer)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.recorder = StepRecorder(self.trial.model, self.optimizer, {"scheduler": self.scheduler}, {})
        self.buckets = BucketOrder.observe(self.trial.model)
        self.units = self.recorder.agree_units(self.world, next_prefix(), self.trial.units)
        record = self.buckets.record
        pure = self.units.pure
        self.recorder.make_source(
            lambda rank: Path("/nowhere"),
            lambda step: {"buckets": record(step)} if pure else {},
            None if pure else record,
        )
        self.recorder.begin(0, Position(1, 0))

    def train(self, first: int, last: int) -> list[Any]:
        """Loss and bits after each of these steps."""
        seen = []
        for number in range(first, last + 1):
            loss = self.trial.step(number)
            self.scheduler.step()
            self.recorder.committed(number, Position(1, number))
            self.buckets.step_ended(number)
            seen.append((loss, self.bits()))
        return seen

    def bits(self) -> int:
        """Hash of all that this rank has: weights, buffers, optimizer state and hyperparameters."""
        parts: list[Any] = []
        names = self.recorder.view.all_names()
        state = stateful(self.trial.optimizer).state
        for name, tensor in sorted({**names.parameters, **names.buffers}.items()):
            parts.append((name, raw(tensor)))
            for key, value in sorted(state.get(tensor, {}).items()):
                parts.append((key, raw(value) if isinstance(value, torch.Tensor) else value))
        for group in self.trial.optimizer.param_groups:
            parts.append(sorted((key, str(value)) for key, value in group.items() if key != "params"))
        return hash(str(parts))

    def save(self, root: Path, step: int, *, leave_out: str = "") -> None:
        """Every unit by its lowest holder, published by rank 0. leave_out: a unit that goes without optimizer state."""
        source = self.recorder.source
        assert source is not None
        table = self.units.table
        mine = [unit for unit, holders in table.units.items() if holders[0] == self.world.rank]
        directory = root / disk.tmp_dir_name(step, 1, 1, 1)
        with without_optimizer_state(self, leave_out):
            if mine:
                states = {unit: source.unit_state(unit, step, Stand(Phase.COMPUTING, step)) for unit in mine}
                write_part(directory, self.world.rank, 1, step, step, states, {}, source.facts(step), job="job")
        dist.barrier()
        if self.world.rank == 0:
            writers = tuple(sorted({holders[0] for holders in table.units.values()}))
            assert verify_parts(directory, writers, tuple(table.units), (), step) == []
            publish(root, directory, Incident("job", 1, 1, 1, step, self.world.size, writers, "a test"))
        dist.barrier()

    def resume(self, root: Path) -> list[str]:
        """Go on from what is in `root`; why it is not exact, but for the rank-local state, which is not saved."""
        found = resume_from([root], self.world, self.recorder, {}, key=next_prefix(), only_job=None, missing_ok=False)
        assert found is not None
        self.recorder.begin(found.global_step, Position(found.epoch, found.step))
        return [reason for reason in found.reasons if "local state" not in reason and "own state" not in reason]


def raw(tensor: torch.Tensor) -> bytes:
    return local_of(tensor).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@contextlib.contextmanager
def without_optimizer_state(rank: Rank, unit: str) -> Iterator[None]:
    if unit not in rank.units.names:
        yield
        return
    optimizer = stateful(rank.trial.optimizer)
    own = rank.units.views[unit].names().parameters.values()
    taken = {parameter: optimizer.state.pop(parameter) for parameter in own if parameter in optimizer.state}
    assert taken
    yield
    optimizer.state.update(taken)


def round_trip(name: str, root: Path, leave_out: str = "") -> dict[str, Any]:
    """Train, save, train on; then a new process's view: build from another seed, resume, train on."""
    run = Rank(name, seed=0)
    run.train(1, SAVED)
    at = run.bits()
    run.save(root, SAVED, leave_out=leave_out)
    whole = run.train(SAVED + 1, STEPS)
    again = Rank(name, seed=1)
    other = again.bits()
    reasons = again.resume(root)
    restored = again.bits()
    resumed = again.train(SAVED + 1, STEPS)
    return {
        "units": dict(run.units.table.units),
        "mine": run.units.names,
        "nbytes": dict(run.units.table.nbytes),
        "fresh differs": other != at,
        "restored": restored == at,
        "different steps": [
            k for k, pair in enumerate(zip(whole, resumed, strict=True), SAVED + 1) if pair[0] != pair[1]
        ],
        "reasons": reasons,
        "files": sorted(str(path.relative_to(root)) for path in root.rglob("*.ckpt")),
    }


UNITS: dict[str, dict[str, tuple[int, ...]]] = {
    "ddp": {},
    "fsdp": {f"rank-{k}": (k,) for k in range(4)},
    "hsdp": {"ranks-0-2": (0, 2), "ranks-1-3": (1, 3)},
    "tp": {f"rank-{k}": (k,) for k in range(4)},
    "ddp x tp": {"ranks-0-2": (0, 2), "ranks-1-3": (1, 3)},
    "ddp over tp": {"ranks-0-2": (0, 2), "ranks-1-3": (1, 3)},
    "fsdp x tp": {"ranks-0-1": (0, 1), "ranks-2-3": (2, 3)} | {f"rank-{k}": (k,) for k in range(4)},
    "zero1 halves": {"ranks-0-2": (0, 2), "ranks-1-3": (1, 3)},
    "zero1 halves, buckets": {"ranks-0-2": (0, 2), "ranks-1-3": (1, 3)},
    "tp by hand": {"tp-0": (0, 2), "tp-1": (1, 3)},
    "pipeline stages": {"stage-0": (0, 1), "stage-1": (2, 3)},
}


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_every_layout_goes_on_bit_for_bit_from_one_file_for_each_unit(name: str, tmp_path: Path) -> None:
    answers = on_ranks(lambda rank: round_trip(name, tmp_path / "ckpt"), tmp_path)
    for rank, answer in enumerate(answers):
        assert answer["units"] == {"replicated": (0, 1, 2, 3), **UNITS[name]}
        assert set(answer["mine"]) == {unit for unit, holders in answer["units"].items() if rank in holders}
        assert answer["fresh differs"], "the control: a fresh model is another one"
        assert answer["restored"]
        assert answer["reasons"] == []
        assert answer["different steps"] == []
    writers = {holders[0] for holders in answers[0]["units"].values()}
    assert len(answers[0]["files"]) == len(writers)
