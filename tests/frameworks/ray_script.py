"""A loop that Ray Train starts, as a user has it: its workers are killed, and Ray starts all of them again."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RANKS, EPOCHS, STEPS, BATCH = 2, 3, 6, 4


def train(config: dict[str, Any]) -> None:
    """In a worker, in a thread that Ray has made."""
    sys.argv[1:] = config["arguments"]
    from tests.frameworks.script import DIRECTORY, PROTECTED, RANK, die, ended, final

    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4))
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    drawn = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(RANKS * STEPS * BATCH, 10, generator=drawn))
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, BATCH, shuffle=True))
    torch.manual_seed(11 + RANK)
    step, tft = 0, None
    if PROTECTED:
        import lastwords

        tft = lastwords.protect(DIRECTORY / "ckpt", model=model, optimizer=optimizer, in_place=True)
    with tft or contextlib.nullcontext():
        if tft is not None:
            point = tft.resume(missing_ok=True)
            step = 0 if point is None else point.global_step
            (DIRECTORY / f"resumed-{RANK}-{step}").write_text(
                "" if point is None else repr((point.exact, point.reasons))
            )
        for epoch in [0] if tft is not None else range(EPOCHS):
            if tft is None:
                loader.sampler.set_epoch(epoch)
            for batch in (one[-1] for one in tft.steps(loader, EPOCHS)) if tft is not None else loader:
                step += 1
                loss = model(batch[0]).square().mean()
                die(step, "fwd")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                die(step, "win")
                ended(step, net.state_dict(), optimizer.state_dict()["state"], loss.detach())
    final(net.state_dict())


def main() -> None:
    directory = Path(sys.argv[1]).absolute()
    ray.init(num_cpus=RANKS + 1, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=True)
    run = ray.train.RunConfig(
        name="run",
        storage_path=str(directory / "ray"),
        failure_config=ray.train.FailureConfig(max_failures=int(os.environ.get("FAILURES", "3"))),
    )
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"arguments": [str(directory), *sys.argv[2:]]},
        scaling_config=ray.train.ScalingConfig(num_workers=RANKS),
        run_config=run,
    ).fit()


if __name__ == "__main__":
    main()
