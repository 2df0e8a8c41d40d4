"""The table at the start says what is where, and what a death would cost."""

from __future__ import annotations

from lastwords.sharding.describe import describe, warnings_of
from lastwords.sharding.pieces import Members, UnitTable


def table(**units: tuple[int, ...]) -> UnitTable:
    return UnitTable(
        units=units,
        mine={"replicated": Members()},
        nbytes={unit: (number + 1) << 20 for number, unit in enumerate(units)},
        tensors={unit: number + 1 for number, unit in enumerate(units)},
    )


def test_the_table_shows_units_sizes_holders_and_what_may_die() -> None:
    text = describe(table(replicated=(0, 1, 2, 3), tp0=(0, 2), tp1=(1, 3)), 4, ["gate: yes"])
    assert text.splitlines() == [
        "state of 4 ranks in 3 units:",
        "  unit        tensors   MiB  holders  may die",
        "  replicated        1  1.00  all      any 3 of 4; not all",
        "  tp0               2  2.00  0, 2     any 1 of 2; not both",
        "  tp1               3  3.00  1, 3     any 1 of 2; not both",
        "  gate: yes",
    ]


def test_a_large_job_is_summed_up() -> None:
    units = {"replicated": tuple(range(2000))} | {f"s{k}": (k, k + 1000) for k in range(1000)}
    lines = describe(table(**units), 2000).splitlines()
    assert len(lines) < 30
    assert lines[-1] == "  and 977 more, of 2 to 2 holders each"


def test_units_with_one_holder_come_with_a_warning_that_says_what_follows() -> None:
    (text,) = warnings_of(table(replicated=(0, 1), a=(0,), b=(1,)))
    assert text.startswith("no redundancy: 2 of 3 units have one holder (a, b). If that process is killed")


def test_a_job_of_one_and_full_copies_need_no_warning() -> None:
    assert warnings_of(table(replicated=(0,))) == []
    assert warnings_of(table(replicated=(0, 1), a=(0, 1))) == []
