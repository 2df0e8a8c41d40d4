"""Private names of other libraries: what nobody has looked at is refused by name."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from pathlib import Path

import pytest

from lastwords.errors import ConfigError
from lastwords.integrations import pins
from tests import golden

SOURCE = "class Trainer:\n    def train(self) -> int:\n        return 1\n"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "a_library_of_ours.py"
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.3.1")
    monkeypatch.delitem(sys.modules, file.stem, raising=False)
    yield file
    sys.modules.pop(file.stem, None)


def test_what_is_known_is_taken(library: Path) -> None:
    known = pins.digest(f"{library.stem}:Trainer.train")
    pins.check("a-library", ">=2.3,<2.4", {f"{library.stem}:Trainer.train": known, f"{library.stem}:Trainer": ""})


def test_another_version_is_refused(library: Path) -> None:
    with golden.raises(ConfigError):
        pins.check("a-library", ">=2.4", {})


def test_another_line_inside_of_the_range_is_refused_by_name(library: Path) -> None:
    known = pins.digest(f"{library.stem}:Trainer.train")
    sys.modules.pop(library.stem)
    library.write_text(SOURCE.replace("1", "22"))
    with golden.raises(ConfigError):
        pins.check("a-library", ">=2.3", {f"{library.stem}:Trainer.train": known})


def test_indentation_is_not_looked_at(library: Path) -> None:
    known = pins.digest(f"{library.stem}:Trainer.train")
    sys.modules.pop(library.stem)
    library.write_text(SOURCE.replace("    ", "  "))
    pins.check("a-library", ">=2.3", {f"{library.stem}:Trainer.train": known})


@pytest.mark.parametrize("name", ["Trainer.fit", "Other"])
def test_what_is_gone_is_refused_by_name(library: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        pins.check("a-library", ">=2.3", {f"{library.stem}:{name}": ""})


@pytest.mark.parametrize("adaptor", ["hf", "lightning", "accelerate_data"])
def test_an_adaptor_imports_modules_alone(adaptor: str) -> None:
    """A name that another version lacks would end in an ImportError, before that version is refused."""
    tree = ast.parse((Path(pins.__file__).parent / f"{adaptor}.py").read_text())
    found = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module is not None]
    libraries = [one for one in found if one.module.partition(".")[0] in ("accelerate", "lightning", "transformers")]
    names = [alias.name for one in libraries for alias in one.names]
    assert names
    assert [name for name in names if name != name.lower() or name.startswith("_")] == []
