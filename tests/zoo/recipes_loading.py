"""Loaders that keep state: numbers that they or the loop count up, an order that depends on what training draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from tests.zoo.loop import BATCH, WIDTH_IN, Loop, recipe


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


class Seen(Dataset[Any]):
    """Part of a larger set. The more often a sample was seen, the less it gives, according to a table of the set."""

    def __init__(self, x: Any, y: Any, table: Any) -> None:
        self.x, self.y, self.table = x, y, table

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return index, self.x[index] / (1 + self.table[1000 + index, 1]), self.y[index]


@recipe("seen_array", "a dataset's table of many samples, of which each step writes a few, as an array of 512 KiB",
        "fwd@3 win@3 end@6", {"all": "table"})  # fmt: skip
class SeenInArray(Loop):
    def table(self) -> Any:
        return np.zeros((1 << 14, 4))

    def loader(self) -> Any:
        self.seen = Seen(*super().dataset().tensors, self.table())  # type: ignore[attr-defined]
        return DataLoader(self.seen, BATCH, sampler=DistributedSampler(self.seen, self.ranks, self.rank, seed=3))

    def before_forward(self, batch: Any) -> Any:
        numbers, x, y = batch
        for number in numbers.tolist():
            self.seen.table[1000 + number, 1] += 1
        return super().before_forward([x, y])


@recipe("seen_dict", "the same as a dict of 2,000 numbers", "fwd@3 win@3 end@6", {"all": "table"})
class SeenInDict(SeenInArray):
    def table(self) -> Any:
        return {(number, 1): 0 for number in range(2000)}


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


class HardestFirst(Sampler[int]):
    """Begins an epoch with the samples of which the model knows least."""

    def __init__(self, net: nn.Module, dataset: Any, numbers: range) -> None:
        self.net, self.dataset, self.numbers = net, dataset, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[int]:
        x, y = self.dataset[self.numbers]
        self.net.eval()
        with torch.no_grad():
            losses = (self.net(x) - y).square().mean(1)
        self.net.train()
        yield from (self.numbers[index] for index in losses.argsort(descending=True).tolist())


@recipe(
    "hardest_first",
    "a sampler that orders an epoch by the losses which the model has at its start",
    "fwd@3 epoch win@7",
    {"fwd win": "has a network"},
)
class Mining(Loop):
    def loader(self) -> Any:
        dataset: Any = self.dataset()
        return DataLoader(
            dataset, BATCH, sampler=HardestFirst(self.bare, dataset, range(self.rank, len(dataset), self.ranks))
        )


class Hardest(Sampler[int]):
    """Each sample once; what comes next is the hardest one that is left by now."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self.hardness = [float(index % 3) for index in range(len(numbers))]

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[int]:
        left = {*range(len(self.numbers))}
        while left:
            left.remove(index := max(left, key=lambda index: (self.hardness[index], index)))
            yield self.numbers[index]


@recipe(
    "hardest_next",
    "a sampler that chooses each sample by what the loop knows of it by then",
    "fwd@3 epoch",
    {"fwd": "did not give again"},
)
class Adaptive(Loop):
    def loader(self) -> Any:
        dataset: Any = self.dataset()
        self.hardest = Hardest(range(self.rank, len(dataset), self.ranks))
        return DataLoader(dataset, BATCH, sampler=self.hardest)

    def before_forward(self, batch: Any) -> Any:
        hardness, first = self.hardest.hardness, float(batch[0][0, 0])
        hardness[:] = [one + (first * index) % 1.0 for index, one in enumerate(hardness)]
        return super().before_forward(batch)


class Pieces(IterableDataset[Any]):
    """Cuts a text into pieces as long as the loop says; the next one begins where the last one ended."""

    def __init__(self, x: Any, y: Any) -> None:
        self.text, self.y, self.length = x.flatten(), y, 2

    def __len__(self) -> int:
        return len(self.y)

    def __iter__(self) -> Iterator[Any]:
        at = 0
        for y in self.y:
            at += self.length
            yield self.text[at - self.length : at].repeat(WIDTH_IN)[:WIDTH_IN], y


@recipe(
    "length_warm_up",
    "the loop makes the pieces longer in each step into which an `IterableDataset` cuts a text",
    "fwd@3 epoch",
    {"fwd": "did not give again"},
)
class LengthWarmUp(Loop):
    def loader(self) -> Any:
        x, y = super().dataset().tensors  # type: ignore[attr-defined]
        self.pieces = Pieces(x[self.rank :: self.ranks], y[self.rank :: self.ranks])
        return DataLoader(self.pieces, BATCH)

    def before_forward(self, batch: Any) -> Any:
        self.pieces.length = min(self.pieces.length + 1, WIDTH_IN)
        return super().before_forward(batch)


def ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """A prefetcher: asks for the next batch before it gives the one that it has."""
    held = None
    for batch in batches:
        if held is not None:
            yield held
        held = batch
    yield held


@recipe("ahead_of_steps", "a prefetcher between `steps()` and the loop", "fwd bwd win@6 end@5", {"all": "asked for"},
        mixes=False)  # fmt: skip
class AheadOfSteps(Loop):
    def run(self, batches: Iterable[Any], ended: Any) -> None:
        super().run(ahead(batches), ended)


@recipe("ahead_accumulating", "the same with `steps(accumulate=2)`", "fwd end@5", {"all": "asked for"}, mixes=False)
class AheadAccumulating(AheadOfSteps):
    accumulate = 2
