"""What has to become of periodic checkpoints where nothing goes wrong: each one that is due comes, or says why not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from lastwords.controller.events import NewestKnown
from lastwords.controller.words import newest_text
from tests.sim.followed_world import FollowedWorld
from tests.sim.job import Job
from tests.sim.ledger import Ledger
from tests.sim.periodic_schedule import Behind
from tests.sim.periodic_world import Record
from tests.sim.schedule import Plan


def what_is_due_is_published(plan: Plan, behind: Behind, ledger: Ledger, record: Record) -> list[str]:
    """Complaints about a schedule without faults."""
    job = plan.job
    found = [
        *_multiples(job, record),
        *_seconds(plan, behind, record),
        *_wanted(job, record),
        *_nothing_else(job, record),
    ]
    found += [f"rank {rank} was {one.farewell}" for rank, one in enumerate(ledger.ranks) if one.farewell != "released"]
    found += [f"a part of rank {rank} is left of attempt {attempt}" for attempt, rank in record.left_over]
    return [f"what_is_due_is_published: {text}" for text in found]


def the_newest_is_named(record: Record) -> list[str]:
    """Complaints about an incident that saved nothing: whoever looks afterwards must find what it has named."""
    if record.newest is None or newest_text(NewestKnown(0, *record.newest)) in record.reason:
        return []
    return [f"the_newest_is_named: {record.newest} was there, and was not named: {record.reason}"]


def _multiples(job: Job, record: Record) -> Iterator[str]:
    every = job.schedule.steps
    for step in range(job.start_step + 1, job.steps + 1):
        if not every or step % every or step in record.published or _made_way(record, step):
            continue
        passed_s = record.passed_s.get(step, 0.0)
        under_way = [attempt for attempt in record.ordered if _is_under_way(record, attempt, passed_s)]
        if not any(record.ordered[one][0] != step or one in record.missed | record.busy for one in under_way):
            yield f"step {step} has no checkpoint, and no other one was being written; attempts: {record.ordered}"


def _made_way(record: Record, step: int) -> bool:
    """Whether one that was wanted sooner has taken its place."""
    return any(
        ordered == step and attempt + 1 in record.ordered and record.ordered[attempt + 1][0] < step
        for attempt, (ordered, _) in record.ordered.items()
    )


def _is_under_way(record: Record, attempt: int, at_s: float) -> bool:
    _step, ordered_s = record.ordered[attempt]
    return ordered_s <= at_s and record.over_s.get(attempt, at_s) >= at_s


def _seconds(plan: Plan, behind: Behind, record: Record) -> Iterator[str]:
    seconds = plan.job.schedule.seconds
    if not seconds:
        return
    step_s = 0.15 + plan.update_s + plan.log_s + 0.5 * bool(plan.slow_messages)
    slack_s = 3 * (behind.write_s + 2 * behind.storage_s) + 8 * step_s
    times = [record.began_s, *sorted(record.published.values()), record.left_s]
    for before_s, after_s in itertools.pairwise(times):
        if after_s - before_s > seconds + slack_s:
            yield f"none was published between {before_s:.2f} s and {after_s:.2f} s, one is due every {seconds} s"


def _any_fell_through(record: Record, at_s: float) -> bool:
    return any(record.over_s.get(attempt, at_s) >= at_s for attempt in record.missed | record.busy)


def _wanted(job: Job, record: Record) -> Iterator[str]:
    for at_s, after_step in record.wanted:
        came = any(step > after_step or step == job.steps for step in record.published)
        if not came and not _any_fell_through(record, at_s):
            yield f"one was wanted at {at_s:.3f} s in step {after_step + 1}, and none came"


def _nothing_else(job: Job, record: Record) -> Iterator[str]:
    """One that is not due was wanted after the one before it, or in the last step."""
    if job.schedule.seconds:
        return
    every = job.schedule.steps
    for before, step in itertools.pairwise([job.start_step, *sorted(record.published)]):
        is_due = every and step % every == 0
        if not is_due and not any(before <= after_step <= step for _, after_step in record.wanted):
            yield f"nobody wanted one of step {step}, step {before} having one; wanted: {record.wanted}"


STEPS_UNTIL_ONE_IS_DUE = 8


def checkpoints_go_on(world: FollowedWorld) -> list[str]:
    """Where nothing else goes wrong, periodic checkpoints come after the controller was killed, as before."""
    job, every = world.job, world.job.schedule.steps
    if not every or not world.followed_s:
        return []
    followed_s, ended = world.followed_s[-1]
    left = job.steps - ended
    if left < 2 * every + STEPS_UNTIL_ONE_IS_DUE or world.ledger.controller_killed:
        return []
    record = world.record
    late = [attempt for attempt, (_, ordered_s) in record.ordered.items() if ordered_s > followed_s]
    if record.missed & set(late) or record.busy & set(late):
        return []  # the next one is further ahead
    if any(published_s > followed_s for published_s in record.published.values()):
        return []
    return [f"checkpoints_go_on: none came in the {left} steps after another controller had begun"]
