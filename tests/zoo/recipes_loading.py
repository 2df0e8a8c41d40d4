"""Loaders that keep state: numbers that they or the loop count up, an order that depends on what training draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from tests.zoo.loop import BATCH, Loop, recipe


class ShuffleBuffer(IterableDataset[Any]):
    """Yields samples from a buffer, at places that it draws."""

    def __init__(self, x: Any, y: Any, draw: Callable[[int], int]) -> None:
        self.x, self.y, self.draw = x, y, draw

    def __len__(self) -> int:
        return len(self.x)

    def __iter__(self) -> Iterator[Any]:
        held = []
        for pair in zip(self.x, self.y, strict=True):
            held.append(pair)
            if len(held) > 6:
                yield held.pop(self.draw(len(held)))
        while held:
            yield held.pop(self.draw(len(held)))


@recipe("shuffle_buffer", "`IterableDataset` with a shuffle buffer that draws from torch's stream, no workers",
        "fwd@3 bwd@3 win@3 end@6", {"all": "so its order may differ"})  # fmt: skip
class ShuffledStream(Loop):
    workers = 0

    def draw(self, count: int) -> int:
        return int(torch.randint(count, ()))

    def loader(self) -> Any:
        x, y = super().dataset().tensors  # type: ignore[attr-defined]
        part = slice(self.rank, None, self.ranks)
        return DataLoader(ShuffleBuffer(x[part], y[part], self.draw), BATCH, num_workers=self.workers)


@recipe("shuffle_buffer_worker", "the same in a worker", "fwd@3 end@6", mixes=False)
class ShuffledInWorker(ShuffledStream):
    workers = 1


@recipe("shuffle_buffer_own", "the same with a generator of its own", "fwd@3 win@3 end@6")
class ShuffledByOwn(ShuffledStream):
    def setup(self) -> None:
        super().setup()
        self.order = torch.Generator().manual_seed(self.rank)

    def draw(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self.order))


class Counting(Dataset[Any]):
    """Scales what it gives by how much it has given."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y, self.seen = x, y, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        self.seen += 1
        return self.x[index] / self.seen, self.y[index]


@recipe("dataset_counts", "a dataset that counts the samples that it has given, and uses that", "fwd@3 end@4 bwd@6")
class DatasetCounts(Loop):
    def loader(self) -> Any:
        dataset = Counting(*super().dataset().tensors)  # type: ignore[attr-defined]
        return DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, self.ranks, self.rank, seed=3))


class Levels(Dataset[Any]):
    """Samples as hard as the level says."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y, self.level = x, y, 1

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] * self.level, self.y[index]


@recipe(
    "curriculum",
    "the loop raises the dataset's level at an epoch's end",
    "end@4 epoch@4 fwd@6 bwd@7",
    {"end epoch bwd": "level"},
)
class Curriculum(Loop):
    epochs = 3

    def loader(self) -> Any:
        self.levels = Levels(*super().dataset().tensors)  # type: ignore[attr-defined]
        return DataLoader(self.levels, BATCH, sampler=DistributedSampler(self.levels, self.ranks, self.rank, seed=3))

    def epoch_end(self) -> None:
        self.levels.level += 1


@recipe("curriculum_mid", "the loop raises it after the log of each epoch's third step", "end@3 fwd@4 win@7",
        {"win end": "loader.dataset.level"})  # fmt: skip
class CurriculumMid(Curriculum):
    def epoch_end(self) -> None:
        """Not here."""

    def after_log(self) -> None:
        if self.step % self.per_epoch == 3:
            self.levels.level += 1
