"""Where a run stands in its data, and how to stand there again in a new process.

A torch DataLoader draws random numbers at three places: its iterator draws a base seed for the workers, the
sampler draws its order when its first index is asked for, and the dataset draws what it likes while it fetches
(in the workers, seeded from the base seed; without workers from the training's own streams). So a resume restores
the streams of the *epoch's start*, makes the iterator, passes over the batches that are done, and then restores the
streams of the step that ended last. Without workers passing over means drawing indices and fetching nothing; with
workers the batches are fetched again and dropped, as only that moves the workers' own streams.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lastwords import clock
from lastwords.checkpoint.meta import Drawn, LoopFacts
from lastwords.errors import ConfigError, MismatchError
from lastwords.optim_wrapper.launch.config import DataMode
from lastwords.optim_wrapper.state.generators import GeneratorState, of_process, state_of
from lastwords.optim_wrapper.state.object_walk import Beyond, Walk
from lastwords.optim_wrapper.state.running import is_users
from lastwords.processor.departure import say

_NO_LENGTH = (
    "; give it a __len__ (batches per epoch, the same on every rank), or write a custom loop that calls "
    "tft.step_end(epoch, step) at the end of each step"
)


LENGTH_UNKNOWN = -1

_SAMPLER_ITERATOR = "_sampler_iter"
"""Private name in torch's DataLoader iterators (2.0 to 2.13). Where it is gone, batches are fetched again instead."""

_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
"""Its loader draws where torch's does, and its iterators are torch's, with `_sampler_iter_yielded` beside the count."""


class LoaderKind(enum.Enum):
    """How a loader can be set to a position."""

    INDEXED = "a DataLoader over a map-style dataset"
    ITERABLE = "a DataLoader over an IterableDataset"
    SEQUENCE = "a list or tuple of batches"
    FOREIGN = "another iterable"


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """What a resume has to know of a loader. `batches` per epoch, this rank."""

    kind: LoaderKind
    batches: int
    workers: int
    persistent_workers: bool
    in_order: bool


PERSISTENT = (
    "the loader's workers are persistent, so the random numbers they draw after the first epoch depend on all epochs "
    "before; use persistent_workers=False if the dataset draws random numbers"
)


STARTED_WORKERS = (
    "a second loader ({}) has started persistent workers within the loop: a resumed run starts them later, which draws "
    "a random number then; use persistent_workers=False"
)


_OTHER_ORDER = (
    "the loader ({}) did not give again what the saved run's epoch had begun with: what it reads has changed since "
    "then, so what is left of the epoch may be other samples, or in another order; let it choose an epoch's samples at "
    "the epoch's start, from attributes of its own"
)

_READS_WEIGHTS = (
    "the loader's sampler ({}) has a network that is trained, and may have chosen the epoch's samples by its weights "
    "at the epoch's start; let it choose from attributes of its own, which the loop sets between two epochs"
)

_ELEMENTS_MAX = 512
"""Of each tensor of a batch so many are in the digest."""


def hear_of_workers(hear: Callable[[Any], None]) -> Callable[[], None]:
    """From now on `hear` is called with each loader that has started persistent workers; returns what ends that."""
    plain = DataLoader.__iter__

    def iterate(loader: Any) -> Any:
        new = loader.persistent_workers and vars(loader).get("_iterator") is None
        iterator = plain(loader)
        if new and vars(loader).get("_iterator") is not None:
            hear(loader)
        return iterator

    def end() -> None:
        if DataLoader.__iter__ is iterate:
            DataLoader.__iter__ = plain  # type: ignore[method-assign]

    DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    return end


def len_of(loader: Any) -> int:
    """Batches of an epoch, or samples of a data set, if it is known."""
    try:
        return len(loader)
    except TypeError:
        return LENGTH_UNKNOWN


def loader_facts(loader: Any, *, sized: bool = True) -> LoaderFacts:
    """Look at a loader; ConfigError for one without a usable length, if it has to have one."""
    name = type(loader).__name__
    try:
        batches = len(loader)
    except TypeError as error:
        if sized:
            raise ConfigError(f"the loader ({name}) has no length ({error}){_NO_LENGTH}") from error
        batches = LENGTH_UNKNOWN
    if batches < 1 and batches != LENGTH_UNKNOWN:
        raise ConfigError(
            f"the loader ({name}) is empty; is drop_last=True with fewer samples on this rank than a batch takes?"
        )
    if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
        raise ConfigError(f"the loader ({name}) cannot be iterated over")
    if isinstance(loader, list | tuple):
        kind = LoaderKind.SEQUENCE
    elif not isinstance(loader, DataLoader) or not _iterates_as_torch(type(loader)):
        kind = LoaderKind.FOREIGN
    elif isinstance(loader.dataset, IterableDataset):
        kind = LoaderKind.ITERABLE
    else:
        kind = LoaderKind.INDEXED
    workers = getattr(loader, "num_workers", 0)
    return LoaderFacts(
        kind=kind,
        batches=batches,
        workers=workers if isinstance(workers, int) else 0,
        persistent_workers=bool(getattr(loader, "persistent_workers", False)),
        in_order=bool(getattr(loader, "in_order", True)),
    )


def _iterates_as_torch(kind: type[DataLoader[Any]]) -> bool:
    return kind.__iter__ is DataLoader.__iter__ or kind.__iter__.__module__ == _STATEFUL


def streams_of(loader: Any) -> dict[str, GeneratorState]:
    """The process's own on the CPU, which a loader may draw from, the loader's, and those in the user's own code."""
    walk = Walk({"loader": loader}, {})
    own = {**walk.generators, **Beyond(walk, {}).generators}
    return of_process() | {name: state for name, one in own.items() if (state := state_of(one)) is not None}


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the sampler which epoch (1-based) begins; samplers count from 0, as in `sampler.set_epoch(epoch - 1)`."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    every = getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None), loader
    for target in {id(one): one for one in every if one is not None}.values():
        tell = getattr(target, "set_epoch", None)
        if callable(tell):
            tell(epoch - 1)
            if target is batch_sampler:
                return  # it passes the epoch on to its own sampler


def told_epochs(loader: Any) -> list[Any]:
    """What the loader's samplers take for their epoch, as torch's DistributedSampler and its like keep it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return [getattr(sampler, "epoch", None) for sampler in samplers]


def static_reasons(facts: LoaderFacts, data: DataMode) -> tuple[str, ...]:
    """Why a resume in the middle of the run cannot be promised to be exact, known before the first step."""
    reasons = []
    if facts.workers and data == "skip":
        reasons.append(
            'batches that are already done are skipped by index (data="skip") or by the loader\'s state, so random '
            "numbers that the dataset draws in its workers differ"
        )
    if facts.workers and not facts.in_order:
        reasons.append("the loader has in_order=False, so the order of its batches depends on timing")
    return tuple(reasons)


class EpochOrder:
    """What a loader has given in this epoch so far: items of its sampler, or batches where it has none.

    A sampler may read what changes within an epoch: attributes of its own that the loop sets, or the model's weights.
    Passing over what is done then gives others than the saved run had, and only they tell. Training thread.
    """

    def __init__(self) -> None:
        self._sampler: Any = None
        self._encode: Callable[[Any], bytes] | None = msgspec.json.Encoder(enc_hook=_readable).encode
        self._put_back: Callable[[], None] = lambda: None
        self._expected: tuple[int, str] | None = None
        self._differs = False
        self.begin()

    def begin(self) -> None:
        """Nothing of the epoch has been given."""
        self._count, self._digest = 0, xxhash.xxh3_64()

    def iterator_of(self, loader: Any, facts: LoaderFacts) -> Iterator[Any]:
        """A new one over this loader; what its sampler gives is heard, if it has one."""
        self.begin()
        if facts.kind is not LoaderKind.INDEXED or type(loader).__iter__ is not DataLoader.__iter__:
            return iter(loader)
        name = _sampler_in(loader)
        self._put_back = partial(loader.__dict__.update, {name: getattr(loader, name)})
        return opened_with(loader, **{name: self.instead_of(getattr(loader, name))})

    def instead_of(self, sampler: Any) -> EpochOrder:
        """Itself, which gives what this one gives."""
        self._sampler = sampler
        return self

    def expect(self, saved: tuple[int, str] | None) -> None:
        """After so many the digest has to be this."""
        self._expected = saved

    def otherwise(self) -> list[str]:
        """Why a resume is not exact, after passing over what is done, if the digest was another one."""
        return [_OTHER_ORDER.format(type(_chooses(self._sampler)).__name__)] if self._differs else []

    @property
    def said(self) -> tuple[int, str] | None:
        """How many have been given, and a digest of them; None if nobody can know."""
        if self._expected is not None:
            return self._expected  # not yet passed over
        return (self._count, self._digest.hexdigest()) if self._count and self._encode is not None else None

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self._put_back()  # before workers start, which takes its time: nobody else is to find this in the loader
        self.begin()
        return map(self._hear, self._sampler)

    def hear_batch(self, loader: Any, facts: LoaderFacts, batch: Any) -> None:
        """The loader has given this one; of its sampler more is heard."""
        if facts.kind in (LoaderKind.ITERABLE, LoaderKind.FOREIGN):
            self._sampler = getattr(loader, "dataset", loader)
            self._hear(batch)

    def _hear(self, item: Any) -> Any:
        self._count += 1
        if self._encode is not None:
            try:
                self._digest.update(self._encode(item))
            except (TypeError, ValueError, OverflowError, RuntimeError):  # what only its data set understands
                self._encode = None
        if self._expected is not None and self._count == self._expected[0]:
            expected, self._expected = self._expected, None
            self._differs = self.said not in (None, expected)
        return item


def _readable(item: Any) -> Any:
    """What stands for it in a digest. An error for what cannot be read, or not without waiting for a device."""
    if isinstance(item, torch.Tensor):
        if item.device.type != "cpu":
            raise TypeError(item.device.type)
        return item.detach().flatten()[:_ELEMENTS_MAX].contiguous().view(torch.uint8).numpy().tobytes()
    if isinstance(item, np.ndarray):
        if item.dtype.hasobject:
            raise TypeError(item.dtype)
        return item.ravel()[:_ELEMENTS_MAX].tobytes()
    return dict(item) if isinstance(item, Mapping) else int(item)  # int: of numpy's


def open_epoch(loader: Any, facts: LoaderFacts, order: EpochOrder, *, late: bool) -> Iterator[Any]:
    """An iterator over one epoch. `late`: it is the first one in this process, but not the run's first epoch.

    Persistent workers are the one case in which a later epoch begins differently: their iterator is made once,
    drawing a base seed, and only reset afterwards. So a process that goes on in a later epoch makes it beforehand.
    """
    if late and facts.persistent_workers and facts.kind in (LoaderKind.INDEXED, LoaderKind.ITERABLE):
        streams = _Streams(streams_of(loader))
        order.iterator_of(loader, facts)
        streams.put_back()
    return order.iterator_of(loader, facts)


def pass_over(
    loader: Any,
    facts: LoaderFacts,
    iterator: Iterator[Any],
    order: EpochOrder,
    batches: int,
    restore_step: Callable[[], None],
    *,
    show_progress: bool,
) -> list[str]:
    """Move a fresh iterator past the first `batches` batches, then put the streams back to those of the step's end.

    Returns why that is not exact, if it is not.
    """
    if batches and facts.kind is LoaderKind.INDEXED and not facts.workers and hasattr(iterator, _SAMPLER_ITERATOR):
        reasons = _draw_indices(iterator, batches)
        restore_step()
        return reasons
    heard = partial(order.hear_batch, loader, facts)
    first = _fetch(iterator, batches, heard, show_progress=show_progress)
    drawn, last = first.moved(), _Streams()
    restore_step()
    if facts.kind is LoaderKind.ITERABLE:
        # Where the training draws none of them, they are now where they were then; and an epoch's end has no order.
        drawn = drawn & last.moved() if batches < facts.batches else set()
    return [_drawing(loader, facts)] if drawn and draws_here(facts) else []


def _by_weights(loader: Any, facts: LoaderFacts) -> Drawn | None:
    """What there is to say if a sampler of the user's leads to parameters that are trained."""
    if facts.kind is not LoaderKind.INDEXED:
        return None
    sampler = _chooses(getattr(loader, _sampler_in(loader)))
    found = Walk({"sampler": sampler}, {}).objects.values() if is_users(type(sampler)) else ()
    trained = any(one.requires_grad for net in found if isinstance(net, torch.nn.Module) for one in net.parameters())
    return Drawn(_READS_WEIGHTS.format(type(sampler).__name__), batches=0) if trained else None


def draws_here(facts: LoaderFacts) -> bool:
    """Whether what the loader draws while it iterates comes from the training's own streams, and may be its order."""
    return not facts.workers and facts.kind in (LoaderKind.ITERABLE, LoaderKind.FOREIGN)


def _drawing(loader: Any, facts: LoaderFacts) -> str:
    if facts.kind is LoaderKind.ITERABLE:
        return (
            f"the loader's data set ({type(loader.dataset).__name__}) draws random numbers in the training process "
            "while it is iterated over, interleaved with the training's own draws, so its order may differ; "
            "give it its own random generator, or use num_workers=1"
        )
    return (
        f"the loader ({type(loader).__name__}) draws random numbers in the training process while it iterates, "
        "and it is unknown how far ahead of the training it does so"
    )


class Draws:
    """Whether a loader that draws in the training process is seen to do so, in the second fetch of each epoch.

    seen: for the checkpoint.
    """

    def __init__(self, loader: Any, facts: LoaderFacts, saved: Drawn, *, followed: bool = False) -> None:
        self._here, self._shared = draws_here(facts) and not followed, facts.kind is LoaderKind.ITERABLE
        self._text = _drawing(loader, facts) if self._here else ""
        self.seen = _by_weights(loader, facts) or saved
        self.looks = False
        self._given: _Streams | None = None
        self._asked: _Streams | None = None
        self._trained: set[str] = set()

    def epoch_starts(self) -> None:
        """None of its batches has been fetched in this process."""
        self.looks, self._given, self._asked = self._here and not self.seen.reason, None, None

    def asked(self) -> None:
        """The next batch is about to be fetched."""
        if self._given is not None:
            self._trained, self._asked = self._given.moved(), _Streams()

    def given(self) -> None:
        """It has been."""
        if self._asked is None:
            self._given = _Streams()
            return
        drawn = self._asked.moved()
        if drawn & self._trained if self._shared else drawn:
            self.seen = Drawn(self._text)
        self.looks, self._given = False, None


SAID_EVERY_S = 10.0


def _fetch(iterator: Iterator[Any], batches: int, heard: Callable[[Any], None], *, show_progress: bool) -> _Streams:
    """Fetch and drop so many batches; returns the streams after the first, whose draws no training had come before."""
    streams = _Streams()
    said_s = clock.mono_s()
    for count in range(1, batches + 1):
        try:
            heard(next(iterator))
        except StopIteration:
            raise ConfigError(
                f"the loader ended after {count - 1} batches, although {batches} of this epoch were done when the "
                "checkpoint was saved; resume with the same data"
            ) from None
        if count == 1:
            streams = _Streams()
        if show_progress and clock.mono_s() - said_s >= SAID_EVERY_S:
            said_s = clock.mono_s()
            say(f"lastwords: fetching the data that was done once more: {count}/{batches}")
    return streams


def skipping_iterator(loader: Any, facts: LoaderFacts, order: EpochOrder, batches: int) -> Iterator[Any] | None:
    """An iterator that starts after `batches` batches by index, with workers; None if this loader has no such way."""
    if facts.kind is not LoaderKind.INDEXED or not facts.workers or facts.persistent_workers:
        return None
    name = _sampler_in(loader)
    return opened_with(loader, **{name: _Rest(order.instead_of(getattr(loader, name)), batches)})


def _sampler_in(loader: Any) -> str:
    """The attribute of a loader that says what comes next."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def _chooses(sampler: Any) -> Any:
    """Of a sampler of batches as torch makes it, that of the samples."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def opened_with(loader: Any, **attributes: Any) -> Iterator[Any]:
    """An iterator over a loader that has these attributes only while it is being made.

    A DataLoader refuses such an assignment once it is made, as it would not reach an iterator that exists.
    """
    kept = {name: getattr(loader, name) for name in attributes}
    loader.__dict__.update(attributes)
    try:
        iterator: Iterator[Any] = iter(loader)
        return iterator
    finally:
        loader.__dict__.update(kept)


class _Rest:
    """A sampler without its first items."""

    def __init__(self, whole: Any, skipped: int) -> None:
        self._whole = whole
        self._skipped = skipped

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._whole)
        for _ in range(self._skipped):
            next(iterator, None)
        yield from iterator

    def __len__(self) -> int:
        return max(0, len(self._whole) - self._skipped)


def _draw_indices(iterator: Any, batches: int) -> list[str]:
    sampler = getattr(iterator, _SAMPLER_ITERATOR)
    next(sampler)
    streams = _Streams()
    for _ in range(batches - 1):
        next(sampler)
    iterator._num_yielded += batches
    if hasattr(iterator, "_sampler_iter_yielded"):
        iterator._sampler_iter_yielded += batches
    if streams.moved():
        return [
            "the loader's sampler draws from the training's random streams between batches, so its order depends on "
            "the training's own draws; give it a torch.Generator of its own"
        ]
    return []


class _Streams:
    """Random streams at one moment: the training process's own, if no others are given."""

    def __init__(self, states: Mapping[str, GeneratorState] | None = None) -> None:
        every = of_process() if states is None else states
        self._then = {name: (state, state.read()) for name, state in every.items()}

    def moved(self) -> set[str]:
        """Which of them are elsewhere now."""
        return {name for name, (state, then) in self._then.items() if state.read() != then}

    def put_back(self) -> None:
        for state, then in self._then.values():
            with suppress(MismatchError):  # of another kind, which is told of where it is captured
                state.put(then)


def known_at_resume(saved: LoopFacts, step: int) -> list[str]:
    """Why a loop that goes on after this step of an epoch is not exact, as far as the saved run knew.

    >>> known_at_resume(LoopFacts(draws=Drawn("it draws"), steps_per_epoch=4), 4)
    []
    """
    draws = saved.draws.reason and step * saved.accumulate > saved.draws.batches and step < saved.steps_per_epoch
    return [saved.draws.reason] if draws else []
