"""Names of workers: who gets them, and when they change hands. All orders of a few applications, with broken rules."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastwords.launcher.registry import SILENCE_S, Admitted, Process, Registry, Rejected
from tests import golden

HERE, THERE = "here", "there"
FIRST, SECOND, THIRD = (Process(HERE, pid, 1) for pid in (11, 12, 13))
FAR, FARTHER = Process(THERE, 21, 1), Process(THERE, 22, 1)


class Host:
    """Which processes run, as the scheduler's host knows it."""

    def __init__(self, *running: Process) -> None:
        self.running = {*running}

    def __call__(self, process: Process) -> bool | None:
        return process in self.running if process.host == HERE else None


def test_a_number_is_a_rank_and_other_names_take_what_is_free() -> None:
    registry, runs = Registry(3), Host(FIRST, SECOND, THIRD)
    assert registry.apply("2", FIRST, 3, 0.0, runs) == Admitted("2", 2, anew=True)
    assert registry.apply("left", SECOND, 3, 0.0, runs) == Admitted("left", 1, anew=True)
    assert registry.apply("", THIRD, 3, 0.0, runs) == Admitted("0", 0, anew=True)
    assert registry.apply("left", SECOND, 3, 9.0, runs) == Admitted("left", 1, anew=False), "it has come back"
    assert registry.apply("", THIRD, 3, 9.0, runs) == Admitted("0", 0, anew=False)


def refused(verdict: Admitted | Rejected, *, later: bool) -> None:
    assert isinstance(verdict, Rejected)
    assert verdict.later == later
    golden.says(verdict.why)


def test_who_is_refused_and_why() -> None:
    registry, runs = Registry(2), Host(FIRST, SECOND)
    registry.apply("0", FIRST, 2, 0.0, runs)
    refused(registry.apply("1", SECOND, 3, 0.0, runs), later=False)
    refused(registry.apply("0", SECOND, 2, 0.0, runs), later=True)
    registry.apply("1", FAR, 2, 0.0, runs)
    refused(registry.apply("7", SECOND, 2, 0.0, runs), later=False)
    refused(registry.apply("", SECOND, 2, 0.0, runs), later=True)


def test_a_process_that_is_a_rank_is_no_other_one_to_a_registry_that_knows_nothing() -> None:
    registry, runs = Registry(2), Host(FIRST, SECOND)
    assert registry.apply("beta", SECOND, 2, 0.0, runs, rank=1) == Admitted("beta", 1, anew=True)
    assert registry.apply("alpha", FIRST, 2, 0.0, runs, rank=0) == Admitted("alpha", 0, anew=True)
    refused(registry.apply("alpha", FIRST, 2, 0.0, runs, rank=1), later=False)
    anew = Registry(2)
    anew.apply("", SECOND, 2, 0.0, runs)
    refused(anew.apply("alpha", FIRST, 2, 0.0, runs, rank=0), later=False)


def verdicts(about: str) -> tuple[str, str]:
    """What the process that has a name is told if it asks again, and what another one is, in the words of the page."""
    has_it, now_s = (FAR, SILENCE_S + 1.0) if "30 s" in about else (FAR, 1.0) if "not" in about else (FIRST, 1.0)
    runs = Host(SECOND) if "has ended" in about else Host(FIRST, SECOND)
    told = []
    for process in (has_it, SECOND):
        registry = Registry(1)
        if about != "there is none":
            registry.apply("0", has_it, 1, 0.0, runs)
            member = registry.members["0"]
            member.linked, member.over, member.done = "is connected" in about, "dead" in about, "its end" in about
        verdict = registry.apply("0", process, 1, now_s, runs)
        if isinstance(verdict, Admitted):
            told.append("admitted, anew" if verdict.anew else "admitted")
        else:
            told.append("refused, later" if verdict.later else "refused, done" if verdict.done else "refused")
    return told[0], told[1]


def test_the_page_says_who_is_admitted() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
    rows = page.split("<!-- names -->")[1].split("<!-- end names -->")[0].strip().splitlines()[2:]
    assert len(rows) == 7
    for row in rows:
        about, again, other = (cell.strip() for cell in row.strip("|").split("|"))
        found = verdicts(about)
        assert (again or found[0], other) == found, about


def test_what_holds_the_connection_of_a_dead_process_open_is_not_the_process() -> None:
    """A child that it had forked, say."""
    registry, runs = Registry(1), Host(FIRST)
    registry.apply("0", FIRST, 1, 0.0, runs)
    registry.members["0"].linked = True
    assert registry.ended(0.0, runs) == []
    assert registry.ended(0.0, Host()) == [0]


def test_on_the_same_host_a_name_is_free_at_once() -> None:
    registry, runs = Registry(1), Host(FIRST)
    registry.apply("0", FIRST, 1, 0.0, runs)
    assert registry.ended(0.0, runs) == []
    runs.running = {SECOND}
    assert registry.ended(0.0, runs) == [0]
    assert registry.ended(0.0, runs) == [], "once"
    assert registry.apply("0", SECOND, 1, 0.0, runs) == Admitted("0", 0, anew=True)


def test_of_another_host_a_name_is_free_after_a_silence() -> None:
    registry, runs = Registry(1), Host()
    registry.apply("0", FAR, 1, 0.0, runs)
    registry.members["0"].linked = True
    refused(registry.apply("0", FARTHER, 1, 1e6, runs), later=True)
    registry.members["0"].linked, registry.members["0"].silent_since_s = False, 1e6
    refused(registry.apply("0", FARTHER, 1, 1e6 + SILENCE_S - 1, runs), later=True)
    assert registry.apply("0", FAR, 1, 1e6 + SILENCE_S - 1, runs) == Admitted("0", 0, anew=False)
    assert registry.ended(1e6 + SILENCE_S, runs) == [0]
    refused(registry.apply("0", FAR, 1, 1e6 + SILENCE_S, runs), later=False)
    assert registry.apply("0", FARTHER, 1, 1e6 + SILENCE_S, runs) == Admitted("0", 0, anew=True)


def test_a_process_that_has_done_its_work_is_not_waited_for() -> None:
    registry, runs = Registry(1), Host(FIRST)
    registry.apply("0", FIRST, 1, 0.0, runs)
    registry.members["0"].done = True
    assert registry.ended(1e6, Host()) == []
    verdict = registry.apply("0", SECOND, 1, 1e6, Host(SECOND))
    refused(verdict, later=False)
    assert isinstance(verdict, Rejected)
    assert verdict.done, "a supervisor has started it once more"
    refused(registry.apply("", SECOND, 1, 1e6, Host(SECOND)), later=True)


def double(registry: Registry, runs: Host) -> list[str]:
    """Ranks that two processes have, as far as each has been told, while both may run."""
    wrong = []
    for name, member in registry.members.items():
        if member.over and member.process in runs.running and member.process.host == HERE:
            wrong.append(f"{name} is over and runs")
    return wrong


def schedules(registry: Registry) -> Iterator[list[str]]:
    """Every order of applications by three processes, deaths and silences; what was wrong in each."""
    acts = [
        ("apply", "0", FIRST),
        ("apply", "0", SECOND),
        ("apply", "", THIRD),
        ("die", "", FIRST),
        ("look", "", FIRST),
    ]
    for order in itertools.permutations(acts):
        here, runs, now_s = copy.deepcopy(registry), Host(FIRST, SECOND, THIRD), 0.0
        holder: dict[int, Process] = {}
        wrong: list[str] = []
        for act, name, process in order:
            now_s += SILENCE_S / 2
            if act == "die":
                runs.running.discard(process)
            elif act == "look":
                here.ended(now_s, runs)
            elif isinstance(verdict := here.apply(name, process, 2, now_s, runs), Admitted):
                before = holder.get(verdict.rank)
                if before not in (None, process) and before in runs.running:
                    wrong.append(f"rank {verdict.rank} is {before} and {process}")
                holder[verdict.rank] = process
            wrong += double(here, runs)
        yield wrong


def test_no_rank_ever_is_two_processes_that_run() -> None:
    assert not [wrong for wrong in schedules(Registry(2)) if wrong]


class Generous(Registry):
    """Gives a name away while its process may live."""

    def _is_taken(self, *_: object) -> str | None:
        return None


def test_a_broken_rule_is_found() -> None:
    assert [wrong for wrong in schedules(Generous(2)) if wrong]


@pytest.mark.parametrize("workers", [1, 3])
def test_names_given_by_the_registry_do_not_meet_those_that_people_give(workers: int) -> None:
    registry, runs = Registry(workers), Host()
    ranks = [registry.apply("", Process(THERE, pid, 1), workers, 0.0, runs) for pid in range(workers)]
    assert [one.rank for one in ranks if isinstance(one, Admitted)] == [*range(workers)]


def test_a_nameless_worker_gets_neither_a_name_nor_a_rank_that_another_one_has() -> None:
    """The scheduler has lost its state, and whoever comes back has the rank that it had, whatever its name."""
    for names in itertools.permutations(("0", "1", "2", "a"), 2):
        for ranks in itertools.permutations(range(3), 2):
            registry, runs = Registry(3), Host()
            for name, rank in zip(names, ranks, strict=True):
                verdict = registry.apply(name, Process(THERE, rank, 1), 3, 0.0, runs, rank=rank)
                assert verdict == Admitted(name, rank, anew=True)
            [left] = {0, 1, 2}.difference(ranks)
            verdict = registry.apply("", FAR, 3, 0.0, runs)
            assert isinstance(verdict, Admitted)
            assert verdict.anew
            assert verdict.rank == left
            assert verdict.name not in names
            assert verdict.name == str(left) or str(left) in names


def test_a_nameless_worker_gets_the_lowest_of_the_ranks_whose_processes_are_dead() -> None:
    registry, runs = Registry(3), Host(SECOND)
    for name, process, rank in (("c", FIRST, 2), ("b", SECOND, 0), ("a", THIRD, 1)):
        registry.apply(name, process, 3, 0.0, runs, rank=rank)
    assert registry.apply("", FAR, 3, 0.0, runs) == Admitted("a", 1, anew=True)
    assert registry.apply("", FARTHER, 3, 0.0, runs) == Admitted("c", 2, anew=True)


def test_a_process_of_another_host_that_never_connects_is_silent_from_its_application_on() -> None:
    registry, runs = Registry(1), Host()
    registry.apply("0", FAR, 1, 100.0, runs)
    assert registry.ended(100.0 + SILENCE_S - 1, runs) == []
    assert registry.ended(100.0 + SILENCE_S, runs) == [0]
