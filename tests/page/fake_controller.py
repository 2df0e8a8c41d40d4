"""A controller that tells whatever it is told to tell, and counts how often it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

from lastwords import codec
from lastwords.state import ControllerState, OpenIncident, RankState
from lastwords.transport import grpc
from lastwords.vocabulary import Phase, ProcessId, Stand

LETTERS = (Phase.COMPUTING, Phase.READY, Phase.UPDATING, Phase.UPDATED)


class FakeController:
    """Answers State calls with `state`."""

    def __init__(self, state: ControllerState, port: int = 0) -> None:
        self.state = state
        self.asked = 0
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        prefix, _, name = codec.STATE_METHOD.rpartition("/")
        handler = grpc.unary_unary_rpc_method_handler(self._answer)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(prefix[1:], {name: handler}),))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    def _answer(self, _: bytes, __: Any) -> bytes:
        self.asked += 1
        return codec.state_to_bytes(self.state)

    @contextmanager
    def serving(self) -> Iterator[FakeController]:
        """Serves meanwhile."""
        self._server.start()
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        """Nobody answers any more."""
        self._server.stop(None).wait()


def rank_of(rank: int, step: int, phase: Phase = Phase.COMPUTING, *, per_host: int = 8, **more: Any) -> RankState:
    """One that trains. step: the newest that it has ended."""
    underway = step if phase in (Phase.COMPUTING, Phase.DONE) else step + 1
    process = ProcessId(f"{rank // per_host * 7919 + 4096:08x}", 4000 + rank, 77, "x")
    facts: dict[str, Any] = {"connected": True, "dead": False, "heard_s": 0.05 * (rank % 3), "work_s": 0.2, **more}
    return RankState(rank, process, Stand(phase, underway), **facts)


def state_of(
    ranks: int,
    step: int = 1000,
    *,
    seed: int = 0,
    stage: str = "watching",
    open_: OpenIncident | None = None,
    **more: Any,
) -> ControllerState:
    """A job in which everybody trains. more: fields of ControllerState."""
    found = tuple(rank_of(rank, step, LETTERS[(rank * 7 + seed * 3) // 5 % 4]) for rank in range(ranks))
    facts: dict[str, Any] = {"ranks": found, "incidents": "", "incident": int(open_ is not None), **more}
    return ControllerState("pretrain-7b", 1, ranks, 77, 12.5, stage, summary="", open=open_, **facts)
