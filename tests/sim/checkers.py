"""The invariants, each as a function from what really happened to a list of complaints.

They share no code with the cores: they read the ledger that the simulated world keeps.
I5 for every system call of the shipped writer is tested with the writer itself (tests/checkpoint); here the
saver and the controller crash between the steps of the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from lastwords.vocabulary import Share, whole_units
from tests.sim.job import Job
from tests.sim.ledger import Ledger, Life, Publication

FROZEN_S_MAX = 400.0
"""No rank may stay frozen longer. The largest named deadline is 30 s; a schedule has at most four faults, and each
can start one more wait (settle, leave, progress) before the end."""

STORAGE_FAILURES_MAX = 3
"""The controller tries on for a while where the same directory refused some ranks of a host, but not for ever."""

Checker = Callable[[Job, Ledger], Iterator[str]]


def i1_every_file_is_of_the_published_step(job: Job, ledger: Ledger) -> Iterator[str]:
    """I1: every file of a published directory is of one step N, from a rank that held N whole."""
    for publication in ledger.publications:
        for file in publication.files:
            where = f"step {publication.step}, file of rank {file.writer}"
            if file.step != publication.step:
                yield f"{where}: it says step {file.step}"
            for unit, at_first, at_last in file.units:
                if at_first != at_last:
                    yield f"{where}: unit {unit} changed from {at_first} to {at_last} while it was read"
                elif not job.same_weights(at_last, publication.step):
                    yield f"{where}: unit {unit} holds the weights of step {at_last}"
            for rank, step in file.local_steps:
                if step != publication.step:
                    yield f"{where}: rank-local state of rank {rank} is of step {step}"


def i2_only_whole_verified_directories_are_published(job: Job, ledger: Ledger) -> Iterator[str]:
    """I2: a directory has its final name only if every unit is in it, verified."""
    for publication in ledger.publications:
        present = sorted(unit for file in publication.files for unit, _, _ in file.units)
        if not _are_all(present, job.unit_names):
            yield f"step {publication.step}: units {present} of {list(job.unit_names)}"
        if not publication.verified:
            yield f"step {publication.step}: published without a successful verification of these files"
        for file in publication.files:
            if not file.whole:
                yield f"step {publication.step}: the file of rank {file.writer} is not whole"


def _are_all(names: Sequence[str], units: Sequence[str]) -> bool:
    """Whether these are all units, each either whole or in all its shares, and nothing twice."""
    shares = [Share.parse(name) for name in names]
    counts = {share.unit: share.count for share in shares}
    wanted = [str(share) for unit in units for share in Share(unit, 0, counts.get(unit, 1)).all]
    return sorted(names) == sorted(wanted)


def i3_what_can_be_saved_is_saved(job: Job, ledger: Ledger) -> Iterator[str]:
    """I3: if every unit has a holder that stays healthy until its file is written, a checkpoint is published.

    "Written" means that the controller has heard of it. A job that ends without an incident (released) owes no
    checkpoint; nor does one in which no survivor has ended a step or begun to update. A rank that can write nowhere is
    no survivor (I4): it is excluded, as if it had died. A dead controller publishes nothing, and one that file systems
    have refused too often gives up.
    """
    if (
        ledger.storage_failures > STORAGE_FAILURES_MAX
        or not ledger.ended
        or ledger.controller_killed
        or ledger.last_words
    ):
        return
    if not any(record.life is Life.LEFT and record.farewell.startswith("exit") for record in ledger.ranks):
        return  # the job was released, or nobody was told that the incident is over: I7's business
    # A step that is only in reach is not owed: its update has not begun anywhere. Nor is the step of the start.
    survivors = [(rank, record) for rank, record in enumerate(ledger.ranks) if ledger.survives(rank, job.targets)]
    owed = {record.held for _, record in survivors} | {step for _, _, step, _ in ledger.heard_saved}
    begun = max((record.held for _, record in survivors), default=0)
    owed |= {step for record in ledger.ranks for step, _ in record.whole if step <= begun}
    for step in sorted(owed, reverse=True):
        for target in job.targets:
            if step > job.start_step and target not in ledger.closed_targets and _can_be_had(job, ledger, step, target):
                told = sorted({record.farewell for record in ledger.ranks if record.farewell})
                yield f"step {step} had healthy holders of every unit, but nothing was published; told: {told}"
                return
    # Theorem 1: that every unit has a holder is enough; the gate has to see to it that they have a step in common.
    held_newest = max((record.held for _, record in survivors), default=0)
    if held_newest > job.start_step:
        for target in sorted(set(job.targets) - ledger.closed_targets):
            able = [rank for rank, record in survivors if not record.gave_up and (rank, target) not in ledger.refused]
            if {unit for rank in able for unit in job.units[rank]} == set(job.unit_names):
                stands = [f"rank {rank}: {list(ledger.ranks[rank].reach)}" for rank in able]
                yield f"every unit had a healthy holder, but no common step was published; in reach: {stands}"
                return
    # With whole copies no more steps are lost than lie between two of them, whenever those die who are not left.
    newest = max((record.ended for _, record in survivors), default=0)
    able = {rank for rank, _ in survivors}
    every = all(
        rank in able or (record.whole and not record.ill and any(job.hosts[one] == job.hosts[rank] for one in able))
        for rank, record in enumerate(ledger.ranks)
    )
    if job.copies and every and newest - job.copies > job.start_step:
        yield f"each part was held by somebody or in a copy, but nothing was published; step {newest} had ended"


def _can_be_had(job: Job, ledger: Ledger, step: int, target: int) -> bool:
    written = whole_units(unit for place, _, of_step, unit in ledger.heard_saved if (place, of_step) == (target, step))
    for rank, record in enumerate(ledger.ranks):
        if record.healthy() and step in record.reach and (rank, target) not in ledger.refused:
            written.update(job.units[rank])
        # Of a rank that is silent nobody may have seen the newest copy.
        if step in dict(record.whole) and not record.ill and _has_reader(job, ledger, rank, target):
            written.update(job.units[rank])
    return written.issuperset(job.unit_names)


def _has_reader(job: Job, ledger: Ledger, rank: int, target: int) -> bool:
    """Whether somebody of this rank's host could write what is in its copies."""
    return any(
        other.healthy() and job.hosts[number] == job.hosts[rank] and (number, target) not in ledger.refused
        for number, other in enumerate(ledger.ranks)
    )


def i4_no_survivor_is_set_back(job: Job, ledger: Ledger) -> Iterator[str]:
    """I4: N is at least every step that a rank which survives to the end of the incident has ended.

    A rank that can write nowhere is not asked, and a step that some unit can no longer reach, because a rank has left
    its loop with its gradients not applied, or of which a dead rank has left no copy, may be given up: losing one step
    is better than losing all.
    """
    for publication in ledger.last_words:
        for rank, record in enumerate(ledger.ranks):
            if ledger.survives(rank, job.targets) and record.ended > publication.step:
                gave_up = job.copies or any(other.gave_up for other in ledger.ranks)
                later = range(publication.step + 1, record.ended + 1)
                if gave_up and not any(_can_be_had(job, ledger, *at) for at in product(later, job.targets)):
                    continue
                yield f"step {publication.step} was published, but healthy rank {rank} had ended step {record.ended}"


def i5_a_crash_leaves_the_old_and_a_whole_new_one_or_none(job: Job, ledger: Ledger) -> Iterator[str]:
    """I5: at any instant the older checkpoints are there, and the new one is whole or not there."""
    for before, after in ledger.renamings:
        old, new = dict(before), dict(after)
        for name in sorted(old.keys() - new.keys()):
            yield f"{name} has vanished"
        for name, directory in sorted(new.items()):
            if not directory.whole:
                yield f"{name} is visible but not whole"
        if len([name for name in new if new[name] != old.get(name)]) > 1:
            yield "more than one directory changed in one instant"


def i6_nothing_older_changes_anything_newer(job: Job, ledger: Ledger) -> Iterator[str]:
    """I6: nothing of an older generation or incident can change a newer one."""
    yield from ledger.stale_effects
    for publication in ledger.publications:
        for file in publication.files:
            if (file.generation, file.incident) != (publication.generation, publication.incident):
                yield (
                    f"step {publication.step} of generation {publication.generation}, incident {publication.incident} "
                    f"contains a file of generation {file.generation}, incident {file.incident}"
                )
    newest = 0
    for publication in ledger.last_words:
        if publication.incident <= newest:
            yield f"incident {publication.incident} published after incident {newest}"
        newest = publication.incident
    for number, publication in enumerate(ledger.publications):
        for older in ledger.publications[:number]:
            same = (older.target, older.step) == (publication.target, publication.step)
            if same and older.incident > publication.incident:
                yield f"a periodic checkpoint has taken the place of the last words of step {older.step}"
            elif older.incident == publication.incident == 0 and _place(older) >= _place(publication):
                yield f"the periodic checkpoint of step {older.step} was followed by that of step {publication.step}"


def _place(periodic: Publication) -> tuple[int, int]:
    """Each is of a later step than those before it, or of the same one where the controller had died unheard."""
    return periodic.step, periodic.controller


def i7_nobody_waits_for_ever(job: Job, ledger: Ledger) -> Iterator[str]:
    """I7: each wait ends by progress, by a decision, or by a named deadline."""
    if ledger.ended:
        for rank, record in enumerate(ledger.ranks):
            if record.life is Life.ALIVE:
                yield f"rank {rank} is still waiting at the end"
        if not ledger.controller_stopped and not ledger.controller_killed:
            yield "the controller has not stopped"
        if ledger.crossed_horizon:
            yield "the simulation's horizon was reached before everybody had left"
    for rank, record in enumerate(ledger.ranks):
        if record.frozen_s_max > FROZEN_S_MAX:
            yield f"rank {rank} was frozen for {record.frozen_s_max:.1f} s"


def a_false_alarm_is_not_noticed(job: Job, ledger: Ledger) -> Iterator[str]:
    """A job in which nothing certain happened, and nobody was silent for too long, trains to its end."""
    if not ledger.ended or ledger.certain_faults or ledger.controller_killed:
        return
    if any("silent" in record.ill for record in ledger.ranks):
        return
    for rank, record in enumerate(ledger.ranks):
        if record.farewell != "released":
            yield f"nothing had failed, yet rank {rank} was told {record.farewell!r}"


def rank_local_state_is_saved_or_said_to_be_lost(job: Job, ledger: Ledger) -> Iterator[str]:
    """Every black box that a healthy rank of its host could read is in the checkpoint; of the others it says so."""
    for publication in ledger.publications:
        saved = {rank for file in publication.files for rank, _ in file.local_steps}
        for rank, host in enumerate(job.hosts):
            if rank in saved:
                continue
            if rank not in publication.lost_local_ranks:
                yield f"step {publication.step}: nothing is said about the rank-local state of rank {rank}"
            mates = [mate for mate, home in enumerate(job.hosts) if home == host]
            if any((mate, publication.target) in ledger.refused for mate in mates):
                continue
            if ledger.refused_for_a_moment.intersection(mates):
                continue  # it is tried again, but not so long that the weights would be at risk
            for mate in mates:
                if ledger.ranks[mate].healthy():
                    yield f"step {publication.step}: rank {mate} was healthy, but the state of rank {rank} is lost"
                    break


def finished_files_are_never_thrown_away(job: Job, ledger: Ledger) -> Iterator[str]:
    """Where nothing was published, the finished files of the newest step are left for a human."""
    if not ledger.ended or not ledger.controller_stopped or ledger.last_words or not ledger.heard_saved:
        return
    step = max(step for _, _, step, _ in ledger.heard_saved)
    finished = {saved for saved in ledger.heard_saved if saved[2] == step}
    if finished.isdisjoint(ledger.left_on_disk):
        yield f"nothing was published, and the finished files of step {step} are gone: {sorted(finished)}"


def what_a_rank_says_is_so(job: Job, ledger: Ledger) -> Iterator[str]:
    """No rank says that it has written what it has not."""
    yield from ledger.untrue


def whoever_can_be_told_is_told(job: Job, ledger: Ledger) -> Iterator[str]:
    """A rank that lives and has a session hears how the job ended, whatever the controller believes of it."""
    for rank in sorted(ledger.untold):
        yield f"rank {rank} had a session to the end, and was told nothing"


CHECKERS: tuple[Checker, ...] = (
    i1_every_file_is_of_the_published_step,
    i2_only_whole_verified_directories_are_published,
    i3_what_can_be_saved_is_saved,
    i4_no_survivor_is_set_back,
    i5_a_crash_leaves_the_old_and_a_whole_new_one_or_none,
    i6_nothing_older_changes_anything_newer,
    i7_nobody_waits_for_ever,
    a_false_alarm_is_not_noticed,
    rank_local_state_is_saved_or_said_to_be_lost,
    finished_files_are_never_thrown_away,
    whoever_can_be_told_is_told,
    what_a_rank_says_is_so,
)


def complaints(job: Job, ledger: Ledger) -> list[str]:
    """Everything that any checker has to say, each line with the checker's name."""
    return [f"{checker.__name__}: {text}" for checker in CHECKERS for text in checker(job, ledger)]
