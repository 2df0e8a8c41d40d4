"""A loop in the way of accelerate or of Fabric, as docs/integrations.md has it; "wrapped": with a wrapper prepared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import lastwords
from tests.frameworks.script import BROKEN, CASE, DIRECTORY, PROTECTED, RANK, Texts, die, end, ended, final, masked

RANKS, EPOCHS, STEPS, ACCUMULATE, BATCH = 2, 3, 6, 2, 4


class Net(nn.Module):
    """What predicts each word from itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(32, 16), nn.Dropout(0.2), nn.Linear(16, 32))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(input_ids)
        return scores.transpose(1, 2)


class Accelerated:
    """What accelerate makes of the three."""

    def __init__(self) -> None:
        import accelerate

        self.own = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)

    def prepare(self, net: nn.Module, optimizer: Any, loader: Any) -> Any:
        return self.own.prepare(net, optimizer, loader)

    def accumulate(self, model: Any, ends_step: bool) -> Any:
        return self.own.accumulate(model)

    def save(self, dies: Dies) -> None:
        self.own.register_for_checkpointing(dies)
        self.own.save_state(str(DIRECTORY / "accelerate"))


class WithFabric:
    """The same of Fabric."""

    def __init__(self) -> None:
        from lightning.fabric import Fabric

        self.own = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
        self.own.launch()

    def prepare(self, net: nn.Module, optimizer: Any, loader: Any) -> Any:
        return *self.own.setup(net, optimizer), self.own.setup_dataloaders(loader)

    def accumulate(self, model: Any, ends_step: bool) -> Any:
        return self.own.no_backward_sync(model, enabled=not ends_step)

    def save(self, dies: Dies) -> None:
        self.own.save(DIRECTORY / "fabric.ckpt", {"dies": dies})


class Dies:
    """A part of what is saved by the framework."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, int]:
        die(self.step, "saving")
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def batches(loader: Any, tft: Any) -> Iterator[tuple[Any, bool]]:
    """Each with whether it is the last one of its step."""
    if tft is not None:
        for *_, batch in tft.steps(loader, EPOCHS, accumulate=ACCUMULATE):
            yield batch, tft.ends_step
    else:
        for epoch in range(EPOCHS):
            if hasattr(loader, "set_epoch"):  # Fabric's counts by itself
                loader.set_epoch(epoch)
            for number, batch in enumerate(loader):
                yield batch, number % ACCUMULATE == ACCUMULATE - 1


def main() -> None:
    library, *variants = CASE.split()
    framework = Accelerated() if library == "accelerate" else WithFabric()
    torch.manual_seed(7)
    net = Net()
    plain = torch.optim.AdamW(net.parameters(), 1e-2)
    wrapped = PROTECTED and "wrapped" in variants
    optimizer: Any = lastwords.OptTFTWrapper(plain) if wrapped else plain
    data: Any = DataLoader(
        Texts(RANKS * STEPS * ACCUMULATE * BATCH),
        BATCH,
        shuffle=True,
        collate_fn=masked if "draws" in variants else None,
    )
    model, its_optimizer, loader = framework.prepare(net, optimizer, data)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
    torch.manual_seed(5 + RANK)
    step, tft = 0, None
    if PROTECTED:
        from lastwords.integrations.accelerate_data import batches_of

        own_data = library == "accelerate" and "draws" in variants and BROKEN != "batches"
        tft = lastwords.protect(
            DIRECTORY / "ckpt",
            model=model,
            optimizer=optimizer,
            extras={"scheduler": schedule} if BROKEN != "scheduler" else {},
            local_extras={"data": batches_of(loader)} if own_data else {},
            in_place=not wrapped,
        )
    with tft or contextlib.nullcontext():
        if tft is not None:
            point = tft.resume(missing_ok=True)
            step = 0 if point is None else point.global_step
        for batch, ends_step in batches(loader, tft):
            with framework.accumulate(model, ends_step):
                loss = nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"])
                die(step + 1, "fwd")
                framework.own.backward(loss)
            if not ends_step:
                continue
            step += 1
            its_optimizer.step()
            its_optimizer.zero_grad()
            die(step, "win")
            schedule.step()
            if tft is not None:
                tft.step_end()
            ended(step, net.state_dict(), plain.state_dict()["state"], plain.param_groups[0]["lr"], loss.detach())
            if step % 3 == 0:
                model.eval()
                with torch.no_grad():
                    model(batch["input_ids"])
                die(step, "evaluating")
                model.train()
                framework.save(Dies(step))
    final(net.state_dict(), schedule.state_dict())
    end()


if __name__ == "__main__":
    main()
