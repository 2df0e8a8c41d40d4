"""After the loop lastwords keeps nothing of the user's alive: what the collector frees late ends late."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lastwords


class Loader:
    """Stands for a DataLoader with persistent workers, which end in five seconds each if a cycle has them."""

    def __init__(self) -> None:
        self.dataset = [torch.ones(2), torch.ones(2)]
        self.generator = torch.Generator()
        self.epochs_begun = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        self.epochs_begun += 1
        return iter(self.dataset)


@pytest.mark.process
@pytest.mark.parametrize("switch", ["{TTP:0}", "{TTP:1}"])
@pytest.mark.parametrize("leaves_by", ["its end", "break"])
def test_a_loader_ends_with_the_last_reference_of_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str, leaves_by: str
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("MS_ENABLE_TFT", switch)
    model = torch.nn.Linear(2, 1)
    tft = lastwords.protect(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    loader = Loader()
    freed = weakref.ref(loader)
    gc.collect()
    gc.disable()
    try:
        with tft:
            for _, step, batch in tft.steps(loader, epochs=2):
                model(batch).sum().backward()
                tft.optimizer.step()
                if step == 2 and leaves_by == "break":
                    break
        del loader
        assert freed() is None
    finally:
        gc.enable()
