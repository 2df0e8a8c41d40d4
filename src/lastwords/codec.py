"""Protobuf to vocabulary and back: the one place that judges what comes off the wire.

The messages of proto/lastwords.proto mirror the dataclasses of `lastwords.vocabulary` field by field, so the
translation is derived from the dataclasses; a field is judged by its name, because a name means the same thing in
every message. Both directions judge, so whatever can be sent can be received. Everything refused raises
`ProtocolError` with "Message.field: what is wrong"; no other exception leaves this module, whatever the bytes are.

Free text (reasons, exceptions, paths that are only shown) is clipped and made encodable instead of refused: the last
words of a rank must not be lost because its exception quotes a broken string.

Any thread may call anything here.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from lastwords import vocabulary
from lastwords._pb import lastwords_pb2 as pb
from lastwords.errors import ProtocolError
from lastwords.state import ControllerState, OpenIncident, RankState
from lastwords.vocabulary import RANKS_MAX, Order, Phase, ProcessId, Report, Schedule, Stand

PROTOCOL_VERSION = 1
TOKEN_KEY = "lastwords-token"
PROTOCOL_KEY = "lastwords-protocol"
JOB_KEY = "lastwords-job"
SESSION_METHOD = f"/{pb.DESCRIPTOR.package}.Controller/Session"
STATE_METHOD = f"/{pb.DESCRIPTOR.package}.Controller/State"

REPORTS_PER_MESSAGE_MAX = 256
UNITS_MAX = 1 << 16
TEXT_CHARS_MAX = 16 * 1024
"""Longer free text is clipped by the sender. A traceback is 1-8 KiB."""

_U32 = (1 << 32) - 1
_I63 = (1 << 63) - 1
_YEAR_S = 366 * 86400.0

_UNIT_NAME = re.compile(r"[A-Za-z0-9_.:=+-]{1,128}")
"""As in checkpoint.layout: unit names become parts of tensor names and of lines in logs, so no slash, no blank."""
_SHARE_NAME = re.compile(_UNIT_NAME.pattern + r"(?:/[0-9]{1,4}of[0-9]{1,4})?")
_OPAQUE_ID = re.compile(r"[!-~]{1,256}")

_INT_BOUNDS: dict[str, tuple[int, int]] = {
    "rank": (0, RANKS_MAX - 1),
    "dead_rank": (0, RANKS_MAX - 1),
    "world_size": (1, RANKS_MAX),
    "generation": (0, _U32),
    "incident": (1, _U32),
    "attempt": (1, _U32),
    "sequence": (1, _U32),
    "target": (0, 255),
    "signal_number": (1, 127),
    "pid": (1, (1 << 31) - 1),
    "start_ticks": (0, _I63),
    "step": (0, _I63),
    "start_step": (0, _I63),
    "after_step": (0, _I63),
    "steps_per_epoch": (0, _I63),
    "epochs": (0, _I63),
    "bytes_written": (0, _I63),
    "steps": (0, _I63),
    "keep_max": (0, _U32),
    "keep_minutes": (0, _U32),
}
_INT_BOUNDS_OF = {(name, "incident"): (0, _U32) for name in ("Save", "SaveProgress", "Saved", "SaveFailed")}

_Judge = Callable[[Any], Any]


def _fail(where: str, problem: str) -> typing.NoReturn:
    raise ProtocolError(f"{where}: {problem}")


def clip_text(text: str) -> str:
    """Free text as it travels: valid UTF-8, no NUL, at most `TEXT_CHARS_MAX` characters.

    >>> clip_text("a\\udcffb\\x00")
    'a\\\\udcffb\\\\x00'
    """
    text = text[: 2 * TEXT_CHARS_MAX].encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")
    return text if len(text) <= TEXT_CHARS_MAX else text[: TEXT_CHARS_MAX - 1] + "…"


def _judge_int(where: str, bounds: tuple[int, int]) -> _Judge:
    low, high = bounds

    def judge(value: Any) -> int:
        if not isinstance(value, int) or not low <= value <= high:
            _fail(where, f"{value!r} is not in {low}..{high}")
        return int(value)

    return judge


def _judge_bool(where: str) -> _Judge:
    def judge(value: Any) -> bool:
        if not isinstance(value, bool):
            _fail(where, f"{value!r} is not a bool")
        return value

    return judge


def _judge_duration(where: str) -> _Judge:
    def judge(value: Any) -> float:
        if not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= _YEAR_S:
            _fail(where, f"{value!r} is not a duration in seconds between 0 and a year")
        return float(value)

    return judge


def _judge_match(where: str, pattern: re.Pattern[str], what: str) -> _Judge:
    def judge(value: Any) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            _fail(where, f"{value!r:.300} is not {what}")
        return value

    return judge


def _judge_text(where: str) -> _Judge:
    def judge(value: Any) -> str:
        if not isinstance(value, str):
            _fail(where, f"{value!r:.100} is not text")
        return clip_text(value)

    return judge


def _judge_enum(where: str, kind: type[enum.IntEnum]) -> _Judge:
    members = {int(member): member for member in kind}

    def judge(value: Any) -> enum.IntEnum:
        member = members.get(value) if isinstance(value, int) else None
        if member is None:
            _fail(where, f"{value!r} is no {kind.__name__}")
        return member

    return judge


def _judge_tuple(where: str, item: _Judge, length_max: int) -> _Judge:
    def judge(values: Any) -> tuple[Any, ...]:
        if len(values) > length_max:
            _fail(where, f"{len(values)} entries are more than {length_max}")
        judged = tuple(item(value) for value in values)
        if len(set(judged)) != len(judged):
            _fail(where, "an entry occurs twice")
        return judged

    return judge


def _judge_of(cls: type, name: str, hint: Any) -> _Judge:
    """Rule for one field; an unknown field is our own mistake and found when this module is imported."""
    where = f"{cls.__name__}.{name}"
    if hint == tuple[str, ...]:
        pattern = _SHARE_NAME if cls is vocabulary.Save else _UNIT_NAME
        return _judge_tuple(where, _judge_match(where, pattern, "a unit's name"), UNITS_MAX)
    if hint == tuple[int, ...]:
        return _judge_tuple(where, _judge_int(where, _INT_BOUNDS["rank"]), RANKS_MAX)
    if hint is int:
        return _judge_int(where, _INT_BOUNDS_OF.get((cls.__name__, name)) or _INT_BOUNDS[name])
    if hint is bool:
        return _judge_bool(where)
    if hint is float:
        return _judge_duration(where)
    if hint is str:
        if name in ("reason", "text", "path", "waits_at", "stands_at", "how", "doubts"):
            return _judge_text(where)
        if name in ("host_id", "nonce"):
            return _judge_match(where, _OPAQUE_ID, "1 to 256 visible ASCII characters")
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        return _judge_enum(where, hint)
    raise AssertionError(f"no rule for {where}: {hint}")


class _Translator:
    """Translates one dataclass from and to its message."""

    def __init__(self, cls: type, nested: dict[type, _Translator]) -> None:
        self.cls = cls
        self.name = cls.__name__
        self._message: Any = getattr(pb, cls.__name__)
        hints = typing.get_type_hints(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        self._nested = tuple((name, nested[hints[name]]) for name in names if hints[name] in nested)
        items = {name: typing.get_args(hints[name])[:1] for name in names}
        self._lists = tuple((name, nested[item[0]]) for name, item in items.items() if item and item[0] in nested)
        known = {name for name, _ in (*self._nested, *self._lists)}
        self._plain = tuple((name, _judge_of(cls, name, hints[name])) for name in names if name not in known)

    def encode(self, value: Any) -> Any:
        fields = {name: judge(getattr(value, name)) for name, judge in self._plain}
        for name, translator in self._nested:
            fields[name] = translator.encode(getattr(value, name))
        for name, translator in self._lists:
            fields[name] = self._judge_list(name, translator.encode, getattr(value, name))
        self._judge_whole(value)
        return self._message(**fields)

    def decode(self, message: Any) -> Any:
        fields = {name: judge(getattr(message, name)) for name, judge in self._plain}
        for name, translator in self._nested:
            if not message.HasField(name):
                _fail(f"{self.name}.{name}", "is absent")
            fields[name] = translator.decode(getattr(message, name))
        for name, translator in self._lists:
            fields[name] = tuple(self._judge_list(name, translator.decode, getattr(message, name)))
        value = self.cls(**fields)
        self._judge_whole(value)
        return value

    def _judge_list(self, name: str, translate: _Judge, values: Any) -> list[Any]:
        if len(values) > RANKS_MAX:
            _fail(f"{self.name}.{name}", f"{len(values)} entries are more than {RANKS_MAX}")
        return [translate(value) for value in values]

    def _judge_whole(self, value: Any) -> None:
        if type(value) is not self.cls:
            _fail(self.name, f"expected, not {type(value).__name__}")
        if isinstance(value, Stand) and value.step == 0 and value.phase not in (Phase.COMPUTING, Phase.DONE):
            _fail("Stand.step", f"0 cannot be under way ({value.phase.name})")
        if isinstance(value, vocabulary.Hello) and value.rank >= value.world_size:
            _fail("Hello.rank", f"{value.rank} is outside a world of {value.world_size}")


_NESTED: dict[type, _Translator] = {
    cls: _Translator(cls, {}) for cls in (Stand, ProcessId, Schedule, vocabulary.WholeCopy)
}


def _table(union: Any) -> dict[type, tuple[str, _Translator]]:
    """Oneof field name and translator by dataclass: `SaveFailed` travels as `save_failed`."""
    return {
        cls: (re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower(), _Translator(cls, _NESTED))
        for cls in typing.get_args(union)
    }


_REPORTS = _table(Report)
_ORDERS = _table(Order)
_REPORTS_BY_FIELD = dict(_REPORTS.values())
_ORDERS_BY_FIELD = dict(_ORDERS.values())


def _encode(table: dict[type, tuple[str, _Translator]], envelope: Any, value: Any) -> Any:
    entry = table.get(type(value))
    if entry is None:
        _fail(envelope.DESCRIPTOR.name, f"cannot carry {type(value).__name__}")
    field, translator = entry
    return envelope(**{field: translator.encode(value)})


def _decode(table: dict[str, _Translator], message: Any) -> Any:
    field = message.WhichOneof("kind")
    if field is None:
        _fail(message.DESCRIPTOR.name, "is empty or of a kind that this version does not know")
    return table[field].decode(getattr(message, field))


def report_to_pb(report: Report) -> pb.Report:
    """Message for a report. Raises ProtocolError for a value that the other side would refuse."""
    message: pb.Report = _encode(_REPORTS, pb.Report, report)
    return message


def report_from_pb(message: pb.Report) -> Report:
    """Report in a message; raises ProtocolError if anything about it is wrong."""
    report: Report = _decode(_REPORTS_BY_FIELD, message)
    return report


def order_to_pb(order: Order) -> pb.Order:
    """Message for an order. Raises ProtocolError for a value that the other side would refuse."""
    message: pb.Order = _encode(_ORDERS, pb.Order, order)
    return message


def order_from_pb(message: pb.Order) -> Order:
    """Order in a message; raises ProtocolError if anything about it is wrong."""
    order: Order = _decode(_ORDERS_BY_FIELD, message)
    return order


def reports_to_bytes(reports: Sequence[Report]) -> bytes:
    """What a session sends: 1 to `REPORTS_PER_MESSAGE_MAX` reports, in order."""
    if not 1 <= len(reports) <= REPORTS_PER_MESSAGE_MAX:
        _fail("FromRank.reports", f"{len(reports)} is not in 1..{REPORTS_PER_MESSAGE_MAX}")
    return pb.FromRank(reports=[report_to_pb(report) for report in reports]).SerializeToString()


def reports_from_bytes(raw: bytes) -> tuple[Report, ...]:
    """Reports in the bytes of one message. Raises ProtocolError, and nothing else, whatever the bytes are."""
    reports = _parse(pb.FromRank, raw).reports
    if not 1 <= len(reports) <= REPORTS_PER_MESSAGE_MAX:
        _fail("FromRank.reports", f"{len(reports)} is not in 1..{REPORTS_PER_MESSAGE_MAX}")
    return tuple(report_from_pb(report) for report in reports)


def addressed_to_pb(ranks: Iterable[int], order: pb.Order) -> pb.AddressedOrder:
    """An order, already encoded once, for these ranks of one session. Raises ProtocolError as the receiver would."""
    return pb.AddressedOrder(ranks=_judge_addressees(tuple(ranks)), order=order)


def orders_from_bytes(raw: bytes) -> tuple[tuple[tuple[int, ...], Order], ...]:
    """Addressed orders in the bytes of one message. Raises ProtocolError, and nothing else, whatever the bytes are."""
    result = []
    for addressed in _parse(pb.ToRank, raw).orders:
        ranks = _judge_addressees(addressed.ranks)
        if not ranks:
            _fail("AddressedOrder.ranks", "is empty")
        result.append((ranks, order_from_pb(addressed.order)))
    return tuple(result)


_judge_addressees = _judge_tuple(
    "AddressedOrder.ranks", _judge_int("AddressedOrder.ranks", _INT_BOUNDS["rank"]), RANKS_MAX
)


def _parse(kind: Any, raw: bytes) -> Any:
    try:
        return kind.FromString(raw)
    except (DecodeError, ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"{kind.DESCRIPTOR.name}: {len(raw)} bytes that are no such message ({error})") from error


# ------------------------------------------------------------------------------------------------ state


def state_request_to_bytes(*, without_ranks: bool) -> bytes:
    """What a State call asks for."""
    return bytes(pb.StateRequest(without_ranks=without_ranks).SerializeToString())


def wants_ranks(raw: bytes) -> bool:
    """Whether this State call asks for the ranks. Raises ProtocolError, and nothing else, whatever the bytes are."""
    return not _parse(pb.StateRequest, raw).without_ranks


def state_to_bytes(state: ControllerState) -> bytes:
    """What the State call answers."""
    reply = pb.StateReply(
        job=clip_text(state.job),
        generation=state.generation,
        world_size=state.world_size,
        pid=state.pid,
        uptime_s=state.uptime_s,
        stage=clip_text(state.stage),
        incident=state.incident,
        summary=clip_text(state.summary),
        incidents=clip_text(state.incidents),
    )
    if (under_way := state.open) is not None:
        reply.open.reason = clip_text(under_way.reason)
        reply.open.since_s, reply.open.written_bytes = under_way.since_s, under_way.written_bytes
        reply.open.SetInParent()
    for view in state.ranks:
        message = reply.ranks.add(
            rank=view.rank, connected=view.connected, dead=view.dead, heard_s=view.heard_s, work_s=view.work_s,
            slower=view.slower, waits_at=clip_text(view.waits_at), stands_at=clip_text(view.stands_at),
            sole_holder=view.sole_holder,
        )  # fmt: skip
        if view.process is not None:
            message.process.CopyFrom(_NESTED[ProcessId].encode(view.process))
        if view.stand is not None:
            message.stand.CopyFrom(_NESTED[Stand].encode(view.stand))
    return reply.SerializeToString()


def state_from_bytes(raw: bytes) -> ControllerState:
    """Answer of a State call. Raises ProtocolError, and nothing else, whatever the bytes are."""
    reply = _parse(pb.StateReply, raw)
    ranks = tuple(
        RankState(
            rank=view.rank,
            process=_NESTED[ProcessId].decode(view.process) if view.HasField("process") else None,
            stand=_NESTED[Stand].decode(view.stand) if view.HasField("stand") else None,
            connected=view.connected,
            dead=view.dead,
            heard_s=view.heard_s,
            waits_at=view.waits_at,
            stands_at=view.stands_at,
            work_s=view.work_s,
            slower=view.slower,
            sole_holder=view.sole_holder,
        )
        for view in reply.ranks
    )
    under_way = reply.open if reply.HasField("open") else None
    return ControllerState(
        job=reply.job,
        generation=reply.generation,
        world_size=reply.world_size,
        pid=reply.pid,
        uptime_s=reply.uptime_s,
        stage=reply.stage,
        incident=reply.incident,
        summary=reply.summary,
        ranks=ranks,
        incidents=reply.incidents,
        open=under_way and OpenIncident(under_way.reason, under_way.since_s, under_way.written_bytes),
    )
