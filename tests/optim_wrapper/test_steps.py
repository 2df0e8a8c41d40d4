"""A resumed loop goes on with the very batches and random numbers of the run that was never interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lastwords.errors import ConfigError
from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.loop import data_position
from lastwords.optim_wrapper.loop.data_position import EpochOrder, known_at_resume, loader_facts, open_epoch
from lastwords.optim_wrapper.loop.steps import FirstStep, ResumeAt, Steps
from lastwords.optim_wrapper.state import generators
from lastwords.optim_wrapper.state.attributes import NOTHING, Attributes
from lastwords.optim_wrapper.state.object_walk import Walk
from tests import golden
from tests.ledgers import told
from tests.optim_wrapper import test_attributes
from tests.selection import more

SAMPLES = 22
BATCH = 4
BATCHES = 6  # the last one is short


class Items(Dataset[Any]):
    """Items with random augmentation from the stream that `draw` names."""

    def __init__(self, draw: str = "none", shape: str = "tensor") -> None:
        self.draw = draw
        self.shape = shape

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        noise = 0.0
        if self.draw in ("torch", "all"):
            noise += torch.rand(()).item()
        if self.draw in ("python", "all"):
            noise += random.random()
        if self.draw in ("numpy", "all"):
            noise += float(np.random.rand())
        value = torch.tensor([index, noise], dtype=torch.float64)
        return {"x": value, "label": index} if self.shape == "dict" else value


class Stream(IterableDataset[Any]):
    """An iterable dataset with a length, cut up between the workers."""

    def __init__(self, draw: str = "none") -> None:
        self.items = Items(draw)

    def __len__(self) -> int:
        return SAMPLES + 2  # as many batches as there are with two workers

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, SAMPLES + 2, every):
            yield self.items[index]


class Buckets(Sampler[list[int]]):
    """A batch sampler of the user's own, with set_epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng(self.epoch).permutation(SAMPLES).tolist()
        yield from (order[at : at + BATCH] for at in range(0, SAMPLES, BATCH))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loader(kind: str, draw: str = "none", workers: int = 0, **kwargs: Any) -> Any:
    items = Items(draw, "dict" if kind == "dict batches" else "tensor")
    common: dict[str, Any] = {"num_workers": workers, "batch_size": BATCH, **kwargs}
    if kind == "shuffle":
        return DataLoader(items, shuffle=True, **common)
    if kind == "shuffle, drop_last":
        return DataLoader(items, shuffle=True, drop_last=True, **common)
    if kind == "shuffle with generator":
        return DataLoader(items, shuffle=True, generator=seeded(5), **common)
    if kind == "two generators":
        return DataLoader(items, sampler=RandomSampler(items, generator=seeded(6)), generator=seeded(7), **common)
    if kind == "with replacement, generator":
        sampler = RandomSampler(items, replacement=True, num_samples=100, generator=seeded(8))
        return DataLoader(items, sampler=sampler, **common)
    if kind == "with replacement":
        return DataLoader(items, sampler=RandomSampler(items, replacement=True, num_samples=100), **common)
    if kind == "weighted":
        return DataLoader(items, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES), **common)
    if kind == "subset":
        return DataLoader(items, sampler=SubsetRandomSampler(range(3, SAMPLES)), **common)
    if kind == "distributed":
        return DataLoader(items, sampler=DistributedSampler(items, 2, 1, shuffle=True), **{**common, "batch_size": 2})
    if kind == "sequential":
        return DataLoader(items, **common)
    if kind == "dict batches":
        return DataLoader(items, shuffle=True, **common)
    if kind == "own batch sampler":
        del common["batch_size"]
        return DataLoader(items, batch_sampler=Buckets(), **common)
    if kind == "distributed in batch sampler":
        del common["batch_size"]
        sampler = DistributedSampler(items, 2, 0, shuffle=True)
        return DataLoader(items, batch_sampler=BatchSampler(sampler, 2, False), **common)
    if kind == "no batching":
        return DataLoader(items, shuffle=True, **{**common, "batch_size": None})
    if kind == "iterable":
        return DataLoader(Stream(draw), **common)
    if kind == "list":
        return [torch.tensor([float(k)]) for k in range(BATCHES)]
    raise AssertionError(kind)


class CountsItsEpochs:
    """As Fabric's loader: it tells its sampler how often it has been iterated over."""

    def __init__(self) -> None:
        self._inner = loader("distributed")
        self.sampler = self._inner.sampler
        self._begun = 0

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        self.sampler.set_epoch(self._begun)
        self._begun += 1
        yield from self._inner


@pytest.mark.parametrize(("resumed_in", "differs"), [(1, False), (2, True)])
def test_a_loader_that_counts_its_epochs_itself_is_found_out(resumed_in: int, differs: bool) -> None:
    class Nothing:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args: None

    at = ResumeAt(resumed_in, 2, lambda: None, lambda: None)
    steps = Steps(CountsItsEpochs(), 2, events=Nothing(), resume=at)
    next(iter(steps))
    golden.says(told(steps))


# ------------------------------------------------------------------ a run in miniature


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the random generators that tests have."""
    monkeypatch.setattr(generators, "Beyond", lambda walk, roots: Walk({}, {}))


def all_streams() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def put_back(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return value


@dataclass
class Run:
    """Events of one run, and the streams at each; the record is what must not differ."""

    record: list[Any] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    starts: dict[int, Any] = field(default_factory=dict)
    ends: dict[tuple[int, int], Any] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    steps: Steps | None = None
    attributes: Attributes = field(default_factory=lambda: Attributes({}, dict))

    def streams(self) -> dict[str, Any]:
        """Whether they are elsewhere."""
        own = {name: state.hex() for name, state in self.attributes.generators.states().items()}
        return {**plain(all_streams()), **own}

    def state(self) -> dict[str, Any]:
        """Of all that is put back while the loop finds its place."""
        self.attributes.look()
        return {**all_streams(), "saved": test_attributes.everything(self.attributes)}

    def epoch_start(self, epoch: int) -> None:
        self.events.append(f"epoch {epoch}")
        self.starts[epoch] = self.state()

    def under_way(self, epoch: int, step: int) -> None:
        self.events.append(f"begin {epoch}.{step}")

    def step_end(self, epoch: int, step: int) -> None:
        self.events.append(f"end {epoch}.{step}")
        self.record.append((epoch, step, self.streams()))
        self.ends[epoch, step] = {**self.state(), "order": None if self.steps is None else self.steps.order.said}

    def round_over(self, epoch: int, step: int) -> None:
        self.events.append(f"over {epoch}.{step}")

    def train(self, **kwargs: Any) -> Run:
        steps = self.steps = Steps(events=self, ledger=self.ledger, aside=self.attributes.aside, **kwargs)
        self.attributes.know(kwargs["loader"])
        self.attributes.begin()
        for epoch, step, batch in steps:
            self.record.append((epoch, step, plain(batch), steps.ends_step))
            torch.rand(3), random.random(), np.random.rand()  # dropout and the like, between the draws of the dataset
        self.record.append(("after", self.streams()))
        self.attributes.let_go()  # workers that the collector ends take five seconds each
        return self


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def after(record: list[Any], epoch: int, step: int) -> list[Any]:
    """What comes after the end of a step."""
    at = max(k for k, entry in enumerate(record) if entry[:2] == (epoch, step)) + 1
    return record[at:]


def resumed(whole: Run, make: Callable[[], Any], epoch: int, step: int, run: Run | None = None, **kwargs: Any) -> Run:
    """The run in a "new process": other seeds, a new loader."""
    seed_all(999)
    run = Run() if run is None else run
    new = make()

    def restore(state: Any) -> Callable[[], None]:
        def put() -> None:
            assert run.steps is not None
            put_back(state)
            run.ledger.tell(*run.attributes.restore(state["saved"]))
            run.ledger.tell(*run.attributes.generators.left_over())

        return put

    ended = whole.ends[epoch, step]
    at = ResumeAt(epoch, step, restore(whole.starts[epoch]), restore(ended), ended["order"])
    return run.train(loader=new, resume=at, **kwargs)


def forget(whole: Run) -> None:
    """For a control: nothing is saved of what moves in the loader."""
    for state in (*whole.starts.values(), *whole.ends.values()):
        state["saved"] = NOTHING


def whole_run(make: Callable[[], Any], run: Run | None = None, **kwargs: Any) -> Run:
    seed_all(1)
    return (run or Run()).train(loader=make(), **kwargs)


KINDS = [
    "shuffle", "shuffle, drop_last", "shuffle with generator", "two generators", "with replacement, generator",
    "with replacement", "weighted", "subset", "distributed", "sequential", "dict batches", "own batch sampler",
    "distributed in batch sampler", "no batching", "iterable", "list",
]  # fmt: skip


def points(steps: int) -> list[tuple[int, int]]:
    """In the first epoch, in a later one, at the first step, at the end of an epoch, at the very end."""
    return [(1, 1), (1, 3), (2, 2), (1, steps), (2, steps), (3, steps)]


class CountsOn(SequentialSampler):
    """As accelerate's: its order is its epoch's, and it counts on once it has been asked for all."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES, generator=seeded(self.epoch)).tolist()
        self.set_epoch(self.epoch + 1)


@pytest.mark.ci
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_counts_on_ahead_of_the_training_is_told_its_epoch_all_the_same(workers: int) -> None:
    def make() -> Any:
        return DataLoader(Items("all"), batch_size=BATCH, sampler=CountsOn(Items()), num_workers=workers)

    whole = whole_run(make, epochs=3)
    assert whole.steps is not None
    assert not told(whole)
    for epoch, step in points(whole.steps.steps_per_epoch):
        again = resumed(whole, make, epoch, step, epochs=3)
        assert again.record == after(whole.record, epoch, step)
        assert not told(again)


@pytest.mark.parametrize("shown", [True, False], ids=["rank 0", "another rank"])
def test_a_step_without_a_name_is_counted_out_and_the_run_is_not_exact(
    shown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What another kind of loop has saved: the global step is all that is known."""
    at = ResumeAt(0, BATCHES + 2, None, None)
    steps = Steps(DataLoader(Items(), BATCH), epochs=3, events=Run(), resume=at, show_progress=shown)
    assert (steps.epoch, steps.step) == (2, 2)
    golden.says(told(steps))
    assert len(caplog.messages) == shown, "not one line of each rank"


@pytest.mark.parametrize(
    ("accumulate", "passes", "updated", "is_told"),
    [(1, 0, False, True), (1, 1, False, False), (1, 0, True, False), (2, 1, True, True), (2, 2, True, False),
     (2, 0, True, False)],
)  # fmt: skip
def test_a_first_step_that_ends_before_it_was_trained_on_is_told(
    accumulate: int, passes: int, updated: bool, is_told: bool
) -> None:
    model = torch.nn.Linear(2, 2)
    first = FirstStep(model, accumulate)
    for _ in range(passes):
        model(torch.ones(1, 2))
    model.eval()(torch.ones(1, 2))  # a validation beforehand is no training
    said = first.end(updated=updated)
    assert (len(said), len(model._forward_pre_hooks)) == (is_told, 0)
    golden.says(said)


@pytest.mark.parametrize("shown", [True, False], ids=["rank 0", "another rank"])
def test_how_far_a_long_wait_is_is_said(
    shown: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_position, "SAID_EVERY_S", 0.0)
    data_position._fetch(iter("ab"), 2, lambda batch: None, show_progress=shown)
    golden.says(capsys.readouterr().err)


@pytest.mark.ci
@pytest.mark.parametrize("draw", ["none", "python", "numpy", "torch", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_resume_without_workers_is_exact_wherever_it_was_cut(kind: str, draw: str) -> None:
    def make() -> Any:
        return loader(kind, draw)

    whole = whole_run(make, epochs=3)
    assert whole.steps is not None
    for epoch, step in points(whole.steps.steps_per_epoch):
        again = resumed(whole, make, epoch, step, epochs=3)
        assert again.record == after(whole.record, epoch, step), (epoch, step)
        assert again.steps is not None
        in_the_middle = 1 < step < whole.steps.steps_per_epoch
        said = kind == "iterable" and draw != "none" and in_the_middle  # whether its order depends on it is not seen
        assert bool(told(again)) is said, told(again)


@pytest.mark.parametrize("data", ["refetch", "skip"])
@pytest.mark.parametrize("epoch", [1, 2])
def test_what_a_sampler_draws_after_an_epochs_last_batch_is_drawn_in_a_resumed_run_too(epoch: int, data: str) -> None:
    """A RandomSampler draws once more when it is asked for what does not fill a batch."""

    def make() -> Any:
        return loader("shuffle, drop_last", generator=seeded(5))

    whole = whole_run(make, epochs=2, data=data)
    again = resumed(whole, make, epoch, BATCHES - 1, epochs=2, data=data)
    assert again.record == after(whole.record, epoch, BATCHES - 1)


class DrawsAtItsEnd(Stream):
    """Its next epoch is another one if its last one has come to its end."""

    def __init__(self, opened: list[str]) -> None:
        super().__init__()
        self.generator = seeded(6)
        self.opened = opened

    def __iter__(self) -> Iterator[Any]:
        self.opened.append("opened")
        for _ in range(len(self)):
            yield torch.rand((), generator=self.generator)
        torch.rand((), generator=self.generator)


class Opened(list[Any]):
    opened = 0

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        return super().__iter__()


def test_a_list_that_is_done_is_not_opened_once_more() -> None:
    batches = Opened(range(BATCHES))
    Run().train(loader=batches, epochs=2, resume=ResumeAt(1, BATCHES, None, None))
    assert batches.opened == 1


def test_which_step_has_ended_is_known_before_the_first_batch_is_asked_for() -> None:
    seen: list[Any] = []

    class Looks(Run):
        def epoch_start(self, epoch: int) -> None:
            seen.append(self.steps and (self.steps.epoch, self.steps.step))

    batches = list(range(BATCHES))
    for resume in (None, ResumeAt(1, 0, None, None), ResumeAt(1, 2, None, None)):
        run = Looks()
        assert Steps(loader=batches, epochs=1, events=run, resume=resume).step == (resume.step if resume else 0)
        run.train(loader=batches, epochs=1, resume=resume)
    assert seen == [(1, 0), (1, 0), (1, 2)]


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_the_streams_of_the_saved_step_are_put_back_whether_or_not_any_step_is_left(epochs: int) -> None:
    restored: list[str] = []
    resume = ResumeAt(2, BATCHES, None, lambda: restored.append("step"))
    Run().train(loader=list(range(BATCHES)), epochs=epochs, resume=resume)
    assert restored == ["step"]


@pytest.mark.parametrize(
    ("epoch", "data", "epochs_opened"), [(1, "refetch", 2), (1, "skip", 1), (2, "refetch", 0), (2, "skip", 0)]
)
def test_a_stream_that_is_done_is_fetched_again_only_for_the_epoch_after_it(
    epoch: int, data: str, epochs_opened: int
) -> None:
    opened: list[str] = []

    def make() -> Any:
        return DataLoader(DrawsAtItsEnd(opened), BATCH)

    whole = whole_run(make, epochs=2, data=data)
    forget(whole)  # the list is an attribute of the data set
    opened.clear()
    again = resumed(whole, make, epoch, BATCHES, epochs=2, data=data)
    assert len(opened) == epochs_opened
    if data == "refetch" and epoch == 1:
        assert again.record == after(whole.record, epoch, BATCHES)


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "draw"),
    [more("shuffle", "all"), ("shuffle with generator", "all"), more("with replacement, generator", "torch"),
     more("distributed", "python"), ("own batch sampler", "numpy"), ("iterable", "all"), more("no batching", "torch")],
)  # fmt: skip
def test_resume_with_workers_is_exact_wherever_it_was_cut(kind: str, draw: str) -> None:
    def make() -> Any:
        return loader(kind, draw, workers=2)

    whole = whole_run(make, epochs=2)
    assert whole.steps is not None
    last = whole.steps.steps_per_epoch
    for epoch, step in [(1, 2), (2, 3), (1, last), (2, last)]:
        again = resumed(whole, make, epoch, step, epochs=2)
        assert again.record == after(whole.record, epoch, step), (epoch, step)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["shuffle", "shuffle with generator"])
def test_persistent_workers_are_exact_in_the_first_epoch_and_keep_their_order_later(kind: str) -> None:
    def make(draw: str = "all") -> Any:
        return loader(kind, draw, workers=2, persistent_workers=True)

    whole = whole_run(make, epochs=3)
    assert whole.steps is not None
    assert any("persistent" in reason for reason in told(whole))
    assert resumed(whole, make, 1, 2, epochs=3).record == after(whole.record, 1, 2)
    assert told(whole_run(make, epochs=1)) == []
    quiet = whole_run(lambda: make("none"), epochs=3)
    for epoch, step in [(2, 2), (1, 6), (2, 6)]:
        again = resumed(quiet, lambda: make("none"), epoch, step, epochs=3)
        assert again.record == after(quiet.record, epoch, step), (epoch, step)
    # Why it is not promised: what the workers draw in a later epoch is not what it would have been.
    assert resumed(whole, make, 2, 2, epochs=3).record != after(whole.record, 2, 2)


class Permuted(Sampler[int]):
    """Draws from a generator of numpy's that is its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.permutation(SAMPLES).tolist()

    def __len__(self) -> int:
        return SAMPLES


@pytest.mark.process
def test_persistent_workers_that_are_started_beforehand_draw_nothing_from_a_sampler() -> None:
    whole = DataLoader(Items(), sampler=Permuted(), num_workers=1, persistent_workers=True)
    found = [int(item[0]) for (item,) in open_epoch(whole, loader_facts(whole), EpochOrder(), late=True)]
    assert found == [*Permuted()]


@pytest.mark.parametrize("accumulate", [2, 4, 6, 7])
def test_accumulated_batches_make_one_step_and_the_left_over_ones_the_last(accumulate: int) -> None:
    def make() -> Any:
        return loader("shuffle", "all")

    whole = whole_run(make, epochs=2, accumulate=accumulate)
    assert whole.steps is not None
    per_epoch = -(-BATCHES // accumulate)
    assert whole.steps.steps_per_epoch == per_epoch
    batches = [entry for entry in whole.record if len(entry) == 4]
    assert [(entry[0], entry[1]) for entry in batches] == [
        (epoch, at // accumulate + 1) for epoch in (1, 2) for at in range(BATCHES)
    ]
    assert [entry[3] for entry in batches] == [
        (at + 1) % accumulate == 0 or at + 1 == BATCHES for _ in (1, 2) for at in range(BATCHES)
    ]
    assert [event for event in whole.events if event.startswith("end")] == [
        f"end {epoch}.{step}" for epoch in (1, 2) for step in range(1, per_epoch + 1)
    ]
    for epoch, step in [(1, 1), (1, per_epoch), (2, 1)]:
        again = resumed(whole, make, epoch, step, epochs=2, accumulate=accumulate)
        assert again.record == after(whole.record, epoch, step)


def test_a_run_that_is_resumed_can_be_resumed_again() -> None:
    def make() -> Any:
        return loader("shuffle with generator", "all")

    whole = whole_run(make, epochs=3)
    first = resumed(whole, make, 2, 1, epochs=3)
    second = resumed(first, make, 2, 4, epochs=3)
    third = resumed(second, make, 2, 6, epochs=3)
    assert third.record == after(whole.record, 2, 6)


# ------------------------------------------------------------------ order of events


def test_events_come_in_the_documented_order() -> None:
    run = Run()
    steps = run.steps = Steps([10, 20, 30], 2, accumulate=2, events=run)
    seen = run.events
    for epoch, step, batch in steps:
        seen.append(f"batch {epoch}.{step} {batch}")
    one = ["begin {e}.1", "batch {e}.1 10", "batch {e}.1 20", "end {e}.1", "begin {e}.2", "batch {e}.2 30", "end {e}.2"]
    assert seen == [text.format(e=epoch) for epoch in (1, 2) for text in ["epoch {e}", *one]]


@pytest.mark.parametrize("how", ["break", "return", "raise"])
def test_a_body_that_does_not_come_back_leaves_its_step_under_way(how: str) -> None:
    run = Run()
    steps = run.steps = Steps([10, 20, 30], 1, events=run)

    def body() -> None:
        for _, _, batch in steps:
            if batch == 20:
                if how == "break":
                    break
                if how == "return":
                    return
                raise ValueError

    if how == "raise":
        with pytest.raises(ValueError):
            body()
    else:
        body()
    assert run.events == ["epoch 1", "begin 1.1", "end 1.1", "begin 1.2"]
    assert (steps.epoch, steps.step, steps.under_way) == (1, 2, True)


def test_a_body_may_end_its_step_before_it_comes_back() -> None:
    run = Run()
    steps = run.steps = Steps([10, 20, 30], 1, accumulate=2, events=run)
    for _, _, batch in steps:
        if batch == 20:
            steps.end_early((1, 1))
            run.events.append("log")
            assert not steps.under_way
    assert run.events == ["epoch 1", "begin 1.1", "end 1.1", "log", "over 1.1", "begin 1.2", "end 1.2"]


def test_a_step_is_ended_once_by_its_own_name_and_with_its_last_batch() -> None:
    run = Run()
    steps = run.steps = Steps([10, 20], 1, accumulate=2, events=run)
    for _, _, batch in steps:
        if batch == 10:
            with golden.raises(ConfigError):
                steps.end_early()
            continue
        with golden.raises(ConfigError):
            steps.end_early((1, 2))
        steps.end_early()
        with golden.raises(ConfigError):
            steps.end_early()
    assert run.events == ["epoch 1", "begin 1.1", "end 1.1", "over 1.1"]


def test_no_step_can_be_ended_while_its_batch_is_fetched() -> None:
    class Hasty(list[int]):
        def __iter__(self) -> Iterator[int]:
            for batch in super().__iter__():
                with golden.raises(ConfigError):
                    steps.end_early()
                yield batch

    run = Run()
    steps = Steps(Hasty([10, 20]), 1, events=run)
    assert [batch for _, _, batch in steps] == [10, 20]
    assert run.events == ["epoch 1", "begin 1.1", "end 1.1", "begin 1.2", "end 1.2"]


def test_a_whole_loop_leaves_nothing_under_way() -> None:
    run = Run()
    steps = run.steps = Steps([10, 20], 1, events=run)
    assert [batch for _, _, batch in steps] == [10, 20]
    assert (steps.epoch, steps.step, steps.under_way) == (1, 2, False)


def test_the_sampler_is_told_the_epoch_counted_from_zero_once() -> None:
    class Told(DistributedSampler[Any]):
        def __init__(self) -> None:
            super().__init__(Items(), 2, 0)
            self.told: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)
            super().set_epoch(epoch)

    for wrap in (False, True):
        sampler = Told()
        data: Any = (
            DataLoader(Items(), batch_sampler=BatchSampler(sampler, 2, False))
            if wrap
            else DataLoader(Items(), 2, sampler=sampler)
        )
        run = Run()
        run.steps = Steps(data, 3, events=run)
        list(run.steps)
        assert sampler.told == [0, 1, 2]


# ------------------------------------------------------------------ negative controls


@pytest.mark.process
def test_control_skipping_by_index_with_workers_differs_where_the_dataset_draws() -> None:
    def make(draw: str) -> Any:
        return loader("shuffle", draw, workers=2)

    for draw, equal in (("none", True), ("torch", False)):
        whole = whole_run(lambda draw=draw: make(draw), epochs=2)
        again = resumed(whole, lambda draw=draw: make(draw), 2, 3, epochs=2, data="skip")
        assert (again.record == after(whole.record, 2, 3)) is equal
        assert again.steps is not None
        golden.says(told(again))


def test_control_without_the_streams_of_the_step_the_batches_differ() -> None:
    def make() -> Any:
        return loader("shuffle", "torch")

    whole = whole_run(make, epochs=2)
    seed_all(999)
    run = Run()
    run.train(loader=make(), epochs=2, resume=ResumeAt(1, 3, lambda: put_back(whole.starts[1]), None))
    assert run.record != after(whole.record, 1, 3)
    assert run.steps is not None
    golden.says(told(run.steps))


def test_control_without_the_streams_of_the_epochs_start_the_order_differs() -> None:
    def make() -> Any:
        return loader("shuffle")

    whole = whole_run(make, epochs=2)
    seed_all(999)
    run = Run()
    run.train(loader=make(), epochs=2, resume=ResumeAt(1, 3, None, lambda: put_back(whole.ends[1, 3])))
    assert run.record != after(whole.record, 1, 3)
    assert run.steps is not None
    golden.says(told(run.steps))


# ------------------------------------------------------------------ what is not exact says so


def test_a_sampler_that_draws_from_the_trainings_streams_between_batches_is_reported() -> None:
    class Greedy(Sampler[int]):
        def __len__(self) -> int:
            return SAMPLES

        def __iter__(self) -> Iterator[int]:
            left = list(range(SAMPLES))
            while left:
                yield left.pop(random.randrange(len(left)))

    def make() -> Any:
        return DataLoader(Items(), BATCH, sampler=Greedy())

    whole = whole_run(make, epochs=1)
    again = resumed(whole, make, 1, 3, epochs=1)
    assert again.record != after(whole.record, 1, 3)
    assert again.steps is not None
    golden.says(told(again))


class Hardest(Sampler[int]):
    """Each sample once in an epoch; of those that are left, the one that is hardest now, or was at the start."""

    def __init__(self, hardness: list[float], lazily: bool) -> None:
        self.hardness, self.lazily = hardness, lazily

    def __len__(self) -> int:
        return len(self.hardness)

    def __iter__(self) -> Iterator[int]:
        hardness, left = self.hardness if self.lazily else [*self.hardness], set(range(len(self.hardness)))
        while left:
            left.remove(hardest := max(left, key=lambda index: (hardness[index], index)))
            yield hardest


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("lazily", "elsewhere"), [(False, False), (True, False), (False, True)])
def test_a_sampler_that_reads_what_has_changed_within_the_epoch_is_found_out(
    lazily: bool, elsewhere: bool, workers: int
) -> None:
    """elsewhere: what it reads at the epoch's start is the model's, say, which `resume()` has put back already."""
    hardness: list[float] = []

    class Trains(Run):
        def step_end(self, epoch: int, step: int) -> None:
            hardness[:] = [one * 2 + index % 5 for index, one in enumerate(hardness)]
            super().step_end(epoch, step)

    class Elsewhere(Hardest):
        __slots__ = ()
        hardness = property(lambda self: hardness, lambda self, value: None)  # type: ignore[assignment]

    def make() -> Any:
        if not elsewhere or not hardness:
            hardness[:] = [float(index % 7) for index in range(SAMPLES)]
        return DataLoader(
            Items(), BATCH, sampler=(Elsewhere if elsewhere else Hardest)(hardness, lazily), num_workers=workers
        )

    whole = whole_run(make, Trains(), epochs=2)
    if elsewhere:
        hardness[:] = [float(index % 3) for index in range(SAMPLES)]
    part = resumed(whole, make, 1, 3, Trains(), epochs=2)
    same = part.record == after(whole.record, 1, 3)
    assert same is not (lazily or elsewhere)
    golden.says([*told(part), f"the same: {same}"])


@pytest.mark.parametrize("trained", [True, False])
def test_a_sampler_that_has_a_network_is_known_at_resume_if_that_is_trained(trained: bool) -> None:
    class Knows(Hardest):
        def __init__(self) -> None:
            super().__init__([0.0] * SAMPLES, lazily=False)
            self.net = torch.nn.Linear(1, 1).requires_grad_(trained)

    made = DataLoader(Items(), batch_sampler=BatchSampler(Knows(), BATCH, drop_last=False))
    saved = Steps(made, 2, events=Run()).facts(1)
    golden.says([f"after {step} of {BATCHES}: {known_at_resume(saved, step)}" for step in (1, BATCHES)])


class Longer(IterableDataset[Any]):
    """Cuts a text into pieces as long as the loop says; what is left of one comes into the next."""

    def __init__(self) -> None:
        self.length = 2

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Any]:
        at = 0
        for _ in range(SAMPLES):
            at += self.length
            yield torch.arange(at - self.length, at)[:2].to(torch.bfloat16)


@pytest.mark.parametrize("grows", [True, False])
def test_a_data_set_that_reads_what_has_changed_within_the_epoch_is_found_out(grows: bool) -> None:
    made: list[Longer] = []

    class Trains(Run):
        def step_end(self, epoch: int, step: int) -> None:
            made[-1].length += grows
            super().step_end(epoch, step)

    def make() -> Any:
        made.append(Longer())
        return DataLoader(made[-1], BATCH)

    whole = whole_run(make, Trains(), epochs=1)
    part = resumed(whole, make, 1, 3, Trains(), epochs=1)
    same = part.record == after(whole.record, 1, 3)
    assert same is not grows
    golden.says([*told(part), f"the same: {same}"])


def test_samplers_may_give_what_only_their_data_set_understands() -> None:
    class Keys(Items):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index[0])

    class Drawn(Sampler[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __iter__(self) -> Iterator[Any]:
            yield from ((index, object()) for index in torch.randperm(SAMPLES))

    def make() -> Any:
        return DataLoader(Keys(), BATCH, sampler=Drawn())

    whole = whole_run(make, epochs=1)
    assert whole.ends[1, 2]["order"] is None
    part = resumed(whole, make, 1, 2, epochs=1)
    assert part.record == after(whole.record, 1, 2)
    assert not told(part)


def test_a_foreign_loader_that_draws_ahead_is_reported_and_one_that_does_not_draw_is_exact() -> None:
    class Ahead:
        def __init__(self, draws: bool) -> None:
            self.draws = draws

        def __len__(self) -> int:
            return BATCHES

        def make(self, k: int) -> Any:
            return (k, torch.rand(()).item() if self.draws else 0.0)

        def __iter__(self) -> Iterator[Any]:
            coming = self.make(0)
            for k in range(1, BATCHES + 1):
                now, coming = coming, self.make(k)
                yield now

    for draws in (False, True):
        whole = whole_run(lambda draws=draws: Ahead(draws), epochs=2)
        again = resumed(whole, lambda draws=draws: Ahead(draws), 1, 3, epochs=2)
        assert (again.record == after(whole.record, 1, 3)) is not draws
        assert again.steps is not None
        golden.says(told(again))


@pytest.mark.parametrize(
    "make_rng", [lambda: random.Random(3), lambda: np.random.default_rng(3), lambda: np.random.RandomState(3)]
)
def test_a_generator_of_the_datasets_own_goes_on_where_it_was(make_rng: Any) -> None:
    class Noise:
        def __init__(self) -> None:
            self.streams = {"noise": [make_rng()]}

        def __call__(self) -> float:
            return float(self.streams["noise"][0].random())

    class Augmented(Items):
        def __init__(self) -> None:
            super().__init__()
            self.transform = Noise()

        def __getitem__(self, index: int) -> Any:
            return torch.tensor([index, self.transform()])

    def make() -> Any:
        return DataLoader(Augmented(), BATCH, shuffle=True)

    whole = whole_run(make, epochs=3)
    for control in (False, True):  # the negative control: without them the numbers differ
        for epoch, step in points(BATCHES):
            again = resumed(whole, make, epoch, step, epochs=3)
            assert (again.record == after(whole.record, epoch, step)) is not control
            assert bool(told(again)) is control
            assert told(whole) == []
        forget(whole)


def test_torch_generators_of_the_datasets_and_samplers_own_are_captured() -> None:
    class Augmented(Items):
        def __init__(self) -> None:
            super().__init__()
            self.noise = seeded(4)

        def __getitem__(self, index: int) -> Any:
            return torch.tensor([index, torch.rand((), generator=self.noise).item()])

    class Drawn(Sampler[int]):
        def __init__(self) -> None:
            self.rng = seeded(5)

        def __len__(self) -> int:
            return SAMPLES

        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(SAMPLES, generator=self.rng).tolist())

    def make() -> Any:
        return DataLoader(Augmented(), BATCH, sampler=Drawn())

    whole = whole_run(make, epochs=3)
    assert whole.steps is not None
    assert whole.ends[1, 1]["saved"].generators.keys() == {"loader.sampler.rng", "loader.dataset.noise"}
    for epoch, step in points(whole.steps.steps_per_epoch):
        assert resumed(whole, make, epoch, step, epochs=3).record == after(whole.record, epoch, step)


def test_without_torchs_private_sampler_iterator_batches_are_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        return loader("shuffle", "none")

    whole = whole_run(make, epochs=1)
    monkeypatch.setattr("lastwords.optim_wrapper.loop.data_position._SAMPLER_ITERATOR", "_gone_in_a_later_torch")
    assert resumed(whole, make, 1, 3, epochs=1).record == after(whole.record, 1, 3)


@pytest.mark.process
def test_the_order_of_workers_without_in_order_is_not_promised() -> None:
    run = Run()
    steps = Steps(loader("shuffle", workers=2, in_order=False), 1, events=run)
    assert any("in_order=False" in reason for reason in told(steps))


# ------------------------------------------------------------------ refusals


class NoLength:
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsized(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("bad", [NoLength(), DataLoader(Unsized()), iter([1, 2]), None])
def test_a_loader_without_a_length_is_refused_with_what_to_do(bad: Any) -> None:
    with golden.raises(ConfigError):
        Steps(bad, 1, events=Run())


def test_an_empty_loader_is_refused() -> None:
    with pytest.raises(ConfigError, match="drop_last"):
        Steps(DataLoader(Items(), batch_size=100, drop_last=True), 1, events=Run())


@pytest.mark.parametrize(("name", "value"), [("epochs", -1), ("epochs", 1.5), ("accumulate", 0), ("accumulate", True)])
def test_counts_that_are_no_counts_are_refused(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"epochs": 1, "accumulate": 1, name: value}
    with pytest.raises(ConfigError, match=name):
        Steps([1], events=Run(), **arguments)


class Liar:
    def __init__(self, says: int, has: int) -> None:
        self.says, self.has = says, has

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.has))


def test_a_loader_whose_length_is_wrong_is_refused_when_it_shows() -> None:
    for says, has in ((3, 2), (2, 3)):
        run = Run()
        with golden.raises(ConfigError):
            run.train(loader=Liar(says, has), epochs=1)


def test_another_length_than_in_the_saved_run_is_refused() -> None:
    with golden.raises(ConfigError):
        Steps([1] * 6, 2, events=Run(), resume=ResumeAt(1, 7, None, None))
    with golden.raises(ConfigError):
        Run().train(loader=Liar(4, 2), epochs=1, resume=ResumeAt(1, 3, None, None))


def test_steps_can_be_taken_once() -> None:
    steps = Steps([1], 1, events=Run())
    iter(steps)
    with pytest.raises(ConfigError, match="once"):
        iter(steps)


@pytest.mark.ci
def test_nothing_of_a_batch_is_kept_while_the_next_is_fetched() -> None:
    import gc
    import weakref

    alive: list[Any] = []

    class Loader:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[torch.Tensor]:
            for k in range(3):
                gc.collect()
                assert all(reference() is None for reference in alive)
                made = torch.tensor([k])
                alive.append(weakref.ref(made))
                yield made
                del made

    run = Run()
    run.steps = Steps(Loader(), 1, events=run)
    for _, _, batch in run.steps:
        assert batch.numel() == 1
        del batch
