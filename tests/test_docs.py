"""The pages tell the truth where a machine can check it: links, commands, settings, exit codes, width."""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap
from pathlib import Path

import pytest

import lastwords
from lastwords.cli.main import ExitCode, build_parser
from lastwords.optim_wrapper.launch.config import Config, variables
from lastwords.processor.departure import EXIT_NOT_SAVED, EXIT_SAVED
from tools.count_words import words

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/*/README.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS, _, SETTINGS = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8").partition("## Settings")
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
README_BYTES_MAX = 10_000
"""Three short pages. What does not fit is reference material and belongs in docs/."""
PAGES_MAX, WORDS_MAX = 16, 30_000
"""A guide, not a book. Words of README.md and the pages of docs/, without code blocks."""
WIDTH_MAX = 120
WIDER_THAN_ALLOWED = (
    "docs/format.md",
    "tests/zoo/README.md",
    "docs/benchmarks.md",
    "docs/adr/",
)
"""format.md has to fit on a screen of 60 lines."""


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page if not name else (page.parent / name).resolve()
        if not path.exists():
            broken.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(path.read_text(encoding="utf-8")):
            broken.append(f"{target}: no such heading")
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_inside_the_project_leads_somewhere(page: Path) -> None:
    assert not broken_links(page, page.read_text(encoding="utf-8"))


def test_a_link_that_leads_nowhere_is_noticed() -> None:
    text = "[a](missing.md) [b](README.md#nothing-like-this) [c](https://example.org/) [d](README.md#what-it-costs)"
    found = broken_links(ROOT / "README.md", text)
    assert found == ["missing.md: no such file", "README.md#nothing-like-this: no such heading"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_of_python_is_python_and_uses_names_that_exist(page: Path) -> None:
    for block in re.findall(
        r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    ):
        tree = ast.parse(textwrap.dedent(block))
        named = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lastwords"
        }
        assert named <= {*lastwords.__all__, "integrations"}, named - {*lastwords.__all__}


def missing_files(table: str) -> list[str]:
    """Files and folders that a table names and that do not exist; a name without a folder lies in that of the last."""
    missing = []
    for row in table.splitlines():
        folder = Path()
        for name in re.findall(r"`([\w/]+\.(?:py|proto|txt)|[\w/]+/)`", row):
            path = Path(name)
            folder = path if name.endswith("/") else path.parent if "/" in name else folder
            if not (ROOT / (path if name.endswith("/") else folder / path.name)).exists():
                missing.append(f"{name}: not in {folder}/")
    return missing


def test_every_file_in_the_table_of_what_to_change_where_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.split("## Where to change what")[1].split("## Life of a step")[0]
    assert table.count(".py`") > 80
    assert not missing_files(table)


def test_a_file_that_is_not_where_a_table_says_is_noticed() -> None:
    right = "| x | `liveness/` (sources), `controller/core.py`, `words.py`; `docs/adr/` |"
    wrong = "| x | `controller/core.py`, `stay.py`, `launcher/host.py`, `processor/none/` |"
    assert missing_files(f"{right}\n{wrong}") == [
        "stay.py: not in controller/",
        "processor/none/: not in processor/none/",
    ]


def test_the_two_commands_are_on_the_first_screen_and_in_the_makefile() -> None:
    first_screen = "\n".join(README.splitlines()[:25])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test"):
        assert f"make {command} " in first_screen
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE)


def test_every_make_target_that_a_page_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(r"`make ([a-z]+)", page.read_text(encoding="utf-8")):
            assert re.search(rf"^{target}\b.*:", makefile, flags=re.MULTILINE), f"{page.name}: make {target}"


def test_every_command_that_exists_is_on_the_commands_page_and_parses() -> None:
    shown = set(re.findall(r"^lastwords ([a-z]+)( +PATH)?", COMMANDS, flags=re.MULTILINE))
    usage = build_parser().format_help()
    assert {command for command, _ in shown} == set(re.findall(r"^ {4}([a-z]+)\b", usage, flags=re.MULTILINE))
    without_json = {("run", ""), ("scheduler", ""), ("worker", ""), ("serve", ""), ("top", "")}
    of_two_paths = {("transform", ""), ("convert", ""), ("export", " PATH"), ("diff", ""), ("upload", " PATH")}
    for command, path in shown - without_json - of_two_paths:
        needed = {"prune": ["--keep", "5"], "controller": ["--recover", "somewhere"]}.get(command, [])
        build_parser().parse_args([command, *(["somewhere"] if path else []), *needed, "--json"])


def test_every_timeout_on_the_settings_page_is_one_and_has_that_default() -> None:
    config = Config.from_env(0, "127.0.0.1", 30051, "ckpt", environ={})
    parts = (config, config.controller, config.processor)
    settings = {field.name: getattr(part, field.name) for part in parts for field in dataclasses.fields(part)}
    rows = re.findall(r"^\| `LASTWORDS_([A-Z_]+_S)` \| ([0-9.]+) \|", SETTINGS, flags=re.MULTILINE)
    named = {name.lower(): float(default) for name, default in rows}
    assert named == {name: default for name, default in settings.items() if name.endswith("_s")}


def test_every_environment_variable_is_on_the_settings_page() -> None:
    assert set(variables()) == set(re.findall(r"^\| `(LASTWORDS_[A-Z_]+)` \|", SETTINGS, flags=re.MULTILINE))


def test_exit_codes_on_the_pages_are_those_of_the_code() -> None:
    for code in (EXIT_SAVED, EXIT_NOT_SAVED):
        assert f"\n| {code} | " in TROUBLESHOOTING
        assert f"{code} (" in README
    documented = re.findall(r"^\| (\d) \| ", COMMANDS, flags=re.MULTILINE)
    assert documented == [str(code.value) for code in ExitCode]


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= README_BYTES_MAX


def test_the_docs_are_short() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    assert len(pages) <= PAGES_MAX
    assert sum(words(page.read_text(encoding="utf-8")) for page in pages) <= WORDS_MAX


def too_wide(text: str) -> list[str]:
    """Lines of prose that are longer than WIDTH_MAX: neither in a table nor in a code block."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for line in prose.splitlines() if len(line) > WIDTH_MAX and not line.startswith("|")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_line_of_prose_is_too_wide(page: Path) -> None:
    if not page.relative_to(ROOT).as_posix().startswith(WIDER_THAN_ALLOWED):
        assert not too_wide(page.read_text(encoding="utf-8"))


def test_a_line_that_is_too_wide_is_noticed() -> None:
    wide = "w" * (WIDTH_MAX + 1)
    assert too_wide(f"{wide}\n| {wide} |\n```\n{wide}\n```\n") == [wide]
