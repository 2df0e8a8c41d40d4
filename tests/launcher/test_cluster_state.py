"""What a scheduler keeps, and whom it refuses; the environment that makes a process part of a cluster."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import selectors
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from lastwords.checkpoint.appearing import write_file
from lastwords.checkpoint.part import write_document
from lastwords.checkpoint.system import Os, read_whole
from lastwords.errors import BusyError, ConfigError, FormatError, LastWordsError, StorageError
from lastwords.launcher import cluster_state, scheduler
from lastwords.launcher.cluster_state import VERSION, ClusterState, KeptCluster, directory_of, read_token, token_path
from lastwords.launcher.core import RankPlace
from lastwords.launcher.environment import SCHEDULER, WORKER, Cluster, _hints, cluster_of
from lastwords.launcher.events import Gone
from lastwords.launcher.registry import Process, Worker
from tests import golden
from tests.checkpoint.simulated_disk import SimulatedOs
from tests.checkpoint.test_crash import crashes

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
    members = {"a": Worker(1, Process("host", 7, 8), linked=True), "b": Worker(0, Process("host", 9, 8))}
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


def test_a_state_that_cannot_be_removed_is_named_with_what_follows(tmp_path: Path) -> None:
    state = ClusterState(cluster(tmp_path))
    (directory_of(tmp_path) / "state.json").mkdir(parents=True)
    with golden.raises(StorageError):
        state.remove()


RECOVERY = Path("/recovery")
MEMBERS = {"3": Worker(1, Process("host", 7, 8)), "x": Worker(0, Process("host", 9, 8), done=True)}
OLDER, NEWER = (
    KeptCluster(VERSION, "127.0.0.1:8118", 2, "job", generation, 7 + generation, MEMBERS) for generation in (1, 2)
)


def disk() -> SimulatedOs:
    """The older state is durable."""
    made = SimulatedOs()
    for directory in (RECOVERY, directory_of(RECOVERY)):
        made.mkdir(directory)
        made.fsync(made.open_directory(directory.parent))
    write_file(directory_of(RECOVERY) / "state.json", msgspec.json.encode(OLDER), made)
    return made


def after_each_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., None]) -> set[str]:
    """What the next scheduler begins with, wherever the power was lost: the newer state has to be there if promised."""
    directory_of(tmp_path).mkdir()
    found = set()

    def save(root: Path, os: Os) -> None:
        monkeypatch.setattr(cluster_state, "write_file", functools.partial(write, os=os))
        ClusterState(cluster(RECOVERY)).write(NEWER)

    for _, after, promised in crashes(disk, save):
        there, here = (directory_of(path) / "state.json" for path in (RECOVERY, tmp_path))
        here.unlink(missing_ok=True)
        if after.exists(there):
            here.write_bytes(read_whole(there, after, bytes_max=1 << 20))
        try:
            with ClusterState(cluster(tmp_path)).held() as kept:
                names = [name for name, known in (("older", OLDER), ("newer", NEWER)) if kept == known]
                found.add("a broken promise" if promised and names != ["newer"] else "".join(names) or "neither")
        except LastWordsError as error:
            found.add(type(error).__name__)
    return found


def test_power_lost_at_any_system_call_leaves_the_older_state_or_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert after_each_crash(tmp_path, monkeypatch, write_file) == {"older", "newer"}


def in_place(target: Path, raw: bytes, os: Os, *, replace: bool) -> None:
    os.unlink(target)
    write_document(target, raw, os)


def test_a_state_that_is_written_in_place_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    assert "neither" in after_each_crash(tmp_path, monkeypatch, in_place)


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


@pytest.mark.parametrize(
    "changed",
    [{"version": -1}, {"version": 0}, {"job": "../../etc/x"}, {"generation": -99999}, {"step": -1}, {"job": "\udc80"}],
    ids=str,
)
def test_a_state_that_no_scheduler_has_written(tmp_path: Path, changed: dict[str, int | str]) -> None:
    state = ClusterState(cluster(tmp_path))
    with state.held() as kept:
        state.write(kept)
    path = directory_of(tmp_path) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changed}))
    with pytest.raises(FormatError), state.held():
        pass


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "two names for one rank": lambda members: members["3"].update(rank=0),
    "a rank beyond the last": lambda members: members["3"].update(rank=99),
    "a negative rank": lambda members: members["3"].update(rank=-1),
    "a rank that is text": lambda members: members["3"].update(rank="1"),
    "a rank without a name": lambda members: members.pop("x"),
    "a name that is none": lambda members: members.update({"": members.pop("x")}),
    "no process": lambda members: members["x"]["process"].update(pid=0),
    "two names for one process": lambda members: members["x"].update(process=members["3"]["process"]),
    "no host": lambda members: members["x"]["process"].update(host=""),
    "a host of two lines": lambda members: members["x"]["process"].update(host="a\nb"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_names_and_ranks_that_do_not_fit_are_damage(tmp_path: Path, wrong: str) -> None:
    kept = json.loads(msgspec.json.encode(NEWER))
    WRONG[wrong](kept["members"])
    with golden.raises(FormatError):
        begin(tmp_path, json.dumps(kept))


def test_a_number_of_the_entry_that_leaves_none_for_the_next_one_is_damage(tmp_path: Path) -> None:
    with golden.raises(FormatError):
        begin(tmp_path, msgspec.json.encode(dataclasses.replace(NEWER, generation=2**63 - 1)).decode())


def begin(path: Path, content: str) -> KeptCluster:
    """What a scheduler that finds this content begins with; all ranks end at once, and it keeps that."""
    directory_of(path).mkdir(exist_ok=True)
    (directory_of(path) / "state.json").write_text(content, encoding="utf-8", errors="surrogatepass")
    state = ClusterState(cluster(path))
    with state.held() as kept, selectors.DefaultSelector() as selector, pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "listen", lambda *_: [])
        one = scheduler.Scheduler(cluster(path), state, kept, selector)
        for rank in range(kept.workers):
            if one._head.core.place(rank) is not RankPlace.ABSENT:
                one._report(Gone(rank))
        one._look()
        one._head.tick()
        assert one._keep() is None
        one.close()
        return kept


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)


def places(document: object) -> list[tuple[Any, Any]]:
    """All dictionaries within, each with one of its keys."""
    if not isinstance(document, dict):
        return []
    return [*((document, key) for key in document), *(place for one in document.values() for place in places(one))]


def mutate(draw: st.DrawFn, document: dict[str, Any]) -> None:
    """In one place."""
    table, key = draw(st.sampled_from(places(document)))
    others = st.sampled_from(places(document)).map(lambda place: place[0][place[1]])
    match draw(st.sampled_from(["drop", "value", "other", "key"])):
        case "drop":
            del table[key]
        case "value":
            table[key] = draw(VALUES)
        case "other":
            table[key] = json.loads(json.dumps(draw(others)))
        case "key":
            table[draw(st.text(max_size=2))] = table.pop(key)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A state with some mutations, a torn one as well."""
    entered = draw(st.booleans())
    some = MEMBERS if entered else {name: one for name, one in MEMBERS.items() if draw(st.booleans())}
    kept = dataclasses.replace(NEWER, generation=NEWER.generation if entered else -1, members=some)
    document = json.loads(msgspec.json.encode(kept))
    for _ in range(draw(st.integers(1, 3))):
        if document:
            mutate(draw, document)
    text = json.dumps(document)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 0 else text


@settings(max_examples=100, deadline=None)
@given(content=mutated())
@example(content=msgspec.json.encode(NEWER).decode())
def test_a_state_of_whatever_content_is_damage_or_one_with_which_a_scheduler_can_begin(
    tmp_path_factory: pytest.TempPathFactory, content: str
) -> None:
    path, refusal = tmp_path_factory.mktemp("recovery"), ""
    try:
        kept = begin(path, content)
    except (FormatError, ConfigError) as error:
        refusal = f"{type(error).__name__}: {error}"
    if refusal.startswith("ConfigError"):
        event("of another cluster")
        assert [json.loads(content)[key] for key in ("address", "workers")] != ["127.0.0.1:8118", 2]
    elif refusal:
        event("damage")
        assert refusal.startswith(f"FormatError: {directory_of(path) / 'state.json'} is damaged") or "newer" in refusal
    else:
        event("consistent")
        ranks = sorted(one.rank for one in kept.members.values())
        assert ranks in ([[0, 1]] if kept.generation >= 0 else [[], [0], [1], [0, 1]])
        with ClusterState(cluster(path)).held() as again:
            assert [*again.members] == [*kept.members]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_state_or_token_that_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    state = ClusterState(cluster(tmp_path))
    with state.held():
        pass
    make(directory_of(tmp_path) / "state.json")
    with pytest.raises(StorageError), state.held():
        pass
    make(token_path(tmp_path))
    with pytest.raises(StorageError):
        read_token(tmp_path)


def test_the_environment_says_who_a_process_is() -> None:
    assert cluster_of({}) is None
    assert cluster_of(ENVIRONMENT) == Cluster(
        "MS_WORKER", 2, "127.0.0.1", 8118, Path("/recovery"), recovery=True, node="1"
    )
    alone = {name: value for name, value in ENVIRONMENT.items() if name != "MS_ROLE"}
    assert cluster_of(alone, SCHEDULER) == dataclasses.replace(cluster(Path("/recovery")))


ROLE_FORGOTTEN = {name: value for name, value in ENVIRONMENT.items() if name != "MS_ROLE"}


def test_a_worker_whose_role_was_forgotten_is_told_so() -> None:
    with golden.raises(ConfigError):
        cluster_of(ROLE_FORGOTTEN)
    assert cluster_of({**ROLE_FORGOTTEN, "RANK": "0"}) is None, "a launcher has started this process"


@pytest.mark.parametrize("missing", ["MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_RECOVERY_PATH"])
def test_a_process_with_some_of_the_variables_is_no_worker(missing: str) -> None:
    """They may be another program's."""
    assert cluster_of({**ROLE_FORGOTTEN, missing: ""}) is None


MISSPELT = {
    "MS_ROLES": "MS_ROLE",
    "MS_WORKERS_NUM": "MS_WORKER_NUM",
    "MS_SCHEDULER_HOST": "MS_SCHED_HOST",
    "MS_SCHED_PROT": "MS_SCHED_PORT",
    "MS_RECOVERYPATH": "MS_RECOVERY_PATH",
    "MS_ENABLE_RECOVER": "MS_ENABLE_RECOVERY",
    "MS_NODEID": "MS_NODE_ID",
}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_variable_whose_name_is_misspelt_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    environ = {one: value for one, value in ENVIRONMENT.items() if one != MISSPELT[name]} | {name: "1"}
    if MISSPELT[name] in ("MS_ENABLE_RECOVERY", "MS_NODE_ID"):
        assert cluster_of(environ) is not None
        golden.says(caplog.messages)
    else:
        with golden.raises(ConfigError):
            cluster_of(environ)


def test_a_variable_of_somebody_elses_and_one_beside_the_right_one_are_not_taken_for_misspelt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    minds = [
        "MS_WORKER_IP",
        "MS_SERVER_NUM",
        "MS_SCHED_NUM",
        "MS_NODE_TIMEOUT",
        "MS_RECOVERY_INTERVAL",
        "MS_ENABLE_TFT",
    ]
    assert _hints(dict.fromkeys(minds, "1")) == []
    assert cluster_of({**ENVIRONMENT, "MS_ENABLE_RECOVER": "1"}) is not None
    assert caplog.messages == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"MS_ROLE": "MS_PSERVER"},
        {"MS_SCHED_HOST": "", "MS_RECOVERY_PATH": ""},
        {"MS_WORKER_NUM": "0"},
        {"MS_SCHED_PORT": "70000"},
        {"MS_ENABLE_RECOVERY": "yes"},
        {"TORCHELASTIC_RUN_ID": "x"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_an_environment_that_makes_no_sense(wrong: dict[str, str]) -> None:
    with golden.raises(ConfigError):
        cluster_of({**ENVIRONMENT, **wrong})


@pytest.mark.parametrize(
    "node", ["a\nb", "", "3 ", "\udcff", "x" * 201], ids=["2 lines", "empty", "3 ", "bytes", "long"]
)
def test_what_can_be_no_name_of_a_worker(node: str) -> None:
    with golden.raises(ConfigError):
        cluster_of({**ENVIRONMENT, "MS_NODE_ID": node})
    scheduler = cluster_of({**ENVIRONMENT, "MS_ROLE": SCHEDULER, "MS_NODE_ID": node})
    assert scheduler is not None, "it has no use for one"


@pytest.mark.parametrize("role", [SCHEDULER, WORKER])
@pytest.mark.parametrize("host", ["node..1", "\udcff", "x" * 64], ids=["dots", "bytes", "long"])
def test_what_can_be_no_name_of_a_host(role: str, host: str) -> None:
    with golden.raises(ConfigError):
        cluster_of({**ENVIRONMENT, "MS_ROLE": role, "MS_SCHED_HOST": host})


def test_a_scheduler_with_the_environment_of_a_worker() -> None:
    with golden.raises(ConfigError):
        cluster_of(ENVIRONMENT, SCHEDULER)
