"""Jobs whose controller is killed, or hangs, and cannot be followed: what they say, what ends them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastwords.controller.handover import ControllerSpec
from lastwords.controller.launch import start_controller
from lastwords.liveness import leftovers
from tests.integration.faults import controller_state, hanging
from tests.integration.plan import Fault, Layout
from tests.integration.rig import Launch, Rig
from tests.selection import more

pytestmark = pytest.mark.process

LAYOUT = Layout(world_size=2, augment=True)
AT_ONCE = {"LASTWORDS_CONTROLLER_LOST_S": "1"}
"""A rank that has done its loop waits so long for a controller that could release the others."""


@pytest.fixture(autouse=True)
def shared_memory_is_cleared(rig: Rig) -> Iterator[None]:
    """What a killed controller leaves is removed by the next job; here there is none."""
    yield
    rig.close()
    leftovers.remove_dead_job_dirs(lambda directory: False)


def strike_controller(launch: Launch, number: int) -> None:
    """Once every rank waits."""
    ranks = range(launch.layout.world_size)
    launch.job.wait_for(lambda: all((launch.directory / f"mark-here-{rank}").exists() for rank in ranks), 60, "marks")
    pid, state = controller_state(launch.plan.ctrl_port)
    state.unlink()  # nothing is left that another controller could know of it
    os.kill(pid, number)


def waiting(layout: Layout, step: int) -> list[Fault]:
    """Every rank waits in the forward of `step` until the test lets it go on."""
    return [Fault(rank, step, "forward", (f"mark:here-{rank}", "await:go")) for rank in range(layout.world_size)]


def await_words(launch: Launch, words: str) -> None:
    ranks = range(launch.layout.world_size)
    launch.job.wait_for(lambda: all(words in launch.job.output(rank) for rank in ranks), 60, f"the words {words!r}")


def test_the_loss_is_said_and_sigterm_ends_a_rank_as_without_us(rig: Rig) -> None:
    launch = rig.launch(LAYOUT, faults=waiting(LAYOUT, 6))
    strike_controller(launch, signal.SIGKILL)
    await_words(launch, "has lost its controller")
    for rank in range(LAYOUT.world_size):
        launch.job.signal(rank, signal.SIGTERM)
    launch.job.wait(60)
    assert launch.codes == dict.fromkeys(range(LAYOUT.world_size), -signal.SIGTERM), launch.job.report()


@pytest.mark.thorough
def test_ranks_that_wait_for_one_that_hangs_leave_it(rig: Rig, tmp_path: Path) -> None:
    """Its gRPC goes on answering pings, and nobody can follow: no session breaks by itself."""
    env = {**AT_ONCE, "LASTWORDS_UNANSWERED_S": "1", **hanging(tmp_path / "site")}
    launch = rig.launch(LAYOUT, faults=waiting(LAYOUT, 6), env=env)
    strike_controller(launch, signal.SIGVTALRM)
    (launch.directory / "mark-go").touch()
    launch.job.wait(90)
    rig.check_untouched(launch)


@pytest.mark.parametrize("token", [more("another"), None], ids=["another token", "the same token"])
def test_another_job_on_the_port_does_not_end_this_one(rig: Rig, tmp_path: Path, token: str | None) -> None:
    launch = rig.launch(LAYOUT, faults=waiting(LAYOUT, 6), env={**AT_ONCE, "LASTWORDS_TOKEN": "ours"})
    strike_controller(launch, signal.SIGKILL)
    spec = ControllerSpec(
        "127.0.0.1", launch.plan.ctrl_port, "words", 1, 2, tmp_path / "words", starter_pid=os.getpid()
    )
    other = start_controller(spec, token or "ours")
    try:
        await_words(launch, "now serves another job")
        await_words(launch, "has lost its controller")
        (launch.directory / "mark-go").touch()
        launch.job.wait(60)
        rig.check_untouched(launch)
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.wait(10.0)
