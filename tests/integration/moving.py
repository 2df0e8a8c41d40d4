"""Runs that end on some ranks and go on on others: what must hold of state, losses, samples and what the model says."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lastwords
from demo.transformer.model import Transformer
from lastwords.checkpoint.layout import UnitTensorName, parse_tensor_name
from lastwords.checkpoint.load import open_checkpoint
from tests.integration.compare import Track
from tests.integration.parallel_training import question, shape_of
from tests.integration.plan import Layout
from tests.integration.rig import Launch, Rig

LOSS_TOLERANCE = 1e-5
"""How far a loss may be from that of the run on the old ranks, which makes its sums in another order."""

ANSWER_TOLERANCE = 2e-6
"""Likewise for logits of the same weights."""

ELASTIC = Layout(epochs=2, steps_per_epoch=4, sequences=8, own_sampler=False, dropout=False, scheduler=True)


def elastic(parallel: str, world_size: int, **more: Any) -> Layout:
    """A layout whose steps have the same samples on any number of ranks, without dropout unless asked for."""
    return dataclasses.replace(ELASTIC, parallel=parallel, world_size=world_size, **more)


def naive_gather(path: Path) -> dict[str, bytes]:
    """Every tensor of a checkpoint as a whole: read, and put where its offsets say."""
    checkpoint = open_checkpoint(path)
    whole: dict[str, np.ndarray[Any, Any]] = {}
    for unit in checkpoint.manifest.units:
        for name, (spec, data) in checkpoint.read(checkpoint.manifest.units[unit]).items():
            parsed = parse_tensor_name(name)
            assert isinstance(parsed, UnitTensorName)
            if parsed.kind == "extra" or parsed.fqn.startswith("~"):
                continue
            key = parsed.fqn + (f"/{parsed.key}" if parsed.key else "")
            assert spec.dtype == "F32"
            offsets, whole_shape = spec.offsets, spec.global_shape
            if parsed.key and parsed.key != "step":  # of a plain tensor's state the spec does not say it
                own = checkpoint.manifest.units[unit].tensors
                weight = next(one for one in own if one.name == f"unit/{unit}/model/{parsed.fqn}")
                offsets, whole_shape = weight.offsets, weight.global_shape
            into = whole.setdefault(key, np.full(whole_shape, np.nan, np.float32))
            place = tuple(slice(at, at + size) for at, size in zip(offsets, spec.shape, strict=True))
            into[place] = np.frombuffer(data, np.float32).reshape(spec.shape)
    return {name: value.tobytes() for name, value in whole.items()}


def move(rig: Rig, ended: Launch, layout: Layout, **settings: Any) -> Launch:
    """Go on from what `ended` has left, in another layout or on other ranks; the launch is over when this returns."""
    arguments: dict[str, Any] = {"recover": True, "whole": True, **settings}
    launch = rig.launch(layout, checkpoints=Path(ended.plan.checkpoints), **arguments)
    launch.finish()
    return launch


def check_moved(moved: Launch, path: Path) -> list[str]:
    """The ranks of `moved` have begun with the state in `path`, bit for bit, and know why this is not exact.

    Returns rank 0's reasons.
    """
    manifest = open_checkpoint(path).manifest
    for rank in range(moved.layout.world_size):
        record = moved.track.one(rank, "resumed")
        if record is None or record["step"] != manifest.global_step or record["exact"]:
            raise moved.fail(f"rank {rank} resumed as {record and (record['step'], record['reasons'])}")
        ours = [reason for reason in record["reasons"] if reason.startswith("resumed on")]
        assert ours[0] == reason_line(manifest.world_size, moved.layout.world_size)
    state = torch.load(Path(moved.directory) / "whole-resumed.pt")["state"]
    saved = naive_gather(path)
    different = [
        name for name in saved.keys() | state.keys() if name not in state or saved.get(name) != raw(state[name])
    ]
    if different:
        raise moved.fail(f"the state is not the saved one: {different}")
    record = moved.track.one(0, "resumed")
    assert record is not None
    return [str(reason) for reason in record["reasons"]]


def reason_line(saved: int, here: int) -> str:
    """What each rank is told once."""
    how = (
        f"on {here} rank{'s' * (here > 1)} from a checkpoint saved on {saved}"
        if saved != here
        else "on a different parallel layout"
    )
    random = ", and RNG streams are per-rank" if saved != here else ""
    return (
        f"resumed {how}: the restored state is bitwise identical, but reductions now run in a different order" + random
    )


def check_losses(moved: Launch, reference: Track, first: int) -> float:
    """From step `first` to the end the losses are those of the uninterrupted run, but for rounding. Their distance."""
    expected, found = losses(reference), losses(moved.track)
    last = max(expected)
    if sorted(found) != list(range(first, last + 1)):
        raise moved.fail(f"steps {sorted(found)} were trained, not {first} to {last}")
    apart = {step: abs(found[step] - expected[step]) for step in found}
    if max(apart.values()) > LOSS_TOLERANCE:
        raise moved.fail(f"the losses are apart: {apart}")
    # The control: what is compared moves by far more than the tolerance from one step to the next.
    assert min(abs(expected[step] - expected[step - 1]) for step in range(2, last + 1)) > 2 * LOSS_TOLERANCE
    return max(apart.values())


def losses(track: Track) -> dict[int, float]:
    """Mean loss of all ranks by step, of steps that every rank has recorded."""
    by_rank = [track.steps(rank) for rank in range(track.world_size)]
    steps = sorted(set.intersection(*(set(steps) for steps in by_rank)))

    def loss(values: dict[str, str]) -> float:
        found = [float.fromhex(value) for name, value in values.items() if re.fullmatch(r"loss\d+", name)]
        return sum(found) / len(found)

    return {step: sum(loss(steps_of[step]) for steps_of in by_rank) / track.world_size for step in steps}


def check_inference(moved: Launch, path: Path) -> None:
    """One process says of the weights in `path` what the layout says that has loaded them."""
    shape = shape_of(moved.layout)
    model, plain = Transformer(shape).eval(), Transformer(shape).eval()
    lastwords.load_for_inference(path, model)
    saved = naive_gather(path)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(torch.frombuffer(bytearray(saved[name]), dtype=torch.float32).reshape(parameter.shape))
        answer, naive = model(question()), plain(question())
    assert torch.equal(answer, naive), "on one process the order of the sums is the same"
    theirs = torch.load(Path(moved.directory) / "whole-resumed.pt")["answer"]
    torch.testing.assert_close(answer, theirs, rtol=0, atol=ANSWER_TOLERANCE)
    assert (naive - naive.mean()).abs().max() > 1000 * ANSWER_TOLERANCE, "the control: there is something to compare"


def samples_seen(parts: Sequence[tuple[Track, range]], epoch: int) -> Counter[int]:
    """How often each sample of `epoch` was seen, in the given steps of each track; a replica's ranks count once."""
    seen: Counter[int] = Counter()
    for track, steps in parts:
        by_rank: list[dict[int, list[int]]] = []
        for records in track.records:
            batches: dict[int, list[int]] = {}
            for one in records:
                if one["kind"] == "batch" and one["epoch"] == epoch and one["step"] in steps:
                    batches.setdefault(one["step"], []).extend(one["samples"])
            by_rank.append(batches)
        for step in steps:
            # Ranks that share a replica's work see the same batches; no two replicas do.
            for dealt in {tuple(batches[step]) for batches in by_rank if step in batches}:
                seen.update(dealt)
    return seen


def raw(tensor: torch.Tensor) -> bytes:
    """All bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
