"""The gate between real processes: who passes, who fails, and who is named."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from lastwords.errors import ConfigError, GateFailedError
from lastwords.optim_wrapper.launch.world import World
from lastwords.optim_wrapper.trainer.gate import Gate
from lastwords.processor.saver import Position
from tests.integration.forked import on_ranks
from tests.patience import until
from tests.shortage import no_threads

pytestmark = pytest.mark.process

FAR_S = 60.0


def _passed(gate: Gate, until_s: float = FAR_S) -> bool:
    """Look at the gate until it is passed; False after `until_s`."""
    deadline_s = time.monotonic() + until_s
    while not gate.passed():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.0001)
    return True


def _gate(timeout_s: float = FAR_S, notice_s: float = FAR_S) -> Gate:
    return Gate(World(), "gate", timeout_s=timeout_s, notice_s=notice_s)


def test_nobody_passes_before_the_last_one_has_entered(tmp_path: Path) -> None:
    def body(rank: int) -> list[tuple[float, float]]:
        gate = _gate()
        times = []
        for step in range(1, 21):
            if rank == step % 4:
                time.sleep(0.005)
            entered_s = time.monotonic()  # one clock for all processes of a host
            gate.enter(step)
            assert _passed(gate)
            times.append((entered_s, time.monotonic()))
        return times

    ranks = on_ranks(body, tmp_path)
    for step in zip(*ranks, strict=True):
        assert min(passed_s for _, passed_s in step) >= max(entered_s for entered_s, _ in step)


def test_a_rank_in_another_step_is_named_on_every_rank(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        gate = _gate()
        gate.enter(8 if rank == 2 else 7)
        with pytest.raises(ConfigError) as caught:
            _passed(gate)
        return f"says: {caught.value}"

    for said in on_ranks(body, tmp_path):
        assert "rank 2 in step 8, all other ranks in step 7" in said


def test_a_rank_that_calls_the_same_step_by_another_name_is_named_on_every_rank(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        gate = _gate()
        for step in (1, 2):
            gate.enter(step, Position(1, step))
            assert _passed(gate), "the control: the same names pass"
        gate.enter(3, Position(2 if rank == 1 else 1, 3))
        with pytest.raises(ConfigError) as caught:
            _passed(gate)
        return f"says: {caught.value}"

    for said in on_ranks(body, tmp_path):
        assert "rank 1 at epoch 2, step 3, all other ranks at epoch 1, step 3" in said


@pytest.mark.parametrize("steps", [(3, 5, 4), (1, 2, 3)], ids=str)
def test_steps_that_differ_are_found_also_where_their_mean_is_ones_own(steps: tuple[int, ...], tmp_path: Path) -> None:
    """Negative control of the second number: the sum alone would satisfy the rank in the middle."""

    def body(rank: int) -> bool:
        gate = _gate()
        gate.enter(steps[rank])
        with pytest.raises(ConfigError):
            _passed(gate)
        return True

    assert on_ranks(body, tmp_path, ranks=3) == [True] * 3


def test_after_a_death_nobody_passes(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        gate = _gate()
        gate.enter(1)
        assert _passed(gate)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        gate.enter(2)
        try:
            return "passed" if _passed(gate, until_s=2.0) else "waits"
        except GateFailedError:
            return "failed"

    answers = on_ranks(body, tmp_path, together=False)
    assert answers[1] is None
    assert set(answers) - {None} <= {"waits", "failed"}


def test_a_rank_that_never_comes_is_named_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        gate = _gate(timeout_s=1.5, notice_s=0.2)
        if rank == 3:
            until(lambda: all((tmp_path / f"failed-{other}").exists() for other in range(3)))
            return "late"
        gate.enter(5)
        with pytest.raises(GateFailedError) as caught:
            _passed(gate)
        (tmp_path / f"failed-{rank}").touch()
        return f"says: {caught.value}"

    answers = on_ranks(body, tmp_path, together=False)
    assert answers[3] == "late"
    for said in answers[:3]:
        assert "the gate of step 5 has failed" in said
    assert any("missing: rank 3" in said for said in answers[:3])


def test_a_rank_that_cannot_start_a_thread_waits_at_the_gate_all_the_same(tmp_path: Path) -> None:
    def body(rank: int) -> bool:
        gate = _gate(notice_s=0.05)
        if rank == 3:
            time.sleep(1.0)
        gate.enter(1)
        with no_threads():
            return _passed(gate)

    assert all(on_ranks(body, tmp_path))


def test_a_gate_of_its_own_does_not_mix_with_the_jobs_collectives(tmp_path: Path) -> None:
    def body(rank: int) -> bool:
        gate = _gate()
        for step in range(1, 6):
            gate.enter(step)
            dist.barrier()  # the job's own group, while the gate is under way
            assert _passed(gate)
        return True

    assert on_ranks(body, tmp_path) == [True] * 4
