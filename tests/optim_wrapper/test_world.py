"""What ranks agree on before there is a controller."""

from __future__ import annotations

import pytest

from lastwords.optim_wrapper.launch import world


def test_each_registration_has_a_place_of_its_own_in_the_store() -> None:
    assert world.next_prefix() != world.next_prefix()


def prefixes_of_three_starts(monkeypatch: pytest.MonkeyPatch, *, store_is_torchruns: bool) -> set[str]:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(store_is_torchruns))
    found = set()
    for restart in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        monkeypatch.setattr(world, "_agreements", 0)  # a new process counts from the beginning
        found.add(world.next_prefix())
    return found


def test_workers_that_torchrun_has_restarted_do_not_find_the_words_of_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(prefixes_of_three_starts(monkeypatch, store_is_torchruns=True)) == 3


def test_nodes_whose_torchruns_have_counted_different_failures_meet_in_one_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent of the node with the failure counts it; the others only see that everybody meets again."""
    assert len(prefixes_of_three_starts(monkeypatch, store_is_torchruns=False)) == 1
