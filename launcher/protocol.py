"""What the processes of a job say to each other, encoded and decoded here alone. One message is one line (link.py).

"kind" is the name of a type below or in events.py, beside it stand the fields of that type. Between a rank and its
launcher, or a supervisor and the scheduler of its cluster, there is no "rank": whoever holds the connection knows it.

    rank to launcher         Hello first; then what happens to it: Guarded, Begun, Updated, Over, ControllerWanted; Left
                             or Raised at the end, where there is a reason
    launcher to rank         ControllerAnswer; Dismissed when nothing is healed any more; Refused instead of all that
    scheduler to supervisor  Challenge first, Refused or Admission next; then Entry, End, Kill, Dismissed; besides Done
                             in answer to Done, and Beat
    supervisor to scheduler  Application first; where its rank runs, Inside next, else Ready; then what happens to the
                             rank, as above, and Ended; Done where that was its end
    between hosts            Introduction first, then events up to the head of the job, and effects down

Who differs in PROTOCOL from the other end is refused, with what to do. So the first message of either side, Refused and
Stop keep their form in all versions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from lastwords.errors import FormatError
from lastwords.launcher import events
from lastwords.launcher.registry import Refused
from lastwords.optim_wrapper.launch.reporter import PROTOCOL

OWN = -1
"""The rank of a worker that speaks of itself, and of one that is spoken to."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """A rank's first message."""

    rank: int
    pid: int
    version: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Raised:
    """An exception leaves the script, and with it the process ends. error, lasting: as of `events.Ended`."""

    error: str
    lasting: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ControllerWanted:
    """The worker would have a process that was started in advance as its controller. asked: number of the answer."""

    work: dict[str, str]
    asked: int


@dataclasses.dataclass(frozen=True, slots=True)
class ControllerAnswer:
    """pid: None if there is no such process. words: what it has answered."""

    asked: int
    pid: int | None = None
    words: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """From a worker of a cluster: its rank has come to its end, in this generation. To it: that is kept."""

    entry: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Seat:
    """Of a worker of a cluster. rank_0: address of its host."""

    local_rank: int
    local_size: int
    rank_0: str


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A generation begins; the fields as of `events.Enter`."""

    generation: int
    port: int
    step: int
    seat: Seat | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Dismissed:
    """Nothing is healed any more. failure: why, where a cluster ends before its workers have come to their end."""

    failure: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Beat:
    """The scheduler runs. Every other message says so, too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Challenge:
    """A scheduler's first message."""

    nonce: str
    version: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Applicant:
    """A process that would be a worker. rank, job: what it is already, and of which job; None and "" if it is new."""

    name: str
    host: str
    pid: int
    start_ticks: int
    workers: int
    rank: int | None
    job: str


@dataclasses.dataclass(frozen=True, slots=True)
class Application:
    """The answer to a Challenge. apply: an Applicant and its version; proof: of that and the nonce, with the token.

    In no version there is more within it than these: what is nested deep cannot be encoded again.
    """

    apply: dict[str, str | int | None]
    proof: str

    @property
    def version(self) -> object:
        """Of the process that has sent it."""
        return self.apply.get("version", 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """The process is this worker from now on."""

    rank: int
    name: str
    job: str


@dataclasses.dataclass(frozen=True, slots=True)
class Introduction:
    """A launcher's first message to the head of its job. ranks: from the first one to the one after the last."""

    token: str
    ranks: tuple[int, int]
    version: int = 0


_EVENTS = (
    events.Ready, events.Inside, events.Guarded, events.Begun, events.Updated, events.Over, events.Left, events.Ended,
    events.Stopped, events.Lost,
)  # fmt: skip
_EFFECTS = (events.Enter, events.End, events.Kill, events.Awaited, events.Look, events.Stop)
_REPORTS = (
    events.Guarded, events.Begun, events.Updated, events.Over, events.Left, events.Ready, events.Inside, events.Ended,
    events.Stopped, ControllerWanted, Raised, Done, Hello,
)  # fmt: skip
_ORDERS = (events.End, events.Kill, events.Look, Entry, ControllerAnswer, Dismissed, Refused, Done, Beat)
_GREETINGS = (Challenge, Application, Admission, Introduction)
_WITHIN = (Applicant, Seat)
KINDS = tuple(dict.fromkeys((*_EVENTS, *_EFFECTS, *_REPORTS, *_ORDERS, *_GREETINGS, *_WITHIN)))
"""All types that go over a connection, those within others as well."""

Report = (
    events.Guarded | events.Begun | events.Updated | events.Over | events.Left | events.Ready | events.Inside
    | events.Ended | events.Stopped | ControllerWanted | Raised | Done | Hello
)  # fmt: skip
Order = events.End | events.Kill | events.Look | Entry | ControllerAnswer | Dismissed | Refused | Done | Beat
Greeting = Challenge | Application | Admission | Introduction


def to_message(what: events.Event | events.Effect | Greeting | Report | Order) -> dict[str, Any]:
    """What another host's launcher understands."""
    return {"kind": type(what).__name__, **dataclasses.asdict(what)}


def to_launcher(report: Report) -> dict[str, Any]:
    """What `report_of` understands, there or in the scheduler."""
    message = to_message(report)
    return message if isinstance(report, Hello) else _without_rank(message)


def to_worker(order: Order) -> dict[str, Any]:
    """What `order_of` understands."""
    return _without_rank(to_message(order))


def report_of(rank: int, message: Mapping[str, Any]) -> Report:
    """What the worker that is `rank` has said; an event, or something for the shell. FormatError for what is none."""
    rank_said = {} if message.get("kind") == Hello.__name__ else {"rank": rank}
    found: Report = _of({**message, **rank_said}, _REPORTS)
    return found


def order_of(message: Mapping[str, Any]) -> Order:
    """What a worker is told. FormatError for what is none."""
    found: Order = _of({**message, "rank": OWN}, _ORDERS)
    return found


def event_of(message: Mapping[str, Any]) -> events.Event:
    """FormatError for what is none."""
    found: events.Event = _of(message, _EVENTS)
    return found


def effect_of(message: Mapping[str, Any]) -> events.Effect:
    """FormatError for what is none."""
    found: events.Effect = _of(message, _EFFECTS)
    return found


def challenge_of(message: Mapping[str, Any]) -> Challenge:
    """FormatError for what is none."""
    found: Challenge = _of(message, (Challenge,))
    return found


def application_of(message: Mapping[str, Any]) -> tuple[Application, Applicant | None]:
    """None from a process of another version, which may say other things there. FormatError for what is none."""
    found: Application = _of(message, (Application,))
    if found.version != PROTOCOL:
        return found, None
    return found, _converted(found.apply, Applicant)


def answer_of(message: Mapping[str, Any]) -> Admission | Refused:
    """That of a scheduler to an application. FormatError for what is none."""
    found: Admission | Refused = _of(message, (Admission, Refused))
    return found


def introduction_of(message: Mapping[str, Any]) -> Introduction:
    """FormatError for what is none."""
    found: Introduction = _of(message, (Introduction,))
    return found


def difference(version: object, own: int = PROTOCOL) -> str | None:
    """What is wrong with a peer of this version, and what to do.

    >>> difference(PROTOCOL) is None
    True
    """
    if version == own:
        return None
    return (
        f"speaks version {version!s:.20} of this protocol, not {own}: install the same version of lastwords everywhere"
    )


def proof_of(token: str, nonce: str, application: dict[str, Any]) -> str:
    """That whoever sends `application` in answer to `nonce` knows the token. An older one proves nothing."""
    said = json.dumps([nonce, application], sort_keys=True).encode()
    return hmac.new(token.encode(), said, hashlib.sha256).hexdigest()


def _without_rank(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "rank"}


def _of(message: Mapping[str, Any], kinds: tuple[Any, ...]) -> Any:
    kind = next((one for one in kinds if one.__name__ == message.get("kind")), None)
    if kind is None:
        raise FormatError(f"{message.get('kind')!r:.80} is nothing that can be said here")
    return _converted({key: value for key, value in message.items() if key != "kind"}, kind)


def _converted(fields: Mapping[str, Any], kind: type[Any]) -> Any:
    """No field may be left out, whatever its default: that is for whoever makes one here."""
    missing = {one.name for one in dataclasses.fields(kind)} - {*fields, "version"}
    try:
        if missing:
            raise FormatError(f"{kind.__name__} without {', '.join(sorted(missing))}")
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise FormatError(f"{kind.__name__}: {error}") from error
