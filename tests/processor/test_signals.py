"""The guard's rules, with signals that this process sends to itself. Other processes are in tests/integration."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import signal
import socket
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastwords.errors import UnavailableError, is_shortage
from lastwords.processor.signals import SignalGuard, _address
from tests import golden
from tests.shortage import no_descriptors

WAIT_S = 20.0
UNHANDLED = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2, signal.SIGXCPU)
OTHERS = (signal.SIGCHLD, signal.SIGUSR1, signal.SIGALRM, *UNHANDLED)
TAKEN = (signal.SIGINT, signal.SIGTERM, *OTHERS)


class Reports:
    """Collects what the guard's thread reports."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []
        self._condition = threading.Condition()

    def __call__(self, number: int) -> None:
        with self._condition:
            self.seen.append((number, threading.current_thread().name))
            self._condition.notify_all()

    def wait(self, count: int) -> list[int]:
        with self._condition:
            assert self._condition.wait_for(lambda: len(self.seen) >= count, WAIT_S), self.seen
            return [number for number, _ in self.seen]


class Calls:
    """A handler of somebody else."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, number: int, frame: types.FrameType | None) -> None:
        self.numbers.append(number)


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in TAKEN}
    fd = signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.set_wakeup_fd(fd)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def guard(reports: Reports) -> Iterator[SignalGuard]:
    made = SignalGuard(reports)
    made.install()
    yield made
    made.uninstall()


@contextlib.contextmanager
def update(guard: SignalGuard) -> Iterator[None]:
    guard.begin_update()
    try:
        yield
    finally:
        guard.end_update()


# --------------------------------------------------------------------------- stop signals


def test_sigterm_is_reported_once_from_the_guards_own_thread(guard: SignalGuard, reports: Reports) -> None:
    signal.raise_signal(signal.SIGTERM)
    assert reports.wait(1) == [signal.SIGTERM]
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert reports.wait(2) == [signal.SIGTERM, signal.SIGINT]
    assert {name for _, name in reports.seen} == {"lastwords-signals"}


@pytest.mark.parametrize("number", UNHANDLED)
def test_a_signal_that_would_end_the_process_is_reported_like_sigterm(
    guard: SignalGuard, reports: Reports, number: signal.Signals
) -> None:
    for _ in range(2):
        signal.raise_signal(number)
    assert guard.deferring
    signal.raise_signal(signal.SIGTERM)
    assert reports.wait(2) == [number, signal.SIGTERM]
    assert {name for _, name in reports.seen} == {"lastwords-signals"}
    guard.hand_back()
    assert _address(number) == signal.SIG_DFL


@pytest.mark.parametrize("number", UNHANDLED)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_script_is_called_in_place_of_a_report(
    reports: Reports, number: signal.Signals, when: str
) -> None:
    theirs = Calls()
    guard = SignalGuard(reports)
    if when == "before":
        signal.signal(number, theirs)
    guard.install()
    signal.signal(number, theirs)
    signal.raise_signal(number)
    guard.refresh()
    signal.raise_signal(number)
    signal.raise_signal(signal.SIGTERM)
    assert reports.wait(1) == [signal.SIGTERM]
    assert theirs.numbers == [number] * 2
    guard.uninstall()
    assert signal.getsignal(number) is theirs


def test_a_handler_that_hands_a_signal_on_to_what_it_found_asks_to_stop(guard: SignalGuard, reports: Reports) -> None:
    found: Any = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, lambda number, frame: found(number, frame))
    guard.refresh()
    signal.raise_signal(signal.SIGHUP)
    assert reports.wait(1) == [signal.SIGHUP]


def test_a_signal_whose_handler_the_script_has_removed_is_reported(guard: SignalGuard, reports: Reports) -> None:
    signal.signal(signal.SIGHUP, Calls())
    guard.refresh()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    guard.refresh()
    signal.raise_signal(signal.SIGHUP)
    assert reports.wait(1) == [signal.SIGHUP]


def test_the_first_sigint_only_reports_and_the_second_interrupts(guard: SignalGuard, reports: Reports) -> None:
    signal.raise_signal(signal.SIGINT)
    assert reports.wait(1) == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_the_second_sigint_waits_for_the_update_and_the_third_does_not(guard: SignalGuard) -> None:
    with update(guard):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert guard._pending
        guard.run_deferred()
    with pytest.raises(KeyboardInterrupt):
        guard.run_deferred()
    with pytest.raises(KeyboardInterrupt), update(guard):
        signal.raise_signal(signal.SIGINT)


def test_a_second_sigint_is_heard_in_an_incident_too(guard: SignalGuard) -> None:
    guard.begin_incident()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, *UNHANDLED])
def test_a_stop_signal_that_is_ignored_stays_ignored(
    reports: Reports, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    signal.signal(number, signal.SIG_IGN)
    guard = SignalGuard(reports)
    guard.install()
    assert signal.getsignal(number) is signal.SIG_IGN
    signal.raise_signal(number)
    signal.raise_signal(signal.SIGTERM)
    assert reports.wait(1) == [signal.SIGTERM]
    assert not caplog.messages
    guard.uninstall()
    assert signal.getsignal(number) is signal.SIG_IGN


def test_a_stop_signals_handler_that_was_set_later_is_taken_back(guard: SignalGuard, reports: Reports) -> None:
    theirs = Calls()
    signal.signal(signal.SIGTERM, theirs)
    with update(guard):
        signal.raise_signal(signal.SIGTERM)
    assert reports.wait(1) == [signal.SIGTERM]
    assert theirs.numbers == []
    guard.uninstall()
    assert signal.getsignal(signal.SIGTERM) is theirs


# --------------------------------------------------------------------------- handlers of others


def raise_in_main(number: int, frame: types.FrameType | None) -> None:
    """As torch's handler does when a data-loader worker has died."""
    raise RuntimeError("DataLoader worker is killed by signal")


def interrupted_update(halves: list[int], number: signal.Signals = signal.SIGCHLD) -> None:
    for half in (1, 2):
        halves.append(half)
        signal.raise_signal(number)


def test_a_handler_that_raises_would_tear_an_update() -> None:
    # Negative control for everything below.
    signal.signal(signal.SIGCHLD, raise_in_main)
    halves: list[int] = []
    with pytest.raises(RuntimeError):
        interrupted_update(halves)
    assert halves == [1]


@pytest.mark.parametrize("number", OTHERS)
def test_a_handler_set_after_the_guard_waits_for_the_end_of_the_update(
    guard: SignalGuard, number: signal.Signals
) -> None:
    """torch's for SIGCHLD, a user's own for what a scheduler sends to all ranks before a time limit."""
    signal.signal(number, raise_in_main)
    halves: list[int] = []
    with update(guard):
        interrupted_update(halves, number)
    assert halves == [1, 2]
    assert guard._pending
    with pytest.raises(RuntimeError, match="DataLoader"):
        guard.run_deferred()
    assert not guard._pending
    guard.run_deferred()


def test_outside_an_update_a_handler_runs_at_once(guard: SignalGuard) -> None:
    signal.signal(signal.SIGCHLD, raise_in_main)
    guard.refresh()
    with pytest.raises(RuntimeError):
        signal.raise_signal(signal.SIGCHLD)
    assert not guard._pending


def test_in_an_incident_a_handler_waits_until_it_was_a_false_alarm(guard: SignalGuard) -> None:
    theirs = Calls()
    signal.signal(signal.SIGCHLD, theirs)
    guard.refresh()
    guard.begin_incident()
    assert guard.deferring
    signal.raise_signal(signal.SIGCHLD)
    guard.run_deferred()
    assert theirs.numbers == []
    guard.end_incident()
    guard.run_deferred()
    assert theirs.numbers == [signal.SIGCHLD]


def test_once_a_stop_was_asked_for_dead_children_are_nothing_new(guard: SignalGuard) -> None:
    # A launcher stops trainer and data-loader workers together.
    signal.signal(signal.SIGCHLD, raise_in_main)
    guard.refresh()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGCHLD)
    guard.run_deferred()
    assert guard._pending


def test_a_handler_that_calls_the_one_before_it_does_not_run_in_circles(guard: SignalGuard) -> None:
    # torch's handler does: it remembers the handler that it found, which is the guard's.
    theirs = Calls()
    found: Any = signal.getsignal(signal.SIGCHLD)

    def chained(number: int, frame: types.FrameType | None) -> None:
        theirs(number, frame)
        if callable(found):
            found(number, frame)

    signal.signal(signal.SIGCHLD, chained)
    for _ in range(3):
        guard.refresh()
    signal.raise_signal(signal.SIGCHLD)
    with update(guard):
        signal.raise_signal(signal.SIGCHLD)
        signal.raise_signal(signal.SIGCHLD)
    guard.run_deferred()
    assert theirs.numbers == [signal.SIGCHLD] * 2  # several of one kind are one, as for the kernel
    guard.uninstall()
    signal.raise_signal(signal.SIGCHLD)
    assert theirs.numbers == [signal.SIGCHLD] * 3


def test_other_signals_can_be_deferred_as_well(reports: Reports) -> None:
    theirs = Calls()
    before = signal.signal(signal.SIGUSR1, theirs)
    guard = SignalGuard(reports)
    guard.install()
    with update(guard):
        signal.raise_signal(signal.SIGUSR1)
        assert theirs.numbers == []
    guard.run_deferred()
    assert theirs.numbers == [signal.SIGUSR1]
    guard.uninstall()
    assert signal.getsignal(signal.SIGUSR1) is theirs
    signal.signal(signal.SIGUSR1, before)


# --------------------------------------------------------------------------- taking and giving back


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, Calls()])
def test_everything_is_as_before_after_the_guard(reports: Reports, before: Any) -> None:
    for number in TAKEN:
        signal.signal(number, before)
    guard = SignalGuard(reports)
    for _ in range(2):
        guard.install()
        guard.install()
        guard.refresh()
        guard.uninstall()
        guard.uninstall()
    assert [signal.getsignal(number) for number in TAKEN] == [before] * len(TAKEN)
    assert signal.set_wakeup_fd(-1) == -1
    assert "lastwords-signals" not in [thread.name for thread in threading.enumerate()]


def test_the_guard_s_thread_ends_though_a_child_holds_copies_of_its_descriptors(guard: SignalGuard) -> None:
    """One that was forked without Python's knowledge; a loader's persistent workers live as long as their loader."""
    write_end = guard._write_end
    assert write_end is not None
    with socket.socket(fileno=os.dup(write_end.fileno())):
        guard.uninstall()
        assert "lastwords-signals" not in [thread.name for thread in threading.enumerate()]


def test_a_forked_child_keeps_no_descriptor_of_the_guard(guard: SignalGuard) -> None:
    ends = [end.fileno() for end in (guard._read_end, guard._write_end) if end is not None]
    assert len(ends) == 2
    child = os.fork()
    if not child:
        kept = [fd for fd in ends if os.path.exists(f"/proc/self/fd/{fd}")]
        os._exit(len(kept))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_handler_over_ours_stays_and_passes_through(guard: SignalGuard, reports: Reports) -> None:
    ours: Any = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda number, frame: ours(number, frame))
    guard.uninstall()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert reports.seen == []


def test_an_earlier_wakeup_fd_still_gets_every_byte_and_is_put_back(reports: Reports) -> None:
    inner, outer = socket.socketpair()
    outer.setblocking(False)
    inner.settimeout(WAIT_S)
    signal.set_wakeup_fd(outer.fileno())
    signal.signal(signal.SIGUSR1, Calls())
    guard = SignalGuard(reports)
    guard.install()
    sent = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    for number in sent:
        signal.raise_signal(number)
    received = b"".join(inner.recv(1) for _ in sent)
    assert received == bytes(sent)
    assert reports.wait(2) == [signal.SIGTERM, signal.SIGHUP]
    guard.uninstall()
    assert signal.set_wakeup_fd(-1) == outer.fileno()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    inner.close()
    outer.close()


def test_a_stop_is_reported_although_somebody_took_the_wakeup_fd(guard: SignalGuard, reports: Reports) -> None:
    inner, outer = socket.socketpair()
    outer.setblocking(False)
    signal.set_wakeup_fd(outer.fileno())
    signal.raise_signal(signal.SIGTERM)
    assert reports.wait(1) == [signal.SIGTERM]
    guard.uninstall()
    assert signal.set_wakeup_fd(-1) == outer.fileno()  # it is theirs, and stays
    inner.close()
    outer.close()


def test_outside_the_main_thread_it_says_why_it_does_nothing(
    reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    before = [signal.getsignal(number) for number in TAKEN]
    guard = SignalGuard(reports)
    thread = threading.Thread(target=guard.install)
    thread.start()
    thread.join()
    golden.says("\n".join(caplog.messages))
    assert [signal.getsignal(number) for number in TAKEN] == before
    with update(guard):  # harmless
        pass
    guard.run_deferred()
    guard.uninstall()


def test_a_report_that_fails_does_not_end_the_guards_thread(caplog: pytest.LogCaptureFixture) -> None:
    reports = Reports()

    def fail_first(number: int) -> None:
        reports(number)
        if len(reports.seen) == 1:
            raise OSError("the session is gone")

    guard = SignalGuard(fail_first)
    guard.install()
    signal.raise_signal(signal.SIGTERM)
    reports.wait(1)
    signal.raise_signal(signal.SIGINT)
    assert reports.wait(2) == [signal.SIGTERM, signal.SIGINT]
    guard.uninstall()
    golden.says(caplog.messages)


def test_a_guard_that_is_not_installed_costs_nothing_and_takes_nothing() -> None:
    guard = SignalGuard(Reports())
    guard.refresh()
    guard.begin_update()
    guard.end_update()
    assert not guard.deferring
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert os.getpid() == guard._pid


def test_a_signal_that_is_passed_on_runs_the_handler_that_was_there(reports: Reports) -> None:
    theirs = Calls()
    signal.signal(signal.SIGTERM, theirs)
    guard = SignalGuard(reports)
    guard.install()
    for count in (1, 2):
        signal.raise_signal(signal.SIGTERM)
        assert reports.wait(count) == [signal.SIGTERM] * count
        assert len(theirs.numbers) == count - 1, "only when nobody is there who could save"
        guard.pass_on(signal.SIGTERM)
        assert theirs.numbers == [signal.SIGTERM] * count
        assert not guard.deferring
    guard.uninstall()


def test_signals_that_are_handed_back_run_the_handlers_that_were_there_every_time(reports: Reports) -> None:
    """Of a rank that hangs after its last step, when the job is over: it has to be possible to end it."""
    theirs = Calls()
    signal.signal(signal.SIGTERM, theirs)
    guard = SignalGuard(reports)
    guard.install()
    signal.raise_signal(signal.SIGTERM)
    reports.wait(1)
    guard.begin_incident()
    guard.hand_back()
    for count in (1, 2, 3):
        signal.raise_signal(signal.SIGTERM)
        assert theirs.numbers == [signal.SIGTERM] * count
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    guard.uninstall()


def test_what_has_no_python_handler_is_left_alone(
    guard: SignalGuard, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its default may be to end the process, and a handler in C (faulthandler's) cannot raise."""
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    with (tmp_path / "stacks").open("w+") as stacks:
        faulthandler.register(signal.SIGUSR2, stacks, all_threads=False)
        try:
            guard.refresh()
            signal.raise_signal(signal.SIGUSR2)
            assert "test_signals.py" in (tmp_path / "stacks").read_text()
            guard.uninstall()
            signal.raise_signal(signal.SIGUSR2)
            assert (tmp_path / "stacks").read_text().count("most recent call first") == 2
        finally:
            faulthandler.unregister(signal.SIGUSR2)
    assert not caplog.messages


def test_a_stop_signal_for_which_faulthandler_writes_stacks_is_left_to_it(
    tmp_path: Path, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    with (tmp_path / "stacks").open("w+") as stacks:
        faulthandler.register(signal.SIGQUIT, stacks, all_threads=False)
        try:
            guard = SignalGuard(reports)
            guard.install()
            with update(guard):
                signal.raise_signal(signal.SIGQUIT)
            signal.raise_signal(signal.SIGTERM)
            assert reports.wait(1) == [signal.SIGTERM]
            guard.uninstall()
            signal.raise_signal(signal.SIGQUIT)
            assert (tmp_path / "stacks").read_text().count("most recent call first") == 2
        finally:
            faulthandler.unregister(signal.SIGQUIT)
    golden.says(caplog.messages)


@contextlib.contextmanager
def asked() -> Iterator[Reports]:
    """What a guard that may take SIGUSR1 is asked for."""
    asks = Reports()
    guard = SignalGuard(Reports(), on_ask=lambda: asks(signal.SIGUSR1))
    guard.install()
    yield asks
    guard.uninstall()


def test_a_signal_that_nobody_handles_asks_for_a_checkpoint() -> None:
    with asked() as asks:
        for count in (1, 2):
            signal.raise_signal(signal.SIGUSR1)
            assert asks.wait(count) == [signal.SIGUSR1] * count
        assert asks.seen[0][1] == "lastwords-signals"
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_script_that_handles_it_is_not_taken_at_its_word(when: str) -> None:
    theirs = Calls()
    with contextlib.ExitStack() as stack:
        if when == "before":
            signal.signal(signal.SIGUSR1, theirs)
        asks = stack.enter_context(asked())
        signal.signal(signal.SIGUSR1, theirs)
        signal.raise_signal(signal.SIGUSR1)
        assert theirs.numbers == [signal.SIGUSR1]
    assert asks.seen == []
    assert signal.getsignal(signal.SIGUSR1) is theirs


def test_a_handler_in_c_is_kept(tmp_path: Path) -> None:
    with (tmp_path / "stacks").open("w+") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
        try:
            with asked() as asks:
                signal.raise_signal(signal.SIGUSR1)
                assert "test_signals.py" in (tmp_path / "stacks").read_text()
            assert asks.seen == []
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def test_a_ctrl_c_that_is_passed_on_interrupts_at_once(guard: SignalGuard, reports: Reports) -> None:
    signal.raise_signal(signal.SIGINT)
    reports.wait(1)
    with pytest.raises(KeyboardInterrupt):
        guard.pass_on(signal.SIGINT)


def test_a_guard_to_whom_sockets_are_denied_takes_nothing_and_says_so(
    reports: Reports, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied() -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(socket, "socketpair", denied)
    guard = SignalGuard(reports)
    guard.install()
    golden.says(caplog.messages)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    guard.uninstall()


def test_a_guard_without_descriptors_is_a_shortage_and_takes_nothing(reports: Reports) -> None:
    guard = SignalGuard(reports)
    with golden.raises(UnavailableError) as caught, no_descriptors():
        guard.install()
    assert is_shortage(caught.value)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    guard.install()
    guard.uninstall()
