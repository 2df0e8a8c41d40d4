"""A controller core that is told things by name, and what it says, for tests."""

from __future__ import annotations

from typing import TypeVar

from lastwords.controller.core import ControllerCore
from lastwords.controller.events import (
    ControllerOptions,
    Died,
    Discard,
    Effect,
    EndController,
    EndKnown,
    Event,
    FromRank,
    KeepParts,
    LookForNewest,
    NewestKnown,
    Published,
    PublishFailed,
    Reply,
    Send,
    SessionClosed,
    StartPublish,
    StartVerify,
    Verified,
    VerifyBlocked,
    VerifyFailed,
)
from lastwords.core_events import Log, Tick
from lastwords.vocabulary import (
    NO_SCHEDULE,
    DeathSource,
    Hello,
    LoopBegin,
    Order,
    Phase,
    ProcessId,
    Report,
    Saved,
    SaveFailed,
    SaveProgress,
    Schedule,
    Settled,
    Stand,
    Status,
    WholeCopy,
)

GENERATION = 3
AnOrder = TypeVar("AnOrder")


def computing(step: int) -> Stand:
    """COMPUTING(step)"""
    return Stand(Phase.COMPUTING, step)


class JobDriver:
    """A controller and the reports of its ranks, which are only spoken for. `effects` are those of the last call.

    newest: step and path of the newest checkpoint, which every look for it finds at once; None: looks are not answered.
    """

    newest: tuple[int, str] | None = (0, "")

    def __init__(
        self,
        ranks: int,
        *,
        options: ControllerOptions | None = None,
        hosts: str = "",
        units: tuple[str, ...] = (),
        registered: bool = True,
    ) -> None:
        self.ranks = ranks
        self.core = ControllerCore(ranks, GENERATION, options)
        self.now_s = 50.0
        self.effects: list[Effect] = []
        self._hosts = hosts or "a" * ranks
        self._units = units or ("u",) * ranks
        self._sequence = 0
        self.tell(Tick())
        if registered:
            for rank in range(ranks):
                self.hello(rank)

    # ------------------------------------------------------------------ events

    def tell(self, event: Event) -> list[Effect]:
        """Hand in an event."""
        self.effects = self.core.handle(event, self.now_s)
        for effect in tuple(self.effects):
            if isinstance(effect, LookForNewest) and self.newest is not None:
                self.effects = self.effects + self.core.handle(NewestKnown(effect.incident, *self.newest), self.now_s)
        return self.effects

    def hear(self, report: Report) -> list[Effect]:
        """Hand in a report."""
        return self.tell(FromRank(report))

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, with the Ticks that the core asks for."""
        until_s = self.now_s + seconds
        effects: list[Effect] = []
        while (due_s := self.core.deadline_s) is not None and due_s <= until_s:
            self.now_s = max(self.now_s, due_s)
            effects += self.tell(Tick())
        self.now_s = until_s
        self.effects = effects
        return effects

    def process(self, rank: int) -> ProcessId:
        """The process of a rank."""
        return ProcessId(f"host-{self._hosts[rank]}", 100 + rank, 7, f"nonce{rank}")

    def hello(self, rank: int, /, **changes: object) -> list[Effect]:
        """A Hello of the rank's process, or of a changed one."""
        fields: dict[str, object] = {
            "rank": rank,
            "generation": GENERATION,
            "world_size": self.ranks,
            "process": self.process(rank),
            "units": (self._units[rank],),
            "stand": computing(0),
        }
        return self.hear(Hello(**(fields | changes)))  # type: ignore[arg-type]

    def begin_loop(
        self, steps_per_epoch: int = 10, epochs: int = 2, start_step: int = 0, schedule: Schedule = NO_SCHEDULE
    ) -> None:
        """All ranks begin the same loop."""
        for rank in range(self.ranks):
            self.hear(LoopBegin(rank, GENERATION, steps_per_epoch, epochs, start_step, schedule))

    def at(self, step: int) -> None:
        """All ranks say that they have ended a step."""
        for rank in range(self.ranks):
            self.hear(Status(rank, GENERATION, computing(step)))

    def settle(
        self,
        rank: int,
        stand: Stand,
        incident: int = 1,
        sequence: int = 0,
        copies: tuple[WholeCopy, ...] = (),
        doubts: str = "",
    ) -> list[Effect]:
        """A Settled, newer than those before unless a sequence is given."""
        self._sequence += 1
        return self.hear(Settled(rank, GENERATION, incident, sequence or self._sequence, stand, copies, doubts))

    def kill(self, rank: int, source: DeathSource = DeathSource.ROBUST_MUTEX) -> list[Effect]:
        """The host watch speaks."""
        return self.tell(Died(rank, source))

    def explain(self, rank: int, how: str = "SIGSEGV, segmentation fault") -> list[Effect]:
        """The host watch knows how its process has ended."""
        return self.tell(EndKnown(rank, how))

    def close(self, rank: int) -> list[Effect]:
        """Its session breaks."""
        return self.tell(SessionClosed(rank))

    def progress(
        self, rank: int, written: int, attempt: int = 1, incident: int = 1, *, syncing: bool = False
    ) -> list[Effect]:
        return self.hear(SaveProgress(rank, GENERATION, incident, attempt, written, syncing))

    def saved(self, rank: int, step: int, attempt: int = 1, incident: int = 1) -> list[Effect]:
        return self.hear(Saved(rank, GENERATION, incident, attempt, step, 1000))

    def save_failed(self, rank: int, step: int, attempt: int = 1, storage: bool = False) -> list[Effect]:
        return self.hear(SaveFailed(rank, GENERATION, 1, attempt, step, "it did not work", storage))

    def verified(self, attempt: int = 1, incident: int = 1) -> list[Effect]:
        return self.tell(Verified(incident, attempt))

    def verify_failed(self, *ranks: int, attempt: int = 1) -> list[Effect]:
        return self.tell(VerifyFailed(1, attempt, tuple((rank, "12 bytes, 1000 expected") for rank in ranks)))

    def verify_blocked(self, attempt: int = 1) -> list[Effect]:
        return self.tell(VerifyBlocked(1, attempt, "Too many open files"))

    def published(self, attempt: int = 1, incident: int = 1) -> list[Effect]:
        return self.tell(Published(incident, attempt, "/c/step"))

    def publish_failed(self, attempt: int = 1) -> list[Effect]:
        return self.tell(PublishFailed(1, attempt, "read-only file system"))

    # ------------------------------------------------------------------ effects of the last call

    def sent(self, kind: type[AnOrder]) -> dict[int, AnOrder]:
        """Orders of this kind, by rank."""
        return {e.rank: e.order for e in self.effects if isinstance(e, Send) and isinstance(e.order, kind)}

    def replies(self) -> list[Order]:
        """Orders to the session that has just spoken."""
        return [effect.order for effect in self.effects if isinstance(effect, Reply)]

    def logs(self) -> str:
        """What was said to the operator."""
        return "\n".join(effect.text for effect in self.effects if isinstance(effect, Log))

    def starts(self) -> StartVerify | StartPublish | None:
        """The work on files that has begun."""
        return next((e for e in self.effects if isinstance(e, StartVerify | StartPublish)), None)

    def discards(self) -> list[tuple[int, int]]:
        """Attempts and steps thrown away."""
        return [(effect.attempt, effect.step) for effect in self.effects if isinstance(effect, Discard)]

    def keeps(self) -> list[tuple[int, int]]:
        """Attempts and steps kept for a human."""
        return [(effect.attempt, effect.step) for effect in self.effects if isinstance(effect, KeepParts)]

    def stops(self) -> bool:
        """True if the controller has ended."""
        return any(isinstance(effect, EndController) for effect in self.effects)
