"""Only sockets of collectives and of the store are shut: not the user's, nor what was there before."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, TCPStore

from lastwords import threads
from lastwords.errors import UnavailableError
from lastwords.launcher import unblock
from lastwords.launcher.unblock import Unblocker, open_sockets
from tests.shortage import no_descriptors, no_threads


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        return near, far


@pytest.fixture
def of_c() -> Iterator[tuple[int, int]]:
    """Descriptors of a connection that Python knows nothing of, as gloo's are."""
    near, far = (end.detach() for end in pair())
    yield near, far
    os.close(near)
    os.close(far)


def is_open(one: socket.socket) -> bool:
    one.settimeout(0.2)
    try:
        return one.recv(1) != b""
    except TimeoutError:
        return True


def shut(before: set[str], ports: set[int]) -> None:
    unblocker = Unblocker(before, ports)
    try:
        unblocker.begin()
    finally:
        unblocker.end()


def test_a_connection_that_python_does_not_know_is_shut(of_c: tuple[int, int]) -> None:
    others = {inode for fd, inode in open_sockets() if fd not in of_c}
    shut(others, set())
    assert os.read(of_c[0], 1) == b""


def test_a_thread_in_reserve_does_it_where_no_other_can_be_had(of_c: tuple[int, int]) -> None:
    others = {inode for fd, inode in open_sockets() if fd not in of_c}
    threads.reserve(1)
    with no_threads():
        shut(others, set())
    assert os.read(of_c[0], 1) == b""
    threads.release(1)
    with no_threads(), pytest.raises(UnavailableError):
        shut(others, set())  # and if there is none of those either, `end` does not wait for it


def test_sockets_are_shut_once_descriptors_are_there_again(
    of_c: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    unblocker = Unblocker({inode for fd, inode in open_sockets() if fd not in of_c}, set())
    tried, shut_once = threading.Semaphore(0), unblocker._shut

    def shut_and_tell() -> None:
        try:
            shut_once()
        finally:
            tried.release()

    monkeypatch.setattr(unblocker, "_shut", shut_and_tell)
    with no_descriptors():
        unblocker.begin()
        for _ in range(3):
            assert tried.acquire(timeout=30)
    assert os.read(of_c[0], 1) == b""
    unblocker.end()


def test_the_users_own_sockets_stay(put_aside: Callable[[], None]) -> None:
    others = {inode for _, inode in open_sockets()}
    near, far = pair()
    with near, far:
        put_aside()
        shut(others, set())
        assert is_open(near)
        assert is_open(far)


def test_what_was_there_before_stays(of_c: tuple[int, int]) -> None:
    shut({inode for _, inode in open_sockets()}, set())
    with socket.socket(fileno=os.dup(of_c[0])) as one:
        assert is_open(one)


def test_who_waits_for_a_key_of_the_store_waits_no_more() -> None:
    before = {inode for _, inode in open_sockets()}
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", master.port, is_master=False)
    unblocker = Unblocker(before, set())
    begin = threading.Timer(0.2, unblocker.begin)
    begin.start()
    with pytest.raises(DistNetworkError):
        store.wait(["what the dead one would have written"], timedelta(seconds=60))
    begin.join()
    unblocker.end()


def test_connections_of_a_port_that_is_named_stay(of_c: tuple[int, int]) -> None:
    others = {inode for fd, inode in open_sockets() if fd not in of_c}
    with socket.socket(fileno=os.dup(of_c[0])) as one:
        shut(others, {one.getpeername()[1]})
        assert is_open(one)


@pytest.mark.parametrize(("backend", "ended"), [("nccl", 1), ("cpu:gloo,cuda:nccl", 1), ("gloo", 0)])
def test_nccl_is_ended_by_torch_once_and_a_failure_of_that_stops_nothing(
    backend: str, ended: int, of_c: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fails() -> None:
        calls.append(backend)
        raise RuntimeError("no device")

    monkeypatch.setattr(unblock.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(unblock.dist, "get_backend", lambda: backend)
    monkeypatch.setattr(unblock, "abort_process_groups", fails)
    others = {inode for fd, inode in open_sockets() if fd not in of_c}
    shut(others, set())
    assert len(calls) == ended
    assert os.read(of_c[0], 1) == b""
