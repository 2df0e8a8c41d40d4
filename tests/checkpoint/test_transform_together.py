"""Two and three `lastwords transform` with one destination, stopped and killed at any system call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from lastwords.checkpoint import load, lock_file
from lastwords.errors import ConfigError, LastWordsError
from lastwords.integrations.transform import TransformOutcome, transform
from tests.checkpoint.elastic import gathered
from tests.checkpoint.interleaving import Choose, Ended, Machine, at_random, stopped_once
from tests.checkpoint.interposed import InterposedOs
from tests.checkpoint.simulated_disk import SimulatedOs
from tests.checkpoint.test_transform_crash import BITS, DISK, OUT, ROOT, TO

FINAL = OUT / "tft_saved_checkpoints-step_7"

Body = Callable[[InterposedOs], TransformOutcome]


def of_ranks(*ranks: int) -> Body:
    return lambda os: transform(ROOT, OUT, TO, ranks=ranks or None, os=os)


def published(disk: SimulatedOs) -> tuple[Any, ...] | None:
    """Every path of the result, and what it holds."""
    if not disk.exists(FINAL):
        return None
    begin = str(FINAL)
    return tuple(item for item in disk.snapshot() if item[0].startswith(begin))


class Judge:
    """Runs processes under a schedule. AssertionError for any word that was not true."""

    def __init__(self, choose: Choose, bodies: Sequence[Body]) -> None:
        self.disk = DISK.copy()
        self.first: tuple[Any, ...] | None = None
        self.machine = Machine(self.disk, choose, self._look)
        self.ended = self.machine.run(bodies)
        for number, end in enumerate(self.ended):
            self._judge(number, end)
        assert published(self.disk) == self.first, "what was published has changed"
        everybody = not any(end.killed for end in self.ended)
        if everybody:
            assert any(end.result.path is not None for end in self.ended), "all were done and nobody has published"
        last = transform(ROOT, OUT, TO, os=self.disk)
        assert last.path == FINAL, "the same command does not go on"
        self._sound()
        assert [name for name in self.disk.listdir(OUT) if name.startswith(".")] == [], "something was left"

    def _look(self, number: int) -> None:
        now = published(self.disk)
        assert self.first is None or now == self.first, f"what was published has changed before process {number} ended"
        self.first = now

    def _judge(self, number: int, end: Ended) -> None:
        if end.killed:
            return
        assert end.error is None, f"process {number}: {end.error}"
        if end.result.path is not None:
            self._sound()

    def _sound(self) -> None:
        assert load.verify(FINAL, os=self.disk) == []
        assert gathered(FINAL, self.disk) == BITS
        assert set(self.disk.listdir(FINAL)) == {"manifest.json", "rank_0", "rank_1"}


def calls_of(body: Body) -> int:
    machine = Machine(DISK.copy(), lambda number, calls, alive: number)
    machine.run([body])
    return machine.calls[0]


CALLS = calls_of(of_ranks())
JOBS = {
    "the same": (of_ranks(), of_ranks()),
    "overlapping": (of_ranks(0, 1), of_ranks(1)),
    "shared": (of_ranks(0), of_ranks(1)),
}


def judge_all(schedules: Iterable[tuple[str, Choose, Sequence[Body]]]) -> None:
    """Every schedule. Fails with the first one that was judged wrong."""
    for label, choose, bodies in schedules:
        try:
            Judge(choose, bodies)
        except (AssertionError, LastWordsError) as verdict:
            pytest.fail(f"{label}: {verdict}")


def stops(step: int, first: int = 1) -> Iterator[tuple[str, Choose, Sequence[Body]]]:
    for name, bodies in JOBS.items():
        for at in range(first, CALLS + 1, step):
            yield f"{name}, the first one stopped at call {at} of {CALLS}", stopped_once(at), bodies


def draws(seeds: Iterable[int]) -> Iterator[tuple[str, Choose, Sequence[Body]]]:
    """Two and three processes, up to two of them killed, with long and short runs between two switches."""
    jobs = [*JOBS.values(), (of_ranks(), of_ranks(), of_ranks()), (of_ranks(0), of_ranks(1), of_ranks())]
    for seed in seeds:
        switch = (0.02, 0.1, 0.3)[seed // 15 % 3]
        yield f"seed {seed}", at_random(seed, kills=seed % 3, switch=switch), jobs[seed % len(jobs)]


@pytest.mark.ci
def test_one_that_is_stopped_while_the_other_runs_to_its_end_says_nothing_false() -> None:
    judge_all(stops(13))


@pytest.mark.ci
def test_stopped_and_killed_at_random_nobody_says_anything_false() -> None:
    judge_all(draws(range(60)))


@pytest.mark.slow
def test_one_that_is_stopped_at_any_system_call_while_the_other_runs_to_its_end() -> None:
    judge_all(stops(1))


@pytest.mark.slow
def test_thousands_of_schedules_of_two_and_three() -> None:
    judge_all(draws(range(60, 3000)))


@pytest.mark.ci
@pytest.mark.parametrize("rule", ["locks exclude", "a lock has its name"])
def test_without_one_of_the_rules_something_false_is_said(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all of the above."""
    if rule == "locks exclude":
        monkeypatch.setattr(SimulatedOs, "try_lock", lambda self, fd, shared=False: True)
        schedules = draws(range(60))
    else:
        monkeypatch.setattr(lock_file, "has_name", lambda path, fd, os: True)
        schedules = stops(1, first=50)
    with pytest.raises(pytest.fail.Exception):
        judge_all(schedules)


@pytest.mark.ci
def test_of_two_transformations_to_two_layouts_one_wins_and_the_other_is_told_what_is_there() -> None:
    for seed in range(20):
        disk = DISK.copy()
        machine = Machine(disk, at_random(seed, switch=0.1))
        one, other = machine.run([of_ranks(), lambda os: transform(ROOT, OUT, None, os=os)])
        lost = [end for end in (one, other) if end.error is not None]
        assert len(lost) == 1, f"seed {seed}"
        assert isinstance(lost[0].error, ConfigError)
        assert any(text in str(lost[0].error) for text in ("another strategy", "is not this checkpoint transformed")), (
            lost[0].error
        )
        assert load.verify(FINAL, os=disk) == []
        assert gathered(FINAL, disk) == BITS
