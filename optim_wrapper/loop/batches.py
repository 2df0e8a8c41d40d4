"""`Batches`: a loader whose position is state, for loops in which neither `steps()` nor the loader itself sets it back.

A framework's loop iterates over its loader once an epoch, and may have fetched a batch more than it has trained on. So
what is kept of an epoch is how many batches were used, the random streams of its start, from which its order was drawn,
and those right before the batch was fetched that is next: in a resumed run that batch is fetched again with them, and
then the streams are put where they were when the step ended. Likewise with what moves of the loader's attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

from lastwords.errors import ConfigError, some
from lastwords.optim_wrapper.loop.data_position import (
    PERSISTENT,
    EpochOrder,
    len_of,
    loader_facts,
    open_epoch,
    pass_over,
    static_reasons,
    streams_of,
)
from lastwords.optim_wrapper.state.generators import GeneratorState
from lastwords.optim_wrapper.state.object_walk import Cell, Walk, own_of

UNKNOWN_END = (
    "an epoch's last step had just ended, and samplers draw once more from their own generators ({}) where a loop asks "
    "for another batch, as `for` does, which is not known here"
)

COUNTS = (
    "to iterate over the loader changes {}, so where a run goes on in the middle of an epoch other batches may come; "
    "let them depend on the epoch (set_epoch) or on a random generator instead"
)

_ITERATOR = "_iterator"
_EPOCH = "epoch"
"""What samplers and data sets call it: the argument of `set_epoch`."""

_LOADERS = "loader."


class RunLike(Protocol):
    """What of a run is asked here. All on the training thread."""

    def begin_step(self) -> None:
        """The next step begins here, and here a resumed run goes on."""

    def know_loader(self, loader: object) -> None:
        """The loop will iterate over this one."""

    def know_data(self, loader: object) -> None:
        """The loop iterates over this."""

    def loader_values(self, *, look: bool = False) -> str:
        """What moves of the loader, as of now. look: also what has moved since the last look."""

    def loader_as_of(self, values: str) -> Callable[[], None]:
        """Make the loader what it was then; what makes it what it is now."""

    def not_exact(self, *reasons: str) -> None:
        """Why a resume is not."""


class _At(NamedTuple):
    """Where an epoch stands: so many of its batches are used, and the streams of its start and of the next fetch.

    first: those of the first fetch, if anything was drawn between it and the start.
    told: what samplers took for their epoch at its start, by name. Some count on as soon as the last index is asked
    for, and workers ask for it long before the epoch ends.
    values: what had moved of the loader, as of the epoch's start and as of the next fetch.
    order: see `EpochOrder.said`.
    """

    epoch: int = 0
    used: int = 0
    start: Mapping[str, bytes] = {}
    fetch: Mapping[str, bytes] = {}
    ended: bool = False
    told: Mapping[str, int] = {}
    first: Mapping[str, bytes] = {}
    values: tuple[str, str] = ("", "")
    order: tuple[int, str] | None = None


class Batches:
    """Iterate over it in the loader's place, once an epoch, and give it to `local_extras`. Training thread.

    In a resumed run the first iterator begins after the batches that were used, or is a new epoch if all of them were
    (of a loader without a length, if it was asked for more); samplers have to know their epoch by then (`set_epoch`).
    Before each fetch it calls `step_begin()`. An iterator may be made before the run has started.

    Args:
        loader: a DataLoader, or any iterable whose iterators yield an epoch each; None: `stand_in` says it later.
        ahead: the loop fetches one batch more than it has trained on (accelerate's loaders do).

    Raises:
        ConfigError: a fetch where it is not among the `local_extras` of a run that has started.
    """

    def __init__(self, loader: Any = None, *, ahead: bool = False) -> None:
        self.loader, self.ahead = loader, ahead
        self._plain: type | None = None
        self.given_by: Any = None
        """What hands its batches on, one later: what the loop iterates over."""
        self.over = False
        """The next iterator is of an epoch that has ended, and gives nothing: its end alone is done again."""
        self._loop: Callable[[], RunLike] | None = None
        self._resumed: _At | None = None
        self._at = _At()
        self._given = 0
        self._streams: dict[str, GeneratorState] = {}
        self._begun: Mapping[str, bytes] = {}
        """Streams right after the newest epoch's start."""
        self._opened = self._said = False
        self._order = EpochOrder()

    def join(self, loop: Callable[[], RunLike]) -> None:
        """It belongs to this run from now on. loop: asked for once the run has started."""
        self._loop = loop

    def stand_in(self, loader: Any) -> None:
        """Iterate over this one; whoever iterates over the loader itself iterates over these batches from now on."""
        self.loader, self._plain = loader, type(loader)
        if self._loop is not None:
            self._loop().know_loader(loader)
        loader.__class__ = type(self._plain.__name__, (self._plain,), {"__iter__": lambda loader: iter(self)})

    def known(self) -> None:
        """The run has started, and the loader stood in before."""
        assert self._loop is not None
        self._loop().know_loader(self.loader)

    @property
    def at_end(self) -> bool:
        """Whether nothing is left of the epoch under way."""
        return (self._resumed or self._at).ended

    def end_epoch(self) -> None:
        """Nothing is left of the epoch under way: the next iterator is a new one.

        For a loop that leaves an epoch before the loader's end, as soon as it has the last batch that it takes: what a
        dead rank leaves of a step is as of that step's backward pass.
        """
        self._at = self._at._replace(ended=True)
        if self._resumed is not None:
            self._resumed = self._resumed._replace(ended=True)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._loop is None:
            return self._early(self._new_epoch())
        if self.over:
            self.over = False
            return iter(())
        loop = self._loop()
        if self._resumed is not None:
            return self._rest(loop)
        loop.begin_step()
        return self._whole(loop, self._new_epoch(loop))

    def _early(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """An epoch whose iterator was made before the run started: in a resumed one that is for nothing."""
        if self._loop is None:
            raise ConfigError("Batches has to be in local_extras= of lastwords.protect() before it gives any batch")
        loop = self._loop()
        if self._resumed is not None:
            self._opened = False
            if _ITERATOR in (own_of(self.loader) or {}):
                self.loader._iterator = None  # persistent workers, of another base seed
            yield from self._rest(loop)
            return
        loop.begin_step()
        self._look(loop)
        yield from self._whole(loop, iterator)

    # ------------------------------------------------------------------ its state

    def state_dict(self) -> dict[str, Any]:
        """Of the batches that were used; those that are fetched in advance are not."""
        return (self._resumed or self._now())._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iterator goes on there."""
        self._resumed = _At(**state)

    def _now(self) -> _At:
        in_hand = self.ahead and not self._at.ended and self._given > 0
        at = self._at if in_hand else self._at._replace(fetch={}, values=(self._at.values[0], ""))
        return at._replace(used=self._given - in_hand, order=self._order.said)

    # ------------------------------------------------------------------ an epoch

    def _new_epoch(self, loop: RunLike | None = None) -> Iterator[Any]:
        """What is drawn as an iterator is made is drawn now."""
        self._look(loop)
        at = self._resumed or self._at
        told = {name: one.told for name, one in _epochs_of(self.loader).items()}
        values = "" if loop is None else loop.loader_values(look=True), ""
        self._resumed, self._given = None, 0
        self._at = _At(at.epoch + 1, start=self._taken(), told=told, values=values)
        if loop is not None and self._facts.persistent_workers and self._at.epoch > 1:
            loop.not_exact(PERSISTENT)
        return self._open()

    def _rest(self, loop: RunLike) -> Iterator[Any]:
        """The first epoch of a resumed run, of which nothing is drawn before its first batch is asked for."""
        loop.begin_step()
        at = self._resumed
        own = [name for name in streams_of(self.loader) if name.startswith(_LOADERS)]
        if at is not None and at.used == len_of(self.loader) and own and not (at.ended or self.ahead):
            loop.not_exact(UNKNOWN_END.format(", ".join(sorted(own))))
        if at is None or at.ended or at.used in (0, len_of(self.loader)):
            yield from self._whole(loop, self._new_epoch(loop))
            return
        self._look(loop)
        self._resumed = None
        iterator, in_hand = self._go_on(at, loop)
        yield from in_hand
        yield from self._whole(loop, iterator)

    def _whole(self, loop: RunLike, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            if self._given != self._facts.batches:  # else what comes now is the epoch's end, which belongs to a step
                loop.begin_step()
            now = self._taken()
            first = now if self._given == 0 and now != self._begun else self._at.first
            values = self._at.values[0], loop.loader_values() if self.ahead else ""
            self._at = self._at._replace(fetch=now, first=first, values=values)
            try:
                batch = next(iterator)
            except StopIteration:
                self._at = self._at._replace(ended=True)
                return
            self._given += 1
            self._order.hear_batch(self.loader, self._facts, batch)
            yield batch

    def _go_on(self, at: _At, loop: RunLike) -> tuple[Iterator[Any], list[Any]]:
        """An iterator over the rest of the epoch, and what had been fetched in advance. Streams and attributes stay.

        An epoch's order depends on what they were at its start, the batch in hand on what they were right before it was
        fetched.
        """
        here, in_hand = self._taken(), list[Any]()
        self._at, self._given = at, at.used
        was = _counted(self.loader)
        as_here = loop.loader_as_of(at.values[0])
        self._put(at.start)
        before = _counted(self.loader)
        for name, one in _epochs_of(self.loader).items():
            own_of(one.holder)[one.key] = at.told.get(name, one.told)
        self._order.expect(at.order)
        iterator = self._open()
        self._put(at.first)
        put_back = partial(self._put, at.fetch or here)
        reasons = pass_over(self.loader, self._facts, iterator, self._order, at.used, put_back, show_progress=False)
        passed = _counted(self.loader)
        epochs = _epochs_of(self.loader)
        if at.fetch:
            loop.loader_as_of(at.values[1])
            self._set_epochs(epochs)
            then = _counted(self.loader)
            in_hand = [next(iterator)]
            self._order.hear_batch(self.loader, self._facts, in_hand[0])
            self._given += 1
            epochs = _epochs_of(self.loader)
        loop.not_exact(*(reasons or self._order.otherwise()))
        as_here()
        self._set_epochs(epochs)
        now = _counted(self.loader)
        counts = _differing(was, now)
        counts |= _differing(before, passed) & _differing(passed, then if at.fetch else now)
        if counts:
            loop.not_exact(COUNTS.format(some(sorted(counts))))
        self._put(here)
        return iterator, in_hand

    def _set_epochs(self, epochs: Mapping[str, Cell]) -> None:
        """Iterating over it has set them, or the saved run's next epoch begins with them."""
        for name, one in _epochs_of(self.loader).items():
            if name in epochs:
                own_of(one.holder)[one.key] = epochs[name].told

    def _open(self) -> Iterator[Any]:
        late, self._opened = not self._opened and self._at.epoch > 1, True
        with self._as_it_was():
            iterator = open_epoch(self.loader, self._facts, self._order, late=late)
        self._begun = self._taken()
        return iterator

    def _look(self, loop: RunLike | None) -> None:
        """At the loader, once, and at the streams that it may draw from."""
        with self._as_it_was():
            if not self._streams:
                self._facts = loader_facts(self.loader, sized=False)
            if loop is not None and not self._said:
                self._said = True
                loop.know_data(self.loader)
                loop.not_exact(*static_reasons(self._facts, "refetch"))
            self._streams = streams_of(self.loader)

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Inside, whoever iterates over the loader has its own iterator."""
        ours = type(self.loader)
        if self._plain is not None:
            self.loader.__class__ = self._plain
        try:
            yield
        finally:
            if self._plain is not None:
                self.loader.__class__ = ours

    def _taken(self) -> dict[str, bytes]:
        return {name: state.read() for name, state in self._streams.items()}

    def _put(self, states: Mapping[str, bytes]) -> None:
        for name, state in states.items():
            if name in self._streams:
                self._streams[name].put(state)


def _counted(loader: Any) -> dict[str, str]:
    """What the attributes of a loader and its data set hold, shortened; without `_epochs_of` it."""
    cells = Walk({"loader": loader}, {}).cells.items()
    return {".".join(name): repr(cell.told) for name, cell in cells if name[1] != _EPOCH}


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def _epochs_of(loader: Any) -> dict[str, Cell]:
    """What a loader, its samplers and its data set take for their epoch."""
    cells = Walk({"loader": loader}, {}).cells.items()
    return {".".join(name): cell for name, cell in cells if name[1] == _EPOCH and type(cell.told) is int}
