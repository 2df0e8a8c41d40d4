"""`Batches`: where a loader stands is state, whatever fetches ahead of the training."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lastwords.checkpoint.meta import StepDocument
from lastwords.errors import ConfigError
from lastwords.optim_wrapper.loop.batches import COUNTS, UNKNOWN_END, Batches
from lastwords.optim_wrapper.state.attributes import Attributes
from tests.optim_wrapper.test_loader_counters import Calls

LENGTH, SIZE = 12, 2


class Loop:
    """What a run does with the streams at a step's end, and where the first step of a resumed one begins."""

    def __init__(self, resumed: Any = None, loader: Any = None) -> None:
        self.resumed, self.loader = resumed, loader
        self.reasons: list[str] = []
        self.known: list[object] = []

    def myself(self) -> Loop:
        return self

    def begin_step(self) -> None:
        if self.resumed is not None:
            put(self.resumed, self.loader)
        self.resumed = None

    def know_loader(self, loader: object) -> None:
        self.known.append(loader)

    def know_data(self, loader: object) -> None:
        self.known.append(loader)

    def loader_values(self, *, look: bool = False) -> str:
        return ""

    def loader_as_of(self, values: str) -> Callable[[], None]:
        return lambda: None

    def not_exact(self, *reasons: str) -> None:
        self.reasons += reasons


def counting_in(loader: Any) -> Any:
    return getattr(loader, "sampler", loader)


def streams(loader: Any = None) -> Any:
    own = None if loader is None or loader.generator is None else loader.generator.get_state()
    epoch = getattr(counting_in(loader), "epoch", None)
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), own, epoch


def put(taken: Any, loader: Any = None) -> None:
    if taken[3] is not None:
        loader.generator.set_state(taken[3])
    random.setstate(taken[0])
    np.random.set_state(taken[1])
    torch.set_rng_state(taken[2])


def drawing(rows: list[int]) -> list[float]:
    return [row + random.random() + float(np.random.rand()) + float(torch.rand(1)) for row in rows]


class Drawn(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


def shuffled() -> DataLoader[Any]:
    return DataLoader(range(LENGTH), SIZE, shuffle=True, collate_fn=drawing)  # type: ignore[arg-type]


def with_generator() -> DataLoader[Any]:
    own = torch.Generator().manual_seed(5)
    return DataLoader(range(LENGTH), SIZE, shuffle=True, collate_fn=drawing, generator=own)  # type: ignore[arg-type]


def streamed() -> DataLoader[Any]:
    return DataLoader(Drawn(), SIZE, collate_fn=list)


class Counting(Sampler[int]):
    """accelerate's: seeds itself from its epoch, and counts on as soon as it is asked for more than it has."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1

    def __len__(self) -> int:
        return LENGTH


def counting() -> DataLoader[Any]:
    return DataLoader(range(LENGTH), SIZE, sampler=Counting(), num_workers=1, collate_fn=drawing)  # type: ignore[arg-type]


class Own:
    """A loader of the user's own, which counts its epochs as each begins."""

    generator = None

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return LENGTH // SIZE

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield from (order[at : at + SIZE] for at in range(0, LENGTH, SIZE))


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": shuffled, "with a generator": with_generator, "streamed": streamed,
    "counting": counting, "own": Own,  # type: ignore[dict-item]
}  # fmt: skip


def ahead(batches: Any) -> Iterator[Any]:
    """As accelerate's loaders: one batch is fetched before the one before it is given."""
    iterator = batches.__iter__()
    in_hand = next(iterator)
    for following in iterator:
        yield in_hand
        in_hand = following
    yield in_hand


def train(
    make: Callable[[], DataLoader[Any]],
    looks_ahead: bool,
    epochs: int = 3,
    at: int = -1,
    saved: Any = None,
    broken: Callable[[Batches], object] = lambda batches: None,
) -> tuple[list[Any], Any, list[str]]:
    """Batches, and what each step draws itself; what is saved at the end of step `at`; why it is not exact.

    saved: of a run whose epochs before are done. broken: does something to the loader's position.
    """
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    loader, found, kept = make(), [], None
    batches = Batches(loader, ahead=looks_ahead)
    if saved is not None:
        torch.manual_seed(9)
        batches.load_state_dict(saved[0])
        broken(batches)
        put(saved[2])  # what comes before the loop may draw
        if saved[1][4] is not None:
            counting_in(loader).epoch = saved[1][4]  # as all attributes of a loader
    loop = Loop(None if saved is None else saved[1], loader)
    batches.join(lambda: loop)
    step = 0 if saved is None else at
    per_epoch = LENGTH // SIZE
    for _ in range(step // per_epoch, epochs):
        for batch in ahead(batches) if looks_ahead else batches:
            step += 1
            found.append((batch, float(torch.rand(1)), random.random()))
            if saved is None and step == at:
                kept = batches.state_dict(), streams(loader)
    return found, kept, loop.reasons


@pytest.mark.ci
@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("at", [1, 4, 6, 7, 11, 12])
def test_a_loader_goes_on_with_the_batch_that_was_next(loader: str, at: int, looks_ahead: bool) -> None:
    if loader == "streamed" and not looks_ahead and at % 6 == 0:
        pytest.skip("of unknown length: an epoch is over once it was asked for more")
    whole, kept, _ = train(LOADERS[loader], looks_ahead, at=at)
    torch.manual_seed(77)
    rest, _, reasons = train(LOADERS[loader], looks_ahead, at=at, saved=(*kept, streams()))
    if loader == "with a generator" and not looks_ahead and at % 6 == 0:
        assert rest != whole[at:]
        assert reasons == [UNKNOWN_END.format("loader.generator")]
        return
    assert rest == whole[at:]
    assert reasons == []


@pytest.mark.parametrize("says", [True, False])
def test_after_an_epoch_that_the_loop_leaves_early_comes_the_next_one_if_it_says_so(says: bool) -> None:
    torch.manual_seed(1)
    batches = Batches(shuffled())
    batches.join(Loop)
    for number, _ in enumerate(batches, start=1):
        if number == 4:
            if says:
                batches.end_epoch()
            break
    saved, at = batches.state_dict(), streams()
    following = [*batches]
    torch.manual_seed(9)
    again, loop = Batches(shuffled()), Loop()
    again.load_state_dict(saved)
    again.join(lambda: loop)
    put(at)
    assert ([*again] == following) is says
    assert loop.reasons == []


@pytest.mark.parametrize("over", [True, False])
def test_of_an_epoch_that_is_over_nothing_is_fetched_or_drawn_before_the_next_one(over: bool) -> None:
    """By a loop that fetches as soon as an iterator is made, in an epoch whose end it only does again."""

    def epoch(batches: Batches) -> list[Any]:
        return [(batch, float(torch.rand(1))) for batch in ahead(batches)]

    torch.manual_seed(1)
    batches = Batches(streamed(), ahead=True)
    batches.join(Loop)
    epoch(batches)
    saved, at = batches.state_dict(), streams()
    torch.rand(2)  # a validation
    following = [epoch(batches), epoch(batches)]
    torch.manual_seed(9)
    loop = Loop(at)
    again = Batches(streamed(), ahead=True)
    again.load_state_dict(saved)
    again.join(loop.myself)
    again.over = over
    assert (next(iter(again), None) is None) is over
    assert again.at_end is over
    loop.begin_step()
    torch.rand(2)
    assert ([epoch(again), epoch(again)] == following) is over
    assert loop.reasons == []


def test_without_the_streams_of_its_fetch_the_batch_in_hand_is_another_one() -> None:
    whole, kept, _ = train(shuffled, True, at=4)

    def forget(batches: Batches) -> None:
        at = batches.state_dict()
        batches.load_state_dict({**at, "fetch": {name: one for name, one in at["fetch"].items() if name == "x"}})

    rest, _, _ = train(shuffled, True, at=4, saved=(*kept, streams()), broken=forget)
    assert rest[0][0] != whole[4][0]


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("loader", ["counting", "own"])
def test_without_the_epoch_of_its_begin_what_has_counted_on_gives_another_order(loader: str, looks_ahead: bool) -> None:
    def forget(batches: Batches) -> None:
        batches._resumed = batches._resumed._replace(told={})  # type: ignore[union-attr]

    whole, kept, _ = train(LOADERS[loader], looks_ahead, at=11)
    rest, _, reasons = train(LOADERS[loader], looks_ahead, at=11, saved=(*kept, streams()), broken=forget)
    assert rest != whole[11:]
    assert [reason.split("did not give again")[0] for reason in reasons] == [f"the loader ({loader.title()}) "]


def test_nothing_differs_from_a_loader_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    loader = shuffled()
    alone = [(batch, float(torch.rand(1)), random.random()) for _ in range(3) for batch in loader]
    assert train(shuffled, False)[0] == alone


def test_whoever_iterates_over_the_loader_iterates_over_what_stands_in_for_it() -> None:
    loader, loop = shuffled(), Loop()
    batches = Batches(ahead=False)
    batches.join(lambda: loop)
    batches.stand_in(loader)
    assert isinstance(loader, DataLoader)
    assert len([*loader]) == 6
    assert batches.state_dict()["used"] == 6
    assert loop.known == [loader, loader]


def test_it_has_to_belong_to_a_run() -> None:
    with pytest.raises(ConfigError, match="local_extras"):
        next(iter(Batches(shuffled())))


@pytest.mark.parametrize("early", [False, True], ids=["in the run", "before it starts"])
@pytest.mark.parametrize("loader", ["shuffled", "with a generator", "counting", "own"])
def test_what_is_drawn_between_an_epochs_begin_and_its_first_batch_changes_no_order(loader: str, early: bool) -> None:
    def first_epoch(saved: Any = None) -> tuple[list[Any], Any]:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1 if saved is None else 9)
        made = LOADERS[loader]()
        batches, loop = Batches(made), Loop(saved and saved[1], made)
        iterator = iter(batches) if early else None
        if saved is not None:
            batches.load_state_dict(saved[0])
            counting_in(made).epoch = saved[1][4]
        batches.join(lambda: loop)
        iterator = iterator or iter(batches)
        torch.rand(3), random.random()  # a hook as training begins
        done = [] if saved else [next(iterator) for _ in range(2)]
        kept = batches.state_dict(), streams(made)
        assert loop.reasons == []
        return [*done, *iterator], kept

    whole, kept = first_epoch()
    assert first_epoch(kept)[0] == whole[2:]


def test_an_iterator_that_was_made_before_the_run_draws_what_the_loaders_own_does() -> None:
    torch.manual_seed(1)
    early = iter(Batches(shuffled()))
    after = torch.get_rng_state()
    torch.manual_seed(1)
    plain = iter(shuffled())
    assert torch.equal(after, torch.get_rng_state())
    del early, plain


class Counts(Sequence[int]):
    """Rows that depend on how often one was asked for, and on a generator of numpy's."""

    def __init__(self, counts: bool) -> None:
        self.counts, self.asked, self.own = counts, 0, np.random.default_rng(3)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: Any) -> Any:
        self.asked += self.counts
        return index + 100 * self.asked + int(self.own.integers(50)) * 1000


class Data(Dataset[int]):
    def __init__(self, counts: bool) -> None:
        self.rows = Counts(counts)

    def __getitem__(self, index: int) -> int:
        return int(self.rows[index])

    def __len__(self) -> int:
        return LENGTH


@pytest.mark.parametrize("counts", [False, True])
def test_a_data_set_may_draw_from_a_generator_of_its_own_and_is_named_if_it_counts(counts: bool) -> None:
    def own(loader: Any) -> Any:
        return loader.dataset.rows.own.bit_generator

    loaders: list[Any] = []

    def make() -> DataLoader[Any]:
        loaders.append(DataLoader(Data(counts), SIZE, collate_fn=list))
        return loaders[-1]

    batches, loop = Batches(make(), ahead=True), Loop()
    batches.join(lambda: loop)
    given = ahead(batches)
    first = [next(given) for _ in range(2)]
    state, drawn = batches.state_dict(), own(loaders[0]).state
    rest = [*given]
    again, other = Batches(make(), ahead=True), Loop()
    again.load_state_dict(state)
    own(loaders[1]).state = drawn
    again.join(lambda: other)
    assert ([*ahead(again)] == rest) is not counts
    assert other.reasons == ([COUNTS.format("loader.dataset.rows.asked")] if counts else [])
    assert len(first) == 2
    assert again.at_end


class Draws:
    """A collator with generators of its own."""

    def __init__(self) -> None:
        self.own, self.numpys = torch.Generator().manual_seed(5), np.random.RandomState(3)

    def __call__(self, rows: list[int]) -> list[float]:
        return [row + float(torch.rand(1, generator=self.own)) + self.numpys.rand() for row in rows]

    collate = __call__


def closed_over(collator: Draws) -> Any:
    return lambda rows: collator(rows)


WAYS: dict[str, Callable[[Draws], Any]] = {
    "itself": lambda collator: collator,
    "library": Calls,
    "partial": functools.partial,
    "method": lambda collator: collator.collate,
    "method in a library": lambda collator: Calls(collator.collate),
    "function": closed_over,
    "function in a library": lambda collator: Calls(closed_over(collator)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_collator_may_draw_from_generators_of_its_own_whatever_wraps_it(way: str) -> None:
    collators: list[Draws] = []

    def make() -> Batches:
        collators.append(Draws())
        batches = Batches(DataLoader(range(LENGTH), SIZE, collate_fn=WAYS[way](collators[-1])), ahead=True)  # type: ignore[arg-type]
        batches.join(loops[len(collators) - 1].myself)
        return batches

    loops = [Loop(), Loop()]
    given = ahead(batches := make())
    first = [next(given) for _ in range(2)]
    state, streams_then = batches.state_dict(), (collators[0].own.get_state(), collators[0].numpys.get_state())
    rest = [*given]
    again = make()
    again.load_state_dict(state)
    collators[1].own.set_state(streams_then[0])
    collators[1].numpys.set_state(streams_then[1])
    assert [*ahead(again)] == rest
    assert loops[1].reasons == []
    assert len(first) == 2


class Weighted(Sampler[int]):
    """Its order comes of weights that the loop changes."""

    def __init__(self) -> None:
        self.weights = torch.ones(LENGTH)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, LENGTH, replacement=True).tolist())

    def __len__(self) -> int:
        return LENGTH


class Curriculum(Dataset[int]):
    """Rows that depend on what the loop sets, and on how many were asked for."""

    def __init__(self) -> None:
        self.hard, self.asked = 0, 0

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        return index + 100 * self.hard + 10_000 * self.asked

    def __len__(self) -> int:
        return LENGTH


class Watching(Loop):
    """Attributes that move are in the document of a step; those of the loader are found beside a callback's."""

    def __init__(self, loader: DataLoader[Any], resumed: Any = None) -> None:
        super().__init__(None, loader)
        self.watch = Attributes({"callback": Holds(loader.dataset)}, dict)
        self.watch.know(loader)
        self.watch.begin()
        if resumed is not None:
            self.watch.put(resumed)

    def loader_values(self, *, look: bool = False) -> str:
        return self.watch.of_loader(look=True)  # as of a run's first steps

    def loader_as_of(self, values: str) -> Callable[[], None]:
        return self.watch.loader_as_of(values)


class Holds:
    def __init__(self, data: Any) -> None:
        self.data = data


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("at", [1, 2, 4, 5, 7, 10, 12, 14])
def test_the_order_and_the_batch_in_hand_come_of_what_the_loader_was_like_then(at: int, looks_ahead: bool) -> None:
    def run(step: int, saved: Any = None) -> tuple[list[Any], Any, Watching]:
        torch.manual_seed(1)
        data, sampler = Curriculum(), Weighted()
        loader = DataLoader(data, SIZE, sampler=sampler, collate_fn=list)
        batches, loop, found, kept = Batches(loader, ahead=looks_ahead), Watching(loader, saved and saved[1]), [], None
        batches.join(lambda: loop)
        if saved is not None:
            batches.load_state_dict(saved[0])
            torch.set_rng_state(saved[2])
        for _ in range(step // 6, 3):
            for batch in ahead(batches) if looks_ahead else batches:
                step += 1
                found.append(batch)
                sampler.weights[step % LENGTH] += step
                data.hard += step > 1
                loop.watch.look()
                if saved is None and step == at:
                    loop.watch.end_step()
                    document = loop.watch.document()
                    values = StepDocument(attributes=document["attributes"]).attributes_inline("x")
                    kept = batches.state_dict(), values, torch.get_rng_state()
        return found, kept, loop

    whole, kept, _ = run(0)
    rest, _, loop = run(at, kept)
    assert rest == whole[at:]
    assert loop.reasons == []
    assert loop.watch.ledger.reasons == ()
