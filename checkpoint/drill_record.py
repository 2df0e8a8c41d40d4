"""What a drill has covered: `drill.json` beside a job's checkpoints, by `lastwords drill --record`. Torch-free."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lastwords.checkpoint.appearing import write_file
from lastwords.checkpoint.codec import Number, typed
from lastwords.checkpoint.layout import DRILL_NAME
from lastwords.checkpoint.meta import WorldSize
from lastwords.checkpoint.system import REAL_OS, Os, read_whole
from lastwords.errors import FormatError, StorageError, ranks_text

FORMAT = 1
BYTES_MAX, SCRIPT_BYTES_MAX = 1 << 20, 64 << 20

Digests = tuple[str, str]
"""SHA-256 of a script, and of its arguments; "" where there is no file."""


@dataclass(frozen=True, slots=True)
class Covered:
    """One drill. ranks: those that were killed, in global step `step`.

    verdict: "bitwise", "told" (not equal in all bits, and a reason had said so), "differs" or "failed". resumed_after:
    global step; 0: nothing was saved, and the script began anew.
    """

    phase: str
    ranks: tuple[Number, ...]
    step: Number
    verdict: str
    resumed_after: Number = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drilled:
    """What the newest drill that was recorded for these checkpoints has covered; `ResumePoint.drilled`.

    bitwise: every resume was equal in all bits. reproducible: two undisturbed runs were. steps: global steps of each
    run. missed: phases that were not drilled. data: digest of the samples, "" where they cannot be seen.
    changed: why it says nothing of what runs here, a sentence each: another script, other versions. Empty: it is about
    this. Modules that the script imports are not compared.
    """

    drilled_unix_ns: Number
    script: str
    sha256: str
    arguments_sha256: str
    torch: str
    lastwords: str
    world_size: WorldSize
    steps: Number
    bitwise: bool
    reproducible: bool = True
    drills: tuple[Covered, ...] = ()
    missed: tuple[str, ...] = ()
    data: str = ""
    changed: tuple[str, ...] = ()

    def beside(
        self,
        digests: Digests | None = None,
        *,
        torch: str | None = None,
        lastwords: str | None = None,
        world_size: int | None = None,
        data: str = "",
    ) -> Drilled:
        """The same with what has changed; what is None or empty is not compared."""
        script, arguments = digests or (self.sha256, self.arguments_sha256)
        compared = (
            ("torch", self.torch, torch),
            ("lastwords", self.lastwords, lastwords),
            ("number of ranks", self.world_size, world_size),
        )
        found = [
            *([f"the script is not {self.script} as it was drilled"] if script != self.sha256 else []),
            *(["the script's arguments are others"] if arguments != self.arguments_sha256 else []),
            *(f"{what}: {then} in the drill, {now} here" for what, then, now in compared if now not in (None, then)),
            *(["the loader's samples are others"] if data and self.data and data != self.data else []),
        ]
        return replace(self, changed=tuple(found))


def running() -> tuple[str, Digests]:
    """Path of the script that this process runs, and digests. Never raises: what cannot be read is no script."""
    path = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    return str(path), (digest_of(Path(path)) if path else "", _digest("\0".join(sys.argv[1:]).encode()))


def digest_of(script: Path) -> str:
    """SHA-256 of a file; "" if it cannot be read."""
    try:
        return _digest(read_whole(script, REAL_OS, bytes_max=SCRIPT_BYTES_MAX))
    except (OSError, ValueError, StorageError):
        return ""


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def write(root: Path, drilled: Drilled) -> None:
    """In place of an earlier one. StorageError where that fails."""
    document = {"format": FORMAT, **asdict(drilled)}
    del document["changed"]
    write_file(root / DRILL_NAME, json.dumps(document, indent=1).encode() + b"\n", replace=True)


def read(root: Path, os: Os = REAL_OS) -> tuple[Drilled | None, str]:
    """What is beside the checkpoints in `root`, and why it is ignored, if it is. Never raises.

    >>> read(Path("/no/such/directory"))
    (None, '')
    """
    path = root / DRILL_NAME
    try:
        document: Any = json.loads(read_whole(path, os, bytes_max=BYTES_MAX))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            return None, f"{path} is ignored: it is no record of a drill, or one of a later version"
        json.dumps(document, ensure_ascii=False).encode()  # half of a surrogate pair could not be printed
        return replace(typed(document, Drilled, ""), changed=()), ""
    except FileNotFoundError:
        return None, ""
    except (ValueError, RecursionError, FormatError, StorageError) as error:
        return None, f"{path} is ignored: {error}"


def summary(drills: Sequence[Covered]) -> str:
    """What was killed, and what came of it, worst first.

    >>> summary([Covered("forward", (0,), 5, "bitwise", 4), Covered("backward", (0, 1), 6, "told", 5)])
    'told: backward (ranks 0 and 1); bitwise: forward (rank 0)'
    >>> summary([Covered("forward", (0, 1), 5, "bitwise")])
    'bitwise: forward (ranks 0 and 1; nothing was saved)'
    """
    found: dict[str, list[str]] = {}
    for one in drills:
        ranks = ranks_text(one.ranks)
        ranks += "" if one.resumed_after or one.verdict == "failed" else "; nothing was saved"
        found.setdefault(one.verdict, []).append(f"{one.phase} ({ranks})")
    order = sorted(found, key=lambda verdict: (verdict == "bitwise", verdict == "told", verdict))
    return "; ".join(f"{verdict}: {', '.join(found[verdict])}" for verdict in order)
