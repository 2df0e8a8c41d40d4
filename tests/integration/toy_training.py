"""A hand-sharded toy job for tests of options and odd loops: `python -m tests.integration.toy_training PLAN.json`.

Four ranks; part p of the weights is held by the ranks with rank % parts == p. The plan (JSON, see PLAN) says which
options TFTRegister gets and what happens to which rank in which step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

PLAN: dict[str, Any] = {
    "out": "",  # folder for what each rank computed
    "checkpoints": "",
    "port": 0,
    "plain": False,  # torch alone
    "recover": False,
    "parts": 2,
    "steps": 6,
    "own_loop": False,  # step_end() instead of steps()
    "accumulate": 1,
    "closure": False,
    "existing": False,  # the loop has a world-wide collective before each update
    "options": {},  # of TFTRegister
    "declare": True,
    "kill": None,  # [rank, step, place]: "forward", "backward" (before the part's collective), "end"
    "raises": None,  # [rank, step]: an exception in the forward pass
    "flip": None,  # [rank, step]: one bit of one weight flips at the end of this step
    "late": None,  # [rank, step, seconds]: this rank sleeps before its update
    "leaves_out": None,  # [rank, step]: an own loop goes on to the next batch, and says nothing of this one
    "skip_gate": None,  # [rank, step]: this rank updates behind lastwords' back, and never ends its step
}


class Job:
    """One rank."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        parts = plan["parts"]
        self.part = self.rank % parts
        self.groups = [dist.new_group(list(range(part, self.size, parts))) for part in range(parts)]
        torch.manual_seed(10 + self.part)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.inner = torch.optim.AdamW(self.net.parameters(), lr=0.02)
        self.optimizer: Any = self.inner
        torch.manual_seed(100 + self.rank // parts)

    def at(self, key: str, step: int, place: str = "") -> bool:
        """Whether the plan has this for this rank now."""
        word = self.plan[key]
        return word is not None and word[:2] == [self.rank, step] and (not place or word[2] == place)

    def come_by(self, step: int, place: str) -> None:
        if self.at("kill", step, place):
            os.kill(os.getpid(), signal.SIGKILL)

    def gradients(self, step: int, batch: int) -> torch.Tensor:
        """Loss of one batch; gradients are averaged over the holders of this part."""
        generator = torch.Generator().manual_seed(1000 * step + 10 * batch + self.rank // self.plan["parts"])
        x, y = torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)
        out = self.net(x)
        dist.all_reduce(shared := out.detach().mean())  # tensor parallelism talks in the forward pass
        loss: torch.Tensor = (out - y).square().mean() + 0.0 * shared
        loss.backward()
        return loss.detach()

    def reduce(self) -> None:
        group = self.groups[self.part]
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size(group)

    def train(self, step: int) -> float:
        """One global step."""
        plan = self.plan
        self.optimizer.zero_grad()
        self.come_by(step, "forward")
        if self.at("raises", step):
            raise ValueError("the data is bad")
        if plan["closure"]:
            loss = self.optimizer.step(lambda: self.closure(step))
        else:
            loss = sum(self.gradients(step, batch) for batch in range(plan["accumulate"]))
            self.come_by(step, "backward")
            self.reduce()
            if plan["existing"]:
                dist.all_reduce(torch.zeros(1))  # a gradient norm, say: nobody updates before all are here
            if self.at("late", step):
                time.sleep(plan["late"][2])
            if self.at("skip_gate", step):
                while True:
                    time.sleep(0.1)
            self.optimizer.step()
        value = float(loss)
        self.come_by(step, "end")
        if self.at("flip", step):
            with torch.no_grad():
                self.net[0].weight.view(torch.int32)[0, 0] ^= 1
        return value

    def closure(self, step: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.gradients(step, 0)
        self.reduce()
        return loss

    def record(self, step: int, loss: float) -> None:
        parts = [p.detach().numpy().tobytes().hex() for p in self.net.parameters()]
        for p in self.net.parameters():
            parts += [self.inner.state[p][key].numpy().tobytes().hex() for key in sorted(self.inner.state[p])]
        parts += [buffer.numpy().tobytes().hex() for buffer in self.net.buffers()]
        line = {"step": step, "loss": loss.hex(), "state": "".join(parts)[-4000:]}
        with (Path(self.plan["out"]) / f"rank_{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def protected(self) -> None:
        import lastwords

        plan = self.plan
        self.optimizer = lastwords.OptTFTWrapper(self.inner)
        parts, ranks = plan["parts"], range(self.size)
        units = [
            lastwords.Unit(f"part{part}", tuple(rank for rank in ranks if rank % parts == part))
            for part in range(parts)
        ]  # fmt: skip
        tft = lastwords.TFTRegister(
            0,
            "127.0.0.1",
            plan["port"],
            plan["checkpoints"],
            model=self.net,
            optimizer=self.optimizer,
            units=units if plan["declare"] else (),
            **plan["options"],
        )
        with tft:
            done = 0
            if plan["recover"]:
                point = tft.resume()
                assert point is not None
                done = point.global_step
            if plan["own_loop"]:
                for step in range(done + 1, plan["steps"] + 1):
                    if not self.at("leaves_out", step):
                        self.record(step, self.train(step))
                        tft.step_end(1, step)
            else:
                for _, step, _ in tft.steps(list(range(plan["steps"])), epochs=1):
                    self.record(step, self.train(step))


def main(arguments: list[str]) -> None:
    plan = PLAN | json.loads(Path(arguments[0]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    job = Job(plan)
    if plan["plain"]:
        for step in range(1, plan["steps"] + 1):
            job.record(step, job.train(step))
        dist.barrier()
        os._exit(0)  # the interpreter's end is not what reference runs are for
    job.protected()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
