"""Every interleaving of a small job: `python -m tests.sim.explore --job pairs`. Shipped cores, all orders of events.

A state is the whole world (`tests.sim.small_world`, which says what is left out): where each training thread is, the
state of each core, what is in every channel, on disk and in the ledger. From each state everything that could happen
next is tried, states that have been seen before are not entered again, and the checkers judge each state in which
nothing can happen any more. A state that leads back to itself would be a wait without end, and is reported as such.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.sim.checkers import complaints
from tests.sim.components import Components, Numbers
from tests.sim.job import Job
from tests.sim.ledger import Life
from tests.sim.mutants import MUTANTS as MUTANTS_OF_INCIDENTS
from tests.sim.periodic_mutants import MUTANTS as MUTANTS_OF_PERIODIC
from tests.sim.small_jobs import BROKEN, JOBS, PERIODIC
from tests.sim.small_world import JUDGED, Action, SmallWorld, Tables

NEVER_S = 1e9

MUTANTS = {**MUTANTS_OF_INCIDENTS, **MUTANTS_OF_PERIODIC}

_SENDING_AGAIN = (
    "lastwords.controller.incident.RESEND_INTERVAL_S",
    "lastwords.controller.loop.RESEND_INTERVAL_S",
)
_CORRESPONDENCE = "lastwords.processor.participation.Correspondence"

End = tuple[Any, ...]


@dataclass(slots=True)
class Found:
    """What an exploration has seen. `bad`: complaints with the actions that lead there."""

    states: int = 0
    moves: int = 0
    ends: set[End] = field(default_factory=set)
    """What the checkers can tell apart of the states in which nothing can happen any more."""
    cores: tuple[int, int] = (0, 0)
    bad: list[tuple[str, list[Action]]] = field(default_factory=list)
    complete: bool = True
    """False if `states_max` has ended it."""

    def __str__(self) -> str:
        controllers, processors = self.cores
        return (
            f"{self.states} distinct states, {self.moves} moves, {len(self.ends)} different ends; "
            f"{controllers} states of the controller's core, {processors} of the processors'"
            + ("" if self.complete else " (NOT ALL: the limit was reached)")
        )


def _no_words(_: object) -> str:
    return "a reason"


def _no_number(*_: object) -> int:
    return 0


def _nothing(*_: object) -> None:
    """No session stays away for long here, so there is no deadline without a controller."""


@contextlib.contextmanager
def reduced() -> Iterator[None]:
    """Nothing is sent again, and reasons are not worded: they differ by what was heard first, and decide nothing.

    Nor is it said how many steps are lost, which differs by what the dead had said.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("lastwords.controller.incident.Incident.words", _no_words))
        stack.enter_context(mock.patch("lastwords.controller.incident.Incident.reached", _no_number))
        for name in _SENDING_AGAIN:
            stack.enter_context(mock.patch(name, NEVER_S))
        stack.enter_context(mock.patch(f"{_CORRESPONDENCE}.run_timer", _nothing))
        stack.enter_context(mock.patch(f"{_CORRESPONDENCE}.deadline_s", _nothing))
        yield


def explore(
    job: Job, kills_max: int, breaks_max: int = 0, *, bad_max: int = 1, states_max: int = 0, whole: bool = False
) -> Found:
    """Visit every state that can be reached; ends early after `bad_max` complaints, or `states_max` states.

    whole: by the plain definition and without reductions, to show that these lose no end.
    """
    with reduced(), without_garbage_collection():
        world = SmallWorld(job, Tables(whole), kills_max, breaks_max, whole)
        parts = Plain(world) if whole else Components(world)
        return Search(job, parts, bad_max, states_max).run()


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Millions of tuples, none of them in a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Plain(Components):
    """The same without looking anything up: the definition itself."""

    def following(self, numbers: Numbers) -> list[tuple[Action, Numbers]]:
        self.put(numbers)
        found = []
        for action in self.world.actions():
            self.put(numbers)
            self.world.perform(action)
            found.append((action, self.take()))
        return found


class Search:
    """Depth first, so that a way back to a state on the path is seen."""

    def __init__(self, job: Job, parts: Components, bad_max: int, states_max: int) -> None:
        self.job = job
        self.parts = parts
        self.bad_max = bad_max
        self.states_max = states_max
        self.found = Found()
        self._judged: dict[Any, list[str]] = {}

    def run(self) -> Found:
        parts, found = self.parts, self.found
        start = parts.take()
        done: set[int] = set()
        on_path: set[int] = {_packed(start)}
        path: list[tuple[int, list[tuple[Action, Numbers]]]] = [(_packed(start), parts.following(start))]
        taken: list[Action] = []
        while path and len(found.bad) < self.bad_max:
            packed, following = path[-1]
            if not following:
                path.pop()
                on_path.discard(packed)
                done.add(packed)
                if taken:
                    taken.pop()
                continue
            action, after = following.pop()
            found.moves += 1
            if parts.over(after) and not parts.world.whole:
                after = self._run_to_the_end(after)
            key = _packed(after)
            if key in done:
                continue
            if key in on_path:
                found.bad.append(("i7_nobody_waits_for_ever: this can go on for ever", [*taken, action]))
                continue
            next_following = parts.following(after)
            if not next_following:
                self._judge(after, [*taken, action])
                done.add(key)
            else:
                taken.append(action)
                path.append((key, next_following))
                on_path.add(key)
            if self.states_max and len(done) > self.states_max:
                found.complete = False
                break
        found.states = len(done) + len(on_path)
        tables = parts.world.tables
        found.cores = (len(tables.controllers.pickles), len(tables.processors.pickles))
        return found

    def _run_to_the_end(self, numbers: Numbers) -> Numbers:
        while following := self.parts.following(numbers):
            numbers = following[0][1]
        return numbers

    def _judge(self, numbers: Numbers, taken: list[Action]) -> None:
        parts, world = self.parts, self.parts.world
        shared = parts.shared[numbers[-1]]
        key = (
            tuple(parts.looks[number].record for number in numbers[:-1]),
            shared[-JUDGED:],
        )
        texts = self._judged.get(key)
        if texts is None:
            parts.put(numbers)
            self.found.ends.add(_end(world))
            world.ledger.ended = True
            world.ledger.left_on_disk = world.disk.unpublished()
            texts = self._judged[key] = complaints(self.job, world.ledger)
        self.found.bad += [(text, taken) for text in texts]


def _packed(numbers: Numbers) -> int:
    """One integer for a state: a million of them need little room."""
    packed = 0
    for number in numbers:
        packed = packed << 28 | number
    return packed


def _end(world: SmallWorld) -> End:
    ledger = world.ledger
    ranks = tuple(
        (record.life,) if record.life is Life.KILLED else (record.life, record.held, record.ended, tuple(record.ill))
        for record in ledger.ranks
    )
    published = tuple(
        (publication.step, publication.verified, publication.files, publication.lost_local_ranks)
        for publication in ledger.publications
    )
    return (ranks, published, ledger.controller_stopped)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.explore", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--job", choices=[*JOBS, *PERIODIC, *BROKEN], help="one of the table in tests/sim/README.md, with its faults"
    )
    parser.add_argument("--kills", type=int, help="so many deaths instead")
    parser.add_argument("--breaks", type=int, help="so many broken sessions instead")
    parser.add_argument("--mutant", default="", choices=["", *MUTANTS], help="break this rule of the cores")
    parser.add_argument("--whole", action="store_true", help="without most of the reductions (much slower)")
    parser.add_argument("--states-max", type=int, default=0, help="give up after so many states")
    options = parser.parse_args(arguments)
    names = [options.job] if options.job else [*JOBS, *PERIODIC]
    bad = 0
    for name in names:
        explored = {**JOBS, **PERIODIC, **BROKEN}[name]
        kills = explored.kills if options.kills is None else options.kills
        breaks = explored.breaks if options.breaks is None else options.breaks
        with MUTANTS[options.mutant].applied() if options.mutant else contextlib.nullcontext():
            found = explore(explored.job, kills, breaks, states_max=options.states_max, whole=options.whole)
        sys.stdout.write(f"{name}: {explored.words}; {kills} death(s), {breaks} broken session(s): {found}\n")
        sys.stdout.flush()
        for text, actions in found.bad:
            bad += 1
            sys.stdout.write(f"VIOLATED  {text}\n" + "".join(f"    {action}\n" for action in actions))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
