"""Hooks of mkdocs (mkdocs.yml): README.md is the front page, and links that leave docs/ become plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    readme = readme.replace("[中文](README.zh.md)\n", "")
    front = LINK.sub(lambda found: _from_docs(found[0], found[1], found[2]), readme).replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=front))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return LINK.sub(lambda found: found[1] if found[2].startswith("../") else found[0], markdown)


def _from_docs(link: str, text: str, target: str) -> str:
    """A link of README.md as one of a page in docs/."""
    if re.match(r"[a-z]+:|#", target):
        return link
    return f"[{text}]({target.removeprefix('docs/')})" if target.startswith("docs/") and target != "docs/adr/" else text
