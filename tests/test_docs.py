"""The pages tell the truth where a machine can check it: links, commands, settings, exit codes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lastwords.cli.main import ExitCode, build_parser
from lastwords.optim_wrapper.config import Config
from lastwords.processor.departure import EXIT_NOT_SAVED, EXIT_SAVED

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


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
    text = "[a](missing.md) [b](README.md#nothing-like-this) [c](https://example.org/) [d](README.md#settings)"
    found = broken_links(ROOT / "README.md", text)
    assert found == ["missing.md: no such file", "README.md#nothing-like-this: no such heading"]


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


def test_every_command_that_the_readme_shows_exists() -> None:
    shown = set(re.findall(r"^lastwords ([a-z]+)( +PATH)?", README, flags=re.MULTILINE))
    assert {command for command, _ in shown} == {"latest", "inspect", "verify", "groups", "status"}
    for command, path in shown:
        build_parser().parse_args([command, *(["somewhere"] if path else []), "--json"])


def test_every_setting_that_the_readme_names_is_one_and_has_that_default() -> None:
    config = Config.from_env(0, "127.0.0.1", 30051, "ckpt", environ={})
    parts = (config, config.controller, config.processor)
    settings = {field.name: getattr(part, field.name) for part in parts for field in dataclasses.fields(part)}
    rows = re.findall(r"^\| `LASTWORDS_([A-Z_]+_S)` \| ([0-9.]+) \|", README, flags=re.MULTILINE)
    named = {name.lower(): float(default) for name, default in rows}
    assert named == {name: default for name, default in settings.items() if name.endswith("_s")}


def test_exit_codes_in_the_readme_are_those_of_the_code() -> None:
    for code in (EXIT_SAVED, EXIT_NOT_SAVED):
        assert f"\n| {code} | " in README
    assert [code.value for code in ExitCode] == [0, 1, 2, 3, 4, 5]
    assert "0 fine, 1 nothing found, 2 wrong usage, 3 damaged or incomplete, 4 the" in README
