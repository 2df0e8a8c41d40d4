"""What counts as a death, what only as a suspicion, and how either is said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from lastwords.controller.words import first_texts, ranks_text
from lastwords.vocabulary import DeathSource

CERTAIN: Final = frozenset((DeathSource.ROBUST_MUTEX, DeathSource.PIDFD))
"""Sources that only speak when the process has ended. The others say that nothing is heard of it."""

_DEATH_WORDS: Final[Mapping[DeathSource, str]] = {
    DeathSource.ROBUST_MUTEX: "died (killed or crashed)",
    DeathSource.PIDFD: "died (killed or crashed)",
    DeathSource.STREAM: "was lost (its connection broke and it did not reconnect)",
}
_SUSPICION_WORDS: Final[Mapping[DeathSource, str]] = {
    DeathSource.STREAM: "its connection broke",
}

_SIGNAL_NAMES: Final[Mapping[int, str]] = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    10: "SIGUSR1",
    12: "SIGUSR2",
    15: "SIGTERM",
    24: "SIGXCPU",
}


def death_text(source: DeathSource, how: str = "") -> str:
    """How a death by this source is told, without the rank. how: the process has ended, where that is known.

    >>> death_text(DeathSource.PIDFD), death_text(DeathSource.PIDFD, "SIGSEGV, segmentation fault")
    ('died (killed or crashed)', 'died (SIGSEGV, segmentation fault)')
    """
    return f"died ({how})" if how and source in CERTAIN else _DEATH_WORDS[source]


def suspicion_text(source: DeathSource) -> str:
    """How a suspicion by this source is told."""
    return _SUSPICION_WORDS.get(source, "it may have ended")


def signal_text(signal_number: int) -> str:
    """How a request to stop is told.

    >>> signal_text(15)
    'was asked to stop (SIGTERM)'
    """
    return f"was asked to stop ({_SIGNAL_NAMES.get(signal_number, f'signal {signal_number}')})"


class Causes:
    """Why an incident is on: rank -> words. Deaths, exceptions and signals are kept apart by `is_signal`."""

    def __init__(self) -> None:
        self._words: dict[int, str] = {}
        self._only_signals = True

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that caused the incident, sorted."""
        return tuple(sorted(self._words))

    def add(self, rank: int, words: str) -> bool:
        """A death or an exception; a death is added to what the rank did before. False if nothing is new."""
        known = self._words.get(rank)
        if known is not None and words in known:
            return False
        self._words[rank] = words if known is None else f"{known}, then {words}"
        self._only_signals = False
        return True

    def explain(self, rank: int, words: str, better: str) -> None:
        """What was said of a death is said with more knowledge."""
        if rank in self._words:
            self._words[rank] = self._words[rank].replace(words, better)

    def add_signal(self, rank: int, words: str) -> bool:
        """A request to stop. After a death it is the launcher's answer to that death, not a cause of its own."""
        if not self._only_signals or rank in self._words:
            return False
        self._words[rank] = words
        return True

    def text(self) -> str:
        """All causes in one phrase, ranks with the same words together; of thousands of words the first ones.

        >>> causes = Causes()
        >>> _ = causes.add_signal(1, "was asked to stop"), causes.add_signal(0, "was asked to stop")
        >>> causes.text()
        'ranks 0 and 1: each was asked to stop'
        """
        by_words: dict[str, list[int]] = {}
        for rank, words in sorted(self._words.items()):
            by_words.setdefault(words, []).append(rank)
        return first_texts(_phrase(ranks, words) for words, ranks in by_words.items())


def _phrase(ranks: Iterable[int], words: str) -> str:
    ordered = list(ranks)
    return f"{ranks_text(ordered)} {words}" if len(ordered) == 1 else f"{ranks_text(ordered)}: each {words}"
