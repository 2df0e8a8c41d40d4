"""README.zh.md is README.md in Chinese: the same code, the same tables, the same numbers, names and links."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def code(text: str) -> list[tuple[str, list[str]]]:
    """Language and lines of each block, without comments, which are translated."""
    return [
        (language, [re.sub(r"\s+#.*$", "", line) for line in inside.splitlines()])
        for language, inside in FENCED.findall(text)
    ]


def tokens(text: str) -> Counter[str]:
    """What no translation changes: code spans, targets of links, numbers."""
    spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", text)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    numbers = re.findall(r"\d+(?:\.\d+)*", re.sub(r"`[^`]+`|\]\([^)]+\)", " ", text))
    return Counter([*(re.sub(r"\s+", " ", span) for span in spans), *targets, *numbers])


def tables(text: str) -> list[list[Counter[str]]]:
    """Of each table the tokens of each row."""
    found = re.findall(r"(?:^\|.*\n)+", FENCED.sub("", text), flags=re.MULTILINE)
    return [[tokens(row) for row in table.splitlines()] for table in found]


def sections(text: str) -> list[tuple[int, Counter[str]]]:
    """Of each section the number of its list items, and its tokens outside code and tables, if there is no language."""
    prose = re.sub(r"^\|.*\n", "", FENCED.sub("", text), flags=re.MULTILINE)
    prose = re.sub(r"^\[\S+\]\(README\S*\)\n", "", prose, flags=re.MULTILINE)
    parts = re.split(r"^#+ .*$", prose, flags=re.MULTILINE)
    return [(len(re.findall(r"^(?:- |\d\. )", part, flags=re.MULTILINE)), tokens(part)) for part in parts]


def differences(english: str, chinese: str) -> list[str]:
    found = []
    for what, of in (("code", code), ("tables", tables), ("sections", sections)):
        here, there = of(english), of(chinese)  # type: ignore[operator]
        if len(here) != len(there):
            found.append(f"{len(here)} {what} in README.md, {len(there)} in README.zh.md")
        found += [f"{what}: {a} in README.md, {b} in README.zh.md" for a, b in zip(here, there, strict=False) if a != b]
    return found


def test_the_readme_in_chinese_is_in_step() -> None:
    assert not differences(ENGLISH, CHINESE)


def test_each_leads_to_the_other() -> None:
    assert "](README.zh.md)" in ENGLISH
    assert "](README.md)" in CHINESE


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("-m demo.train --is_recover 1", "-m demo.train --is_recover 2"),
        ("tft.step_end()  ", "tft.end()  "),
        ("| 13 MiB |", "| 14 MiB |"),
        ("| Which commands, settings and metrics are there? | [operating](docs/operating.md) |\n", ""),
        ("`--max-restarts`", "`--restarts`"),
        ("docs/layouts.md#declaring-a-layout", "docs/layouts.md#other"),
        ("whatever `--shutdown-timeout` says", "whatever it says"),
        ("the\nwrapper then still adds 7 µs", "the\nwrapper then still adds 9 µs"),
        ("code 75 (saved)", "code 74 (saved)"),
    ],
)
def test_a_change_of_one_alone_is_noticed(right: str, wrong: str) -> None:
    assert right in ENGLISH
    assert differences(ENGLISH.replace(right, wrong), CHINESE)
