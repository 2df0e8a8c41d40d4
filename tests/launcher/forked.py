"""Programs as forks of a fork server, which is this process's, and as new interpreters: to see what differs."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lastwords.launcher.forks import ForkServer
from lastwords.launcher.link import Lines
from lastwords.launcher.processes import RankProcess
from lastwords.launcher.protocol import Fork
from lastwords.optim_wrapper.launch.reporter import listening
from tests.integration.programs import PR_SET_CHILD_SUBREAPER, prctl

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
SET_HERE = (
    "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LASTWORDS_JOB", "LASTWORDS_LAUNCHER", "OMP_NUM_THREADS",
    "GRPC_ENABLE_FORK_SUPPORT",
)  # fmt: skip
"""By whoever runs the tests, or in a test of this process."""


def environment(**more: str) -> dict[str, str]:
    """Of a launcher that nobody has told of a job."""
    kept = {name: value for name, value in os.environ.items() if name not in SET_HERE}
    return {**kept, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", **more}


@dataclass(frozen=True)
class Done:
    """How a program has ended, and what it has written."""

    code: int
    out: str
    err: str


class Forks:
    """A fork server, and what its forks say to their launcher. In `directory` there may be modules, too."""

    alive = 0
    """Of these, in this process, which is the parent of the forks of all."""

    def __init__(self, directory: Path, python: str = sys.executable, preload: Sequence[str] = ()) -> None:
        self.directory, self.count = directory, 0
        self.selector = selectors.DefaultSelector()
        self.environment = environment()
        self.environment["PYTHONPATH"] += f":{directory}"
        self.server = ForkServer(python, self.environment, self.selector, preload, str(directory))
        self.failures: list[str] = []
        self.server.made, self.server.failed = self._made, self.failures.append
        self.server.impossible = self.failures.append
        self.processes: list[RankProcess] = []
        self._listener, self._name = listening(1)

    @classmethod
    @contextlib.contextmanager
    def anywhere(cls, preload: Sequence[str] = ()) -> Iterator[Self]:
        """Where paths of sockets are short enough."""
        with tempfile.TemporaryDirectory(dir="/tmp") as directory, cls(Path(directory), preload=preload) as forks:
            yield forks

    def __enter__(self) -> Self:
        Forks.alive += 1
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.end()
        for process in self.processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
        self.selector.close()
        self._listener.close()
        Forks.alive -= 1
        prctl(PR_SET_CHILD_SUBREAPER, int(Forks.alive > 0))

    def _made(self, pids: Mapping[int, int], problem: str) -> None:
        assert not problem
        self.processes += map(RankProcess, pids.values())

    def ready(self) -> None:
        """Wait until it has imported all."""
        while not self.server._ready:
            assert not self.failures, self.failures
            self.turn()

    def turn(self) -> None:
        """Hear the fork server once."""
        for key, _ in self.selector.select(PATIENCE_S):
            key.data()

    def start(self, *argv: str, is_module: bool = False, threads: int = 1, **env: str) -> RankProcess:
        """Rank 1, which runs this, with files of its own for what it writes."""
        self.count += 1
        self.heard()
        variables = {**self.environment, "RANK": "1", **env}
        paths = [str(self.directory / f"{self.count}.{stream}") for stream in ("out", "err")]
        self.server.fork([Fork(1, variables, argv, is_module, *paths, threads, self._name, 0, "", 0)])
        while len(self.processes) < self.count:
            assert not self.failures, self.failures
            self.turn()
        return self.processes[-1]

    def run(self, *argv: str, **how: Any) -> Done:
        """The same, to its end."""
        code = self.start(*argv, **how).wait(PATIENCE_S)
        return Done(code, *((self.directory / f"{self.count}.{stream}").read_text() for stream in ("out", "err")))

    def heard(self) -> list[dict[str, Any]]:
        """What the fork that has ended last has said, but for its name."""
        said: list[dict[str, Any]] = []
        self._listener.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                link, _ = self._listener.accept()
                lines, said = Lines(), []
                with link:
                    while data := link.recv(1 << 16):
                        said += lines.feed(data)
        return said[1:]

    def plain(self, *argv: str, is_module: bool = False, **env: str) -> Done:
        """The same in a new interpreter, as torchrun starts it."""
        command = [sys.executable, "-u", *(["-m"] if is_module else []), *argv]
        variables = {**self.environment, "RANK": "1", **env}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        return Done(done.returncode, done.stdout, done.stderr)
