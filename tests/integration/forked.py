"""A function on several forked processes in one gloo group: for tests that need ranks, but no launcher."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 240


def on_ranks(body: Callable[[int], Any], tmp_path: Path, ranks: int = 4) -> list[Any]:
    """What `body(rank)` returns on each of `ranks` forked processes in one gloo group."""
    context = multiprocessing.get_context("fork")

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=rank, world_size=ranks)
            answer = body(rank)
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            answer = traceback.format_exc()
        (tmp_path / f"answer{rank}").write_bytes(pickle.dumps(answer))

    processes = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
    answers = [pickle.loads((tmp_path / f"answer{rank}").read_bytes()) for rank in range(ranks)]
    failed = [answer for answer in answers if isinstance(answer, str)]
    assert not failed, failed[0]
    return answers
