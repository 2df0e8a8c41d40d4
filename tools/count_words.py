"""Counts what there is to read: python tools/count_words.py [COMMIT], beside the working tree.

A word has a letter or a digit; code blocks are not counted. Docstrings are those of the product's modules.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_THE_PRODUCT = ("tests", "bench", "demo", "tools", "examples", "build")
FENCED = re.compile(r"^\s*```.*?^\s*```$", flags=re.MULTILINE | re.DOTALL)


def words(text: str) -> int:
    return sum(1 for word in FENCED.sub("", text).split() if re.search(r"\w", word))


def docstrings(source: str) -> str:
    """Of modules, classes and functions, and the texts below constants."""
    alone = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    return "\n".join(node.value for node in alone if isinstance(node, ast.Constant) and isinstance(node.value, str))


def counts(root: Path) -> dict[str, tuple[int, int]]:
    """What -> files, words."""
    tracked = [path.relative_to(root) for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    product = [path for path in tracked if path.suffix == ".py" and path.parts[0] not in NOT_THE_PRODUCT
               and not any(part.startswith(".") or part == "_pb" for part in path.parts)]  # fmt: skip
    pages = [path for path in tracked if path.suffix == ".md"]
    groups = {
        "README and pages": [path for path in pages if path.as_posix() == "README.md" or path.parts[:-1] == ("docs",)],
        "ADRs": [path for path in pages if path.parts[:-1] == ("docs", "adr")],
    }
    of = {
        name: (len(paths), sum(words((root / path).read_text("utf-8")) for path in paths))
        for name, paths in groups.items()
    }
    of["docstrings"] = (len(product), sum(words(docstrings((root / path).read_text("utf-8"))) for path in product))
    return of


def at(commit: str, directory: Path) -> Path:
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(directory, filter="data")
    return directory


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        trees = {commit: at(commit, Path(directory)) for commit in sys.argv[1:2]} | {"now": ROOT}
        for name, tree in trees.items():
            for what, (files, total) in counts(tree).items():
                print(f"{name:>10}  {what:<16} {files:>4} files {total:>8,} words")


if __name__ == "__main__":
    main()
