"""The fork server of a host: what it imports for all ranks, what it refuses to, and what becomes of one that dies."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lastwords.checkpoint import load
from lastwords.errors import FormatError
from lastwords.launcher import fork_server, forks
from lastwords.launcher.forks import DEATHS_MAX, Ahead, ForkServer, begun_for
from lastwords.launcher.protocol import Fork, Forked, Made, read
from lastwords.liveness.parents import MEANT_FOR_RANKS
from lastwords.liveness.process_id import is_stopped
from tests import golden
from tests.integration.faults import is_gone
from tests.integration.harness import Cluster
from tests.integration.zygote import command_line, processes
from tests.launcher.forked import Forks, environment
from tests.launcher.test_heal import SCRIPT, STEPS, begun, check_equal, pids, run
from tests.launcher.test_launcher_ends import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

RANKS = 2
EMPTY = f"""
import sys, types
sys.path[0] = {str(Path(fork_server.__file__).parents[2])!r}
group = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: group.made, made=False)
sys.modules["torch.distributed"] = group
from lastwords.launcher import fork_server
fork_server._import_all = lambda: None
fork_server.serve()
"""
"""A fork server that begins at once, since it imports nothing; it makes no ranks."""

SPOILING = {
    "reads_rank": "import os\nrank = int(os.environ['RANK'])",
    "has_a_default": "import os\nrank = os.environ.get('LOCAL_RANK', '0')",
    "gets": "import os\nport = os.getenv('MASTER_PORT')",
    "asks": "import os\nalone = 'RANK' not in os.environ",
    "goes_on_without": "import os\ntry:\n    rank = os.environ['RANK']\nexcept Exception:\n    rank = 0",
    "raises": "raise ValueError('no samples')",
    "exits": "import sys\nsys.exit(3)",
    "ends": "import os\nos._exit(7)",
    "seeds": "import random\nrandom.seed(1)",
    "goes_away": "import os\nos.chdir('/')",
    "asks_how_often": "import os\nagain = os.environ.get('TORCHELASTIC_RESTART_COUNT')",
    "absent": None,
    "has_a_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=[100], daemon=True).start()",
    "has_a_named_thread": "import threading, time\nnamed = threading.Event()\ndef run():\n"
    "    __import__('pathlib').Path('/proc/thread-self/comm').write_text('cleaner')\n    named.set()\n"
    "    time.sleep(100)\nthreading.Thread(target=run, daemon=True).start()\nnamed.wait()",
    "has_a_process": "import subprocess\nchild = subprocess.Popen(['sleep', '100'])\n"
    "open(__file__ + '.child', 'w').write(str(child.pid))",
    "has_a_device": "import os\nos.readlink = lambda path: '/dev/nvidia0'",
    "has_a_group": "import sys\nsys.modules['torch.distributed'].made = True",
}
"""Modules that no rank can have in common with others."""

ONCE = "with open(__file__ + '.imports', 'a') as file:\n    file.write('once\\n')\n"
TIDY = ONCE + "import threading\nthread = threading.Thread(target=int)\nthread.start()\nthread.join()\n"


def count(module: Path) -> int:
    """How often it was imported."""
    return len(module.with_name(f"{module.name}.imports").read_text().splitlines())


RANK_1 = Fork(1, {}, ["train.py"], False, "", "", 1, "", 0, "", 0)


class Served:
    """A fork server, and why it has given up."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        preload: Sequence[str],
        path: Path,
        wanted: Sequence[Fork] = (),
        begun: Ahead | None = None,
    ) -> None:
        self.failures: list[str] = []
        self._selector = selector
        self.server = ForkServer(sys.executable, environment(OF_THE_JOB="yes"), selector, preload, str(path))
        self.server.failed = self.server.impossible = self.failures.append
        self.server.made = lambda pids, problem: self.failures.append(problem)
        self.server.start(begun)
        self.server.fork(wanted)
        while not self.failures and (wanted or not self.server._ready):
            for key, _ in selector.select(60):
                key.data()


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made


def test_modules_that_ranks_cannot_have_in_common_are_named_and_left_to_the_script(
    tmp_path: Path, selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forks, "BOOT", EMPTY)
    for name, text in {**SPOILING, "tidy": TIDY}.items():
        if text is not None:
            (tmp_path / f"{name}.py").write_text(text)
    served = Served(selector, [*SPOILING, "tidy"], tmp_path)
    served.server.end()
    assert served.failures == []
    assert served.server._preload == ["tidy"]
    assert count(tmp_path / "tidy.py") == 1
    assert is_gone(int((tmp_path / "has_a_process.py.child").read_text()))
    golden.says("\n".join(caplog.messages))


@pytest.mark.parametrize("boot", ["import os; os._exit(7)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_fork_server_that_dies_each_time_before_it_serves_is_given_up(
    tmp_path: Path,
    selector: selectors.BaseSelector,
    boot: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(forks, "BOOT", boot)
    (why,) = Served(selector, [], tmp_path, [RANK_1]).failures
    assert len(caplog.messages) == DEATHS_MAX - 1
    golden.says(why)


def test_a_fork_server_that_has_a_thread_of_its_own_makes_no_ranks(
    tmp_path: Path, selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a library in LD_PRELOAD: nothing is imported in vain."""
    thread = f"import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n{EMPTY}"
    monkeypatch.setattr(forks, "BOOT", thread)
    (tmp_path / "tidy.py").write_text(TIDY)
    served = Served(selector, ["tidy"], tmp_path, [RANK_1])
    golden.says(served.failures)
    assert not (tmp_path / "tidy.py.imports").exists()
    assert served.server.supervise() is None, "nor is another one started"


def test_where_there_is_no_memory_for_the_first_fork_none_is_tried_again(
    tmp_path: Path, selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with vm.overcommit_memory=2."""
    full = "import os\ndef fork():\n    raise OSError(12, 'Cannot allocate memory')\nos.fork = fork"
    monkeypatch.setattr(forks, "BOOT", f"{full}\n{EMPTY}")
    served = Served(selector, [], tmp_path, [RANK_1])
    golden.says(served.failures)
    assert (served.server.supervise(), served.server.pid) == (None, 0)


def test_where_there_is_no_descriptor_for_a_fork_that_is_said(
    tmp_path: Path, selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "BOOT", EMPTY)
    served = Served(selector, [], tmp_path)
    resource.prlimit(served.server.pid, resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    served.server.fork([RANK_1])
    while not served.failures:
        for key, _ in selector.select(60):
            key.data()
    assert served.failures == [str(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))]
    served.server.end()


SEES = """
import os, resource
with open(__file__ + ".seen", "a") as file:
    print(os.environ["OF_THE_JOB"], hash("text"), resource.getrlimit(resource.RLIMIT_NOFILE)[0], file=file)
"""


def test_one_that_has_begun_before_its_job_is_known_is_like_any_other(
    tmp_path: Path, selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "BOOT", EMPTY)
    (tmp_path / "sees.py").write_text(SEES)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
    try:
        with begun_for(["train.py"]) as begun:
            assert begun is not None
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))  # as a launcher of many ranks raises it
            served = Served(selector, ["sees"], tmp_path, begun=begun)
            assert served.server.pid == begun.process.pid
            served.server.end()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    Served(selector, ["sees"], tmp_path).server.end()
    first, second = (tmp_path / "sees.py.seen").read_text().splitlines()
    assert first == second
    assert first.split()[::2] == ["yes", str(soft)]


def test_one_that_nobody_takes_ends_with_its_launcher_and_who_needs_none_gets_none(
    tmp_path: Path, selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "BOOT", EMPTY)
    with begun_for(["train.py"]) as begun:
        assert begun is not None
        other = Served(selector, [], tmp_path, begun=dataclasses.replace(begun, python="another interpreter"))
        assert other.server.pid != begun.process.pid
        other.server.end()
    assert begun.process.returncode is not None
    with begun_for(["--no-python", "train.sh"]) as none:
        assert none is None


def test_what_a_preloaded_module_sets_and_opens_is_each_forks_and_what_it_draws_is_not() -> None:
    modules = {
        "sets": "import os\nos.environ['SET_BY_A_MODULE'] = 'yes'",
        "rolls": "import random\ndice = random.Random()",
        "writes": "file = open(__file__ + '.rows', 'w')",
        "draws": "import numpy, random, torch\ndef draw():\n"
        "    return random.random(), numpy.random.rand(), torch.rand(1).item()\nfirst = draw()",
    }
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        for name, text in modules.items():
            Path(directory, f"{name}.py").write_text(text)
        script = Path(directory, "script.py")
        script.write_text(
            "import os, sys, draws, writes\nwrites.file.write('1')\n"
            "print(os.environ.get('SET_BY_A_MODULE'), 'rolls' in sys.modules, *draws.first, *draws.draw())\n"
            "from lastwords.processor import departure\ndeparture._flush_files()\nos._exit(0)"
        )
        with Forks(Path(directory), preload=[*modules]) as forks:
            ranks = [forks.run(str(script)).out.split() for _ in range(2)]
        assert Path(directory, "writes.py.rows").read_text() == "11"
    said, drawn = [one[:5] for one in ranks], [number for one in ranks for number in one[5:]]
    assert said[0] == said[1], "it was imported once"
    assert said[0][:2] == ["yes", "False"]
    assert len({*said[0][2:], *drawn}) == 9


LIBRARIES = {
    "opens_a_channel": "import grpc\nchannel = grpc.insecure_channel('127.0.0.1:9')",
    "computes_in_parallel": "import torch\ntorch.set_num_threads(2)\ntorch.ones(1 << 20).sum()",
    "shares_a_lock": "import multiprocessing\nlock = multiprocessing.get_context('spawn').Lock()",
}
"""What starts gRPC's threads, libgomp's, and a resource tracker."""


def test_threads_of_grpc_and_of_libgomp_are_not_for_a_fork_server_and_a_resource_tracker_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        for name, text in LIBRARIES.items():
            Path(directory, f"{name}.py").write_text(text)
        script = Path(directory, "script.py")
        script.write_text(
            f"import sys\nprint([name in sys.modules for name in {[*LIBRARIES]}])\n"
            "import torch, opens_a_channel, shares_a_lock\nfrom multiprocessing import shared_memory\n"
            "with shares_a_lock.lock:\n    shared = shared_memory.SharedMemory(create=True, size=4096)\n"
            "shared.close()\nshared.unlink()\nprint(torch.ones(1 << 20).sum().item())"
        )
        with Forks(Path(directory), preload=[*LIBRARIES]) as served:
            done = served.run(str(script), threads=2)
            assert done.out == f"{[False, False, True]}\n{float(1 << 20)}\n", done
            assert served.server._preload == ["shares_a_lock"]
    said = "\n".join(caplog.messages)
    golden.says(re.sub(r"\d+ threads?( \(.*?\))?", "N threads", said))


def test_a_fork_server_that_is_stopped_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    with Forks.anywhere() as served:
        served.ready()
        os.kill(served.server.pid, signal.SIGSTOP)
        fork = Fork(1, environment(RANK="1"), [str(script)], False, "", "", 1, "", 0, "", 0)
        served.server.fork([fork])
        assert served.server.supervise() is not None
        assert not caplog.messages
        monkeypatch.setattr(forks, "HUNG_S", 0.0)
        old = served.server.pid
        served.server.supervise()
        while not served.processes:
            served.turn()
        assert served.server.supervise() is None
        assert served.processes[0].wait(60) == 0
        golden.says("\n".join(caplog.messages).replace(str(old), "PID"))


def test_a_fork_server_that_imports_for_long_is_named_and_one_that_is_stopped_meanwhile_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    with Forks.anywhere() as served:
        old = served.server.pid
        served.server.fork([Fork(1, environment(RANK="1"), [str(script)], False, "", "", 1, "", 0, "", 0)])
        with monkeypatch.context() as impatient:
            impatient.setattr(forks, "HUNG_S", 0.0)
            served.server.supervise()
            os.kill(old, signal.SIGSTOP)
            until(lambda: is_stopped(old), "it is stopped")
            served.server.supervise()
        while not served.processes:
            served.turn()
        assert served.processes[0].wait(60) == 0
        assert served.server.pid != old
        golden.says("\n".join(caplog.messages).replace(str(old), "PID"))


def test_signals_for_all_processes_of_a_job_are_not_for_a_fork_server_and_forks_have_none_of_that(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import signal\nprint({{str(signal.getsignal(one)) for one in {[*map(int, MEANT_FOR_RANKS)]}}})")
    with Forks.anywhere() as served:
        served.ready()
        pid = served.server.pid
        for number in MEANT_FOR_RANKS:
            os.kill(pid, number)
        done = served.run(str(script))
        assert served.server.pid == pid
        assert sorted(done.out.split("'")[1::2])[0] == str(int(signal.SIG_DFL)), done
        assert str(int(signal.SIG_IGN)) not in done.out.split("'")[1::2], done


def test_the_end_of_a_fork_server_is_not_that_of_the_ranks_it_has_forked_and_all_of_them_are_known(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(600)")
    with Forks.anywhere() as served:
        served.ready()
        fork = Fork(1, environment(RANK="1"), [str(script)], False, "", "", 1, "", 0, "", 0)
        served.server.fork([dataclasses.replace(fork, rank=rank) for rank in range(1, 4)])
        served.turn()  # one of them, maybe not yet in a session of its own
        served.server.end()
        served.server.end()
        assert served.processes
        assert {one.poll() for one in served.processes} == {None}
        for one in served.processes:
            os.kill(one.pid, signal.SIGTERM)  # also if it is not as far as to have its own handlers
        assert {one.wait(60) for one in served.processes} == {-signal.SIGTERM}
        assert not [one for one in processes() if str(script) in command_line(one)], (
            "nor is there one that nobody knows"
        )


LONG = {f"LONG_{number}": "\u00e9" * 60_000 for number in range(10)}
"""Which the system takes; in a message each byte is six."""


@pytest.mark.parametrize("begins", [True, False])
def test_what_is_too_long_to_be_said_to_a_fork_server_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selector: selectors.BaseSelector, begins: bool
) -> None:
    monkeypatch.setattr(forks, "BOOT", EMPTY)
    served = Served(selector, [], tmp_path)
    if begins:
        monkeypatch.setattr(served.server, "_environment", {**environment(), **LONG})
        os.kill(served.server.pid, signal.SIGKILL)
        while served.server.pid:
            for key, _ in selector.select(60):
                key.data()
        assert served.failures == []
    served.server.fork([dataclasses.replace(RANK_1, environment=LONG)])
    golden.says([re.sub(r"take \d+", "take MANY", one) for one in served.failures])
    assert (served.server.supervise(), served.server.pid) == (None, 0), "nothing is wanted any more"


def test_the_directory_of_a_ranks_output_is_made_anew_and_where_that_fails_it_writes_where_its_launcher_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, logs = tmp_path / "train.py", tmp_path / "logs"
    script.write_text("print('ran')")
    with Forks.anywhere() as served:
        served.ready()
        for file in (logs / "0" / "stdout.log", script / "stdout.log"):
            served.server.fork([Fork(1, environment(RANK="1"), [str(script)], False, str(file), "", 1, "", 0, "", 0)])
            served.turn()
            while not served.processes:
                served.turn()
            assert served.processes.pop().wait(60) == 0
    assert (logs / "0" / "stdout.log").read_text() == "ran\n"
    spoken = capfd.readouterr()
    assert spoken.out.count("ran\n") == 1
    golden.says(spoken.err)


def test_where_the_ends_of_children_are_ignored_a_launcher_hears_of_them_all_the_same() -> None:
    """A shell's `trap '' CHLD` is inherited, and the kernel collects whatever ends."""
    program = (
        "import signal, subprocess\nfrom lastwords.liveness.parents import take_in_orphans\n"
        "take_in_orphans()\nprint(subprocess.run(['sh', '-c', 'exit 7']).returncode)"
    )
    ignoring = (
        "import os, signal, sys\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"  # which not every shell does
        "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    )
    command = [sys.executable, "-c", ignoring, program]
    assert subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout == "7\n"


def test_a_fork_server_that_begins_where_they_are_ignored_waits_for_its_own_and_so_do_its_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is started before its launcher handles signals."""
    script = tmp_path / "train.py"
    script.write_text("import subprocess\nprint(subprocess.run(['sh', '-c', 'exit 7']).returncode)")
    monkeypatch.setattr(forks, "BOOT", f"import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); {forks.BOOT}")
    with Forks.anywhere() as served:
        pid = served.server.pid
        assert [served.run(str(script)).out for _ in range(2)] == ["7\n"] * 2
        assert served.server.pid == pid


def test_fork_servers_that_end_while_nobody_wants_a_fork_are_replaced_however_many(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    with Forks.anywhere() as served:
        for _ in range(DEATHS_MAX + 1):
            served.ready()
            os.kill(served.server.pid, signal.SIGKILL)
            while served.server._ready:
                served.turn()
        assert served.run(str(script)).out == "ran\n"
        assert not served.failures


@pytest.mark.parametrize(
    "breaks",
    [
        "raise OSError(116, 'Stale file handle')",
        "import sys, threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    ],
    ids=["ends", "has a thread"],
)
def test_one_that_cannot_be_replaced_is_tried_again_once_ranks_are_wanted_and_those_that_run_go_on(
    tmp_path: Path,
    breaks: str,
    selector: selectors.BaseSelector,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the file system of the interpreter is not there, say."""
    monkeypatch.setattr(forks, "BOOT", EMPTY)
    served = Served(selector, [], tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(forks, "BOOT", f"{breaks}\n{EMPTY}")
        os.kill(served.server.pid, signal.SIGKILL)
        while served.server.pid:
            for key, _ in selector.select(60):
                key.data()
    assert served.failures == [], "which would end the job"
    assert served.server.supervise() is None, "nor is one started again and again"
    golden.says(caplog.messages[-1])
    served.server.fork([RANK_1])
    assert served.server.pid
    served.server.end()


def test_a_fork_server_that_cannot_be_started_for_lack_of_descriptors_is_started_once_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    plain = subprocess.Popen

    def short(*of: Any, **more: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with Forks.anywhere() as served:
        served.ready()
        monkeypatch.setattr(subprocess, "Popen", short)
        os.kill(served.server.pid, signal.SIGKILL)
        while served.server.pid:
            served.turn()
        served.server.fork([Fork(1, environment(RANK="1"), [str(script)], False, "", "", 1, "", 0, "", 0)])
        assert served.server.supervise() is not None
        assert not served.failures
        monkeypatch.setattr(subprocess, "Popen", plain)
        assert served.server.supervise() is not None
        while not served.processes:
            served.turn()
        assert served.processes[0].wait(60) == 0
        monkeypatch.setattr(forks, "SHORT_S", 0.0)
        monkeypatch.setattr(subprocess, "Popen", short)
        served.server.fork([Fork(1, environment(RANK="1"), [str(script)], False, "", "", 1, "", 0, "", 0)])
        os.kill(served.server.pid, signal.SIGKILL)
        while not served.failures:
            served.turn()
        golden.says(served.failures[0])


@pytest.mark.parametrize("known", [True, False], ids=["known", "of another release"])
def test_a_module_that_keeps_the_rank_where_it_is_known_has_that_of_each_fork(
    known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module = "torchmetrics.utilities.prints"
    keeper = "rank_zero_only" if known else "only_on_rank_0"
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path = Path(directory, f"{module.replace('.', '/')}.py")
        path.parent.mkdir(parents=True)
        path.write_text(f"import os\ndef {keeper}(): pass\n{keeper}.rank = int(os.environ.get('LOCAL_RANK', 0))\n")
        script = Path(directory, "script.py")
        script.write_text(
            f"import sys\nprint({module!r} in sys.modules)\nfrom {module} import {keeper} as one\nprint(one.rank)"
        )
        with Forks(Path(directory), preload=[module]) as forks:
            for rank in ("3", "0"):
                assert forks.run(str(script), LOCAL_RANK=rank).out.split() == [str(known), rank]
    golden.says("\n".join(caplog.messages))


@pytest.mark.parametrize(
    "said", [{}, {"kind": "Spoilt"}, {"kind": "Forked", "pids": {"0": "x"}, "problem": "", "errno": 0}], ids=str
)
def test_what_is_nothing_that_a_fork_server_says_is_refused(said: dict[str, object]) -> None:
    with golden.raises(FormatError):
        read(said, Made | Forked)


# ---------------------------------------------------------------------- in a job


def fork_server_of(launcher_pid: int) -> int:
    """The one that serves; 0: none does."""
    found = [pid for pid, (parent, state) in processes().items() if parent == launcher_pid and state != "Z"]
    return next((pid for pid in found if "[lastwords fork server]" in command_line(pid)), 0)


def trained(directory: Path, rank: int) -> int:
    path = directory / f"trace-{rank}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def until_all_train(directory: Path, generations: int) -> list[int]:
    """All are in this one, and have ended steps from now on; their processes."""
    before = [trained(directory, rank) for rank in range(RANKS)]
    until(
        lambda: all(
            trained(directory, rank) > before[rank] and len(pids(directory, rank)) == generations
            for rank in range(RANKS)
        ),
        f"all ranks train in generation {generations}",
    )
    return [pids(directory, rank)[-1] for rank in range(RANKS)]


def test_ranks_train_whatever_becomes_of_the_fork_server_and_of_the_launcher(cluster: Cluster, tmp_path: Path) -> None:
    tidy = tmp_path / "a_tidy_module.py"
    tidy.write_text(TIDY)
    (tmp_path / "a_module_of_a_rank.py").write_text(SPOILING["reads_rank"] or "")
    job = cluster.start(
        tmp_path / "launched",
        module=SCRIPT,
        arguments=[str(tmp_path), "100000"],
        world_size=RANKS,
        launcher="healing",
        launcher_arguments=["--preload", "a_module_of_a_rank, a_tidy_module"],
        env=environment(PYTHONPATH=f"{environment()['PYTHONPATH']}:{tmp_path}", OMP_NUM_THREADS="1"),
    )

    def said(*about: object) -> list[str]:
        lines = (job.directory / "healing.err").read_text().splitlines()
        return [line for line in lines if any(str(one) in line for one in about)]

    try:
        first = until_all_train(tmp_path, 1)
        (launcher,) = {processes()[pid][0] for pid in first}
        golden.says(said("a_module_of_a_rank"))
        assert count(tidy) == 1

        server = fork_server_of(launcher)
        assert server
        os.kill(server, signal.SIGKILL)
        until(lambda: fork_server_of(launcher) not in (server, 0), "another fork server")
        assert until_all_train(tmp_path, 1) == first
        golden.says([line.replace(str(server), "PID") for line in said(f"(pid {server})")])

        os.kill(first[1], signal.SIGKILL)
        second = until_all_train(tmp_path, 2)
        assert {processes()[pid][0] for pid in second} == {launcher}
        golden.says([line.replace(str(first[1]), "PID") for line in said(f"(pid {first[1]})")])
        assert count(tidy) == 2, "once for each fork server"
        assert len({one["hash"] for rank in range(RANKS) for one in begun(tmp_path, rank)}) == 1

        server = fork_server_of(launcher)
        assert server
        os.kill(launcher, signal.SIGKILL)
        until(lambda: is_gone(server), "the fork server ends")
        assert until_all_train(tmp_path, 2) == second
        golden.says(sorted(said("launcher")))

        os.kill(second[1], signal.SIGKILL)
        until(lambda: all(map(is_gone, second)), "the survivors end")
        assert load.latest(tmp_path / "ckpt") is not None
    except AssertionError:
        sys.stderr.write(job.report())
        raise
    finally:
        job.close()


@pytest.mark.thorough
def test_ranks_that_cannot_be_forked_are_new_processes_and_are_healed(cluster: Cluster, tmp_path: Path) -> None:
    run(tmp_path / "whole", launcher="torchrun", ranks=RANKS, cluster=cluster)
    run(tmp_path / "healed", "1:5:bwd", "0:9:win", ranks=RANKS, python=["--no-python", sys.executable])
    check_equal(tmp_path / "healed", tmp_path / "whole", heals=2, ranks=RANKS)
    assert STEPS > 9
