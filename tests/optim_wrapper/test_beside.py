"""What the loop changes and no checkpoint has is named, unless it is not carried on; and nothing else is."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from lastwords.optim_wrapper.ledger import Ledger
from lastwords.optim_wrapper.state.attributes import Attributes
from lastwords.optim_wrapper.state.beside import _TOO_SLOW, NAMES_MAX, carried_by, passing_in, words_on
from tests import golden
from tests.ledgers import told

HERE = __name__
RUNNING = {"loss": 1.0}


class Meter:
    window: ClassVar = [0.0]

    def __init__(self) -> None:
        self.total = 0.0


class Count:
    """An iterator of the user's own."""

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> int:
        self.at += 1
        return self.at


class Trainer:
    """Everything that such an object may have; `train` is the loop, which yields at each step's end."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = StepLR(self.optimizer, 1)
        self.meter, self.history = Meter(), [0.0]
        self.criterion = falling()
        self.stream = iter(DataLoader([1, 2, 3]))
        self.handed = {"best": 1.0}
        self.settings = {"rate": 0.5}
        self.own, self.large = Count(), torch.zeros(200, 200)
        self.other = nn.Linear(1, 1)
        self.other(torch.ones(1)).backward()
        self.hidden = torch.optim.SGD(self.other.parameters(), lr=0.0, momentum=0.9)

    def attributes(self, forget: tuple[str, ...] = ()) -> Attributes:
        roots = {"model": self.model, "optimizer": self.optimizer}
        saved = lambda: dict(self.model.named_parameters())  # noqa: E731
        return Attributes(roots, saved, Ledger(forget), apart={"handed": self.handed})

    def train(self, change: Callable[[Trainer], Any]) -> Iterator[int]:
        best = previous = 0
        for step in range(9):
            yield step
            batch = torch.ones(2)
            loss = self.model(batch).sum()
            loss.backward()
            self.optimizer.step()
            change(self)
            best = max(best, step)
            previous += int(loss > 9)
        print(best, previous)


def falling() -> Callable[[], float]:
    share = 1.0

    def criterion() -> float:
        nonlocal share
        share *= 0.5
        return share

    return criterion


def names(change: Callable[[Trainer], Any], forget: tuple[str, ...] = ()) -> list[str]:
    """What is named after two steps, in a function that runs the loop."""
    trainer = Trainer()
    attributes = trainer.attributes(forget)
    attributes.begin()
    steps = trainer.train(change)
    found: list[str] = []
    for step in steps:
        if step == 0:
            in_frame(steps, attributes.loop_begins)
        if step == 2:
            found = [*in_frame(steps, attributes.beside)]
            break
    assert not attributes.ledger.reasons
    return found


def in_frame(steps: Iterator[int], call: Callable[[], Any]) -> Any:
    """As if the loop itself called it: a generator that is not running is on no stack."""
    frame = steps.gi_frame  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lastwords.optim_wrapper.state.beside.user_frames", lambda thread, modules: [frame])
        return call()


OF_SCHEDULER = ("_last_lr", "_step_count", "last_epoch")
LOOP = f"Trainer.train() of {HERE}"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda one: None, []),
        (lambda one: setattr(one.meter, "total", 0.5), ["self.meter.total"]),
        (lambda one: one.history.append(1.0), ["self.history"]),
        (lambda one: one.history.__setitem__(0, 1.0), ["self.history"]),
        (lambda one: setattr(one, "added", 1), ["self.added"]),
        (lambda one: one.criterion(), ["self.criterion.share"]),
        (lambda one: next(one.stream), ["self.stream"]),
        (lambda one: one.scheduler.step(), [f"self.scheduler.{key}" for key in OF_SCHEDULER]),
        (lambda one: one.handed.update(best=2.0), []),
        (lambda one: setattr(one.model, "calls", 1), []),
        (lambda one: one.settings.get("rate"), []),
        (lambda one: next(one.own), ["self.own.at"]),
        (lambda one: one.large.data.add_(1), ["self.large"]),
        (lambda one: setattr(one, "grads", [p.grad for p in one.model.parameters()]), ["self.grads"]),
        (lambda one: one.hidden.step(), ["self.hidden.state"]),
    ],
)  # fmt: skip
def test_what_the_loop_has_changed_is_named(change: Callable[[Trainer], Any], named: list[str]) -> None:
    assert names(change) == sorted([f"{LOOP}.{name}" for name in [*named, "best"]])


def test_globals_and_attributes_of_classes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(one: Trainer) -> None:
        monkeypatch.setitem(RUNNING, "loss", 2.0)
        Meter.window.append(1.0)

    assert {f"{HERE}.RUNNING", f"{HERE}.Meter.window"} <= {*names(change)}
    del Meter.window[1:]


def test_what_is_forgotten_is_not_named() -> None:
    assert names(lambda one: one.history.append(1.0), ("*.best", "*.history")) == []


def test_an_object_that_cannot_be_looked_at_costs_nothing_but_its_name() -> None:
    class Odd:
        def __getattribute__(self, name: str) -> Any:
            raise ZeroDivisionError

        __hash__ = None  # type: ignore[assignment]

    assert names(lambda one: setattr(one, "odd", Odd())) == [f"{LOOP}.best", f"{LOOP}.self.odd"]


# ----------------------------------------------------------------- which variables a loop carries on


def plain(loader: Any) -> Iterator[Any]:
    best = 9
    for x in loader:
        loss = x + 1
        best = min(best, loss)
        yield
    return best


def nested(loader: Any) -> Iterator[Any]:
    average = None
    for _ in range(3):
        total = 0
        for x in loader:
            if x:
                continue
            total += x
            average = x if average is None else average + x
            yield
        print(total)


def counting(limit: int) -> Iterator[Any]:
    step = 0
    while step < limit:
        step += 1
        doubled = step * 2
        with open(str(doubled)) as file:
            try:
                yield file
            finally:
                del doubled


def closed(loader: Any) -> Iterator[Any]:
    seen, last = [], 0

    def note(x: Any) -> None:
        nonlocal last
        last = x
        seen.append(last)

    for x in loader:
        note(x)
        yield


def before(loader: Any) -> Iterator[Any]:
    kept, gone = 1, 2
    print(gone)
    yield
    print(kept)


@pytest.mark.parametrize(
    ("function", "carried"),
    [
        (plain, {"best"}),
        (nested, {"average", "total", "loader"}),
        (counting, {"step", "limit"}),
        (closed, {"note"}),
        (before, {"kept"}),
    ],
)
def test_a_variable_that_is_read_before_it_is_written_anew_is_carried(function: Any, carried: set[str]) -> None:
    lines, first = inspect.getsourcelines(function)
    line = first + next(number for number, text in enumerate(lines) if "yield" in text)
    code = function.__code__
    places = [begin for begin, _, number in code.co_lines() if number == line]
    names = {*code.co_varnames, *code.co_cellvars}
    assert carried_by(code, places[0]) & names == carried


def reducing(model: nn.Module) -> Iterator[Any]:
    best = total = 0
    for _ in range(3):
        loss = torch.ones(())
        yield "begin"
        for parameter in model.parameters():
            loss = parameter
            yield loss
        total += int(loss)
        best = max(best, total, int(loss))
    return best


def test_inside_a_loop_of_the_step_only_that_counts_which_the_steps_carry_on() -> None:
    steps = reducing(nn.Linear(1, 1))
    frame = steps.gi_frame  # type: ignore[attr-defined]
    next(steps)
    begun_at = frame.f_lasti
    next(steps)
    code = frame.f_code
    assert carried_by(code, frame.f_lasti, begun_at) & {*code.co_varnames} == {"best", "total", "model"}


def test_in_a_script_s_own_loop_what_passes_is_not_named() -> None:
    loop = "for step in range(3):\n    loss = step\n    best = max(best, loss)\n    mark = here()\n"
    source = f"best = kept = 0\n{loop}print(best)\nhere()\n"
    found: list[frozenset[str]] = []
    begun: list[int] = []

    def here() -> None:
        frame = sys._getframe(1)
        begun.append(frame.f_lasti)
        found.append(passing_in(frame.f_code, frame.f_lasti, begun[0]))
        assert len(begun) < 4 or passing_in(frame.f_code, frame.f_lasti) == set(), "the control: it has been left"

    exec(compile(source, "script.py", "exec"), {"here": here, "print": str, "__name__": "__main__"})
    assert len(begun) == 4
    assert {*found} == {frozenset({"step", "loss", "mark"})}


def test_what_takes_too_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lastwords.optim_wrapper.state.beside.SLOW_S", -1.0)
    (said,) = names(lambda one: one.history.append(1.0))
    assert said == _TOO_SLOW


def test_the_cut_is_said_and_what_is_forgotten_does_not_count() -> None:
    def change(one: Trainer) -> None:
        one.meter.__dict__ |= {f"m{number}": number for number in range(70)}

    every = names(change)
    assert len(every) == NAMES_MAX + 1
    assert names(change, ("*.meter.m*",)) == [f"{LOOP}.best"]


class Inner:
    def __init__(self, seen: int = 0) -> None:
        self.seen = seen


class Best:
    """An extra, of which something is left out."""

    def __init__(self, net: nn.Module) -> None:
        self.best, self.waited, self.rows, self.net, self.inner = 9.0, 0, [1.0], net, Inner()
        self.kept, self.lost, self.cached = torch.zeros(2), torch.zeros(2), None
        self.trained = [*net.parameters(), *(one.detach() for one in net.parameters())]

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "rows": [*self.rows], "kept": self.kept, "inner": vars(self.inner).copy()}


CHANGES: dict[str, tuple[Callable[[Best], Any], list[str]]] = {
    "all that is told": (
        lambda one: (setattr(one, "best", 0.5), one.rows.append(2.0), one.kept.add_(1), setattr(one.inner, "seen", 7)),
        [],
    ),
    "a number": (lambda one: setattr(one, "waited", 5), ["extras['best'].waited"]),
    "a tensor": (lambda one: one.lost.sub_(1), ["extras['best'].lost"]),
    "a new object": (lambda one: setattr(one, "cached", Inner(5)), ["extras['best'].cached.seen"]),
    "in an object": (lambda one: setattr(one.inner, "more", 5), []),
    "the model": (lambda one: setattr(one.net, "best", 5), []),
    "the model's parameters": (lambda one: [weight.detach().sub_(1) for weight in one.trained], []),
}
"""What is told by `Best`, and not."""


def named_of(change: Callable[[Best], Any]) -> list[str]:
    net = nn.Linear(2, 2)
    extra = Best(net)
    watch = Attributes({"model": net}, lambda: dict(net.named_parameters()), apart={"extras['best']": extra})
    watch.begin()
    watch.loop_begins()
    change(extra)
    watch.look()
    watch.compare_extras({"extras['best']": extra.state_dict()})
    return [name for name in watch.beside() if name.startswith("extras")]


@pytest.mark.parametrize("kind", CHANGES)
def test_what_an_extra_does_not_tell_of_itself_is_named(kind: str) -> None:
    change, named = CHANGES[kind]
    assert named_of(change) == named


def counting(value: float) -> Callable[..., Any]:
    """A function that counts how often it is called."""
    calls = 0

    def count(*_: Any) -> Any:
        nonlocal calls
        calls += 1
        return value

    return count


def test_what_a_function_in_an_extra_has_with_it_is_named() -> None:
    """torch saves no plain functions with its schedulers, nor with averaged models."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    averaged = torch.optim.swa_utils.AveragedModel(net, avg_fn=counting(torch.zeros(())))
    extras = {"averaged": averaged, "rate": torch.optim.lr_scheduler.LambdaLR(optimizer, counting(0.5))}
    watch = Attributes({"model": net}, lambda: dict(net.named_parameters()), apart=extras)
    watch.begin()
    watch.loop_begins()
    assert watch.beside() == {}
    for _ in range(2):
        optimizer.step()
        extras["rate"].step()
        averaged.update_parameters(net)
    assert [*watch.beside()] == ["averaged.avg_fn.calls", "rate.lr_lambdas[0].calls"]


def test_where_its_state_is_not_known_nothing_is_named() -> None:
    """As where it cannot be stored, which is told."""
    net = nn.Linear(2, 2)
    extra = Best(net)
    watch = Attributes({"model": net}, lambda: dict(net.named_parameters()), apart={"extras['best']": extra})
    watch.begin()
    watch.loop_begins()
    extra.waited = 5
    watch.look()
    watch.compare_extras({})
    assert watch.beside() == {}


class Counts:
    """A loop of one's own that counts, and keeps what it has seen."""

    def __init__(self, steps: int = 0, best: float = 0.0, seen: tuple[int, ...] = ()) -> None:
        self.steps, self.best, self.seen, self.mean = steps, best, [*seen], torch.zeros(2)
        net = nn.Linear(2, 2)
        self.attributes = Attributes({"model": net}, lambda: dict(net.named_parameters()))

    def train(self) -> Iterator[int]:
        steps, best, seen, mean = self.steps, self.best, self.seen, self.mean
        while True:
            yield steps
            steps += 1
            best = max(best, 0.5 * steps)
            seen.append(steps)
            mean += steps

    def begun(self) -> Iterator[int]:
        loop = self.train()
        next(loop)
        self.attributes.begin()
        in_frame(loop, self.attributes.loop_begins)
        return loop


def missed(**again: Any) -> list[str]:
    """Variables of which a resumed run says that they are missing, after three steps; again: what its script sets."""
    before, after = Counts(), Counts(**again)
    loop = before.begun()
    for _ in range(3):
        next(loop)
    changed = in_frame(loop, before.attributes.beside)
    after.begun()
    return sorted({name.rpartition(".")[2] for name in after.attributes.missing_beside(changed)})


def test_what_the_script_has_set_to_the_same_again_is_not_missing() -> None:
    assert missed() == ["best", "mean", "seen", "steps"]
    assert missed(steps=3) == ["best", "mean", "seen"]
    assert missed(steps=3, best=1.5, seen=(1, 2, 3)) == ["mean"]
    assert missed(steps=2, best=1.0, seen=(3, 2, 1)) == ["best", "mean", "seen", "steps"]


class Adaptor:
    """An extra of lastwords' own, which stands for the callbacks of a Trainer."""

    __module__ = "lastwords.integrations.example"

    def __init__(self, *held: Any) -> None:
        self._held = held


class Stateful:
    """As of a library's class."""

    tried = 0

    def state_dict(self) -> dict[str, Any]:
        return {"tried": self.tried}


@pytest.mark.parametrize(("kind", "named"), [(Adaptor, []), (vars, []), (None, ["tried"])])
def test_what_an_extra_holds_that_stands_for_an_object_is_saved_with_it(kind: Any, named: list[str]) -> None:
    net, callback = nn.Linear(2, 2), Stateful()
    extras = {} if kind is None else {"callbacks": kind(callback)}
    watch = Attributes({"model": net}, lambda: dict(net.named_parameters()), apart=extras)

    def loop() -> Iterator[int]:
        held, rounds = callback, 0
        while True:
            yield rounds
            rounds += 1
            held.tried = rounds

    steps = loop()
    next(steps)
    watch.begin()
    in_frame(steps, watch.loop_begins)
    next(steps)
    assert [name.rpartition(".")[2] for name in in_frame(steps, watch.beside)] == [*named, "rounds"]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="there, a look writes into no dict")
def test_a_loop_whose_variables_cannot_be_looked_at_is_told() -> None:
    watch = Attributes({}, dict)
    watch.begin()

    def loop() -> int:
        config = locals()
        watch.loop_begins()
        return len(config)

    loop()
    (why,) = told(watch)
    golden.says(why)


def test_where_the_loop_cannot_be_looked_at_all_of_it_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lastwords.optim_wrapper.state.beside.SLOW_S", -1.0)
    counts = Counts(steps=3)
    counts.begun()
    told = {"steps": "0123456789abcdef", _TOO_SLOW: ""}
    assert counts.attributes.missing_beside(told) == ["steps", _TOO_SLOW]


@pytest.mark.parametrize("variables", [False, True])
@pytest.mark.parametrize("name", ["main() of train.trainer.average", "train.seen"])
def test_what_is_missing_is_said_with_what_would_save_it(name: str, variables: bool) -> None:
    golden.says(words_on([name], variables=variables))
