"""Reasons against exactness: each once, and whoever has to know of new ones hears of them."""

from __future__ import annotations

from lastwords.checkpoint.reason import Reason
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
