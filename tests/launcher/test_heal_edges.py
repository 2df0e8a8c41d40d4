"""`lastwords run` where healing itself goes wrong, or must not be: the same training, bitwise, or an end."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.test_heal import ROOT, SCRIPT, STEPS, check_equal, environment, run
from tests.launcher.test_launcher_ends import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

RANKS = 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same script under torchrun, where nobody dies."""
    directory = tmp_path_factory.mktemp("undisturbed")
    run(directory, launcher=("torch.distributed.run",), ranks=RANKS)
    return directory


@pytest.mark.thorough
def test_a_main_that_can_be_entered_once_is_entered_by_new_processes(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCE_ONLY", "1")
    run(tmp_path, "1:5:bwd", ranks=RANKS)
    check_equal(tmp_path, undisturbed, {0: 1, 1: 1}, ranks=RANKS)


@pytest.mark.thorough
def test_where_nothing_is_saved_nobody_goes_on_with_weights_from_outside_of_main(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTSIDE", "1")
    run(tmp_path, "1:5:unsaved", ranks=RANKS)
    check_equal(tmp_path, undisturbed, {0: 1, 1: 1}, ranks=RANKS)


def test_a_death_between_the_end_of_the_loops_and_its_news_makes_nobody_train_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lastwords.cli", "run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["-m", SCRIPT, str(tmp_path), str(STEPS), "1:0:release"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert (tmp_path / "died-1-0-release").exists(), done.stderr
    for rank in range(RANKS):
        assert len((tmp_path / f"trace-{rank}").read_text().splitlines()) == STEPS, done.stderr


@pytest.mark.thorough
def test_a_launcher_that_has_no_descriptors_for_a_while_goes_on_once_it_has(tmp_path: Path, undisturbed: Path) -> None:
    command = [sys.executable, "-m", "lastwords.cli", "run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["-m", SCRIPT, str(tmp_path), str(STEPS), "1:5:bwd"]
    with (tmp_path / "log").open("wb") as log:
        launcher = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=log, stderr=log)
    try:
        until(lambda: all((tmp_path / f"trace-{rank}").exists() for rank in range(RANKS)), "all ranks train")
        fewest, most = resource.prlimit(
            launcher.pid, resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        until(lambda: "Too many open files" in (tmp_path / "log").read_text(), "they are used up")
        resource.prlimit(launcher.pid, resource.RLIMIT_NOFILE, (fewest, most))
        assert launcher.wait(200) == 0, (tmp_path / "log").read_text()
    finally:
        launcher.kill()
        launcher.wait()
    check_equal(tmp_path, undisturbed, {1: 1}, ranks=RANKS)
