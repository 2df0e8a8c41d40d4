"""What a session sends can be read by the rank at its other end, whatever the core repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from lastwords import codec
from lastwords.controller.sessions import PeerSession
from lastwords.vocabulary import Freeze, Order, Welcome

FREEZE = Freeze(1, 1, "rank 2 died")


class Context:
    """A stream that notes what is written to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def write(self, message: bytes) -> None:
        self.written.append(message)


def sent(push: Callable[[PeerSession], None]) -> list[tuple[tuple[int, ...], Order]]:
    """What the ranks at the other end read after `push(session)`."""

    async def run() -> tuple[Context, PeerSession]:
        context = Context()
        session = PeerSession(context)
        push(session)
        await session.drained()
        assert session.open
        return context, session

    context, _ = asyncio.run(run())
    return [addressed for raw in context.written for addressed in codec.orders_from_bytes(raw)]


def test_an_order_that_is_repeated_before_it_is_written_can_be_read() -> None:
    def push(session: PeerSession) -> None:
        for rank in (0, 1, 0, 0, 1):
            session.push(rank, FREEZE)
        session.push(1, Welcome(1))

    assert sent(push) == [((0, 1), FREEZE), ((1,), Welcome(1))]


def test_an_order_that_cannot_be_sent_costs_no_other_order() -> None:
    broken: Any = Freeze(1, 0, "incidents count from 1")

    def push(session: PeerSession) -> None:
        session.push(0, FREEZE)
        session.push(0, broken)
        session.push(1, FREEZE)

    assert sent(push) == [((0,), FREEZE), ((1,), FREEZE)]
