"""What was replaced while it was read is told from what is damaged, and read once more."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lastwords.checkpoint import load, retention
from lastwords.checkpoint.load import Checkpoint, read_checkpoint
from lastwords.checkpoint.system import REAL_OS, read_whole
from lastwords.errors import FormatError, IncompleteError, MismatchError, ReplacedError, StorageError
from lastwords.optim_wrapper.resume import resume_choice
from tests import golden
from tests.checkpoint.elastic import QUICK, Whole, save_naively
from tests.checkpoint.states import Job
from tests.checkpoint.test_rank_transform import rows
from tests.integrations.made import flip

PERIODIC = Job(incident=0, attempt=3)


def job(value: float) -> Whole:
    made = Whole(parameters=["w"])
    made.arrays["model/w"] = "F32", np.full((8, 6), value, np.float32)
    made.arrays["buffer/mean"] = "F64", np.zeros(2)
    return made


def save(root: Path, value: float) -> Path:
    return save_naively(root, job(value), rows(2), os=QUICK)


def first_weight(checkpoint: Checkpoint) -> float:
    found = [(unit, spec.name) for unit, entry in checkpoint.manifest.units.items() for spec in entry.tensors]
    unit, name = min((unit, name) for unit, name in found if "model/w" in name)
    return float(np.frombuffer(checkpoint.read(checkpoint.manifest.units[unit])[name][1], np.float32)[0])


def test_a_checkpoint_that_is_replaced_once_is_read_once_more(tmp_path: Path) -> None:
    path = save(tmp_path, 1.0)
    tries = 0

    def read(checkpoint: Checkpoint) -> float:
        nonlocal tries
        tries += 1
        if tries == 1:
            shutil.rmtree(path)
            save(tmp_path, 2.0)
        return first_weight(checkpoint)

    assert read_checkpoint(tmp_path, read) == 2.0
    assert tries == 2


def test_one_that_is_replaced_again_and_again_says_so(tmp_path: Path) -> None:
    path = save(tmp_path, 1.0)

    def read(checkpoint: Checkpoint) -> float:
        shutil.rmtree(path)
        save(tmp_path, checkpoint.manifest.published_unix_ns % 1000)
        return first_weight(checkpoint)

    with golden.raises(ReplacedError):
        read_checkpoint(path, read)


def test_a_success_without_checksums_counts_only_if_nothing_was_replaced(tmp_path: Path) -> None:
    path = save(tmp_path, 1.0)
    tries = 0

    def read(checkpoint: Checkpoint) -> int:
        nonlocal tries
        tries += 1
        if tries == 1:
            shutil.rmtree(path)
            save(tmp_path, 2.0)
        return tries

    assert read_checkpoint(path, read, checked=False) == 2


def test_damage_and_another_model_are_what_they_are_and_read_once(tmp_path: Path) -> None:
    path = save(tmp_path, 1.0)
    file = next(iter(path.rglob("*.ckpt")))
    tries: list[int] = []

    def read(checkpoint: Checkpoint) -> None:
        tries.append(1)
        for unit in checkpoint.manifest.units:
            checkpoint.read(checkpoint.manifest.units[unit])

    flip(file, file.stat().st_size - 1)
    with golden.raises(FormatError):
        read_checkpoint(path, read)

    def refuse(checkpoint: Checkpoint) -> None:
        tries.append(1)
        raise MismatchError("another model")

    with pytest.raises(MismatchError):
        read_checkpoint(path, refuse)
    assert len(tries) == 2
    file.unlink()
    with golden.raises(IncompleteError):
        read_checkpoint(path, read)


def removed_at(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, root: Path) -> None:
    """When `module.name` has given its first result, a newer one is published and that one is removed."""
    inner = getattr(module, name)
    given: list[object] = []

    def late(*arguments: Any, **named: Any) -> Any:
        result = inner(*arguments, **named)
        given.append(result)
        if len(given) == 1:
            PERIODIC.again(attempt=4, seed=8).save(root, 38)
            retention.prune([root], "job", retention.Rules(1))
        return result

    monkeypatch.setattr(module, name, late)


def test_the_newest_that_is_pruned_before_the_first_look_is_chosen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PERIODIC.save(tmp_path, 37)
    removed_at(monkeypatch, load, "latest", tmp_path)
    assert read_checkpoint(tmp_path, lambda checkpoint: checkpoint.manifest.global_step) == 38


def test_one_that_was_named_and_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError):
        read_checkpoint(tmp_path / "tft_saved_checkpoints-step_37", first_weight)


def test_rank_0_chooses_again_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PERIODIC.save(tmp_path, 37)
    removed_at(monkeypatch, load, "newest", tmp_path)
    assert resume_choice.look_for([tmp_path], None)["identity"]["global_step"] == 38


def test_a_rank_that_finds_its_checkpoint_gone_asks_for_another_one(tmp_path: Path) -> None:
    path = PERIODIC.save(tmp_path, 37)
    word = resume_choice.look_for([tmp_path], None)
    shutil.rmtree(path)
    with golden.raises(ReplacedError):
        resume_choice._open(resume_choice.Chosen(path, word["identity"], path))


def test_a_file_that_is_too_long_is_not_blamed_on_a_limit_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"12345")
    with golden.raises(StorageError):
        read_whole(tmp_path / "manifest.json", REAL_OS, bytes_max=4)
    assert read_whole(tmp_path / "manifest.json", REAL_OS, bytes_max=5) == b"12345"
