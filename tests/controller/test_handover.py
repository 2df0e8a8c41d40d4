"""Who holds an address: run files that can be believed, and what a newcomer does about each kind of holder."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastwords.controller import handover
from lastwords.controller.handover import RunFile, RunRecord, await_address, read_run_file, run_file_path
from lastwords.errors import ConfigError, UnavailableError, is_shortage
from lastwords.liveness import process_id
from tests import golden
from tests.shortage import no_descriptors

HOST = "127.0.0.1"


def record_of(pid: int, **changes: object) -> RunRecord:
    record = RunRecord(
        "127.0.0.1:30051", pid, process_id.start_ticks(pid) or 0, "digits", 2, "t0ken", "/ckpt/logs/c.log"
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends on SIGTERM, as an idle controller does."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not end on SIGTERM, as a controller in an incident."""
    code = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def held() -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        yield listener


@pytest.fixture
def free_port(held: socket.socket) -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def write(root: Path, port: int, record: RunRecord) -> Path:
    path = run_file_path(HOST, port, root=root)
    RunFile(path, record).update(stage=record.stage, live=record.live, progress=record.progress)
    return path


def test_a_run_file_is_private_and_says_what_was_written(tmp_path: Path) -> None:
    path = write(tmp_path, 30051, record_of(os.getpid(), stage="saving", live=3, progress=9))
    assert read_run_file(path) == record_of(os.getpid(), stage="saving", live=3, progress=9)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_run_file_is_whole_where_the_system_writes_it_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write_all(fd, data[:10]))
    path = write(tmp_path, 30051, record_of(os.getpid(), stage="saving", live=3, progress=9))
    assert read_run_file(path) == record_of(os.getpid(), stage="saving", live=3, progress=9)


def test_a_host_name_and_its_address_have_one_run_file(tmp_path: Path) -> None:
    names = {run_file_path(name, 30051, root=tmp_path).name for name in ("localhost", "127.0.0.1", "::1")}
    assert len(names) == 2


def test_a_run_file_of_a_newer_controller_is_left_alone(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    own = RunFile(run_file_path(HOST, 30051, root=tmp_path), record_of(os.getpid()))
    own.update(stage="watching", live=1, progress=0)
    path = write(tmp_path, 30051, record_of(sleeper.pid))
    own.remove()
    assert read_run_file(path) == record_of(sleeper.pid)
    RunFile(path, record_of(sleeper.pid)).remove()
    assert not path.exists()
    assert not path.parent.exists()


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", '{"pid": 1}',
        json.dumps({**dataclasses.asdict(record_of(os.getpid())), "pid": "1"}),
        json.dumps({**dataclasses.asdict(record_of(os.getpid())), "pid": -1}),
        json.dumps({**dataclasses.asdict(record_of(os.getpid())), "live": True}),
    ],
)  # fmt: skip
def test_a_run_file_that_makes_no_sense_is_no_run_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    assert read_run_file(path) is None


@pytest.mark.parametrize("content", [b"\xff", b"[" * 4000, b'{"pid": 1' + b"0" * 3000 + b"}"])
def test_bytes_that_are_no_run_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    assert read_run_file(path) is None


def test_controllers_that_run_are_listed_and_others_are_not(tmp_path: Path) -> None:
    assert handover.running_here(root=tmp_path) == []
    here = record_of(os.getpid())
    write(tmp_path, 30051, here)
    write(tmp_path, 30052, dataclasses.replace(here, start_ticks=1))
    handover.run_directory(root=tmp_path).joinpath("x.json").write_text("garbage")
    assert handover.running_here(root=tmp_path) == [here]


def test_run_files_of_killed_controllers_are_removed_and_others_stay(tmp_path: Path) -> None:
    running = write(tmp_path, 30051, record_of(os.getpid()))
    killed = write(tmp_path, 30052, dataclasses.replace(record_of(os.getpid()), start_ticks=1))
    handover.remove_dead_run_files(root=tmp_path)
    assert killed.exists(), "too young: a new controller may just be writing its own"
    handover.remove_dead_run_files(root=tmp_path, young_s=-1.0)
    assert running.exists()
    assert not killed.exists()
    handover.remove_dead_run_files(root=tmp_path / "nowhere")


def test_a_link_is_no_run_file(tmp_path: Path) -> None:
    path = write(tmp_path, 30051, record_of(os.getpid()))
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert read_run_file(link) is None


def test_a_directory_that_others_could_write_is_refused(tmp_path: Path) -> None:
    handover.run_directory(root=tmp_path).mkdir(mode=0o777)
    handover.run_directory(root=tmp_path).chmod(0o777)
    with pytest.raises(ConfigError, match="mode 0700"):
        write(tmp_path, 30051, record_of(os.getpid()))


# ------------------------------------------------------------------ taking over


class Clockwork:
    """Instead of sleeping: counts the naps, and lets something happen at a given one."""

    def __init__(self, at: int = -1, happen: Callable[[], object] = lambda: None) -> None:
        self.naps = 0
        self._at = at
        self._happen = happen

    def __call__(self, _seconds: float) -> None:
        self.naps += 1
        if self.naps == self._at:
            self._happen()
        assert self.naps < 1_000_000, "waits for ever"


def test_a_free_address_is_taken_at_once(tmp_path: Path, free_port: int) -> None:
    clockwork = Clockwork()
    await_address(HOST, free_port, root=tmp_path, sleep=clockwork)
    assert clockwork.naps == 0


def test_a_run_file_of_a_process_that_is_gone_stops_nobody(tmp_path: Path, free_port: int) -> None:
    write(tmp_path, free_port, dataclasses.replace(record_of(os.getpid()), start_ticks=1))
    clockwork = Clockwork()
    await_address(HOST, free_port, root=tmp_path, sleep=clockwork)
    assert clockwork.naps == 0


def test_something_else_on_the_port_is_named_with_a_remedy(tmp_path: Path, held: socket.socket) -> None:
    port = held.getsockname()[1]
    with golden.raises(ConfigError) as error:
        await_address(HOST, port, root=tmp_path, sleep=Clockwork())
    assert f"port {port} " in str(error.value)


def test_a_controller_that_just_closes_its_port_is_waited_for(tmp_path: Path, held: socket.socket) -> None:
    clockwork = Clockwork(at=3, happen=held.close)
    await_address(HOST, held.getsockname()[1], root=tmp_path, sleep=clockwork)
    assert clockwork.naps == 3


def test_an_idle_controller_is_asked_to_end_and_its_address_taken(
    tmp_path: Path, free_port: int, sleeper: subprocess.Popen[bytes]
) -> None:
    write(tmp_path, free_port, record_of(sleeper.pid, stage="registering", live=0))
    clockwork = Clockwork(at=1, happen=lambda: sleeper.wait(10))
    await_address(HOST, free_port, root=tmp_path, sleep=clockwork)
    assert clockwork.naps >= 1
    assert sleeper.returncode == -15


@pytest.mark.parametrize("stage", ["settling", "saving", "publishing", "exiting"])
def test_a_controller_in_an_incident_is_waited_for_even_while_ranks_are_alive(
    tmp_path: Path, free_port: int, busy: subprocess.Popen[bytes], stage: str
) -> None:
    def end() -> None:
        busy.kill()
        busy.wait(10)

    write(tmp_path, free_port, record_of(busy.pid, stage=stage, live=3))
    clockwork = Clockwork(at=5, happen=end)
    await_address(HOST, free_port, root=tmp_path, live_grace_s=0.0, sleep=clockwork)
    assert clockwork.naps == 5


def test_a_controller_with_living_ranks_keeps_its_address(
    tmp_path: Path, free_port: int, sleeper: subprocess.Popen[bytes]
) -> None:
    write(tmp_path, free_port, record_of(sleeper.pid, stage="watching", live=3))
    with golden.raises(ConfigError) as error:
        await_address(HOST, free_port, root=tmp_path, live_grace_s=0.0, sleep=Clockwork())
    assert f"process {sleeper.pid}" in str(error.value)


def test_a_controller_that_does_not_move_is_given_up(
    tmp_path: Path, free_port: int, busy: subprocess.Popen[bytes]
) -> None:
    write(tmp_path, free_port, record_of(busy.pid, stage="publishing"))
    with golden.raises(UnavailableError) as error:
        await_address(HOST, free_port, root=tmp_path, stall_s=0.05, sleep=Clockwork())
    assert f"kill -9 {busy.pid}" in str(error.value)


def test_an_address_of_another_host_is_refused() -> None:
    with golden.raises(ConfigError):
        handover.port_is_free("192.0.2.1", 30051)


def test_a_name_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="no-such-host"):
        handover.port_is_free("no-such-host.invalid", 30051)


def test_a_host_name_that_means_loopback_here_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 30051))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    handover.resolve("node-3", 30051)
    golden.says(caplog.messages)
    caplog.clear()
    handover.resolve("localhost", 30051)
    assert not caplog.text


def test_an_address_of_a_kind_that_the_kernel_lacks_is_no_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_ipv6(*_: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "socket", without_ipv6)
    with golden.raises(ConfigError):
        handover.port_is_free("::1", 30051)


def test_to_look_for_a_port_without_descriptors_is_a_shortage() -> None:
    with golden.raises(UnavailableError) as caught, no_descriptors():
        handover.port_is_free(HOST, 1)
    assert is_shortage(caught.value)
