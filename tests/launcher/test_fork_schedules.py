"""Forks fail, the fork server ends, and the launcher is stopped, in random orders: each process is made once."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import selectors
import socket
import sys
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest

from lastwords.launcher import forks, host
from lastwords.launcher.events import Enter, Event, Lost
from lastwords.launcher.forks import Ahead, ForkServer
from lastwords.launcher.host import Host, Program
from lastwords.launcher.link import RECV_BYTES, Lines, send
from lastwords.launcher.processes import RankSeat
from lastwords.launcher.protocol import ControllerWanted, Forked, Forks, Made, Preload, read, to_message

SCHEDULES = 200
RANKS, CONTROLLERS_MAX, DEATHS_MAX = 3, 3, 2
MOVES = 60
NO_PID = 1 << 22
"""No process has this number, or a larger one."""


class Server:
    """A fork server as its launcher sees it, without processes. made: how often it has forked which."""

    def __init__(self, made: Counter[int], pid: int) -> None:
        self.pid, self.returncode, self.is_collected = pid, 0, False
        self.ours, self._link = socket.socketpair()
        self._lines, self._asked = Lines(), deque[list[int]]()
        self._made = made

    def fork(self, *, fails: bool) -> None:
        """The next process that it was asked for; or it, and those that were asked for with it, cannot be forked."""
        with contextlib.suppress(OSError):  # there is nothing, or nobody
            while data := self._link.recv(RECV_BYTES, socket.MSG_DONTWAIT):
                for said in self._lines.feed(data):
                    match read(said, Preload | Forks):
                        case Preload():
                            send(self._link, to_message(Made()))
                        case Forks(asked):
                            self._asked.append([one.rank for one in asked])
        if not self._asked:
            return
        if fails:
            del self._asked[0]
            return send(self._link, to_message(Forked({}, os.strerror(errno.EAGAIN), errno.EAGAIN)))
        rank = self._asked[0].pop(0)
        if not self._asked[0]:
            del self._asked[0]
        self._made[rank] += 1
        send(self._link, to_message(Forked({str(rank): NO_PID})))

    def kill(self) -> None:
        self._link.close()
        self._asked.clear()

    def wait(self) -> int:
        self.is_collected = True
        return -9


class Schedule:
    """A host, its fork servers, and what happens to them."""

    def __init__(self, seed: int, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self._dice, self._now_s, self._deaths = random.Random(seed), 0.0, 0
        self.made, self.answered, self.events = Counter[int](), list[int](), list[Event]()
        self._servers, self._shortages = list[Server](), self._dice.choice((0, 0, 1, 2, 3))
        self._wanted = 0
        patch.setattr(forks, "ahead", self._ahead)
        for module in (forks, host):
            patch.setattr(module, "mono_s", lambda: self._now_s)
        patch.setattr(Host, "_watch", lambda host, rank: None)
        (script := directory / "train.py").touch()
        self._selector = selectors.DefaultSelector()
        seats = {rank: RankSeat(sys.executable, ("-u", str(script)), {"RANK": str(rank)}) for rank in range(RANKS)}
        program = Program(sys.executable, is_module=False, threads=1)
        self._host = Host(seats, program, self._selector, self.events.append)

    def _ahead(self, *of: object) -> Ahead:
        if self._shortages:
            self._shortages -= 1
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        process: Any = Server(self.made, NO_PID + len(self._servers))
        self._servers.append(process)
        return Ahead(sys.executable, process, process.ours)

    def run(self) -> None:
        try:
            self._host.begin()
            self._host.obey(Enter(0))
            shortage = self._dice.choice((0.0, 0.5, 0.9))
            for _ in range(MOVES):
                moves = (self._fork, self._hear, self._pass, self._want, self._die)
                self._dice.choices(moves, (4, 6, 4, 1, 1))[0](shortage)
            for _ in range(MOVES):  # nothing is short any more
                self._fork(0.0)
                self._hear()
                self._pass()
        finally:
            self._host.end()
            self._selector.close()
        assert [self.made[rank] for rank in range(RANKS)] == [1] * RANKS, self.made
        assert self.made.total() == RANKS + self._wanted, self.made
        assert sorted(self.answered) == [*range(1, self._wanted + 1)]
        assert not [one for one in self.events if isinstance(one, Lost)]
        assert all(one.is_collected for one in self._servers), "no fork server is left"

    def _fork(self, shortage: float) -> None:
        if self._servers:
            self._servers[-1].fork(fails=self._dice.random() < shortage)

    def _hear(self, shortage: float = 0.0) -> None:
        for key, _ in self._selector.select(0):
            key.data()

    def _pass(self, shortage: float = 0.0) -> None:
        """Longer where the launcher was stopped."""
        self._now_s += self._dice.choice((0.1, 0.5, 3.0))
        self._host.tick()

    def _want(self, shortage: float) -> None:
        """A rank asks for a controller."""
        if self._wanted < CONTROLLERS_MAX and any(seat.proc.pid for seat in self._host.seats.values()):
            self._wanted += 1
            link: Any = self
            self._host._fork_controller(link, ControllerWanted([], {}, "", self._wanted))

    def tell(self, message: dict[str, Any]) -> None:
        """What the rank is answered."""
        self.answered.append(message["asked"])

    def _die(self, shortage: float) -> None:
        if self._servers and self._deaths < DEATHS_MAX:
            self._deaths += 1
            self._servers[-1].kill()


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_each_process_is_made_once_whatever_fails_and_whenever(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Schedule(seed, tmp_path, monkeypatch).run()


def test_a_fork_server_that_is_asked_again_before_it_has_answered_makes_one_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    plain: Any = ForkServer._ask

    def ask(server: Any) -> None:
        server._asked = set()
        plain(server)

    def run_all() -> None:
        for seed in range(SCHEDULES):
            Schedule(seed, tmp_path, monkeypatch).run()

    monkeypatch.setattr(ForkServer, "_ask", ask)
    with pytest.raises((AssertionError, KeyError)):  # nobody waits for the second one of a controller
        run_all()
