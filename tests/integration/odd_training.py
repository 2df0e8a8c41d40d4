"""Loops that do what few do, with values that few have: `python -m tests.integration.odd_training PLAN.json`.

The plan: checkpoints, port, out, recover, plain, copy; kill = [rank, step, place] or null, place "forward" or
the name of a place in the case; case, one of:
    "values"   extras, local_extras and optimizer state of every kind that is stored, all moving in each step
    "spoiled"  the same, and from step 3 on something that cannot be stored in each of them
    "swapped"  at the end of each step averaged weights are put in, validated with, and taken out again
    "copied"   the same, but put in and taken out through `p.data.copy_()`; "copied within": before the end of the step
    "clipped"  weights are clipped after `optimizer.step()`
    "bank"     a large buffer that is first written in the forward pass of step 4
    "inner"    from step 3 on the *inner* optimizer is stepped
    "lbfgs"    LBFGS, whose closure has a collective; places "closure1" (its first call), "closure2"
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections import OrderedDict, defaultdict, deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 6
SPOILED_FROM = 3
BANK_FROM, BANK_ELEMENTS = 4, 20_000
AVERAGED = ("swapped", "copied", "copied within")


def values_of(step: int, seed: int) -> dict[str, Any]:
    """One of each kind, all of them other ones in each step and for each seed."""
    n = 1000 * seed + step
    generator = torch.Generator()
    generator.manual_seed(n)
    torch.rand(3, generator=generator)
    return {
        "numpy": [np.float32(n / 3), np.int64(n), np.float64(n / 7), np.bool_(n % 2), np.datetime64(n, "s")],
        "tuple": (n, (float(n), "x")),
        "bytes": str(n).encode(),
        "nan": [float("nan"), float("inf"), -0.0, complex(n, float("nan"))],
        n: {1: "int key", (1, n): "tuple key", None: n},
        "when": [datetime.datetime(2026, 11, 22, 1, n % 60, tzinfo=datetime.UTC), timedelta(n)],
        "path": Path(f"/somewhere/{n}"),
        "deque": deque([n, n + 1], 3),
        "ordered": OrderedDict([("b", n), ("a", 2)]),
        "default": defaultdict(list, {n: [torch.full((2,), n)]}),
        "array": np.arange(n, n + 6, dtype=np.float32).reshape(2, 3),
        "strings": np.array(["a", str(n)]),
        "tensor": torch.full((3,), n, dtype=torch.bfloat16),
        "complex": torch.tensor([complex(n, 1)], dtype=torch.complex128),
        "sparse": torch.sparse_coo_tensor([[n % 3]], [float(n)], (4,)),
        "generator": generator,
        "torch": [torch.float16, torch.device("cpu"), torch.Size([n, 2])],
        "set": {n, 1},
    }


def described(value: Any) -> str:
    """Types, content and bits of a value, as text."""
    if isinstance(value, torch.Generator):
        return f"generator {described(value.get_state())}"
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return f"{value.layout} {described(value.to_dense())}"
        content = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {content.hex()}"
    if isinstance(value, np.ndarray | np.generic):
        return f"{type(value).__name__} {value.dtype} {value.shape} {value.tobytes().hex()}"
    if isinstance(value, dict):
        inside = ", ".join(f"{described(key)}: {described(item)}" for key, item in value.items())
        return f"{type(value).__name__} {getattr(value, 'default_factory', '')} {{{inside}}}"
    if isinstance(value, list | tuple | deque):
        return f"{type(value).__name__} {getattr(value, 'maxlen', '')} [{', '.join(map(described, value))}]"
    if isinstance(value, set):
        return f"set {sorted(value)}"
    return f"{type(value).__name__} {value!r}"


class Odd(torch.optim.SGD):
    """SGD that keeps one of each kind in its state: by parameter, by name, in a form of its own, and in a group."""

    moving = False

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One step of SGD."""
        result = super().step(closure)
        if self.moving:
            first, second = self.param_groups[0]["params"][:2]
            count = self.state[first].get("count", 0) + 1
            self.state[first].update(count=count, odd=values_of(count, 7))
            self.state[second] = {0: values_of(count, 8)}
            self.state["by name"] = values_of(count, 9)  # type: ignore[index]
            self.state["number"] = count  # type: ignore[index]
            self.param_groups[0]["odd"] = values_of(count, 6)
        return result


def state_of(modules: nn.Module, optimizer: Any, more: Any) -> str:
    """A digest of weights, optimizer and extras."""
    names = {id(parameter): name for name, parameter in modules.named_parameters()}
    state = {names.get(id(key), key): value for key, value in optimizer.state.items()}
    parts = [described(p) for p in modules.parameters()]
    parts += [f"{key}={described(state[key])}" for key in sorted(state, key=str)]
    parts += [described({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
    return hashlib.sha256("\n".join([*parts, described(more)]).encode()).hexdigest()


class Loop:
    """The loop of one rank."""

    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        self.plan, self.rank, self.case = plan, rank, plan["case"]
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        if self.case == "bank":
            self.net.register_buffer("bank", torch.zeros(BANK_ELEMENTS))
        self.model = DDP(self.net)
        parameters = list(self.net.parameters())
        if self.case == "lbfgs":
            self.inner: Any = torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)
        else:
            self.inner = Odd(parameters, lr=0.05, momentum=0.9)
            self.inner.moving = self.case in ("values", "spoiled")
        self.optimizer: Any = self.inner
        self.extras: dict[str, Any] = {}
        self.local_extras: dict[str, Any] = {}
        if self.inner.__class__ is Odd and self.inner.moving:
            self.extras, self.local_extras = values_of(0, 5), values_of(0, 10 + rank)
        self.average = [p.detach().clone() for p in parameters]
        self.step = 0
        self.calls = 0

    def come_by(self, place: str) -> None:
        """Where a rank may be killed, as soon as all have updated in the step before.

        A collective that this rank has passed may not have ended on the others: they would lose it with this rank.
        """
        if self.plan["kill"] == [self.rank, self.step, place]:
            while any(self.updates_of(rank) < self.step - 1 for rank in range(dist.get_world_size())):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

    def updates_of(self, rank: int) -> int:
        """Steps that a rank has recorded, which it does after the update."""
        path = Path(self.plan["out"]) / f"rank_{rank}.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def train(self, step: int) -> None:
        """One step, but for its end."""
        self.step, self.calls = step, 0
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)

        def loss_of() -> torch.Tensor:
            self.calls += 1
            self.optimizer.zero_grad()
            if self.case == "bank" and step >= BANK_FROM:
                self.net.bank.add_(1)  # type: ignore[operator, union-attr]
            loss = (self.model(x) - y).square().mean()
            self.come_by("forward" if self.case != "lbfgs" else f"closure{self.calls}")
            loss.backward()
            if self.case == "lbfgs":  # which keeps it in its state
                loss = loss.detach()
                dist.all_reduce(loss)
            return loss

        if self.case == "lbfgs":
            loss = self.optimizer.step(loss_of)
        else:
            loss = loss_of()
            (self.inner if self.case == "inner" and step >= 3 else self.optimizer).step()
        self.after_update(step)
        self.record(step, loss.item())

    def after_update(self, step: int) -> None:
        """What the case does between the update and the end of the step."""
        if self.extras:
            for live, seed in ((self.extras, 5), (self.local_extras, 10 + self.rank)):
                live.clear()
                live.update(values_of(step, seed))
        if self.case == "spoiled" and step >= SPOILED_FROM:
            self.extras["bad"] = self.local_extras["bad"] = threading.Lock()
            first = self.inner.param_groups[0]["params"][0]
            self.inner.state[first]["bad"] = threading.Lock()
        with torch.no_grad():
            if self.case == "clipped":
                for p in self.net.parameters():
                    p.clamp_(-0.2, 0.2)
            if self.case in AVERAGED:
                for mean, p in zip(self.average, self.net.parameters(), strict=True):
                    mean.lerp_(p, 0.5)
        self.validate(step, within=True)

    def validate(self, step: int, *, within: bool = False) -> None:
        """After the end of the step, and so in the next one as far as lastwords can tell; or still in it."""
        if self.case not in AVERAGED or within != (self.case == "copied within"):
            return
        copied = self.case != "swapped"
        kept = [p.data.clone() if copied else p.data for p in self.net.parameters()]
        self.put_in(self.average, copied=copied)
        self.step = step
        (Path(self.plan["out"]) / f"swapped_{step}_{self.rank}").touch()
        while self.plan["kill"] == [self.rank, step, "validation"]:
            if len(list(Path(self.plan["out"]).glob(f"swapped_{step}_*"))) == dist.get_world_size():
                break  # a rank that had not swapped its weights yet would save those of the step
            time.sleep(0.001)
        self.come_by("validation")
        loss = self.net(torch.ones(1, 8)).sum().detach()
        dist.all_reduce(loss)
        self.put_in(kept, copied=copied)

    def put_in(self, weights: list[torch.Tensor], *, copied: bool) -> None:
        """Give the model these weights: their content as torch_ema and diffusers do it, or their very memory."""
        for weight, p in zip(weights, self.net.parameters(), strict=True):
            if copied:
                p.data.copy_(weight)
            else:
                p.data = weight

    def record(self, step: int, loss: float) -> None:
        more = {
            key: value for extras in (self.extras, self.local_extras) for key, value in extras.items() if key != "bad"
        }
        state = state_of(self.net, self.inner, more) if self.case != "spoiled" else described([*self.net.parameters()])
        self.write({"step": step, "loss": loss.hex(), "state": state})

    def write(self, line: dict[str, Any]) -> None:
        with (Path(self.plan["out"]) / f"rank_{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def main(arguments: list[str]) -> None:
    """Train as the plan says."""
    plan = json.loads(Path(arguments[0]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    loop = Loop(plan, dist.get_rank())
    if plan["plain"]:
        for step in range(1, STEPS + 1):
            loop.train(step)
            loop.validate(step)
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # the interpreter's end is not what reference runs are for
    import lastwords

    loop.optimizer = lastwords.OptTFTWrapper(loop.inner)
    more: dict[str, Any] = {}
    if loop.extras:
        more = {"extras": {"mine": loop.extras}, "local_extras": {"own": loop.local_extras}}
    tft = lastwords.TFTRegister(
        0, "127.0.0.1", plan["port"], plan["checkpoints"], model=loop.model, optimizer=loop.optimizer,
        copy=plan["copy"], **more,
    )  # fmt: skip
    with tft:
        first = 1
        if plan["recover"]:
            point = tft.resume()
            assert point is not None
            first = point.global_step + 1
            loop.record(point.global_step, 0.0)
            (Path(plan["out"]) / f"rank_{loop.rank}.resumed").write_text(json.dumps([point.exact, point.reasons]))
        for step in range(first, STEPS + 1):
            loop.train(step)
            tft.step_end(1, step)
            loop.validate(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
