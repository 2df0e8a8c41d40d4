"""Periodic checkpoints of real jobs on a disk that is full, read-only or slow: training goes on, and so does saving."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.compare import first_difference
from tests.integration.harness import Cluster
from tests.integration.plan import Fault, Layout
from tests.integration.rig import Launch, Rig
from tests.integration.test_periodic import EVERY, logs_of, steps_of
from tests.integration.trouble import Trouble, build
from tests.selection import usually

pytestmark = pytest.mark.process

LAYOUT = Layout(epochs=3)
ILL_FROM, WELL_FROM, DEATH = 2, 8, 11
FOREVER_S = 600
WELL = f"trouble:{FOREVER_S},0"
ILL = {
    "full": Trouble(("write",), "ENOSPC", 1000, 0.0, FOREVER_S),
    "read-only": Trouble(("open", "rename"), "EROFS", 1000, 0.0, FOREVER_S),
}
SLOW = Trouble(("fsync",), "", 1000, 0.0, FOREVER_S)


@pytest.fixture(scope="module")
def ill_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    library = build(tmp_path_factory.mktemp("library"))
    if library is None:
        pytest.skip("there is no C compiler, so that no library can make calls fail")
    with Cluster(preload=library) as cluster:
        yield cluster


@pytest.fixture
def rig(ill_cluster: Cluster, references: Path, tmp_path: Path) -> Iterator[Rig]:
    """Its logs are on another disk, so that a test reads them."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "logs").symlink_to(tmp_path / "logs")
    rig = Rig(ill_cluster, tmp_path, references)
    try:
        yield rig
    finally:
        rig.close()


def launched(rig: Rig, trouble: Trouble, *faults: Fault) -> Launch:
    env = trouble.prepare(rig.directory / "trouble", rig.directory / "checkpoints")
    return rig.launch(LAYOUT, faults=(Fault(0, ILL_FROM, "body", (trouble.action,)), *faults), every=EVERY, env=env)


def not_written(launch: Launch) -> list[str]:
    """The level of each line about a periodic checkpoint that was given up."""
    return re.findall(
        r"(\w+) the periodic checkpoint of step \d+ was not", "".join(map(Path.read_text, logs_of(launch)))
    )


def let_on(launch: Launch, mark: str) -> None:
    (launch.directory / f"mark-{mark}").touch()


@pytest.mark.parametrize("name", usually(ILL, {"full"}))
def test_while_it_takes_no_checkpoint_training_goes_on_and_afterwards_all_is_as_before(rig: Rig, name: str) -> None:
    """Rank 0 waits for this test in two steps, so that two checkpoints are given up before the disk is well again."""
    launch = launched(
        rig,
        ILL[name],
        Fault(0, WELL_FROM - EVERY, "body", ("await:first",)),
        Fault(0, WELL_FROM, "body", ("await:second", WELL)),
        Fault(2, DEATH, "forward", ("await:published", "kill")),
    )
    for count, mark in enumerate(("first", "second"), 1):
        launch.job.wait_for(lambda count=count: len(not_written(launch)) == count, 60, "one that is given up")
        assert steps_of(launch) == []
        let_on(launch, mark)
    launch.job.wait_for(lambda: bool(steps_of(launch)), 60, "a checkpoint")
    let_on(launch, "published")
    launch.finish()
    assert not_written(launch) == ["WARNING", "INFO"]
    step = rig.check_last_words(launch, (2,), {DEATH - 1})
    assert min(steps_of(launch)) >= WELL_FROM
    rig.check_resume(launch, step)


@pytest.mark.thorough
def test_on_a_slow_disk_the_whole_training_may_pass_before_a_checkpoint_is_written(rig: Rig) -> None:
    launch = launched(rig, SLOW, Fault(1, LAYOUT.steps, "end", ("mark:over", "await:seen", WELL)))
    launch.job.wait_for((launch.directory / "mark-over").exists, 60, "the last step")
    assert steps_of(launch) == []
    assert Trouble.failed(rig.directory / "trouble")
    let_on(launch, "seen")
    launch.finish()
    assert set(launch.codes.values()) == {0}, launch.job.report()
    assert first_difference(rig.reference(LAYOUT), launch.track, range(1, LAYOUT.steps + 1)) is None
    assert steps_of(launch)
    assert not_written(launch) == []
