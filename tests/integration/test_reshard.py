"""A checkpoint of one layout starts training in another, on more ranks or fewer: the state is the same, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lastwords.checkpoint.load import Checkpoint, latest, open_checkpoint
from lastwords.checkpoint.slice_reader import StoredTensor
from lastwords.errors import CheckpointError, FormatError, MismatchError
from lastwords.sharding.zero import stateful
from tests.integration.forked import on_ranks
from tests.integration.layouts import LAYOUTS, TP, Block, Net, Trial, adamw, fsdp, fsdp_tp, mesh_of, trainable
from tests.integration.test_layouts import SAVED, Rank, raw
from tests.selection import more

pytestmark = pytest.mark.process


def plain() -> Trial:
    """One process, nothing around the model."""
    model = Net()
    return Trial(model, [adamw(model)], 0)


def tp_two() -> Trial:
    """Tensor parallelism of two, and no replica."""
    model = parallelize_module(Net(), mesh_of((dist.get_world_size(),), "tp"), TP)
    return Trial(model, [adamw(model)], 0)


def zero1() -> Trial:
    """The optimizer's state dealt out over all ranks, however many."""
    model = DistributedDataParallel(Net())
    groups: Any = [{"params": trainable(model)}]
    return Trial(model, [ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1e-2)], dist.get_rank())


def one_group() -> Trial:
    """What `zero1` is without a division."""
    model = Net()
    return Trial(model, [torch.optim.AdamW(trainable(model), lr=1e-2)], 0)


class Part(torch.nn.Module):
    """One block of a pipeline, under its name in the whole."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleDict({str(index): Block()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def stages(backwards: bool = False) -> Trial:
    """A block on each rank."""
    torch.manual_seed(dist.get_rank())
    size, rank = dist.get_world_size(), dist.get_rank()
    model = Part(size - 1 - rank if backwards else rank)
    return Trial(model, [adamw(model)], 0)


MORE = {"plain": plain, "tp of two": tp_two, "zero1": zero1, "one group": one_group, "fsdp": fsdp, "fsdp x tp": fsdp_tp,
        "stages": stages, "stages the other way round": lambda: stages(backwards=True)}  # fmt: skip


def made(name: str, seed: int) -> Rank:
    LAYOUTS.update(MORE)
    return Rank(name, seed)


def gathered(run: Rank) -> dict[str, bytes]:
    """Every tensor that this rank can see whole: weights, buffers, and the optimizer's state that it holds."""
    found: dict[str, bytes] = {}

    def take(name: str, tensor: Any, layout: Any) -> None:
        if layout is not None and tensor.shape == layout[1]:  # of DDP, a plain tensor that is a part
            spec = layout[0]
            tensor = DTensor.from_local(tensor.detach(), spec.mesh, spec.placements, shape=spec.shape,
                                        stride=torch.empty(spec.shape, device="meta").stride())  # fmt: skip
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = raw(whole.detach())

    names = run.recorder.view.all_names()
    for name, tensor in {**names.parameters, **names.buffers}.items():
        layout = (tensor._st_info, tensor.shape) if hasattr(tensor, "_st_info") else None
        take(name, tensor, layout)
        for optimizer in run.trial.optimizers:
            for key, value in sorted(stateful(optimizer).state.get(tensor, {}).items()):
                take(f"{name}/{key}", value, layout)
    return found


def joined(answers: list[dict[str, bytes]]) -> dict[str, bytes]:
    """All ranks' tensors, which agree where several have one."""
    result: dict[str, bytes] = {}
    for answer in answers:
        for name, value in answer.items():
            assert result.setdefault(name, value) == value, name
    return result


def saved_as(name: str, ranks: int, tmp_path: Path) -> dict[str, bytes]:
    """Train and save; what the state is, gathered whole."""
    return joined(saved_by_rank(name, ranks, tmp_path))


def saved_by_rank(name: str, ranks: int, tmp_path: Path) -> list[dict[str, bytes]]:
    """The same, as each rank sees it."""

    def body(rank: int) -> dict[str, bytes]:
        run = made(name, 0)
        run.train(1, SAVED)
        run.save(tmp_path / "ckpt", SAVED)
        return gathered(run)

    return on_ranks(body, _room(tmp_path, f"save {name}"), ranks)


def resumed_as(name: str, ranks: int, root: Path, room: Path) -> tuple[dict[str, bytes], list[str], list[Any]]:
    """Another model, resumed, as a whole; the reasons; and that two more steps can be trained."""

    def body(rank: int) -> Any:
        run = made(name, 1)
        before = gathered(run)
        reasons = run.resume(root)
        groups = [
            {key: str(value) for key, value in group.items() if key != "params"}
            for optimizer in run.trial.optimizers
            for group in optimizer.param_groups
        ]
        whole = gathered(run)
        assert whole != before, "the control: a fresh model is another one"
        trained = run.train(SAVED + 1, SAVED + 2)
        return whole, reasons, groups, [loss for loss, _ in trained]

    answers = on_ranks(body, _room(room, f"resume {name}"), ranks)
    assert all(answer[2] == answers[0][2] for answer in answers)
    return joined([answer[0] for answer in answers]), answers[0][1], answers[0][2]


def _room(tmp_path: Path, name: str) -> Path:
    room = tmp_path / name.replace(" ", "_")
    room.mkdir()
    return room


MOVES = [
    ("ddp x tp", 4, "tp of two", 2),
    more("ddp x tp", 4, "plain", 1),
    more("fsdp", 4, "fsdp", 2),
    more("fsdp", 4, "fsdp", 3),
    more("fsdp", 2, "fsdp x tp", 4),
    more("fsdp x tp", 4, "fsdp", 3),
    more("ddp", 4, "ddp", 3),
    more("ddp over tp", 4, "fsdp", 2),
    more("plain", 1, "ddp over tp", 4),
    more("zero1", 4, "zero1", 2),
    ("zero1", 4, "zero1", 3),
    more("zero1", 4, "one group", 1),
    more("one group", 1, "zero1", 3),
    more("fsdp", 1, "ddp", 2),
    more("ddp", 2, "fsdp", 1),
    ("stages", 2, "stages the other way round", 2),
]


@pytest.mark.parametrize(("saved", "ranks", "here", "there"), MOVES)
def test_the_state_is_the_same_in_another_layout_bit_for_bit(
    saved: str, ranks: int, here: str, there: int, tmp_path: Path
) -> None:
    whole = saved_as(saved, ranks, tmp_path)
    found, reasons, _ = resumed_as(here, there, tmp_path / "ckpt", tmp_path)
    different = [name for name in whole.keys() | found.keys() if whole.get(name) != found.get(name)]
    assert not different
    assert sum("in a different order" in reason for reason in reasons) == 1


@pytest.mark.parametrize(("saved", "here", "there"), [more("fsdp", "fsdp", 3), more("fsdp x tp", "fsdp", 2)])
def test_of_a_large_checkpoint_too(
    saved: str, here: str, there: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lastwords.checkpoint.publish.TABLES_BYTES_MAX", 0)
    whole = saved_as(saved, 4, tmp_path)
    path = latest(tmp_path / "ckpt")
    assert path is not None
    assert open_checkpoint(path).manifest.tables is not None
    found, _, _ = resumed_as(here, there, tmp_path / "ckpt", tmp_path)
    assert found == whole


# ------------------------------------------------------------------ refusals


def refusal(saved: str, here: Any, tmp_path: Path) -> str:
    """What a single process is told that resumes a checkpoint of `saved` as `here`; it is as it was then."""
    saved_by_rank(saved, 4, tmp_path)

    def body(rank: int) -> str:
        LAYOUTS["here"] = here
        run = made("here", 1)
        before = run.bits()
        with pytest.raises((FormatError, MismatchError)) as caught:
            run.resume(tmp_path / "ckpt")
        assert run.bits() == before
        return str(caught.value)

    [text] = on_ranks(body, _room(tmp_path, "refuse"), 1)
    return str(text)


def other(width: int = 10, optimizer: Any = adamw, more: bool = False) -> Trial:
    model = Net(width)
    if more:
        model.extra = torch.nn.Parameter(torch.ones(2))
    return Trial(model, [optimizer(model)], 0)


def test_another_model_is_refused_by_tensor(tmp_path: Path) -> None:
    text = refusal("fsdp", lambda: other(width=12), tmp_path)
    assert "does not fit this Net" in text
    assert "blocks.0.up.weight (saved float32 (10, 6), here float32 (12, 6))" in text


@pytest.mark.thorough
def test_a_model_with_more_tensors_or_other_groups_is_refused(tmp_path: Path) -> None:
    assert "missing in the checkpoint: extra" in refusal("fsdp", lambda: other(more=True), tmp_path)


@pytest.mark.thorough
def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    def sgd(model: Net) -> Any:
        return torch.optim.SGD(trainable(model), lr=0.1)

    assert "create the same parameter groups" in refusal("fsdp", lambda: other(optimizer=sgd), tmp_path)


def test_parts_cut_by_hand_are_refused_with_both_units(tmp_path: Path) -> None:
    text = refusal("tp by hand", plain, tmp_path)
    assert "Only in the checkpoint: norm.bias, norm.weight, up" in text


def test_stages_with_one_name_for_two_tensors_are_refused(tmp_path: Path) -> None:
    text = refusal("pipeline stages", plain, tmp_path)
    assert "model/blocks.0.up.weight is F32 (10, 6) in unit stage-0 and F32 " in text
    assert "in unit stage-1" in text


def test_a_damaged_slice_is_an_error_on_every_rank(tmp_path: Path) -> None:
    saved_as("fsdp", 4, tmp_path)
    path = latest(tmp_path / "ckpt")
    assert path is not None
    file = path / open_checkpoint(path).manifest.units["rank-3"].file
    with file.open("r+b") as stream:
        stream.seek(-1, 2)
        last = stream.read(1)
        stream.seek(-1, 2)
        stream.write(bytes([last[0] ^ 1]))

    def body(rank: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            made("fsdp", 1).resume(tmp_path / "ckpt")
        return str(caught.value)

    texts = on_ranks(body, _room(tmp_path, "damaged"), 2)
    assert any("do not match their checksum" in text for text in texts)
    assert len(texts) == 2


def test_a_rank_reads_little_more_than_its_share(tmp_path: Path) -> None:
    """The shards of four ranks, read by two: each reads the files of two ranks, and those that all hold."""
    saved_as("fsdp", 4, tmp_path)

    def body(rank: int) -> tuple[set[str], set[str]]:
        files: set[str] = set()
        units: set[str] = set()
        stored = Checkpoint.stored

        def noting(self: Checkpoint, name: str) -> tuple[StoredTensor, ...]:
            found = stored(self, name)
            files.update(one.path.parent.name for one in found)
            units.add(name.split("/")[1])
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoint, "stored", noting)
            made("fsdp", 1).resume(tmp_path / "ckpt")
        return files, units

    (first, _), (second, units) = on_ranks(body, _room(tmp_path, "reading"), 2)
    assert "rank_3" not in first
    assert "rank_3" in second
    assert {"rank-2", "rank-3"} <= units
    assert "rank-0" not in units, "a copy of each counter is beside its shard"
