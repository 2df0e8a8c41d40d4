"""What users of timm, diffusers, torchvision's references, RL and self-supervised code write."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.zoo.loop import BATCH, WIDTH, WIDTH_IN, WIDTH_OUT, Loop, recipe
from tests.zoo.recipes_ddp import GanGOnlyCopy
from tests.zoo.recipes_schedules import Scheduled


def mlp(inlet: int = WIDTH_IN, outlet: int = WIDTH_OUT) -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(inlet, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outlet))


@recipe("timm_ema", "timm's ModelEmaV2: a deep copy that follows `state_dict()`, as an extra", "win bwd end",
        {"win": "extras['ema']"})  # fmt: skip
class TimmEma(Scheduled):
    def net(self) -> nn.Module:
        return mlp()

    def setup(self) -> None:
        super().setup()
        self.extras["ema"] = self.ema = copy.deepcopy(self.bare)

    @torch.no_grad()
    def after_update(self) -> None:
        super().after_update()
        for mean, value in zip(self.ema.state_dict().values(), self.bare.state_dict().values(), strict=True):
            mean.copy_(0.9 * mean + 0.1 * value)


class ShadowParameters:
    """diffusers' EMAModel in short: a list of shadow parameters and a count."""

    def __init__(self, parameters: Any) -> None:
        self.shadow = [p.detach().clone() for p in parameters]
        self.steps = 0

    @torch.no_grad()
    def step(self, parameters: Any) -> None:
        self.steps += 1
        decay = min(0.99, (1 + self.steps) / (10 + self.steps))
        for shadow, p in zip(self.shadow, parameters, strict=True):
            shadow.sub_((1 - decay) * (shadow - p))

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.shadow = [p.clone() for p in state["shadow"]]


@recipe("diffusers_ema", "diffusers' EMAModel as an extra", "win bwd end fwd", {"win": "extras['ema']"})
class DiffusersEma(Loop):
    def net(self) -> nn.Module:
        return mlp()

    def setup(self) -> None:
        super().setup()
        self.extras["ema"] = self.ema = ShadowParameters(self.bare.parameters())

    def after_update(self) -> None:
        super().after_update()
        self.ema.step(self.bare.parameters())


@recipe("ema_validation", "averaged weights swapped in for a validation at an epoch's end, and out again",
        "epoch fwd@5 bwd@5 end@4", {"epoch bwd": ("weight", "extras['ema']")})  # fmt: skip
class EmaValidation(DiffusersEma):
    def epoch_end(self) -> None:
        super().epoch_end()
        kept = [p.detach().clone() for p in self.bare.parameters()]
        for p, shadow in zip(self.bare.parameters(), self.ema.shadow, strict=True):
            p.data.copy_(shadow)
        with torch.no_grad():
            mean = self.bare(torch.ones(1, WIDTH_IN)).sum()
        dist.all_reduce(mean)
        for p, value in zip(self.bare.parameters(), kept, strict=True):
            p.data.copy_(value)


@recipe("distillation", "a frozen teacher outside of the model, the same in each start", "bwd win")
class Distillation(Loop):
    def setup(self) -> None:
        super().setup()
        torch.manual_seed(33)
        self.teacher = mlp().requires_grad_(False).eval()

    def loss(self, x: Any, y: Any) -> Any:
        return super().loss(x, self.teacher(x))


@recipe("mean_teacher", "mean teacher: averaged weights outside of the model, as an extra", "win bwd end",
        {"win": "extras['teacher']"})  # fmt: skip
class MeanTeacher(Loop):
    def net(self) -> nn.Module:
        return mlp()

    def setup(self) -> None:
        super().setup()
        self.extras["teacher"] = self.teacher = copy.deepcopy(self.bare).requires_grad_(False)

    def loss(self, x: Any, y: Any) -> Any:
        return super().loss(x, y) + nn.functional.mse_loss(self.model(x), self.teacher(x))

    @torch.no_grad()
    def after_update(self) -> None:
        super().after_update()
        for mean, p in zip(self.teacher.parameters(), self.bare.parameters(), strict=True):
            mean.lerp_(p, 0.2)


@recipe("teacher_hidden", "the same teacher, handed over to nobody", "bwd", beside=("teacher",), mixes=False)
class TeacherHidden(MeanTeacher):
    def setup(self) -> None:
        super().setup()
        self.extras.pop("teacher")


class Queue(nn.Module):
    """MoCo's queue: a buffer with a pointer, and gathered keys."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp()
        self.register_buffer("queue", torch.randn(64, WIDTH_OUT))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.encoder(x)
        logits = keys @ self.queue.clone().T
        gathered = [torch.zeros_like(keys) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, keys.detach())
        rows = torch.cat(gathered)
        at = int(self.place)
        self.queue[at : at + len(rows)] = rows
        self.place[0] = (at + len(rows)) % 64
        return torch.logsumexp(logits, 1)


@recipe("moco_queue", "contrastive queue: a buffer with a pointer, written in forward", "bwd win fwd")
class MocoQueue(Loop):
    def net(self) -> nn.Module:
        return Queue()

    def loss(self, x: Any, y: Any) -> Any:
        return self.model(x).mean()


@recipe("dqn", "DQN: replay buffer in `local_extras`, target network as an extra, copied every third step",
        "bwd win fwd end", {"win": ("extras", "local_extras")})  # fmt: skip
class Dqn(Loop):
    own_loop = True

    def net(self) -> nn.Module:
        return mlp()

    def setup(self) -> None:
        super().setup()
        self.extras["target"] = self.target = copy.deepcopy(self.bare).requires_grad_(False)
        self.replay: deque[Any] = deque(maxlen=3)
        self.local_extras["replay"] = {"frames": self.replay}

    def before_forward(self, batch: Any) -> Any:
        self.replay = self.local_extras["replay"]["frames"]
        self.replay.append([part.clone() for part in super().before_forward(batch)])
        number = int(torch.randint(len(self.replay), ()))
        return self.replay[number]

    def loss(self, x: Any, y: Any) -> Any:
        return nn.functional.smooth_l1_loss(self.model(x), y + 0.9 * self.target(x))

    def after_update(self) -> None:
        super().after_update()
        if self.step % 3 == 0:
            self.target.load_state_dict(self.bare.state_dict())


@recipe("ppo", "PPO: several updates on one rollout, each of them a step", "bwd win fwd end",
        {"win bwd": ("global step", "local_extras")})  # fmt: skip
class Ppo(Loop):
    own_loop = True

    def net(self) -> nn.Module:
        return mlp()

    def setup(self) -> None:
        super().setup()
        self.local_extras["rollout"] = self.rollout = {"x": torch.zeros(BATCH, WIDTH_IN), "old": torch.zeros(BATCH, 1)}

    def before_forward(self, batch: Any) -> Any:
        x, y = super().before_forward(batch)
        if self.step % 4 == 1:
            with torch.no_grad():
                self.rollout["x"] = x + 0.1 * torch.randn_like(x)
                self.rollout["old"] = self.bare(x)[:, :1]
        return self.rollout["x"], y

    def loss(self, x: Any, y: Any) -> Any:
        ratio = (self.model(x)[:, :1] - self.rollout["old"]).exp()
        return -torch.min(ratio * y[:, :1], ratio.clamp(0.8, 1.2) * y[:, :1]).mean()


@recipe("fairseq_gan", "WGAN: several critic steps for one of the generator, critic's weights clipped",
        "bwd win fwd", mixes=False)  # fmt: skip
class Wgan(GanGOnlyCopy):
    batch_norm = False

    def train(self, x: Any, y: Any) -> Any:
        g_opt, d_opt = self.opts
        fake = self.model(x)
        d_opt.zero_grad()
        self.at("fwd")
        loss = self.d(fake.detach()).mean() - self.d(y).mean()
        loss.backward()
        d_opt.step()
        for p in self.d_bare.parameters():
            p.data.clamp_(-0.1, 0.1)
        if self.step % 2 == 0:
            g_opt.zero_grad()
            (-self.d(fake).mean()).backward()
            g_opt.step()
        return loss


@recipe("two_opts_in_turns", "the second optimizer steps, and its gradients are zeroed, in every second step only",
        "bwd@6 win@6 fwd@4 end@5", {"end": "grad"})  # fmt: skip
class TwoInTurns(Loop):
    def optimizers(self) -> list[Any]:
        first, rest = [*self.bare.parameters()][:2], [*self.bare.parameters()][2:]
        return [torch.optim.AdamW(first, lr=0.01), torch.optim.SGD(rest, lr=0.05, momentum=0.9)]

    def options(self) -> dict[str, Any]:
        return {"copy": True}

    def train(self, x: Any, y: Any) -> Any:
        often, seldom = self.opts
        loss = self.loss(x, y)
        self.at("fwd")
        loss.backward()
        self.after_backward()
        often.step()
        often.zero_grad()
        if self.step % 2 == 0:
            seldom.step()
            seldom.zero_grad()
        return loss


@recipe("task_weights", "weights of several tasks are parameters of the loop's, in a group of their own", "bwd win fwd",
        mixes=False)  # fmt: skip
class TaskWeights(Loop):
    def optimizers(self) -> list[Any]:
        self.weights = nn.Parameter(torch.zeros(2))
        return [torch.optim.AdamW([{"params": self.bare.parameters()}, {"params": [self.weights]}], lr=0.01)]

    def loss(self, x: Any, y: Any) -> Any:
        out = self.model(x)
        losses = torch.stack([nn.functional.mse_loss(out, y), nn.functional.l1_loss(out, y)])
        return (self.weights.exp() * losses).sum() - self.weights.sum()

    def after_backward(self) -> None:
        super().after_backward()
        dist.all_reduce(self.weights.grad)


@recipe("label_smoothing_mixup", "mixup from torch's stream, label smoothing, cosine with warm-up (torchvision)",
        "bwd win end")  # fmt: skip
class TorchvisionReference(Scheduled):
    def make(self) -> Any:
        warm = torch.optim.lr_scheduler.LinearLR(self.opt, 0.1, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 5)
        return torch.optim.lr_scheduler.SequentialLR(self.opt, [warm, cosine], [3])

    def loss(self, x: Any, y: Any) -> Any:
        share = float(torch.distributions.Beta(0.2, 0.2).sample())
        x = share * x + (1 - share) * x.flip(0)
        return nn.functional.cross_entropy(self.model(x), y.argmax(1), label_smoothing=0.1)


@recipe("early_stopping", "best loss and patience as an extra, updated after the log", "win bwd end", {"win": "extras"})
class EarlyStopping(Loop):
    def setup(self) -> None:
        super().setup()
        self.extras["stopper"] = self.stopper = {"best": float("inf"), "bad": 0}

    def after_log(self) -> None:
        super().after_log()
        mean = float(self.mean)
        self.stopper["bad"] = 0 if mean < self.stopper["best"] else self.stopper["bad"] + 1
        self.stopper["best"] = min(mean, self.stopper["best"])


@recipe("metrics_local", "running mean of each rank in `local_extras`, moved after the update", "win bwd end",
        {"win end": "local_extras"})  # fmt: skip
class LocalMetrics(Loop):
    def setup(self) -> None:
        super().setup()
        self.local_extras["metric"] = self.metric = {"sum": 0.0, "count": 0}

    def train(self, x: Any, y: Any) -> Any:
        loss = super().train(x, y)
        self.metric["sum"] += float(loss)
        return loss

    def after_update(self) -> None:
        super().after_update()
        self.metric["count"] += 1


@recipe("transformer", "a transformer layer with tied embeddings, clipped gradients, warm-up", "bwd win fwd")
class Transformer(Scheduled):
    def net(self) -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(20, WIDTH)
                self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
                self.head = nn.Linear(WIDTH, 20, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                return torch.as_tensor(self.head(self.layer(self.embed(tokens))))

        return Net()

    def loss(self, x: Any, y: Any) -> Any:
        tokens = (x.abs() * 10).long() % 20
        return nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())

    def after_backward(self) -> None:
        super().after_backward()
        nn.utils.clip_grad_norm_(self.bare.parameters(), 1.0)


class StraightThrough(torch.autograd.Function):
    """Binarised weights with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grads[0]


@recipe("gumbel_binary", "Gumbel noise, annealed by the step, and a straight-through gradient", "bwd win")
class Gumbel(Loop):
    def loss(self, x: Any, y: Any) -> Any:
        gates = nn.functional.gumbel_softmax(x, tau=1.0 / self.step)
        return super().loss(StraightThrough.apply(x) * gates, y)


@recipe("frozen_within", "a critic that is frozen until the backward pass is over, as `toggle_optimizer` does",
        "fwd bwd win")  # fmt: skip
class FrozenWithin(Loop):
    def net(self) -> nn.Module:
        return mlp()

    def wrap(self, net: nn.Module) -> nn.Module:
        self.critic = mlp(WIDTH_OUT, 1)
        return super().wrap(net)

    def registered(self) -> Any:
        return nn.ModuleDict({"net": self.model, "critic": self.critic})

    def modules(self) -> dict[str, nn.Module]:
        return {"": self.bare, "critic.": self.critic}

    def optimizers(self) -> list[Any]:
        return [torch.optim.AdamW([*self.bare.parameters(), *self.critic.parameters()], lr=0.01)]

    def loss(self, x: Any, y: Any) -> Any:
        self.was = [one.requires_grad for one in self.critic.parameters()]
        self.critic.requires_grad_(False)
        self.made = self.model(x)
        return nn.functional.mse_loss(self.made, y) - 0.1 * self.critic(self.made).mean()

    def after_backward(self) -> None:
        for parameter, was in zip(self.critic.parameters(), self.was, strict=True):
            parameter.requires_grad_(was)
        loss = self.critic(self.made.detach()).square().mean()
        if loss.requires_grad:
            loss.backward()
            for parameter in self.critic.parameters():
                dist.all_reduce(parameter.grad)


@recipe("per_sample", "gradients of each sample by `vmap(grad(...))`, with noise, as differential privacy asks for",
        "fwd bwd win")  # fmt: skip
class PerSample(Loop):
    def wrap(self, net: nn.Module) -> nn.Module:
        return net

    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH_IN, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH_OUT))

    def loss(self, x: Any, y: Any) -> Any:
        def one(parameters: Any, x: Any, y: Any) -> Any:
            return (torch.func.functional_call(self.bare, parameters, (x[None],)) - y).square().mean()

        parameters = {name: p.detach() for name, p in self.bare.named_parameters()}
        each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0), randomness="different")(parameters, x, y)
        self.each = {name: gradients.clamp(-1, 1).mean(0) for name, gradients in each.items()}
        return nn.functional.mse_loss(self.bare(x), y)

    def backward(self, loss: Any) -> None:
        for name, parameter in self.bare.named_parameters():
            parameter.grad = self.each[name] + 0.01 * torch.randn(parameter.shape)
            dist.all_reduce(parameter.grad)


class Centred(nn.Module):
    """Less a part of the mean over all ranks: where one is dead, the others wait in here."""

    def forward(self, x: Any) -> Any:
        means = x.detach().mean(0)
        dist.all_reduce(means)
        return x - 0.1 * means


@recipe("fast_weights", "fast weights by `functional_call`, as of MAML, with a collective in the module",
        "fwd bwd win")  # fmt: skip
class FastWeights(Loop):
    def wrap(self, net: nn.Module) -> nn.Module:
        return net

    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH_IN, WIDTH), Centred(), nn.Linear(WIDTH, WIDTH_OUT))

    def loss(self, x: Any, y: Any) -> Any:
        own = dict(self.bare.named_parameters())
        gradients = torch.autograd.grad(nn.functional.mse_loss(self.bare(x), y), [*own.values()], create_graph=True)
        fast = {name: one - 0.1 * more for (name, one), more in zip(own.items(), gradients, strict=True)}
        self.at("fwd")
        return nn.functional.mse_loss(torch.func.functional_call(self.bare, fast, (x,)), y)

    def backward(self, loss: Any) -> None:
        loss.backward()
        for parameter in self.bare.parameters():
            dist.all_reduce(parameter.grad)


@recipe("other_layers", "the loop puts other layers without parameters in the place of an activation and of dropout",
        "fwd@6 bwd@7 end@5", {"all": "has changed the model"}, mixes=False)  # fmt: skip
class OtherLayers(Loop):
    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH_IN, WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH_OUT))

    def before_forward(self, batch: Any) -> Any:
        if self.step == 4:
            self.bare[1], self.bare[2] = nn.Tanh(), nn.Identity()  # type: ignore[operator]
        return super().before_forward(batch)


@recipe("norm_anew", "the loop puts a copy in the place of a BatchNorm without parameters, and begins one anew",
        "fwd bwd@6 win@5 end@7")  # fmt: skip
class NormAnew(Loop):
    def blocks(self) -> list[nn.Module]:
        return [nn.BatchNorm1d(WIDTH, affine=False), nn.ReLU(), nn.BatchNorm1d(WIDTH, affine=False)]

    def before_forward(self, batch: Any) -> Any:
        if self.step == 3:
            self.bare[1] = copy.deepcopy(self.bare[1])  # type: ignore[operator, index]
        if self.step == 5:
            self.bare[3] = nn.BatchNorm1d(WIDTH, affine=False)  # type: ignore[operator]
        return super().before_forward(batch)


@recipe("one_zero", "hidden states that begin as one tensor of zeros, as attributes and as an extra", "fwd bwd win")
class OneZero(Loop):
    def net(self) -> nn.Module:
        return mlp()

    def setup(self) -> None:
        self.bare.hidden = dict.fromkeys("hc", torch.zeros(WIDTH_OUT))  # type: ignore[assignment]
        self.local_extras["states"] = self.states = {"all": [torch.zeros(WIDTH_OUT)] * 3}

    def loss(self, x: Any, y: Any) -> Any:
        hidden: dict[str, torch.Tensor] = self.bare.hidden  # type: ignore[assignment]
        out = self.model(x) + hidden["h"] - 2 * hidden["c"] + sum(at * one for at, one in enumerate(self.states["all"]))
        means = out.detach().mean(0)
        hidden.update(h=means.clone(), c=means.square())
        self.states["all"] = [means, 2 * means, means.cos()]
        return nn.functional.mse_loss(out, y)
