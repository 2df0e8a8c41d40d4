"""Builds the wheel and the source distribution of HEAD, with the same bytes each time.

    python tools/build_dist.py [OUT]        # dist/ by default

From what git has of HEAD, so neither files that lie about nor the umask of a clone get in. The time in both is
SOURCE_DATE_EPOCH, or that of the commit.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def normalise(sdist: Path, epoch_s: int) -> None:
    """Write a .tar.gz anew: names in order, one time, no owner, modes 0644 and 0755.

    setuptools stamps the files that it makes with the time of the build, and gzip does so with its header.
    """
    with tarfile.open(sdist) as old:
        files = [(member, old.extractfile(member)) for member in sorted(old, key=lambda one: one.name)]
        tar = io.BytesIO()
        with tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member, data in files:
                plain = copy.copy(member)
                plain.mtime, plain.pax_headers = epoch_s, {}
                plain.uid = plain.gid = 0
                plain.uname = plain.gname = ""
                plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                new.addfile(plain, data)
    with sdist.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=epoch_s) as packed:
        packed.write(tar.getvalue())


def build(source: Path, out: Path, epoch_s: int) -> list[Path]:
    """Both distributions of a tree of sources: the source distribution, and the wheel that is built from that."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch_s)}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(command, env=environment, umask=0o022, capture_output=True, text=True, check=False)
    if built.returncode:
        raise SystemExit(built.stdout + built.stderr)
    (sdist,) = out.glob("*.tar.gz")
    normalise(sdist, epoch_s)
    return sorted(out.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the wheel and the source distribution of HEAD.")
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "dist", help="an empty folder, or a new one")
    out = parser.parse_args().out
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} is not empty: remove what is there, or name another folder")
    git = ["git", "-C", str(ROOT)]
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or subprocess.check_output([*git, "log", "-1", "--format=%ct"])
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.check_output([*git, "archive", "--format=tar", "HEAD"])
        with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
            tree.extractall(folder, filter="data")
        for path in build(Path(folder), out, int(epoch)):
            print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}")


if __name__ == "__main__":
    main()
