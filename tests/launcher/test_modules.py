"""The package's own description of its modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from lastwords import launcher

FOLDER = Path(launcher.__file__).parent
PREFIX = "lastwords.launcher"


def imported(path: Path) -> Iterator[str]:
    """Modules of this package."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == PREFIX:
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PREFIX}."):
            yield str(node.module).removeprefix(f"{PREFIX}.")


def test_all_modules_are_named_and_each_imports_only_those_above_it() -> None:
    order = re.findall(r"(\w+)\.py", launcher.__doc__ or "")
    paths = {path.stem: path for path in FOLDER.glob("*.py") if path.stem != "__init__"}
    assert sorted(order) == sorted(paths)
    for name, path in paths.items():
        below = [one for one in imported(path) if order.index(one) >= order.index(name)]
        assert not below, f"{name}.py imports {below}"
