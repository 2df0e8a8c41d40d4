"""What ranks agree on before there is a controller."""

from __future__ import annotations

import pytest

from lastwords.optim_wrapper import world


def test_each_registration_has_a_place_of_its_own_in_the_store() -> None:
    assert world.next_prefix() != world.next_prefix()


def test_workers_that_torchrun_has_restarted_do_not_find_the_words_of_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = set()
    for restart in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        monkeypatch.setattr(world, "_agreements", 0)  # a new process counts from the beginning
        found.add(world.next_prefix())
    assert len(found) == 3
