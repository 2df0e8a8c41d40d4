"""Reasons against exactness: each once, and whoever has to know of new ones hears of them."""

from __future__ import annotations

from lastwords.checkpoint.entries import Reason
from lastwords.optim_wrapper.ledger import Ledger


def test_each_is_there_once_in_the_order_in_which_they_were_found() -> None:
    ledger = Ledger()
    assert ledger.tell("late", Reason("other"), "late") == [Reason("late"), Reason("other")]
    assert ledger.tell("other", "third") == [Reason("third")]
    assert ledger.tell("late", Reason("late", ranks=(1,))) == [Reason("late", ranks=(1,))]
    assert [*map(str, ledger.reasons)] == ["late", "other", "third", "rank 1: late"]


def test_only_what_is_new_is_heard_of() -> None:
    ledger = Ledger()
    heard: list[Reason] = []
    ledger.tell("before")
    ledger.heard_by(heard.extend)
    ledger.tell()
    ledger.tell("before", "after")
    assert heard == [Reason("after")]


def test_what_is_forgotten_is_never_told_and_all_that_is_in_it() -> None:
    ledger = Ledger(["model.*.cache", "model.heads[0]", "loader"])
    for leaf, is_so in {
        "model.a.cache": True, "model.a.b.cache": True, "model.a.cache.keys": True, "model.a.cache[3].key": True,
        "model.cache": False, "model.a.caches": False, "model.heads[0].calls": True, "model.heads[1].calls": False,
        "model.heads0": False, "loader.seen": True, "loaders": False, "": False,
    }.items():  # fmt: skip
        assert ledger.forgets(leaf) is is_so, leaf
        assert bool(ledger.tell(f"{leaf} moves", leaf=leaf)) is not is_so
    assert "model.a.cache" in ledger.forgotten
    assert "model.cache" not in ledger.forgotten
