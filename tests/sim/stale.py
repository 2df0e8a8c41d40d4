"""Messages of an older generation or incident, thrown in at any time. They must not make any difference."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from lastwords.controller import events as to_controller
from lastwords.core_events import Log, Tick
from lastwords.processor import events as to_processor
from lastwords.vocabulary import (
    DeathSource,
    Exit,
    ExitKind,
    Freeze,
    Goodbye,
    Hello,
    Left,
    LoopGo,
    Notice,
    Order,
    PeerDied,
    Phase,
    Proceed,
    ProcessId,
    Raised,
    Refused,
    Release,
    Report,
    Resume,
    Save,
    Saved,
    SaveFailed,
    SaveProgress,
    Settled,
    Signalled,
    Stand,
    Status,
    Welcome,
)
from tests.sim.ledger import Life

if TYPE_CHECKING:
    from tests.sim.timed import TimedWorld


def older_reports(rank: int, generation: int, incident: int, ranks: int, step: int, attempt: int = 0) -> list[Report]:
    """Reports that only a process of the generation before, or an answer to the incident before, would send.

    attempt: of the periodic checkpoint under way.
    """
    old, before = generation - 1, incident - 1
    stand = Stand(Phase.COMPUTING, step + 3)
    ghost = ProcessId("host0", 99, 5, "ghost")
    reports: list[Report] = [
        Hello(rank, old, ranks, ghost, ("replicated",), stand),
        Hello(rank, generation, ranks, ghost, ("replicated",), stand),
        Status(rank, old, stand),
        Settled(rank, old, max(incident, 1), 99, stand),
        Saved(rank, old, max(incident, 1), 1, step, 5),
        SaveFailed(rank, old, max(incident, 1), 1, step, "old", True),
        Raised(rank, old, "old", False, stand),
        Signalled(rank, old, 15, stand),
        Left(rank, old, stand),
        PeerDied(rank, old, (rank + 1) % ranks, DeathSource.ROBUST_MUTEX),
        Goodbye(rank, old),
    ]
    if attempt > 1:
        reports += [
            SaveProgress(rank, generation, 0, attempt - 1, 10),
            Saved(rank, generation, 0, attempt - 1, step, 5),
            SaveFailed(rank, generation, 0, attempt - 1, step, "old", True),
            SaveFailed(rank, generation, 0, attempt - 1, step, "old", False, True),
        ]
    if before > 0:
        reports += [
            Settled(rank, generation, before, 99, stand),
            SaveProgress(rank, generation, before, 1, 10),
            Saved(rank, generation, before, 1, step, 5),
            SaveFailed(rank, generation, before, 1, step, "old", True),
        ]
    return reports


def older_orders(generation: int, over: int, step: int) -> list[Order]:
    """Orders of the generation before, and of the incident `over`, which has ended (0: none has)."""
    orders: list[Order] = []
    for made_in, incident in ((generation - 1, 1), (generation - 1, 9), (generation, over)):
        if made_in == generation and over == 0:
            continue
        orders += [
            Freeze(made_in, incident, "old"),
            Proceed(made_in, incident, step + 1),
            Save(made_in, incident, 9, step, ("replicated",), (0,), 0, "old"),
            Resume(made_in, incident),
            Exit(made_in, incident, ExitKind.SAVED, step, "/old", "old", (0,)),
        ]
    orders += [Welcome(generation - 1), Refused(generation - 1, "old"), LoopGo(generation - 1)]
    orders += [Release(generation - 1), Notice(generation - 1, "old")]
    return orders


_VOLATILE = ("_now_s", "now_s", "_effects")


def fingerprint(core: object) -> bytes:
    """State of a core without its clock."""
    state = dict(core.__dict__)
    for name in _VOLATILE:
        state.pop(name, None)
    return pickle.dumps(state)


def inject(world: TimedWorld, rank: int) -> None:
    """Throw some older messages at the controller and at a rank, chosen by the world's dice."""
    job, dice = world.job, world.dice
    attempt = world.controller._periodic.attempt
    reports = older_reports(rank, job.generation, world.incident, job.world_size, job.steps, attempt)
    for report in dice.sample(reports, 4):
        if world.controller_lives:
            _inject_above(world, rank, report)
    orders = older_orders(job.generation, world.over[rank], job.steps)
    for order in dice.sample(orders, 4):
        if world.trainers[rank].record.life is Life.ALIVE and world.paused_until_s[rank] <= world.now_s:
            _inject_below(world, rank, order)


def _inject_above(world: TimedWorld, rank: int, report: Report) -> None:
    world.feed_controller(Tick())
    if not world.controller_lives or (type(report) is Hello and rank not in world.known):
        return  # the first Hello of a rank is taken, whoever says it
    world.tell("fault", f"the controller gets {report}")
    world.controller._remembering([to_controller.Reply(Notice(0, ""))])  # a death that could be kept later is kept now
    before = fingerprint(world.controller)
    effects = world.controller.handle(to_controller.FromRank(report), world.controller_now_s())
    _compare(world, f"controller, {report}", before, fingerprint(world.controller), effects, _HARMLESS_ABOVE)


def _inject_below(world: TimedWorld, rank: int, order: Order) -> None:
    core = world.trainers[rank].core
    world.feed(world.trainers[rank], Tick())
    world.tell("fault", f"rank {rank} gets {order}")
    before = fingerprint(core)
    core.handle(to_processor.FromController(order), world.rank_now_s(world.trainers[rank]))
    _compare(world, f"rank {rank}, {order}", before, fingerprint(core), core.take_effects(), _HARMLESS_BELOW)


def _says_it_is_over(effect: Any) -> bool:
    """A rank that still answers to a false alarm is told again that it is over; to others that says nothing. And what
    belongs to a periodic checkpoint that was given up is removed again."""
    if isinstance(effect, to_controller.Discard):
        return effect.incident == 0
    return isinstance(effect, to_controller.Send) and isinstance(effect.order, Resume)


_HARMLESS_ABOVE = (to_controller.Reply, Log)
_HARMLESS_BELOW = (to_processor.Wake, Log)


def _compare(
    world: TimedWorld, what: str, before: bytes, after: bytes, effects: list[Any], harmless: tuple[type, ...]
) -> None:
    visible = [effect for effect in effects if not isinstance(effect, harmless) and not _says_it_is_over(effect)]
    if visible:
        world.ledger.stale_effects.append(f"{what} had effects: {visible}")
    elif before != after:
        world.ledger.stale_effects.append(f"{what} changed the state")
