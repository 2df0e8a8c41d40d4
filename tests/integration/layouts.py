"""Small models in each parallel layout, on 4 ranks: built from a seed, trained on data of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from lastwords.sharding.declare import Unit

FEATURES = 6


class Block(nn.Module):
    """Odd sizes, so that shards are uneven and some are empty; a LayerNorm, which tensor parallelism replicates."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, width)
        self.down = nn.Linear(width, FEATURES)
        self.gain = nn.Parameter(torch.full((2,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.gain.sum() * self.down(torch.relu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Two blocks, the first of them frozen in part, and a constant buffer that is too large to be rank-local."""

    table: torch.Tensor

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("table", torch.randn(20_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.frozen.sum() + self.table.mean()


def replicated(model: nn.Module, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    """Without sending buffers: torch 2.7 counts the version of each of them up for that, as if it was written."""
    return DistributedDataParallel(model, process_group=group, broadcast_buffers=False)


@dataclass
class Trial:
    """A model as the loop calls it, its optimizers, what follows the backward pass, and the rank's data coordinate."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    replica: int
    reduce: Callable[[], None] = lambda: None
    units: Sequence[Unit] = ()
    names: Callable[[str], str] | None = None

    def step(self, number: int) -> float:
        """One step on the data of this step and replica; returns the loss."""
        generator = torch.Generator().manual_seed(1000 * number + self.replica)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.model(torch.randn(3, FEATURES, generator=generator)).square().mean()
        loss.backward()
        self.reduce()
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adamw(model: nn.Module) -> Optimizer:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decay = [p for name, p in named if name.endswith("weight")]
    other = [p for name, p in named if not name.endswith("weight")]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": other, "lr": 2e-2}], lr=1e-2)


def average_over(parameters: Sequence[torch.Tensor], group: Any, size: int) -> Callable[[], None]:
    """Data parallelism by hand: DDP refuses models in which plain tensors and DTensors are mixed."""

    def average() -> None:
        for parameter in parameters:
            gradient: Any = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                dist.all_reduce(local, group=group)
                local.div_(size)

    return average


TP: dict[str, ParallelStyle] = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def mesh_of(shape: tuple[int, ...], *names: str) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def ddp() -> Trial:
    model = replicated(Net())
    return Trial(model, [adamw(model)], dist.get_rank())


def fsdp() -> Trial:
    mesh = mesh_of((dist.get_world_size(),), "dp")
    return _fully_sharded(Net(), mesh, dist.get_rank())


def hsdp() -> Trial:
    mesh = mesh_of((2, dist.get_world_size() // 2), "replicate", "shard")
    return _fully_sharded(Net(), mesh, dist.get_rank())


def tp() -> Trial:
    mesh = mesh_of((dist.get_world_size(),), "tp")
    model = parallelize_module(Net(width=8), mesh, TP)
    return Trial(model, [adamw(model)], 0)


def ddp_tp() -> Trial:
    mesh = mesh_of((2, dist.get_world_size() // 2), "dp", "tp")
    model = parallelize_module(Net(), mesh["tp"], TP)
    replicas = mesh["dp"]
    average = average_over(trainable(model), replicas.get_group(), replicas.size())
    return Trial(model, [adamw(model)], replicas.get_local_rank(), average)


def ddp_over_tp() -> Trial:
    """The same with torch's DDP, which trains on the DTensors' local tensors."""
    mesh = mesh_of((2, dist.get_world_size() // 2), "dp", "tp")
    model = parallelize_module(Net(), mesh["tp"], TP)
    _pre_dp_module_transform(model)
    replicas = mesh["dp"]
    wrapped = replicated(model, replicas.get_group())
    return Trial(wrapped, [adamw(wrapped)], replicas.get_local_rank())


def fsdp_tp() -> Trial:
    mesh = mesh_of((2, dist.get_world_size() // 2), "dp", "tp")
    model = parallelize_module(Net(), mesh["tp"], TP)
    return _fully_sharded(model, mesh["dp"], mesh["dp"].get_local_rank())


def zero1_halves() -> Trial:
    model = replicated(Net())
    return Trial(model, [_zero(model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)], dist.get_rank())


def zero1_buckets() -> Trial:
    model = replicated(Net())
    optimizer = _zero(model, torch.optim.SGD, parameters_as_bucket_view=True, lr=1e-2, momentum=0.9)
    return Trial(model, [optimizer], dist.get_rank())


def zero1_beside_another() -> Trial:
    model = replicated(Net())
    pair, _ = dist.new_subgroups(group_size=2)
    *most, last = trainable(model)
    sharded = ZeroRedundancyOptimizer(most, torch.optim.AdamW, process_group=pair, lr=1e-2)
    return Trial(model, [torch.optim.SGD([last], lr=1e-2, momentum=0.9), sharded], dist.get_rank())


def fsdp_two_optimizers() -> Trial:
    trial = fsdp()
    first, *others = trainable(trial.model)
    return Trial(trial.model, [torch.optim.SGD([first], 1e-2, 0.9), torch.optim.AdamW(others, 1e-2)], trial.replica)


def _zero(model: nn.Module, kind: type[Optimizer], **options: Any) -> Optimizer:
    """Sharded over pairs of ranks; the last group has one parameter, so that only one of a pair owns any of it."""
    pair, _ = dist.new_subgroups(group_size=2)
    *most, last = trainable(model)
    groups: Any = [{"params": most}, {"params": [last], "lr": 3e-2}]
    return ZeroRedundancyOptimizer(groups, kind, process_group=pair, **options)


def _fully_sharded(model: nn.Module, mesh: DeviceMesh, replica: int) -> Trial:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trial(model, [adamw(model)], replica)


class Halves(nn.Module):
    """Tensor parallelism by hand, Megatron's way: plain tensors, all names and shapes the same on every rank."""

    def __init__(self, group: Any, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(torch.initial_seed())
        whole = torch.randn(width, FEATURES)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.group = group
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Parameter(whole.chunk(size)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(x) @ self.up.t())
        part = hidden @ self.up
        total = part.detach().clone()
        dist.all_reduce(total, group=self.group)
        return x + part + (total - part.detach())


def hand_made_tp() -> Trial:
    mesh = mesh_of((2, dist.get_world_size() // 2), "dp", "tp")
    model = Halves(mesh["tp"].get_group())
    replicas, halves = mesh["dp"], mesh["tp"]
    everything = average_over([model.up], replicas.get_group(), replicas.size())
    norms = average_over(list(model.norm.parameters()), None, dist.get_world_size())

    def average() -> None:
        everything()
        norms()

    units = [
        Unit("tp-0", (0, 2), ("up",)),
        Unit("tp-1", (1, 3), ("up",)),
    ]
    assert halves.size() == 2
    return Trial(model, [adamw(model)], replicas.get_local_rank(), average, units)


def stages() -> Trial:
    """Two stages of the same names, two replicas of each; the stages do not even talk: only who holds what counts."""
    mesh = mesh_of((2, dist.get_world_size() // 2), "pp", "dp")
    stage, replicas = mesh["pp"].get_local_rank(), mesh["dp"]
    model = Net(width=10 if stage == 0 else 14)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(stage)
    wrapped = replicated(model, replicas.get_group())
    units = [Unit("stage-0", (0, 1)), Unit("stage-1", (2, 3))]
    return Trial(wrapped, [adamw(wrapped)], dist.get_rank(), units=units)


LAYOUTS: dict[str, Callable[[], Trial]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "tp": tp,
    "ddp x tp": ddp_tp,
    "ddp over tp": ddp_over_tp,
    "fsdp x tp": fsdp_tp,
    "zero1 halves": zero1_halves,
    "zero1 halves, buckets": zero1_buckets,
    "zero1 halves beside another optimizer": zero1_beside_another,
    "fsdp, two optimizers": fsdp_two_optimizers,
    "tp by hand": hand_made_tp,
    "pipeline stages": stages,
}


def build(name: str, seed: int) -> Trial:
    """The layout's model with weights of this seed, the same on every rank before they are divided."""
    torch.manual_seed(seed)
    return LAYOUTS[name]()
