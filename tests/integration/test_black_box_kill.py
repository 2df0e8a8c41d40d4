"""A writer that is really killed with -9, at instants that nobody chose, and what is left in its black box."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from lastwords.processor.black_box import BlackBox
from lastwords.processor.box_layout import BoxLayout, BoxReader, RegionSpec, SlotKind
from lastwords.vocabulary import Phase

pytestmark = pytest.mark.process

LAYOUT = BoxLayout((RegionSpec("rng/torch", "U8", (5056,)), RegionSpec("buffer/bn", "F32", (64, 1024), lazy=True)))
KILLS = 40
WAIT_S = 60.0
LATE_STEP = 200
"""From here on the large region is in use."""


def pattern(step: int, nbytes: int) -> bytes:
    """Every copy is recognisable, and a mixture of two is too."""
    return step.to_bytes(8, "little") * (nbytes // 8)


def write_for_ever(path: Path, begins: Connection) -> None:
    """The child: one step after the other, as fast as it goes. COMPUTING(M): M is committed; READY(M + 1): so is its
    tentative copy."""
    box = BlackBox.create(path, LAYOUT)
    step = 0

    def copy(kind: SlotKind) -> None:
        slot = box.begin(kind, step)
        for region in LAYOUT.regions:
            if box.is_active(region.name):
                view = box.region(slot, region.name)
                value = pattern(step, len(view))
                for at in range(0, len(view), 1024):
                    view[at : at + 1024] = value[at : at + 1024]
        box.commit(slot, b'{"step": %d}' % step)

    copy(SlotKind.COMMITTED)
    box.set_stand(Phase.COMPUTING, 0)
    begins.send("go")
    while True:
        step += 1
        if step == LATE_STEP:
            box.activate("buffer/bn")
        copy(SlotKind.TENTATIVE)
        box.set_stand(Phase.READY, step)
        copy(SlotKind.COMMITTED)
        assert box.compare_tentative() is None
        box.set_stand(Phase.COMPUTING, step)


def test_a_killed_writer_leaves_the_copies_that_can_be_needed(tmp_path: Path) -> None:
    instants = random.Random(20240731)
    path = tmp_path / "rank_0.box"
    met: Counter[str] = Counter()
    for _ in range(KILLS):
        context = multiprocessing.get_context("fork")
        begun, begins = context.Pipe(duplex=False)
        writer = context.Process(target=write_for_ever, args=(path, begins), daemon=True)
        writer.start()
        try:
            assert begun.poll(WAIT_S)
            time.sleep(instants.choice([0.0, 0.001, 0.02, 0.2]) * instants.random())
        finally:
            writer.kill()
            writer.join(WAIT_S)
        assert writer.exitcode == -signal.SIGKILL
        with BoxReader(path) as reader:
            stand = reader.stand()
            assert stand is not None
            ended = stand.ended_step
            needed = {max(ended - 1, 0), ended} | ({ended + 1} if stand.phase is Phase.READY else set())
            for step in sorted(needed):
                copy = reader.read(step)
                assert copy is not None, f"killed in {stand}: step {step} is not there, only {reader.contents()}"
                assert copy.json == {"step": step}
                for name, region in copy.regions.items():
                    assert bytes(region.data) == pattern(step, len(region.data)), f"{name} of step {step} is torn"
                assert ("buffer/bn" in copy.regions) == (step >= LATE_STEP)
            met[stand.phase.name] += 1
            met["in the middle of a write"] += len(reader.contents()) < 4
            met["with the late region"] += ended >= LATE_STEP
    # The kills were spread as intended; without that the test would say nothing.
    assert all(met[name] > 0 for name in ("READY", "COMPUTING", "in the middle of a write", "with the late region")), (
        met
    )
