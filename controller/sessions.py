"""The gRPC side of the controller: who is connected, what they say, what is said to them.

Everything runs in one asyncio loop. A session carries the ranks that said Hello in it; which session a rank's orders
go to is decided by the owner (`controller.server`), since only the core knows whether a Hello is accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import resource
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from lastwords import codec
from lastwords._pb import lastwords_pb2 as pb
from lastwords.errors import ProtocolError
from lastwords.transport import grpc
from lastwords.vocabulary import Order

if TYPE_CHECKING:
    from lastwords.controller.server import ControllerShell

_log = logging.getLogger(__name__)

OUTBOX_ORDERS_MAX = 4096
"""A session that leaves so many orders unread is ended: 8 ranks owe a handful each in an incident."""

MALFORMED_MAX = 16
"""One bad message is dropped, since ending the session would start an incident; a stream of them is not a peer."""

REFUSALS_LOGGED = 20
"""Somebody who tries tokens must not fill the disk: after so many, every hundredth is logged."""

FILES_RESERVED = 512
"""Descriptors that no connection gets: for the host's watch, for reading files back, for logs."""

_encoded = functools.lru_cache(maxsize=256)(codec.order_to_pb)


def _addressed(ranks: list[int], order: Order) -> list[pb.AddressedOrder]:
    """The order as it travels; none if the receiver would refuse it, and with it all that travels in its company."""
    try:
        return [codec.addressed_to_pb(ranks, _encoded(order))]
    except ProtocolError as error:
        _log.error("an order for ranks %s cannot be sent and is dropped: %s", ranks, error)  # our own mistake
        return []


def connections_max(world_size: int) -> int:
    """How many connections this process may hold, whoever opens them; said if that is less than the job needs."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files_max = 1 << 20 if files_max == resource.RLIM_INFINITY else files_max
    room = max(files_max - FILES_RESERVED, files_max // 2)
    if room < world_size:
        _log.warning(
            "this process may open %d files, which leaves room for %d connections: too few for %d ranks; raise the "
            "limit (ulimit -n) where rank ctrl_rank_id is started",
            files_max,
            room,
            world_size,
        )
    return room


class PeerSession:
    """One open session. Loop's thread only."""

    def __init__(self, context: Any) -> None:
        self.peer: str = context.peer()
        self.ranks: set[int] = set()
        self.open = True
        self.strays = 0  # reports of ranks that are not accepted in this session
        self._cancelled = False
        self._context = context
        self._orders: list[tuple[list[int], Order]] = []
        self._writer: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None

    def push(self, rank: int, order: Order) -> None:
        """Send an order as soon as the transport takes it; ranks that get the same order share one copy."""
        if not self.open:
            return
        if self._orders and self._orders[-1][1] == order:
            if rank not in self._orders[-1][0]:  # said again before it was written: once is enough
                self._orders[-1][0].append(rank)
        else:
            self._orders.append(([rank], order))
        if len(self._orders) > OUTBOX_ORDERS_MAX:
            _log.error("%s (ranks %s) does not read its orders; its session is closed", self, sorted(self.ranks))
            self.cancel()
        elif self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())

    def cancel(self) -> None:
        """End the session without waiting for anything."""
        self.open = False
        self._cancelled = True
        self._orders.clear()
        if self._reader is not None:
            self._reader.cancel()

    async def run(self, read: Coroutine[Any, Any, None]) -> bool:
        """Run the reader; False if `cancel` ended it."""
        self._reader = asyncio.get_running_loop().create_task(read)
        try:
            await self._reader
        except asyncio.CancelledError:
            if not self._cancelled:
                raise  # the stream broke, or the server stops
            return False
        return True

    async def drained(self) -> None:
        """Wait until everything has been handed to the transport."""
        while self._writer is not None:
            await self._writer

    async def _write(self) -> None:
        # A task of its own only while there is something to write: thousands of idle sessions cost nothing.
        try:
            while self._orders:
                orders, self._orders = self._orders, []
                if addressed := [message for ranks, order in orders for message in _addressed(ranks, order)]:
                    await self._context.write(pb.ToRank(orders=addressed).SerializeToString())
        except Exception as error:  # outermost loop of a task: the stream is over, its reader says so to the owner
            _log.info("cannot send to %s: %s", self, error)
            self.cancel()  # a session that only listens would leave its ranks without orders
        finally:
            self._writer = None

    def __str__(self) -> str:
        return self.peer


class SessionService:
    """Serves `lastwords.v1.Controller` for one job; every call must carry the job's token.

    owner: is told in the loop's thread of reports, and of a session that is over, for whatever reason.
    """

    def __init__(self, token: str, job: str, owner: ControllerShell) -> None:
        self._token = token.encode()
        self._job = job
        self._owner = owner
        self._refusals = 0
        self._open: set[PeerSession] = set()

    def register(self, server: Any) -> None:
        """Add this service to a grpc.aio server. Bytes go in and out, so that a malformed message reaches us."""
        prefix, _, session = codec.SESSION_METHOD.rpartition("/")
        state = codec.STATE_METHOD.rpartition("/")[2]
        handlers = {
            session: grpc.stream_stream_rpc_method_handler(self._session),
            # Not a unary handler: that would be called only when the request is there, and who has no token could
            # hold a call, and with it a connection, by never sending one.
            state: grpc.stream_stream_rpc_method_handler(self._state),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(prefix[1:], handlers),))

    async def end_all(self, timeout_s: float) -> None:
        """End every session, after what is still to be said; waits at most `timeout_s` for a slow peer."""
        sessions = list(self._open)
        if sessions:
            await asyncio.wait([asyncio.ensure_future(session.drained()) for session in sessions], timeout=timeout_s)
        for session in sessions:
            session.cancel()

    async def _admit(self, context: Any) -> None:
        """Abort the call unless it carries the token and speaks our protocol."""
        metadata = dict(context.invocation_metadata() or ())
        token = metadata.get(codec.TOKEN_KEY, "")
        if isinstance(token, str):
            token = token.encode()
        if not hmac.compare_digest(token, self._token):
            self._refusals += 1
            if self._refusals <= REFUSALS_LOGGED or self._refusals % 100 == 0:
                _log.warning("rejected %s: wrong token (rejection number %d)", context.peer(), self._refusals)
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                (
                    "wrong token: this controller serves another job; use the same LASTWORDS_TOKEN (or none at all) "
                    "on all ranks of a job, and a different ctrl_port for each job"
                ),
            )
        protocol = metadata.get(codec.PROTOCOL_KEY, "")
        if protocol != str(codec.PROTOCOL_VERSION):
            _log.warning("rejected %s: it speaks protocol %r", context.peer(), protocol)
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the controller speaks protocol {codec.PROTOCOL_VERSION}, this process {protocol!r:.20}; "
                "install the same version of lastwords on all hosts",
            )

    async def _admit_rank(self, context: Any) -> None:
        """Abort the call unless it comes from this very job: users may give one token to all their jobs."""
        await self._admit(context)
        job = str(dict(context.invocation_metadata() or ()).get(codec.JOB_KEY, ""))
        if job != self._job:
            _log.warning("rejected %s: it belongs to job %.80r", context.peer(), job)
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                (
                    f"this controller serves job {self._job}, this process belongs to job {job:.80}; use a different "
                    "ctrl_port for each job, and end processes of an older start of this job (-gN is the number of "
                    "the start)"
                ),
            )

    async def _state(self, _requests: Any, context: Any) -> None:
        await self._admit(context)
        if (raw := await context.read()) is grpc.aio.EOF:
            return
        try:
            with_ranks = codec.wants_ranks(raw)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        await context.write(self._owner.state(with_ranks=with_ranks))

    async def _session(self, _requests: Any, context: Any) -> None:
        await self._admit_rank(context)
        await context.send_initial_metadata(((codec.JOB_KEY, self._job),))
        session = PeerSession(context)
        self._open.add(session)
        try:
            if not await session.run(self._read(session, context)):
                with contextlib.suppress(grpc.aio.UsageError, grpc.aio.InternalError):  # the stream is gone already
                    await context.abort(
                        grpc.StatusCode.ABORTED, ("the controller has closed this session; connect again")
                    )
            await session.drained()
        finally:
            session.open = False
            self._open.discard(session)
            self._owner.on_closed(session)

    async def _read(self, session: PeerSession, context: Any) -> None:
        malformed = 0
        while (raw := await context.read()) is not grpc.aio.EOF:
            try:
                reports = codec.reports_from_bytes(raw)
            except ProtocolError as error:
                malformed += 1
                _log.error("dropped a message of %s (ranks %s): %s", session, sorted(session.ranks), error)
                if malformed >= MALFORMED_MAX:
                    _log.error("%s has sent %d malformed messages; its session is closed", session, malformed)
                    session.cancel()
                continue
            self._owner.on_reports(session, reports)
