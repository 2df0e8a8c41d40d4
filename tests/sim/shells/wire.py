"""A network in virtual time that looks like gRPC to both ends: a channel to the session, a server to the controller."""

from __future__ import annotations

import asyncio
import contextlib
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from lastwords import codec
from lastwords.transport import grpc
from tests.sim.shells.scheduler import Process, Scheduler, Task

EOF = grpc.aio.EOF


class WireError(grpc.RpcError):  # type: ignore[misc]
    """What a broken or refused call raises at the rank's end."""


class Loop(asyncio.BaseEventLoop):
    """An event loop that waits in virtual time. Run it in a simulated thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._selector = self
        self._task: Task | None = None
        self._poked = False

    def time(self) -> float:
        return self._scheduler.now_s

    def select(self, timeout: float | None) -> list[Any]:
        self._task = self._scheduler.current
        if timeout == 0 or self._poked:
            self._poked = False
            self._scheduler.step()
        else:
            self._scheduler.wait(timeout)
            self._poked = False
        return []

    def abandon(self) -> None:
        """Its process has ended: what was under way in it is put away without a word."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for task in asyncio.all_tasks(self):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with contextlib.suppress(BaseException):
                    task.get_coro().close()  # type: ignore[union-attr]
        self._ready.clear()  # type: ignore[attr-defined]
        if not self.is_running():
            self.close()

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        self._poked = True
        if self._task is not None:
            self._scheduler.wake(self._task)

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:
        pass

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        future.set_result(func(*args))
        return future


class Call:
    """One session as its rank sees it."""

    def __init__(self, wire: Wire, rank: int, messages: Iterator[bytes], metadata: Any) -> None:
        self.wire = wire
        self.rank = rank
        self.metadata = tuple(metadata)
        self.context: Context | None = None
        self.server: Server | None = None
        self.cut = False
        self._scheduler = wire.scheduler
        self._inbox: list[bytes] = []
        self._early: list[Any] = []
        self._accepted: Any = None  # the metadata that came with the acceptance
        self._code: Any = None
        self._details = ""
        self._waiting: list[Task] = []
        self._messages = messages
        self._scheduler.spawn(self._scheduler.current.process, "grpc", self._send_all)
        self._scheduler.after(wire.delay_s(), lambda: wire.connect(self))

    def _send_all(self) -> None:
        for raw in self._messages:
            if self._code is not None:
                return
            self.wire.carry(self, up=True, deliver=lambda raw=raw: self._arrive(raw))
        if self._code is None:
            self.wire.carry(self, up=True, deliver=lambda: self._arrive(EOF))

    def _arrive(self, raw: Any) -> None:
        if self.context is not None:
            self.context.feed(raw)
        else:
            self._early.append(raw)

    def open(self, context: Context) -> None:
        """The controller's end is there."""
        self.context = context
        for raw in self._early:
            context.feed(raw)

    # what the session calls

    def initial_metadata(self) -> Any:
        self._wait(lambda: self._accepted is not None)
        return self._accepted

    def done(self) -> bool:
        return self._code is not None

    def cancel(self) -> None:
        if self._code is None:
            self.end(grpc.StatusCode.CANCELLED, "cancelled here")
            self.wire.part(self)

    def code(self) -> Any:
        return self._code

    def details(self) -> str:
        return self._details

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self._wait(lambda: bool(self._inbox), ends_well=True)
            if not self._inbox:
                return
            yield self._inbox.pop(0)

    def _wait(self, ready: Callable[[], bool], ends_well: bool = False) -> None:
        while not ready():
            if self._code is not None:
                if ends_well and self._code is grpc.StatusCode.OK:
                    return
                raise WireError(self._details)
            self._waiting.append(self._scheduler.current)
            self._scheduler.wait()

    # what the network does

    def accept(self, metadata: Any) -> None:
        self._accepted = metadata
        self._wake()

    def receive(self, raw: bytes) -> None:
        self._inbox.append(raw)
        self._wake()

    def end(self, code: Any, details: str) -> None:
        if self._code is None:
            self._code, self._details = code, details
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._scheduler.wake(task)


class Answer:
    """Of a call that asks for the controller's state, as its rank sees it."""

    def __init__(self, wire: Wire, rank: int, timeout_s: float) -> None:
        self._wire, self._rank = wire, rank
        self._until_s = wire.scheduler.now_s + timeout_s
        self._process = wire.scheduler.current.process
        self._code: Any = None

    def code(self) -> Any:
        return self._code

    def add_done_callback(self, function: Callable[[Any], None]) -> None:
        self._wire.scheduler.spawn(self._process, "answer", lambda: self._await(function))

    def _await(self, function: Callable[[Any], None]) -> None:
        scheduler = self._wire.scheduler
        scheduler.sleep(2 * self._wire.delay_s())
        while not self._wire.answers(self._rank) and scheduler.now_s < self._until_s:
            scheduler.sleep(0.05)
        in_time = self._wire.answers(self._rank)
        self._code = grpc.StatusCode.OK if in_time else grpc.StatusCode.DEADLINE_EXCEEDED
        function(self)


class Context:
    """The same session as the controller sees it: what grpc.aio hands to a handler."""

    def __init__(self, call: Call, loop: Loop) -> None:
        self._call = call
        self._loop = loop
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._aborted = False
        self.task: asyncio.Task[None] | None = None

    def feed(self, raw: Any) -> None:
        self._soon(self._messages.put_nowait, raw)

    def broken(self) -> None:
        """The transport has found out that nobody is there."""
        self._soon(self._cancel)

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def _soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    async def serve(self, handler: Callable[..., Any]) -> None:
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AbortError):
            await handler(None, self)
        if not self._aborted:
            self._tell(lambda: self._call.end(grpc.StatusCode.OK, ""))

    def _tell(self, deliver: Callable[[], None]) -> None:
        self._call.wire.carry(self._call, up=False, deliver=deliver)

    # what the handler calls

    def peer(self) -> str:
        return f"rank {self._call.rank}"

    def invocation_metadata(self) -> Any:
        return self._call.metadata

    async def send_initial_metadata(self, metadata: Any) -> None:
        self._tell(lambda: self._call.accept(metadata))

    async def read(self) -> Any:
        return await self._messages.get()

    async def write(self, raw: bytes) -> None:
        await asyncio.sleep(0)
        self._tell(lambda: self._call.receive(raw))

    async def abort(self, code: Any, details: str = "") -> None:
        self._aborted = True
        self._tell(lambda: self._call.end(code, details))
        raise grpc.aio.AbortError(details)


class Server:
    """What `grpc.aio.server` gives to the controller."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.session: Callable[..., Any] | None = None
        self.loop: Any = asyncio.get_running_loop()
        self.process = wire.scheduler.current.process

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        (handler,) = handlers
        details = types.SimpleNamespace(method=codec.SESSION_METHOD, invocation_metadata=())
        self.session = handler.service(details).stream_stream

    def add_insecure_port(self, address: str) -> int:
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        self._wire.server = self

    async def stop(self, grace: float | None) -> None:
        if self._wire.server is self:
            self._wire.server = None
        for call in list(self._wire.calls.values()):
            if call.server is self:
                call.end(grpc.StatusCode.UNAVAILABLE, "the server has stopped")


class Wire:
    """All connections. `held_s`: from when to when nothing of a rank passes in one direction."""

    def __init__(self, scheduler: Scheduler, controller: Process, mean_delay_s: float) -> None:
        self.scheduler = scheduler
        self.controller = controller
        self.server: Server | None = None
        self.calls: dict[int, Call] = {}
        self.blocked_until_s: dict[int, float] = {}
        self.held_until_s: dict[tuple[int, bool], float] = {}
        self._mean_delay_s = mean_delay_s
        self._clear_s: dict[tuple[int, bool], float] = {}

    def delay_s(self) -> float:
        """How long the next message takes."""
        dice = self.scheduler.dice
        slow_s = 0.3 * dice.random() if dice.random() < 0.03 else 0.0
        return self._mean_delay_s * (0.1 + dice.random()) + slow_s

    def channel_of(self, rank: int) -> Callable[..., Any]:
        """What `grpc.insecure_channel` is to the session of this rank."""
        return lambda *_, **__: _Channel(self, rank)

    def for_controller(self) -> Any:
        """Stands in for the module `grpc` in the controller's shell."""
        return types.SimpleNamespace(aio=types.SimpleNamespace(server=lambda **_: Server(self)))

    def connect(self, call: Call) -> None:
        """A call arrives at the controller's host, or does not."""
        if call.done():
            return
        blocked_s = self.blocked_until_s.get(call.rank, 0.0) - self.scheduler.now_s
        if blocked_s > 0:
            self.scheduler.after(min(blocked_s, 1.0), lambda: call.end(grpc.StatusCode.UNAVAILABLE, "no route"))
            return
        server = self.server
        if server is None or server.session is None or not server.process.lives:
            call.end(grpc.StatusCode.UNAVAILABLE, "connection refused")
            return
        context = Context(call, server.loop)
        call.open(context)
        call.server = server
        self.calls[call.rank] = call
        handler = server.session

        def begin() -> None:
            context.task = server.loop.create_task(context.serve(handler))

        server.loop.call_soon_threadsafe(begin)

    def is_served_by(self, process: Process) -> bool:
        """Whether new connections reach this process."""
        return self.server is not None and self.server.process is process

    def serves(self, process: Process, rank: int) -> bool:
        """Whether the connection of this rank leads to this process."""
        call = self.calls.get(rank)
        return call is not None and call.server is not None and call.server.process is process

    def answers(self, rank: int) -> bool:
        """Whether the process that this rank is connected with would answer it now."""
        call = self.calls.get(rank)
        if call is None or call.cut or call.server is None:
            return False
        process = call.server.process
        return process.lives and not process.stopped

    def close(self, process: Process) -> None:
        """A process has ended: what listened there is gone."""
        if self.is_served_by(process):
            self.server = None

    def carry(self, call: Call, *, up: bool, deliver: Callable[[], None]) -> None:
        """Deliver in order, after a delay, unless the connection has broken meanwhile."""
        key = (call.rank, up)
        at_s = max(self.scheduler.now_s + self.delay_s(), self._clear_s.get(key, 0.0), self.held_until_s.get(key, 0.0))
        self._clear_s[key] = at_s

        def arrive() -> None:
            if not call.cut:
                deliver()

        self.scheduler.after(at_s - self.scheduler.now_s, arrive)

    def part(self, call: Call) -> None:
        """The rank has cancelled its call: the controller hears of it."""
        if call.context is not None:
            self.carry(call, up=True, deliver=call.context.broken)

    def cut(self, rank: int, rank_sees_s: float, controller_sees_s: float) -> None:
        """A connection breaks now; what is on its way is lost, and each end notices in its time."""
        call = self.calls.pop(rank, None)
        if call is None or call.cut:
            return
        call.cut = True
        self.scheduler.after(rank_sees_s, lambda: call.end(grpc.StatusCode.UNAVAILABLE, "connection reset"))
        if call.context is not None:
            self.scheduler.after(controller_sees_s, call.context.broken)


class _Channel:
    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire = wire
        self._rank = rank
        self._calls: list[Call] = []

    def __enter__(self) -> _Channel:
        return self

    def __exit__(self, *_: object) -> None:
        for call in self._calls:
            call.cancel()

    def unary_unary(self, method: str) -> Any:
        assert method == codec.STATE_METHOD
        return types.SimpleNamespace(future=lambda _request, metadata, timeout: Answer(self._wire, self._rank, timeout))

    def stream_stream(self, _method: str) -> Callable[..., Call]:
        def begin(messages: Iterator[bytes], metadata: Any = ()) -> Call:
            call = Call(self._wire, self._rank, messages, metadata)
            self._calls.append(call)
            return call

        return begin
