"""What a rank keeps of a checkpoint of another layout is enough for it, and little."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lastwords.checkpoint import publish
from lastwords.checkpoint.boxes import Box, slices_for
from lastwords.checkpoint.manifest import Manifest, read_published
from lastwords.checkpoint.reshard.saved_state import join, units_of
from lastwords.checkpoint.reshard.strategy import Cut, Held, Strategy
from lastwords.optim_wrapper.resume.resume_elsewhere import Places, source_rank, survey
from tests.checkpoint.elastic import QUICK, Unsynced, Whole, naive_holding, random_strategy, random_whole, save_naively


class Opened(Unsynced):
    """Names what is opened for reading."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def open_read(self, path: Path) -> int:
        self.names.append(f"{path.parent.name}/{path.name}")
        return super().open_read(path)


@pytest.fixture(autouse=True)
def every_checkpoint_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "TABLES_BYTES_MAX", 0)


def places_of(job: Whole, strategy: Strategy, rank: int) -> Places:
    """Parameters and the buffer that a rank holds."""
    found: Places = {}
    for name, (_, box, _) in naive_holding(job, strategy, rank).items():
        kind, _, fqn = name.partition("/")
        if kind != "optim":
            found[fqn] = [(box, job.arrays[name][1].shape)]
    return found


@pytest.mark.parametrize("seed", range(12))
def test_what_is_kept_fills_a_rank_with_the_same_slices_as_everything(tmp_path: Path, seed: int) -> None:
    job = random_whole(seed)
    source = random_strategy(job, seed, 2 + seed % 5, like_parameters=True)
    wanted = random_strategy(job, 100 + seed, 1 + seed % 4, like_parameters=True)
    path = save_naively(tmp_path, job, source, os=QUICK)
    manifest = read_published(path, QUICK)
    everything = join([unit for _, unit in units_of(path, manifest)], copies=False)
    for rank in range(wanted.world_size):
        places = places_of(job, wanted, rank)
        found = survey(path, manifest, places)
        saved = join(found.units, copies=False)
        assert found.names == {*everything.parameters, *everything.buffers}
        assert places.keys() <= {*saved.parameters, *saved.buffers}
        assert saved.extras == everything.extras
        for fqn, [place] in places.items():
            assert place is not None
            for name in (f"model/{fqn}", f"buffer/{fqn}", f"optim/{fqn}/exp_avg"):
                if name in everything.tensors:
                    box = place[0]
                    assert slices_for(saved.tensors[name], box) == slices_for(everything.tensors[name], box)
            if fqn in everything.states:
                assert saved.states[fqn] == everything.states[fqn]
                assert f"optim/{fqn}/step" in saved.tensors
            if fqn in everything.parameters:
                assert any(fqn in group.parameters for group in saved.groups)


def rows_of(job: Whole, ranks: int) -> Strategy:
    """Each parameter in rows, one for each rank."""
    tensors = {}
    for fqn in job.parameters:
        dtype, array = job.arrays[f"model/{fqn}"]
        held = tuple(Held(Box((rank, 0), (1, 3)), (rank,)) for rank in range(ranks))
        tensors[f"model/{fqn}"] = Cut(dtype, array.shape, held)
    return Strategy(ranks, tensors)


def saved_in_rows(tmp_path: Path, ranks: int) -> tuple[Whole, Path, Manifest, Opened]:
    job = Whole()
    rng = np.random.default_rng(0)
    for number in range(3):
        job.parameters.append(f"w{number}")
        job.trained.append(f"w{number}")
        job.add(f"model/w{number}", "F32", (ranks, 3), rng)
        job.add(f"optim/w{number}/step", "F32", (), rng)
        job.add(f"optim/w{number}/exp_avg", "F32", (ranks, 3), rng)
    job.add("buffer/mean", "F64", (3,), rng)
    os = Opened()
    path = save_naively(tmp_path, job, rows_of(job, ranks), os=os)
    manifest = read_published(path, os)
    os.names.clear()
    return job, path, manifest, os


def test_a_rank_keeps_the_parts_that_it_takes_rows_from_and_the_first(tmp_path: Path) -> None:
    job, path, manifest, os = saved_in_rows(tmp_path, 16)
    wanted: Places = {fqn: [(Box((5, 0), (2, 3)), (16, 3))] for fqn in job.parameters}
    found = survey(path, manifest, wanted)
    assert [unit.label for unit in found.units] == [
        f"unit {name}" for name in ("replicated", "rank-0", "rank-5", "rank-6")
    ]
    assert {name.partition("/")[2] for name in os.names} == {"part.json"}
    assert len(os.names) <= 18  # `replicated` has a writer that wrote another unit too
    tables = manifest.tables
    assert tables is not None
    assert len(tables._read) <= 4


def test_a_rank_takes_over_local_state_without_a_look_at_the_others(tmp_path: Path) -> None:
    _, _, manifest, os = saved_in_rows(tmp_path, 16)
    assert source_rank(manifest, 18) == 2
    assert os.names == ["rank_2/part.json"]
    assert source_rank(manifest, 17) == 0  # rank 1 has saved none
    assert os.names == ["rank_2/part.json", "rank_0/part.json"]
