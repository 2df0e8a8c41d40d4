"""What happens to the ranks of a job (events), and what is done about it (effects): what core.py takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

from lastwords.launcher.versions import Ask, Sources

UNKNOWN_CODE = 256
"""No process ends with it: how this one has ended only whoever has started it knows."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """`rank` is not in `main`, holds no group, and waits.

    step: the newest one that it knows to be saved; 0: none. record: path of the controller's incidents.jsonl, where it
    knows that. sources: a digest of the user's code that it has imported. entered: the newest entry by which this
    process was in `main`; -1: none.
    """

    rank: int
    step: int = 0
    record: str = ""
    sources: str = ""
    entered: int = -1


@dataclass(frozen=True, slots=True)
class Inside:
    """`rank` has been in `main` since before this launcher was there; it repeats what it has said.

    generation: the number of its entry; the name is that on the wire. begun: so has its loop. loops: how many have,
    this one included.
    """

    rank: int
    generation: int
    begun: bool
    loops: int = 1


@dataclass(frozen=True, slots=True)
class Begun:
    """The training loop of `rank` has begun after `step`, so a controller looks after it.

    inexact: why it may differ from one that was never interrupted; "" where nothing is known.
    """

    rank: int
    step: int = 0
    inexact: str = ""


@dataclass(frozen=True, slots=True)
class Updated:
    """`rank` has ended its first step since it entered `main`; nothing follows from that."""

    rank: int


@dataclass(frozen=True, slots=True)
class Over:
    """The training loop of `rank` has come to its end, and nobody looks after it any more."""

    rank: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """A signal holds the process of `rank`."""

    rank: int


@dataclass(frozen=True, slots=True)
class Imported:
    """The process that was started for `rank` is a spare: its imports are done."""

    rank: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The launcher of another host cannot be reached any more."""

    why: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The process of `rank` has ended. code: as of `Popen.returncode`. how: the same, for people.

    raised: the exception that has left `lastwords.run` there, in one line; "" where none is known. lasting: `main`
    would raise it again, however often it is entered.
    """

    rank: int
    code: int
    how: str = ""
    raised: str = ""
    lasting: bool = False

    @property
    def words(self) -> str:
        """Why it has ended, as far as that is known."""
        return (
            self.raised or self.how or ("killed or crashed" if self.code == UNKNOWN_CODE else f"exit code {self.code}")
        )


@dataclass(frozen=True, slots=True)
class Kept:
    """The answer to `Keep`. failure: why nothing is kept; "" if it is, durably."""

    entry: int
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Waiting | Sources | Inside | Begun | Updated | Over | Ended | Stopped | Imported | Lost | Kept | Tick


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process for `rank`; where a spare is ready, that one."""

    rank: int


@dataclass(frozen=True, slots=True)
class Keep:
    """All ranks wait, or have said that they are in `main`: keep by which entry, for whoever follows this launcher."""

    entry: int
    step: int


@dataclass(frozen=True, slots=True)
class Enter:
    """All ranks wait: they enter `main`. port: of this entry's store, which the shell makes.

    generation: the number of the entry; the name is that on the wire. step: the newest one that is known to be saved:
    where the loop has to go on.
    """

    generation: int
    port: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Abandon:
    """`rank` leaves `main`; no controller will tell it."""

    rank: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process of `rank`."""

    rank: int
    why: str


NOT_COME = "has not reached lastwords.run(main)"
NOT_ANSWERED = "is a spare and has not answered"
NOT_LEFT = "has not left main()"


@dataclass(frozen=True, slots=True)
class Awaited:
    """For people: the others wait for `rank`. what: it has not done; seconds: until it is killed (None: it is not)."""

    rank: int
    what: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Look:
    """Whether the process of `rank` is stopped, which `Stopped` answers; else it may be at work."""

    rank: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Nothing is healed any more. failure: why; None where all ranks have ended well. lasting: as of `Ended`."""

    failure: str | None
    lasting: bool = False


Effect = Start | Keep | Enter | Ask | Abandon | Kill | Awaited | Look | Stop
