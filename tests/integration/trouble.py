"""A file system that fails for a moment, for a job's ranks and its controller: see trouble.c, which is preloaded."""

from __future__ import annotations

import errno
import os
import random
import shutil
import struct
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "CHAOS_TROUBLE"
_SECONDS = struct.Struct("=dd")
_REST = struct.Struct("=iiii4096s")
KINDS = {"open": 1, "write": 2, "fsync": 4, "rename": 8, "stat": 16, "read": 32}


def build(directory: Path) -> Path | None:
    """The library, compiled into `directory`; None where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    library = directory / "trouble.so"
    source = Path(__file__).with_name("trouble.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@dataclass(frozen=True)
class Trouble:
    """So many of 1000 calls of these kinds fail with `error`, from `after_s` after the order for `length_s`.

    error: "" for calls that take a second longer, and succeed.
    """

    kinds: tuple[str, ...]
    error: str
    per_mille: int
    after_s: float
    length_s: float

    @classmethod
    def draw(cls, draw: random.Random) -> Trouble:
        """Some kinds of calls, one error, up to 2 s, while a rank that is killed at once is being saved."""
        error = draw.choice(("EIO", "ESTALE", "EMFILE"))
        kinds = ("open",) if error == "EMFILE" else tuple(sorted(draw.sample(sorted(KINDS), draw.choice((1, 2, 3, 6)))))
        seconds = round(draw.uniform(0.0, 0.1), 3), round(draw.uniform(0.2, 2.0), 3)
        return cls(kinds, error, draw.choice((1000, 1000, 300)), *seconds)

    @property
    def action(self) -> str:
        """What a fault does to begin with it."""
        return f"trouble:{self.after_s},{self.length_s}"

    def prepare(self, file: Path, below: Path) -> dict[str, str]:
        """Write what the library reads; returns the environment of the job. Nothing fails before the order."""
        kinds = sum(KINDS[kind] for kind in self.kinds)
        rest = _REST.pack(getattr(errno, self.error, 0), kinds, self.per_mille, 0, os.fsencode(below))
        file.write_bytes(_SECONDS.pack(0.0, 0.0) + rest)
        return {VARIABLE: str(file)}

    @staticmethod
    def failed(file: Path) -> int:
        """How many calls have failed."""
        return int(_REST.unpack_from(file.read_bytes(), _SECONDS.size)[3])


def order(after_s: float, length_s: float) -> None:
    """In a process of the job: the trouble begins so many seconds from now."""
    begin_s = time.monotonic() + after_s
    with open(os.environ[VARIABLE], "r+b") as file:
        file.write(_SECONDS.pack(begin_s, begin_s + length_s))
