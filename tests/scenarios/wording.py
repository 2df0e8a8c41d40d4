"""Messages and effects as lines of a transcript."""

from __future__ import annotations

from collections.abc import Iterable

from lastwords.controller import events as to_controller
from lastwords.core_events import Log
from lastwords.processor import events as to_processor
from lastwords.vocabulary import (
    NO_SCHEDULE,
    Exit,
    Freeze,
    Goodbye,
    Hello,
    Left,
    LoopBegin,
    LoopGo,
    Notice,
    Order,
    PeerDied,
    Proceed,
    Raised,
    Refused,
    Release,
    Report,
    Resume,
    Save,
    Saved,
    SaveFailed,
    SaveProgress,
    SaveWanted,
    Settled,
    Signalled,
    Stack,
    Status,
    Welcome,
)


def numbers(ranks: Iterable[int]) -> str:
    """Ranks, blank-separated."""
    return " ".join(map(str, ranks))


def contents(units: tuple[str, ...], local_ranks: tuple[int, ...]) -> str:
    """What a part holds."""
    parts = list(units)
    if local_ranks:
        parts.append(f"local state of {numbers(local_ranks)}")
    return ", ".join(parts)


def report_words(report: Report) -> str:
    """One report, without its rank."""
    match report:
        case Hello():
            return f"Hello {report.stand}"
        case LoopBegin():
            every = f", {report.schedule}" if report.schedule != NO_SCHEDULE else ""
            return f"LoopBegin {report.epochs} x {report.steps_per_epoch} steps after step {report.start_step}{every}"
        case Status():
            return f"Status {report.stand}"
        case Stack():
            return "Stack"
        case Settled():
            return f"Settled i{report.incident} #{report.sequence} {report.stand}"
        case SaveProgress():
            return f"SaveProgress {_of(report.incident)} a{report.attempt} {report.bytes_written} bytes"
        case Saved():
            return f"Saved {_of(report.incident)} a{report.attempt} step {report.step}"
        case SaveFailed():
            kind = "storage: " if report.storage else "missed: " if report.missed else ""
            return f"SaveFailed {_of(report.incident)} a{report.attempt} step {report.step} ({kind}{report.reason})"
        case Raised():
            return f"Raised{' (secondary)' if report.secondary else ''} {report.stand} ({report.text})"
        case Signalled():
            return f"Signalled {report.signal_number} {report.stand}"
        case Left():
            return f"Left {report.stand}"
        case PeerDied():
            return f"PeerDied {report.dead_rank} {report.source.name}"
        case SaveWanted():
            return f"SaveWanted after step {report.after_step}"
        case Goodbye():
            return "Goodbye"


def _of(incident: int) -> str:
    return f"i{incident}" if incident else "periodic"


def order_words(order: Order) -> str:
    """One order, without its rank."""
    match order:
        case Welcome():
            return "Welcome"
        case Refused():
            return f"Refused: {order.reason}"
        case LoopGo():
            return "LoopGo"
        case Freeze():
            return f"Freeze i{order.incident}: {order.reason}"
        case Proceed():
            return f"Proceed i{order.incident} to step {order.step}"
        case Save():
            where = " in the fallback directory" if order.target else ""
            what = contents(order.units, order.local_ranks)
            return f"Save {_of(order.incident)} a{order.attempt} step {order.step}{where}: {what}"
        case Resume():
            return f"Resume i{order.incident}"
        case Exit():
            path = f" {order.path}" if order.path else ""
            step = f" step {order.step}" if order.step else ""
            return f"Exit i{order.incident} {order.kind.name}{step}{path}: {order.reason}"
        case Release():
            return "Release"
        case Notice():
            return f"Notice{' with a stack' if order.stack else ''}: {order.text}"


def controller_line(effect: to_controller.Effect) -> str:
    """One effect of the controller that is not a message to a rank."""
    match effect:
        case to_controller.StartVerify():
            parts = "; ".join(
                f"rank {part.rank} (a{part.attempt}): {contents(part.units, part.local_ranks)}" for part in effect.parts
            )
            return f"ctl verifies a{effect.attempt} of step {effect.step}: {parts}"
        case to_controller.StartPublish():
            lost = f", local state lost: {numbers(effect.lost_local_ranks)}" if effect.lost_local_ranks else ""
            why = f"cause {numbers(effect.cause_ranks) or '-'}, dead {numbers(effect.dead_ranks) or '-'}"
            return f"ctl publishes a{effect.attempt} of step {effect.step} ({why}{lost})"
        case to_controller.Discard():
            return f"ctl discards a{effect.attempt} of step {effect.step}"
        case to_controller.KeepParts():
            return f"ctl keeps a{effect.attempt} of step {effect.step} for a human"
        case Log():
            return f"ctl says: {effect.text}"
        case to_controller.EndController():
            return f"ctl stops: {effect.reason}"
        case _:
            raise AssertionError(effect)


def processor_line(rank: int, effect: to_processor.Effect) -> str | None:
    """One effect of a processor that is not a report; None if it is of no interest."""
    match effect:
        case to_processor.StartSave():
            return f"{rank} starts to write a{effect.order.attempt}"
        case to_processor.CancelSave():
            return f"{rank} stops writing a{effect.attempt}"
        case to_processor.Leave():
            return f"{rank} leaves: {effect.reason}"
        case to_processor.Released():
            return f"{rank} is released"
        case Log():
            return f"{rank} says: {effect.text}"
        case _:
            return None
