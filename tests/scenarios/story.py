"""A job of shipped cores that does what a transcript says, in one thread and in virtual time.

Every message is delivered at once and in order, unless its link is held. A rank's training thread has a goal and
walks towards it; where it has to park, it tries again when it is woken.
"""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lastwords.controller import events as to_controller
from lastwords.controller.core import ControllerCore
from lastwords.controller.events import ControllerOptions
from lastwords.core_events import Tick
from lastwords.processor import events as to_processor
from lastwords.processor.core import ProcessorCore
from lastwords.vocabulary import (
    UNIT_REPLICATED,
    DeathSource,
    Hello,
    Order,
    PeerDied,
    Phase,
    ProcessId,
    Report,
    Schedule,
    Stand,
    Status,
)
from tests.scenarios.wording import controller_line, numbers, order_words, processor_line, report_words

Link = tuple[int, str]
"""(rank, "up") towards the controller, (rank, "down") from it."""

GENERATION = 1


@dataclass
class Trainer:
    """One simulated process: its core, and what its training thread is after."""

    core: ProcessorCore
    process: ProcessId
    units: tuple[str, ...]
    alive: bool = True
    connected: bool = False
    goal: Stand | None = None
    parked: bool = False
    saving: to_processor.StartSave | None = None
    behind: to_processor.StartSave | None = None  # the training


@dataclass
class Story:
    """Interprets the commands of one transcript; `run` returns what happened, in lines."""

    now_s: float = 0.0
    controller: ControllerCore | None = None
    trainers: dict[int, Trainer] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    mail: deque[tuple[Link, Report | Order]] = field(default_factory=deque)
    held: dict[Link, list[Report | Order]] = field(default_factory=dict)
    last: dict[Link, Report | Order] = field(default_factory=dict)
    storage: to_controller.StartVerify | to_controller.StartPublish | None = None
    stopped: bool = False

    def run(self, command: str) -> list[str]:
        """Carry out one command and everything that follows from it."""
        self.lines = []
        name, *arguments = shlex.split(command)
        method: Callable[..., None] = getattr(self, f"do_{name.replace('-', '_')}")
        method(*arguments)
        self._settle_down()
        return _compact(self.lines)

    # ------------------------------------------------------------------ commands

    def do_start(self, *settings: str) -> None:
        """start ranks=4 [hosts=a,a,b,b] [units=A,B,A,B] [fallback] [absent=3] [generation=2] [<option>=<s>]"""
        given = dict(setting.partition("=")[::2] for setting in settings)
        count = int(given.pop("ranks"))
        hosts = given.pop("hosts", ",".join(["a"] * count)).split(",")
        units = given.pop("units", ",".join([UNIT_REPLICATED] * count)).split(",")
        absent = _ranks(given.pop("absent", ""))
        options = ControllerOptions(has_fallback_target="fallback" in given)
        given.pop("fallback", None)
        options = replace(options, **{name: float(value) for name, value in given.items()})
        self.controller = ControllerCore(count, GENERATION, options)
        self._tell(Tick())
        for rank in range(count):
            core = ProcessorCore(rank, GENERATION)
            process = ProcessId(f"host-{hosts[rank]}", 1000 + rank, 7, f"nonce{rank}")
            self.trainers[rank] = Trainer(core, process, tuple(units[rank].split("+")))
            if rank not in absent:
                self.do_connect(str(rank))

    def do_connect(self, ranks: str) -> None:
        """connect RANKS: a new session of the same process."""
        for rank in _ranks(ranks):
            trainer = self.trainers[rank]
            trainer.connected = True
            self._say_hello(rank)
            self._tell_rank(rank, to_processor.SessionUp())

    def _say_hello(self, rank: int) -> None:
        trainer = self.trainers[rank]
        hello = Hello(rank, GENERATION, len(self.trainers_wanted), trainer.process, trainer.units, trainer.core.stand)
        self._post((rank, "up"), hello)

    def do_impostor(self, rank: str) -> None:
        """impostor RANK: another process says that it is this rank."""
        member = self.trainers[int(rank)]
        process = replace(member.process, pid=4242, nonce="other")
        hello = Hello(
            int(rank), GENERATION, len(self.trainers_wanted), process, member.units, Stand(Phase.COMPUTING, 0)
        )
        self.lines.append(f"{rank} -> ctl  Hello of another process")
        self._tell(to_controller.FromRank(hello))

    def do_loop(self, *settings: str) -> None:
        """loop STEPS EPOCHS [start=N] [ranks=...] [every=STEPS]: the loop is about to begin."""
        given = dict(setting.partition("=")[::2] for setting in settings if "=" in setting)
        steps, epochs = (int(setting) for setting in settings if "=" not in setting)
        schedule = Schedule(steps=int(given.get("every", "0")))
        for rank in _ranks(given.get("ranks", "all"), self.trainers):
            self.trainers[rank].core.begin_loop(steps, epochs, int(given.get("start", "0")), schedule)
            self._take(rank)

    def do_want(self, rank: str) -> None:
        """want RANK: it asks for a periodic checkpoint."""
        self.trainers[int(rank)].core.want_save()
        self._take(int(rank))

    def do_train(self, ranks: str, to: str, goal: str) -> None:
        """train RANKS to PHASE(STEP): the training threads walk there, or until they park."""
        assert to == "to"
        stand = _stand(goal)
        for rank in _ranks(ranks, self.trainers):
            if self.trainers[rank].alive:
                self.trainers[rank].goal = stand
                self._walk(rank)
                self._take(rank)

    def do_status(self, ranks: str) -> None:
        """status RANKS: the newest stand, as a rank streams it."""
        for rank in _ranks(ranks, self.trainers):
            self._post((rank, "up"), Status(rank, GENERATION, self.trainers[rank].core.stand))

    def do_tear(self, rank: str) -> None:
        """tear RANK: its update raises half-way."""
        self.trainers[int(rank)].core.mark_torn()
        self._take(int(rank))

    def do_raise(self, rank: str, text: str, kind: str = "") -> None:
        """raise RANK TEXT [secondary]: an exception leaves its loop."""
        self.trainers[int(rank)].goal = None
        self.trainers[int(rank)].core.mark_raised(text, kind == "secondary")
        self._take(int(rank))

    def do_signal(self, ranks: str, number: str) -> None:
        """signal RANKS NUMBER"""
        for rank in _ranks(ranks, self.trainers):
            self.trainers[rank].core.mark_signalled(int(number))
            self._take(rank)

    def do_leave(self, ranks: str) -> None:
        """leave RANKS: their loop is over."""
        for rank in _ranks(ranks, self.trainers):
            self.trainers[rank].goal = None
            self._copy_if_due(rank)
            self.trainers[rank].core.mark_left()
            self._take(rank)

    def do_kill(self, ranks: str, how: str = "seen") -> None:
        """kill RANKS [unseen]: seen by the host watch at once, or only by the broken stream."""
        for rank in _ranks(ranks, self.trainers):
            self._lose_process(rank)
            if how == "seen":
                self._tell(to_controller.Died(rank, DeathSource.ROBUST_MUTEX))
        for rank in _ranks(ranks, self.trainers):
            self._lose_session(rank)

    def do_peer_died(self, observer: str, dead: str, source: str) -> None:
        """peer-died OBSERVER DEAD SOURCE"""
        self._post((int(observer), "up"), PeerDied(int(observer), GENERATION, int(dead), DeathSource[source]))

    def do_cut(self, ranks: str) -> None:
        """cut RANKS: the session breaks; the process lives."""
        for rank in _ranks(ranks, self.trainers):
            self._lose_session(rank)
            self._tell_rank(rank, to_processor.SessionDown())

    def do_hold(self, rank: str, way: str) -> None:
        """hold RANK up|down: messages wait."""
        self.held[int(rank), way] = []

    def do_drop(self, rank: str, way: str) -> None:
        """drop RANK up|down: what was held is lost, the link works again."""
        for message in self.held.pop((int(rank), way)):
            self.lines.append(f"lost: {self._line((int(rank), way), message)}")

    def do_deliver(self, rank: str, way: str, order: str = "") -> None:
        """deliver RANK up|down [backwards]: what was held arrives, the link works again."""
        messages = self.held.pop((int(rank), way))
        for message in reversed(messages) if order == "backwards" else messages:
            self._post((int(rank), way), message)

    def do_repeat(self, rank: str, way: str) -> None:
        """repeat RANK up|down: the newest message arrives once more."""
        self._post((int(rank), way), self.last[int(rank), way])

    def do_save(self, rank: str, what: str, *words: str) -> None:
        """save RANK done | BYTES | fails TEXT | refused TEXT"""
        number = int(rank)
        saving = self.trainers[number].saving or self.trainers[number].behind
        assert saving is not None, f"rank {rank} is not writing"
        incident, attempt = saving.order.incident, saving.order.attempt
        event: to_processor.Event
        if what == "done":
            event = to_processor.SaveFinished(incident, attempt, 1000)
        elif what in ("fails", "refused"):
            event = to_processor.SaveErrored(incident, attempt, words[0], storage=what == "refused")
        else:
            event = to_processor.SaveProgressed(incident, attempt, int(what))
        if what == "done" or what in ("fails", "refused"):
            self._end_writer(number, incident)
        self._tell_rank(number, event)

    def do_files(self, what: str, *words: str) -> None:
        """files good | bad RANK TEXT | blocked TEXT | published | unpublished TEXT"""
        effect = self.storage
        assert effect is not None, "no file is being looked at"
        self.storage = None
        event: to_controller.Event
        if what == "good":
            event = to_controller.Verified(effect.incident, effect.attempt)
        elif what == "bad":
            event = to_controller.VerifyFailed(effect.incident, effect.attempt, ((int(words[0]), words[1]),))
        elif what == "blocked":
            event = to_controller.VerifyBlocked(effect.incident, effect.attempt, words[0])
        elif what == "published":
            event = to_controller.Published(effect.incident, effect.attempt, f"/ckpt/step_{effect.step}")
        else:
            event = to_controller.PublishFailed(effect.incident, effect.attempt, words[0])
        self._tell(event)

    def do_late_published(self, attempt: str) -> None:
        """late-published ATTEMPT: a publication that nobody waits for any more succeeds."""
        assert self.controller is not None
        self._tell(to_controller.Published(self.controller.incident, int(attempt), "/ckpt/late"))

    def do_wait(self, seconds: str) -> None:
        """wait SECONDS: time passes."""
        until_s = self.now_s + float(seconds)
        self._settle_down()
        while True:
            due = [(at_s, rank) for rank, at_s in self._deadlines() if at_s <= until_s]
            if not due:
                break
            at_s, rank = min(due)
            self.now_s = max(self.now_s, at_s)
            if rank < 0:
                self._tell(Tick())
            else:
                self._tell_rank(rank, Tick())
            self._settle_down()
        self.now_s = until_s

    def do_gone(self, ranks: str) -> None:
        """gone RANKS: the processes have ended, as they were told to."""
        for rank in _ranks(ranks, self.trainers):
            if self.trainers[rank].alive:
                self._lose_process(rank)
                self._lose_session(rank)

    def do_show(self) -> None:
        """show: where everybody stands."""
        assert self.controller is not None
        incident = f", incident {self.controller.incident}" if self.controller.incident else ""
        self.lines.append(f"ctl {self.controller.state.value}{incident}")
        for rank, trainer in self.trainers.items():
            if not trainer.alive:
                self.lines.append(f"{rank} dead")
                continue
            core = trainer.core
            words = ["frozen"] if core.frozen else []
            words += ["parked"] if trainer.parked else []
            words += ["no session"] if not trainer.connected else []
            self.lines.append(" ".join([f"{rank} {core.stand}", *words]))

    # ------------------------------------------------------------------ inside

    @property
    def trainers_wanted(self) -> range:
        """All ranks of the job."""
        assert self.controller is not None
        return range(self.controller.members.world_size)

    def _deadlines(self) -> list[tuple[int, float]]:
        assert self.controller is not None
        cores = [(-1, self.controller.deadline_s if not self.stopped else None)]
        cores += [(rank, trainer.core.deadline_s) for rank, trainer in self.trainers.items() if trainer.alive]
        return [(rank, at_s) for rank, at_s in cores if at_s is not None]

    def _lose_process(self, rank: int) -> None:
        trainer = self.trainers[rank]
        trainer.alive = trainer.parked = False
        trainer.goal = trainer.saving = trainer.behind = None

    def _lose_session(self, rank: int) -> None:
        trainer = self.trainers[rank]
        if trainer.connected:
            trainer.connected = False
            self._settle_down()
            self._tell(to_controller.SessionClosed(rank))

    def _post(self, link: Link, message: Report | Order) -> None:
        self.mail.append((link, message))

    def _settle_down(self) -> None:
        while self.mail:
            link, message = self.mail.popleft()
            rank, way = link
            if link in self.held:
                self.held[link].append(message)
                continue
            self.last[link] = message
            self.lines.append(self._line(link, message))
            if way == "up":
                self._tell(to_controller.FromRank(message))  # type: ignore[arg-type]
            elif self.trainers[rank].alive:
                self._tell_rank(rank, to_processor.FromController(message))  # type: ignore[arg-type]

    def _line(self, link: Link, message: Report | Order) -> str:
        rank, way = link
        if way == "up":
            return f"{rank} -> ctl  {report_words(message)}"  # type: ignore[arg-type]
        return f"ctl -> {rank}  {order_words(message)}"  # type: ignore[arg-type]

    def _tell(self, event: to_controller.Event) -> None:
        assert self.controller is not None
        effects = self.controller.handle(event, self.now_s)
        for effect in effects:
            match effect:
                case to_controller.Send(rank, order):
                    if self.trainers[rank].connected:
                        self._post((rank, "down"), order)
                case to_controller.Reply(order):
                    assert isinstance(event, to_controller.FromRank)
                    if event.report.rank in self.trainers and getattr(event.report, "process", None) == (
                        self.trainers[event.report.rank].process
                    ):
                        self._post((event.report.rank, "down"), order)
                    else:
                        self.lines.append(f"ctl replies  {order_words(order)}")
                case to_controller.Remember() | to_controller.LookForNewest():
                    pass
                case _:
                    self.lines.append(controller_line(effect))
                    if isinstance(effect, to_controller.StartVerify | to_controller.StartPublish):
                        self.storage = effect
                    self.stopped = self.stopped or isinstance(effect, to_controller.EndController)
        for effect in effects:
            if isinstance(effect, to_controller.LookForNewest):
                self._tell(to_controller.NewestKnown(effect.incident, 0, ""))

    def _tell_rank(self, rank: int, event: to_processor.Event) -> None:
        self.trainers[rank].core.handle(event, self.now_s)
        self._take(rank)
        if self.trainers[rank].parked:
            self._walk(rank)
            self._take(rank)

    def _take(self, rank: int) -> None:
        trainer = self.trainers[rank]
        for effect in trainer.core.take_effects():
            match effect:
                case to_processor.SendReport(report):
                    if trainer.connected:
                        self._post((rank, "up"), report)
                case to_processor.SayHello():
                    self._say_hello(rank)
                case _:
                    line = processor_line(rank, effect)
                    self.lines += [line] if line else []
                    if isinstance(effect, to_processor.StartSave) and effect.order.incident:
                        trainer.saving = effect
                    elif isinstance(effect, to_processor.StartSave):
                        trainer.behind = effect
                    if isinstance(effect, to_processor.CancelSave):
                        self._end_writer(rank, effect.incident)

    def _end_writer(self, rank: int, incident: int) -> None:
        if incident:
            self.trainers[rank].saving = None
        else:
            self.trainers[rank].behind = None

    def _copy_if_due(self, rank: int) -> None:
        core = self.trainers[rank].core
        if (order := core.copy_due) is not None:
            self.lines.append(f"{rank} copies its state of step {order.step}")
            core.mark_copied(order)
            self._take(rank)

    def _walk(self, rank: int) -> None:
        """Training thread: one step after the other until the goal, or until it has to park."""
        trainer = self.trainers[rank]
        was_parked, trainer.parked = trainer.parked, False
        before = trainer.core.stand
        while trainer.goal is not None and trainer.core.stand != trainer.goal:
            if trainer.core.phase is Phase.COMPUTING:
                self._copy_if_due(rank)
            if not self._take_one_step(trainer.core, trainer.goal):
                trainer.parked = True
                break
            if trainer.core.frozen and trainer.core.phase is Phase.COMPUTING:
                break
        after = trainer.core.stand
        if trainer.parked and not was_parked:
            self.lines.append(f"{rank} parks at {after}")
        elif was_parked and after != before:
            self.lines.append(f"{rank} goes on to {after}")

    def _take_one_step(self, core: ProcessorCore, goal: Stand) -> bool:
        match core.phase:
            case Phase.COMPUTING if goal.phase is Phase.SKIPPED and goal.step == core.stand.step + 1:
                core.mark_skipped()
            case Phase.COMPUTING:
                core.mark_ready()
            case Phase.READY:
                return core.try_update()
            case Phase.UPDATING:
                core.mark_updated()
            case _:
                return core.try_end_step()
        return True


def _ranks(text: str, everybody: dict[int, Trainer] | None = None) -> list[int]:
    if text == "all":
        return sorted(rank for rank, trainer in (everybody or {}).items() if trainer.alive)
    return [int(rank) for rank in text.split(",") if rank]


def _stand(text: str) -> Stand:
    match = re.fullmatch(r"([A-Z]+)\((\d+)\)", text)
    assert match is not None, text
    return Stand(Phase[match[1]], int(match[2]))


def _compact(lines: list[str]) -> list[str]:
    """Equal lines once, with their number; the same message to or from several ranks in one line."""
    counts: dict[str, int] = {}
    for line in lines:
        counts[line] = counts.get(line, 0) + 1
    merged: list[tuple[str, list[int], str]] = []
    for line, count in counts.items():
        times = f"  (x{count})" if count > 1 else ""
        down = re.fullmatch(r"ctl -> (\d+)  (.*)", line)
        up = re.fullmatch(r"(\d+) -> ctl  (.*)", line)
        way, rank, text = ("", -1, line)
        if down:
            way, rank, text = "down", int(down[1]), down[2]
        elif up:
            way, rank, text = "up", int(up[1]), up[2]
        same = next((entry for entry in reversed(merged) if entry[0] or not entry[2][:1].isdigit()), None)
        if way and same is not None and (same[0], same[2]) == (way, text + times):
            same[1].append(rank)  # what ranks do by themselves may stand between the copies of a message to all
        else:
            merged.append((way, [rank], text + times))
    return [
        f"ctl -> {numbers(ranks)}  {text}"
        if way == "down"
        else f"{numbers(ranks)} -> ctl  {text}"
        if way == "up"
        else text
        for way, ranks, text in merged
    ]
