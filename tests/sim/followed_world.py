"""A timed world whose controller is killed, and followed by another one that knows what was remembered.

The older one is gone when the other one begins, unless nothing keeps two of them apart (`fenced=False`): then it was
only stopped, and goes on behind the other one's back with the sessions that it still has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lastwords.clock import OwnTime
from lastwords.controller import events as to_controller
from lastwords.controller.core import ControllerCore
from lastwords.controller.events import ControllerOptions, Remember
from lastwords.core_events import Log, Tick
from lastwords.vocabulary import DeathSource, Report
from tests.sim.followed_schedule import IN_TIME_S, Followers
from tests.sim.ledger import Life
from tests.sim.periodic_schedule import Behind
from tests.sim.periodic_world import PeriodicWorld
from tests.sim.schedule import Fault, Plan, Trigger
from tests.sim.timed import SILENT_S
from tests.sim.world import Trainer

_OWN = (
    "controller",
    "controller_lives",
    "bound",
    "verifying",
    "publishing",
    "periodic_files",
    "stage",
    "periodic_stage",
    "controller_tick_s",
    "controller_time",
    "controller_free_s",
    "told",
)
"""What each controller has of its own."""

_ACTS = frozenset(
    (
        "_tick_controller",
        "_checked",
        "_renamed",
        "_files_done",
        "_look",
        "_tell_newest",
        "tell_published",
        "discard",
    )
)
"""What a controller's process does later: never, if it is killed before."""


class FollowedWorld(PeriodicWorld):
    """followers: what becomes of a controller that is killed. follow: makes the core of another one."""

    def __init__(
        self,
        plan: Plan,
        behind: Behind,
        followers: Followers,
        *,
        fenced: bool = True,
        follow: Callable[..., ControllerCore] = ControllerCore,
        **others: Any,
    ) -> None:
        self.followers = followers
        self.fenced = fenced
        self.follow = follow
        self.side = self.acting = 0  # numbers of controllers: the one that serves, the one that something happens to
        self.side_of: dict[int, int] = {}  # session -> the controller at its other end
        self.older: dict[int, dict[str, Any]] = {}
        self.wakes_s: dict[int, float] = {}
        self.kills = self.follows = 0
        self.follows_at_s: float | None = None
        self.kept: Remember | None = None
        self.kept_at_last_act: Remember | None = None
        self.late_files = 0  # how often what was kept last is lost
        self.dies_within = -1
        self.followed_s: list[tuple[float, int]] = []
        """When another one began to serve, and the newest step that any rank had ended then."""
        super().__init__(plan, behind, **others)

    # ------------------------------------------------------------------ whose turn it is

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        if getattr(action, "__name__", "") in _ACTS:
            super().after(delay_s, self._by, self.acting, action, arguments)
        else:
            super().after(delay_s, action, *arguments)

    def _by(self, side: int, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Something happens to this controller, if it still lives."""
        if side == self.acting:
            action(*arguments)
        elif side in self.older:
            with self._as(side):
                action(*arguments)

    @contextmanager
    def _as(self, side: int) -> Iterator[None]:
        newer, newer_side = self._take_own(), self.acting
        stopped = self.ledger.controller_stopped
        self._put_own(self.older[side])
        self.acting = side
        try:
            yield
        finally:
            self.older[side] = self._take_own()
            if not self.controller_lives:
                del self.older[side]
            self.acting, self.ledger.controller_stopped = newer_side, stopped
            self._put_own(newer)

    def _take_own(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OWN}

    def _put_own(self, own: dict[str, Any]) -> None:
        for name, value in own.items():
            setattr(self, name, value)

    def _controller_is_busy(self, action: Callable[..., None], *arguments: Any) -> bool:
        wakes_s = self.wakes_s.get(self.acting, 0.0) if self.acting != self.side else 0.0
        if wakes_s > self.now_s:
            self.after(wakes_s - self.now_s, action, *arguments)
            return True
        return super()._controller_is_busy(action, *arguments)

    def _give_the_controller_up(self, until_s: float) -> None:
        if not self.follows:  # else the one that was stopped is gone
            super()._give_the_controller_up(until_s)

    # ------------------------------------------------------------------ sessions

    def connect(self, trainer: Trainer) -> None:
        rank = trainer.rank
        if not self.controller_lives and self.follows_at_s is not None and trainer.record.life is Life.ALIVE:
            delay_s = max(0.0, self.follows_at_s - self.now_s) + 0.1 * self.dice.random()
            self.after_in(trainer, delay_s, self.connect, trainer)
            return
        before = self.session[rank]
        self.side_of[self.sessions + 1] = self.side  # if it opens one, its Hello is sent at once
        super().connect(trainer)
        assert self.session[rank] in (before, self.sessions)

    def _arrive_up(self, rank: int, session: int, report: Report) -> None:
        self._by(self.side_of.get(session, 0), super()._arrive_up, (rank, session, report))

    def _closed(self, rank: int, session: int) -> None:
        self._by(self.side_of.get(session, 0), super()._closed, (rank, session))

    # ------------------------------------------------------------------ what is kept

    def _carry_out_all(self, effects: list[to_controller.Effect]) -> None:
        within = self.dies_within
        if within < 0 or len(effects) <= within or self.acting != self.side:
            super()._carry_out_all(effects)
            return
        self.dies_within = -1
        for effect in effects[:within]:
            self._carry_out(effect)
        names = [type(effect).__name__ for effect in effects]
        self.tell("fault", f"the controller is killed when it has done {within} of {names}")
        self._kill_now()

    def _carry_out(self, effect: to_controller.Effect) -> None:
        if self.acting == self.side:
            if isinstance(effect, Remember):
                self.kept = effect
            elif not isinstance(effect, Log):
                self.kept_at_last_act = self.kept
        super()._carry_out(effect)

    def rename(self, effect: to_controller.StartPublish) -> None:
        """As the shipped one: the order that a killed controller has carried out already changes nothing."""
        done = ((publication.incident, publication.attempt) for publication in self.ledger.publications)
        if (effect.incident, effect.attempt) not in done:
            super().rename(effect)

    # ------------------------------------------------------------------ one is killed, another one follows

    def strike(self, fault: Fault) -> None:
        if fault.kind == "kill_controller":
            self.tell("fault", str(fault))
            self._kill_controller(fault)
        else:
            super().strike(fault)

    def _kill_controller(self, fault: Fault) -> None:
        if not self.controller_lives:
            return
        if self.followers.within >= 0 and self.kills == 0:
            self.dies_within = self.followers.within
        else:
            self._kill_now()

    def _kill_now(self) -> None:
        self.deaths[f"controller: {self.stage or self.periodic_stage or 'training'}"] += 1
        for rank, since_s in enumerate(self.unheard_since_s):
            if since_s >= 0 and self.now_s - since_s >= SILENT_S:
                self.ledger.ranks[rank].ill.add("silent")
        delay_s = self._delay_until_another_s()
        self.kills += 1
        self.follows_at_s = None if delay_s is None else self.now_s + delay_s
        if delay_s is not None:
            self.ledger.certain_faults += delay_s > IN_TIME_S
            self.after(delay_s, self._follow)
        if self.fenced or delay_s is None:
            if isinstance(self.periodic_files, to_controller.StartPublish) and self.dice.random() < 0.5:
                self.rename(self.periodic_files)
            super()._kill_controller(Fault("kill_controller", Trigger()))
        else:
            self.wakes_s[self.side] = self.now_s + delay_s + self.followers.wakes_s

    def _delay_until_another_s(self) -> float | None:
        known = self.kept is not None and (self.kept.members or self.followers.by_hand) and not self.followers.lost
        if self.kills >= len(self.followers.delays_s) or not known or not self._somebody_starts_it():
            return None
        return self.followers.delays_s[self.kills]

    def _somebody_starts_it(self) -> bool:
        host = self.job.hosts[0]
        lives = any(
            trainer.record.life is not Life.KILLED for trainer in self.trainers if self.job.hosts[trainer.rank] == host
        )
        return lives or self.followers.by_hand

    def on_controller_ended(self) -> None:
        if self.ledger.controller_stopped or self.follows_at_s is None:
            super().on_controller_ended()
            return
        self.tell("controller", f"is killed; another one serves at {self.follows_at_s:.4f} s")
        for rank in range(self.job.world_size):
            self.break_session(rank, lose_tail=True, seen_s=0.0)

    def _follow(self) -> None:
        if not self._somebody_starts_it():
            self.follows_at_s = None
            super().on_controller_ended()
            return
        if not self.fenced and self.controller_lives:
            self.older[self.side] = self._take_own()
        before = self.kept_at_last_act
        if self.followers.late and before is not None and (before.members or self.followers.by_hand):
            self.late_files += before is not self.kept
            self.kept = before
        self.follows_at_s = None
        self.side += 1
        self.acting = self.side
        self.follows += 1
        self.followed_s.append((self.now_s, max(trainer.record.ended for trainer in self.trainers)))
        self.tell("controller", f"another one serves, which knows {self.kept}")
        self.ledger.controller_killed = False
        self.ledger.heard_saved.clear()
        self.troubles = replace(self.troubles, controller_pause=(0.0, 0.0))  # it was the older one that was stopped
        self._begin_anew()
        self._announce_the_dead()
        self.feed_controller(Tick())
        again_s = self.followers.again_s[self.follows - 1] if self.follows <= len(self.followers.again_s) else 0.0
        if again_s:
            self.after(again_s, self.strike, Fault("kill_controller", Trigger(time_s=self.now_s + again_s)))

    def _begin_anew(self) -> None:
        job = self.job
        assert self.kept is not None
        self.kept_at_last_act = self.kept
        self.controller = self.follow(
            job.world_size, job.generation, ControllerOptions(has_fallback_target=job.fallback), self.kept
        )
        self.controller_lives = True
        self.bound, self.told = {}, set()
        self.verifying = self.publishing = self.periodic_files = None
        self.stage = self.periodic_stage = ""
        self.controller_tick_s, self.controller_free_s, self.controller_time = -1.0, 0.0, OwnTime()
        self.line_free_s = dict.fromkeys((0, 1), 0.0)
        for rank, since_s in enumerate(self.unheard_since_s):  # nobody was there to hear it
            if since_s >= 0 and self.paused_until_s[rank] <= self.now_s and self.blocked_until_s[rank] <= self.now_s:
                self.unheard_since_s[rank] = self.now_s
        if not self.fenced:
            for rank in range(job.world_size):
                if self.dice.random() < 0.5:
                    self.break_session(rank, lose_tail=True, seen_s=0.01)

    def _announce_the_dead(self) -> None:
        """The host watch of the one that begins."""
        assert self.kept is not None
        gone = {one.rank for one in self.kept.memory.gone}
        for trainer in self.trainers:
            killed = trainer.record.life is Life.KILLED and trainer.rank not in gone
            if killed and self.job.hosts[trainer.rank] == self.job.hosts[0]:
                died = to_controller.Died(trainer.rank, DeathSource.ROBUST_MUTEX)
                self.after(0.003 * self.dice.random(), self.feed_controller, died)
