"""What the log of a run says about the recovery in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.peers.job import Update
from bench.peers.workload import RANKS


@dataclass(frozen=True)
class Kill:
    """One of a run's kills; training had begun, or had gone on after the kill before, at `begun_mono_ns`."""

    victim_rank: int
    victim_pid: int
    begun_mono_ns: int
    killed_mono_ns: int
    recovered_mono_ns: int
    durable: bool


def first_of(
    updates: Sequence[Update], killed_mono_ns: int, victim_pid: int, world: int
) -> tuple[int, set[int]] | None:
    """When the first update of `world` living ranks after the kill was over, and their processes.

    A rank lives in the process that has logged for it last: before they are ended, survivors may still log a step to
    which their successors go back.
    """
    living = set({update.rank: update.pid for update in updates}.values()) - {victim_pid}
    times_ns: dict[int, dict[int, int]] = {}
    for update in updates:
        if update.mono_ns > killed_mono_ns and update.ranks == world and update.pid in living:
            times_ns.setdefault(update.step, {})[update.pid] = update.mono_ns
    complete = [
        (sorted(by_pid.values())[world - 1], set(by_pid)) for by_pid in times_ns.values() if len(by_pid) >= world
    ]
    return min(complete, key=lambda one: one[0], default=None)


def verdict(
    run: Sequence[Update], kill: Kill, after: Kill | None, reference: dict[tuple[int, int], Update]
) -> dict[str, Any]:
    """The figures of one kill, from the updates between the recovery before it and the kill `after` it."""
    killed_mono_ns, victim_pid = kill.killed_mono_ns, kill.victim_pid
    until_mono_ns = run[-1].mono_ns if after is None else after.killed_mono_ns
    updates = [update for update in run if kill.begun_mono_ns <= update.mono_ns <= until_mono_ns]
    killed_at_step = max(update.step for update in updates if update.mono_ns <= killed_mono_ns)
    old = {
        update.pid for update in updates if update.mono_ns <= killed_mono_ns and update.step >= killed_at_step - 1
    }  # a reserve may have taken part in the first steps
    full = first_of(updates, killed_mono_ns, victim_pid, RANKS)
    fewer = first_of(updates, killed_mono_ns, victim_pid, RANKS - 1)
    new = [
        update
        for update in updates
        if update.mono_ns > killed_mono_ns and (update.pid not in old or update.ranks < RANKS)
    ]
    pids = full[1] if full is not None else fewer[1] if fewer is not None else set()
    # A survivor's line of the first step after the recovery may stand before that of the new process.
    again = {update.pid: update for update in updates if update.step == new[0].step and update.pid in pids}
    before = [update for update in updates if update.mono_ns < new[0].mono_ns and update is not again.get(update.pid)]
    done = max(update.step for update in before if update.pid in old)
    return {
        "victim": kill.victim_rank,
        "killed_at_step": killed_at_step,
        "full_s": None if full is None else seconds(full[0] - killed_mono_ns),
        "fewer_s": None if fewer is None else seconds(fewer[0] - killed_mono_ns),
        "updates_lost": max(0, done + 1 - new[0].step),
        "steps_with_fewer": len({update.step for update in new if update.ranks < RANKS}),
        "pids_kept": len(pids & (old - {victim_pid})),
        "steps_compared": len({step for rank, step in reference if new[0].step <= step <= updates[-1].step}),
        "first_difference": first_difference(updates, reference),
        "durable": kill.durable,
    }


def seconds(duration_ns: int) -> float:
    """To the millisecond."""
    return round(duration_ns / 1e9, 3)


def first_difference(updates: Sequence[Update], reference: dict[tuple[int, int], Update]) -> int | None:
    """The first step whose loss or weights differ, on any rank, from those of the undisturbed run; None: no step."""
    last = {(update.rank, update.step): update for update in updates}
    differing = [
        step
        for (rank, step), update in last.items()
        if (rank, step) in reference
        and (update.loss, update.weights) != (reference[rank, step].loss, reference[rank, step].weights)
    ]
    return min(differing, default=None)
