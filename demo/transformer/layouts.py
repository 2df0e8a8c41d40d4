"""The parallel layouts of the demo: how the model is cut, who averages gradients, and how their norm is taken.

A layout returns what the training loop needs; the loop itself (train.py) is the same for all of them. Where the world
is a mesh, its last axis varies fastest from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW, Optimizer

import lastwords
from demo.transformer.experts import Experts
from demo.transformer.gradients import average, clip, copies_of
from demo.transformer.model import BYTES, Shape, Transformer, loss_of

MAX_NORM = 1.0
EXPERTS = 4


@dataclass(frozen=True)
class Task:
    """What is to be trained.

    batch_size: sequences of a step, those of all replicas together. parts: ranks that share what is cut into pieces.
    device: where it is trained: "cpu", or "cuda" for the current GPU.
    """

    shape: Shape = field(default_factory=Shape)
    batch_size: int = 16
    parts: int = 2
    optimizer_class: type[Optimizer] = AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 3e-3, "weight_decay": 0.1})
    device: str = "cpu"

    def model(self, **options: Any) -> nn.Module:
        return Transformer(self.shape, **options).to(self.device)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self.optimizer_class(parameters, **self.options)

    def mesh(self, *names: str) -> DeviceMesh:
        """The world as a mesh: `parts` ranks along each axis but "replicate", which takes what is left."""
        left = dist.get_world_size() // self.parts ** (len(names) - 1)
        sizes = tuple(left if name == "replicate" else self.parts for name in names)
        return init_device_mesh(self.device, sizes, mesh_dim_names=names)


@dataclass(frozen=True)
class Parallel:
    """A model that is spread over the ranks.

    backward: bytes and targets to the loss; every gradient is averaged when it returns, and `clip` scales them.
    replica: which of the `replicas` slices of the data is this rank's. Random numbers are seeded with it and never
    with the rank: ranks that share a replica's work, such as those of tensor parallelism, have to draw the same ones.
    units: what lastwords has to be told, where it cannot see it. copy: whether each rank is to keep copies.
    """

    model: nn.Module
    optimizer: Optimizer
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    clip: Callable[[], object]
    replica: int
    replicas: int
    units: Callable[[], tuple[Any, ...]] = tuple
    copy: Literal["auto", True] = "auto"


def loss_and_gradients(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model(inputs), targets)
    loss.backward()
    return loss.detach()


def ddp(task: Task) -> Parallel:
    """Every rank holds everything."""
    model = DDP(task.model())
    return _averaged_by_torch(model, task.optimizer(model.parameters()))


def zero1(task: Task) -> Parallel:
    """Everybody holds the weights. The optimizer's state is sharded over groups of `parts` ranks."""
    model = DDP(task.model())
    group, _ = dist.new_subgroups(group_size=task.parts)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=task.optimizer_class, process_group=group, **task.options
    )
    return _averaged_by_torch(model, optimizer)


def hsdp(task: Task) -> Parallel:
    """Weights and optimizer are sharded over `parts` ranks; each shard has as many holders as there are replicas."""
    model = fully_sharded(task.model(), task.mesh("replicate", "shard"))
    return _averaged_by_torch(model, task.optimizer(model.parameters()))


def fsdp(task: Task) -> Parallel:
    """Weights and optimizer are sharded over all ranks: each part has one holder, and a copy that outlives it."""
    mesh = init_device_mesh(task.device, (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = fully_sharded(task.model(), mesh)
    return replace(_averaged_by_torch(model, task.optimizer(model.parameters())), copy=True)


def _averaged_by_torch(model: nn.Module, optimizer: Optimizer) -> Parallel:
    """Each rank trains on data of its own, and torch's wrapper averages gradients."""
    norm = partial(nn.utils.clip_grad_norm_, list(model.parameters()), MAX_NORM)
    backward = partial(loss_and_gradients, model)
    return Parallel(model, optimizer, backward, norm, dist.get_rank(), dist.get_world_size())


def fully_sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 on each block, and on what is left."""
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


TENSOR_PARALLEL: dict[str, ParallelStyle] = {
    "blocks.*.attention.query": ColwiseParallel(),
    "blocks.*.attention.key": ColwiseParallel(),
    "blocks.*.attention.value": ColwiseParallel(),
    "blocks.*.attention.out": RowwiseParallel(),
    "blocks.*.mlp.up": ColwiseParallel(),
    "blocks.*.mlp.down": RowwiseParallel(),
}
"""The other tensors (LayerNorms, embeddings, the head) are the same on every rank."""


def tp(task: Task) -> Parallel:
    """Neighbours share each projection; each part is held by as many ranks as there are replicas."""
    mesh = task.mesh("replicate", "tp")
    model = parallelize_module(task.model(), mesh["tp"], TENSOR_PARALLEL)
    parameters = list(model.parameters())

    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = loss_and_gradients(model, inputs, targets)
        average(parameters, mesh["replicate"].get_group(), mesh["replicate"].size())
        return loss

    norm = partial(clip, parameters, copies_of, MAX_NORM)
    replicas = mesh["replicate"]
    return Parallel(model, task.optimizer(parameters), backward, norm, replicas.get_local_rank(), replicas.size())


def fsdp_tp(task: Task) -> Parallel:
    """Each part of a projection is sharded once more, and the replicas hold copies: three axes."""
    mesh = task.mesh("replicate", "shard", "tp")
    model = parallelize_module(task.model(), mesh["tp"], TENSOR_PARALLEL)
    fully_sharded(model, mesh["replicate", "shard"])
    norm = partial(clip, list(model.parameters()), copies_of, MAX_NORM)
    backward = partial(loss_and_gradients, model)
    return Parallel(
        model,
        task.optimizer(model.parameters()),
        backward,
        norm,
        replica=dist.get_rank() // task.parts,
        replicas=dist.get_world_size() // task.parts,
    )


def pp(task: Task) -> Parallel:
    """A pipeline of `parts` stages, GPipe; each stage is held by as many ranks as there are replicas."""
    return _pipeline(task, task.mesh("stage", "replicate"))


def pp_tp(task: Task) -> Parallel:
    """The same, and the neighbours in a stage share its projections: three axes."""
    return _pipeline(task, task.mesh("stage", "replicate", "tp"))


def _pipeline(task: Task, mesh: DeviceMesh) -> Parallel:
    stage, last, replicas, shape = mesh["stage"].get_local_rank(), task.parts - 1, mesh["replicate"], task.shape
    each = shape.layers // task.parts
    model = task.model(layers=range(stage * each, stage * each + each))
    if "tp" in (mesh.mesh_dim_names or ()):
        model = parallelize_module(model, mesh["tp"], TENSOR_PARALLEL)
    parameters = list(model.parameters())

    chunks = 2
    sequences = task.batch_size // replicas.size() // chunks
    tokens = torch.zeros(sequences, shape.context, dtype=torch.int64, device=task.device)
    activations = torch.zeros(sequences, shape.context, shape.width, device=task.device, requires_grad=True)
    logits = torch.zeros(sequences * shape.context, BYTES, device=task.device, requires_grad=True)
    group = mesh["stage"].get_group()
    its_place = PipelineStage(
        model,
        stage,
        task.parts,
        torch.device(task.device),
        input_args=tokens if stage == 0 else activations,
        output_args=logits if stage == last else activations,
        group=group,
    )
    schedule = ScheduleGPipe(its_place, n_microbatches=chunks, loss_fn=loss_of)

    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        schedule.step(*([inputs] if stage == 0 else []), target=targets if stage == last else None, losses=losses)
        average(parameters, replicas.get_group(), replicas.size())
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=task.device)
        dist.broadcast(loss, group=group, group_src=last)
        return loss

    norm = partial(clip, parameters, lambda parameter: copies_of(parameter) // task.parts, MAX_NORM)
    return Parallel(model, task.optimizer(parameters), backward, norm, replicas.get_local_rank(), replicas.size())


def moe(task: Task) -> Parallel:
    """Experts in the place of each MLP, shared out among `parts` neighbours. Everybody holds the rest."""
    mesh, world = task.mesh("replicate", "experts"), dist.get_world_size()
    holders = mesh["replicate"]
    model = task.model(mlp=partial(Experts, count=EXPERTS, group=mesh["experts"].get_group()))
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    own = set(experts)
    others = [parameter for parameter in model.parameters() if parameter not in own]

    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = loss_and_gradients(model, inputs, targets)
        average(others, None, world)
        average(experts, holders.get_group(), world)  # all ranks' tokens are in the holders' gradients
        return loss

    norm = partial(clip, [*experts, *others], lambda parameter: holders.size() if parameter in own else world, MAX_NORM)
    return Parallel(
        model,
        task.optimizer(model.parameters()),
        backward,
        norm,
        dist.get_rank(),
        world,
        units=lambda: lastwords.units_from_mesh(dp=world, expert_parallel=task.parts, experts=("*.experts.*",)),
    )


LAYOUTS: dict[str, Callable[[Task], Parallel]] = {
    "tp": tp, "hsdp": hsdp, "fsdp": fsdp, "pp": pp, "zero1": zero1, "moe": moe, "ddp": ddp,
    "fsdp-tp": fsdp_tp, "pp-tp": pp_tp,
}  # fmt: skip
