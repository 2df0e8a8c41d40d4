"""Writes down what a process that runs this module is given, for a comparison, and fails with exit code 3.

Arguments: a file, and others that are noted as they are.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

OF_ONE_JOB = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")

if __name__ == "__main__":
    spec = sys.modules["__main__"].__spec__
    assert spec is not None
    seen = {
        "parent": os.getppid(),
        "is a fork": "torch" in sys.modules,
        "module": spec.name,
        "arguments": sys.argv,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name not in OF_ONE_JOB},
        "directory": str(Path.cwd()),
        "leads a session": os.getsid(0) == os.getpid() == os.getpgrp(),
        "handlers": {number: repr(signal.getsignal(number)).partition(" at ")[0] for number in signal.valid_signals()},
        "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
        "input": os.readlink("/proc/self/fd/0"),
        "threads": len(os.listdir("/proc/self/task")),
        "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
    }
    Path(sys.argv[1]).write_text(json.dumps(seen), encoding="utf-8")
    sys.exit(3)
