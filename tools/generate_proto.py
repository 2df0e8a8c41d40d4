"""Generates src/lastwords/_pb from the schemas in proto/ with a pinned, old generator.

Generated code refuses a run time that is older than its generator, never one that is newer; so the generator is the
oldest one that is supported, and sets the lower bounds of grpcio and protobuf in pyproject.toml. (1.62 would set
none at all, since its output predates that check, but then nothing would tell a user of protobuf 4 what is wrong.)

It runs in a throw-away virtual environment, because its requirements must not meet those of the project.

    python tools/generate_proto.py            write src/lastwords/_pb
    python tools/generate_proto.py --check    write nothing; exit 1 and show the difference if it would change
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

GENERATOR = ("grpcio-tools==1.66.2", "grpcio==1.66.2", "protobuf==5.27.5", "setuptools==75.8.0")
ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = ROOT / "proto"
OUT = ROOT / "src" / "lastwords" / "_pb"
PACKAGE_DOC = '"""Generated from proto/ by tools/generate_proto.py; do not edit."""\n'


def generator_python(cache: Path) -> Path:
    """Python of a virtual environment with exactly the pinned generator; made if it is not in `cache`."""
    python = cache / "bin" / "python"
    stamp = cache / "generator.txt"
    if python.exists() and stamp.exists() and stamp.read_text().split() == list(GENERATOR):
        return python
    print(f"installing {GENERATOR[0]} into {cache} ...", file=sys.stderr, flush=True)
    venv.create(cache, with_pip=True, clear=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *GENERATOR], check=True)
    stamp.write_text("\n".join(GENERATOR))
    return python


def generate(python: Path, out: Path) -> dict[str, str]:
    """Content by file name of the package `lastwords._pb`."""
    for schema in sorted(SCHEMAS.glob("*.proto")):
        command = [str(python), "-m", "grpc_tools.protoc", f"-I{SCHEMAS}", f"--python_out={out}", f"--pyi_out={out}"]
        if re.search(r"^service ", schema.read_text(), flags=re.MULTILINE):
            command.append(f"--grpc_python_out={out}")
        subprocess.run([*command, str(schema)], check=True)
    files = {"__init__.py": PACKAGE_DOC}
    for path in sorted(out.iterdir()):
        # protoc knows nothing of the package that its output is put into: make its imports absolute.
        text = re.sub(r"^import (\w+_pb2)", r"from lastwords._pb import \1", path.read_text(), flags=re.MULTILINE)
        files[path.name] = text
    return files


def differences(files: dict[str, str]) -> list[str]:
    """Unified diff between what is committed and what the generator gives."""
    lines: list[str] = []
    present = {path.name for path in OUT.iterdir() if path.is_file()} if OUT.is_dir() else set()
    for name in sorted(present | set(files)):
        here = (OUT / name).read_text() if name in present else ""
        lines += difflib.unified_diff(
            here.splitlines(keepends=True),
            files.get(name, "").splitlines(keepends=True),
            f"committed/{name}",
            f"generated/{name}",
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--venv", type=Path, help="keep the generator's environment here, for the next time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lastwords-proto-") as scratch:
        kept = arguments.venv or os.environ.get("LASTWORDS_PROTO_VENV")
        python = generator_python(Path(kept) if kept else Path(scratch) / "venv")
        out = Path(scratch) / "out"
        out.mkdir()
        files = generate(python, out)
    changed = differences(files)
    if not changed:
        return 0
    if arguments.check:
        sys.stdout.writelines(changed)
        print("src/lastwords/_pb is not what proto/ gives; run `make proto`", file=sys.stderr)
        return 1
    OUT.mkdir(exist_ok=True)
    for name, text in files.items():
        (OUT / name).write_text(text)
    print(f"wrote {len(files)} files to {OUT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
