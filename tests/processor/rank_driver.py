"""A processor core that is told things by name, and what it says, for tests."""

from __future__ import annotations

from lastwords.core_events import Tick
from lastwords.processor.core import ProcessorCore, ProcessorOptions
from lastwords.processor.events import Effect, Event, FromController, SendReport, SessionUp
from lastwords.vocabulary import Exit, ExitKind, Freeze, Order, Phase, Proceed, Report, Resume, Save, Stand

GENERATION = 4


class RankDriver:
    """One rank with an open session; `now_s` moves only by `wait`."""

    def __init__(self, ended_step: int = 0, options: ProcessorOptions | None = None, connected: bool = True) -> None:
        self.core = ProcessorCore(1, GENERATION, ended_step, options)
        self.now_s = 100.0
        if connected:
            self.tell(SessionUp())

    def tell(self, event: Event) -> list[Effect]:
        """Hand in an event and take what follows."""
        self.core.handle(event, self.now_s)
        return self.core.take_effects()

    def order(self, order: Order) -> list[Effect]:
        """Hand in an order."""
        return self.tell(FromController(order))

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, with the Ticks that the core asks for."""
        until_s = self.now_s + seconds
        effects: list[Effect] = []
        while (due_s := self.core.deadline_s) is not None and due_s <= until_s:
            self.now_s = max(self.now_s, due_s)
            effects += self.tell(Tick())
        self.now_s = until_s
        return effects

    # ------------------------------------------------------------------ where the training thread is

    def walk(self, phase: Phase, step: int) -> None:
        """Walk the unfrozen training thread to a stand of the step under way."""
        core = self.core
        moves = {
            Phase.READY: (core.mark_ready,),
            Phase.UPDATING: (core.mark_ready, core.try_update),
            Phase.UPDATED: (core.mark_ready, core.try_update, core.mark_updated),
            Phase.TORN: (core.mark_ready, core.try_update, core.mark_torn),
            Phase.SKIPPED: (core.mark_skipped,),
            Phase.DONE: (core.mark_left,),
            Phase.COMPUTING: (),
        }
        for move in moves[phase]:
            move()
        assert core.stand == Stand(phase, step), core.stand

    # ------------------------------------------------------------------ orders

    def freeze(self, incident: int = 1) -> list[Effect]:
        return self.order(Freeze(GENERATION, incident, "rank 0 died"))

    def resume(self, incident: int = 1) -> list[Effect]:
        return self.order(Resume(GENERATION, incident))

    def proceed(self, step: int, incident: int = 1) -> list[Effect]:
        return self.order(Proceed(GENERATION, incident, step))

    def save(self, step: int, attempt: int = 1, incident: int = 1, units: tuple[str, ...] = ("u",)) -> list[Effect]:
        return self.order(Save(GENERATION, incident, attempt, step, units, (1,), 0, "chosen"))

    def exit(self, incident: int = 1) -> list[Effect]:
        return self.order(Exit(GENERATION, incident, ExitKind.SAVED, 7, "/c", "rank 0 died", (0,)))


def reports(effects: list[Effect]) -> list[Report]:
    """What was sent."""
    return [effect.report for effect in effects if isinstance(effect, SendReport)]
