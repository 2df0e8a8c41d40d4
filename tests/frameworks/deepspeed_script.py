"""A loop with DeepSpeed's engine, as a user has it: accumulation, clipping, a scheduler that the engine steps."""

from __future__ import annotations

import contextlib
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.frameworks.script import BROKEN, CASE, DIRECTORY, PROTECTED, RANK, die, end, ended, final

RANKS, EPOCHS, STEPS, ACCUMULATE, BATCH = 2, 3, 5, 2, 4


def config() -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": next((int(one) for one in CASE.split() if one.isdigit()), 0)},
    }
    if "bf16" in CASE:
        found["bf16"] = {"enabled": True}
    if "autocast" in CASE:
        found["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return found


def protected(model: nn.Module, optimizer: Any, scheduler: Any) -> Any:
    import lastwords

    extras = {} if BROKEN else {"scheduler": scheduler}
    return lastwords.protect(DIRECTORY / "ckpt", model=model, optimizer=optimizer, in_place=True, extras=extras)


def main() -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its compiler takes minutes; nothing here uses it
    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4))
    optimizer: Any = torch.optim.AdamW(net.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    step, tft = 0, protected(net, optimizer, scheduler) if "early" in CASE else None
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=scheduler, config=config())
    drawn = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(RANKS * (STEPS * ACCUMULATE - ("odd" in CASE)) * BATCH, 10, generator=drawn))
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, drop_last=True))
    torch.manual_seed(11 + RANK)
    if PROTECTED and tft is None:
        tft = protected(engine.module, engine.optimizer if "engine's" in CASE else optimizer, scheduler)
    with tft or contextlib.nullcontext():
        if tft is not None:
            point = tft.resume(missing_ok=True)
            step = 0 if point is None else point.global_step
        for epoch in [0] if tft is not None else range(EPOCHS):
            loader.sampler.set_epoch(epoch)
            batches: Any = tft.steps(loader, EPOCHS, ACCUMULATE) if tft is not None else enumerate(loader, 1)
            for *_, count, batch in batches:
                last = tft.ends_step if tft is not None else count % ACCUMULATE == 0 or count == len(loader)
                if "by itself" not in CASE:
                    engine.set_gradient_accumulation_boundary(last)
                loss = engine(batch[0]).square().mean()
                die(step + 1, "fwd")
                engine.backward(loss)
                engine.step()
                if last:
                    step += 1
                    die(step, "win")
                    ended(
                        step,
                        net.state_dict(),
                        [*optimizer.state.values()],
                        loss.detach().float(),
                        scheduler.state_dict(),
                    )
    final(net.state_dict())
    end()


if __name__ == "__main__":
    main()
