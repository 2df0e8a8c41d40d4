"""Large units are shared out among their holders; a share that is lost goes to another one, and cuts never mix."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest

from lastwords.controller import selection
from lastwords.controller.events import JobStage, StartPublish, StartVerify, VerifyFailed
from lastwords.controller.membership import Member
from lastwords.controller.periodic import shares
from lastwords.controller.selection import Decision, NoDecision, RankView, WrittenPart, select
from lastwords.vocabulary import SHARES_MAX, Phase, ProcessId, Save, Share, Stand
from tests import golden
from tests.controller.job_driver import JobDriver, computing

N = 7
STANDS = (
    Stand(Phase.COMPUTING, N),
    Stand(Phase.COMPUTING, N),
    Stand(Phase.READY, N + 1),
    Stand(Phase.UPDATED, N),
    Stand(Phase.READY, N),
    Stand(Phase.TORN, N),
    None,
)


def views(
    stands: Sequence[Stand | None], units: Sequence[str], shared: Sequence[str] = ("u", "v")
) -> dict[int, RankView]:
    return {
        rank: RankView(rank, "host", tuple(units[rank]), stand, "died", shared=tuple(shared))
        for rank, stand in enumerate(stands)
    }


def choose(
    stands: Sequence[Stand | None], parts: Sequence[WrittenPart] = (), units: Sequence[str] = ("u",) * 12
) -> Decision:
    answer = select(views(stands, units[: len(stands)]), {one for held in units[: len(stands)] for one in held}, parts)
    assert isinstance(answer, Decision), answer
    return answer


def units_of(answer: Decision) -> dict[int, tuple[str, ...]]:
    return {rank: work.units for rank, work in answer.writers.items() if work.units}


def part(rank: int, *units: str, attempt: int = 1, step: int = N) -> WrittenPart:
    return WrittenPart(rank, attempt, step, 0, units, ())


# --------------------------------------------------------------------------- who writes


def test_all_who_stand_at_the_end_of_the_step_write_a_share() -> None:
    answer = choose([computing(N), None, computing(N), Stand(Phase.READY, N + 1)])
    assert units_of(answer) == {0: ("u/0of3",), 2: ("u/1of3",), 3: ("u/2of3",)}
    golden.says(answer.reason)


def test_a_rank_that_has_not_ended_the_step_writes_no_share() -> None:
    answer = choose([Stand(Phase.UPDATED, N), computing(N), computing(N)])
    assert units_of(answer) == {1: ("u/0of2",), 2: ("u/1of2",)}
    assert units_of(choose([Stand(Phase.UPDATED, N), Stand(Phase.UPDATED, N)])) == {0: ("u",)}


def test_there_are_not_more_shares_than_are_worth_it() -> None:
    assert len(units_of(choose([computing(N)] * 12))) == SHARES_MAX


def test_a_unit_that_some_holder_does_not_call_large_is_written_whole() -> None:
    known = views([computing(N)] * 3, ["u"] * 3)
    known[1] = replace(known[1], shared=())
    answer = select(known, ["u"])
    assert isinstance(answer, Decision)
    assert units_of(answer) == {0: ("u",)}


def test_several_units_are_spread_over_their_holders() -> None:
    answer = choose([computing(N)] * 4, units=["uv", "uv", "u", "u"])
    assert {rank: len(units) for rank, units in units_of(answer).items()} == {0: 2, 1: 2, 2: 1, 3: 1}


# --------------------------------------------------------------------------- what is kept


def test_a_lost_share_goes_to_a_holder_that_writes_nothing_yet() -> None:
    kept = (part(0, "u/0of3"), part(2, "u/2of3"))
    answer = choose([computing(N), None, computing(N), computing(N)], kept)
    assert answer.kept == kept
    assert units_of(answer) == {3: ("u/1of3",)}


def test_a_lost_share_goes_to_a_holder_that_writes_its_own_anew_if_all_have_one() -> None:
    answer = choose([computing(N), None, computing(N)], (part(0, "u/0of3"), part(2, "u/2of3")))
    assert answer.kept == (part(2, "u/2of3"),)
    assert units_of(answer) == {0: ("u/0of3", "u/1of3")}
    golden.says(answer.reason)


def test_shares_of_two_cuts_are_not_mixed() -> None:
    parts = (part(0, "u/0of2", attempt=2), part(1, "u/1of3"), part(2, "u/2of3"))
    answer = choose([computing(N)] * 3, parts)
    assert answer.kept == (parts[0],)
    assert units_of(answer) == {1: ("u/1of2",)}


def test_a_share_of_the_step_before_is_not_used() -> None:
    answer = choose([computing(N)] * 2, (part(1, "u/1of2", step=N - 1),))
    assert (answer.step, answer.kept) == (N, ())


def test_a_step_of_which_a_share_is_lost_cannot_be_had() -> None:
    parts = [part(0, "u/0of2", step=N + 1)]
    assert choose([None, None, computing(N)], parts).step == N
    assert choose([None, None, computing(N)], [*parts, part(1, "u/1of2", step=N + 1)]).step == N + 1


def test_without_a_holder_at_the_end_of_the_step_it_is_written_whole() -> None:
    parts = (part(0, "u/0of2"),)
    answer = choose([None, Stand(Phase.UPDATED, N)], parts)
    assert answer.kept == ()
    assert units_of(answer) == {1: ("u",)}


def random_choice(seed: int) -> tuple[dict[int, RankView], list[WrittenPart], Decision | NoDecision]:
    dice = random.Random(seed)
    ranks = dice.randint(1, 6)
    units = [dice.choice(["u", "v", "uv"]) for _ in range(ranks)]
    known = views([dice.choice(STANDS) for _ in range(ranks)], units, dice.choice(["uv", "uv", "u", ""]))
    parts = []
    for rank in range(ranks):
        if dice.random() < 0.6:
            count = dice.choice([1, 2, 2, 3])
            names = [str(Share(unit, dice.randrange(count), count)) for unit in units[rank] if dice.random() < 0.8]
            parts.append(part(rank, *names, attempt=dice.randint(1, 2), step=dice.choice([N, N, N, N - 1])))
    return known, parts, select(known, {unit for held in units for unit in held}, parts)


def complaints(known: dict[int, RankView], parts: list[WrittenPart], answer: Decision | NoDecision) -> list[str]:
    if not isinstance(answer, Decision) or answer.proceed:
        return []
    found = []
    names = [name for one in answer.kept for name in one.units]
    names += [name for work in answer.writers.values() for name in work.units]
    for unit in {unit for view in known.values() for unit in view.units}:
        own = sorted(share for share in map(Share.parse, names) if share.unit == unit)
        if not own or own != [*own[0].all]:
            found.append(f"{unit} is made of {[*map(str, own)]}")
    for rank, work in answer.writers.items():
        stand = known[rank].stand
        if any(Share.parse(name).count > 1 for name in work.units) and (not stand or stand.ended_step != answer.step):
            found.append(f"rank {rank} writes a share at {stand}")
    found += [f"{one} is kept" for one in answer.kept if one.step != answer.step or one not in parts]
    return found


SEEDS = range(3000)


@pytest.mark.ci
def test_whatever_is_kept_and_written_is_every_unit_once() -> None:
    for seed in SEEDS:
        assert complaints(*random_choice(seed)) == [], f"seed {seed}"


def _kept_whatever_the_cut(parts: Sequence[WrittenPart], place: selection._SavePlace) -> list[WrittenPart]:
    newest = {part.rank: part for part in reversed(parts) if (part.step, part.target) == (place.step, place.target)}
    kept: list[WrittenPart] = []
    for one in newest.values():
        if not any(set(one.units) & set(other.units) for other in kept):
            kept.append(one)
    return kept


def _kept_of_any_step(parts: Sequence[WrittenPart], place: selection._SavePlace) -> list[WrittenPart]:
    return shipped_kept([replace(one, step=place.step) for one in parts], place)


def _covered_by_one_share(survey: object, draft: selection._Draft, unit: str, kept: set[Share]) -> set[int] | None:
    return set() if kept else shipped_assign(survey, draft, unit, kept)  # type: ignore[arg-type]


shipped_kept, shipped_assign = selection._kept_parts, selection._assign_shares


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_kept_parts", _kept_whatever_the_cut),
        ("_kept_parts", _kept_of_any_step),
        ("_assign_shares", _covered_by_one_share),
        ("_SavePlace.has_ended", lambda place, view: view.rank in place.holding),
    ],
    ids=["two cuts mixed", "a share of the step before", "a lost share", "not at the end of the step"],
)
def test_a_broken_rule_is_noticed(name: str, broken: object) -> None:
    with mock.patch(f"lastwords.controller.selection.{name}", broken):
        assert any(_notices(seed) for seed in SEEDS)


def _notices(seed: int) -> bool:
    try:
        return bool(complaints(*random_choice(seed)))
    except (RecursionError, KeyError):
        return False


# --------------------------------------------------------------------------- an incident


def saving(ranks: int = 4) -> JobDriver:
    """The last rank has died, the others write a share each."""
    job = JobDriver(ranks, registered=False)
    for rank in range(ranks):
        job.hello(rank, shared=("u",))
    job.kill(ranks - 1)
    for rank in range(ranks - 1):
        job.settle(rank, computing(5))
    return job


def test_the_checkpoint_waits_for_every_share_and_lists_them() -> None:
    job = saving()
    assert {rank: order.units for rank, order in job.sent(Save).items()} == {
        0: ("u/0of3",),
        1: ("u/1of3",),
        2: ("u/2of3",),
    }
    job.saved(0, 5)
    job.saved(2, 5)
    assert job.starts() is None
    job.saved(1, 5)
    started = job.starts()
    assert isinstance(started, StartVerify)
    assert started.units == ("u/0of3", "u/1of3", "u/2of3")
    job.verified()
    assert isinstance(job.starts(), StartPublish)


@pytest.mark.parametrize("sharers", [2, 3])
def test_shares_that_do_not_fit_together_are_given_up_and_the_unit_is_written_whole(sharers: int) -> None:
    job = saving(sharers + 1)
    for rank in range(sharers):
        job.saved(rank, 5)
    job.tell(VerifyFailed(1, 1, ((-1, "ranks 0 and 1 have cut unit u into different shares"),)))
    assert {rank: order.units for rank, order in job.sent(Save).items() if order.units} == {0: ("u",)}
    job.saved(0, 5, attempt=2)
    started = job.starts()
    assert isinstance(started, StartVerify)
    assert started.units == ("u",)


def test_a_share_that_is_bad_is_written_by_another_rank() -> None:
    job = saving()
    for rank in range(3):
        job.saved(rank, 5)
    job.tell(VerifyFailed(1, 1, ((1, "it is damaged"),)))
    assert job.core.state is JobStage.SAVING
    [(rank, order)] = job.sent(Save).items()
    assert (rank, order.units) == (0, ("u/0of3", "u/1of3"))


def test_where_a_share_is_bad_nothing_is_concluded_from_their_not_fitting_together() -> None:
    job = saving()
    for rank in range(3):
        job.saved(rank, 5)
    job.tell(VerifyFailed(1, 1, ((-1, "ranks 0 and 1 have cut unit u into different shares"), (1, "it is damaged"))))
    [(rank, order)] = job.sent(Save).items()
    assert (rank, order.units) == (0, ("u/0of3", "u/1of3"))


# --------------------------------------------------------------------------- periodically


def member(rank: int, *units: str, shared: tuple[str, ...] = ("u", "v")) -> Member:
    return Member(rank, ProcessId("h", 1, 1, "n"), units, computing(0), shared=shared)


def test_periodic_checkpoints_are_shared_out_too() -> None:
    members = [member(0, "u", "v"), member(1, "u", "v"), member(2, "u")]
    assert {rank: one.units for rank, one in shares(members).items()} == {
        0: ("u/0of3", "v/0of2"),
        1: ("u/1of3", "v/1of2"),
        2: ("u/2of3",),
    }
    assert {rank: one.units for rank, one in shares(members, whole=True).items()} == {0: ("u",), 1: ("v",), 2: ()}
