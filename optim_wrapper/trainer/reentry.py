"""How an incident ends in a process that goes on: by leaving `main`, which `lastwords.run` enters again."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Running(Protocol):
    """A run that is under way in `main`."""

    def hold(self, error: BaseException) -> None:
        """An exception leaves `main`: returns once its incident is over, or raises SystemExit. Nothing if closed."""

    def newest_step(self) -> int:
        """Of the newest checkpoint of this job, periodic ones included; 0 if there is none that can be read."""

    def close(self) -> None:
        """End its threads and give back what it has; nothing if closed."""


class Leaver(Protocol):
    """Whoever entered `main`."""

    def started(self, run: Running) -> None:
        """`run` has started; where the script has no `with`, nobody else sees that `main` is left. Training thread."""

    def leave(self, step: int, ports: tuple[int, ...], record: Path | None) -> None:
        """Bring the training thread out of `main`: it is in our hands, in the user's code, or stuck in a collective.

        step: the newest one that is saved. ports: whose connections stay. record: where the controller writes how each
        incident went. Any thread, returns at once.
        """

    def asked_to_stop(self, number: int) -> None:
        """This process was asked to stop by this signal, which an incident follows. Signal thread."""

    def controlled(self, path: Path) -> None:
        """A controller of this host looks after this rank; it keeps its state in `path`."""

    def begun(self, step: int, inexact: str) -> None:
        """The training loop begins after `step`; inexact: why it may differ from one that was never interrupted, or "".

        ConfigError where a later step is saved, which it should go on from.
        """

    def updated(self) -> None:
        """Its first step is over."""

    def over(self) -> None:
        """It has come to its end by itself."""


_leaver: Leaver | None = None


def use(leaver: Leaver) -> None:
    """From now on incidents end so in this process."""
    global _leaver
    _leaver = leaver


def leaver() -> Leaver | None:
    """Who enters `main` again; None where an incident ends the process."""
    return _leaver
