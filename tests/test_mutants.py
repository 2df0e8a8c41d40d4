"""The tool that makes mutants: what it changes, that its seed decides all, and that it says what tests let pass."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tools.mutants import NEAREST_TESTS, ROOT, Mutant, drawn, mutants_of, reasons

TOY = '''"""At least one is < 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 1

__all__ = ["least" + "most"]


def least(numbers: list[int], extra: int | None = None, *, strict: bool = False) -> int:
    """The least of them, if it is < 9."""
    found = sorted(numbers)
    if extra is not None and extra not in found:
        found += [extra]
        found.sort()
    log.info("%d", 1 + 1)
    if not found or (
        strict
        and any(one < 0 for one in found)
    ):
        raise ValueError(f"{len(found) - 1} numbers are too few: 0 < 1")
    return min(found) if found[0] <= 9 else found[-1]
'''


def changes() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for mutant in mutants_of(TOY, "toy.py"):
        found.setdefault(mutant.before.strip(), set()).add(mutant.after.strip())
    return found


def test_what_is_changed() -> None:
    whole = "if extra is not None and extra not in found:"
    assert changes() == {
        "def least(numbers: list[int], extra: int | None = None, *, strict: bool = False) -> int:": {
            "def least(numbers: list[int], extra: int | None = None, *, strict: bool = True) -> int:"
        },
        "found = sorted(numbers)": {"found = sorted(numbers, reverse=True)"},
        whole: {
            "if extra is None and extra not in found:",
            "if extra is not None and extra in found:",
            "if extra is not None or extra not in found:",
            "if True and extra not in found:",
            "if extra is not None and True:",
            "if (not (extra is not None and extra not in found)):",
            "if True:",
            "if False:",
        },
        "found += [extra]": {"pass", "found = [extra]"},
        "found.sort()": {"pass"},
        "if not found or (": {"if bool(found) or (", "if not found and (", "if False or ("},
        "strict": {"True"},
        "and any(one < 0 for one in found)": {
            "or any(one < 0 for one in found)",
            "and all(one < 0 for one in found)",
            "and any(one <= 0 for one in found)",
            "and any(one < 1 for one in found)",
            "and any(one < (-1) for one in found)",
            "and True",
        },
        "return min(found) if found[0] <= 9 else found[-1]": {
            "return None",
            "return max(found) if found[0] <= 9 else found[-1]",
            "return min(found) if found[-1] <= 9 else found[-1]",
            "return min(found) if found[0] < 9 else found[-1]",
            "return min(found) if found[0] <= 10 else found[-1]",
            "return min(found) if found[0] <= 8 else found[-1]",
            "return min(found) if found[0] <= 9 else found[0]",
            "return min(found) if True else found[-1]",
            "return min(found) if False else found[-1]",
        },
    }


@pytest.mark.ci
@pytest.mark.parametrize("file", NEAREST_TESTS)
def test_of_each_file_there_are_enough_and_each_changes_one_line_and_compiles(file: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    mutants = mutants_of(source, file)
    assert len(mutants) == len(set(mutants)) >= 100
    assert drawn(mutants, 25, 1) == drawn(mutants_of(source, file), 25, 1)
    assert drawn(mutants, 25, 1) != drawn(mutants, 25, 2)
    for mutant in drawn(mutants, 25, 3):
        changed = mutant.applied(source)
        compile(changed, file, "exec")
        pairs = list(zip(source.split("\n"), changed.split("\n"), strict=True))
        assert [pair for pair in pairs if pair[0] != pair[1]] == [(mutant.before, mutant.after)]
    for tests in NEAREST_TESTS[file]:
        assert (ROOT / tests.partition("::")[0]).exists()


def test_every_reason_is_of_a_mutant_that_is_made() -> None:
    made = {
        (mutant.file, mutant.before.strip(), mutant.after.strip())
        for file in NEAREST_TESTS
        for mutant in mutants_of((ROOT / file).read_text(encoding="utf-8"), file)
    }
    listed = json.loads((ROOT / "tests/equivalent_mutants.json").read_text(encoding="utf-8"))
    assert len(reasons()) == len(listed)
    assert not set(reasons()) - made, "take these off the list"
    assert all(reasons().values())


JUDGE = """
import sys
from pathlib import Path
from tools import mutants
root = Path(sys.argv[1])
try:
    for mutant, verdict, how in mutants.judged("toy.py", ("test_toy.py",), 1, 99, root=root, package=""):
        print(mutant.after.strip(), verdict, how, sep="|")
except mutants.Broken as error:
    sys.exit(f"Broken: {error}")
"""


def judged(root: Path, toy: str, test: str) -> subprocess.CompletedProcess[str]:
    (root / "toy.py").write_text(toy)
    (root / "test_toy.py").write_text(test)
    before = sorted(root.iterdir())
    done = subprocess.run(
        [sys.executable, "-B", "-c", JUDGE, str(root)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert sorted(root.iterdir()) == before
    assert (root / "toy.py").read_text() == toy
    return done


@pytest.mark.thorough
@pytest.mark.process
def test_a_mutant_that_the_tests_notice_is_killed_and_another_one_survives(tmp_path: Path) -> None:
    toy = "def up(n):\n    while n < 9:\n        n = 100\n    return n\n"
    done = judged(tmp_path, toy, "import toy\n\n\ndef test_it():\n    assert toy.up(3) == 100\n")
    assert done.returncode == 0, done.stderr
    failed, survived = "killed|test_toy.py::test_it", "survived|"
    assert dict(line.split("|", 1) for line in done.stdout.splitlines()) == {
        "while n <= 9:": survived,
        "while n < 10:": survived,
        "while n < 8:": survived,
        "while True:": "killed|exit code -9",  # no more time
        "while False:": failed,
        "n = 101": failed,
        "n = 99": failed,
        "return None": failed,
    }


@pytest.mark.process
def test_a_mutant_that_cannot_be_imported_is_killed(tmp_path: Path) -> None:
    done = judged(tmp_path, "TWO = 2 / 1\n", "import toy\n\n\ndef test_it():\n    assert toy.TWO != 3\n")
    assert done.returncode == 0, done.stderr
    assert dict(line.split("|", 1) for line in done.stdout.splitlines()) == {
        "TWO = 2 / 2": "survived|",
        "TWO = 2 / 0": "killed|test_toy.py",
        "TWO = 3 / 1": "killed|test_toy.py::test_it",
        "TWO = 1 / 1": "survived|",
    }


@pytest.mark.process
@pytest.mark.parametrize(
    "test", ["def test_it():\n    pass\n", "import toy\n\ndef test_it():\n    assert toy.up(3) == 8\n", ""],
    ids=["not imported", "red", "no test"],
)  # fmt: skip
def test_tests_that_say_nothing_are_refused(tmp_path: Path, test: str) -> None:
    done = judged(tmp_path, "def up(n):\n    return max(n, 9)\n", test)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Broken: toy.py")


@pytest.mark.process
def test_tests_that_are_red_once_they_have_run_are_refused(tmp_path: Path) -> None:
    """All mutants would be killed by what is left behind."""
    root = tmp_path / "toy"
    root.mkdir()
    test = "import os\nimport toy\n\n\ndef test_it():\n    assert toy.up(3) == 9\n    os.mkdir('../left')\n"
    done = judged(root, "def up(n):\n    return max(n, 9)\n", test)
    assert done.returncode == 1
    assert done.stderr.startswith("Broken: toy.py")


def test_a_mutant_is_written_with_its_place() -> None:
    assert str(Mutant("a/b.py", 3, "    if x:", "    if True:")) == "a/b.py:3: if x: -> if True:"


def test_a_seed_does_not_draw_the_same_lines_first() -> None:
    lines = Counter(mutant.line for seed in range(200) for mutant in drawn(mutants_of(TOY, "toy.py"), 3, seed))
    assert len(lines) == len({mutant.line for mutant in mutants_of(TOY, "toy.py")})
