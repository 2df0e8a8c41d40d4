"""docs/format.md says what the code does, and fits one screen."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from lastwords.checkpoint.entries import FileEntry, LocalEntry, UnitEntry
from lastwords.checkpoint.format import TensorSpec
from lastwords.checkpoint.manifest import MANIFEST_FORMAT, Manifest

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", [Manifest, FileEntry, UnitEntry, LocalEntry, TensorSpec])
def test_every_field_is_explained(kind: type) -> None:
    missing = [field.name for field in fields(kind) if f"`{field.name}`" not in PAGE]
    assert not missing


def test_the_version_is_the_code_s() -> None:
    assert PAGE.startswith(f"# Format of a checkpoint, versions 1 and {MANIFEST_FORMAT}\n")


def test_the_page_fits_one_screen() -> None:
    assert PAGE.count("\n") <= 60
