"""A worker of a dynamic cluster: it forks its rank, which dies with it, and is to people what its rank is."""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lastwords.errors import ConfigError
from lastwords.launcher import supervisor as module
from lastwords.launcher.cluster_state import ClusterState
from lastwords.launcher.core import END_S
from lastwords.launcher.environment import SCHEDULER, WORKER, Cluster
from lastwords.launcher.events import (
    NOT_ENDED,
    Begun,
    Effect,
    End,
    Ended,
    Enter,
    Guarded,
    Kill,
    Leaving,
    Look,
    Lost,
    Over,
    Ready,
    Stop,
    Stopped,
    Updated,
)
from lastwords.launcher.events import Seat as Given
from lastwords.launcher.host import Host, Program
from lastwords.launcher.processes import RankSeat
from lastwords.launcher.protocol import Beat, Done, FromSupervisor
from lastwords.launcher.scheduler import Scheduler
from lastwords.launcher.supervisor import Supervisor, become_supervisor
from lastwords.processor.departure import EXIT_NOT_SAVED, EXIT_SAVED
from tests import golden
from tests.integration.harness import Port
from tests.patience import until

ROOT = Path(__file__).parents[2]
WAIT_S = 200.0


class Fake:
    """In place of the fork server, the host and the membership."""

    def __init__(self, *given: Any) -> None:
        self.rank, self.job, self.address = 1, "job", ""
        self.orders: list[Effect | int] = []
        self.said: list[FromSupervisor] = []
        self.obey = self.signal_all = self.orders.append
        self.tick: Callable[[], None] = lambda: None
        self.report = self.said.append

    def start(self) -> None:
        """As a fork server does."""


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """A supervisor whose rank has not been started."""
    for name in ("ahead", "WorkerMembership", "Host"):
        monkeypatch.setattr(module, name, Fake)
    monkeypatch.setattr(module, "take_in_orphans", lambda: None)
    return Supervisor(Cluster(WORKER, 2, "127.0.0.1", 8118, tmp_path, True), ["train.py"], selectors.DefaultSelector())


def runs(one: Supervisor) -> None:
    one._seat.proc = SimpleNamespace(pid=7, returncode=None)


def ends(one: Supervisor, code: int) -> None:
    one._seat.proc = SimpleNamespace(pid=7, returncode=code)
    one._report(Ended(1, code))


def stops(one: Supervisor) -> None:
    one._on_signal(signal.SIGTERM, None)


def gives_up(one: Supervisor) -> None:
    one._is_over("the scheduler has given up: a crash loop", True)


def test_what_the_scheduler_orders_is_done_with_its_rank(one: Supervisor) -> None:
    enter = Enter(5, 29500, 7, Given(3, 4, "10.0.0.7"))
    for order in (Beat(), enter, Look(1), End(1), Kill(1, "late")):
        one._obey(order)
    assert one._host.orders == [enter, Look(1), End(1), Kill(1, "late")]
    environment = {
        "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "job",
        "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4",
    }  # fmt: skip
    assert (one._seat.env, one._host.address, one._code) == (environment, "10.0.0.7", None)


def test_what_happens_to_its_rank_is_said_to_the_scheduler(one: Supervisor) -> None:
    said = [Guarded(1), Begun(1), Updated(1), Stopped(1), Over(1), Leaving(1, 7), Ended(1, -9)]
    for event in (Ready(1), *said):
        one._report(event)
    assert one._membership.said == said
    assert one._code is None, "its rank is forked again"


Act = Callable[[Supervisor], object]


@pytest.mark.parametrize(
    ("acts", "code"),
    [
        ([runs, lambda one: ends(one, 0), lambda one: one._obey(Done())], 0),
        ([runs, stops, lambda one: ends(one, EXIT_SAVED)], EXIT_SAVED),
        ([runs, stops, lambda one: ends(one, -signal.SIGTERM)], 128 + signal.SIGTERM),
        ([runs, stops, lambda one: ends(one, 0)], 0),
        ([runs, lambda one: ends(one, EXIT_SAVED), stops], EXIT_SAVED),
        ([stops], EXIT_NOT_SAVED),
        ([runs, gives_up, lambda one: ends(one, EXIT_SAVED)], EXIT_SAVED),
        ([runs, lambda one: ends(one, -signal.SIGKILL), gives_up], 128 + signal.SIGKILL),
        ([gives_up], EXIT_NOT_SAVED),
        ([runs, lambda one: ends(one, 0), gives_up], 0),
        ([runs, lambda one: ends(one, 1), lambda one: one._is_over("it has come to its end before", False)], 0),
        ([runs, lambda one: one._report(Lost("train.py has been changed"))], 1),
    ],
    ids=[
        "done", "asked to stop", "killed by that", "done though asked to stop", "asked to stop while it waits",
        "before it has begun", "given up", "given up while it waits", "given up before it has begun",
        "given up when it was done", "done before", "cannot be started",
    ],
)  # fmt: skip
def test_it_ends_as_its_rank_has(
    one: Supervisor, acts: list[Act], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    for act in acts:
        assert one._code is None
        act(one)
    assert one._code == code
    if gives_up in acts[1:2]:
        assert one._host.orders == [End(1)]
    if stops in acts[1:2]:
        assert one._host.orders == [signal.SIGTERM]
    golden.says(capfd.readouterr().err)


def test_a_rank_that_does_not_end_once_the_scheduler_has_given_up_is_killed_in_time(
    one: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(module, "mono_s", lambda: now_s[0])
    runs(one)
    gives_up(one)
    now_s[0] += 2 * END_S  # it was stopped, and its rank maybe as well
    one._tick()
    assert one._host.orders == [End(1)]
    for _ in range(int(END_S) + 1):
        now_s[0] += 1.0
        one._tick()
    assert one._host.orders == [End(1), Kill(1, NOT_ENDED)]


def test_it_ends_though_nobody_can_be_told_why(one: Supervisor, close_stderr: Callable[[], None]) -> None:
    close_stderr()
    gives_up(one)
    assert one._code == EXIT_NOT_SAVED


@pytest.mark.parametrize(
    ("name", "argv", "program"),
    [
        (None, [__file__, "-m", "x"], [__file__, "-m", "x"]),
        ("demo.train", [__file__, "--lr", "1"], ["-m", "demo.train", "--lr", "1"]),
        ("demo.__main__", [__file__], ["-m", "demo"]),
        ("__main__", [str(ROOT)], [str(ROOT)]),
    ],
    ids=["a script", "a module", "a package", "a directory"],
)
def test_a_process_becomes_one_with_its_script_and_arguments(
    monkeypatch: pytest.MonkeyPatch, name: str | None, argv: list[str], program: list[str]
) -> None:
    taken: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: taken.append(arguments))
    run_as(monkeypatch, name, argv)
    become_supervisor()
    assert taken == [[sys.executable, "-m", "lastwords.cli", "worker", *program]]


@pytest.mark.parametrize("argv", [["-c"], ["-"], [""]], ids=["command line", "standard input", "prompt"])
def test_what_no_other_process_can_run_is_refused(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    run_as(monkeypatch, None, argv)
    with golden.raises(ConfigError):
        become_supervisor()


def run_as(monkeypatch: pytest.MonkeyPatch, name: str | None, argv: list[str]) -> None:
    spec = None if name is None else importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    monkeypatch.setattr(sys, "argv", argv)


@pytest.mark.parametrize("order", [End(1), Kill(1, "late")])
def test_a_rank_that_is_told_to_end_while_it_is_forked_ends_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, order: End | Kill
) -> None:
    """Until then there is no process of it, whose number is 0: that of a whole process group."""
    kill, signals = os.kill, list[tuple[int, int]]()
    forks: Any = SimpleNamespace(pid=1, fork=lambda _: None, supervise=lambda: None)
    seat = RankSeat(sys.executable, ("-u", "train.py"), {})
    with selectors.DefaultSelector() as selector:
        program = Program(sys.executable, is_module=False, threads=1)
        monkeypatch.setattr("lastwords.launcher.host.ForkServer", lambda *_: forks)
        host = Host({1: seat}, program, selector, lambda _: None)
        host.obey(Enter(0))
        with subprocess.Popen(["sleep", "1000"]) as child, monkeypatch.context() as patched:
            patched.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
            host.obey(order)
            forks.made({1: child.pid}, "")
            kill(child.pid, signal.SIGKILL)
    number = signal.SIGTERM if isinstance(order, End) else signal.SIGKILL
    assert signals == [(child.pid, number)]


# ---------------------------------------------------------------------- real processes

SCRIPT = """
import json, os, pathlib, signal, sys
import lastwords
from lastwords.optim_wrapper.launch.reporter import reporter

def main():
    launcher = reporter()
    launcher.guarded(None)
    launcher.begun(0, lacks="")
    directory, *acts = sys.argv[1:]
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    facts = {"pid": os.getpid(), "parent": os.getppid(), "environment": [os.environ[name] for name in names]}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    path = pathlib.Path(directory, str(generation))
    path.with_suffix(".new").write_text(json.dumps(facts))
    path.with_suffix(".new").rename(path)
    if acts[generation] == "waits":
        while True:
            signal.pause()
    sys.exit(int(acts[generation]))

lastwords.run(main)
"""


class Job:
    """A cluster of one worker, whose scheduler runs in a thread. acts: of the script, by generation."""

    def __init__(self, path: Path, *acts: str) -> None:
        self._path, self._port = path, Port()
        (path / "train.py").write_text(SCRIPT)
        self._acts = [str(path), *acts]
        self._environment = {
            "MS_WORKER_NUM": "1", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(self._port.number),
            "MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(path / "recovery"), "MS_ROLE": WORKER,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        cluster = Cluster(SCHEDULER, 1, "127.0.0.1", self._port.number, path / "recovery", recovery=True)
        self.ended: list[Stop] = []
        self._state = contextlib.ExitStack()
        state = ClusterState(cluster)
        kept = self._state.enter_context(state.held())
        self.scheduler = Scheduler(cluster, state, kept, self._state.enter_context(selectors.DefaultSelector()))
        self._thread = threading.Thread(target=lambda: self.ended.append(self.scheduler.run()))
        self._thread.start()
        self._workers: list[subprocess.Popen[bytes]] = []

    def start(self, *by: str) -> subprocess.Popen[bytes]:
        """by: what runs the script, in place of the interpreter alone."""
        command = [sys.executable, *by, str(self._path / "train.py"), *self._acts]
        self._workers.append(subprocess.Popen(command, env={**os.environ, **self._environment}, cwd=self._path))
        return self._workers[-1]

    def facts(self, generation: int) -> dict[str, Any]:
        """What the rank has found in this one, as soon as it has."""
        path, worker = self._path / str(generation), self._workers[-1]
        until(lambda: path.exists() or worker.poll() is not None, "what the rank has found")
        assert path.exists(), f"the worker has ended with {worker.poll()}"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def finish(self) -> Stop:
        """How the scheduler has ended."""
        self._thread.join(WAIT_S)
        return self.ended[0]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
        self.scheduler._result = self.scheduler._result or Stop("the test is over")
        self._thread.join()
        self._state.close()
        self._port.release()


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    with contextlib.closing(Job(tmp_path, *request.param)) as made:
        yield made


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("job", [("3", "0")], indirect=True)
def test_a_rank_that_dies_alone_is_forked_again_without_a_person(job: Job) -> None:
    worker = job.start()
    first, second = (job.facts(generation) for generation in range(2))
    assert worker.wait(WAIT_S) == 0
    assert job.finish() == Stop(None)
    assert first["environment"] == second["environment"] == ["0", "0", "1", "1", "127.0.0.1"]
    assert first["parent"] == second["parent"] == worker.pid, "it has become the supervisor"
    assert first["pid"] != second["pid"]


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("job", [("waits", "0")], indirect=True)
def test_a_rank_dies_with_its_supervisor_which_people_start_again(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    worker = job.start("-m", "lastwords.cli", "worker")
    rank = job.facts(0)["pid"]
    pidfd = os.pidfd_open(rank)
    (member,) = job.scheduler._registry.members.values()
    until(lambda: member.forked is not None, "the scheduler knows the process of the rank")
    assert member.forked is not None
    assert member.forked.pid == rank
    worker.kill()
    assert select.select([pidfd], [], [], WAIT_S)[0] == [pidfd]
    os.close(pidfd)
    assert job.start("-m", "lastwords.cli", "worker").wait(WAIT_S) == 0
    assert job.finish() == Stop(None)
    golden.says([line for line in caplog.messages if "all wait for it" in line])


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("job", [("waits",)], indirect=True)
def test_a_signal_goes_to_the_rank_whose_exit_code_is_the_workers(job: Job) -> None:
    worker = job.start("-m", "lastwords.cli", "worker")
    job.facts(0)
    worker.terminate()
    assert worker.wait(WAIT_S) == 7
