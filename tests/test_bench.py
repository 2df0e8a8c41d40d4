"""Benchmarks that measure the machine's own limits do not lose their figures to a race of their own."""

from __future__ import annotations

import ast
import contextlib
import functools
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lastwords
from bench import incident, scale
from bench.peers.job import Update
from bench.peers.verdict import Kill, first_difference, verdict
from lastwords.checkpoint import load
from lastwords.checkpoint.manifest import read_manifest


@pytest.mark.process
def test_bare_round_trips_ask_every_process_however_late_a_thread_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_and_lose_the_processor(thread: threading.Thread, *arguments: Any) -> None:
        start(thread, *arguments)
        if thread.name.endswith("(listen)"):
            threading.Event().wait(0.3)

    monkeypatch.setattr(threading.Thread, "start", start_and_lose_the_processor)
    assert len(incident.round_trips_ms(busy=0, count=3)) == 3


def test_the_copies_of_one_part_are_as_if_every_rank_had_written_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scale.measure(12, 400, tmp_path)
    assert "save: 12" in capsys.readouterr().out
    path = load.latest(tmp_path)
    assert path is not None
    assert load.verify(path) == []
    assert read_manifest(path).holders_of("u11") == (11,)


ROOT = Path(__file__).parent.parent


def _scripts(text: str) -> Iterator[ast.AST]:
    """A file, and the scripts that it has in strings."""
    yield (tree := ast.parse(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import " in node.value:
            with contextlib.suppress(SyntaxError):
                yield ast.parse(textwrap.dedent(node.value))


def _taken(text: str) -> Iterator[tuple[str, str]]:
    """Module and name of what a file takes from the product and from the tests."""
    for node in (node for script in _scripts(text) for node in ast.walk(script)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("lastwords", "tests"):
            yield from ((str(node.module), one.name) for one in node.names if one.name != "*")


@functools.cache
def _top_level(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    taken = {one.asname or one.name.split(".")[0] for node in imports for one in node.names}
    return found | taken | {node.id for node in names}


def _is_there(module: str, name: str) -> bool:
    """Read and not imported, where it can be: some modules take seconds, and some need what is not installed."""
    file = ROOT.joinpath(*(["src", *module.split(".")] if module.startswith("lastwords") else module.split(".")))
    own = [path for path in (file.with_suffix(".py"), file / "__init__.py") if path.exists()]
    below = any(path.exists() for path in (file / f"{name}.py", file / name))
    lazy = module == "lastwords" and name in lastwords.__all__
    return below or lazy or any(name in _top_level(path) for path in own)


@pytest.mark.ci
def test_files_take_only_names_that_are_there() -> None:
    texts = [path.read_text(encoding="utf-8") for folder in ("bench", "demo", "tools", "examples", "tests") for path in
             (ROOT / folder).rglob("*.py")]  # fmt: skip
    assert sorted({taken for text in texts for taken in _taken(text) if not _is_there(*taken)}) == []
    wrong = [
        f"from {module} import gone" for module in ("lastwords.clock", "lastwords", "tests.patience", "tests.gone")
    ]
    wrong += ["script = 'from ' 'tests.patience ' 'import gone'"]
    assert [_is_there(*taken) for text in wrong for taken in _taken(text)] == [False] * 5


CALLS_MAX = 145
"""On the training thread; each costs half a microsecond, and more where it is not in the processor's cache."""


@pytest.mark.process
def test_a_protected_step_calls_few_functions() -> None:
    command = [sys.executable, str(ROOT / "bench/step_overhead.py"), "--calls"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, cwd=ROOT).stdout
    assert 50 < int(said.split(maxsplit=1)[0]) <= CALLS_MAX


KILLED_MONO_NS = 1_000_000_000
VICTIM_PID = 102


KILL = Kill(2, VICTIM_PID, 0, KILLED_MONO_NS, 0, durable=True)


def updates(steps: range, pids: list[int], first_mono_ns: int, ranks: int = 4) -> list[Update]:
    """A step every 100 ms; a line of each process, a millisecond after the one before."""
    return [
        Update(first_mono_ns + number * 100_000_000 + place * 1_000_000, pid, place, step, ranks, loss=step)
        for number, step in enumerate(steps)
        for place, pid in enumerate(pids)
    ]


def before_the_kill() -> list[Update]:
    return updates(range(1, 6), [100, 101, 102, 103], 500_000_000)


def test_a_rank_that_is_replaced_alone_loses_no_update_and_keeps_three_processes() -> None:
    log = before_the_kill() + updates(range(6, 9), [100, 101, 200, 103], 2_000_000_000)
    reference = {(update.rank, update.step): update for update in log}
    found = verdict(log, KILL, None, reference)
    assert (found["full_s"], found["fewer_s"]) == (1.003, None)
    assert (found["updates_lost"], found["pids_kept"], found["first_difference"]) == (0, 3, None)
    assert found["steps_compared"] == 3


def test_a_restart_from_an_older_checkpoint_loses_the_updates_since() -> None:
    log = before_the_kill() + updates(range(4, 9), [200, 201, 202, 203], 3_000_000_000)
    found = verdict(log, KILL, None, {})
    assert (found["full_s"], found["updates_lost"], found["pids_kept"]) == (2.003, 2, 0)
    assert found["steps_compared"] == 0


def test_survivors_that_go_back_to_a_checkpoint_lose_updates_too() -> None:
    log = before_the_kill() + updates(range(5, 9), [100, 101, 103, 104], 3_000_000_000)
    found = verdict(log, KILL, None, {})
    assert (found["updates_lost"], found["pids_kept"]) == (1, 3)


def test_an_update_that_was_running_when_the_rank_died_is_no_recovery() -> None:
    running = updates(range(6, 7), [100, 101, 103], 1_001_000_000)
    log = before_the_kill() + running + updates(range(7, 9), [100, 101, 200, 103], 2_000_000_000)
    found = verdict(log, KILL, None, {})
    assert (found["full_s"], found["updates_lost"]) == (1.003, 0)


def test_steps_with_fewer_ranks_are_counted_until_all_are_back() -> None:
    log = before_the_kill() + updates(range(6, 8), [100, 101, 103], 1_500_000_000, ranks=3)
    log += updates(range(8, 10), [100, 101, 200, 103], 2_000_000_000)
    found = verdict(log, KILL, None, {})
    assert (found["fewer_s"], found["full_s"], found["steps_with_fewer"]) == (0.502, 1.003, 2)


def test_of_several_kills_in_one_run_each_has_its_own_updates() -> None:
    log = before_the_kill() + updates(range(4, 9), [200, 201, 202, 203], 3_000_000_000)
    log += updates(range(9, 12), [200, 201, 300, 203], 6_000_000_000)
    after = Kill(2, 202, 3_000_000_000, 5_000_000_000, 0, durable=True)
    first, second = verdict(log, KILL, after, {}), verdict(log, after, None, {})
    assert (first["updates_lost"], first["pids_kept"]) == (2, 0)
    assert (second["killed_at_step"], second["updates_lost"], second["pids_kept"]) == (8, 0, 3)


def test_a_survivor_that_is_ended_later_is_not_kept() -> None:
    running = updates(range(6, 7), [100, 101, 103], 1_001_000_000)
    log = before_the_kill() + running + updates(range(6, 9), [200, 201, 202, 203], 3_000_000_000)
    found = verdict(log, KILL, None, {})
    assert (found["full_s"], found["pids_kept"]) == (2.003, 0)


def test_a_loss_that_differs_on_one_rank_is_found_and_a_repeated_step_counts_as_it_was_repeated() -> None:
    log = before_the_kill()
    reference = {(update.rank, update.step): update for update in log}
    assert first_difference(log, reference) is None
    other = Update(KILLED_MONO_NS, 200, rank=2, step=4, ranks=4, loss=-1)
    assert first_difference([*log, other], reference) == 4
    assert first_difference([*log, other, reference[2, 4]], reference) is None
