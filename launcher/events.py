"""What happens to the ranks of a job (events), and what is done about it (effects): what core.py takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

from lastwords.core_events import Tick

UNKNOWN_CODE = 256
"""No process ends with it: how this one has ended only whoever has started it knows."""


@dataclass(frozen=True, slots=True)
class Ready:
    """No process of `rank` runs, and one can be started. entered: the newest generation it was in; -1: none known."""

    rank: int
    entered: int = -1


@dataclass(frozen=True, slots=True)
class Gone:
    """Nor can one be started any more: whoever would do so has ended, and its process with it."""

    rank: int


@dataclass(frozen=True, slots=True)
class Inside:
    """`rank` runs since before this launcher was there; it repeats what it has said.

    begun: its loop has begun. loops: how many have, this one included.
    """

    rank: int
    generation: int
    begun: bool
    loops: int = 1


@dataclass(frozen=True, slots=True)
class Guarded:
    """A controller looks after `rank`. path: of what it keeps for the one that follows it; "" on another host."""

    rank: int
    path: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """The training loop of `rank` has begun after `step`.

    lacks: what a script has to do that has not called `resume()` before it; "" where it has. imports: modules that the
    script has imported meanwhile, and seconds; those that took longest. saved_only: it cannot call that, as it is.
    """

    rank: int
    step: int = 0
    lacks: str = ""
    imports: tuple[tuple[str, float], ...] = ()
    saved_only: bool = False


@dataclass(frozen=True, slots=True)
class Updated:
    """`rank` has ended its first step in this generation; nothing follows from that.

    inexact: why what it computes may differ from a run that was never interrupted; "" where nothing is known.
    """

    rank: int
    inexact: str = ""


@dataclass(frozen=True, slots=True)
class Over:
    """The training loop of `rank` has come to its end, and nobody looks after it any more."""

    rank: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """`rank` is told to leave after an incident, and ends now.

    step: the newest one that it knows to be saved; 0: none. record: path of the controller's incidents.jsonl. ended:
    the newest step that it has ended. alone: it has lost its controller, which may still have the others save.
    """

    rank: int
    step: int = 0
    record: str = ""
    ended: int = 0
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Stopped:
    """A signal holds the process of `rank`."""

    rank: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The launcher of another host cannot be reached any more."""

    why: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The process of `rank` has ended. code: as of `Popen.returncode`. how: the same, for people.

    raised: the exception that has left the script there, in one line; "" where none is known. lasting: each new process
    would raise it again.
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


Event = Ready | Gone | Inside | Guarded | Begun | Updated | Over | Leaving | Ended | Stopped | Lost | Kept | Tick


@dataclass(frozen=True, slots=True)
class Keep:
    """All ranks are ready, or have said that they run: keep in which generation, for whoever follows this launcher."""

    entry: int
    step: int


@dataclass(frozen=True, slots=True)
class Seat:
    """Of a worker of a cluster. rank_0: address of its host."""

    local_rank: int
    local_size: int
    rank_0: str


@dataclass(frozen=True, slots=True)
class Enter:
    """All ranks are ready: a generation begins. port: of its store, which the shell makes.

    generation: its number; the name is that on the wire. step: the newest one that is known to be saved: where the loop
    has to go on. seat: of a supervisor's rank.
    """

    generation: int
    port: int = 0
    step: int = 0
    seat: Seat | None = None


@dataclass(frozen=True, slots=True)
class End:
    """Ask the process of `rank` to end; no controller will tell it."""

    rank: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process of `rank`."""

    rank: int
    why: str


NOT_ENDED = "has not ended"


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
    """Nothing is healed any more. failure: why; None where all ranks have ended well. lasting: as of `Ended`.

    saved: it is the script that could not go on from what is.
    """

    failure: str | None
    lasting: bool = False
    saved: bool = False


Effect = Keep | Enter | End | Kill | Awaited | Look | Stop
