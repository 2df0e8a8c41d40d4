"""What the adaptors refuse before anything is protected: in one process, without a launcher.

`make ci-frameworks` runs them with the versions that the adaptors know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lastwords import ConfigError, MismatchError

transformers = pytest.importorskip("transformers", reason="not installed: make ci-frameworks")
pl = pytest.importorskip("lightning.pytorch", reason="not installed: make ci-frameworks")
hf = pytest.importorskip("lastwords.integrations.hf")
lightning = pytest.importorskip("lastwords.integrations.lightning")

pytestmark = pytest.mark.slow

ROWS = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 4


@pytest.fixture(autouse=True)
def _nobody_is_protected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a script begins."""
    for adaptor in (hf, lightning):
        monkeypatch.setattr(adaptor, "_protected", [])
    with mock.patch.dict(os.environ):  # Lightning sets a part of it
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# ---------------------------------------------------------------------- transformers


class PlainLoader(transformers.Trainer):  # type: ignore[misc,name-defined]
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, 2)


def hf_trainer(directory: Path, kind: Any = transformers.Trainer, *callbacks: Any) -> Any:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1))
    arguments = transformers.TrainingArguments(str(directory), use_cpu=True, report_to="none", disable_tqdm=True)
    return kind(model, arguments, train_dataset=ROWS, callbacks=[*callbacks])


def test_a_second_trainer_of_transformers_is_refused(tmp_path: Path) -> None:
    hf.protect(hf_trainer(tmp_path), tmp_path / "ckpt")
    with pytest.raises(ConfigError, match="one Trainer"):
        hf.protect(hf_trainer(tmp_path), tmp_path / "ckpt")


@pytest.mark.parametrize("layout", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_a_trainer_that_accelerates_configuration_shards_is_refused(layout: str, tmp_path: Path) -> None:
    """Accelerate turns FSDP on for GPUs only: what the Trainer says of itself is set here."""
    trainer = hf_trainer(tmp_path)
    setattr(trainer, layout, True)
    with pytest.raises(ConfigError, match="DeepSpeed"):
        hf.protect(trainer, tmp_path / "ckpt")


@pytest.mark.parametrize(
    ("kind", "more", "word"),
    [(PlainLoader, {}, "is a DataLoader"), (transformers.Trainer, {"trial": {"learning_rate": 1.0}}, "a search")],
)
def test_a_training_that_is_not_known_is_refused(kind: Any, more: dict[str, Any], word: str, tmp_path: Path) -> None:
    trainer = hf_trainer(tmp_path, kind)
    hf.protect(trainer, tmp_path / "ckpt")
    with pytest.raises(ConfigError, match=word):
        trainer.train(**more)
    assert not (tmp_path / "ckpt").exists()


class Stops(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):  # type: ignore[misc,name-defined]
    """In the second step; a callback with a state."""

    def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        if state.global_step == 2:
            raise InterruptedError

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {}}


def saved(directory: Path) -> None:
    """A Trainer that has been interrupted in its second step."""
    trainer = hf_trainer(directory, transformers.Trainer, Stops())
    hf.protect(trainer, directory / "ckpt")
    with pytest.raises(InterruptedError):
        trainer.train()
    hf._protected.clear()


def test_the_state_of_a_callback_that_is_gone_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    trainer = hf_trainer(tmp_path)
    hf.protect(trainer, tmp_path / "ckpt")
    with pytest.raises(MismatchError, match="Stops"):
        trainer.train()


def test_a_checkpoint_that_comes_while_training_begins_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved(tmp_path)
    monkeypatch.setattr(hf.lastwords, "peek", lambda *of, **more: None)
    trainer = hf_trainer(tmp_path, transformers.Trainer, Stops())
    hf.protect(trainer, tmp_path / "ckpt")
    with pytest.raises(ConfigError, match="began"):
        trainer.train()


# ---------------------------------------------------------------------- lightning


class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self, loaders: int = 1) -> None:
        super().__init__()
        self.net, self.lr, self.batch_size, self.loaders, self.stepped = nn.Linear(4, 1), 0.1, 2, loaders, False

    def train_dataloader(self) -> Any:
        found: list[Any] = [DataLoader(torch.ones(8, 4), self.batch_size) for _ in range(self.loaders)]  # type: ignore[arg-type]
        return found if len(found) > 1 else found[0]

    def configure_model(self) -> None:
        """A ModelParallelStrategy asks for it."""

    def training_step(self, batch: Any, number: int) -> Any:
        self.stepped = True
        return self.net(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


class SetsUp(pl.Callback):  # type: ignore[misc,name-defined]
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.fit_loop.setup_data()


def pl_trainer(directory: Path, *before: Any, **more: Any) -> Any:
    callbacks = [*before, lightning.LastWords(directory / "ckpt")]
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(
        **plain, accelerator="cpu", devices=1, max_steps=2, default_root_dir=directory, callbacks=callbacks, **more
    )


@pytest.mark.parametrize(
    ("before", "more", "loaders", "word"),
    [
        ([], {}, 2, "there are 2"),
        ([], {"reload_dataloaders_every_n_epochs": 1}, 1, "reload_dataloaders_every_n_epochs="),
        ([SetsUp()], {}, 1, "setup_data"),
        ([pl.callbacks.LearningRateFinder()], {}, 1, "LearningRateFinder puts"),
        ([pl.callbacks.BatchSizeFinder()], {}, 1, "BatchSizeFinder puts"),
        ([pl.callbacks.ModelPruning("l1_unstructured")], {}, 1, "ModelPruning puts"),
        ([lightning.LastWords("other")], {}, 1, "two LastWords"),
        (
            [],
            {"strategy": pl.strategies.ModelParallelStrategy(process_group_backend="gloo")},
            1,
            "a ModelParallelStrategy",
        ),
    ],
)
def test_a_fit_that_is_not_known_is_refused_before_its_first_step(
    before: list[Any], more: dict[str, Any], loaders: int, word: str, tmp_path: Path
) -> None:
    module = Module(loaders)
    with pytest.raises(ConfigError, match=word):
        pl_trainer(tmp_path, *before, **more).fit(module)
    assert not module.stepped


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.ones(8, 4))


class Asks(Module):
    """How many steps there will be."""

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), 2)

    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_an_estimate_of_steps_for_a_loader_without_a_length_is_refused(tmp_path: Path) -> None:
    module = Asks()
    with pytest.raises(ConfigError, match="estimated_stepping_batches"):
        pl_trainer(tmp_path, max_epochs=2).fit(module)
    assert not module.stepped
    pl_trainer(tmp_path, max_epochs=-1).fit(module)
    assert module.steps == 2


def test_a_search_for_a_learning_rate_by_the_protected_trainer_is_refused(tmp_path: Path) -> None:
    """Before it, and not in the fit() after it."""
    module, trainer = Module(), pl_trainer(tmp_path)
    with pytest.raises(ConfigError, match="LearningRateFinder"):
        pl.tuner.Tuner(trainer).lr_find(module)
    assert not module.stepped
