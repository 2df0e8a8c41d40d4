"""Examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import lastwords.checkpoint
import lastwords.cli
import lastwords.controller

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (lastwords.checkpoint, lastwords.cli, lastwords.controller)
    for module in pkgutil.iter_modules(package.__path__)
    if module.name != "__main__"
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    assert sum(len(test.examples) for name in MODULES for test in finder.find(importlib.import_module(name))) > 20
