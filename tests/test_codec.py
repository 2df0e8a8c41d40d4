"""The wire: everything that may be said survives the trip, and nothing else gets through."""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastwords import codec, vocabulary
from lastwords._pb import lastwords_pb2 as pb
from lastwords.errors import ProtocolError
from lastwords.state import ControllerState, OpenIncident, RankState
from lastwords.vocabulary import (
    Exit,
    ExitKind,
    Goodbye,
    Hello,
    Order,
    Phase,
    ProcessId,
    Raised,
    Report,
    Save,
    Stand,
    Status,
    Welcome,
    WholeCopy,
)
from tests import golden

REPORTS: tuple[type, ...] = typing.get_args(Report)
ORDERS: tuple[type, ...] = typing.get_args(Order)

PROCESS = ProcessId("boot-7/ns-4", 4242, 123456, "a1b2")


def hello(**changes: Any) -> Hello:
    value = Hello(1, 0, 4, PROCESS, ("replicated",), Stand(Phase.COMPUTING, 0))
    return dataclasses.replace(value, **changes)


# ------------------------------------------------------------------ every value that is allowed


def strategy_of(cls: type, name: str, hint: Any) -> st.SearchStrategy[Any]:
    if hint is int:
        low, high = codec._INT_BOUNDS_OF.get((cls.__name__, name)) or codec._INT_BOUNDS[name]
        return st.integers(low, high)
    if hint is bool:
        return st.booleans()
    if hint is float:
        return st.floats(0, 1e6)
    if hint is str:
        if name in ("reason", "text", "path"):
            return st.text(max_size=200).map(codec.clip_text)
        return st.from_regex(r"[!-~]{1,256}", fullmatch=True)
    if hint == tuple[int, ...]:
        return st.lists(st.integers(0, codec.RANKS_MAX - 1), unique=True, max_size=20).map(tuple)
    if hint == tuple[str, ...]:
        return st.lists(st.from_regex(codec._UNIT_NAME, fullmatch=True), unique=True, max_size=5).map(tuple)
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        return st.sampled_from(list(hint))
    if hint == tuple[WholeCopy, ...]:
        return st.lists(values_of(WholeCopy), max_size=3).map(tuple)
    return values_of(hint)


def values_of(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    fields = {field.name: strategy_of(cls, field.name, hints[field.name]) for field in dataclasses.fields(cls)}
    if cls is Stand:
        return st.builds(lambda phase, step: Stand(phase, step if phase in (1, 7) else max(step, 1)), **fields)
    if cls is Hello:
        return st.builds(lambda **named: Hello(**{**named, "rank": named["rank"] % named["world_size"]}), **fields)
    return st.builds(cls, **fields)


any_report = st.one_of([values_of(cls) for cls in REPORTS])
any_order = st.one_of([values_of(cls) for cls in ORDERS])


def orders_to_bytes(orders: Sequence[tuple[Sequence[int], Order]]) -> bytes:
    """As the controller sends them down a session."""
    addressed = [codec.addressed_to_pb(ranks, codec.order_to_pb(order)) for ranks, order in orders]
    return pb.ToRank(orders=addressed).SerializeToString()


@pytest.mark.ci
@pytest.mark.parametrize("cls", REPORTS, ids=lambda cls: cls.__name__)
def test_every_report_survives_the_trip(cls: type) -> None:
    @given(values_of(cls))
    @settings(max_examples=60, deadline=None)
    def trip(report: Any) -> None:
        assert codec.reports_from_bytes(codec.reports_to_bytes([report])) == (report,)

    trip()


@pytest.mark.ci
@pytest.mark.parametrize("cls", ORDERS, ids=lambda cls: cls.__name__)
def test_every_order_survives_the_trip(cls: type) -> None:
    @given(values_of(cls), st.lists(st.integers(0, codec.RANKS_MAX - 1), unique=True, min_size=1, max_size=9))
    @settings(max_examples=60, deadline=None)
    def trip(order: Any, ranks: list[int]) -> None:
        assert codec.orders_from_bytes(orders_to_bytes([(ranks, order)])) == ((tuple(ranks), order),)

    trip()


@given(st.lists(any_report, min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_message_of_several_reports_keeps_their_order(reports: list[Any]) -> None:
    assert codec.reports_from_bytes(codec.reports_to_bytes(reports)) == tuple(reports)


@pytest.mark.parametrize("cls", [*REPORTS, *ORDERS, Stand, ProcessId], ids=lambda cls: cls.__name__)
def test_schema_and_vocabulary_have_the_same_fields_in_the_same_order(cls: type) -> None:
    message = getattr(pb, cls.__name__).DESCRIPTOR
    assert [field.name for field in message.fields] == [field.name for field in dataclasses.fields(cls)]


@pytest.mark.parametrize("kind", ["Phase", "DeathSource", "ExitKind"])
def test_schema_and_vocabulary_number_their_enums_alike(kind: str) -> None:
    wire = {value.name: value.number for value in getattr(pb, kind).DESCRIPTOR.values if value.number != 0}
    assert wire == {member.name: int(member) for member in getattr(vocabulary, kind)}


def test_the_envelopes_carry_every_report_and_order_and_nothing_else() -> None:
    assert len(pb.Report.DESCRIPTOR.fields) == len(REPORTS)
    assert len(pb.Order.DESCRIPTOR.fields) == len(ORDERS)
    assert {field.message_type.name for field in pb.Report.DESCRIPTOR.fields} == {cls.__name__ for cls in REPORTS}
    assert {field.message_type.name for field in pb.Order.DESCRIPTOR.fields} == {cls.__name__ for cls in ORDERS}


def test_the_state_of_a_controller_survives_the_trip() -> None:
    seen = RankState(0, PROCESS, Stand(Phase.READY, 8), connected=True, dead=False, heard_s=0.25)
    seen = dataclasses.replace(seen, waits_at="train.py:41", stands_at="data.py:7", work_s=0.041, slower=0.5)
    seen = dataclasses.replace(seen, sole_holder=True)
    unseen = RankState(1, None, None, connected=False, dead=False, heard_s=-1.0)
    state = ControllerState(
        "job", 3, 2, 77, 12.5, "registering", 0, "1 of 2 ranks are here", (seen, unseen), "/c/logs/x"
    )
    for one in (state, dataclasses.replace(state, open=OpenIncident("", 0.0, 0))):
        assert codec.state_from_bytes(codec.state_to_bytes(one)) == one


# ------------------------------------------------------------------ everything else


BAD_REPORTS = {
    "a rank outside the world": pb.Report(hello=codec.report_to_pb(hello()).hello),
    "no kind": pb.Report(),
    "a hello without a process": pb.Report(hello=pb.Hello(rank=0, world_size=1, stand=pb.Stand(phase="DONE", step=1))),
    "a stand without a phase": pb.Report(status=pb.Status(stand=pb.Stand(step=1))),
    "a phase from the future": pb.Report(status=pb.Status(stand=pb.Stand(phase=99, step=1))),
    "a status without a stand": pb.Report(status=pb.Status()),
    "step 0 under way": pb.Report(status=pb.Status(stand=pb.Stand(phase="READY", step=0))),
    "a step beyond 63 bits": pb.Report(status=pb.Status(stand=pb.Stand(phase="DONE", step=1 << 63))),
    "incident 0": pb.Report(settled=pb.Settled(sequence=1, stand=pb.Stand(phase="DONE", step=1))),
    "attempt 0": pb.Report(save_progress=pb.SaveProgress(rank=1, incident=0, attempt=0)),
    "sequence 0": pb.Report(settled=pb.Settled(incident=1, stand=pb.Stand(phase="DONE", step=1))),
    "signal 0": pb.Report(signalled=pb.Signalled(stand=pb.Stand(phase="DONE", step=1))),
    "a death without a source": pb.Report(peer_died=pb.PeerDied(dead_rank=1)),
    "a rank beyond the largest world": pb.Report(goodbye=pb.Goodbye(rank=codec.RANKS_MAX)),
}
BAD_REPORTS["a rank outside the world"].hello.rank = 4


@pytest.mark.parametrize("name", BAD_REPORTS)
def test_a_report_is_refused_for(name: str) -> None:
    with pytest.raises(ProtocolError, match=r"^\w+(\.\w+)?: "):
        codec.reports_from_bytes(pb.FromRank(reports=[BAD_REPORTS[name]]).SerializeToString())


@pytest.mark.parametrize(
    "unit", ["", "../../etc/passwd", "a/b", "a b", "a\nb", "\x00", "x" * 129, "ä"], ids=lambda unit: repr(unit)[:20]
)
def test_a_unit_name_that_could_be_taken_for_a_path_or_a_line_is_refused(unit: str) -> None:
    message = codec.report_to_pb(hello())
    message.hello.units[:] = [unit]
    with pytest.raises(ProtocolError, match=r"Hello\.units"):
        codec.report_from_pb(message)
    with pytest.raises(ProtocolError, match=r"Hello\.units"):
        codec.report_to_pb(hello(units=(unit,)))


def test_a_unit_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ProtocolError, match="twice"):
        codec.report_to_pb(hello(units=("a", "a")))


def test_a_message_without_reports_and_one_with_too_many_are_refused() -> None:
    goodbye = pb.Report(goodbye=pb.Goodbye(rank=1))
    for count in (0, codec.REPORTS_PER_MESSAGE_MAX + 1):
        with pytest.raises(ProtocolError, match=r"FromRank\.reports"):
            codec.reports_from_bytes(pb.FromRank(reports=[goodbye] * count).SerializeToString())
        with pytest.raises(ProtocolError, match=r"FromRank\.reports"):
            codec.reports_to_bytes([Goodbye(1, 0)] * count)


def test_an_order_for_nobody_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"AddressedOrder\.ranks"):
        codec.orders_from_bytes(orders_to_bytes([((), Welcome(0))]))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e12])
def test_a_duration_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ProtocolError, match="duration"):
        codec.report_to_pb(Status(0, 0, Stand(Phase.COMPUTING, 0), work_s=seconds))
    message = codec.report_to_pb(Status(0, 0, Stand(Phase.COMPUTING, 0)))
    message.status.work_s = seconds
    with pytest.raises(ProtocolError, match="duration"):
        codec.report_from_pb(message)


@pytest.mark.parametrize(
    "wrong",
    [
        hello(rank=-1),
        hello(world_size=0),
        hello(process=dataclasses.replace(PROCESS, nonce="")),
        hello(generation=1 << 40),
        hello(rank="3"),
        Status(0, 0, typing.cast(Stand, Welcome(0))),
    ],
    ids=str,
)
def test_what_the_peer_would_refuse_cannot_be_sent(wrong: Report) -> None:
    with pytest.raises((ProtocolError, AttributeError)):
        codec.reports_to_bytes([wrong])


def test_an_order_is_no_report() -> None:
    with golden.raises(ProtocolError):
        codec.report_to_pb(typing.cast(Report, Welcome(0)))


@pytest.mark.parametrize(
    "text", ["x" * 1_000_000, "\udcff" * 50_000, "a\x00b", "🦆" * 40_000], ids=["long", "not utf-8", "nul", "wide"]
)
def test_last_words_that_are_long_or_broken_are_clipped_and_not_lost(text: str) -> None:
    (raised,) = codec.reports_from_bytes(codec.reports_to_bytes([Raised(1, 0, text, False, Stand(Phase.READY, 1))]))
    assert isinstance(raised, Raised)
    assert 0 < len(raised.text) <= codec.TEXT_CHARS_MAX
    assert raised.text[0] in text or raised.text.startswith("\\udcff")


@given(st.binary(max_size=400))
@settings(max_examples=500, deadline=None)
def test_arbitrary_bytes_never_do_more_than_raise_protocol_error(raw: bytes) -> None:
    for decode in (codec.reports_from_bytes, codec.orders_from_bytes, codec.state_from_bytes):
        try:
            decode(raw)
        except ProtocolError:
            pass


SAMPLE = codec.reports_to_bytes([hello(), Raised(1, 0, "boom", True, Stand(Phase.UPDATED, 9))])
SAMPLE_ORDERS = orders_to_bytes(
    [
        ((0, 1), Save(1, 1, 1, 7, ("replicated",), (0, 1, 2), 0, "lowest healthy rank")),
        ((0,), Exit(1, 1, ExitKind.SAVED, 7, "/ckpt/x", "rank 1 died", (1,))),
    ]
)


@pytest.mark.ci
@given(st.data())
@settings(max_examples=400, deadline=None)
def test_a_damaged_message_is_refused_or_is_another_valid_one(data: st.DataObject) -> None:
    for sample, decode in ((SAMPLE, codec.reports_from_bytes), (SAMPLE_ORDERS, codec.orders_from_bytes)):
        raw = bytearray(sample)
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        raw = raw[: data.draw(st.integers(0, len(raw)))]
        try:
            values = decode(bytes(raw))
        except ProtocolError:
            continue
        again = codec.reports_to_bytes if decode is codec.reports_from_bytes else orders_to_bytes
        if values:
            assert decode(again(values)) == values  # type: ignore[operator]
