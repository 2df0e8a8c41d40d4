"""Random generators: of the model, the loop, the dataset, the loader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, WeightedRandomSampler

from tests.zoo.loop import BATCH, WIDTH, WIDTH_IN, WIDTH_OUT, Loop, recipe

shared_by_module = np.random.default_rng(0)
"""What a module-level generator of a user's script is."""


class Noisy(nn.Module):
    """Noise from a generator of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn(x.shape, generator=self.generator)


@recipe("gen_attr", "`torch.Generator` attribute of the model", "bwd win fwd end")
class GeneratorAttribute(Loop):
    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), Noisy()]

    def setup(self) -> None:
        super().setup()
        for module in self.bare.modules():
            if isinstance(module, Noisy):
                module.generator.manual_seed(50 + self.rank)
                self.generators["noise"] = module.generator


@recipe("nprng_model", "`np.random.default_rng` in the loop", "bwd win fwd")
class NumpyInLoop(Loop):
    def setup(self) -> None:
        super().setup()
        self.generators["mixup"] = self.rng = np.random.default_rng(self.rank)

    def before_forward(self, batch: Any) -> Any:
        share = float(self.rng.beta(0.8, 0.8))
        x, y = super().before_forward(batch)
        return share * x + (1 - share) * x.flip(0), share * y + (1 - share) * y.flip(0)


@recipe("nprng_declared", "the same, its state handed over in `local_extras`", "bwd win fwd end")
class NumpyDeclared(NumpyInLoop):
    def setup(self) -> None:
        super().setup()
        self.local_extras["rng"] = Declared(self.rng)


class Declared:
    """A numpy generator as something with a state_dict."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["state"]


class Augmented(Dataset[Any]):
    """Samples with noise from wherever."""

    def __init__(self, inner: Any, noise: Any) -> None:
        self.inner, self.noise = inner, noise

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        x, y = self.inner[index]
        return x + torch.as_tensor(np.asarray(self.noise()), dtype=torch.float32), y


def draw_from_module() -> Any:
    return shared_by_module.normal(size=WIDTH_IN)


class Augmenting(Loop):
    """A dataset that draws random numbers."""

    def noise(self) -> Any:
        return np.random.randn(WIDTH_IN)

    def dataset(self) -> Any:
        return Augmented(super().dataset(), self.noise)


@recipe("augment_numpy", "dataset that draws from numpy's global stream", "bwd win fwd epoch")
class AugmentNumpy(Augmenting):
    pass


@recipe("augment_python", "dataset that draws from python's `random`", "bwd win fwd")
class AugmentPython(Augmenting):
    def noise(self) -> Any:
        return random.gauss(0, 1)


@recipe("augment_torch", "dataset that draws from torch's global stream", "bwd win fwd")
class AugmentTorch(Augmenting):
    def noise(self) -> Any:
        return torch.randn(WIDTH_IN)


@recipe("nprng_global", "module-level `default_rng` used by the dataset", "bwd win fwd")
class NumpyModule(Augmenting):
    def setup(self) -> None:
        super().setup()
        self.generators["module"] = shared_by_module

    def dataset(self) -> Any:
        return Augmented(Loop.dataset(self), draw_from_module)


class OwnNoise(Augmented):
    """Noise from an attribute of the dataset."""

    def __init__(self, inner: Any, rank: int) -> None:
        self.rng = np.random.default_rng(rank)
        super().__init__(inner, lambda: self.rng.normal(size=WIDTH_IN))


@recipe("nprng_dataset", "`default_rng` attribute of the dataset", "bwd win fwd")
class NumpyDataset(Augmenting):
    def dataset(self) -> Any:
        dataset = OwnNoise(Loop.dataset(self), self.rank)
        self.generators["dataset"] = dataset.rng
        return dataset


class PythonNoise(Augmented):
    """Noise from a `random.Random`."""

    def __init__(self, inner: Any, rank: int) -> None:
        self.rng = random.Random(rank)
        super().__init__(inner, lambda: self.rng.gauss(0, 1))


@recipe("pyrng_dataset", "`random.Random` attribute of the dataset", "bwd win fwd")
class PythonDataset(Augmenting):
    def dataset(self) -> Any:
        return PythonNoise(Loop.dataset(self), self.rank)


@recipe("pyrng_loop", "`random.Random` attribute of the loop: stochastic depth", "bwd win")
class PythonLoop(Loop):
    def setup(self) -> None:
        super().setup()
        self.rng = random.Random(self.rank)

    def loss(self, x: Any, y: Any) -> Any:
        return super().loss(x, y) * (2.0 if self.rng.random() < 0.5 else 1.0)


class TorchNoise(Augmented):
    """Noise from a `torch.Generator` of the dataset."""

    def __init__(self, inner: Any, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)
        super().__init__(inner, lambda: torch.randn(WIDTH_IN, generator=self.generator))


@recipe("gen_dataset", "`torch.Generator` attribute of the dataset", "bwd win fwd end epoch")
class GeneratorDataset(Augmenting):
    def dataset(self) -> Any:
        dataset = TorchNoise(Loop.dataset(self), self.rank)
        self.generators["dataset"] = dataset.generator
        return dataset


@recipe("loader_generator", "`DataLoader(shuffle=True, generator=g)`", "bwd win fwd epoch")
class LoaderGenerator(Loop):
    def loader(self) -> Any:
        self.generators["loader"] = generator = torch.Generator().manual_seed(9 + self.rank)
        dataset: Any = self.dataset()
        subset = torch.utils.data.Subset(dataset, range(self.rank, len(dataset), self.ranks))
        return DataLoader(subset, BATCH, shuffle=True, generator=generator)


@recipe("sampler_plain", "`DataLoader(shuffle=True)` that draws from torch's global stream", "bwd win fwd epoch")
class ShuffleGlobal(Loop):
    def loader(self) -> Any:
        dataset: Any = self.dataset()
        subset = torch.utils.data.Subset(dataset, range(self.rank, len(dataset), self.ranks))
        return DataLoader(subset, BATCH, shuffle=True)


@recipe("sampler_weighted", "WeightedRandomSampler with a generator of its own", "bwd win epoch")
class Weighted(Loop):
    def sampler(self, count: int) -> Any:
        generator = self.generators["sampler"] = torch.Generator().manual_seed(self.rank)
        return WeightedRandomSampler([1.0, 2.0] * (count // 2), count // self.ranks, generator=generator)

    def loader(self) -> Any:
        dataset: Any = self.dataset()
        return DataLoader(dataset, BATCH, sampler=self.sampler(len(dataset)))


@recipe("sampler_random", "RandomSampler with replacement and a generator", "bwd win epoch")
class RandomReplacement(Weighted):
    def sampler(self, count: int) -> Any:
        generator = self.generators["sampler"] = torch.Generator().manual_seed(self.rank)
        return RandomSampler(range(count), replacement=True, num_samples=count // self.ranks, generator=generator)


@recipe("workers", "two loader workers, a dataset that draws from torch's stream", "bwd win fwd epoch", mixes=False)
class Workers(AugmentTorch):
    def loader(self) -> Any:
        plain = super().loader()
        return DataLoader(plain.dataset, BATCH, sampler=plain.sampler, num_workers=2)


@recipe("noise_in_model", "dropout, and noise from torch, numpy and python in one step", "bwd win fwd end")
class ThreeStreams(Loop):
    def loss(self, x: Any, y: Any) -> Any:
        x = x + 0.1 * torch.randn_like(x) + float(np.random.rand()) + random.random()
        return super().loss(x, y)


@recipe("env_rng", "an RL environment with a numpy generator, its state in `local_extras`", "bwd win fwd end",
        {"win": "local_extras"})  # fmt: skip
class Environment(Loop):
    own_loop = True

    def setup(self) -> None:
        super().setup()
        self.rng = np.random.default_rng(self.rank)
        self.generators["env"] = self.rng
        self.local_extras["env"] = self.env = {"position": 0.0, "rng": self.rng.bit_generator.state}

    def before_forward(self, batch: Any) -> Any:
        x, y = super().before_forward(batch)
        self.rng.bit_generator.state = self.env["rng"]
        self.env["position"] += float(self.rng.normal())
        self.env["rng"] = self.rng.bit_generator.state
        return x + self.env["position"], y


@recipe("cutmix_torch", "a `torch.Generator` made in the loop, a local variable of a closure", "bwd win")
class ClosureGenerator(Loop):
    def setup(self) -> None:
        super().setup()
        generator = self.generators["cutmix"] = torch.Generator().manual_seed(self.rank)
        self.cut = lambda x: torch.where(torch.rand(x.shape, generator=generator) < 0.2, 0.0, x)

    def before_forward(self, batch: Any) -> Any:
        x, y = super().before_forward(batch)
        return self.cut(x), y


@recipe("diffusion", "timesteps and noise drawn on a generator of the rank (diffusers)", "bwd win fwd")
class Diffusion(Loop):
    def setup(self) -> None:
        super().setup()
        self.noise = self.generators["noise"] = torch.Generator().manual_seed(40 + self.rank)
        self.alphas = torch.linspace(0.99, 0.1, 20)

    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH_IN, WIDTH), nn.SiLU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH_IN))

    def loss(self, x: Any, y: Any) -> Any:
        t = torch.randint(20, (len(x), 1), generator=self.noise)
        noise = torch.randn(x.shape, generator=self.noise)
        a = self.alphas[t]
        return nn.functional.mse_loss(self.model(a.sqrt() * x + (1 - a).sqrt() * noise), noise)


class Jitter:
    """A schedule whose state says nothing of the generator that it draws from."""

    def __init__(self, rank: int) -> None:
        self.rng = np.random.RandomState(20 + rank)

    def state_dict(self) -> dict[str, Any]:
        return {"is": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@recipe("gen_extra_own", "generators of the dataset and of an extra, in a loop of one's own", "fwd")
class ExtraOwnLoop(GeneratorDataset):
    own_loop = True

    def setup(self) -> None:
        super().setup()
        self.extras["jitter"] = self.jitter = Jitter(self.rank)

    def loss(self, x: Any, y: Any) -> Any:
        return super().loss(x, y) * (1 + 0.1 * self.jitter.rng.rand())

    def plain(self, loader: Any, done: int, ready: Callable[[], None]) -> Iterator[tuple[int, int, Any]]:
        """What a step is trained on is fetched once it has begun, since the data set draws."""
        last, first = divmod(done, self.per_epoch)
        for epoch in range(last, self.epochs):
            loader.sampler.set_epoch(epoch)
            batches = iter(loader)
            if epoch == last:
                for _ in range(first):
                    next(batches)
                ready()
            for step in range(first if epoch == last else 0, self.per_epoch):
                yield epoch + 1, step + 1, next(batches)


class Stream:
    """Samples without end, drawn on a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> Any:
        x = torch.randn(BATCH, WIDTH_IN, generator=self.generator)
        return x, torch.randn(BATCH, WIDTH_OUT, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


@recipe(
    "stream_own", "batches drawn by an object in `local_extras`, in a loop of one's own without `step_begin()`", "fwd"
)
class StreamOwnLoop(Loop):
    own_loop = True

    def setup(self) -> None:
        super().setup()
        self.local_extras["stream"] = self.stream = Stream(self.rank)
        self.generators["stream"] = self.stream.generator

    def plain(self, loader: Any, done: int, ready: Callable[[], None]) -> Iterator[tuple[int, int, Any]]:
        for step in range(done, self.epochs * self.per_epoch):
            yield step // self.per_epoch + 1, step % self.per_epoch + 1, next(self.stream)
