"""docs/process.md tells the truth: what a protected process has that another one lacks, and that it is given back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lastwords.processor.departure import THREADS

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "process.md").read_text(encoding="utf-8")
RANKS = 2
WAIT_S = 200.0


def section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def run(directory: Path, **environment: str) -> list[dict[str, Any]]:
    """What each rank has seen of itself."""
    without = {key: value for key, value in os.environ.items() if not key.startswith(("GRPC_", "LASTWORDS_"))}
    ranks = []
    for rank in range(RANKS):
        with (directory / f"rank_{rank}.err").open("w") as errors:
            command = [sys.executable, "-m", "tests.integration.footprint", str(rank), str(RANKS), str(directory)]
            settings = {**without, "OMP_NUM_THREADS": "1", **environment}
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=settings, stderr=errors))
    try:
        codes = [process.wait(WAIT_S) for process in ranks]
        assert codes == [0] * RANKS, [(directory / f"rank_{rank}.err").read_text() for rank in range(RANKS)]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads((directory / f"footprint_{rank}.json").read_text()) for rank in range(RANKS)]


JOB = f"footprint-{os.getpid()}"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job has seen."""
    return run(tmp_path_factory.mktemp("footprint"), LASTWORDS_JOB=JOB)


@pytest.mark.parametrize("rank", range(RANKS))
def test_while_protected_exactly_the_threads_of_the_page_run(seen: list[dict[str, Any]], rank: int) -> None:
    rows = re.findall(r"^\| `(lastwords-[a-zA-Z-]+)` \| while protected", section("Threads"), flags=re.MULTILINE)
    found = [name for name in seen[rank]["inside"]["threads"] if name.startswith("lastwords-")]
    assert sorted({re.sub(r"-\d+$", "-PID", name) for name in found}) == sorted(rows)
    assert found.count("lastwords-reserve") == THREADS
    assert seen[rank]["inside"]["all_daemon"]


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_gets_the_environment_variable_of_the_page_and_no_other(seen: list[dict[str, Any]], rank: int) -> None:
    in_ranks = re.findall(r"^\| `([A-Z_]+)` \| every rank", section("Environment variables"), flags=re.MULTILINE)
    new = set(seen[rank]["inside"]["environment"]) - set(seen[rank]["before"]["environment"])
    assert new == set(in_ranks)


@pytest.mark.parametrize("rank", range(RANKS))
def test_signals_of_the_page_are_wrapped_and_no_other(seen: list[dict[str, Any]], rank: int) -> None:
    before, inside = (seen[rank][when]["handlers"] for when in ("before", "inside"))
    taken = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU"}
    assert {name for name in inside if inside[name] != before[name]} == taken
    assert seen[rank]["inside"]["wakeup_fd"] >= 0
    assert "ExceptHook" in seen[rank]["inside"]["excepthook"]


@pytest.mark.parametrize("rank", range(RANKS))
def test_the_controller_is_the_only_child(seen: list[dict[str, Any]], rank: int) -> None:
    starts = [line for line in seen[rank]["inside"]["children"] if "lastwords.controller" in line]
    assert len(starts) == len(seen[rank]["inside"]["children"]) == (1 if rank == 0 else 0)


@pytest.mark.parametrize("rank", range(RANKS))
def test_at_the_end_everything_is_given_back(seen: list[dict[str, Any]], rank: int) -> None:
    before, after = seen[rank]["before"], seen[rank]["after"]
    for what in ("handlers", "excepthook", "wakeup_fd", "hooks"):
        assert after[what] == before[what], what
    assert not [name for name in after["threads"] if name.startswith("lastwords-")]


def test_shared_memory_is_left_clean(seen: list[dict[str, Any]]) -> None:
    assert len(seen) == RANKS
    assert not list(Path("/dev/shm").glob(f"lastwords-{os.getuid()}-{JOB}-*"))


@pytest.mark.thorough
def test_switched_off_nothing_runs_and_nothing_is_written(tmp_path: Path) -> None:
    for one in run(tmp_path, MS_ENABLE_TFT="{TTP:0}"):
        before, inside = one["before"], one["inside"]
        for what in ("handlers", "excepthook", "wakeup_fd", "children"):
            assert inside[what] == before[what], what
        assert not [name for name in inside["threads"] if name.startswith("lastwords-")]
    assert not (tmp_path / "checkpoints").exists()


def test_every_thread_that_the_code_names_is_on_the_page() -> None:
    trainer = ("processor", "optim_wrapper", "liveness", "checkpoint", "sharding")
    sources = [path for folder in trainer for path in (ROOT / folder).rglob("*.py")]
    named = {
        name.rstrip("-")
        for path in sources
        for name in re.findall(r"name=f?\"(lastwords-[a-z-]+)", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    missing = {name for name in named if f"`{name}" not in section("Threads")}
    assert not missing


def test_every_environment_variable_that_the_code_sets_is_on_the_page() -> None:
    folders = ("src", "processor", "optim_wrapper", "liveness", "checkpoint", "sharding", "controller", "integrations")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    written = re.compile(r"environ(?:ment)?(?:\.setdefault\(|\[)\"([A-Z_]+)\"(?:,|\] =)")
    named = {name for path in sources for name in written.findall(path.read_text(encoding="utf-8"))}
    assert named >= {"GRPC_ENABLE_FORK_SUPPORT", "GRPC_VERBOSITY"}
    assert not [name for name in named if f"`{name}`" not in section("Environment variables")]


def test_importing_the_package_changes_nothing() -> None:
    script = (
        "import os, sys, threading; before = dict(os.environ); import lastwords; "
        "assert dict(os.environ) == before; assert threading.active_count() == 1; "
        "assert not {'torch', 'grpc'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=WAIT_S)
