"""Where a scheduler listens: real sockets on loopback addresses; only what names mean is the test's."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lastwords.errors import ConfigError
from lastwords.launcher import scheduler
from tests import golden
from tests.integration.harness import Port

ELSEWHERE = "192.0.2.1"
"""RFC 5737: no host has it."""


@pytest.fixture
def port() -> Iterator[int]:
    one = Port()
    yield one.number
    one.release()


@pytest.fixture
def means(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """In place of the resolver, for one name; without an address it is unknown."""
    really = socket.getaddrinfo

    def resolve(name: str, *addresses: str) -> None:
        def getaddrinfo(host: str, port: int, *args: Any, **more: Any) -> list[Any]:
            if host != name:
                return really(host, port, *args, **more)
            if not addresses:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    return resolve


def reached(host: str, port: int) -> list[str]:
    """At which addresses of this host somebody answers."""
    answers = []
    with contextlib.ExitStack() as stack:
        for server in scheduler.servers(host, port, 8):
            stack.enter_context(server)
        for one in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            with contextlib.suppress(ConnectionRefusedError):
                stack.enter_context(socket.create_connection((one, port), 10))
                answers.append(one)
    return answers


def test_a_scheduler_listens_at_the_address_that_it_was_given(port: int, caplog: pytest.LogCaptureFixture) -> None:
    assert reached("127.0.0.2", port) == ["127.0.0.2"]
    assert caplog.messages == []


def test_a_name_of_several_addresses_is_served_at_all_that_are_here(
    port: int, means: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    means("localhost", "127.0.0.1", ELSEWHERE, "127.0.0.3", "127.0.0.1")
    assert reached("localhost", port) == ["127.0.0.1", "127.0.0.3"]
    assert caplog.messages == []


@pytest.mark.parametrize("host", [ELSEWHERE, "scheduler.training.svc"])
def test_an_address_that_is_not_here_is_told_and_all_are_served(
    port: int, means: Callable[..., None], caplog: pytest.LogCaptureFixture, host: str
) -> None:
    means(host, ELSEWHERE)
    assert reached(host, port) == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    golden.says(caplog.messages)


def test_a_name_that_is_a_loopback_address_here_may_be_another_one_elsewhere(
    port: int, means: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Debian's /etc/hosts: `127.0.1.1 node-1`."""
    means("node-1", "127.0.1.1")
    assert reached("node-1", port) == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    golden.says(caplog.messages)


def test_a_name_that_nobody_knows_is_refused(port: int, means: Callable[..., None]) -> None:
    means("nohost.invalid")
    with golden.raises(ConfigError):
        scheduler.servers("nohost.invalid", port, 8)


def test_an_address_that_is_taken_gives_the_others_back(port: int, means: Callable[..., None]) -> None:
    means("localhost", "127.0.0.1", "127.0.0.2")
    with socket.create_server(("127.0.0.2", port)), pytest.raises(OSError) as refused:
        scheduler.servers("localhost", port, 8)
    assert refused.value.errno == errno.EADDRINUSE
    assert reached("localhost", port) == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_an_ipv6_address(port: int) -> None:
    with contextlib.ExitStack() as stack:
        for server in scheduler.servers("::1", port, 8):
            stack.enter_context(server)
        stack.enter_context(socket.create_connection(("::1", port), 10))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 10)
