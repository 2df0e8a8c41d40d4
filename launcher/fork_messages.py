"""What a fork server and its launcher say to each other; one message is one line (link.py, protocol.py).

The server says `Importing` and `Made` first; `Forks` is answered by a `Forked` for each process, and one for what has
gone wrong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


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


def as_text(one: Fork) -> Fork:
    """The same, as a message can say it: names and arguments of the system's may be no Unicode."""
    environment = {_text(name): _text(value) for name, value in one.environment.items()}
    return replace(one, environment=environment, argv=[*map(_text, one.argv)])


def from_text(one: Fork) -> Fork:
    """The inverse."""
    environment = {_native(name): _native(value) for name, value in one.environment.items()}
    return replace(one, environment=environment, argv=[*map(_native, one.argv)])


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
    """pids: of ranks that were made, by rank as text. problem: why others were not."""

    pids: Mapping[str, int]
    problem: str = ""
