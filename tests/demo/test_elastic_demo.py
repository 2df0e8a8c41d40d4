"""The demo on fewer ranks: the whole story once, and that each of its checks can fail."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from demo.compare import RankLog
from demo.incident import Incident
from demo.transformer.answer import continued
from demo.transformer.elastic import CONTINUED, LOSS_TOLERANCE, Runs, every_sample, same_curve, same_state
from demo.transformer.model import Shape, Transformer
from tests import golden

ROOT = Path(__file__).resolve().parents[2]
STEPS, KILLED_AFTER, LEFT_AFTER = 8, 2, 7
PER_EPOCH = 4


def log(rank: int, ranks: int, steps: range, resumed: str = "") -> RankLog:
    """Ranks share each layer by four. Every step has 16 samples, dealt to one replica or to two."""
    replicas = ranks // 4
    each = 16 // replicas
    return RankLog(
        steps=STEPS,
        losses={step: 5 - step / 8 for step in steps},
        states={step: f"{step}-{rank % 4}" for step in steps},
        samples={
            step: tuple(range(16 * ((step - 1) % PER_EPOCH), 16 * ((step - 1) % PER_EPOCH) + 16))[
                rank // 4 * each : rank // 4 * each + each
            ]
            for step in steps
        },
        resumed=resumed,
    )


def runs() -> Runs:
    incident = Incident(KILLED_AFTER, "", 0, (5,), 0.0, 0.0, 0.0, 0.0, ())
    return Runs(
        {rank: log(rank, 8, range(1, STEPS + 1)) for rank in range(8)},
        {rank: log(rank, 8, range(1, KILLED_AFTER + 1)) for rank in range(8)},
        {rank: log(rank, 4, range(KILLED_AFTER + 1, LEFT_AFTER + 1), f"{KILLED_AFTER}-{rank}") for rank in range(4)},
        incident,
        LEFT_AFTER,
        Path(),
    )


def changed(rank: int, **fields: object) -> Runs:
    """The runs, but for one of the four ranks."""
    good = runs()
    return dataclasses.replace(good, fewer={**good.fewer, rank: dataclasses.replace(good.fewer[rank], **fields)})


def problems(found: Runs) -> list[str]:
    console = Console(file=io.StringIO())
    return [*same_state(console, found), *same_curve(console, found), *every_sample(console, found, PER_EPOCH)]


def test_runs_that_fit_together_have_no_problem() -> None:
    assert problems(runs()) == []


def test_a_rank_with_another_state_is_named() -> None:
    assert problems(changed(2, resumed="2-3")) == ["ranks [2] began with another state"]


def test_a_loss_beyond_the_tolerance_is_a_problem() -> None:
    losses = runs().fewer[0].losses
    further = {**losses, 5: losses[5] + 4.4 * LOSS_TOLERANCE}  # of four ranks one is apart: a quarter of it
    [said] = problems(changed(0, losses=further))
    golden.says(said)
    assert problems(changed(0, losses={**losses, 5: losses[5] + 3.6 * LOSS_TOLERANCE})) == []


def test_a_step_that_is_not_there_is_a_problem() -> None:
    losses = {step: loss for step, loss in runs().fewer[1].losses.items() if step != LEFT_AFTER}
    golden.says(problems(changed(1, losses=losses)))


def test_a_sample_that_was_not_seen_or_twice_is_a_problem() -> None:
    good = runs()
    twice = {
        rank: dataclasses.replace(one, samples={**one.samples, 3: (0, *one.samples[3][1:])})
        for rank, one in good.fewer.items()
    }
    assert problems(dataclasses.replace(good, fewer=twice)) == [
        "of the 64 samples of the first epoch 1 were not seen, and 1 more than once"
    ]


def test_a_killed_run_that_was_another_one_before_is_a_problem() -> None:
    good = runs()
    other = dataclasses.replace(good.killed[0], states={**good.killed[0].states, 1: "else"})
    [said] = problems(dataclasses.replace(good, killed={**good.killed, 0: other}))
    assert said.startswith("before the kill: step 1, rank 0")


def test_what_a_model_makes_up_begins_with_the_prompt_and_can_be_repeated() -> None:
    torch.manual_seed(1)
    model = Transformer(Shape(context=8, width=16))
    said = continued(model, "The ", more=12)
    assert said.startswith("The ")
    assert len(said) >= 5
    assert said == continued(model, "The ", more=12)
    assert said != continued(model, "The ", more=12, seed=2)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_on_fewer_ranks_ends_well_and_leaves_a_checkpoint_that_answers(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    out = tmp_path / "out"
    command = [sys.executable, "-m", "demo.transformer.elastic", "--windows", "128", "--seed", "3", "--out", str(out)]
    demo = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800, env=environment, cwd=ROOT)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stdout.strip().splitlines()[-1] == CONTINUED
    for word in (
        "state  ",
        "curve  ",
        "samples  ",
        "inference  ",
        "kill -9 of rank",
        "SIGTERM after step",
        "steps lost",
    ):
        assert word in demo.stdout
    assert (out / "elastic.png").read_bytes().startswith(b"\x89PNG")
    command = [sys.executable, "-m", "demo.transformer.answer", str(out / "killed" / "checkpoints")]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment, cwd=ROOT)
    assert said.returncode == 0, said.stderr
    assert "value" in said.stdout
