"""Real jobs with a rank that is slower than the others, and without: who is named, and where."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastwords.cli.main import main as cli
from lastwords.controller.takeover import query_state
from lastwords.errors import LastWordsError
from lastwords.state import RankState
from tests import golden
from tests.integration.harness import Cluster, Job, Port

pytestmark = pytest.mark.process

RANKS, LIMIT_S = 3, 120.0
LOOKS = {"LASTWORDS_STRAGGLER_NOTICE_S": "3"}


class Uneven:
    """One launch, and what a person asks of it."""

    def __init__(self, cluster: Cluster, folder: Path, **plan: Any) -> None:
        self.folder, port = folder, Port()
        self.address = f"127.0.0.1:{port.number}"
        plan = {"out": str(folder), "checkpoints": str(folder / "checkpoints"), "port": port.number} | plan
        (folder / "plan.json").write_text(json.dumps(plan))
        self.job: Job = cluster.start(
            folder,
            module="tests.integration.uneven_training",
            arguments=[str(folder / "plan.json")],
            world_size=RANKS,
            ports=[port],
            env=LOOKS,
        )

    def ranks(self) -> tuple[RankState, ...]:
        """What the controller says of each rank; nothing before it can be asked."""
        try:
            return query_state(self.address).ranks
        except LastWordsError:
            return ()

    def step(self) -> int:
        """The newest one of any rank."""
        return max((rank.stand.ended_step for rank in self.ranks() if rank.stand), default=0)

    def leave(self) -> None:
        """All ranks leave after the same step, which none has come to yet."""
        (self.folder / "last.new").write_text(str(self.step() + 30))
        (self.folder / "last.new").rename(self.folder / "last")
        assert {end.code for end in self.job.wait(LIMIT_S).values()} == {0}, self.job.report()
        self.job.wait_gone(LIMIT_S)

    def notices(self) -> list[str]:
        """Lines about slow ranks that ranks have printed."""
        lines = [line for rank in range(RANKS) for line in self.job.output(rank).splitlines() if "its peers" in line]
        return list(map(plain, lines))

    def logged(self) -> list[str]:
        """Likewise of the controller's log, each once."""
        (log,) = (self.folder / "checkpoints" / "logs").glob("controller-*.log")
        return sorted({plain(line) for line in log.read_text().splitlines() if "its peers" in line})


def plain(line: str) -> str:
    """Without what differs from run to run."""
    return re.sub(r"[\d.]+(?= ms)|(?<=\+)\d+|(?<=host )\w+|^.*?(?=rank \d \()", "_", line)


@pytest.fixture
def cases(cluster: Cluster, tmp_path: Path) -> Iterator[Any]:
    started: list[Uneven] = []

    def start(**plan: Any) -> Uneven:
        started.append(Uneven(cluster, tmp_path, **plan))
        return started[-1]

    yield start
    for one in started:
        one.job.close()


def shown(job: Uneven, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The ranks' lines of `lastwords status`, and of two looks of `lastwords top`."""
    assert cli(["status", "--controller", job.address]) == 0
    assert cli(["top", "--controller", job.address, "--every", "0.2", "--frames", "2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\s*\d+\s+\d+ ", line)]
    return [lines[first : first + RANKS] for first in range(0, len(lines), RANKS)]


def slowness(line: str) -> int:
    """1 if it says by how much more than a fifth this rank is slower, 0 if it says nothing of that kind."""
    found = re.search(r"slower than its peers by (\d+)%", line)
    assert found is None or int(found[1]) > 20
    return int(found is not None)


def test_a_rank_that_takes_twice_as_long_is_named(cases: Any, capsys: pytest.CaptureFixture[str]) -> None:
    uneven = cases(step_s=0.1, slow=[1, 0.1])
    uneven.job.wait_for(lambda: any(rank.slower for rank in uneven.ranks()), LIMIT_S, "a slow rank")
    named = {rank.rank: rank for rank in uneven.ranks() if rank.slower}
    assert list(named) == [1]
    assert named[1].slower > 0.2
    assert named[1].work_s > 0.05
    assert [list(map(slowness, frame)) for frame in shown(uneven, capsys)] == [[0, 1, 0]] * 3
    uneven.leave()
    golden.says(uneven.notices())
    golden.says(uneven.logged())


@pytest.mark.parametrize("others", [{}, pytest.param({"validates": [2, 20, 0.5]}, marks=pytest.mark.thorough)])
@pytest.mark.thorough
def test_the_control_without_them_nobody_is_named(
    cases: Any, others: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even a rank that validates now and then, while the others wait for it."""
    even = cases(step_s=0.1, **others)
    even.job.wait_for(lambda: even.step() > 80, LIMIT_S, "five looks and more")
    assert all(rank.work_s > 0.02 for rank in even.ranks()), "it is measured"
    assert [list(map(slowness, frame)) for frame in shown(even, capsys)] == [[0, 0, 0]] * 3
    even.leave()
    assert even.notices() == []
    assert even.logged() == []
