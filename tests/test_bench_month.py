"""The simulated month agrees with the closed form, and its optimum is one."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from bench import month
from bench.month import Strategy, daly_s, expected, simulate

HOUR_S = 3600.0
SEEDS = 60
PERIODIC = Strategy("periodic", 300.0, 30.0)
CASES = [
    (strategy, hours)
    for strategy in (PERIODIC, replace(PERIODIC, save_s=0.0), Strategy("slow", 1800.0, 120.0))
    for hours in (0.5, 2.0, 12.0)
]


def error_and_bound(strategy: Strategy, mtbf_s: float, told: Strategy) -> tuple[float, float]:
    """How far the mean of the months is from the closed form of `told`, and four standard errors and an end effect."""
    months = [simulate(strategy, mtbf_s, seed) for seed in range(SEEDS)]
    pause_s = strategy.pause_s(mtbf_s) if strategy.save_s else 0.0
    at_the_ends_s = pause_s + strategy.save_s + strategy.recovery_s
    bound = 4 * statistics.stdev(months) / math.sqrt(SEEDS) + at_the_ends_s / month.MONTH_S
    return abs(statistics.fmean(months) - expected(told, mtbf_s)), bound


@pytest.mark.parametrize(("strategy", "hours"), CASES)
def test_the_months_agree_with_the_closed_form(strategy: Strategy, hours: float) -> None:
    error, bound = error_and_bound(strategy, hours * HOUR_S, strategy)
    assert error <= bound


@pytest.mark.parametrize(("strategy", "hours"), CASES)
def test_they_would_not_with_another_recovery(strategy: Strategy, hours: float) -> None:
    told = replace(strategy, recovery_s=2 * strategy.recovery_s)
    error, bound = error_and_bound(strategy, hours * HOUR_S, told)
    assert error > bound


@pytest.mark.parametrize("hours", [0.5, 2.0, 12.0])
def test_no_other_pause_is_better_than_the_optimum(hours: float) -> None:
    mtbf_s = hours * HOUR_S
    pause_s = daly_s(PERIODIC.save_s, mtbf_s)

    def share(of_s: float) -> float:
        return of_s / math.expm1((of_s + PERIODIC.save_s) / mtbf_s)

    assert share(pause_s) >= max(share(0.9 * pause_s), share(1.1 * pause_s))


def test_the_same_seed_is_the_same_month() -> None:
    assert simulate(PERIODIC, HOUR_S, 7) == simulate(PERIODIC, HOUR_S, 7) != simulate(PERIODIC, HOUR_S, 8)
