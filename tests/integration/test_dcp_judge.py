"""torch.distributed.checkpoint is the judge: what it reshards and what we reshard are equal on every rank, bit for bit.

The same trained state is saved by both. Then other ranks load it three times over weights of other seeds: by torch
alone, by torch's planner through our reader, and by a resume of ours. AdamW's state and the hyperparameters included.
Widths are such that tensor parallelism divides evenly where there is training; elsewhere shards are uneven, or empty.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from lastwords.checkpoint.boxes import Shard
from lastwords.checkpoint.direct_io import CHUNK_BYTES
from lastwords.checkpoint.layout import MANIFEST_NAME
from lastwords.checkpoint.load import latest, open_checkpoint, verify
from lastwords.integrations.catalogue import catalogue
from lastwords.integrations.dcp import LastWordsReader
from lastwords.sharding.dtensor import local_of
from tests.integration.forked import on_ranks
from tests.integration.layouts import LAYOUTS, TP, Net, Trial, adamw, mesh_of
from tests.integration.test_layouts import Rank, raw

pytestmark = pytest.mark.process

STEPS = 2
WIDTH = {8: 16, 6: 18, 4: 12}
"""Of the source's ranks -> the model's width: 16 over 3 ranks and 18 over 4 are uneven."""

MOVES = ((8, 4), (6, 4), (8, 3), (4, 1))
KINDS = ("fsdp", "hsdp", "tp", "fsdp x tp")
USUAL = {("fsdp x tp", "hsdp", 8, 3)}
"""What runs each time; FSDP over six ranks, read by four, is the negative control."""

MORE = {
    ("hsdp", "hsdp", 8, 4),
    ("fsdp x tp", "fsdp x tp", 4, 1),
    ("tp", "fsdp x tp", 6, 4),
    ("fsdp", "fsdp", 6, 4),
    ("tp", "tp", 8, 3),
}
"""With these the thorough run has every move, and every layout. The other pairs of layouts are slow."""


def trial(kind: str, width: int) -> Trial:
    """The layout over all ranks there are; tensor parallelism beside sharding is of two where they are even."""
    ranks = torch.distributed.get_world_size()
    pairs = 2 if ranks % 2 == 0 else 1
    model = Net(width)
    if kind == "tp":
        parallelize_module(model, mesh_of((ranks,), "tp"), TP)
        return Trial(model, [adamw(model)], 0)
    if kind == "fsdp x tp":
        mesh = mesh_of((ranks // pairs, pairs), "dp", "tp")
        parallelize_module(model, mesh["tp"], TP)
        shards, replica = mesh["dp"], mesh["dp"].get_local_rank()
    else:
        replica = torch.distributed.get_rank()
        shards = mesh_of((ranks,), "dp") if kind == "fsdp" else mesh_of((pairs, ranks // pairs), "replicate", "shard")
    for block in model.blocks:
        fully_shard(block, mesh=shards)
    fully_shard(model, mesh=shards)
    return Trial(model, [adamw(model)], replica)


def made(kind: str, width: int, seed: int) -> Rank:
    LAYOUTS[f"{kind} of {width}"] = functools.partial(trial, kind, width)
    return Rank(f"{kind} of {width}", seed)


def loaded(run: Rank, reader: Any) -> None:
    """torch's own load into this rank's state."""
    weights, moments = get_state_dict(run.trial.model, run.trial.optimizers)
    state: dict[str, Any] = {"model": weights, "optim": moments}
    dcp.load(state, storage_reader=reader)
    set_state_dict(
        run.trial.model, run.trial.optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )


def parts(run: Rank) -> dict[str, Any]:
    """What lies on this rank: shape and bytes of its part of each tensor, and the hyperparameters."""
    found: dict[str, Any] = {}
    model, [optimizer] = run.trial.model, run.trial.optimizers
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = tuple(local_of(tensor).shape), raw(tensor)
        for key, value in optimizer.state.get(tensor, {}).items():
            found[f"{name}/{key}"] = tuple(local_of(value).shape), raw(value)
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"group {number}/{key}": value for key, value in group.items() if key != "params"}
    return found


def unlike(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


Save = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Trains a layout on so many ranks and saves it in both ways, once: a directory with `torch` and `ours` in it."""

    @functools.cache
    def saved(kind: str, ranks: int) -> Path:
        root = tmp_path_factory.mktemp(f"{kind} {ranks}".replace(" ", "_"))

        def body(rank: int) -> None:
            run = made(kind, WIDTH[ranks], seed=0)
            run.train(1, STEPS)
            weights, moments = get_state_dict(run.trial.model, run.trial.optimizers)
            dcp.save({"model": weights, "optim": moments}, storage_writer=FileSystemWriter(root / "torch"))
            run.save(root / "ours", STEPS)

        on_ranks(body, root, ranks)
        return root

    return saved


def verdicts(root: Path, kind: str, width: int, ranks: int, room: Path) -> list[dict[str, Any]]:
    """Of each rank: what our two ways have made other than torch alone, and facts for the controls."""

    def body(rank: int) -> dict[str, Any]:
        judge, reader, resumed = (made(kind, width, seed) for seed in (1, 2, 3))
        before = parts(judge)
        loaded(judge, FileSystemReader(root / "torch"))
        loaded(reader, LastWordsReader(root / "ours"))
        reasons = resumed.resume(root / "ours")
        right = parts(judge)
        return {
            "reader": unlike(right, parts(reader)),
            "resumed": unlike(right, parts(resumed)),
            "changed": unlike(before, right),
            "names": sorted(right),
            "shapes": [value[0] for value in right.values() if isinstance(value, tuple) and len(value) == 2],
            "moved": any("in a different order" in reason for reason in reasons),
        }

    return on_ranks(body, room, ranks)


def cases() -> list[Any]:
    pairs = [(kind, here) for kind in KINDS for here in KINDS]
    every = [(kind, here, m, n) for kind, here in pairs for m, n in MOVES]
    marks = {**dict.fromkeys(USUAL, ()), **dict.fromkeys(MORE, (pytest.mark.thorough,))}
    return [pytest.param(*one, marks=marks.get(one, (pytest.mark.slow,))) for one in every]


@pytest.mark.parametrize(("kind", "here", "ranks", "there"), cases())
def test_torch_and_we_reshard_alike_bit_for_bit(
    kind: str, here: str, ranks: int, there: int, save: Save, tmp_path: Path
) -> None:
    answers = verdicts(save(kind, ranks), here, WIDTH[ranks], there, tmp_path)
    assert [answer["reader"] for answer in answers] == [[]] * there
    assert [answer["resumed"] for answer in answers] == [[]] * there
    for answer in answers:
        assert answer["moved"], "the state came by the way of another layout"
        assert {"blocks.0.up.weight/exp_avg", "blocks.0.up.weight/exp_avg_sq", "blocks.0.gain/step", "table"} <= {
            *answer["names"]
        }
    changed = {name for answer in answers for name in answer["changed"]}
    assert {"blocks.0.up.weight", "blocks.1.norm.bias/exp_avg"} <= changed, "the control: it was another state before"


@pytest.mark.thorough
def test_one_flipped_bit_in_one_source_shard_is_seen(save: Save, tmp_path: Path) -> None:
    """The negative control: the checksums are right for the flipped bit, so only the comparison can notice.

    And a control of the moves: the shards that are compared here are uneven on both sides.
    """
    root = tmp_path / "flipped"
    root.mkdir()
    source = save("fsdp", 6)
    (root / "torch").symlink_to(source / "torch")
    found = latest(source / "ours")
    assert found is not None
    checkpoint = open_checkpoint(found)
    shard: Shard = catalogue(checkpoint).state["blocks.1.down.weight"]["exp_avg_sq"].divided.shards[2]
    [stored] = checkpoint.stored(shard.name)
    copy = root / "ours" / found.name
    for file in found.rglob("*.ckpt"):
        place = copy / file.relative_to(found)
        place.parent.mkdir(parents=True)
        place.write_bytes(file.read_bytes())
    assert stored.entry is not None
    flipped = copy / stored.entry.path
    data = bytearray(flipped.read_bytes())
    data[stored.begin + 1] ^= 0x10
    flipped.write_bytes(data)
    sums = tuple(
        xxhash.xxh3_64_hexdigest(bytes(data[at : at + CHUNK_BYTES])) for at in range(0, len(data), CHUNK_BYTES)
    )
    files = tuple(
        dataclasses.replace(entry, chunks=sums) if entry == stored.entry else entry
        for entry in checkpoint.manifest.files
    )
    (copy / MANIFEST_NAME).write_bytes(dataclasses.replace(checkpoint.manifest, files=files).encode())
    assert verify(copy) == []
    answers = verdicts(root, "fsdp", WIDTH[6], 4, tmp_path)
    for way in ("reader", "resumed"):
        assert [answer[way] for answer in answers].count(["blocks.1.down.weight/exp_avg_sq"]) == 1
        assert sum(map(len, (answer[way] for answer in answers))) == 1
    assert {(5, 6), (3, 6), (2, 18), (0, 18)} <= {shape for answer in answers for shape in answer["shapes"]}
    gain = catalogue(checkpoint).parameters["blocks.0.gain"].divided.shards
    assert len(gain) == 2, "two elements over six ranks: four have none"
