"""Every exception that a caller may see; all of them are in `lastwords`, too.

There is one class for each different *reaction* of the caller, and each carries its data.
A message says what happened, where, and what to do about it.
"""

from __future__ import annotations

import errno as _errno
from collections.abc import Iterable, Sequence
from typing import Final

SHORTAGES = frozenset({_errno.EMFILE, _errno.ENFILE, _errno.EAGAIN, _errno.ENOMEM, _errno.ENOBUFS})
"""Of descriptors, processes or memory: they pass, so nothing follows from them but another try."""


class LastWordsError(Exception):
    """Root of all errors raised by lastwords."""


class ConfigError(LastWordsError, ValueError):
    """The caller asked for something that cannot work; fix the call or the environment."""


class NotAnOptimizerError(ConfigError, TypeError):
    """`OptTFTWrapper` was given something that is not a `torch.optim.Optimizer`."""


class UnstorableError(ConfigError):
    """A value that a checkpoint cannot store. reason: its place and type, for whoever goes on without it."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class NotTextError(ConfigError, TypeError):
    """A path was given as something else than a str."""


class NotARankError(ConfigError, TypeError):
    """A rank was given as something else than an int."""


class WrongTypeError(ConfigError, TypeError):
    """An argument is of a type that cannot be meant."""


class NoStrategiesError(ConfigError, NotADirectoryError):
    """Strategies were to be read from something that is no directory."""


class ProtocolError(LastWordsError):
    """A peer sent something that the protocol does not allow; it is refused and logged."""


class CommandFailedError(LastWordsError):
    """A command that is drilled fails, or hangs, by itself: nothing was killed yet."""


class UnavailableError(LastWordsError):
    """A peer could not be reached in a bounded time; worth a retry."""


class GateFailedError(UnavailableError):
    """The gate of a step can never be passed any more: a peer, or the network, is gone."""


class CheckpointError(LastWordsError):
    """Root of the errors about checkpoint files."""


class FormatError(CheckpointError):
    """A file is damaged, of another step or model, or of a format newer than this code."""


class NewerFormatError(FormatError):
    """A file is sound as far as is known, and of a format newer than this code: it may be the newest checkpoint."""


class GroupInfoError(FormatError, ValueError):
    """A group_info file is missing, empty, damaged, or without the list of ranks that it is for."""


class StrategyError(FormatError, ValueError):
    """A strategy file is missing, empty, damaged, or contradicts another one."""


class IncompleteError(CheckpointError):
    """Something that a checkpoint needs is not there.

    `missing` names what is absent (files, ranks, units or tensors).
    """

    def __init__(self, message: str, *, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing: tuple[str, ...] = tuple(missing)


class BusyError(CheckpointError):
    """Another living process is writing to the same place. Worth a retry when it has ended."""


class ReplacedError(CheckpointError):
    """A checkpoint was replaced while it was read, so its files are of two; nothing is damaged. Worth a retry."""


class MismatchError(CheckpointError):
    """A checkpoint is sound but belongs to another model, optimizer or world size.

    `missing` is in the model but not in the checkpoint, `extra` the reverse;
    `different` maps a tensor's name to "saved ... here ...".
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        extra: Sequence[str] = (),
        different: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing: tuple[str, ...] = tuple(missing)
        self.extra: tuple[str, ...] = tuple(extra)
        self.different: dict[str, str] = dict(different or {})


class StorageError(CheckpointError):
    """The file system refused: no space, no permission, a failed write or fsync.

    `errno` is the system's error number, 0 where there is none.
    """

    def __init__(self, message: str, *, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno


def is_shortage(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that the system is short of something for now.

    >>> is_shortage(OSError(_errno.EMFILE, "Too many open files")), is_shortage(FileNotFoundError())
    (True, False)
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError | StorageError) and cause.errno in SHORTAGES:
            return True
        cause = cause.__cause__
    return False


def named(error: BaseException) -> str:
    """Type and text of any exception, for a message; an assertion or a MemoryError often has no text.

    >>> named(ValueError("too small")), named(MemoryError())
    ('ValueError: too small', 'MemoryError')
    """
    text = str(error)
    return f"{type(error).__name__}: {text}" if text.strip() else type(error).__name__


NAMED_RANKS_MAX: Final = 8
"""A line names at most this many ranks; a job may have thousands."""


def some(items: Iterable[object], shown: int = 3, between: str = ", ") -> str:
    """For a message: the first ones, and how many more there are.

    >>> some("abc"), some("abcde")
    ('a, b, c', 'a, b, c and 2 more')
    """
    every = [*items]
    return between.join(map(str, every[:shown])) + (f" and {len(every) - shown} more" if len(every) > shown else "")


def counted(number: int, what: str) -> str:
    """
    >>> counted(1, "rank"), counted(3, "rank")
    ('1 rank', '3 ranks')
    """
    return f"{number} {what}{'s' * (number != 1)}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks for people.

    >>> ranks_text([3]), ranks_text([2, 0]), ranks_text(range(20))
    ('rank 3', 'ranks 0 and 2', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    ordered = sorted(ranks)
    if not ordered:
        return "no rank"
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) <= NAMED_RANKS_MAX:
        return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"
    return f"ranks {some(ordered, NAMED_RANKS_MAX)}"
