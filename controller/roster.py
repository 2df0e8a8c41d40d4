"""Which session each rank's orders go to, and what people are told about a rank. The core keeps books of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType

from lastwords.controller.sessions import PeerSession
from lastwords.state import RankState
from lastwords.vocabulary import Hello, ProcessId, Report, Stand, Status


@dataclass(slots=True)
class _Seen:
    process: ProcessId
    stand: Stand
    heard_mono_s: float
    units: tuple[str, ...]
    dead: bool = False
    explained: bool = False
    status: Status | None = None


class Roster:
    """Ranks that were accepted, and the sessions that they are bound to. The loop's thread only."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._session_of: dict[int, PeerSession] = {}
        self._seen: dict[int, _Seen] = {}

    @property
    def is_untouched(self) -> bool:
        """Whether no rank has ever been accepted."""
        return not self._seen

    @property
    def connected(self) -> Collection[int]:
        """Ranks with an open session."""
        return self._session_of.keys()

    @property
    def live(self) -> int:
        """How many ranks have an open session and are not known to be dead."""
        return sum(1 for rank in self._session_of if not self._seen[rank].dead)

    def session_of(self, rank: int) -> PeerSession | None:
        """Session that orders for `rank` go to."""
        return self._session_of.get(rank)

    def bind(self, session: PeerSession, hello: Hello, now_s: float) -> None:
        """A Hello was accepted: orders for its rank go here from now on; a session left without ranks is ended."""
        before = self._session_of.get(hello.rank)
        if before is not None and before is not session:
            before.ranks.discard(hello.rank)
            if not before.ranks:
                before.cancel()
        session.ranks.add(hello.rank)
        self._session_of[hello.rank] = session
        known = self._seen.get(hello.rank)
        dead = known is not None and known.dead and known.process == hello.process  # its last words may come late
        self._seen[hello.rank] = _Seen(hello.process, hello.stand, now_s, hello.units, dead)

    def unbind(self, session: PeerSession) -> list[int]:
        """A session is over; returns the ranks that have none now, sorted."""
        gone = sorted(rank for rank in session.ranks if self._session_of.get(rank) is session)
        for rank in gone:
            del self._session_of[rank]
        return gone

    def hear(self, report: Report, now_s: float) -> None:
        """A report of an accepted rank."""
        seen = self._seen[report.rank]
        seen.heard_mono_s = now_s
        stand: Stand | None = getattr(report, "stand", None)
        if stand is not None:
            seen.stand = stand
        if isinstance(report, Status):
            seen.status = report

    def bury(self, rank: int) -> bool:
        """The process of this rank has died; False if that is known already, or nobody of that rank ever came."""
        seen = self._seen.get(rank)
        if seen is None or seen.dead:
            return False
        seen.dead = True
        return True

    def explain(self, rank: int) -> bool:
        """It is known how the process of this rank has died; False if that was known already."""
        seen = self._seen.get(rank)
        if seen is None or not seen.dead or seen.explained:
            return False
        seen.explained = True
        return True

    def views(self, now_s: float, slower: Mapping[int, float] = MappingProxyType({})) -> tuple[RankState, ...]:
        """All ranks of the job as people see them. slower: by how much, those that are slower than their peers."""
        holders = Counter(unit for seen in self._seen.values() if not seen.dead for unit in seen.units)
        alone = {unit for unit, count in holders.items() if count == 1}
        return tuple(self._view(rank, now_s, slower.get(rank, 0.0), alone) for rank in range(self._world_size))

    def _view(self, rank: int, now_s: float, slower: float, alone: Set[str]) -> RankState:
        seen = self._seen.get(rank)
        if seen is None:
            return RankState(rank, None, None, connected=False, dead=False, heard_s=-1.0)
        heard_s = max(0.0, now_s - seen.heard_mono_s)
        known, connected, said = (rank, seen.process, seen.stand), rank in self._session_of, seen.status
        sole_holder = not seen.dead and not alone.isdisjoint(seen.units)
        if said is None or seen.dead:
            return RankState(*known, connected, seen.dead, heard_s, sole_holder=sole_holder)
        where = said.waits_at, said.stands_at
        return RankState(*known, connected, seen.dead, heard_s, *where, said.work_s, slower, sole_holder)
