"""A hand-sharded toy job for tests of options and odd loops: `python -m tests.integration.toy_training PLAN.json`.

Four ranks; part p of the weights is held by the ranks with rank % parts == p. The plan (JSON, see PLAN) says which
options TFTRegister gets and what happens to which rank in which step.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
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
    "per_epoch": 0,  # steps in an epoch of the own loop; 0: there is one epoch
    "forgets": False,  # the own loop begins with step 1, whatever was resumed
    "nameless": False,  # the own loop knows only global steps
    "average": False,  # the loss is averaged over all ranks after the update
    "early": False,  # the loop says that its step is over before that
    "log_draws": False,  # the log draws a random number
    "accumulate": 1,
    "closure": False,
    "existing": False,  # the loop has a world-wide collective before each update
    "options": {},  # of TFTRegister
    "declare": True,
    "kill": None,  # [rank, step, place]: "forward", "backward" (before the part's collective), "end"
    "kill_after": (),  # [rank, place] each: where others have to be in that step before the kill
    "exits": None,  # [rank, step]: sys.exit(0) in the forward pass
    "raises": None,  # [rank, step]: an exception in the forward pass
    "sleeps": None,  # [rank, step, seconds]: this rank sleeps in its forward pass
    "stops": None,  # [rank, step, seconds]: this rank is stopped there, and goes on
    "flip": None,  # [rank, step]: one bit of one weight flips at the end of this step
    "late": None,  # [rank, step, seconds]: this rank sleeps before its update
    "slow_end": None,  # [rank, step, seconds]: this rank sleeps after its update
    "leaves_out": None,  # [rank, step]: an own loop goes on to the next batch, and says nothing of this one
    "export": None,  # [rank, seconds]: this rank writes a file of the user's after its loop, inside `with`
    "kill_waiting": None,  # a rank that dies meanwhile, when it has left its loop
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
        self.step_is_over = lambda step: None
        torch.manual_seed(100 + self.rank // parts)

    def at(self, key: str, step: int, place: str = "") -> bool:
        """Whether the plan has this for this rank now."""
        word = self.plan[key]
        return word is not None and word[:2] == [self.rank, step] and (not place or word[2] == place)

    def come_by(self, step: int, place: str) -> None:
        out = Path(self.plan["out"])
        (out / f"{place}_{step}_{self.rank}").touch()
        if self.at("kill", step, place):
            for rank, other in self.plan["kill_after"]:
                while not (out / f"{other}_{step}_{rank}").exists():
                    time.sleep(0.001)
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

    def named(self, step: int) -> tuple[int, ...]:
        """What the own loop calls a global step."""
        per_epoch = self.plan["per_epoch"] or self.plan["steps"]
        return () if self.plan["nameless"] else ((step - 1) // per_epoch + 1, (step - 1) % per_epoch + 1)

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
        if self.at("exits", step):
            sys.exit(0)
        if self.at("raises", step):
            raise ValueError("the data is bad")
        if self.at("sleeps", step):
            time.sleep(plan["sleeps"][2])
        if self.at("stops", step):
            subprocess.Popen(["sh", "-c", f"sleep {plan['stops'][2]}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
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
        if self.at("slow_end", step):
            time.sleep(plan["slow_end"][2])
        self.step_is_over(step)
        self.come_by(step, "over")
        if plan["average"]:
            dist.all_reduce(torch.tensor(value))
        if plan["log_draws"]:
            torch.rand(1)
        if self.at("flip", step):
            with torch.no_grad():
                self.net[0].weight.view(torch.int32)[0, 0] ^= 1
        return value

    def closure(self, step: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.gradients(step, 0)
        self.reduce()
        return loss

    def export(self) -> None:
        """The user's last file, in many small writes; whoever is to be killed meanwhile waits until it has begun."""
        if self.plan["export"] is None:
            return
        writer, seconds = self.plan["export"]
        path = Path(self.plan["out"]) / "export"
        if self.rank == writer:
            with path.open("w") as file:
                for number in range(100):
                    file.write(f"{number}\n")
                    file.flush()
                    time.sleep(seconds / 100)
        elif self.plan["kill_waiting"] == self.rank:
            threading.Timer(seconds / 3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif self.at("kill", self.plan["steps"], "export"):
            while not path.exists():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

    def state(self) -> str:
        """Weights, optimizer and buffers."""
        parts = [p.detach().numpy().tobytes().hex() for p in self.net.parameters()]
        for p in self.net.parameters():
            parts += [self.inner.state[p][key].numpy().tobytes().hex() for key in sorted(self.inner.state[p])]
        parts += [buffer.numpy().tobytes().hex() for buffer in self.net.buffers()]
        return "".join(parts)[-4000:]

    def record(self, step: int, loss: float) -> None:
        line = {"step": step, "loss": loss.hex(), "state": self.state()}
        with (Path(self.plan["out"]) / f"rank_{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.come_by(step, "recorded")

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
                said = [point.epoch, point.step, point.global_step, point.exact, point.reasons]
                (Path(plan["out"]) / f"resumed_{self.rank}.json").write_text(json.dumps(said))
                (Path(plan["out"]) / f"state_{self.rank}").write_text(self.state())
            if plan["early"]:
                self.step_is_over = lambda step: tft.step_end(*(self.named(step) if plan["own_loop"] else ()))
            if plan["own_loop"]:
                for step in range(1 if plan["forgets"] else done + 1, plan["steps"] + 1):
                    if not self.at("leaves_out", step):
                        self.record(step, self.train(step))
                        if not plan["early"]:
                            tft.step_end(*self.named(step))
            else:
                for _, step, _ in tft.steps(list(range(plan["steps"])), epochs=1):
                    self.record(step, self.train(step))
            self.export()


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
