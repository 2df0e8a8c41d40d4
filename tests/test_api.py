"""What `import lastwords` gives: every name that the documentation tells users of, with its type."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import lastwords
from lastwords import errors
from lastwords.compat import mindspore

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_exception_that_a_caller_may_see_is_public() -> None:
    ours = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert ours - set(lastwords.__all__) == set()


def test_every_exception_that_a_page_names_can_be_caught_from_the_package() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(\w+Error)`", page.read_text(encoding="utf-8"))}
    known = {name for name in named if hasattr(lastwords, name) or hasattr(builtins, name)}
    assert named - known == set()
    assert "StrategyError" in named


@pytest.mark.ci
def test_exceptions_are_defined_in_one_module() -> None:
    """A private one never leaves its own module."""
    elsewhere: dict[str, str] = {}
    for path in Path(lastwords.__file__).parent.glob("*/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and not node.name.startswith("_"):
                elsewhere[node.name] = path.name
    assert elsewhere == {}


def test_each_name_is_loaded_from_where_type_checkers_see_it() -> None:
    tree = ast.parse(Path(lastwords.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == {
        name: lastwords._WHERE.get(name, "lastwords.errors") for name in lastwords.__all__ if name != "__version__"
    }


def test_what_a_public_object_holds_is_public() -> None:
    """Or a caller could not name the type of a field."""

    def kinds(annotation: object) -> Iterator[type]:
        parts = typing.get_args(annotation)
        if inspect.isclass(annotation) and not parts:
            yield annotation
        for part in parts:
            yield from kinds(part)

    public = [kind for name in lastwords.__all__ if dataclasses.is_dataclass(kind := getattr(lastwords, name))]
    held = {one for kind in public for hint in typing.get_type_hints(kind).values() for one in kinds(hint)}
    ours = {one.__name__ for one in held if one.__module__.startswith("lastwords.")}
    assert ours - set(lastwords.__all__) == set()
    assert "Drilled" in ours


def test_upstream_s_names_are_those_of_the_package() -> None:
    for name in mindspore.__all__:
        assert getattr(mindspore, name) is getattr(lastwords, name)


SCRIPT = """
import lastwords
import torch

model = torch.nn.Linear(2, 2)
optimizer = lastwords.OptTFTWrapper(torch.optim.SGD(model.parameters(), 0.1))
tft = lastwords.TFTRegister(0, "127.0.0.1", 30051, "ckpt", model=model, optimizer=optimizer)
with tft:
    point = tft.resume()
    for epoch, step, batch in tft.steps([1, 2], epochs=1):
        reveal_type(step)
try:
    lastwords.merge_pipeline_strategys("a", "b")
except lastwords.StrategyError as error:
    reveal_type(error)
reveal_type(point)
lastwords.TFTRegister(0, "127.0.0.1", "30051", "ckpt", model=model, optimizer=optimizer)
lastwords.no_such_name
"""


@pytest.mark.process
@pytest.mark.thorough
def test_an_editor_sees_the_types_of_a_user_s_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(script)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240).stdout
    revealed = re.findall(r'Revealed type is "([^"]*)"', told)
    assert [kind.replace("builtins.", "").split(".")[-1] for kind in revealed] == [
        "int",
        "StrategyError",
        "ResumePoint | None",
    ], told
    mistakes = re.findall(r"error: .*\[([a-z-]+)\]", told)
    assert mistakes == ["arg-type", "attr-defined"], told
