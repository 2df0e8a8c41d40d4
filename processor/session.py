"""A rank's session with the controller: one daemon thread that connects, listens, and connects again.

Nothing in here raises into a caller or makes it wait: `send` leaves a report in a bounded outbox, and everything
that the network does is told through call-backs. They come from the session's thread, one at a time:

    on_up() -> on_order(order) ... -> on_down() -> on_up() -> ...     and, once and last, on_refused(reason)

Each connection begins with a fresh `hello()`. What was in the outbox when a connection broke is sent over the next
one; what was on its way is lost, so `on_up` is the signal to repeat whatever still needs an answer.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

from lastwords import codec, descriptors, threads
from lastwords.errors import ProtocolError, UnavailableError, named
from lastwords.processor.events import ProcessorOptions
from lastwords.processor.ring import Silence
from lastwords.transport import call_metadata, channel_options, grpc
from lastwords.vocabulary import Hello, Order, Report, SaveProgress, Settled, Status

_log = logging.getLogger(__name__)

OUTBOX_REPORTS_MAX = 1024
"""Far more than a rank ever owes: status, settled and progress are coalesced, the rest is one of a kind."""

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
"""A broken session is only a suspicion as long as the rank is back within the controller's lost_confirm_s (2 s) or,
where nothing else has happened, silence_timeout_s (10 s)."""

ANSWER_S = 5.0
"""A controller that is asked for a sign of life has so long. Freezing 16 384 ranks keeps its event loop for 0.2 s."""

REFUSED_PAUSE_MAX_S = 60.0
"""A controller of another job is not to be bothered by thousands of ranks each second."""

_FATAL = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Trying again would give the same answer: wrong token, other protocol, not a controller at all."""


class _ReportQueue:
    """Reports that wait to be sent, newest status only. Any thread."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._reports: dict[object, Report] = {}
        self._ended = False
        self._connection = 0

    def put(self, report: Report) -> bool:
        """Take a report; False if it displaced the oldest one, because nobody reads."""
        key: object = report
        if isinstance(report, Status | Settled | SaveProgress):
            key = type(report)  # only the newest one means anything
        with self._condition:
            self._reports.pop(key, None)
            self._reports[key] = report
            full = len(self._reports) > OUTBOX_REPORTS_MAX
            if full:
                del self._reports[next(iter(self._reports))]
            self._condition.notify_all()
        return not full

    def open(self) -> int:
        """Begin a connection; iterators of earlier ones end."""
        with self._condition:
            self._connection += 1
            self._condition.notify_all()
            return self._connection

    def end(self) -> None:
        """Iterators end as soon as everything is sent."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def messages(self, connection: int, hello: Hello) -> Iterator[bytes]:
        """What connection number `connection` sends; gRPC takes it from a thread of its own."""
        yield codec.reports_to_bytes([hello])
        while True:
            with self._condition:
                while not self._reports and not self._ended and self._connection == connection:
                    self._condition.wait()
                if self._connection != connection:
                    return
                keys = list(self._reports)[: codec.REPORTS_PER_MESSAGE_MAX]
                reports = [self._reports.pop(key) for key in keys]
            if not reports:
                return  # ended, and everything is sent
            yield from _encoded(reports)


def _encoded(reports: list[Report]) -> Iterator[bytes]:
    try:
        yield codec.reports_to_bytes(reports)
    except ProtocolError as error:
        if len(reports) == 1:
            _log.error("a report cannot be sent and is dropped: %s", error)  # our own mistake: peers are not told it
            return
        for report in reports:
            yield from _encoded([report])


class Session:
    """Keeps one rank connected with its controller until `close`. Methods may be called by any thread.

    address: as `transport.host_port` gives it. A refusal ends the session if it is the first word that comes from
    there (`on_refused`); later it is somebody else's, and the controller counts as lost. wanted: whether this rank
    still needs a controller; one that is not there is no news otherwise. `jitter` spreads the reconnects of thousands
    of ranks.
    """

    def __init__(
        self,
        address: str,
        token: str,
        job: str,
        rank: int,
        *,
        on_order: Callable[[Order], None],
        on_up: Callable[[], None],
        on_down: Callable[[], None],
        on_refused: Callable[[str], None],
        hello: Callable[[], Hello],
        wanted: Callable[[], bool] = lambda: True,
        silence: Silence | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        self.address = address
        self.rank = rank
        self._metadata = call_metadata(token, job)
        self._on_order = on_order
        self._on_up = on_up
        self._on_down = on_down
        self._on_refused = on_refused
        self._hello = hello
        self._wanted = wanted
        self._options = channel_options()
        self._silence = silence if silence is not None else Silence(ProcessorOptions())
        self._jitter = jitter if jitter is not None else random.Random()
        self._outbox = _ReportQueue()
        self._lock = threading.Lock()
        self._call: Any = None
        self._channel: Any = None
        self._heard = 0
        self.up = False  # whether a connection is open at the moment
        self._accepted = False  # by the controller of this job, once at least
        self._refusals = 0  # since then, by somebody else
        self._closing = threading.Event()
        self._failures = 0
        self._drops = False  # reports, and that has been said
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to connect; returns at once.

        UnavailableError if gRPC lacks descriptors, or if no thread can be started, which takes some seconds.
        """
        descriptors.look_for_grpc()
        self._thread = threads.start_patiently(self._run, name="lastwords-session")

    def send(self, report: Report) -> None:
        """Send a report as soon as possible. Never waits, never raises; a newer status replaces an older one."""
        drops, self._drops = self._drops, not self._outbox.put(report)
        if self._drops and not drops:
            _log.warning("the controller at %s does not receive reports; the oldest ones are dropped", self.address)

    def ask_if_silent(self, asks: bool, now_s: float) -> None:
        """Ask a controller that has been silent for too long; the connection ends if it does not answer within
        `ANSWER_S`. Its event loop hangs then, while the threads of its gRPC go on answering pings; the next connection
        comes up as soon as it answers. Called by one thread, often; never waits. asks, now_s: as `Silence` has them.
        """
        self._silence.hear(self._heard if self.up else None, now_s)
        if asks and self._silence.is_over(asks, is_first=True, now_s=now_s):
            self._silence.begin(now_s)
            self._ask()

    def _ask(self) -> None:
        with self._lock:
            call, channel = self._call, self._channel
            if call is None or not self.up:
                return
            request = codec.state_request_to_bytes(without_ranks=True)
            state = channel.unary_unary(codec.STATE_METHOD)
            answer = state.future(request, metadata=self._metadata, timeout=ANSWER_S)
        answer.add_done_callback(lambda answer: self._on_answer(answer, call))

    def _on_answer(self, answer: Any, call: Any) -> None:
        if answer.code() is grpc.StatusCode.OK:
            self._heard += 1
        elif not call.done():
            _log.warning("the controller at %s does not answer; rank %d connects again", self.address, self.rank)
            call.cancel()

    def close(self, timeout_s: float) -> None:
        """Send what is left and end, at most `timeout_s` later; at once where there is no connection. Idempotent."""
        self._closing.set()
        self._outbox.end()
        if self._thread is None or self._thread is threading.current_thread() or not self._thread.is_alive():
            return
        if self.up:
            self._thread.join(timeout_s)
        with self._lock:
            if self._call is not None:
                self._call.cancel()
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------ the session's thread

    def _run(self) -> None:
        # Never used. gRPC ends with its last channel and would begin anew with each connection, where it aborts the
        # process if there is no descriptor left. It is not kept any longer than the session: it has threads, and a
        # child that is forked afterwards may have a session of its own.
        spare, said = None, ""
        with contextlib.ExitStack() as kept:
            while not self._closing.is_set():
                try:
                    if spare is None:
                        descriptors.look_for_grpc()
                        spare = kept.enter_context(grpc.insecure_channel(self.address, options=self._options))
                    if not self._connect():
                        return
                    said = ""
                except Exception as error:  # outermost loop of a thread: whatever it was, the next try may do better
                    if named(error) != said and isinstance(error, UnavailableError):
                        _log.warning("rank %d cannot connect to the controller yet: %s", self.rank, error)
                    elif named(error) != said:
                        _log.exception("session of rank %d with %s failed", self.rank, self.address)
                    said = named(error)
                pause_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._failures, 10))
                if self._refusals:
                    pause_s = min(REFUSED_PAUSE_MAX_S, BACKOFF_MAX_S * 2 ** min(self._refusals - 1, 10))
                self._failures += 1
                self._closing.wait(pause_s * self._jitter.uniform(0.5, 1.0))

    def _connect(self) -> bool:
        """One connection from beginning to end; False if there is no point in another one."""
        hello = self._hello()
        with grpc.insecure_channel(self.address, options=self._options) as channel:
            method = channel.stream_stream(codec.SESSION_METHOD)
            connection = self._outbox.open()
            call = method(self._outbox.messages(connection, hello), metadata=self._metadata)
            with self._lock:
                self._call, self._channel = call, channel
            if self._closing.is_set():
                call.cancel()
            try:
                # The controller names its job as soon as it has accepted the call. A call that is refused, or over,
                # has initial metadata too, and is not always done by then.
                if codec.JOB_KEY in dict(call.initial_metadata() or ()):
                    self._failures = self._refusals = 0
                    self._accepted = True
                    self.up = True
                    self._on_up()
                for raw in call:
                    self._take(raw)
            except grpc.RpcError:
                pass  # the status below says what happened
            finally:
                was_up, self.up = self.up, False
                self._outbox.open()  # ends the iterator of this connection
                call.cancel()
                with self._lock:
                    self._call = self._channel = None
                code, details = _status_of(call)
                if was_up:
                    _log.log(self._level, "the session with the controller is down: %s: %s", code.name, details)
                    self._on_down()
        if code in _FATAL:
            return self._on_refusal(details)
        if not was_up and self._failures in (0, 5):
            _log.log(self._level, "rank %d cannot reach the controller at %s yet: %s", self.rank, self.address, details)
        return True

    @property
    def _level(self) -> int:
        return logging.INFO if self._wanted() else logging.DEBUG

    def _on_refusal(self, details: str) -> bool:
        """True if it says nothing about this process: its own controller is gone, and somebody else has the port."""
        if not self._accepted:
            self._on_refused(f"the controller at {self.address} rejected rank {self.rank}: {details}")
            return False
        if not self._refusals:
            _log.error(
                (
                    "rank %d has lost its controller: the one at %s now serves another job; nothing is saved if a "
                    "rank of this job dies"
                ),
                self.rank,
                self.address,
            )
        self._refusals += 1
        return True

    def _take(self, raw: bytes) -> None:
        self._heard += 1
        try:
            orders = codec.orders_from_bytes(raw)
        except ProtocolError as error:
            _log.error("the controller at %s sent an invalid message, which is dropped: %s", self.address, error)
            return
        for ranks, order in orders:
            if self.rank in ranks:
                self._on_order(order)


def _status_of(call: Any) -> tuple[Any, str]:
    """Status of a call that is over. `cancel` before this makes sure that it is."""
    code = call.code()
    return code if code is not None else grpc.StatusCode.UNKNOWN, call.details() or ""
