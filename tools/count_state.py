"""Counts what grows with the number of cases, where it should grow with the number of ideas: state, and reasons.

    python tools/count_state.py [--rev REV] [--json]

Of `optim_wrapper` at a revision, or as the files are: functions that copy state and that put it back, places that tell
a reason, classes with many fields, names of libraries and of special classes in the code, lines.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "optim_wrapper"
FIELDS_MAX = 15
NAMES = (
    "SobolEngine", "PostLocalSGDOptimizer", "LBFGS", "SequentialLR", "GradScaler", "ZeroRedundancyOptimizer",
    "AveragedModel", "Lookahead", "SWA", "timm", "transformers", "accelerate", "lightning", "diffusers", "torch_ema",
    "schedulefree", "peft", "torchmetrics",
)  # fmt: skip
"""Of torch's special cases and of other libraries; DDP and FSDP are what the project is about."""

COPIES = re.compile(r"def (take|capture|captured|committed|tentative|copy_groups|copy)\b")
RESTORES = re.compile(r"def (restore|restored|put|put_back|load_state_dict|give_back)\b")
REASONS = re.compile(r"ledger\.tell\(|\bReason\(|reasons\.append\(|reasons \+=")


def sources(rev: str) -> dict[str, str]:
    """Path -> text of each module."""
    if not rev:
        return {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
    packed = subprocess.run(["git", "archive", rev, PACKAGE], cwd=ROOT, check=True, capture_output=True).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                found[member.name] = file.read().decode()
    return dict(sorted(found.items()))


def fields_of(text: str) -> Iterator[tuple[str, int]]:
    """Each class, and how many fields its instances have: annotated in its body, or set by `__init__`."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        found = {
            one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }
        for made in (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"):
            for inner in ast.walk(made):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    found |= {inner.attr} if isinstance(inner.value, ast.Name) and inner.value.id == "self" else set()
        yield node.name, len(found)


def without_words(text: str) -> str:
    """The code alone: no comments, no docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def count(texts: Mapping[str, str]) -> dict[str, Any]:
    """Everything, by what it is."""
    code = {path: without_words(text) for path, text in texts.items()}

    def places(pattern: re.Pattern[str]) -> dict[str, int]:
        return {path: hits for path, text in code.items() if (hits := len(pattern.findall(text)))}

    names = Counter(name for text in code.values() for name in NAMES for _ in re.findall(rf"\b{name}\b", text))
    large = {f"{path}: {name}": number for path, text in texts.items() for name, number in fields_of(text)
             if number > FIELDS_MAX}  # fmt: skip
    return {
        "lines": sum(text.count("\n") for text in texts.values()),
        "modules": len(texts),
        "functions that copy": places(COPIES),
        "functions that put back": places(RESTORES),
        "places that make a reason": places(REASONS),
        "names of libraries and special classes": dict(names.most_common()),
        f"classes with more than {FIELDS_MAX} fields": dict(sorted(large.items(), key=lambda one: -one[1])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rev", default="", help="of git; without it, the files as they are")
    parser.add_argument("--json", action="store_true", help="everything, place by place")
    arguments = parser.parse_args()
    found = count(sources(arguments.rev))
    if arguments.json:
        json.dump(found, sys.stdout, indent=1)
        print()
        return
    for what, number in found.items():
        if isinstance(number, dict):
            print(f"{sum(number.values()) if 'fields' not in what else len(number):7} {what}, in {len(number)}")
        else:
            print(f"{number:7} {what}")


if __name__ == "__main__":
    main()
