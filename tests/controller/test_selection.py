"""The choice of step and writers: exhaustively for small jobs, by example for the rest."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from lastwords.controller.selection import Decision, NoDecision, NoDecisionKind, RankView, WrittenPart, select
from lastwords.vocabulary import Phase, Stand
from tests import golden

N = 7
GATED = (
    Stand(Phase.READY, N),
    Stand(Phase.SKIPPED, N),
    Stand(Phase.UPDATED, N),
    Stand(Phase.COMPUTING, N),
    Stand(Phase.READY, N + 1),
    Stand(Phase.SKIPPED, N + 1),
)
"""Where settled ranks can be between two gates: all have entered the gate of step 7, none has passed that of step 8."""

LAYOUTS = {
    "one unit": ("u", "u", "u", "u"),
    "two units, two holders": ("A", "B", "A", "B"),
    "overlapping": ("A", "A+B", "B+C", "C"),
}


def views(
    stands: Sequence[Stand | None], units: Sequence[str], hosts: str = "", refused: dict[int, set[int]] | None = None
) -> dict[int, RankView]:
    return {
        rank: RankView(
            rank,
            f"host-{(hosts or 'aaaaaaaa')[rank]}",
            tuple(units[rank].split("+")),
            stand,
            "" if stand else "died",
            frozenset((refused or {}).get(rank, ())),
        )
        for rank, stand in enumerate(stands)
    }


def all_units(units: Iterable[str]) -> set[str]:
    return {unit for held in units for unit in held.split("+")}


def choose(stands: Sequence[Stand | None], units: Sequence[str] = ("u",) * 8, **options: object) -> Decision:
    hosts = str(options.pop("hosts", ""))
    refused = options.pop("refused", None)
    answer = select(views(stands, units, hosts, refused), all_units(units[: len(stands)]), **options)  # type: ignore[arg-type]
    assert isinstance(answer, Decision), answer
    return answer


def computing(step: int) -> Stand:
    return Stand(Phase.COMPUTING, step)


# --------------------------------------------------------------------------- exhaustive: what the proof claims


def gated_jobs(units: Sequence[str]) -> Iterable[tuple[Stand | None, ...]]:
    """Every mixture of the stands between two gates, with every set of ranks dead or torn."""
    for stands in itertools.product((*GATED, Stand(Phase.TORN, N), None), repeat=len(units)):
        if any(stand is not None and stand.phase is not Phase.TORN for stand in stands):
            yield stands


def holder_of_each_unit(stands: Sequence[Stand | None], units: Sequence[str]) -> bool:
    held = {
        unit
        for stand, of_rank in zip(stands, units, strict=True)
        if stand is not None and stand.phase is not Phase.TORN
        for unit in of_rank.split("+")
    }
    return held == all_units(units)


@pytest.mark.ci
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_the_gate_a_step_is_found_whenever_every_unit_has_a_holder(layout: str) -> None:
    units = LAYOUTS[layout]
    for stands in gated_jobs(units):
        answer = select(views(stands, units), all_units(units))
        assert isinstance(answer, Decision) == holder_of_each_unit(stands, units), (stands, answer)


def test_without_the_gate_the_same_claim_fails() -> None:
    """Negative control: rank 1 has not even final gradients of the step that rank 0 has ended."""
    stands = (computing(N), computing(N - 1))
    answer = select(views(stands, ("A", "B")), {"A", "B"})
    assert isinstance(answer, NoDecision)
    assert answer.kind is NoDecisionKind.NO_HOLDER


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_survivor_is_set_back_and_no_dead_rank_sets_the_step(layout: str) -> None:
    units = LAYOUTS[layout]
    for stands in gated_jobs(units):
        answer = select(views(stands, units), all_units(units))
        if isinstance(answer, Decision):
            alive = [stand for stand in stands if stand is not None]
            assert answer.step >= max(stand.ended_step for stand in alive), stands
            assert answer.step <= max(stand.begun_step for stand in alive), stands


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_is_written_once_by_somebody_who_can(layout: str) -> None:
    units = LAYOUTS[layout]
    for stands in gated_jobs(units):
        answer = select(views(stands, units, hosts="aabb"), all_units(units))
        if not isinstance(answer, Decision):
            continue
        written = sorted(unit for work in answer.writers.values() for unit in work.units)
        assert written == sorted(all_units(units)), stands
        local = sorted(rank for work in answer.writers.values() for rank in work.local_ranks)
        assert sorted(local + list(answer.lost_local_ranks)) == [0, 1, 2, 3]
        for rank, work in answer.writers.items():
            stand = stands[rank]
            assert stand is not None
            assert not work.units or answer.step in stand.reach
            assert set(work.units) <= set(units[rank].split("+"))
            assert all("aabb"[other] == "aabb"[rank] for other in work.local_ranks)
        for rank in answer.proceed:
            assert stands[rank] == Stand(Phase.READY, answer.step)


def test_the_order_of_the_input_does_not_matter() -> None:
    units = LAYOUTS["overlapping"]
    shuffle = random.Random(1)
    for stands in shuffle.sample(list(gated_jobs(units)), 300):
        known = views(stands, units, hosts="abab")
        shuffled = dict(shuffle.sample(sorted(known.items()), len(known)))
        assert select(known, sorted(all_units(units))) == select(shuffled, set(all_units(units)))


# --------------------------------------------------------------------------- the step


def test_the_step_of_a_dead_rank_does_not_count() -> None:
    assert choose([computing(7), None, computing(7)]).step == 7
    assert choose([computing(7), computing(8), computing(7)]).step == 8, "the control: alive, it does"


def test_a_begun_update_counts_and_final_gradients_do_not() -> None:
    assert choose([Stand(Phase.UPDATED, 8), Stand(Phase.READY, 8)]).step == 8
    assert choose([Stand(Phase.READY, 8), Stand(Phase.READY, 8)]).step == 7


def test_a_torn_rank_holds_nothing_but_is_not_set_back() -> None:
    answer = choose([Stand(Phase.TORN, 8), computing(7)])
    assert (answer.step, list(answer.writers)) == (7, [1])


def test_only_torn_ranks_left_save_nothing() -> None:
    answer = select(views([Stand(Phase.TORN, 8)], ["u"]), ["u"])
    assert isinstance(answer, NoDecision)
    assert answer.kind is NoDecisionKind.NO_HOLDER
    assert answer.reason == "u cannot be saved at step 7: rank 0 is at TORN(8)"


def test_before_the_first_step_there_is_nothing_to_save() -> None:
    answer = select(views([Stand(Phase.READY, 1), computing(0)], ["u", "u"]), ["u"])
    assert answer == NoDecision(NoDecisionKind.NOTHING_TO_SAVE, "no step had been completed since the start")


def test_right_after_a_resume_there_is_nothing_to_save() -> None:
    answer = select(views([computing(37)], ["u"]), ["u"], base_step=37)
    assert isinstance(answer, NoDecision)
    golden.says(answer.reason)
    assert isinstance(select(views([computing(38)], ["u"]), ["u"], base_step=37), Decision)


def test_of_a_step_that_cannot_be_had_the_units_are_named_that_no_rank_and_no_file_has() -> None:
    """Of what is not named, the file of a dead rank has one, and a rank that may still apply its gradients another."""
    stands = [computing(8), None, None, Stand(Phase.READY, 8), computing(7)]
    finished = [part(2, step=8, units=("C", "E/0of2"))]
    answer = select(views(stands, ["A", "B", "C+E", "D", "F"]), list("ABCDEF"), finished)
    assert isinstance(answer, NoDecision)
    golden.says(answer.reason)


def test_of_several_steps_that_cannot_be_had_the_highest_is_told_of() -> None:
    stands = [Stand(Phase.UPDATED, 8), computing(7), None]
    answer = select(views(stands, ["A", "B", "C"]), list("ABC"), [part(2, step=7, units=("C",))])
    assert isinstance(answer, NoDecision)
    assert answer.step == 8
    golden.says(answer.reason)


def test_a_begun_step_is_given_up_if_a_unit_cannot_get_there() -> None:
    """Rank 1 raised at its gate and can no longer update; rank 2 still holds step 7 of A. Nobody has ended step 8."""
    answer = choose([Stand(Phase.UPDATED, 8), computing(7), Stand(Phase.READY, 8)], ["A", "B", "A"])
    assert (answer.step, sorted(answer.writers)) == (7, [1, 2])


def test_an_ended_step_is_never_given_up() -> None:
    stands = [computing(8), computing(7), Stand(Phase.READY, 8)]
    answer = select(views(stands, ["A", "B", "A"]), ["A", "B"])
    assert isinstance(answer, NoDecision)


# --------------------------------------------------------------------------- writers


def test_the_lowest_holder_writes() -> None:
    assert list(choose([None, computing(7), computing(7)]).writers) == [1]


def test_a_holder_is_preferred_to_a_rank_that_would_have_to_proceed() -> None:
    answer = choose([Stand(Phase.READY, 8), computing(8)])
    assert answer.proceed == ()
    assert [rank for rank, work in answer.writers.items() if work.units] == [1]


def test_the_lowest_laggard_proceeds_where_nobody_holds_the_unit() -> None:
    answer = choose([computing(8), Stand(Phase.READY, 8), None, Stand(Phase.READY, 8)], ["A", "B", "A", "B"])
    assert answer.proceed == (1,)
    golden.says(answer.reason)


def test_the_local_state_of_a_dead_rank_is_written_on_its_host() -> None:
    answer = choose([computing(7), None, None, computing(7)], hosts="aabb")
    assert answer.writers[0].local_ranks == (0, 1)
    assert answer.writers[3].local_ranks == (2, 3)
    assert answer.writers[3].units == ()


def test_a_rank_that_could_not_copy_black_boxes_writes_its_units_and_another_one_copies() -> None:
    known = views([computing(7)] * 2, ["A", "B"])
    known[0] = replace(known[0], may_copy=False)
    answer = select(known, ["A", "B"])
    assert isinstance(answer, Decision)
    written = {rank: (work.units, work.local_ranks) for rank, work in answer.writers.items()}
    assert written == {0: (("A",), ()), 1: (("B",), (0, 1))}


def test_the_local_state_of_a_lost_host_is_lost_and_said() -> None:
    answer = choose([computing(7), computing(7), None, None], hosts="aabb")
    assert answer.lost_local_ranks == (2, 3)
    golden.says(answer.reason)


def test_a_host_whose_file_system_has_refused_writes_only_what_no_other_host_has() -> None:
    answer = choose([computing(7)] * 3, ["A+B", "A+B", "A"], hosts="aab", refused={0: {0}}, retry_refused=True)
    assert {rank: work.units for rank, work in answer.writers.items()} == {1: ("B",), 2: ("A",)}


def test_a_unit_writer_also_writes_the_local_state_of_its_host() -> None:
    answer = choose([computing(7)] * 4, ["A", "A", "A", "B"], hosts="aabb")
    assert answer.writers[3].local_ranks == (2, 3)
    assert 2 not in answer.writers


# --------------------------------------------------------------------------- parts that are there already


def part(rank: int, step: int = 7, units: tuple[str, ...] = ("u",), local_ranks: tuple[int, ...] = ()) -> WrittenPart:
    return WrittenPart(rank, 1, step, 0, units, local_ranks)


def test_a_finished_part_outlives_its_writer_and_sets_the_step() -> None:
    answer = choose([None, computing(7)], parts=[part(0, step=8, local_ranks=(0,))])
    assert answer.step == 8
    assert answer.kept == (part(0, step=8, local_ranks=(0,)),)
    assert answer.writers[1].units == ()
    assert choose([None, computing(7)]).step == 7, "the control: without the file the step is lost"


def test_a_finished_part_in_another_directory_is_not_kept() -> None:
    finished = part(0, local_ranks=(0, 1))
    for target in (0, 1):
        answer = choose([computing(7), computing(7)], parts=[finished], targets=(target,))
        assert answer.kept == ((finished,) if target == finished.target else ())
        assert bool(answer.writers) == (target != finished.target)


def test_a_finished_part_of_a_step_below_the_survivors_does_not_count() -> None:
    answer = choose([None, computing(8)], parts=[part(0, step=7)])
    assert (answer.step, answer.kept) == (8, ())


def test_of_two_finished_parts_of_one_rank_the_newest_counts() -> None:
    """It has one file in a checkpoint."""
    parts = [WrittenPart(0, 2, 7, 0, ("A",), ()), WrittenPart(0, 1, 7, 0, ("B",), (0,))]
    decision = choose([None, computing(7)], ["A+B", "A+B"], parts=parts)
    assert decision.kept == (parts[0],)
    assert decision.writers[1].units == ("B",)


def test_nothing_is_left_to_write_when_all_parts_are_finished() -> None:
    answer = choose([None, None], parts=[part(0, local_ranks=(0, 1))])
    assert (answer.step, answer.writers) == (7, {})


def test_a_rank_with_a_finished_part_writes_again_only_if_nobody_else_can() -> None:
    kept = part(0, units=("A",), local_ranks=(0, 1, 2))
    units = ["A+B", "B", "A"]
    answer = choose([computing(7), computing(7), None], units, parts=[kept])
    assert answer.kept == (kept,)
    assert answer.writers[1].units == ("B",)
    answer = choose([computing(7), None, None], units, parts=[kept])
    assert answer.kept == ()
    assert answer.writers[0].units == ("A", "B")


def test_a_part_is_redone_if_its_writer_alone_can_save_the_local_state_of_its_host() -> None:
    kept = part(1, units=("B",))
    answer = choose([None, computing(7)], ["A+B", "A+B"], parts=[kept])
    assert answer.kept == ()
    assert answer.writers[1].units == ("A", "B")
    answer = choose([computing(7), computing(7)], ["A", "B"], hosts="ab", parts=[kept])
    assert answer.writers[1].local_ranks == (1,)


# --------------------------------------------------------------------------- storage


def test_another_host_is_tried_first() -> None:
    answer = choose([computing(7)] * 3, hosts="aab", refused={0: {0}})
    assert [rank for rank, work in answer.writers.items() if work.units] == [2]


def test_the_fallback_is_next() -> None:
    answer = choose([computing(7)] * 2, refused={0: {0}}, targets=(0, 1), retry_refused=True)
    assert (answer.target, list(answer.writers)) == (1, [0])


def test_another_rank_of_the_same_host_is_the_last_resort() -> None:
    known = views([computing(7)] * 2, ["u", "u"], refused={0: {0}})
    assert isinstance(select(known, ["u"]), NoDecision)
    answer = select(known, ["u"], retry_refused=True)
    assert isinstance(answer, Decision)
    assert list(answer.writers) == [1]


def test_a_rank_is_never_asked_twice_for_the_same_directory() -> None:
    known = views([computing(7)] * 2, ["u", "u"], refused={0: {0, 1}, 1: {0, 1}})
    answer = select(known, ["u"], targets=(0, 1), retry_refused=True)
    assert isinstance(answer, NoDecision)
    assert answer.kind is NoDecisionKind.STORAGE


def test_a_rank_that_can_write_nowhere_does_not_hold_its_step_in_vain() -> None:
    answer = choose([computing(8), computing(7)], hosts="ab", refused={0: {0}})
    assert (answer.step, answer.given_up, list(answer.writers)) == (7, (0,), [1])
    golden.says(answer.reason)


def test_nor_does_it_where_the_other_directory_lacks_what_a_finished_part_has() -> None:
    stands, units = [None, computing(8), computing(7)], ["A", "B", "A+B"]
    finished = part(0, step=8, units=("A",))
    answer = choose(stands, units, hosts="abc", refused={1: {0, 1}}, parts=[finished], targets=(0, 1))
    assert (answer.step, answer.given_up, list(answer.writers)) == (7, (1,), [2])


def test_but_not_where_anything_else_than_the_directories_is_the_reason() -> None:
    known = views([computing(7), computing(8), computing(7)], ("A", "B", "B"), "abc", {1: {0}})
    answer = select(known, {"A", "B"})
    assert isinstance(answer, NoDecision)
    assert answer.kind is NoDecisionKind.NO_HOLDER


def test_the_directory_that_saves_more_local_state_is_preferred() -> None:
    answer = choose([computing(7)] * 4, hosts="aabb", refused={0: {0}}, targets=(0, 1))
    assert (answer.target, answer.lost_local_ranks) == (1, ())


# --------------------------------------------------------------------------- words


def test_a_reason_stays_short_in_a_large_job() -> None:
    ranks = 4096
    units = [f"tp{rank % 512}" for rank in range(ranks)]
    known = {
        rank: RankView(rank, f"host-{rank // 8}", (units[rank],), computing(7), "", frozenset())
        for rank in range(ranks)
    }
    answer = select(known, set(units))
    assert isinstance(answer, Decision)
    assert len(answer.reason) < 1000


# --------------------------------------------------------------------------- whole copies


def copied(
    stands: Sequence[Stand | None], steps: Sequence[Iterable[int]], hosts: str = "", **options: object
) -> Decision | NoDecision:
    """Each rank alone holds a unit. steps: of the whole copies of each rank."""
    units = [f"u{rank}" for rank in range(len(stands))]
    every = views(stands, units, hosts)
    every = {rank: replace(view, copies=frozenset(steps[rank])) for rank, view in every.items()}
    return select(every, units, **options)  # type: ignore[arg-type]


def test_what_only_a_dead_rank_has_held_is_read_from_its_copy() -> None:
    answer = copied([computing(7), None, computing(7)], [{6, 7}] * 3)
    assert isinstance(answer, Decision)
    assert answer.step == 7
    read = {rank: work.copied for rank, work in answer.writers.items()}
    assert read == {0: (), 2: ("u1",)}
    golden.says(answer.reason)


def test_memory_is_preferred_to_a_copy() -> None:
    answer = copied([computing(7)] * 2, [{6, 7}] * 2)
    assert isinstance(answer, Decision)
    assert not any(work.copied for work in answer.writers.values())


def test_a_copy_of_another_host_is_out_of_reach() -> None:
    answer = copied([computing(7), None], [{6, 7}] * 2, hosts="ab", back=True)
    assert isinstance(answer, NoDecision)
    assert answer.kind is NoDecisionKind.NO_HOLDER


def test_an_older_step_is_taken_only_where_each_unit_has_a_copy_of_it() -> None:
    stands, steps = [computing(7), None, Stand(Phase.UPDATED, 7)], [{6, 7}, {5, 6}, {5, 6}]
    assert isinstance(copied(stands, steps), NoDecision), "not before it is seen that there is no other way"
    answer = copied(stands, steps, back=True)
    assert isinstance(answer, Decision)
    assert answer.step == 6
    assert {rank: work.copied for rank, work in answer.writers.items()} == {0: ("u0",), 2: ("u1", "u2")}
    golden.says(answer.reason)
    for rank in range(3):
        without = [of - {6} if rank == number else of for number, of in enumerate(map(set, steps))]
        assert isinstance(copied(stands, without, back=True), NoDecision), "copies of two steps are no step"


def test_of_the_steps_that_were_copied_the_newest_is_taken_that_all_copies_have() -> None:
    stands, steps = [computing(8), None, computing(8)], [{3, 6}, {0, 3}, {3, 6}]
    answer = copied(stands, steps, back=True)
    assert isinstance(answer, Decision)
    assert answer.step == 3
    assert isinstance(copied(stands, [{3, 6}, {6, 9}, {3}], back=True), NoDecision), "the control"


def test_the_step_of_the_start_is_saved_from_no_copy() -> None:
    answer = copied([computing(7), None], [{6}] * 2, back=True, base_step=6)
    assert isinstance(answer, NoDecision)


def test_nothing_is_read_from_a_copy_of_weights_that_are_wrong() -> None:
    torn = Stand(Phase.TORN, 8)
    assert isinstance(copied([computing(7), torn], [{6, 7}] * 2, back=True), NoDecision)
    assert isinstance(copied([computing(7), None], [{6, 7}] * 2, back=True), Decision), "the control"
