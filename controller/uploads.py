"""The process that uploads a job's checkpoints: `lastwords upload --follow`, started by the controller.

A process, not a thread: the library of a store would keep the controller's loop from a death, and what is left at the
end of the job is uploaded after the controller has ended. Its input is a pipe: a line says that there is a new
checkpoint, the end that no more come.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lastwords.checkpoint.remote import record
from lastwords.checkpoint.remote.address import address_of
from lastwords.controller.spec import ControllerSpec
from lastwords.errors import StorageError

_log = logging.getLogger(__name__)

USAGE = 2
"""Exit code of a command that cannot work, so it is not started again."""


class Uploads:
    """For the thread of one storage queue. Starts nothing before `look`."""

    def __init__(self, spec: ControllerSpec, roots: Sequence[Path]) -> None:
        self._roots, self._remote = roots, str(address_of(spec.remote))
        fallback = [f"--fallback={root}" for root in roots[1:]]
        self._command = [
            *(sys.executable, "-P", "-m", "lastwords.cli", "upload", str(roots[0]), spec.remote),
            *("--follow", "--job", spec.job, *fallback),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process that runs; None if there is none."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def look(self) -> None:
        """There may be a new checkpoint. A process that was killed is started again."""
        process = self._process
        if process is None or process.poll() not in (None, USAGE):
            self._start()
        elif process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended, or has lines enough to read
                os.write(process.stdin.fileno(), b"\n")

    def close(self) -> None:
        """No more checkpoints come: the process ends when it has uploaded what there is."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _start(self) -> None:
        try:
            record.begin(self._roots, self._remote)
        except StorageError as error:
            _log.warning("until the first upload, `lastwords prune` may remove what has not been uploaded: %s", error)
        try:
            # Its output goes to the controller's log. A session of its own: whoever ends this one does not end it.
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            _log.warning("checkpoints are not uploaded: the process for it cannot be started: %s", error)
            return
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
