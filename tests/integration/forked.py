"""A function on several forked processes in one gloo group: for tests that need ranks, but no launcher."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it at the first step: once here, and not in each rank
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.optim

from lastwords.optim_wrapper.ddp.ddp_found import known_ddps

LIMIT_S = 150
DUMP_S = 5


class Failure(str):
    """The traceback of a rank that raised."""

    __slots__ = ()


def on_ranks(body: Callable[[int], Any], tmp_path: Path, ranks: int = 4, *, together: bool = True) -> list[Any]:
    """What `body(rank)` returns on each of `ranks` forked processes in one gloo group; None for one that is killed.

    together: all of them live to the end, and leave the group together.
    """
    context = multiprocessing.get_context("fork")

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        faulthandler.register(signal.SIGUSR1, (tmp_path / f"stacks{rank}").open("w"))
        try:
            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=rank, world_size=ranks)
            answer = body(rank)
            if together:
                dist.barrier()
                dist.destroy_process_group()
        except BaseException:
            answer = Failure(traceback.format_exc())
        (tmp_path / f"answer{rank}").write_bytes(pickle.dumps(answer))
        if not together:
            os._exit(0)  # the end of a group with a collective under way may never come

    known_ddps()  # of those that this process has; the first call looks through all objects
    processes = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    gc.freeze()  # a child that collects a group of ours waits for ever for its threads: they are not forked
    try:
        for process in processes:
            process.start()
    finally:
        gc.unfreeze()
    hung = False
    for process in processes:
        process.join(0 if hung else LIMIT_S)
        hung = hung or process.is_alive()
    files = [tmp_path / f"answer{rank}" for rank in range(ranks)]
    answers = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
    stacks = _end(processes, tmp_path) if hung else ""
    assert not together or all(file.exists() for file in files), f"a rank has ended without an answer\n{stacks}"
    failed = [answer for answer in answers if isinstance(answer, Failure)]
    assert not failed, failed[0]
    return answers


def _end(processes: list[Any], tmp_path: Path) -> str:
    """Kill those that still run, and say where they were."""
    for process in processes:
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
            process.join(DUMP_S)
            process.kill()
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(tmp_path.glob("stacks*")))
