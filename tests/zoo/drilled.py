"""A recipe as a script of a user's own, for `lastwords drill`: `python -m tests.zoo.drilled RECIPE`."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import lastwords
from tests.zoo.loop import CARDS
from tests.zoo.rank import named_steps, protected


def main() -> None:
    card = CARDS[sys.argv[1]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    loop = card.loop(dist.get_rank(), lastwords.OptTFTWrapper, lambda _place: None)
    with protected({"port": 0, "checkpoints": "mine"}, loop) as tft:
        point = tft.resume(missing_ok=True)
        done = loop.step = 0 if point is None else point.global_step
        loop.resumed()
        loop.end_step = tft.step_end
        if loop.own_loop:
            loop.run(loop.plain(loop.loader(), done, tft.step_begin), tft.step_end)
        else:
            loop.run(named_steps(tft, loop), lambda _epoch, _step: None)
    sys.stdout.flush()
    os._exit(0)  # as in `tests.zoo.rank`


if __name__ == "__main__":
    main()
