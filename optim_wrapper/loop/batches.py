"""`Batches`: a loader whose position is state, for loops in which neither `steps()` nor the loader itself sets it back.

A framework's loop iterates over its loader once an epoch, and may have fetched a batch more than it has trained on. So
what is kept of an epoch is how many batches were used, the random streams of its begin, from which its order was drawn,
and those right before the batch was fetched that is next: in a resumed run that batch is fetched again with them, and
then the streams are put where they were when the step ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.loop.data_position import (
    PERSISTENT,
    generators,
    loader_facts,
    open_epoch,
    pass_over,
    static_reasons,
)
from lastwords.optim_wrapper.state.generators import State, of_stream, state_of
from lastwords.optim_wrapper.streams.rng_streams import NumpyStream, PythonStream, TorchStream


class Loop(Protocol):
    """What of a run is asked here. All on the training thread."""

    def begin_step(self) -> None:
        """The next step begins here, and here a resumed run goes on."""

    def know_data(self, loader: object) -> None:
        """The loop iterates over this."""

    def not_exact(self, *reasons: str) -> None:
        """Why a resume is not."""


class _At(NamedTuple):
    """Where an epoch stands: so many of its batches are used, and the streams of its begin and of the next fetch."""

    epoch: int = 0
    used: int = 0
    start: Mapping[str, bytes] = {}
    fetch: Mapping[str, bytes] = {}
    ended: bool = False


class Batches:
    """Iterate over it in the loader's place, once an epoch, and give it to `local_extras`. Training thread.

    loader: a DataLoader, or any iterable whose iterators yield an epoch each. ahead: the loop fetches one batch more
    than it has trained on (accelerate's loaders do). In a resumed run the first iterator begins after the batches that
    were used, or is a new epoch if all of them were; samplers have to know their epoch by then (`set_epoch`). Before
    each fetch it says `step_begin()`. ConfigError if it is not among the `local_extras` of a run that has started.
    """

    def __init__(self, loader: Any, *, ahead: bool = False) -> None:
        self.loader, self._ahead = loader, ahead
        self._facts = loader_facts(loader, sized=False)
        self._loop: Callable[[], Loop] | None = None
        self._resumed: _At | None = None
        self._at = _At()
        self._given = 0
        self._streams: dict[str, State] = {}
        self._known = self._opened = False

    def join(self, loop: Callable[[], Loop]) -> None:
        """It belongs to this run from now on. loop: asked for once the run has started."""
        self._loop = loop

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._loop is None:
            raise ConfigError("Batches has to be in local_extras= of lastwords.protect() before it is iterated over")
        return self._epoch(self._loop())

    # ------------------------------------------------------------------ its state

    def state_dict(self) -> dict[str, Any]:
        """Of the batches that were used; those that are fetched in advance are not."""
        at = self._resumed or self._now()
        streams = {"start": at.start, "fetch": at.fetch}
        return {
            "epoch": at.epoch,
            "used": at.used,
            "ended": at.ended,
            **{name: {key: torch.frombuffer(bytearray(state), dtype=torch.uint8) for key, state in states.items()}
               for name, states in streams.items()},
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iterator goes on there."""
        start, fetch = ({key: one.numpy().tobytes() for key, one in state[name].items()} for name in ("start", "fetch"))
        self._resumed = _At(int(state["epoch"]), int(state["used"]), start, fetch, bool(state["ended"]))

    def _now(self) -> _At:
        in_hand = self._ahead and not self._at.ended and self._given > 0
        return self._at._replace(used=self._given - in_hand, fetch=self._at.fetch if in_hand else {})

    # ------------------------------------------------------------------ an epoch

    def _epoch(self, loop: Loop) -> Iterator[Any]:
        if not self._known:
            self._known = True
            loop.know_data(self.loader)
            loop.not_exact(*static_reasons(self.loader, self._facts, "refetch"))
        loop.begin_step()
        at, self._resumed = self._resumed or self._now(), None
        self._streams = _streams_of(self.loader)
        in_hand: list[Any] = []
        if self._given or at.ended or at.used in (0, self._facts.batches):
            self._at, self._given = _At(at.epoch + 1, start=self._taken()), 0
            iterator = self._open()
        else:
            iterator, in_hand = self._go_on(at, loop)
        if self._facts.persistent_workers and self._at.epoch > 1:
            loop.not_exact(PERSISTENT)
        yield from in_hand
        while True:
            if self._given != self._facts.batches:  # else what comes now is the epoch's end, which belongs to a step
                loop.begin_step()
            self._at = self._at._replace(fetch=self._taken())
            try:
                batch = next(iterator)
            except StopIteration:
                self._at = self._at._replace(ended=True)
                return
            self._given += 1
            yield batch

    def _go_on(self, at: _At, loop: Loop) -> tuple[Iterator[Any], list[Any]]:
        """An iterator over the rest of the epoch, and what had been fetched in advance. The streams stay as they are.

        An epoch's order depends on the streams at its begin, the batch in hand on those right before it was fetched.
        """
        here = self._taken()
        self._put(at.start)
        self._at, self._given, in_hand = at, at.used, []
        iterator = self._open()
        put_back = partial(self._put, at.fetch or here)
        loop.not_exact(*pass_over(self.loader, self._facts, iterator, at.used, put_back, show_progress=False))
        if at.fetch:
            in_hand = [next(iterator)]
            self._given += 1
        self._put(here)
        return iterator, in_hand

    def _open(self) -> Iterator[Any]:
        late, self._opened = not self._opened and self._at.epoch > 1, True
        return open_epoch(self.loader, self._facts, late=late)

    def _taken(self) -> dict[str, bytes]:
        return {name: state.take() for name, state in self._streams.items()}

    def _put(self, states: Mapping[str, bytes]) -> None:
        for name, state in states.items():
            if name in self._streams:
                self._streams[name].put(state)


def _streams_of(loader: Any) -> dict[str, State]:
    """The process's own on the CPU, which a loader may draw from, and the loader's."""
    found = {"python": of_stream(PythonStream()), "numpy": of_stream(NumpyStream()),
             "torch": of_stream(TorchStream("torch", torch.default_generator))}  # fmt: skip
    return found | {name: state for name, one in generators(loader).items() if (state := state_of(one)) is not None}
