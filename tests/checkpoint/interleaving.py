"""Several processes on one simulated disk, of which one runs at a time: a schedule says at each call who goes on.

A process that is not chosen has been stopped there, however long. One that is killed does nothing more, and the kernel
closes its files, which ends its locks.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.checkpoint.interposed import Crash, InterposedOs
from tests.checkpoint.simulated_disk import SimulatedOs

CALLS_MAX = 20_000
"""A schedule in which processes wait for each other for ever ends here."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The process that is at a call does not make it, nor any other one."""


Choose = Callable[[int, int, Sequence[int]], "int | Kill"]
"""(process, how many calls it has made, processes that have not ended) -> who goes on."""


@dataclass
class Ended:
    """How a process ended: with a result, an error, or killed."""

    result: Any = None
    error: Exception | None = None
    killed: bool = False


@dataclass
class Machine:
    """Runs each body with an `Os` of its own. after: is called with the process's number whenever one has ended."""

    disk: SimulatedOs
    choose: Choose
    after: Callable[[int], None] = lambda number: None
    calls: list[int] = field(default_factory=list)
    log: list[tuple[int, str]] = field(default_factory=list)

    def run(self, bodies: Sequence[Callable[[InterposedOs], Any]]) -> list[Ended]:
        """Ends when all have."""
        self.calls = [0] * len(bodies)
        self._ended = [Ended() for _ in bodies]
        self._turn = threading.Condition()
        self._alive = list(range(len(bodies)))
        self._current = 0
        self._broken: Exception | None = None
        threads = [threading.Thread(target=self._live, args=(n, body), daemon=True) for n, body in enumerate(bodies)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a process waits for ever"
        if self._broken is not None:
            raise self._broken
        return self._ended

    def _live(self, number: int, body: Callable[[InterposedOs], Any]) -> None:
        ended = self._ended[number]
        os = InterposedOs(lambda _, name, arguments: self._at_call(number, name), self.disk)
        try:
            with self._turn:
                self._turn.wait_for(lambda: self._current == number)
            ended.result = body(os)
        except Crash:
            ended.killed = True
        except Exception as error:
            ended.error = error
        finally:
            os.close_leaked()
            with self._turn:
                self._alive.remove(number)
                try:
                    self.after(number)
                except Exception as error:
                    self._broken = error
                if self._alive:
                    self._current = self._alive[0]
                    chosen = self.choose(number, self.calls[number], self._alive)
                    if not isinstance(chosen, Kill) and chosen in self._alive:
                        self._current = chosen
                self._turn.notify_all()

    def _at_call(self, number: int, name: str) -> None:
        with self._turn:
            if self._ended[number].killed:
                raise Crash
            self.calls[number] += 1
            self.log.append((number, name))
            assert sum(self.calls) < CALLS_MAX, "they wait for each other"
            chosen = self.choose(number, self.calls[number], self._alive)
            if isinstance(chosen, Kill):
                self._ended[number].killed = True
                raise Crash
            if name == "pause" and chosen == number:  # others run while it sleeps
                chosen = next((other for other in self._alive if other != number), number)
            if chosen in self._alive and chosen != number:
                self._current = chosen
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._current == number)


def stopped_once(at: int, who: int = 0) -> Choose:
    """Process `who` is stopped at its call `at` until all others have ended; they run one after another."""
    hold = False

    def choose(number: int, calls: int, alive: Sequence[int]) -> int:
        nonlocal hold
        if number == who and calls == at:
            hold = True
        if hold:
            others = [other for other in alive if other != who]
            return number if number in others else others[0] if others else who
        return number if number in alive else alive[0]

    return choose


def at_random(seed: int, *, kills: int = 0, switch: float = 0.1) -> Choose:
    """Switches at random, and kills up to that many processes."""
    draw = random.Random(seed)
    fatal = sorted(draw.randrange(1, 200) for _ in range(kills))
    made = 0

    def choose(number: int, calls: int, alive: Sequence[int]) -> int | Kill:
        nonlocal made
        made += 1
        if fatal and made >= fatal[0] and number in alive:
            fatal.pop(0)
            return Kill()
        if number not in alive or draw.random() < switch:
            return draw.choice(list(alive))
        return number

    return choose
