"""What a scheduler keeps, and whom it refuses; the environment that makes a process part of a cluster."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path

import pytest

from lastwords.errors import BusyError, ConfigError, FormatError
from lastwords.launcher.cluster_state import ClusterState, directory_of, token_path
from lastwords.launcher.environment import SCHEDULER, Cluster, cluster_of
from lastwords.launcher.registry import Member, Process
from tests import golden

ENVIRONMENT = {
    "MS_ROLE": "MS_WORKER",
    "MS_WORKER_NUM": "2",
    "MS_SCHED_HOST": "127.0.0.1",
    "MS_SCHED_PORT": "8118",
    "MS_RECOVERY_PATH": "/recovery",
    "MS_ENABLE_RECOVERY": "1",
    "MS_NODE_ID": "1",
}


def cluster(path: Path) -> Cluster:
    return Cluster(SCHEDULER, 2, "127.0.0.1", 8118, path, recovery=True)


def test_what_is_kept_is_there_for_the_next_scheduler_and_nobody_else(tmp_path: Path) -> None:
    state = ClusterState(cluster(tmp_path))
    members = {"a": Member(1, Process("host", 7, 8), linked=True)}
    with state.held() as kept:
        token = state.token()
        assert (kept.generation, kept.members) == (-1, {})
        state.write(dataclasses.replace(kept, generation=3, step=9, members=members))
    with ClusterState(cluster(tmp_path)).held() as again:
        assert again == dataclasses.replace(kept, generation=3, step=9, members=members)
        assert ClusterState(cluster(tmp_path)).token() == token
    assert stat.S_IMODE(directory_of(tmp_path).stat().st_mode) == 0o700
    state.remove()
    assert not token_path(tmp_path).exists()
    with ClusterState(cluster(tmp_path)).held() as anew:
        assert (anew.generation, anew.members) == (-1, {})
        assert anew.job != kept.job


def test_two_schedulers_on_one_path(tmp_path: Path) -> None:
    with (
        ClusterState(cluster(tmp_path)).held(),
        golden.raises(BusyError),
        ClusterState(cluster(tmp_path)).held(),
    ):
        pass


@pytest.mark.parametrize("changed", [{"port": 9}, {"workers": 3}], ids=["another port", "another number of workers"])
def test_the_path_of_another_cluster(tmp_path: Path, changed: dict[str, int]) -> None:
    state = ClusterState(cluster(tmp_path))
    with state.held() as kept:
        state.write(kept)
    other = ClusterState(dataclasses.replace(cluster(tmp_path), **changed))
    with golden.raises(ConfigError), other.held():
        pass


@pytest.mark.parametrize("content", ['{"version": 99}', "{", "[]"], ids=["newer", "torn", "no object"])
def test_a_state_that_cannot_be_read(tmp_path: Path, content: str) -> None:
    state = ClusterState(cluster(tmp_path))
    with state.held():
        pass
    (directory_of(tmp_path) / "state.json").write_text(content, encoding="utf-8")
    with golden.raises(FormatError), state.held():
        pass
    assert (directory_of(tmp_path) / "state.json").read_text(encoding="utf-8") == content


def test_the_environment_says_who_a_process_is() -> None:
    assert cluster_of({}) is None
    assert cluster_of(ENVIRONMENT) == Cluster(
        "MS_WORKER", 2, "127.0.0.1", 8118, Path("/recovery"), recovery=True, node="1"
    )
    alone = {name: value for name, value in ENVIRONMENT.items() if name != "MS_ROLE"}
    assert cluster_of(alone) is None
    assert cluster_of(alone, SCHEDULER) == dataclasses.replace(cluster(Path("/recovery")))


@pytest.mark.parametrize(
    "wrong",
    [
        {"MS_ROLE": "MS_PSERVER"},
        {"MS_SCHED_HOST": "", "MS_RECOVERY_PATH": ""},
        {"MS_WORKER_NUM": "0"},
        {"MS_SCHED_PORT": "70000"},
        {"MS_ENABLE_RECOVERY": "yes"},
        {"MS_NODE_ID": "a\nb"},
        {"TORCHELASTIC_RUN_ID": "x"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_an_environment_that_makes_no_sense(wrong: dict[str, str]) -> None:
    with golden.raises(ConfigError):
        cluster_of({**ENVIRONMENT, **wrong})


def test_a_scheduler_with_the_environment_of_a_worker() -> None:
    with golden.raises(ConfigError):
        cluster_of(ENVIRONMENT, SCHEDULER)
