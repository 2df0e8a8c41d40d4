"""Random states, strategies and world sizes, moved by rank and as a whole, against a naive gather; there and back."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastwords.checkpoint.load import open_checkpoint, verify
from lastwords.checkpoint.reshard.strategy import Strategy, save_strategy_file, strategy_of
from lastwords.integrations import transform as module
from lastwords.integrations.transform import transform
from lastwords.integrations.transform_files import transform_all
from tests.checkpoint.elastic import (
    EXTRAS,
    QUICK,
    Whole,
    content_of,
    gathered,
    naive_holding,
    random_strategy,
    random_whole,
    save_naively,
)

SEEDS = st.integers(0, 2**32)
WORLDS = st.integers(1, 16)


@contextmanager
def room() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="lastwords-test-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def written(path: Path, strategy: Strategy) -> Path:
    save_strategy_file(strategy, path, QUICK)
    return path


def bits(job: Whole) -> dict[str, tuple[str, bytes]]:
    return {name: (dtype, array.tobytes()) for name, (dtype, array) in job.arrays.items()}


def own(path: Path) -> dict[str, tuple[str, bytes]]:
    """Tensors of a rank's file that a strategy speaks of."""
    _, tensors = content_of(path)
    return {
        name: (dtype, raw) for name, (dtype, _, raw) in tensors.items() if not name.startswith(("extra/", "optim/~"))
    }


def file_of(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}" / f"part{rank}.ckpt"


@pytest.mark.ci
@settings(max_examples=25, deadline=None)
@given(SEEDS, WORLDS, WORLDS)
def test_whole_and_by_rank_it_is_what_a_naive_gather_says(seed: int, source: int, destination: int) -> None:
    job = random_whole(seed)
    before = random_strategy(job, seed + 1, source, like_parameters=True)
    after = random_strategy(job, seed + 2, destination)
    with room() as tmp:
        saved = save_naively(tmp / "saved", job, before, shared=seed % 2 == 1, os=QUICK)
        to = written(tmp / "to", after)
        moved = transform(saved, tmp / "moved", to, os=QUICK).path
        assert moved is not None
        assert not verify(moved)
        assert gathered(moved) == bits(job)
        old, new = open_checkpoint(saved).manifest, open_checkpoint(moved).manifest
        assert (new.holders_world_size, new.world_size) == (destination, source)
        assert (new.reasons, new.exact, new.locals.keys()) == (old.reasons, old.exact, old.locals.keys())
        for rank, entry in new.locals.items():
            assert entry.writer == rank % destination
            one, other = (found.read(found.manifest.locals[rank]) for found in map(open_checkpoint, (saved, moved)))
            assert {name: data.tobytes() for name, (_, data) in one.items()} == {
                name: data.tobytes() for name, (_, data) in other.items()
            }
        assert new.units["replicated"].meta.extras == EXTRAS
        back = strategy_of(new)
        assert all(back.tensors[name] == cut for name, cut in _sorted(after).items() if name.startswith("model/"))
        transform_all(str(saved), str(tmp / "files"), "part", None, str(to), os=QUICK)
        for rank in range(destination):
            naive = {name: (dtype, raw) for name, (dtype, _, raw) in naive_holding(job, after, rank).items()}
            assert own(file_of(tmp / "files", rank)) == naive


def _sorted(strategy: Strategy) -> dict[str, Any]:
    from lastwords.checkpoint.reshard.strategy import Cut

    return {
        name: Cut(cut.dtype, cut.shape, tuple(sorted(cut.held, key=lambda held: held.box)))
        for name, cut in strategy.tensors.items()
    }


def _plain(value: Any) -> Any:
    """JSON without the order of what has none: parameters of a group come from the units in their order."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted((_plain(item) for item in value), key=repr)
    return value


@settings(max_examples=12, deadline=None)
@given(SEEDS, WORLDS, WORLDS, WORLDS)
@pytest.mark.thorough
def test_there_and_back_by_two_others_gives_the_first_again(seed: int, a: int, b: int, c: int) -> None:
    job = random_whole(seed)
    worlds = {"A": a, "B": b, "C": c}
    with room() as tmp:
        strategies = {
            name: random_strategy(job, seed + place, world, like_parameters=name == "A")
            for place, (name, world) in enumerate(worlds.items())
        }
        for name, strategy in strategies.items():
            written(tmp / name, strategy)
        saved = save_naively(tmp / "saved", job, strategies["A"], shared=seed % 2 == 1, os=QUICK)
        transform_all(str(saved), str(tmp / "0 A"), "part", None, str(tmp / "A"), os=QUICK)
        before = "0 A"
        for place, name in enumerate("BCA", 1):
            here = f"{place} {name}"
            source, to = str(tmp / before[-1]), str(tmp / name)
            transform_all(str(tmp / before), str(tmp / here), "part", source, to, os=QUICK)
            before = here
        for rank in range(a):
            (first, tensors), (last, again) = (content_of(file_of(tmp / name, rank)) for name in ("0 A", "3 A"))
            assert tensors == again
            assert _plain(first) == _plain(last)
        path = saved
        for place, name in enumerate("BCA"):
            done = transform(path, tmp / f"whole {place}", tmp / name, os=QUICK).path
            assert done is not None
            path = done
        assert gathered(path) == bits(job)
        direct = transform(saved, tmp / "direct", tmp / "A", os=QUICK).path
        assert direct is not None
        one, other = (_tensors(found) for found in (direct, path))
        assert one == other


def _tensors(path: Path) -> dict[str, tuple[Any, bytes]]:
    checkpoint = open_checkpoint(path)
    return {
        name: (spec, data.tobytes())
        for unit in checkpoint.manifest.units
        for name, (spec, data) in checkpoint.read(checkpoint.manifest.units[unit]).items()
    }


def test_the_comparison_notices_one_element_in_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: slices that are swapped make another state."""
    job = random_whole(3)
    saved = save_naively(tmp_path / "saved", job, random_strategy(job, 4, 5, like_parameters=True), os=QUICK)
    planned = module.planned

    def swapped(*arguments: Any) -> Any:
        plans = planned(*arguments)
        like: dict[Any, int] = {}
        for place, one in enumerate(plans):
            other = like.setdefault((one.spec.dtype, one.spec.shape, one.box), place)
            if other != place and one.spec.nbytes > 4:
                plans[place], plans[other] = (
                    type(one)(one.spec, one.box, plans[other].slices),
                    type(one)(plans[other].spec, one.box, one.slices),
                )
        return plans

    monkeypatch.setattr(module, "planned", swapped)
    moved = transform(saved, tmp_path / "moved", None, os=QUICK).path
    assert moved is not None
    assert not verify(moved)
    assert gathered(moved) != bits(job)
