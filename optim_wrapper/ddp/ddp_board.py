"""Rank 0's order of gradients, told to the other ranks of its DDP once, through the process group's store.

Until DDP's logging data show the buckets, nobody else knows that order, and it is the one that counts. No collective:
a rank that has died must keep nobody waiting, so a thread of its own writes the order, or looks for it now and then.
"""

from __future__ import annotations

import json
import logging
import threading

import torch.distributed as dist

from lastwords import threads
from lastwords.checkpoint.codec import from_json
from lastwords.errors import FormatError, UnavailableError
from lastwords.torch_private import Store

_log = logging.getLogger(__name__)

_LOOK_S = 0.02
_LOOKS_MAX = 3000
"""A minute of looks: rank 0 may reach its first backward pass later than this rank."""

Passes = list[list[int]]


class Board:
    """One DDP's entry in the store. key: the same on all ranks of its process group; writes: this is its rank 0."""

    def __init__(self, store: Store, key: str, *, writes: bool) -> None:
        self._store = store
        self._key = key
        self._writes = writes
        self._there = threading.Event()
        self._over = threading.Event()
        self._found: Passes | None = None
        self._thread: threading.Thread | None = None

    def exchange(self, passes: Passes) -> None:
        """Write these passes, or begin to look for those of rank 0; returns at once."""
        if self._thread is None:
            act = self._write if self._writes else self._look
            try:
                self._thread = threads.start(act, passes, name="lastwords-gradient-order")
            except UnavailableError as error:
                _log.info("the order of DDP's gradients is not exchanged yet: %s", error)

    def found(self, wait_s: float) -> Passes | None:
        """Rank 0's passes; None if they have not come after `wait_s`."""
        if self._thread is not None:
            self._there.wait(wait_s)
        return self._found

    def close(self) -> None:
        """Nobody will ask any more."""
        self._over.set()

    def _write(self, passes: Passes) -> None:
        try:
            self._store.set(self._key, json.dumps(passes))
        except (dist.DistError, RuntimeError) as error:
            _log.info("the order of DDP's gradients could not be sent to the other ranks: %s", error)

    def _look(self, _: Passes) -> None:
        try:
            for _look in range(_LOOKS_MAX):
                if self._store.check([self._key]):
                    self._found = _passes(self._store.get(self._key))
                    break
                if self._over.wait(_LOOK_S):
                    break
        except (dist.DistError, RuntimeError) as error:
            _log.info("rank 0's order of DDP's gradients could not be read: %s", error)
        self._there.set()


def _passes(text: bytes) -> Passes | None:
    """
    >>> _passes(b"[[1, 0]]"), _passes(b"{}"), _passes(b"[[true]]"), _passes(b"\\xff")
    ([[1, 0]], None, None, None)
    """
    try:
        return from_json(text, list[list[int]])
    except FormatError:
        return None
