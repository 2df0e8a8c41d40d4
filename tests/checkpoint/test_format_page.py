"""docs/format.md says what the code does, and fits one screen."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from lastwords.checkpoint.entries import FileEntry, LocalEntry, UnitEntry
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.manifest import Manifest
from lastwords.checkpoint.meta import MANIFEST_FORMAT

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", [Manifest, FileEntry, UnitEntry, LocalEntry, TensorSpec])
def test_every_field_is_explained(kind: type) -> None:
    names = [{"said": "meta"}.get(field.name, field.name) for field in fields(kind)]
    missing = [name for name in names if f"`{name}`" not in PAGE]
    assert not missing


def test_the_version_is_the_code_s() -> None:
    assert PAGE.startswith(f"# Format of a checkpoint, version {MANIFEST_FORMAT}\n")


def test_the_page_fits_one_screen() -> None:
    assert PAGE.count("\n") <= 60
