"""The user's code has to be the same on all ranks; its files are listed only where a digest is new."""

from __future__ import annotations

from lastwords.launcher.core import LauncherCore
from lastwords.launcher.events import Begun, Effect, Ended, Enter, Start, Stop, Waiting
from lastwords.launcher.versions import Ask, Sources

KILLED = -9
FILES = {"model.py": "one", "data.py": "one"}


def started(*ranks: int) -> LauncherCore:
    """All train with the same files."""
    core = LauncherCore(ranks)
    effects = [effect for rank in ranks for effect in core.handle(Waiting(rank, sources="old"), 0.0)]
    assert effects == [Ask(ranks[0])]
    assert core.handle(Sources(ranks[0], FILES), 0.0) == [Enter(0)]
    for rank in ranks:
        core.handle(Begun(rank), 0.0)
    return core


def replaced(core: LauncherCore, rank: int, version: str) -> list[Effect]:
    assert core.handle(Ended(rank, KILLED), 0.0) == [Start(rank)]
    return core.handle(Waiting(rank, sources=version), 0.0)


def test_of_ranks_with_the_same_files_one_lists_them_once_for_the_whole_job() -> None:
    core = started(0, 1, 2)
    assert replaced(core, 1, "old") == []
    assert core.handle(Waiting(0, 5, sources="old"), 0.0) == []
    assert core.handle(Waiting(2, 5, sources="old"), 0.0) == [Enter(1, step=5)]


def test_a_replacement_that_runs_another_version_of_the_script_stops_the_job() -> None:
    core = started(0, 1)
    assert replaced(core, 1, "new") == [Ask(1)]
    assert core.handle(Waiting(0, 5, sources="old"), 0.0) == [], "nobody enters before they are compared"
    (stop,) = core.handle(Sources(1, {"more.py": "new", "model.py": "other"}), 0.0)
    assert isinstance(stop, Stop)
    assert stop.failure is not None
    assert "model.py" in stop.failure


def test_a_rank_that_has_imported_more_or_less_than_the_others_is_none_of_another_version() -> None:
    core = started(0, 1)
    assert replaced(core, 1, "more") == [Ask(1)]
    assert core.handle(Waiting(0, 5, sources="old"), 0.0) == []
    assert core.handle(Sources(1, {"more.py": "new", "model.py": "one"}), 0.0) == [Enter(1, step=5)]


def test_where_the_rank_that_was_asked_dies_the_next_one_is_asked() -> None:
    core = LauncherCore((0, 1, 2))
    for rank in (0, 1, 2):
        core.handle(Waiting(rank, sources="old"), 0.0)
    assert core.handle(Sources(0, FILES), 0.0) == [Enter(0)]
    for rank in (0, 1, 2):
        core.handle(Begun(rank), 0.0)
    for rank in (1, 2):
        core.handle(Ended(rank, KILLED), 0.0)
    assert core.handle(Waiting(1, sources="new"), 0.0) == [Ask(1)]
    assert core.handle(Waiting(2, sources="new"), 0.0) == []
    assert core.handle(Ended(1, KILLED), 0.0)[0] == Ask(2)
    assert core.handle(Sources(1, {"model.py": "other"}), 0.0) == [], "of a process that has ended"
    (stop,) = core.handle(Sources(2, {"model.py": "other"}), 0.0)
    assert isinstance(stop, Stop)
