"""A loop in the manner of nanoGPT: no data loader, an iteration number, a learning rate by formula, accumulation.

    lastwords run --standalone --nproc-per-node 2 examples/nanogpt.py

Seven lines of it are lastwords': marked with <--.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lastwords  # <--

BLOCK, BATCH, ACCUMULATE, WARMUP = 32, 8, 2, 10


class Model(nn.Module):
    """One block of a transformer, over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(256, 64), nn.Embedding(BLOCK, 64)
        self.block = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.1, batch_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(BLOCK)
        hidden = self.block(self.words(x) + self.places.weight, src_mask=mask, is_causal=True)
        scores: torch.Tensor = self.head(hidden)
        return scores.transpose(1, 2)


def rate(iteration: int, iterations: int) -> float:
    """Warm-up, then a cosine."""
    if iteration < WARMUP:
        return 3e-3 * (iteration + 1) / WARMUP
    return 1.5e-3 * (1 + math.cos(math.pi * (iteration - WARMUP) / max(1, iterations - WARMUP)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--evaluate-every", type=int, default=20)
    parser.add_argument("--checkpoints", default="nanogpt-checkpoints")
    parsed = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    text = torch.tensor([*Path(torch.nn.modules.module.__file__).read_bytes()])
    model = DistributedDataParallel(Model())
    torch.manual_seed(1 + dist.get_rank())

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - BLOCK - 1, (BATCH,))
        rows = torch.stack([text[at : at + BLOCK + 1] for at in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    # Drawn once: a death while an evaluation draws between two steps would be told as not exact.
    held_out = [batch() for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters())
    with lastwords.protect(parsed.checkpoints, model=model, optimizer=optimizer) as tft:  # <--
        point = tft.resume(missing_ok=True)  # <--
        begin = 0 if point is None else point.global_step  # <--
        for iteration in range(begin, parsed.iterations):
            tft.step_begin()  # <--
            for group in optimizer.param_groups:
                group["lr"] = rate(iteration, parsed.iterations)
            for part in range(ACCUMULATE):
                x, y = batch()
                model.require_backward_grad_sync = part == ACCUMULATE - 1
                loss = nn.functional.cross_entropy(model(x), y) / ACCUMULATE
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            tft.optimizer.step()  # <--
            tft.optimizer.zero_grad()
            tft.step_end()  # <--
            if (iteration + 1) % parsed.evaluate_every == 0:
                model.eval()
                with torch.no_grad():
                    losses = [nn.functional.cross_entropy(model(x), y).item() for x, y in held_out]
                model.train()
                if dist.get_rank() == 0:
                    print(f"iteration {iteration + 1}: loss {sum(losses) / 4:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
