"""A job of `ddp_jobs`: `python -m tests.integration.ddp_training PLAN.json`.

The plan: checkpoints, port, out, recover, plain, job (its class), without (a mechanism that is taken out) and
kill = [rank, step], at the beginning of that step, once the others have ended the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integration.ddp_jobs import JOBS, HookedLate, Job

STEPS = 6


def take_out(name: str) -> None:
    """Replace a mechanism by one that does nothing."""
    from lastwords.optim_wrapper.ddp import ddp_buckets, ddp_order
    from lastwords.optim_wrapper.state import state_view

    if name == "replay":
        ddp_buckets.replay = lambda *_args, **_more: []
    elif name == "beside":
        state_view.with_those_beside = lambda model, *_: model
    elif name == "rank 0's order":
        ddp_order.OrderBoard.exchange = lambda *_: None  # type: ignore[method-assign]
        ddp_order.GradientOrder._unconfirmed = lambda *_: ""  # type: ignore[method-assign]
    elif name == "hooks":
        ddp_order.hidden_states = lambda *_: []


def run(plan: dict[str, Any], job: Job, after: int, end_step: Callable[[int], None]) -> None:
    """The steps after `after`."""
    if isinstance(job, HookedLate):
        job.begin()
    out, rank = Path(plan["out"]), dist.get_rank()
    for step in range(after + 1, STEPS + 1):
        if plan["kill"] == [rank, step]:
            while len(list(out.glob(f"ended_{step - 1}_*"))) < dist.get_world_size():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        job.train(step)
        with (out / f"rank_{rank}.jsonl").open("a") as file:
            state = hashlib.sha256(job.bits()).hexdigest()
            file.write(json.dumps({"step": step, "loss": "", "state": state}) + "\n")
        end_step(step)
        (out / f"ended_{step}_{rank}").touch()


def protected(plan: dict[str, Any], job: Job) -> None:
    """With lastwords."""
    import lastwords

    take_out(plan["without"])
    job.optimizers = [lastwords.OptTFTWrapper(one) for one in job.inner]
    tft = lastwords.TFTRegister(
        0,
        "127.0.0.1",
        plan["port"],
        plan["checkpoints"],
        model=job.registered(),
        optimizer=job.optimizers,
        copy=len(job.optimizers) > 1,
    )
    with tft:
        if job.late:
            job.wrap()
        after = 0
        if plan["recover"]:
            point = tft.resume()
            assert point is not None
            after = point.global_step
            record = {"step": after, "exact": point.exact, "reasons": point.reasons}
            (Path(plan["out"]) / f"resumed_{dist.get_rank()}.json").write_text(json.dumps(record))
        run(plan, job, after, lambda step: tft.step_end(1, step))


def main(arguments: list[str]) -> None:
    plan = json.loads(Path(arguments[0]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    job = JOBS[plan["job"]](2 if plan["recover"] else 1)
    if plan["plain"]:
        if job.late:
            job.wrap()
        run(plan, job, 0, lambda _: None)
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # the interpreter's end is not what reference runs are for
    protected(plan, job)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
