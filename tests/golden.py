"""Messages for people, compared in full with messages.txt, so that a better sentence is one changed line of that file.

`make messages` rewrites it: review the difference. `make messages ARGS=tests/checkpoint` runs those tests alone.
After a conflict in messages.txt take either side, and run it. A test calls this from its own thread and process, and in
a fixed order: its second message has the entry `TEST #2`. Times, sizes of this machine and tables that are wrapped are
no golden messages.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).resolve().parents[1]
MESSAGES = Path(__file__).with_name("messages.txt")
RECORD = "LASTWORDS_RECORD_MESSAGES"
INDENT = "    "
VARYING = (
    (re.compile(re.escape(tempfile.gettempdir()) + r"/tmp\w{8}"), "<tmp>"),
    (re.compile(re.escape(str(ROOT))), "<root>"),
    (re.compile(rf"\b{re.escape(socket.gethostname())}\b"), "<host>"),
    (re.compile(r"\b0x[0-9a-f]+\b"), "<address>"),
    (re.compile(r"(?<=json-)[0-9a-f]{8}\b"), "<hex>"),
    (re.compile(r"(?<=/lastwords-)\d+(?=-)"), "<uid>"),
    (re.compile(r"\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{8,}\b"), "<hex>"),
    (re.compile(r"(?<=\d\.\d:)\d{2,5}\b|(?<=\bport )\d{2,5}\b|(?<=\bsport = :)\d{2,5}\b"), "<port>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b"), "<time>"),
    (re.compile("─{2,}"), "──"),
    (re.compile(r"(?<=\bprocess )\d{3,}\b|(?<=\bkill -9 )\d{3,}\b|(?<=/proc/)\d+\b|(?<=, not to )\d{3,}\b"), "<pid>"),
)
"""What differs between two runs, two machines or two working trees -> its name in messages.txt."""


class Running:
    """The test that runs and the folder that temporary ones are in (conftest sets both), and what the test has said."""

    test = ""
    temporary = ""
    said: ClassVar[list[str]] = []


class raises:
    """`pytest.raises`; the error's class and message are the golden ones.

    No generator: its frame would be in the error's traceback, hold the error, and thereby all that the test has made.
    """

    def __init__(self, kind: type[BaseException] | tuple[type[BaseException], ...]) -> None:
        self._expected = pytest.raises(kind)

    def __enter__(self) -> pytest.ExceptionInfo:
        self._caught = self._expected.__enter__()
        return self._caught

    def __exit__(self, *ended: Any) -> bool:
        is_expected = self._expected.__exit__(*ended)
        if is_expected:
            says(self._caught.value)
        return is_expected


def says(spoken: object) -> None:
    """Compare an error, a text or several texts with the running test's next entry in messages.txt."""
    said = normalised(spoken)
    if Running.said[-1:] == [said]:
        return  # in a loop: one entry
    Running.said.append(said)
    number = f" #{len(Running.said)}" if len(Running.said) > 1 else ""
    name = Running.test + number
    if RECORD in os.environ:
        with open(os.environ[RECORD], "a", encoding="utf-8") as record:  # one write of one line, by several processes
            record.write(json.dumps([name, said]) + "\n")
        return
    golden = _golden().get(name, _golden().get(test_of(name) + number, "(no entry)"))
    assert said == golden, (
        f"{name}\nsays:\n{_indented(said)}\nin messages.txt:\n{_indented(golden)}\n"
        f"If the new message is the better one: make messages ARGS={name.partition('::')[0]}"
    )


def normalised(spoken: object) -> str:
    """The text, with names for what varies; an error begins with its class."""
    if isinstance(spoken, BaseException):
        text = f"{type(spoken).__name__}: {spoken}"
    elif isinstance(spoken, Iterable) and not isinstance(spoken, str):
        text = "\n".join(map(str, spoken))
    else:
        text = str(spoken)
    if Running.temporary:
        text = re.sub(re.escape(Running.temporary) + r"/\w+", "<tmp>", text)
    for pattern, name in VARYING:
        text = pattern.sub(name, text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


@functools.cache
def _golden() -> Mapping[str, str]:
    return parsed(MESSAGES.read_text(encoding="utf-8"))


def _indented(message: str) -> str:
    return "\n".join(INDENT + line if line else "" for line in message.splitlines())


def written(entries: Mapping[str, str]) -> str:
    """messages.txt: each entry's name, and its message indented below."""
    return "".join(f"{name}\n{_indented(message)}\n" for name, message in sorted(entries.items()))


def parsed(text: str) -> dict[str, str]:
    """The entries of messages.txt.

    >>> parsed(written({"a": "one\\n\\ntwo", "b": ""})) == {"a": "one\\n\\ntwo", "b": ""}
    True
    """
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(INDENT):
            found[line] = lines = []
        else:
            lines.append(line.removeprefix(INDENT))
    return {name: "\n".join(lines).strip("\n") for name, lines in found.items()}


def test_of(name: str) -> str:
    """File and test of an entry, without the parameters and the number."""
    return re.sub(r"(\[.*)?( #\d+)?$", "", name, flags=re.DOTALL)


def folded(entries: Mapping[str, str]) -> dict[str, str]:
    """What most cases of a test say stands once, under the test's name without parameters.

    >>> folded({"a::b[1]": "no", "a::b[2]": "no", "a::b[3]": "never", "a::b[1] #2": "yes"})
    {'a::b': 'no', 'a::b[3]': 'never', 'a::b[1] #2': 'yes'}
    """
    cases: dict[str, dict[str, str]] = {}
    for name, said in entries.items():
        number = re.search(r"( #\d+)?$", name)
        cases.setdefault(test_of(name) + (number.group() if number else ""), {})[name] = said
    found: dict[str, str] = {}
    for test, of_test in cases.items():
        usual, times = Counter(of_test.values()).most_common(1)[0]
        if times > 1:
            found[test] = usual
        found |= {name: said for name, said in of_test.items() if times == 1 or said != usual}
    return found


def without_a_test(names: Iterable[str]) -> list[str]:
    """Those of the entries whose test, or whose file, is gone."""
    return [name for name in names if test_of(name) not in _tests(name.partition("::")[0])]


@functools.cache
def _tests(file: str) -> frozenset[str]:
    path = ROOT / file
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else ()
    return frozenset(f"{file}::{node.name}" for node in nodes if isinstance(node, ast.FunctionDef))


def merged(before: Mapping[str, str], spoken: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The entries, with those of each test that has run in place of its old ones."""
    after: dict[str, str] = {}
    for name, said in spoken:
        assert after.setdefault(name, said) == said, f"{name} says two things:\n{said}\n{after[name]}"
    tests = set(map(test_of, after))
    kept = {name: said for name, said in before.items() if test_of(name) not in tests}
    for gone in without_a_test(kept):
        del kept[gone]
    return kept | folded(after)


def recorded(path: Path) -> list[tuple[str, str]]:
    """What all processes have said."""
    return [(name, said) for name, said in map(json.loads, path.read_text(encoding="utf-8").splitlines())]


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments, and write what was said; without paths, all tests that compare messages."""
    chosen = [argument for argument in arguments if (ROOT / argument.partition("::")[0]).exists()]
    every = [path for path in (ROOT / "tests").rglob("test_*.py") if "golden." in path.read_text(encoding="utf-8")]
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record")
        record.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *arguments, *([] if chosen else every)]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {RECORD: str(record)}, check=False)
        if done.returncode:
            print("A test failed: messages.txt is as it was.")
            return done.returncode
        said = recorded(record)
    before = parsed(MESSAGES.read_text(encoding="utf-8")) if chosen and MESSAGES.exists() else {}
    MESSAGES.write_text(written(merged(before, said)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
