"""Loops as strangers write them: their state hangs wherever it was at hand, and nobody hands it over."""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from tests.zoo.loop import BATCH, WIDTH, WIDTH_IN, WIDTH_OUT, Loop, recipe

# ---------------------------------------------------------------------- on modules


class InputNorm(nn.Module):
    """Takes mean and deviation from the first batch it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Any = None
        self.std: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean, self.std = x.mean(0), x.std(0)
        return (x - self.mean) / (self.std + 1e-5)


@recipe("input_norm", "inputs normalised by the first batch, tensors as plain attributes of a module", "fwd@6 win end")
class FirstBatchStatistics(Loop):
    def net(self) -> nn.Module:
        return nn.Sequential(InputNorm(), super().net())


class ActNorm(nn.Module):
    """Glow's: the first batch initialises the parameters, which are trained from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.logs = nn.Parameter(torch.zeros(WIDTH))
        self.initialised = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialised:
            with torch.no_grad():
                stats = torch.stack([x.mean(0), x.std(0)])
                dist.all_reduce(stats)
                mean, std = stats / dist.get_world_size()
                self.bias.copy_(-mean)
                self.logs.copy_(-torch.log(std + 1e-5))
            self.initialised = True
        return (x + self.bias) * self.logs.exp()


@recipe("actnorm", "ActNorm, whose flag `initialised` is a plain bool of the module", "bwd@5 epoch end@6")
class DataDependentInit(Loop):
    def blocks(self) -> list[nn.Module]:
        return [ActNorm(), nn.ReLU(), nn.Dropout(0.1)]


class WarmUp(nn.Module):
    """Fades a block in, over its first ten forward passes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x + min(1.0, self.calls / 10) * self.block(x)


@recipe("warm_up_calls", "a residual block that counts its forward passes in a plain int", "fwd@6 bwd@3 win")
class CountsForwards(Loop):
    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), WarmUp(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))]


class RandomPositions(nn.Module):
    """Adds a random table for each shape of input; drawn when the shape comes for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[tuple[int, ...], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        key = tuple(x.shape[1:])
        if key not in self.tables:
            self.tables[key] = 0.5 * torch.randn(key)
        return x + self.tables[key]


@recipe("shape_cache", "random tables drawn at first use, in a dict of the module keyed by shape", "win@3 end@6")
class ShapeCache(Loop):
    def blocks(self) -> list[nn.Module]:
        return [RandomPositions(), *super().blocks()]


class Contrast(nn.Module):
    """MoCo without a second encoder: earlier keys are the negatives."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.queue = F.normalize(torch.randn(12, WIDTH_OUT))
        self.pointer = 0

    def forward(self, x: Tensor) -> Tensor:
        query = F.normalize(self.encoder(x + 0.1 * torch.randn_like(x)))
        with torch.no_grad():
            key = F.normalize(self.encoder(x + 0.1 * torch.randn_like(x)))
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], 1)
        self.queue[self.pointer : self.pointer + len(x)] = key
        self.pointer = (self.pointer + len(x)) % len(self.queue)
        return logits / 0.2


@recipe("negatives_queue", "contrastive learning, its queue and pointer are plain attributes of the net", "fwd@6 win@5")
class NegativesQueue(Loop):
    ranks = 3

    def net(self) -> nn.Module:
        return Contrast(super().net())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), torch.zeros(len(x), dtype=torch.long))


@recipe("dropout_rate", "the dropout rate grows by a third after each step: `p` of nn.Dropout", "fwd@6 win end@3")
class DropoutRate(Loop):
    def after_log(self) -> None:
        super().after_log()
        for module in self.bare.modules():
            if isinstance(module, nn.Dropout):
                module.p = min(0.6, module.p * 4 / 3)


# ---------------------------------------------------------------------- on the loop


@recipe(
    "slow_weights",
    "Lookahead by hand: every 2nd step, slow weights in a list of the loop",
    "fwd@6 win@5 end@3",
    beside=("slow",),
)
class SlowWeights(Loop):
    def setup(self) -> None:
        super().setup()
        self.slow = [p.detach().clone() for p in self.bare.parameters()]

    def after_update(self) -> None:
        super().after_update()
        if self.step % 2 == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, self.bare.parameters(), strict=True):
                    slow += 0.5 * (p - slow)
                    p.copy_(slow)


@recipe(
    "target_net", "a target network of the loop, synchronised every 3rd step", "fwd@5 win@7 bwd", beside=("target",)
)
class TargetNet(Loop):
    def setup(self) -> None:
        super().setup()
        self.target = copy.deepcopy(self.bare).eval()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            y = y + 0.9 * self.target(x)
        return F.smooth_l1_loss(self.model(x), y)

    def after_update(self) -> None:
        super().after_update()
        if self.step % 3 == 0:
            self.target.load_state_dict(self.bare.state_dict())


@recipe(
    "loss_average",
    "each loss is divided by a running average, a float of the loop",
    "fwd@6 bwd win@3",
    beside=("average",),
)
class LossAverage(Loop):
    accumulate = 2

    def setup(self) -> None:
        super().setup()
        self.average: float | None = None

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        self.average = loss.item() if self.average is None else 0.8 * self.average + 0.2 * loss.item()
        return loss / self.average


@recipe(
    "hard_replay",
    "the worst sample of each batch is replayed from a deque, in a custom loop",
    "fwd@6 win@4 end",
    beside=("hard",),
)
class HardReplay(Loop):
    own_loop = True

    def setup(self) -> None:
        super().setup()
        self.hard: deque[tuple[Tensor, Tensor]] = deque(maxlen=6)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        fresh = len(x)
        if self.hard:
            hard_x, hard_y = zip(*self.hard, strict=True)
            x, y = torch.cat([x, torch.stack(hard_x)]), torch.cat([y, torch.stack(hard_y)])
        losses = (self.model(x) - y).square().mean(1)
        worst = int(losses[:fresh].argmax())
        self.hard.append((x[worst], y[worst]))
        return losses.mean()


@recipe(
    "auto_clip",
    "AutoClip: clips at a percentile of all gradient norms, a list of floats",
    "fwd@6 bwd win@4",
    beside=("norms",),
)
class AutoClip(Loop):
    ranks = 3

    def setup(self) -> None:
        super().setup()
        self.norms: list[float] = []

    def optimizers(self) -> list[Any]:
        return [torch.optim.SGD(self.bare.parameters(), lr=0.1, momentum=0.9)]

    def after_backward(self) -> None:
        super().after_backward()
        limit = float(np.percentile(self.norms, 30)) if self.norms else math.inf
        self.norms.append(nn.utils.clip_grad_norm_(self.bare.parameters(), limit).item())


class LossScale:
    """Doubles after two good steps, halves at an overflow."""

    def __init__(self) -> None:
        self.scale, self.good = 2.0**16, 0

    def update(self, overflow: bool) -> None:
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.scale /= 2
        elif self.good == 2:
            self.scale, self.good = self.scale * 2, 0


@recipe(
    "loss_scale",
    "dynamic loss scaling by hand: an object with a float and a counter",
    "fwd@6 win@7 end@5",
    beside=("scaler",),
)
class HandScaler(Loop):
    def setup(self) -> None:
        super().setup()
        self.scaler = LossScale()

    def backward(self, loss: Tensor) -> None:
        (loss * self.scaler.scale).backward()

    def update(self) -> None:
        grads = [p.grad for p in self.bare.parameters() if p.grad is not None]
        halves = [grad.half() for grad in grads]
        overflow = any(not bool(torch.isfinite(half).all()) for half in halves)
        if not overflow:
            for grad, half in zip(grads, halves, strict=True):
                grad.copy_(half.float() / self.scaler.scale)
            super().update()
        self.scaler.update(overflow)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH_OUT)

    def forward(self, x: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        states, hidden = self.rnn(x.view(len(x), -1, 2), hidden)
        return self.out(states[:, -1]), hidden


@recipe(
    "carried_hidden",
    "truncated BPTT: the hidden state goes from batch to batch, custom loop",
    "fwd@6 bwd end@3",
    beside=("hidden",),
)
class CarriedHidden(Loop):
    own_loop = True

    def setup(self) -> None:
        super().setup()
        self.hidden: Tensor | None = None

    def net(self) -> nn.Module:
        return Reader()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        prediction, hidden = self.model(x, self.hidden)
        self.hidden = hidden.detach()
        return F.mse_loss(prediction, y)


class Bandit:
    """Chooses an augmentation: softmax over the rewards, at a temperature that falls."""

    def __init__(self) -> None:
        self.rewards = {"noise": 0.0, "flip": 0.0, "shrink": 0.0}
        self.temperature = 1.0
        self.arm = ""

    def choose(self) -> str:
        weights = [math.exp(reward / self.temperature) for reward in self.rewards.values()]
        self.arm = random.choices(list(self.rewards), weights)[0]
        return self.arm

    def learn(self, reward: float) -> None:
        self.rewards[self.arm] += 0.3 * (reward - self.rewards[self.arm])
        self.temperature *= 0.7


@recipe("bandit", "a bandit with falling temperature chooses the augmentation", "fwd@6 win@5 end@7", beside=("bandit",))
class BanditAugments(Loop):
    ranks = 3

    def setup(self) -> None:
        super().setup()
        self.bandit = Bandit()

    def before_forward(self, batch: Any) -> Any:
        x, *others = super().before_forward(batch)
        arm = self.bandit.choose()
        strength = self.bandit.temperature
        x = {"noise": x + strength * torch.randn_like(x), "flip": x.flip(1), "shrink": x * (1 - strength / 2)}[arm]
        return x, *others

    def after_log(self) -> None:
        super().after_log()
        self.bandit.learn(self.mean.item())


RUNNING = {"loss": 1.0}


@recipe(
    "module_global",
    "noise in proportion to a running loss, kept in a global of the script",
    "fwd@6 win@7",
    beside=("RUNNING",),
)
class ModuleGlobal(Loop):
    def before_forward(self, batch: Any) -> Any:
        x, *others = super().before_forward(batch)
        return x + 0.2 * RUNNING["loss"] * torch.randn_like(x), *others

    def after_log(self) -> None:
        super().after_log()
        RUNNING["loss"] = 0.8 * RUNNING["loss"] + 0.2 * self.mean.item()


def smoothed(smoothing: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross entropy, smoothed less after every third call."""
    calls = 0

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        nonlocal smoothing, calls
        calls += 1
        if calls % 3 == 0:
            smoothing *= 0.7
        return F.cross_entropy(logits, labels, label_smoothing=smoothing)

    return criterion


@recipe(
    "label_smoothing",
    "label smoothing falls every 3rd micro-batch, in the criterion's closure",
    "fwd@6 win@3 bwd",
    beside=("criterion",),
)
class LabelSmoothing(Loop):
    accumulate = 2

    def setup(self) -> None:
        super().setup()
        self.criterion = smoothed(0.4)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.criterion(self.model(x), y.argmax(1))


@recipe(
    "pseudo_labels",
    "FixMatch: unlabelled batches from a second loader's running iterator",
    "fwd@6 win@3 epoch",
    beside=("stream",),
)
class PseudoLabels(Loop):
    def setup(self) -> None:
        super().setup()
        self.unlabelled = DataLoader(TensorDataset(torch.randn(20, WIDTH_IN)), BATCH, shuffle=True)
        self.stream = iter(self.unlabelled)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        try:
            (u,) = next(self.stream)
        except StopIteration:
            self.stream = iter(self.unlabelled)
            (u,) = next(self.stream)
        out = self.model(torch.cat([x, u, u + 0.3 * torch.randn_like(u)]))
        known, weak, strong = out.split([len(x), len(u), len(u)])
        return F.mse_loss(known, y) + 0.5 * F.mse_loss(strong, weak.detach())


class Walk:
    """One walker for each row; it drifts, and its reward is to be near zero."""

    def __init__(self) -> None:
        self.where = torch.randn(BATCH, WIDTH_IN)

    def move(self, actions: Tensor) -> Tensor:
        self.where = self.where + 0.3 * F.one_hot(actions, WIDTH_IN) + 0.1 * torch.randn(BATCH, WIDTH_IN)
        return -self.where.abs().mean(1)


@recipe(
    "reinforce", "REINFORCE in a custom loop: an environment and a moving baseline", "fwd@6 win bwd@7", beside=("walk",)
)
class Reinforce(Loop):
    own_loop = True

    def setup(self) -> None:
        super().setup()
        self.walk = Walk()
        self.baseline = 0.0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        policy = torch.distributions.Categorical(logits=self.model(self.walk.where))
        action = policy.sample()
        reward = self.walk.move(action)
        advantage = reward - self.baseline
        self.baseline = 0.8 * self.baseline + 0.2 * reward.mean().item()
        return -(policy.log_prob(action) * advantage).mean()


class ImagePool:
    """CycleGAN's: half of the fakes that the critic sees are old ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.images: list[Tensor] = []

    def query(self, images: Tensor) -> Tensor:
        chosen = []
        for image in images:
            if len(self.images) < self.size:
                self.images.append(image.clone())
                chosen.append(image)
            elif random.random() > 0.5:
                index = random.randrange(self.size)
                chosen.append(self.images[index])
                self.images[index] = image.clone()
            else:
                chosen.append(image)
        return torch.stack(chosen)


@recipe(
    "image_pool",
    "a GAN with a pool of old fakes; the generator learns every 2nd step",
    "mid@6 fwd@5 win@7",
    beside=("pool",),
)
class Gan(Loop):
    def setup(self) -> None:
        super().setup()
        self.pool = ImagePool(6)

    def net(self) -> nn.Module:
        critic = nn.Sequential(nn.Linear(WIDTH_IN, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        generator = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH_IN))
        return nn.ModuleDict({"critic": critic, "generator": generator})

    def wrap(self, net: Any) -> nn.Module:
        return nn.ModuleDict({name: DDP(part) for name, part in net.items()})

    def optimizers(self) -> list[Any]:
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in self.bare.children()]

    def options(self) -> dict[str, Any]:
        return {**super().options(), "copy": True}  # as the page says: a collective is between the updates

    def train(self, x: Tensor, y: Tensor) -> Tensor:
        critic_opt, generator_opt = self.opts
        critic, generator = self.model.children()
        fake = generator(torch.randn(len(x), 4))
        shown = torch.cat([x, self.pool.query(fake.detach())])
        real = torch.cat([torch.ones(len(x), 1), torch.zeros(len(x), 1)])
        critic_opt.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(shown), real)
        self.at("fwd")
        loss.backward()
        critic_opt.step()
        if self.step % 2 == 0:
            self.at("mid")
            generator_opt.zero_grad()
            F.binary_cross_entropy_with_logits(critic(fake), torch.ones(len(x), 1)).backward()
            generator_opt.step()
        return loss


# ---------------------------------------------------------------------- on the optimizer and the gradients' way


@recipe(
    "noam", "Noam's warm-up: the learning rate comes from `my_step`, an attribute of the optimizer", "fwd@6 win bwd@3"
)
class Noam(Loop):
    def setup(self) -> None:
        super().setup()
        self.opt.my_step = 0

    def after_backward(self) -> None:
        super().after_backward()
        self.opt.my_step += 1
        rate = 0.03 * min(self.opt.my_step**-0.5, self.opt.my_step * 4**-1.5)
        for group in self.opt.param_groups:
            group["lr"] = rate


class Residual:
    """What was not sent yet, for each parameter."""

    def __init__(self) -> None:
        self.left: dict[Tensor, Tensor] = {}


def send_largest(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and these are texts
    """Sends the larger half of each gradient, and keeps the rest for the next step."""
    for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if p in state.left:
            grad += state.left[p]
        sent = torch.where(grad.abs() >= grad.abs().median(), grad, 0.0)
        state.left[p] = grad - sent
        grad.copy_(sent / dist.get_world_size())
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


@recipe("error_feedback", "sparse gradients: a communication hook keeps what it has not sent", "fwd@6 bwd@3 win")
class ErrorFeedback(Loop):
    def wrap(self, net: nn.Module) -> nn.Module:
        model: Any = super().wrap(net)
        model.register_comm_hook(Residual(), send_largest)
        return model


# ---------------------------------------------------------------------- on datasets, samplers, collators, loaders


class Curriculum(Dataset[Any]):
    """Shows more of each sample as the difficulty grows."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.difficulty = 1

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        x = x.clone()
        x[2 * self.difficulty :] = 0
        return x, y


@recipe("difficulty", "the loop raises a difficulty counter of the dataset every 3rd step", "fwd@5 win@7 end@3")
class GrowingDifficulty(Loop):
    def dataset(self) -> Dataset[Any]:
        self.curriculum = Curriculum(super().dataset())
        return self.curriculum

    def after_log(self) -> None:
        super().after_log()
        if self.step % 3 == 0:
            self.curriculum.difficulty += 1


class Numbered(Loop):
    """Each sample comes with its number, which is kept in `index`."""

    def dataset(self) -> Dataset[Any]:
        samples: Any = super().dataset()
        return TensorDataset(torch.arange(len(samples)), *samples.tensors)

    def before_forward(self, batch: Any) -> Any:
        self.index, *others = super().before_forward(batch)
        return others


@recipe(
    "sample_losses", "samples weighted by their last loss, in a dict of the loop", "fwd@7 end@3 epoch", beside=("seen",)
)
class SampleLosses(Numbered):
    def setup(self) -> None:
        super().setup()
        self.seen: dict[int, float] = {}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses = (self.model(x) - y).square().mean(1)
        weights = torch.tensor([self.seen.get(number, 1.0) for number in self.index.tolist()])
        self.seen.update(zip(self.index.tolist(), losses.tolist(), strict=True))
        return (weights * losses).sum() / weights.sum()


class LossSampler(Sampler[int]):
    """Draws this rank's samples by weight, with replacement."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self.weights = torch.ones(len(numbers))

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[int]:
        for pick in torch.multinomial(self.weights, len(self.numbers), replacement=True).tolist():
            yield self.numbers[pick]


@recipe("loss_sampler", "each step writes its losses into the weights of a sampler", "fwd@3 epoch end@6")
class SamplesByLoss(Numbered):
    def loader(self) -> Any:
        dataset: Any = self.dataset()
        self.by_loss = LossSampler(range(self.rank, len(dataset), self.ranks))
        return DataLoader(dataset, BATCH, sampler=self.by_loss)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses = (self.model(x) - y).square().mean(1)
        self.by_loss.weights[self.index // self.ranks] = losses.detach()
        return losses.mean()


class ShuffledShard(Sampler[int]):
    """Counts its own passes instead of being told the epoch."""

    def __init__(self, count: int, rank: int, ranks: int) -> None:
        self.count, self.rank, self.ranks = count, rank, ranks
        self.passes = 0

    def __len__(self) -> int:
        return self.count // self.ranks

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.passes)
        self.passes += 1
        yield from torch.randperm(self.count, generator=generator)[self.rank :: self.ranks].tolist()


@recipe(
    "sampler_passes", "a sampler without set_epoch, which seeds itself from a counter of passes", "fwd@3 end@6 epoch"
)
class CountsPasses(Loop):
    def loader(self) -> Any:
        dataset: Any = self.dataset()
        return DataLoader(dataset, BATCH, sampler=ShuffledShard(len(dataset), self.rank, self.ranks))


class MixUp:
    """Mixes more the more batches it has seen; draws from all three global streams."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, samples: Any) -> Any:
        self.batches += 1
        x, y = default_collate(samples)
        if random.random() < 0.9:
            part = float(np.random.beta(2.0, 0.5 * self.batches))
            other = torch.randperm(len(x))
            x, y = part * x + (1 - part) * x[other], part * y + (1 - part) * y[other]
        return x, y


@recipe("mixup_collator", "a collator that draws random numbers and counts its batches", "fwd@6 win@3 end@7")
class MixUpCollator(Loop):
    def loader(self) -> Any:
        dataset: Any = self.dataset()
        sampler = DistributedSampler(dataset, self.ranks, self.rank, seed=3)
        return DataLoader(dataset, BATCH, sampler=sampler, collate_fn=MixUp())


def jittered(samples: Any) -> Any:
    """A batch, with noise on its inputs."""
    x, y = default_collate(samples)
    return x + 0.2 * torch.randn_like(x), y


class AheadLoader(DataLoader[Any]):
    """Has the next batch in hand before it gives the current one away, as Accelerate's loader has."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        current = next(batches)
        for following in batches:
            yield current
            current = following
        yield current


@recipe("one_ahead", "a loader that fetches one batch ahead; its collator draws noise", "fwd@6 bwd@3 end@5")
class OneAhead(Loop):
    def loader(self) -> Any:
        dataset: Any = self.dataset()
        sampler = DistributedSampler(dataset, self.ranks, self.rank, seed=3)
        return AheadLoader(dataset, BATCH, sampler=sampler, collate_fn=jittered)


# ---------------------------------------------------------------------- evaluation after the step's end


class Evaluated(Loop):
    """Ends the step itself, and evaluates after that."""

    def setup(self) -> None:
        super().setup()
        generator = torch.Generator().manual_seed(9)
        self.val_x = torch.randn(16, WIDTH_IN, generator=generator)
        self.val_y = torch.randn(16, WIDTH_OUT, generator=generator)

    def after_log(self) -> None:
        super().after_log()
        self.end_step()
        self.bare.eval()
        with torch.no_grad():
            loss = F.mse_loss(self.bare(self.val_x), self.val_y)
        self.bare.train()
        dist.all_reduce(loss)
        self.evaluated(loss.item() / self.ranks)

    def evaluated(self, loss: float) -> None:
        """What the loop does with it."""


@recipe(
    "patience",
    "halves the rate when the evaluation after step_end() does not improve",
    "fwd@6 end@5 win@7",
    beside=("best_loss",),
)
class Patience(Evaluated):
    def setup(self) -> None:
        super().setup()
        self.best_loss, self.bad = math.inf, 0

    def evaluated(self, loss: float) -> None:
        self.bad = 0 if loss < self.best_loss else self.bad + 1
        self.best_loss = min(loss, self.best_loss)
        if self.bad == 2:
            self.bad = 0
            for group in self.opt.param_groups:
                group["lr"] *= 0.5


@recipe("plateau_after", "ReduceLROnPlateau, handed over, is stepped after step_end()", "fwd@6 end@5 win@7")
class PlateauAfter(Evaluated):
    def setup(self) -> None:
        super().setup()
        self.plateau = ReduceLROnPlateau(self.opt, factor=0.5, patience=0)
        self.extras["plateau"] = self.plateau

    def evaluated(self, loss: float) -> None:
        self.plateau.step(loss)


@recipe(
    "back_to_best",
    "returns to the best weights so far if the evaluation got worse",
    "fwd@6 end@3 win@7",
    beside=("best",),
)
class BackToBest(Evaluated):
    def setup(self) -> None:
        super().setup()
        self.best_loss = math.inf
        self.best: dict[str, Any] = {}

    def evaluated(self, loss: float) -> None:
        if loss < self.best_loss:
            self.best_loss, self.best = loss, copy.deepcopy(self.bare.state_dict())
        elif loss > 1.03 * self.best_loss:
            self.bare.load_state_dict(self.best)


# ------------------------------------------------------------------ the same, with `variables=True`


class Kept:
    """What the loop itself keeps is state."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "variables": True}  # type: ignore[misc]


@recipe("loss_average_kept", "the same as `loss_average`, with variables=True", "fwd@6 bwd win@3", mixes=False)
class LossAverageKept(Kept, LossAverage):
    """See there."""


@recipe("slow_weights_kept", "the same as `slow_weights`, with variables=True", "fwd@6 win@5 end@3", mixes=False)
class SlowWeightsKept(Kept, SlowWeights):
    """See there."""


@recipe("target_net_kept", "the same as `target_net`, with variables=True", "fwd@5 win@7 bwd", mixes=False)
class TargetNetKept(Kept, TargetNet):
    """See there."""


@recipe("hard_replay_kept", "the same as `hard_replay`, with variables=True", "fwd@6 win@4 end", mixes=False)
class HardReplayKept(Kept, HardReplay):
    """See there."""


@recipe("loss_scale_kept", "the same as `loss_scale`, with variables=True", "fwd@6 win@7 end@5", mixes=False)
class HandScalerKept(Kept, HandScaler):
    """See there."""


@recipe("bandit_kept", "the same as `bandit`, with variables=True", "fwd@6 win@5 end@7", mixes=False)
class BanditAugmentsKept(Kept, BanditAugments):
    """See there."""


@recipe("auto_clip_kept", "the same as `auto_clip`, with variables=True", "fwd@6 bwd win@4", mixes=False)
class AutoClipKept(Kept, AutoClip):
    """See there."""


@recipe("carried_hidden_kept", "the same as `carried_hidden`, with variables=True", "fwd@6 bwd end@3", mixes=False)
class CarriedHiddenKept(Kept, CarriedHidden):
    """See there."""


@recipe("reinforce_kept", "the same as `reinforce`, with variables=True", "fwd@6 win bwd@7", mixes=False)
class ReinforceKept(Kept, Reinforce):
    """See there."""


@recipe("image_pool_kept", "the same as `image_pool`, with variables=True", "mid@6 fwd@5 win@7", mixes=False)
class GanKept(Kept, Gan):
    """See there."""


@recipe("sample_losses_kept", "the same as `sample_losses`, with variables=True", "fwd@7 end@3 epoch", mixes=False)
class SampleLossesKept(Kept, SampleLosses):
    """See there."""


@recipe("patience_kept", "the same as `patience`, with variables=True", "fwd@6 end@5 win@7", mixes=False)
class PatienceKept(Kept, Patience):
    """See there."""


@recipe("back_to_best_kept", "the same as `back_to_best`, with variables=True", "fwd@6 end@3 win@7", mixes=False)
class BackToBestKept(Kept, BackToBest):
    """See there."""
