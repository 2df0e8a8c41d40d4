"""In every parallel layout the units are found, each is written by one holder, and all ranks go on bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lastwords.checkpoint import layout as disk
from lastwords.checkpoint.load import Checkpoint
from lastwords.checkpoint.meta import RunFacts
from lastwords.checkpoint.part import write_part
from lastwords.checkpoint.publish import IncidentFacts, publish, verify_parts
from lastwords.checkpoint.system import REAL_OS
from lastwords.errors import ConfigError
from lastwords.optim_wrapper.capture.buffers import Buffers
from lastwords.optim_wrapper.capture.recorder import StepRecorder
from lastwords.optim_wrapper.ddp.ddp_buckets import BucketOrder
from lastwords.optim_wrapper.launch.world import World, next_prefix
from lastwords.optim_wrapper.resume.resume import resume_from
from lastwords.optim_wrapper.state.rank_units import LOOK_EVERY_STEPS, RankUnits
from lastwords.optim_wrapper.wrapper import OptTFTWrapper
from lastwords.processor.black_box import BlackBox
from lastwords.processor.box_layout import BoxLayout, RegionCopy, SlotKind
from lastwords.processor.saver import Position
from lastwords.sharding.dtensor import box_of, local_of
from lastwords.sharding.zero import stateful
from lastwords.vocabulary import Phase, Stand
from tests.integration.forked import on_ranks
from tests.integration.layouts import FEATURES, LAYOUTS, Net, Trial, build
from tests.ledgers import told
from tests.selection import more, usually

USUAL = {"fsdp x tp", "hsdp", "pipeline stages", "zero1 halves, buckets"}
"""Layouts whose parts are those of the others."""

pytestmark = pytest.mark.process

SAVED = 3
STEPS = 7


class Rank:
    """One rank of a run: what `TFTRegister` does, without a controller."""

    def __init__(self, name: str, seed: int) -> None:
        self.world = World()
        self.trial: Trial = build(name, seed)
        wrappers = [OptTFTWrapper(optimizer) for optimizer in self.trial.optimizers]
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(wrappers[0], 0.9)
        self.recorder = StepRecorder(self.trial.model, wrappers, {"scheduler": self.scheduler}, {}, self.trial.names)
        self.buckets = BucketOrder(self.trial.model)
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
            self.recorder.end_step(number, Position(1, number))
            self.buckets.end_step(number)
            seen.append((loss, self.bits()))
        return seen

    def bits(self) -> int:
        """Hash of all that this rank has: weights, buffers, optimizer state and hyperparameters."""
        parts: list[Any] = []
        names = self.recorder.view.all_names()
        state = [stateful(optimizer).state for optimizer in self.trial.optimizers]
        for name, tensor in sorted({**names.parameters, **names.buffers}.items()):
            parts.append((name, raw(tensor)))
            for key, value in sorted(pair for one in state for pair in one.get(tensor, {}).items()):
                parts.append((key, raw(value) if isinstance(value, torch.Tensor) else value))
        for group in (group for optimizer in self.trial.optimizers for group in optimizer.param_groups):
            parts.append(sorted((key, str(value)) for key, value in group.items() if key != "params"))
        return hash(str(parts))

    def save(self, root: Path, step: int, *, leave_out: str = "") -> None:
        """Every unit by its lowest holder, published by rank 0. leave_out: a unit that goes without optimizer state."""
        source = self.recorder.source
        assert source is not None
        table = self.units.table
        mine = [unit for unit, holders in table.units.items() if holders[0] == self.world.rank]
        directory = disk.TemporaryName(step, "job", 1, 1, 1).under(root)
        with without_optimizer_state(self, leave_out):
            if mine:
                states = {unit: source.unit_state(unit, step, Stand(Phase.COMPUTING, step)) for unit in mine}
                write_part(directory, self.world.rank, 1, step, step, states, {}, source.facts(step), job="job")
        dist.barrier()
        if self.world.rank == 0:
            writers = tuple(sorted({holders[0] for holders in table.units.values()}))
            assert verify_parts(directory, writers, tuple(table.units), (), step) == []
            publish(root, directory, IncidentFacts("job", 1, 1, 1, step, self.world.size, writers, "a test"))
        dist.barrier()

    def resume(self, root: Path) -> list[str]:
        """Go on from what is in `root`; why it is not exact, but for the rank-local state, which is not saved."""
        found = resume_from(
            [root], self.world, self.recorder, RunFacts(), key=next_prefix(), agreed=None, missing_ok=False
        )
        assert found is not None
        self.recorder.begin(found.global_step, Position(found.epoch, found.step))
        said = map(str, found.reasons)
        return [reason for reason in said if "local state" not in reason and "own state" not in reason]


def raw(tensor: torch.Tensor) -> bytes:
    return local_of(tensor).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@contextlib.contextmanager
def without_optimizer_state(rank: Rank, unit: str) -> Iterator[None]:
    if unit not in rank.units.names:
        yield
        return
    optimizer, watch = stateful(rank.trial.optimizers[0]), rank.recorder.watch
    own = [one for one in rank.units.views[unit].names().parameters.values() if one in optimizer.state]
    assert own
    honest = watch.moved_since
    watch.moved_since = lambda step: (honest(step)[0], dict.fromkeys(own), [])  # type: ignore[method-assign]
    yield
    watch.moved_since = honest  # type: ignore[method-assign]


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
    "zero1 halves beside another optimizer": {"ranks-0-2": (0, 2), "ranks-1-3": (1, 3)},
    "fsdp, two optimizers": {f"rank-{k}": (k,) for k in range(4)},
    "tp by hand": {"tp-0": (0, 2), "tp-1": (1, 3)},
    "pipeline stages": {"stage-0": (0, 1), "stage-1": (2, 3)},
}


@pytest.mark.parametrize("name", usually(sorted(LAYOUTS), USUAL))
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


# ------------------------------------------------------------------ controls


@pytest.mark.thorough
def test_a_unit_without_its_optimizer_state_is_noticed(tmp_path: Path) -> None:
    answers = on_ranks(lambda rank: round_trip("hsdp", tmp_path / "ckpt", leave_out="ranks-1-3"), tmp_path)
    assert [answer["restored"] for answer in answers] == [True, False, True, False]
    assert all(answer["different steps"] for answer in answers), "the losses of all ranks depend on it"


def test_zero_needs_the_weights_of_the_other_partitions(tmp_path: Path) -> None:
    def body(rank: int) -> dict[str, Any]:
        RankUnits.foreign = property(lambda self: {}, lambda self, views: None)  # type: ignore[assignment]
        return round_trip("zero1 halves", tmp_path / "ckpt")

    for answer in on_ranks(body, tmp_path):
        assert not answer["restored"]
        assert answer["different steps"]


# ------------------------------------------------------------------ what is read, and when


def noting(read_tensors: Any, names: list[str]) -> Any:
    def read(self: Checkpoint, wanted: Any, into: Any) -> None:
        names.extend(wanted)
        read_tensors(self, wanted, into)

    return read


def test_a_rank_reads_its_own_units_only_and_of_zero_the_weights_of_the_others_too(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        names: dict[str, list[str]] = {}
        for name in ("hsdp", "zero1 halves"):
            root = tmp_path / name
            run = Rank(name, seed=0)
            run.train(1, SAVED)
            run.save(root, SAVED)
            read = names[name] = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Checkpoint, "read_tensors", noting(Checkpoint.read_tensors, read))
                Rank(name, seed=1).resume(root)
        return names

    for rank, names in enumerate(on_ranks(body, tmp_path)):
        own, other = ("ranks-0-2", "ranks-1-3") if rank in (0, 2) else ("ranks-1-3", "ranks-0-2")
        assert {name.split("/")[1] for name in names["hsdp"]} == {own, "replicated"}
        of_others = {name.split("/")[2] for name in names["zero1 halves"] if name.split("/")[1] == other}
        assert of_others == {"model"}
        assert {"model", "optim"} <= {name.split("/")[2] for name in names["zero1 halves"] if own in name}


@pytest.mark.parametrize("name", usually(["ddp", "hsdp"], ["ddp"]))
def test_nobody_can_prune_a_checkpoint_while_a_rank_resumes_from_it(name: str, tmp_path: Path) -> None:
    def body(rank: int) -> tuple[list[bool], bool]:
        run = Rank(name, seed=0)
        run.train(1, SAVED)
        run.save(tmp_path, SAVED)
        free: list[bool] = []
        honest = Checkpoint.read_tensors

        def reading(self: Checkpoint, *arguments: Any) -> None:
            free.append(is_free(self.path))
            honest(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoint, "read_tensors", reading)
            Rank(name, seed=1).resume(tmp_path)
        dist.barrier()
        afterwards = rank > 0 or is_free(disk.checkpoint_dir(tmp_path, SAVED))
        dist.barrier()
        return free, afterwards

    for free, afterwards in on_ranks(body, tmp_path):
        assert free
        assert not any(free)
        assert afterwards


def is_free(directory: Path) -> bool:
    """Whether it could be removed now."""
    fd = REAL_OS.open_lock(directory / disk.MANIFEST_NAME)
    try:
        return REAL_OS.try_lock(fd)
    finally:
        REAL_OS.close(fd)


@pytest.mark.parametrize("name", [more("fsdp"), "fsdp x tp", more("ddp over tp")])
def test_the_state_can_be_read_at_any_moment_of_a_step(name: str, tmp_path: Path) -> None:
    """FSDP2 swaps parameters for whole ones while it computes, DDP over DTensors puts other tensors in their place."""

    def body(rank: int) -> dict[str, bool]:
        run = Rank(name, seed=0)
        run.train(1, SAVED)
        source = run.recorder.source
        assert source is not None

        def contents() -> dict[str, bytes]:
            found = {}
            for unit in run.units.names:
                for spec, made in source.unit_state(unit, SAVED, Stand(Phase.COMPUTING, SAVED)).tensors:
                    found[spec.name] = bytes(made() if callable(made) else made)
            return found

        before = contents()
        seen = {"before": bool(before)}

        def look(moment: str) -> None:
            seen[moment] = contents() == before

        model = run.trial.model
        inner = run.recorder.view.model.blocks[1]  # type: ignore[index, union-attr]
        inner.register_forward_pre_hook(lambda *_: look("in the forward pass"))
        inner.register_forward_hook(lambda *_: look("after a block's forward pass"))
        generator = torch.Generator().manual_seed(run.trial.replica)
        output = model(torch.randn(3, FEATURES, generator=generator))
        look("after the forward pass")
        output.register_hook(lambda _: look("in the backward pass"))
        output.square().mean().backward()
        look("after the backward pass")
        return seen

    for seen in on_ranks(body, tmp_path):
        assert len(seen) == 6
        assert all(seen.values()), seen


def test_shards_lie_where_their_boxes_say(tmp_path: Path) -> None:
    def body(rank: int) -> int:
        checked = 0
        for name in ("fsdp", "hsdp", "tp", "ddp x tp", "fsdp x tp"):
            for tensor in build(name, 3).model.parameters():
                if isinstance(tensor, DTensor):
                    box = box_of(tensor)
                    place = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.shape, strict=True))
                    assert torch.equal(tensor.full_tensor()[place], tensor.to_local()), (name, box)
                    checked += 1
        return checked

    assert all(checked > 40 for checked in on_ranks(body, tmp_path))


OPTIMIZERS: dict[str, Any] = {
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.mark.thorough
def test_every_kind_of_sharded_optimizer_state_comes_back(tmp_path: Path) -> None:
    def body(rank: int) -> dict[str, Any]:
        answer = {}
        for name, make in OPTIMIZERS.items():

            def layout(make: Any = make) -> Trial:
                trial = LAYOUTS["fsdp"]()
                trial.optimizers = [make(trial.model.parameters())]
                return trial

            LAYOUTS[name] = layout
            trip = round_trip(name, tmp_path / name.replace(" ", "_"))
            answer[name] = trip["restored"], trip["different steps"]
        return answer

    for answer in on_ranks(body, tmp_path, ranks=2):
        assert answer == {name: (True, []) for name in OPTIMIZERS}


# ------------------------------------------------------------------ refusals


def test_a_model_that_is_sharded_again_is_refused_in_the_next_check_and_at_the_save(tmp_path: Path) -> None:
    def body(rank: int) -> list[str]:
        run = Rank("ddp x tp", seed=0)
        parameter = run.trial.model.blocks[0].up.weight  # type: ignore[index, union-attr]
        whole = torch.nn.Parameter(parameter.redistribute(placements=[Replicate()]))
        source = run.recorder.source
        assert source is not None
        source.unit_state("replicated", 0, Stand(Phase.COMPUTING, 0))
        torch.utils.swap_tensors(parameter, whole)
        texts = []
        for act in (
            lambda: run.train(1, 1),
            lambda: source.unit_state("replicated", 1, Stand(Phase.COMPUTING, 1)),
        ):
            try:
                act()
            except ConfigError as error:
                texts.append(str(error))
        return texts

    for texts in on_ranks(body, tmp_path):
        assert len(texts) == 2
        for text in texts:
            assert "'blocks.0.up.weight' was float32 (5, 6) at (" in text
            assert "and is float32 (10, 6) now: the model was sharded or converted again" in text


def test_a_model_that_is_sharded_again_later_is_found_within_the_steps_between_two_looks(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        run = Rank("ddp x tp", seed=0)
        run.train(1, 1)
        units = run.recorder.units
        parameter = run.trial.model.blocks[0].up.weight  # type: ignore[index, union-attr]
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(parameter.redistribute(placements=[Replicate()])))
        try:
            for _ in range(LOOK_EVERY_STEPS):
                units.check_step()
        except ConfigError as error:
            return f"says: {error}"
        return "nothing"

    for said in on_ranks(body, tmp_path):
        assert "the model was sharded or converted again" in said


def test_layouts_that_cannot_be_followed_are_refused_on_all_ranks(tmp_path: Path) -> None:
    def refusal(trial: Trial) -> str:
        try:
            recorder = StepRecorder(trial.model, [OptTFTWrapper(one) for one in trial.optimizers], {}, {})
            recorder.agree_units(World(), next_prefix(), trial.units)
        except ConfigError as error:
            return str(error)
        return ""

    def body(rank: int) -> dict[str, str]:
        mesh = init_device_mesh("cpu", (4,))
        answer = {}
        torch.manual_seed(0)
        model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
        answer["fsdp1"] = refusal(Trial(model, [torch.optim.SGD(model.parameters(), lr=0.1)], rank))
        net = Net()
        zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        answer["overlap"] = refusal(Trial(net, [zero], rank))
        net = Net()
        net.frozen = torch.nn.Parameter(DTensor.from_local(torch.ones(5), mesh, [Partial()]), requires_grad=False)
        answer["partial"] = refusal(Trial(net, [torch.optim.SGD(net.parameters(), lr=0.1)], rank))
        stages = build("pipeline stages", 0)
        answer["stages that nobody declared"] = refusal(Trial(stages.model, stages.optimizers, rank))
        answer["stages"] = refusal(stages)
        return answer

    for answer in on_ranks(body, tmp_path):
        assert "use torch.distributed.fsdp.fully_shard" in answer["fsdp1"]
        assert "use overlap_with_ddp=False" in answer["overlap"]
        assert "parameter 'frozen' is a partial sum that has not been reduced yet" in answer["partial"]
        text = answer["stages that nobody declared"]
        assert "is float32 (10, 6) on rank 0 and float32 (14, 6) on rank 2" in text
        assert "units_from_mesh" in text
        assert answer["stages"] == "", "the control"


def test_a_buffer_that_is_a_dtensor_is_captured_and_put_back_like_any_other(tmp_path: Path) -> None:
    def body(rank: int) -> tuple[Any, ...]:
        mesh = init_device_mesh("cpu", (2,))
        net = Net()
        net.register_buffer("seen", distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))
        net.register_buffer("moved", distribute_tensor(torch.arange(40_000.0), mesh, [Replicate()]))
        buffers = Buffers(net)
        capture = buffers.tensors
        box = BlackBox.create(tmp_path / f"box{rank}", BoxLayout(capture.regions))
        capture.bind(box)
        with torch.no_grad():
            net.seen.add_(rank + 1)
            net.moved.add_(1)
        capture.refresh()
        slot = box.begin(SlotKind.COMMITTED, 1)
        capture.capture(slot)
        box.commit(slot)
        kept = {name: bytes(box.region(slot, f"buffer/{name}")) for name in ("seen", "moved")}
        same = {name: kept[name] == raw(getattr(net, name)) for name in kept}
        copies = {
            f"buffer/{name}": RegionCopy("F32", tuple(local_of(getattr(net, name)).shape), kept[name]) for name in kept
        }
        net.seen.zero_()
        same["put back"] = buffers.restore(copies) is not None and raw(net.seen) == kept["seen"]
        return told(capture), same, sorted(buffers.captured)

    for reasons, same, captured in on_ranks(body, tmp_path, ranks=2):
        assert reasons == []
        assert same == {"seen": True, "moved": True, "put back": True}
        assert captured == ["moved", "seen"]
