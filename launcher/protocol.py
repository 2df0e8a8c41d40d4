"""What the processes of a job say to each other, encoded and decoded here alone. One message is one line (link.py).

"kind" is the name of a type below or in events.py, beside it stand the fields of that type. Whose rank it is, whoever
holds the connection of one knows best.

    rank to launcher         RankHello first; then what happens to it, `FromRank`
    launcher to rank         `ToRank`
    scheduler to supervisor  Challenge first, Rejected or Admission next; then `ToSupervisor`
    supervisor to scheduler  Application first; where its rank runs, Inside next, else Ready; then what happens to the
                             rank, RankRuns for each process of it, and Done where its end was that of its training
    between hosts            Introduction first, then events up to the head of the job, and effects down

Who differs in PROTOCOL from the other end is refused, with what to do. So the first message of either side, Rejected
and Stop keep their form in all versions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

import msgspec

from lastwords.errors import FormatError
from lastwords.launcher import events
from lastwords.launcher.registry import Rejected
from lastwords.optim_wrapper.launch.reporter import PROTOCOL

# What a fork server and its launcher say to each other; one message is one line (link.py, protocol.py).
#
# The launcher says `Preload` first, which is answered by `Importing` and `Made`; `Forks` by a `Forked` for each
# process, and one for what has gone wrong.


@dataclass(frozen=True, slots=True)
class Fork:
    """A process for a rank; below 0: a controller. environment: all of it. argv: the script, or module, and its
    arguments; of a controller, those alone.

    stdout, stderr: paths of files that are appended to; "": those of the launcher. threads: of each pool. report: name
    of the launcher's socket, where the rank says what happens to it. step: that is saved, from which it has to go on.
    address: of rank 0's host, "": as in the environment. dies_with: pid of a parent whose death is the rank's; 0: none.
    cpus: on which alone it may run; none: as this process.
    """

    rank: int
    environment: Mapping[str, str]
    argv: Sequence[str]
    is_module: bool
    stdout: str
    stderr: str
    threads: int
    report: str
    step: int
    address: str
    dies_with: int
    cpus: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Preload:
    """What a fork server imports once torch is there. environment: of all ranks, without what differs between them.

    argv: where the script's own modules are, and the modules to import, in this order. left_out: modules that cannot
    be.
    """

    environment: Mapping[str, str]
    argv: Sequence[str]
    left_out: Sequence[str] = ()


def as_text(one: OfSystem) -> OfSystem:
    """The same, as a message can say it: names and arguments of the system's may be no Unicode."""
    environment = {_text(name): _text(value) for name, value in one.environment.items()}
    return replace(one, environment=environment, argv=[*map(_text, one.argv)])


def from_text(one: OfSystem) -> OfSystem:
    """The inverse."""
    environment = {_native(name): _native(value) for name, value in one.environment.items()}
    return replace(one, environment=environment, argv=[*map(_native, one.argv)])


OfSystem = TypeVar("OfSystem", Fork, Preload)


def _text(native: str) -> str:
    return os.fsencode(native).decode("latin-1")


def _native(text: str) -> str:
    return os.fsdecode(text.encode("latin-1"))


@dataclass(frozen=True, slots=True)
class Forks:
    """Of one generation on this host, in this order."""

    forks: Sequence[Fork]


@dataclass(frozen=True, slots=True)
class Importing:
    """This module is imported now."""

    module: str


@dataclass(frozen=True, slots=True)
class Made:
    """All is imported. problem: why this process must not fork; "" if it may. module: whose import has led to that.

    seconds: that the imports have taken, by module.
    """

    problem: str = ""
    module: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Forked:
    """pids: of ranks that were made, by rank as text. problem: why others were not. errno: 0 if that is no OSError."""

    pids: Mapping[str, int]
    problem: str = ""
    errno: int = 0


OWN = -1
"""The rank of whoever has not shown yet which one it is."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankHello:
    """A rank's first message."""

    rank: int
    pid: int
    version: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class RankRaised:
    """An exception leaves the script, and with it the process ends. error, lasting: as of `events.Ended`."""

    error: str
    lasting: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """The training loop is about to begin. files: paths of what the program consists of."""

    files: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class ControllerWanted:
    """The rank would have a fork as its controller. log: what it prints goes there. asked: number of the answer."""

    arguments: list[str]
    environment: dict[str, str]
    log: str
    asked: int


@dataclasses.dataclass(frozen=True, slots=True)
class ControllerAnswer:
    """pid: None if it can have none."""

    asked: int
    pid: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """From a worker of a cluster: its rank has come to its end, in this generation. To it: that is kept."""

    entry: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class RankRuns:
    """From a worker of a cluster: the process of its rank, on its own host."""

    pid: int
    start_ticks: int


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


OfRank = events.Guarded | events.Begun | events.Updated | events.Over | events.Leaving
"""What a rank itself says of what happens to it."""
FromRank = OfRank | ControllerWanted | Loaded | RankRaised
ToRank = ControllerAnswer | Dismissed | Rejected
FromSupervisor = OfRank | events.Ready | events.Inside | events.Ended | events.Stopped | RankRuns | Done
ToSupervisor = events.Enter | events.End | events.Kill | events.Look | Dismissed | Rejected | Done | Beat
FromHost = OfRank | events.Ready | events.Inside | events.Ended | events.Stopped | events.Lost
ToHost = events.Enter | events.End | events.Kill | events.Awaited | events.Look | events.Stop
Answer = Admission | Rejected
"""That of a scheduler to an application."""
Greeting = RankHello | Challenge | Application | Admission | Introduction
Message = FromRank | ToRank | FromSupervisor | ToSupervisor | FromHost | ToHost | Greeting
KINDS = (*get_args(Message), Applicant, events.Seat)
"""All types that go over a connection, those within others as well."""


def to_message(what: Any) -> dict[str, Any]:
    """What `read` understands, of a dataclass."""
    return {"kind": type(what).__name__, **dataclasses.asdict(what)}


def read(message: Mapping[str, Any], kinds: Any, rank: int | None = None) -> Any:
    """One of these types (a type, or a union). FormatError for what is none.

    rank: whose word it is, whatever it says of that. No field may be left out, whatever its default: that is for
    whoever makes one here.
    """
    kind = next((one for one in get_args(kinds) or (kinds,) if one.__name__ == message.get("kind")), None)
    if kind is None:
        raise FormatError(f"{message.get('kind')!r:.80} is nothing that can be said here")
    return _converted(message if rank is None else {**message, "rank": rank}, kind)


def application_of(message: Mapping[str, Any]) -> tuple[Application, Applicant | None]:
    """None from a process of another version, which may say other things there. FormatError for what is none."""
    found: Application = read(message, Application)
    return found, _converted(found.apply, Applicant) if found.version == PROTOCOL else None


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


def _converted(fields: Mapping[str, Any], kind: type[Any]) -> Any:
    missing = {one.name for one in dataclasses.fields(kind)} - {*fields, "version"}
    try:
        if missing:
            raise FormatError(f"{kind.__name__} without {', '.join(sorted(missing))}")
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise FormatError(f"{kind.__name__}: {error}") from error
