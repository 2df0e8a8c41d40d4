"""A process with a life line, for tests and benchmarks: does as it is told by lines on its standard input.

    python -m tests.integration.living LIFE_PATH RESIDENT_MB

Prints "ready", then for each command line its answer: `child` forks a child that lives for a minute, `brief` one
that ends at once, `release` gives the life line back, `exit N` ends with that status, `raise` ends by an exception,
`exec` becomes another program.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from lastwords.liveness import process_id
from lastwords.liveness.robust_mutex import LifeLine
from lastwords.vocabulary import ProcessId

ROOT = Path(__file__).resolve().parents[2]
ORPHAN_S = 60


class Living:
    """The process from the outside."""

    def __init__(self, life_path: Path, *, resident_mb: int = 0) -> None:
        self.life_path = life_path
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.living", str(life_path), str(resident_mb)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.orphans: list[int] = []
        assert self._answer() == "ready"
        ticks = process_id.start_ticks(self.pid)
        assert ticks is not None
        self.process = ProcessId(process_id.host_id(), self.pid, ticks, "living")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output_fd(self) -> int:
        """Read end of the process's standard output, which its children hold open as well."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def tell(self, command: str, *, answer: bool = True) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer() if answer else ""

    def fork_child(self) -> int:
        self.orphans.append(int(self.tell("child")))
        return self.orphans[-1]

    def kill(self) -> None:
        os.kill(self.pid, 9)

    def wait(self) -> int:
        return self._process.wait(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        for orphan in self.orphans:
            os.kill(orphan, 9)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def main(life_path: str, resident_mb: str) -> None:
    memory = bytearray(int(resident_mb) << 20)
    for at in range(0, len(memory), 4096):
        memory[at] = 1
    line = LifeLine.create(Path(life_path))
    print("ready", flush=True)
    for command in sys.stdin:
        word, _, argument = command.strip().partition(" ")
        if word == "child":
            child = os.fork()
            if child == 0:
                time.sleep(ORPHAN_S)
                os._exit(0)
            print(child, flush=True)
        elif word == "brief":
            child = os.fork()
            if child == 0:
                sys.exit(0)  # with everything that runs at the end of an interpreter
            os.waitpid(child, 0)
            print("gone", flush=True)
        elif word == "release":
            line.release()
            print("released", flush=True)
        elif word == "exit":
            sys.exit(int(argument))
        elif word == "raise":
            raise RuntimeError("as told")
        elif word == "exec":
            os.execv("/bin/sleep", ["sleep", str(ORPHAN_S)])


if __name__ == "__main__":
    main(*sys.argv[1:])
