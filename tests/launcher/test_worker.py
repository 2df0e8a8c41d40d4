"""A worker and what its launcher may say at any time; the launcher is played by a thread."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import random
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lastwords import clock
from lastwords.controller import launch as controller_launch
from lastwords.errors import BusyError, ConfigError, IncompleteError, MismatchError, StorageError
from lastwords.launcher import stay, worker
from lastwords.launcher.events import Abandon, Begun, Waiting
from lastwords.launcher.link import Lines
from lastwords.launcher.protocol import OWN, ControllerAnswer, Dismissed, Entry, Order, to_launcher, to_worker
from lastwords.launcher.registry import Refused
from lastwords.launcher.roster import OWN_LEAVE_S
from lastwords.launcher.source_files import source_digests
from lastwords.launcher.stay import Stay
from lastwords.launcher.streams import Streams
from lastwords.launcher.versions import Ask
from lastwords.launcher.worker import keep
from lastwords.optim_wrapper.ddp import ddp_found
from lastwords.optim_wrapper.launch import world
from lastwords.optim_wrapper.launch.config import LAUNCHER
from lastwords.optim_wrapper.trainer import reentry
from lastwords.optim_wrapper.trainer.register import TFTRegister
from lastwords.processor.departure import EXIT_NOT_SAVED, EXIT_SAVED
from tests import golden
from tests.launcher.test_unblock import pair


@pytest.fixture
def launcher(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(short_path / "agent"))
    server.listen()
    monkeypatch.setenv(LAUNCHER, str(short_path / "agent"))
    for name, value in (("RANK", "0"), ("MASTER_PORT", "0"), ("TORCHELASTIC_RESTART_COUNT", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.setattr(worker, "warm_up", lambda: None)
    # What a worker sets for the whole process must not outlive the test.
    monkeypatch.setattr(controller_launch, "_waiting", None)
    monkeypatch.setattr(worker, "_workers", [])
    monkeypatch.setattr(reentry, "_leaver", None)
    monkeypatch.setattr(world, "_agreements", 0)
    yield server
    server.close()
    for one in worker._workers:
        with contextlib.suppress(OSError):  # the launcher has ended
            one._socket.shutdown(socket.SHUT_RDWR)
    join_listening()


def join_listening() -> None:
    """Of a worker whose launcher has ended, the thread that listens to it ends, too."""
    for one in threading.enumerate():
        if one.name == "lastwords-launcher":
            one.join(10)


def play(server: socket.socket, answers: list[bytes]) -> tuple[threading.Thread, list[dict[str, Any]]]:
    """Answers each `waiting` with the next of these, and hangs up after the last one."""
    heard: list[dict[str, Any]] = []

    def talk() -> None:
        link, _ = server.accept()
        lines, left = Lines(), [*answers]
        with link:
            while data := link.recv(1 << 20):
                for message in lines.feed(data):
                    heard.append(message)
                    if message["kind"] == "Waiting":
                        if not left:
                            return
                        if answer := left.pop(0):  # to an end that has closed not even nothing can be sent
                            link.sendall(answer)

    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    return thread, heard


def line(order: Order) -> bytes:
    return json.dumps(to_worker(order)).encode() + b"\n"


ENTER = line(Entry(0, 1, 0))
ABANDON = line(Abandon(OWN))


def run(main: Callable[[], None]) -> int | str | None:
    """How it ends when the launcher has hung up."""
    with pytest.raises(SystemExit) as ended:
        worker.run(main)
    return ended.value.code


def stuck(entries: list[int]) -> Callable[[], None]:
    """A `main` that waits for a rank that is dead, in C."""

    def main() -> None:
        entries.append(1)
        near, far = pair()
        fd = near.detach()
        try:
            os.read(fd, 1)
            raise RuntimeError("Connection closed by peer")
        finally:
            os.close(fd)
            far.close()

    return main


@pytest.mark.parametrize("together", [True, False])
def test_a_worker_that_is_told_to_leave_comes_out_however_soon(launcher: socket.socket, together: bool) -> None:
    entries: list[int] = []
    if together:
        thread, heard = play(launcher, [ENTER + ABANDON])
    else:
        thread, heard = play_in_turn(launcher, ABANDON, entries)
    assert run(stuck(entries)) == EXIT_NOT_SAVED
    thread.join(10)
    assert entries == [1]
    assert saved_steps(heard) == [0, 0]


def saved_steps(heard: list[dict[str, Any]]) -> list[int]:
    """That the worker has named each time that it waited."""
    return [message["step"] for message in heard if message["kind"] == "Waiting"]


def play_in_turn(
    server: socket.socket, abandon: bytes, entries: list[int]
) -> tuple[threading.Thread, list[dict[str, Any]]]:
    """`abandon` only after `main` has been entered."""
    heard: list[dict[str, Any]] = []

    def talk() -> None:
        link, _ = server.accept()
        lines = Lines()
        pause = threading.Event()
        with link:
            while len(saved_steps(heard)) < 2:
                before = len(heard)
                heard.extend(lines.feed(link.recv(1 << 20)))
                if saved_steps(heard[before:]) and not entries:
                    link.sendall(ENTER)
                    while not entries:
                        pause.wait(0.01)
                    link.sendall(abandon)

    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    return thread, heard


class Unenclosed:
    """A run whose script has no `with`. The incident of what leaves its loop saves step 7."""

    def __init__(self, newest: int = 5) -> None:
        self.held: list[str] = []
        self._newest = newest
        self.closed = 0

    def hold(self, error: BaseException) -> None:
        self.held.append(str(error))
        leaver = reentry.leaver()
        assert leaver is not None
        leaver.leave(7, (), None)
        raise SystemExit(EXIT_SAVED)

    def newest_step(self) -> int:
        return self._newest

    def close(self) -> None:
        self.closed += 1


def test_a_run_that_no_with_encloses_is_held_and_ended_when_its_main_is_left(launcher: socket.socket) -> None:
    one = Unenclosed()

    def main() -> None:
        leaver = reentry.leaver()
        assert leaver is not None
        leaver.started(one)
        raise RuntimeError("Connection closed by peer")

    thread, heard = play(launcher, [ENTER])
    assert run(main) == EXIT_SAVED
    thread.join(10)
    assert saved_steps(heard) == [0, 7]
    assert (one.held, one.closed) == (["Connection closed by peer"], 1)


@pytest.mark.parametrize(("trained", "saved", "known"), [(True, 0, 5), (True, 7, 7), (False, 0, 0)], ids=str)
def test_where_an_incident_saves_nothing_what_periodic_checkpoints_have_saved_is_known(
    launcher: socket.socket, trained: bool, saved: int, known: int
) -> None:
    def main() -> None:
        leaver = reentry.leaver()
        assert leaver is not None
        leaver.started(Unenclosed())
        if trained:
            leaver.begun(0, "")
        leaver.leave(saved, (), None)
        raise SystemExit(EXIT_NOT_SAVED)

    thread, heard = play(launcher, [ENTER])
    run(main)
    thread.join(10)
    assert saved_steps(heard) == [0, known]


@pytest.mark.parametrize(("told", "known"), [(line(Dismissed()), [0, 5]), (b"", [0])], ids=["ends", "stays"])
def test_a_launcher_that_ends_hears_what_is_saved_from_a_rank_whose_own_exception_ends_it(
    launcher: socket.socket, told: bytes, known: list[int]
) -> None:
    thread, heard = play(launcher, [told + ENTER, b""])

    def main() -> None:
        leaver = reentry.leaver()
        assert leaver is not None
        leaver.started(Unheld())
        raise KeyError(7)

    with pytest.raises(KeyError):
        worker.run(main)
    assert said_at_the_end(thread, heard) == [("KeyError: 7", False)]
    assert saved_steps(heard) == known


class Unheld(Unenclosed):
    """The same, and its user hears of the exception."""

    def hold(self, error: BaseException) -> None:
        pass


@pytest.mark.parametrize(
    ("incidents", "code"),
    [
        ([(True, 7)], EXIT_SAVED),
        ([(True, 7), (True, 0)], EXIT_NOT_SAVED),
        ([(True, 7), (False, 0)], EXIT_SAVED),
        ([(True, 7), (True, 0), (False, 0)], EXIT_NOT_SAVED),
        ([(True, 0), (True, 7)], EXIT_SAVED),
        ([(False, 0)], EXIT_NOT_SAVED),
    ],
    ids=str,
)
def test_the_exit_code_of_a_worker_without_a_launcher_tells_whether_what_it_has_trained_is_saved(
    launcher: socket.socket, incidents: list[tuple[bool, int]], code: int
) -> None:
    """Each one: whether the loop had begun, and the step that was saved. A periodic checkpoint is of step 5."""
    left = [*incidents]

    def main() -> None:
        trained, saved = left.pop(0)
        leaver = reentry.leaver()
        assert leaver is not None
        leaver.started(Unenclosed())
        if trained:
            leaver.begun(0, "")
        leaver.leave(saved, (), None)
        raise SystemExit(EXIT_NOT_SAVED)

    thread, _ = play(launcher, [ENTER] * len(incidents))
    assert run(main) == code
    thread.join(10)


def test_what_is_kept_is_made_once_however_often_main_is_entered_and_what_main_returns_is_dropped(
    launcher: socket.socket,
) -> None:
    seen: list[object] = []
    leave = stuck([])

    def main() -> int:
        seen.append(keep("data of this test", object))
        if len(seen) == 1:
            leave()
        return 5

    thread, heard = play(launcher, [ENTER + ABANDON, ENTER])
    assert worker.run(main) is None  # type: ignore[func-returns-value]
    assert saved_steps(heard) == [0, 0]
    first, again = seen
    assert first is again
    assert keep("other data of this test", object) is not first
    del thread


def test_a_worker_says_one_digest_of_the_users_code_and_the_files_only_where_they_are_asked_for(
    launcher: socket.socket,
) -> None:
    thread, heard = play(launcher, [line(Ask(OWN)) + ENTER + ABANDON])
    assert run(stuck([])) == EXIT_NOT_SAVED
    thread.join(10)
    first, again = (message["sources"] for message in heard if message["kind"] == "Waiting")
    (files,) = (message["files"] for message in heard if message["kind"] == "Sources")
    assert isinstance(first, str)
    assert first == again
    assert str(Path(__file__)) in files


def test_a_launcher_that_has_gone_ends_a_worker_that_waits(
    launcher: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    thread, _ = play(launcher, [])
    assert run(lambda: None) == EXIT_NOT_SAVED
    thread.join(10)
    golden.says(capfd.readouterr().err)


@pytest.mark.parametrize("listens", [False, True])
def test_a_worker_that_starts_when_its_launcher_has_gone_says_so_in_one_line(
    launcher: socket.socket, listens: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if listens:  # it goes between the connection and the first message
        connect = socket.socket.connect

        def connect_and_lose(link: socket.socket, path: str) -> None:
            connect(link, path)
            launcher.accept()[0].close()

        monkeypatch.setattr(socket.socket, "connect", connect_and_lose)
    else:
        launcher.close()
    assert run(lambda: None) == EXIT_NOT_SAVED
    golden.says(capfd.readouterr().err)


@pytest.mark.parametrize(
    "arguments", [(5, dict), ("b", 5), ("b", lambda path: path)], ids=["name", "value", "arguments"]
)
def test_what_cannot_be_kept_is_refused_with_what_to_do(arguments: tuple[Any, Any]) -> None:
    with golden.raises(ConfigError):
        keep(*arguments)


def refused(
    main: Any,
    capfd: pytest.CaptureFixture[str],
    code: int = worker.EXIT_REFUSED,
    heard: tuple[threading.Thread, list[dict[str, Any]]] | None = None,
) -> None:
    """In one line, which is the golden one but for the number of the line of this file.

    heard: the launcher hears the same line, and that it would come again.
    """
    with pytest.raises(SystemExit) as ended:
        worker.run(main)
    assert ended.value.code == code
    lines = [one for one in capfd.readouterr().err.splitlines() if one.startswith("lastwords: ")]
    assert len(lines) == 1, lines
    line = lines[0]
    golden.says(re.sub(r"(?<=\.py:)\d+", "_", line))
    if heard is not None:
        assert said_at_the_end(*heard) == [(line.removeprefix("lastwords: rank 0: "), True)]


def misuse(error: Exception) -> Callable[[], None]:
    """A `main` that lastwords refuses in one of its own modules, called from the user's."""

    def main() -> None:
        if isinstance(error, BusyError):
            raise error
        keep("data", 5)  # type: ignore[arg-type]

    return main


@pytest.mark.parametrize("started", ["lastwords run", "torchrun"])
@pytest.mark.parametrize("error", [ConfigError(""), BusyError("another scheduler runs")], ids=["config", "busy"])
def test_what_lastwords_refuses_in_main_is_one_line_with_the_users_own_place(
    launcher: socket.socket, started: str, error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    if started == "torchrun":
        monkeypatch.delenv(LAUNCHER)
    heard = None if started == "torchrun" else play(launcher, [ENTER])
    refused(misuse(error), capfd, 5 if isinstance(error, BusyError) else 2, heard)


def said_at_the_end(thread: threading.Thread, heard: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """What has left `lastwords.run`, as the launcher hears it."""
    worker._workers[0]._socket.shutdown(socket.SHUT_RDWR)  # as the end of the process would
    thread.join(10)
    return [(message["error"], message["lasting"]) for message in heard if message["kind"] == "Raised"]


def out_of_resume(error: Exception) -> None:
    """`tft.resume()`, which raises this."""

    def started(name: str) -> None:
        raise error

    TFTRegister.resume(SimpleNamespace(_started=started))  # type: ignore[arg-type]


def elsewhere(error: Exception) -> None:
    """A step that raises this."""
    raise error


@pytest.mark.parametrize(
    ("error", "place", "lasting"),
    [
        (ValueError("too small"), elsewhere, False),
        (MismatchError("another model"), out_of_resume, True),
        (IncompleteError("no checkpoint"), out_of_resume, True),
        (StorageError("a file system that hangs"), out_of_resume, False),
        (MismatchError("replicas have diverged"), elsewhere, False),
    ],
    ids=["own", "another model", "no checkpoint", "storage", "diverged"],
)
def test_an_error_keeps_its_traceback_and_the_launcher_hears_it_and_whether_it_would_come_again(
    launcher: socket.socket, error: Exception, place: Callable[[Exception], None], lasting: bool
) -> None:
    thread, heard = play(launcher, [ENTER])
    with pytest.raises(type(error)) as raised:
        worker.run(lambda: place(error))
    assert raised.value is error
    assert said_at_the_end(thread, heard) == [(f"{type(error).__name__}: {error}", lasting)]


def test_only_what_leaves_main_by_itself_is_told(launcher: socket.socket) -> None:
    thread, heard = play(launcher, [ENTER + ABANDON, ENTER])
    worker.run(stuck_once())
    assert said_at_the_end(thread, heard) == []


def test_a_launcher_that_ends_after_main_concerns_nobody(
    launcher: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    thread, heard = play(launcher, [ENTER])
    worker.run(lambda: None)
    said_at_the_end(thread, heard)
    join_listening()
    assert capfd.readouterr().err == ""


def stuck_once() -> Callable[[], None]:
    """A `main` whose first entry ends with the news of another rank's end."""
    leave, entries = stuck([]), []

    def main() -> None:
        entries.append(1)
        if len(entries) == 1:
            leave()

    return main


@pytest.mark.parametrize("main", [None, 5, lambda arguments: None], ids=["called", "number", "arguments"])
def test_what_is_no_main_is_refused_with_what_to_do(
    launcher: socket.socket, main: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    refused(main, capfd, heard=play(launcher, []))


def test_the_users_own_files_are_compared_and_installed_ones_are_not() -> None:
    found = source_digests()
    assert str(Path(__file__)) in found
    assert not any("site-packages" in path for path in found)


def test_a_process_group_from_before_run_is_refused(
    launcher: socket.socket, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker.dist, "is_initialized", lambda: True)
    refused(lambda: None, capfd, heard=play(launcher, []))


def test_the_answer_to_an_earlier_request_for_a_controller_is_not_taken_for_this_one(launcher: socket.socket) -> None:
    one = worker.Worker(worker._connected(os.environ[LAUNCHER]))
    link, _ = launcher.accept()
    one._asked = 6
    one._take(ControllerAnswer(6, 41, {"port": 1}))  # its stay in main was over by then

    def answer() -> None:
        link.recv(1 << 20)
        one._take(ControllerAnswer(7, 42, {"port": 2}))

    thread = threading.Thread(target=answer)
    thread.start()
    assert one._become_controller({}) == (42, {"port": 2})
    thread.join()
    link.close()


def test_two_threads_that_ask_for_a_controller_get_each_its_own(launcher: socket.socket) -> None:
    """A rank may still wait for one that was to follow when the next entry asks for its first one."""
    one = worker.Worker(worker._connected(os.environ[LAUNCHER]))
    link, _ = launcher.accept()
    found: dict[str, Any] = {}
    threads = {
        name: threading.Thread(target=lambda name=name: found.update({name: one._become_controller({})}))
        for name in ("older", "newer")
    }
    for thread in threads.values():
        thread.start()
        link.recv(1 << 20)  # it has asked
    for name, asked in (("newer", 2), ("older", 1)):
        one._take(ControllerAnswer(asked, 40 + asked))
        threads[name].join(10.0)
        assert found[name] == (40 + asked, {})
    link.close()


@pytest.mark.parametrize("dismissed", [False, True])
def test_a_launcher_that_was_killed_is_missed_and_one_that_ends_is_not(
    launcher: socket.socket, dismissed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    one = worker.Worker(worker._connected(os.environ[LAUNCHER]))
    link, _ = launcher.accept()
    if dismissed:
        link.sendall(line(Dismissed()))
    link.close()
    one._inside = True
    one._listen()
    assert ("rank 0" in capfd.readouterr().err) != dismissed


def test_a_second_training_in_one_process_is_refused(
    launcher: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    heard = play(launcher, [ENTER])
    worker.run(lambda: None)
    refused(lambda: None, capfd, heard=heard)


def test_what_is_done_beforehand_uses_no_device_no_hook_and_no_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("touched")

    monkeypatch.setattr(gc, "freeze", lambda: None)
    for module, name in ((torch.accelerator, "current_accelerator"), (torch.cuda, "_lazy_init")):
        monkeypatch.setattr(module, name, refuse)
    hooks = [torch.nn.modules.module.register_module_forward_hook(refuse)]
    hooks.append(register_optimizer_step_pre_hook(refuse))
    drawn = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    try:
        with torch.no_grad(), torch.device("meta"):
            worker.warm_up()
    finally:
        for hook in hooks:
            hook.remove()
    assert drawn == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_what_is_set_aside_beforehand_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: what `main` has made is freed once it is over."""
    monkeypatch.setattr(ddp_found, "_looked", False)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    worker.warm_up()

    def refuse() -> None:
        raise AssertionError("unfrozen")

    monkeypatch.setattr(gc, "unfreeze", refuse)
    ddp_found.known_ddps()


def test_every_main_begins_with_the_random_streams_of_a_new_process() -> None:
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    streams = Streams()
    first = [torch.rand(2).tolist(), random.random(), numpy.random.rand()]
    streams.put_back()
    assert [torch.rand(2).tolist(), random.random(), numpy.random.rand()] == first


class LateEvent(threading.Event):
    """Set after so many looks; the clock moves by these seconds with each."""

    def __init__(self, now_s: list[float], looks_s: list[float]) -> None:
        super().__init__()
        self._now_s, self._looks_s = now_s, looks_s

    def wait(self, timeout: float | None = None) -> bool:
        self._now_s[0] += self._looks_s.pop(0) if self._looks_s else 0.5
        return not self._looks_s


@pytest.mark.parametrize(("looks_s", "comes"), [([0.5, 60.0, 0.5, 0.5], True), ([0.5] * 60, False)])
def test_a_survivor_that_was_stopped_and_goes_on_has_its_time_to_leave(
    looks_s: list[float], comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(clock, "mono_s", lambda: now_s[0])
    assert clock.within_own_time(LateEvent(now_s, looks_s), OWN_LEAVE_S) is comes


@pytest.mark.parametrize("newest", [7, 4], ids=["it is there", "on another host"])
def test_a_main_that_does_not_go_on_where_it_was_saved_is_refused(newest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = pair()
    monkeypatch.setattr(stay.socket, "gethostname", lambda: "node-2")
    with near, far:
        one = Stay(near, goes_on_at=7)
        one.started(Unenclosed(newest=newest))
        with golden.raises(ConfigError):
            one.begun(4, "")
        one.begun(7, "")
        assert json.loads(far.recv(100)) == to_launcher(Begun(OWN, 7))
        one.begun(8, "late")
        assert json.loads(far.recv(100)) == to_launcher(Begun(OWN, 8, "late"))


def test_after_a_group_that_could_not_be_made_the_next_one_has_the_name_that_a_new_process_gives_it() -> None:
    """Ranks that have different names for it look for each other in vain."""
    near, far = pair()
    with near, far:
        one = Stay(near)
        with pytest.raises(RuntimeError):
            dist.init_process_group(
                "gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=datetime.timedelta(seconds=0.2)
            )
        one.end()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.group_name == "0"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("inside", [False, True])
def test_a_worker_that_is_refused_ends_with_the_reason_and_one_that_trains_saves_first(
    launcher: socket.socket, inside: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(worker.os, "kill", lambda pid, number: signals.append(number))
    why = "the scheduler at node-1:8118 speaks another version of this protocol: install the same version"
    if inside:
        one = worker.Worker(worker._connected(os.environ[LAUNCHER]))
        near, far = pair()
        with near, far:
            one._inside, one._stay = True, Stay(near)
            one._take(Refused(why))
        golden.says(capfd.readouterr().err)
    else:
        play(launcher, [line(Refused(why))])
        refused(lambda: None, capfd)
    assert signals == ([signal.SIGTERM] if inside else [])


def test_a_worker_that_hangs_after_its_launcher_was_told_to_end_does_not_wait_and_says_what_is_saved(
    launcher: socket.socket, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float | None] = []
    codes: list[int] = []
    monkeypatch.setattr(stay, "wait_out", lambda wait, seconds: bool(waits_s.append(seconds)))
    monkeypatch.setattr(stay.os, "_exit", codes.append)
    monkeypatch.setattr(stay.threads, "run", lambda call, name: call())
    monkeypatch.setattr(stay.Unblocker, "begin", lambda self: None)
    one = worker.Worker(worker._connected(os.environ[LAUNCHER]))
    near, far = pair()
    with near, far:
        one._stay = Stay(near)
        one._take(Dismissed())
        one._stay.leave(7, (), Path("/ckpt/logs/incidents.jsonl"))
        assert json.loads(far.recv(1 << 16)) == to_launcher(Waiting(OWN, 7, "/ckpt/logs/incidents.jsonl"))
    assert waits_s == [stay.UNWIND_S]
    assert codes == [EXIT_SAVED]
    golden.says(capfd.readouterr().err)


def test_a_launcher_that_is_not_understood_leaves_no_worker_waiting(
    launcher: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    play(launcher, [b'{"kind": "Entry", "generation": 1}\n'])
    assert run(lambda: None) == EXIT_NOT_SAVED
    golden.says("\n".join(caplog.messages))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_mistake_in_taking_an_order_leaves_no_worker_waiting(
    launcher: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistake(self: worker.Worker, order: Order) -> None:
        raise KeyError(7)

    monkeypatch.setattr(worker.Worker, "_take", mistake)
    play(launcher, [ENTER, ENTER])
    assert run(lambda: None) == EXIT_NOT_SAVED
    assert caplog.messages == [], "it is not the launcher's"


def test_a_worker_whose_stderr_is_dead_ends_as_any_other(
    launcher: socket.socket, close_stderr: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says why it ends before it does, and a closed terminal is often what ends it."""
    close_stderr()
    codes: list[int] = []
    signals: list[int] = []
    monkeypatch.setattr(stay.os, "_exit", codes.append)
    monkeypatch.setattr(stay, "wait_out", lambda wait, seconds: False)
    monkeypatch.setattr(worker.os, "kill", lambda pid, number: signals.append(number))
    assert worker._asked_to_stop(signal.SIGHUP, EXIT_SAVED).code == EXIT_SAVED
    assert worker._without_launcher().code == EXIT_NOT_SAVED
    one = worker.Worker(worker._connected(os.environ[LAUNCHER]))
    near, far = pair()
    with near, far:
        one._inside, one._stay = True, Stay(near)
        one._stop("the scheduler has given up")
        one._stay._end_if_here()
    assert signals == [signal.SIGTERM]
    assert codes == [EXIT_NOT_SAVED]
    with pytest.raises(SystemExit) as refusal:
        worker.run(5)  # type: ignore[arg-type]
    assert refusal.value.code == worker.EXIT_REFUSED
