"""What a terminal, a shell or a launcher sends to a job: each signal saves it, unless it is ignored."""

from __future__ import annotations

import itertools
import signal

import pytest

from tests.integration.plan import Fault, Layout
from tests.integration.rig import EXIT_SAVED, HEALED_TIMEOUT_S, Launch, Rig
from tests.selection import more, usually

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

LAYOUT = Layout(world_size=2, augment=True, workers=1)
STEP = 3
SIGNALS = ("SIGHUP", "SIGQUIT", "SIGTERM", "SIGINT")
ROWS = [*itertools.product(("torchrun", "healing", "fork"), SIGNALS, ("default", "ignored"))]
USUAL = [
    ("torchrun", "SIGQUIT", "default"),
    ("healing", "SIGHUP", "default"),
    ("healing", "SIGHUP", "ignored"),
    ("fork", "SIGHUP", "ignored"),
]


def signalled(rig: Rig, launcher: str, number: str, *, ignored: bool = False) -> Launch:
    """All ranks are in a step when the signal comes, to whole process groups but for SIGTERM, as of a terminal.

    The handler that torch sets for SIGTERM in a loader's worker ends it, also where that was ignored.
    """
    ranks = range(LAYOUT.world_size)
    actions = [(f"mark:here-{rank}", "await:go") for rank in ranks]
    launch = rig.launch(
        LAYOUT,
        faults=[Fault(rank, STEP, "body", actions[rank]) for rank in ranks],
        launcher=launcher,
        ignored=[signal.Signals[number]] if ignored else [],
        missing_ok=launcher == "healing",
    )
    marks = [launch.directory / f"mark-here-{rank}" for rank in ranks]
    launch.job.wait_for(lambda: all(mark.exists() for mark in marks), HEALED_TIMEOUT_S, "the step")
    for rank in launch.job.expected:
        launch.job.signal(rank, signal.Signals[number], group=number != "SIGTERM")
    launch.job.processes()  # an answer that comes after the signals
    if ignored and launcher != "torchrun":  # whose ranks get it after some steps else, however late
        (launch.directory / "mark-go").touch()
    launch.finish(HEALED_TIMEOUT_S)
    return launch


def saved(rig: Rig, launch: Launch) -> int:
    """A checkpoint of a whole step, the codes that are promised, and each rank says so. Returns the step.

    Torchrun's own code is 1 after a signal, or that of an abort in a thread of torch's that its interpreter leaves.
    """
    step = rig.check_last_words(launch, [], {STEP - 1, STEP})
    codes = {*launch.codes.values()}
    assert 0 not in codes if launch.job.launcher == "torchrun" else codes == {EXIT_SAVED}, launch.job.report()
    return step


@pytest.mark.parametrize("row", usually(ROWS, USUAL), ids="-".join)
def test_a_job_that_gets_a_signal_saves_and_ends_unless_it_is_ignored(rig: Rig, row: tuple[str, str, str]) -> None:
    launcher, number, found = row
    launch = signalled(rig, launcher, number, ignored=found == "ignored")
    if found == "ignored" and launcher != "torchrun":  # torch's agent handles it all the same, so its ranks get it
        rig.check_untouched(launch)
        assert set(launch.codes.values()) == {0}
        return
    step = saved(rig, launch)
    if launcher == "healing":
        *_, last = (launch.directory / "healing.err").read_text().splitlines()
        where = f"step {step} was saved in {launch.new_checkpoint}"
        assert last == f"lastwords run: ended by {number}; {where}; start the job again to go on from there"


@pytest.mark.parametrize("number", ["SIGQUIT", more("SIGHUP"), more("SIGUSR2"), more("SIGXCPU")])
def test_what_is_saved_then_goes_on_bit_for_bit(rig: Rig, number: str) -> None:
    launch = signalled(rig, "fork", number)
    rig.check_resume(launch, saved(rig, launch))
