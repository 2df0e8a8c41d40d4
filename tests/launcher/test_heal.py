"""`lastwords run`: after a failure all ranks begin anew, and the run is bitwise that of a job in which nobody died."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import golden
from tests.integration.harness import Cluster
from tests.integration.zygote import AGENTS
from tests.launcher.forked import ROOT
from tests.launcher.forked import environment as any_environment
from tests.patience import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

SCRIPT = "tests.launcher.healed_training"
RANKS, STEPS = 3, 16
WAIT_S = 800.0
"""Many times what a whole run takes; with ten failures it is some minutes on a busy machine."""


def environment() -> dict[str, str]:
    return any_environment(OMP_NUM_THREADS="1")


def run(
    directory: Path,
    *deaths: str,
    launcher: str = "healing",
    ranks: int = RANKS,
    steps: int = STEPS,
    cluster: Cluster | None = None,
    script: str = SCRIPT,
    python: Sequence[str] = (),
    **more: object,
) -> str:
    """A whole job; returns what it wrote to stderr. launcher: one of AGENTS. It is a fork of `cluster`'s.

    script: a module. python: what the launcher is told to run it with.
    """
    directory.mkdir(exist_ok=True)
    flags = [flag for name, value in more.items() for flag in (f"--{name.replace('_', '-')}", str(value))]
    arguments = [str(directory), str(steps), *deaths]
    if cluster is not None:
        job = cluster.start(
            directory / "launched",
            module=script,
            arguments=arguments,
            world_size=ranks,
            launcher=launcher,
            launcher_arguments=flags,
            env=environment(),
        )
        assert job.wait(WAIT_S)[-1].code == 0, job.report()
        job.close()
        return (job.directory / f"{launcher}.err").read_text()
    command = [sys.executable, "-m", *AGENTS[launcher], "--standalone", "--nproc-per-node", str(ranks), *flags]
    done = subprocess.run(
        [*command, *python, "-m", script, *arguments],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def trace(directory: Path, rank: int) -> dict[int, str]:
    """Loss of each step; a step that was trained twice has to have given the same one."""
    found: dict[int, str] = {}
    for line in (directory / f"trace-{rank}").read_text(encoding="utf-8").splitlines():
        step, loss, *_ = line.split()
        assert found.setdefault(int(step), loss) == loss
    return found


def pids(directory: Path, rank: int) -> list[int]:
    """The processes that were this rank and have ended a step, in turn."""
    lines = (directory / f"trace-{rank}").read_text(encoding="utf-8").splitlines()
    return list(dict.fromkeys(int(line.split()[2]) for line in lines))


def begun(directory: Path, rank: int) -> list[dict[str, int]]:
    """What the launcher had of the system's when each process of this rank began."""
    return [json.loads(line) for line in (directory / f"begun-{rank}").read_text().splitlines()]


def check_equal(directory: Path, undisturbed: Path, heals: int, ranks: int = RANKS) -> None:
    """heals: how often all ranks have begun anew, and have ended a step since; nobody has a line of a step whose window
    it died in.
    """
    for rank in range(ranks):
        assert (directory / f"final-{rank}").read_text() == (undisturbed / f"final-{rank}").read_text(), rank
        found = trace(directory, rank)
        whole = trace(undisturbed, rank)
        assert found == {step: whole[step] for step in found}
        assert len(pids(directory, rank)) == 1 + heals, rank


def test_all_ranks_begin_anew_after_each_failure_and_nothing_differs(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank dies in a step, the next ones of it before there is a controller, and one as it resumes."""
    monkeypatch.setenv("LOADER_WORKERS", "2")
    run(tmp_path / "whole", launcher="torchrun", cluster=cluster)
    monkeypatch.setenv("FORKS", "1")
    healed, deaths = tmp_path / "healed", ["1:5:bwd", "1:1:alone", "1:2:main", "0:3:resume", "2:9:win"]
    said = run(healed, *deaths, cluster=cluster, tee="0:3", redirects=3, log_dir=tmp_path / "logs")
    check_equal(healed, tmp_path / "whole", heals=2)
    assert {path.name for path in healed.glob("died-*")} == {f"died-{death.replace(':', '-')}" for death in deaths}
    assert len(begun(healed, 1)) == 1 + len(deaths), "others may have been ended before they could count"

    for rank in range(RANKS):  # output goes where it went
        (log,) = (tmp_path / "logs").glob(f"*/attempt_0/{rank}/stderr.log")
        lines = [f"rank={rank} pid={pid}" for pid in pids(healed, rank)]
        assert [line for line in log.read_text().splitlines() if line in lines] == lines
        assert [f"[default{rank}]:{line}" in said for line in lines] == [rank == 0] * len(lines)

    # What a generation leaves behind ends, or is named where it has a session of its own.
    strangers = {int(path.read_text()) for path in healed.glob("forked-*-[0-4]-True")}
    assert {int(number) for number in re.findall(r"process (\d+) .*outlived", said)} == strangers
    assert len(strangers) >= 3 * RANKS
    for rank in range(RANKS):
        assert {one["left-False"] for one in begun(healed, rank)} == {0}
        assert begun(healed, rank)[-1]["left-True"] == len(strangers)
    recoveries = [line for line in said.splitlines() if line.startswith("lastwords run:")]
    assert len(recoveries) == 2, said
    assert not any("SIGTERM" in line for line in recoveries), "who was told to end has not died"


@pytest.mark.parametrize("preload", ["", pytest.param("tests.launcher.drawing", marks=pytest.mark.thorough)])
def test_a_script_with_state_at_its_top_goes_on_as_if_nothing_had_happened(
    preload: str, cluster: Cluster, tmp_path: Path
) -> None:
    """Each time all ranks find what its first lines make, and what is handed over comes back.

    A preloaded module has drawn before, from streams that are not the ranks', and so it has where nobody dies.
    """
    plain, healed = tmp_path / "whole", tmp_path / "healed"
    script = "tests.launcher.plain_training"
    flags = {"preload": preload} if preload else {}
    run(plain, launcher="healing" if preload else "torchrun", ranks=2, cluster=cluster, script=script, **flags)
    run(healed, "1:4", "1:8", "1:13", ranks=2, cluster=cluster, script=script, **flags)
    for rank in range(2):
        for file in (f"final-{rank}", f"log-{rank}", f"ended-{rank}"):
            assert (healed / file).read_text() == (plain / file).read_text()
        (found,) = (plain / f"begun-{rank}").read_text().splitlines()
        assert (healed / f"begun-{rank}").read_text().splitlines() == [found] * 4
    assert (healed / "beside-0").read_text().split() == ["__main__.best_loss", "__main__.history"], "what does not"
    # Nobody has flushed the survivor's rows.
    assert (healed / "rows-0.csv").read_text() == (plain / "rows-0.csv").read_text()
    assert [len([*healed.glob(f"left-{rank}-*")]) for rank in range(2)] == [3, 0]
    assert not [*plain.glob("left-*")]


@pytest.mark.thorough
def test_ten_failures_leave_no_threads_no_descriptors_and_no_children_in_the_launcher(tmp_path: Path) -> None:
    run(tmp_path / "whole", launcher="torchrun", ranks=2, steps=24)
    run(tmp_path / "healed", *(f"1:{step}:bwd" for step in range(2, 22, 2)), ranks=2, steps=24)
    check_equal(tmp_path / "healed", tmp_path / "whole", heals=10, ranks=2)
    counts = begun(tmp_path / "healed", 0)
    assert len(counts) == 11
    early, late = ({name: max(one[name] for one in some) for name in some[0]} for some in (counts[1:4], counts[-3:]))
    assert all(late[name] <= early[name] for name in late), counts


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same script under torchrun, where nobody dies."""
    directory = tmp_path_factory.mktemp("undisturbed")
    run(directory, launcher="torchrun", cluster=cluster)
    return directory


@pytest.mark.thorough
def test_a_rank_that_is_stopped_when_another_dies_is_killed_once_all_others_have_left(
    tmp_path: Path, undisturbed: Path
) -> None:
    said = run(tmp_path, "0:5:stop", "1:5:fwd")
    check_equal(tmp_path, undisturbed, heals=1)
    golden.says([line for line in said.splitlines() if "is killed:" in line])


@pytest.mark.thorough
def test_of_a_rank_that_comes_late_nobody_finds_an_address_before_it_has_come(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each generation has a store of its own."""
    monkeypatch.setenv("LATE_RANK", "2")
    run(tmp_path, "1:5:bwd")
    check_equal(tmp_path, undisturbed, heals=1)
    assert (tmp_path / "late").read_text() == str(RANKS - 1)


@pytest.mark.thorough
def test_in_the_store_of_the_generation_before_torch_finds_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whom torch then waits for depends on the ports: the lower of two numbers may be the one that listens."""
    monkeypatch.setenv("LATE_RANK", "2")
    command = [sys.executable, "-m", "tests.launcher.old_store", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["-m", SCRIPT, str(tmp_path), str(STEPS), "1:5:bwd"]
    launcher = subprocess.Popen(command, env=environment(), cwd=ROOT, stderr=subprocess.DEVNULL)
    late = tmp_path / "late"
    try:
        until(lambda: (late.exists() and late.read_text()) or launcher.poll() is not None, "a rank that is late")
        assert launcher.poll() is None
        assert late.read_text() == str(RANKS)
    finally:
        launcher.terminate()
        launcher.wait()
