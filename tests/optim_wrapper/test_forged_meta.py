"""A manifest with a valid checksum and content that nobody has written: read anywhere, it ends in an error of ours."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

from lastwords.checkpoint import load, publish
from lastwords.checkpoint.document import encode_document
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.meta import LocalMeta
from lastwords.checkpoint.part import LocalState, UnitState
from lastwords.checkpoint.reshard.rank_files import CheckpointSource
from lastwords.checkpoint.reshard.strategy import Needs, load_sound_strategy
from lastwords.checkpoint.reshard.transform_plan import meta_of, of_rank, planned, whole_strategy
from lastwords.checkpoint.storable import pack
from lastwords.cli.checkpoint_commands import inspect
from lastwords.cli.groups_command import groups
from lastwords.cli.retention_commands import listed
from lastwords.errors import FormatError, LastWordsError
from lastwords.integrations.catalogue import catalogue
from lastwords.integrations.inference import load_for_inference
from lastwords.integrations.transform import transform
from lastwords.optim_wrapper.resume.reshard import Resharded, fits_as_it_is
from lastwords.optim_wrapper.resume.resume import _reasons_of, _restore_units
from lastwords.optim_wrapper.resume.resume_choice import peek
from lastwords.optim_wrapper.resume.resume_elsewhere import places_of, survey
from lastwords.optim_wrapper.resume.state_restore import RestorePlan
from lastwords.optim_wrapper.state.extras import Extras, pack_inline, restore_inline
from lastwords.optim_wrapper.state.state_view import UnitView
from lastwords.sharding.pieces import Members, UnitTable
from tests import golden
from tests.checkpoint.elastic import QUICK, random_strategy, random_whole, save_naively
from tests.checkpoint.states import published

FORGERIES = int(os.environ.get("LASTWORDS_FORGERIES", "10"))
"""Of each kind of checkpoint, with its tables in either place: up to 0.15 s each. More of them to look for what these
do not meet."""


class Live:
    """A small model, an optimizer with a state of its own kind, and extras, in this process alone."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.model.register_buffer("late", torch.ones(2), persistent=False)
        self.optimizer = torch.optim.AdamW(
            [{"params": self.model[0].parameters()}, {"params": self.model[2].parameters(), "lr": torch.tensor(0.1)}]
        )
        self.model(torch.ones(5, 3)).sum().backward()
        self.optimizer.step()
        first = self.model[0].weight
        self.optimizer.state[first]["memory"] = [torch.ones(2), (1, torch.zeros(3, dtype=torch.complex128))]
        self.optimizer.state["global"] = {"count": 3, "mean": torch.ones(1)}
        self.optimizer.state[("odd", 1)] = [torch.ones(2)]
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.extras = Extras({"scheduler": scheduler, "ema": {"w": torch.ones(3), "n": (1, 2)}})
        self.local_extras = Extras({"own": {"x": torch.ones(2), "y": {1: 2}}}, "local_extras")
        self.view = UnitView(self.model, self.optimizer)

    def save(self, root: Path) -> Path:
        state = self.view.state()
        snapshot = self.extras.ended(self.extras.first())
        document, tensors = self.extras.store(snapshot, "replicated")
        unit = UnitState([*state.tensors, *tensors], dataclasses.replace(state.meta, extras=document, step_ended=True))
        slot = {
            "epoch": 1,
            "step": 3,
            "local_extras": pack(pack_inline(self.local_extras, self.local_extras.first()).to_json()),
        }
        own = [(TensorSpec("local/0/rng/torch", "U8", (5,)), bytes(5))]
        local = LocalState(own, LocalMeta(kind="step", slot=slot, epoch_start={"epoch": 1}))
        facts = {"torch": "2", "buckets": {}, "ddp": {}}
        return published(root, {0: {"replicated": unit}}, step=3, locals_={0: local}, facts=facts, os=QUICK)

    def decode(self, checkpoint: load.Checkpoint) -> None:
        """What `resume` does with a manifest, but for what needs other ranks."""
        manifest = checkpoint.manifest
        table = UnitTable({"replicated": (0,)}, {"replicated": Members()}, {})
        if fits_as_it_is(manifest, table, 0, self.view):
            entry = manifest.units["replicated"]
            plan = RestorePlan(self.view, entry.tensors, entry.meta)
            checkpoint.read_tensors(plan.tensor_names, plan.into)
            plan.commit()
        units = _Units(self)
        surveyed = survey(checkpoint.path, manifest, places_of(units))  # type: ignore[arg-type]
        resharded = Resharded(checkpoint.path, surveyed.units, copies=manifest.moved)
        resharded.unit(self.view)
        _restore_units(checkpoint, units, frozenset(), [], surveyed)  # type: ignore[arg-type]
        inline = manifest.locals[0].document.extras_inline("slot") if 0 in manifest.locals else None
        if inline is not None:
            restore_inline(self.local_extras, inline)
        _reasons_of(manifest)


class _Units:
    """As much of a recorder as `_restore_units` asks for."""

    def __init__(self, live: Live) -> None:
        self.units, self.view, self.extras = self, live.view, live.extras
        self.views, self.foreign, self.pure = {"replicated": live.view}, {}, True
        self.table = UnitTable({"replicated": (0,)}, {"replicated": Members()}, {})

    def exclude_buffers(self, names: frozenset[str]) -> None:
        pass


def sharded(root: Path) -> Path:
    job = random_whole(3)
    return save_naively(root, job, random_strategy(job, 3, 3, like_parameters=True), own_buffers=True, os=QUICK)


def moved(root: Path) -> Path:
    job = random_whole(4)
    path = save_naively(root / "from", job, random_strategy(job, 3, 3, like_parameters=True), os=QUICK)
    to = root / "to.strategy"
    to.write_bytes(random_strategy(job, 5, 2).encode())
    made = transform(path, root / "moved", to)
    assert made.path is not None
    return made.path


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths_in(item, (*path, key))


OTHERS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1 << 70, 0.5, "", "x", "float64", "~", [], {}, [[]], [None], {"x": 1}, [["x", 1]],
    {"plain": 1}, {"plain": []}, {"unknown": 1}, {"tensor": 3}, {"tensor": "x", "dtype": "float32", "shape": [1]},
    {"dict": [["x", {"plain": 1}]]}, {"~tuple": [1]}, {"~dict": [[[1], 2]]}, {"~float": "nan"}, {"~bytes": "AA=="},
    {"object": ["size", 1, []]}, {"object": ["dtype", "x", []]}, {"list": [{"plain": 1}]}, {"~unheard": 1},
)  # fmt: skip


def forged(content: dict[str, Any], draw: random.Random, parts: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    """One thing in it is another one."""
    content = copy.deepcopy(content)
    inside = [path for path in paths_in(content) if len(path) > 1 and any(part in path for part in parts)]
    deep = draw.choice([path for path in inside if len(path) <= draw.choice((4, 5, 7, 30))])
    *way, last = deep
    owner: Any = content
    for key in way:
        owner = owner[key]
    how = draw.choice(("delete", "other", "other", "other", "wrap", "twice", "rename"))
    value = owner[last]
    if how == "delete":
        del owner[last]
    elif how == "wrap":
        owner[last] = [value]
    elif how == "twice" and isinstance(value, list):
        owner[last] = value + value
    elif how == "rename" and isinstance(owner, dict):
        owner[f"{last}x"] = owner.pop(last)
    else:
        owner[last] = copy.deepcopy(draw.choice(OTHERS))
    return content, f"{how} {'/'.join(map(str, deep))}"


def forge(path: Path, draw: random.Random, parts: tuple[str, ...]) -> str:
    """Rewrites the manifest, or a part and the manifest that has its checksum."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest.pop("checksum")
    if manifest["tables_in_parts"] and draw.random() < 0.9:
        place = draw.randrange(len(manifest["files"]))
        file = path / Path(manifest["files"][place]["path"]).parent / "part.json"
        part = json.loads(file.read_bytes())
        part.pop("checksum")
        part, what = forged(part, draw, parts)
        raw = encode_document(part)
        file.write_bytes(raw)
        manifest["files"][place] |= {"part_bytes": len(raw), "part_sum": xxhash.xxh3_64_hexdigest(raw)}
    else:
        manifest, what = forged(manifest, draw, ("units", "locals", "facts") if manifest["tables_in_parts"] else parts)
    (path / "manifest.json").write_bytes(encode_document(manifest))
    return what


def use(root: Path, path: Path, live: Live) -> list[str]:
    """All that reads a checkpoint; what came out that is no error of ours."""
    other = random_strategy(random_whole(3), 9, 2)

    def plan() -> None:
        source = CheckpointSource(load.open_checkpoint(path))
        saved = source.saved_for(None, 0)
        holding = of_rank(saved, whole_strategy(saved), 0)
        planned(saved, holding, str)
        pack(meta_of(saved, holding, str).to_json())

    def strategy() -> None:
        found = load_sound_strategy(path)
        for rank in range(found.world_size):
            Needs(found, found).of(rank)
        Needs(found, other).of(0)

    uses = {
        "verify": lambda: load.verify(path),
        "latest": lambda: load.latest(root),
        "peek": lambda: peek(path),  # type: ignore[arg-type]
        "inspect": lambda: inspect(path, as_json=False, tensors=True, everything=True),
        "inspect --json": lambda: inspect(path, as_json=True, tensors=False),
        "groups": lambda: groups(path, as_json=True),
        "strategy": strategy,
        "plan": plan,
        "resume": lambda: live.decode(load.open_checkpoint(path)),
        "catalogue": lambda: catalogue(load.open_checkpoint(path), clash_by_unit=True),
        "ls": lambda: listed(root, as_json=False),
        "transform": lambda: transform(path, root / "transformed", None),
        "inference": lambda: load_for_inference(path, nn.Linear(2, 2), strict=False),
    }
    amiss = []
    for name, call in uses.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                call()
        except LastWordsError as error:
            if not str(error):
                amiss.append(f"{name}: an error without words")
        except Exception as error:
            amiss.append(f"{name}: {error!r:.200}")
    return amiss


MAKERS = {"pure": lambda root: Live().save(root), "sharded": sharded, "moved": moved}


@pytest.mark.ci
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_forged_manifest_ends_in_an_error_of_ours(
    tmp_path: Path, kind: str, in_parts: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if in_parts:
        monkeypatch.setattr(publish, "TABLES_BYTES_MAX", 0)
    sound = MAKERS[kind](tmp_path / "sound")
    assert json.loads((sound / "manifest.json").read_bytes())["tables_in_parts"] == in_parts
    root = tmp_path / "forged"
    path, found = root / sound.name, []
    assert load.verify(sound) == []
    for seed in range(FORGERIES):
        draw = random.Random(f"{kind}/{in_parts}/{seed}")
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(sound, path)
        what = forge(path, draw, ("meta", "facts") if seed % 4 else ("units", "locals", "facts", "files"))
        found += [f"seed {seed}, {what}: {text}" for text in use(root, path, Live())]
    assert found == []


def renamed_key(pairs: list[Any]) -> None:
    """The tensor stays as it was called."""
    pairs[2][0] = "another"


def dropped_key(pairs: list[Any]) -> None:
    """Its tensor stays in the file."""
    del pairs[2]


@pytest.mark.parametrize("change", [renamed_key, dropped_key])
def test_a_moment_that_meta_does_not_name_as_its_tensor_is_damage(tmp_path: Path, change: Any) -> None:
    """It would be lost on the way into another layout or format, without a word."""
    path = Live().save(tmp_path)
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest.pop("checksum")
    change(dict(manifest["units"]["replicated"]["meta"]["optimizer_state"]["~dict"])["2.bias"]["dict"])
    (path / "manifest.json").write_bytes(encode_document(manifest))
    with golden.raises(FormatError):
        transform(path, tmp_path / "transformed", None)
    with pytest.raises(FormatError):
        load.open_checkpoint(path)
    assert load.verify(path)
    assert load.latest(tmp_path) is None
    assert use(tmp_path, path, Live()) == []
