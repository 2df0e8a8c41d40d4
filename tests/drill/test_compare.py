"""What is said of two runs: each verdict, and that one wrong digest changes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lastwords.drill.compare import BITWISE, DIFFERS, FAILED, TOLD, first_difference, judge, judge_fewer, unsteady
from lastwords.drill.phases import FEWER, Drill, RankLife
from lastwords.optim_wrapper.launch.drill_plan import STATE, Death
from tests.drill.made import begin, leaves, life

DRILL = Drill("forward", Death((1,), 5, "forward", 1))
LAST = 8


def killed(
    *, after: int = 4, changed: dict[int, dict[str, dict[str, str]]] | None = None, **begins: object
) -> dict[int, list[RankLife]]:
    """Both ranks die in step 5 and go on after step 4. changed, begins: of rank 1's second life."""
    second = life(after + 1, LAST, begins=begin(after, **begins), changed=changed)  # type: ignore[arg-type]
    return {0: [life(1, 4), life(after + 1, LAST)], 1: [life(1, 4, dies="forward"), second]}


def reference() -> dict[int, RankLife]:
    return {0: life(), 1: life()}


def test_a_resume_that_is_equal_in_all_bits_is_bitwise() -> None:
    verdict = judge(DRILL, reference(), killed(), frozenset(), LAST)
    assert (verdict.kind, verdict.resumed_after, verdict.compared) == (BITWISE, 4, 4)
    assert verdict.first is None


@pytest.mark.parametrize("kind", STATE)
def test_one_other_digest_of_any_kind_is_named_with_its_step_and_rank(kind: str) -> None:
    usual = leaves(7)
    usual[kind] = {**usual.get(kind, {}), "odd": "x"}
    verdict = judge(DRILL, reference(), killed(changed={7: usual}), frozenset(), LAST)
    assert verdict.kind == DIFFERS
    assert verdict.first is not None
    assert (verdict.first.kind, verdict.first.name, verdict.first.step, verdict.first.rank) == (kind, "odd", 7, 1)


def test_what_was_told_is_told() -> None:
    other = {7: leaves(7, parameter={"w": "x"})}
    verdict = judge(DRILL, reference(), killed(changed=other, reasons=["the loader is odd"]), frozenset(), LAST)
    assert (verdict.kind, verdict.reasons) == (TOLD, ("the loader is odd",))


def test_a_reason_that_is_told_in_the_first_step_counts_unless_an_undisturbed_run_tells_it_too() -> None:
    usual, lives = reference(), killed(changed={7: leaves(7, parameter={"w": "x"})})
    lives[1][1].steps[5].reasons.append("the streams are unknown")
    assert judge(DRILL, usual, lives, frozenset(), LAST).reasons == ("the streams are unknown",)
    usual[1].steps[5].reasons.append("the streams are unknown")
    assert judge(DRILL, usual, lives, frozenset(), LAST).kind == DIFFERS


def test_equal_bits_are_bitwise_although_a_reason_was_told() -> None:
    verdict = judge(DRILL, reference(), killed(reasons=["another torch"]), frozenset(), LAST)
    assert (verdict.kind, verdict.reasons) == (BITWISE, ("another torch",))


def test_what_was_restored_otherwise_comes_before_what_follows_from_it() -> None:
    spoilt = leaves(4, parameter={"b": "x"})
    verdict = judge(
        DRILL, reference(), killed(at=spoilt, changed={5: leaves(5, parameter={"w": "x"})}), frozenset(), LAST
    )
    assert verdict.at_resume is not None
    assert verdict.first is not None
    assert (verdict.at_resume.name, verdict.at_resume.step, verdict.first.name) == ("b", 4, "w")


@pytest.mark.parametrize(("begun", "kind"), [(False, DIFFERS), (True, BITWISE)])
def test_what_was_restored_otherwise_counts_unless_it_is_of_the_next_steps_begin(begun: bool, kind: str) -> None:
    lives = killed(at=leaves(4, parameter={"b": "x"}))
    lives[1][1].begin = dataclasses.replace(lives[1][1].begin, begun=begun)
    assert judge(DRILL, reference(), lives, frozenset(), LAST).kind == kind


def test_a_variable_that_the_loop_had_changed_and_that_is_not_back_is_suspected() -> None:
    def with_scale(of: dict[int, RankLife]) -> dict[int, RankLife]:
        for one in of.values():
            one.begin.leaves["variable"] = {"scale": "1.0", "path": "a"}
            for number, step in one.steps.items():
                step.leaves["variable"] = {"scale": f"scale {number}", "path": "a"}
        return of

    lives = killed(at=leaves(4, variable={"scale": "1.0", "path": "b"}), changed={5: leaves(5, parameter={"w": "x"})})
    verdict = judge(DRILL, with_scale(reference()), lives, frozenset(), LAST)
    assert verdict.suspects == ("scale",), "the path was never changed by the loop"
    assert not judge(DRILL, with_scale(reference()), lives, {("variable", "scale")}, LAST).suspects


def test_what_resume_has_named_is_suspected() -> None:
    lives = killed(changed={5: leaves(5, parameter={"w": "x"})})
    assert not judge(DRILL, reference(), lives, frozenset(), LAST).suspects
    lives[0][-1].begin.beside.append("extras average.seen")
    assert judge(DRILL, reference(), lives, frozenset(), LAST).suspects == ("extras average.seen",)
    assert not judge(DRILL, reference(), lives, {("variable", "extras average.seen")}, LAST).suspects


@pytest.mark.parametrize(("there", "named"), [("main() of t.loop.epochs", True), ("train() of t.loop.epochs", False)])
def test_what_the_loop_has_made_is_suspected_where_its_object_is_there(there: str, named: bool) -> None:
    made = "main() of t.loop.count"
    whole = reference()
    for one in whole.values():
        for number, step in one.steps.items():
            step.leaves["variable"] = {there: "4", made: str(number)}
    lives = killed(at=leaves(4, variable={there: "4"}), changed={5: leaves(5, parameter={"w": "x"})})
    assert judge(DRILL, whole, lives, frozenset(), LAST).suspects == ((made,) if named else ())


def test_a_run_that_differs_before_the_kill_proves_nothing() -> None:
    lives = killed()
    lives[0][0].steps[2].leaves["parameter"]["w"] = "x"
    assert judge(DRILL, reference(), lives, frozenset(), LAST).kind == FAILED


@pytest.mark.parametrize(
    "lives",
    [
        {},
        {0: [life()], 1: [life()]},
        {0: [life(1, 4)], 1: [life(1, 4, dies="forward")]},
        {0: [life(1, 4), life(5, 6)], 1: [life(1, 4), life(5, 6)]},
        {0: [life(1, 4), life(5, 8)], 1: [life(1, 4), life(4, 8)]},
    ],
    ids=["nothing", "never killed", "never again", "ended early", "at two steps"],
)
def test_a_run_that_did_not_go_as_planned_is_no_success(lives: dict[int, list[RankLife]]) -> None:
    verdict = judge(DRILL, reference(), lives, frozenset(), LAST)
    assert verdict.kind == FAILED
    assert verdict.problem


def test_a_run_that_did_not_go_on_from_the_periodic_checkpoint_proves_nothing_of_it() -> None:
    wants = [Drill("periodic", Death((0, 1), 6, "forward", 1, published=step), step) for step in (4, 3)]
    assert [judge(one, reference(), killed(), frozenset(), LAST).kind for one in wants] == [BITWISE, FAILED]


def test_where_nothing_was_saved_the_run_begins_anew_and_is_compared_from_the_first_step() -> None:
    lives = {0: [life(1, 4), life()], 1: [life(1, 4, dies="forward"), life()]}
    verdict = judge(DRILL, reference(), lives, frozenset(), LAST)
    assert (verdict.kind, verdict.resumed_after, verdict.compared) == (BITWISE, 0, LAST)


def test_what_differs_from_run_to_run_and_is_no_state_is_set_aside() -> None:
    one, other = reference(), reference()
    other[0].steps[2].leaves["random stream"]["python"] = "x"
    other[1].steps[3].leaves["variable"] = {"began": "now"}
    aside = unsteady(one, other)
    assert aside == {("random stream", "python"), ("variable", "began")}
    assert first_difference(one, other, aside) is None
    other[1].steps[3].leaves["parameter"]["w"] = "x"
    found = first_difference(one, other, unsteady(one, other))
    assert found is not None
    assert (found.name, found.step, found.rank) == ("w", 3, 1)


def test_on_fewer_ranks_the_state_at_the_resume_is_compared_where_all_hold_it() -> None:
    drill = Drill(FEWER, Death((1,), 5, "forward", 1))
    fewer = {0: [RankLife(begin(4, ["other ranks"]))]}
    assert judge_fewer(drill, reference(), fewer, 4).kind == BITWISE
    fewer[0][0].begin.leaves["parameter"]["w"] = "x"
    assert judge_fewer(drill, reference(), fewer, 4).kind == DIFFERS
    parts = reference()
    parts[1].steps[4].leaves["parameter"]["w"] = "of rank 1"
    assert judge_fewer(drill, parts, fewer, 4).kind == FAILED
    assert judge_fewer(drill, reference(), {}, 4).kind == FAILED


CACHE = "model.0.last"


def with_cache(of: RankLife, **values: str) -> RankLife:
    """What is in the cache when the loop begins, or another attribute; after each step it is made anew."""
    of.begin.leaves["attribute"] = {CACHE: "None", **values}
    for number, step in of.steps.items():
        step.leaves["attribute"] = {CACHE: f"last of {number}"}
    return of


def cached(why: str = f"ranks 0-1: the attribute {CACHE} changes, and is not saved") -> tuple[dict[int, RankLife], Any]:
    """The undisturbed run, and the lives of one that was killed and went on after step 4 without the cache."""
    lives = {rank: [life(1, 4, dies="forward"), life(5, LAST, begins=begin(4, [why]))] for rank in (0, 1)}
    for every in lives.values():
        every[:] = map(with_cache, every)
    return {rank: with_cache(life(unsaved=[CACHE])) for rank in (0, 1)}, lives


def dead_of(usual: dict[int, RankLife], lives: Any, unsteady: Any = frozenset()) -> tuple[str, ...]:
    return judge(DRILL, usual, lives, unsteady, LAST).dead


def test_state_that_was_not_back_and_is_missed_by_nothing_is_dead() -> None:
    assert dead_of(*cached()) == (CACHE,)


def back(usual: dict[int, RankLife], lives: Any) -> None:
    lives[1][1].begin.leaves["attribute"][CACHE] = "last of 4"


def read_by_a_weight(usual: dict[int, RankLife], lives: Any) -> None:
    lives[1][1].steps[7].leaves["parameter"]["w"] = "x"


def read_by_another_attribute(usual: dict[int, RankLife], lives: Any) -> None:
    lives[1][1].steps[LAST].leaves["attribute"]["model.0.total"] = "x"


def a_history(usual: dict[int, RankLife], lives: Any) -> None:
    for step in lives[0][1].steps.values():
        step.leaves["attribute"][CACHE] = f"last of 5 to {step.step}"


def told_later(usual: dict[int, RankLife], lives: Any) -> None:
    for rank in usual:
        for number in range(1, 5):
            usual[rank].steps[number].unsaved.clear()


@pytest.mark.parametrize("change", [back, read_by_a_weight, read_by_another_attribute, a_history, told_later])
def test_state_that_may_be_missed_is_not_dead(change: Any) -> None:
    usual, lives = cached()
    change(usual, lives)
    assert dead_of(usual, lives) == ()


def test_state_that_no_reason_of_the_resume_is_about_is_not_dead() -> None:
    assert dead_of(*cached("another torch")) == ()
    assert dead_of(*cached(), {("attribute", CACHE)}) == (), "it is never the same twice, so nothing can be said"
